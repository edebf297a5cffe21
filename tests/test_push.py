"""Converted repositories to the Hub: the command line and the real client, against a Hub of our own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from converter.exports.onnx.export import export
from converter.pipeline import convert
from converter.result import manifest
from tests import forks
from tests.conftest import Run, edit_json, fingerprint
from tests.dealt import quick
from tests.foreign_code import UNSEEN
from tests.hub_server import (
    AS_USERS_DO,
    TOKEN,
    UNVERIFIED,
    Account,
    Command,
    HubServer,
    Refusal,
    Request,
    refused,
)
from tests.patched import CHECKED
from tests.test_manifest import TAMPERED, flip

ID = "ada/bloom-ntk"
GIT, CARD = ".gitattributes", "README.md"
MANIFEST = manifest.MANIFEST
SHARDS = [f"model-{number:05}-of-00004.safetensors" for number in range(1, 5)]

Push = Callable[..., Run]


@pytest.fixture(scope="session")
def converted(pristine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted repository in four shards; do not change it."""
    place = tmp_path_factory.mktemp("converted") / "out"
    convert(pristine("bloom", sharded=True), place, scale=2, verify=False)
    return place


@pytest.fixture
def out(converted: Path, work: Path) -> Path:
    """A copy of it in the working directory."""
    return Path(shutil.copytree(converted, work / "out"))


@pytest.fixture
def push(hub: HubServer, command: Command, out: Path) -> Push:
    """``push(*words, **environment)``: pushes ``out`` to ``ID`` as its owner; nothing in it changes.

    With ``verify`` as users do, else without the seconds of verification, which comes before all that
    most tests are about.
    """
    hub.accounts[TOKEN] = Account("ada", ("lab",))

    def call(
        *words: object, to: str = ID, verify: bool = False, fresh: bool = False, **environment: str
    ) -> Run:
        before = fingerprint(out)
        start = AS_USERS_DO if verify else UNVERIFIED
        done = command(
            "push", "out", to, *words, start=start, fresh=fresh, **{"HF_TOKEN": TOKEN, **environment}
        )
        assert fingerprint(out) == before
        assert "%|" not in done.err
        assert "\r" not in done.err
        return done

    return call


def contents(folder: Path, to: str = ID, branch: str | None = None) -> dict[str, bytes]:
    """The files of a folder as they are pushed: the card's examples load the model from the Hub."""
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    there = f'("{to}", revision="{branch}"' if branch else f'("{to}"'
    served = f"serve {to} --revision {branch}" if branch else f"serve {to}"
    card = files[CARD].replace(b'("./out"', there.encode()).replace(b"serve ./out", served.encode())
    return files | {CARD: card}


def pushed(hub: HubServer, revision: str = "main", repo_id: str = ID) -> dict[str, bytes]:
    """What a repository holds of ours."""
    return {name: data for name, data in hub.files(repo_id, revision).items() if name != GIT}


def sent(hub: HubServer) -> list[Request]:
    """The requests that changed anything, on either host."""
    return [request for request in hub.requests if request.method not in ("GET", "HEAD")]


def puts(hub: HubServer) -> list[str]:
    """The SHA-256 of each file that was sent to the storage, as often as it was."""
    return [request.path.split("/")[2] for request in hub.requests if request.method == "PUT"]


def theirs(hub: HubServer, folder: Path, files: dict[str, str] | None = None) -> str:
    """A repository of somebody else; without ``files``, one that says no more than its licence."""
    own = {GIT: "*.bin filter=lfs\n", CARD: "---\nlicense: mit\n---\n"}
    for name, text in (own | (files or {})).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return hub.commit(ID, folder)


