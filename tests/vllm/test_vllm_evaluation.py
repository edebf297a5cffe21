"""``eval --server`` against vLLM: four requests at once, the local table, a server that does not scale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from converter import convert, evaluate, make_task
from converter.errors import VerificationError
from tests.vllm.engines import TINY_BLOOM, widened
from tests.vllm.test_vllm_server import served

LENGTH = 256
OPTIONS = ("--dtype", "float32", "--max-model-len", "1600", "--enforce-eager")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("evaluation")
    convert(widened(work / "source"), work / "out", verify=False, dynamic="position", train_length=LENGTH)
    return work / "out"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = TINY_BLOOM.with_suffix(".jsonl").read_text().splitlines()
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text(" ".join(json.loads(row)["prompt"] for row in rows[:12]))
    return path


def test_its_table_is_the_local_one(folder: Path, text: Path, tmp_path: Path) -> None:
    asked = {
        "text": text,
        "lengths": [256, 1024],
        "items": 4,
        "tasks": [make_task("prompts", short(tmp_path))],
    }
    here = evaluate(folder, **asked)
    with served(folder, tmp_path / "log", *OPTIONS) as client:
        there = evaluate(folder, server=str(client.base_url), concurrency=4, **asked)
    for ours, theirs in zip(there.measurements, here.measurements, strict=True):
        assert (ours.task, ours.length) == (theirs.task, theirs.length)
        assert ours.scores == pytest.approx(theirs.scores, abs=1e-3)
    print(there.report(), here.report(), sep="\n\n")
    [about] = there.models.values()
    assert about["server"]["scales"].startswith("yes")


def test_a_server_that_does_not_scale(folder: Path, text: Path, tmp_path: Path) -> None:
    """Another model's class, without the plugin: vLLM serves it unscaled, and says nothing."""
    unscaled = ("--trust-remote-code", "--hf-overrides", '{"architectures": ["BloomForCausalLM"]}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "")
        patch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
        with (
            served(folder, tmp_path / "log", *OPTIONS, *unscaled) as client,
            pytest.raises(VerificationError, match="does not scale"),
        ):
            evaluate(folder, text=text, lengths=[1024], items=1, server=str(client.base_url))


def short(folder: Path) -> Path:
    """Four prompts of 256 tokens."""
    rows = [json.loads(line) for line in TINY_BLOOM.with_suffix(".jsonl").read_text().splitlines()]
    path = folder / "prompts.jsonl"
    path.write_text("\n".join([json.dumps(row) for row in rows if row["length"] == LENGTH][:4]))
    return path
