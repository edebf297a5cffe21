"""The pages hold what users rely on: links, commands, options, examples and tables are right and complete."""

from __future__ import annotations

import dataclasses
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import click
import lines_task
import pytest
import yaml

from converter.cli import cli
from converter.evaluation.results import Measurement
from tests import forks
from tests.conftest import RunCli
from tests.versions import environments as versions

ROOT = Path(__file__).parent.parent
OWN = ["README.md", "README.zh.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
"""Pages about this project's own commands."""
PAGES = [*OWN, "CHANGELOG.md", "benchmarks/README.md", "tests/README.md"] + [
    str(page.relative_to(ROOT)) for page in sorted((ROOT / "examples").glob("*/*.md"))
]
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
README = TEXTS["README.md"]
CODE = re.compile(r"^```\w*\n(.*?)^```$|((?:^ {4}.*?\n)+)", re.DOTALL | re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
GENERATED = re.compile(r"<!-- (?!end of ).*?<!-- end of .*?-->", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMANDS = [
    (page, line.strip())
    for page in [*OWN, "examples/lm_eval/README.md"]
    for fenced, indented in CODE.findall(TEXTS[page])
    for line in (fenced or indented).replace("\\\n", " ").splitlines()
    if line.strip().startswith("ntk-convert ")
]
OPTIONS = {name for command in cli.commands.values() for option in command.params for name in option.opts}
HARNESS = ROOT / "examples/lm_eval"


def anchors(page: Path) -> set[str]:
    """What GitHub calls a page's headings in links."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# --- links and files


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    """And no marks of a merge were left."""
    assert not re.search(r"^(<{7}|={7}|>{7})", TEXTS[page], re.MULTILINE)
    wrong = []
    for link in LINK.findall(TEXTS[page]):
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if not link.startswith("https://") and not (
            target.exists() and (not anchor or anchor in anchors(target))
        ):
            wrong.append(link)
    assert not wrong


def test_the_readme_is_short_and_links_every_page() -> None:
    assert len(README.splitlines()) <= 150
    assert {page for page in OWN if page.startswith("docs/")} <= set(LINK.findall(README))


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page, text in TEXTS.items():
        for target in re.findall(r"`make ([\w.-]+)[`\s]", text):
            assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), (page, target)


def test_every_file_of_the_contributors_page_exists() -> None:
    page = TEXTS["docs/contributing.md"]
    layout = page.split("```\n")[1]
    folder = ""
    for line in layout.splitlines():
        name = line.split()[0]
        folder = folder if line.startswith(" ") else name
        assert (ROOT / (folder + name if line.startswith(" ") else name)).exists(), name
    files = re.findall(r"`((?:converter|templates|tests|docs)/[\w/.]+)`", page)
    assert len(files) > 15
    for file in files:
        known = [file.replace("NAME", name) for name in ("mpt", "numbers", "penalties", "baichuan")]
        assert any((ROOT / each).exists() for each in known), file


def test_every_module_of_tests_is_in_their_table() -> None:
    """Once it leads somewhere, see above, it is one that is there."""
    listed = re.findall(r"^\| \[(test_\w+)\]\(", TEXTS["tests/README.md"], re.MULTILINE)
    assert listed == sorted(path.stem for path in (ROOT / "tests").glob("test_*.py"))


# --- commands and options


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_every_command_parses(page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line, comments=True)[1:]
    monkeypatch.chdir(tmp_path)
    for word in words:
        if Path(word).suffix in (".txt", ".jsonl"):  # click looks whether the files are there
            (tmp_path / word).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / word).touch()
    (tmp_path / "mine").mkdir(exist_ok=True)
    words = words if words[0] in cli.commands else ["convert", *words]
    _, command, rest = cli.resolve_command(click.Context(cli), words)
    assert command is not None, page
    command.make_context(words[0], rest)


def test_every_command_and_option_is_documented() -> None:
    text = "".join(TEXTS[page] for page in OWN)
    for name in cli.commands:
        assert f"ntk-convert {name}" in text
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    assert {option for option in OPTIONS if option.startswith("--")} <= named


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion(shell: str, run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that the page names asks for a script, and the script for what completes a word."""
    [variable] = set(re.findall(rf"(\w+)={shell}_source ntk-convert", TEXTS["docs/command-line.md"]))
    monkeypatch.setenv(variable, f"{shell}_source")
    assert f"{variable}={shell}_complete" in run().out


# --- examples in Python


def test_every_example_passes_mypy(tmp_path: Path) -> None:
    """In strict mode, all of a page together; what other packages give has no types here."""
    config = tmp_path / "mypy.ini"
    settings = ("[mypy]", "strict = True", "follow_imports = skip", "ignore_missing_imports = True")
    config.write_text("\n".join([*settings, "[mypy-converter.*]", "follow_imports = silent"]))
    files = []
    for page, text in TEXTS.items():
        files.append(tmp_path / f"{re.sub(r'[^a-z]', '_', page.lower())}.py")
        files[-1].write_text("".join(PYTHON.findall(text)), encoding="utf-8")
    words = ["--config-file", config, "--cache-dir", tmp_path / "cache", *files]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stdout + done.stderr


def test_the_readmes_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's conversion of the model that is here, and then its examples for it, with fewer prompts."""
    [trial] = re.findall(r"^ntk-convert (examples/tiny-bloom .+)$", README, re.MULTILINE)
    [load] = [code for code in PYTHON.findall(README) if "./tiny-ntk" in code]
    [calls] = [code for code in PYTHON.findall(README) if "examples/tiny-bloom" in code]
    monkeypatch.chdir(tmp_path)
    Path("examples").mkdir()
    Path("examples/tiny-bloom").symlink_to(ROOT / "examples/tiny-bloom")
    prompts = (ROOT / "examples/tiny-bloom.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    Path("examples/tiny-bloom.jsonl").write_text("".join(prompts[:2] + prompts[-2:]), encoding="utf-8")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    _, loaded, called = (
        forks.run([sys.executable, *words], env=env, check=True, capture_output=True, text=True).stdout
        for words in (["-m", "converter", *shlex.split(trial)], ["-c", load], ["-c", calls])
    )
    [prompt] = re.findall(r'tokenizer\("(.+?)"', load)
    assert loaded.startswith(f"{prompt} 16")
    assert "2 items per length" in called


# --- tables and numbers


def test_the_tables_are_what_their_script_writes() -> None:
    tables = runpy.run_path(str(ROOT / "docs/tables.py"))
    for page in tables["PAGES"]:
        text = page.read_text(encoding="utf-8")
        assert tables["MARKED"].search(text), page
        assert tables["updated"](text) == text, "write them again: python docs/tables.py"


def test_the_table_of_versions_ends_with_the_pinned_one() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"transformers=={versions.SUPPORTED[-1]}\n" in pins
    [table] = re.findall(
        r"<!-- versions: .*?<!-- end of versions -->", TEXTS["docs/transformers.md"], re.DOTALL
    )
    assert f"{versions.SUPPORTED[-1]} |" in table, "write it again: make test-versions"


def test_the_chinese_readme_has_the_same_code_tables_and_links() -> None:
    chinese = TEXTS["README.zh.md"]
    assert CODE.findall(chinese) == CODE.findall(README)
    assert GENERATED.findall(chinese) == GENERATED.findall(README)
    english = README.replace("(README.zh.md)", "(README.md)")
    assert sorted(LINK.findall(chinese)) == sorted(LINK.findall(english))
    kinds = [re.findall(r"^(#+|\*|\||!|> \*\*)", text, re.MULTILINE) for text in (chinese, README)]
    assert kinds[0] == kinds[1], "the same headings, lists, tables and warnings"


def test_the_table_of_measurements_has_every_field() -> None:
    table = TEXTS["docs/evaluation.md"].split("| field | |")[1].split("\n\n")[0]
    cells = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == {field.name for field in dataclasses.fields(Measurement)} | {"verdict"}


def test_the_tasks_of_the_harness() -> None:
    shared = yaml.safe_load((HARNESS / "_lines.yaml").read_text(encoding="utf-8"))
    page = TEXTS["examples/lm_eval/README.md"]
    [lengths] = re.findall(r"for n in ([\d ]+);", page)
    assert f"--tasks {shared['tag']} " in page
    for length in lengths.split():
        content = yaml.safe_load((HARNESS / f"lines_{length}.yaml").read_text(encoding="utf-8"))
        assert content["task"] == f"lines_{length}"
        assert (HARNESS / content["include"]).is_file()
        assert content["dataset_kwargs"]["data_files"]["test"] == f"examples/lm_eval/lines_{length}.jsonl"


def test_the_prompts_beside_the_example_are_what_their_script_writes() -> None:
    stored = (ROOT / "examples/tiny-bloom.jsonl").read_text(encoding="utf-8")
    assert stored == lines_task.prompts_as_json([256, 2048], 40, seed=0)
