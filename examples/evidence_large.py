"""Show what scaling does to a larger model: train it, measure it, write the tables.

    python examples/evidence_large.py             # train and measure what is missing; 2.5 hours on one core
    python examples/evidence_large.py --tables    # rewrite comparisons and tables, from stored scores

The model is that of train_large.py, and is kept in .evidence/ with the results of each scaling, so a stopped
run goes on. The results of all are in examples/evidence/large.json.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lines_task
import numpy as np
import torch
from evidence_design import EXAMPLES, NONE
from evidence_measure import MODELS_FOLDER, against_none, compare_again, kept, read, to_text, together
from evidence_tables import cell, compared, markdown, with_tables
from safetensors.torch import load_file
from tokenizers import Tokenizer
from train_large import SHARES, TOKENS_PER_RECORD, TRAINED_LENGTH, network, spread

from converter.evaluation.evaluate import evaluate
from converter.evaluation.results import PERPLEXITY, Measurement, Results
from converter.evaluation.tasks import make_task
from converter.scaling.scaling import UNSCALED, Scaling, short_names

RESULTS = EXAMPLES / "evidence" / "large.json"
DOCUMENT = EXAMPLES / "evidence" / "README.md"
PROMPTS = {512: 100, 1024: 60, 2048: 60, 4096: 60}
"""Number of prompts of each length."""
LENGTHS = tuple(PROMPTS)
WINDOWS = 24
"""Number of windows of text; each has the longest length, and comes from the middle of another file."""

RAMP = (TRAINED_LENGTH / 8, TRAINED_LENGTH / 2)
BY_PARTS = Scaling("by-parts", dynamic="position", train_length=TRAINED_LENGTH, ramp=RAMP)
NTK = Scaling("ntk", dynamic="position", train_length=TRAINED_LENGTH)
STATIC_BY_PARTS = Scaling("by-parts", 4.0, RAMP)
SCALINGS: tuple[Scaling, ...] = (
    UNSCALED,
    BY_PARTS,
    NTK,
    STATIC_BY_PARTS,
    Scaling("ntk", 4.0),
    Scaling("linear", 4.0),
)
"""In the order in which they are measured: what a stop should leave comes first."""
SHORT = short_names(map(str, SCALINGS))
PAIRS = ((BY_PARTS, UNSCALED), (BY_PARTS, NTK), (BY_PARTS, STATIC_BY_PARTS))
"""Two scalings to compare on the same prompts and windows."""
FIRST_QUERY = 256
"""The attention of queries from this place on is averaged: before it, the first token is near."""


def prompt(rng: np.random.Generator, tokenizer: Tokenizer, text: str, length: int) -> dict[str, Any]:
    """Lines spread among a piece of a text, one in twice the tokens of a record, and a question about one.

    In the training, every second record is a question.

    Args:
        rng: the source of randomness.
        tokenizer: the model's.
        text: held-out text of one kind, of at least 8 characters for each token of the prompt.
        length: the most tokens of the prompt with its answer, of one token.
    """
    count = length // (2 * TOKENS_PER_RECORD)
    keys = [f"<{lines_task.KEYS[key]}>" for key in rng.permutation(len(lines_task.KEYS))[:count]]
    values = [f"<{lines_task.VALUES[value]}>" for value in rng.integers(len(lines_task.VALUES), size=count)]
    asked = int(rng.integers(count))
    start = int(rng.integers(len(text) - 8 * length))
    piece = tokenizer.encode(text[start : start + 8 * length])
    wanted = length - count * lines_task.TOKENS_PER_LINE - lines_task.TOKENS_PER_QUESTION - 1
    is_line = spread(rng, wanted, count)
    before = np.cumsum(~is_line)[is_line]  # tokens of text before each line
    lines = [f"<{lines_task.LINE}>{key}{value}" for key, value in zip(keys, values, strict=True)]
    depth = round(asked / max(1, count - 1), 2)
    over = 0
    while True:  # text that is cut at other places may take more tokens
        cuts = [0, *(piece.offsets[max(0, each - over)][0] for each in (*before, wanted))]
        parts = [text[start + one : start + two] for one, two in itertools.pairwise(cuts)]
        among = "".join(part + line for part, line in zip(parts, [*lines, ""], strict=True))
        asking = f"{among}<{lines_task.ASK}>{keys[asked]}"
        tokens = len(tokenizer.encode(asking).ids) + 1
        if tokens <= length:
            return {"prompt": asking, "answer": values[asked], "length": length, "depth": depth}
        over += tokens - length


class Material:
    """What the model is asked, made from the files of its training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.held_out: dict[str, list[str]] = json.loads((folder / "held-out.json").read_text("utf-8"))

    def prompts(self, shortest: int = TRAINED_LENGTH) -> Path:
        """Writes the prompts of a length and of all longer ones, for ``make_task``."""
        rows = []
        joined = {kind: "".join(files) for kind, files in self.held_out.items()}
        for length in (each for each in PROMPTS if each >= shortest):
            rng = np.random.default_rng([0, length])
            for _ in range(PROMPTS[length]):
                text = joined[str(rng.choice([*SHARES], p=[*SHARES.values()]))]
                rows.append(json.dumps(prompt(rng, self.tokenizer, text, length)) + "\n")
        file = self.folder / f"prompts-{shortest}.jsonl"
        file.write_text("".join(rows), encoding="utf-8")
        return file

    def windows(self) -> Path:
        """Writes the windows of text one after another, of each kind in turn."""
        in_turn = itertools.chain.from_iterable(
            zip(*map(self._middles, self.held_out.values()), strict=False)
        )
        file = self.folder / "held-out.txt"
        file.write_text("".join(itertools.islice(in_turn, WINDOWS)), encoding="utf-8", newline="\n")
        return file

    def _middles(self, files: Sequence[str]) -> Iterator[str]:
        """The middle of each file that is long enough.

        It has a few tokens more than a window, since those at its ends may join its neighbours'.
        """
        tokens = LENGTHS[-1] + 4
        for text in files:
            offsets = self.tokenizer.encode(text).offsets
            first = (len(offsets) - tokens) // 2
            if first > 0:
                yield text[offsets[first][0] : offsets[first + tokens][0]]

    def window_ids(self) -> torch.Tensor:
        """The windows of text, int64 of shape [windows, longest length]."""
        ids = self.tokenizer.encode(self.windows().read_text(encoding="utf-8")).ids
        return torch.tensor(ids[: WINDOWS * LENGTHS[-1]]).reshape(WINDOWS, -1)


