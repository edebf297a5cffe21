"""A converted repository in plain transformers: loading, heads, devices, saving, compiling."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from converter import convert
from converter.families import recognise
from templates.ntk_alibi import Alibi, stock_slopes
from templates.ntk_plan import plan_attention
from tests import tiny
from tests.conftest import edit_json
from tests.patched import FAMILIES, FITTED, STOCK, Convert, assert_logits, batch, config_of, load
from tests.runners import HEADS, auto_class


def test_loading_without_trust_raises(converted: Convert) -> None:
    folder = converted("bloom")
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)


@pytest.mark.parametrize("family", [*FAMILIES, *tiny.ENCODERS])
def test_a_config_keeps_what_it_is_given(family: str, tmp_path: Path) -> None:
    """Under the names that transformers knows too; what it is not given has a default."""
    source = {**tiny.FACTORIES, **tiny.ENCODERS}[family](tmp_path / "source", 4)
    convert(source, tmp_path / "out", scale=2, verify=False)
    config = AutoConfig.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert config.to_diff_dict().items() >= {"alibi_scaling": {"type": "ntk", "factor": 2.0}}.items()
    # transformers 5 has no default for the padding token; heads and exports ask.
    if family in FAMILIES:
        edit_json(tmp_path / "out/config.json", {"pad_token_id": None})
        padding = AutoConfig.from_pretrained(tmp_path / "out", trust_remote_code=True).pad_token_id
        assert padding == (0 if family == "baichuan" else None)
    empty, sizes = type(config)(), {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    assert (empty.alibi_scaling, empty.num_labels) == (None, 2)
    given = {**sizes, "num_labels": 5, "use_cache": not getattr(empty, "use_cache", True), "pad_token_id": 7}
    changed = type(config)(**given, head_dim=3)  # some files hold what is computed here
    for each in (changed, type(config).from_dict(changed.to_dict())):
        assert {name: getattr(each, name) for name in given} == given
    if family in FAMILIES:
        assert changed.head_dim == 16 + 8


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", STOCK)
def test_every_head_gives_the_stock_head_s_loss(family: str, head: str, tmp_path: Path) -> None:
    """test_numbers.py has the numbers of every head, and the stock model's."""
    source = tiny.FACTORIES[family](tmp_path / "source", 4, head=head)
    convert(source, tmp_path / "out", method="none", verify=False)
    model = load(tmp_path / "out", auto_class(family, head))
    stock = auto_class(family, head).from_pretrained(source).eval()
    ids, mask = batch(rows=2, length=30, side="right")
    ids = ids.masked_fill(mask == 0, tiny.PAD)
    places = {"start_positions": torch.tensor([1, 99]), "end_positions": torch.tensor([4, 2])}
    labels = {
        "Model": {},
        "SequenceClassification": {"labels": torch.tensor([0, 1])},
        "TokenClassification": {"labels": ids % 2},
        "QuestionAnswering": places,
    }[head]
    ours, theirs = (each(ids, attention_mask=mask, **labels) for each in (model, stock))
    if labels:  # stock Falcon rounds its bias to bfloat16
        tolerance = 0.05 if family == "falcon" else 1e-4
        assert ours.loss.item() == pytest.approx(theirs.loss.item(), abs=tolerance)
    options = {"output_hidden_states": True, "output_attentions": True}
    assert len(model(ids, return_dict=False, **options)) == len(model(ids, **options).to_tuple())


