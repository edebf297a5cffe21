"""Transfer of weights: linked, in another dtype, several files at once, and ``.bin`` files in processes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
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
from converter.errors import SourceError
from converter.source.checkpoint import ITEM_BYTES, read_checkpoint, read_header, read_metadata
from converter.weights import files, worker
from converter.weights import transfer as transfer_module
from converter.weights.files import link_file
from converter.weights.transfer import TransferOptions, transfer
from converter.weights.worker import START, rewrite_apart
from tests import tiny
from tests.conftest import Run, fingerprint, in_this_process
from tests.messages import Words, raises, says

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


# Sharing bytes


def test_hard_links(make_source: Pristine, run: Command, tmp_path: Path) -> None:
    source, out = make_source("bloom", sharded=True), tmp_path / "out"
    first = min(source.glob("*.safetensors"))
    first.symlink_to(first.rename(source / "blob"))  # linked to the file, not to the link
    before = fingerprint(source)
    done = run(source, "--scale", "2", "--out", out, "--hard-link", "--no-verify")
    assert done.code == 0, done.err
    shards = sorted(path.name for path in source.glob("*.safetensors"))
    says(done.err, f"{len(shards)} files hard-linked", "NaN or infinite was not checked")
    assert [(out / name).samefile(source / name) for name in shards] == [True] * len(shards)
    assert not (out / first.name).is_symlink()
    assert not (out / "config.json").samefile(source / "config.json")
    # Replacing or removing it affects the link, not the file.
    assert run(source, "--scale", "4", "--out", out, "--overwrite", "--no-verify").code == 0
    shutil.rmtree(out)
    assert fingerprint(source) == before


def clone(target: int, request: int, source: int) -> int:
    """In place of the ioctl: copies all of the file's bytes, as if the file system could share."""
    assert request == files.FICLONE
    os.pwrite(target, os.pread(source, os.fstat(source).st_size, 0), 0)
    return 0


def forbidden(*_: object) -> None:
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


@pytest.mark.parametrize(
    ("word", "name", "function", "made", "told"),
    [
        ("--link", "fcntl.ioctl", clone, "shared", "reflink"),
        ("--link", "fcntl.ioctl", forbidden, "not shared", "--hard-link"),
        ("--hard-link", "os.link", forbidden, "not linked", "cannot be linked"),
    ],
)
def test_shared_blocks_need_no_space_and_copies_do(
    pristine: Pristine,
    run: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    word: str,
    name: str,
    function: Callable[..., object],
    made: str,
    told: str,
) -> None:
    """On btrfs or XFS the blocks are shared; elsewhere the files are copied, and the output says so."""
    monkeypatch.setattr(name, function)
    source, out, needed = pristine("bloom", sharded=True), tmp_path / "out", []
    checkpoint = read_checkpoint(source)
    (tmp_path / "folder").mkdir()
    options = TransferOptions(link="reflink" if word == "--link" else "hard")
    transfer(checkpoint, source, tmp_path / "folder", options, space=needed.append)
    assert needed == [0 if made == "shared" else sum(checkpoint.files.values())]
    words = (source, "--scale", "2", "--out", out, word, "--no-verify")
    assert run(*words, "--json").json["weights"] == {made: len(checkpoint.files)}
    assert told in run(*words, "--overwrite").err
    for file in checkpoint.files:
        assert (out / file).read_bytes() == (source / file).read_bytes()
        assert not (out / file).samefile(source / file)


@pytest.mark.parametrize("link", ["reflink", "hard"])
def test_a_file_that_changed_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: Any
) -> None:
    monkeypatch.setattr("fcntl.ioctl", clone if link == "reflink" else forbidden)
    (tmp_path / "a").write_bytes(b"12345")
    with raises(SourceError, "a changed"):
        link_file(tmp_path / "a", tmp_path / "b", 4, link)
    assert not (tmp_path / "b").exists()


# Another dtype


@pytest.mark.parametrize(
    ("stored", "wanted", "fmt"),
    [
        (torch.float32, "fp16", "bin"),
        (torch.bfloat16, "fp16", "safetensors"),
        *((stored, "bf16", "safetensors") for stored in (torch.float32, torch.float16)),
        *((stored, "fp32", "bin") for stored in (torch.float16, torch.bfloat16, torch.float32)),
    ],
)
def test_weights_are_rounded_to_nearest(
    tmp_path: Path, stored: torch.dtype, wanted: Any, fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "rewrite_apart", in_this_process)
    source, out = tmp_path / "source", tmp_path / "out"
    tiny.FACTORIES["bloom"](source, dtype=stored, fmt=fmt, sharded=True)
    out.mkdir()
    needed: list[int] = []
    options = TransferOptions(dtype=wanted, tied=["lm_head.weight"])
    how, _ = transfer(read_checkpoint(source), source, out, options, space=needed.append)
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


