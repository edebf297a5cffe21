"""Checks that optimum runs a repository's portable graph, and computes the same as transformers.

    PATH/TO/OPTIMUM/python benchmarks/optimum_loads.py FOLDER

Run this in an environment with optimum-onnx; nothing else of this project is needed there. The folder is a
converted repository with ``model.onnx``. Both greedily continue two prompts of different lengths, padded on
the left; optimum does so with and without IOBinding. For an encoder without a head, hidden states are
compared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

TOLERANCE = 1e-3
"""Largest difference of a prompt's logits, relative to the largest logit."""


def prompts(vocabulary: int, pad: int, length: int) -> dict[str, Any]:
    """Token ids and mask, each [2, length]; the first third of the first row is padding."""
    import torch

    ids = torch.randint(vocabulary, (2, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[0, : length // 3], mask[0, : length // 3] = pad, 0
    return {"input_ids": ids, "attention_mask": mask}


def compare(folder: Path, length: int, new: int) -> bool:
    """Prints whether both continuations agree; returns whether they differ."""
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).eval()
    inputs = prompts(model.config.vocab_size, model.config.pad_token_id or 0, length)
    # Generate all tokens: an end token would hide differences after it.
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    expected = model.generate(**inputs, **options)[:, length:]
    with torch.inference_mode():
        logits = model(**inputs).logits[:, -1]
    failed = False
    for use_io_binding in (False, True):
        graph = ORTModelForCausalLM.from_pretrained(
            folder, trust_remote_code=True, use_cache=True, use_io_binding=use_io_binding
        )
        # For unknown model types, optimum assumes that every query head has its own keys.
        [key] = [value for value in graph.session.get_inputs() if value.name == "past_key_values.0.key"]
        graph.num_key_value_heads = key.shape[1]
        found = graph.generate(**inputs, **options)[:, length:]
        gap = float((graph(**inputs).logits[:, -1] - logits).abs().max() / logits.abs().max())
        same = torch.equal(expected, found)
        failed |= not (same and gap <= TOLERANCE)
        print(
            f"IOBinding {use_io_binding}: {'the same' if same else 'OTHER'} {new} tokens for 2 prompts "
            f"({len(expected.unique())} distinct), prompt's logits differ by {gap:.1e} of the largest"
        )
        if not same:
            print(f"transformers {expected.tolist()}\noptimum      {found.tolist()}")
    return failed


def compare_encoder(folder: Path, length: int) -> bool:
    """Prints how much the hidden states differ; returns whether that is too much."""
    import torch
    from optimum.onnxruntime import ORTModelForFeatureExtraction
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).eval()
    inputs = prompts(model.config.vocab_size, model.config.pad_token_id or 0, length)
    with torch.inference_mode():
        expected = model(**inputs).last_hidden_state
    graph = ORTModelForFeatureExtraction.from_pretrained(folder, trust_remote_code=True)
    real = inputs["attention_mask"].bool()
    error = (graph(**inputs).last_hidden_state - expected)[real].abs().max()
    gap = float(error / expected[real].abs().max())
    print(f"hidden states of 2 texts differ by {gap:.1e} of the largest")
    return not gap <= TOLERANCE


def main() -> int:
    parser = argparse.ArgumentParser(description="Check that optimum runs a repository's portable graph.")
    parser.add_argument("folder", type=Path, help="converted repository with model.onnx")
    parser.add_argument("--length", type=int, default=30, help="tokens of the prompts (default: 30)")
    parser.add_argument("--new", type=int, default=24, help="tokens to generate (default: 24)")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory(prefix="ntk-benchmark-") as modules:
        # transformers caches a repository's code by name; a new cache is never stale.
        os.environ["HF_MODULES_CACHE"] = modules
        packages = ("optimum-onnx", "transformers", "onnxruntime", "torch")
        print(", ".join(f"{package} {version(package)}" for package in packages))
        folder = arguments.folder.resolve()
        named = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
        if named.endswith("Model"):
            return int(compare_encoder(folder, arguments.length))
        return int(compare(folder, arguments.length, arguments.new))


if __name__ == "__main__":
    sys.exit(main())
