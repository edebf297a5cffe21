"""onnxruntime-genai runs an exported graph as transformers runs the converted repository."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import converter
from converter import OnnxOptions, recipes
from converter.exports.onnx.genai import genai_config
from converter.result.converted import ConvertedRepository, open_converted
from tests import tiny
from tests.dealt import dealt
from tests.patched import FAMILIES, TRAIN_LENGTH, Convert, load

og = pytest.importorskip("onnxruntime_genai")

NEW = 24
INSIDE, BEYOND = TRAIN_LENGTH // 2, 60
SCALINGS = ("ntk", "ntk-length", "ntk-position")
Generated = tuple[np.ndarray, np.ndarray]


def export(folder: Path, dtype: str = "fp32", *, last_logits: bool = False) -> Any:
    """Exports a converted repository, and loads it with genai as it is."""
    converter.export(folder, OnnxOptions(dtype=dtype, last_logits=last_logits, validate=False))
    if dtype != "fp32":
        # As the README says: the file names the graph for CPUs, and a GPU takes the other one.
        path = folder / "genai_config.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        assert content["model"]["decoder"]["filename"] == "model_fp32.onnx"
        content["model"]["decoder"]["filename"] = "model.onnx"
        path.write_text(json.dumps(content), encoding="utf-8")
    return og.Model(str(folder))


def start(model: Any, length: int, rows: int = 1, **options: Any) -> Any:
    """A generator of rows of exactly ``length`` tokens."""
    params = og.GeneratorParams(model)
    # A minimum, so that no row stops at the end token.
    params.set_search_options(batch_size=rows, max_length=length, min_length=length, **options)
    return og.Generator(model, params)


def finish(generator: Any, rows: int = 1) -> Generated:
    """The tokens [rows, NEW] that follow, and the logits [rows, NEW, vocabulary] behind them."""
    tokens, logits = [], []
    for _ in range(NEW):
        assert not generator.is_done()
        logits.append(np.array(generator.get_logits()).reshape(rows, -1))
        generator.generate_next_token()
        tokens.append(np.array(generator.get_next_tokens()))
    assert generator.is_done()
    return np.stack(tokens, axis=1), np.stack(logits, axis=1)


def expected(model: Any, *prompts: np.ndarray) -> Generated:
    """What transformers generates for each prompt alone, as ``finish`` gives it."""
    tokens, logits = [], []
    for prompt in prompts:
        made = model.generate(
            torch.from_numpy(prompt)[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens.append(made.sequences[0, len(prompt) :].numpy())
        logits.append(torch.cat(made.logits).float().numpy())
    return np.stack(tokens), np.stack(logits)


def assert_same(actual: Generated, reference: Generated, tolerance: float = 1e-3) -> None:
    """The same tokens, from the same logits: these tiny models often repeat a token whatever they read."""
    # The end token's logit is lowered to keep the rows going.
    error = np.where(np.arange(tiny.VOCAB_SIZE) == tiny.END, 0, actual[1] - reference[1])
    assert np.abs(error).max() <= tolerance
    assert np.array_equal(actual[0], reference[0])


@pytest.mark.parametrize(
    ("family", "scaling", "share"), dealt(FAMILIES, [*SCALINGS, "fitted-position"], [True, False], each=1)
)
def test_greedy_tokens(converted: Convert, family: str, scaling: str, share: bool) -> None:
    folder = converted(family, 12, scaling)
    model, reference = export(folder), load(folder)
    for length in (INSIDE, BEYOND):
        (prompt,) = tiny.token_ids(1, length)
        generator = start(model, length + NEW, past_present_share_buffer=share)
        generator.append_tokens(prompt.astype(np.int32))
        assert_same(finish(generator), expected(reference, prompt))


def test_a_graph_of_another_factor_is_noticed(converted: Convert) -> None:
    folder = converted("bloom", 12, "ntk")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    reference = load(folder)
    config["alibi_scaling"]["factor"] = 3.5
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (prompt,) = tiny.token_ids(1, BEYOND)
    generator = start(export(folder), BEYOND + NEW)
    generator.append_tokens(prompt.astype(np.int32))
    with pytest.raises(AssertionError):
        assert_same(finish(generator), expected(reference, prompt))


@pytest.mark.parametrize(
    ("family", "scaling", "last_logits"), dealt(FAMILIES, SCALINGS, [False, True], each=1)
)
def test_a_batch_is_padded_on_the_right(
    converted: Convert, family: str, scaling: str, last_logits: bool
) -> None:
    folder = converted(family, 4, scaling)
    ids = tiny.token_ids(3, BEYOND)
    lengths = [BEYOND, 43, INSIDE]
    padded = np.where(tiny.padding_mask(lengths, "right", BEYOND), ids, tiny.PAD)
    generator = start(export(folder, last_logits=last_logits), BEYOND + NEW, rows=3)
    generator.append_tokens(padded.astype(np.int32))
    prompts = [row[:length] for row, length in zip(ids, lengths, strict=True)]
    assert_same(finish(generator, rows=3), expected(load(folder), *prompts))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_parts(converted: Convert, family: str) -> None:
    folder = converted(family, 4, "ntk-position")
    model = export(folder)
    (prompt,) = tiny.token_ids(1, BEYOND).astype(np.int32)
    reference = expected(load(folder), prompt.astype(np.int64))

    chunked = start(model, BEYOND + NEW, chunk_size=16)
    chunked.append_tokens(prompt)
    assert_same(finish(chunked), reference)

    appended = start(model, BEYOND + NEW)
    for part in (prompt[:20], prompt[20:33], prompt[33:]):
        appended.append_tokens(part)
    assert_same(finish(appended), reference)

    rewound = start(model, BEYOND + NEW)
    rewound.append_tokens(np.concatenate([prompt[:20], prompt[:30]]))
    rewound.rewind_to(20)
    rewound.append_tokens(prompt[20:])
    assert_same(finish(rewound), reference)


def test_a_second_turn(converted: Convert) -> None:
    folder = converted("mpt", 4, "ntk-position")
    first, second = tiny.token_ids(2, 20).astype(np.int32)
    generator = start(export(folder), 45 + NEW)
    generator.append_tokens(first)
    for _ in range(5):
        generator.generate_next_token()
    # The last token has not been run yet; genai runs it when it is asked for logits, not when appending.
    generator.get_logits()
    generator.append_tokens(second)
    whole = np.array(generator.get_sequence(0)).astype(np.int64)
    assert len(whole) == 45
    assert_same(finish(generator), expected(load(folder), whole))


def test_half_precision(converted: Convert) -> None:
    folder = converted("bloom", 4, "ntk-position", dtype=torch.float16)
    (prompt,) = tiny.token_ids(1, BEYOND)
    generator = start(export(folder, "fp16"), BEYOND + NEW)
    generator.append_tokens(prompt.astype(np.int32))
    assert_same(finish(generator), expected(load(folder).float(), prompt), tolerance=0.1)


def test_which_graph_is_served(converted: Convert) -> None:
    """The last one that CPUs can run."""
    folder = converted("bloom", 4, "ntk", dtype=torch.bfloat16)

    def served(**options: Any) -> str:
        converter.export(folder, OnnxOptions(validate=False, **options))
        config = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
        return str(config["model"]["decoder"]["filename"])

    assert served(standalone=True) == "onnx/model_bf16.onnx"  # there is no other
    assert served() == "model_fp32.onnx"
    assert served(standalone=True) == "model_fp32.onnx"
    assert served(dtype="w8a8") == "onnx/model_int8.onnx"
    # A trunk generates nothing, whatever else the repository has.
    assert served(standalone=True, task="feature-extraction") == "onnx/model_int8.onnx"
    assert "genai" not in (folder / "README.md").read_text(encoding="utf-8")


def content(repository: ConvertedRepository, **changes: Any) -> dict[str, Any]:
    config = {**repository.config, **changes}
    changed = dataclasses.replace(repository, config=config, recipe=recipes.of_checkpoint(config))
    return genai_config(changed, file_name="model.onnx")


def test_special_tokens(converted: Convert) -> None:
    folder = converted("bloom")
    repository = open_converted(folder)
    model = content(repository)["model"]
    assert [model[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [tiny.START, [tiny.END], tiny.PAD]

    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 97, 6], "pad_token_id": null}')
    model = content(repository)["model"]
    assert model["eos_token_id"] == [5, 6], "one outside the vocabulary would be refused"
    assert model["pad_token_id"] == tiny.PAD

    (folder / "generation_config.json").unlink()
    model = content(repository, pad_token_id=None, bos_token_id=None)["model"]
    assert model["pad_token_id"] == tiny.END
    assert "bos_token_id" not in model
    model = content(repository, eos_token_id=None)["model"]
    assert model["eos_token_id"] == [tiny.PAD]
    model = content(repository, eos_token_id=None, pad_token_id=None)["model"]
    assert (model["eos_token_id"], model["pad_token_id"]) == ([0], 0)


def test_context_length(converted: Convert) -> None:
    repository = open_converted(converted("bloom"))
    known = repository.config["ntk_convert"]
    dynamic = {"type": "ntk", "train_seq_len": 100, "dynamic": "length", "rate": 1.0}

    def length(**changes: Any) -> int:
        made = content(repository, **changes)
        assert made["search"]["max_length"] == made["model"]["context_length"]
        return made["model"]["context_length"]

    assert length() == 2048 * 4
    assert length(seq_length=512) == 512 * 4
    assert length(ntk_convert={**known, "train_length": 300}) == 300 * 4
    assert length(ntk_convert={**known, "train_length": 300}, alibi_scaling=None) == 300
    assert length(alibi_scaling=dynamic) == 800


def test_the_raised_limit_of_mpt_is_not_multiplied_again(converted: Convert) -> None:
    repository = open_converted(converted("mpt", max_seq_len=512))
    assert repository.config["max_seq_len"] == 2048
    assert content(repository)["model"]["context_length"] == 2048


def test_the_tokenizer_that_the_readme_warns_of(converted: Convert) -> None:
    """Once genai reads BLOOM's tokenizer, the README need not send people to token ids."""
    folder = converted("bloom")
    model = export(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(settings | {"tokenizer_class": "BloomTokenizerFast"}), encoding="utf-8")
    with pytest.raises(Exception, match="Unsupported tokenizer class: BloomTokenizerFast"):
        og.Tokenizer(model)
