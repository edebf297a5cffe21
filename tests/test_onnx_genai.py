"""onnxruntime-genai runs an exported graph as transformers runs the repository; so does the example."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from converter import OnnxOptions, convert, export
from converter.model.alibi import AlibiModel
from converter.model.model import Model
from converter.onnx.genai import genai_config
from converter.result import manifest
from converter.result.converted import open_converted
from converter.source.open import open_folder
from tests import models as tests_models
from tests import tiny
from tests.conftest import edit_json
from tests.messages import says
from tests.onnx_graphs import NEW as WORDS
from tests.onnx_graphs import Make, exported, generated, prompts
from tests.patched import TRAIN_LENGTH, Convert, config_of, load

pytest.importorskip("onnxruntime_genai")

import generate_genai as example
import onnxruntime_genai as og
from generate_genai import batch, stream, text_of, tokenizer

SCRIPT = Path(__file__).parent.parent / "examples" / "generate_genai.py"
NEW = 24
INSIDE, BEYOND = TRAIN_LENGTH // 2, 60
Generated = tuple[np.ndarray, np.ndarray]


def model_of(folder: Path) -> Any:
    return og.Model(str(folder))


def start(model: Any, length: int, rows: int = 1, **options: Any) -> Any:
    """A generator of rows of exactly ``length`` tokens."""
    params = og.GeneratorParams(model)
    # A minimum, so that no row stops at the end token.
    params.set_search_options(batch_size=rows, max_length=length, min_length=length, **options)
    return og.Generator(model, params)


def finish(running: Any, rows: int = 1) -> Generated:
    """The tokens [rows, NEW] that follow, and the logits [rows, NEW, vocabulary] behind them."""
    tokens, logits = [], []
    for _ in range(NEW):
        assert not running.is_done()
        logits.append(np.array(running.get_logits()).reshape(rows, -1))
        running.generate_next_token()
        tokens.append(np.array(running.get_next_tokens()))
    assert running.is_done()
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


def begin(model: Any, prompts: np.ndarray, **options: Any) -> Any:
    """A generator that has rows of prompts, and makes ``NEW`` tokens of each."""
    running = start(model, prompts.shape[1] + NEW, len(prompts), **options)
    running.append_tokens(prompts.astype(np.int32))
    return running


@pytest.mark.parametrize(
    ("family", "scaling", "share", "last_logits"),
    [
        ("bloom", "ntk", True, False),
        ("mpt", "ntk-length", True, True),
        ("refact", "ntk-position", False, False),
        ("jais", "fitted-position", True, True),
        ("baichuan", "by-parts-tempered", False, True),
        ("falcon", "by-parts-position-tempered", True, False),
        ("replit", "concave", True, False),
    ],
)
def test_greedy_tokens(converted: Convert, family: str, scaling: str, share: bool, last_logits: bool) -> None:
    """Of short and long prompts, and of several together, which are padded on the right."""
    folder = converted(family, 12, scaling)
    model, reference = model_of(exported(folder, last_logits=last_logits)), load(folder)
    for length in (INSIDE, BEYOND):
        ids = tiny.token_ids(1, length)
        running = begin(model, ids, past_present_share_buffer=share)
        assert_same(finish(running), expected(reference, *ids))
    ids, lengths = tiny.token_ids(3, BEYOND), [BEYOND, 43, INSIDE]
    running = begin(model, np.where(tiny.padding_mask(lengths, "right", BEYOND), ids, tiny.PAD))
    rows = [row[:length] for row, length in zip(ids, lengths, strict=True)]
    assert_same(finish(running, rows=3), expected(reference, *rows))


@pytest.mark.parametrize(
    ("family", "scaling"),
    [("bloom", "ntk"), ("jais", "ntk-position"), ("mpt", "ntk-length"), ("falcon", "concave")],
)
def test_requests_of_different_lengths_in_an_engine(converted: Convert, family: str, scaling: str) -> None:
    """Up to four run together, and each row's new token stands right behind its own tokens."""
    folder = exported(converted(family, 4, scaling))
    reference = load(folder)
    engine = og.Engine(model_of(folder))
    events = engine.create_event_buffer(64)
    given = [np.array(prompt, np.int64) for prompt in prompts((60, 43, 5, 12, 33, 1))]
    requests = [engine.create_request() for _ in given]
    for request, prompt in zip(requests, given, strict=True):
        turn = og.TurnOptions(request)
        # A minimum, so that no request stops at the end token.
        turn.set_min_generated_tokens(NEW)
        turn.set_max_generated_tokens(NEW)
        request.begin_turn(prompt.astype(np.int32), turn)
    found: list[list[int]] = [[] for _ in given]
    while engine.has_pending_requests():
        for event in engine.run(events) or ():
            if event.token is not None:
                found[requests.index(event.request)].append(event.token)
    right = [expected(reference, prompt)[0][0].tolist() for prompt in given]
    assert found == right


