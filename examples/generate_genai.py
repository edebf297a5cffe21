"""Generate text with onnxruntime-genai: one prompt as a stream, or several as a batch.

    python examples/generate_genai.py DIR "a prompt" ["another"] [--max-new-tokens 32] [--provider cuda]

DIR holds a graph of the profile ort and its genai_config.json. Where genai cannot read the tokenizer, the
package tokenizers does; without a tokenizer.json, prompts are token ids ("5 6 7"). --graph FILE takes another
graph of DIR than genai_config.json names.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # onnxruntime reads this when it is imported

import onnxruntime
import onnxruntime_genai as og
from generate_onnx import text_functions

IN_HALF_PRECISION = {"model_fp32.onnx": "model.onnx"}
"""Of two graphs over the same weights, that for CPUs -> that for GPUs."""


def settings(folder: Path) -> dict[str, Any]:
    """What genai_config.json says of the model."""
    content: dict[str, Any] = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["model"]
    return content


def load(folder: Path, provider: str = "cpu", graph: str | None = None) -> Any:
    """The repository's model; genai_config.json names no provider, and of two graphs the one for CPUs.

    Raises RuntimeError, as genai does, for a provider that this genai does not have.
    """
    config = og.Config(str(folder))
    # One that was added to the file, such as TensorRT-RTX, may give the graph a mask of another length.
    config.clear_providers()
    if provider == "cuda":
        if not og.is_cuda_available():
            raise RuntimeError("this genai is for CPUs; install onnxruntime-genai-cuda in its place")
        with redirect_stdout(sys.stderr):  # where it says what it does not find
            onnxruntime.preload_dlls()  # finds CUDA in NVIDIA's pip packages too
        config.append_provider("cuda")
        config.set_provider_option("cuda", "sdpa_kernel", "2")  # see generate_onnx.py
        graph = graph or IN_HALF_PRECISION.get(settings(folder)["decoder"]["filename"])
    if graph is not None:
        config.overlay(json.dumps({"model": {"decoder": {"filename": graph}}}))
    return og.Model(config)


def generator(model: Any, rows: int, length: int) -> Any:
    """An empty generator, whose cache has ``length`` tokens for each row; by default it has the most."""
    params = og.GeneratorParams(model)
    params.set_search_options(batch_size=rows, max_length=length, do_sample=False)
    return og.Generator(model, params)


def stream(model: Any, prompt: Sequence[int], max_new_tokens: int, chunk: int = 512) -> Iterator[int]:
    """Yields each new token of one prompt, which is run in chunks; a chunk bounds the memory of its logits.

    With length-dynamic scaling, give a chunk that holds the whole prompt: else the tokens are others.
    """
    running = generator(model, 1, len(prompt) + max_new_tokens)
    for start in range(0, len(prompt), chunk):
        running.append_tokens(np.array(prompt[start : start + chunk], np.int32))
    while not running.is_done():
        running.generate_next_token()
        yield int(running.get_next_tokens()[0])


def batch(
    model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, padding: int, ends: Sequence[int]
) -> list[list[int]]:
    """The new tokens of each of several prompts, up to its end token or to ``max_new_tokens``.

    Args:
        padding: the id of the padding token. Prompts are padded on the right: genai does not mask the left.
        ends: ids of end tokens.
    """
    width = max(map(len, prompts))
    padded = np.full((len(prompts), width), padding, np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    running = generator(model, len(prompts), width + max_new_tokens)
    running.append_tokens(padded)
    rows: list[list[int]] = [[] for _ in prompts]
    while not running.is_done():
        running.generate_next_token()
        for made, token in zip(rows, running.get_next_tokens().tolist(), strict=True):
            # A row that has ended gets padding until all rows have ended.
            if not made or made[-1] not in ends:
                made.append(token)
    return rows


def text_of(tokens: Iterator[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """The text as it grows. A token that ends within a character adds nothing; the next one adds it all."""
    known, shown = list[int](), ""
    for token in tokens:
        known.append(token)
        text = decode(known)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text


def tokenizer(
    model: Any, folder: Path
) -> tuple[Callable[[str], Any], Callable[[Iterator[int]], Iterator[str]]]:
    """A function from text to tokens, and one from a stream of tokens to a stream of text."""
    try:
        made = og.Tokenizer(model)
    except Exception:  # genai has no class for a tokenizer that it does not know, or that is not there
        encode, decode = text_functions(folder)
        return encode, lambda tokens: text_of(tokens, decode)
    # A TokenizerStream keeps what its last tokens left of a character, so each answer needs its own.
    return made.encode, lambda tokens: map(made.create_stream().decode, tokens)


def main() -> None:
    """Runs the script; what cannot be done ends in one line and exit code 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=512, help="most tokens of a prompt that run at once")
    parser.add_argument("--provider", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--graph", help="the graph's file in DIR")
    options = parser.parse_args()
    try:
        config = settings(options.folder)
        model = load(options.folder, options.provider, options.graph)
        encode, texts = tokenizer(model, options.folder)
        prompts = [list(encode(prompt)) for prompt in options.prompts]
        if len(prompts) == 1:
            for text in texts(stream(model, prompts[0], options.max_new_tokens, options.chunk)):
                print(text, end="", flush=True)
            print()
            return
        padding, ends = config["pad_token_id"], config["eos_token_id"]
        for row in batch(model, prompts, options.max_new_tokens, padding=padding, ends=ends):
            print("".join(texts(iter(row))))
    except (RuntimeError, OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
