"""The right results: the cases that a graph and the torch model both run, and what torch computes in them.

A case is a sequence of steps over one cache. Both sides are engines with
``step(ids, mask, past) -> (outputs, past)``, so prefill, chunks and decoding are one loop. The torch model
has the repository's own code and weights, whole or its first layers.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import normalize
from transformers.pytorch_utils import Conv1D

from converter.model.alibi import AlibiModel
from converter.onnx.quantise import QuantisedGraph
from converter.onnx.report import GraphCheck
from converter.onnx.rounding import BAND
from converter.onnx.session import Outputs, Session, stacked
from converter.scaling.scaling import first_layers
from converter.source.sentence_transformers import Pooling
from converter.texts import pooled
from converter.verification import unlogged
from converter.verification.loaded import failing, load_result, own_modules
from converter.verification.patched import Patched, build

Array = NDArray[Any]

SHORT, STEPS = 48, 8
"""Tokens of a short prompt, decoding steps."""
KEPT = 256
"""Positions of a long prompt whose logits are compared: spread over it, always including the last."""
LONGEST_ROW = 16384
"""Tokens; a longer trained length is not run, because the time of attention grows with its square."""
LOGITS, TABLE = 25_000_000, 100_000_000
"""Largest numbers of logits of a prompt and of elements of an embedding; the vocabulary is cut to fit."""
OPERATIONS, ELEMENTS = 1e12, 350_000_000
"""Largest numbers of floating-point operations (about 15 seconds on two cores) and of the layers' weights;
the number of layers is cut to fit."""
UNKNOWN_LENGTH, JOINT = 512, 256
"""Tokens: used if the trained length is not known; length of a prompt that is continued."""


@dataclass(frozen=True)
class Extent:
    """How much of a model is run, and on how many tokens."""

    layers: int
    vocabulary: int
    whole: bool
    """Whether these are all layers and all tokens of the vocabulary."""
    at: int
    """Trained length in tokens, or the length that replaces it."""
    beyond: int
    """A length beyond it, in tokens."""
    joint: int
    """Where chunks continue a prompt: at the trained length, where a dynamic scaling starts to act, or
    earlier."""
    note: str
    """What was cut and why; empty if nothing was cut."""


def extent(repository: AlibiModel) -> Extent:
    """Chooses how much can be run within the bounds above."""
    config, geometry = repository.config, repository.geometry
    trained = repository.trained.tokens
    notes = [] if trained else [f"trained length not known, {UNKNOWN_LENGTH} taken for it"]
    at = trained or UNKNOWN_LENGTH
    if at > LONGEST_ROW:
        notes.append(f"trained length {at} not reached, {LONGEST_ROW} run instead")
        at = LONGEST_ROW
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
    joint = at if repository.scaling.dynamic else min(at, JOINT)
    lengths = (at, beyond, joint)
    operations = sum(2 * layer * length + 4 * hidden * length**2 for length in lengths)
    fitting = max(2, int(min(OPERATIONS // operations, ELEMENTS // max(layer, 1))))
    layers = min(geometry.num_layers, fitting)
    if layers < geometry.num_layers:
        notes.append(f"first {layers} of {geometry.num_layers} layers")
    whole = (layers, vocabulary) == (geometry.num_layers, full)
    return Extent(layers, vocabulary, whole, at, beyond, joint, ", ".join(notes))


def ends_by_id(repository: AlibiModel) -> bool:
    """Whether it is a classifier that finds the last token of a row by the id of the padding."""
    return repository.decoder and repository.head == "ForSequenceClassification"


@dataclass(frozen=True)
class Case:
    """Steps over one cache."""

    name: str
    steps: Sequence[Array]
    """int64 [B, S]: the tokens of each step."""
    mask: Array
    """int64 [B, all steps' tokens]."""

    def run(self, engine: Session | Reference) -> list[Outputs]:
        """What is compared of each step, values as [any, vocabulary].

        First those of each row's last real token. An engine that has the others adds at most ``KEPT``, all
        over the step.
        """
        results, past, seen = [], None, 0
        for ids in self.steps:
            mask = self.mask[:, : seen + ids.shape[1]]
            (values, sentences), past = engine.step(ids, mask, past)
            kept = values[:, 0]
            if values.shape[1] == ids.shape[1]:
                new = mask[:, seen:].astype(bool)
                last = values[np.arange(len(ids)), ids.shape[1] - 1 - new[:, ::-1].argmax(axis=1)]
                rows, columns = new.nonzero()
                spread = np.unique(np.linspace(0, len(rows) - 1, KEPT).astype(int))
                kept = np.concatenate([last, values[rows[spread], columns[spread]]])
            results.append(Outputs(kept, sentences))
            seen += ids.shape[1]
        return results


def choose_cases(run: Extent, *, cached: bool, padding: int | None = None) -> Iterator[Case]:
    """The cases that every graph runs; ``padding`` is the id of padded tokens, if it matters."""
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
    # GroupQueryAttention takes chunks of one row only.
    chunks = [tokens(1, length) for length in (max(run.joint - 16, 8), 24, 1, 16)]
    yield Case("chunked prefill", chunks, np.ones((1, sum(c.shape[1] for c in chunks)), dtype=np.int64))


def padded(rows: int, length: int) -> Array:
    """A mask of rows that end together; each starts later than the row before."""
    starts = np.arange(rows)[:, None] * (length // (2 * rows))
    return (np.arange(length)[None] >= starts).astype(np.int64)


# The torch model

TINY = float(np.finfo(np.float32).tiny)
"""What differences are compared with if the right results are all 0."""
VOCABULARY_TENSORS = (
    "lm_head.weight",
    "lm_head.bias",
    "cls.predictions.bias",
    "cls.predictions.decoder.weight",
    "cls.predictions.decoder.bias",
)
"""Tensors of heads that have a row for each token of the vocabulary."""
RESULTS = ("last_hidden_state", "logits", "start_logits", "end_logits")
"""Outputs that a model may have, in the order of a graph's outputs."""
CACHES = ("cache", "past_key_values")
"""The cache's name; transformers 5.24 shortened it."""

LARGEST_CHANGE, NOISE = 0.5, 1e-6
"""Largest change of a weight by calibration, and of its values by rounding of float32.

Rounding to the nearest changes normal weights by 0.08 of their root mean square. Calibration moves them
further, by up to 0.15 in the small models tried. Weights in the wrong place differ by 1.4."""


@dataclass
class Reference:
    """The torch model in float32, which computes the right results."""

    model: Any
    stored: Mapping[str, str]
    """Parameter -> its stored name."""
    has_cache: bool
    pooling: Pooling | None = None
    """How a backbone's hidden states also become one vector of each text."""

    @classmethod
    @contextlib.contextmanager
    def load(cls, repository: AlibiModel, scope: Extent, pooling: Pooling | None) -> Iterator[Reference]:
        """Loads the layers and the rows of the embeddings that are run: all of them as users load them."""
        layers, vocabulary = scope.layers, scope.vocabulary
        with contextlib.ExitStack() as stack:
            patched = stack.enter_context(Patched.load(repository))
            if scope.whole:
                place = stack.enter_context(tempfile.TemporaryDirectory(prefix="ntk-convert-"))
                stack.enter_context(own_modules(Path(place)))
                with unlogged(), failing("the model does not load", "", repository.folder):
                    model, _ = load_result(patched, repository.folder, torch.float32)
                names = {name: stored for name in model.state_dict() if (stored := patched.stored_name(name))}
                yield cls(model, names, repository.has_cache, pooling)
                return
            scaling = first_layers(repository.scaling, layers)
            config = patched.build_config(alibi_scaling=scaling.to_json())
            config.num_hidden_layers = layers
            config.vocab_size = vocabulary
            if repository.decoder:
                config.use_cache = repository.has_cache
            padding = config.pad_token_id
            if padding is not None and padding >= vocabulary:
                config.pad_token_id = None  # it is outside the shortened vocabulary
            model = build(patched.architecture, config, device="meta")
            family = repository.family
            tables = {family.embeddings, *VOCABULARY_TENSORS}

            def read(stored: str) -> Any:
                if family.below(stored) not in tables:
                    return patched.tensor(stored)
                with patched.open(stored) as file:
                    return file.get_slice(stored)[:vocabulary]

            names = patched.fill(model, read=read)
            table, head = model.get_input_embeddings(), model.get_output_embeddings()
            # transformers 5 ties a stored head only if it has the same values, whatever the config says.
            if head is None or head.weight.is_meta or torch.equal(head.weight, table.weight):
                model.tie_weights()
            yield cls(model, names, repository.has_cache, pooling)

    def quantise(self, graph: QuantisedGraph) -> GraphCheck:
        """Gives weights the values that a graph stores, if they are the checkpoint's, rounded."""
        by_column = {id(module.weight) for module in self.model.modules() if isinstance(module, Conv1D)}
        largest = 0.0
        for parameter_name, parameter in self.model.named_parameters():
            name = self.stored.get(parameter_name, "")
            if name not in graph.bits:
                continue
            weight = (parameter.data.T if id(parameter) in by_column else parameter.data).numpy()
            calibrated = graph.calibrated and graph.bits[name] == 4
            found, change, size = np.empty(weight.shape, np.float32), 0.0, 0.0
            height = max(1, BAND // weight.shape[1])
            for start in range(0, len(weight), height):  # as a whole, it would take several times its memory
                band = slice(start, min(start + height, len(weight)))
                found[band] = graph.values(name, band, weight.shape[1])
                right = weight[band] if calibrated else graph.rounded(name, weight[band])
                change += squares(found[band] - right)
                size += squares(right)
            change = math.sqrt(change) / max(math.sqrt(size), TINY)
            if not change <= (LARGEST_CHANGE if calibrated else NOISE):
                return GraphCheck("stored weights", False, f"{name} is not the checkpoint's, rounded")
            largest = max(largest, change if calibrated else 0.0)
            values = torch.from_numpy(found)
            parameter.data = values.T if id(parameter) in by_column else values
        detail = "the checkpoint's, rounded to the nearest"
        if graph.calibrated:
            detail = f"calibrated; within {largest:.2f} of the root mean square of the checkpoint's"
        return GraphCheck("stored weights", True, detail)

    def step(self, ids: Array, mask: Array, past: Any = None) -> tuple[Outputs, Any]:
        """See ``Session.step``."""
        cache = {"past_key_values": past, "use_cache": True} if self.has_cache else {}
        with torch.no_grad():
            output = self.model(
                torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), return_dict=True, **cache
            )
        values = stacked([output[name].numpy() for name in RESULTS if name in output], ids.shape[1])
        sentences = None
        if self.pooling:
            vectors = pooled(torch.from_numpy(values).double(), torch.from_numpy(mask), self.pooling)
            sentences = (normalize(vectors) if self.pooling.normalised else vectors).float().numpy()
        return Outputs(values, sentences), next((output[name] for name in CACHES if name in [*output]), None)


def squares(values: Array) -> float:
    return float(np.square(values, dtype=np.float64).sum())


class Expected(NamedTuple):
    """What is run, and the results of the torch model."""

    scope: Extent
    cases: Sequence[Case]
    answers: Mapping[str, Sequence[Outputs]]
    """Name of a case -> the results of its steps."""
    loss: Sequence[GraphCheck]
    """What quantised weights change, if they are quantised."""

    @property
    def results(self) -> list[Array]:
        """The results of all cases, without vectors of texts."""
        return [step.values for steps in self.answers.values() for step in steps]


def run_torch(repository: AlibiModel, pooling: Pooling | None, quantised: QuantisedGraph | None) -> Expected:
    """Runs the torch model and frees it; with a quantised graph, on the values that it stores."""
    scope = extent(repository)
    padding = repository.config["pad_token_id"] if ends_by_id(repository) else None
    cases = list(choose_cases(scope, cached=repository.has_cache, padding=padding))
    with Reference.load(repository, scope, pooling) as reference:
        loss = []
        if quantised is not None:
            several = next(case for case in cases if len(case.mask) > 1)
            before = several.run(reference)
            loss = [reference.quantise(quantised), loss_of_weights(several.run(reference), before)]
        found = {case.name: case.run(reference) for case in cases}
        return Expected(scope, cases, found, loss)


def loss_of_weights(results: Sequence[Outputs], before: Sequence[Outputs]) -> GraphCheck:
    """What quantising the weights changes in a model's results.

    Only a loss of all information is a failure: zeros would differ from the results by 1.
    """
    errors = [found.values - right.values for found, right in zip(results, before, strict=True)]
    difference = math.sqrt(mean_square(errors) / max(mean_square([step.values for step in before]), TINY))
    detail = f"change the results by {difference:.1e} of their root mean square"
    if not difference < 1:
        detail += ": nothing is left of them; choose another dtype"
    return GraphCheck("quantised weights", difference < 1, detail, difference)


def mean_square(arrays: Sequence[Array]) -> float:
    """The mean of the arrays' mean squares."""
    return float(np.mean([np.square(array).mean() for array in arrays]))
