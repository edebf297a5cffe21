"""Pushes, alone and with the conversion: the command line and the real client, against a Hub of our own."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from converter.conversion import convert
from converter.onnx.export import export
from converter.result import manifest
from tests import forks
from tests.conftest import Pristine, Run, edit_json, fingerprint
from tests.hub_server import (
    AS_USERS_DO,
    IMPATIENT,
    TOKEN,
    UNVERIFIED,
    Account,
    Command,
    HubServer,
    Refusal,
    Request,
    refused,
)
from tests.messages import says
from tests.patched import CHECKED
from tests.test_instructions_to_libraries import UNSEEN
from tests.test_manifest import TAMPERED, cut, flip

SOURCE, ID = "org/tiny-bloom", "ada/bloom-ntk"
CONVERT = (SOURCE, "--scale", "2", "--out", "out")
GIT, CARD = ".gitattributes", "README.md"
MANIFEST = manifest.MANIFEST
SHARDS = [f"model-{number:05}-of-00004.safetensors" for number in range(1, 5)]

ADA = Account("ada", ("lab",))
XET = "/xet-write-token/"

Push = Callable[..., Run]


@pytest.fixture(scope="session")
def converted(pristine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted repository in four shards; do not change it."""
    place = tmp_path_factory.mktemp("converted") / "out"
    convert(pristine("bloom", sharded=True), place, scale=2, verify=False)
    return place


@pytest.fixture
def source(pristine: Pristine, hub: HubServer) -> Path:
    """A checkpoint on the Hub; do not change it."""
    folder = pristine("bloom")
    hub.accounts[TOKEN] = Account("ada", ("LAB",))
    hub.commit(SOURCE, folder)
    return folder


@pytest.fixture
def out(converted: Path, work: Path) -> Path:
    """A copy of it in the working directory."""
    return Path(shutil.copytree(converted, work / "out"))


@pytest.fixture
def push(hub: HubServer, command: Command, out: Path) -> Push:
    """``push(*words, **environment)``: pushes ``out`` to ``ID`` as its owner; nothing in it changes.

    By default without the seconds of verification, which comes before all that most tests are about.
    """
    hub.accounts[TOKEN] = ADA

    def call(*words: object, to: str = ID, start: Sequence[str] = UNVERIFIED, **environment: str) -> Run:
        before = fingerprint(out)
        done = command("push", "out", to, *words, start=start, **{"HF_TOKEN": TOKEN, **environment})
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
def test_a_new_repository(hub: HubServer, push: Push, out: Path, work: Path, tmp_path: Path) -> None:
    """It is verified without running what somebody put in the place of its code; other files stay behind."""
    before = contents(out)
    for plant in UNSEEN.values():
        plant(out, "open('ran', 'w')")
    (out / ".git").mkdir()
    (out / ".git" / "config").write_text("[core]")
    (out / "sub").mkdir()
    (out / "elsewhere").symlink_to(tmp_path)
    stray = [".env", "optimizer.pt", "pytorch_model.bin", "training_args.bin", "model.onnx.failed"]
    stray += ["sub/config.json", "extra.py", "trainer_state.json", "diary.md", "genai_config.json"]
    for name in stray:
        (out / name).write_text("mine")
    run = push("--json", "-v", start=AS_USERS_DO)
    assert run.code == 0, run.err
    assert pushed(hub) == before
    assert not (work / "ran").exists()
    assert GIT in hub.files(ID)
    repository = hub.repositories[ID]
    assert not repository.private
    assert len(repository.commits) == 2
    assert run.json["commit"] == repository.refs["main"]
    assert run.json["files"] == {name: len(data) for name, data in before.items()}
    assert (run.json["repo"], run.json["branch"], run.json["pull_request"]) == (ID, "main", None)
    assert run.json["url"] == f"{hub.endpoint}/{ID}"
    assert run.json["left"] == sorted([*stray, ".git/", "elsewhere/", "ntk_alibi/__init__.py"])
    assert [check["name"] for check in run.json["checks"]] == ["config", *CHECKED]
    assert len([request for request in hub.requests if "/commit/" in request.path]) == 1
    assert {request.token for request in hub.requests if request.host == "hub"} <= {TOKEN, None}

    hub.requests.clear()
    again = push()
    assert (again.code, again.out) == (0, f"{hub.endpoint}/{ID}\n")
    assert "nothing to push" in again.err
    assert not [request for request in sent(hub) if "/preupload/" not in request.path]


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
    """To an organisation, a branch, or a pull request in the repository of somebody else.

    Later, only what changed is sent: a card of ours is replaced, and files may be added.
    """
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
        hub.requests.clear()
        (out / "LICENSE").write_text("MIT\n")
        with (out / CARD).open("a") as card:
            card.write("\nMore.\n")
        relist(out)
        again = push(*words, "--token", TOKEN, "--json", to=to, HF_TOKEN="")
        assert again.json["changed"] == ["LICENSE", CARD, MANIFEST]
        assert pushed(hub, ref, to) == contents(out, to, branch)
        assert puts(hub) == []