def test_a_graph_of_another_factor_is_noticed(converted: Convert) -> None:
    folder = converted("bloom", 12, "ntk")
    reference, scaling = load(folder), config_of(folder)["alibi_scaling"]
    edit_json(folder / "config.json", {"alibi_scaling": {**scaling, "factor": 3.5}})
    manifest.write(folder, manifest.listed(open_folder(folder)), {})
    ids = tiny.token_ids(1, BEYOND)
    with pytest.raises(AssertionError):
        assert_same(finish(begin(model_of(exported(folder)), ids)), expected(reference, *ids))


def test_a_prompt_in_parts(with_graph: Make) -> None:
    folder = with_graph("mpt", "ntk-position")
    model = model_of(folder)
    (prompt,) = tiny.token_ids(1, BEYOND).astype(np.int32)
    chunked, appended, rewound = (
        start(model, BEYOND + NEW, **options) for options in ({"chunk_size": 16}, {}, {})
    )
    chunked.append_tokens(prompt)
    for part in (prompt[:20], prompt[20:33], prompt[33:]):
        appended.append_tokens(part)
    rewound.append_tokens(np.concatenate([prompt[:20], prompt[:30]]))
    rewound.rewind_to(20)
    rewound.append_tokens(prompt[20:])
    reference = expected(load(folder), prompt.astype(np.int64))
    for running in (chunked, appended, rewound):
        assert_same(finish(running), reference)


@pytest.mark.parametrize(
    ("dtype", "graph", "tolerance"),
    [("fp16", "model.onnx", 0.1), ("int8-fp16", "onnx/model_q8f16.onnx", 0.3)],
)
def test_the_graph_for_gpus(
    converted: Convert, monkeypatch: pytest.MonkeyPatch, dtype: str, graph: str, tolerance: float
) -> None:
    """The example asks for CUDA and takes the graph in half precision, which runs here on the CPU."""
    folder = exported(converted("bloom", 4, "ntk-position", dtype=torch.float16), dtype=dtype)
    for other in folder.rglob("*.onnx"):
        if other != folder / graph:
            other.unlink()
    providers: list[str] = []
    monkeypatch.setattr(og, "is_cuda_available", lambda: True)
    monkeypatch.setattr(og.Config, "append_provider", lambda _, name: providers.append(name))
    monkeypatch.setattr(og.Config, "set_provider_option", lambda *_: None)
    ids = tiny.token_ids(1, BEYOND)
    running = begin(example.load(folder, "cuda"), ids)
    assert providers == ["cuda"]
    assert_same(finish(running), expected(load(folder).float(), *ids), tolerance)


def test_providers_of_the_file_are_not_taken(converted: Convert) -> None:
    """TensorRT-RTX's mask has another length, with which the graph would count wrong."""
    folder = exported(converted("bloom", 4, "ntk"))
    content = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
    content["model"]["decoder"]["session_options"]["provider_options"] = [{"NvTensorRtRtx": {}}]
    edit_json(folder / "genai_config.json", content)
    with pytest.raises(RuntimeError, match="Cuda interface not available"):
        model_of(folder)
    assert list(stream(example.load(folder), prompts()[0], WORDS)) == generated(folder, prompts()[0])


