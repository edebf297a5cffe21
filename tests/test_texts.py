"""Encoders without padding: texts one after another, with every attention function that takes them.

The reference computes each text alone, in float64, and knows neither padding nor packing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DataCollatorWithFlattening

from templates import ntk_symmetric, ntk_symmetric_sdpa, ntk_texts
from templates.ntk_alibi import Alibi, stock_slopes
from tests import flash_stand_in, runners, tiny
from tests.dealt import dealt
from tests.patched import Convert, assert_logits, load
from tests.runners import LAYERS, MakeRunner, auto_class

LENGTHS = (23, 9, 1, 40)
TOKENS = sum(LENGTHS)
BOUNDS = [0, 23, 32, 33, 73]
"""Of texts in one row, without padding."""
FLASH = "flash_attention_2"
FUNCTIONS = ("sdpa", FLASH, "flex_attention")
SCALINGS = ("ntk", "ntk-length", "ntk-position", "fitted", "fitted-length")


def padded(side: str = "right", lengths: tuple[int, ...] = LENGTHS) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and a mask [4, 40] of four texts in rows of their own."""
    ids = torch.from_numpy(tiny.token_ids(len(lengths), max(lengths)))
    return ids, torch.from_numpy(tiny.padding_mask([*lengths], side, max(lengths)))


def in_one_row() -> dict[str, Any]:
    """The same texts in one row, as transformers' collator and sentence-transformers pack them."""
    ids, _ = padded()
    rows = [{"input_ids": row[:length].tolist()} for row, length in zip(ids, LENGTHS, strict=True)]
    packed = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(rows)
    packed.pop("labels")
    return dict(packed)


def expected(folder: Path, name: str) -> np.ndarray:
    """Logits [73, vocabulary] of the four texts, each alone, one after another."""
    ids, _ = padded()
    texts = [row[None, :length].numpy() for row, length in zip(ids, LENGTHS, strict=True)]
    return np.concatenate([runners.expected(folder, name, text)[0] for text in texts])


def layer_inputs(model: Any) -> list[tuple[int, ...]]:
    """The shapes [rows, tokens, hidden] that the first layer will be given."""
    shapes: list[tuple[int, ...]] = []
    layer = model.base_model.encoder_layers[0]
    layer.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(map(int, inputs[0].shape))))
    return shapes


@torch.no_grad()
@pytest.mark.parametrize(
    ("layer", "scaling", "function"),
    [
        case
        for case in dealt(LAYERS, SCALINGS, FUNCTIONS, each=3)
        if case.values[1:] != ("ntk-position", FLASH)
    ],
)
def test_each_text_is_as_it_is_alone(
    converted: Convert, runner: MakeRunner, layer: str, scaling: str, function: str
) -> None:
    name, changes = LAYERS[layer]
    folder = converted(name, 12, scaling, **changes)
    model: Any = runner(function, folder, name).model  # type: ignore[attr-defined]
    shapes = layer_inputs(model)
    right = expected(folder, name)
    ids, mask = padded()
    found = model(ids, attention_mask=mask).logits[mask.bool()]
    assert_logits(found[None], right[None])
    packed = model(**in_one_row()).logits
    assert_logits(packed, right[None])
    # Without padding, the layers get the same numbers.
    assert torch.equal(packed[0], found)
    width = model.config.hidden_size
    assert shapes == [(1, TOKENS, width)] * 2


IN_ROWS = (4, 40)
LEFT_OUT = (1, TOKENS)


