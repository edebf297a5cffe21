"""examples/generate_genai.py, and the pitfalls of onnxruntime-genai that docs/onnx-serving.md names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import converter
from converter import OnnxOptions
from tests import tiny
from tests.conftest import edit_json
from tests.patched import Convert
from tests.test_onnx_example import LENGTHS, NEW, expected, prompts

pytest.importorskip("onnxruntime_genai")

import onnxruntime_genai as og
from generate_genai import batch, generator, stream, text_of, tokenizer

SCRIPT = Path(__file__).parent.parent / "examples" / "generate_genai.py"
SPECIAL = {"padding": tiny.PAD, "ends": [tiny.END]}


def export(folder: Path) -> Path:
    converter.export(folder, OnnxOptions(validate=False))
    return folder


def byte_level(folder: Path) -> Tokenizer:
    """Gives a repository a tokenizer that genai reads, with tokens for parts of characters."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(vocab_size=40, special_tokens=special, show_progress=False, min_frequency=2)
    made.train_from_iterator(["the cat sat on the mat, the hat", "é 雪"], trainer)
    made.save(str(folder / "tokenizer.json"))
    edit_json(folder / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    return made


@pytest.mark.parametrize("chunk", [512, 16])
def test_a_stream(converted: Convert, chunk: int) -> None:
    folder = export(converted("mpt", 4, "ntk-position"))
    model = og.Model(str(folder))
    for prompt in prompts():
        assert list(stream(model, prompt, NEW, chunk)) == expected(folder, prompt)


@pytest.mark.parametrize("family", ["bloom", "jais"])
def test_a_batch_of_unequal_prompts(converted: Convert, family: str) -> None:
    folder = export(converted(family, 4, "ntk-position"))
    made = batch(og.Model(str(folder)), prompts(), NEW, **SPECIAL)
    assert made == [expected(folder, prompt) for prompt in prompts()]


def test_a_row_that_has_ended_gets_padding(converted: Convert) -> None:
    """The example cuts it off."""
    folder = export(converted("mpt", 4, "ntk"))
    rows = [prompts()[0], prompts()[2]]
    whole = batch(og.Model(str(folder)), rows, NEW, **SPECIAL)
    end = next(token for token in whole[1] if token not in whole[0])
    path = folder / "genai_config.json"
    content = json.loads(path.read_text())
    content["model"]["eos_token_id"] = [end]
    path.write_text(json.dumps(content))
    model = og.Model(str(folder))
    cut = batch(model, rows, NEW, padding=tiny.PAD, ends=[end])
    assert cut == [whole[0], whole[1][: whole[1].index(end) + 1]]
    assert batch(model, rows, NEW, padding=tiny.PAD, ends=[])[1][len(cut[1])] == tiny.PAD


def test_text_as_it_grows(converted: Convert) -> None:
    """From genai's stream and from tokenizers: no half characters, and the same text in the end."""
    folder = export(converted("mpt", 4, "ntk"))
    reference = byte_level(folder)
    text = "the cat é 雪"
    ids = reference.encode(text).ids
    assert len(ids) > len(text.split()) + 2, "characters of several tokens"
    encode, texts = tokenizer(og.Model(str(folder)), folder)
    assert list(encode(text)) == ids
    for pieces in (list(texts(iter(ids))), list(text_of(iter(ids), reference.decode))):
        assert "".join(pieces) == text
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_the_command_line(converted: Convert) -> None:
    folder = export(converted("mpt", 4, "ntk"))
    (folder / "tokenizer.json").unlink()

    def run(*words: str) -> tuple[int, str, str]:
        done = subprocess.run([sys.executable, SCRIPT, folder, *words], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    new = ("--max-new-tokens", str(NEW))
    texts = [" ".join(map(str, expected(folder, ids))) for ids in ([5, 6, 7], [20, 21])]
    assert run("5 6 7", "20 21", *new)[:2] == (0, "".join(f"{text}\n" for text in texts))
    code, out, err = run("5 6 7", "--max-new-tokens", "100000")
    assert (code, out) == (1, "")
    assert err.startswith("error: max_length (100003) cannot be greater than model context_length")


# --- pitfalls; if genai mends one, the page need not warn of it any more


def test_a_batch_is_appended_once_and_in_one_chunk(converted: Convert) -> None:
    model = og.Model(str(export(converted("bloom", 4, "ntk"))))
    ids = tiny.token_ids(2, 20).astype(np.int32)
    running = generator(model, 2, 64)
    running.append_tokens(ids)
    with pytest.raises(RuntimeError, match="can only be called once for batch_size > 1"):
        running.append_tokens(ids)
    params = og.GeneratorParams(model)
    params.set_search_options(batch_size=2, max_length=64, chunk_size=8)
    with pytest.raises(RuntimeError, match="batch_size must be 1"):
        og.Generator(model, params).append_tokens(ids)


def test_what_genai_does_not_check(converted: Convert) -> None:
    """A prompt for too few rows is divided among them, and negative ids count from the vocabulary's end."""
    model = og.Model(str(export(converted("mpt", 4, "ntk"))))
    (ids,) = tiny.token_ids(1, 20).astype(np.int32)

    def first(tokens: np.ndarray, rows: int = 1) -> Any:
        running = generator(model, rows, 64)
        running.append_tokens(tokens)
        return running.get_logits()

    divided = first(ids, rows=2)
    assert np.array_equal(divided, first(ids.reshape(2, 10), rows=2))
    negative = np.where(np.arange(20) == 19, ids - tiny.VOCAB_SIZE, ids).astype(np.int32)
    assert negative[19] < 0
    assert np.array_equal(first(negative), first(ids))
    with pytest.raises(RuntimeError, match="out of data bounds"):
        first(np.array([5, tiny.VOCAB_SIZE], np.int32))
    with pytest.raises(RuntimeError, match="exceeds max length"):
        first(np.tile(ids, 4))


def by_engine(model: Any, rows: list[list[int]]) -> list[list[int]]:
    """What genai's Engine makes of requests that run together."""
    engine = og.Engine(model)
    events = engine.create_event_buffer(64)
    requests, made = [], {}
    for index, row in enumerate(rows):
        request = engine.create_request()
        options = og.TurnOptions(request)
        options.set_max_generated_tokens(NEW)
        options.set_do_sample(False)
        request.begin_turn(np.array(row, np.int32), options)
        requests.append(request)
        made[index] = list[int]()
    while engine.has_pending_requests():
        for event in engine.run(events):
            made[requests.index(event.request)].append(event.token)
    return list(made.values())


def test_the_engine_is_wrong_for_unequal_prompts(converted: Convert) -> None:
    """Without an error. Prompts of the same length, and one at a time, are right."""
    if not hasattr(og, "Engine"):
        pytest.skip("this genai has no Engine")
    folder = export(converted("mpt", 4, "ntk"))
    model = og.Model(str(folder))

    def wanted(rows: list[list[int]]) -> list[list[int]]:
        return [list(stream(model, row, NEW)) for row in rows]

    same = [row[: min(LENGTHS)] for row in prompts()]
    assert by_engine(model, same) == wanted(same)
    assert by_engine(model, prompts()[:1]) == wanted(prompts()[:1])
    assert by_engine(model, prompts()) != wanted(prompts())