def test_which_graph_is_served(converted: Convert) -> None:
    """The one of the last export; of two, that for CPUs."""
    folder = converted("bloom", 4, "ntk", dtype=torch.bfloat16)

    def served(**options: Any) -> str:
        export(folder, OnnxOptions(validate=False, **options))
        config = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
        return str(config["model"]["decoder"]["filename"])

    assert served(standalone=True) == "onnx/model_bf16.onnx"
    assert served() == "model_fp32.onnx"
    assert served(dtype="int4-fp16") == "onnx/model_q4f16.onnx"
    assert served(dtype="w8a8") == "onnx/model_int8.onnx"
    # A backbone generates nothing, whatever else the repository has.
    assert served(standalone=True, task="feature-extraction") == "onnx/model_int8.onnx"
    assert "genai" not in (folder / "README.md").read_text(encoding="utf-8")


def content(repository: Model, **changes: Any) -> dict[str, Any]:
    changed = dataclasses.replace(
        tests_models.model_of({**repository.result_config, **changes}), source=repository.source
    )
    assert isinstance(changed, AlibiModel)
    return genai_config(changed, file_name="model.onnx")


@pytest.mark.parametrize(
    ("generation", "changes", "tokens"),
    [
        ({"eos_token_id": tiny.END}, {}, (tiny.START, [tiny.END], tiny.PAD)),
        # One outside the vocabulary would be refused.
        ({"eos_token_id": [5, 97, 6], "pad_token_id": None}, {}, (tiny.START, [5, 6], tiny.PAD)),
        (None, {"pad_token_id": None, "bos_token_id": None}, (tiny.START, [tiny.END], tiny.PAD)),
        # The tokenizer's.
        (None, {"eos_token_id": None}, (tiny.START, [tiny.END], tiny.PAD)),
        (None, dict.fromkeys(("eos_token_id", "pad_token_id")), (tiny.START, [tiny.END], tiny.PAD)),
        ({"eos_token_id": 5, "bos_token_id": 6, "pad_token_id": 7}, {}, (6, [5], 7)),
    ],
)
def test_special_tokens(converted: Convert, generation: Any, changes: Any, tokens: Any) -> None:
    folder = converted("bloom")
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    model = content(open_converted(folder), **changes)["model"]
    assert tuple(model.get(f"{name}_token_id") for name in ("bos", "eos", "pad")) == tokens


SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


@pytest.mark.parametrize("where", ["tokenizer_config.json", "special_tokens_map.json", "decoder", "nowhere"])
def test_an_mpt_that_names_no_tokens_ends(tmp_path: Path, where: str) -> None:
    source = tiny.FACTORIES["mpt"](tmp_path / "source", 4, use_cache=True)
    edit_json(source / "config.json", dict.fromkeys(SPECIAL))
    (source / "generation_config.json").unlink(missing_ok=True)
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokens = {name: settings.pop(name) for name in tiny.SPECIAL_TOKENS}
    if where == "decoder":
        entry = {"content": tokens["eos_token"], "special": True}
        settings |= {**tokens, "eos_token": entry, "added_tokens_decoder": {str(tiny.END): entry}}
        edit_json(source / "tokenizer.json", {"added_tokens": []})
    elif where == "tokenizer_config.json":
        settings |= tokens
    elif where != "nowhere":
        (source / where).write_text(json.dumps(tokens), encoding="utf-8")
    (source / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    out = tmp_path / "out"
    convert(source, out, scale=2, train_length=TRAIN_LENGTH, verify=False)
    result = export(out, OnnxOptions(validate=False))
    found = json.loads((out / "genai_config.json").read_text(encoding="utf-8"))["model"]
    assert found.get("eos_token_id") == (None if where == "nowhere" else [tiny.END])
    assert ("no end token" in result.summary()) == (where == "nowhere")
    running = start_free(og.Model(str(out)), 12)
    running.append_tokens(np.array([[5, 6, 7]], dtype=np.int32))
    made = []
    while not running.is_done():
        running.generate_next_token()
        made.append(int(running.get_next_tokens()[0]))
    assert len(made) == 9 or made[-1] == tiny.END


def start_free(model: Any, length: int) -> Any:
    """A generator of one row, which ends where the model ends it."""
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=length)
    return og.Generator(model, params)


