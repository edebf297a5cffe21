"""Transfer of weights: linked, in another dtype, several files at once, and resumed after a stop."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from converter import convert
from converter.errors import OutputError, SourceError
from converter.source.checkpoint import ITEM_BYTES, read_checkpoint, read_header
from converter.weights import files
from converter.weights import transfer as transfer_module
from converter.weights.files import copy_file, place_file, sha256
from converter.weights.journal import JOURNAL, Journal
from converter.weights.transfer import Order, transfer
from converter.weights.worker import Job, Worker
from tests import tiny
from tests.conftest import Run, fingerprint

ROOT = Path(__file__).parent.parent
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

Pristine = Callable[..., Path]
Command = Callable[..., Run]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name in read_checkpoint(folder).files:
        load = torch.load if name.endswith(".bin") else load_file
        found |= load(folder / name)
    return found


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def staging_folders(parent: Path) -> list[Path]:
    return list(parent.glob(".out.ntk-convert-*"))


# Sharing bytes


def test_hard_links(pristine: Pristine, run: Command, tmp_path: Path) -> None:
    source, out = pristine("bloom", sharded=True), tmp_path / "out"
    before = fingerprint(source)
    done = run(source, "--scale", "2", "--out", out, "--hard-link", "--no-verify")
    assert done.code == 0, done.err
    shards = sorted(path.name for path in source.glob("*.safetensors"))
    assert f"weights: {len(shards)} files hard-linked" in done.err
    assert "and not read, so whether a weight is NaN or infinite was not checked" in done.err
    assert [(out / name).samefile(source / name) for name in shards] == [True] * len(shards)
    assert not (out / "config.json").samefile(source / "config.json")
    # Replacing or removing it affects the link, not the file.
    assert run(source, "--scale", "4", "--out", out, "--overwrite", "--no-verify").code == 0
    shutil.rmtree(out)
    assert fingerprint(source) == before


def test_a_source_of_links_is_linked_to_the_files(pristine: Pristine, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(pristine("bloom"), source)
    (source / "model.safetensors").rename(source / "blob")
    (source / "model.safetensors").symlink_to("blob")
    result = convert(source, tmp_path / "out", scale=2, link="hard", verify=False)
    assert dict(result.weights) == {"hard-linked": 1}
    made = tmp_path / "out" / "model.safetensors"
    assert not made.is_symlink()
    assert made.samefile(source / "blob")


@pytest.fixture
def other_disk(tmp_path: Path) -> Path:
    """A folder on a different file system from ``tmp_path``."""
    for place in map(Path, ("/dev/shm", "/tmp", "/var/tmp")):
        if place.is_dir() and os.access(place, os.W_OK) and place.stat().st_dev != tmp_path.stat().st_dev:
            return place
    pytest.skip("there is only one file system")


def test_links_to_another_disk_are_copies_and_the_output_says_so(
    pristine: Pristine, run: Command, tmp_path: Path, other_disk: Path
) -> None:
    source = other_disk / f"ntk-convert-test-{os.getpid()}"
    shutil.copytree(pristine("bloom"), source)
    try:
        done = run(source, "--scale", "2", "--out", tmp_path / "out", "--hard-link", "--no-verify", "--json")
        assert done.json["weights"] == {"not linked": 1}
        same = (tmp_path / "out/model.safetensors").read_bytes() == (
            source / "model.safetensors"
        ).read_bytes()
        assert same
    finally:
        shutil.rmtree(source)


def test_link_where_the_disk_can_or_cannot(pristine: Pristine, run: Command, tmp_path: Path) -> None:
    """On btrfs or XFS the blocks are shared; elsewhere the files are copied, and the output says so."""
    source, out = pristine("bloom"), tmp_path / "out"
    done = run(source, "--scale", "2", "--out", out, "--link", "--no-verify", "--json")
    can = files.can_link(source / "model.safetensors", tmp_path, "reflink")
    assert done.json["weights"] == {"shared" if can else "not shared": 1}
    assert (out / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert not (out / "model.safetensors").samefile(source / "model.safetensors")
    assert names(tmp_path) == ["out"]
    done = run(source, "--scale", "2", "--out", out, "--link", "--no-verify", "--overwrite")
    assert ("reflink" if can else "cannot share disk space (--hard-link") in done.err


@pytest.fixture
def reflinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the ioctl by one that copies all of the file's bytes, as if the file system could share."""

    def clone(target: int, request: int, source: int) -> int:
        assert request == files.FICLONE
        os.pwrite(target, os.pread(source, os.fstat(source).st_size, 0), 0)
        return 0

    monkeypatch.setattr("fcntl.ioctl", clone)


