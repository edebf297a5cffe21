"""Refact-1.6B (Small Magellanic Cloud AI): code models with 32 query heads and one key and value head.

Sources: for the first revision, the model's own code (github.com/sycomix/refact, commit 35834ba,
hf/modeling_gpt_refact.py and hf/configuration_gpt_refact.py); for the current revision, its ports (vLLM's,
llama.cpp's converter, and one to mlx that names it as its source) and the fine-tuning code of
github.com/smallcloudai/refact, which splits attn.kv and names the modules. They agree on this:

* The norms are LayerNorm without bias (llama.cpp's converter stores the epsilon as that of an RMSNorm; the
  original, the model card and the other ports have LayerNorm). There are no other biases either. Only the
  first revision's ``ln_f`` has a bias, which its own conversion leaves at zero. ``ln_f`` and lm_head are
  outside the backbone, and the head is not tied, although no config says so.
* The scale is 1 / sqrt(head size). The bias is +slope * (key position + 1), which in a softmax equals
  -slope * distance. With a cache the first revision has no causal mask, so it takes one new token at a time.
* The MLP is silu(gate) * up; its width is two thirds of ``n_inner`` (4 * n_embd if null), rounded up
  to a multiple of 256. ``activation_function``, the dropouts, ``scale_attn_weights`` and the options
  of the softmax in float32 are left over from GPTBigCode, whose config was copied: no code reads them, or
  they only affect precision. (In half precision the first revision would multiply the scores by the
  layer's number, but that path calls a method that does not exist.)
* The first revision stores attn.q, attn.k, attn.v, mlp.linear_1 (gate) and mlp.linear_3 (up), and its
  config class has the model_type ``gpt_bigcode``. The current one, ``gpt_refact``, stores attn.q, attn.kv
  (k, then v) and mlp.gate_up_proj (gate, then up). Their configs do not differ; their tensors' names do.

Trained length: 4096, according to the model card of smallcloudai/Refact-1_6B-fim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converter.config import Config, count
from converter.errors import SourceError
from converter.families.family import Family, Trained, check_options
from converter.source.checkpoint import Tensor

PACKED = "packed_projections"
"""Key of a converted config: whether key and value share one stored tensor, and gate and up another."""


def claims(config: Config) -> bool:
    """Whether it has Refact's model_type or, as in the first revision, StarCoder's with Refact's class."""
    named = config.get("architectures")
    ours = isinstance(named, list) and any(str(name).startswith("GPTRefact") for name in named)
    return config.get("model_type") == "gpt_refact" or (config.get("model_type") == "gpt_bigcode" and ours)


def check_supported(config: Config) -> None:
    check_options({"multi_query": True, **config}, {"multi_query": (True,)}, "a Refact")
    if not isinstance(config.get(PACKED, True), bool):
        raise SourceError(f"config.json: {PACKED} is {config[PACKED]!r}, expected true or false")
    count(config, "n_inner", default=1)


def rewrite(config: dict[str, Any]) -> dict[str, Any]:
    # transformers' default of the last key, true, never reached the head.
    return {PACKED: True, **config, "tie_word_embeddings": False}


def settings_from_tensors(config: Config, tensors: Mapping[str, Tensor]) -> dict[str, Any]:  # noqa: ARG001
    """Which of the two layouts is stored, and whether the last norm has a bias."""
    packed = not any(name.endswith("attn.k.weight") for name in tensors)
    return {PACKED: packed, "final_norm_bias": "ln_f.bias" in tensors}


FAMILY = Family(
    name="refact",
    title="Refact-1.6B",
    model_types=("gpt_refact",),
    class_prefixes=("GPTRefact",),
    check_supported=check_supported,
    checkpoints=(Trained(4096, "card", ("smallcloudai/Refact-1_6B-fim",)),),
    sizes=("n_head", "n_embd", "n_layer"),
    spellings={
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
    },
    kv_heads=lambda config, heads: 1,
    claims=claims,
    length_hint="n_positions",
    rewrite=rewrite,
    settings_from_tensors=settings_from_tensors,
    embeddings="wte.weight",
    stock=False,
    examples=("smallcloudai/Refact-1_6B-fim",),
)
