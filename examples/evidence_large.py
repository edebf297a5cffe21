"""Show what scaling does to a larger model: train it, measure it, write the tables.

    python examples/evidence_large.py             # train and measure what is missing; 2.5 hours on one core
    python examples/evidence_large.py --tables    # write only the tables, from the stored results

The model is that of train_large.py, and is kept in .evidence/. Results are stored after each scaling, in
examples/evidence/large.json, so a stopped run goes on. Results of another training are thrown away.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lines_task
import numpy as np
import torch
import torch.nn.functional as F
from evidence_design import EXAMPLES, NONE
from evidence_measure import MODELS_FOLDER, to_text
from evidence_tables import cell, compared, markdown
from safetensors.torch import load_file
from tokenizers import Tokenizer
from train_large import (
    BIAS_MAX,
    HEADS,
    LAYERS,
    SHARES,
    TOKENS_PER_RECORD,
    TRAINED_LENGTH,
    Network,
    causal_bias,
    mixed,
)

from converter.evaluation.evaluate import evaluate
from converter.evaluation.results import PERPLEXITY, Measurement, Results
from converter.evaluation.statistics import compare
from converter.evaluation.tasks import make_task
from converter.scaling.scaling import UNSCALED, Dynamic, Scaling, Static
from converter.scaling.slopes import NATS, stock_slopes

NAME = "large"
RESULTS = EXAMPLES / "evidence" / f"{NAME}.json"
DOCUMENT = EXAMPLES / "evidence" / "README.md"
PROMPTS = {512: 100, 1024: 60, 2048: 60, 4096: 60}
"""Number of prompts of each length."""
LENGTHS = (512, 2048, 4096)
"""Of text."""
WINDOWS = 24
"""Number of windows of text; each has the longest length, and comes from the middle of another file."""
TOKENS_PER_LINE = 2 * TOKENS_PER_RECORD
"""In the training, every second record is a question."""

SCALE = 4.0
RAMP = (TRAINED_LENGTH / 8, TRAINED_LENGTH / 2)
BY_PARTS = Dynamic("by-parts", "position", 1.0, TRAINED_LENGTH, RAMP)
NTK = Dynamic("ntk", "position", 1.0, TRAINED_LENGTH)
STATIC_BY_PARTS, STATIC_NTK = Static("by-parts", SCALE, RAMP), Static("ntk", SCALE)
LINEAR = Static("linear", SCALE)
TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.6)
TEMPERED = {each: replace(BY_PARTS, temperature=each) for each in TEMPERATURES}
SCALINGS: tuple[Scaling, ...] = (
    *(UNSCALED, BY_PARTS, TEMPERED[0.2], NTK, STATIC_BY_PARTS, TEMPERED[0.4], STATIC_NTK, LINEAR),
    *(TEMPERED[0.1], TEMPERED[0.6], TEMPERED[0.3]),
)
"""In the order in which they are measured: what a stop should leave comes first."""
PAIRS = (
    (BY_PARTS, UNSCALED),
    (BY_PARTS, NTK),
    (STATIC_BY_PARTS, STATIC_NTK),
    *((tempered, BY_PARTS) for tempered in TEMPERED.values()),
)
"""Two scalings to compare on the same prompts and windows."""
FIRST_QUERY = 256
"""The attention of queries from this place on is averaged: before it, the first token is near."""
SINK = 0.5
"""A head with more of its attention on the first token is a sink, as in arXiv 2603.09616."""
BLOCK = re.compile(
    r"(?P<start><!-- large (?P<name>[a-z]+): [^\n]*-->\n).*?(?P<end><!-- end of large -->)", re.DOTALL
)


def prompt(rng: np.random.Generator, tokenizer: Tokenizer, text: str, length: int) -> dict[str, Any]:
    """Lines spread among a piece of a text, and a question about one of them.

    Args:
        rng: the source of randomness.
        tokenizer: the model's.
        text: held-out text of one kind, of at least 8 characters for each token of the prompt.
        length: the most tokens of the prompt with its answer, of one token.
    """
    count = length // TOKENS_PER_LINE
    keys = rng.permutation(len(lines_task.KEYS))[:count]
    values = rng.integers(len(lines_task.VALUES), size=count)
    asked = int(rng.integers(count))
    start = int(rng.integers(len(text) - 8 * length))
    piece = tokenizer.encode(text[start : start + 8 * length])
    # Of all places of lines and pieces of text, in order: how many pieces are before each line.
    wanted = length - count * lines_task.TOKENS_PER_LINE - lines_task.TOKENS_PER_QUESTION - 1
    _, of_lines = mixed(np.zeros(wanted, np.int64), np.zeros((count, 3), np.int64), rng)
    before = np.cumsum(~of_lines)[of_lines][:: lines_task.TOKENS_PER_LINE]
    lines = [
        f"<{lines_task.LINE}><{lines_task.KEYS[key]}><{lines_task.VALUES[value]}>"
        for key, value in zip(keys, values, strict=True)
    ]
    answer, over = f"<{lines_task.VALUES[values[asked]]}>", 0
    while True:  # text that is cut at other places may take more tokens
        cuts = [0, *(piece.offsets[max(0, each - over)][0] for each in (*before, wanted))]
        parts = [text[start + one : start + two] for one, two in itertools.pairwise(cuts)]
        among = "".join(part + line for part, line in zip(parts, [*lines, ""], strict=True))
        asking = f"{among}<{lines_task.ASK}><{lines_task.KEYS[keys[asked]]}>"
        tokens = len(tokenizer.encode(asking).ids) + 1
        if tokens <= length:
            depth = round(asked / max(1, count - 1), 2)
            return {"prompt": asking, "answer": answer, "length": length, "depth": depth}
        over += tokens - length


def write_prompts(folder: Path, shortest: int = TRAINED_LENGTH) -> Path:
    """Writes the prompts of a length and of all longer ones, for ``make_task``."""
    file = folder / f"prompts-{shortest}.jsonl"
    if not file.exists():
        tokenizer = _tokenizer(folder)
        held_out = {kind: "".join(files) for kind, files in _held_out(folder).items()}
        rows = []
        for length, count in PROMPTS.items():
            rng = np.random.default_rng([0, length])
            for _ in range(count if length >= shortest else 0):
                text = held_out[str(rng.choice([*SHARES], p=[*SHARES.values()]))]
                rows.append(json.dumps(prompt(rng, tokenizer, text, length)) + "\n")
        file.write_text("".join(rows), encoding="utf-8")
    return file


def write_windows(folder: Path) -> Path:
    """Writes the windows of text one after another, of each kind in turn."""
    file = folder / "held-out.txt"
    if not file.exists():
        # A few tokens more than a window has, since those at its ends may join its neighbours'.
        tokenizer, tokens = _tokenizer(folder), LENGTHS[-1] + 4
        by_kind = [_middle(files, tokenizer, tokens) for files in _held_out(folder).values()]
        in_turn = itertools.chain.from_iterable(zip(*by_kind, strict=False))
        file.write_text("".join(itertools.islice(in_turn, WINDOWS)), encoding="utf-8", newline="\n")
    return file


def _middle(files: Sequence[str], tokenizer: Tokenizer, tokens: int) -> Iterator[str]:
    """The middle of each file that is long enough."""
    for text in files:
        offsets = tokenizer.encode(text).offsets
        first = (len(offsets) - tokens) // 2
        if first > 0:
            yield text[offsets[first][0] : offsets[first + tokens][0]]


def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _held_out(folder: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads((folder / "held-out.json").read_text(encoding="utf-8"))
    return found


def measure(folder: Path) -> None:
    """Measures what is not stored yet, and stores it after each scaling.

    Up to the trained length, scalings by position compute the same as none, so they are not measured there.
    """
    training = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    found = read() if RESULTS.exists() else Results([], {})
    if found.models.get(NAME, {}).get("training") != training:
        found = Results([], {})
    for scaling in SCALINGS:
        if any(each.scaling == str(scaling) for each in found.measurements):
            continue
        beyond = isinstance(scaling, Dynamic)
        prompts = write_prompts(folder, 2 * TRAINED_LENGTH if beyond else TRAINED_LENGTH)
        new = evaluate(
            [folder],
            tasks=[make_task("prompts", prompts)],
            text=[write_windows(folder)],
            lengths=LENGTHS[beyond:],
            items=max(PROMPTS.values()),
            train_length=TRAINED_LENGTH,
            progress=sys.stderr.isatty(),
            **arguments(scaling),
        )
        [about] = new.models.values()
        found = Results(
            [*found.measurements, *(_kept(each, found) for each in new.measurements)],
            {NAME: {**about, "training": training}},
            {**new.settings, **found.settings, "items": {"prompts": PROMPTS, "windows": WINDOWS}},
            found.seconds + new.seconds,
        )
        store(found)
        print(scaling, round(new.seconds), "s", flush=True)


def arguments(scaling: Scaling) -> dict[str, Any]:
    """The arguments of ``evaluate`` that ask for a scaling."""
    found: dict[str, Any] = {"methods": (scaling.method,)}
    if isinstance(scaling, Static):
        found["scales"] = (scaling.factor,)
    if isinstance(scaling, Dynamic):
        found["dynamic"] = (scaling.dynamic,)
    return found | ({"temperatures": (scaling.temperature,)} if scaling.temperature else {})


def _kept(new: Measurement, found: Results) -> Measurement:
    """A measurement with rounded scores, compared with those of none on the same items."""
    new = replace(new, model=NAME, scores=tuple(round(score, 6) for score in new.scores), positions=())
    unscaled = _by_cell(found).get((NONE, (new.metric, new.length)))
    pair = compare(new.metric, new.scores, unscaled.scores) if unscaled else None
    return replace(new, comparison=pair)


def read() -> Results:
    """The stored results."""
    return Results.from_json(json.loads(RESULTS.read_text(encoding="utf-8")))


def store(results: Results) -> None:
    """Stores the results, first under another name, so that a stop loses nothing."""
    new = RESULTS.with_suffix(".new")
    new.write_text(to_text(results), encoding="utf-8")
    new.replace(RESULTS)


# --- the first token, in the trained network itself, because only there its attention can be seen and changed


def load(folder: Path) -> Network:
    """The trained network."""
    network = Network()
    network.load_state_dict(load_file(folder / "model.safetensors"))
    return network.eval()


def scaled_bias(scaling: Scaling, tokens: int, *, capped: bool = False) -> torch.Tensor:
    """The bias of a scaling without temperature, float32 of shape [heads, tokens, tokens].

    With ``capped``, the distance to the first token is at most the trained length, as with LM-Infinite
    (arXiv 2308.16137), in the heads that by-parts scales.
    """
    stock = stock_slopes(HEADS, BIAS_MAX)
    slopes = torch.tensor([scaling.slopes(stock, place + 1) for place in range(tokens)]).T
    bias = causal_bias(tokens, slopes)
    if capped:
        changed = torch.tensor(BY_PARTS.slopes(stock, 2 * TRAINED_LENGTH)) != torch.tensor(stock)
        near = torch.arange(tokens).clamp(max=TRAINED_LENGTH)
        bias[changed, :, 0] = -slopes[changed] * near
    return bias


@torch.no_grad()
def first_token(network: Network, windows: torch.Tensor, bias: torch.Tensor) -> list[list[float]]:
    """The attention on the first token, averaged over windows and queries, of each layer's heads."""
    found = torch.zeros(LAYERS, HEADS)
    for window in windows:
        hidden = network.transformer.wte(window[None])
        block: Any
        for layer, block in enumerate(network.transformer.blocks):
            query, key, _ = block.heads(hidden)
            for head in range(HEADS):  # one after another, since the scores of a long window are large
                scores = query[0, head, FIRST_QUERY:] @ key[0, head].T / query.shape[-1] ** 0.5
                scores += bias[head, FIRST_QUERY:]
                found[layer, head] += (scores[:, 0] - scores.logsumexp(-1)).exp().mean()
            hidden = block(hidden, bias)
    return [[round(float(each), 4) for each in row] for row in found / len(windows)]


