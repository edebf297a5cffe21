"""MPT (MosaicML): ``attn_config`` holds what concerns attention, the bias' maximum included.

Facts from mosaicml/llm-foundry, ``llmfoundry/models/{mpt,layers}`` at v0.1.0 to v0.21.0 (its copy is the
remote code of MosaicML's and Replit's repositories, with the class ``MPTForCausalLM``), and from
transformers' ``models/mpt``, which names the tensors alike:

* The slopes come from ``attn_config.alibi_bias_max`` (8; 16 in StoryWriter), which stock transformers
  ignores, as it does ``alibi: false``. llm-foundry's defaults are ``alibi: false`` and ``no_bias: false``,
  transformers' the opposites.
* ``attn_type`` is ``multihead_attention``, ``multiquery_attention`` (one key and value head) or
  ``grouped_query_attention`` (``attn_config.kv_n_heads`` of them; replit-code-v1_5-3b has 24 heads over 8).
  ``Wqkv`` gives query, key and value in this order; consecutive query heads share a key head.
* ``qk_ln`` normalises the whole query and the whole key, each over its own width, before they are split
  into heads; it is a LayerNorm with an epsilon of 1e-5 whatever ``norm_type`` and ``norm_eps`` say.
* The RMSNorm of v0.1 multiplies by the root mean square instead of dividing by it. Only v0.3 and later
  write ``fc_type``, so without that key it is unknown which norm was trained.
* ``mptglu`` is down(activation(gate) * up); the activation is exact GELU unless ``ffn_act_fn`` is given.
* ``embedding_fraction`` scales a gradient only. ``attn_uses_sequence_id`` masks packed documents from each
  other in training, ``use_pad_tok_in_ffn: false`` skips padded tokens, ``learned_pos_emb`` is off when
  ``alibi`` is on, ``attn_impl`` selects a kernel: none of them changes what a real token gets.

The other options below change the computation and are refused. Trained lengths are those of the model
cards; ``max_seq_len`` is a limit that users raise on purpose.
"""

from __future__ import annotations

import math
from typing import Any

from converter import slopes
from converter.errors import SourceError, UnsupportedModel
from converter.families.base import Config, Family, Geometry, count, head_dim, respelled

SPELLINGS = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "norm_eps": "layer_norm_epsilon",
}
EPSILON = 1e-5

# Option -> the values under which the layer is the one that the template computes; None is the
# default, which is left out of a config or null in it.
LAYER_NORMS = ("layernorm", "low_precision_layernorm")
RMS_NORMS = ("rmsnorm", "low_precision_rmsnorm")
ATTENTION: dict[str, tuple[Any, ...]] = {
    "attn_type": (None, "multihead_attention", "multiquery_attention", "grouped_query_attention"),
    "prefix_lm": (None, False),
    "rope": (None, False),
    "nope": (None, False),
    "qk_gn": (None, False),
    "fused_qkv": (None, True),
    "kv_dim": (None,),
    "reuse_kv_layer_idx": (None,),
    "sliding_window_size": (None, -1),
    "attn_logit_softcapping": (None,),
    "flex_attn_mod_list": (None, []),
    "norm_type": (None, *LAYER_NORMS),
    "norm_eps": (None, EPSILON),
}
FFN: dict[str, tuple[Any, ...]] = {
    "ffn_type": (None, "mptmlp", "mptglu"),
    "ffn_act_fn": (None, {"name": "gelu", "approximate": "none"}, {"name": "gelu"}, {"name": "silu"}),
    "fc_type": (None, "torch"),
}
LAYER: dict[str, tuple[Any, ...]] = {
    "norm_type": (None, *LAYER_NORMS, *RMS_NORMS),
    "no_bias": (None, True, False),
    "fc_type": (None, "torch"),
    "fuse_norm_attn_norm": (None, False),
    "block_overrides": (None,),
    "final_logit_softcapping": (None,),
    "residual_modification": (None,),
    "residual_coeff": (None,),
    "attention_bias": (None, False),
    "head_dim": (None,),
}


def attention(config: Config) -> Config:
    """``attn_config``; empty, which means the defaults, where the config has none.

    Raises:
        SourceError: it is not an object.
    """
    return _options(config, "attn_config")


