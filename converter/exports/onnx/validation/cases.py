"""The cases that a graph and the reference both run, step by step.

A case is a sequence of steps over one cache. Both sides are engines with
``step(ids, mask, past) -> (logits, past)``, so prefill, chunks and decoding are one loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from converter.exports.onnx.session import Outputs
from converter.result.converted import ConvertedRepository
from converter.scaling.scaling import Dynamic

Array = NDArray[Any]

SHORT, STEPS, GREEDY = 48, 8, 32
"""Tokens of a short prompt, decoding steps, greedy tokens."""
KEPT = 256
"""Positions of a long prompt whose logits are compared: spread over it, always including the last."""
LONGEST = 16384
"""Tokens; a longer trained length is not run, because the time of attention grows with its square."""
LOGITS, TABLE = 25_000_000, 100_000_000
"""Largest numbers of logits of a prompt and of elements of an embedding; the vocabulary is cut to fit."""
OPERATIONS, ELEMENTS = 1e12, 350_000_000
"""Largest numbers of floating-point operations (about 15 seconds on two cores) and of the layers' weights;
the number of layers is cut to fit."""
UNKNOWN_LENGTH, JOINT = 512, 256
"""Tokens: used if the trained length is not known; length of a prompt that is continued."""


class Engine(Protocol):
    """A model that runs tokens over a cache."""

    def step(self, ids: Array, mask: Array, past: Any = None) -> tuple[Outputs, Any]:
        """New tokens [B, S] under a mask [B, T]; returns what the model computes, and the cache."""
        ...


@dataclass(frozen=True)
class Extent:
    """How much of a model is run, and on how many tokens."""

    layers: int
    total_layers: int
    vocabulary: int
    full_vocabulary: int
    at: int
    """Trained length in tokens, or the length that replaces it."""
    beyond: int
    """A length beyond it, in tokens."""
    joint: int
    """Where chunks and greedy decoding continue a prompt: at the trained length, where a dynamic scaling
    starts to act, or earlier."""
    note: str
    """What was cut and why; empty if nothing was cut."""

    @property
    def whole(self) -> bool:
        return self.layers == self.total_layers and self.vocabulary == self.full_vocabulary


def extent(repository: ConvertedRepository) -> Extent:
    """Chooses how much can be run within the bounds above."""
    config, geometry = repository.config, repository.geometry
    trained = repository.train_length
    notes = [] if trained else [f"trained length not known, {UNKNOWN_LENGTH} taken for it"]
    at = trained or UNKNOWN_LENGTH
    if at > LONGEST:
        notes.append(f"trained length {at} not reached, {LONGEST} run instead")
        at = LONGEST
    beyond = max(at + at // 4, min(4 * at, 2048))

    hidden = geometry.num_heads * geometry.head_dim
    least = config["pad_token_id"] + 1 if ends_by_id(repository) else 64
    vocabulary = full = int(config["vocab_size"])
    most = LOGITS // beyond if repository.has_logits else full
    if full > most or hidden * full > TABLE:
        vocabulary = max(min(full, most, TABLE // hidden), least)
        notes.append(f"first {vocabulary} of {full} tokens of the vocabulary")

    prefix = f"{repository.family.layers}.0."
    layer = sum(
        (tensor.end - tensor.start) // (2 if tensor.dtype in ("F16", "BF16") else 4)
        for name, tensor in repository.checkpoint.tensors.items()
        if repository.family.below(name).startswith(prefix)
    )
    joint = at if isinstance(repository.scaling, Dynamic) else min(at, JOINT)
    lengths = (at, beyond, joint, joint)
    operations = sum(2 * layer * length + 4 * hidden * length**2 for length in lengths)
    fitting = max(2, int(min(OPERATIONS // operations, ELEMENTS // max(layer, 1))))
    layers = min(geometry.num_layers, fitting)
    if layers < geometry.num_layers:
        notes.append(f"first {layers} of {geometry.num_layers} layers")
    return Extent(layers, geometry.num_layers, vocabulary, full, at, beyond, joint, ", ".join(notes))


def ends_by_id(repository: ConvertedRepository) -> bool:
    """Whether it is a classifier that finds the last token of a row by the id of the padding."""
    return repository.decoder and repository.head == "ForSequenceClassification"


class Answer(NamedTuple):
    """The logits of one step that are compared with the other side's."""

    last: Array
    """[B, vocabulary]: the logits of each row's last real token."""
    spread: Array | None
    """[at most KEPT, vocabulary]: logits of real tokens all over the step; None if unknown."""
    sentences: Array | None
    """[B, any]: one vector of each text; None for a model that does not pool."""


