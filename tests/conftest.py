"""Fixtures of all tests."""

from __future__ import annotations

import os
import re

# Before NumPy and torch are imported: the tests run one process a core, and threads of their own
# would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import atexit
import gc
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import pytest

from tests import forks
from tests.messages import Words, says

pytest_plugins = ("tests.patched", "tests.onnx_graphs", "tests.runners", "tests.hub_server")

# The user's token, cache and saved code stay out of the tests, and each worker has its own. Set
# before anything imports huggingface_hub, which reads it once.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="ntk-convert-tests-")
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
os.environ.pop("HF_TOKEN", None)

# A shared machine is no reason to fail. Every run tries the same examples, so a change is judged by what it
# changed; ``--hypothesis-profile random`` looks for new ones.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.load_profile("same")

# Files whose tests do not depend on the version of transformers. make test-4.57 leaves them out, except for
# tests that are marked ``version``. A new test file is not in this list, so it runs on both versions.
ANY_VERSION = {
    *("architecture", "benchmarks", "cli", "convert_job", "converted_repository", "docs"),
    *("evaluation_tasks", "families_command", "family_details", "faults", "hostile", "hub", "input_limit"),
    *("inspect", "install", "manifest", "notebook", "oldest_onnxruntime", "onnx_calibrate", "onnx_concave"),
    *("onnx_example", "onnx_export", "onnx_genai", "onnx_quantise", "onnx_server"),
    *("onnx_sessions", "onnx_tasks", "onnx_validation", "outputs", "overrides", "pictures", "placement"),
    *("push", "refusals", "scaling", "slopes", "staging", "stored_tensors", "transfer", "weights"),
}

Pristine = Callable[..., Path]
MakeSource = Callable[..., Path]
RunCli = Callable[..., "Run"]
Refuses = Callable[..., Exception]
Refused = Callable[..., str]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that do not depend on the version of transformers."""
    for item in items:
        parameters = getattr(item, "callspec", None) and item.callspec.params
        graph = str((parameters or {}).get("how", "")).startswith(("ort", "portable"))
        same = graph or item.path.stem.removeprefix("test_") in ANY_VERSION
        if same and not item.get_closest_marker("version"):
            item.add_marker(pytest.mark.any_version)


def pytest_collection_finish() -> None:
    """What was imported stays to the end, so the garbage collector need not look at it again and again."""
    gc.freeze()


def pytest_runtest_teardown() -> None:
    """The example's and genai's first sessions take denormal numbers for zero, which hypothesis refuses."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)


@pytest.fixture(scope="session", autouse=True)
def _each_picture_once() -> Iterator[None]:
    """The picture of a card takes as long as a tiny conversion, and most tests' are the same."""
    from converter.pictures import per_head

    draw, drawn = per_head.card_picture, {}

    def draw_once(model: Any) -> bytes:
        key = repr((model.variants, model.train_length, model.rotary, model.bias_scale))
        if key not in drawn:
            drawn[key] = draw(model)
        return drawn[key]

    with mock.patch.object(per_head, "card_picture", draw_once):
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """No test is about a power failure."""
    with mock.patch.object(os, "fsync", int):
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread_a_graph() -> Iterator[None]:
    """A session of onnxruntime has a thread a core; they spin while they wait, where tests could run."""
    from converter.onnx import session

    quiet_options = session.quiet_options

    def of_one_thread() -> Any:
        options = quiet_options()
        options.intra_op_num_threads = 1
        return options

    with mock.patch.object(session, "quiet_options", of_one_thread):
        yield


@pytest.fixture(scope="session", autouse=True)
def _forked_workers() -> Iterator[None]:
    """The processes that rewrite weights start within milliseconds."""
    with mock.patch("converter.weights.worker.subprocess", forks):
        yield


def in_this_process(source: Path, target: Path, names: dict[str, Any], _: object) -> str:
    """In place of ``worker.rewrite_apart``: a process for each of many files would take minutes."""
    from converter.weights.rewrite import rewrite

    ignored = names["ignored"]
    return rewrite(source, target, **{**names, "ignored": ignored and re.compile(ignored)})


