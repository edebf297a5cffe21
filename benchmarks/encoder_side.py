"""Embeds texts with one side of encoder_speed.py, and measures time and memory; see there.

    python benchmarks/encoder_side.py JOB.json

Each side runs in a process of its own. The original code also has an environment of its own, which has torch
and an old transformers but not this project's packages; so each side imports what it needs by itself. The
last line of the output is a ``Measured`` in JSON.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from peak import limit_memory, proc

START, FIRST_WORD, WORDS = 1, 1000, 1024
"""Id of every text's first token; the first of the ids that texts are made of; and the number of these."""
WARM_UP_ROWS = 16
"""Texts of the run before the measurement. They hold all words, so that run reads all weights into memory."""

Texts = Sequence[Sequence[int]]
"""The token ids of each text."""
Embed = Callable[[Texts, int], np.ndarray]
"""Texts and the number of them in a batch -> vectors [texts, hidden], in the order of the texts."""


@dataclass(frozen=True)
class Job:
    """What to measure."""

    side: str
    """A key of ``SIDES``."""
    model: str
    """The side's model: a folder, or the file of a graph."""
    texts: str
    """A JSON file with the texts."""
    rows: int
    """Texts in a batch."""
    threads: int
    vectors: str
    """The file that the vectors are saved to."""
    ordered: bool = False
    """Sort the texts by length first, so that those in a batch have similar lengths."""
    original: str = ""
    """The name of the original code; a key of original_code.ORIGINALS."""
    code: str = ""
    """The folder with the original code's repositories."""


@dataclass(frozen=True)
class Measured:
    """One run of all texts."""

    seconds: float = 0.0
    extra: int = 0
    """Bytes at the peak beyond those of the loaded model."""
    peak: int = 0
    """Bytes of the whole process at the peak."""
    failure: str | None = None


def converted(job: Job) -> Embed:
    """The converted model as transformers loads it."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(job.model, trust_remote_code=True).eval()
    return in_batches(lambda ids, mask: model(ids, attention_mask=mask).last_hidden_state, job.ordered)


def original(job: Job) -> Embed:
    """The model's own code with the checkpoint that was converted."""
    from originals import importable, original_run

    run = original_run(importable(job.original, job.code), Path(job.model), "Model")
    return in_batches(lambda ids, mask: run(ids, mask, None)[0], job.ordered)


def in_batches(run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ordered: bool) -> Embed:
    """The means of a torch model's hidden states [rows, tokens, hidden]."""

    @torch.inference_mode()
    def pooled(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        real = torch.from_numpy(mask)
        weights = real[..., None].float()
        means: np.ndarray = ((run(torch.from_numpy(ids), real) * weights).sum(1) / weights.sum(1)).numpy()
        return means

    return batched(pooled, ordered)


def batched(pooled: Callable[[np.ndarray, np.ndarray], np.ndarray], ordered: bool) -> Embed:
    """Pads batches for a function of ids and mask, each int64 [rows, tokens]."""

    def embed(texts: Texts, rows: int) -> np.ndarray:
        order = list(range(len(texts)))
        if ordered:
            order.sort(key=lambda index: -len(texts[index]))
        vectors: dict[int, np.ndarray] = {}
        for start in range(0, len(order), rows):
            batch = order[start : start + rows]
            vectors.update(zip(batch, pooled(*padded([texts[index] for index in batch])), strict=True))
        return np.stack([vectors[index] for index in range(len(texts))])

    return embed


def padded(texts: Texts) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and mask, with padding on the right."""
    lengths = np.array([len(text) for text in texts])
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
    ids = np.zeros_like(mask)
    ids[mask.astype(bool)] = np.concatenate([np.array(text) for text in texts])
    return ids, mask


def sentence_transformers(job: Job) -> Embed:
    """``encode``, which sorts texts by their length; its time includes that of the tokenizer."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(job.model, trust_remote_code=True, device="cpu")

    def embed(texts: Texts, rows: int) -> np.ndarray:
        # The tokenizer puts the first token there.
        words = [" ".join(f"w{token}" for token in text[1:]) for text in texts]
        vectors: np.ndarray = model.encode(words, batch_size=rows, show_progress_bar=False)
        return vectors

    return embed


def graph(job: Job) -> Embed:
    """A pooled graph in onnxruntime, with the settings that the docs advise."""
    import onnxruntime
    import report  # noqa: F401  # it makes this checkout's converter the one that is imported

    from converter.exports.onnx.session_options import session_options

    options = session_options()
    options.intra_op_num_threads, options.inter_op_num_threads = job.threads, 1
    options.log_severity_level = 4  # lack of memory is shown in the table
    session = onnxruntime.InferenceSession(job.model, options, ["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}

    def pooled(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        chosen = {name: feed[name] for name in names}
        vectors: np.ndarray = session.run(["sentence_embedding"], chosen)[0]
        return vectors

    return batched(pooled, job.ordered)


SIDES: dict[str, Callable[[Job], Embed]] = {
    "converted": converted,
    "original": original,
    "sentence-transformers": sentence_transformers,
    "graph": graph,
}


def measure(job: Job) -> Measured:
    """Runs all texts once, and saves their vectors.

    Raises:
        RuntimeError: there is no /proc, which is needed to measure memory.
    """
    limit_memory()
    torch.set_num_threads(job.threads)
    texts = json.loads(Path(job.texts).read_text(encoding="utf-8"))
    try:
        embed = SIDES[job.side](job)
        embed(warm_up(), WARM_UP_ROWS)
        before = proc("/proc/self/status", "VmRSS")
        if not before:
            raise RuntimeError("memory is measured with Linux's /proc")
        Path("/proc/self/clear_refs").write_text("5")
        # With one thread, the processor's time is the run's; other work on the machine matters less to it.
        clock = time.process_time if job.threads == 1 else time.perf_counter
        started = clock()
        vectors = embed(texts, job.rows)
        seconds = clock() - started
    except Exception as error:  # onnxruntime's exceptions have no common base class
        if not re.search(r"alloc|not enough memory|MemoryError", f"{type(error).__name__} {error}"):
            raise
        return Measured(failure="out of memory")
    peak = proc("/proc/self/status", "VmHWM")
    np.save(job.vectors, vectors)
    return Measured(seconds, peak - before, peak)


def warm_up() -> list[list[int]]:
    words = np.arange(FIRST_WORD, FIRST_WORD + WORDS).reshape(WARM_UP_ROWS, -1).tolist()
    return [[START, *row] for row in words]


if __name__ == "__main__":
    job = Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    print(f"\n{json.dumps(asdict(measure(job)))}", flush=True)