@pytest.mark.usefixtures("reflinks")
def test_shared_blocks_need_no_space(pristine: Pristine, run: Command, tmp_path: Path) -> None:
    source, out = pristine("bloom", sharded=True), tmp_path / "out"
    needed: list[int] = []
    (tmp_path / "folder").mkdir()
    transfer(read_checkpoint(source), source, tmp_path / "folder", Order(link="reflink"), space=needed.append)
    assert needed == [0]
    done = run(source, "--scale", "2", "--out", out, "--link", "--no-verify", "--json")
    assert done.json["weights"] == {"shared": len(list(source.glob("*.safetensors")))}
    for name in source.glob("*.safetensors"):
        assert (out / name.name).read_bytes() == name.read_bytes()


@pytest.mark.usefixtures("reflinks")
@pytest.mark.parametrize("link", ["reflink", "hard"])
def test_a_file_that_changed_is_not_shared(tmp_path: Path, link: Any) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    with pytest.raises(SourceError, match="a changed while it was read"):
        place_file(tmp_path / "a", tmp_path / "b", 4, link=link)
    assert not (tmp_path / "b").exists()


def test_a_hard_link_to_a_file_that_changed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    with pytest.raises(SourceError, match="a changed while it was read"):
        place_file(tmp_path / "a", tmp_path / "b", 4, link="hard")
    assert not (tmp_path / "b").exists()


# Copying


@pytest.mark.parametrize(
    "layout", ["data", "hole", "hole data", "data hole", "hole data hole data", "data hole data hole", ""]
)
def test_holes_stay_holes(tmp_path: Path, layout: str) -> None:
    part = 1 << 20
    with (tmp_path / "a").open("wb") as file:
        for kind in layout.split():
            if kind == "data":
                file.write(os.urandom(part))
            else:
                file.seek(part, os.SEEK_CUR)
        file.truncate()
    digest = copy_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    assert digest == sha256(tmp_path / "a")
    assert (tmp_path / "b").stat().st_blocks <= (tmp_path / "a").stat().st_blocks