@pytest.fixture
def fresh_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that rewrite weights are new interpreters, as users have them."""
    monkeypatch.setattr("converter.weights.worker.subprocess", subprocess)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``pristine(name, **options)``: a tiny checkpoint, written once a session; do not change it.

    The name is that of a decoder or an encoder in ``tests.tiny``, or the model_type of a rotary model.
    """
    from tests import tiny
    from tests.tiny.rotary import rotary

    made: dict[str, Path] = {}

    def get(name: str = "bloom", **options: Any) -> Path:
        key = json.dumps([name, options], sort_keys=True)
        if key not in made:
            folder, factory = tmp_path_factory.mktemp(name), (tiny.FACTORIES | tiny.ENCODERS).get(name)
            made[key] = factory(folder, **options) if factory else rotary(folder, name, **options)
        return made[key]

    return get


@pytest.fixture
def make_source(pristine: Callable[..., Path], tmp_path: Path) -> MakeSource:
    """``make_source(name, changes, **options)``: a checkpoint of its own in ``tmp_path / "source"``.

    ``changes`` are keys of config.json; see ``edit_json``.
    """

    def make(name: str = "bloom", changes: dict[str, Any] | None = None, **options: Any) -> Path:
        folder = tmp_path / "source"
        shutil.copytree(pristine(name, **options), folder)
        if changes:
            edit_json(folder / "config.json", changes)
        return folder

    return make


@dataclass(frozen=True)
class Run:
    """What one command line gave."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """``run(*words)``: the command line, in this process."""
    from converter import progress
    from converter.cli import main

    monkeypatch.setattr(progress, "LONG", 3600)  # a stage that is slow on a busy machine says nothing more

    def call(*words: object) -> Run:
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main([str(word) for word in words])
        captured = capfd.readouterr()
        return Run(int(exit_.value.code or 0), captured.out, captured.err)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield call
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def refused(run: Callable[..., Run], tmp_path: Path) -> Callable[..., str]:
    """``refused(*words, code=1)``: a command in vain; the line, and that nothing in ``tmp_path`` changed."""

    def call(*words: object, code: int = 1) -> str:
        before, files = fingerprint(tmp_path), sorted(tmp_path.rglob("*"))
        result = run(*words)
        assert result.code == code, result.err
        assert result.out == ""
        assert result.err.startswith("error: ")
        assert result.err.count("\n") == 1
        assert "this is a bug" not in result.err
        assert sorted(tmp_path.rglob("*")) == files
        assert fingerprint(tmp_path) == before
        return result.err

    return call


@pytest.fixture
def refuses(tmp_path: Path) -> Refuses:
    """``refuses(source, words, error=ConverterError, out=..., **options)``: ``convert`` in vain.

    Checks that the message is one line with these words, and that nothing in ``tmp_path`` changed. Without
    other options, the conversion is one by a factor of 2.
    """
    from converter import convert
    from converter.errors import ConverterError

    def call(
        source: Path | str, words: Words, error: type[Exception] = ConverterError, **options: Any
    ) -> Exception:
        before, files = fingerprint(tmp_path), sorted(tmp_path.rglob("*"))
        with pytest.raises(error) as raised:
            convert(source, options.pop("out", tmp_path / "out"), **{"scale": 2, "verify": False, **options})
        says(raised.value, words)
        assert "\n" not in str(raised.value)
        assert sorted(tmp_path.rglob("*")) == files
        assert fingerprint(tmp_path) == before
        return raised.value

    return call


def into_a_subfolder(folder: Path) -> None:
    """Moves the shards of a checkpoint."""
    (folder / "shards").mkdir()
    [index] = folder.glob("*.index.json")
    files = json.loads(index.read_text())["weight_map"]
    for name in set(files.values()):
        (folder / name).rename(folder / "shards" / name)
    edit_json(index, {"weight_map": {tensor: f"shards/{name}" for tensor, name in files.items()}})


def edit_json(path: Path, changes: dict[str, Any]) -> None:
    """Sets keys of a JSON file; None removes one, and an ellipsis is null."""
    value = json.loads(path.read_text(encoding="utf-8")) | changes
    kept = {key: None if item is ... else item for key, item in value.items() if item is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")


def fingerprint(folder: Path) -> dict[str, tuple[str, int]]:
    """Every file's hash and time of change, to show that nothing touched it."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
