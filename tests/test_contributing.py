"""docs/contributing.md, followed to the letter for made-up additions: its lists of files are complete."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/contributing.md").read_text(encoding="utf-8")
COPIED = (
    *("converter", "templates", "tests", "docs", "examples", "benchmarks"),
    *("pyproject.toml", "Makefile", "README.md", "README.zh.md"),
)
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.jsonl", ".*")
LISTED = re.compile(r"^\* ((?:`[^`]+`(?:, )?)+): (.*(?:\n  .*)*)", re.MULTILINE)
ADDED = re.compile(r"add `([^`]+)` to `(\w+)`")
COMMAND = re.compile(r"run `python (\S+)`")
NAME = "sample_lm"
MODEL = "refact"
"""The family that is copied under a new name."""
RENAMED = (
    ("gpt_refact", "gpt_sample_lm"),
    ("Refact", "SampleLm"),
    ("refact", "sample_lm"),
    (r"\bwte\b", "token_table"),  # a tensor's name
    (r"\b256\b", "8"),  # what the width of its MLP is a multiple of
)


def section(title: str) -> dict[str, str]:
    """The page's files under a heading -> what it says of each."""
    [text] = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return {
        file: " ".join(said.split())
        for files, said in LISTED.findall(text)
        for file in re.findall(r"`([^`]+)`", files)
    }