def test_context_length(converted: Convert) -> None:
    repository = open_converted(converted("bloom"))
    known = repository.result_config["ntk_convert"]
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
    concave = {"type": "concave", "train_seq_len": 100, "dynamic": "position", "power": 8}
    assert length(alibi_scaling=concave) == 800


def test_the_raised_limit_of_mpt_is_not_multiplied_again(converted: Convert) -> None:
    repository = open_converted(converted("mpt", max_seq_len=512))
    assert repository.result_config["max_seq_len"] == 2048
    assert content(repository)["model"]["context_length"] == 2048


# The example


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


@pytest.mark.parametrize("family", ["mpt", "jais"])
def test_the_example_s_tokens(with_graph: Make, family: str) -> None:
    """Of a stream, in one chunk and in several, and of a batch of unequal prompts."""
    folder = with_graph(family, "ntk-position")
    model, wanted = model_of(folder), [generated(folder, prompt) for prompt in prompts()]
    for chunk in (512, 16):
        assert [list(stream(model, prompt, WORDS, chunk)) for prompt in prompts()] == wanted
    assert batch(model, prompts(), WORDS, padding=tiny.PAD, ends=[tiny.END]) == wanted


def test_a_row_that_has_ended_gets_padding(converted: Convert) -> None:
    """The example cuts it off."""
    folder = exported(converted("mpt", 4, "ntk"))
    rows = [prompts()[0], prompts()[2]]
    whole = batch(model_of(folder), rows, WORDS, padding=tiny.PAD, ends=[tiny.END])
    end = next(token for token in whole[1] if token not in whole[0])
    content = json.loads((folder / "genai_config.json").read_text())
    edit_json(folder / "genai_config.json", {"model": {**content["model"], "eos_token_id": [end]}})
    model = model_of(folder)
    cut = batch(model, rows, WORDS, padding=tiny.PAD, ends=[end])
    assert cut == [whole[0], whole[1][: whole[1].index(end) + 1]]
    assert batch(model, rows, WORDS, padding=tiny.PAD, ends=[])[1][len(cut[1])] == tiny.PAD


def test_text_as_it_grows(converted: Convert) -> None:
    """From genai's stream and from tokenizers: no half characters, and the same text in the end."""
    folder = exported(converted("mpt", 4, "ntk"))
    reference = byte_level(folder)
    text = "the cat é 雪"
    ids = reference.encode(text).ids
    assert len(ids) > len(text.split()) + 2, "characters of several tokens"
    encode, texts = tokenizer(model_of(folder), folder)
    assert list(encode(text)) == ids
    for pieces in (list(texts(iter(ids))), list(text_of(iter(ids), reference.decode))):
        assert "".join(pieces) == text
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_the_command_line(converted: Convert) -> None:
    folder = exported(converted("mpt", 4, "ntk"))
    (folder / "tokenizer.json").unlink()

    def run(*words: str) -> tuple[int, str, str]:
        done = subprocess.run([sys.executable, SCRIPT, folder, *words], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    new = ("--max-new-tokens", str(WORDS))
    texts = [" ".join(map(str, generated(folder, ids))) for ids in ([5, 6, 7], [20, 21])]
    assert run("5 6 7", "20 21", *new)[:2] == (0, "".join(f"{text}\n" for text in texts))
    code, out, err = run("5 6 7", "--max-new-tokens", "100000")
    assert (code, out) == (1, "")
    says(err, "error: ", "max_length (100003)", "context_length")
    if not og.is_cuda_available():
        code, out, err = run("5 6 7", "--provider", "cuda")
        assert (code, out, err.count("\n")) == (1, "", 1)
        says(err, "error: ", "install onnxruntime-genai-cuda")
