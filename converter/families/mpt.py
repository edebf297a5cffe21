"""MPT (MosaicML): the options of attention are in ``attn_config``, among them the maximum of the bias.

Sources: mosaicml/llm-foundry, ``llmfoundry/models/{mpt,layers}`` from v0.1.0 to v0.21.0 (a copy is the remote
code of MosaicML's and Replit's repositories, with the class ``MPTForCausalLM``), and transformers'
``models/mpt``, which gives the tensors the same names.

* The slopes come from ``attn_config.alibi_bias_max`` (8; 16 in StoryWriter). Stock transformers ignores
  that key, and ``alibi: false`` too. llm-foundry's defaults are ``alibi: false`` and ``no_bias: false``,
  those of transformers the opposite. transformers' class writes only what differs from its defaults, and
  always ``attn_config.model_type``, but keeps the class names of the config that it read.
* ``attn_type`` is ``multihead_attention``, ``multiquery_attention`` (one key and value head) or
  ``grouped_query_attention`` (``attn_config.kv_n_heads`` of them; replit-code-v1_5-3b has 24 heads over 8).
  ``Wqkv`` gives query, key and value in this order; consecutive query heads share a key head.
* ``qk_ln`` normalises the whole query and the whole key, each over its own width, before they are split
  into heads; it is a LayerNorm with an epsilon of 1e-5 whatever ``norm_type`` and ``norm_eps`` say.
* The RMSNorm of v0.1 multiplies by the root mean square instead of dividing by it. Only v0.3 and later
  write ``fc_type``; without that key it is unknown which norm the model was trained with.
* ``mptglu`` is down(activation(gate) * up); the activation is exact GELU unless ``ffn_act_fn`` is given.
* Krutrim-1's config.json (krutrim-ai-labs/Krutrim-1-instruct) has no ``ffn_act_fn``, for which the code
  beside it, llm-foundry's, computes GELU, as does its authors' copy (github.com/ola-krutrim/Chitrarth,
  ``language_model/mpt/ffn.py``). But their paper (arXiv 2502.09642) says ReLU. So the user has to say it.
* ``embedding_fraction`` scales a gradient only. ``attn_uses_sequence_id`` masks packed documents from each
  other in training, ``use_pad_tok_in_ffn: false`` skips padded tokens, ``learned_pos_emb`` is off when
  ``alibi`` is on, ``attn_impl`` selects a kernel: none of them changes the results for real tokens.

The other options below change the computation and are refused. Trained lengths are those of the model
cards; ``max_seq_len`` is a limit that users raise on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from converter.config import Config, agreed, count, inner, is_number
from converter.errors import SourceError, Undecided, UnsupportedModel, option
from converter.families.family import Family, Trained, check_options
from converter.scaling import slopes

EPSILON = 1e-5

# Option -> the values for which the template computes the right layer; see check_options.
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
    "ffn_act_fn": (
        None,
        {"name": "gelu", "approximate": "none"},
        {"name": "gelu"},
        {"name": "relu"},
        {"name": "silu"},
    ),
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
KRUTRIM = (4608, 48, 8)
"""``d_model``, ``n_heads`` and ``attn_config.kv_n_heads`` of Krutrim-1."""


def attention(config: Config) -> Config:
    """``attn_config``; empty, which means the defaults, if the config has none."""
    return inner(config, "attn_config")


def check_supported(config: Config) -> None:
    options, layer = attention(config), ffn(config)
    alibi = options.get("alibi", not _foundry(config))
    if alibi is not True:
        reason = (
            f"attn_config.alibi is {alibi!r}: this MPT, like SEA-LION v1, was trained with learned "
            "positions, so it has no slopes to scale; no conversion can lengthen it"
        )
        if "alibi" in options:
            raise UnsupportedModel(reason)
        raise Undecided(
            f"config.json does not say attn_config.alibi, and by llm-foundry's default {reason}; if it was "
            f"trained with ALiBi, give {option.overrides} attn_config.alibi=true"
        )
    check_softmax_scale(options, "an MPT", "attn_config.")
    check_options(options, ATTENTION, "an MPT", "attn_config.")
    check_options(_with_named_layers(layer), FFN, "an MPT", "ffn_config.")
    check_options(_with_named_layers(config), LAYER, "an MPT")
    check_numbers(options, ("clip_qkv", "attn_pdrop"), "attn_config.")
    check_numbers(config, ("logit_scale",))
    check_norms(config)
    tuning = options.get("attn_temperature_tuning")
    if tuning and not (isinstance(tuning, dict) and tuning.get("attn_scale", 0) == 0):
        raise UnsupportedModel(
            f"attn_config.attn_temperature_tuning is {tuning!r}; only an MPT whose queries are not scaled by "
            "their positions can be converted"
        )
    count(layer, "ffn_hidden_size", default=1)
    bias_max(options)
    sizes = (config.get("d_model"), config.get("n_heads"), options.get("kv_n_heads"))
    if sizes == KRUTRIM and layer.get("ffn_act_fn") is None:
        raise Undecided(
            "config.json does not say which activation this model has: its sizes are those of Krutrim-1, "
            "whose paper (arXiv 2502.09642) names ReLU, but whose code computes GELU by default; give "
            f"{option.overrides} ffn_config.ffn_act_fn.name=relu or {option.overrides} "
            "ffn_config.ffn_act_fn.name=gelu"
        )


def check_norms(config: Config) -> None:
    given = {key: config[key] for key in ("norm_eps", "layer_norm_epsilon") if config.get(key) is not None}
    agreed(given)
    own = config.get("layer_norm_epsilon")
    if _foundry(config) and config.get("norm_eps") is None and own not in (None, EPSILON):
        raise Undecided(
            f"layer_norm_epsilon is {own!r}, but llm-foundry's classes, which architectures names, do not "
            f"read that key; if the model was trained with it, give {option.overrides} norm_eps={own!r}, "
            "otherwise remove it from config.json"
        )
    if attention(config).get("qk_ln") and not set(given.values()) <= {EPSILON}:
        raise UnsupportedModel(
            f"attn_config.qk_ln is set and the norms have epsilon {next(iter(given.values()))!r}; an MPT "
            f"that normalises queries and keys can be converted only with epsilon {EPSILON!r}"
        )
    if config.get("norm_type") in RMS_NORMS and config.get("fc_type") is None:
        raise Undecided(
            f"norm_type is {config['norm_type']!r} without fc_type, so the model is from llm-foundry before "
            "v0.3, whose first versions compute another norm under this name; if a later version trained it, "
            f"give {option.overrides} fc_type=torch"
        )


def check_softmax_scale(options: Config, what: str, where: str = "") -> None:
    """The template divides the slopes by this scale, and half precision must hold the result."""
    scale = options.get("softmax_scale")
    if scale is not None and not (is_number(scale) and 1 / 256 <= scale <= 16):
        raise UnsupportedModel(
            f"{where}softmax_scale is {scale!r}; only {what} with a value from 1/256 to 16 can be converted"
        )


def check_numbers(options: Config, keys: Sequence[str], where: str = "") -> None:
    """Raises ``SourceError`` for a value that is not a number, null, or the name of a factor on logits."""
    for key in keys:
        value = options.get(key)
        named = key == "logit_scale" and value == "inv_sqrt_d_model"
        if not (value is None or is_number(value) or named):
            raise SourceError(f"config.json: {where}{key} is {value!r}, expected a number or null")


def kv_heads(config: Config, heads: int) -> int:
    """The number of key and value heads, which depends on ``attn_type``."""
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
            f"{groups}; other numbers need 'grouped_query_attention'"
        )
    return groups


def bias_max(options: Config, where: str = "attn_config.") -> float:
    """``alibi_bias_max``, a number above 0 and up to 128, by default 8."""
    value = options.get("alibi_bias_max", 8)
    if not is_number(value) or not 0 < value <= 128:
        raise SourceError(f"config.json: {where}alibi_bias_max is {value!r}, expected 8 or so")
    return float(value)


def trained_slopes(config: Config, heads: int) -> slopes.Slopes:
    return slopes.stock_slopes(heads, bias_max(attention(config)))


def rewrite(config: dict[str, Any]) -> dict[str, Any]:
    unless_null = ("attn_config", "ffn_config", "layer_norm_epsilon")
    result = {key: value for key, value in config.items() if key not in unless_null or value is not None}
    if result.get("no_bias") is None and _foundry(config):
        result["no_bias"] = False
    return result


def stock_unfit(config: Config) -> str | None:
    """Names an option that transformers' MPT silently ignores; None if there is none."""
    options, layer, sizes = attention(config), ffn(config), FAMILY.geometry(config)
    maximum, ratio, norm = bias_max(options), config.get("expansion_ratio", 4), config.get("norm_type")
    ignored = {
        f"attn_config.attn_type ({options.get('attn_type')})": sizes.num_kv_heads != sizes.num_heads,
        "ffn_config": layer.get("ffn_type") == "mptglu"
        or layer.get("ffn_act_fn")
        or layer.get("ffn_hidden_size"),
        f"norm_type ({norm})": norm in RMS_NORMS,
        f"norm_eps ({config.get('norm_eps')})": config.get("norm_eps") not in (None, EPSILON),
        f"attn_config.alibi_bias_max ({maximum:g})": maximum != 8,
        "attn_config.qk_ln": options.get("qk_ln"),
        f"expansion_ratio ({ratio})": ratio != 4,
        "no_bias": not FAMILY.template_config(config).get("no_bias", True),
    }
    first = next((option for option, given in ignored.items() if given), None)
    return None if first is None else f"stock transformers ignores {first}"


