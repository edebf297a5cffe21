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
from scipy import stats

from converter.cli import cli
from converter.evaluation.results import Measurement
from converter.scaling.scaling import Scaling
from converter.scaling.slopes import NATS, stock_slopes
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
THEIRS = {
    *("--continuous-batching", "--attention-backend", "--hf-overrides", "--kv-cache-dtype", "--pooling"),
    *("--max-model-len", "--model-impl", "--enable-lora", "--lora-modules", "--quantization"),
    *("--convert", "--pooler-config", "--runner", "--enable-chunked-prefill", "--enable-prefix-caching"),
    *("--max-batch-tokens", "--length", "--queue", "--chunk", "--trust-remote-code", "--hypothesis-profile"),
    *("--torch-backend", "--find-links"),
}
"""Options of other programs, and of the examples."""
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
        assert (ROOT / (folder + name if line.startswith(" ") else name)).is_dir(), name
    files = re.findall(r"`((?:converter|templates|tests|docs)/[\w/.]+)`", page)
    assert len(files) > 15
    for file in files:
        known = [file.replace("NAME", name) for name in ("mpt", "numbers", "slopes", "baichuan")]
        assert any((ROOT / each).exists() for each in known), file


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


@pytest.mark.parametrize("page", OWN)
def test_every_option_exists(page: str) -> None:
    named = set(re.findall(r"`(--[a-z][a-z-]*)", TEXTS[page])) - {"--help"}
    assert named <= OPTIONS | THEIRS


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


def test_the_tables_of_spans_are_those_of_the_slopes() -> None:
    page, stock = TEXTS["docs/how-it-works.md"], stock_slopes(8)
    rows = {"span, tokens": stock}
    rows |= {f"`{method}`": Scaling(method, 4).slopes(stock) for method in ("linear", "ntk")}
    for name, slopes in rows.items():
        [row] = re.findall(rf"^\| {re.escape(name)} \| (.+) \|$", page, re.MULTILINE)
        assert row.split(" | ") == [f"{NATS / slope:.0f}" for slope in slopes], name


def test_how_near_llama_cpp_comes_to_ntk() -> None:
    """B = 10 is one exponent for all heads; what differs most from ``ntk`` is the steepest."""
    page = " ".join(TEXTS["docs/engines.md"].split())
    for heads in (32, 64):
        wanted, near = Scaling("ntk", 4).slopes(stock_slopes(heads)), stock_slopes(heads, bias_max=10)
        first, *others = [one / other for one, other in zip(wanted, near, strict=True)]
        assert 0.999 < min(others) <= max(others) < first
        assert f"{100 * (first - 1):.0f} % at {heads}" in page


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


def test_how_long_it_takes_and_how_many_prompts_are_enough() -> None:
    """The rows that the page calls computed, by its own formula and by the sign test."""
    page = TEXTS["docs/recipes.md"]

    def row(name: str) -> list[float]:
        [cells] = re.findall(rf"^\| {name}.*? \|(.+)\|$", page, re.MULTILINE)
        return [float(re.findall(r"\d+", cell)[0]) for cell in cells.split("|")]

    tokens, texts = 8192, {"one prompt": 1 / 60, "`tune`": 825 / 3600, "`fit`": 1000 / 3600}
    for name, units in texts.items():
        for stated, (layers, hidden) in zip(row(name), [(24, 2048), (30, 4096)], strict=True):
            logits = 250_880 * hidden if name == "`fit`" else 0
            work = 2 * (12 * layers * hidden**2 + logits) * tokens + 2 * layers * hidden * tokens**2
            assert stated == round(work / 1.5e11 * units), name
    # tune: 13 scalings on 50 prompts of the target, and two on 50 prompts of each of three lengths
    assert round((13 * 50 * 8192 + 2 * 50 * (2048 + 4096 + 8192)) / tokens) == 825
    for gain in (10, 20, 30):
        for stated, differ in zip(row(str(gain)), (gain / 100, 2 * gain / 100), strict=True):
            count = round(stated * differ)
            fewest = stats.binom.isf(0.025, count, 0.5)
            assert stats.binom.sf(fewest, count, (1 + gain / 100 / differ) / 2) >= 0.8
