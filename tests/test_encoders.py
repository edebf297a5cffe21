"""The converted encoders: loading, outputs, compiling, embeddings.

test_numbers.py and test_training.py have the rest.
"""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BloomConfig,
)

from converter import convert
from templates import ntk_symmetric_sdpa
from templates.ntk_alibi import Alibi, stock_slopes
from templates.ntk_symmetric import SymmetricAttention, plan_symmetric_attention
from tests import forks, patched, runners, tiny
from tests.conftest import MakeSource
from tests.dealt import dealt
from tests.hub_server import HubServer
from tests.messages import raises
from tests.patched import Convert, assert_logits, batch, config_of
from tests.runners import BERT_LAYERS, HEADS, LAYERS, auto_class

FAMILIES = tuple(tiny.ENCODERS)
BERTS = tuple(name for name in FAMILIES if tiny.CHECKPOINTS[name].bert)


def load(folder: Path, head: str | None = None, **options: Any) -> Any:
    return patched.load(folder, auto_class("jina_bert", head), **options)


def expected(
    folder: Path, name: str, ids: torch.Tensor, mask: torch.Tensor | None = None, head: str | None = None
) -> np.ndarray:
    rows = None if mask is None else mask.numpy()
    return runners.expected(folder, name, ids.numpy(), rows, head=head)


def module_of(model: Any, name: str) -> Any:
    """A module of the loaded repository."""
    return sys.modules[type(model).__module__.rpartition(".")[0] + f".{name}"]


def prediction_bias(model: Any) -> torch.Tensor:
    """Of the prediction head, whose name differs between families."""
    names = ("cls.predictions.bias", "cls.predictions.decoder.bias", "lm_head.bias")
    [bias] = [value for name, value in model.named_parameters() if name in names]
    return bias


@pytest.mark.parametrize("layer", LAYERS)
def test_inference_gives_what_training_does(
    converted: Convert, monkeypatch: pytest.MonkeyPatch, layer: str
) -> None:
    """On a CPU, inference takes each row's real tokens, and a few tokens at a time in feed-forward layers."""
    name, changes = LAYERS[layer]
    model = load(converted(name, 6, "ntk", **changes))
    ids, holes = batch()
    holes[0, 5:9] = 0
    empty = batch()[1]
    empty[1] = 0
    for mask in (holes, empty, torch.ones_like(ids)):
        trained = model(ids, attention_mask=mask).logits.detach()
        with torch.no_grad():
            found = model(ids, attention_mask=mask).logits
            with monkeypatch.context() as patch:
                patch.setattr(module_of(model, "ntk_encoder"), "SLICE", 7)
                pieces = model(ids, attention_mask=mask).logits
        real = mask.bool()
        assert_logits(found, trained.double().numpy(), mask)
        assert (pieces - found)[real].abs().max() <= 1e-5 * found[real].abs().max()


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_trace_is_right_for_other_shapes(converted: Convert, name: str) -> None:
    """As older exporters of ONNX make it."""
    model = load(converted(name, 6, "ntk"))
    ids, mask = batch()
    model.config.return_dict = False
    traced = torch.jit.trace(model, (ids, mask), check_trace=False, strict=False)
    for rows, length in ((2, 40), (1, 90)):
        ids, mask = batch(rows, length)
        assert_logits(traced(ids, mask)[0], model(ids, mask)[0].double().numpy(), mask)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["ntk", "ntk-position"])
