"""`transformers serve` for a converted repository, over HTTP, through OpenAI's client."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig

from tests.patched import Convert, load
from tests.served import PACKAGES, complete, served
from tests.test_continuous_batching import OLD

NEW_TOKENS = 6
LENGTHS = (5, 64, 300)
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(OLD, reason="continuous batching in transformers 4.57 needs a GPU"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]


def texts() -> list[str]:
    return [" ".join(f"w{10 + (index * 7 + n) % 60}" for index in range(n)) for n in LENGTHS]


def test_answers_are_those_of_generate(converted: Convert, tmp_path: Path) -> None:
    folder = converted("bloom", 12, "ntk-position")
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    expected = []
    for text in texts():
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        output = model.generate(ids, generation_config=config)
        expected.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
    with served(folder, tmp_path / "log") as client, ThreadPoolExecutor() as pool:
        found = pool.map(lambda text: complete(client, folder, text, NEW_TOKENS), texts())
        assert [text.split() for text in found] == [text.split() for text in expected]


def test_length_dynamic_scaling_is_refused(converted: Convert, tmp_path: Path) -> None:
    import openai

    folder = converted("bloom", 4, "ntk-length")
    with served(folder, tmp_path / "log") as client, pytest.raises(openai.InternalServerError):
        complete(client, folder, texts()[0], NEW_TOKENS)
    assert "--dynamic position" in (tmp_path / "log").read_text()
