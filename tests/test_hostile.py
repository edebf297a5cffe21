"""Hostile input: every fourth case of ``python -m tests.hostile`` (``make hostile``), and the messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from converter.errors import SourceError
from converter.source.jsonfile import parse_object
from tests.conftest import MakeSource, Refused, RunCli
from tests.hostile import sources
from tests.hostile.outcomes import outcomes
from tests.messages import Words, raises, says

ROOT = Path(__file__).parent.parent


def quick(kind: str) -> list[int]:
    """Every fourth example and some random cases."""
    examples = len(sources.KINDS[kind].examples)
    return [*range(0, examples, 4), *range(examples, examples + 12)]


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        *((name, quick(name)) for name, kind in sources.KINDS.items() if not kind.verify),
        pytest.param("verified", range(2), marks=pytest.mark.slow),
    ],
)
def test_hostile_sources(kind: str, numbers: list[int]) -> None:
    done = list(outcomes(kind, numbers))
    assert [case.number for case in done] == list(numbers)
    assert not {case.number: case.problems for case in done if case.problems}
    # The first of these is a good source: what is refused beside it is refused for what it is.
    assert kind != "configs" or done[0].code == 0


# The watch itself


PLANTED = {
    "(out / 'new').write_text('allowed'); exec('1')": "",
    "open(outside / 'x', 'w')": "open ",
    "(outside / 'x').mkdir()": "os.mkdir ",
    "(outside / 'old').unlink()": "os.remove ",
    "(out / 'new').rename(outside / 'new')": "os.rename ",
    "(outside / 'x').symlink_to(out)": "os.symlink ",
    "(outside / 'old').chmod(0o600)": "os.chmod ",
    "shutil.rmtree(outside)": "shutil.rmtree ",
    "open(out / 'link', 'w')": "open ",
    "os.open(outside / 'x', os.O_CREAT | os.O_WRONLY)": "open ",
    "os.system('true')": "os.system ",
    "subprocess.run(['true'])": "subprocess.Popen ",
    "subprocess.run([sys.executable, '-c', 'pass'])": "subprocess.Popen ",  # Python, but not our worker
    "socket.create_connection(('127.0.0.1', 9), timeout=1)": "socket.",
    "exec(compile('1', str(source / 'evil.py'), 'exec'))": "compile ",
    "sys.path.insert(0, str(source)); import evil": "hostile.executed",
    "eval(\"__import__('sys').audit('hostile.executed')\")": "hostile.executed",
}
"""What a run might do in folders ``out``, ``outside`` and ``source`` -> what the guard says of it."""


def test_the_guard_sees(tmp_path: Path) -> None:
    for number in range(len(PLANTED)):
        root = tmp_path / str(number)
        sources.write(root / "source")
        for name in ("out", "outside"):
            (root / name).mkdir()
        (root / "outside/old").touch()
        (root / "out/new").touch()
        (root / "out/link").symlink_to(root / "outside/old")
    script = f"""
        import contextlib, json, os, shutil, socket, subprocess, sys
        from pathlib import Path
        import converter.weights.worker
        from tests.hostile.guard import Guard
        sys.dont_write_bytecode = True
        guard = Guard()
        for number, action in enumerate({[*PLANTED]!r}):
            root = Path({str(tmp_path)!r}, str(number))
            out, outside, source = root / "out", root / "outside", root / "source"
            planted = compile(action, "<planted>", "exec")
            with guard.watching(writable=[out], hostile=source), contextlib.suppress(OSError):
                exec(planted)
            print(json.dumps(guard.take()))
    """
    words = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    for line, (action, expected) in zip(done.stdout.splitlines(), PLANTED.items(), strict=True):
        found = json.loads(line)
        assert any(expected in each for each in found) if expected else found == [], action


# What is said


def link(path: Path, target: str | Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("name", [name for name in sources.SIX if name != "model.safetensors"])
def test_a_link_out_of_the_source(
    name: str, make_source: MakeSource, refused: Refused, tmp_path: Path
) -> None:
    folder = make_source()
    (folder / name).touch()
    (folder / name).rename(tmp_path / "elsewhere")
    link(folder / name, "../elsewhere")
    line = refused(folder, "--scale", "2", "--out", tmp_path / "out", "--no-verify")
    says(line, f"{name} in source", "replace the link by a copy of the file")
    if name == "config.json":  # of these files, inspect reads no other
        assert refused("inspect", folder) == line


def test_links_that_are_meant(
    make_source: MakeSource, run: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside the folder, and into the Hub's cache, where old versions of the client linked to."""
    folder, blobs = make_source(), tmp_path / "cache/models--a--b/blobs"
    blobs.mkdir(parents=True)
    (folder / "tokenizer.json").rename(blobs / "1")
    link(folder / "tokenizer.json", blobs / "1")
    link(folder / "LICENSE", "tokenizer.json")
    words = (folder, "--scale", "2", "--out", tmp_path / "out", "--no-verify")
    assert "leads out" in run(*words).err  # a folder of blobs that is in no cache
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert run(*words).code == 0
    assert not (tmp_path / "out/LICENSE").is_symlink()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"a":' * 64 + b"9" * 300 + b"}" * 64, None),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "64 levels"),
        (b"[" * 10**6, "64 levels"),
        (b'{"a":' + b"9" * 301 + b"}", "301 digits"),
        (b'{"a":[' + b"[]," * (5 << 20) + b"[]]}", "4194304 values"),
        *((raw, "not valid JSON") for raw in (b"{", b"\xff{}")),
        (b'{"a":1,"a":2}', ("'a'", "twice")),
    ],
)
def test_json(raw: bytes, words: Words | None) -> None:
    if words is None:
        assert parse_object(raw, "x.json")
        return
    with raises(SourceError, "x.json", words):
        parse_object(raw, "x.json")


@pytest.mark.parametrize("name", [b"caf\xe9", b"a\nerror: forged\x1b[2J"])
def test_names_that_cannot_be_printed(
    name: bytes, make_source: MakeSource, run: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the source's folder, and of a file in it, which is left there."""
    place = make_source().rename(tmp_path / os.fsdecode(name))
    (place / os.fsdecode(name + b".json")).write_text("{}")
    line = run(place, "--scale", "2", "--out", tmp_path / "out").err
    says(line, "rename the folder", ". as MODEL")
    monkeypatch.chdir(place)
    result = run(".", "--scale", "2", "--out", tmp_path / "out", "--no-verify", "--json")
    assert result.code == 0
    assert all(text.isprintable() for text in (result.json["source"], *result.json["files"]))
    texts = [(tmp_path / "out" / file).read_text() for file in ("config.json", "README.md")]
    assert all(letter.isprintable() or letter == "\n" for text in texts for letter in text)
