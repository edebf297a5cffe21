"""Hostile input: every fourth case of ``python -m tests.hostile`` (``make hostile``), and the messages."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from converter.config import LARGEST
from converter.errors import ConverterError, SourceError
from converter.recipes import of_checkpoint
from converter.source.checkpoint import parse_header, weight_files
from converter.source.jsonfile import parse_object
from tests.conftest import Run, edit_json
from tests.hostile import mutate, source
from tests.hostile.kinds import KINDS, configs
from tests.hostile.report import Row, outcomes

ROOT = Path(__file__).parent.parent
QUICK = [name for name, kind in KINDS.items() if not kind.torch]
# Each of them starts torch in a process of its own.
PICKLES = ["good", "os.system", "a record ../"]
RUN = ["_attn_implementation 'nobody/evil-kernel'", "num_labels 16777216"]


def checked(row: Row) -> None:
    """That nothing happened which must not; the message says how to have each case again."""
    again = [
        f"python -m tests.hostile --kind {case.kind} --case {case.case!r}: {case.problems}"
        for case in row.failed
    ]
    assert not again, "\n".join(again)


@pytest.mark.parametrize("kind", QUICK)
def test_hostile_sources(kind: str) -> None:
    cases = [*list(KINDS[kind].examples)[::4], *map(str, range(4))]
    row = Row(kind, "", list(outcomes(kind, 0, cases)))
    assert len(row.outcomes) == len(cases)
    checked(row)


@pytest.mark.parametrize(
    ("kind", "cases"), [("pickles", PICKLES), pytest.param("verified", RUN, marks=pytest.mark.slow)]
)
def test_hostile_sources_that_reach_torch(kind: str, cases: list[str]) -> None:
    row = Row(kind, "", list(outcomes(kind, 0, cases)))
    assert len(row.outcomes) == len(cases)
    checked(row)
    # What is refused beside it is refused for what it is.
    assert kind != "pickles" or {case.case for case in row.outcomes if case.code == 0} >= {"good"}


def test_the_same_seed_gives_the_same_case(tmp_path: Path) -> None:
    def made(seed: int) -> bytes:
        folder = tmp_path / f"{seed}-{len(list(tmp_path.iterdir()))}"
        source.write(folder)
        KINDS["configs"].vary(folder, Random(f"{seed}/config.json/7"))
        return (folder / "config.json").read_bytes()

    assert made(1) == made(1) != made(2)


# The watch itself


PLANTED = {
    "a write": ("open(outside / 'x', 'w')", "open "),
    "a folder": ("(outside / 'x').mkdir()", "os.mkdir "),
    "a file removed": ("(outside / 'old').unlink()", "os.remove "),
    "a file moved out": ("(out / 'new').rename(outside / 'new')", "os.rename "),
    "a link": ("(outside / 'x').symlink_to(out)", "os.symlink "),
    "a mode": ("(outside / 'old').chmod(0o600)", "os.chmod "),
    "a tree removed": ("shutil.rmtree(outside)", "shutil.rmtree "),
    "a write through a link": ("open(out / 'link', 'w')", "open "),
    "a write by os.open": ("os.open(outside / 'x', os.O_CREAT | os.O_WRONLY)", "open "),
    "a shell": ("os.system('true')", "os.system "),
    "a process": ("subprocess.run(['true'])", "subprocess.Popen "),
    "Python, but not our worker": ("subprocess.run([sys.executable, '-c', 'pass'])", "subprocess.Popen "),
    "a connection": ("socket.create_connection(('127.0.0.1', 9), timeout=1)", "socket."),
    "the source's code by exec": ("exec(compile('1', str(source / 'evil.py'), 'exec'))", "compile "),
    "the source's module": ("sys.path.insert(0, str(source)); import evil", "hostile.executed"),
    "a payload": ("eval(\"__import__('sys').audit('hostile.executed')\")", "hostile.executed"),
}


@pytest.mark.parametrize("planted", ["nothing", *PLANTED])
def test_the_guard_sees(planted: str, tmp_path: Path) -> None:
    action, expected = PLANTED.get(planted, ("(out / 'new').write_text('allowed'); exec('1')", ""))
    for name in ("out", "outside"):
        (tmp_path / name).mkdir()
    source.write(tmp_path / "source")
    (tmp_path / "outside/old").touch()
    (tmp_path / "out/new").touch()
    (tmp_path / "out/link").symlink_to(tmp_path / "outside/old")
    script = f"""
        import contextlib, json, os, shutil, socket, subprocess, sys
        from pathlib import Path
        import converter.weights.worker
        from tests.hostile.guard import Guard
        sys.dont_write_bytecode = True
        root = Path({str(tmp_path)!r})
        out, outside, source = root / "out", root / "outside", root / "source"
        guard = Guard()
        with guard.watching(writable=[out], hostile=source), contextlib.suppress(OSError):
            {action}
        print(json.dumps(guard.take()))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert any(expected in line for line in found) if expected else found == []


# What is said