# Something else is there


CLASHES: dict[str, Callable[[Path], object]] = {
    "tokenizer.json": lambda folder: edit_json(folder / "tokenizer.json", {"mark": "theirs"}),
    SHARDS[2]: lambda folder: flip(folder / SHARDS[2]),
    "config.json": lambda folder: edit_json(folder / "config.json", {"mark": "theirs"}),
}
"""File that another model has -> how it gets it."""


@pytest.mark.parametrize(
    ("words", "clash"),
    [
        *(([], clash) for clash in CLASHES),
        (["--branch", "new"], "config.json"),
        (["--create-pr"], "config.json"),
    ],
)
def test_something_else_is_refused(
    hub: HubServer, push: Push, out: Path, tmp_path: Path, words: list[str], clash: str
) -> None:
    other = Path(shutil.copytree(out, tmp_path / "other"))
    CLASHES[clash](other)
    hub.commit(ID, other)
    begins = ["new branch"] if "new" in words else []
    refused(push(*words), ID, clash, "--overwrite", *begins)
    assert sent(hub) == []


def test_an_update_of_the_same_model(hub: HubServer, push: Push, out: Path, tmp_path: Path) -> None:
    """What was pushed is converted again and pushed: only what others put there stays, and graphs."""
    older = Path(shutil.copytree(out, tmp_path / "older"))
    for name in ("ntk_old.py", "model.onnx"):
        (older / name).write_text("old")
    relist(older)
    (older / "notes.md").write_text("theirs")
    hub.commit(ID, older)
    convert(older, out, scale=4, verify=False, overwrite=True)
    run = push("--json", "-v")
    assert run.code == 0, run.err
    assert (run.json["deleted"], run.json["stale"]) == (["ntk_old.py"], ["model.onnx"])
    assert "config.json" in run.json["changed"]
    more = {name: (older / name).read_bytes() for name in ("notes.md", "model.onnx")}
    assert pushed(hub) == contents(out) | more
    assert "model.onnx, graphs of the older model" in run.err
    assert push("--json").json["changed"] == []

    edit_json(older / "config.json", {"hidden_size": 64, "n_embed": 64})  # another model of that name
    relist(older)
    hub.commit(ID, older)
    refused(push(), ID, "--overwrite")


@pytest.mark.parametrize("words", [[], ["--branch", "ntk"]])
def test_overwriting(hub: HubServer, push: Push, out: Path, tmp_path: Path, words: list[str]) -> None:
    """All that another model has is replaced. Other branches stay."""
    first = theirs(hub, tmp_path / "theirs", {"config.json": "{}", "a\x1b[2Jb": "", "eval.md": ""})
    branch = words[1] if words else None
    expected = contents(out, branch=branch) | {GIT: b"*.bin filter=lfs\n"}
    for name in ("eval.md", *(f"mine-{number:03}\x1b[2J" for number in range(300))):
        (out / name).write_text("mine")
    run = push("--overwrite", *words, "--json", "-v")
    assert run.code == 0, run.err
    assert run.json["deleted"] == ["a\x1b[2Jb", "eval.md"]
    assert hub.files(ID, branch or "main") == expected
    assert hub.repositories[ID].commits[first] == tmp_path / "theirs"
    assert branch is None or hub.repositories[ID].refs["main"] == first
    assert "deleted: a\\x1b[2Jb, eval.md\nnot pushed: eval.md, mine-000\\x1b[2J, " in run.err
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
    assert ("by hand" in run.err) is not bool(words)
    again = push("--json")
    assert (again.json["changed"], again.json["kept"]) == ([], [*mine])
    assert pushed(hub) == contents(out) | mine


