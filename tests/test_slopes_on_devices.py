"""The slopes on a device: copied there once, and never wrong after copying, tracing or casting a model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel

from templates.ntk_alibi import Alibi, stock_slopes
from tests import tiny
from tests.dealt import dealt
from tests.patched import FAMILIES, Convert, assert_logits, batch, load

DYNAMIC = {"type": "ntk", "train_seq_len": 16, "dynamic": "position"}


class Uploads(TorchDispatchMode):
    """Counts the tensors that are made from Python numbers."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.lift_fresh.default
        return func(*args, **(kwargs or {}))


def uploads(run: Any) -> int:
    with Uploads() as mode:
        run()
    return mode.count


def inputs(family: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Ids, mask, and keywords with the mask. A new cache would make empty tensors of its own."""
    ids, mask = batch(rows=2, length=40)
    return ids, mask, {"attention_mask": mask, **({"use_cache": False} if family in FAMILIES else {})}


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "scaling"),
    [
        *dealt(["bloom", "falcon", *tiny.ENCODERS], ["none", "ntk", "ntk-length", "ntk-position"], each=1),
        ("mpt", "concave"),
    ],
)
def test_slopes_are_uploaded_once(converted: Convert, family: str, scaling: str) -> None:
    model = load(converted(family, 12, scaling), AutoModel)
    ids, mask, keywords = inputs(family)
    assert uploads(lambda: model(ids, **keywords)) == 1
    assert uploads(lambda: model(ids, **keywords)) == 0
    assert uploads(lambda: model(ids, **keywords, output_attentions=True)) == 0
    if family in FAMILIES:
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
        longer = torch.cat([mask, mask[:, -1:]], dim=1)
        assert uploads(lambda: model(ids[:, :1], attention_mask=longer, past_key_values=cache)) == 0


def test_each_device_has_its_own() -> None:
    alibi = Alibi(stock_slopes(6), DYNAMIC)
    for device in (torch.device("cpu"), torch.device("meta")):
        first = alibi.on(device)
        assert first is alibi.on(device)
        assert (first.shape, first.dtype, first.device) == ((2, 1, 1, 6, 1), torch.float32, device)
    values = [alibi.slopes, alibi.exponents]
    assert torch.equal(alibi.on(torch.device("cpu")).flatten(2), torch.tensor(values))


def test_threads_may_share_a_model() -> None:
    positions = torch.arange(40)[None]
    expected = Alibi(stock_slopes(6), DYNAMIC).slopes_at(positions)
    for _ in range(20):
        alibi = Alibi(stock_slopes(6), DYNAMIC)
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda _, alibi=alibi: alibi.slopes_at(positions), range(8)))
        assert all(torch.equal(result, expected) for result in results)


def test_inference_before_training(converted: Convert) -> None:
    """What is kept from inference is an ordinary tensor: one of inference mode has no place in training."""
    model = load(converted("bloom", 4, "ntk-position"))
    ids, mask = batch(rows=2, length=40)
    with torch.inference_mode():
        model(ids, attention_mask=mask)
    assert not model.base_model.alibi.on(ids.device).is_inference()
    model(ids, attention_mask=mask, labels=ids).loss.backward()


@torch.no_grad()
def test_casting_and_moving_a_model_keeps_them_exact(converted: Convert) -> None:
    model = load(converted("bloom", 12, "ntk"))
    ids, _ = batch(rows=1, length=40)
    model(ids)
    model.half().bfloat16().float()
    slopes = model.base_model.alibi.slopes_at(torch.arange(40)[None])
    assert torch.equal(slopes.flatten(1), torch.tensor(model.base_model.alibi.slopes))
    model.to("meta")
    assert model(ids.to("meta")).logits.device.type == "meta"


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "strict", "first"),
    dealt(["bloom", "refact", *tiny.ENCODERS], [True, False], [True, False], each=1),
)
def test_export(converted: Convert, family: str, strict: bool, first: bool) -> None:
    folder = converted(family)
    model, other = (load(folder, AutoModel) for _ in range(2))
    ids, mask, keywords = inputs(family)
    if first:
        model(ids, **keywords)
    exported = torch.export.export(model, (ids,), keywords, strict=strict).module()
    expected = other(ids, **keywords).last_hidden_state
    assert_logits(exported(ids, **keywords).last_hidden_state, expected, mask)
    assert_logits(model(ids, **keywords).last_hidden_state, expected, mask)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("family", ["bloom", "jina_bert"])
def test_compiling_after_a_plain_pass(converted: Convert, family: str) -> None:
    """The graph then takes the tensor that is there, and is not compiled again for the next call."""
    model = load(converted(family, scaling="ntk-position"), AutoModel)
    ids, mask, keywords = inputs(family)
    expected = model(ids, **keywords).last_hidden_state
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.compiler.set_stance("default"):
        assert_logits(compiled(ids, **keywords).last_hidden_state, expected, mask)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_logits(compiled(ids, **keywords).last_hidden_state, expected, mask)