@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_in_one_graph(
    converted: Convert, name: str, scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()  # what earlier tests compiled counts against the limit of one code object
    model = load(converted(name, 4, scaling))
    monkeypatch.setattr(module_of(model, "ntk_symmetric_sdpa"), "BLOCK", 16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (40, 43):
        ids, mask = batch(rows=2, length=length)
        assert_logits(compiled(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits, mask)


LABELS: dict[str, Any] = {
    "MaskedLM": {"labels": torch.arange(40).view(2, 20)},
    "SequenceClassification": {"labels": torch.tensor([0, 1])},
    "TokenClassification": {"labels": torch.arange(40).view(2, 20) % 2},
    "QuestionAnswering": {"start_positions": torch.tensor([1, 99]), "end_positions": torch.tensor([4, 2])},
}


@pytest.mark.parametrize("head", ["MaskedLM", *HEADS])
def test_outputs_are_those_of_transformers_classes(converted: Convert, head: str) -> None:
    model = load(converted("jina_bert", head=head), head)
    ids, mask = batch(rows=2, length=20, side="right")
    labels = LABELS.get(head, {})
    options = {"output_hidden_states": True, "output_attentions": True, **labels}
    output = model(ids, attention_mask=mask, **options)
    assert len(output.hidden_states) == 3
    assert len(output.attentions) == 2
    assert len(model(ids, attention_mask=mask, return_dict=False, **options)) == len(output.to_tuple())
    assert ("loss" in output) == bool(labels)
    embeds = model.get_input_embeddings()(ids).detach()
    same = model(inputs_embeds=embeds, attention_mask=mask)
    first = (
        "start_logits"
        if head == "QuestionAnswering"
        else "last_hidden_state"
        if head == "Model"
        else "logits"
    )
    assert torch.allclose(same[first], output[first], atol=1e-4)
    with pytest.raises(ValueError, match="exactly one"):
        model(ids, inputs_embeds=embeds)
    with raises(ValueError, "attention_mask", "[rows, tokens]"):
        model(ids, attention_mask=mask[:, :-1])


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_other_attention_functions_are_refused(
    converted: Convert, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By transformers when they are chosen, or by the model when it runs; none computes the bias."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "mine", lambda *_: None)
    ids, mask = batch(rows=2, length=20)
    model = load(converted(name))
    right = model(ids, attention_mask=mask).logits
    flash = ("flash_attention_3", "kernels-community/flash-attn3", "paged|flash_attention_2")
    for function in (*flash, "sdpa_paged", "paged|eager", "mine"):
        with suppress(ValueError, ImportError):
            model.set_attn_implementation(function)
            assert model.config._attn_implementation != "sdpa"
        model.config._attn_implementation = function
        with raises(ValueError, f'"{function}"', "use one of: sdpa, eager"):
            model(ids, attention_mask=mask)
        model.set_attn_implementation("eager")
        assert_logits(model(ids, attention_mask=mask).logits, right, mask)


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_what_else_is_given_beside_tokens(converted: Convert, name: str) -> None:
    model = load(converted(name))
    ids, mask = batch(rows=2, length=20)
    plain, padded = model(ids).logits, model(ids, attention_mask=mask).logits
    # Positions say nothing new, for the bias depends on distances.
    for positions in (torch.arange(20)[None], torch.arange(20).repeat(2, 1) + 2):
        assert torch.equal(model(ids, position_ids=positions).logits, plain)
    for positions in (torch.arange(20)[None], (mask.cumsum(-1) - 1).clamp(min=0)):
        assert torch.equal(model(ids, attention_mask=mask, position_ids=positions).logits, padded)
    types = torch.zeros_like(ids)
    assert torch.equal(model(ids, attention_mask=mask, token_type_ids=types).logits, padded)
    other = model(ids, attention_mask=mask, token_type_ids=types + 1).logits
    assert torch.allclose(other, padded) is not tiny.CHECKPOINTS[name].bert


@pytest.mark.parametrize("name", [name for name in FAMILIES if tiny.CHECKPOINTS[name].zeroes_padding])
def test_padded_tokens_leave_as_zeros(converted: Convert, name: str) -> None:
    model = load(converted(name, head="Model"), "Model")
    ids, mask = batch(rows=2, length=20)
    hidden = model(ids, attention_mask=mask, output_hidden_states=True)
    assert (hidden.last_hidden_state[mask == 0] == 0).all()
    assert torch.equal(hidden.hidden_states[-1], hidden.last_hidden_state)


# Loading


@torch.no_grad()
@pytest.mark.parametrize(("name", "own"), [("mosaic_bert", BertConfig), ("bloom", BloomConfig)])
def test_a_config_of_transformers_own_class(converted: Convert, tmp_path: Path, name: str, own: Any) -> None:
    """As on the cards of DNABERT-2, MosaicBERT, mRNABERT and BiRNA-BERT; what is saved is converted, too."""
    folder = converted(name, scaling="ntk-position")
    auto = AutoModelForMaskedLM if own is BertConfig else AutoModelForCausalLM
    config = own.from_pretrained(folder)
    config.alibi_starting_size = 2048
    model = auto.from_pretrained(folder, config=config, trust_remote_code=True).eval()
    ids, mask = batch(rows=2, length=40)
    right = auto.from_pretrained(folder, trust_remote_code=True)(ids, attention_mask=mask).logits
    assert torch.equal(model(ids, attention_mask=mask).logits, right)
    model.save_pretrained(tmp_path / "saved")
    assert config_of(tmp_path / "saved")["model_type"] == f"ntk_{name}"
    again = auto.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert torch.equal(again(ids, attention_mask=mask).logits, right)
    if own is BertConfig:  # BiRNA-BERT's card reads hidden states this way
        model.cls = torch.nn.Identity()
        states = model.bert(ids, attention_mask=mask).last_hidden_state
        assert torch.equal(model(ids, attention_mask=mask).logits, states)


@torch.no_grad()
@pytest.mark.parametrize("name", tiny.CHECKPOINTS)
def test_from_pretrained_takes_its_first_argument_by_name(converted: Convert, name: str) -> None:
    folder = converted(name)
    auto = auto_class(name)
    model = type(patched.load(folder, auto))
    found, info = model.from_pretrained(pretrained_model_name_or_path=folder, output_loading_info=True)
    assert type(found) is model
    assert not info["missing_keys"]


@torch.no_grad()
def test_a_stored_classifier_is_loaded_though_the_config_names_the_backbone(
    make_source: MakeSource, tmp_path: Path
) -> None:
    """As in jina-reranker-v1, whose config does not say the number of labels either."""
    head, changes = "SequenceClassification", {"num_labels": None, "architectures": ["JinaBertModel"]}
    source = make_source("jina_bert", changes, head=head, num_labels=1)
    convert(source, tmp_path / "out", verify=False, scale=4)
    ids, mask = batch()
    logits = load(tmp_path / "out", head)(ids, attention_mask=mask).logits
    assert logits.shape == (len(ids), 1)
    right = expected(tmp_path / "out", "jina_bert", ids, mask, head)
    assert_logits(logits[:, None], right)


@pytest.mark.parametrize(
    ("family", "stated", "labels"),
    [
        ("jina_bert", {}, ["LABEL_0", "LABEL_1", "LABEL_2"]),
        ("mosaic_bert", {"id2label": {"0": "no", "1": "so-so", "2": "yes"}}, ["no", "so-so", "yes"]),
        ("bloom", {"id2label": {"0": "no"}, "num_labels": 3}, ["LABEL_0", "LABEL_1", "LABEL_2"]),
    ],
)
def test_a_classifier_names_its_labels_as_transformers_would(
    make_source: MakeSource, tmp_path: Path, family: str, stated: dict[str, Any], labels: list[str]
) -> None:
    """text-embeddings-inference serves no classifier without these keys."""
    source = make_source(family, stated, head="SequenceClassification", num_labels=3)
    convert(source, tmp_path / "out", method="none", verify=False)
    written = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    config = AutoConfig.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert list(written["id2label"].values()) == labels == list(config.id2label.values())
    assert written["label2id"] == {label: index for index, label in enumerate(labels)} == config.label2id


@torch.no_grad()
@pytest.mark.parametrize("layer", BERT_LAYERS)
@pytest.mark.parametrize("tied", [True, False])
def test_tensors_of_old_pickles(tmp_path: Path, layer: str, tied: bool) -> None:
    """Tied tensors are stored once more, as are buffers, which are ignored; an untied decoder is not."""
    name, changes = LAYERS[layer]
    ties = {} if tied else {"tie_word_embeddings": False}
    source = tiny.ENCODERS[name](tmp_path / "source", 4, fmt="bin", **changes, **ties)
    file = source / "pytorch_model.bin"
    state = torch.load(file, weights_only=True)
    table = state["bert.embeddings.word_embeddings.weight"]
    state["cls.predictions.decoder.weight"] = table if tied else 2 * table
    if tied and "cls.predictions.bias" in state:
        state["cls.predictions.decoder.bias"] = state["cls.predictions.bias"]
    state["bert.embeddings.position_ids"] = torch.arange(16)[None]
    torch.save(state, file)
    convert(source, tmp_path / "out", method="none", verify=False)
    model, info = AutoModelForMaskedLM.from_pretrained(
        tmp_path / "out", trust_remote_code=True, output_loading_info=True
    )
    assert not info["missing_keys"]
    model = model.eval()
    ids, mask = batch(rows=2, length=20)
    assert_logits(model(ids, attention_mask=mask).logits, expected(tmp_path / "out", name, ids, mask), mask)


class ModelConfig:
    """Of the training program, which is not installed where weights are converted."""


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_a_training_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    """AlBERTurin's ``checkpoint.ckpt``: objects beside the tensors, and among them what is not loaded.

    The head is the embeddings only if one tensor is stored, whatever the config says.
    """
    source = tiny.ENCODERS["alberturin"](tmp_path / "source", 12, fmt="bin", tie_word_embeddings=not tied)
    state = torch.load(source / "pytorch_model.bin", weights_only=True)
    if tied:
        state["lm_head.weight"] = state["encoder.embed_tokens.weight"]
    state["encoder.blocks.layers.0.attn.attn_kernel.alibi_slopes"] = torch.full((12,), torch.nan)
    state["lm_head._extra_state"] = ModelConfig()
    settings = ModelConfig()
    settings.mask_token_id = 4
    monkeypatch.setattr(ModelConfig, "__module__", "matformer_config")
    monkeypatch.setitem(sys.modules, "matformer_config", sys.modules[__name__])
    saved = {"state_dict": state, "hyper_parameters": {"config": settings, "path": tmp_path}}
    torch.save(saved, source / "checkpoint.ckpt")
    monkeypatch.delitem(sys.modules, "matformer_config")
    (source / "pytorch_model.bin").unlink()
    convert(source, tmp_path / "out", scale=4)
    model = load(tmp_path / "out")
    assert (model.lm_head.weight is model.encoder.embed_tokens.weight) is tied
    ids, mask = batch(rows=2, length=20)
    right = expected(tmp_path / "out", "alberturin", ids, mask)
    assert_logits(model(ids, attention_mask=mask).logits, right, mask)


@torch.no_grad()
@pytest.mark.parametrize("layer", LAYERS)
def test_loading_again_and_growing(converted: Convert, tmp_path: Path, layer: str) -> None:
    """As saved by transformers, onto a device map, and with a larger vocabulary."""
    name, changes = LAYERS[layer]
    folder = converted(name, **changes)
    model = load(folder)
    ids, mask = batch(rows=2, length=20)
    logits = model(ids, attention_mask=mask).logits
    model.save_pretrained(tmp_path / "again")
    for again in (load(tmp_path / "again"), load(folder, device_map="cpu")):
        assert torch.equal(again(ids, attention_mask=mask).logits, logits)
    model.resize_token_embeddings(tiny.VOCAB_SIZE + 7)
    after = model(ids, attention_mask=mask).logits
    assert after.shape[-1] == tiny.VOCAB_SIZE + 7
    assert torch.allclose(after[..., : tiny.VOCAB_SIZE], logits, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_a_new_head_s_bias_starts_at_zero(converted: Convert, name: str) -> None:
    """The embedding models have no prediction head; what transformers makes up must not be garbage."""
    folder = converted(name, head="Model")
    model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
    assert (prediction_bias(model) == 0).all()
    assert name not in BERTS or model.cls.predictions.transform.dense.weight.abs().max() < 1


# Embeddings


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"max_length": 7}, {"normalize_embeddings": True}])
def test_encode_gives_means_of_hidden_states(converted: Convert, options: dict[str, Any]) -> None:
    folder = converted("jina_bert", head="Model")
    model = load(folder, "Model").train()
    texts = ["w5 w6 w7 w8 w9 w10 w11 w12", "w20", "w30 w31 w32"]
    embeddings = model.encode(texts, batch_size=2, **options)
    assert model.training
    assert embeddings.shape == (3, 32)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    for text, embedding in zip(texts, embeddings, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"][:, : options.get("max_length", 99)]
        mean = expected(folder, "jina_bert", ids, head="Model")[0].mean(axis=0)
        if options.get("normalize_embeddings"):
            mean = mean / np.linalg.norm(mean)
        assert np.abs(embedding - mean).max() < 1e-5
    assert np.array_equal(model.encode(texts[1], **options).shape, (32,))
    assert isinstance(model.encode(texts, convert_to_tensor=True), torch.Tensor)
    assert isinstance(model.encode(texts, convert_to_numpy=False), list)


def test_encode_loads_its_tokenizer_once(converted: Convert, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(converted("jina_bert", head="Model"), "Model")
    loaded = []
    load_tokenizer = AutoTokenizer.from_pretrained

    def count(*place: Any, **options: Any) -> Any:
        loaded.append(place)
        return load_tokenizer(*place, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", count)
    first, second = model.encode("w5 w6"), model.encode("w5 w6")
    assert np.array_equal(first, second)
    assert len(loaded) == 1


@pytest.mark.parametrize("head", ["Model", "MaskedLM"])
def test_encode_takes_the_tokenizer_of_the_pinned_revision(
    converted: Convert, hub: HubServer, environment: dict[str, str], tmp_path: Path, head: str
) -> None:
    folder = converted("jina_bert", head=head)
    later = shutil.copytree(folder, tmp_path / "later")
    (later / "README.md").write_text("another commit")
    pinned = hub.commit("ada/jina", folder, tag="v1")
    hub.commit("ada/jina", later)
    auto = auto_class("jina_bert", head).__name__
    code = f"""
from transformers import {auto}
model = {auto}.from_pretrained("ada/jina", revision="v1", trust_remote_code=True)
print(model.base_model.encode("w5 w6").shape)
"""
    words = [sys.executable, "-c", code]
    done = forks.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "(32,)\n"), done.stderr
    asked = [request.match("resolve") for request in hub.requests]
    others = {found["file"] for found in asked if found and found["revision"] not in ("v1", pinned)}
    assert others <= {"adapter_config.json"}  # transformers 4.57 looks for this one on main


# The attention by itself.


def exact(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slopes: torch.Tensor, real: torch.Tensor
) -> torch.Tensor:
    """float64 attention [B, L, H * D] with the whole bias written out."""
    slots = torch.arange(query.shape[2])
    distance = (slots[:, None] - slots[None, :]).abs()
    scores = query.double() @ key.double().transpose(-1, -2) * query.shape[-1] ** -0.5
    scores = scores - slopes.double()[..., None] * distance
    weights = scores.masked_fill(~real[:, None, None, :], float("-inf")).softmax(-1)
    return (weights @ value.double()).transpose(1, 2).flatten(2)


SCALED = {
    "static": {"type": "ntk", "factor": 4.0},
    "length": {"type": "ntk", "train_seq_len": 100, "dynamic": "length"},
    "position": {"type": "ntk", "train_seq_len": 100, "dynamic": "position"},
}


@torch.no_grad()
@pytest.mark.parametrize(
    ("scaling", "dtype"),
    dealt(SCALED, [torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    ids=str,
)
def test_attention_at_long_range(scaling: str, dtype: torch.dtype) -> None:
    """Only the format's own rounding is left, over several blocks and an odd length."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 6, 701, 16, dtype=dtype) for _ in range(3))
    mask = torch.ones(2, 701, dtype=torch.long)
    mask[0, :300] = 0
    attention = SymmetricAttention(6, 0.0).eval()
    alibi = Alibi(stock_slopes(6), SCALED[scaling])
    [plan] = plan_symmetric_attention(alibi, "sdpa", torch.zeros(2, 701, 1), mask)
    output, weights = attention.attend(query, key, value, plan)
    assert weights is None
    expected = exact(query, key, value, plan.slopes, mask.bool())
    error = (output.double() - expected)[mask.bool()]
    limit = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-6}[dtype]
    assert error.norm() / expected[mask.bool()].norm() < limit


@torch.no_grad()
def test_no_bias_tensor_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gets a view on 2 L - 1 numbers a head, and of blocks one at a time."""
    shapes, sdpa = [], torch.nn.functional.scaled_dot_product_attention

    def spy(query: torch.Tensor, *args: Any, attn_mask: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        shapes.append((tuple(attn_mask.shape), attn_mask.untyped_storage().nbytes() // 4))
        return sdpa(query, *args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(ntk_symmetric_sdpa.F, "scaled_dot_product_attention", spy)
    states = torch.randn(1, 6, 500, 8)
    for scaling in ("static", "position"):
        alibi = Alibi(stock_slopes(6), SCALED[scaling])
        [plan] = plan_symmetric_attention(alibi, "sdpa", torch.zeros(1, 500, 1))
        SymmetricAttention(6, 0.0).eval().attend(states, states, states, plan)
    block = ntk_symmetric_sdpa.CPU_BLOCK
    assert shapes[0] == ((1, 6, 500, 500), 6 * 999)
    assert [shape for shape, _ in shapes[1:]] == [(1, 6, rows, 500) for rows in (block, block, block, 116)]


def test_attention_dropout_keeps_the_mean() -> None:
    attention = SymmetricAttention(4, 0.5).train()
    torch.manual_seed(0)
    states = [torch.randn(1, 4, 24, 8).expand(4000, -1, -1, -1) for _ in range(3)]
    [plan] = plan_symmetric_attention(Alibi(stock_slopes(4)), "sdpa", torch.zeros(4000, 24, 1))
    dropped, expected = attention.attend(*states, plan)[0], attention.eval().attend(*states, plan)[0]
    assert (dropped.mean(0) - expected[0]).abs().max() < 0.1
