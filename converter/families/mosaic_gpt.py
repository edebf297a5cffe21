"""MosaicGPT, MPT's predecessor: mosaicml/mpt-1b-redpajama-200b, and replit-code-v1-3b as first published.

Sources: mosaicml/examples v0.0.4, ``examples/llm/src/models/{mosaic_gpt,layers}``, the version that the
model card of mpt-1b-redpajama-200b names; and replit/ReplitLM, ``replit-code-v1-3b/`` before May 24, 2023,
a fork of the same code with the class ``ReplitLM`` and the model_type ``replit_lm`` (since then, that
repository is an ``mpt``).

* The options are top-level keys: ``alibi`` (false by default), ``alibi_bias_max``, ``attn_qk_ln``,
  ``attn_clip_qkv``, ``softmax_scale``, ``attn_pdrop``, ``mlp_ratio``, ``no_bias`` (false by default).
* The only class is the language model; its backbone is a ModuleDict called ``transformer``. Each layer has
  ``ln_1``, ``attn.{Wqkv,out_proj}``, ``ln_2``, ``mlp.{mlp_up,mlp_down}``; the last norm is ``ln_f``. Logits
  come from ``wte`` whatever ``tie_word_embeddings`` says.
* ``attn_qk_ln`` adds ``attn.{q_ln,k_ln}`` over the whole width, before the split into heads. Both
  mpt-1b-redpajama-200b models were trained with it.
* Head h of H has the slope 2^(-alibi_bias_max * h / H) for every H. On April 25, 2023, mosaicml/examples
  changed this to the slopes of MPT (#307), which differ unless H is a power of two; no config key shows
  which of the two a model has. The published checkpoints have 16 and 32 heads. From April 28 on (#308), the
  norms are called ``norm_1``, ``norm_2`` and ``norm_f`` and the config has ``norm_type``; that layout is
  refused.
* ``low_precision_layernorm`` concerns autocast, ``embedding_fraction`` a gradient, ``attn_uses_sequence_id``
  packed documents in training and ``attn_impl`` the kernel; none of them changes the results.

The trained length is that of the model cards (2048); ``max_seq_len`` is a limit that the code enforces.
"""

from __future__ import annotations

from typing import Any

from converter.config import Config, count
from converter.errors import UnsupportedModel
from converter.families.family import Family, Trained, check_options
from converter.families.mpt import bias_max, check_numbers, check_softmax_scale
from converter.scaling.slopes import Slopes

# Option -> the values for which the template computes the right model; see check_options.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "prefix_lm": (None, False),
    "norm_type": (None,),
    "multiquery_attention": (None, False),
    "low_precision_layernorm": (None, True, False),
    "attn_qk_ln": (None, True, False),
    "no_bias": (None, True, False),
    "tie_word_embeddings": (None, True),
}


def check_supported(config: Config) -> None:
    if config.get("alibi") is not True:
        raise UnsupportedModel(
            f"alibi is {config.get('alibi', False)!r}: this MosaicGPT was trained with learned positions, so "
            "it has no slopes to scale; no conversion can lengthen it"
        )
    check_options(config, OPTIONS, "a MosaicGPT")
    check_softmax_scale(config, "a MosaicGPT")
    check_numbers(config, ("attn_clip_qkv", "logit_scale"))
    count(config, "mlp_ratio", default=4)
    bias_max(config, "")


def trained_slopes(config: Config, heads: int) -> Slopes:
    return tuple(2.0 ** (-bias_max(config, "") * head / heads) for head in range(1, heads + 1))


def rewrite(config: dict[str, Any]) -> dict[str, Any]:
    # The original code ignores this key; its head is always the embedding.
    return config | {"tie_word_embeddings": True}


def doubt(config: Config) -> str | None:
    heads = FAMILY.geometry(config).num_heads
    if heads & (heads - 1) == 0:
        return None
    return (
        f"the model has {heads} heads, not a power of two, so its slopes depend on the code that trained it; "
        "config.json does not name its version, and one from before April 25, 2023 is assumed "
        "(mosaicml/examples #307)"
    )


FAMILY = Family(
    name="mosaic_gpt",
    title="MosaicGPT",
    model_types=("mosaic_gpt", "replit_lm"),
    class_prefixes=("MosaicGPT", "ReplitLM"),
    class_aliases={"MosaicGPT": "ForCausalLM", "ReplitLM": "ForCausalLM"},
    check_supported=check_supported,
    sizes=("n_heads", "d_model", "n_layers"),
    spellings={"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    trained_slopes=trained_slopes,
    checkpoints=(
        Trained(
            2048,
            "card",
            ("mosaicml/mpt-1b-redpajama-200b", "mosaicml/mpt-1b-redpajama-200b-dolly"),
        ),
        Trained(2048, "of mosaicml's, whose copy it is", ("anas-awadalla/mpt-1b-redpajama-200b",)),
        Trained(2048, "max_seq_len, and the tokenizer's limit", ("replit/replit-code-v1-3b",)),
    ),
    length_hint="max_seq_len",
    rewrite=rewrite,
    layers="blocks",
    embeddings="wte.weight",
    tokenizer_class="GPTNeoXTokenizerFast",
    stock=False,
    doubt=doubt,
    examples=("mosaicml/mpt-1b-redpajama-200b", "mosaicml/mpt-1b-redpajama-200b-dolly"),
)