@dataclass(frozen=True)
class Case:
    """Steps over one cache, and the logits that are compared."""

    name: str
    steps: Sequence[Array]
    """int64 [B, S]: the tokens of each step."""
    mask: Array
    """int64 [B, all steps' tokens]."""

    def run(self, engine: Engine) -> list[Answer]:
        """The logits of each step that are compared."""
        results, past, seen = [], None, 0
        for ids in self.steps:
            mask = self.mask[:, : seen + ids.shape[1]]
            (logits, sentences), past = engine.step(ids, mask, past)
            new = mask[:, seen:].astype(bool)
            last, spread = logits[:, 0], None
            if logits.shape[1] == ids.shape[1]:
                last = logits[np.arange(len(ids)), ids.shape[1] - 1 - new[:, ::-1].argmax(axis=1)]
                rows, columns = new.nonzero()
                kept = np.unique(np.linspace(0, len(rows) - 1, KEPT).astype(int))
                spread = logits[rows[kept], columns[kept]]
            results.append(Answer(last, spread, sentences))
            seen += ids.shape[1]
        return results


def choose_cases(
    run: Extent, *, cached: bool, one_row_chunks: bool, padding: int | None = None
) -> Iterator[Case]:
    """The cases that every graph runs; ``padding`` is the id of padded tokens, if it matters.

    ``one_row_chunks``: chunked prefill with one row only; GroupQueryAttention takes no more.
    """
    generator = np.random.default_rng(0)

    def tokens(rows: int, length: int) -> Array:
        return generator.integers(0, run.vocabulary, size=(rows, length))

    def whole(name: str, length: int) -> Case:
        return Case(name, [tokens(1, length)], np.ones((1, length), dtype=np.int64))

    inside = max(4, min(SHORT, run.at // 2))
    yield whole(f"prompt of {inside}", inside)
    yield whole(f"prompt of {run.at}", run.at)
    yield whole(f"prompt of {run.beyond}", run.beyond)
    for side, mask in (("left", padded(3, 2 * SHORT)), ("right", padded(3, 2 * SHORT)[:, ::-1].copy())):
        ids = tokens(3, 2 * SHORT)
        ids = ids if padding is None else np.where(mask == 1, ids, padding)
        yield Case(f"{side} padding", [ids], mask)
    if not cached:
        return
    decoding = [tokens(2, SHORT), *(tokens(2, 1) for _ in range(STEPS))]
    yield Case("decoding", decoding, padded(2, SHORT + STEPS))
    rows = 1 if one_row_chunks else 2
    chunks = [tokens(rows, length) for length in (max(run.joint - 16, 8), 24, 1, 16)]
    yield Case("chunked prefill", chunks, np.ones((rows, sum(c.shape[1] for c in chunks)), dtype=np.int64))


def padded(rows: int, length: int) -> Array:
    """A mask of rows that end together; each starts later than the row before."""
    starts = np.arange(rows)[:, None] * (length // (2 * rows))
    return (np.arange(length)[None] >= starts).astype(np.int64)


def greedy(engine: Engine, run: Extent) -> tuple[Array, Array]:
    """Continues a prompt that ends just before ``joint``, always with the most likely token.

    Returns the tokens, [GREEDY], and the logits they were chosen from, [GREEDY, vocabulary].
    """
    length = max(run.joint - GREEDY // 2, 4)
    ids = np.random.default_rng(1).integers(0, run.vocabulary, size=(1, length))
    chosen, scores, past = [], [], None
    for count in range(length, length + GREEDY):
        (logits, _), past = engine.step(ids, np.ones((1, count), dtype=np.int64), past)
        scores.append(logits[0, -1])
        chosen.append(int(scores[-1].argmax()))
        ids = np.array([[chosen[-1]]])
    return np.array(chosen), np.stack(scores)
