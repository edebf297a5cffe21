"""MPT (MosaicML): ``attn_config`` holds what concerns attention, the bias' maximum included.

Facts from llm-foundry's ``modeling_mpt`` and transformers' ``models/mpt``: the slopes come from
``attn_config.alibi_bias_max`` (8; 16 in StoryWriter), which stock transformers ignores, as it does
``alibi: false``. ``attn_uses_sequence_id`` masks packed documents from each other in training and
does nothing when a model runs without sequence ids, so it is harmless here; the other options
below change the attention or the layer and are refused. Trained lengths are those of MosaicML's
model cards; ``max_seq_len`` is a limit that users raise on purpose.
"""

from __future__ import annotations

import math
from typing import Any

from converter import slopes
from converter.errors import SourceError, UnsupportedModel
from converter.families.base import Config, Family, Geometry, count, head_dim, respelled

SPELLINGS = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}

# Option -> the values under which the layer is the one that the template computes; None is the
# default, which is left out of a config or null in it.
ATTENTION: dict[str, tuple[Any, ...]] = {
    "attn_type": (None, "multihead_attention"),
    "prefix_lm": (None, False),
    "rope": (None, False),
    "qk_gn": (None, False),
    "sliding_window_size": (None, -1),
    "attn_logit_softcapping": (None,),
}
FFN: dict[str, tuple[Any, ...]] = {"ffn_type": (None, "mptmlp"), "ffn_act_fn": (None,)}
LAYER: dict[str, tuple[Any, ...]] = {
    "norm_type": (None, "layernorm", "low_precision_layernorm"),
    "no_bias": (None, True, False),
    "final_logit_softcapping": (None,),
}


def attention(config: Config) -> Config:
    """``attn_config``; empty, which means the defaults, where the config has none.

    Raises:
        SourceError: it is not an object.
    """
    return _options(config, "attn_config")


def check(config: Config) -> None:
    options, ffn = attention(config), _options(config, "ffn_config")
    if options.get("alibi", True) is not True:
        raise UnsupportedModel(
            f"attn_config.alibi is {options['alibi']!r}: this MPT (SEA-LION v1 is one) was trained with "
            "learned positions, so it has no slopes to scale; no conversion can lengthen it"
        )
    check_softmax_scale(options)
    for where, values, known in (
        ("attn_config.", options, ATTENTION),
        ("ffn_config.", ffn, FFN),
        ("", config, LAYER),
    ):
        for key, good in known.items():
            if values.get(key) not in good:
                fit = " or ".join(repr(value) for value in good if value is not None) or "no such key"
                raise UnsupportedModel(
                    f"{where}{key} is {values[key]!r}; only an MPT with {fit} can be converted"
                )
    for where, values, key in (
        ("attn_config.", options, "softmax_scale"),
        ("attn_config.", options, "clip_qkv"),
        ("", config, "logit_scale"),
    ):
        value = values.get(key)
        if not (value is None or _number(value) or (key == "logit_scale" and value == "inv_sqrt_d_model")):
            raise SourceError(f"config.json: {where}{key} is {value!r}, expected a number or null")
    bias_max(config)


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
    kv_heads = attention(config).get("kv_n_heads")
    if kv_heads not in (None, heads):
        raise UnsupportedModel(
            f"attn_config.kv_n_heads is {kv_heads!r} with {heads} heads; grouped-query MPT is not supported"
        )
    return Geometry(
        num_heads=heads,
        head_dim=head_dim(count(config, "d_model", "hidden_size"), heads),
        num_layers=count(config, "n_layers", "num_hidden_layers"),
        num_kv_heads=heads,
    )


def bias_max(config: Config) -> float:
    """``attn_config.alibi_bias_max``, 8 by default.

    Raises:
        SourceError: not a positive finite number.
    """
    value = attention(config).get("alibi_bias_max", 8)
    if not _number(value) or not 0 < value <= 128:
        raise SourceError(f"config.json: attn_config.alibi_bias_max is {value!r}, expected 8 or so")
    return float(value)


def stock_slopes(config: Config) -> slopes.Slopes:
    return slopes.stock_slopes(geometry(config).num_heads, bias_max(config))


def normalise(config: Config) -> dict[str, Any]:
    return respelled(config, SPELLINGS)


def raise_length(config: dict[str, Any], length: int) -> None:
    """``max_seq_len``, beyond which MPT code and the tools that read it refuse to run."""
    config["max_seq_len"] = max(count(config, "max_seq_len", default=1), length)


def stock_unfit(config: Config) -> str | None:
    """transformers' MPT ignores these options, silently."""
    options = attention(config)
    if bias_max(config) != 8:
        return f"stock transformers ignores attn_config.alibi_bias_max ({bias_max(config):g})"
    if options.get("qk_ln"):
        return "stock transformers ignores attn_config.qk_ln"
    if config.get("expansion_ratio", 4) != 4:
        return f"stock transformers ignores expansion_ratio ({config['expansion_ratio']})"
    if not config.get("no_bias", True):
        return "stock transformers has no biases"
    return None


def _options(config: Config, key: str) -> Config:
    options = config.get(key)
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise SourceError(f"config.json: {key} is {options!r}, not an object")
    return options


def _number(value: object) -> bool:
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
    },
    length_hint="max_seq_len",
    length_doubt="is a limit that is often raised without training",
    normalise=normalise,
    raise_length=raise_length,
    layers_prefix="transformer.blocks",
    embeddings="wte.weight",
    tokenizer_class="GPTNeoXTokenizerFast",
    stock_unfit=stock_unfit,
    examples=("mosaicml/mpt-7b", "mosaicml/mpt-7b-storywriter", "mosaicml/mpt-30b"),
)