def relist(folder: Path) -> None:
    """A manifest of what is there now, as an attacker would make one."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    manifest.write(folder, names, {})


# What arrives


@pytest.mark.version
def test_a_new_repository(hub: HubServer, push: Push, out: Path) -> None:
    run = push("--json", "-v", verify=True, fresh=True)
    assert run.code == 0, run.err
    assert pushed(hub) == contents(out)
    assert GIT in hub.files(ID)
    repository = hub.repositories[ID]
    assert not repository.private
    assert len(repository.commits) == 2
    assert run.json["commit"] == repository.refs["main"]
    assert run.json["files"] == {name: len(data) for name, data in contents(out).items()}
    assert (run.json["repo"], run.json["branch"], run.json["pull_request"]) == (ID, "main", None)
    assert (run.json["url"], run.json["left"]) == (f"{hub.endpoint}/{ID}", [])
    assert [check["name"] for check in run.json["checks"]] == CHECKED
    assert len([request for request in hub.requests if "/commit/" in request.path]) == 1
    assert {request.token for request in hub.requests if request.host == "hub"} <= {TOKEN, None}

    hub.requests.clear()
    again = push()
    assert (again.code, again.out) == (0, f"{hub.endpoint}/{ID}\n")
    assert "nothing to push" in again.err
    assert not [request for request in sent(hub) if "/preupload/" not in request.path]


def test_the_card_s_examples_load_the_model_from_the_hub(hub: HubServer, push: Push, out: Path) -> None:
    """Other text of the card is not changed, and a card that is not ours is not touched."""
    with (out / CARD).open("ab") as card:
        card.write(b'\r\nMine: `load("./out")`, [a link](./out)\n')
    assert push("-q", "--branch", "ntk").code == 0
    there = pushed(hub, "ntk")[CARD]
    assert b'\r\nMine: `load("ada/bloom-ntk", revision="ntk")`, [a link](./out)\n' in there
    assert b"--out ./out --no-verify" in there
    for name in (b"AutoTokenizer", b"AutoModelForCausalLM"):
        code = name + b'.from_pretrained("ada/bloom-ntk", revision="ntk", trust_remote_code=True)\n'
        assert code in there

    (out / CARD).write_text('# Mine\n\nmodel = AutoModel.from_pretrained("./out")\n')
    assert push("-q").code == 0
    assert pushed(hub)[CARD] == (out / CARD).read_bytes()


@pytest.mark.parametrize(
    ("words", "to", "owner", "ref", "url"),
    [
        (["--private"], "lab/bloom", "ada", "main", "lab/bloom"),
        (["--branch", "ntk/2x"], ID, "ada", "ntk/2x", f"{ID}/tree/ntk/2x"),
        (["--create-pr"], ID, "grace", "refs/pr/1", f"{ID}/discussions/1"),
    ],
)
def test_where_it_goes(
    hub: HubServer, push: Push, out: Path, tmp_path: Path, words: Any, to: str, owner: str, ref: str, url: str
) -> None:
    """To an organisation, a branch, or a pull request in the repository of somebody else."""
    first = theirs(hub, tmp_path / "theirs")
    hub.accounts[TOKEN] = Account(owner, ("lab",))
    branch = ref if "--branch" in words else None
    run = push(*words, "--token", TOKEN, "--json", to=to, HF_TOKEN="")
    assert run.code == 0, run.err
    assert to in run.err
    assert run.json["url"] == f"{hub.endpoint}/{url}"
    assert run.json["commit"] == hub.repositories[to].refs[ref]
    assert hub.repositories[to].private == ("--private" in words)
    assert hub.repositories[ID].refs["main"] == first
    assert pushed(hub, ref, to) == contents(out, to, branch)

    if ref != "refs/pr/1":
        (out / "LICENSE").write_text("MIT\n")
        relist(out)
        again = push(*words, "--token", TOKEN, "--json", to=to, HF_TOKEN="")
        assert again.json["changed"] == ["LICENSE", MANIFEST]
        assert pushed(hub, ref, to) == contents(out, to, branch)


def test_a_branch_that_begins_with_all_of_it(hub: HubServer, push: Push, out: Path) -> None:
    (out / CARD).unlink()  # its examples would name the branch
    assert push("-q").code == 0
    run = push("--branch", "copy")
    assert run.code == 0, run.err
    assert f"created {ID} (branch copy)" in run.err
    refs = hub.repositories[ID].refs
    assert refs["copy"] == refs["main"]
    assert "nothing to push" in push("--branch", "copy").err


def test_only_what_changed_is_sent(hub: HubServer, push: Push, out: Path) -> None:
    """A card of ours is replaced; new files may be added."""
    assert push("-q").code == 0
    hub.requests.clear()
    with (out / CARD).open("a") as card:
        card.write("\nMore.\n")
    (out / "NOTICE").write_text("Thanks.\n")
    relist(out)
    assert push("--json").json["changed"] == ["NOTICE", CARD, MANIFEST]
    assert pushed(hub) == contents(out)
    assert puts(hub) == []


def test_what_stays_behind(hub: HubServer, push: Push, out: Path, tmp_path: Path) -> None:
    (out / ".git").mkdir()
    (out / ".git" / "config").write_text("[core]")
    (out / "sub").mkdir()
    (out / "elsewhere").symlink_to(tmp_path)
    stray = [".env", "optimizer.pt", "pytorch_model.bin", "training_args.bin", "model.onnx.failed"]
    stray += ["sub/config.json", "extra.py", "trainer_state.json", "diary.md", "genai_config.json"]
    for name in stray:
        (out / name).write_text("mine")
    before = contents(out)
    run = push("--json")
    assert run.code == 0, run.err
    assert run.json["left"] == sorted([*stray, ".git/", "elsewhere/"])
    assert set(before) - set(pushed(hub)) == {*stray, ".git/config"}


# Something else is there


CLASHES: dict[str, Callable[[Path], object]] = {
    "model.gguf": lambda folder: (folder / "model.gguf").write_text("GGUF"),
    ".gitignore": lambda folder: (folder / ".gitignore").write_text("*.json\n"),
    SHARDS[2]: lambda folder: flip(folder / SHARDS[2]),
    "config.json": lambda folder: edit_json(folder / "config.json", {"mark": "theirs"}),
}
"""File that another model has -> how it gets it."""


@pytest.mark.parametrize("words", [[], ["--branch", "new"], ["--create-pr"]])
@pytest.mark.parametrize("clash", CLASHES)
def test_something_else_is_refused(
    hub: HubServer, push: Push, out: Path, tmp_path: Path, words: list[str], clash: str
) -> None:
    other = Path(shutil.copytree(out, tmp_path / "other"))
    CLASHES[clash](other)
    hub.commit(ID, other)
    begins = ["a new branch begins as the default one"] if "new" in words else []
    refused(push(*words), ID, clash, "--overwrite", *begins)
    assert sent(hub) == []


@pytest.mark.parametrize("words", [[], ["--branch", "ntk"]])
def test_overwriting(hub: HubServer, push: Push, out: Path, tmp_path: Path, words: list[str]) -> None:
    """All that another model has is replaced; its .gitignore keeps nothing out. Other branches stay."""
    ignored = {".gitignore": "*.safetensors\n*.json\n"}
    first = theirs(hub, tmp_path / "theirs", {"config.json": "{}", "a\x1b[2Jb": "", "eval.md": ""} | ignored)
    branch = words[1] if words else None
    expected = contents(out, branch=branch) | {GIT: b"*.bin filter=lfs\n"}
    for name in ("eval.md", *(f"mine-{number:03}\x1b[2J" for number in range(300))):
        (out / name).write_text("mine")
    run = push("--overwrite", *words, "--json", "-v")
    assert run.code == 0, run.err
    assert run.json["deleted"] == [".gitignore", "a\x1b[2Jb", "eval.md"]
    assert hub.files(ID, branch or "main") == expected
    assert hub.repositories[ID].commits[first] == tmp_path / "theirs"
    assert branch is None or hub.repositories[ID].refs["main"] == first
    assert "deleted: .gitignore, a\\x1b[2Jb, eval.md\nnot pushed: eval.md, mine-000\\x1b[2J, " in run.err
    assert "mine-299" not in run.err
    assert " and 281 more" in run.err
    assert push("--json", *words).json["changed"] == []


@pytest.mark.parametrize("words", [[], ["--overwrite"]])
def test_a_card_that_was_written_by_hand(
    hub: HubServer, push: Push, out: Path, tmp_path: Path, words: list[str]
) -> None:
    card = "---\nlicense: mit\n---\n# Mine\n\nWeeks of work.\n"
    theirs(hub, tmp_path / "theirs", {CARD: card})
    run = push(*words, "--json", "-v")
    assert run.code == 0, run.err
    mine = {} if words else {CARD: card.encode()}
    assert pushed(hub) == contents(out) | mine
    assert run.json["kept"] == [*mine]
    assert run.json["files"].keys() == contents(out).keys() - mine.keys()
    assert ("README.md, written by hand" in run.err) is not bool(words)
    again = push("--json")
    assert (again.json["changed"], again.json["kept"]) == ([], [*mine])
    assert pushed(hub) == contents(out) | mine


@pytest.mark.parametrize(
    ("to", "words", "parts"),
    [
        # Who asks for the old name is sent on, to what may be the source.
        *(("ada/old", words, ("ada/old", f"was renamed to {ID}")) for words in ([], ["--overwrite"])),
        ("ada/old", ["--branch", "main"], ("ada/old", f"was renamed to {ID}")),
        (ID, ["--private"], (ID, "exists and is public")),
        (ID, ["--branch", "v1"], ("v1 is a tag",)),
        (ID, ["--create-pr", "--branch", "new"], (f"{ID} (branch new)", "--create-pr")),
        ("ada/other", ["--create-pr"], ("ada/other", "--create-pr")),
        ("grace/other", [], ("grace", "ada/other")),
    ],
)
def test_targets_that_cannot_be(
    hub: HubServer, push: Push, tmp_path: Path, to: str, words: list[str], parts: tuple[str, ...]
) -> None:
    first = theirs(hub, tmp_path / "theirs")
    hub.commit(ID, tmp_path / "theirs", tag="v1")
    hub.renamed["ada/old"] = ID
    refused(push(*words, to=to), *parts, code=2 if "v1" in words else 1)
    assert sent(hub) == []
    assert hub.repositories.keys() == {ID}
    assert hub.repositories[ID].refs == {"main": first, "v1": first}


@pytest.mark.parametrize("how", ["lost", "ignored"])
@pytest.mark.parametrize("name", ["config.json", SHARDS[1]])
def test_a_commit_that_lacks_a_file(hub: HubServer, push: Push, name: str, how: str) -> None:
    """Whether the Hub or the client, told by the Hub, leaves it out in silence."""
    getattr(hub, how).add(name)
    run = push()
    refused(run, ID, name, "do not use it", ".gitignore", hub.repositories[ID].refs["main"])
    getattr(hub, how).clear()
    assert push("-q").code == 0
    assert name in pushed(hub)


# What changes at the same time


@pytest.mark.parametrize("why", ["refused", "interrupted"])
def test_a_new_branch_goes_with_its_commit(
    hub: HubServer, push: Push, process: Callable[..., Any], tmp_path: Path, why: str
) -> None:
    first = theirs(hub, tmp_path / "theirs")
    there: list[str] = []

    def refuse(request: Request) -> None:
        if "/commit/" in request.path:
            there.extend(hub.repositories[ID].refs)
            if why == "interrupted":
                running.send_signal(signal.SIGINT)
                threading.Event().wait(1)
            raise Refusal(HTTPStatus.FORBIDDEN, "no way")

    hub.before = refuse
    if why == "refused":
        refused(push("--branch", "ntk"), "may not write")
    else:
        running = process("--branch", "ntk")
        output, errors = running.communicate(timeout=60)
        refused(Run(running.returncode, output, errors.removeprefix("\n")), "interrupted", ID)
    assert there == ["main", "ntk"]
    assert hub.repositories[ID].refs == {"main": first}


@pytest.mark.parametrize(
    ("moment", "words", "parts"),
    [
        ("/branch/", ["--branch", "ntk"], ["same time"]),
        ("/commit/", [], ["main", "meanwhile"]),
        ("/repos/create", ["--private"], ["same time"]),
    ],
)
def test_somebody_else_writes_at_the_same_time(
    hub: HubServer, push: Push, tmp_path: Path, moment: str, words: list[str], parts: list[str]
) -> None:
    """The same branch or repository is made, or the branch moves: theirs stays."""
    first = theirs(hub, tmp_path / "theirs")
    if moment == "/repos/create":
        hub.repositories.clear()
    expected: dict[str, str] = {}

    def move(request: Request) -> None:
        if moment in request.path and not expected:
            (tmp_path / "theirs" / CARD).write_text("# New\n")
            expected["main"] = first if moment == "/branch/" else hub.commit(ID, tmp_path / "theirs")
            expected.update({"ntk": first} if moment == "/branch/" else {})
            hub.repositories[ID].refs.update(expected)

    hub.before = move
    refused(push(*words), ID, *parts)
    assert hub.repositories[ID].refs == expected
    again = push(*words)
    if "--private" in words:
        refused(again, ID, "exists and is public")
    else:
        assert again.code == 0, again.err


@pytest.fixture
def process(
    hub: HubServer, environment: dict[str, str], work: Path, out: Path
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``process()``: a push that runs; ended with the test."""
    assert out.is_dir()
    hub.accounts[TOKEN] = Account("ada")
    running: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        running.append(
            forks.Popen(
                [sys.executable, *UNVERIFIED, "push", "out", ID, *words],
                cwd=work,
                env=environment | {"HF_TOKEN": TOKEN},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return running[-1]

    yield start
    for found in running:
        if found.poll() is None:
            os.killpg(found.pid, signal.SIGKILL)
            found.wait()


@pytest.mark.version
@pytest.mark.parametrize(
    "number", quick([signal.SIGKILL, signal.SIGTERM, signal.SIGINT], signal.SIGKILL, signal.SIGINT)
)
@pytest.mark.parametrize("exists", [False, True])
def test_signals_while_files_are_sent(
    hub: HubServer,
    push: Push,
    process: Callable[[], subprocess.Popen[str]],
    out: Path,
    tmp_path: Path,
    number: signal.Signals,
    exists: bool,
) -> None:
    """The Hub is left as it was; the client's threads end the files that they are sending."""
    if exists:
        theirs(hub, tmp_path / "theirs")
    half, ended = threading.Event(), threading.Event()

    def stop() -> None:
        half.set()
        ended.wait(60)

    hub.half_sent = stop
    running = process()
    assert half.wait(60)
    before = hub.repositories[ID].refs.copy()
    running.send_signal(number)
    threading.Timer(1, ended.set).start()
    output, errors = running.communicate(timeout=20)
    if number is signal.SIGKILL:
        assert running.returncode == -signal.SIGKILL
    else:
        # click ends the line that the terminal's ^C stands in.
        refused(Run(running.returncode, output, errors.removeprefix("\n")), "interrupted", ID, "again")
    assert hub.repositories[ID].refs == before
    hub.half_sent = None
    assert push("-q").code == 0
    assert pushed(hub) == contents(out)


@pytest.mark.parametrize("moment", ["half sent", "/preupload/", "/api/validate-yaml"])
def test_what_was_compared_is_what_is_sent(hub: HubServer, command: Command, out: Path, moment: str) -> None:
    """Whatever is written there meanwhile."""
    hub.accounts[TOKEN] = Account("ada")
    before = contents(out)

    def write(request: Request | None = None) -> None:
        if request is None or moment in request.path:
            edit_json(out / "config.json", {"mark": "changed"})

    if moment == "half sent":
        hub.half_sent = write
    else:
        hub.before = write
    run = command("push", "out", ID, start=UNVERIFIED, HF_TOKEN=TOKEN)
    assert run.code == 0, run.err
    assert pushed(hub) == before


# Only what is right


@pytest.mark.parametrize("kind", ["short weights", "infinite weights", "layers", "code", "no folder"])
def test_what_is_not_right_is_not_pushed(hub: HubServer, push: Push, out: Path, kind: str) -> None:
    """One of each step that finds it; tests/test_manifest.py has the others."""
    change, part = TAMPERED[kind]
    change(out)
    refused(push(verify=True), part)
    assert sent(hub) == []
    assert hub.repositories == {}


@pytest.mark.parametrize("kind", UNSEEN)
def test_code_that_takes_the_place_of_a_file_is_not_run_nor_pushed(
    hub: HubServer, push: Push, out: Path, work: Path, kind: str
) -> None:
    before = contents(out)
    UNSEEN[kind](out, "open('ran', 'w')")
    run = push(verify=True)
    assert run.code == 0, run.err
    assert not (work / "ran").exists()
    assert pushed(hub) == before


def test_graphs(hub: HubServer, push: Push, out: Path) -> None:
    """They are run again, and one that is wrong stops everything."""
    export(out)
    run = push("--json", verify=True)
    assert run.code == 0, run.err
    assert "graph" in [check["name"] for check in run.json["checks"]]
    assert {"model.onnx", "onnx_validation.json", "genai_config.json"} <= pushed(hub).keys()
    assert pushed(hub) == contents(out)
    hub.requests.clear()
    data = (out / "model.onnx").read_bytes()
    (out / "model.onnx").write_bytes(data[: len(data) // 2])
    refused(push("--overwrite", verify=True), "model.onnx")
    assert sent(hub) == []


# What the Hub refuses, and what breaks


@pytest.mark.parametrize(
    ("account", "parts"),
    [
        (None, ("does not know this token", "write access")),
        (Account("ada", role="read"), ("can only read", "write access")),
        (Account("grace", role="fineGrained"), ("may not write", "rights to create", ID)),
    ],
    ids=["unknown", "read", "fine-grained"],
)
def test_tokens_that_may_not_write(
    hub: HubServer, push: Push, account: Account | None, parts: tuple[str, ...]
) -> None:
    del hub.accounts[TOKEN]
    if account is not None:
        hub.accounts[TOKEN] = account
    refused(push(), *parts)
    assert hub.repositories == {}
    assert puts(hub) == []
    refused(push(HF_TOKEN=""), ID, "--token", "hf auth login")


@pytest.mark.version
@pytest.mark.parametrize("words", [["--json"], ["-v", "--token", TOKEN]])
@pytest.mark.parametrize(
    ("status", "where", "parts"),
    [
        (HTTPStatus.UNAUTHORIZED, "/api/whoami-v2", ("does not know this token", "write access")),
        (HTTPStatus.FORBIDDEN, "/commit/", ("may not write", "no way", "write access")),
        (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "/preupload/", ("does not accept", "no way")),
        (HTTPStatus.INSUFFICIENT_STORAGE, "/objects/batch", ("failed with HTTP 507", "later")),
        (HTTPStatus.NOT_FOUND, "/api/whoami-v2", ("is a Hub", "HF_ENDPOINT")),
        (HTTPStatus.BAD_REQUEST, "/commit/", ("does not accept", "no way")),
        (HTTPStatus.TOO_MANY_REQUESTS, "/api/repos/create", ("wait", "later")),
    ],
)
def test_what_the_hub_refuses(
    hub: HubServer, push: Push, words: list[str], status: HTTPStatus, where: str, parts: tuple[str, ...]
) -> None:
    """A traceback does not tell the token either, which the Hub says back."""

    def refuse(request: Request) -> None:
        if where in request.path:
            raise Refusal(status, f"no way for {request.token}")

    hub.before = refuse
    run = push(*words)
    if "-v" in words:
        assert "Traceback" in run.err
        run = Run(run.code, run.out, run.err[run.err.rindex("error: ") :])
    refused(run, *parts)
    hub.before = None
    assert ID not in hub.repositories or set(hub.files(ID)) == {GIT}
    assert push("-q").code == 0


@pytest.mark.version
@pytest.mark.parametrize("from_storage", [False, True])
@pytest.mark.parametrize("status", [HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND])
def test_what_the_xet_storage_refuses(
    hub: HubServer, push: Push, status: HTTPStatus, from_storage: bool
) -> None:
    """The Hub, asked for a way in, or what it says is the storage."""
    hub.transfer = "xet"
    way = {"X-Xet-Cas-Url": f"{hub.endpoint}/cas", "X-Xet-Access-Token": "x"}
    way["X-Xet-Token-Expiration"] = "9999999999"
    body = {"casUrl": f"{hub.endpoint}/cas", "accessToken": "x", "exp": 9999999999}

    def refuse(request: Request) -> None:
        asked = "/xet-write-token/" in request.path
        if asked and from_storage:
            refusal = Refusal(HTTPStatus.OK, "")
            refusal.answer.headers, refusal.answer.body = way, json.dumps(body).encode()
            raise refusal
        if asked or request.path.startswith("/cas/"):
            raise Refusal(status, f"no way for {request.token}")

    hub.before = refuse
    refused(push(HF_HUB_DISABLE_XET="0"), ID, "Xet", "write access", "HF_HUB_DISABLE_XET=1")
    assert set(hub.files(ID)) == {GIT}


@pytest.mark.version
def test_a_hub_without_xet(hub: HubServer, push: Push, out: Path) -> None:
    """Clients before 1.0 ask how files are to be sent; later ones with hf_xet take Xet for granted."""
    run = push(HF_HUB_DISABLE_XET="0")
    if huggingface_hub.__version__.startswith("0."):
        assert run.code == 0, run.err
        assert pushed(hub) == contents(out)
    else:
        refused(run, "HF_HUB_DISABLE_XET=1")
        assert set(hub.files(ID)) == {GIT}


@pytest.mark.parametrize(
    "words",
    [
        *(["bloom"], ["a/b/c"], ["ada/bl oom"], ["ada/.."], ["ada/x--y"], ["../x"], [""], ["ada/x\x1b[2J"]),
        *([ID, "--branch", name] for name in ("a b", "../main", "refs/pr/1", "a.lock", "")),
        [ID, "--token", "hf_ secret"],
    ],
)
@pytest.mark.usefixtures("out")
def test_names_that_cannot_be(here: Command, words: list[str]) -> None:
    refused(here("push", "out", *words), code=2)


@pytest.mark.version
@pytest.mark.parametrize("fault", ["cut", pytest.param("reset", marks=pytest.mark.slow)])
def test_an_upload_that_breaks_off_goes_on(hub: HubServer, push: Push, out: Path, fault: Any) -> None:
    """The client tries each file six times; two are taken before the connection is gone for good."""
    hub.upload_faults = [None, None, *[fault] * 99]
    refused(push(), ID, "the connection to the Hub failed", "again")
    stored = hub.stored
    assert len(stored) == 2
    assert set(hub.files(ID)) == {GIT}

    hub.upload_faults = []
    hub.requests.clear()
    assert push("-q").code == 0
    assert len(puts(hub)) == len(SHARDS) - len(stored)
    assert not stored & set(puts(hub))
    assert pushed(hub) == contents(out)


def test_a_card_that_the_hub_does_not_take(hub: HubServer, push: Push, out: Path) -> None:
    (out / CARD).write_text("---\n- a list\n---\n")
    refused(push(), ID, CARD, "metadata")
    assert set(hub.files(ID)) == {GIT}


@pytest.mark.parametrize("how", ["down", "offline", "welcome page"])
def test_no_hub(hub: HubServer, push: Push, how: str) -> None:
    with HubServer() as other:
        down = other.endpoint

    def welcome(_: Request) -> None:
        refusal = Refusal(HTTPStatus.OK, "Welcome")
        refusal.answer.body = b"<html>Welcome to the hotel's network</html>"
        raise refusal

    hub.before = welcome if how == "welcome page" else None
    environment = {"down": {"HF_ENDPOINT": down}, "offline": {"HF_HUB_OFFLINE": "1"}}.get(how, {})
    refused(push(**environment), "HF_ENDPOINT")
    assert sent(hub) == []
