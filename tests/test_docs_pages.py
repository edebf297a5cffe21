"""The pages of docs/ and of examples/lm_eval name what exists: files, commands, options, numbers."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

from converter.cli import cli
from converter.cli.evaluation import TASKS
from converter.evaluation.results import COLUMNS, PERPLEXITY, Measurement
from converter.families.bloom import FAMILY as BLOOM
from converter.slopes import scaled_slopes, stock_slopes

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "examples/lm_eval/README.md"]
HARNESS = ROOT / "examples/lm_eval"
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
LINKS = [(page, link) for page, text in TEXTS.items() for link in re.findall(r"\]\(([^)\s]+)\)", text)]
COMMANDS = [
    (page, line.strip())
    for page, text in TEXTS.items()
    for line in text.replace("\\\n", " ").splitlines()
    if line.strip().startswith("ntk-convert ")
]
NATS = 5


def anchors(page: Path) -> set[str]:
    """What GitHub calls a page's headings in links."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_are_pages_links_and_commands() -> None:
    assert {"docs/how-it-works.md", "docs/evaluation.md", "docs/recipes.md"} <= set(TEXTS)
    assert len(LINKS) > 20
    assert len(COMMANDS) > 10


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_every_link_leads_somewhere(page: str, link: str) -> None:
    if link.startswith("https://"):
        return
    name, _, anchor = link.partition("#")
    target = (ROOT / page).parent / name if name else ROOT / page
    assert target.exists()
    assert not anchor or anchor in anchors(target)


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_every_command_parses(page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line)[1:]
    monkeypatch.chdir(tmp_path)
    for word in words:
        if Path(word).suffix in (".txt", ".jsonl"):  # click looks whether the files are there
            (tmp_path / word).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / word).touch()
    name, command, rest = cli.resolve_command(click.Context(cli), cli_words(words))
    assert command is not None, page
    command.make_context(name, rest)


def cli_words(words: list[str]) -> list[str]:
    """With the command that is meant where none is named."""
    return words if words[0] in cli.commands else ["convert", *words]


def test_every_option_exists() -> None:
    ours = {name for command in cli.commands.values() for option in command.params for name in option.opts}
    for page, text in TEXTS.items():
        named = set(re.findall(r"`(--[a-z][a-z-]*)", text))
        assert named <= ours, page


def test_the_tables_of_spans_are_those_of_the_slopes() -> None:
    page = TEXTS["docs/how-it-works.md"]
    stock = stock_slopes(8)
    rows = {
        "span, tokens": stock,
        "stock": stock,
        "`linear`": scaled_slopes(stock, "linear", 4),
        "`ntk`": scaled_slopes(stock, "ntk", 4),
    }
    for name, slopes in rows.items():
        [row] = re.findall(rf"^\| {re.escape(name)} \| (.+) \|$", page, re.MULTILINE)
        assert row.split(" | ") == [f"{NATS / slope:.0f}" for slope in slopes], name
    [row] = re.findall(r"^\| slope \| (.+) \|$", page, re.MULTILINE)
    assert row.split(" | ") == [f"1/{1 / slope:g}" for slope in stock]


def test_numbers_of_the_recipes() -> None:
    assert BLOOM.train_lengths["bigscience/bloom-1b7"] == 8192 / 4
    assert f"{NATS / min(stock_slopes(32, bias_max=16)):,.0f} tokens" in TEXTS["docs/recipes.md"].replace(
        "\n", " "
    )


def test_the_tables_of_the_evaluation() -> None:
    page = TEXTS["docs/evaluation.md"]
    tasks = page.split("## Tasks")[1].split("## Confidence")[0]
    assert re.findall(r"^\| `(\w+)` \|", tasks, re.MULTILINE) == [
        name for name in TASKS if name != PERPLEXITY
    ]
    written = page.split("| field | |")[1].split("\n\n")[0]
    named = {
        name
        for cell in re.findall(r"^\| (.+?) \|", written, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", cell)
    }
    known = {field.name for field in dataclasses.fields(Measurement)} | set(COLUMNS)
    assert named == known


def test_the_tasks_of_the_harness() -> None:
    shared = yaml.safe_load((HARNESS / "_lines.yaml").read_text(encoding="utf-8"))
    tasks = sorted(HARNESS.glob("lines_*.yaml"))
    page = TEXTS["examples/lm_eval/README.md"]
    [lengths] = re.findall(r"for n in ([\d ]+);", page)
    assert {task.stem for task in tasks} == {f"lines_{length}" for length in lengths.split()}
    assert f"--tasks {shared['tag']} " in page
    for task in tasks:
        content = yaml.safe_load(task.read_text(encoding="utf-8"))
        assert content["task"] == task.stem
        assert (HARNESS / content["include"]).is_file()
        assert content["dataset_kwargs"]["data_files"]["test"] == f"examples/lm_eval/{task.stem}.jsonl"
