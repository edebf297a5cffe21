"""Checkpoints from the Hub: the command line and the real client, against a Hub of our own."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import threading
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.conftest import Pristine, Run, edit_json, into_a_subfolder
from tests.hub_server import (
    IMPATIENT,
    TOKEN,
    UNVERIFIED,
    Account,
    Answer,
    Command,
    Fault,
    HubServer,
    Refusal,
    Request,
)
from tests.hub_server import refused as one_line
from tests.messages import errors, says

ID = "org/tiny-bloom"
CONVERT = (ID, "--scale", "2", "--out", "out", "--no-verify", "--json")
PUSH = ("--push-to-hub", "org/new")
DOWN = "http://127.0.0.1:9"
"""Nobody listens on that port."""


def refused(run: Run, work: Path, *parts: str, code: int = 1) -> None:
    """The error is one line that contains all ``parts``; nothing is printed to stdout or written."""
    one_line(run, *parts, code=code)
    assert list(work.iterdir()) == []


def contents(folder: Path) -> dict[str, bytes]:
    """File -> bytes; empty for files that name the source, or have a hash of a file that does."""
    named = ("config.json", "README.md", "ntk_convert.json")
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {
        path.relative_to(folder).as_posix(): b"" if path.name in named else path.read_bytes()
        for path in paths
    }


def config(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return values


def variant(source: Path, folder: Path, mark: str) -> Path:
    """A copy of a checkpoint in which every small file and the weights contain ``mark``."""
    shutil.copytree(source, folder)
    edit_json(folder / "config.json", {"mark": mark})
    edit_json(folder / "tokenizer_config.json", {"mark": mark})
    (folder / "LICENSE").write_text(mark)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + mark.encode().ljust(8)[:8])
    return folder


# The same repository from the Hub and from a folder


@pytest.mark.version
def test_an_id_gives_what_its_folder_gives(
    pristine: Pristine, tmp_path: Path, hub: HubServer, command: Command, work: Path
) -> None:
    source = tmp_path / "tiny-bloom"
    shutil.copytree(pristine("bloom", sharded=True), source)
    (source / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n")
    commit = hub.commit(ID, source)
    from_hub = command(*CONVERT)
    assert (from_hub.code, from_hub.json["source"], from_hub.json["commit"]) == (0, ID, commit), from_hub.err
    assert sorted(hub.downloads()) == sorted(path.name for path in source.iterdir())

    asked = len(hub.requests)
    assert command(source, *CONVERT[1:4], "local", *CONVERT[5:]).code == 0
    assert len(hub.requests) == asked
    assert contents(work / "out") == contents(work / "local")
    assert not any(path.is_symlink() for path in (work / "out").iterdir())  # as those in the Hub's cache
    ours, local = config(work / "out"), config(work / "local")
    assert (ours["ntk_convert"]["source"], ours["ntk_convert"]["commit"]) == (ID, commit)
    assert (local["ntk_convert"]["source"], local["ntk_convert"]["commit"]) == ("tiny-bloom", None)
    del ours["ntk_convert"], local["ntk_convert"]
    assert ours == local
    card = (work / "out" / "README.md").read_text()
    assert f"base_model: {ID}" in card
    assert "license: mit" in card
    assert commit in card


@pytest.mark.version
def test_a_subfolder_gives_what_its_folder_gives(
    pristine: Pristine, tmp_path: Path, hub: HubServer, command: Command, work: Path
) -> None:
    """The root holds another model, and none of its files is read, also with half of a cache."""
    source = variant(pristine("bloom"), tmp_path / "models", "root")
    last = source / "runs" / "last one"
    shutil.copytree(pristine("bloom", sharded=True), last)
    (last / "additional_chat_templates").mkdir()
    (last / "additional_chat_templates" / "short.jinja").write_text("{{ messages }}")
    commit = hub.commit(ID, source)
    words = ("--subfolder", "runs/last one", "--cache-dir", tmp_path / "cache")
    found = command("inspect", ID, *words, "--json").json
    assert (found["source"], found["commit"]) == (f"{ID}/runs/last one", commit)
    run = command(*CONVERT, *words)
    assert (run.code, run.json["source"]) == (0, f"{ID}/runs/last one"), run.err
    files = {request.match("resolve")["file"] for request in resolved(hub)}
    assert files == {path.relative_to(source).as_posix() for path in last.rglob("*") if path.is_file()}

    made = contents(work / "out")
    assert "additional_chat_templates/short.jinja" in made
    assert command(*CONVERT, *words, "--overwrite", HF_HUB_OFFLINE="1").code == 0
    assert contents(work / "out") == made
    for model, more in ((source, ("--subfolder", "runs/last one/")), (last, ())):
        assert command(model, *CONVERT[1:4], "local", *CONVERT[5:], *more, "--overwrite").code == 0
        assert contents(work / "local") == made

    found = config(work / "out")["ntk_convert"]
    assert (found["source"], found["commit"], found["subfolder"]) == (ID, commit, "runs/last one")
    assert again_by_its_card(command, hub, work / "out").code == 0

    # A trained length is known of the checkpoint in the root.
    hub.commit("bigscience/bloom", source)
    words = ("inspect", "bigscience/bloom", "--json")
    found = [command(*words, *more).json["train_length"] for more in ((), ("--subfolder", "runs/last one"))]
    assert found == [2048, None]


def again_by_its_card(command: Command, hub: HubServer, folder: Path) -> Run:
    """Converts with the command of a card, after its branch has moved, and compares all bytes."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    [line] = re.findall("^ntk-convert (.* --out .*)$", (folder / "README.md").read_text(), re.MULTILINE)
    moved = folder.parent.parent / "moved"
    moved.mkdir()
    (moved / "config.json").write_text("{}")
    hub.commit(ID, moved)
    run = command(*shlex.split(line), "--overwrite")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    return run


