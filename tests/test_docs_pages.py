"""README, docs/ and examples/lm_eval name what exists: files, commands, options, numbers."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

import converter
from converter.cli import cli
from converter.cli.evaluation import TASKS
from converter.evaluation.results import COLUMNS, PERPLEXITY, Measurement
from converter.families.bloom import FAMILY as BLOOM
from converter.scaling.scaling import Static
from converter.scaling.slopes import stock_slopes
from tests import forks

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples/lm_eval/README.md"]
OTHERS = [
    ROOT / f"{folder}/README.md" for folder in ("benchmarks", "examples/evidence", "examples/tiny-bloom")
]
"""Pages of scripts with options of their own."""
CODE = re.compile(r"^```\w*\n(.*?)^```$|((?:^ {4}.*?\n)+)", re.DOTALL | re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
HARNESS = ROOT / "examples/lm_eval"
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
LINKS = [
    (str(page.relative_to(ROOT)), link)
    for page in [*PAGES, *OTHERS]
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
]
COMMANDS = [
    (page, line.strip())
    for page, text in TEXTS.items()
    for fenced, indented in CODE.findall(text)
    for line in (fenced or indented).replace("\\\n", " ").splitlines()
    if line.strip().startswith("ntk-convert ")
]
RESULTS = ROOT / "benchmarks/results"
NATS = 5


def anchors(page: Path) -> set[str]:
    """What GitHub calls a page's headings in links."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_are_pages_links_and_commands() -> None:
    pages = "command-line conversion evaluation families how-it-works onnx push recipes"
    assert {"README.md", *(f"docs/{name}.md" for name in pages.split())} <= set(TEXTS)
    assert len(LINKS) > 60
    assert len(COMMANDS) > 45


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
    words = shlex.split(line, comments=True)[1:]
    monkeypatch.chdir(tmp_path)
    for word in words:
        if Path(word).suffix in (".txt", ".jsonl"):  # click looks whether the files are there
            (tmp_path / word).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / word).touch()
    (tmp_path / "mine").mkdir(exist_ok=True)
    name, command, rest = cli.resolve_command(click.Context(cli), cli_words(words))
    assert command is not None, page
    command.make_context(name, rest)


def cli_words(words: list[str]) -> list[str]:
    """With the command that is meant where none is named."""
    return words if words[0] in cli.commands else ["convert", *words]


SERVE = {
    *("--continuous-batching", "--cb-num-blocks", "--cb-max-batch-tokens"),
    *("--attention-backend", "--hf-overrides", "--kv-cache-dtype", "--max-model-len", "--model-impl"),
    *("--enable-lora", "--lora-modules", "--quantization", "--trust-remote-code"),
    *("--max-batch-tokens", "--pooling"),
    *("--slots", "--length", "--queue", "--chunk", "--at"),
}
"""Options of ``transformers serve``, ``vllm serve``, text-embeddings-inference and the example servers."""


def test_every_option_exists() -> None:
    ours = {name for command in cli.commands.values() for option in command.params for name in option.opts}
    for page, text in TEXTS.items():
        named = set(re.findall(r"`(--[a-z][a-z-]*)", text)) - {"--help", "--version"} - SERVE
        assert named <= ours, page