def first_tokens(folder: Path, count: int = 4) -> dict[str, Any]:
    """The attention on the first token by scaling, length, layer and head, in so many windows."""
    network, windows = load(folder), _windows(folder)[:count]
    return {
        str(scaling): {
            str(length): first_token(network, windows[:, :length], scaled_bias(scaling, length))
            for length in PROMPTS
        }
        for scaling in (UNSCALED, BY_PARTS)
    }


@torch.no_grad()
def capped(folder: Path) -> dict[str, Any]:
    """What a capped distance to the first token does at the longest length: scores by scaling and metric."""
    network, tokenizer, length = load(folder), _tokenizer(folder), LENGTHS[-1]
    prompts = write_prompts(folder, length).read_text(encoding="utf-8").splitlines()
    found: dict[str, Any] = {}
    for scaling in (UNSCALED, BY_PARTS):
        bias = scaled_bias(scaling, length, capped=True)
        losses, right = [], []
        for window in _windows(folder):
            logits = network.lm_head(network.transformer(window[None], bias))[0, :-1]
            losses.append(round(F.cross_entropy(logits, window[1:]).item(), 6))
        for row in map(json.loads, prompts):
            ids = torch.tensor([tokenizer.encode(row["prompt"]).ids])
            last = network.transformer(ids, bias[:, : ids.shape[1], : ids.shape[1]])[0, -1]
            right.append(float(tokenizer.id_to_token(int(network.lm_head(last).argmax())) == row["answer"]))
        found[str(scaling)] = {"accuracy": right, PERPLEXITY: losses}
        print(scaling, "capped", flush=True)
    return found


