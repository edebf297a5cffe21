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
from measuring import Cell
from report import Document, ratio

from gpu.part import Settings, shared

TITLE = "encoders"
SIZES = {"heads": 12, "layers": 12, "hidden": 768, "inner": 3072}
"""Of jina-embeddings-v2-base."""
NEAREST = {"float32": 1 - 1e-6, "bfloat16": 0.99, "float16": 0.999}
"""Dtype -> smallest cosine of a text's vector with that of the same model in float32 on the CPU."""
TURNS, COMPARED = 3, 8
"""Timed runs at most; texts that are compared."""
OURS, BERT = "converted", "BERT"
INTRO = f"""\
A JinaBERT of jina-embeddings-v2-base's sizes and a BERT that is as wide and as deep ({SIZES["layers"]}
layers, {SIZES["heads"]} heads x 64), both with random weights and sdpa. Texts have a quarter of the length up
to all of it. Texts of similar length share a batch, which has {{tokens}} tokens; vectors are means. Times are
medians of up to {TURNS} runs after one more. Memory is the peak of torch's allocator beyond the weights."""
HEAD = ["tokens", "dtype", "model", "padding", "texts/s", "ratio", "extra MB"]


def run(settings: Settings, document: Document) -> None:
    lengths = settings.size((512, 2048, 8192), (16, 48))
    tokens = settings.size(65536, 96)
    document.intro = INTRO.format(tokens=tokens)
    models = make(settings, max(lengths))
    texts = {length: make_texts(length, 4 * max(1, tokens // length)) for length in lengths}
    some = texts[lengths[0]][:COMPARED]
    right = vectors(models[OURS], some, COMPARED)
    rows: list[list[str]] = []
    plan = [(dtype, length) for dtype in settings.size(list(NEAREST), ["bfloat16"]) for length in lengths]
    for (dtype, length), until in shared(plan, settings.until):
        batch, sizes = max(1, tokens // length), sorted(map(len, texts[length]), reverse=True)
        cells: dict[str, Cell] = {}
        for name, model in models.items():
            model.to(settings.device, getattr(torch, dtype))
            if name == OURS and length == lengths[0]:
                nearest = cosine(vectors(model, some, COMPARED), right)
                if not nearest >= NEAREST[dtype]:
                    document.fail(dtype, f"a vector's cosine with that of the CPU is {nearest:.4f}")
            cell = cells[name] = measure(model, texts[length], batch, until)
            speed = cell.failure or ratio(len(sizes), cell.prompt.median).rstrip("x")
            row = [str(length), dtype, name, f"{padding(sizes, batch):.0%}", speed]
            rows.append([*row, ratio(cell.prompt.median, cells[OURS].prompt.median), cell.prompt.megabytes])
            measuring.release()
        document.put("Unequal texts", report.table(HEAD, rows, texts=3))


def make(settings: Settings, longest: int) -> dict[str, Any]:
    """Both models, on the CPU in float32."""
    from transformers import AutoModel

    from converter import convert

    folder = settings.folder / "encoders"
    make_models(
        folder, longest=longest, **settings.size(SIZES, {"heads": 2, "layers": 2, "hidden": 128, "inner": 64})
    )
    convert(folder / "source", folder / "out", method="none", verify=False)
    ours = AutoModel.from_pretrained(folder / "out", trust_remote_code=True)
    bert = AutoModel.from_pretrained(folder / "bert", add_pooling_layer=False)
    return {OURS: ours.float().eval(), BERT: bert.eval()}


def vectors(model: Any, texts: Sequence[Sequence[int]], rows: int) -> np.ndarray:
    """Means of hidden states, float32 [texts, hidden]."""

    def states(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        device = model.device
        found: torch.Tensor = model(ids.to(device), attention_mask=mask.to(device)).last_hidden_state
        return found.float().cpu()

    return in_batches(states, ordered=True)(texts, rows)


def cosine(found: np.ndarray, right: np.ndarray) -> float:
    """The smallest one between rows."""
    return float(
        ((found * right).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(right, axis=1)).min()
    )


def measure(model: Any, texts: Sequence[Sequence[int]], rows: int, until: float) -> Cell:
    """Embeds all texts some times."""
    cell, cuda = Cell(), model.device.type == "cuda"
    with measuring.noting_failure(cell.prompt):
        vectors(model, texts[:rows], rows)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        for _ in measuring.turns([model], TURNS, until - time.monotonic()):
            started = time.perf_counter()
            vectors(model, texts, rows)
            cell.prompt.seconds.append(time.perf_counter() - started)
        cell.prompt.extra = torch.cuda.max_memory_allocated() - before if cuda else None
    return cell
