"""Baichuan-13B and Baichuan2-13B (Baichuan Inc.): 40 heads, standard slopes, RMSNorm, SwiGLU.

Sources: the models' own modeling_baichuan.py and configuration_baichuan.py (copies:
github.com/Mrgengli/baichuan_python of Baichuan-13B-Chat, github.com/jrd77/Baichuan2-13B-Chat), and vLLM's
baichuan.py, which recognises rotary positions by hidden_size 4096 and Baichuan2's head by vocab_size 125696.

* ``W_pack`` holds q, k and v in that order, each of the whole width. There are no biases, and the scale
  is 1 / sqrt(head size). The ALiBi bias is +slope * key position in Baichuan and -slope * distance in
  Baichuan2's later code; after the softmax both are the same. Padded columns count too, which adds a
  constant to each row and so changes nothing.
* Baichuan2's head (``NormHead``) uses the rows of lm_head at unit L2 length. The stored rows are not
  normalised; the original code normalises its parameter in place at the first evaluation. No config says
  which head a model has: see ``norm_head``. The training loss has a term ``z_loss_weight``.
* The 7B models have rotary positions under the same model_type, and Baichuan2-7B even has the same class
  names; old 7B checkpoints store ``rotary_emb.inv_freq``. See ``check_positions``.
* The config class wraps ``gradient_checkpointing`` in a tuple, so saved configs have ``[false]``.
* The code enlarges its mask beyond ``model_max_length``; its chat functions truncate prompts there.

Trained length: 4096, according to the README of github.com/baichuan-inc/Baichuan-13B and, for the second
generation, Yang et al. 2023 (arXiv 2309.10305).
"""

from __future__ import annotations

from typing import Any

from converter.config import Config, is_number
from converter.errors import SourceError, Undecided, UnsupportedModel, option
from converter.families.family import Family, Trained, check_options

# (hidden_size, num_attention_heads)
SIZES_7B, SIZES_13B = (4096, 32), (5120, 40)
ROTARY_KEYS = ("max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters")
VOCABULARY, VOCABULARY_2 = 64000, 125696
OPTIONS: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "tie_word_embeddings": (None, False)}


def check_supported(config: Config) -> None:
    check_positions(config)
    norm_head(config)
    check_options({"hidden_act": "silu", **config}, OPTIONS, "a Baichuan")
    weight = config.get("z_loss_weight") or 0
    if not is_number(weight) or weight < 0:
        raise SourceError(f"config.json: z_loss_weight is {weight!r}, expected a number of at least 0")


def check_positions(config: Config) -> None:
    """Distinguishes the 13B models, which have ALiBi, from the rotary 7B models, which are refused."""
    sizes = (config.get("hidden_size"), config.get("num_attention_heads"))
    signs = [f"it has {key}" for key in ROTARY_KEYS if config.get(key) is not None]
    named = config.get("architectures")
    if isinstance(named, list) and "BaiChuanForCausalLM" in named:
        signs.append("its class is BaiChuanForCausalLM (with a capital C), Baichuan-7B's")
    if sizes == SIZES_7B:
        signs.append(f"its hidden_size {sizes[0]} and {sizes[1]} heads are the 7B's")
    if signs and sizes == SIZES_13B:
        raise UnsupportedModel(
            f"config.json is ambiguous: hidden_size {sizes[0]} and {sizes[1]} heads are those of the 13B "
            f"models with ALiBi, but {' and '.join(signs)}, like the 7B models with rotary positions; if it "
            "is a 13B, restore the config.json of its original"
        )
    if signs:
        raise UnsupportedModel(
            f"this Baichuan has rotary positions, not ALiBi ({'; '.join(signs)}), like Baichuan-7B and "
            "Baichuan2-7B, so there are no slopes to scale; once rewritten in Llama's layout, it can be "
            "scaled by transformers' rope_scaling"
        )
    if config.get("model_max_length") is None:
        raise UnsupportedModel(
            "config.json is ambiguous: it has neither model_max_length, like the 13B models with ALiBi, nor "
            "max_position_embeddings, like the 7B models with rotary positions; restore the key from the "
            "config.json of its original"
        )


def norm_head(config: Config) -> bool:
    """Whether the head is Baichuan2's, with rows of unit length.

    The configs of both generations have the same keys except ``z_loss_weight``, which Baichuan2's
    configuration class writes. Baichuan2-13B-Chat's config.json was written by hand and lacks that key, so
    only its vocabulary reveals the head. Fine-tuned models may have another vocabulary.
    """
    given = config.get("norm_head")
    if given is not None:
        if not isinstance(given, bool):
            raise SourceError(f"config.json: norm_head is {given!r}, expected true or false")
        return given
    vocabulary = config.get("vocab_size")
    second = config.get("z_loss_weight") is not None
    if vocabulary == VOCABULARY_2 or (second and vocabulary != VOCABULARY):
        return True
    if vocabulary == VOCABULARY and not second:
        return False
    contradiction = "it has Baichuan-13B's vocab_size 64000 and Baichuan2's key z_loss_weight"
    unknown = f"vocab_size is {vocabulary!r} (Baichuan-13B has 64000, Baichuan2-13B 125696), no z_loss_weight"
    raise Undecided(
        f"config.json does not say which head this model has: {contradiction if second else unknown}; give "
        f"{option.overrides} norm_head=true if it was made from Baichuan2, and {option.overrides} "
        "norm_head=false if from Baichuan-13B"
    )


def rewrite(config: dict[str, Any]) -> dict[str, Any]:
    result = {**config, "norm_head": norm_head(config)}
    result.setdefault("tie_word_embeddings", False)
    checkpointing = config.get("gradient_checkpointing", False)
    while isinstance(checkpointing, list):  # each time a model is loaded and saved, it is wrapped again
        checkpointing = bool(checkpointing) and checkpointing[0]
    if "gradient_checkpointing" in config:
        result["gradient_checkpointing"] = bool(checkpointing)
    return result


FAMILY = Family(
    name="baichuan",
    title="Baichuan-13B",
    model_types=("baichuan",),
    class_prefixes=("Baichuan",),
    check_supported=check_supported,
    checkpoints=(
        Trained(
            4096,
            "github.com/baichuan-inc/Baichuan-13B, README.md",
            ("baichuan-inc/Baichuan-13B-Base", "baichuan-inc/Baichuan-13B-Chat"),
        ),
        Trained(
            4096,
            "arXiv 2309.10305",
            ("baichuan-inc/Baichuan2-13B-Base", "baichuan-inc/Baichuan2-13B-Chat"),
        ),
    ),
    length_hint="model_max_length",
    rewrite=rewrite,
    base_prefix="model",
    layers="layers",
    embeddings="embed_tokens.weight",
    stock=False,
    examples=("baichuan-inc/Baichuan-13B-Base", "baichuan-inc/Baichuan2-13B-Chat"),
)
