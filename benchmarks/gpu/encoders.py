"""Texts per second of a converted encoder and of transformers' BERT, on unequal texts."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import measuring
import numpy as np
import report
import torch
from encoder_speed import Embed, in_batches, make_models, make_texts, padding, pool_by_mean
from measuring import Cell
from report import Document, number, ratio

from converter import convert
from gpu.part import Settings, shared

TITLE = "encoders"
SIZES = {"heads": 12, "layers": 12, "hidden": 768, "inner": 3072}
"""Of jina-embeddings-v2-base."""
NEAREST = {"float16": 0.999, "bfloat16": 0.95, "float32": 1 - 1e-6}
"""Dtype -> smallest cosine of a text's vector with that of the same model in float32 on the CPU."""
TURNS, COMPARED = 3, 8
"""Timed runs at most; texts that are compared."""
OURS, BERT = "converted, sdpa", "BERT"
FUNCTIONS = {
    OURS: "sdpa",
    "converted, flash_attention_2": "flash_attention_2",
    "converted, flex": "flex_attention",
}
"""Side -> its attention function; not every one is installed."""
INTRO = f"""\
A JinaBERT of jina-embeddings-v2-base's sizes and a BERT that is as wide and as deep ({SIZES["layers"]}
layers, {SIZES["heads"]} heads x 64), both with random weights; BERT with sdpa. The JinaBERT computes no
padding. Texts have 1/32 of the length up to all of it. Texts of similar length share a batch, which has
{{tokens}} tokens; vectors are means. Times are medians of up to {TURNS} runs after one more. Memory is the
peak of torch's allocator beyond the weights."""
HEAD = ["tokens", "dtype", "side", "padding", "texts/s", "ratio", "extra MB"]


def run(settings: Settings, document: Document) -> None:
    lengths = settings.size((512, 2048, 8192, 32768), (16, 48))
    tokens = settings.size(65536, 96)
    document.intro = INTRO.format(tokens=tokens)
    models = make(settings, max(lengths))
    texts = {length: make_texts(length, 4 * max(1, tokens // length)) for length in lengths}
    some = texts[lengths[0]][:COMPARED]
    right = in_torch(models[OURS], "cpu", "float32")(some, COMPARED)
    rows: list[list[str]] = []
    plan = settings.size([*NEAREST], ["float32"])
    for dtype, until in shared(plan, settings.until):
        base: dict[int, Cell] = {}
        for name, side_until in shared([*models], until):
            try:
                embed = in_torch(models[name], settings.device, dtype, FUNCTIONS.get(name, "sdpa"))
                found = embed(some, COMPARED)
                for length, until_ in shared(lengths, side_until):
                    batch, sizes = max(1, tokens // length), sorted(map(len, texts[length]), reverse=True)
                    cell = measure(embed, texts[length], batch, until_, settings.device)
                    if name == OURS:
                        base[length] = cell
                    speed = cell.failure or number(len(sizes) / (cell.prompt.median or 1))
                    times = ratio(cell.prompt.median, base[length].prompt.median)
                    row = [str(length), dtype, name, f"{padding(sizes, batch):.0%}", speed, times]
                    rows.append([*row, cell.prompt.megabytes])
                    document.put("Unequal texts", report.table(HEAD, rows, texts=3))
            except ImportError as error:
                document.skip(f"{name}, {dtype}", error)
                continue
            except Exception as error:  # the other sides can still be measured
                document.fail(f"{name}, {dtype}", error)
                continue
            nearest = cosine(found, right)
            if name != BERT and not nearest >= NEAREST[dtype]:
                document.fail(f"{name}, {dtype}", f"a vector's cosine with the right one is {nearest:.4f}")
            del embed
            measuring.release()


def make(settings: Settings, longest: int) -> dict[str, Any]:
    """Both models, on the CPU in float32."""
    from transformers import AutoModel

    folder = settings.folder / "encoders"
    make_models(
        folder, longest=longest, **settings.size(SIZES, {"heads": 2, "layers": 2, "hidden": 128, "inner": 64})
    )
    pool_by_mean(folder / "source")
    convert(folder / "source", folder / "out", method="none", verify=False)
    ours = AutoModel.from_pretrained(folder / "out", trust_remote_code=True).float().eval()
    bert = AutoModel.from_pretrained(folder / "bert", add_pooling_layer=False).eval()
    return {**dict.fromkeys(FUNCTIONS, ours), BERT: bert}


def in_torch(model: Any, device: str, dtype: str, function: str = "sdpa") -> Embed:
    """Means of the hidden states of a copy of the model, with one of transformers' attention functions."""
    model = copy.deepcopy(model).to(device, getattr(torch, dtype))
    model.set_attn_implementation(function)

    def states(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(ids.to(device), attention_mask=mask.to(device)).last_hidden_state
        return found

    return in_batches(states, ordered=True)


def cosine(found: np.ndarray, right: np.ndarray) -> float:
    """The smallest one between rows."""
    return float(
        ((found * right).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(right, axis=1)).min()
    )


def measure(embed: Embed, texts: Sequence[Sequence[int]], rows: int, until: float, device: str) -> Cell:
    """Embeds all texts some times."""
    cell = Cell()
    with measuring.noting_failure(cell.prompt):
        embed(texts[:rows], rows)
        with measuring.noting_extra(cell.prompt, device):
            for _ in measuring.turns([embed], TURNS, until - time.monotonic()):
                started = time.perf_counter()
                embed(texts, rows)
                cell.prompt.seconds.append(time.perf_counter() - started)
    return cell
