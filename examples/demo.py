"""Convert the included checkpoint, measure several scalings, and load it in transformers and onnxruntime.

    python examples/demo.py [--items 40]

tiny-bloom was trained on sequences of 256 tokens to look up values in a list. Every scaling gets the same
prompts, those of `examples/tiny-bloom.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from generate_onnx import Batch, Model, generate
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

EXAMPLES = Path(__file__).parent
ROOT = EXAMPLES.parent
MODEL = EXAMPLES / "tiny-bloom"
TRAIN_LENGTH = 256
PROMPTS = EXAMPLES / "tiny-bloom.jsonl"
STARTED = time.monotonic()
PATIENCE = 5
"""Seconds between two lines that say that a command still runs."""


def step(text: str) -> None:
    """Announces what comes next, and the seconds since the start."""
    print(f"\n[{time.monotonic() - STARTED:.0f} s] {text}", flush=True)


def command(*words: object) -> None:
    """Prints an ntk-convert command and runs it in the project's folder.

    If stderr is not a terminal, the command draws no progress bars; then lines say that it still runs. Its
    result is printed when it has ended, so no such line follows it.
    """
    print("\n$ ntk-convert", *words, "\n", flush=True)
    started = time.monotonic()
    line = [sys.executable, "-m", "converter", *map(str, words)]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        while True:
            try:
                result, _ = process.communicate(timeout=PATIENCE)
                break
            except subprocess.TimeoutExpired:
                if not sys.stderr.isatty():
                    print(f"... running for {time.monotonic() - started:.0f} s", flush=True)
    print(result, end="", flush=True)
    if process.returncode:
        sys.exit(process.returncode)


def continuation(model: Any, tokenizer: Any, text: str) -> str:
    """The continuation of a text by ``generate``, up to the end token."""
    inputs = tokenizer(text, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    return str(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def onnx_continuation(folder: Path, tokenizer: Any, text: str) -> str:
    """The continuation of a text by onnxruntime, from the graph beside the weights."""
    ids = tokenizer(text)["input_ids"]
    batch = Batch(Model(folder), rows=1, length=len(ids) + 4)
    tokens = [token for [token] in generate(batch, [ids], max_new_tokens=4) if token is not None]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def show(prompt: dict[str, Any], said: dict[str, str]) -> None:
    """Prints one shortened prompt, and the answer of each model."""
    lines = prompt["prompt"].splitlines()
    asked = next(line for line in lines if lines[-1].split()[1] in line)
    print(f"    {lines[0]}\n    {lines[1]}\n    ... {len(lines) - 4} more lines, {asked!r} among them ...")
    print(f"    {lines[-2]}\n    {lines[-1]}\n")
    for name, word in said.items():
        verdict = "right" if word == prompt["answer"] else f"wrong, it is {prompt['answer']}"
        print(f"    {name:<8} {word}  ({verdict})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=int, default=40, help="most prompts of each length [%(default)s]")
    parser.add_argument("--out", default="demo-out", help="folder to write, inside the project [%(default)s]")
    options = parser.parse_args()
    logging.disable_progress_bar()

    step("Converting the model and exporting its graph (1 of 4)")
    model, out = MODEL.relative_to(ROOT), ROOT / options.out
    train_length = ("--train-length", TRAIN_LENGTH)
    command(model, *train_length, "--onnx", "--overwrite", "--quiet", "--out", options.out)

    step("Loading the result in transformers and onnxruntime (2 of 4)")
    tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    models = {
        "stock": AutoModelForCausalLM.from_pretrained(MODEL).eval(),
        "scaled": AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval(),
    }
    prompts = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    longest = max(prompt["length"] for prompt in prompts)
    for prompt in prompts:
        if prompt["length"] < longest:
            continue
        said = {name: continuation(model, tokenizer, prompt["prompt"]) for name, model in models.items()}
        if said["scaled"] == prompt["answer"] != said["stock"]:
            break
    print(f"\nThe answers to a prompt of {longest} tokens:\n")
    show(prompt, said | {"onnx": onnx_continuation(out, tokenizer, prompt["prompt"])})

    step("Comparing the stock model (method none) with scalings of it (3 of 4)")
    print(f"\nThe model was trained on at most {TRAIN_LENGTH} tokens. Guessing would score 3 %.")
    scalings = ("--methods", "none,by-parts,ntk,linear", "--dynamic", "position")
    asked = ("--prompts", PROMPTS.relative_to(ROOT), "--items", options.items)
    command("eval", model, *scalings, *asked, *train_length)

    step("Checking the result once more (4 of 4)")
    command("validate", options.out)


if __name__ == "__main__":
    main()
