"""What the tests of ONNX graphs share.

Building graphs, running them without this project's own session, and the float64 reference over steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from converter import OnnxOptions, convert, export
from converter.onnx.build import build_graph
from converter.onnx.describe import Description
from converter.onnx.files import graphs_in
from converter.onnx.graph import Graph
from converter.onnx.options import Profile
from converter.onnx.report import ValidationReport
from converter.result.converted import open_converted, read_converted
from converter.validation import run_graphs
from tests import tiny
from tests.patched import config_of, load, scaled
from tests.reference import FAMILIES as REFERENCES
from tests.reference import alibi
from tests.reference.alibi import query_factors

Array = NDArray[Any]
Past = dict[str, Array]
Make = Callable[..., Path]
Plant = Callable[..., None]

PROFILES: tuple[Profile, ...] = ("ort", "portable")
TRAIN_LENGTH = 32


def converted_copy(source: Path, out: Path, **scaling: Any) -> Path:
    """A converted repository whose trained length is short, so that validation takes no time."""
    convert(source, out, verify=False, **(scaling or {"scale": 2.0, "train_length": TRAIN_LENGTH}))
    return out


def build(
    folder: Path,
    profile: Profile = "ort",
    dtype: str = "fp32",
    *,
    last_logits: bool = False,
    name: str = "graph.onnx",
) -> Path:
    """Writes a graph into its repository without all that an export does around it."""
    made = Description(profile, dtype, last_logits, False, config_of(folder).get("alibi_scaling"))
    build_graph(open_converted(folder), made).save(folder / name, made.metadata)
    return folder / name


def graphs_report(folder: Path, provider: str | None = None) -> ValidationReport:
    """What ``validate`` says of a repository's graphs."""
    return run_graphs(read_converted(folder), graphs_in(folder), provider)


def exported(folder: Path, profile: Profile = "ort", **options: Any) -> Path:
    """Exports without validation; the repository."""
    export(folder, OnnxOptions(profile, validate=False, **options))
    return folder


class Engine:
    """A graph on the CPU, in NumPy arrays from end to end."""

    def __init__(self, path: Path):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        self.caches = {
            value.name: value for value in self.session.get_inputs() if value.name.startswith("past_key")
        }

    def empty(self, rows: int, length: int = 0) -> Past:
        """Caches of zeros."""
        kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
        return {
            name: np.zeros((rows, value.shape[1], length, value.shape[3]), kinds[value.type])
            for name, value in self.caches.items()
        }

    def step(self, ids: Array, mask: Array, past: Past | None = None) -> tuple[Array, Past]:
        """Logits and the new caches; ids [B, S], mask [B, T]."""
        past = past or self.empty(len(ids))
        logits, *presents = self.session.run(None, {"input_ids": ids, "attention_mask": mask, **past})
        return logits, dict(zip(past, presents, strict=True))

    def steps(self, ids: Array, mask: Array, ends: Sequence[int]) -> Array:
        """Logits of all tokens, which are given in pieces that end at ``ends``."""
        past, pieces = None, []
        for start, end in pairwise((0, *ends)):
            logits, past = self.step(ids[:, start:end], mask[:, :end], past)
            pieces.append(logits)
        return np.concatenate(pieces, axis=1)


def expected(
    folder: Path, family: str, ids: Array, mask: Array | None = None, ends: Sequence[int] = ()
) -> Array:
    """The reference's logits.

    Args:
        ends: where the steps end in which the tokens are given. A length-dynamic scaling knows no more
            than the tokens that are there at the step, whose keys then stay in the cache as they are.
    """

    def so_far(scaling: Any, row: Any) -> Any:
        return np.concatenate(
            [query_factors(scaling, row[:end])[start:] for start, end in pairwise((0, *ends))]
        )

    _, tensors = tiny.read(folder)
    with mock.patch.object(alibi, "query_factors", so_far if ends else query_factors):
        return REFERENCES[family].logits(config_of(folder), tensors, ids, mask)


def assert_close(actual: Array, right: Array, mask: Array | None = None, relative: float = 1e-5) -> None:
    """Equal within ``relative`` of the largest logit at every real token."""
    real = np.ones(right.shape[:2], dtype=bool) if mask is None else mask.astype(bool)
    error = np.abs(actual.astype(np.float64) - right)[real].max() / np.abs(right[real]).max()
    assert error <= relative, f"largest error {error:.2e} of the largest logit"


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """All nodes, those in the bodies of loops too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from nodes_of(attribute.g)


def edit(path: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    """Changes a graph's file, weights untouched."""
    model = onnx.load(path, load_external_data=False)
    before = model.SerializeToString(deterministic=True)
    change(model)
    assert model.SerializeToString(deterministic=True) != before
    onnx.save(model, path)


POOLING = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}


def with_modules(folder: Path, pooling: dict[str, Any] = POOLING, *more: str) -> Path:
    """Adds the files of sentence-transformers; ``more`` are kinds of modules after the pooling."""
    modules = []
    for number, kind in enumerate(["Transformer", "Pooling", *more]):
        path = f"{number}_{kind}" if number else ""
        modules.append(
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        )
        (folder / path).mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    return folder


@pytest.fixture
def repository(pristine: Callable[..., Path], tmp_path: Path) -> Make:
    """``repository(family, **options)``: a converted tiny checkpoint in ``tmp_path / "model"``."""

    def convert_one(family: str = "bloom", **options: Any) -> Path:
        # Dtypes are no keys of what is pristine.
        written = "dtype" in options
        make = (tiny.FACTORIES | tiny.ENCODERS)[family]
        source = make(tmp_path / "source", **options) if written else None
        return converted_copy(source or pristine(family, **options), tmp_path / "model")

    return convert_one


@pytest.fixture(scope="session")
def with_graph(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """``with_graph(family, scaling, stored, **options)``: a checkpoint with a graph, which tests only read.

    It is converted as ``converted`` does it; ``stored`` is the dtype of the weights.
    """
    made: dict[str, Path] = {}

    def get(
        family: str = "bloom", scaling: str = "ntk", stored: torch.dtype = torch.float32, **options: Any
    ) -> Path:
        key = repr((family, scaling, stored, options))
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            source = tiny.FACTORIES[family](folder / "source", 4, dtype=stored, use_cache=True)
            scaled(source, folder / "out", scaling, 4)
            made[key] = exported(folder / "out", **options)
        return made[key]

    return get


NEW = 16
"""Tokens that the tests of examples generate."""
LENGTHS = (60, 43, 12)


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    ids = tiny.token_ids(len(lengths), max(lengths))
    return [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]


def generated(folder: Path, prompt: list[int]) -> list[int]:
    """What transformers generates for one prompt, up to the end token."""
    ids = torch.tensor([prompt])
    made = load(folder).float().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW)
    return made[0, len(prompt) :].tolist()


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """``plant(mutate)``: what builds graphs has a mistake; with ``dtype``, graphs that compute in it."""

    def arm(mutate: Callable[[onnx.ModelProto], None], dtype: ir.DataType | None = None) -> None:
        right = Graph.model

        def wrong(self: Graph, *metadata: Any) -> ir.Model:
            model = right(self, *metadata)
            if dtype not in (None, self.dtype):
                return model
            proto = ir.to_proto(model)
            mutate(proto)
            return ir.from_proto(proto)

        monkeypatch.setattr(Graph, "model", wrong)

    return arm
