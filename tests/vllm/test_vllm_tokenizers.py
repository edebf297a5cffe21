"""Prompts of text: vLLM runs no code from the repository, for tokenizers either."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import sentencepiece
from transformers import AutoTokenizer
from vllm import SamplingParams

from converter import convert
from tests import tiny
from tests.vllm.engines import converted_tiny, engine

TEXT = "a few words of text"
OPTIONS = {
    "baichuan": {"unk_id": 0, "bos_id": 1, "eos_id": 2},
    "replit": {"bos_id": -1, "eos_id": 1, "pad_id": 2, "eos_piece": "<|endoftext|>", "pad_piece": "<|pad|>"},
}
CLASSES = {
    "baichuan": ("BaichuanTokenizer", "tokenization_baichuan", "tokenizer.model"),
    "replit": ("ReplitLMTokenizer", "replit_lm_tokenizer", "spiece.model"),
}


def prompt_ids(folder: Path) -> list[int]:
    with engine(folder) as llm:
        [output] = llm.generate([TEXT], SamplingParams(max_tokens=1), use_tqdm=False)
    return output.prompt_token_ids


def test_a_tokenizer_of_transformers(tmp_path: Path) -> None:
    folder = converted_tiny(tmp_path, "mpt", "ntk")
    assert prompt_ids(folder) == AutoTokenizer.from_pretrained(folder, trust_remote_code=True)(TEXT).input_ids


@pytest.mark.parametrize("name", CLASSES)
def test_a_tokenizer_on_sentencepiece(name: str, tmp_path: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(Path(__file__).read_text(encoding="utf-8").splitlines()),
        model_writer=model,
        vocab_size=90,
        hard_vocab_limit=False,
        minloglevel=2,
        **OPTIONS[name],
    )
    original, module, file = CLASSES[name]
    source = tiny.FACTORIES[name](tmp_path / "source", 4, use_cache=True)
    (source / "tokenizer.json").unlink()
    (source / file).write_bytes(model.getvalue())
    settings = {"auto_map": {"AutoTokenizer": [f"{module}.{original}", None]}, "tokenizer_class": original}
    (source / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    convert(source, tmp_path / "out", verify=False, scale=4.0)
    expected = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).encode(TEXT)
    start = [1] if name == "baichuan" else []  # Baichuan's class adds <s> unless its config says otherwise
    assert prompt_ids(tmp_path / "out") == start + expected
