"""Checks that other programs load an encoder or its standalone graphs, and give the torch model's vectors.

    python benchmarks/embeddings_loads.py FOLDER sentence-transformers    # writes FOLDER/vectors.json first
    PATH/TO/OPTIMUM/python benchmarks/embeddings_loads.py FOLDER optimum
    PATH/TO/FASTEMBED/python benchmarks/embeddings_loads.py FOLDER fastembed
    PATH/TO/INFINITY/python benchmarks/embeddings_loads.py FOLDER infinity    # the torch model, not a graph
    node benchmarks/transformers_js_loads.mjs FOLDER

Each program may have an environment of its own; nothing else of this project is needed there. The folder is
a converted encoder with files of sentence-transformers, which pool by the mean, and with graphs of
``--onnx-standalone --pooled``. Their vectors are compared with those of sentence-transformers on the torch
model. So the first line comes first, in an environment with ``sentence-transformers[onnx]``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

LEAST = {"model": 0.99999, "model_fp16": 0.9999, "model_quantized": 0.99, "model_int8": 0.99, "model_q4": 0.9}
"""Name of a graph -> smallest cosine between its vector of a text and the torch model's."""
TORCH = "model.safetensors"
"""What a program loads that runs no graph."""
VECTORS = "vectors.json"
SEED, LENGTHS = 0, (3, 60, 1, 17)
"""Of the texts, in words of the vocabulary."""
PACKAGES = {
    "sentence-transformers": ("sentence-transformers", "optimum-onnx", "onnxruntime"),
    "optimum": ("optimum-onnx", "transformers", "onnxruntime"),
    "fastembed": ("fastembed", "onnxruntime"),
    "infinity": ("infinity-emb", "sentence-transformers", "transformers"),
}


def texts(folder: Path) -> list[str]:
    """Texts of random words that the tokenizer knows."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    words = [word for word in vocabulary if word.isalnum()]
    generator = np.random.default_rng(SEED)
    return [" ".join(generator.choice(words, length)) for length in LENGTHS]


def write_vectors(folder: Path) -> None:
    """Writes what the torch model gives: texts and their vectors."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    known = texts(folder)
    content = {"texts": known, "vectors": model.encode(known).tolist()}
    (folder / VECTORS).write_text(json.dumps(content), encoding="utf-8")


def with_sentence_transformers(folder: Path, graph: str, known: Sequence[str]) -> Any:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(
        str(folder), backend="onnx", trust_remote_code=True, model_kwargs={"file_name": f"{graph}.onnx"}
    )
    return model.encode(known)


def with_optimum(folder: Path, graph: str, known: Sequence[str]) -> Any:
    """The hidden states of optimum's model, pooled here by the mean of the real tokens."""
    from optimum.onnxruntime import ORTModelForFeatureExtraction
    from transformers import AutoTokenizer

    model = ORTModelForFeatureExtraction.from_pretrained(
        folder, trust_remote_code=True, subfolder="onnx", file_name=f"{graph}.onnx"
    )
    batch = AutoTokenizer.from_pretrained(folder)(list(known), padding=True, return_tensors="pt")
    states = model(**batch).last_hidden_state.float()
    weights = batch["attention_mask"][..., None]
    return ((states * weights).sum(1) / weights.sum(1)).numpy()


def with_fastembed(folder: Path, graph: str, known: Sequence[str]) -> Any:
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    file = f"onnx/{graph}.onnx"
    TextEmbedding.add_custom_model(
        model=graph,
        pooling=PoolingType.MEAN,
        normalization=True,
        sources=ModelSource(hf="not/used"),
        dim=len(json.loads((folder / VECTORS).read_text(encoding="utf-8"))["vectors"][0]),
        model_file=file,
    )
    model = TextEmbedding(graph, specific_model_path=str(folder))
    return np.stack(list(model.embed(list(known))))


def with_infinity(folder: Path, file: str, known: Sequence[str]) -> Any:
    del file
    from infinity_emb import AsyncEmbeddingEngine, EngineArgs

    arguments = EngineArgs(
        model_name_or_path=str(folder), engine="torch", device="cpu", bettertransformer=False
    )

    async def embed() -> Any:
        engine = AsyncEmbeddingEngine.from_args(arguments)
        async with engine:
            found, _ = await engine.embed(sentences=list(known))
            return np.stack(found)

    return asyncio.run(embed())


PROGRAMS: dict[str, Callable[[Path, str, Sequence[str]], Any]] = {
    "sentence-transformers": with_sentence_transformers,
    "optimum": with_optimum,
    "fastembed": with_fastembed,
    "infinity": with_infinity,
}


def cosine(a: Any, b: Any) -> float:
    """The smallest cosine between rows of two matrices."""
    a, b = (np.asarray(rows, dtype=np.float64) for rows in (a, b))
    return float(((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min())


def main() -> int:
    parser = argparse.ArgumentParser(description="Check that a program gives the torch model's vectors.")
    parser.add_argument("folder", type=Path, help="converted encoder, with standalone graphs")
    parser.add_argument("program", choices=PROGRAMS)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory(prefix="ntk-benchmark-") as modules:
        # transformers caches a repository's code by name; a new cache is never stale.
        os.environ["HF_MODULES_CACHE"] = modules
        print(", ".join(f"{package} {version(package)}" for package in PACKAGES[arguments.program]))
        if arguments.program == "sentence-transformers":
            write_vectors(folder)
        right = json.loads((folder / VECTORS).read_text(encoding="utf-8"))
        failed = False
        loaded = {graph: f"onnx/{graph}.onnx" for graph in LEAST}
        for graph, file in ({"model": TORCH} if arguments.program == "infinity" else loaded).items():
            if not (folder / file).is_file():
                continue
            least = LEAST[graph]
            found = PROGRAMS[arguments.program](folder, graph, right["texts"])
            found /= np.linalg.norm(found, axis=1, keepdims=True)
            theirs = np.asarray(right["vectors"])
            gap = float(np.abs(found - theirs / np.linalg.norm(theirs, axis=1, keepdims=True)).max())
            near = cosine(found, right["vectors"])
            failed |= not near >= least
            print(f"{file}: cosine at least {near:.6f} (limit {least}), unit vectors within {gap:.1e}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