@pytest.mark.parametrize("options", [{}, {"fmt": "bin", "sharded": True}])
def test_inspecting_downloads_no_weights(
    pristine: Pristine, hub: HubServer, command: Command, options: dict[str, Any]
) -> None:
    source = pristine("bloom", **options)
    commit = hub.commit(ID, source)
    found = command("inspect", ID, "--scale", "2", "--json")
    assert (found.code, found.err) == (0, "")
    assert not [request for request in hub.requests if request.host == "storage"]
    assert set(hub.downloads()) <= {"config.json", *(path.name for path in source.glob("*.index.json"))}
    local = command("inspect", source, "--scale", "2", "--json").json
    needs = local["needs"] | {"download": sum(local["files"].values())}
    assert found.json == local | {"source": ID, "commit": commit, "needs": needs}


def test_the_card_is_downloaded_where_the_config_tells_no_trained_length(
    make_source: Pristine, hub: HubServer, command: Command
) -> None:
    source = make_source("bloom")
    (source / "README.md").write_text("---\nbase_model: bigscience/bloom-560m\n---\n", encoding="utf-8")
    hub.commit(ID, source)
    found = command("inspect", ID, "--json")
    assert found.json["base"] == {"name": "bigscience/bloom-560m", "tokens": 2048}
    assert set(hub.downloads()) == {"config.json", "README.md"}
    hub.requests.clear()
    assert command("inspect", ID, "--train-length", "64", "--json").json["base"] is None
    assert "README.md" not in hub.downloads()


