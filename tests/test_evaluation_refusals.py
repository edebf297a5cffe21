"""What ``eval``, ``tune``, ``fit`` and ``plot`` refuse, in one line that names the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from converter import convert
from converter.evaluation.results import Results
from tests import tiny
from tests.conftest import Refused, edit_json
from tests.test_embeddings import beir, text_file
from tests.tiny import rotary

ENCODER = "--lengths 48 --train-length 24"
TUNE = "tune SOURCE --train-length 24 --target-length 64"
FIT = "fit SOURCE --train-length 24 -q --out NEW --target-length"
LEARN = f"{FIT} 96 --text LEARNED"
PLOT = "plot SOURCE --scales 2 --out NEW"
DRAW = "plot RESULTS --out NEW"


def _small(kind: str, **options: str) -> Callable[[Path], Path]:
    factory = {**tiny.FACTORIES, **tiny.ENCODERS}[kind]
    return lambda path: factory(path, 4, **options)


def _text(content: str | bytes, suffix: str = "") -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        path = path.with_name(path.name + suffix)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def _rows(*rows: object) -> Callable[[Path], Path]:
    return _text("\n".join(map(json.dumps, rows)))


def _masked(path: Path) -> Path:
    folder = tiny.ENCODERS["mosaic_bert"](path, 4)
    edit_json(folder / "tokenizer_config.json", {"mask_token": "w5"})
    return folder


def _silent(path: Path) -> Path:
    source = tiny.FACTORIES["bloom"](path, 4)
    for file in source.glob("*token*"):
        file.unlink()
    return source


def _converted(path: Path) -> Path:
    convert(tiny.FACTORIES["bloom"](path.with_name("source"), 4), path, method="none", verify=False)
    return path


PLACES: dict[str, Callable[[Path], Path]] = {
    "SOURCE": _small("bloom"),
    "JINA": _small("jina_bert"),
    "MASKED": _masked,
    "CLASSIFIER": _small("bloom", head="SequenceClassification"),
    "JINACLASSIFIER": _small("jina_bert", head="SequenceClassification"),
    "BARE": _small("jina_bert", head="Model"),
    "LLAMA": lambda path: rotary.rotary(path, "llama"),
    "SILENT": _silent,
    "CONVERTED": _converted,
    "TEXT": text_file,
    "WINDOW": lambda path: text_file(path, 100),
    "LEARNED": lambda path: text_file(path, 80 * 96),
    "SHORT": _text("too short"),
    "BINARY": _text(bytes(range(128, 256)) * 99),
    "BEIR": beir,
    "PROMPTS": _rows(*({"prompt": "w7", "answer": "w8", "length": at} for at in (256, 1024) * 2)),
    "ONE": _rows(*({"prompt": "w7", "answer": "w8", "length": at} for at in (256, 256, 1024))),
    "RESULTS": _rows(Results([], {}).to_json()),
    "DAMAGED": _rows({"format": 1, "measurements": [{}]}),
    "BROKEN": _text("["),
    "NEW": lambda path: path,
    "NOWHERE": lambda path: path / "at" / "all",
}


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        ("eval SOURCE", "the trained length of SOURCE is not known; give --lengths or --train-length", 2),
        ("eval SOURCE --prompts PROMPTS --text TEXT", "give --lengths or --train-length", 2),
        (
            "eval SOURCE --prompts PROMPTS --methods by-parts --scales 2",
            "--methods by-parts needs the trained length of SOURCE, which is not known; add --train-length N",
            2,
        ),
        ("eval SOURCE --tasks perplexity", "--text", 2),
        ("eval SOURCE --tasks trec", "file", 2),
        ("eval SOURCE --tasks nonsense", "is not one of", 2),
        ("eval SOURCE --scales 2,x", "not a comma-separated list of numbers", 2),
        ("eval SOURCE --scales 2", "--methods", 2),
        ("eval SOURCE --lengths 64 --rates 2 --methods none", "--rates belongs to --dynamic; add e.g.", 2),
        ("eval SOURCE --lengths 100000000000", "out of range", 2),
        ("eval SOURCE --lengths 1", "--lengths 1 is out of range", 2),
        ("eval SOURCE --train-length 1", "from its trained length 1; give --lengths from 2 to", 2),
        ("eval SOURCE --items 0 --lengths 64", "--items", 2),
        ("eval SOURCE --lengths 64 --batch-size 0", "--batch-size", 2),
        ("eval SOURCE --lengths 8", "does not fit", 2),
        ("eval SOURCE --lengths 4096", "does not know the words of lines; give --text, or prompts of yo", 2),
        ("eval SOURCE --text SHORT --tasks perplexity --lengths 64", "give more text", 2),
        ("eval SOURCE --text BINARY --tasks perplexity --lengths 64", "not UTF-8", 2),
        ("eval NOWHERE", "no folder", 1),
        ("eval JINA --tasks passkey --lengths 64", "is an encoder", 2),
        ("eval CLASSIFIER --lengths 200", "no language model", 1),
        ("eval SILENT --lengths 64", "tokenizer", 1),
        (f"eval SOURCE --beir BEIR {ENCODER}", "beir is for encoders, and SOURCE is not one", 2),
        (f"eval MASKED --tasks passkey {ENCODER}", "is an encoder and generates no text, which the task", 2),
        (f"eval MASKED {ENCODER}", "is an encoder: give --text, or queries and documents with --beir", 2),
        (f"eval JINACLASSIFIER {ENCODER}", "neither embeds texts nor predicts masked tokens", 1),
        (f"eval BARE --text TEXT {ENCODER}", "BARE has no head that predicts masked tokens", 1),
        (f"eval MASKED --tasks beir {ENCODER}", "beir is read from a folder; give it with --beir", 2),
        ("tune SOURCE", "--target-length", 2),
        ("tune SOURCE --target-length 64", "add --train-length", 2),
        ("tune SOURCE --target-length 64 --train-length 64", "not above the trained length", 2),
        ("tune SOURCE --target-length 16777217 --train-length 24", "at most 16777216", 2),
        (f"{TUNE} --items 1", "--items 1 is out of range", 2),
        (TUNE, "tokens, but takes at least 120; give --text, or prompts of your own", 2),
        (f"{TUNE} --text WINDOW", "only one window of 64", 2),
        ("tune SOURCE --target-length 500 --train-length 256 --prompts PROMPTS", "no prompts between", 2),
        ("tune SOURCE --target-length 1024 --train-length 256 --prompts ONE", "at least two", 2),
        ("fit LLAMA --target-length 256 --text TEXT --out NEW", "which have no slopes to fit", 2),
        (f"{FIT} 96", "give --text, --prompts or both", 2),
        (f"{FIT} 24 --text LEARNED", "--target-length 24 is not above the trained length 24", 2),
        (f"{FIT} 2304 --text LEARNED", "--text has 3 windows of 2304 tokens, and fitting needs 16", 2),
        (f"{FIT} 1048576 --text LEARNED", "one window takes 1048576", 2),
        (f"{LEARN} --dynamic length", "'length' is not 'position'", 2),
        (f"{LEARN} --dynamic position --static", "--static and --dynamic cannot be combined", 2),
        (f"{LEARN} --dtype fp16", "--dtype fp16 cannot hold the gradients", 2),
        (f"{LEARN} --steps 0", "--steps 0 is out of range", 2),
        (f"{LEARN} --minutes nan", "--minutes nan is out of range", 2),
        (f"{LEARN} --device auto", "--device auto is for eval and tune", 2),
        (f"{LEARN} --device cuda", "torch finds no CUDA device", 2),
        (f"{PLOT} --dynamic length", "--train-length", 2),
        (f"{PLOT} --out SOURCE/pictures", "only read", 1),
        (f"{PLOT} --out SOURCE", "not empty", 1),
        (f"{PLOT} --out SOURCE/config.json", "is a file", 1),
        ("plot NOWHERE --out NEW", "no folder", 1),
        ("plot LLAMA --methods ntk-published --scales 2 --out NEW", "ntk-published", 2),
        (f"{DRAW} --scales 2", "--scales is for pictures of a model", 2),
        (DRAW, "no measurements", 2),
        ("plot DAMAGED --out NEW", "damaged", 1),
        ("plot BROKEN --out NEW", "not valid JSON", 1),
    ],
)
def test_what_is_refused(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str, code: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made: dict[str, Path] = {}

    def found(word: str) -> str:
        name, slash, rest = word.partition("/")
        if name not in PLACES:
            return word
        if name not in made:
            made[name] = PLACES[name](tmp_path / name)
        return f"{made[name]}{slash}{rest}"

    line = refused(*map(found, words.split()), code=code)
    assert message in line
    assert "`" not in line


def test_device_auto_without_accelerate(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = PLACES["SOURCE"](tmp_path / "SOURCE")
    monkeypatch.setattr("converter.evaluation.runner.find_spec", lambda _: None)
    assert "pip install accelerate" in refused("eval", source, "--lengths", "200", "--device", "auto")
