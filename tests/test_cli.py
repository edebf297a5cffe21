"""The command line: what goes where, and that it and the Python API are one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import converter
from converter import ConversionResult, Inspection, convert, inspect
from converter.cli import cli
from tests.conftest import MakeSource, Run, fingerprint

ROOT = Path(__file__).parent.parent
FAST = ("--scale", "2", "--no-verify")


def test_convert_is_the_default_command(
    pristine: Callable[..., Path], run: Callable[..., Run], tmp_path: Path
) -> None:
    source = pristine("bloom")
    for number, words in enumerate(
        [("convert", source, *FAST), (source, *FAST), (*FAST, source), ("--no-verify", "--scale=2", source)]
    ):
        out = tmp_path / str(number)
        result = run(*words, "--out", out)
        assert result.code == 0, result.err
        assert result.out == f"{out}\n"
    assert fingerprint(tmp_path / "0").keys() == fingerprint(tmp_path / "3").keys()


@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon"])
def test_a_verified_conversion(
    pristine: Callable[..., Path], run: Callable[..., Run], tmp_path: Path, family: str
) -> None:
    result = run(pristine(family), "--scale", "2", "--out", tmp_path / "out", "--json")
    assert result.code == 0, result.err
    checks = {check["name"]: check for check in result.json["checks"]}
    assert {"tensors", "slopes"} <= checks.keys()
    assert not checks["slopes"]["skipped"]
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert all(check["detail"] in card for check in checks.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_json_is_one_object_on_stdout(
    pristine: Callable[..., Path], run: Callable[..., Run], tmp_path: Path
) -> None:
    source, out = pristine("bloom"), tmp_path / "out"
    result = run(source, *FAST, "--train-length", "64", "--out", out, "--json")
    assert result.out.count("\n") == 1
    values = result.json
    assert values["path"] == str(out)
    assert (values["family"], values["model_type"], values["method"]) == ("bloom", "ntk_bloom", "ntk")
    assert values["alibi_scaling"] == {"type": "ntk", "factor": 2.0}
    assert values["train_length"] == 64
    assert values["files"] == {path.name: path.stat().st_size for path in out.iterdir()}
    assert values["config_changes"]["model_type"] == {"before": "bloom", "after": "ntk_bloom"}
    assert values["checks"] == []
    assert values["dry_run"] is False


def test_summary_on_stderr_and_quiet(
    pristine: Callable[..., Path], run: Callable[..., Run], tmp_path: Path
) -> None:
    source = pristine("bloom")
    said = run(source, *FAST, "--out", tmp_path / "a")
    assert "not verified" in said.err
    assert "trust_remote_code=True" in said.err
    assert "model.safetensors" not in said.err
    assert "%" not in said.err  # no progress bar: stderr is no terminal
    assert "model.safetensors" in run(source, *FAST, "--out", tmp_path / "b", "-v").err
    quiet = run(source, *FAST, "--out", tmp_path / "c", "-q")
    assert (quiet.out, quiet.err) == (f"{tmp_path / 'c'}\n", "")


def test_dry_run_writes_nothing(make_source: MakeSource, run: Callable[..., Run], tmp_path: Path) -> None:
    source = make_source("mpt", {"max_seq_len": 64})
    before, names = fingerprint(tmp_path), sorted(tmp_path.rglob("*"))
    result = run(source, "--scale", "2", "--out", tmp_path / "out", "--dry-run")
    assert result.code == 0
    for words in (
        "model.safetensors",
        "ntk_alibi.py",
        '- model_type: "mpt"',
        '+ model_type: "ntk_mpt"',
        "+ max_seq_len: 128",
    ):
        assert words in result.out
    values = run(source, "--scale", "2", "--out", tmp_path / "out", "--dry-run", "--json").json
    assert values["dry_run"] is True
    assert values["files"]["model.safetensors"] == (source / "model.safetensors").stat().st_size
    assert values["config_changes"]["max_seq_len"] == {"before": 64, "after": 128}
    assert (fingerprint(tmp_path), sorted(tmp_path.rglob("*"))) == (before, names)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
def test_dry_run_says_what_the_real_run_writes(
    pristine: Callable[..., Path], run: Callable[..., Run], tmp_path: Path, fmt: str, sharded: bool
) -> None:
    words = (pristine("bloom", fmt=fmt, sharded=sharded), *FAST, "--out", tmp_path / "out", "--json")
    planned, done = run(*words, "--dry-run").json, run(*words).json
    assert planned["files"].keys() == done["files"].keys()
    if fmt == "safetensors":
        assert all(size in (None, done["files"][name]) for name, size in planned["files"].items())
    assert planned["config_changes"] == done["config_changes"]


def test_overwrite(pristine: Callable[..., Path], run: Callable[..., Run], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "stale").write_text("old")
    (out / "config.json").write_text("{}")
    assert run(pristine("bloom"), *FAST, "--out", out).code == 1
    assert run(pristine("bloom"), *FAST, "--out", out, "--overwrite").code == 0
    assert not (out / "stale").exists()
    assert json.loads((out / "config.json").read_text())["model_type"] == "ntk_bloom"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_out_through_a_link(pristine: Callable[..., Path], run: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert run(pristine("bloom"), *FAST, "--out", tmp_path / "link").out == f"{tmp_path / 'real'}\n"
    assert (tmp_path / "link/config.json").exists()


def test_python_and_command_line_give_the_same(
    pristine: Callable[..., Path], run: Callable[..., Run], tmp_path: Path
) -> None:
    source = pristine("bloom")
    result = convert(source, tmp_path / "out", scale=2, verify=False)
    assert isinstance(result, ConversionResult)
    values = run(source, *FAST, "--out", tmp_path / "out", "--overwrite", "--json").json
    assert {**result.to_json(), "seconds": 0} == {**values, "seconds": 0}
    found = inspect(str(source), scale=2)
    assert isinstance(found, Inspection)
    assert json.loads(json.dumps(found.to_json())) == run("inspect", source, "--scale", "2", "--json").json


def test_the_package_s_members() -> None:
    assert dir(converter) == sorted(converter.__all__)
    for name in converter.__all__:
        assert getattr(converter, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'torch'"):
        converter.torch  # noqa: B018


def test_help_names_every_command_and_option(run: Callable[..., Run]) -> None:
    shown = run("--help")
    assert shown.code == 0
    for name, command in cli.commands.items():
        assert name in shown.out
        page = run(name, "--help")
        assert page.code == 0
        for parameter in command.params:
            assert all(option in page.out for option in parameter.opts if option.startswith("--"))
            if name == "convert":
                assert all(option in shown.out for option in parameter.opts if option.startswith("--"))


def test_version(run: Callable[..., Run]) -> None:
    assert run("--version").out == f"ntk-convert, version {converter.__version__}\n"


@pytest.mark.parametrize("words", [[], ["convert"], ["inspect"], ["--scale", "2"], ["model"]])
def test_incomplete_command_lines(run: Callable[..., Run], words: list[str]) -> None:
    result = run(*words)
    assert (result.code, result.out) == (2, "")
    assert result.err


def test_a_failure_shows_its_traceback_only_when_asked(run: Callable[..., Run], tmp_path: Path) -> None:
    words = ("inspect", tmp_path)
    assert run(*words).err.count("\n") == 1
    loud = run(*words, "-v").err
    assert loud.startswith("Traceback")
    assert loud.splitlines()[-1].startswith("error: ")


def test_a_bug_is_one_line_too(
    pristine: Callable[..., Path], run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("two\nlines")

    monkeypatch.setattr("converter.pipeline.write_card", broken)
    result = run(pristine("bloom"), *FAST, "--out", tmp_path / "out")
    assert result.code == 1
    assert (
        result.err
        == r"error: unexpected ValueError: two\nlines; this is a bug, please report it with -v" + "\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_is_no_traceback(pristine: Callable[..., Path]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "converter", "inspect", str(pristine("bloom"))]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    os.close(writer)
    assert "Traceback" not in result.stderr