def measured(material: Material, scaling: Scaling) -> Results:
    """Measures one scaling.

    Up to the trained length, scalings by position compute the same as none, so they are not measured there.
    """
    print(scaling, flush=True)
    beyond = bool(scaling.dynamic)
    return evaluate(
        [material.folder],
        tasks=[make_task("prompts", material.prompts(2 * TRAINED_LENGTH if beyond else TRAINED_LENGTH))],
        text=[material.windows()],
        methods=(scaling.method,),
        scales=(scaling.factor,) if scaling.static else (),
        dynamic=(scaling.dynamic,) if scaling.dynamic else (),
        lengths=LENGTHS[beyond:],
        items=max(PROMPTS.values()),
        train_length=TRAINED_LENGTH,
        progress=sys.stderr.isatty(),
    )


def measure(folder: Path) -> Results:
    """Measures what is not kept beside the model yet."""
    material = Material(folder)
    found = [
        kept(folder / f"{SHORT[str(scaling)]}.json", partial(measured, material, scaling))
        for scaling in SCALINGS
    ]
    whole = together(found)
    training = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    settings = {"items": {"prompts": PROMPTS, "windows": WINDOWS}, "first token": first_tokens(material)}
    return replace(
        whole,
        measurements=[replace(each, positions=()) for each in against_none(whole.measurements)],
        models={name: {**about, "training": training} for name, about in whole.models.items()},
        settings={**whole.settings, **settings},
    )


# --- the first token


@contextmanager
def trained(folder: Path, scaling: Scaling, attention: str) -> Iterator[Any]:
    """The trained network with a scaling."""
    with network(scaling, attention) as model:
        model.load_state_dict(load_file(folder / "model.safetensors"))
        yield model.eval()