@pytest.mark.parametrize(
    ("how", "options", "side", "shape"),
    [
        ("inference", {}, "right", LEFT_OUT),
        ("inference", {"output_hidden_states": True}, "right", LEFT_OUT),
        ("inference", {"output_attentions": True}, "right", IN_ROWS),
        ("inference", {}, "left", IN_ROWS),
        ("inference", {}, "gap", IN_ROWS),
        ("inference", {}, "an empty row", IN_ROWS),
        ("gradients", {}, "right", IN_ROWS),
        ("training mode", {}, "right", IN_ROWS),
        ("eager", {}, "right", IN_ROWS),
        ("jit", {}, "right", IN_ROWS),
        ("compiled", {}, "right", IN_ROWS),
        ("exported", {}, "right", IN_ROWS),
        ("fx", {}, "right", IN_ROWS),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_when_padding_is_left_out(
    converted: Convert, how: str, options: dict[str, Any], side: str, shape: tuple[int, int]
) -> None:
    """Always with the same result; graphs are made for other rows, too, and also compute those."""
    model = load(converted("jina_bert", 4, "ntk"), auto_class("jina_bert"))
    ids, mask = padded("left" if side == "left" else "right")
    if side == "gap":
        mask[3, 5:9] = 0
    if side == "an empty row":
        mask[1] = 0
    right = model(ids, attention_mask=mask, output_attentions=True).logits.detach()
    shapes = layer_inputs(model)
    if how == "training mode":
        model.train()
        without_dropout(model)
    with torch.enable_grad() if how == "gradients" else torch.no_grad():
        found = PASSES.get(how, plain)(model, ids, mask, options)
    real = mask.bool()
    assert torch.allclose(found[real], right[real], atol=1e-4)
    if how not in ("jit", "compiled", "exported"):  # graphs run no hooks
        assert {found[:2] for found in shapes} == {shape}


def without_dropout(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0


def plain(model: Any, ids: torch.Tensor, mask: torch.Tensor, options: dict[str, Any]) -> Any:
    return model(ids, attention_mask=mask, **options).logits


def eager(model: Any, ids: torch.Tensor, mask: torch.Tensor, _: Any) -> Any:
    model.set_attn_implementation("eager")
    return model(ids, attention_mask=mask).logits


def jit(model: Any, ids: torch.Tensor, mask: torch.Tensor, _: Any) -> Any:
    model.config.return_dict = False
    traced = torch.jit.trace(model, (ids[:2], mask[:2]), check_trace=False, strict=False)
    return traced(ids, mask)[0]


def compiled(model: Any, ids: torch.Tensor, mask: torch.Tensor, _: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend="eager")(ids, attention_mask=mask).logits


def exported(model: Any, ids: torch.Tensor, mask: torch.Tensor, _: Any) -> Any:
    program = torch.export.export(model, (ids,), {"attention_mask": torch.ones_like(mask)})
    return program.module()(ids, attention_mask=mask).logits


def fx(model: Any, ids: torch.Tensor, mask: torch.Tensor, _: Any) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    def run(ids: torch.Tensor, mask: torch.Tensor) -> Any:
        return model(ids, attention_mask=mask).logits

    return make_fx(run)(ids, torch.ones_like(mask))(ids, mask)


PASSES: dict[str, Callable[..., Any]] = {
    "eager": eager,
    "jit": jit,
    "compiled": compiled,
    "exported": exported,
    "fx": fx,
}


@torch.no_grad()
@pytest.mark.parametrize("head", ["Model", "MaskedLM", "TokenClassification"])
@pytest.mark.parametrize("name", tiny.ENCODERS)
def test_padded_tokens_are_zero_in_the_hidden_states(converted: Convert, name: str, head: str) -> None:
    """Heads compute these zeros like other hidden states."""
    model = load(converted(name, 4, "ntk", head=head), auto_class(name, head))
    ids, mask = padded()
    output = model(ids, attention_mask=mask, output_hidden_states=True)
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    for states in output.hidden_states:
        assert states.shape == (*ids.shape, model.config.hidden_size)
        assert (states[mask == 0] == 0).all()
        assert (states[mask == 1] != 0).any(-1).all()
    if head != "Model":
        at_padding = output.logits[mask == 0]
        assert at_padding.shape[-1] == output.logits.shape[-1]
        assert torch.allclose(at_padding, at_padding[:1].expand_as(at_padding))


@torch.no_grad()
@pytest.mark.parametrize("scaling", [None, "static", "length", "position"])
def test_accelerators_compute_what_cpus_do(scaling: str | None) -> None:
    """They take all texts at once, in rows with padding; with the same slopes for each query."""
    lengths = {"type": "ntk", "train_seq_len": 10, "dynamic": scaling}
    static = {"type": "ntk", "factor": 4.0}
    settings = {None: None, "static": static}.get(scaling, lengths)
    ids, mask = padded()
    torch.manual_seed(0)
    states = [torch.randn(1, 6, TOKENS, 8) for _ in range(3)]
    [plan] = ntk_symmetric.plan_symmetric_attention(
        Alibi(stock_slopes(6), settings), "sdpa", torch.zeros(*ids.shape, 1), mask
    )
    shared = (*states, plan.slopes, 8**-0.5, 0.0, plan.texts)
    assert torch.allclose(ntk_texts.in_padded_rows(*shared, {}), ntk_texts.text_by_text(*shared), atol=2e-6)


def test_layers_share_the_biases_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a size, and not where gradients need them again."""
    made: list[tuple[int, int]] = []
    make = ntk_symmetric_sdpa.block_bias

    def watch(slopes: torch.Tensor, start: int, stop: int, *args: Any) -> torch.Tensor:
        made.append((start, stop))
        return make(slopes, start, stop, *args)

    monkeypatch.setattr(ntk_symmetric_sdpa, "block_bias", watch)
    states = [torch.randn(1, 6, 40, 8) for _ in range(3)]
    scaling = {"type": "ntk", "train_seq_len": 10, "dynamic": "position"}
    blocks = [(0, 16), (16, 32), (32, 40)]
    size = 6 * 40 * 40 * 4
    results = []
    for largest, gradients, times in ((size, False, 1), (size - 1, False, 2), (size, True, 2)):
        monkeypatch.setattr(ntk_symmetric_sdpa, "LARGEST_KEPT", largest)
        monkeypatch.setattr(ntk_symmetric_sdpa, "CPU_BLOCK", 16)
        [plan] = ntk_symmetric.plan_symmetric_attention(
            Alibi(stock_slopes(6), scaling), "sdpa", torch.zeros(1, 40, 1)
        )
        made.clear()
        with torch.enable_grad() if gradients else torch.no_grad():
            for _ in range(2):
                results.append(ntk_symmetric.SymmetricAttention(6, 0.0).attend(*states, plan)[0])
        assert made == blocks * times
    for result in results:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_bias_that_is_copied_is_the_one_that_is_computed(rows: int, dtype: torch.dtype) -> None:
    slopes = torch.rand(rows, 6, 1)
    computed = ntk_symmetric_sdpa.distance_bias(slopes, torch.arange(5, 16), 37).to(dtype)
    assert torch.equal(ntk_symmetric_sdpa.block_bias(slopes, 5, 16, 37, dtype), computed)


# FlashAttention and flex_attention


@pytest.mark.parametrize("scaling", ["ntk", "ntk-length"])
def test_what_flash_attention_is_called_with(
    converted: Convert, monkeypatch: pytest.MonkeyPatch, scaling: str
) -> None:
    """Slopes for all texts or for each, dropout in training only; gradients are those of sdpa."""
    folder = converted("mosaic_bert", 12, scaling, attention_probs_dropout_prob=0.0)
    calls = flash_stand_in.install(monkeypatch, FLASH)
    sdpa = load(folder, auto_class("mosaic_bert")).train()
    flash = load(folder, auto_class("mosaic_bert")).train()
    flash.config._attn_implementation = FLASH
    ids, mask = padded()
    labels = torch.where(mask.bool(), ids, -100)
    for model in (sdpa, flash):
        without_dropout(model)
        model(ids, attention_mask=mask, labels=labels).loss.backward()
    assert calls.varlen == [BOUNDS] * flash.config.num_hidden_layers
    assert not calls.plain
    found = dict(flash.named_parameters())
    for path, parameter in sdpa.named_parameters():
        scale = parameter.grad.abs().max().item()
        assert (parameter.grad - found[path].grad).abs().max() <= 1e-4 * scale, path


def test_dropout_of_attention(converted: Convert, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention drops weights while training, and only then; flex_attention cannot."""
    folder = converted("jina_bert", 12, "ntk", attention_probs_dropout_prob=0.5)
    flash_stand_in.install(monkeypatch, FLASH)
    runners.do_not_compile(monkeypatch)
    model = load(folder, auto_class("jina_bert"))
    ids, mask = padded()
    model.config._attn_implementation = FLASH
    first, second = (model(ids, attention_mask=mask).logits for _ in range(2))
    assert torch.equal(first, second)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    first, second = (model(ids, attention_mask=mask).logits for _ in range(2))
    assert not torch.allclose(first, second)
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="use sdpa"):
        model(ids, attention_mask=mask)


def test_flash_attention_without_its_package(converted: Convert) -> None:
    """An error of transformers, and never another attention function in silence."""
    with pytest.raises(ImportError, match="FlashAttention2"):
        load(converted("jina_bert", 4, "ntk"), auto_class("jina_bert"), attn_implementation=FLASH)


CU_SEQ_LENS = torch.tensor(BOUNDS, dtype=torch.int32)
ONE_ROW = torch.arange(TOKENS)[None]
RESTARTS = torch.cat([torch.arange(length) for length in LENGTHS])[None]


@torch.no_grad()
@pytest.mark.parametrize(
    ("function", "scaling", "inputs", "words"),
    [
        ("sdpa", "ntk", {"position_ids": RESTARTS * 2}, "start again at 0"),
        ("sdpa", "ntk", {"position_ids": RESTARTS + 1}, "start again at 0"),
        ("sdpa", "ntk", {"position_ids": RESTARTS[:, 1:]}, "must be"),
        ("sdpa", "ntk", {"position_ids": ONE_ROW.expand(2, -1)}, "must be"),
        ("sdpa", "ntk", {"position_ids": RESTARTS, "attention_mask": "between"}, "at their ends only"),
        ("sdpa", "ntk", {"cu_seq_lens_q": CU_SEQ_LENS}, "needs position_ids"),
        ("sdpa", "ntk", {"cu_seq_lens_q": CU_SEQ_LENS, "position_ids": ONE_ROW}, "disagree"),
        ("sdpa", "ntk", {"cu_seq_lens_q": CU_SEQ_LENS[1:], "position_ids": RESTARTS}, "disagree"),
        ("eager", "ntk", {"position_ids": RESTARTS}, "use sdpa"),
        ("sdpa", "ntk", {"position_ids": RESTARTS, "output_attentions": True}, "use sdpa"),
        (FLASH, "ntk-position", {}, "--dynamic length"),
        *((function, "ntk", {"attention_mask": "left"}, "pad on the right") for function in FUNCTIONS[1:]),
        *((function, "ntk", {"attention_mask": "gap"}, "use sdpa") for function in FUNCTIONS[1:]),
    ],
)
def test_what_is_refused(
    converted: Convert,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    scaling: str,
    inputs: dict[str, Any],
    words: str,
) -> None:
    flash_stand_in.install(monkeypatch, FLASH)
    model = load(converted("jina_bert", 4, scaling), auto_class("jina_bert"))
    model.config._attn_implementation = function
    inputs = dict(inputs)
    if "attention_mask" in inputs:
        mask = torch.ones_like(ONE_ROW)
        mask[0, {"left": 0, "gap": 3, "between": BOUNDS[1] - 1}[inputs["attention_mask"]]] = 0
        inputs["attention_mask"] = mask
    with pytest.raises(ValueError, match=words):
        model(torch.ones_like(ONE_ROW), **inputs)


@torch.no_grad()
@pytest.mark.parametrize(
    ("function", "inputs", "words"),
    [
        (FLASH, {}, "use sdpa"),
        ("flex_attention", {}, "use sdpa"),
        ("sdpa", {"position_ids": RESTARTS}, "leave them out"),
    ],
)
def test_what_graphs_do_not_compute_is_refused(
    converted: Convert, function: str, inputs: dict[str, Any], words: str
) -> None:
    model = load(converted("jina_bert", 4, "ntk"), auto_class("jina_bert"))
    model.config._attn_implementation = function
    torch._dynamo.reset()
    with pytest.raises(Exception, match=words):
        torch.compile(model, fullgraph=True, backend="eager")(ONE_ROW, **inputs)


@torch.no_grad()
def test_rows_with_gaps_are_one_text_if_positions_go_on(converted: Convert) -> None:
    """By counting the real tokens or all of them, from 0 or another number."""
    model = load(converted("jina_bert", 4, "ntk"), auto_class("jina_bert"))
    ids, mask = padded("left")
    mask[3, 5:9] = 0
    right = model(ids, attention_mask=mask).logits
    for positions in (torch.arange(ids.shape[1])[None], mask.cumsum(-1) - 1, mask.cumsum(-1) + 1):
        assert torch.equal(model(ids, attention_mask=mask, position_ids=positions).logits, right)


def test_the_last_layer_may_be_on_another_device() -> None:
    texts = ntk_texts.find_texts(padded()[1].bool(), None)
    assert texts is not None
    assert texts.unpack(torch.empty(1, TOKENS, 3, device="meta")).device.type == "meta"


@torch.no_grad()
@pytest.mark.parametrize("name", tiny.ENCODERS)
def test_no_rows_and_no_tokens(converted: Convert, name: str) -> None:
    model = load(converted(name, 4, "ntk", head="Model"), auto_class(name, "Model"))
    none = torch.zeros(0, 5, dtype=torch.long)
    assert model(none, attention_mask=none).last_hidden_state.shape == (0, 5, model.config.hidden_size)


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(300, 5, 128, 1, 129), (7, 7), (1024,)])
def test_the_blocks_that_flex_attention_skips(lengths: tuple[int, ...]) -> None:
    """A pair of tokens of one text is in a block that counts, and blocks far from all of a text's are not."""
    mask = torch.ones(1, sum(lengths), dtype=torch.bool)
    starts = torch.zeros_like(mask)
    starts[0, torch.tensor([0, *lengths]).cumsum(0)[:-1]] = True
    texts = ntk_texts.find_texts(mask, starts)
    assert texts is not None
    same = texts.numbers[:, None] == texts.numbers
    needed = torch.nn.functional.pad(same, [0, -len(same) % 128] * 2).unfold(0, 128, 128).unfold(1, 128, 128)
    assert torch.equal(ntk_texts.text_mask(texts).to_dense()[0, 0].bool(), needed.flatten(2).any(-1))


@torch.no_grad()
@pytest.mark.skipif(
    sys.modules["transformers"].__version__.startswith("4."), reason="sentence-transformers packs for 5"
)
def test_sentence_transformers_packs_for_flash_attention(
    converted: Convert, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers", minversion="6")
    folder = converted("jina_bert", 12, "ntk-length", head="Model")
    calls = flash_stand_in.install(monkeypatch, FLASH)
    encoder = sentence_transformers.SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    texts = ["w5 w6 w7 w8 w9 w10 w11 w12", "w20", " ".join(f"w{number}" for number in range(5, 60))]
    right = encoder.encode(texts)
    encoder[0].auto_model.config._attn_implementation = FLASH
    encoder[0].unpad_inputs = None
    assert encoder[0].can_flatten_inputs
    found = encoder.encode(texts)
    assert calls.varlen
    assert np.abs(found - right).max() < 1e-5