def to_half(value: float) -> float:
    """Nearest float16, by NumPy's own conversion."""
    return float(np.float64(value).astype(np.float32).astype(np.float16))


def one_file(folder: Path, state: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(dict(state), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_only_floating_point_changes_and_what_is_kept_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of 16 bytes, too."""
    monkeypatch.setattr("converter.weights.rewrite.BLOCK", 16)
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
    _, digests = transfer(
        read_checkpoint(source), source, out, TransferOptions(dtype="fp16", keep=["slopes"])
    )
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
    assert digests == {"model.safetensors": files.sha256(out / "model.safetensors")}
    for tensor in read_header(out / "model.safetensors").values():
        assert tensor.offset % ITEM_BYTES[tensor.dtype] == 0


@pytest.mark.parametrize(
    ("words", "value", "said"),
    [
        (["--dtype", "fp16"], 7e4, ("7e+04", "float16", "another --dtype")),
        (["--dtype", "bf16"], 3.4e38, ("3.4e+38", "bfloat16", "another --dtype")),
        (["--dtype", "bf16"], float("nan"), ("model.safetensors", "NaN or infinite")),
        ([], float("-inf"), ("model.safetensors", "NaN or infinite")),
    ],
)
def test_values_that_are_refused(
    make_source: Callable[..., Path],
    refused: Callable[..., str],
    words: list[str],
    value: float,
    said: Words,
) -> None:
    source = make_source("bloom")
    state = load_file(source / "model.safetensors")
    next(tensor for tensor in state.values() if tensor.dim() == 2)[1, 1] = value
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    says(refused(source, "--scale", "2", "--out", source.parent / "out", *words), said)


def test_a_repository_in_another_dtype(pristine: Pristine, run: Command, tmp_path: Path) -> None:
    """It verifies, loads in its dtype, and computes what the rounded weights compute. Its slopes are kept."""
    source, out, plain = pristine("jais"), tmp_path / "out", tmp_path / "plain"
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


def test_a_dtype_that_the_weights_have_is_no_conversion(
    pristine: Pristine, run: Command, tmp_path: Path
) -> None:
    """They are copied, and may be linked; what converts them in earnest may not."""
    source, words = pristine("jais"), ("--scale", "2", "--train-length", "32", "--no-verify", "--json")
    half, out = tmp_path / "half", tmp_path / "out"
    assert run(source, *words, "--out", half, "--dtype", "bf16").code == 0
    shutil.copytree(source, tmp_path / "bf16")
    (tmp_path / "bf16" / "model.safetensors").write_bytes((half / "model.safetensors").read_bytes())
    done = run(tmp_path / "bf16", *words, "--out", out, "--dtype", "bf16", "--hard-link")
    assert done.code == 0, done.err
    assert done.json["weights"].keys() <= {"hard-linked", "shared"}
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    card = (out / "README.md").read_text()
    assert "--dtype bf16" in card
    assert "converted to" not in card
    assert "Weights, tokenizer" in card
    refused = run(tmp_path / "bf16", *words, "--out", tmp_path / "no", "--dtype", "fp16", "--hard-link")
    says(refused.err, "drop --dtype", "link")
    assert not (tmp_path / "no").exists()


# What not every transformers loads as it is


@pytest.mark.parametrize("metadata", [None, [], "text", {"total_size": 7, "own": "kept"}], ids=str)
def test_an_index_has_metadata_to_which_transformers_can_add(
    make_source: Pristine, run: Command, tmp_path: Path, metadata: Any
) -> None:
    source, out = make_source("bloom", sharded=True), tmp_path / "out"
    index = source / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    total = content.pop("metadata")["total_size"]
    index.write_text(json.dumps({**content, **({} if metadata is None else {"metadata": metadata})}))
    assert run(source, "--scale", "2", "--out", out, "--no-verify").code == 0
    written = json.loads((out / index.name).read_text())
    assert written["weight_map"] == content["weight_map"]
    if isinstance(metadata, dict):
        assert (out / index.name).read_bytes() == index.read_bytes()
    else:
        assert written["metadata"] == {"total_size": total}
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    expected = tensors(source)["transformer.word_embeddings.weight"]
    assert torch.equal(model.get_input_embeddings().weight, expected)


FORMATS: dict[str, tuple[dict[str, str] | None, dict[str, str] | None]] = {
    "no metadata": (None, None),
    "torch": ({"format": "pt", "own": "kept"}, {"format": "pt", "own": "kept"}),
    "mlx": ({"format": "mlx"}, {"format": "mlx"}),
    "no format": ({"own": "kept"}, {"own": "kept", "format": "pt"}),
    "numpy": ({"format": "np"}, {"format": "pt"}),
    "flax": ({"format": "flax"}, {"format": "pt"}),
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("link", [None, "hard"])
def test_the_header_has_a_format_that_transformers_4_loads(
    make_source: Pristine, tmp_path: Path, kind: str, link: Any
) -> None:
    source, out = make_source("bloom"), tmp_path / "out"
    before, after = FORMATS[kind]
    file = source / "model.safetensors"
    stored = load_file(file)
    file.unlink()
    save_file(stored, file, metadata=before)
    convert(source, out, scale=2, link=link, verify=False)
    assert read_metadata(out / file.name) == after
    assert ((out / file.name).read_bytes() == file.read_bytes()) == (before == after)
    assert {name: each.tolist() for name, each in load_file(out / file.name).items()} == {
        name: each.tolist() for name, each in stored.items()
    }
    AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)


# Several files at once


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even small files are made several at once."""
    monkeypatch.setattr(transfer_module, "LEAST", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)


def sharded(folder: Path, count: int, size: int = 1000) -> Path:
    """Shards of one tensor each."""
    folder.mkdir()
    weight_map = {}
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        save_file({f"t{number}": torch.randn(size)}, folder / file, metadata={"format": "pt"})
        weight_map[f"t{number}"] = file
    index = {"metadata": {"total_size": 4 * size * count}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_many_files_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str], dtype: Any) -> None:
    source, out = sharded(tmp_path / "source", 12), tmp_path / "out"
    out.mkdir()
    how, digests = transfer(read_checkpoint(source), source, out, TransferOptions(dtype=dtype), progress=True)
    assert how == {"converted" if dtype else "copied": 12}
    assert ("converting weights" if dtype else "copying weights") in capfd.readouterr().err
    assert dtype or all((out / path.name).read_bytes() == path.read_bytes() for path in source.iterdir())
    assert digests == {path.name: files.sha256(path) for path in out.glob("*.safetensors")}
    assert names(out) == names(source)


@pytest.mark.usefixtures("many")
def test_one_failure_stops_all(tmp_path: Path) -> None:
    source, out = sharded(tmp_path / "source", 200), tmp_path / "out"
    out.mkdir()
    checkpoint = read_checkpoint(source)
    os.truncate(source / "model-00003-of-00200.safetensors", 900)
    with raises(SourceError, "model-00003-of-00200.safetensors changed"):
        transfer(checkpoint, source, out)
    assert len(names(out)) < 200


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("endless", ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"])
def test_an_interruption_ends_files_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endless: str
) -> None:
    """One file is copied for ever; Ctrl-C reaches the thread that waits, and the others see it."""
    source, out = sharded(tmp_path / "source", 3), tmp_path / "out"
    out.mkdir()
    copy = transfer_module.copy_file

    def copy_for_ever(path: Path, target: Path, size: int, look: Callable[..., object]) -> str:
        while path.name == endless:
            look(memoryview(b"more"))
            time.sleep(0.01)
        return copy(path, target, size, look)

    def interrupted(_: object) -> Any:
        yield from ()
        raise KeyboardInterrupt

    monkeypatch.setattr(transfer_module, "copy_file", copy_for_ever)
    monkeypatch.setattr(transfer_module, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        transfer(read_checkpoint(source), source, out)


# The process that reads a .bin file


class Hungry:
    """A pickle that takes ten terabytes when it is read."""

    def __reduce__(self) -> Any:
        return bytearray, (10**13,)


PLAIN = {"dtype": None, "keep": [], "expected": [], "tied": [], "ignored": None}


@pytest.fixture
def simple(tmp_path: Path) -> Path:
    """A small file to convert."""
    torch.save({"a": torch.ones(2)}, tmp_path / "a.bin")
    return tmp_path / "a.bin"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that are started."""
    processes: list[Any] = []
    start = worker.subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> Any:
        processes.append(start(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(worker.subprocess, "Popen", popen)
    return processes


def damaged(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (damaged, SourceError, ("a.bin", "damaged")),
        ({"target": "none/a"}, OSError, "No such file or directory"),
        ({"expected": ["b"]}, SourceError, ("'b'", "a.bin")),
        ({"dtype": "no dtype"}, RuntimeError, "KeyError: 'no dtype'"),
        (lambda path: torch.save({"a": Hungry()}, path), SourceError, ("a.bin", "memory")),
    ],
)
def test_errors_of_the_process_are_those_of_the_run(
    tmp_path: Path, simple: Path, change: Any, error: type[Exception], words: Words
) -> None:
    given: dict[str, Any] = {"target": "a", **(change if isinstance(change, dict) else {})}
    if callable(change):
        change(simple)
    with raises(error, words) as raised:
        rewrite_apart(simple, tmp_path / given.pop("target"), {**PLAIN, **given}, bool)
    assert not isinstance(raised.value, OSError) or raised.value.errno == errno.ENOENT
    assert not isinstance(raised.value, RuntimeError) or "Traceback" in str(raised.value.__cause__)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("change", [lambda path: path.write_bytes(b"no"), lambda path: os.truncate(path, 99)])
def test_a_bin_file_of_another_size(
    make_source: Callable[..., Path], tmp_path: Path, change: Callable[[Path], object]
) -> None:
    source, out = make_source("bloom", fmt="bin"), tmp_path / "out"
    out.mkdir()
    checkpoint = read_checkpoint(source)
    change(source / "pytorch_model.bin")
    with raises(SourceError, "pytorch_model.bin changed"):
        transfer(checkpoint, source, out)


@pytest.mark.parametrize(
    ("sent", "error", "words"),
    [
        (signal.SIGKILL, SourceError, ("pipe.bin", "killed", "memory")),
        (signal.SIGBUS, SourceError, "pipe.bin was cut off"),
        (signal.SIGSEGV, SourceError, ("pipe.bin is damaged", "-11")),
        (None, KeyboardInterrupt, ()),
    ],
)
def test_a_run_that_is_stopped_ends_the_process(
    tmp_path: Path, started: list[Any], sent: Any, error: type[BaseException], words: Words
) -> None:
    """It waits until it is killed, since nobody writes to its pipe."""
    os.mkfifo(tmp_path / "pipe.bin")

    def stop() -> None:
        if sent is None:
            raise KeyboardInterrupt
        started[0].send_signal(sent)

    with raises(error, words):
        rewrite_apart(tmp_path / "pipe.bin", tmp_path / "never", PLAIN, stop)
    assert None not in [process.poll() for process in started]


def test_the_process_ends_with_its_run(tmp_path: Path) -> None:
    """Even when the run is killed, or ended before the process began."""
    os.mkfifo(tmp_path / "pipe.bin")
    code = (
        "from pathlib import Path; from converter.weights.worker import rewrite_apart\n"
        f"rewrite_apart(Path({str(tmp_path / 'pipe.bin')!r}), Path('never'), {PLAIN!r}, bool)"
    )
    run = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    while not (pids := children.read_text().split()):
        assert run.poll() is None
        time.sleep(0.01)
    run.kill()
    run.wait()
    for _ in range(100):
        if not any(alive(int(pid)) for pid in pids):
            break
        time.sleep(0.1)
    else:
        raise AssertionError("it still runs")
    words = [sys.executable, "-c", START, str(os.getppid()), *sys.path]
    late = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        assert late.wait(timeout=60) == 1
    finally:
        late.kill()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.usefixtures("fresh_workers")
def test_a_worker_runs_only_our_code(
    make_source: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile source may hold a ``torch.py`` and be the current folder. Other output is ignored."""
    source = make_source("bloom", fmt="bin")
    for name in ("torch", "json", "converter", "safetensors"):
        (source / f"{name}.py").write_text(f"open({str(tmp_path / 'it-ran')!r}, 'w')")
    noise = "print('[\"SourceError\"]', 'noise\\n' * 100_000, 'one', end='')"
    (tmp_path / "sitecustomize.py").write_text(noise)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(source)
    convert(source, tmp_path / "out", scale=2, verify=False)
    assert not (tmp_path / "it-ran").exists()
    with raises(SourceError, "'b'"):
        rewrite_apart(source / "pytorch_model.bin", tmp_path / "never", {**PLAIN, "expected": ["b"]}, bool)