def test_a_file_that_ends_in_a_hole_and_ended_short(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.truncate(1 << 20)
    with pytest.raises(SourceError, match=r"\(1048576 of 2097152 bytes\)"):
        copy_file(tmp_path / "a", tmp_path / "b", 2 << 20)


# Another dtype


@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", ["fp32", "fp16", "bf16"])
def test_weights_are_rounded_to_nearest(
    tmp_path: Path, stored: torch.dtype, wanted: Any, fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_module, "Worker", SameProcess)
    source, out = tmp_path / "source", tmp_path / "out"
    tiny.FACTORIES["bloom"](source, dtype=stored, fmt=fmt, sharded=True)
    out.mkdir()
    needed: list[int] = []
    order = Order(dtype=wanted, tied=["lm_head.weight"])
    how = transfer(read_checkpoint(source), source, out, order, space=needed.append)
    assert how.keys() == {"converted"}
    before, after = tensors(source), tensors(out)
    before.pop("lm_head.weight", None)  # tied
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == DTYPES[wanted]
        assert torch.equal(after[name], tensor.to(DTYPES[wanted])), name
    index = json.loads((out / "model.safetensors.index.json").read_text())
    size = sum(tensor.nbytes for tensor in after.values())
    assert index["metadata"]["total_size"] == size
    assert index["weight_map"].keys() == after.keys()
    assert needed[0] >= size


class SameProcess(Worker):
    """Rewrites in this process, since a worker process takes seconds to start."""

    def rewrite(self, request: Job, *_: object) -> None:
        from converter.weights.rewrite import rewrite

        values = vars(request)
        rewrite(Path(values.pop("source")), Path(values.pop("target")), **values)


def to_half(value: float) -> float:
    """Nearest float16, by NumPy's own conversion."""
    return float(np.float64(value).astype(np.float32).astype(np.float16))


def one_file(folder: Path, state: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(dict(state), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_only_floating_point_changes_and_what_is_kept_stays(tmp_path: Path) -> None:
    state = {
        "weight": torch.tensor([[0.1, 1e-8, -65504.0, float("inf"), float("-inf")]]),
        "wide": torch.tensor([1 / 3], dtype=torch.float64),
        "slopes": torch.tensor([1 / 3]),
        "count": torch.tensor([2**40]),
        "flag": torch.tensor([True]),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 3),
    }
    source, out = one_file(tmp_path / "source", state), tmp_path / "out"
    out.mkdir()
    transfer(read_checkpoint(source), source, out, Order(dtype="fp16", keep=["slopes"]))
    made = load_file(out / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in made.items()} == {
        **dict.fromkeys(("weight", "wide", "scalar", "none"), torch.float16),
        "slopes": torch.float32,
        "count": torch.int64,
        "flag": torch.bool,
    }
    assert made["weight"].tolist() == [[to_half(v) for v in state["weight"][0].tolist()]]
    assert made["slopes"].tolist() == state["slopes"].tolist()
    assert made["count"].tolist() == [2**40]
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == {
        name: tuple(tensor.shape) for name, tensor in state.items()
    }
    for tensor in read_header(out / "model.safetensors").values():
        assert tensor.offset % ITEM_BYTES[tensor.dtype] == 0


def test_a_tensor_of_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from converter.weights import rewrite

    monkeypatch.setattr(rewrite, "BLOCK", 4096)
    monkeypatch.setattr(transfer_module, "Worker", SameProcess)
    state = {"big": torch.randn(12_345, generator=torch.Generator().manual_seed(0)), "small": torch.ones(3)}
    source, out = one_file(tmp_path / "source", state), tmp_path / "out"
    out.mkdir()
    transfer(read_checkpoint(source), source, out, Order(dtype="bf16"))
    assert torch.equal(load_file(out / "model.safetensors")["big"], state["big"].bfloat16())


@pytest.mark.parametrize(("dtype", "value"), [("fp16", 7e4), ("bf16", 3.4e38)])
def test_a_value_that_the_dtype_cannot_hold_is_refused(
    make_source: Callable[..., Path], refused: Callable[..., str], dtype: str, value: float
) -> None:
    source = make_source("bloom")
    state = load_file(source / "model.safetensors")
    next(tensor for tensor in state.values() if tensor.dim() == 2)[1, 1] = value
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    line = refused(source, "--scale", "2", "--out", source.parent / "out", "--dtype", dtype)
    assert f"has values up to {value:.3g}" in line
    assert "give another --dtype" in line


@pytest.mark.parametrize("family", ["bloom", "jais"])
def test_a_repository_in_another_dtype(pristine: Pristine, run: Command, tmp_path: Path, family: str) -> None:
    """It verifies, loads in its dtype, and computes what the rounded weights compute."""
    source, out, plain = pristine(family), tmp_path / "out", tmp_path / "plain"
    # Scaling by a power of two is exact in every dtype, so slopes too small for one would show.
    words = (source, "--scale", "2", "--train-length", "32")
    done = run(*words, "--out", out, "--dtype", "bf16", "--json")
    assert done.code == 0, done.err
    assert {check["name"] for check in done.json["checks"]} >= {"tensors", "slopes", "paths"}
    assert any("converted to bfloat16" in note for note in done.json["notes"])
    assert run(*words, "--out", plain, "--no-verify").code == 0
    config, before = (json.loads((folder / "config.json").read_text()) for folder in (out, plain))
    assert (config.get("dtype") or config.get("torch_dtype")) == "bfloat16"
    assert config.get("alibi_slopes") == before.get("alibi_slopes")
    card = (out / "README.md").read_text()
    assert "--dtype bf16" in card
    assert "converted to bfloat16" in card

    load = AutoModelForCausalLM.from_pretrained
    model = load(out, trust_remote_code=True, dtype="auto").eval()
    assert model.dtype == torch.bfloat16
    expected = load(plain, trust_remote_code=True, dtype=torch.bfloat16).eval()
    tokens = torch.arange(3, 40)[None] % model.config.vocab_size
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected(tokens).logits)


# Several at once


def test_many_files_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_module, "LEAST", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    source, out = sharded(tmp_path / "source", 12), tmp_path / "out"
    out.mkdir()
    assert transfer(read_checkpoint(source), source, out) == {"copied": 12}
    assert all((out / path.name).read_bytes() == path.read_bytes() for path in source.iterdir())
    (out / JOURNAL).unlink()
    assert len(list(out.iterdir())) == 13


def sharded(folder: Path, count: int, size: int = 1000) -> Path:
    """Shards of one tensor each."""
    folder.mkdir()
    weight_map = {}
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        save_file({f"t{number}": torch.randn(size)}, folder / file, metadata={"format": "pt"})
        weight_map[f"t{number}"] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_one_failure_stops_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_module, "LEAST", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    source, out = sharded(tmp_path / "source", 200), tmp_path / "out"
    out.mkdir()
    checkpoint = read_checkpoint(source)
    os.truncate(source / "model-00003-of-00200.safetensors", 900)
    with pytest.raises(SourceError, match="model-00003-of-00200"):
        transfer(checkpoint, source, out)
    assert len(list(out.iterdir())) < 100


def test_a_signal_that_another_thread_gets_stops_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system chooses the thread; the main thread, if it waits for a lock, is not woken by that."""
    source, out = sharded(tmp_path / "source", 1), tmp_path / "out"
    out.mkdir()
    signalled = threading.Event()

    def place_file(*_: object, check: Callable[[], object], **__: object) -> None:
        time.sleep(0.3)  # the main thread waits by then
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        signalled.set()
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            check()
            time.sleep(0.01)

    monkeypatch.setattr(transfer_module, "place_file", place_file)
    started = time.monotonic()
    # A shell that starts the tests in the background has them ignore this signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            transfer(read_checkpoint(source), source, out)
    finally:
        signal.signal(signal.SIGINT, before)
    assert signalled.is_set()
    assert time.monotonic() - started < 50


# The worker process


def request(source: Path, target: Path, dtype: str | None = None) -> Job:
    return Job(str(source), str(target), dtype=dtype, keep=[], expected=[])


@pytest.fixture
def worker() -> Any:
    worker = Worker()
    yield worker
    worker.close()


def test_a_worker_rewrites_one_file_after_another(tmp_path: Path, worker: Worker) -> None:
    for name in ("a", "b"):
        torch.save({name: torch.arange(5.0)}, tmp_path / f"{name}.bin")
        done: list[int] = []
        worker.rewrite(request(tmp_path / f"{name}.bin", tmp_path / name), done.append, bool)
        assert sum(done) == (tmp_path / f"{name}.bin").stat().st_size
        assert load_file(tmp_path / name)[name].tolist() == [0, 1, 2, 3, 4]


def test_errors_of_a_worker_are_those_of_the_run(tmp_path: Path, worker: Worker) -> None:
    (tmp_path / "a.bin").write_bytes(b"nothing")
    with pytest.raises(SourceError, match=r"a\.bin is damaged"):
        worker.rewrite(request(tmp_path / "a.bin", tmp_path / "a"), int, bool)
    torch.save({"a": torch.ones(1)}, tmp_path / "a.bin")
    with pytest.raises(OSError, match="No such file or directory") as error:
        worker.rewrite(request(tmp_path / "a.bin", tmp_path / "none" / "a"), int, bool)
    assert error.value.errno == errno.ENOENT
    worker.rewrite(request(tmp_path / "a.bin", tmp_path / "a"), int, bool)
    assert (tmp_path / "a").is_file()


@pytest.mark.parametrize("dtype", [None, "BF16"])
def test_a_file_that_kills_its_reader(tmp_path: Path, worker: Worker, dtype: str | None) -> None:
    """A mapped file is cut off while it is read: the system kills the process that reads past its end."""
    path, target = tmp_path / "a.bin", tmp_path / "a"
    torch.save({"a": torch.ones(64 << 20)}, path)

    def cut(_: int) -> None:
        os.truncate(path, 1 << 20)

    with pytest.raises(SourceError, match=r"a\.bin was cut off while it was read; try again"):
        worker.rewrite(request(path, target, dtype), cut, bool)


def test_a_worker_ends_with_its_run(tmp_path: Path) -> None:
    """Even when the run is killed."""
    torch.save({"a": torch.ones(8)}, tmp_path / "a.bin")
    code = (
        "import sys, time; from pathlib import Path; from converter.weights.worker import Job, Worker\n"
        "worker = Worker()\n"
        "worker.rewrite(Job(sys.argv[1], sys.argv[2], None, [], []), int, bool)\n"
        "print(worker._process.pid, flush=True); time.sleep(60)"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "a.bin"), str(tmp_path / "a")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert run.stdout is not None
    pid = int(run.stdout.readline())
    run.kill()
    run.communicate()
    for _ in range(100):
        if not alive(pid):
            return
        time.sleep(0.1)
    raise AssertionError("it still runs")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.usefixtures("fresh_workers")
def test_no_module_of_the_current_folder_is_run(
    make_source: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile source may hold a ``torch.py``, and it may be the user's current folder."""
    source = make_source("bloom", fmt="bin")
    for name in ("torch", "json", "converter", "safetensors"):
        (source / f"{name}.py").write_text(f"open({str(tmp_path / 'it-ran')!r}, 'w')")
    monkeypatch.chdir(source)
    convert(source, tmp_path / "out", scale=2, verify=False)
    assert not (tmp_path / "it-ran").exists()


# Resuming after a stop


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """``stopped(source, error)``: lets ``error`` end a run after two files; returns its staging folder."""

    def stop(source: Path, error: BaseException, **options: Any) -> Path:
        made: list[str] = []
        make = transfer_module._Work.make

        def two(self: Any, name: str, *rest: Any) -> None:
            if len(made) == 2:
                raise error
            made.append(name)
            make(self, name, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(transfer_module._Work, "make", two)
            with pytest.raises((OutputError, KeyboardInterrupt)) as raised:
                convert(source, tmp_path / "out", scale=2, verify=False, **options)
        (folder,) = staging_folders(tmp_path)
        assert str(folder) in str(raised.value)
        assert "2 finished weight files are kept" in str(raised.value)
        assert "--resume" in str(raised.value)
        assert not (tmp_path / "out").exists()
        return folder

    return stop


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}, {"fmt": "bin"}], ids=str)
def test_a_stopped_run_goes_on(
    pristine: Pristine,
    tmp_path: Path,
    stopped: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    options: dict[str, Any],
) -> None:
    if options:
        monkeypatch.setattr(transfer_module, "Worker", SameProcess)
    how = {key: value for key, value in options.items() if key == "dtype"}
    source = pristine("bloom", sharded=True, **{key: options[key] for key in options.keys() - how.keys()})
    count = len(read_checkpoint(source).files)
    assert count > 3
    folder = stopped(source, error, **how)
    (folder / "half-written").write_text("x")
    (folder / "1_Pooling").mkdir()
    inodes = {entry.file: (folder / entry.file).stat().st_ino for entry in Journal(folder).entries().values()}
    assert len(inodes) == 2
    needed: list[int] = []
    monkeypatch.setattr("converter.pipeline.check_space", lambda _, size, *__: needed.append(size))
    result = convert(source, tmp_path / "out", scale=2, verify=False, resume=True, **how)
    kind = "converted" if options else "copied"
    assert dict(result.weights) == {"kept": 2, kind: count - 2}
    assert {name: (tmp_path / "out" / name).stat().st_ino for name in inodes} == inodes
    assert names(tmp_path) == ["out"]

    clean = convert(source, tmp_path / "clean", scale=2, verify=False, **how)
    assert dict(clean.weights) == {kind: count}
    assert needed[0] < needed[1]
    ours, theirs = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("out", "clean"))
    del ours["README.md"], theirs["README.md"]  # each names its own folder
    assert ours == theirs


