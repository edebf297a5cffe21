"""Runs with faults: the source stays as it is, out is complete or not there, the next run succeeds.

A bounded sample of what ``python -m tests.faults`` tries (``make hostile``): about one point in three.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import fingerprint
from tests.dealt import quick
from tests.faults import campaign, trial
from tests.faults.campaign import FULL, IN_WORKER, LIMITS, SIGNALS, STOPPED, Row, changes, rows, table
from tests.faults.hook import Fault
from tests.faults.planted import DEFECTS
from tests.faults.trial import BIN, COPY, DTYPE, HUB, JOURNAL, OVERWRITE, RESUME, VERIFIED, Kind, Trial

ROOT = Path(__file__).parent.parent
BIG = 8 << 30
"""Bytes of a tensor that takes seconds to copy; sparse, so that writing it takes none."""
PUBLISHING = 12
"""Events at the end of a run that put its folder in place."""
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc"),
]


def name(kind: Kind) -> str:
    return kind.name


@pytest.fixture(scope="session")
def small_disk() -> None:
    if not campaign.can_mount():
        pytest.skip("only root can mount a small disk")


@pytest.fixture
def runs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Trial]:
    """Runs of the kind that the test names as its parameter ``runs``."""
    with campaign.trial(request.param, tmp_path) as made:
        yield made


def of(*kinds: Kind) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("runs", kinds, indirect=True, ids=name)


def slowly(kind: Kind) -> Any:
    return pytest.param(kind, marks=pytest.mark.slow)


def survived(result: Sequence[Row], tried: int = 1) -> None:
    """Every fault was tried at so many points, and none did harm."""
    assert not any(row.failures for row in result), table(result)
    assert all(row.tried >= tried for row in result), table(result)


# Signals


@of(COPY, OVERWRITE, RESUME, slowly(HUB))
def test_signals(runs: Trial) -> None:
    survived(rows(runs, SIGNALS, 2), 2)


@pytest.mark.slow
@of(OVERWRITE)
def test_signals_while_one_folder_replaces_another(runs: Trial) -> None:
    """At each point with one signal, at every third with all of them."""
    survived(rows(runs, {"SIGKILL": SIGNALS["SIGKILL"]}, last=PUBLISHING), PUBLISHING)
    survived(rows(runs, SIGNALS, PUBLISHING // 3, last=PUBLISHING), PUBLISHING // 3)


@of(COPY, slowly(DTYPE))
def test_signals_before_a_run_that_resumes(runs: Trial) -> None:
    faults = SIGNALS if runs.kind is COPY else {"SIGKILL": SIGNALS["SIGKILL"]}  # a worker takes seconds
    survived(rows(runs, faults, 1, options=["--resume"]), 1)


@pytest.mark.slow
@of(BIN)
def test_signals_while_workers_convert(runs: Trial) -> None:
    survived(rows(runs, {"Ctrl-C": SIGNALS["Ctrl-C"]}, 1, last=len(runs.events["main"]) // 2))
    survived(rows(runs, {"its process crashed": IN_WORKER["its process crashed"]}, 1))


@pytest.mark.slow
@of(VERIFIED)
def test_signals_while_the_result_is_verified(runs: Trial) -> None:
    survived(campaign.rows_in_time(runs, 1), 1)


# The disk


@of(COPY, OVERWRITE)
def test_files_that_cannot_grow(runs: Trial) -> None:
    survived(rows(runs, LIMITS, 2), 2)


@pytest.mark.usefixtures("small_disk")
@pytest.mark.parametrize("kind", quick([COPY, OVERWRITE], OVERWRITE), ids=name)
def test_full_disk(tmp_path: Path, kind: Kind) -> None:
    """It fills before each weight file, the config, the card and what else there is."""
    with campaign.trial(kind, tmp_path, disk=True) as runs:
        written = [
            event for event in runs.events["main"] if " open " in event and ".out.ntk-convert" in event
        ]
        assert {"config.json", "README.md"} <= {event.rpartition("/")[2] for event in written}
        survived(rows(runs, FULL, 8), 8)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with campaign.trial(COPY, tmp_path) as runs:
        runs.reset()
        runs.here.chmod(0o555)
        try:
            ended = runs.run(powerless=True)
        finally:
            runs.here.chmod(0o755)
        assert trial.one_line(ended) == []
        assert "no permission to write" in ended.err
        assert runs.after(ended, None) == []
        assert runs.again() == []


# A source that changes


@of(COPY)
def test_a_shard_changes_while_it_is_copied(runs: Trial) -> None:
    survived(rows(runs, changes(runs), 2), 2)


@pytest.mark.slow
@of(BIN)
def test_a_shard_changes_while_it_is_converted(runs: Trial) -> None:
    """A mapped file that ends short ends the process that reads it, and not the run."""
    survived(rows(runs, {"truncate": changes(runs)["a shard: truncate"]}, 1), 1)


# Other runs


@pytest.mark.slow
@of(COPY, OVERWRITE, RESUME)
def test_another_run_to_the_same_folder(runs: Trial) -> None:
    survived(rows(runs, STOPPED, 2), 2)
    survived(rows(runs, STOPPED, 4, last=PUBLISHING), 4)


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_command_lines_at_once(pristine: Callable[..., Path], tmp_path: Path, overwrite: bool) -> None:
    out = tmp_path / "out"
    both = [start(pristine("bloom"), out, "--no-verify", *["--overwrite"] * overwrite) for _ in range(2)]
    results = [(run.communicate(), run.returncode) for run in both]
    succeeded = [code for _, code in results if code == 0]
    assert len(succeeded) == 2 if overwrite else len(succeeded) >= 1, results
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "config.json").exists()


# What an interrupted run leaves, and somebody changes


@pytest.fixture
def left(tmp_path: Path) -> Iterator[tuple[Trial, Path]]:
    """Runs, and the folder that an interrupted one left with finished weight files."""
    with campaign.trial(COPY, tmp_path) as runs:
        runs.reset()
        config = next(event for event in runs.events["main"] if event.endswith("/README.md"))
        ended = runs.run(Fault(str(runs.work), at=int(config.split()[0]), signal=signal.SIGINT))
        (folder,) = runs.leftovers()
        assert "--resume to continue" in ended.err
        yield runs, folder


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def test_finished_files_are_kept(left: tuple[Trial, Path]) -> None:
    runs, folder = left
    inodes = [path.stat().st_ino for path in shards(folder)]
    assert runs.again(["--resume"]) == []
    assert [path.stat().st_ino for path in shards(runs.here / "out")] == inodes
    assert not (runs.here / "out" / JOURNAL).exists()


def truncated(folder: Path) -> None:
    os.truncate(shards(folder)[1], 1000)


def altered(folder: Path) -> None:
    data = bytearray(shards(folder)[1].read_bytes())
    data[-1] ^= 1
    shards(folder)[1].write_bytes(data)


def swapped(folder: Path) -> None:
    first, second, *_ = shards(folder)
    first.rename(folder / "other")
    second.rename(first)
    (folder / "other").rename(second)


def linked(folder: Path) -> None:
    shards(folder)[1].unlink()
    shards(folder)[0].with_name("model-00002-of-00004.safetensors").symlink_to(shards(folder)[0])


def cut_journal(folder: Path) -> None:
    text = (folder / JOURNAL).read_text()
    (folder / JOURNAL).write_text(text[: len(text) // 2])


def strange_journal(folder: Path) -> None:
    lines = ["null", "[]", "{", '{"file": "../../source/config.json"}', "\0\udcff", "[" * 100_000]
    (folder / JOURNAL).write_text("\n".join(lines) + "\n", errors="surrogateescape")


def more_files(folder: Path) -> None:
    (folder / "more.safetensors").write_text("more")
    (folder / "more").mkdir()
    (folder / "more/file").write_text("more")


@pytest.mark.parametrize(
    "tamper",
    [truncated, altered, swapped, linked, cut_journal, strange_journal, more_files],
    ids=lambda tamper: tamper.__name__,
)
def test_only_what_is_as_it_was_is_kept(left: tuple[Trial, Path], tamper: Callable[[Path], None]) -> None:
    runs, folder = left
    source = fingerprint(runs.here / "source")
    tamper(folder)
    ended = runs.run(None, "--resume")
    assert ended.code == 0, ended.err
    assert trial.contents(runs.here / "out") == runs.complete
    assert runs.leftovers() == []
    assert fingerprint(runs.here / "source") == source


def test_files_of_a_source_that_changed_are_done_again(left: tuple[Trial, Path]) -> None:
    runs, _ = left
    shard = shards(runs.here / "source")[1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    ended = runs.run(None, "--resume")
    assert ended.code == 0, ended.err
    assert (runs.here / "out" / shard.name).read_bytes() == data


def test_without_resume_nothing_is_kept(left: tuple[Trial, Path]) -> None:
    runs, folder = left
    shards(folder)[1].write_bytes(b"damaged")
    assert runs.again() == []


# In the middle of copying, where nothing can be counted


def start(source: Path, out: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "converter", str(source), "--scale", "2", "--out", str(out), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


@pytest.fixture(scope="module")
def big_source(pristine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BLOOM whose vocabulary is a sparse file of ``BIG`` bytes."""
    folder = tmp_path_factory.mktemp("big")
    shutil.copytree(pristine("bloom"), folder, dirs_exist_ok=True)
    header: dict[str, Any] = {"big": {"dtype": "U8", "shape": [BIG], "data_offsets": [0, BIG]}}
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + BIG)
    return folder


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda sent: sent.name)
@pytest.mark.parametrize("overwrite", [False, True])
def test_stopped_while_copying(
    big_source: Path, tmp_path: Path, sent: signal.Signals, overwrite: bool
) -> None:
    out, weights = tmp_path / "out", big_source / "model.safetensors"
    if overwrite:
        out.mkdir()
        (out / "a").write_text("old")
        (out / "config.json").write_text("{}")
    before = fingerprint(out), weights.stat().st_size, weights.stat().st_mtime_ns
    process = start(big_source, out, "--no-verify", *["--overwrite"] * overwrite)
    while not (found := list(tmp_path.glob(".out.ntk-convert-*/model.safetensors"))):
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.send_signal(sent)
    _, err = process.communicate()
    assert process.returncode == (-sent if sent == signal.SIGKILL else 1)
    assert out.exists() == overwrite
    assert (fingerprint(out), weights.stat().st_size, weights.stat().st_mtime_ns) == before
    left = list(tmp_path.glob(".out.ntk-convert-*"))
    if sent == signal.SIGKILL:
        assert left == [found[0].parent]
    else:
        assert err.strip() == "error: interrupted; nothing was written"
        assert left == []


# The harness itself


@pytest.mark.parametrize(
    ("defect", "kind", "last", "points", "found"),
    [
        ("publishes file by file", COPY, 120, 8, "out is neither as before nor complete"),
        ("removes the old folder first", OVERWRITE, 4, 4, "out is neither as before nor complete"),
        ("touches the source", COPY, 10, 1, "the source was changed"),
        ("leaves a process", COPY, 10, 1, "1 of its processes still ran"),
        ("leaves its folders", COPY, 10, 1, "the next run left"),
    ],
    ids=DEFECTS,
)
def test_a_defect_is_found(
    tmp_path: Path, defect: str, kind: Kind, last: int, points: int, found: str
) -> None:
    with campaign.trial(kind, tmp_path, planted=defect) as runs:
        (row,) = rows(runs, {"SIGKILL": SIGNALS["SIGKILL"]}, points, last=last)
        assert row.tried == points
        assert any(found in failure for failure in row.failures), row


@pytest.mark.slow
def test_the_report(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults", "--seconds", "0", "--kind", "hard-link"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("run ")
    assert "SIGKILL" in done.stdout
    assert list(tmp_path.iterdir()) == []