@torch.no_grad()
@pytest.mark.parametrize("family", ["bloom", "mosaic_bert"])
def test_hidden_states_are_freed_unless_they_are_asked_for(family: str, tmp_path: Path) -> None:
    """At 100,000 tokens, those of all layers would take tens of gigabytes."""
    factory = {**tiny.FACTORIES, **tiny.ENCODERS}[family]
    convert(factory(tmp_path / "source", 4, head="Model"), tmp_path / "out", method="none", verify=False)
    model = AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    first, last = model.decoder_layers if family == "bloom" else model.encoder_layers
    seen: list[Any] = []
    first.register_forward_pre_hook(lambda _, inputs: seen.append(weakref.ref(inputs[0])))
    last.register_forward_pre_hook(lambda *_: seen.append(seen[-1]() is not None))
    for kept in (False, True):
        model(torch.arange(3, 33)[None], output_hidden_states=kept)
        assert seen[-1] == kept


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_classification_losses(problem: str, tmp_path: Path) -> None:
    count = 1 if problem == "regression" else 3
    source = tiny.FACTORIES["bloom"](tmp_path / "source", head="SequenceClassification", num_labels=count)
    convert(source, tmp_path / "out", method="none", verify=False)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", trust_remote_code=True)
    stock = AutoModelForSequenceClassification.from_pretrained(source)
    ids, _ = batch(rows=2, length=30)
    labels = torch.rand(2) if count == 1 else torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    ours, theirs = (each.eval()(ids, labels=labels).loss for each in (model, stock))
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    model.config.pad_token_id = None
    with pytest.raises(ValueError, match="pad_token_id"):
        model(ids)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_saving_and_loading_again(converted: Convert, family: str, tmp_path: Path) -> None:
    folder = converted(family, 12, "ntk-position")
    model, ids = load(folder), batch()[0]
    model.save_pretrained(tmp_path / "saved")
    saved = config_of(tmp_path / "saved")
    assert saved["alibi_scaling"] == config_of(folder)["alibi_scaling"]
    assert saved["model_type"] == config_of(folder)["model_type"]
    shutil.rmtree(folder)
    assert torch.equal(load(tmp_path / "saved")(ids).logits, model(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_device_maps(converted: Convert, family: str, tmp_path: Path) -> None:
    folder = converted(family, 4, "ntk")
    model = load(folder)
    ids, mask = batch(rows=2, length=40)
    expected = model(ids, attention_mask=mask).logits
    assert_logits(load(folder, device_map="auto")(ids, attention_mask=mask).logits, expected, mask)
    trunk, layers = model.base_model_prefix, recognise(config_of(folder)).layers
    placed = {name: "cpu" for name, _ in model.named_children() if name != trunk}
    placed |= {f"{trunk}.{name}": "cpu" for name, _ in model.base_model.named_children() if name != layers}
    placed |= {f"{trunk}.{layers}.0": "cpu", f"{trunk}.{layers}.1": "disk"}
    offloaded = load(folder, device_map=placed, offload_folder=tmp_path / "offload")
    assert_logits(offloaded(ids, attention_mask=mask).logits, expected, mask)
    tokens = offloaded.generate(ids, attention_mask=mask, max_new_tokens=5)
    assert torch.equal(tokens, model.generate(ids, attention_mask=mask, max_new_tokens=5))


def test_a_plan_follows_its_layer_to_another_device() -> None:
    """``device_map`` places each layer; accelerate moves what a layer is called with before it runs."""
    hidden, documents = torch.zeros(1, 8, 4), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    eager = SimpleNamespace(_attn_implementation="eager")
    plan = plan_attention(eager, Alibi(stock_slopes(4)), 0.5, hidden, position_ids=documents)
    moved = send_to_device(plan, torch.device("meta"))
    tensors = {
        "mask": moved.mask,
        "slots": moved.slots,
        "queries": moved.query_channels[0],
        "keys": moved.key_channels,
        "bounds": moved.keywords["cu_seq_lens_q"],
    }
    assert {name for name, tensor in tensors.items() if tensor.device.type != "meta"} == set()
    assert type(moved) is type(plan)
    assert moved.implementation == plan.implementation


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "scaling", "backend"),
    [
        *((family, "ntk-position", "aot_eager") for family in FAMILIES),
        *(("bloom", scaling, "aot_eager") for scaling in ("ntk", "ntk-length", "concave", *FITTED)),
        ("bloom", "ntk", "inductor"),
    ],
)
def test_compiling_as_one_graph(converted: Convert, family: str, scaling: str, backend: str) -> None:
    model = load(converted(family, 4, scaling))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for length in (40, 44) if backend == "aot_eager" else (40,):
        ids, mask = batch(rows=2, length=length)
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        assert_logits(compiled(ids, attention_mask=mask, use_cache=False).logits, expected, mask)
        assert_logits(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("family", ["bloom", "jina_bert"])
def test_the_attention_that_was_asked_for(converted: Convert, family: str) -> None:
    """transformers 5 reads the config with another copy of its class."""
    folder, kind = converted(family), AutoModel if family == "jina_bert" else AutoModelForCausalLM
    for function in ("eager", "sdpa"):
        assert load(folder, kind, attn_implementation=function).config._attn_implementation == function


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_some_logits_only(converted: Convert, family: str) -> None:
    model = load(converted(family))
    assert model.config._attn_implementation == "sdpa"
    ids, _ = batch(rows=2, length=40)
    logits = model(ids).logits
    assert torch.allclose(model(ids, logits_to_keep=3).logits, logits[:, -3:], atol=1e-5)
    kept = torch.tensor([0, 5])
    assert torch.allclose(model(ids, logits_to_keep=kept).logits, logits[:, kept], atol=1e-5)


NOT_HONOURED: list[dict[str, Any]] = [
    {"factor": 2.0},
    {"type": "yarn", "factor": 2.0},
    {"type": "ntk"},
    {"type": "ntk", "factor": 0.5},
    {"type": "ntk", "factor": 2.0, "train_seq_len": 2048},
    {"type": "ntk", "train_seq_len": 2048, "dynamic": "row"},
    {"type": "ntk", "train_seq_len": 2048, "dynamic": None},
    {"type": "ntk", "train_seq_len": 2048, "rate": -1},
    {"type": "ntk", "factor": 2.0, "exponents": [[0, 0, 0, 1]]},
    *({"type": method, "factor": 2.0, "temperature": 0.2} for method in ("ntk", "linear", "ntk-published")),
    {"type": "by-parts", "factor": 2.0, "ramp": [64, 256], "temperature": 0.2},
    {"type": "fitted", "factor": 2.0, "exponents": [[0, 0, 0, 1]], "temperature": 0.2},
    {"type": "fitted", "factor": 2.0},
    {"type": "fitted", "factor": 2.0, "exponents": [[0, 0, 1]]},
    {"type": "fitted", "factor": 2.0, "exponents": [[0, 0, 0, 1]] * 3},
    {"type": "fitted", "factor": 2.0, "exponents": [[0, 0, 0, 5]]},
    {"type": "fitted", "factor": 2.0, "temperatures": [[0, 0, 0, 1]]},
    {"type": "fitted", "factor": 2.0, "exponents": [[0, 0, 0, 1]], "temperatures": [[0, 0, 1]]},
    {"type": "fitted", "factor": 2.0, "exponents": [[0, 0, 0, 1]], "temperatures": [[0, 0, 0, 1]] * 2},
    {"type": "fitted", "factor": 2.0, "exponents": [[0, 0, 0, 1]], "temperatures": [[0, 0, 0, 4.1]]},
    {"type": "ntk", "factor": 2.0, "temperatures": [[0, 0, 0, 1]]},
    *({"type": kind, "factor": 2.0, "ramp": [64, 256]} for kind in ("ntk", "linear")),
    *(
        {"type": "by-parts", "factor": 2.0, "ramp": ramp}
        for ramp in ([64], [64, 64], [0, 64], [64, float("inf")], [2000, 4000], None, 64, ["a", "b"])
    ),
    {"type": "ntk", "factor": None},
    {"type": ["ntk"], "factor": 2.0},
    ["ntk", 2.0],
]


def test_a_scaling_that_cannot_be_honoured_is_refused(converted: Convert) -> None:
    folder = converted("bloom")
    for scaling in NOT_HONOURED:
        with pytest.raises(ValueError, match="alibi_scaling"):
            load(folder, alibi_scaling=scaling)
