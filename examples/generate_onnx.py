"""Generate text from an exported graph with onnxruntime only, without torch and transformers.

    python examples/generate_onnx.py DIR "a prompt" ["another"] [--max-new-tokens 32] [--provider cuda]

DIR holds an ONNX graph of the profile ort, config.json and tokenizer.json; without the latter, prompts are
token ids ("5 6 7"). If it holds several graphs, --graph onnx/model_q4.onnx chooses one.
The keys and the values of each layer stay in one buffer, which the graph reads as past and writes as present.
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

import onnxruntime as ort

PROVIDERS: dict[str, tuple[str, dict[str, str]]] = {
    "cpu": ("CPUExecutionProvider", {}),
    # Memory-efficient attention. FlashAttention (1) is wrong for heads of 128 in onnxruntime 1.31, and that
    # of cuDNN, which an H100 has by default, makes a plan for each length (docs/onnx.md).
    "cuda": ("CUDAExecutionProvider", {"sdpa_kernel": "2"}),
}
DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class Model:
    """A loaded graph; any number of batches may use it.

    Raises:
        RuntimeError: there is no graph, it has no cache (an encoder), it has another profile than ``ort``,
            whose caches alone may be one buffer, or its cache is bfloat16, which NumPy does not support; or
            the provider does not work (onnxruntime would silently fall back to the CPU).
    """

    def __init__(self, folder: Path, provider: str = "cpu", graph: str | None = None):
        self.device = provider
        path = graph_file(folder, provider) if graph is None else folder / graph
        if not folder.is_dir():
            raise RuntimeError(f"{folder} is not a folder")
        if not path.is_file():
            what = "ONNX graph" if graph is None else f"graph {graph}"
            raise RuntimeError(f"no {what} in {folder}; write one: ntk-convert export {folder}")
        options = ort.SessionOptions()
        # The probabilities of ALiBi's far keys are denormal numbers, which are slow on some processors. The
        # first session of a process decides this for its thread, so make no other session before.
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
        # onnxruntime would keep a plan of memory for each shape that it meets, and every step is a new shape.
        options.enable_mem_pattern = False
        with redirect_stdout(sys.stderr):  # onnxruntime prints what it does not find
            if provider == "cuda":
                ort.preload_dlls()  # from NVIDIA's pip packages too
            self.session = ort.InferenceSession(path, options, providers=[PROVIDERS[provider]])
        name = PROVIDERS[provider][0]
        if name not in self.session.get_providers():
            raise RuntimeError(f"{name} does not work here; see onnxruntime's warnings")
        self.caches = [item for item in self.session.get_inputs() if item.name.startswith("past_key_values")]
        if not self.caches:
            raise RuntimeError(
                f"{path} has no cache: it is not the graph of a language model, and does not generate text"
            )
        found = profile(self.session)
        if found != "ort":
            kind = f"of the profile {found}" if found else "not from ntk-convert"
            raise RuntimeError(
                f"{path} is {kind}, and this script needs the profile ort; export again "
                f"(ntk-convert export {folder} --onnx-profile ort), or run this graph with optimum"
            )
        if not all(item.type in DTYPES for item in self.caches):
            raise RuntimeError("the graph is neither float32 nor float16; export with --onnx-dtype fp16")
        self.logits = self.session.get_outputs()[0]
        self.end_tokens = end_tokens(folder)


class Batch:
    """Rows that are generated together, and their cache.

    Args:
        model: the graph.
        rows: number of rows.
        length: most tokens in a row, counting prompt, padding and new tokens.
    """

    def __init__(self, model: Model, rows: int, length: int):
        self.model = model
        self.length = length
        self.used = 0
        self.mask = np.ones((rows, length), np.int64)
        self.binding = model.session.io_binding()
        self.cache: dict[str, ort.OrtValue] = {}
        for item in model.caches:
            _, heads, _, head_size = item.shape
            # Filled with zeros: a kernel may read beyond the end of a row, and must not find NaN there.
            # Written and not only promised (np.zeros): so a lack of memory shows here, not in a later step.
            zeros = np.full((rows, heads, length, head_size), 0, DTYPES[item.type])
            buffer = ort.OrtValue.ortvalue_from_numpy(zeros, model.device, 0)
            self.cache[item.name] = buffer
            self.binding.bind_ortvalue_input(item.name, buffer)
            self.binding.bind_ortvalue_output(item.name.replace("past_key_values", "present"), buffer)
        self._logits: np.ndarray | None = None

    def clear(self) -> None:
        """Forgets the rows. The next ones use the same buffers; their masks hide what is left there."""
        self.used = 0
        self.mask[:] = 1

    def prefill(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Runs the prompts, which are padded on the left.

        Returns:
            The logits of the last token of each row, [rows, vocabulary]; the next step overwrites them.
        """
        width = max(map(len, prompts))
        ids = np.zeros((len(prompts), width), np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = prompt
            self.mask[row, : width - len(prompt)] = 0
        return self._run(ids)

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Runs one more token of each row, [rows]; returns the same as ``prefill``."""
        return self._run(tokens[:, None].astype(np.int64))

    def _run(self, ids: np.ndarray) -> np.ndarray:
        rows, new = ids.shape
        if self.used + new > self.length:
            raise ValueError(f"{self.used} + {new} tokens do not fit into a buffer of {self.length}")
        self.used += new
        # Keep a reference: the binding points to these arrays.
        self._inputs = ids, np.ascontiguousarray(self.mask[:, : self.used])
        for name, value in zip(("input_ids", "attention_mask"), self._inputs, strict=True):
            self.binding.bind_cpu_input(name, value)
        kind = self.model.logits
        count = 1 if kind.shape[1] == 1 else new  # logits of all tokens, or only of the last
        shape = (rows, count, kind.shape[2])
        if self._logits is None or self._logits.shape != shape:
            # Always in host memory; bound once, and every step overwrites it.
            self._logits = np.empty(shape, DTYPES[kind.type])
            self.binding.bind_ortvalue_output(kind.name, ort.OrtValue.ortvalue_from_numpy(self._logits))
        self.model.session.run_with_iobinding(self.binding)
        return self._logits[:, -1]


def generate(
    batch: Batch, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> Iterator[list[int | None]]:
    """Decodes greedily; yields the next token of each row, or None for a row that has ended.

    Raises:
        ValueError: the prompts and the new tokens do not fit into the batch's buffer.
    """
    needed = max(map(len, prompts)) + max_new_tokens
    if needed > batch.length:
        raise ValueError(f"prompts and new tokens need {needed} tokens, the buffer holds {batch.length}")
    logits = batch.prefill(prompts)
    ended = np.zeros(len(prompts), bool)
    for number in range(max_new_tokens):
        tokens = logits.argmax(axis=-1)
        yield [None if over else int(token) for over, token in zip(ended, tokens, strict=True)]
        ended |= np.isin(tokens, batch.model.end_tokens)
        if ended.all() or number == max_new_tokens - 1:
            return
        logits = batch.step(tokens)


def graph_file(folder: Path, provider: str) -> Path:
    """The repository's graph; on a CPU, the one that computes in float32 if there is one."""
    names = (["model_fp32.onnx"] if provider == "cpu" else []) + ["model.onnx", "onnx/model.onnx"]
    found = [folder / name for name in names if (folder / name).is_file()]
    found += sorted(folder.glob("onnx/*.onnx"))
    return found[0] if found else folder / "model.onnx"


def profile(session: ort.InferenceSession) -> str | None:
    """The profile that ntk-convert recorded in the graph; None for a graph of another tool."""
    record = session.get_modelmeta().custom_metadata_map.get("ntk_convert")
    return json.loads(record)["profile"] if record else None


def end_tokens(folder: Path) -> list[int]:
    """The ids of end-of-text tokens, found as transformers finds them; empty if there are none."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        value = settings.get("eos_token_id")
        if value is not None:
            return value if isinstance(value, list) else [value]
    return []


def text_functions(folder: Path) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """Functions from text to tokens and back; without a tokenizer.json, the text consists of token ids."""
    if not (folder / "tokenizer.json").is_file():
        return token_ids, lambda ids: " ".join(map(str, ids))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: tokenizer.encode(text).ids, tokenizer.decode


def token_ids(text: str) -> list[int]:
    """The token ids in a text such as "5 6 7"."""
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise ValueError(f"without a tokenizer.json, a prompt is token ids (5 6 7), not {text!r}") from None


def main() -> None:
    """Runs the script; what cannot be done ends in one line and exit code 1."""
    try:
        run()
    except (RuntimeError, ValueError, MemoryError) as error:
        raise SystemExit(f"error: {error}") from None


def run() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--provider", choices=sorted(PROVIDERS), default="cpu")
    parser.add_argument("--graph", help="the graph's file in DIR, if there are several")
    options = parser.parse_args()
    if options.max_new_tokens < 1:
        raise ValueError("--max-new-tokens must be at least 1")
    model = Model(options.folder, options.provider, options.graph)
    encode, decode = text_functions(options.folder)
    prompts = [encode(prompt) for prompt in options.prompts]
    if not all(prompts):
        raise ValueError("a prompt has no tokens")
    batch = Batch(model, len(prompts), max(map(len, prompts)) + options.max_new_tokens)
    rows: list[list[int]] = [[] for _ in prompts]
    shown = ""
    for tokens in generate(batch, prompts, options.max_new_tokens):
        for row, token in zip(rows, tokens, strict=True):
            row.extend([] if token is None else [token])
        so_far = decode(rows[0])
        # Show the text of a single prompt as it grows, unless it ends within a character.
        if len(prompts) == 1 and not so_far.endswith("\N{REPLACEMENT CHARACTER}"):
            print(so_far[len(shown) :], end="", flush=True)
            shown = so_far
    print(decode(rows[0])[len(shown) :] if len(prompts) == 1 else "\n".join(map(decode, rows)))


if __name__ == "__main__":
    main()
