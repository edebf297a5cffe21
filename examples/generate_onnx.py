"""Generate text from an exported graph with onnxruntime alone, without torch and transformers.

    python examples/generate_onnx.py DIR "a prompt" ["another"] [--max-new-tokens 32] [--provider cuda]

DIR has an ONNX graph, config.json and tokenizer.json; without the last, prompts are token ids ("5 6 7").
Keys and values stay in one buffer for each layer, which the graph reads as past and writes as present.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class Model:
    """A loaded graph; any number of batches may use it.

    Raises:
        RuntimeError: the provider does not work, for which onnxruntime would silently take the CPU; or
            the cache is bfloat16, which NumPy does not have.
    """

    def __init__(self, folder: Path, provider: str = "cpu"):
        self.device = provider
        self.session = ort.InferenceSession(graph_file(folder, provider), providers=[PROVIDERS[provider]])
        if PROVIDERS[provider] not in self.session.get_providers():
            raise RuntimeError(f"{PROVIDERS[provider]} does not work here; see onnxruntime's warnings")
        self.caches = [item for item in self.session.get_inputs() if item.name.startswith("past_key_values")]
        if not all(item.type in DTYPES for item in self.caches):
            raise RuntimeError("only float32 and float16 graphs; export with --onnx-dtype fp16")
        self.logits = self.session.get_outputs()[0]
        self.end_tokens = end_tokens(folder)


class Batch:
    """Some rows that are generated together, and their cache.

    Args:
        rows: how many.
        length: tokens of the longest row that fits, prompt, padding and new ones together.
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
            # Zeros: a kernel may read beyond the rows' end, and no number there may be NaN.
            zeros = np.zeros((rows, heads, length, head_size), DTYPES[item.type])
            buffer = ort.OrtValue.ortvalue_from_numpy(zeros, model.device, 0)
            self.cache[item.name] = buffer
            self.binding.bind_ortvalue_input(item.name, buffer)
            self.binding.bind_ortvalue_output(item.name.replace("past_key_values", "present"), buffer)
        self._logits: np.ndarray | None = None

    def prefill(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Runs the prompts, padded on the left.

        Returns:
            The logits of each row's last token, [rows, vocabulary]; the next step overwrites them.
        """
        width = max(map(len, prompts))
        ids = np.zeros((len(prompts), width), np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = prompt
            self.mask[row, : width - len(prompt)] = 0
        return self._run(ids)

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Runs one more token of each row, [rows]; returns as ``prefill`` does."""
        return self._run(tokens[:, None].astype(np.int64))

    def _run(self, ids: np.ndarray) -> np.ndarray:
        rows, new = ids.shape
        if self.used + new > self.length:
            raise ValueError(f"{self.used} + {new} tokens do not fit into a buffer of {self.length}")
        self.used += new
        # Kept as long as the binding points to them.
        self._inputs = ids, np.ascontiguousarray(self.mask[:, : self.used])
        for name, value in zip(("input_ids", "attention_mask"), self._inputs, strict=True):
            self.binding.bind_cpu_input(name, value)
        kind = self.model.logits
        count = 1 if kind.shape[1] == 1 else new  # a graph gives all tokens' logits, or the last's only
        shape = (rows, count, kind.shape[2])
        if self._logits is None or self._logits.shape != shape:
            # Host memory, whatever the device; bound once, and every step writes to it again.
            self._logits = np.empty(shape, DTYPES[kind.type])
            self.binding.bind_ortvalue_output(kind.name, ort.OrtValue.ortvalue_from_numpy(self._logits))
        self.model.session.run_with_iobinding(self.binding)
        return self._logits[:, -1]


def generate(
    batch: Batch, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> Iterator[list[int | None]]:
    """Greedy decoding; yields each row's next token, None for a row that has ended.

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
    """The repository's graph: on CPUs the one that computes in float32, where there is such a one."""
    names = (["model_fp32.onnx"] if provider == "cpu" else []) + ["model.onnx", "onnx/model.onnx"]
    return next((folder / name for name in names if (folder / name).is_file()), folder / "model.onnx")


def end_tokens(folder: Path) -> list[int]:
    """The ids that end a text, as transformers finds them; none if nothing names one."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        value = settings.get("eos_token_id")
        if value is not None:
            return value if isinstance(value, list) else [value]
    return []


def text_functions(folder: Path) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """From text to tokens, and back; without a tokenizer.json, text is the tokens' ids."""
    if not (folder / "tokenizer.json").is_file():
        return lambda text: [int(word) for word in text.split()], lambda ids: " ".join(map(str, ids))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: tokenizer.encode(text).ids, tokenizer.decode


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--provider", choices=sorted(PROVIDERS), default="cpu")
    options = parser.parse_args()
    encode, decode = text_functions(options.folder)
    prompts = [encode(prompt) for prompt in options.prompts]
    try:
        model = Model(options.folder, options.provider)
    except RuntimeError as error:
        raise SystemExit(f"error: {error}") from None
    batch = Batch(model, len(prompts), max(map(len, prompts)) + options.max_new_tokens)
    rows: list[list[int]] = [[] for _ in prompts]
    shown = ""
    for tokens in generate(batch, prompts, options.max_new_tokens):
        for row, token in zip(rows, tokens, strict=True):
            row.extend([] if token is None else [token])
        so_far = decode(rows[0])
        # A single prompt's text is shown as it comes, unless it ends within a character.
        if len(prompts) == 1 and not so_far.endswith("\N{REPLACEMENT CHARACTER}"):
            print(so_far[len(shown) :], end="", flush=True)
            shown = so_far
    print(decode(rows[0])[len(shown) :] if len(prompts) == 1 else "\n".join(map(decode, rows)))


if __name__ == "__main__":
    main()