def kept(path: Path, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """What a file beside the model holds, which is made if it is missing."""
    if not path.exists():
        path.write_text(json.dumps(make(path.parent)), encoding="utf-8")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _windows(folder: Path) -> torch.Tensor:
    """The windows of text, int64 of shape [windows, longest length]."""
    ids = _tokenizer(folder).encode(write_windows(folder).read_text(encoding="utf-8")).ids
    return torch.tensor(ids[: WINDOWS * LENGTHS[-1]]).reshape(WINDOWS, -1)


# --- the tables


COLUMNS = [("accuracy", length) for length in PROMPTS] + [(PERPLEXITY, length) for length in LENGTHS]
NAMES = {"accuracy": "right", PERPLEXITY: PERPLEXITY}


def _by_cell(results: Results) -> dict[tuple[str, tuple[str, int]], Measurement]:
    """Scaling and column of the table -> what was measured."""
    return {(each.scaling, (each.metric, each.length)): each for each in results.measurements}


def _titles(columns: Sequence[tuple[str, int]]) -> list[str]:
    return [f"{NAMES[metric]}, {length // TRAINED_LENGTH}x" for metric, length in columns]


def rows(results: Results) -> Iterator[list[str]]:
    """The head; then for each scaling its name, right answers in per cent, and the perplexity, by length.

    A star marks a significant difference from none.
    """
    yield ["scaling", *_titles(COLUMNS)]
    found = _by_cell(results)
    order = (UNSCALED, *(each for pair in PAIRS for each in reversed(pair)), LINEAR)
    for scaling in dict.fromkeys(map(str, order)):
        cells = [(found.get((scaling, column)), found[NONE, column]) for column in COLUMNS]
        if any(each for each, _ in cells):
            yield [scaling, *(cell(each, unscaled) if each else "" for each, unscaled in cells)]


def table(results: Results) -> str:
    """The same as Markdown."""
    head, *lines = rows(results)
    return markdown(head, lines)


def pairs(results: Results) -> str:
    """Pairs of scalings on the same prompts and windows."""
    found, columns = _by_cell(results), [column for column in COLUMNS if column[1] > TRAINED_LENGTH]
    lines = []
    for pair in PAIRS:
        both = [[found.get((str(each), column)) for each in pair] for column in columns]
        cells = [compared(one.metric, [one.scores], [two.scores]) for one, two in both if one and two]
        if len(cells) == len(columns):
            lines.append(["{}, against {}".format(*pair), *cells])
    return markdown(["compared", *_titles(columns)], lines)


def sinks(results: Results) -> str:
    """By head, the mean attention on the first token over the layers, and in how many it is a sink."""
    masses = results.settings["first token"]
    lines = []
    for head, slope in enumerate(stock_slopes(HEADS, BIAS_MAX)):
        lengths = itertools.chain.from_iterable(each.values() for each in masses.values())
        by_layer = [[layer[head] for layer in each] for each in lengths]
        cells = [f"{100 * np.mean(each):.0f} % ({sum(mass > SINK for mass in each)})" for each in by_layer]
        lines.append([f"{head + 1}, sees {NATS / slope:.0f} tokens", *cells])
    columns = [f"{name}, {length // TRAINED_LENGTH}x" for name in ("none", "by-parts") for length in PROMPTS]
    return markdown(["head", *columns], lines)


def caps(results: Results) -> str:
    """What a capped distance to the first token changes at the longest length."""
    found, lines = _by_cell(results), []
    for scaling, scores in results.settings["capped"].items():
        without = (found[scaling, (metric, LENGTHS[-1])] for metric in NAMES)
        lines.append(
            [scaling, *(compared(each.metric, [scores[each.metric]], [each.scores]) for each in without)]
        )
    return markdown(["scaling", *NAMES.values()], lines)


TABLES: dict[str, Callable[[Results], str]] = {
    "results": table,
    "pairs": pairs,
    "sinks": sinks,
    "caps": caps,
}


def with_tables(document: str, results: Results) -> str:
    """The document with the tables between its markers replaced."""
    return BLOCK.sub(lambda block: block["start"] + TABLES[block["name"]](results) + block["end"], document)


def as_csv(results: Results) -> str:
    """The table of results."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows(results))
    return text.getvalue()


def main() -> None:
    """Read the command line; train, measure and write."""
    parser = argparse.ArgumentParser(description="Produce the evidence about a larger model.")
    parser.add_argument("--models", type=Path, default=MODELS_FOLDER, help="models' folder [.evidence]")
    parser.add_argument("--tables", action="store_true", help="only rewrite the tables")
    arguments = parser.parse_args()
    if not arguments.tables:
        folder = arguments.models / NAME
        if not (folder / "model.safetensors").exists():
            subprocess.run(
                [sys.executable, str(EXAMPLES / "train_large.py"), "--out", str(folder)], check=True
            )
        torch.set_num_threads(1)
        measure(folder)
        more = {"first token": kept(folder / "first-token.json", first_tokens)}
        more |= {"capped": kept(folder / "capped.json", capped)}
        found = read()
        store(replace(found, settings={**found.settings, **more}))
    results = read()
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(encoding="utf-8"), results), encoding="utf-8")
    RESULTS.with_suffix(".csv").write_text(as_csv(results), encoding="utf-8")
    print(DOCUMENT)


if __name__ == "__main__":
    main()