def check(config: Config) -> None:
    options, layer = attention(config), ffn(config)
    alibi = options.get("alibi", not _foundry(config))
    if alibi is not True:
        raise UnsupportedModel(
            f"attn_config.alibi is {alibi!r}: this MPT (SEA-LION v1 is one) was trained with "
            "learned positions, so it has no slopes to scale; no conversion can lengthen it"
        )
    check_softmax_scale(options)
    for where, values, known in (
        ("attn_config.", options, ATTENTION),
        ("ffn_config.", layer, FFN),
        ("", config, LAYER),
    ):
        for key, good in known.items():
            value = values.get(key)
            # Newer versions spell the kind of linear layer as an object.
            value = value.get("name", "torch") if key == "fc_type" and isinstance(value, dict) else value
            if value not in good:
                fit = " or ".join(repr(value) for value in good if value is not None) or "no such key"
                raise UnsupportedModel(f"{where}{key} is {value!r}; only an MPT with {fit} can be converted")
    for where, values, key in (
        ("attn_config.", options, "softmax_scale"),
        ("attn_config.", options, "clip_qkv"),
        ("", config, "logit_scale"),
    ):
        value = values.get(key)
        if not (
            value is None or finite_number(value) or (key == "logit_scale" and value == "inv_sqrt_d_model")
        ):
            raise SourceError(f"config.json: {where}{key} is {value!r}, expected a number or null")
    check_norms(config)
    tuning = options.get("attn_temperature_tuning")
    if tuning and not (isinstance(tuning, dict) and tuning.get("attn_scale", 0) == 0):
        raise UnsupportedModel(
            f"attn_config.attn_temperature_tuning is {tuning!r}; only an MPT whose queries are not scaled by "
            "their positions can be converted"
        )
    count(layer, "ffn_hidden_size", default=1)
    bias_max(config)


def check_norms(config: Config) -> None:
    given = {key: config[key] for key in ("norm_eps", "layer_norm_epsilon") if config.get(key) is not None}
    for key, value in given.items():
        if not finite_number(value) or not 0 < value < 1:
            raise SourceError(f"config.json: {key} is {value!r}, expected a small positive number")
    if len(set(given.values())) > 1:
        spelled = " and ".join(f"{key} {value}" for key, value in given.items())
        raise SourceError(f"config.json contradicts itself: {spelled}; remove the wrong one")
    own = config.get("layer_norm_epsilon")
    if _foundry(config) and config.get("norm_eps") is None and own not in (None, EPSILON):
        raise UnsupportedModel(
            f"layer_norm_epsilon is {own!r}, which llm-foundry's classes, that architectures names, do not "
            "read; if the model was trained with it, spell it norm_eps, else remove it from config.json"
        )
    if attention(config).get("qk_ln") and not set(given.values()) <= {EPSILON}:
        raise UnsupportedModel(
            f"attn_config.qk_ln with norms of epsilon {next(iter(given.values()))!r}: only an MPT with "
            f"{EPSILON!r} can be converted when its queries and keys are normalised too"
        )
    if config.get("norm_type") in RMS_NORMS and config.get("fc_type") is None:
        raise UnsupportedModel(
            f"norm_type is {config['norm_type']!r} without fc_type, so from llm-foundry before v0.3, whose "
            "first versions compute another norm under this name; if a later one trained the checkpoint, add "
            "the fc_type 'torch' to its config.json"
        )


def check_softmax_scale(options: Config) -> None:
    """The template divides the slopes by this scale, and half precision must hold the result."""
    scale = options.get("softmax_scale")
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if scale is not None and not (number and 1 / 256 <= scale <= 16):
        raise UnsupportedModel(
            f"attn_config.softmax_scale is {scale!r}; only an MPT with one of 1/256 to 16 can be converted"
        )


def geometry(config: Config) -> Geometry:
    heads = count(config, "n_heads", "num_attention_heads")
    return Geometry(
        num_heads=heads,
        head_dim=head_dim(count(config, "d_model", "hidden_size"), heads),
        num_layers=count(config, "n_layers", "num_hidden_layers"),
        num_kv_heads=kv_heads(config, heads),
    )


def kv_heads(config: Config, heads: int) -> int:
    """The number of key and value heads, which ``attn_type`` decides.

    Raises:
        SourceError: grouped heads without ``attn_config.kv_n_heads``, or with one that does not divide
            the number of heads.
        UnsupportedModel: ``attn_config.kv_n_heads`` contradicts ``attn_type``.
    """
    options = attention(config)
    if options.get("attn_type") == "grouped_query_attention":
        groups = count(options, "kv_n_heads")
        if heads % groups:
            raise SourceError(f"config.json: attn_config.kv_n_heads {groups} does not divide {heads} heads")
        return groups
    multi_query = options.get("attn_type") == "multiquery_attention"
    groups = 1 if multi_query else heads
    given = options.get("kv_n_heads")
    if given not in (None, groups):
        raise UnsupportedModel(
            f"attn_config.kv_n_heads is {given!r}, but attn_type {options.get('attn_type')!r} means "
            f"{groups}; only 'grouped_query_attention' has a number of its own"
        )
    return groups


