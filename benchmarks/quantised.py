"""Measures how far quantised weights and quantised caches of transformers change the logits.

    python benchmarks/quantised.py --write

The models are tiny, random and converted with position-dynamic scaling. So the numbers show which ways of
quantising work and how they compare. They say nothing about the quality of a trained model. A package that is
not installed is named in the table.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import clean_up_when_terminated, load, table, write

from converter import convert
from tests import tiny

FAMILIES = ("bloom", "mpt")
HEADS, ROWS, TOKENS = 16, 2, 60
PACKAGES = ("torchao", "bitsandbytes", "hqq", "optimum-quanto")
INTRO = f"""\
Tiny random models with {HEADS} heads, position-dynamic, on the CPU; {ROWS} rows of {TOKENS} tokens. Each
number is the norm of the change of the logits, relative to the norm of the logits in float32. *Weights*
compares the whole prompt, *caches* the second new token of `generate`, which reads the cache."""


def torchao(name: str, **options: Any) -> dict[str, Any]:
    """Keywords of ``from_pretrained`` for a config class of torchao."""
    import torch
    from torchao import quantization
    from transformers import TorchAoConfig

    options = {key: getattr(torch, value) for key, value in options.items()}
    settings = TorchAoConfig(quant_type=getattr(quantization, name)(**options))
    return {"quantization_config": settings, "device_map": "cpu"}


def bitsandbytes(**options: Any) -> dict[str, Any]:
    import bitsandbytes  # noqa: F401 -- transformers' own error does not name the package
    from transformers import BitsAndBytesConfig

    return {"quantization_config": BitsAndBytesConfig(**options), "device_map": "cpu"}


WEIGHTS: dict[str, Callable[[], dict[str, Any]]] = {
    "bfloat16, not quantised": lambda: {"dtype": "bfloat16"},
    "torchao, `Int8WeightOnlyConfig`": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao, `Int8DynamicActivationInt8WeightConfig`": lambda: torchao(
        "Int8DynamicActivationInt8WeightConfig"
    ),
    "torchao, `IntxWeightOnlyConfig(weight_dtype=torch.int4)`": lambda: torchao(
        "IntxWeightOnlyConfig", weight_dtype="int4"
    ),
    "bitsandbytes, `load_in_8bit`": lambda: bitsandbytes(load_in_8bit=True),
    "bitsandbytes, `load_in_4bit` with nf4": lambda: bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4"
    ),
}
CACHES: dict[str, dict[str, Any]] = {
    f"`{settings}`".replace("'", '"'): settings
    for settings in (
        {"backend": "hqq", "nbits": 8, "q_group_size": 16, "axis_key": 1, "axis_value": 1},
        {"backend": "hqq", "nbits": 4, "q_group_size": 16, "axis_key": 1, "axis_value": 1},
        {"backend": "quanto", "nbits": 4, "q_group_size": 16},
        {"backend": "fp8"},
    )
}


def measured(measure: Callable[[], Any], expected: Any) -> str:
    """The change, or in one line why there is none."""
    try:
        logits = measure()
    except Exception as error:  # packages say in many ways that they cannot run here
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:90]}"
    return f"{((logits.float() - expected).norm() / expected.norm()).item():.2g}"


def compare(family: str, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """What changes with each way to quantise the weights and the cache of one family."""
    import torch
    from transformers import AutoModelForCausalLM

    source = tiny.FACTORIES[family](folder / "source", HEADS, use_cache=True)
    convert(source, folder / "out", method="ntk", dynamic="position", train_length=24, verify=False)
    ids = torch.from_numpy(tiny.token_ids(ROWS, TOKENS))

    def model(**options: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder / "out", trust_remote_code=True, **options).eval()

    def second_token(plain: Any, **options: Any) -> Any:
        return plain.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=2,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        ).logits[1]

    with torch.no_grad():
        plain = model()
        expected, cached = plain(ids).logits, second_token(plain)
        weights = {
            name: measured(lambda options=options: model(**options())(ids).logits, expected)
            for name, options in WEIGHTS.items()
        }
        caches = {
            name: measured(
                lambda settings=settings: second_token(
                    plain, cache_implementation="quantized", cache_config=settings
                ),
                cached,
            )
            for name, settings in CACHES.items()
        }
    return weights, caches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables into results/")
    options = parser.parse_args()
    clean_up_when_terminated()
    before, found = load(), []
    for family in FAMILIES:
        with tempfile.TemporaryDirectory(prefix="ntk-benchmark-") as folder:
            found.append(compare(family, Path(folder)))
    text = [INTRO]
    for title, number in (("weights", 0), ("caches", 1)):
        rows = [[name, *(each[number][name] for each in found)] for name in found[0][number]]
        text.append(table([title, *FAMILIES], rows))
    if options.write:
        write("quantised", "Quantised weights and caches", text, before, PACKAGES)
    else:
        print("\n\n".join(text))


if __name__ == "__main__":
    main()