def test_files_in_folders_come_too(
    make_source: Pristine, pristine: Pristine, hub: HubServer, command: Command, work: Path
) -> None:
    """Shards, what sentence-transformers needs, and chat templates; from the Hub and from the cache."""
    source = make_source("bloom", sharded=True)
    into_a_subfolder(source)
    modules = [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    nested = {
        "modules.json": json.dumps(modules),
        "1_Pooling/config.json": "{}",
        "1_Pooling/notes.md": "left",
        "additional_chat_templates/tools.jinja": "{{ tools }}",
        "2_Unnamed/config.json": "{}",
    }
    for name, content in nested.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(content)
    hub.commit(ID, source)
    found = command("inspect", ID, "--json")
    assert found.json["files"].keys() == {f"shards/{path.name}" for path in (source / "shards").iterdir()}
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        run = command(*CONVERT, "--overwrite", **environment)
        assert run.code == 0, run.err
        copied = {path.relative_to(work / "out").as_posix() for path in (work / "out").glob("*/*")}
        assert copied == {"1_Pooling/config.json", "additional_chat_templates/tools.jinja"}
        assert all((work / "out" / name).read_text() == nested[name] for name in copied)
        files = sorted((work / "out").glob("*.safetensors"))
        whole = load_file(pristine("bloom") / "model.safetensors")
        assert {name for path in files for name in load_file(path)} == whole.keys()
        if not environment:
            [note] = run.json["notes"]
            says(note, "not copied", "1_Pooling/notes.md")
            assert set(hub.downloads()).isdisjoint({"1_Pooling/notes.md", "2_Unnamed/config.json"})


@pytest.mark.parametrize("safetensors", [True, False])
def test_only_what_is_needed_is_asked_for(
    pristine: Pristine, tmp_path: Path, hub: HubServer, command: Command, safetensors: bool
) -> None:
    source = tmp_path / "tiny-bloom"
    shutil.copytree(pristine("bloom", fmt="bin"), source)
    needed = {path.name for path in source.iterdir()} | {"README.md", "LICENSE.txt"}
    (source / "README.md").write_text("# Tiny\n")
    (source / "LICENSE.txt").write_text("MIT\n")
    if safetensors:
        shutil.copy(pristine("bloom") / "model.safetensors", source)
        needed = needed - {"pytorch_model.bin"} | {"model.safetensors"}
    (source / "onnx").mkdir()
    others = (
        "tf_model.h5 flax_model.msgpack modeling_bloom.py .gitattributes onnx/model.onnx onnx/config.json"
    )
    for name in (*others.split(), "model.onnx", "rust_model.ot", "training_args.bin", "optimizer.pt"):
        (source / name).write_text("not needed")
    hub.commit(ID, source)
    run = command(*CONVERT)
    assert run.code == 0, run.err
    assert set(hub.downloads()) == needed
    asked = {request.path.split("/resolve/")[1].split("/", 1)[1] for request in resolved(hub)}
    assert asked == needed


def resolved(hub: HubServer) -> list[Request]:
    return [request for request in hub.requests if "/resolve/" in request.path]


# One commit


def test_a_revision_is_resolved_to_its_commit(
    pristine: Pristine, tmp_path: Path, hub: HubServer, command: Command, work: Path
) -> None:
    """A tag and a commit are only inspected."""
    old = hub.commit(ID, variant(pristine("bloom"), tmp_path / "first", "first"), tag="v1.0")
    hub.commit(ID, variant(pristine("bloom"), tmp_path / "second", "second"))
    other = hub.commit(ID, variant(pristine("bloom"), tmp_path / "third", "third"), branch="feature/x")
    for revision in ("v1.0", old):
        assert command("inspect", ID, "--revision", revision, "--json").json["commit"] == old
    run = command(*CONVERT, "--revision", "feature/x")
    assert (run.code, run.json["commit"]) == (0, other), run.err
    made = config(work / "out")
    assert (made["ntk_convert"]["commit"], made["mark"]) == (other, "third")
    assert (work / "out" / "LICENSE").read_text() == "third"
    assert f"--revision {other} " in (work / "out" / "README.md").read_text()
    [ref] = tmp_path.rglob("refs/feature/x")
    assert ref.read_text() == other

    # No revision leads out of the cache.
    hub.commit(ID, pristine("bloom"), branch="../../outside")
    assert command("inspect", ID, "--revision", "../../outside").code == 0
    assert not [*tmp_path.rglob("outside")]


@pytest.mark.parametrize("moment", [2, 4])
def test_a_branch_that_moves_meanwhile(
    pristine: Pristine, tmp_path: Path, hub: HubServer, command: Command, work: Path, moment: int
) -> None:
    first = variant(pristine("bloom"), tmp_path / "first", "first")
    second = variant(pristine("bloom"), tmp_path / "second", "second")
    (second / "added.json").write_text("{}")
    marks = {hub.commit(ID, first): "first"}

    def move(_: Request) -> None:
        if len([request for request in hub.requests if ID in request.path]) == moment:
            marks[hub.commit(ID, second)] = "second"

    hub.before = move
    run = command(*CONVERT, "--revision", "main")
    assert run.code == 0, run.err
    assert len(marks) == 2
    mark = marks[run.json["commit"]]
    out, source = work / "out", {"first": first, "second": second}[mark]
    assert config(out)["mark"] == mark
    assert config(out)["ntk_convert"]["commit"] == run.json["commit"]
    for name in ("LICENSE", "tokenizer_config.json", "model.safetensors"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert (out / "added.json").exists() == (mark == "second")


# The cache


@pytest.mark.version
def test_a_second_run_uses_the_cache(
    pristine: Pristine, tmp_path: Path, hub: HubServer, command: Command, work: Path
) -> None:
    """In a folder of one's own, here; with the Hub, offline, and when the Hub is down."""
    commit = hub.commit(ID, pristine("bloom", sharded=True))
    words = (*CONVERT, "--cache-dir", tmp_path / "cache")
    assert command(*words).code == 0
    assert (tmp_path / "cache" / "models--org--tiny-bloom").is_dir()
    assert not (tmp_path / "hf" / "hub").exists()
    before = contents(work / "out")
    for online, environment in ((True, {}), (False, {"HF_HUB_OFFLINE": "1"}), (False, {"HF_ENDPOINT": DOWN})):
        hub.requests.clear()
        run = command(*words, "--overwrite", **environment)
        assert (run.code, run.json["commit"]) == (0, commit), run.err
        assert contents(work / "out") == before
        assert hub.downloads() == []
        assert bool(hub.requests) == online


def test_offline_with_half_a_cache(pristine: Pristine, hub: HubServer, command: Command, work: Path) -> None:
    hub.commit(ID, pristine("bloom"))
    offline, down = {"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": DOWN}
    for environment, reason in ((offline, "offline mode is enabled"), (down, "Connection refused")):
        run = command(*CONVERT, **environment)
        refused(run, work, ID, reason, "HF_HUB_OFFLINE, HF_ENDPOINT", "local folder")
    assert hub.requests == []
    online = command("inspect", ID, "--json").json
    offline = command("inspect", ID, "--json", HF_HUB_OFFLINE="1").json
    assert offline["slopes"] == online["slopes"]
    assert offline["commit"] == online["commit"]
    refused(command(*CONVERT, HF_HUB_OFFLINE="1"), work, ID, "HF_HUB_OFFLINE")


# What the Hub refuses


@pytest.mark.parametrize(
    ("settings", "words", "parts"),
    [
        ({}, ["org/other", *CONVERT[1:]], ["org/other", "Repository Not Found", "check the id", "--token"]),
        ({}, [*CONVERT, "--revision", "v9"], [ID, "revision 'v9'", "Revision Not Found", "--revision"]),
        ({}, [*CONVERT, "--subfolder", "last"], [f"{ID}/last", "no config.json"]),
        ({}, [*CONVERT, "--revision", "../../main"], [ID, "'../../main'", "--revision"]),
        ({"private": True}, CONVERT, [ID, "Repository Not Found", "private", "--token"]),
        (
            {"private": True},
            [*CONVERT, "--token", "hf_somebody"],
            [ID, "Repository Not Found", "private", "--token"],
        ),
        ({"gated": True}, CONVERT, [ID, "gated repo", "is restricted", "--token"]),
        ({"gated": True}, [*CONVERT, "--token", "hf_somebody"], [ID, "gated repo", "is restricted"]),
        ({}, [*CONVERT, "--token", "hf_unknown_secret"], [ID, "401", "Invalid credentials", "--token"]),
        ({}, [*CONVERT, "--cache-dir", __file__], ["config.json", "Not a directory", "--cache-dir"]),
        ({}, [*CONVERT, "HF_ENDPOINT"], ["404 Not Found", "HF_ENDPOINT"]),
    ],
)
def test_what_is_refused(
    pristine: Pristine, hub: HubServer, command: Command, work: Path, settings: Any, words: Any, parts: Any
) -> None:
    hub.commit(ID, pristine("bloom"), **settings)
    hub.accounts["hf_somebody"] = Account("eve")
    environment = {}
    if words[-1] == "HF_ENDPOINT":  # no Hub, but a server
        words, environment = words[:-1], {"HF_ENDPOINT": f"{hub.endpoint}/welcome"}
    refused(command(*words, **environment), work, *parts)
    assert not [request for request in hub.requests if request.host == "storage"]


def rename(pattern: str, name: str) -> Callable[[Path], object]:
    def change(source: Path) -> None:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        [path.rename(source / name) for path in sorted(source.glob(pattern))]

    return change


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (rename("*-00001-of-*", "quant_config.json"), ["quantised", "quant_config.json"]),
        (rename("config.json", "q4.gguf"), [ID, "q4.gguf", "GGUF"]),
        (rename("config.json", "runs/config.json"), [ID, "no config.json", "--subfolder runs"]),
        (rename("config.json", "x"), [ID, "no config.json"]),
        (
            rename("config.json", "adapter_config.json"),
            [ID, "no config.json", "merge"],
        ),
        (rename("*.safetensors*", "x"), [ID, "no weights"]),
        (rename("model-00004-of-*", "x"), [ID, "model-00004-of-00004.safetensors", "--revision"]),
    ],
)
def test_what_a_listing_shows(
    make_source: Pristine,
    hub: HubServer,
    command: Command,
    work: Path,
    change: Callable[[Path], object],
    parts: list[str],
) -> None:
    source = make_source("bloom", sharded=True)
    change(source)
    hub.commit(ID, source)
    refused(command(*CONVERT), work, *parts)
    assert not [request for request in hub.requests if request.host == "storage"]


