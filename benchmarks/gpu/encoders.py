"""Texts per second of a converted encoder and of transformers' BERT, on unequal texts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import measuring
import numpy as np
import report
import torch
from encoder_speed import in_batches, make_models, make_texts, padding
from report import Document, number, ratio

from gpu.part import Settings, shared

TITLE = "encoders"
SIZES = {"heads": 12, "layers": 12, "hidden": 768, "inner": 3072}
"""Of jina-embeddings-v2-base."""
DTYPES = ("float32", "bfloat16", "float16")
NEAREST = {"float32": 1 - 1e-6, "bfloat16": 0.99, "float16": 0.999}
"""Smallest cosine of a text's vector with that of the same model in float32 on the CPU."""
TURNS = 3
OURS, BERT = "converted", "BERT"
ORDERS = {True: "sorted", False: "as they come"}
INTRO = f"""\
A JinaBERT of jina-embeddings-v2-base's sizes and a BERT that is as wide and as deep ({SIZES["layers"]} layers,
{SIZES["heads"]} heads x 64), both with random weights. Texts have a quarter of the length up to all of it; a
batch has {{tokens}} tokens, and vectors are means. *Sorted*: texts of similar length share a batch. Both
attend with sdpa; the converted one has no kernel for texts without padding, so sorting is what saves its
padding. Times are medians of up to {TURNS} runs after one more. Memory is the peak of torch's allocator beyond
the weights. Factors are to the converted model with the texts in the same order."""
HEAD = ["tokens", "dtype", "model", "order", "padding", "texts/s", "factor", "extra MB"]


def run(settings: Settings, document: Document) -> None:
    lengths = settings.size((512, 2048, 8192), (16, 48))
    tokens = settings.size(65536, 96)
    document.intro = INTRO.format(tokens=tokens)
    models = make(settings, max(lengths))
    texts = {length: make_texts(length, 4 * max(1, tokens // length)) for length in lengths}
    right = vectors(models[OURS], texts[lengths[0]][:8], 8, ordered=True)
    rows: list[list[str]] = []
    plan = [(dtype, length) for dtype in settings.size(DTYPES, DTYPES[:2]) for length in lengths]
    for (dtype, length), until in shared(plan, settings.until):
        batch = max(1, tokens // length)
        sizes = [len(text) for text in texts[length]]
        speeds: dict[tuple[str, bool], float] = {}
        for name, model in models.items():
            model.to(settings.device, getattr(torch, dtype))
            if name == OURS and length == lengths[0]:
                nearest = float(cosines(vectors(model, texts[length][:8], 8, ordered=True), right).min())
                if not nearest >= NEAREST[dtype]:
                    document.fail(dtype, f"a vector's cosine with that of the CPU is {nearest:.4f}")
            for ordered, order in ORDERS.items():
                if time.monotonic() > until:
                    rows.append([str(length), dtype, name, order, "-", "no time", "-", "-"])
                    continue
                seconds, extra = measure(model, texts[length], batch, until, ordered=ordered)
                speeds[name, ordered] = len(sizes) / seconds
                base = speeds.get((OURS, ordered)) if name != OURS else None
                empty = padding(sorted(sizes, reverse=True) if ordered else sizes, batch)
                row = [str(length), dtype, name, order, f"{empty:.0%}", number(speeds[name, ordered])]
                memory = f"{extra / 1e6:.0f}" if not settings.trial else "-"
                rows.append([*row, ratio(speeds[name, ordered], base), memory])
            measuring.release()
        document.put("Unequal texts", report.table(HEAD, rows, texts=4))


def make(settings: Settings, longest: int) -> dict[str, Any]:
    """Both models, on the CPU in float32."""
    from transformers import AutoModel

    from converter import convert

    folder = settings.folder / "encoders"
    sizes = settings.size(SIZES, {"heads": 2, "layers": 2, "hidden": 128, "inner": 64})
    make_models(folder, longest=longest, **sizes)
    convert(folder / "source", folder / "out", method="none", verify=False)
    ours = AutoModel.from_pretrained(folder / "out", trust_remote_code=True)
    bert = AutoModel.from_pretrained(folder / "bert", add_pooling_layer=False)
    return {OURS: ours.float().eval(), BERT: bert.eval()}


def vectors(model: Any, texts: Sequence[Sequence[int]], rows: int, *, ordered: bool) -> np.ndarray:
    """Means of hidden states, float32 [texts, hidden]."""

    def states(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        device = model.device
        found: torch.Tensor = model(ids.to(device), attention_mask=mask.to(device)).last_hidden_state
        return found.float().cpu()

    return in_batches(states, ordered)(texts, rows)


def cosines(found: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The cosine of each pair of rows."""
    products: np.ndarray = (found * right).sum(1)
    return products / np.linalg.norm(found, axis=1) / np.linalg.norm(right, axis=1)


def measure(
    model: Any, texts: Sequence[Sequence[int]], rows: int, until: float, *, ordered: bool
) -> tuple[float, int]:
    """Seconds for all texts, and the bytes at the peak beyond the weights."""
    cuda = model.device.type == "cuda"
    vectors(model, texts[:rows], rows, ordered=ordered)
    before = 0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    times: list[float] = []
    while not times or (len(times) < TURNS and time.monotonic() < until):
        started = time.perf_counter()
        vectors(model, texts, rows, ordered=ordered)
        times.append(time.perf_counter() - started)
    extra = torch.cuda.max_memory_allocated() - before if cuda else 0
    return float(np.median(times)), extra