def test_the_tables_of_spans_are_those_of_the_slopes() -> None:
    page = TEXTS["docs/how-it-works.md"]
    stock = stock_slopes(8)
    rows = {
        "span, tokens": stock,
        "stock": stock,
        "`linear`": Static("linear", 4).slopes(stock),
        "`ntk`": Static("ntk", 4).slopes(stock),
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


def test_how_near_llama_cpp_comes_to_ntk() -> None:
    """B = 10 is one exponent for all heads; what differs most from ``ntk`` is the steepest."""
    page = TEXTS["docs/serving.md"].replace("\n", " ")
    for heads in (8, 16, 32, 64):
        wanted = Static("ntk", 4).slopes(stock_slopes(heads))
        found = stock_slopes(heads, bias_max=10)
        ratios = [one / other for one, other in zip(wanted, found, strict=True)]
        assert max(ratios) == ratios[0]
        assert min(ratios) > 0.999
        assert re.search(rf"{ratios[0] - 1:.0%} at {heads}\b".replace("%", " %"), page), heads


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


# --- examples in Python


@pytest.mark.parametrize(
    ("page", "code"), [(page, c) for page, text in TEXTS.items() for c in PYTHON.findall(text)]
)
def test_every_example_parses_and_imports_what_exists(page: str, code: str) -> None:
    for node in ast.walk(ast.parse(code, page)):
        if isinstance(node, ast.ImportFrom) and node.module == "converter":
            assert {alias.name for alias in node.names} <= {*converter.__all__}


def test_the_readmes_example_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's first conversion, of the model that is here, and then its example, as they stand."""
    readme = TEXTS["README.md"]
    [trial] = re.findall(r"^ntk-convert examples/tiny-bloom (.+?) --out \./tiny-ntk\b", readme, re.MULTILINE)
    [code] = [c for c in PYTHON.findall(readme) if "from_pretrained" in c]
    monkeypatch.chdir(tmp_path)
    Path("prompt.txt").write_text(
        "LINE velvet-heron 24 LINE silver-magpie 16 ASK silver-magpie", encoding="utf-8"
    )
    source = str(ROOT / "examples/tiny-bloom")
    for words in (
        ["-m", "converter", source, *shlex.split(trial), "--out", "./bloom-ntk"],
        ["-c", code],
    ):
        done = forks.run(
            [sys.executable, *words],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
            text=True,
        )
    assert done.stdout.startswith("LINE velvet-heron 24 LINE silver-magpie 16 ASK silver-magpie 16")


# --- shell completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion(shell: str) -> None:
    """The variable that the page names asks for a script, and the script for what completes a word."""
    [variable] = set(re.findall(rf"(\w+)={shell}_source ntk-convert", TEXTS["docs/command-line.md"]))

    def answer(**environment: str) -> str:
        code = "import sys; sys.argv[0] = 'ntk-convert'; from converter.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout

    assert f"{variable}={shell}_complete" in answer(**{variable: f"{shell}_source"})
    typed = {"COMP_WORDS": "ntk-convert insp", "COMP_CWORD": "insp" if shell == "fish" else "1"}
    assert "inspect" in answer(**{variable: f"{shell}_complete"}, **typed)


# --- numbers of benchmarks/results


def said(page: str) -> str:
    """The page on one line."""
    return " ".join(TEXTS[page].split())


def cells(name: str, start: str) -> list[list[str]]:
    """The rows of a results file that begin so, without that beginning."""
    rows = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    return [row[len(start) :].strip(" |").split(" | ") for row in rows if row.startswith(start)]


def test_numbers_of_the_original_codes() -> None:
    results = (RESULTS / "originals.md").read_text(encoding="utf-8")
    largest = [float(n) for n in re.findall(r"^\| [\w-]+ \| \d+ \| (\S+) \|$", results, re.MULTILINE)]
    now = re.findall(r"^    \* transformers 5\.23\..*?: (.+)$", results, re.MULTILINE)
    unloaded = [line for line in now if line.startswith("from_pretrained: ")]
    mute = [line for line in now if "; generate: " in line]
    assert (len(now), len(unloaded), len(mute), len(largest)) == (7, 4, 3, 12)
    assert max(largest) <= 3e-6
    page = said("docs/families.md")
    assert "Seven such codes were tried on transformers 5.23: four do not load, and three cannot gen" in page
    assert "compared with twelve original codes" in page
    assert "differ by at most 3e-6 of the largest logit" in page


def test_numbers_of_torch() -> None:
    name = "torch_speed-bloom-cpu-float32.md"
    prefill, decoding = (
        dict(zip(head, row, strict=True))
        for head, row in zip(cells(name, "| tokens |"), cells(name, "| 8192 |"), strict=True)
    )
    page = said("docs/conversion.md")
    seconds = {side: float(prefill[f"{side} ms"]) / 1e3 for side in ("stock", "patched")}
    assert f"prefill takes {seconds['patched']:.0f} s instead of {seconds['stock']:.0f} s, and " in page
    memory = {side: float(prefill[f"{side} extra MB"]) / 1e3 for side in ("stock", "patched")}
    assert f" {memory['patched']:.1f} GB of extra memory instead of {memory['stock']:.0f} GB" in page
    token = {side: float(decoding[f"{side} ms"]) for side in ("stock", "patched")}
    assert f"takes {token['patched']:.0f} ms instead of {token['stock']:.0f} ms" in page


def test_numbers_of_vllm() -> None:
    name = "vllm_speed-6x1024-cpu-float32.md"
    sides = ("vLLM, static", "vLLM, by position", "transformers, static", "onnxruntime-genai, static")
    found = {side: cells(name, f"| {side} |") for side in sides}
    speeds = {side: round(100 * float(throughput[5].rstrip("x"))) for side, (throughput, _) in found.items()}
    page = said("docs/serving.md")
    assert speeds[sides[0]] >= 100
    assert "static scaling has the throughput of vLLM's own BLOOM" in page
    assert f"scaling by position {speeds[sides[1]]} % of it" in page
    assert f"transformers has {speeds[sides[2]]} %, onnxruntime-genai {speeds[sides[3]]} %." in page
    slowest = {side: min(float(each.rstrip("x")) for each in first[3:]) for side, (_, first) in found.items()}
    assert f"up to {100 - 100 * slowest[sides[0]]:.0f} % longer" in page
    assert f"(by position: up to {100 - 100 * slowest[sides[1]]:.0f} %)" in page


def test_numbers_of_copying() -> None:
    [[_, _, _, on_disk, *_], *_] = cells("conversion.md", "| `ntk-convert --no-verify` |")
    [[verified, *_], *_] = cells("conversion.md", "| `ntk-convert` |")
    [[bare, ratio, *_], *_] = cells("conversion.md", "| `ntk-convert --no-verify` |")
    page = said("docs/conversion.md")
    assert f"takes {float(ratio.rstrip('x')):.1f} times as long as `cp -r`" in page
    assert f"{float(on_disk.rstrip('x')):.1f}" == f"{float(ratio.rstrip('x')):.1f}"
    assert f"verification adds about {float(verified) - float(bare):.0f} seconds" in page


def test_numbers_of_onnx() -> None:
    page = said("docs/onnx.md")
    name = "onnx_speed-bloom-6x1024-cpu-float32.md"
    [head] = cells(name, "| graph | tokens |")
    graphs = {
        graph: dict(zip(head, cells(name, f"| {graph} | 8192 |")[0], strict=True))
        for graph in ("ours", "transformers", "optimum")
    }
    memory = {graph: float(row["extra MB"]) / 1e3 for graph, row in graphs.items()}
    decoding = {graph: f"{float(row['decode ms']):.0f} ms" for graph, row in graphs.items()}
    assert f"{memory['transformers']:.0f}" == f"{memory['optimum']:.0f}"
    assert f"needs {memory['ours']:.1f} GB of extra memory and theirs {memory['optimum']:.0f} GB" in page
    assert (
        f"decodes a token in {decoding['ours']} where theirs take {decoding['transformers']} and "
        f"{decoding['optimum']}"
    ) in page


def test_numbers_of_the_server() -> None:
    [start, *rounds] = cells("onnx_server.md", "| ")[2:]
    [peak] = {row[4] for row in rounds}
    requests = {int(row[1]) + int(row[2]) for row in rounds}
    page = said("docs/serving.md")
    assert requests == {20}
    assert f"{start[4]} MB after the start, and a peak of {peak} MB in each of {len(rounds)} rounds" in page


def test_numbers_of_quantised_graphs() -> None:
    changes: dict[tuple[str, str], list[float]] = {}
    for task, lengths in (("text", slice(0, 2)), ("lines", slice(1, 2))):
        for heads, seed in itertools.product((8, 12), (0, 1)):
            for graph in ("w8a8", "int4", "int4, `--calibrate`"):
                [row, *_] = cells("quantised_graphs.md", f"| {task}-{heads}-{seed} | {graph} |")
                found = [float(re.findall(r"\(([+-][\d.]+)", cell)[0]) for cell in row[lengths]]
                changes.setdefault((task, graph), []).extend(found)
    page = said("docs/onnx.md")
    rounded, calibrated = (changes["text", graph] for graph in ("int4", "int4, `--calibrate`"))
    assert f"perplexity by {min(rounded):.1f} to {max(rounded):.1f} %, and" in page
    assert f"calibrated int4 by {min(calibrated):.1f} to {max(calibrated):.1f} %." in page
    rounded, calibrated = (changes["lines", graph] for graph in ("int4", "int4, `--calibrate`"))
    assert f"int4 loses {-max(rounded):.1f} to {-min(rounded):.1f} points" in page
    assert f"and calibrated int4 at most {-min(calibrated):.1f} (" in page
    text, lines = (
        changes["text", "w8a8"],
        [
            float(re.findall(r"\(([+-][\d.]+)", cell)[0])
            for heads, seed in itertools.product((8, 12), (0, 1))
            for cell in cells("quantised_graphs.md", f"| lines-{heads}-{seed} | w8a8 |")[0]
        ],
    )
    assert f"w8a8 raises perplexity by {min(text)} to {max(text)} %" in page
    assert f"changes right answers by {min(lines):+} to {max(lines):+} points" in page


def test_numbers_of_quantised_speed() -> None:
    name = "quantised_speed-bloom-6x2048-cpu.md"
    page = said("docs/onnx.md")
    found = []
    for length in (512, 2048):
        [ours] = cells(name, f"| ours | int4 | {length} |")
        [peer] = cells(name, f"| transformers | int4 | {length} |")
        found.append((float(ours[1].rstrip("x")), float(peer[2].rstrip("x"))))
    (short, short_peer), (long, long_peer) = found
    assert f"int4 decodes {short:.1f} times as fast as our float32 graph, and {short_peer:.1f} times" in page
    assert f"it is {long:.1f} and {long_peer:.1f} times" in page
    reading = {
        graph: [float(cells(name, f"| {graph} | {length} |")[0][-3].rstrip("x")) for length in (512, 2048)]
        for graph in ("ours | w8a8", "transformers | int8", "ours | int8", "ours | int4")
    }
    ours, peers, *others = reading.values()
    assert all(0.8 < each < 1.2 for found in others for each in found)
    assert f"of 512 and 2048 tokens {ours[0]:.1f} and {ours[1]:.1f} times as fast, and" in page
    assert f"one scale, {peers[0]:.1f} and {peers[1]:.1f} times (" in page


def test_numbers_of_the_profile() -> None:
    rows = cells("onnx_profile-bloom-6x1024-cpu-float32.md", "| ")
    lengths = ("512", "2048", "4096", "8192")
    prompt = {(row[0], row[1]): row for row in rows if len(row) == 8 and row[0] in lengths}
    token = {(row[0], row[1]): row for row in rows if len(row) == 6 and row[0] in lengths}
    page = said("docs/onnx.md")

    def spread(found: dict[tuple[str, str], list[str]], nodes: str, column: int) -> str:
        values = [found[length, nodes][column].rstrip(" %x") for length in lengths]
        numbers = [float(value) for value in values]
        return f"{min(numbers):.3g} to {max(numbers):.3g}"

    assert f"in float32 reach {spread(prompt, 'all', 5)} %, and a token after them" in page
    assert f"after them {spread(token, 'all', 5)} %" in page
    assert f"products with weights reach {spread(prompt, 'products with weights', 5)} %" in page
    times = [float(prompt[length, "attention"][7].rstrip("x")) for length in lengths]
    assert f"attention takes {min(times):.1f} to {max(times):.1f} times as long as torch's fused" in page
    assert f"All other nodes are {spread(prompt, 'the rest', 3)} % of a prompt" in page


def test_numbers_of_encoders() -> None:
    rows = cells("encoder_speed-cpu.md", "| original code |")
    speed, memory = ([float(row[column].rstrip("x")) for row in rows] for column in (2, 4))
    page = said("docs/families.md")
    assert len(rows) == 4
    assert f"unequal texts {speed[0]:.1f} times as fast up to 128 tokens, {speed[2]:.1f} times up" in page
    assert f"up to 2048 and {speed[3]:.1f} times up to 8192" in page
    assert f"where it needs {memory[-1]:.0f} times less memory" in page
    integers, floats = (cells("encoder_speed-cpu.md", f"| ONNX, {name} |") for name in ("w8a8", "float32"))
    gains = [float(b[1]) / float(a[1]) for a, b in zip(integers, floats, strict=True)]
    assert f"{gains[0]:.1f} times as fast as in float32 up to 128 tokens" in said("docs/onnx.md")
    assert f"and {gains[1]:.1f} times up to 512" in said("docs/onnx.md")


def test_numbers_of_tiles() -> None:
    page = said("docs/serving.md")
    for length, text in ((2048, "at {} % of the keys in 2048 tokens"), (8192, "and at {} % in 8192")):
        rows = [row for row in cells("tiles-cpu.md", "| ") if row[0].endswith(f", {length}")]
        shares = [int(share.rstrip("%")) for row in rows for share in row[1].split()]
        assert len(rows) > 4
        assert text.format(f"{min(shares)} to {max(shares)}") in page