def linked(folder: Path, name: str, target: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "README.md", "tokenizer_config.json", "tokenizer.json", "LICENSE"],
)
def test_a_link_out_of_the_source(
    name: str, make_source: Callable[..., Path], refused: Callable[..., str], tmp_path: Path
) -> None:
    folder = make_source()
    (tmp_path / "secret").write_text("{}")
    linked(folder, name, "../secret")
    line = refused(folder, "--scale", "2", "--out", tmp_path / "out", "--no-verify")
    assert line == (
        f"error: {name} in source is a link that leads out of the folder; if this is intended, "
        "replace the link by a copy of the file\n"
    )


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_inspect_follows_no_link_out(
    name: str, make_source: Callable[..., Path], refused: Callable[..., str], tmp_path: Path
) -> None:
    folder = make_source()
    (folder / name).rename(tmp_path / "elsewhere")
    linked(folder, name, "../elsewhere")
    assert "leads out of the folder" in refused("inspect", folder)


def test_links_that_are_meant(
    make_source: Callable[..., Path], run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside the folder, and into the Hub's cache, where old versions of the client linked to."""
    folder, cache = make_source(), tmp_path / "cache"
    blobs = cache / "models--a--b/blobs"
    blobs.mkdir(parents=True)
    (folder / "model.safetensors").rename(blobs / "1")
    linked(folder, "model.safetensors", str(blobs / "1"))
    linked(folder, "LICENSE", "tokenizer.json")
    words = (folder, "--scale", "2", "--out", tmp_path / "out", "--no-verify")
    assert "leads out" in run(*words).err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    assert run(*words).code == 0
    assert not (tmp_path / "out/LICENSE").is_symlink()


def test_a_link_that_leads_to_itself(make_source: Callable[..., Path], run: Callable[..., Run]) -> None:
    folder = make_source()
    linked(folder, "LICENSE", "LICENSE")
    result = run("inspect", folder)
    assert (result.code, result.err) == (1, "error: LICENSE is a link that leads to itself; remove it\n")


def test_inspect_of_a_config_without_a_model_type(run: Callable[..., Run], tmp_path: Path) -> None:
    """As DNABERT-2's is."""
    source.write(tmp_path / "source", "mosaic_bert")
    assert "family          mosaic_bert (model_type not given)" in run("inspect", tmp_path / "source").out


def test_a_blobs_folder_that_is_no_cache(
    make_source: Callable[..., Path], refused: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "home/downloads").mkdir(parents=True)
    (tmp_path / "home/blobs").mkdir()
    folder = make_source().rename(tmp_path / "home/downloads/source")
    (folder / "model.safetensors").rename(tmp_path / "home/blobs/1")
    linked(folder, "model.safetensors", "../../blobs/1")
    assert "leads out" in refused(folder, "--scale", "2", "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_head": 1 << 20, "hidden_size": 1 << 20}, "config.json gives 1048576 heads, more than any model"),
        ({"n_layer": 10**6}, "config.json gives 1000000 layers, more than any model has (8192)"),
        ({"hidden_size": 1 << 20}, "config.json gives 262144 channels per head, more than any model"),
        ({"n_layer": 10**299}, "expected an integer from 1 to 16777216"),
        ({"architectures": [["BloomForCausalLM"]]}, "architectures names ['BloomForCausalLM']"),
        ({"architectures": [{}]}, "architectures names {}"),
        ({"num_labels": 1 << 24}, "num_labels is 16777216, more than any model has (131072)"),
    ],
)
def test_configs(
    changes: dict[str, Any],
    words: str,
    make_source: Callable[..., Path],
    refused: Callable[..., str],
    tmp_path: Path,
) -> None:
    assert words in refused(make_source("bloom", changes), "--scale", "2", "--out", tmp_path / "out")


