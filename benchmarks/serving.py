"""Tokens a second of examples/serve_onnx.py with 1, 4 and 16 clients, beside vLLM's server.

    python benchmarks/serving.py
    python benchmarks/serving.py --vllm-python .venv-vllm/bin/python

A server with one row answers one request after another: that is what batching is compared with. All servers
have the same random weights, and one thread of the CPU for the model. They are up at the same time, take
turns, and are asked through OpenAI's client.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import measuring
import report
from measuring import Setup
from report import number, ratio, say

FOLDER = "static"
CONVERSIONS = {FOLDER: {"method": "ntk", "scale": 4}}
SERVE = report.ROOT / "examples" / "serve_onnx.py"
PACKAGES = ("onnxruntime", "openai", "uvicorn")
ALONE = "serve_onnx.py, 1 row"
VLLM = "vLLM"
CLOCK = os.sysconf("SC_CLK_TCK")


class Server:
    """A server in a process of its own, with all processes that it starts."""

    def __init__(self, words: Sequence[str], log: Path, **environment: str):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        command = [*words, "--host", "127.0.0.1", "--port", str(port)]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, env=os.environ | environment, stdout=output, stderr=output, start_new_session=True
            )
        self.url = f"http://127.0.0.1:{port}"
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health").close()
                return
            if self.process.poll() is not None:
                raise click.ClickException(f"the server ended:\n{log.read_text()[-2000:]}")
            time.sleep(0.5)

    def seconds(self) -> float:
        """The processor's seconds that its processes have taken; they are those of its session."""
        total = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                # The fields behind the name, which may have spaces: session is the 4th, times are 12 and 13.
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid:
                    total += int(fields[11]) + int(fields[12])
        return total / CLOCK

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def add_tokenizer(setup: Setup) -> None:
    """A word for each token id, since servers write text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(setup.vocabulary)}, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(setup.folder / FOLDER)


def export_graph(setup: Setup) -> None:
    from converter import OnnxOptions, export

    add_tokenizer(setup)
    export(setup.folder / FOLDER, OnnxOptions(validate=False, last_logits=True))


@contextlib.contextmanager
def started(setup: Setup, clients: Sequence[int], vllm_python: str | None) -> Iterator[dict[str, Server]]:
    """The servers, by what the table calls them."""
    folder = str(setup.folder / FOLDER)
    ours = [sys.executable, str(SERVE), folder, "--length", str(setup.longest), "--threads", "1"]
    rows = max(clients)
    commands: dict[str, tuple[list[str], dict[str, str]]] = {
        f"serve_onnx.py, {rows} rows": ([*ours, "--rows", str(rows)], {}),
        ALONE: ([*ours, "--rows", "1", "--queue", str(rows)], {}),
    }
    if vllm_python is not None:
        command = [vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
        command += [
            "--dtype",
            setup.dtype,
            "--max-model-len",
            str(setup.longest),
            "--no-enable-prefix-caching",
        ]
        core = str(min(os.sched_getaffinity(0)))
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        commands[VLLM] = (command, {**settings, "VLLM_CPU_OMP_THREADS_BIND": core})
    with contextlib.ExitStack() as stack:
        servers = {}
        for number_, (name, (words, environment)) in enumerate(commands.items()):
            log = setup.folder / f"server-{number_}.log"
            servers[name] = Server(words, log, **environment)
            stack.callback(servers[name].stop)
            say(f"{name}: started")
        yield servers


def ask(
    server: Server, name: str, prompts: Sequence[list[int]], new: int, clients: int
) -> tuple[float, float]:
    """Seconds until all prompts are answered, and the processor's."""
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600)

    def one(prompt: list[int]) -> None:
        answer: Any = client.completions.create(model=name, prompt=prompt, max_tokens=new, temperature=0)
        made = answer.usage.completion_tokens
        if made != new:
            raise click.ClickException(f"{server.url} gave {made} tokens in place of {new}")

    before, started_at = server.seconds(), time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, prompts))
    return time.monotonic() - started_at, server.seconds() - before


@click.command(help=__doc__)
@report.numbers(layers=6, heads=16, head_dim=64, vocabulary=32000, count=16, prompt=64, new=64, repeats=3)
@click.option("--clients", default="1,4,16", show_default=True, help="Numbers of clients.")
@click.option("--vllm-python", help="The Python of an environment with vLLM.")
@report.common(
    layers=1, heads=2, head_dim=32, vocabulary=512, count=4, prompt=8, new=4, clients="1,4", repeats=1
)
def main(
    count: int,
    prompt: int,
    new: int,
    clients: str,
    repeats: int,
    vllm_python: str | None,
    write: bool,
    **options: Any,
) -> None:
    before, numbers = report.load(), [int(word) for word in re.split(",", clients)]
    with measuring.workplace() as temporary:
        setup = Setup(temporary, longest=prompt + new, **options)
        measuring.fresh(measuring.make_repositories, setup, CONVERSIONS)
        measuring.fresh(export_graph, setup)
        name = str(setup.folder / FOLDER)
        prompts = [measuring.tokens(setup, prompt + n)[0, :prompt].tolist() for n in range(count)]
        with started(setup, numbers, vllm_python) as servers:
            times: dict[str, dict[int, list[tuple[float, float]]]] = {}
            for turn, side in measuring.turns(list(servers), 1 + repeats):
                for each in numbers:
                    taken = ask(servers[side], name, prompts, new, each)
                    if turn:  # the first one warms up
                        times.setdefault(side, {}).setdefault(each, []).append(taken)
                say(f"turn {turn}, {side}")
    rows = []
    for side in servers:
        row = [side]
        for place in (0, 1):
            for each in numbers:
                median, base = (
                    statistics.median(taken[place] for taken in times[one][each]) for one in (side, ALONE)
                )
                row += [number(count * new / median), ratio(base, median)]
        rows.append(row)
    head = ["server"]
    for what in ("tokens / s", "tokens / s of CPU"):
        for each in numbers:
            head += [f"{each}: {what}", "ratio"]
    sections = [
        f"BLOOM's layout, {setup.said()}, random weights, ntk with factor 4; {repeats} turns of each server. "
        f"{count} prompts of {prompt} tokens, {new} new tokens each, by so many clients at once. *Of CPU*: "
        f"the processor's time of the server, so that other work matters less. *Ratio*: to {ALONE}.",
        report.table(head, rows),
    ]
    where = f"serving-{setup.layers}x{setup.hidden}-cpu-float32"
    report.finish(where, "A server that batches", sections, before, PACKAGES, write=write)


if __name__ == "__main__":
    main()
