"""Measures the memory of examples/serve_onnx.py under more load than it has slots for.

    python benchmarks/onnx_server.py --write

The model is a BLOOM of random weights. More clients than there are slots send prompts of random lengths, try
again after a 503, and go away in the middle of every fifth answer.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import transformers
from report import ROOT, clean_up_when_terminated, load, table, write

from converter import OnnxOptions, convert
from tests.memory import MB, SAMPLING, anonymous

SLOTS, QUEUE, LENGTH, CHUNK, CLIENTS = 2, 2, 2048, 512, 8
VOCABULARY, LAYERS, HEADS, HEAD_DIM = 8192, 6, 16, 64
HEAD = ["round", "answered", "gone away", "503", "peak, MB"]
INTRO = f"""\
A BLOOM of {LAYERS} layers and {HEADS} heads of {HEAD_DIM}, float32, on the CPU, with `--last-logits`:
`serve_onnx.py --slots {SLOTS} --queue {QUEUE} --length {LENGTH} --chunk {CHUNK}`, {CLIENTS} clients at once.
Prompts have 50 to {LENGTH - 50} tokens, answers 4 to 12. *Gone away*: clients that closed the connection
after the first token. *503*: how often a client was refused, and tried again 50 ms later. *Peak*: of memory
that is not mapped from a file, sampled every {1000 * SAMPLING:.0f} ms; round 0 is the server
before the first request."""


def make(folder: Path) -> Path:
    sizes = {"hidden_size": HEADS * HEAD_DIM, "n_head": HEADS, "n_layer": LAYERS, "vocab_size": VOCABULARY}
    transformers.BloomForCausalLM(transformers.BloomConfig(**sizes)).save_pretrained(folder / "source")
    options = OnnxOptions(last_logits=True, validate=False)
    convert(folder / "source", folder / "out", scale=4, verify=False, onnx=options)
    return folder / "out"


@contextmanager
def served(folder: Path) -> Iterator[tuple[int, int]]:
    """A server; its process id and its port."""
    sizes = ("--slots", SLOTS, "--queue", QUEUE, "--length", LENGTH, "--chunk", CHUNK)
    words = [sys.executable, ROOT / "examples" / "serve_onnx.py", folder, "--port", "0", *sizes]
    quiet = subprocess.DEVNULL
    with subprocess.Popen([str(w) for w in words], stdout=subprocess.PIPE, stderr=quiet, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.pid, int(server.stdout.readline().rpartition(":")[2])
        finally:
            server.terminate()


def ask(port: int, number: int) -> Counter[str]:
    """One client, until it is answered or goes away."""
    draw, counts = random.Random(number), Counter[str]()
    prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(50, LENGTH - 50))]
    body = {"input_ids": prompt, "max_new_tokens": draw.randint(4, 12), "stream": True}
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/generate", json.dumps(body))
        response = connection.getresponse()
        if response.status == 200 and number % 5 == 0:
            response.readline()
            counts["gone away"] += 1
        elif response.status == 200:
            assert "finish" in json.loads(response.read().splitlines()[-1])
            counts["answered"] += 1
        else:
            assert response.status == 503, response.read()
            counts["503"] += 1
        response.close()
        connection.close()
        if response.status == 200:
            return counts
        time.sleep(0.05)


def measure(folder: Path, rounds: int, requests: int) -> Iterator[list[str]]:
    with served(folder) as (pid, port), ThreadPoolExecutor(CLIENTS) as pool:
        peak, ended = [anonymous(pid)], threading.Event()

        def watch() -> None:
            while not ended.wait(SAMPLING):
                peak[0] = max(peak[0], anonymous(pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for number in range(rounds + 1):
                numbers = range((number - 1) * requests, number * requests) if number else range(0)
                counts = sum(pool.map(lambda each: ask(port, each), numbers), Counter[str]())
                row = [str(number), *(str(counts[name]) for name in HEAD[1:4]), f"{peak[0] / MB:.0f}"]
                print(row, flush=True)
                yield row
                peak[0] = 0
        finally:
            ended.set()
            watcher.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=20, help="in each round")
    parser.add_argument("--write", action="store_true", help="write the table into results/")
    options = parser.parse_args()
    clean_up_when_terminated()
    before = load()
    with tempfile.TemporaryDirectory() as folder:
        result = table(HEAD, measure(make(Path(folder)), options.rounds, options.requests))
    print(f"\n{result}")
    if options.write:
        title = "Memory of the example server under load"
        print(write("onnx_server", title, [INTRO, result], before, ["onnxruntime"]))


if __name__ == "__main__":
    main()
