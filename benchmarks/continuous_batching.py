"""Compares the tokens of transformers' continuous batching with those of ``generate``.

    python benchmarks/continuous_batching.py --write

Each decoder family is a tiny checkpoint with random weights, converted with a static and with a
position-dynamic scaling; tiny-bloom is trained. Requests over HTTP need ``transformers[serving]``.
"""

from __future__ import annotations

import argparse
import importlib.util
import operator
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

from report import ROOT, clean_up_when_terminated, load, table, write

from converter import convert
from tests import tiny
from tests.served import PACKAGES, complete, served

LENGTHS = (5, 17, 64, 129, 300, 700)
NEW_TOKENS = 16
SCALINGS: dict[str, dict[str, Any]] = {
    "static, factor 4": {"method": "ntk", "scale": 4.0},
    "by position": {"method": "ntk", "dynamic": "position"},
}
TRAINED = "tiny-bloom (trained)"
FUNCTIONS = {"sdpa": "sdpa", "eager": "paged\\|eager"}
"""Attention of ``generate`` -> the name of that of continuous batching in the table."""
HEAD = ["model", "scaling", "head size", "attention", "tokens equal", "log-probability", "over HTTP"]
INTRO = f"""\
Prompts of {", ".join(map(str, LENGTHS))} words at once, at most {NEW_TOKENS} new tokens each,
greedy, float32, on the CPU. *Head size*: of the cache. *Tokens equal*: those of `generate_batch` that are the
tokens of `generate`. *Log-probability*: the largest difference of a new token's. *Over HTTP*: the prompts
that `transformers serve --continuous-batching` answers with the same text; OpenAI's client asks them all at
once. A pass takes at most 256 tokens, so longer prompts take several."""


def texts(tokenizer: Any) -> list[str]:
    """Prompts of random words that are one token each; special tokens come first in every vocabulary here."""
    import torch

    random = torch.Generator().manual_seed(0)
    ids = [torch.randint(10, len(tokenizer), (length,), generator=random) for length in LENGTHS]
    return [tokenizer.decode(row) for row in ids]


def generated(model: Any, config: Any, rows: Sequence[list[int]]) -> tuple[list[list[int]], list[float]]:
    """New tokens of each row by itself, and the log-probabilities of all of them."""
    import torch

    tokens, found = [], []
    for row in rows:
        output = model.generate(
            torch.tensor([row]),
            generation_config=config,
            return_dict_in_generate=True,
            output_logits=True,
        )
        new = output.sequences[0, len(row) :]
        tokens.append(new.tolist())
        found += torch.cat(output.logits).log_softmax(-1).gather(1, new[:, None])[:, 0].tolist()
    return tokens, found


def batched(model: Any, config: Any, rows: Sequence[list[int]]) -> tuple[list[list[int]], list[float]]:
    """The same from ``generate_batch``."""
    from transformers import ContinuousBatchingConfig

    sizes = ContinuousBatchingConfig(
        num_blocks=16, max_batch_tokens=256, return_logprobs=True, auto_switch_to_flash=False
    )
    outputs = model.generate_batch(rows, generation_config=config, continuous_batching_config=sizes)
    found = [each for answer in outputs.values() for each in answer.logprobs]
    return [answer.generated_tokens for answer in outputs.values()], found


def over_http(repository: Path, prompts: Sequence[str]) -> list[str] | None:
    """The answers of a server; None if its packages are not installed."""
    if any(importlib.util.find_spec(name) is None for name in PACKAGES):
        return None
    with served(repository, repository.parent / "log") as client, ThreadPoolExecutor() as pool:
        return list(pool.map(lambda text: complete(client, repository, text, NEW_TOKENS), prompts))


def equal(expected: Sequence[Any], found: Sequence[Any]) -> str:
    """How many are the same, and of how many."""
    return f"{sum(map(operator.eq, expected, found))} of {len(expected)}"


def compare(name: str, folder: Path) -> Iterator[list[str]]:
    """The lines of one model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    trained = name == TRAINED
    source = ROOT / "examples" / "tiny-bloom" if trained else tiny.FACTORIES[name](folder / "source", 12)
    for number, (scaling, options) in enumerate(SCALINGS.items()):
        options = options | {"train_length": 256 if trained else 24}
        repository = folder / str(number) / "out"
        repository.parent.mkdir()
        convert(source, repository, verify=False, **options)
        tokenizer = AutoTokenizer.from_pretrained(repository, trust_remote_code=True)
        prompts = texts(tokenizer)
        rows = [tokenizer(text)["input_ids"] for text in prompts]
        config = GenerationConfig(
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=0
        )
        for attention, paged in FUNCTIONS.items():
            model = AutoModelForCausalLM.from_pretrained(
                repository, trust_remote_code=True, attn_implementation=attention
            ).eval()
            tokens, expected = generated(model, config, rows)
            answers, found = batched(model, config, rows)
            same = equal(list(chain(*tokens)), list(chain(*answers)))
            difference = max(map(abs, map(operator.sub, expected, found)))
            http = over_http(repository, prompts) if attention == "sdpa" else None
            said = [tokenizer.decode(row, skip_special_tokens=True).split() for row in tokens]
            yield [
                *(name, scaling, str(model.config.head_dim), paged),
                *(same, f"{difference:.1e}"),
                equal(said, [answer.split() for answer in http]) if http else "-",
            ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default=",".join([TRAINED, *tiny.FACTORIES]))
    parser.add_argument("--write", action="store_true", help="write the table into results/")
    options = parser.parse_args()
    clean_up_when_terminated()
    before, lines = load(), []
    for name in options.families.split(","):
        with tempfile.TemporaryDirectory(prefix="ntk-benchmark-") as folder:
            for line in compare(name, Path(folder)):
                print(*line, sep="  ", flush=True)
                lines.append(line)
    text = [INTRO, table(HEAD, lines, texts=4)]
    if options.write:
        write("continuous_batching", "Continuous batching against generate", text, before, PACKAGES)
    else:
        print("\n\n".join(text))


if __name__ == "__main__":
    main()
