"""The converted encoders: numbers, loading, training, compiling, embeddings."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AttentionInterface,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorWithFlattening,
)

from converter import convert
from templates import ntk_symmetric
from templates.ntk_alibi import Alibi, stock_slopes
from templates.ntk_symmetric import SymmetricAttention, plan_attention
from tests import tiny
from tests.dealt import dealt
from tests.patched import FITTED, SCALINGS, assert_logits, batch, config_of, options_for
from tests.reference import ENCODERS as REFERENCES

FAMILIES = tuple(tiny.ENCODERS)
# Every layer that the templates have, and the options that change the numbers.
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "-".join(filter(None, [name, layout])): (name, dict(changes))
    for name in FAMILIES
    for layout, changes in {"": {}, **tiny.CHECKPOINTS[name].layouts}.items()
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{name}-{variant}": (name, dict(changes))
    for name in FAMILIES
    for variant, changes in tiny.CHECKPOINTS[name].variants.items()
}
HEADS = {
    "MaskedLM": AutoModelForMaskedLM,
    "Model": AutoModel,
    "SequenceClassification": AutoModelForSequenceClassification,
    "TokenClassification": AutoModelForTokenClassification,
    "QuestionAnswering": AutoModelForQuestionAnswering,
}

Convert = Callable[..., Path]


@pytest.fixture
def converted(tmp_path: Path) -> Convert:
    """``converted(family, num_heads, scaling, head, **config_changes)``: writes and converts a checkpoint."""

    def build(
        family: str, num_heads: int = 4, scaling: str = "ntk", head: str = "MaskedLM", **changes: Any
    ) -> Path:
        # None takes a key out.
        source = tiny.ENCODERS[family](tmp_path / "source", num_heads, head=head, **changes)
        config = json.loads((source / "config.json").read_text())
        kept = {key: value for key, value in config.items() if changes.get(key, "") is not None}
        (source / "config.json").write_text(json.dumps(kept))
        convert(source, tmp_path / "out", verify=False, **options_for(scaling, num_heads))
        return tmp_path / "out"

    return build


def load(folder: Path, head: str = "MaskedLM", **options: Any) -> Any:
    """The converted model as a user loads it, with every tensor accounted for."""
    model, info = HEADS[head].from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, **options
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def reference(folder: Path, family: str, ids: torch.Tensor, mask: torch.Tensor | None, head: str) -> Any:
    _, tensors = tiny.read(folder)
    rows = None if mask is None else mask.numpy()
    return REFERENCES[family].logits(config_of(folder), tensors, ids.numpy(), rows, head)


def numbers(output: Any, head: str) -> torch.Tensor:
    """What a head computes, as the reference gives it."""
    if head == "QuestionAnswering":
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    return output.last_hidden_state if head == "Model" else output.logits


def prediction_bias(model: Any) -> torch.Tensor:
    """Of the prediction head, whose name differs between families."""
    names = ("cls.predictions.bias", "cls.predictions.decoder.bias")
    [bias] = [value for name, value in model.named_parameters() if name in names]
    return bias


@torch.no_grad()
@pytest.mark.parametrize(
    ("layer", "scaling", "heads"),
    [*dealt(LAYERS, SCALINGS, [12, 8, 6]), *dealt(LAYERS, FITTED, [12], each=1)],
)
def test_logits_are_the_reference_s(converted: Convert, layer: str, scaling: str, heads: int) -> None:
    family, changes = LAYERS[layer]
    folder = converted(family, heads, scaling, **changes)
    model = load(folder)
    for side in ("left", "right"):
        ids, mask = batch(side=side)
        expected = reference(folder, family, ids, mask, "MaskedLM")
        assert_logits(model(ids, attention_mask=mask).logits, expected, mask)
    expected = reference(folder, family, ids, None, "MaskedLM")
    assert_logits(model(ids).logits, expected)
    assert_logits(model(ids, attention_mask=torch.ones_like(ids)).logits, expected)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", ["left", "right", "ones", "holes", "an empty row"])
def test_inference_gives_what_training_does(
    converted: Convert, monkeypatch: pytest.MonkeyPatch, layer: str, kind: str
) -> None:
    """On a CPU, inference takes each row's real tokens, and a few tokens at a time in feed-forward layers."""
    family, changes = LAYERS[layer]
    model = load(converted(family, 6, "ntk", **changes))
    ids, mask = batch(side="right" if kind == "right" else "left")
    if kind == "ones":
        mask[:] = 1
    elif kind == "holes":
        mask[0, 5:9] = 0
    elif kind == "an empty row":
        mask[1] = 0
    trained = model(ids, attention_mask=mask).logits.detach()
    with torch.no_grad():
        found = model(ids, attention_mask=mask).logits
        monkeypatch.setattr(
            sys.modules[type(model).__module__.rpartition(".")[0] + ".ntk_encoder"], "SLICE", 7
        )
        pieces = model(ids, attention_mask=mask).logits
    real = mask.bool()
    assert_logits(found, trained.double().numpy(), mask)
    assert (pieces - found)[real].abs().max() <= 1e-5 * found[real].abs().max()


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("family", ["jina_bert", "mosaic_bert"])
def test_a_trace_is_right_for_other_shapes(converted: Convert, family: str) -> None:
    """As older exporters of ONNX make it."""
    model = load(converted(family, 6, "ntk"))
    ids, mask = batch()
    model.config.return_dict = False
    traced = torch.jit.trace(model, (ids, mask), check_trace=False, strict=False)
    for rows, length in ((2, 40), (1, 90)):
        ids, mask = batch(rows, length)
        assert_logits(traced(ids, mask)[0], model(ids, mask)[0].double().numpy(), mask)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_options_of_the_config_are_honoured(converted: Convert, tmp_path: Path, variant: str) -> None:
    family, changes = VARIANTS[variant]
    folder = converted(family, 12, "ntk", **changes)
    ids, mask = batch()
    logits = load(folder)(ids, attention_mask=mask).logits
    assert_logits(logits, reference(folder, family, ids, mask, "MaskedLM"), mask)
    # The reference reads the source's config, with its own spellings, as well.
    source = json.loads((tmp_path / "source" / "config.json").read_text())
    _, tensors = tiny.read(folder)
    source["alibi_scaling"] = config_of(folder)["alibi_scaling"]
    assert_logits(logits, REFERENCES[family].logits(source, tensors, ids.numpy(), mask.numpy()), mask)


