"""JAIS (Core42, Inception, Cerebras) and BTLM-3B-8K (Cerebras, Opentensor): the same layer under two names.

The authors' ``modeling_jais.py`` and ``modeling_btlm.py`` are on the Hub only. The facts below are those on
which their copies and ports agree: robertalanm/text-generation-inference (branch feature/btlm,
``btlm_modeling.py`` and ``btlm_config.py``), vllm-project/vllm (``models/jais.py``,
``transformers_utils/configs/jais.py``), ggml-org/llama.cpp (``conversion/jais.py``), TensorRT-LLM (its
conversion of GPT), Cerebras/modelzoo (``btlm_hf_cs.py``) and the model cards.

* Layout: that of GPT-2 (``wte``, ``h.N.ln_1``, ``attn.c_attn`` with q, k and v in this order,
  ``attn.c_proj``, ``ln_2``, ``mlp.c_fc``, ``mlp.c_fc2``, ``mlp.c_proj``, ``ln_f``), with Conv1D weights
  [inputs, outputs] and a bias everywhere; ``lm_head`` is tied. SwiGLU is ``c_fc(x) * silu(c_fc2(x))``; its
  width is ``n_inner``, or 4 * ``n_embd`` by default.
* muP: the embeddings are multiplied by ``mup_embeddings_scale``, and the logits by ``mup_output_alpha *
  mup_width_scale``; q.k is divided by the head size if ``mup_scale_qk_dot_by_d`` is true, otherwise by its
  square root. The defaults are 1 and false. The first configs (jais-13b) call these keys
  ``embeddings_scale``, ``scale_qk_dot_by_d`` and ``width_scale``, where the last is the whole factor on the
  logits.
* ALiBi: the bias ``-slope * |i - j|`` is added after the scores were scaled. The slopes are a stored
  parameter, ``transformer.relative_pe.slopes`` [heads, 1]; stored values replace those of the formula.
* The models' own ``alibi_scaling`` divides every slope by one number: by a for ``{"type": "linear",
  "factor": a}``, by max(1, T / N) for ``{"type": "linear", "train_seq_len": N}``, where T counts all keys of
  the forward pass, cached ones included. The latter is this tool's ``--method linear --dynamic length
  --rate 1``, except that their T counts padding too. A conversion replaces it by its own.
* ``reorder_and_upcast_attn`` computes the same scores in float32 before the softmax, so both values are
  accepted. ``token_type_ids`` would add rows of ``wte``; no model card passes them, and the template
  ignores them.
* GPT-JX-3b is BTLM-3B-8K under its own class names (``GPTJX...``, huggingface/transformers issue 25723).
* Trained lengths: the Jais paper (2,048 for 13B), and the cards of jais-30b-chat-v3 ("8000" tokens, "2000"
  before), the jais-family and btlm-3b-8k-base. The original code cannot run beyond ``n_positions``.
"""

from __future__ import annotations

import math
from typing import Any

from converter.config import Config, agreed, is_count, is_number
from converter.errors import SourceError, UnsupportedModel
from converter.families.family import Family, Trained, check_options, stored_slopes
from converter.scaling import slopes

OLD_SCALES = ("embeddings_scale", "width_scale", "scale_qk_dot_by_d")


# Option -> the values for which the template computes the right layer; null is false in the original code.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "activation_function": ("swiglu",),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "add_cross_attention": (None, False),
}
# The template divides the slopes by the softmax scale, and half precision must hold the result.
LARGEST_HEAD_DIM = 256


def check_supported(config: Config) -> None:
    positions = config.get("position_embedding_type", "learned")
    if positions != "alibi":
        raise UnsupportedModel(
            f"position_embedding_type is {positions!r}: this model, like the muP models of Cerebras-GPT, "
            "has no ALiBi, so it has no slopes to scale; no conversion can lengthen it"
        )
    if config.get("output_logits_scale") is not None:
        # BTLM's first revision has it beside width_scale, which is another number there than in JAIS-13B.
        raise UnsupportedModel(
            f"config.json has output_logits_scale {config['output_logits_scale']!r}: the muP keys of this "
            "early revision have another meaning, so the factor on the logits is not known; convert the "
            "present revision, whose keys are called mup_..."
        )
    defaults = {"activation_function": "gelu_new", "scale_attn_weights": True}
    check_options({**defaults, **config}, OPTIONS, "a JAIS or BTLM")
    scales(config)
    head_dim = FAMILY.geometry(config).head_dim
    if head_dim > LARGEST_HEAD_DIM:
        raise UnsupportedModel(
            f"n_embd / n_head is {head_dim}; only a JAIS or BTLM with heads of up to "
            f"{LARGEST_HEAD_DIM} channels can be converted"
        )
    own = config.get("alibi_scaling")
    if own is not None and not _linear(own):
        raise UnsupportedModel(
            f"alibi_scaling is {own!r}, which the code of JAIS and BTLM cannot compute; if the model was "
            "trained without it, remove it from config.json"
        )