@pytest.mark.parametrize(
    ("words", "part", "code"),
    [
        *(
            ([model, *CONVERT[1:]], "error: ", 1)
            for model in ("a/b/c", "", "../x", "a\nb/c", "a\x1b[2Jb", "org/.x", "a--b/c", "~no_one/x")
        ),
        ([*CONVERT, "--revision", ""], "--revision is empty", 2),
        *(
            ([*CONVERT, "--subfolder", folder], "--subfolder", 2)
            for folder in ("../x", "/etc", "", "a/../../x", "a//b", "./a", "a\nb", "/", "a//")
        ),
        *(
            ([*CONVERT, way, token], way.removesuffix("="), 2)
            # HTTP clients refuse it with an error that quotes the header, token and all.
            for way in ("--token", "HF_TOKEN=")
            for token in ("hf_ secret", "hf_secret\x01x", "hf_s\u00e9cret_secret")
        ),
        *(([*CONVERT, "--token", token], "--token", 2) for token in ("", "hf_secret\n")),
    ],
)
def test_names_and_options_that_cannot_be(
    here: Command, work: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], part: str, code: int
) -> None:
    if words[-2] == "HF_TOKEN=":
        monkeypatch.setenv("HF_TOKEN", words[-1])
        words = words[:-2]
    refused(here(*words), work, part, code=code)


