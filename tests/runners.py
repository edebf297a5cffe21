"""Every way to run a converted model, and what it must compute: the float64 reference's numbers.

A runner has ``whole(ids, mask)``, the numbers of all tokens in one pass, and for a decoder
``pieces(ids, mask, ends)``, those of tokens that are given over a cache in pieces which end at ``ends``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, get_args

import numpy as np
import pytest
import torch
import transformers
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import DynamicCache, StaticCache, masking_utils
from transformers.integrations.flex_attention import WrappedFlexAttention

from converter.onnx.options import Profile
from tests import flash_stand_in, onnx_graphs, tiny
from tests.onnx_graphs import PROFILES, Array, Engine, build
from tests.patched import config_of, load
from tests.reference import ENCODERS, FAMILIES

FUNCTIONS = ("eager", "sdpa", "flash_attention_2", "flex_attention")
"""Attention functions of transformers that decoders take."""
HEADS = ("Model", "SequenceClassification", "TokenClassification", "QuestionAnswering")
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "-".join(filter(None, [name, layout])): (name, dict(changes))
    for name in tiny.ENCODERS
    for layout, changes in {"": {}, **tiny.CHECKPOINTS[name].layouts}.items()
}
"""Every layer of the encoders: name -> the tiny checkpoint, and changes of its config."""
BERT_LAYERS = {layer: pair for layer, pair in LAYERS.items() if tiny.CHECKPOINTS[pair[0]].bert}
OUTPUTS = {"Model": ["last_hidden_state"], "QuestionAnswering": ["start_logits", "end_logits"]}
"""Of the heads that give no ``logits``."""


class Runner(Protocol):
    chunk_rows: int
    """How many rows may be given several tokens at once over a cache."""

    def whole(self, ids: Array, mask: Array | None = None) -> Array: ...

    def pieces(self, ids: Array, mask: Array, ends: Sequence[int]) -> Array: ...


def auto_class(name: str, head: str | None = None) -> Any:
    """What loads a tiny checkpoint with such a head; by default, the language model's."""
    if head == "Model":
        return transformers.AutoModel
    head = head or ("MaskedLM" if name in tiny.ENCODERS else "CausalLM")
    return getattr(transformers, f"AutoModelFor{head}")


class Torch:
    """The model in transformers, with one of its attention functions."""

    chunk_rows = 2

    def __init__(self, model: Any, *, static: bool = False, training: bool = False):
        self.model, self.static, self.training = model, static, training

    def run(self, ids: Array, mask: Array | None = None, **options: Any) -> Any:
        with torch.set_grad_enabled(self.training):
            return self.model(
                torch.from_numpy(ids),
                attention_mask=None if mask is None else torch.from_numpy(mask),
                **{
                    name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v
                    for name, v in options.items()
                },
            )

    def whole(self, ids: Array, mask: Array | None = None, **options: Any) -> Array:
        output = self.run(ids, mask, **options)
        if "start_logits" in output:
            return numbers(torch.stack([output.start_logits, output.end_logits], dim=-1))
        return numbers(output.logits if "logits" in output else output.last_hidden_state)

    def pieces(self, ids: Array, mask: Array, ends: Sequence[int]) -> Array:
        cache = StaticCache(config=self.model.config, max_cache_len=64) if self.static else DynamicCache()
        return np.concatenate(
            [
                self.whole(ids[:, start:end], mask[:, :end], past_key_values=cache, use_cache=True)
                for start, end in pairwise((0, *ends))
            ],
            axis=1,
        )


class Graph:
    """Its ONNX graph under onnxruntime; torch has no part in it."""

    def __init__(self, path: Path, chunk_rows: int):
        self.engine, self.chunk_rows = Engine(path), chunk_rows
        self.inputs = {value.name for value in self.engine.session.get_inputs()}
        self.outputs = [value.name for value in self.engine.session.get_outputs()]

    def whole(self, ids: Array, mask: Array | None = None) -> Array:
        mask = np.ones_like(ids) if mask is None else mask
        if self.engine.caches:
            return self.engine.step(ids, mask)[0]
        feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        found = self.engine.session.run(None, {name: feed[name] for name in self.inputs})
        return by_token(np.stack(found, axis=-1) if len(found) == 2 else found[0])

    def pieces(self, ids: Array, mask: Array, ends: Sequence[int]) -> Array:
        return self.engine.steps(ids, mask, ends)


def numbers(tensor: torch.Tensor) -> Array:
    return by_token(tensor.detach().double().numpy())


def by_token(array: Array) -> Array:
    """[rows, tokens, any]; a classifier of texts has one token."""
    return array if array.ndim == 3 else array[:, None]


MakeRunner = Callable[..., Runner]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> MakeRunner:
    """``runner(how, folder, name, head)``: a converted tiny checkpoint, run in one way.

    ``how`` is an attention function of transformers, "training" or "static" (sdpa with gradients, or with a
    static cache), or a profile of ONNX.
    """

    def make(how: str, folder: Path, name: str, head: str | None = None, dtype: str = "fp32") -> Runner:
        if how in PROFILES:
            profile: Profile = next(each for each in get_args(Profile) if each == how)
            path = build(folder, profile, dtype, name=f"{how}-{dtype}.onnx")
            # onnxruntime's GroupQueryAttention takes one row only.
            return Graph(path, chunk_rows=1 if how == "ort" else 2)
        kinds = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
        model = load(folder, auto_class(name, head), dtype=kinds[dtype])
        if how.startswith("flash"):
            flash_stand_in.install(monkeypatch, how)
        if how == "flex_attention":
            do_not_compile(monkeypatch)
        if how in FUNCTIONS:  # transformers' method looks for a GPU where it is FlashAttention's
            model.config._attn_implementation = how
        return Torch(model, static=how == "static", training=how == "training")

    return make


def do_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers compiles flex_attention and its masks, for half a minute and again for other shapes."""

    def create(*arguments: Any, _compile: bool = False, **options: Any) -> Any:
        return create_block_mask(*arguments, **options)

    monkeypatch.setattr(masking_utils, "create_block_mask", create)
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda _: flex_attention)
    # Without a GPU it is not fused; torch would trace it anew for each shape all the same.
    monkeypatch.setattr(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    # One line of advice: to compile it.
    monkeypatch.setattr(flex_module, "_warn_once", lambda *_, **__: None, raising=False)


def expected(
    folder: Path,
    name: str,
    ids: Array,
    mask: Array | None = None,
    *,
    head: str | None = None,
    ends: Sequence[int] = (),
) -> Array:
    """The reference's numbers of a converted tiny checkpoint; ``ends`` as in ``onnx_graphs.expected``."""
    if head is None and name in FAMILIES:
        return onnx_graphs.expected(folder, name, ids, mask, ends)
    config, (_, tensors) = config_of(folder), tiny.read(folder)
    if name in ENCODERS:
        return by_token(ENCODERS[name].logits(config, tensors, ids, mask, head or "MaskedLM"))
    hidden = FAMILIES[name].trunk(config, tensors, ids, mask).hidden
    if head == "Model":
        return hidden
    layer = {"SequenceClassification": "score", "TokenClassification": "classifier"}.get(head, "qa_outputs")
    scores = hidden @ tensors[f"{layer}.weight"].T
    if head != "SequenceClassification":
        return scores + tensors[f"{layer}.bias"]
    last = [np.flatnonzero(row != tiny.PAD)[-1] for row in ids]
    return scores[np.arange(len(ids)), last][:, None]