def ffn(config: Config) -> Config:
    """``ffn_config``; empty, which means the defaults, if the config has none."""
    return inner(config, "ffn_config")


def _foundry(config: Config) -> bool:
    """Whether llm-foundry's classes wrote the config; their defaults differ from those of transformers."""
    if "model_type" in attention(config):
        return False
    named = config.get("architectures")
    if not named:
        code = config.get("auto_map")
        named = [str(name).split(".")[-1] for name in code.values()] if isinstance(code, dict) else []
    return isinstance(named, list) and any(str(name).startswith("MPT") for name in named)


def doubt(config: Config) -> str | None:
    scale = config.get("logit_scale")
    if scale is None or _foundry(config):
        return None
    return f"logit_scale {scale!r} is honoured, as in llm-foundry; transformers' own MPT class ignores it"


def _with_named_layers(options: Config) -> Config:
    """The same, with the kind of linear layer as a word; newer versions write an object."""
    kind = options.get("fc_type")
    return {**options, "fc_type": kind.get("name", "torch")} if isinstance(kind, dict) else options


FAMILY = Family(
    name="mpt",
    title="MPT",
    model_types=("mpt",),
    class_prefixes=("Mpt", "MPT"),
    check_supported=check_supported,
    sizes=("n_heads", "d_model", "n_layers"),
    spellings={
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "norm_eps": "layer_norm_epsilon",
    },
    kv_heads=kv_heads,
    trained_slopes=trained_slopes,
    checkpoints=(
        Trained(2048, "card", tuple(f"mosaicml/mpt-7b{kind}" for kind in ("", "-instruct", "-chat"))),
        Trained(65536, "card", ("mosaicml/mpt-7b-storywriter",)),
        Trained(8192, "card", tuple(f"mosaicml/mpt-7b-8k{kind}" for kind in ("", "-instruct", "-chat"))),
        Trained(8192, "card", tuple(f"mosaicml/mpt-30b{kind}" for kind in ("", "-instruct", "-chat"))),
        Trained(2048, "max_seq_len, and the tokenizer's limit", ("replit/replit-code-v1-3b",)),
        Trained(4096, "card", ("replit/replit-code-v1_5-3b",)),
        Trained(
            8192, "github.com/VinAIResearch/PhoGPT, README.md", ("vinai/PhoGPT-4B", "vinai/PhoGPT-4B-Chat")
        ),
        Trained(
            2048,
            "github.com/VinAIResearch/PhoGPT, README.md of 2023",
            ("vinai/PhoGPT-7B5", "vinai/PhoGPT-7B5-Instruct"),
        ),
        Trained(
            4096,
            "github.com/ola-krutrim/Krutrim-1-7B; arXiv 2502.09642",
            ("krutrim-ai-labs/Krutrim-1-instruct",),
        ),
    ),
    length_hint="max_seq_len",
    rewrite=rewrite,
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