def test_without_resume_the_next_run_starts_clean(
    pristine: Pristine, tmp_path: Path, stopped: Callable[..., Path]
) -> None:
    source = pristine("bloom", sharded=True)
    stopped(source, KeyboardInterrupt())
    result = convert(source, tmp_path / "out", scale=2, verify=False)
    assert "kept" not in result.weights
    assert names(tmp_path) == ["out"]


def test_resume_with_nothing_to_go_on_from(pristine: Pristine, tmp_path: Path) -> None:
    result = convert(pristine("bloom"), tmp_path / "out", scale=2, verify=False, resume=True)
    assert dict(result.weights) == {"copied": 1}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def swap(path: Path) -> None:
    """Replaces a file by a link to the same bytes; a linked file is not one that this run finished."""
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def damage_line(path: Path) -> None:
    journal = path.parent / JOURNAL
    lines = [line[:-20] if path.name in line else line for line in journal.read_text().splitlines()]
    journal.write_text("\n".join(["[]", "{}", "\0", '{"file": 3}', *lines]))


SPOILED: dict[str, Callable[[Path, Path], object]] = {
    "another byte": lambda made, source: flip(made),
    "a byte less": lambda made, source: os.truncate(made, made.stat().st_size - 1),
    "another source": lambda made, source: flip(source),
    "not there": lambda made, source: made.unlink(),
    "a link": lambda made, source: swap(made),
    "a damaged journal": lambda made, source: damage_line(made),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_what_is_not_as_it_was_is_done_again(
    make_source: Callable[..., Path],
    tmp_path: Path,
    stopped: Callable[..., Path],
    spoil: Callable[[Path, Path], object],
) -> None:
    source = make_source("bloom", sharded=True)
    folder = stopped(source, KeyboardInterrupt())
    name = min(Journal(folder).entries())
    spoil(folder / name, source / name)
    result = convert(source, tmp_path / "out", scale=2, verify=False, resume=True)
    assert result.weights["kept"] == 1
    for path in source.glob("*.safetensors"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
        assert not (tmp_path / "out" / path.name).is_symlink()


def test_files_of_another_dtype_are_done_again(
    pristine: Pristine, tmp_path: Path, stopped: Callable[..., Path]
) -> None:
    source = pristine("bloom", sharded=True)
    stopped(source, KeyboardInterrupt())
    result = convert(source, tmp_path / "out", scale=2, verify=False, resume=True, dtype="bf16")
    assert "kept" not in result.weights or result.weights["kept"] == 0
    assert {tensor.dtype for tensor in read_checkpoint(tmp_path / "out").tensors.values()} == {"BF16"}


def test_the_command_line_says_what_is_kept(tmp_path: Path, pristine: Pristine, run: Command) -> None:
    """Ctrl-C after the small shards of a checkpoint whose last one takes a second."""
    source = tmp_path / "source"
    shutil.copytree(pristine("bloom", sharded=True), source)
    index = source / "model.safetensors.index.json"
    big, size = "model-big.safetensors", 8 << 30
    header = json.dumps({"big": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (source / big).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    content = json.loads(index.read_text())
    content["weight_map"]["big"] = big
    index.write_text(json.dumps(content))
    words = [sys.executable, "-m", "converter", str(source), "--scale", "2", "--no-verify", "--out"]
    process = subprocess.Popen([*words, str(tmp_path / "out")], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    while True:
        assert process.poll() is None
        folders = staging_folders(tmp_path)
        if folders and Journal(folders[0]).entries() and (folders[0] / big).exists():
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 1
    assert err.strip().splitlines()[-1].startswith("error: interrupted; ")
    assert f"kept in {folders[0]}: repeat the command with --resume to continue from there" in err
    index.write_text(json.dumps(json.loads((pristine("bloom", sharded=True) / index.name).read_text())))
    (source / big).unlink()
    done = run(source, "--scale", "2", "--no-verify", "--out", tmp_path / "out", "--resume", "--json")
    assert done.code == 0, done.err
    assert done.json["weights"]["kept"] >= 1
    assert names(tmp_path) == ["out", "source"]


def test_a_disk_that_is_still_full_loses_nothing(
    pristine: Pristine, tmp_path: Path, stopped: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pristine("bloom", sharded=True)
    stopped(source, OSError(errno.ENOSPC, "No space left on device"))
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        with pytest.raises(OutputError, match=r"GB free.*2 finished weight files are kept"):
            convert(source, tmp_path / "out", scale=2, verify=False, resume=True)
    result = convert(source, tmp_path / "out", scale=2, verify=False, resume=True)
    assert result.weights["kept"] == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS], ids=lambda number: number.name)
def test_a_worker_that_is_killed_loses_nothing(
    pristine: Pristine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    source = pristine("bloom", sharded=True)
    rewrite = Worker.rewrite
    last = max(read_checkpoint(source).files)

    def killed(self: Worker, request: Job, *rest: Any) -> None:
        if Path(request.source).name == last:
            self._started().send_signal(number)
            self._started().wait()
        rewrite(self, request, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "rewrite", killed)
        with pytest.raises(OutputError, match="finished weight files are kept"):
            convert(source, tmp_path / "out", scale=2, verify=False, dtype="bf16")
    result = convert(source, tmp_path / "out", scale=2, verify=False, dtype="bf16", resume=True)
    assert dict(result.weights) == {"kept": len(read_checkpoint(source).files) - 1, "converted": 1}


def test_content_whose_time_was_set_back(
    make_source: Callable[..., Path], tmp_path: Path, stopped: Callable[..., Path]
) -> None:
    source = make_source("bloom", sharded=True)
    folder = stopped(source, KeyboardInterrupt())
    changed = source / min(Journal(folder).entries())
    before = changed.stat()
    flip(changed)
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    result = convert(source, tmp_path / "out", scale=2, verify=False, resume=True)
    assert result.weights["kept"] == 1
    assert (tmp_path / "out" / changed.name).read_bytes() == changed.read_bytes()


def test_of_two_leftovers_the_one_with_more_is_gone_on_from(
    pristine: Pristine, tmp_path: Path, stopped: Callable[..., Path]
) -> None:
    source = pristine("bloom", sharded=True)
    folder = stopped(source, KeyboardInterrupt())
    for name in (".out.ntk-convert-0-aa", ".out.ntk-convert-999999999-zz"):
        shutil.copytree(folder, tmp_path / name)
        journal = Journal(tmp_path / name)
        journal.rewrite(list(journal.entries().values())[:1])
    result = convert(source, tmp_path / "out", scale=2, verify=False, resume=True)
    assert result.weights["kept"] == 2
    assert names(tmp_path) == ["out"]


def test_a_link_and_another_dtype_exclude_each_other(
    make_source: Callable[..., Path], refused: Callable[..., str]
) -> None:
    source = make_source()
    words = ("--scale", "2", "--out", source.parent / "out", "--dtype", "bf16", "--link")
    assert "drop --dtype or the link" in refused(source, *words, code=2)


def test_a_hard_link_that_is_not_allowed(
    pristine: Pristine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may forbid links to another user's files: they are copied, and need free space."""

    def forbidden(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", forbidden)
    source, needed = pristine("bloom"), []
    checkpoint = read_checkpoint(source)
    how = transfer(checkpoint, source, tmp_path, Order(link="hard"), space=needed.append)
    assert how == {"not linked": 1}
    assert needed == [checkpoint.total_bytes]
