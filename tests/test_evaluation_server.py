"""``eval --server``: the local table, what is sent, what is refused, and whether the server scales."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from converter import convert, evaluate, make_task
from converter.errors import VerificationError
from converter.evaluation.server import NEUTRAL, share
from tests.completions_server import completions
from tests.conftest import Refused, RunCli, edit_json
from tests.messages import Words, says
from tests.test_evaluation import EXAMPLE
from tests.tiny import ENCODERS

pytest.importorskip("openai")
TRAINED = 256


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-bloom with by-parts by position, and a generation config that penalises repetitions."""
    folder = tmp_path_factory.mktemp("server") / "scaled"
    convert(EXAMPLE, folder, train_length=TRAINED, verify=False)
    edit_json(folder / "generation_config.json", {"repetition_penalty": 3.0, "top_k": 2})
    return folder


@pytest.fixture(scope="module")
def unscaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server") / "unscaled"
    convert(EXAMPLE, folder, method="none", train_length=TRAINED, verify=False)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two prompts of each length."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [json.loads(line) for line in EXAMPLE.with_suffix(".jsonl").read_text().splitlines()]
    kept = [[row for row in rows if row["length"] == length][:2] for length in (256, 2048)]
    path.write_text("\n".join(json.dumps(row) for some in kept for row in some))
    return path


def text_file(path: Path) -> Path:
    """What tiny-bloom can read, 1200 tokens and more."""
    rows = EXAMPLE.with_suffix(".jsonl").read_text().splitlines()
    path.write_text(" ".join(json.loads(row)["prompt"] for row in rows[:12]))
    return path


def small(folder: Path, target: Path) -> Path:
    """A repository's small files alone."""
    target.mkdir()
    for file in folder.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    return target


def test_the_table_is_the_local_one(scaled: Path, prompts: Path, tmp_path: Path, run: RunCli) -> None:
    text = text_file(tmp_path / "text")
    asked = ("--prompts", prompts, "--text", text, "--lengths", "256,512", "--items", 2, "--json")
    here = run("eval", scaled, *asked).json
    with completions(scaled, fault="once") as server:
        found = run("eval", scaled, "--server", server.url.removesuffix("/v1"), *asked)
    there = found.json
    assert [each["task"] for each in there["measurements"]] == ["prompts"] * 2 + ["perplexity"] * 2
    for ours, theirs in zip(there["measurements"], here["measurements"], strict=True):
        if ours["task"] == "perplexity":
            assert ours["scores"] == pytest.approx(theirs["scores"], abs=1e-5)
            assert [part["loss"] for part in ours["positions"]] == pytest.approx(
                [part["loss"] for part in theirs["positions"]], abs=1e-4
            )
        else:
            assert ours == theirs
    [model] = there["models"].values()
    assert model["server"]["url"] == server.url
    assert model["server"]["scales"].startswith("yes")
    generated = [each for each in server.asked if not each.get("echo")]
    assert generated
    assert all(each["temperature"] == 0 and isinstance(each["prompt"][0], int) for each in server.asked)
    assert all(each[key] == NEUTRAL[key] for each in generated for key in ("repetition_penalty", "top_k"))
    assert not any("min_p" in each for each in generated)


def test_small_files_are_enough(scaled: Path, prompts: Path, tmp_path: Path, run: RunCli) -> None:
    """And requests are sent at once; a key of the environment is told."""
    folder = small(scaled, tmp_path / "small")
    with completions(scaled, "m", fault="together") as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", "sk-secret")
        found = run("eval", folder, "--prompts", prompts, "--server", server.url, "--concurrency", 3)
    assert found.code == 0
    assert 1 < server.most <= 3
    assert server.keys == {"Bearer sk-secret"}
    assert "secret" not in found.out + found.err
    says(found.err, "OPENAI_API_KEY", server.url)
    assert "not checked" in found.out


@pytest.mark.parametrize("model", ["scaled", "unscaled"])
@pytest.mark.parametrize("served", ["scaled", "unscaled"])
def test_whether_the_server_scales(
    model: str, served: str, prompts: Path, request: pytest.FixtureRequest
) -> None:
    folder, other = (request.getfixturevalue(name) for name in (model, served))
    with completions(other, "m") as server:

        def asked() -> Any:
            return evaluate(folder, tasks=[make_task("prompts", prompts)], items=1, server=server.url)

        if (model, served) == ("scaled", "unscaled"):
            with pytest.raises(VerificationError, match="does not scale"):
                asked()
            return
        [about] = asked().models.values()
    assert about["server"]["scales"].split(",")[0] == {"scaled": "yes", "unscaled": "not asked to"}[model]


