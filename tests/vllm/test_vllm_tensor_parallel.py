"""Two processes give the log-probabilities of one, for every family."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import tiny
from tests.patched import FAMILIES, FITTED
from tests.vllm.engines import BOUND, FELT, converted_tiny

# One key head for both processes, key heads that are divided, and norms over the heads of both.
OPTIONS = {
    "replit-one-key-head": ("replit", {"attn_config": {"kv_n_heads": 1}}),
    "replit-two-key-heads": ("replit", {"attn_config": {"kv_n_heads": 2}}),
    "mpt-qk-ln": ("mpt", {"attn_config": {"qk_ln": True}}),
    "refact-first-revision": ("refact", {"packed_projections": False}),
}

# Both layouts of encoders, fused weights that are split when they are loaded, and heads that are not divided.
POOLED: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    "jina-qk-length": (
        "jina_bert",
        "ntk-length",
        "SequenceClassification",
        tiny.CHECKPOINTS["jina_bert"].layouts["qk"],
    ),
    "jina-fitted": ("jina_bert", "fitted", "Model", {}),
    "mosaic-length": ("mosaic_bert", "ntk-length", "TokenClassification", {}),
    "bloom-classes": ("bloom", "ntk", "SequenceClassification", {}),
    "wrong-encoder": ("mosaic_bert", "ntk", "TokenClassification", {}),
}


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def test_two_processes_give_what_one_gives(tmp_path: Path) -> None:
    models = {
        f"{family}-{scaling}": converted_tiny(tmp_path / f"{family}-{scaling}", family, scaling)
        for number, family in enumerate(FAMILIES)
        for scaling in (("ntk", "ntk-position")[number % 2],)
    }
    for number, (name, (family, changes)) in enumerate(OPTIONS.items()):
        models[name] = converted_tiny(tmp_path / name, family, ("ntk-position", "ntk")[number % 2], **changes)
    for family, scaling in zip(("mpt", "bloom"), FITTED, strict=True):
        models[scaling] = converted_tiny(tmp_path / scaling, family, scaling)
    heads = {}
    for name, (family, scaling, head, changes) in POOLED.items():
        models[name] = converted_tiny(tmp_path / name, family, scaling, head, **changes)
        heads[name] = head
    models["wrong-ntk"] = converted_tiny(tmp_path / "wrong-ntk", "bloom", "ntk")
    models["wrong-position"] = converted_tiny(tmp_path / "wrong-position", "mpt", "ntk-position")
    jobs = tmp_path / "jobs.json"
    ports = dict(zip(models, free_ports(len(models)), strict=True))
    each = {name: (str(folder), ports[name], heads.get(name)) for name, folder in models.items()}
    jobs.write_text(json.dumps(each), encoding="utf-8")
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", "tests.vllm.ranks", str(jobs)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["examples", "."])},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    differences = json.loads(jobs.read_text(encoding="utf-8"))
    assert [name for name in models if name.startswith("wrong") and differences[name] <= FELT] == []
    assert [name for name in models if not name.startswith("wrong") and differences[name] >= BOUND] == []
