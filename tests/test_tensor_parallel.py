"""Two processes give what one gives: tensor parallelism in transformers, and training with FSDP2."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from converter import convert
from tests import forks, tiny
from tests.patched import FAMILIES, VARIANTS, scaled

# JAIS stores its weights as GPT-2 does, and transformers has no way to divide those.
DIVIDED = [family for family in FAMILIES if family != "jais"]
# With version 4, transformers does not train the biases that are added after the processes' sum.
TRAINED = DIVIDED if transformers.__version__ >= "5" else [f for f in DIVIDED if f not in ("bloom", "falcon")]
Job = tuple[str, Path]


def build(
    folder: Path, name: str, family: str, heads: int = 4, scaling: str = "ntk-position", **changes: Any
) -> Path:
    """A converted checkpoint. Its folder has a name of its own: under it, transformers caches the code."""
    source = tiny.FACTORIES[family](folder / f"{name} source", heads, **{"use_cache": True, **changes})
    scaled(source, folder / name, scaling, heads)
    return folder / name


def plant(model: Path, file: str, before: str, after: str) -> None:
    """Puts a mistake into the code of a converted model."""
    text = (model / file).read_text(encoding="utf-8")
    assert text.count(before) == 1
    (model / file).write_text(text.replace(before, after), encoding="utf-8")


def launch(jobs: dict[str, Job], folder: Path, torchrun: bool = False) -> dict[str, list[dict[str, Any]]]:
    """What each job gave in each of the two processes; see tests/parallel.py."""
    file = folder / "jobs.json"
    pairs = [(function, str(model)) for function, model in jobs.values()]
    file.write_text(json.dumps(pairs), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    python, module = [sys.executable, "-m"], ["tests.parallel", str(file)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 1200, "check": False}
    if torchrun:
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
        result = subprocess.run([*python, *launcher, *module], env=environment, **options)
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        result = forks.run([*python, *module], env=environment, **options)
    assert result.returncode == 0, result.stderr
    return dict(zip(jobs, json.loads(file.read_text(encoding="utf-8")), strict=True))


def wrong(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What is wrong with the results of models that must be divided, and give what one process gives."""
    return [
        f"{name}: {result}"
        for name, both in results.items()
        for result in both
        if "raised" in result
        or result["logits"] > 1e-5
        or not result["tokens"]
        or result["weights"] > 0.7
        or result["heads"][0] != max(1, result["heads"][1] // 2)
    ]


def undivided(both: list[dict[str, Any]], name: str) -> bool:
    """Without a plan, transformers 5 raises an error, and in 4.57 every process computes everything."""
    return all(
        "has no `tp_plan`" in result.get("raised", "") or result.get(name, 1) < 1e-5 for result in both
    )


def test_two_processes_give_the_logits_of_one(tmp_path: Path) -> None:
    right = {name: ("tensor_parallel", build(tmp_path, name, name)) for name in ("bloom", "replit")}
    for scaling in ("fitted-position", "by-parts-position-tempered", "concave"):
        right[scaling] = ("tensor_parallel", build(tmp_path, scaling, "bloom", scaling=scaling))
    others = {
        "rows": ("tensor_parallel", build(tmp_path, "rows", "replit")),
        "channels": ("tensor_parallel", build(tmp_path, "channels", "bloom")),
        "odd": ("tensor_parallel", build(tmp_path, "odd", "bloom", heads=3)),
        "jais": ("tensor_parallel", build(tmp_path, "jais", "jais")),
    }
    plant(tmp_path / "rows", "configuration_ntk_mpt.py", '"colwise_rep"', '"colwise"')
    plant(
        tmp_path / "channels",
        "ntk_attention.py",
        "local_heads(channels, plan.processes)",
        "channels[:, : channels.shape[1] // plan.processes.size()]",
    )
    results = launch({**right, **others}, tmp_path)
    assert wrong({name: results[name] for name in right}) == []

    # Division by rows, where the rows are not in the order of the heads, does not go unnoticed.
    assert all("raised" in result for result in results["rows"])
    # The first process's slopes in both of them do not give the same logits.
    assert max(result["logits"] for result in results["channels"]) > 1e-2
    odd = "the 3 attention heads (3 key heads) cannot be divided evenly among 2 processes"
    assert all(result["raised"].startswith(odd) for result in results["odd"]), results["odd"]
    assert undivided(results["jais"], "logits"), results["jais"]


@pytest.mark.slow
def test_every_family_is_divided_right(tmp_path: Path) -> None:
    """Every scaling, another number of heads, and every option of the configs; started by torchrun."""
    models = {
        f"{family}-{scaling}-{heads}": (family, heads, scaling, {})
        for family in DIVIDED
        for scaling, heads in (("ntk", 4), ("ntk-length", 4), ("ntk-position", 12), ("concave", 4))
    }
    models |= {
        name: (family, 4, "ntk-position", changes)
        for name, (family, changes) in VARIANTS.items()
        if family in DIVIDED
    }
    jobs = {
        name: ("tensor_parallel", build(tmp_path, name, family, heads, scaling, **changes))
        for name, (family, heads, scaling, changes) in models.items()
    }
    assert wrong(launch(jobs, tmp_path, torchrun=True)) == []


@pytest.mark.slow
def test_training_in_two_processes(tmp_path: Path) -> None:
    models = {family: build(tmp_path, family, family) for family in FAMILIES}
    jobs = {f"tensor parallel {family}": ("tensor_parallel_gradients", models[family]) for family in TRAINED}
    jobs |= {f"FSDP {family}": ("fsdp_step", models[family]) for family in FAMILIES}
    for name, both in launch(jobs, tmp_path).items():
        for result in both:
            assert "raised" not in result, (name, result)
            assert result.pop("weights", 0.5) < 0.6, name
            assert max(result.values()) < 1e-5, (name, result)


@pytest.mark.slow
def test_encoders_are_not_divided(tmp_path: Path) -> None:
    for family, write in tiny.ENCODERS.items():
        convert(write(tmp_path / f"{family} source"), tmp_path / family, method="none", verify=False)
    jobs = {family: ("tensor_parallel_trunk", tmp_path / family) for family in tiny.ENCODERS}
    for both in launch(jobs, tmp_path).values():
        assert undivided(both, "states"), both