# A target that cannot be pushed to: what it is, its owner or reader, and words of the error.
TARGETS: list[tuple[str, list[str], Account, tuple[str, ...]]] = [
    # Who asks for the old name is sent on, to what may be the source.
    ("ada/old", ["--overwrite"], ADA, ("ada/old", ID)),
    (ID, ["--private"], ADA, (ID, "public", "--private")),
    (ID, ["--branch", "v1"], ADA, ("v1", "tag")),
    (ID, ["--create-pr", "--branch", "new"], ADA, (f"{ID} (branch new)", "--create-pr")),
    ("ada/other", ["--create-pr"], ADA, ("ada/other", "--create-pr")),
    ("grace/other", [], ADA, ("grace", "ada")),
    ("ada/other", [], Account("ada", role="read"), ("read", "write access")),
]
NO_RIGHTS = ("ada/other", [], Account("grace", role="fineGrained"), ("403", "rights", "ada/other"))
"""The Hub does not say where such a token may write, before something is sent."""


@pytest.mark.parametrize(
    ("converting", "to", "words", "account", "parts"),
    [
        *((False, *target) for target in (*TARGETS, NO_RIGHTS)),
        *(pytest.param(True, *target, marks=pytest.mark.version) for target in TARGETS),
    ],
    ids=str,
)
@pytest.mark.usefixtures("source")
def test_targets_that_cannot_be(
    hub: HubServer,
    push: Push,
    command: Command,
    work: Path,
    tmp_path: Path,
    converting: bool,
    to: str,
    words: list[str],
    account: Account,
    parts: tuple[str, ...],
) -> None:
    """A conversion with a push, or its dry run, finds them before any work."""
    hub.accounts[TOKEN] = account
    first = theirs(hub, tmp_path / "theirs")
    hub.commit(ID, tmp_path / "theirs", tag="v1")

    def renamed(request: Request) -> None:
        if "/ada/old" in request.path:
            refusal = Refusal(HTTPStatus.TEMPORARY_REDIRECT, "moved")
            refusal.answer.headers["Location"] = hub.endpoint + request.path.replace("ada/old", ID)
            raise refusal

    hub.before = renamed
    if converting:
        run = command(*CONVERT, "--out", "new", "--push-to-hub", to, *words, "--dry-run", HF_TOKEN=TOKEN)
        assert not (work / "new").exists()
    else:
        run = push(*words, to=to)
    refused(run, *parts, code=2 if "v1" in words else 1)
    assert hub.repositories.keys() == {ID, SOURCE}
    assert hub.repositories[ID].refs == {"main": first, "v1": first}
    assert "model.safetensors" not in hub.downloads()
    if account.role != "fineGrained":
        assert sent(hub) == []


def test_a_gitignore_by_which_the_hub_would_leave_out_files(
    hub: HubServer, push: Push, tmp_path: Path
) -> None:
    theirs(hub, tmp_path / "theirs", {".gitignore": "*.json\n"})
    refused(push("--overwrite"), ID, ".gitignore")
    assert sent(hub) == []


def test_a_commit_that_lacks_a_file(hub: HubServer, push: Push) -> None:
    """Because the Hub left it out in silence."""
    hub.lost.add("config.json")
    refused(push(), ID, "config.json", ".gitignore", hub.repositories[ID].refs["main"])
    hub.lost.clear()
    assert push("-q").code == 0
    assert "config.json" in pushed(hub)