def scales(config: Config) -> dict[str, Any]:
    """The muP keys under their current names, with their defaults."""
    embeddings = _value(config, 1.0, "mup_embeddings_scale", "embeddings_scale")
    divides = _value(config, False, "mup_scale_qk_dot_by_d", "scale_qk_dot_by_d")
    width = _value(config, 1.0, "mup_width_scale")
    alpha = _value(config, 1.0, "mup_output_alpha")
    if config.get("width_scale") is not None:
        whole = _value(config, 1.0, "width_scale")
        both = any(config.get(key) is not None for key in ("mup_width_scale", "mup_output_alpha"))
        if both and not math.isclose(whole, alpha * width):
            raise SourceError(
                f"config.json contradicts itself: width_scale {whole} and mup_output_alpha * mup_width_scale "
                f"{alpha * width}; remove the wrong one"
            )
        width, alpha = whole, 1.0
    return {
        "mup_embeddings_scale": embeddings,
        "mup_width_scale": width,
        "mup_output_alpha": alpha,
        "mup_scale_qk_dot_by_d": divides,
    }


def trained_slopes(config: Config, heads: int) -> slopes.Slopes:
    return stored_slopes(config, heads) or slopes.stock_slopes(heads)


def rewrite(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in OLD_SCALES} | scales(config)


def _linear(scaling: object) -> bool:
    """Whether the original code accepts it: ``type`` and either ``factor`` or ``train_seq_len``, above 1."""
    if not isinstance(scaling, dict) or scaling.get("type") != "linear" or len(scaling) != 2:
        return False
    factor, length = scaling.get("factor"), scaling.get("train_seq_len")
    if factor is not None:
        return is_number(factor) and factor > 1
    return is_count(length) and length > 1


def _value(config: Config, default: Any, *names: str) -> Any:
    """The value under any of a key's names; it must be a boolean or a number, as ``default`` is."""
    found = {name: config[name] for name in names if config.get(name) is not None}
    for name, value in found.items():
        if not (isinstance(value, bool) if isinstance(default, bool) else is_number(value)):
            expected = "true or false" if isinstance(default, bool) else "a number"
            raise SourceError(f"config.json: {name} is {value!r}, expected {expected}")
    value = agreed(found)
    return default if value is None else value


# The organisations that published the same models one after another.
OWNERS = ("core42", "inceptionai", "inception-mbzuai")
KINDS = ("", "-chat")

CHECKPOINTS = (
    Trained(
        2048,
        "arXiv 2308.16149",
        tuple(f"{owner}/jais-13b{kind}" for owner in OWNERS for kind in KINDS),
    ),
    Trained(
        2048,
        "card of jais-30b-chat-v3 (2k before v3)",
        tuple(f"{owner}/jais-30b{kind}-v1" for owner in OWNERS[:2] for kind in KINDS),
    ),
    Trained(
        8192,
        "card of jais-30b-chat-v3",
        tuple(f"{owner}/jais-30b{kind}-v3" for owner in OWNERS[:2] for kind in KINDS),
    ),
    Trained(
        2048,
        "card",
        tuple(
            f"inceptionai/jais-family-{size}{kind}"
            for size in ("590m", "1p3b", "2p7b", "6p7b", "13b")
            for kind in KINDS
        ),
    ),
    Trained(8192, "card", tuple(f"inceptionai/jais-family-30b-8k{kind}" for kind in KINDS)),
    Trained(16384, "card", tuple(f"inceptionai/jais-family-30b-16k{kind}" for kind in KINDS)),
    Trained(2048, "n_positions, beyond which its code cannot run", ("inceptionai/Jais-family-256m",)),
    Trained(
        8192,
        "card of btlm-3b-8k-base (2k, then 8k)",
        ("cerebras/btlm-3b-8k-base", "cerebras/btlm-3b-8k-chat"),
    ),
    Trained(None, "not in config.json; its card was not read", ("KnutJaegersberg/GPT-JX-3b",)),
)

FAMILY = Family(
    name="jais",
    title="JAIS and BTLM",
    model_types=("jais", "btlm", "gpt_jx"),
    class_prefixes=("JAIS", "BTLM", "GPTJX"),
    class_aliases={"JAISLMHeadModel": "ForCausalLM", "BTLMLMHeadModel": "ForCausalLM"},
    check_supported=check_supported,
    checkpoints=CHECKPOINTS,
    sizes=("n_head", "n_embd", "n_layer"),
    spellings={"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    trained_slopes=trained_slopes,
    length_hint="n_positions",
    rewrite=rewrite,
    embeddings="wte.weight",
    stored_slopes="relative_pe.slopes",
    own_scaling=True,
    ignored_tensors=(r"(^|\.)relative_pe\.slopes$", r"(^|\.)attn\.(bias|masked_bias)$"),
    stock=False,
    examples=("inceptionai/jais-13b", "inceptionai/jais-30b-v3", "cerebras/btlm-3b-8k-base"),
)