@torch.no_grad()
def test_a_stored_classifier_is_loaded_though_the_config_names_the_trunk(tmp_path: Path) -> None:
    """As in jina-reranker-v1, whose config does not say the number of labels either."""
    head = "SequenceClassification"
    source = tiny.ENCODERS["jina_bert"](tmp_path / "source", 4, head=head, num_labels=1)
    config = json.loads((source / "config.json").read_text())
    del config["num_labels"]
    config["architectures"] = ["JinaBertModel"]
    (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "out", verify=False, **SCALINGS["ntk"])
    ids, mask = batch()
    logits = load(tmp_path / "out", head)(ids, attention_mask=mask).logits
    assert logits.shape == (len(ids), 1)
    assert_logits(logits, reference(tmp_path / "out", "jina_bert", ids, mask, head))


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_head_gives_the_reference_s_numbers(
    converted: Convert, layer: str, head: str, side: str
) -> None:
    family, changes = LAYERS[layer]
    folder = converted(family, 12, "ntk-position", head, num_labels=3, **changes)
    model = load(folder, head)
    ids, mask = batch(rows=2, length=40, side=side)
    expected = reference(folder, family, ids, mask, head)
    # A padded first token is pooled all the same: as zeros, or as whatever it is.
    per_row = head == "SequenceClassification"
    if per_row and side == "left" and not tiny.CHECKPOINTS[family].zeroes_padding:
        return
    assert_logits(numbers(model(ids, attention_mask=mask), head), expected, None if per_row else mask)


