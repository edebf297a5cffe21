"""Convert the embedded checkpoint, measure scalings of it, and load it in transformers and onnxruntime.

    python examples/demo.py [--items 100]

tiny-bloom was trained at 256 tokens to look up values in a list; the same prompts go to every scaling.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from generate_onnx import Batch, Model, generate
from lines_task import Prompt, evaluation_prompt, prompts_as_json
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

EXAMPLES = Path(__file__).parent
ROOT = EXAMPLES.parent
MODEL = EXAMPLES / "tiny-bloom"
TRAIN_LENGTH = 256
LENGTHS = (256, 1024, 2048)


def command(*words: object) -> None:
    """Runs ntk-convert in the project's folder, and shows what is run."""
    print("\n$ ntk-convert", *words, "\n", flush=True)
    subprocess.run([sys.executable, "-m", "converter", *map(str, words)], check=True, cwd=ROOT)


def continuation(model: Any, tokenizer: Any, text: str) -> str:
    """What ``generate`` makes of a text, up to the end token."""
    inputs = tokenizer(text, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def onnx_continuation(folder: Path, tokenizer: Any, text: str) -> str:
    """What onnxruntime makes of it, from the graph beside the weights."""
    ids = tokenizer(text)["input_ids"]
    batch = Batch(Model(folder), rows=1, length=len(ids) + 4)
    tokens = [token for [token] in generate(batch, [ids], max_new_tokens=4) if token is not None]
    return tokenizer.decode(tokens, skip_special_tokens=True)


def show(prompt: Prompt, said: dict[str, str]) -> None:
    """Prints one prompt, shortened, and what each model says."""
    lines = prompt.text.splitlines()
    asked = lines[prompt.asked_line]
    print(f"    {lines[0]}\n    {lines[1]}\n    ... {len(lines) - 4} more lines, {asked!r} among them ...")
    print(f"    {lines[-2]}\n    {lines[-1]}\n")
    for name, word in said.items():
        verdict = "right" if word == prompt.answer else f"wrong, it is {prompt.answer}"
        print(f"    {name:<8} {word}  ({verdict})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=int, default=100, help="prompts of each length [%(default)s]")
    parser.add_argument("--out", default="demo-out", help="folder to write, in the project's [%(default)s]")
    options = parser.parse_args()
    started = time.monotonic()
    logging.disable_progress_bar()

    model, out = MODEL.relative_to(ROOT), ROOT / options.out
    train_length = ("--train-length", TRAIN_LENGTH)
    command(model, "--scale", 4, *train_length, "--onnx", "--overwrite", "--out", options.out)

    # Beside the repository, which holds what was verified and nothing else.
    prompts = out.with_name(f"{out.name}.jsonl")
    prompts.write_text(prompts_as_json(LENGTHS, options.items, seed=1), encoding="utf-8")
    scalings = ("--methods", "none,ntk,linear", "--scales", 4, "--dynamic", "position")
    asked = ("--tasks", "prompts", "--prompts", prompts.name, "--items", options.items)
    command("eval", model, *scalings, *asked, *train_length)
    print("\nGuessing would give 3 %. Nothing was trained after 256 tokens.")

    tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    models = {
        "stock": AutoModelForCausalLM.from_pretrained(MODEL).eval(),
        "scaled": AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval(),
    }
    rng = np.random.default_rng(0)
    for _ in range(options.items):
        prompt = evaluation_prompt(rng, tokens=LENGTHS[-1])
        said = {name: continuation(model, tokenizer, prompt.text) for name, model in models.items()}
        if said["scaled"] == prompt.answer != said["stock"]:
            break
    print(f"\nA prompt of {LENGTHS[-1]} tokens, as text, in transformers and onnxruntime:\n")
    show(prompt, said | {"onnx": onnx_continuation(out, tokenizer, prompt.text)})
    print(f"\n{options.out}/ is a repository that transformers and onnxruntime load.")
    print(f"{time.monotonic() - started:.0f} s in all.")


if __name__ == "__main__":
    main()