def test_noise_hides_a_difference() -> None:
    """But a small difference between two models is found below larger noise, in enough tokens."""
    rng = np.random.default_rng(0)
    unscaled, way, noise = rng.normal(3, 1, 2000), rng.normal(0, 0.01, 2000), rng.normal(0, 0.03, 2000)
    for part in (0.0, 1.0):
        middle, error = share(unscaled + part * way + noise, unscaled, unscaled + way) or (np.nan, np.nan)
        assert abs(middle - part) < 3 * error < 0.5
    few = slice(20)
    _, error = share((unscaled + noise)[few], unscaled[few], (unscaled + way)[few]) or (0.0, 0.0)
    assert 3 * error > 0.5
    assert share(unscaled + noise, unscaled, unscaled + 1e-3 * way) is None


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        ("--server URL --methods ntk --scales 2", "--methods", 2),
        ("--server URL --device cpu", "--device", 2),
        ("--server URL --concurrency 0", "--concurrency 0 is out of range", 2),
        ("--model-name m", ("--model-name", "--server URL"), 2),
        ("--server URL --model-name other", ("'other'", "a, m", "--model-name"), 2),
        ("--server URL", ("a, m", "--model-name"), 2),
        ("--server localhost", ("localhost", "http://"), 2),
        ("--server http://[", ("http://[", "is no address"), 2),
        ("--server http://127.0.0.1:9 --model-name m", "http://127.0.0.1:9/v1", 1),
        ("--server URL/there --model-name m", "there is no such thing", 1),
        ("--server URL --model-name m --fault short", "500 tokens", 2),
        ("MORE --server URL", ("--server", "one model"), 2),
        ("--server URL --model-name m --fault rejects", ("HTTP 400", "this is\\ntoo much"), 1),
        (
            "--server URL --model-name m --fault silent --text TEXT --lengths 200 --items 1",
            "no log-probabilities",
            1,
        ),
        (
            "--server URL --model-name m --fault NaN --text TEXT --lengths 200 --items 1",
            "invalid log-probabilities",
            1,
        ),
        (
            "--server URL --model-name m --fault positive --text TEXT --lengths 200 --items 1",
            "numbers up to 0",
            1,
        ),
        (
            "--server URL --model-name m --fault words --text TEXT --lengths 200 --items 1",
            "numbers up to 0",
            1,
        ),
        ("--server URL --model-name m --fault null", "gives no text", 1),
        ("--server URL --model-name m --fault redirect", ("/elsewhere'", "nothing is sent"), 1),
        ("--server URL --model-name m --fault packed", "compresses its answers", 1),
        ("--server URL --model-name m --fault endless", "1.0 MB", 1),
        ("--server URL --model-name m --fault slow", ("did not end", "1 s"), 1),
        ("--server URL --model-name m --fault page", "OpenAI-compatible", 1),
        ("ENCODER --server URL --model-name m", ("ENCODER", "encoder"), 1),
    ],
)
def test_what_is_refused(
    words: str,
    said: Words,
    code: int,
    scaled: Path,
    prompts: Path,
    refused: Refused,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("converter.evaluation.server.RETRIES", 0)
    monkeypatch.setattr("converter.evaluation.server.MOST_BYTES", 1_000_000)
    if "slow" in words:
        monkeypatch.setattr("converter.evaluation.server.SECONDS", 1.0)
    words, _, fault = words.partition(" --fault ")
    fault, _, more = fault.partition(" ")
    given = [*words.split(), *more.split(), *([] if "TEXT" in more else ["--prompts", "PROMPTS"])]
    model = [] if "ENCODER" in given else [small(scaled, tmp_path / "small")]
    with completions(
        scaled, "a", "m", context=500 if fault == "short" else 9999, fault=fault.replace("+", " ")
    ) as server:
        places = {
            "PROMPTS": prompts,
            "URL": server.url,
            "URL/there": f"{server.url}/there",
            "MORE": tmp_path / "small",
            "TEXT": text_file(tmp_path / "text") if "TEXT" in given else "",
            "ENCODER": ENCODERS["jina_bert"](tmp_path / "ENCODER", 4) if "ENCODER" in given else "",
        }
        found = refused("eval", *model, *(places.get(word, word) for word in given), code=code)
        server.ends.set()
    says(found, said)
    assert not any("elsewhere" in path for path in server.paths)


def test_without_the_client(
    scaled: Path, prompts: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    found = refused("eval", scaled, "--prompts", prompts, "--server", "http://127.0.0.1:9")
    assert "pip install openai" in found


def test_a_server_that_hangs(
    scaled: Path, prompts: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("converter.evaluation.server.RETRIES", 0)
    monkeypatch.setattr("converter.evaluation.server.SECONDS", 1.0)
    folder = small(scaled, tmp_path / "small")
    with completions(scaled, "m", fault="hangs") as server:
        found = refused("eval", folder, "--prompts", prompts, "--server", server.url)
        server.ends.set()
    says(found, "no answer", "1 s")
