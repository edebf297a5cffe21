"""Texts per second of a converted encoder and of transformers' BERT, on unequal texts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch
import torch_speed
from encoder_side import in_batches
from encoder_speed import VOCABULARY, make_texts, padding

from gpu.document import Document
from gpu.settings import Settings, shared

TITLE = "encoders"
HEADS, HEAD_DIM, LAYERS, INNER = 12, 64, 12, 3072
"""Of jina-embeddings-v2-base."""
DTYPES = ("float32", "bfloat16", "float16")
NEAREST = {"float32": 1 - 1e-6, "bfloat16": 0.99, "float16": 0.999}
"""Smallest cosine of a text's vector with that of the same model in float32 on the CPU."""
TURNS = 3
OURS, BERT = "converted", "BERT"
INTRO = f"""\
A JinaBERT of jina-embeddings-v2-base's sizes and a BERT that is as wide and as deep ({LAYERS} layers, {HEADS}
heads x {HEAD_DIM}), both with random weights. Texts have a quarter of the length up to all of it; a batch has
{{tokens}} tokens, and vectors are means. *Sorted*: texts of similar length share a batch. Both models attend
with sdpa; the converted one has no kernel for texts without padding, so sorting is what saves its padding.
Times are medians of up to {TURNS} runs after one more. Memory is the peak of torch's allocator beyond the
weights. Factors are to the converted model with the texts in the same order."""
HEAD = ["tokens", "dtype", "model", "order", "padding", "texts/s", "factor", "extra MB"]


def run(settings: Settings, document: Document) -> None:
    lengths = settings.size((512, 2048, 8192), (16, 48))
    tokens = settings.size(65536, 96)
    document.intro = INTRO.format(tokens=tokens)
    models = {OURS: converted(settings, max(lengths)), BERT: bert(settings, max(lengths))}
    texts = {length: make_texts(length, 4 * max(1, tokens // length)) for length in lengths}
    right = vectors(models[OURS].float().cpu(), texts[lengths[0]][:8], 8, ordered=True)
    rows: list[list[str]] = []
    plan = [(dtype, length) for dtype in settings.size(DTYPES, DTYPES[:2]) for length in lengths]
    for (dtype, length), until in shared(plan, settings.until):
        speeds: dict[tuple[str, bool], float] = {}
        for name, model in models.items():
            model.to(settings.device, getattr(torch, dtype))
            if name == OURS and length == lengths[0]:
                found = vectors(model, texts[length][:8], 8, ordered=True)
                nearest = float(cosines(found, right).min())
                if not nearest >= NEAREST[dtype]:
                    document.fail(f"{dtype}", f"a vector's cosine with that of the CPU is {nearest:.4f}")
            for ordered in (True, False):
                if time.monotonic() > until:
                    rows.append([str(length), dtype, name, order(ordered), "-", "no time", "-", "-"])
                    continue
                batch = max(1, tokens // length)
                seconds, extra = measure(model, texts[length], batch, until, ordered=ordered)
                speeds[name, ordered] = len(texts[length]) / seconds
                sizes = [len(text) for text in texts[length]]
                empty = padding(sorted(sizes, reverse=True) if ordered else sizes, batch)
                base = speeds.get((OURS, ordered), 0.0) if name != OURS else 0.0
                rows.append(
                    [
                        *(str(length), dtype, name, order(ordered), f"{empty:.0%}"),
                        torch_speed.number(speeds[name, ordered]),
                        f"{speeds[name, ordered] / base:.2f}x" if base else "-",
                        f"{extra / 1e6:.0f}" if settings.device != "cpu" else "-",
                    ]
                )
            torch_speed.release()
        document.put("Unequal texts", report.table(HEAD, rows, texts=4))


def order(ordered: bool) -> str:
    return "sorted" if ordered else "as they come"


def converted(settings: Settings, longest: int) -> Any:
    """A converted JinaBERT with random weights."""
    from transformers import AutoModel

    from converter import convert
    from tests import tiny

    heads, layers, inner = settings.size((HEADS, LAYERS, INNER), (2, 2, 64))
    source, out = Path(settings.folder, "encoder"), Path(settings.folder, "encoder-converted")
    sizes = {"hidden_size": heads * HEAD_DIM, "num_hidden_layers": layers, "intermediate_size": inner}
    tiny.ENCODERS["jina_bert"](
        source, heads, head="Model", vocab_size=VOCABULARY, max_position_embeddings=longest, **sizes
    )
    convert(source, out, method="none", verify=False)
    return AutoModel.from_pretrained(out, trust_remote_code=True).eval()


def bert(settings: Settings, longest: int) -> Any:
    """transformers' BERT with random weights, which attends with sdpa."""
    from transformers import BertConfig, BertModel

    heads, layers, inner = settings.size((HEADS, LAYERS, INNER), (2, 2, 64))
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=heads * HEAD_DIM,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        max_position_embeddings=longest,
    )
    return BertModel(config, add_pooling_layer=False).eval()


def vectors(model: Any, texts: Sequence[Sequence[int]], rows: int, *, ordered: bool) -> np.ndarray:
    """Means of hidden states, float32 [texts, hidden]."""
    device = model.device

    def states(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
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