class Checkout:
    """A copy of the sources, to which something is added."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=LEFT_OUT)
            else:
                shutil.copy(source, folder / name)
        self.before = self.files()

    def files(self) -> dict[str, str]:
        """Every file's hash, without those that running something leaves behind."""
        return {
            str(path.relative_to(self.folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in self.folder.rglob("*")
            if path.is_file() and ".hypothesis" not in path.parts
        }

    def touched(self) -> set[str]:
        """Files that were added or changed."""
        return {file for file, digest in self.files().items() if self.before.get(file) != digest}

    def run(self, *words: str) -> str:
        """Runs Python here; what it prints."""
        env = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, *words], cwd=self.folder, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done.stdout

    def test(self, *words: str) -> set[str]:
        """Runs tests here, all of which must pass; the files that they are from."""
        options = ("-v", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow")
        return set(
            re.findall(
                r"^tests/test_(\w+)\.py::.* PASSED", self.run("-m", "pytest", *options, *words), re.MULTILINE
            )
        )

    def write(self, file: str, text: str) -> None:
        """Adds a file."""
        assert not (self.folder / file).exists()
        (self.folder / file).write_text(text, encoding="utf-8")

    def edit(self, file: str, before: str, after: str) -> None:
        """Replaces a piece of a file."""
        text = (self.folder / file).read_text(encoding="utf-8")
        assert text.count(before) == 1, f"{before!r} is {text.count(before)} times in {file}"
        (self.folder / file).write_text(text.replace(before, after), encoding="utf-8")

    def follow(self, listed: dict[str, str]) -> None:
        """Makes the edits that the page words as "add ... to ..." and "run ..."."""
        for file, said in listed.items():
            for added, table in ADDED.findall(said):
                text = (self.folder / file).read_text(encoding="utf-8")
                [entries] = re.findall(
                    rf"^{table} = (?:Literal)?[(\[](.*?),?\s*[)\]]$", text, re.MULTILINE | re.DOTALL
                )
                self.edit(file, entries, f"{entries}, {added.replace('NAME', NAME)}")
        for command in dict.fromkeys(word for said in listed.values() for word in COMMAND.findall(said)):
            self.run(command)


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    return Checkout(tmp_path / "checkout")


def add_family(checkout: Checkout) -> set[str]:
    """A family as the page says; its files. It is one of ours with other names and another width."""
    listed = section("A decoder family")
    for file in listed:
        if "NAME" not in file:
            continue
        text = (ROOT / file.replace("NAME", MODEL)).read_text(encoding="utf-8")
        for before, after in RENAMED:
            text = re.sub(before, after, text)
        checkout.write(file.replace("NAME", NAME), text)
    checkout.follow(listed)
    return {file.replace("NAME", NAME) for file in listed}


def add_task(checkout: Checkout) -> set[str]:
    """A task as the page says; its files."""
    listed = section("An evaluation task")
    checkout.write(f"converter/evaluation/tasks/{NAME}.py", TASK)
    checkout.follow(listed)
    return {file.replace("NAME", NAME) for file in listed}


def add_check(checkout: Checkout) -> set[str]:
    """A check as the page says; its files."""
    listed = section("A check")
    checkout.write(f"converter/verification/{NAME}.py", CHECK)
    checkout.follow(listed)
    return {file.replace("NAME", NAME) for file in listed}


def add_method(checkout: Checkout) -> set[str]:
    """A scaling method as the page says; its files."""
    listed = section("A scaling method")
    checkout.follow(listed)
    linear = '    if method == "linear":\n'
    for file, formula in FORMULAS.items():
        stated = f'    if method == "{NAME}":\n        return {formula}\n{linear}'
        checkout.edit(file, linear, stated)
    return set(listed)


@pytest.mark.slow
def test_a_family(checkout: Checkout) -> None:
    files = add_family(checkout)
    assert checkout.touched() == files
    assert len([file for file in files if NAME in file]) == 9
    assert sorted(file for file in files if NAME not in file) == [
        "README.md",
        "README.zh.md",
        "converter/families/__init__.py",
        "docs/families.md",
    ]
    assert "SampleLm-1.6B  (alibi, decoder)" in checkout.run("-m", "converter", "families")
    quick = ("catalogue", "docs", "repository", "tiny")
    files = [f"tests/test_{name}.py" for name in quick]
    assert checkout.test(*files, "-k", f"{NAME} or family or families") == set(quick)


def test_a_task(checkout: Checkout) -> None:
    files = add_task(checkout)
    assert checkout.touched() == files
    assert len(files) == 3
    assert "--sample-lm FILE" in checkout.run("-m", "converter", "eval", "--help")
    assert f", {NAME}; by default all" in " ".join(checkout.run("-m", "converter", "tune", "--help").split())


@pytest.mark.slow
def test_a_check_and_a_method(checkout: Checkout) -> None:
    """In one conversion, whose verification compares the two formulas."""
    files = add_check(checkout)
    assert checkout.touched() == files
    assert len(files) == 2
    methods = add_method(checkout)
    assert checkout.touched() == files | methods
    assert len(methods) == 4
    words = ("examples/tiny-bloom", "--method", NAME, "--scale", "4", "--train-length", "256", "--json")
    result = json.loads(checkout.run("-m", "converter", *words, "--out", "converted"))
    assert result["alibi_scaling"] == {"type": NAME, "factor": 4.0}
    assert {"name": NAME, "detail": "a BLOOM, made of a bloom", "skipped": False} in result["checks"]


@pytest.mark.slow
def test_every_test_holds_for_a_family_a_task_and_a_check(checkout: Checkout) -> None:
    files = add_family(checkout) | add_task(checkout) | add_check(checkout)
    tested = checkout.test("tests", "-k", NAME)
    assert {"reference", "tiny", "logits", "caches", "generation", "loading", "training"} < tested
    assert {"verification", "onnx_export", "onnx_genai", "onnx_logits", "onnx_validation"} < tested
    assert "evaluation_tasks" in tested
    assert checkout.touched() == files


@pytest.mark.slow
def test_tests_of_scalings_hold_for_a_method(checkout: Checkout) -> None:
    files = add_method(checkout)
    tested = {"slopes", "logits", "onnx_logits", "verification"}
    assert checkout.test(*(f"tests/test_{name}.py" for name in tested), "-k", f"{NAME} or slopes") == tested
    assert checkout.touched() == files


TASK = '''"""A made-up task: a word to say again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from converter.evaluation.tasks.base import Item, Metric, TaskType
from converter.evaluation.tasks.cases import read_records
from converter.evaluation.tasks.drawing import generator
from converter.evaluation.tasks.fitting import encode, fill


@dataclass(frozen=True)
class Again:
    words: tuple[str, ...] = ()
    name: str = "sample_lm"
    metric: Metric = "accuracy"
    max_new_tokens: int = 8

    @classmethod
    def read(cls, path: Path) -> Again:
        return cls(tuple(record.text("word") for record in read_records(path)))

    def items(
        self, tokenizer: Any, lengths: Sequence[int], count: int, seed: int
    ) -> Mapping[int, Sequence[Item]]:
        return {length: self._items(tokenizer, length, count, seed) for length in lengths}

    def score(self, item: Item, text: str) -> float:
        return float(text.strip() in item.answers)

    def _items(self, tokenizer: Any, length: int, count: int, seed: int) -> list[Item]:
        chance = generator(self.name, seed, length)
        words = self.words or tuple(str(chance.randrange(10**6, 10**7)) for _ in range(count))
        return fill(self, [partial(_item, tokenizer, word) for word in words[:count]], length, least=0)


def _item(tokenizer: Any, word: str, fillers: int) -> Item:
    return Item(encode(tokenizer, f"Say {word}. {'And so on. ' * fillers}Now say it again:"), (word,), 0.0)


TYPES = (
    TaskType(
        name="sample_lm",
        prompt="a word, then filler text",
        right="the same word",
        origin="nobody",
        generate=Again,
        read=Again.read,
        file_help="Words to say again.",
    ),
)
'''
CHECK = '''"""A made-up check: the config knows its tensors."""

from __future__ import annotations

from converter.verification.check import Check, Context
from converter.verification.patched import Patched

NAME = "sample_lm"


def check(patched: Patched, context: Context) -> Check:
    return Check(NAME, f"a {patched.family.title}, made of a {context.source_config['model_type']}")
'''
FORMULAS = {
    "converter/scaling/slopes.py": "(0.5,) * heads",
    "templates/ntk_alibi.py": "[0.5] * heads",
    "tests/reference/alibi.py": "slopes / factor**0.5",
}
"""Of a made-up method that scales every head by the same root of the factor."""
