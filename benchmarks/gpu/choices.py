"""What the attention kernels that torch and onnxruntime choose between cost, and whether they are right."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import measuring
import report
import torch
from report import Document, number

from gpu.part import BLOOM_1B7, Settings, Side, load, repositories

TITLE = "attention kernels to choose from"
TOKENS = 20
KERNELS = {"by itself": None, "flash, 1": "1", "memory-efficient, 2": "2", "unfused, 16": "16"}
"""Name -> ``sdpa_kernel`` of onnxruntime."""
INTRO = f"""\
*Decoding*: the median of {TOKENS} tokens in a row, each over a cache of a new length. *Prefill*: the last
token's logits of a prompt of a new length, and of the same once more. One row, bfloat16. *torch's choice* is
what torch takes on this GPU; the templates leave cuDNN out where lengths are new.

*Graphs*: of a BLOOM of two layers and four heads, profile ort, float16, with the kernel that `sdpa_kernel`
names, and the checks of `ntk-convert validate`."""


def run(settings: Settings, document: Document) -> None:
    document.intro = INTRO
    torch_kernels(settings, document)
    graphs(settings, document)


@torch.inference_mode()
def torch_kernels(settings: Settings, document: Document) -> None:
    lengths = settings.size((2048, 16384), (64,))
    setup = settings.setup("choices", {**BLOOM_1B7, "layers": 12, "vocabulary": 1024}, longest=max(lengths))
    head, rows = ["tokens", "kernels", "decoding ms", "prefill ms, first", "again"], []
    with repositories(setup, "position"):
        model = load(setup, Side("converted", "position", "sdpa"))
        code = sys.modules[type(model).__module__.rpartition(".")[0] + ".ntk_alibi"]
        # From 0 queries on, cuDNN's kernel is left to torch's choice.
        sides = (("templates", code.CUDNN_QUERIES), ("torch's choice", 0))

        def milliseconds(call: Callable[..., Any], *arguments: Any) -> float:
            return 1000 * measuring.timed(settings.device, lambda: call(model, *arguments))[0]

        for length in lengths:
            ids = measuring.tokens(setup, length)
            for less, (name, code.CUDNN_QUERIES) in enumerate(sides, 1):
                cache, prompt = measuring.random_cache(setup, model, length), ids[:, :-less]
                tokens = [
                    milliseconds(measuring.decode, ids[:, :1], at, cache)
                    for at in range(length, length + TOKENS)
                ]
                prompts = [milliseconds(measuring.prefill, prompt) for _ in range(2)]
                rows.append([str(length), name, *map(number, (statistics.median(tokens), *prompts))])
                document.put(setup.said(), report.table(head, rows, texts=2))


def graphs(settings: Settings, document: Document) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    from converter import OnnxOptions, convert, export
    from converter.onnx import comparison, session
    from converter.result.converted import open_converted

    rows: list[list[str]] = []
    for head in (128, 64):
        source, folder = settings.folder / f"source-{head}", settings.folder / f"graph-{head}"
        sizes = BloomConfig(hidden_size=4 * head, n_head=4, n_layer=2, vocab_size=200, initializer_range=0.05)
        BloomForCausalLM(sizes).half().save_pretrained(source)
        convert(source, folder, train_length=1024, verify=False)
        export(folder, OnnxOptions(validate=False))
        for name, kernel in KERNELS.items():
            chosen = {} if kernel is None else {"sdpa_kernel": kernel}
            session.OPTIONS = {**session.OPTIONS, "cuda": {"use_tf32": "0", **chosen}}
            place = {"model.onnx": folder / "model.onnx"}
            found = comparison.run(open_converted(folder), place, settings.device).graphs[0].providers[-1]
            wrong = [check.name for check in found.checks if not check.passed]
            rows.append([str(head), name, ", ".join(wrong) or "none"])
            document.put("Graphs", report.table(["head size", "kernel", "checks that fail"], rows, texts=3))
