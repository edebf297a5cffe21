"""The command line: what it prints and where, its help, and that the Python API gives the same results."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import click
import pytest

import converter
from converter import ConversionResult, Inspection, convert, inspect
from converter.cli import cli
from converter.cli.click_additions import DefaultGroup
from converter.errors import SourceError, UsageError, option
from converter.formatting import argv
from tests import forks
from tests.conftest import MakeSource, Pristine, Refused, RunCli, fingerprint
from tests.messages import Words, raises, says
from tests.patched import CHECKED

ROOT = Path(__file__).parent.parent
FAST = ("--scale", "2", "--no-verify")


def test_convert_is_the_default_command(pristine: Pristine, run: RunCli, tmp_path: Path) -> None:
    source = pristine("bloom")
    for number, words in enumerate(
        [("convert", source, *FAST), (source, *FAST), (*FAST, source), ("--no-verify", "--scale=2", source)]
    ):
        out = tmp_path / str(number)
        result = run(*words, "--out", out)
        assert result.code == 0, result.err
        assert result.out == f"{out}\n"
    assert fingerprint(tmp_path / "0").keys() == fingerprint(tmp_path / "3").keys()


@pytest.mark.parametrize("option", ["-q", "--json", "-v"])
def test_options_of_every_command_may_stand_before_its_name(
    pristine: Pristine, run: RunCli, option: str
) -> None:
    before, after = run(option, "inspect", pristine("bloom")), run("inspect", pristine("bloom"), option)
    assert (before.code, before.out) == (0, after.out)


def test_json_is_one_object_on_stdout(pristine: Pristine, run: RunCli, tmp_path: Path) -> None:
    source, out = pristine("bloom"), tmp_path / "out"
    result = run(source, "--scale", "2", "--train-length", "64", "--out", out, "--json")
    assert result.out.count("\n") == 1
    values = result.json
    assert values["path"] == str(out)
    assert (values["family"], values["model_type"], values["method"]) == ("bloom", "ntk_bloom", "ntk")
    assert values["alibi_scaling"] == {"type": "ntk", "factor": 2.0}
    assert values["train_length"] == 64
    assert values["files"] == {path.name: path.stat().st_size for path in out.iterdir()}
    assert values["config_changes"]["model_type"] == {"before": "bloom", "after": "ntk_bloom"}
    assert [check["name"] for check in values["checks"]] == CHECKED
    assert not any(check["skipped"] for check in values["checks"])
    assert values["dry_run"] is False


def test_summary_on_stderr_and_quiet(pristine: Pristine, run: RunCli, tmp_path: Path) -> None:
    source = pristine("bloom")
    said = run(source, *FAST, "--out", tmp_path / "a")
    assert "not verified" in said.err
    assert "trust_remote_code=True" in said.err
    assert "model.safetensors" not in said.err
    assert "%" not in said.err  # no progress bar: stderr is not a terminal
    assert "model.safetensors" in run(source, *FAST, "--out", tmp_path / "b", "-v").err
    quiet = run(source, *FAST, "--out", tmp_path / "c", "-q")
    assert (quiet.out, quiet.err) == (f"{tmp_path / 'c'}\n", "")


@pytest.mark.parametrize("words", [[], ["-q"]])
def test_a_long_stage_says_its_name_where_no_terminal_draws_a_bar(
    pristine: Pristine, tmp_path: Path, words: list[str]
) -> None:
    words = [str(pristine("bloom")), "--scale", "2", "--out", str(tmp_path / "out"), *words]
    code = f"from converter import cli, progress; progress.LONG = 0.05; cli.main({words!r})"
    done = forks.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert ("verifying ...\n" in done.stderr) == (words[-1] != "-q")


def test_dry_run_writes_nothing(make_source: MakeSource, run: RunCli, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(("fmt", "sharded"), [("safetensors", False), ("bin", True)])
def test_dry_run_says_what_the_real_run_writes(
    pristine: Pristine, run: RunCli, tmp_path: Path, fmt: str, sharded: bool
) -> None:
    words = (pristine("bloom", fmt=fmt, sharded=sharded), *FAST, "--out", tmp_path / "out", "--json")
    planned, done = run(*words, "--dry-run").json, run(*words).json
    assert planned["files"].keys() == done["files"].keys()
    if fmt == "safetensors":
        assert all(size in (None, done["files"][name]) for name, size in planned["files"].items())
    assert planned["config_changes"] == done["config_changes"]


def test_overwrite(pristine: Pristine, run: RunCli, tmp_path: Path) -> None:
    """Through a link, too."""
    out, link = tmp_path / "out", tmp_path / "link"
    out.mkdir()
    link.symlink_to(out)
    (out / "vocab.txt").write_text("old")
    (out / "config.json").write_text("{}")
    assert run(pristine("bloom"), *FAST, "--out", link).code == 1
    assert run(pristine("bloom"), *FAST, "--out", link, "--overwrite").out == f"{out}\n"
    assert not (out / "vocab.txt").exists()
    assert json.loads((out / "config.json").read_text())["model_type"] == "ntk_bloom"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]


@pytest.mark.parametrize(
    ("out", "words", "code"),
    [
        ("a/b/out", FAST, 0),
        ("a/b/out", [*FAST, "--dry-run"], 0),
        ("a/b/out", ["--scale", "0.5"], 2),
        ("file/out", FAST, 1),
        ("file/b/out", FAST, 1),
    ],
)
def test_the_parents_of_out(
    pristine: Pristine, run: RunCli, tmp_path: Path, out: str, words: list[str], code: int
) -> None:
    """They are made, once it is sure that something will be written there."""
    (tmp_path / "file").write_text("mine")
    done = run(pristine("bloom"), *words, "--out", tmp_path / out)
    assert done.code == code
    assert (tmp_path / out / "config.json").exists() == (words == FAST and code == 0)
    made = ["a"] if (tmp_path / out).exists() else []
    assert sorted(path.name for path in tmp_path.iterdir()) == [*made, "file"]
    assert (tmp_path / "file").read_text() == "mine"


def test_python_and_command_line_give_the_same(pristine: Pristine, run: RunCli, tmp_path: Path) -> None:
    source = pristine("bloom")
    result = convert(source, tmp_path / "out", scale=2, verify=False)
    assert isinstance(result, ConversionResult)
    values = run(source, *FAST, "--out", tmp_path / "out", "--overwrite", "--json").json
    assert {**result.to_json(), "onnx": None, "pushed": None, "seconds": 0} == {**values, "seconds": 0}
    found = inspect(str(source), scale=2)
    assert isinstance(found, Inspection)
    assert json.loads(json.dumps(found.to_json())) == run("inspect", source, "--scale", "2", "--json").json


def test_the_package_s_members() -> None:
    assert dir(converter) == sorted(converter.__all__)
    for name in converter.__all__:
        assert getattr(converter, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'torch'"):
        converter.torch  # noqa: B018


# --- help


@pytest.fixture
def page(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """``page(*words)``: what ``--help`` prints on a terminal of 80 columns."""

    def call(*words: str) -> str:
        monkeypatch.setenv("COLUMNS", "80")
        shown = run(*words, "--help")
        assert (shown.code, shown.err) == (0, "")
        return shown.out

    return call


@pytest.mark.parametrize("words", [[], *([name] for name in cli.commands)])
def test_help_fits_80_columns_and_is_not_cut(page: Callable[..., str], words: list[str]) -> None:
    text = page(*words)
    assert max(map(len, text.splitlines())) <= 80
    assert "..." not in text.replace("COMMAND ...", "").replace("MODEL...", "")


@pytest.mark.parametrize("name", cli.commands)
def test_help_describes_every_parameter(page: Callable[..., str], name: str) -> None:
    command = cli.commands[name]
    context = click.Context(command, info_name=name)
    shown = {name: page(name)} | ({"convert": page()} if name == "convert" else {})
    for text in shown.values():
        flat = " ".join(text.split())
        for parameter in command.get_params(context):
            record = parameter.get_help_record(context)
            assert record is not None
            declaration, description = record
            assert description
            assert " ".join([declaration, *description.split()]) in flat
    assert re.search(rf"^  {name} +\S", page(), re.MULTILINE)
    usage = shown[name].split("\n\n")[0]
    required = [parameter for parameter in command.params if parameter.required]
    assert all(parameter.make_metavar(context) in usage for parameter in required)


# --- wrong usage


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("--frobnicate", "convert"),
        ("model", "convert"),
        ("convert", "convert"),
        ("--scale 2", "convert"),
        ("inspect", "inspect"),
        ("inspect model --scale two", "inspect"),
        ("push folder", "push"),
        ("eval model --lengths 1k", "eval"),
        ("eval model --tasks reading", "eval"),
        ("tune model", "tune"),
        ("plot model", "plot"),
        ("export", "export"),
        ("validate", "validate"),
        ("families bloom mpt", "families"),
    ],
)
def test_wrong_usage_points_to_the_command_s_own_help(run: RunCli, words: str, command: str) -> None:
    result = run(*words.split())
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert re.search(rf"[.?)] See ntk-convert {command} --help\.\n$", result.err)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        # The option, where the library's messages name the parameter of Python
        ("inspect plain --scale 0.5", "--scale 0.5 is out of range"),
        ("inspect plain --scale 1e308", ("--scale 1e+308 is out of range", "2147483648")),
        ("plot plain --scales 2,1e308 --out o", "--scales 1e+308 is out of range"),
        ("inspct plain", "inspect?"),
        ("evaluate plain", "eval?"),
        ("plain --scale 2 --out=", ("--out", "empty")),
        ("inspect plain --train-length 256 --target-length 256", "trained length 256"),
        ("inspect plain --target-length 256 --dynamic position", ("needs no target", "drop --target-length")),
        ("inspect plain --set n_head", ("--set 'n_head'", "KEY=VALUE")),
        ("convert plain --scale 2 --out / --overwrite", "--out /"),
        ("convert plain --out o --no-verify --push-to-hub a/b", "drop --no-verify or --push-to-hub"),
        ("convert plain --scale 2 --out o --create-pr", ("--create-pr", "--push-to-hub")),
        ("convert plain --out o --scale 2 --dtype bf16 --link", ("drop --dtype", "link")),
        (
            "convert plain --out o --onnx --calibrate plain/config.json",
            ("--calibrate", "give --onnx-dtype int4"),
        ),
        # An option in the plural
        ("eval plain --methods linear --scales 0.5", "--scales 0.5 is out of range"),
        ("inspect none/x --revision=", "--revision is empty"),
        # What was typed, and no absolute path in its place
        ("export plain/", "error: plain "),
        ("push .. a/b", ("error: .. ", "config.json")),
        ("validate ../here/none", "error: ../here/none "),
        ("convert plain --scale 2 --out file/x", ("--out file/x", "below file")),
        ("inspect plain --slopes ./file", ("error: file ", "JSON")),
    ],
)
def test_errors_name_what_was_typed(
    run: RunCli, pristine: Pristine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: Words
) -> None:
    here = tmp_path / "here"
    shutil.copytree(pristine("bloom"), here / "plain")
    (here / "file").touch()
    monkeypatch.chdir(here)
    error = run(*words.split()).err
    says(error, said)
    assert "`" not in error


def test_errors_name_the_parameter(pristine: Pristine) -> None:
    with pytest.raises(converter.UsageError, match=r"^`scale` 0\.5 is out of range"):
        inspect(pristine("bloom"), scale=0.5)
    with raises(converter.UsageError, "'scle'", "'scale'"):
        inspect(pristine("bloom"), scle=2)  # type: ignore[call-arg]
    with raises(converter.UsageError, "`lengths`", "`train_length`"):
        converter.evaluate(pristine("bloom"), tasks="passkey", items=2)
    with raises(converter.UsageError, "`OnnxOptions.dtype` 'x'"):
        converter.OnnxOptions(dtype="x")


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((None, "M"), {"scale": 2.5, "target_length": 0}, "M --scale 2.5 --target-length 0"),
        (
            ("push", "DIR", "me/x"),
            {"private": True, "create_pr": False, "branch": None},
            "push DIR me/x --private",
        ),
        (("export", "a b"), {"calibrate": ["c", "d"]}, "export 'a b' --calibrate c --calibrate d"),
        ((None, "M"), {"ramp": (1, 2), "set": [], "slopes": (), "method": ""}, "M --ramp 1 2"),
    ],
)
def test_command_lines_to_run_again(arguments: Any, options: dict[str, Any], words: str) -> None:
    assert shlex.join(argv(*arguments, **options)) == f"ntk-convert {words}"


@pytest.mark.parametrize(
    ("name", "python", "converting", "evaluating"),
    [
        ("scale", "`scale`", "--scale", "--scales"),
        ("overrides", "`overrides`", "--set", "--set"),
        ("no_verify", "`verify=False`", "--no-verify", "--no-verify"),
        ("onnx_dtype", "`OnnxOptions.dtype`", "--onnx-dtype", "--onnx-dtype"),
        ("calibrate", "`calibrate`", "--calibrate", "--calibrate"),
        ("unheard_of", "`unheard_of`", "`unheard_of`", "`unheard_of`"),
    ],
)
def test_parameters_in_messages(name: str, python: str, converting: str, evaluating: str) -> None:
    """Of the running command first; what a user wrote in backquotes stays as it is."""
    group = cast("DefaultGroup", cli)
    error = UsageError(f"{option[name]} is `scale`")
    assert str(error) == f"{python} is `scale`"
    for command, shown in (("convert", converting), ("eval", evaluating), (None, converting)):
        error.name_of = partial(group._flag_of, command)
        assert str(error) == f"{shown} is `scale`"
    assert str(SourceError(f"so {error.message}")) == f"so {python} is `scale`"


def test_no_words_at_all(run: RunCli) -> None:
    result = run()
    assert (result.code, result.out) == (2, "")
    assert "Usage: ntk-convert" in result.err


# --- shell completion


@pytest.fixture
def complete(run: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """``complete(line, shell="bash")``: what the shell is offered for the last word, in ``tmp_path``."""
    (tmp_path / "bloom-ntk").mkdir()
    monkeypatch.chdir(tmp_path)

    def call(line: str, shell: str = "bash") -> list[str]:
        words = line.split(" ")
        monkeypatch.setenv("_NTK_CONVERT_COMPLETE", f"{shell}_complete")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", words[-1] if shell == "fish" else str(len(words) - 1))
        result = run()
        assert (result.code, result.err) == (0, "")
        return result.out.splitlines()

    return call


COMMANDS = [f"plain,{name}" for name in sorted(cli.commands)]
SUMMARY = "Export a converted model, as an ONNX graph."
COMPLETIONS: list[tuple[str, list[str]]] = [
    # Folders and files
    *(
        (line, [f"dir,{line.split()[-1]}"])
        for line in (
            *("./b", "blo", "convert b", "inspect b", "tune b", "export b", "validate b", "push b"),
            *("eval ./bloom-ntk b", "./bloom-ntk --out b", "./bloom-ntk --cache-dir b"),
        )
    ),
    *((line, ["file,ex"]) for line in ("plot ex", "eval m --text ex", "tune m --prompts ex")),
    # The first word: a command, an option of convert, or a folder
    ("", COMMANDS),
    ("insp", ["plain,inspect"]),
    ("--h", ["plain,--help", "plain,--hard-link"]),
    ("--sc", ["plain,--scale"]),
    # Options and their choices
    ("./bloom-ntk --ove", ["plain,--overwrite"]),
    ("push ./bloom-ntk USER/NAME --b", ["plain,--branch"]),
    ("inspect ./bloom-ntk --method n", ["plain,ntk", "plain,ntk-published", "plain,none"]),
]


@pytest.mark.parametrize(
    ("shell", "line", "offered"),
    [
        *(("bash", line, offered) for line, offered in COMPLETIONS),
        ("zsh", "exp", ["plain", "export", SUMMARY]),
        ("zsh", "./b", ["dir", "./b", "_"]),
        ("fish", "exp", [f"plain,export\t{SUMMARY}"]),
        ("fish", "./b", ["dir,./b"]),
    ],
)
def test_completion(complete: Callable[..., list[str]], shell: str, line: str, offered: list[str]) -> None:
    assert complete(f"ntk-convert {line}", shell) == offered


def test_version(run: RunCli) -> None:
    assert run("--version").out == f"ntk-convert, version {converter.__version__}\n"


def test_a_failure_shows_its_traceback_only_when_asked(run: RunCli, tmp_path: Path) -> None:
    words = ("inspect", tmp_path)
    assert run(*words).err.count("\n") == 1
    loud = run(*words, "-v").err
    assert loud.startswith("Traceback")
    assert loud.splitlines()[-1].startswith("error: ")


def test_a_bug_is_one_line_too(
    pristine: Pristine, run: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("two\nlines")

    monkeypatch.setattr("yaml.safe_dump", broken)  # for the card
    result = run(pristine("bloom"), *FAST, "--out", tmp_path / "out")
    assert result.code == 1
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    says(result.err, r"ValueError: two\nlines", "this is a bug", "-v")
    assert list(tmp_path.iterdir()) == []


# --- what the shell gives it


def started(words: str, *, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs words of a shell, with the command line in $RUN."""
    added = {"RUN": f"{sys.executable} -m converter", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        ["sh", "-c", words], cwd=cwd, env=os.environ | added, capture_output=True, text=True, check=False
    )