def bias_max(config: Config) -> float:
    """``attn_config.alibi_bias_max``, 8 by default.

    Raises:
        SourceError: not a positive finite number.
    """
    value = attention(config).get("alibi_bias_max", 8)
    if not finite_number(value) or not 0 < value <= 128:
        raise SourceError(f"config.json: attn_config.alibi_bias_max is {value!r}, expected 8 or so")
    return float(value)


def stock_slopes(config: Config) -> slopes.Slopes:
    return slopes.stock_slopes(geometry(config).num_heads, bias_max(config))


def normalise(config: Config) -> dict[str, Any]:
    result = {
        key: value
        for key, value in respelled(config, SPELLINGS).items()
        if key != SPELLINGS["norm_eps"] or value is not None
    }
    if result.get("no_bias") is None and _foundry(config):
        result["no_bias"] = False
    return result


def raise_length(config: dict[str, Any], length: int) -> None:
    """``max_seq_len``, beyond which MPT code and the tools that read it refuse to run."""
    config["max_seq_len"] = max(count(config, "max_seq_len", default=1), length)


def stock_unfit(config: Config) -> str | None:
    """transformers' MPT ignores these options, silently."""
    options, layer = attention(config), ffn(config)
    sizes = geometry(config)
    if sizes.num_kv_heads != sizes.num_heads:
        return f"stock transformers ignores attn_config.attn_type ({options['attn_type']})"
    if layer.get("ffn_type") == "mptglu" or layer.get("ffn_act_fn") or layer.get("ffn_hidden_size"):
        return "stock transformers ignores ffn_config"
    if config.get("norm_type") in RMS_NORMS:
        return f"stock transformers ignores norm_type ({config['norm_type']})"
    if config.get("norm_eps") not in (None, EPSILON):
        return f"stock transformers ignores norm_eps ({config['norm_eps']})"
    if bias_max(config) != 8:
        return f"stock transformers ignores attn_config.alibi_bias_max ({bias_max(config):g})"
    if options.get("qk_ln"):
        return "stock transformers ignores attn_config.qk_ln"
    if config.get("expansion_ratio", 4) != 4:
        return f"stock transformers ignores expansion_ratio ({config['expansion_ratio']})"
    if not normalise(config).get("no_bias", True):
        return "stock transformers has no biases"
    return None


def ffn(config: Config) -> Config:
    """``ffn_config``; empty, which means the defaults, where the config has none.

    Raises:
        SourceError: it is not an object.
    """
    return _options(config, "ffn_config")


def _foundry(config: Config) -> bool:
    """Whether llm-foundry's classes wrote the config; its defaults are not those of transformers."""
    named = config.get("architectures")
    if not named:
        code = config.get("auto_map")
        named = [str(name).split(".")[-1] for name in code.values()] if isinstance(code, dict) else []
    return isinstance(named, list) and any(str(name).startswith("MPT") for name in named)


def doubt(config: Config) -> str | None:
    scale = config.get("logit_scale")
    if scale is None or _foundry(config):
        return None
    return f"logit_scale {scale!r} is honoured, as llm-foundry does; transformers' own MPT class ignores it"


def _options(config: Config, key: str) -> Config:
    options = config.get(key)
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise SourceError(f"config.json: {key} is {options!r}, not an object")
    return options


def finite_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


FAMILY = Family(
    name="mpt",
    title="MPT",
    camel="Mpt",
    model_types=("mpt",),
    class_prefixes=("Mpt", "MPT"),
    check=check,
    geometry=geometry,
    stock_slopes=stock_slopes,
    train_lengths={
        **{f"mosaicml/mpt-7b{kind}": 2048 for kind in ("", "-instruct", "-chat")},
        **{f"mosaicml/mpt-7b-8k{kind}": 8192 for kind in ("", "-instruct", "-chat")},
        **{f"mosaicml/mpt-30b{kind}": 8192 for kind in ("", "-instruct", "-chat")},
        "mosaicml/mpt-7b-storywriter": 65536,
        "replit/replit-code-v1_5-3b": 4096,
    },
    length_hint="max_seq_len",
    length_doubt="is a limit that is often raised without training",
    normalise=normalise,
    raise_length=raise_length,
    layers="blocks",
    embeddings="wte.weight",
    tokenizer_class="GPTNeoXTokenizerFast",
    stock_unfit=stock_unfit,
    doubt=doubt,
    examples=(
        "mosaicml/mpt-7b",
        "mosaicml/mpt-7b-storywriter",
        "mosaicml/mpt-30b",
        "replit/replit-code-v1_5-3b",
    ),
)
