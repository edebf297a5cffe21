"""examples/convert_job.py, told by words or by its environment, converts, pushes and leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Pristine
from tests.hub_server import TOKEN, Account, Command, HubServer, refused

SOURCE, ID = "org/tiny-bloom", "ada/bloom-ntk"


@pytest.fixture
def job(pristine: Pristine, hub: HubServer, command: Command, work: Path) -> Iterator[Command]:
    """``job(*words, **environment)``: the script, as a process that uses ``hub``."""
    hub.accounts[TOKEN] = Account("ada")
    hub.commit(SOURCE, pristine("bloom"))
    more = {"TMPDIR": str(work), "HF_TOKEN": TOKEN}
    yield lambda *words, **given: command(*words, start=("-m", "examples.convert_job"), **more, **given)
    assert not [*work.iterdir()]


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ((SOURCE, ID, "--scale", "2", "--private"), {"MODEL": "org/another"}),
        ((), {"MODEL": SOURCE, "TARGET": ID, "OPTIONS": "--scale 2 '--private'"}),
    ],
)
def test_a_model_is_pushed(
    job: Command, hub: HubServer, words: tuple[str, ...], given: dict[str, str]
) -> None:
    run = job(*words, **given)
    assert run.code == 0, run.err
    assert run.out.splitlines()[-1] == f"{hub.endpoint}/{ID}"
    assert hub.repositories[ID].private
    assert b'"factor": 2.0' in hub.files(ID)["config.json"]


@pytest.mark.parametrize(
    ("words", "given", "said", "code"),
    [
        ((), {}, "MODEL", 2),
        ((), {"MODEL": SOURCE, "TARGET": ID, "OPTIONS": "--scale '2"}, "OPTIONS", 2),
        ((SOURCE, ID, "--scal", "2"), {}, "--scal", 2),
        ((SOURCE, "../..", "--scale", "2"), {}, "../..", 2),
        (("org/missing", ID, "--scale", "2"), {}, "org/missing", 1),
    ],
)
def test_bad_input(
    job: Command, hub: HubServer, words: tuple[str, ...], given: dict[str, str], said: str, code: int
) -> None:
    refused(job(*words, **given), said, code=code)
    assert [*hub.repositories] == [SOURCE]
