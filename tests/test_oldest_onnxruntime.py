"""Graphs under the oldest onnxruntime that pyproject.toml allows, and exports with it.

`make test-ort-1.22` makes its environment, of onnxruntime and NumPy. Without it, the tests are skipped.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from converter import OnnxOptions, export
from converter.onnx.attention_portable import BLOCK
from converter.onnx.options import QUANTISED, Profile
from converter.onnx.session import CUDA_SINCE
from tests import run_graphs, tiny
from tests.conftest import edit_json
from tests.onnx_graphs import POOLING, PROFILES, TRAIN_LENGTH, converted_copy, exported, with_modules

Array = NDArray[Any]
ROOT = Path(__file__).parent.parent
OLDEST = "1.22"
FOLDER = ROOT / f".venv-ort-{OLDEST}"
PYTHON = FOLDER / "bin" / "python"
DTYPES = ("fp32", "fp16", "int8", "int4", "w8a8")
LIMITS = {"fp32": 1e-5, "fp16": 1e-2, **dict.fromkeys(QUANTISED, 5e-2)}
"""dtype -> largest difference between two releases, relative to the largest value.

Quantised graphs round activations to 8 bits, and a last bit of theirs may change."""

needs_environment = pytest.mark.skipif(
    not (FOLDER / "ready").exists(), reason=f"make test-ort-{OLDEST} makes the environment"
)


def headed(folder: Path, name: str, head: Any) -> Path:
    source = (tiny.FACTORIES | tiny.ENCODERS)[name](folder / "source", 4, head=head)
    edit_json(source / "config.json", {"pad_token_id": tiny.PAD})
    return converted_copy(source, folder / "out")


KINDS = [
    *(f"{family} CausalLM" for family in ("bloom", "mpt", "baichuan")),
    *("bloom SequenceClassification", "bloom QuestionAnswering"),
    *(f"{family} MaskedLM" for family in tiny.ENCODERS),
    *("bloom pooled", "jina_bert pooled", "bloom concave"),
]


def made_as(folder: Path, kind: str) -> Path:
    """A converted tiny checkpoint of one of ``KINDS``."""
    name, head = kind.split()
    if head == "concave":
        source = tiny.FACTORIES[name](folder / "source", 4)
        return converted_copy(source, folder / "out", method="concave", train_length=TRAIN_LENGTH)
    if head != "pooled":
        return headed(folder, name, head)
    pooling = {"word_embedding_dimension": 32, "pooling_mode": "weightedmean"}
    return with_modules(headed(folder, name, "Model"), pooling if name == "bloom" else POOLING, "Normalize")


def graphs(folder: Path, name: str, made: Path, profile: Profile, dtype: str) -> list[Path]:
    """Exports a copy of a converted repository; fp16 makes a second graph, in float32."""
    copy = folder / f"{profile} {dtype}"
    shutil.copytree(made, copy)
    return sorted(exported(copy, profile, dtype=dtype, pooled=name.endswith("pooled")).rglob("*.onnx"))


def batch() -> tuple[Array, Array]:
    """Rows beyond the trained length, in three blocks of queries; one of them is padded on the left."""
    length = 2 * BLOCK + 44
    ids = tiny.token_ids(2, length)
    ids[ids == tiny.PAD] += 1
    mask = tiny.padding_mask([length, length - 12], "left", length)
    return np.where(mask == 1, ids, tiny.PAD), mask


def run_there(folder: Path, ids: Array, mask: Array, paths: Sequence[Path]) -> dict[str, Array]:
    """What the graphs compute in the other environment, named as ``run_graphs.main`` names it."""
    np.savez(folder / "inputs.npz", ids=ids, mask=mask)
    words = [folder / "inputs.npz", folder / "outputs.npz", *paths]
    # Isolated: the environment's own packages, nothing of this project.
    subprocess.run([PYTHON, "-I", run_graphs.__file__, *words], check=True)
    with np.load(folder / "outputs.npz") as stored:
        return dict(stored)


def error(found: Array, right: Array, mask: Array) -> float:
    """Largest difference, relative to the largest value; what stands at padded tokens is of no use."""
    assert found.shape == right.shape
    assert found.dtype == right.dtype
    assert np.isfinite(found).all()
    if right.ndim > 1 and right.shape[1] == mask.shape[1]:
        found, right = found[mask == 1], right[mask == 1]
    found, right = found.astype(np.float64), right.astype(np.float64)
    return float(np.abs(found - right).max() / np.abs(right).max())


def test_the_environment_has_the_oldest_version() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert dict(re.findall(r'"(onnxruntime(?:-gpu)?)>=([\d.]+)"', text)) == {
        "onnxruntime": OLDEST,
        "onnxruntime-gpu": CUDA_SINCE,
    }
    pins = (ROOT / f"constraints-ort-{OLDEST}.txt").read_text(encoding="utf-8").split()
    assert f"onnxruntime=={OLDEST}.0" in pins
    # Exports with it take the other packages from the main environment.
    [numpy] = [pin for pin in pins if pin.startswith("numpy==")]
    assert numpy in (ROOT / "constraints.txt").read_text(encoding="utf-8").split()


@pytest.mark.slow
@needs_environment
@pytest.mark.parametrize("name", KINDS)
def test_graphs(tmp_path: Path, name: str) -> None:
    """Each loads and computes what it does under the newest onnxruntime."""
    made = made_as(tmp_path, name)
    paths = [
        path
        for profile, dtype in itertools.product(PROFILES, DTYPES)
        for path in graphs(tmp_path, name, made, profile, dtype)
    ]
    ids, mask = batch()
    found = run_there(tmp_path, ids, mask, paths)
    assert str(found.pop("version")).startswith(f"{OLDEST}.")
    right = {
        f"{number} {output}": value
        for number, path in enumerate(paths)
        for output, value in run_graphs.outputs(str(path), ids, mask).items()
    }
    assert found.keys() == right.keys()
    for key, value in right.items():
        number, output = key.split(" ", 1)
        path = paths[int(number)].relative_to(tmp_path)
        dtype = path.parts[0].split()[1]
        limit = LIMITS["fp32" if path.name == "model_fp32.onnx" else dtype]
        real = mask[:, : -run_graphs.STEP] if output.startswith("first ") else mask
        assert error(found[key], value, real) <= limit, f"{output} of {path}"


EXPORT = """
import sys
from pathlib import Path
import onnxruntime
from converter import OnnxOptions, export
print(onnxruntime.__version__)
for folder in sys.argv[1:]:
    profile, dtype = Path(folder).name.split()
    export(folder, OnnxOptions(profile=profile, dtype=dtype))
"""


@pytest.mark.slow
@needs_environment
def test_exports_with_it(tmp_path: Path) -> None:
    """They are validated, and the graphs and the quantised weights are the same to the byte."""
    made = headed(tmp_path, "bloom", "CausalLM")
    names = [f"{profile} {dtype}" for profile, dtype in itertools.product(PROFILES, DTYPES)]
    for folder, name in itertools.product(("here", "there"), names):
        shutil.copytree(made, tmp_path / folder / name)
    # Of the other environment, only this package comes before that of the environment of the tests.
    [package] = FOLDER.glob("lib/python*/site-packages/onnxruntime")
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/onnxruntime").symlink_to(package)
    words = [sys.executable, "-c", EXPORT, *(tmp_path / "there" / name for name in names)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "packages"), str(ROOT)])}
    done = subprocess.run(words, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.startswith(f"{OLDEST}.")
    for name in names:
        here, there = tmp_path / "here" / name, tmp_path / "there" / name
        profile, dtype = name.split()
        export(here, OnnxOptions(profile, dtype, validate=False))
        written = sorted(path.relative_to(here) for path in here.rglob("*.onnx*"))
        assert written
        for path in written:
            assert (there / path).read_bytes() == (here / path).read_bytes(), f"{path} of {name}"