@pytest.mark.parametrize("named", [1.5, {"a": "b"}, [1]])
def test_classes_of_a_rotary_model(named: Any, refused: Callable[..., str], tmp_path: Path) -> None:
    source.write(tmp_path / "source", "llama")
    edit_json(tmp_path / "source/config.json", {"architectures": named})
    line = refused(tmp_path / "source", "--scale", "2", "--out", tmp_path / "out", "--no-verify")
    assert f"architectures is {named!r}, not a list of class names" in line


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"a":' * 65 + b"1" + b"}" * 65, "nested deeper than 64 levels"),
        (b"[" * 10**6, "nested deeper than 64 levels"),
        (b'{"a":' + b"9" * 301 + b"}", "a number has 301 digits"),
        (b'{"a":[' + b"[]," * (5 << 20) + b"[]]}", "more than 4194304 values"),
        (b"\xff{}", "not valid JSON"),
        (b'{"a":1,"a":2}', "the key 'a' occurs twice"),
    ],
)
def test_json(raw: bytes, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        parse_object(raw, "x.json")


def test_json_of_64_levels_and_300_digits_is_read() -> None:
    assert parse_object(b'{"a":' * 64 + b"9" * 300 + b"}" * 64, "x.json")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"shape": [1 << 62] * 100_000}, "the entry of tensor 'a' is not valid"),
        ({"dtype": "F" * 10_000}, "has dtype 'FFFFFFFFFFFFFFFFFFFF', which"),
        ({"\ud800": 1}, "the header of x is not valid Unicode"),
    ],
)
def test_headers(entry: dict[str, Any], words: str) -> None:
    raw = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], **entry}}).encode()
    with pytest.raises(SourceError, match=words):
        parse_header(raw, "x", 1)


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "a\x00", "x" * 513])
def test_tensors_with_names_that_are_none(name: str) -> None:
    raw = json.dumps({name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    with pytest.raises(SourceError, match="is not a valid tensor name"):
        parse_header(raw, "x", 1)


@pytest.mark.parametrize("name", [b"caf\xe9", b"a\nerror: forged", b"\x1b[2J"])
def test_a_folder_whose_name_cannot_be_printed(
    name: bytes,
    make_source: Callable[..., Path],
    run: Callable[..., Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = os.fsdecode(os.fsencode(tmp_path) + b"/" + name)
    make_source().rename(place)
    line = run(place, "--scale", "2", "--out", tmp_path / "out").err
    assert "rename the folder, or run the command in it with . as MODEL" in line
    monkeypatch.chdir(place)
    result = run(".", "--scale", "2", "--out", tmp_path / "out", "--no-verify", "--json")
    assert result.code == 0
    assert result.json["source"].isprintable()
    texts = [(tmp_path / "out" / file).read_text() for file in ("config.json", "README.md")]
    assert all(letter.isprintable() or letter == "\n" for text in texts for letter in text)


def test_files_whose_names_cannot_be_printed_are_left(
    make_source: Callable[..., Path], run: Callable[..., Run], tmp_path: Path
) -> None:
    folder = make_source()
    for name in (b"a\nb.json", b"caf\xe9.json"):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_text("{}")
    result = run(folder, "--scale", "2", "--out", tmp_path / "out", "--no-verify", "--json")
    assert result.code == 0
    assert all(name.isprintable() for name in result.json["files"])


def test_a_shard_outside(
    make_source: Callable[..., Path], refused: Callable[..., str], tmp_path: Path
) -> None:
    folder = make_source(sharded=True)
    index = folder / "model.safetensors.index.json"
    for place in ("../x.safetensors", "/x.safetensors", "a\nb.safetensors"):
        edit_json(index, {"weight_map": {"a": place}})
        line = refused(folder, "--scale", "2", "--out", tmp_path / "out")
        assert f"places 'a' in {place!r}, which is not a weight file in its folder" in line


# Functions under what chance gives them

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(mutate.NASTY[:30]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
VALUES = st.none() | st.sampled_from(["F32", "U8", "BF16", "F128"]) | JSON
SIZES = st.lists(st.integers(-1, 9), max_size=3) | st.just([1 << 62, 1 << 62])
ENTRY = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "U8", "BOOL", "F64", "F128"]), "shape": SIZES, "data_offsets": SIZES}
)
HEADER = st.dictionaries(st.sampled_from(["a", "b", "__metadata__", "c\n"]), ENTRY | JSON, max_size=3)
quickly = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@quickly
@given(HEADER, st.integers(0, 64))
@example({"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}, 0)
@example({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}, "__metadata__": {}}, 2)
def test_any_header_is_refused_or_one_that_the_library_reads(header: dict[str, Any], size: int) -> None:
    from safetensors import deserialize

    raw = mutate.dumps(header)
    try:
        tensors = parse_header(raw, "x", size)
    except SourceError:
        return
    assert {name for name, _ in deserialize(struct.pack("<Q", len(raw)) + raw + bytes(size))} == set(tensors)


@quickly
@given(st.binary(max_size=60) | JSON.map(mutate.dumps))
def test_any_bytes_are_an_object_or_refused(raw: bytes) -> None:
    try:
        assert isinstance(parse_object(raw, "x"), dict)
    except SourceError:
        return


@quickly
@given(st.dictionaries(st.text(max_size=3), st.text(max_size=12) | JSON, max_size=3))
def test_any_index_names_files_beside_it_or_is_refused(weight_map: dict[str, Any]) -> None:
    try:
        found = weight_files("model.safetensors.index.json", lambda name: {"weight_map": weight_map})
    except SourceError:
        return
    assert all("/" not in file and file.isprintable() for file in found.values())


@quickly
@given(st.integers(0, 10**9), st.sampled_from(sorted(source.CONFIGS)))
def test_any_config_is_a_model_or_refused(seed: int, family: str) -> None:
    config = mutate.worse(source.CONFIGS[family], Random(seed), configs.POOL)
    try:
        parsed = parse_object(mutate.dumps(config), "config.json")
        recipe = of_checkpoint(parsed)
        assert recipe.geometry.num_heads <= LARGEST["heads"]
        recipe.own_scaling  # noqa: B018
        recipe.stock({})
    except ConverterError:
        return