# What changes at the same time


@pytest.mark.parametrize(
    ("moment", "words", "parts"),
    [
        ("/branch/", ["--branch", "ntk"], ["409 Conflict", "Reference already exists", "ntk"]),
        ("/commit/", [], ["main", "A commit has happened since"]),
        ("/repos/create", ["--private"], ["409 Conflict", "already created"]),
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
        refused(again, ID, "--private")
    else:
        assert again.code == 0, again.err


@pytest.mark.version
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_while_files_are_sent(
    hub: HubServer,
    push: Push,
    environment: dict[str, str],
    work: Path,
    out: Path,
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    """The Hub is left as it was; the client's threads end the files that they are sending."""
    first = theirs(hub, tmp_path / "theirs")
    half, ended = threading.Event(), threading.Event()

    def stop() -> None:
        half.set()
        ended.wait(60)

    hub.half_sent = stop
    running = forks.Popen(
        [sys.executable, *UNVERIFIED, "push", "out", ID],
        cwd=work,
        env=environment | {"HF_TOKEN": TOKEN},
        stdout=forks.PIPE,
        stderr=forks.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert half.wait(60)
        running.send_signal(number)
        threading.Timer(1, ended.set).start()
        output, errors = running.communicate(timeout=20)
    finally:
        running.kill()
    if number is signal.SIGKILL:
        assert running.returncode == -signal.SIGKILL
    else:
        # click ends the line that the terminal's ^C stands in.
        refused(Run(running.returncode, output, errors.removeprefix("\n")), "interrupted", ID, "again")
    assert hub.repositories[ID].refs == {"main": first}
    hub.half_sent = None
    assert push("-q").code == 0
    assert pushed(hub) == contents(out)


# Only what is right


def test_graphs(hub: HubServer, push: Push, out: Path) -> None:
    """They are run again, and what is wrong stops everything; tests/test_manifest.py has other defects."""
    export(out)
    run = push("--json", start=AS_USERS_DO)
    assert run.code == 0, run.err
    assert "graph" in [check["name"] for check in run.json["checks"]]
    assert {"model.onnx", "onnx_validation.json", "genai_config.json"} <= pushed(hub).keys()
    assert pushed(hub) == contents(out)
    hub.requests.clear()
    cut_off = (lambda out: cut(out / "model.onnx"), "model.onnx")
    for change, part in (TAMPERED["layers"], cut_off):
        change(out)
        refused(push("--overwrite", start=AS_USERS_DO), part)
    assert sent(hub) == []


# What the Hub refuses, and what breaks


@pytest.mark.version
@pytest.mark.parametrize(
    ("status", "where", "parts"),
    [
        (HTTPStatus.UNAUTHORIZED, "/api/whoami-v2", ("Invalid user token", "write access")),
        (HTTPStatus.FORBIDDEN, "/commit/", ("403 Forbidden: no way for [token].", "write access")),
        (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "/preupload/", ("413", "no way for [token];")),
        (HTTPStatus.INSUFFICIENT_STORAGE, "/objects/batch", ("507", "no way for [token];", "again")),
        (HTTPStatus.NOT_FOUND, "/api/whoami-v2", ("404", "no way for [token];", "HF_ENDPOINT")),
        (HTTPStatus.BAD_REQUEST, "/commit/", ("BadRequestError: ", "no way for [token];")),
        (HTTPStatus.BAD_REQUEST, "/api/validate-yaml", (ID, f"Invalid metadata in {CARD}")),
        (HTTPStatus.TOO_MANY_REQUESTS, "/api/repos/create", ("429", "no way for [token];", "again")),
        # Also of a Hub without Xet, which later clients take for granted.
        *((status, XET, (str(status), "write access", "HF_HUB_DISABLE_XET=1")) for status in (403, 404)),
    ],
)
def test_what_the_hub_refuses(
    hub: HubServer, push: Push, status: HTTPStatus, where: str, parts: tuple[str, ...]
) -> None:
    """A traceback does not tell the token either, which the Hub says back."""

    def refuse(request: Request) -> None:
        if where in request.path:
            raise Refusal(status, f"no way for {request.token}")

    hub.before = refuse
    hub.transfer = "xet" if where == XET else "basic"
    run = push("-v", "--token", TOKEN, HF_HUB_DISABLE_XET=str(int(where != XET)))
    assert "Traceback" in run.err
    refused(Run(run.code, run.out, run.err[run.err.rindex("\nerror: ") + 1 :]), *parts)
    assert ID not in hub.repositories or set(hub.files(ID)) == {GIT}


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


@pytest.mark.parametrize("words", [["bloom"], [ID, "--branch", "a b"]])
@pytest.mark.usefixtures("out")
def test_names_that_cannot_be_in_a_dry_run_without_a_token(command: Command, words: list[str]) -> None:
    refused(command("push", "out", *words, "--dry-run", HF_TOKEN=""), code=2)


@pytest.mark.parametrize(
    ("address", "code"),
    [
        (f"https://huggingface.co/{ID}", 0),
        (f"https://hf.co/{ID}/", 0),
        (f"https://huggingface.co/{ID}/tree/main", 2),
        (f"https://huggingface.co/datasets/{ID}", 2),
        (f"https://example.com/{ID}", 2),
    ],
)
def test_an_address_stands_for_its_id(hub: HubServer, push: Push, out: Path, address: str, code: int) -> None:
    run = push(to=address)
    assert run.code == code, run.err
    if code:
        refused(run, "USER/NAME", code=2)
        assert sent(hub) == []
    else:
        assert run.out == f"{hub.endpoint}/{ID}\n"
        assert pushed(hub) == contents(out)


@pytest.mark.version
def test_a_dry_run_says_what_is_sent_and_what_is_left_out(hub: HubServer, push: Push, out: Path) -> None:
    """With a token, also what the Hub has; it sends and verifies nothing."""
    (out / "notes.txt").write_text("mine")
    told = push("--dry-run", "--json", HF_TOKEN="").json
    assert told["files"] == {name: len(data) for name, data in contents(out).items() if name != "notes.txt"}
    assert (told["left"], told["changes"], told["dry_run"]) == (["notes.txt"], None, True)
    assert hub.requests == []
    said = push("--dry-run", HF_TOKEN="").out
    says(said, ID, "model-00001-of-00004.safetensors", "not sent: notes.txt", "the Hub was not asked")

    assert set(push("--dry-run", "--json").json["changes"]["changed"]) == set(told["files"])
    assert sent(hub) == []
    assert push().code == 0
    hub.requests.clear()
    assert push("--dry-run", "--json").json["changes"]["changed"] == []
    says(push("--dry-run").out, "on the Hub already: ")
    (out / "README.md").write_text("---\nlicense: mit\n---\n# Other\n")
    assert push("--dry-run", "--json").json["changes"]["changed"] == ["README.md"]
    assert sent(hub) == []


@pytest.mark.version
def test_an_upload_that_breaks_off_goes_on(hub: HubServer, push: Push, out: Path) -> None:
    """The client tries each file six times; two are taken before the connection is gone for good."""
    taken = iter((False, False))
    hub.half_sent = lambda: next(taken, True)
    refused(push(start=IMPATIENT), ID, "isconnected", "again")
    stored = set(hub.objects)
    assert len(stored) == 2
    assert set(hub.files(ID)) == {GIT}

    hub.half_sent = None
    hub.requests.clear()
    assert push("-q").code == 0
    assert len(puts(hub)) == len(SHARDS) - len(stored)
    assert not stored & set(puts(hub))
    assert pushed(hub) == contents(out)


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


# A Hub that makes the client wait


@pytest.mark.parametrize(
    ("header", "value"), [("Retry-After", "86400"), ("RateLimit", '"api";r=0;t=86400')], ids=str
)
def test_a_hub_that_asks_to_wait_for_a_day(hub: HubServer, push: Push, header: str, value: str) -> None:
    def refuse(_: Request) -> None:
        refusal = Refusal(HTTPStatus.TOO_MANY_REQUESTS, "Too many requests")
        refusal.answer.headers[header] = value
        raise refusal

    hub.before = refuse
    refused(push(), "86400 seconds", "again")


def test_a_hub_that_asks_to_wait_for_seconds_is_waited_for(hub: HubServer, push: Push, out: Path) -> None:
    def refuse_once(request: Request) -> None:
        if request.match("tree") and not asked:
            asked.append(request)
            refusal = Refusal(HTTPStatus.TOO_MANY_REQUESTS, "Too many requests")
            refusal.answer.headers["Retry-After"] = "60"
            raise refusal

    asked: list[Request] = []
    hub.before = refuse_once
    done = push(start=IMPATIENT)
    assert "60 seconds" in done.err
    assert done.code == 0
    assert pushed(hub) == contents(out)


def test_a_silent_hub_is_left(hub: HubServer, push: Push) -> None:
    go = threading.Event()
    hub.before = lambda _: go.wait(60)
    quickly = (
        "-c",
        "import converter.progress as progress, converter.source.hub as hub\n"
        f"progress.LONG = 0.2; hub.SILENCE = 1.0\n{IMPATIENT[1]}",
    )
    done = push(start=quickly)
    go.set()
    said, error = done.err.splitlines()
    assert said.startswith("waiting for the Hub")
    assert "timed out" in error
    assert done.code == 1


# Conversion and push as one command, which depend on the version of transformers


@pytest.mark.version
def test_from_the_hub_to_the_hub(
    pristine: Pristine, hub: HubServer, command: Command, work: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(pristine("bloom", sharded=True), tmp_path / "source"))
    (source / CARD).write_text("---\nlicense: bigscience-bloom-rail-1.0\n---\n# Tiny\n")
    hub.commit(SOURCE, source)
    hub.accounts[TOKEN] = Account("ada")
    run = command(*CONVERT, "--push-to-hub", ID, "--private", HF_TOKEN=TOKEN)
    assert run.code == 0, run.err
    repository = hub.repositories[ID]
    assert run.out.splitlines() == [str(work / "out"), f"{hub.endpoint}/{ID}"]
    assert repository.refs["main"] in run.err
    assert "slopes" in run.err
    assert "%|" not in run.err
    assert repository.private
    there = pushed(hub)
    assert there == contents(work / "out")
    for line in (f"base_model: {SOURCE}", "license: bigscience-bloom-rail-1.0"):
        assert line in there[CARD].decode()
    for path in source.glob("*.safetensors"):
        assert there[path.name] == path.read_bytes()
    assert not [name for name, data in hub.files(ID).items() if TOKEN.encode() in data]

    # What is there is as it would be, so that the same once more is no commit.
    again = command("push", "out", ID, "--json", start=UNVERIFIED, HF_TOKEN=TOKEN)
    assert again.code == 0, again.err
    assert (again.json["changed"], again.json["commit"]) == ([], repository.refs["main"])
    more = command(ID, "--scale", "4", "--out", "again", "--push-to-hub", ID, HF_TOKEN=TOKEN)
    assert more.code == 0, more.err
    assert json.loads(hub.files(ID)["config.json"])["alibi_scaling"]["factor"] == 4


@pytest.mark.version
@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    ("held", "words", "part"),
    [
        (None, [], ""),
        (None, ["--push-to-hub", "Lab/x"], ""),
        (None, ["--push-to-hub", "https://huggingface.co/Lab/x"], ""),
        (None, ["--push-to-hub", SOURCE.upper()], SOURCE.upper()),
        (None, ["--token", "hf_unknown_secret"], "401"),
        (CARD, [], ""),
        ("onnx/old.onnx", [], "onnx/old.onnx"),
        ("onnx/old.onnx", ["--overwrite"], ""),
        ("onnx/old.onnx", ["--branch", "new"], "new branch"),
    ],
)
def test_the_target_is_checked_before_the_work(
    hub: HubServer,
    command: Command,
    work: Path,
    tmp_path: Path,
    held: str | None,
    words: list[str],
    part: str,
) -> None:
    """A dry run checks it too, and pushes nothing."""
    if held is not None:
        (tmp_path / "held" / held).parent.mkdir(parents=True)
        (tmp_path / "held" / held).write_text("theirs")
        hub.commit(ID, tmp_path / "held")
    before = {name: repository.refs.copy() for name, repository in hub.repositories.items()}
    run = command(*CONVERT, "--push-to-hub", ID, *words, "--dry-run", HF_TOKEN=TOKEN)
    assert run.code == bool(part), run.err
    assert part in run.err
    assert run.err.count("\n") == bool(part)
    assert {name: repository.refs for name, repository in hub.repositories.items()} == before
    assert list(work.iterdir()) == []
    assert "model.safetensors" not in hub.downloads()


@pytest.mark.version
@pytest.mark.usefixtures("source")
def test_without_a_token_only_a_dry_run_goes_on(hub: HubServer, command: Command, work: Path) -> None:
    hub.requests.clear()
    words = (*CONVERT, "--push-to-hub", ID)
    refused(command(*words, HF_TOKEN=""), "write access", "--token")
    run = command(*words, "--dry-run", HF_TOKEN="")
    assert run.code == 0, run.err
    refused(command(*CONVERT, "--push-to-hub", "bloom", "--dry-run", HF_TOKEN=""), "USER/NAME", code=2)
    says(run.err, "the Hub was not asked", ID, "no token")
    assert list(work.iterdir()) == []
    assert "model.safetensors" not in hub.downloads()


@pytest.mark.version
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--push-to-hub", ID, "--no-verify"], "verified"),
        (["--private"], "--push-to-hub"),
        (["--branch", "b"], "--push-to-hub"),
        (["--create-pr"], "--push-to-hub"),
    ],
)
def test_options_that_contradict_each_other(here: Command, work: Path, words: list[str], part: str) -> None:
    refused(here("source", "--scale", "2", "--out", "out", *words), part, code=2)
    assert list(work.iterdir()) == []


@pytest.mark.version
@pytest.mark.usefixtures("source")
def test_a_push_that_fails_leaves_the_result(hub: HubServer, command: Command, work: Path) -> None:
    def refuse(request: Request) -> None:
        if request.path.endswith("/commit/main"):
            raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the repository is full")

    hub.before = refuse
    run = command(*CONVERT, "--push-to-hub", ID, start=UNVERIFIED, HF_TOKEN=TOKEN)
    refused(run, "the repository is full", f"ntk-convert push {work / 'out'} {ID}")
    hub.before = None
    assert command("push", "out", ID, start=UNVERIFIED, HF_TOKEN=TOKEN).code == 0


FULL_DISK = """
import shutil, sys
usage = shutil.disk_usage("/")
free = int(sys.argv.pop(1))
shutil.disk_usage = lambda path: usage._replace(free=free)
from converter.cli import main
main()
"""


@pytest.mark.version
def test_a_disk_without_room_is_refused_before_the_download(
    source: Path, hub: HubServer, environment: dict[str, str], work: Path
) -> None:
    """Room for the download alone, on a disk that the result goes to as well."""
    free = (source / "model.safetensors").stat().st_size + (16 << 20)
    words = [sys.executable, "-c", FULL_DISK, str(free), *CONVERT, "--no-verify"]
    run = forks.run(words, env=environment, cwd=work, capture_output=True, text=True)
    assert run.returncode == 1
    assert "download and result" in run.stderr
    assert "model.safetensors" not in hub.downloads()
    assert list(work.iterdir()) == []
    words[3] = str(2 * free)
    assert forks.run(words, env=environment, cwd=work, capture_output=True).returncode == 0
    # The cache has it now, so there must be room for the result alone.
    words[3] = str((16 << 20) + sum(path.stat().st_size for path in source.iterdir()))
    assert forks.run([*words, "--overwrite"], env=environment, cwd=work, capture_output=True).returncode == 0