# What breaks


@pytest.mark.version
@pytest.mark.parametrize("fault", ["cut", "short"])
def test_a_download_that_breaks_off(
    pristine: Pristine, hub: HubServer, command: Command, work: Path, fault: Fault
) -> None:
    """The client says how much came. Complete files stay in the cache."""
    source = pristine("bloom", sharded=True)
    hub.commit(ID, source)
    first, shard, *_ = sorted(path.name for path in source.glob("*.safetensors"))
    hub.faults[shard] = fault
    came = str((source / shard).stat().st_size // 2)
    refused(command(*CONVERT, start=IMPATIENT), work, shard, ID, came, "run the same command again")
    assert first in hub.downloads()
    hub.faults.clear()
    hub.requests.clear()
    run = command(*CONVERT)
    assert run.code == 0, run.err
    assert first not in hub.downloads()
    assert shard in hub.downloads()


# The token


@pytest.mark.parametrize(
    ("way", "kind"), [("--token", "private"), ("HF_TOKEN", "gated"), ("saved", "private")]
)
def test_the_token_opens_and_stays_secret(
    pristine: Pristine, tmp_path: Path, hub: HubServer, command: Command, way: str, kind: str
) -> None:
    hub.commit(ID, pristine("bloom"), private=kind == "private", gated=kind == "gated")
    hub.accounts[TOKEN] = Account("org")
    if way == "saved":
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf" / "token").write_text(TOKEN)
    run = command(
        *CONVERT,
        *(["--token", TOKEN, "-v"] if way == "--token" else []),
        **({"HF_TOKEN": TOKEN} if way == "HF_TOKEN" else {}),
    )
    assert run.code == 0, run.err
    assert {request.token for request in hub.requests if ID in request.path} == {TOKEN}
    assert "model.safetensors" in hub.downloads()


@pytest.mark.parametrize(
    ("where", "status", "part"),
    [
        ("/api/models/", HTTPStatus.UNAUTHORIZED, "401 Unauthorized"),
        ("/api/models/", HTTPStatus.SERVICE_UNAVAILABLE, "no way for [token];"),
        ("/resolve/", HTTPStatus.FORBIDDEN, "403 Forbidden: no way for [token]."),
        ("short", HTTPStatus.OK, "Consistency check failed"),
    ],
)
def test_tracebacks_do_not_tell_the_token(
    pristine: Pristine, hub: HubServer, command: Command, work: Path, where: str, status: Any, part: str
) -> None:
    """Whether it was an option or the environment's, and even if the Hub says it back."""
    hub.commit(ID, pristine("bloom"))
    hub.accounts[TOKEN] = Account("org")
    if where == "short":
        hub.faults["model.safetensors"] = "short"

    def refuse(request: Request) -> None:
        if where in request.path:
            raise Refusal(status, f"no way for {request.token}")

    hub.before = refuse
    words, environment = (["--token", TOKEN], {}) if status.value % 2 else ([], {"HF_TOKEN": TOKEN})
    run = command(*CONVERT, "-v", *words, **environment)
    assert run.code == 1
    assert "Traceback" in run.err
    line = run.err[run.err.rindex("\nerror: ") :]
    assert part in line
    assert "Signature" not in line  # with which anybody could download the file
    assert TOKEN not in run.err
    assert list(work.iterdir()) == []


# Servers that are no Hub, or a bad one


def other_json(path: str, value: Any) -> Callable[[Request, Answer], None]:
    """Answers with ``value`` where ``path`` is asked for, or with the usual object changed by it."""

    def change(request: Request, answer: Answer) -> None:
        if request.path.startswith(path):
            usual = json.loads(bytes(answer.body))  # type: ignore[arg-type]
            answer.body = json.dumps(usual | value if isinstance(value, dict) else value).encode()

    return change


def other_commit(commit: str) -> Callable[[Request, Answer], None]:
    return lambda _, answer: answer.headers.update({"X-Repo-Commit": commit})


@pytest.mark.version
@pytest.mark.parametrize(
    ("words", "after", "reason"),
    [
        *(
            ((), other_json("/api/models/", value), reason)
            for value, reason in (
                (["a list"], "Error: "),
                ({"siblings": [{"rfilename": "config.json", "size": "big"}]}, "'big'"),
                (
                    {"siblings": [{"rfilename": "x", "lfs": {"size": 1, "sha256": 3, "pointerSize": 1}}]},
                    "TypeError: ",
                ),
                ({"sha": "../../../x"}, "'../../../x' is not a commit"),
            )
        ),
        ((), other_commit("../../../x"), "../../../x"),
        (PUSH, other_json("/api/whoami-v2", {"orgs": [{}]}), "KeyError: 'name'"),
        (PUSH, other_json("/api/models/org/new", {"sha": "../../../x"}), "'../../../x' is not a commit"),
    ],
)
def test_answers_of_no_hub(
    pristine: Pristine,
    tmp_path: Path,
    hub: HubServer,
    command: Command,
    work: Path,
    words: tuple[str, ...],
    after: Callable[[Request, Answer], None],
    reason: str,
) -> None:
    hub.accounts[TOKEN] = Account("org")
    for name in (ID, "org/new"):
        hub.commit(name, pristine("bloom"))
    hub.after = after
    refused(command(*CONVERT[:5], *words, HF_TOKEN=TOKEN), work, reason, "HF_ENDPOINT")
    assert not [*tmp_path.rglob("x")]


def test_a_dtype_that_the_hub_s_weights_have_is_no_conversion(
    pristine: Pristine, hub: HubServer, command: Command, work: Path
) -> None:
    """The Hub says before the download which dtype they have; a wrong word is refused after it."""
    hub.commit(ID, pristine("bloom"))
    assert command(*CONVERT, "--dtype", "fp32", "--dry-run").json["notes"] == []
    hub.after = other_json("/api/models/", {"safetensors": {"parameters": {"F16": 9}, "total": 9}})
    refused(command(*CONVERT, "--dtype", "fp16"), work, "the Hub says", ID, "float16")


@pytest.mark.version
def test_a_hub_that_never_answers(pristine: Pristine, hub: HubServer, command: Command) -> None:
    """With limits of a second; a mirror or a proxy that takes connections looks like this."""
    hub.accounts[TOKEN] = Account("org")
    hub.commit(ID, pristine("bloom"))
    end = threading.Event()
    hub.before = lambda request: request.path.startswith("/api/models/") and end.wait(60)
    run = command(*CONVERT[:5], start=UNVERIFIED, HF_HUB_ETAG_TIMEOUT="1", HF_HUB_DOWNLOAD_TIMEOUT="1")
    end.set()
    assert run.code == 1
    assert errors(run.err).isprintable()  # one line
    assert "timed out" in run.err


# Bytes that are not what the Hub has


def damage(hub: HubServer, name: str, at: int) -> None:
    """Changes a byte of a file in its downloads; the size stays."""

    def change(request: Request, answer: Answer) -> None:
        if isinstance(answer.body, Path) and answer.body.name == name and request.method == "GET":
            data = bytearray(answer.body.read_bytes())
            data[at] ^= 1
            answer.body = bytes(data)

    hub.after = change


WEIGHTS = "model.safetensors"


@pytest.mark.parametrize(
    ("name", "at", "options", "words"),
    [
        (WEIGHTS, -3, {}, ()),
        (WEIGHTS, 9, {}, ()),  # in the header
        (WEIGHTS, -3, {}, ("--hard-link",)),
        ("pytorch_model.bin", -3, {"fmt": "bin"}, ()),  # rewritten, as with --dtype
        ("config.json", 0, {}, ()),
        ("tokenizer_config.json", -3, {}, ()),
    ],
)
def test_a_download_with_other_bytes(
    pristine: Pristine,
    hub: HubServer,
    command: Command,
    work: Path,
    name: str,
    at: int,
    options: dict[str, Any],
    words: tuple[str, ...],
) -> None:
    """The file is named until it is deleted: from the Hub, offline, and as a folder of its cache."""
    hub.commit(ID, pristine("bloom", **options))
    damage(hub, name, at)
    run = command(*CONVERT, *words)
    refused(run, work, name, "the Hub has", "delete")
    hub.after = None
    bad = Path(run.err.partition("delete ")[2].partition(",")[0])
    folder = next(bad.parent.parent.glob(f"snapshots/*/{name}")).parent
    again = [command(*CONVERT, *words)]
    if name.startswith("model"):  # the name of its blob is the SHA-256
        again += [command(*CONVERT, *words, HF_HUB_OFFLINE="1"), command(folder, *CONVERT[1:], *words)]
    for each in again:
        refused(each, work, str(bad))
    bad.unlink()
    run = command(*CONVERT, *words)
    assert run.code == 0, run.err


@pytest.mark.parametrize("family", ["bloom", "llama"])
def test_an_evaluation_of_other_bytes(
    pristine: Pristine, hub: HubServer, command: Command, work: Path, family: str
) -> None:
    hub.commit(ID, pristine(family))
    damage(hub, WEIGHTS, -3)
    text = work.parent / "text.txt"
    text.write_text("w5 w6 w7 w8 " * 99)
    run = command("eval", ID, "--text", text, "--lengths", "16")
    refused(run, work, WEIGHTS, "the Hub has")


def test_a_folder_of_the_cache_that_shares_files(
    pristine: Pristine, tmp_path: Path, hub: HubServer, command: Command
) -> None:
    """The cache of newer clients keeps a file of Xet once for all repositories, under another hash."""
    hub.commit(ID, pristine("bloom"))
    assert command(*CONVERT).code == 0
    [weights] = (tmp_path / "hf/hub").glob(f"models--*/snapshots/*/{WEIGHTS}")
    blob, shared = weights.resolve(), tmp_path / "hf/hub/blobs/ab" / ("ab" * 32)
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    words = (weights.parent, *CONVERT[1:4], "again", *CONVERT[5:])
    run = command(*words)
    assert run.code == 0, run.err
    with shared.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"x")
    one_line(command(*words, "--overwrite"), WEIGHTS, f"delete {shared}")