DONE = ("error: ", "complete", "stdout", "No space left")

LOADED = ("trust_remote_code=True",)


@pytest.mark.parametrize(
    ("before", "after", "code", "printed", "said"),
    [
        # Streams that are closed, or full
        ("", "2>&-", 0, "{out}", ()),
        ("", ">&-", 0, "", LOADED),
        ("", "<&- >&- 2>&-", 0, "", ()),
        ("", "2>/dev/full", 0, "{out}", ()),
        ("", ">/dev/full", 1, "", DONE),
        # Limits
        (
            "ulimit -f 8;",
            "",
            1,
            "",
            ("error: File too large", "{out}", "raise the limit"),
        ),
        ("ulimit -d 150000;", "", 1, "", ("error: ", "not enough memory", "raise the limit")),
        # Languages
        ("LC_ALL=C", "", 0, "{out}", LOADED),
        ("PYTHONIOENCODING=ascii", "", 0, "{out}", LOADED),
    ],
)
def test_the_streams_limits_and_language_of_a_shell(
    pristine: Pristine,
    tmp_path: Path,
    before: str,
    after: str,
    code: int,
    printed: str,
    said: tuple[str, ...],
) -> None:
    place = tmp_path / "\u00e9"
    place.mkdir()
    source, out = pristine("bloom"), place / "out"
    verify = "" if after == "2>&-" or "-d" in before else "--no-verify"  # which takes most of the time
    done = started(f"{before} $RUN {source} --scale 2 --out {out} {verify} {after}", cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stdout.strip() == printed.format(out=out)
    says(done.stderr, *(word.format(out=out) for word in said))
    assert done.stderr.count("\n") == 1 if code else "error" not in done.stderr
    complete = code == 0 or said == DONE
    # Without memory, the hidden folder may stay, as after a kill: the next run removes it.
    left = [path for path in place.iterdir() if "-d" not in before or not path.name.startswith(".")]
    assert left == [out] * complete


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "another disk"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "choose a folder"),
        (errno.EMFILE, "ulimit -n"),
    ],
)
def test_a_failed_write_names_the_output(
    pristine: Pristine,
    refused: Refused,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    remedy: str,
) -> None:
    def fails(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.delattr(os, "copy_file_range", raising=False)
    monkeypatch.setattr(os, "write", fails)
    out = tmp_path / "out"
    says(refused(pristine("bloom"), *FAST, "--out", out), os.strerror(number), str(out), remedy)


def test_what_is_wrong_with_the_process_is_not_blamed_on_the_model(
    pristine: Pristine, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    with monkeypatch.context() as patch:
        patch.setattr("tempfile.gettempdir", none)
        assert "TMPDIR" in refused(pristine("bloom"), "--scale", "2", "--out", tmp_path / "out")

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("I/O error: Too many open files (os error 24)")

    with monkeypatch.context() as patch:
        patch.setattr("converter.verification.tensors.check_tensors", full)
        assert "ulimit -n" in refused(pristine("bloom"), "--scale", "2", "--out", tmp_path / "out")
    words = [sys.executable, "-OO", "-m", "converter", pristine("bloom"), "--scale", "2"]
    done = subprocess.run(
        [*words, "--out", tmp_path / "out"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "-OO" in done.stderr


def test_a_closed_pipe_gives_no_traceback(pristine: Pristine) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "converter", "inspect", str(pristine("bloom"))]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    os.close(writer)
    assert "Traceback" not in result.stderr
