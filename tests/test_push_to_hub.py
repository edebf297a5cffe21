"""Conversion and push as one command, and the checks before any work: the token, the target, the disks."""

from __future__ import annotations

import json
import shutil
import sys
from http import HTTPStatus
from pathlib import Path

import pytest

from tests import forks
from tests.conftest import Pristine
from tests.hub_server import TOKEN, UNVERIFIED, Account, Command, HubServer, Refusal, Request, refused

SOURCE, ID, CARD = "org/tiny-bloom", "ada/bloom-ntk", "README.md"
CONVERT = (SOURCE, "--scale", "2", "--out", "out", "--push-to-hub", ID)


@pytest.fixture
def source(pristine: Pristine, hub: HubServer) -> Path:
    folder = pristine("bloom")
    hub.accounts[TOKEN] = Account("ada", ("LAB",))
    hub.commit(SOURCE, folder)
    return folder


def test_from_the_hub_to_the_hub(
    pristine: Pristine, hub: HubServer, command: Command, work: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(pristine("bloom", sharded=True), tmp_path / "source"))
    (source / CARD).write_text("---\nlicense: bigscience-bloom-rail-1.0\n---\n# Tiny\n")
    hub.commit(SOURCE, source)
    hub.accounts[TOKEN] = Account("ada")
    run = command(*CONVERT, "--private", HF_TOKEN=TOKEN)
    assert run.code == 0, run.err
    assert run.out.splitlines() == [str(work / "out"), f"{hub.endpoint}/{ID}"]
    assert f"pushed to {ID} as commit " in run.err
    assert "checked slopes" in run.err
    assert "%|" not in run.err
    repository = hub.repositories[ID]
    assert repository.private
    pushed = hub.files(ID)
    mine = {path.name: path.read_bytes() for path in (work / "out").iterdir()}
    for here, there in (('("./out"', f'("{ID}"'), ("serve ./out", f"serve {ID}")):
        mine[CARD] = mine[CARD].replace(here.encode(), there.encode())
    assert pushed == mine | {".gitattributes": pushed[".gitattributes"]}
    for line in (f"base_model: {SOURCE}", "license: bigscience-bloom-rail-1.0"):
        assert line in pushed[CARD].decode()
    for path in source.glob("*.safetensors"):
        assert pushed[path.name] == path.read_bytes()
    assert not [name for name, data in pushed.items() if TOKEN.encode() in data]

    # What is there is as it would be, so that the same once more is no commit.
    again = command("push", "out", ID, "--json", start=UNVERIFIED, HF_TOKEN=TOKEN)
    assert again.code == 0, again.err
    assert (again.json["changed"], again.json["commit"]) == ([], repository.refs["main"])
    more = command(ID, "--scale", "4", "--out", "again", "--push-to-hub", ID, HF_TOKEN=TOKEN)
    assert more.code == 0, more.err
    assert json.loads(hub.files(ID)["config.json"])["alibi_scaling"]["factor"] == 4


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    ("held", "words", "part"),
    [
        (None, [], ""),
        (None, ["--push-to-hub", "Lab/x"], ""),
        (None, ["--push-to-hub", "bob/model"], "'bob' is neither ada"),
        (None, ["--push-to-hub", SOURCE.upper()], "is what was converted"),
        (None, ["--token", "hf_unknown_secret"], "401"),
        (None, ["HF_TOKEN="], "takes a token with write access"),
        (CARD, [], ""),
        (CARD, ["--private"], "exists and is public"),
        ("onnx/old.onnx", [], "holds something else (onnx/old.onnx"),
        ("onnx/old.onnx", ["--overwrite"], ""),
        ("onnx/old.onnx", ["--branch", "new"], "as a new branch begins as the default one"),
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
    token = TOKEN
    if "HF_TOKEN=" in words:
        words, token = [], ""
    run = command(*CONVERT, *words, "--dry-run", HF_TOKEN=token)
    assert run.code == bool(part), run.err
    assert part in run.err
    assert run.err.count("\n") == bool(part)
    assert {name: repository.refs for name, repository in hub.repositories.items()} == before
    assert list(work.iterdir()) == []
    assert "model.safetensors" not in hub.downloads()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--push-to-hub", ID, "--no-verify"], "only a verified result can be pushed"),
        (["--private"], "needs --push-to-hub"),
        (["--branch", "b"], "needs --push-to-hub"),
        (["--create-pr"], "needs --push-to-hub"),
    ],
)
def test_options_that_contradict_each_other(here: Command, work: Path, words: list[str], part: str) -> None:
    refused(here("source", "--scale", "2", "--out", "out", *words), part, code=2)
    assert list(work.iterdir()) == []


@pytest.mark.usefixtures("source")
def test_a_push_that_fails_leaves_the_result(hub: HubServer, command: Command, work: Path) -> None:
    def refuse(request: Request) -> None:
        if request.path.endswith("/commit/main"):
            raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the repository is full")

    hub.before = refuse
    run = command(*CONVERT, start=UNVERIFIED, HF_TOKEN=TOKEN)
    refused(
        run,
        "the repository is full",
        f"out is complete; to go on, run: ntk-convert push {work / 'out'} {ID}",
    )
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


def test_a_disk_without_room_is_refused_before_the_download(
    source: Path, hub: HubServer, environment: dict[str, str], work: Path
) -> None:
    """Room for the download alone, on a disk that the result goes to as well."""
    free = (source / "model.safetensors").stat().st_size + (16 << 20)
    words = [sys.executable, "-c", FULL_DISK, str(free), *CONVERT[:5], "--no-verify"]
    run = forks.run(words, env=environment, cwd=work, capture_output=True, text=True)
    assert run.returncode == 1
    assert "MB free, and download and result need " in run.stderr
    assert " MB; free some space or choose another" in run.stderr
    assert "model.safetensors" not in hub.downloads()
    assert list(work.iterdir()) == []
    words[3] = str(2 * free)
    assert forks.run(words, env=environment, cwd=work, capture_output=True).returncode == 0
    # The cache has it now, so there must be room for the result alone.
    words[3] = str((16 << 20) + sum(path.stat().st_size for path in source.iterdir()))
    assert forks.run([*words, "--overwrite"], env=environment, cwd=work, capture_output=True).returncode == 0
