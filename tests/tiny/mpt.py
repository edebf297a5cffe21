"""A tiny MPT as transformers' own classes write it, and replit-code-v1_5-3b, which those classes cannot load.

Those classes know no ``attn_config.qk_ln``, ``expansion_ratio`` other than 4 or ``no_bias: false``, though
checkpoints have them: for these the tensors are added or resized.
"""

from __future__ import annotations

from typing import Any

from tests.tiny import replit, stock
from tests.tiny.layout import HEAD_DIM, Random, Tensors, Tiny


def sizes(num_heads: int) -> dict[str, Any]:
    return {"n_heads": num_heads, "d_model": HEAD_DIM * num_heads, "n_layers": 2}


def beyond_stock(config: Any, state: Tensors, random: Random) -> Tensors:
    """The tensors that an MPT with this config has and transformers' class lacks or shapes otherwise."""
    trunk = "transformer." if "transformer.wte.weight" in state else ""
    width, inner = config.d_model, int(config.expansion_ratio * config.d_model)
    shapes: dict[str, tuple[int, ...]] = {}
    for n in range(config.n_layers):
        block = f"{trunk}blocks.{n}"
        if config.attn_config.qk_ln:
            shapes[f"{block}.attn.q_ln.weight"] = (width,)
            shapes[f"{block}.attn.k_ln.weight"] = (width,)
        if config.expansion_ratio != 4:
            shapes[f"{block}.ffn.up_proj.weight"] = (inner, width)
            shapes[f"{block}.ffn.down_proj.weight"] = (width, inner)
    if not config.no_bias:
        for name, shape in ({name: tensor.shape for name, tensor in state.items()} | shapes).items():
            if name.startswith((f"{trunk}blocks.", f"{trunk}norm_f.")):
                shapes[name.removesuffix("weight") + "bias"] = (shape[0],)
    dtype = state[f"{trunk}wte.weight"].dtype
    return {name: stock.values(random, name, shape).to(dtype) for name, shape in shapes.items()}


TINY = Tiny(
    write=stock.factory("Mpt", sizes, beyond_stock),
    tensors=replit.TINY.tensors,  # the published ones are llm-foundry's own
    layers="n_layers",
    queries=("Wqkv",),
    dropout={"attn_config": {"attn_pdrop": 0.5}},
    variants={
        "bias-max-16": {"attn_config": {"alibi_bias_max": 16}},
        "softmax-scale": {"attn_config": {"softmax_scale": 0.2}},
        "clip-qkv": {"attn_config": {"clip_qkv": 1.0}},
        "qk-ln": {"attn_config": {"qk_ln": True}},
        "expansion": {"expansion_ratio": 2},
        "logit-scale": {"logit_scale": "inv_sqrt_d_model"},
        "biases": {"no_bias": False},
    },
    beyond_stock=("bias-max-16", "qk-ln", "expansion", "biases"),
    others={"replit": replit.TINY},
)