@pytest.mark.parametrize("head", HEADS)
def test_outputs_are_those_of_transformers_classes(converted: Convert, head: str) -> None:
    model = load(converted("jina_bert", 4, "ntk", head), head)
    ids, mask = batch(rows=2, length=20, side="right")
    labels: dict[str, Any] = {
        "MaskedLM": {"labels": ids},
        "SequenceClassification": {"labels": torch.tensor([0, 1])},
        "TokenClassification": {"labels": ids % 2},
        "QuestionAnswering": {
            "start_positions": torch.tensor([1, 99]),
            "end_positions": torch.tensor([4, 2]),
        },
    }.get(head, {})
    options = {"output_hidden_states": True, "output_attentions": True, **labels}
    output = model(ids, attention_mask=mask, **options)
    assert len(output.hidden_states) == 3
    assert len(output.attentions) == 2
    assert len(model(ids, attention_mask=mask, return_dict=False, **options)) == len(output.to_tuple())
    assert ("loss" in output) == bool(labels)
    embeds = model.get_input_embeddings()(ids)
    same = model(inputs_embeds=embeds, attention_mask=mask)
    assert torch.equal(numbers(output, head) * 0, numbers(same, head) * 0)
    with pytest.raises(ValueError, match="exactly one"):
        model(ids, inputs_embeds=embeds)
    with pytest.raises(ValueError, match=r"attention_mask must be \[rows, tokens\]"):
        model(ids, attention_mask=mask[:, :-1])
    with pytest.raises(TypeError, match="head_mask"):
        model(ids, head_mask=torch.ones(4))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_other_attention_functions_are_refused(
    converted: Convert, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, when loading and later, even if transformers knows them; none computes the bias."""
    folder = converted(family)
    monkeypatch.setitem(AttentionInterface._global_mapping, "mine", lambda *_: None)
    ids, mask = batch(rows=2, length=20)
    model = load(folder)
    expected = model(ids, attention_mask=mask).logits
    flash = ("flash_attention_2", "flash_attention_3", "kernels-community/flash-attn")
    for name in (*flash, "flex_attention", "sdpa_paged", "paged|eager", "mine"):
        message = (
            f'"{re.escape(name)}"` is not supported, because it cannot compute .*; use one of: sdpa, eager'
        )
        with pytest.raises(ValueError, match=message):
            load(folder, attn_implementation=name)
        with pytest.raises(ValueError, match=message):
            model.set_attn_implementation(name)
        model.config._attn_implementation = name
        with pytest.raises(ValueError, match=message):
            model(ids, attention_mask=mask)
        model.set_attn_implementation("eager")
        assert_logits(model(ids, attention_mask=mask).logits, expected, mask)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_several_texts_in_a_row_are_refused(converted: Convert, family: str) -> None:
    model = load(converted(family))
    ids, mask = batch(rows=2, length=20)
    plain, padded = model(ids).logits, model(ids, attention_mask=mask).logits
    for positions in (torch.arange(20)[None], torch.arange(20).repeat(2, 1) + 2):
        assert torch.equal(model(ids, position_ids=positions).logits, plain)
    for positions in (torch.arange(20)[None], (mask.cumsum(-1) - 1).clamp(min=0)):
        assert torch.equal(model(ids, attention_mask=mask, position_ids=positions).logits, padded)
    packed = DataCollatorWithFlattening()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    with pytest.raises(ValueError, match="an encoder reads one text in a row; pad the texts instead"):
        model(**packed)
    with pytest.raises(TypeError, match="'cu_seq_lens_q'"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 20]))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_token_types(converted: Convert, family: str) -> None:
    model = load(converted(family))
    ids, mask = batch(rows=2, length=20)
    plain = model(ids, attention_mask=mask).logits
    zeros = torch.zeros_like(ids)
    assert torch.equal(model(ids, attention_mask=mask, token_type_ids=zeros).logits, plain)
    assert not torch.allclose(model(ids, attention_mask=mask, token_type_ids=zeros + 1).logits, plain)


@torch.no_grad()
@pytest.mark.parametrize("layer", LAYERS)
def test_the_scaling_changes_the_logits_by_far_more_than_the_tolerance(
    converted: Convert, layer: str
) -> None:
    family, changes = LAYERS[layer]
    folder = converted(family, 12, "ntk", **changes)
    ids, mask = batch()
    scaled = load(folder)(ids, attention_mask=mask).logits
    unscaled = load(folder, alibi_scaling=None)(ids, attention_mask=mask).logits
    assert (scaled - unscaled)[mask.bool()].abs().max() > 0.05


@torch.no_grad()
@pytest.mark.parametrize("layer", LAYERS)
def test_attention_weights_come_with_the_same_numbers(converted: Convert, layer: str) -> None:
    family, changes = LAYERS[layer]
    folder = converted(family, 12, "ntk-position", **changes)
    model = load(folder)
    ids, mask = batch(rows=2, length=40)
    fused = model(ids, attention_mask=mask).logits
    output = model(ids, attention_mask=mask, output_attentions=True)
    assert_logits(output.logits, fused, mask)
    assert_logits(load(folder, attn_implementation="eager")(ids, attention_mask=mask).logits, fused, mask)
    config, tensors = tiny.read(folder)
    expected = REFERENCES[family].trunk(config, tensors, ids.numpy(), mask.numpy(), attentions=True)
    for weights, probabilities in zip(output.attentions, expected.attentions, strict=True):
        real = mask.bool()[:, None, :, None].expand_as(weights)
        assert (weights.double() - torch.as_tensor(probabilities))[real].abs().max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision(converted: Convert, family: str, dtype: torch.dtype) -> None:
    folder = converted(family, 12)
    ids, mask = batch()
    logits = load(folder, dtype=dtype)(ids, attention_mask=mask).logits
    assert logits.dtype == dtype
    expected = torch.as_tensor(reference(folder, family, ids, mask, "MaskedLM"))
    error = (logits.double() - expected)[mask.bool()].abs().mean() / expected.abs().mean()
    assert error < (0.03 if dtype == torch.bfloat16 else 0.004)


@pytest.mark.parametrize("family", [name for name in FAMILIES if tiny.CHECKPOINTS[name].zeroes_padding])
def test_padded_tokens_leave_as_zeros(converted: Convert, family: str) -> None:
    model = load(converted(family, head="Model"), "Model")
    ids, mask = batch(rows=2, length=20)
    hidden = model(ids, attention_mask=mask, output_hidden_states=True)
    assert (hidden.last_hidden_state[mask == 0] == 0).all()
    assert torch.equal(hidden.hidden_states[-1], hidden.last_hidden_state)


@torch.no_grad()
@pytest.mark.parametrize("layer", LAYERS)
def test_a_second_name_of_the_bias_and_old_buffers_are_ignored(tmp_path: Path, layer: str) -> None:
    """As ``.bin`` checkpoints have them: the tied tensors once more, and buffers."""
    family, changes = LAYERS[layer]
    source = tiny.ENCODERS[family](tmp_path / "source", 4, fmt="bin", **changes)
    file = source / "pytorch_model.bin"
    state = torch.load(file, weights_only=True)
    state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"]
    if "cls.predictions.bias" in state:
        state["cls.predictions.decoder.bias"] = state["cls.predictions.bias"]
    state["bert.embeddings.position_ids"] = torch.arange(16)[None]
    torch.save(state, file)
    convert(source, tmp_path / "out", method="none", verify=False)
    model, info = AutoModelForMaskedLM.from_pretrained(
        tmp_path / "out", trust_remote_code=True, output_loading_info=True
    )
    assert not info["missing_keys"]
    ids, mask = batch(rows=2, length=20)
    expected = reference(tmp_path / "out", family, ids, mask, "MaskedLM")
    assert_logits(model.eval()(ids, attention_mask=mask).logits, expected, mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_layers_do_not_load_unnoticed(tmp_path: Path, family: str) -> None:
    """Without the code, transformers takes its own BERT; docs/families.md tells the symptom."""
    source = tiny.ENCODERS[family](tmp_path / "source", 12, head="Model")
    stock, info = AutoModel.from_pretrained(source, output_loading_info=True)
    assert type(stock).__name__ == "BertModel"
    assert any("intermediate.dense" in name for name in info["missing_keys"])
    convert(source, tmp_path / "out", method="none", verify=False)
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=False)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_an_untied_decoder(tmp_path: Path, family: str) -> None:
    source = tiny.ENCODERS[family](tmp_path / "source", 4, fmt="bin", tie_word_embeddings=False)
    file = source / "pytorch_model.bin"
    state = torch.load(file, weights_only=True)
    state["cls.predictions.decoder.weight"] = 2 * state["bert.embeddings.word_embeddings.weight"]
    torch.save(state, file)
    convert(source, tmp_path / "out", method="none", verify=False)
    model = load(tmp_path / "out")
    ids, _ = batch(rows=1, length=20)
    bias = prediction_bias(model)
    tied = torch.as_tensor(reference(tmp_path / "out", family, ids, None, "MaskedLM"))
    assert_logits(model(ids).logits, 2 * (tied - bias) + bias)


@torch.no_grad()
@pytest.mark.parametrize("layer", LAYERS)
def test_saving_and_loading_again(converted: Convert, tmp_path: Path, layer: str) -> None:
    family, changes = LAYERS[layer]
    model = load(converted(family, **changes))
    ids, mask = batch(rows=2, length=20)
    model.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    assert torch.equal(again(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_device_map(converted: Convert, family: str) -> None:
    folder = converted(family)
    ids, mask = batch(rows=2, length=20)
    mapped = load(folder, device_map="cpu")(ids, attention_mask=mask).logits
    assert torch.equal(mapped, load(folder)(ids, attention_mask=mask).logits)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_head_s_bias_starts_at_zero(converted: Convert, family: str) -> None:
    """The embedding models have no prediction head; what transformers makes up must not be garbage."""
    folder = converted(family, head="Model")
    model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
    assert (prediction_bias(model) == 0).all()
    assert model.cls.predictions.transform.dense.weight.abs().max() < 1


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_larger_vocabulary(converted: Convert, family: str) -> None:
    model = load(converted(family))
    ids, mask = batch(rows=2, length=20)
    before = model(ids, attention_mask=mask).logits
    model.resize_token_embeddings(tiny.VOCAB_SIZE + 7)
    after = model(ids, attention_mask=mask).logits
    assert after.shape[-1] == tiny.VOCAB_SIZE + 7
    assert torch.allclose(after[..., : tiny.VOCAB_SIZE], before, atol=1e-5)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_are_those_of_plain_attention(
    converted: Convert, layer: str, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, changes = LAYERS[layer]
    folder = converted(family, 12, "ntk-position" if blocks else "ntk", hidden_dropout_prob=0.0, **changes)
    fused = load(folder).train()
    monkeypatch.setattr(attention_module(fused), "CPU_BLOCK", 16)
    ids, mask = batch(rows=2, length=40)
    assert_same_gradients(
        gradients(fused, ids, mask),
        gradients(load(folder, attn_implementation="eager").train(), ids, mask),
    )


def attention_module(model: Any) -> Any:
    """The copy of ntk_symmetric.py that the loaded repository runs."""
    return sys.modules[type(model).__module__.rpartition(".")[0] + ".ntk_symmetric"]


def gradients(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same_gradients(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, gradient in first.items():
        scale = max(1.0, gradient.abs().max().item())
        assert (gradient - second[name]).abs().max().item() <= 1e-4 * scale, name


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_gradient_checkpointing(converted: Convert, layer: str, reentrant: bool) -> None:
    family, changes = LAYERS[layer]
    model = load(converted(family, 4, "ntk-position", hidden_dropout_prob=0.0, **changes)).train()
    ids, mask = batch(rows=2, length=40)
    expected = gradients(model, ids, mask)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    runs: list[int] = []
    model.bert.encoder.layer[0].attention.output.dense.register_forward_pre_hook(lambda *_: runs.append(1))
    assert_same_gradients(gradients(model, ids, mask), expected)
    assert len(runs) == 2, "the first layer was not run again in the backward pass"


@pytest.mark.parametrize("key", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
@pytest.mark.parametrize("layer", LAYERS)
def test_dropout_acts_in_training_only(converted: Convert, layer: str, key: str) -> None:
    family, changes = LAYERS[layer]
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = load(converted(family, 4, "ntk", **{**changes, **none, key: 0.5}))
    ids, mask = batch(rows=2, length=40)
    with torch.no_grad():
        first, second = (model(ids, attention_mask=mask).logits for _ in range(2))
        assert torch.equal(first, second)
        model.train()
        first, second = (model(ids, attention_mask=mask).logits for _ in range(2))
        assert not torch.allclose(first, second, atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_adapter(converted: Convert, tmp_path: Path, family: str) -> None:
    folder = converted(family)
    ids, mask = batch(rows=2, length=40)
    targets = [*tiny.CHECKPOINTS[family].queries]
    model = get_peft_model(load(folder), LoraConfig(target_modules=targets, r=4))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval().save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        again = PeftModel.from_pretrained(load(folder), tmp_path / "adapter").eval()
        assert_logits(again(input_ids=ids, attention_mask=mask).logits, expected, mask)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["ntk", "ntk-position"])
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_in_one_graph(
    converted: Convert, family: str, scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(converted(family, 4, scaling))
    monkeypatch.setattr(attention_module(model), "BLOCK", 16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (40, 43):
        ids, mask = batch(rows=2, length=length)
        assert_logits(compiled(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits, mask)


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
        ids = tokenizer(text, return_tensors="np")["input_ids"][:, : options.get("max_length", 99)]
        mean = reference(folder, "jina_bert", torch.from_numpy(ids), None, "Model")[0].mean(axis=0)
        if options.get("normalize_embeddings"):
            mean = mean / np.linalg.norm(mean)
        assert np.abs(embedding - mean).max() < 1e-5
    assert np.array_equal(model.encode(texts[1], **options).shape, (32,))
    assert isinstance(model.encode(texts, convert_to_tensor=True), torch.Tensor)
    assert isinstance(model.encode(texts, convert_to_numpy=False), list)


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
    ("scaling", "dtype"), dealt(SCALED, [torch.float32, torch.bfloat16, torch.float16], each=1), ids=str
)
def test_attention_at_long_range(scaling: str, dtype: torch.dtype) -> None:
    """Only the format's own rounding is left, over several blocks and an odd length."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 6, 1501, 16, dtype=dtype) for _ in range(3))
    mask = torch.ones(2, 1501, dtype=torch.long)
    mask[0, :700] = 0
    attention = SymmetricAttention(6, 0.0).eval()
    plan = plan_attention(
        Alibi(stock_slopes(6), SCALED[scaling]), torch.zeros(2, 1501, 1), mask, eager=False
    )[0]
    output, weights = attention.attend(query, key, value, plan)
    assert weights is None
    expected = exact(query, key, value, plan.slopes, mask.bool())
    error = (output.double() - expected)[mask.bool()]
    limit = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    assert error.norm() / expected[mask.bool()].norm() < limit


@torch.no_grad()
def test_no_bias_tensor_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gets a view on 2 L - 1 numbers a head, and of blocks one at a time."""
    shapes, sdpa = [], torch.nn.functional.scaled_dot_product_attention

    def spy(query: torch.Tensor, *args: Any, attn_mask: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        shapes.append((tuple(attn_mask.shape), attn_mask.untyped_storage().nbytes() // 4))
        return sdpa(query, *args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(ntk_symmetric.F, "scaled_dot_product_attention", spy)
    states = torch.randn(1, 6, 500, 8)
    for scaling in ("static", "position"):
        alibi = Alibi(stock_slopes(6), SCALED[scaling])
        plan = plan_attention(alibi, torch.zeros(1, 500, 1), None, eager=False)[0]
        SymmetricAttention(6, 0.0).eval().attend(states, states, states, plan)
    block = ntk_symmetric.CPU_BLOCK
    assert shapes[0] == ((1, 6, 500, 500), 6 * 999)
    assert [shape for shape, _ in shapes[1:]] == [(1, 6, rows, 500) for rows in (block, block, block, 116)]


def test_attention_dropout_keeps_the_mean() -> None:
    attention = SymmetricAttention(4, 0.5).train()
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 4, 24, 8) for _ in range(3))
    plan = plan_attention(Alibi(stock_slopes(4)), torch.zeros(1, 24, 1), None, eager=False)[0]
    mean = sum(attention.attend(query, key, value, plan)[0] for _ in range(4000)) / 4000
    expected = attention.eval().attend(query, key, value, plan)[0]
    assert (mean - expected).abs().max() < 0.1
