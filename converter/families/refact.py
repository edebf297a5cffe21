"""Refact-1.6B (Small Magellanic Cloud AI): code models with 32 query heads and one key and value head.

Facts from the first revision of the model's own code (github.com/sycomix/refact, commit 35834ba,
hf/modeling_gpt_refact.py and hf/configuration_gpt_refact.py) and, for the present revision, from its
ports (vLLM's, llama.cpp's converter, one to mlx that names it as its source) and the fine-tuning code of
github.com/smallcloudai/refact, which splits attn.kv and names the modules. They agree:

* LayerNorm without bias, no biases anywhere (llama.cpp's converter stores the epsilon as RMSNorm's; the
  original, the model card and the other ports have LayerNorm; the first revision's ``ln_f`` has a bias
  that its own conversion leaves at zero). ``ln_f`` and lm_head stand outside the trunk, and the head is
  not tied, although no config says so.
* Scale 1 / sqrt(head size). The bias is +slope * (key position + 1), which is -slope * distance to a
  softmax. The first revision has no causal mask with a cache: it takes one new token at a time.
* The first revision's class gives ``ln_f``, and no other norm, a bias; its conversion leaves that at zero.
* The MLP is silu(gate) * up; its width is two thirds of ``n_inner`` (4 * n_embd if null), rounded up
  to a multiple of 256. ``activation_function``, the dropouts, ``scale_attn_weights`` and the options
  of the softmax in float32 are GPTBigCode's, which the config was copied from: nothing reads them or
  they concern the precision alone. (In half precision the first revision would multiply the scores by
  the layer's number, but that path ends in a method that does not exist.)
* The first revision stores attn.q, attn.k, attn.v, mlp.linear_1 (gate) and mlp.linear_3 (up), and its
  config class says ``gpt_bigcode``; the present one stores attn.q, attn.kv (k, then v) and
  mlp.gate_up_proj (gate, then up), as ``gpt_refact``. Configs do not differ; the tensors' names do.

Trained length: 4096, by the model card of smallcloudai/Refact-1_6B-fim.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from converter import slopes
from converter.errors import SourceError, UnsupportedModel
from converter.families.base import Config, Family, Geometry, count, head_dim, respelled

SPELLINGS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}
PACKED = "packed_projections"
"""Key of a converted config: whether key and value, and gate and up, are stored as one tensor."""


FINAL_BIAS = "final_norm_bias"
"""Key of a converted config: whether the last norm has a bias."""


def claims(config: Config) -> bool:
    """By model_type, or the first revision's, which is StarCoder's, with Refact's class."""
    named = config.get("architectures")
    ours = isinstance(named, list) and any(str(name).startswith("GPTRefact") for name in named)
    return config.get("model_type") == "gpt_refact" or (config.get("model_type") == "gpt_bigcode" and ours)


def check(config: Config) -> None:
    if config.get("multi_query", True) is not True:
        raise UnsupportedModel(
            f"multi_query is {config['multi_query']!r}; only a Refact with one key and value head, and true, "
            "can be converted"
        )
    if not isinstance(config.get(PACKED, True), bool):
        raise SourceError(f"config.json: {PACKED} is {config[PACKED]!r}, expected true or false")
    count(config, "n_inner", default=1)


def geometry(config: Config) -> Geometry:
    heads = count(config, "n_head", "num_attention_heads")
    return Geometry(
        num_heads=heads,
        head_dim=head_dim(count(config, "n_embd", "hidden_size"), heads),
        num_layers=count(config, "n_layer", "num_hidden_layers"),
        num_kv_heads=1,
    )


def stock_slopes(config: Config) -> slopes.Slopes:
    return slopes.stock_slopes(geometry(config).num_heads)


def normalise(config: Config) -> dict[str, Any]:
    result = respelled(config, SPELLINGS)
    result.setdefault(PACKED, True)
    result["tie_word_embeddings"] = False  # transformers' default, true, never reached the head
    return result


def fit(config: Config, names: Collection[str]) -> dict[str, Any]:  # noqa: ARG001 -- as Family.fit
    """Which of the two layouts is stored, and whether the last norm has a bias."""
    packed = not any(name.endswith("attn.k.weight") for name in names)
    return {PACKED: packed, FINAL_BIAS: "ln_f.bias" in names}


def raise_length(config: dict[str, Any], length: int) -> None:
    """``n_positions``, beyond which the tools that read it refuse to run."""
    config["n_positions"] = max(count(config, "n_positions", default=1), length)


FAMILY = Family(
    name="refact",
    title="Refact-1.6B",
    camel="Refact",
    model_types=("gpt_refact",),
    class_prefixes=("GPTRefact",),
    check=check,
    geometry=geometry,
    stock_slopes=stock_slopes,
    train_lengths={"smallcloudai/Refact-1_6B-fim": 4096},
    claims=claims,
    length_hint="n_positions",
    length_doubt="is a limit that is often raised without training",
    normalise=normalise,
    fit=fit,
    raise_length=raise_length,
    embeddings="wte.weight",
    stock=False,
    examples=("smallcloudai/Refact-1_6B-fim",),
)