@torch.no_grad()
def first_token(model: Any, ids: torch.Tensor) -> list[list[float]]:
    """The attention on the first token, averaged over rows and queries, by layer and head.

    The model has eager attention, so that its layers return the weights.
    """
    found: list[list[float]] = []

    def keep(_module: object, _inputs: object, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        found.append(outputs[1][:, :, FIRST_QUERY:, 0].mean((0, 2)).tolist())

    hooks = [block.attn.register_forward_hook(keep) for block in model.transformer.blocks]
    model.transformer(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def first_tokens(material: Material, count: int = 4) -> dict[str, Any]:
    """The attention on the first token by scaling, length, layer and head, in so many windows."""
    windows, found = material.window_ids()[:count, None], {}
    for scaling in (UNSCALED, BY_PARTS):
        with trained(material.folder, scaling, "eager") as model:
            found[str(scaling)] = {
                str(length): np.mean([first_token(model, each[:, :length]) for each in windows], 0).tolist()
                for length in LENGTHS
            }
    return found


# --- the tables


COLUMNS = [(metric, length) for metric in ("accuracy", PERPLEXITY) for length in LENGTHS]
BEYOND = [(metric, length) for metric, length in COLUMNS if length > TRAINED_LENGTH]
NAMES = {"accuracy": "right", PERPLEXITY: PERPLEXITY}


def _by_cell(results: Results) -> dict[tuple[str, str, int], Measurement]:
    """Scaling, metric and length -> what was measured."""
    return {(each.scaling, each.metric, each.length): each for each in results.measurements}


def _titles(columns: Sequence[tuple[str, int]]) -> list[str]:
    return [f"{NAMES[metric]}, {length // TRAINED_LENGTH}x" for metric, length in columns]


def rows(results: Results) -> Iterator[list[str]]:
    """The head; then for each scaling its name, right answers in per cent, and the perplexity, by length.

    A star marks a significant difference from none.
    """
    yield ["scaling", *_titles(COLUMNS)]
    found = _by_cell(results)
    for name in map(str, SCALINGS):
        cells = [
            (found.get((name, metric, length)), found[NONE, metric, length]) for metric, length in COLUMNS
        ]
        if any(each for each, _ in cells):
            yield [SHORT[name], *(cell(each, unscaled) if each else "" for each, unscaled in cells)]


def table(results: Results) -> str:
    """The same as Markdown."""
    head, *lines = rows(results)
    return markdown(head, lines)


def pairs(results: Results) -> str:
    """Pairs of scalings on the same prompts and windows."""
    found, lines = _by_cell(results), []
    for pair in PAIRS:
        both = [[found.get((str(each), *column)) for each in pair] for column in BEYOND]
        cells = [compared(one.metric, [one.scores], [two.scores]) for one, two in both if one and two]
        if cells:
            lines.append(["{}, against {}".format(*(SHORT[str(each)] for each in pair)), *cells])
    return markdown(["compared", *_titles(BEYOND)], lines)


def sinks(results: Results) -> str:
    """The most attention that a head of any layer gives the first token."""
    lines = [
        [SHORT[name], *(f"{100 * max(map(max, layers)):.2f} %" for layers in lengths.values())]
        for name, lengths in results.settings["first token"].items()
    ]
    return markdown(["scaling", *(f"{length // TRAINED_LENGTH}x" for length in LENGTHS)], lines)


TABLES: dict[str, Callable[[Results], str]] = {"results": table, "pairs": pairs, "sinks": sinks}


def page(results: Results) -> str:
    """The document with its tables."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return with_tables(text, "large", lambda name: TABLES[name](results))


def as_csv(results: Results) -> str:
    """The table of results."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows(results))
    return text.getvalue()


def main() -> None:
    """Read the command line; train, measure and write."""
    parser = argparse.ArgumentParser(description="Produce the evidence about a larger model.")
    parser.add_argument("--models", type=Path, default=MODELS_FOLDER, help="models' folder [.evidence]")
    parser.add_argument("--tables", action="store_true", help="only rewrite comparisons and tables")
    arguments = parser.parse_args()
    if not arguments.tables:
        folder = arguments.models / "large"
        if not (folder / "model.safetensors").exists():
            subprocess.run([sys.executable, EXAMPLES / "train_large.py", "--out", folder], check=True)
        torch.set_num_threads(1)
        RESULTS.write_text(to_text(measure(folder)), encoding="utf-8")
    compare_again(RESULTS)
    results = read(RESULTS)
    DOCUMENT.write_text(page(results), encoding="utf-8")
    RESULTS.with_suffix(".csv").write_text(as_csv(results), encoding="utf-8")
    print(DOCUMENT)


if __name__ == "__main__":
    main()
