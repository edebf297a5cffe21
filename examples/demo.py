"""Convert the embedded checkpoint, load the result, its ONNX graph too, and show it beside the stock model.

    python examples/demo.py [--items 100] [--scale 4]

tiny-bloom was trained at 256 tokens to look up values in a list; the same prompts go to both models.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from generate_onnx import Batch, Model, generate
from lines_task import VOCABULARY, Prompt, evaluation_prompt
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

EXAMPLES = Path(__file__).parent
TRAIN_LENGTH = 256
LENGTHS = (1, 4, 8)


# A progress bar on a terminal, nothing elsewhere.
bar = partial(tqdm, leave=False, disable=None)


@torch.no_grad()
def answer(model: Any, prompt: Prompt) -> str:
    """The word that a model puts after the prompt."""
    logits = model(torch.from_numpy(prompt.input_ids)[None], logits_to_keep=1, use_cache=False).logits
    return VOCABULARY[int(logits[0, -1].argmax())]


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
    parser.add_argument("--scale", type=float, default=4.0, help="scale factor (default 4)")
    parser.add_argument("--items", type=int, default=100, help="prompts for each length (default 100)")
    parser.add_argument("--out", type=Path, default=EXAMPLES.parent / "demo-out", help="folder to write")
    options = parser.parse_args()
    started = time.monotonic()
    logging.disable_progress_bar()

    source = EXAMPLES / "tiny-bloom"
    words = ["--scale", f"{options.scale:g}", "--train-length", str(TRAIN_LENGTH), "--onnx", "--overwrite"]
    print(f"$ ntk-convert examples/{source.name}", *words, "--out", options.out.name, flush=True)
    words += ["--out", str(options.out)]
    subprocess.run([sys.executable, "-m", "converter", str(source), *words], check=True)

    tokenizer = AutoTokenizer.from_pretrained(options.out, trust_remote_code=True)
    models = {
        "stock": AutoModelForCausalLM.from_pretrained(source).eval(),
        "scaled": AutoModelForCausalLM.from_pretrained(options.out, trust_remote_code=True).eval(),
    }
    print(f"\nRight answers to {options.items} prompts of each length (guessing would give 3 %):\n")
    print(f"    {'length':<22} {'stock':>7} {'scaled':>7}   only scaled / only stock right")
    for multiple in LENGTHS:
        rng = np.random.default_rng(multiple)
        prompts = [evaluation_prompt(rng, tokens=multiple * TRAIN_LENGTH) for _ in range(options.items)]
        right = {
            name: np.array([answer(model, prompt) == prompt.answer for prompt in bar(prompts)])
            for name, model in models.items()
        }
        gained, lost = right["scaled"] & ~right["stock"], right["stock"] & ~right["scaled"]
        label = f"{multiple * TRAIN_LENGTH} tokens ({multiple}x)"
        shares = " ".join(f"{each.mean():>6.0%} " for each in right.values())
        print(f"    {label:<22} {shares}   {gained.sum()} / {lost.sum()}", flush=True)

    prompt = prompts[int(gained.argmax())]
    print(f"\n{'A prompt that only the scaled model answers' if gained.any() else 'A prompt'}, as text:\n")
    said = {name: continuation(model, tokenizer, prompt.text) for name, model in models.items()}
    show(prompt, said | {"onnx": onnx_continuation(options.out, tokenizer, prompt.text)})
    seconds = time.monotonic() - started
    name = options.out.name
    print(f"\n{name}/ is a repository that transformers and onnxruntime load. {seconds:.0f} s in all.")


if __name__ == "__main__":
    main()
