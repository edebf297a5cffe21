"""Generate text from an exported graph with onnxruntime only, without torch and transformers.

    python examples/generate_onnx.py DIR "a prompt" ["another"] [--max-new-tokens 32] [--provider cuda]

DIR holds an ONNX graph of the profile ort, config.json and tokenizer.json; without the latter, prompts are
token ids ("5 6 7"). If it holds several graphs, --graph onnx/model_q4.onnx chooses one.
The keys and the values of each layer stay in one buffer, which the graph reads as past and writes as present.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    ``threads`` is the number of CPU threads, by default one for each core.

    Raises:
        RuntimeError: there is no graph, it has no cache (an encoder), it has another profile than ``ort``,
            whose caches alone may be one buffer, an older version wrote it, or its cache is bfloat16, which
            NumPy does not support; or the provider does not work (onnxruntime would silently fall back to
            the CPU).
    """

    def __init__(
        self, folder: Path, provider: str = "cpu", graph: str | None = None, threads: int | None = None
    ):
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
        if threads is not None:
            options.intra_op_num_threads = threads
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
        properties = self.session.get_modelmeta().custom_metadata_map
        found = profile(properties)
        if found != "ort":
            kind = f"of the profile {found}" if found else "not from ntk-convert"
            raise RuntimeError(
                f"{path} is {kind}, and this script needs the profile ort; export again "
                f"(ntk-convert export {folder} --onnx-profile ort), or run this graph with optimum"
            )
        if "rows" not in properties:
            raise RuntimeError(
                f"{path} is from an older ntk-convert: its rows must all end together; export again "
                f"(ntk-convert export {folder})"
            )
        if not all(item.type in DTYPES for item in self.caches):
            raise RuntimeError("the graph is neither float32 nor float16; export with --onnx-dtype fp16")
        self.logits = self.session.get_outputs()[0]
        self.end_tokens = end_tokens(folder)


class Batch:
    """Rows that are generated together, and their caches.

    A row's tokens are the first ones of its part of the buffers. So rows may have different lengths, and a
    row may begin or end while others go on.

    Args:
        model: the graph.
        rows: number of rows.
        length: most tokens in a row, counting prompt and new tokens.
    """

    def __init__(self, model: Model, rows: int, length: int):
        self.model = model
        self.length = length
        self.counts = np.zeros(rows, np.int64)
        """Tokens in the cache of each row."""
        self.binding = model.session.io_binding()
        self.cache: dict[str, ort.OrtValue] = {}
        for item in model.caches:
            _, heads, _, head_size = item.shape
            # Filled with zeros: a kernel may read beyond the end of a row, and must not find NaN there.
            # Written and not only promised (np.zeros): so a lack of memory shows here, not in a later step.
            zeros = np.full((rows, heads, length, head_size), 0, DTYPES[item.type])
            self.cache[item.name] = ort.OrtValue.ortvalue_from_numpy(zeros, model.device, 0)
        self._bound: tuple[int, int] | None = None
        self._logits = np.empty(0, DTYPES[model.logits.type])

    def clear(self, row: int) -> None:
        """Forgets a row's tokens, so that another prompt can use its part of the buffers."""
        self.counts[row] = 0

    def prefill(self, row: int, tokens: Sequence[int]) -> np.ndarray:
        """Runs a prompt, or its next tokens, in one row.

        Returns:
            The logits after each of these tokens, [tokens, vocabulary], or only after the last one if the
            graph was exported with --last-logits. The next run overwrites them.
        """
        total = int(self.counts[row]) + len(tokens)
        if total > self.length:
            raise ValueError(f"{total} tokens do not fit into a buffer of {self.length}")
        self._bind_rows(row, 1)
        logits: np.ndarray = self._run(np.array([tokens], np.int64), np.ones((1, total), np.int64))[0]
        self.counts[row] = total
        return logits

    def step(self, tokens: Mapping[int, int]) -> np.ndarray:
        """Runs one more token of some rows: the tokens by the numbers of the rows.

        Returns:
            The logits, [len(tokens), vocabulary], in the order of ``tokens``.
        """
        rows = list(tokens)
        used = max(rows) + 1
        # The rows between compute a token, too. It stands behind their own tokens, and their next one
        # overwrites it.
        totals = self.counts[:used] + 1
        if totals.max() > self.length:
            raise ValueError(f"{totals.max()} tokens do not fit into a buffer of {self.length}")
        ids = np.zeros((used, 1), np.int64)
        ids[rows, 0] = list(tokens.values())
        mask = np.arange(totals.max()) < totals[:, None]
        self._bind_rows(0, used)
        logits = self._run(ids, mask.astype(np.int64))
        self.counts[rows] += 1
        ours: np.ndarray = logits[rows, 0]
        return ours

    def _bind_rows(self, first: int, count: int) -> None:
        """The graph's caches become those of ``count`` rows; it writes where it reads."""
        if self._bound == (first, count):
            return
        for item in self.model.caches:
            buffer, dtype = self.cache[item.name], np.dtype(DTYPES[item.type])
            _, *row_shape = buffer.shape()
            start = buffer.data_ptr() + first * math.prod(row_shape) * dtype.itemsize
            part = self.model.device, 0, dtype, [count, *row_shape], start
            self.binding.bind_input(item.name, *part)
            self.binding.bind_output(item.name.replace("past_key_values", "present"), *part)
        self._bound = first, count

    def _run(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """The logits, [rows, tokens or 1, vocabulary]."""
        # Keep a reference: the binding points to these arrays.
        self._inputs = ids, mask
        for name, value in zip(("input_ids", "attention_mask"), self._inputs, strict=True):
            self.binding.bind_cpu_input(name, value)
        kind = self.model.logits
        rows, new = ids.shape
        shape = [rows, 1 if kind.shape[1] == 1 else new, kind.shape[2]]
        size = math.prod(shape)
        if self._logits.size < size:
            self._logits = np.empty(size, DTYPES[kind.type])
        # Always in host memory.
        logits = self._logits[:size].reshape(shape)
        self.binding.bind_output(kind.name, "cpu", 0, logits.dtype, shape, logits.ctypes.data)
        self.model.session.run_with_iobinding(self.binding)
        return logits


def generate(
    batch: Batch, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> Iterator[list[int | None]]:
    """Decodes greedily; yields the next token of each row, or None for a row that has ended.

    Raises:
        ValueError: a prompt and its new tokens do not fit into the batch's buffer.
    """
    needed = max(map(len, prompts)) + max_new_tokens
    if needed > batch.length:
        raise ValueError(f"prompts and new tokens need {needed} tokens, the buffer holds {batch.length}")
    running = {row: int(batch.prefill(row, prompt)[-1].argmax()) for row, prompt in enumerate(prompts)}
    for number in range(max_new_tokens):
        yield [running.get(row) for row in range(len(prompts))]
        running = {row: token for row, token in running.items() if token not in batch.model.end_tokens}
        if not running or number == max_new_tokens - 1:
            return
        tokens = batch.step(running).argmax(axis=-1)
        running = dict(zip(running, map(int, tokens), strict=True))


def graph_file(folder: Path, provider: str) -> Path:
    """The repository's graph; on a CPU, the one that computes in float32 if there is one."""
    names = (["model_fp32.onnx"] if provider == "cpu" else []) + ["model.onnx", "onnx/model.onnx"]
    found = [folder / name for name in names if (folder / name).is_file()]
    found += sorted(folder.glob("onnx/*.onnx"))
    return found[0] if found else folder / "model.onnx"


def profile(properties: Mapping[str, str]) -> str | None:
    """The profile that ntk-convert recorded in a graph's properties; None for a graph of another tool."""
    record = properties.get("ntk_convert")
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
