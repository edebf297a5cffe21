"""AlBERTurin (AlBERTmini, AlBERTina, AlBERTone): Italian encoders with RMSNorm before each block and SwiGLU.

Facts and their sources:

* They were trained with matformer, which can build many other models; ``check`` takes what the model cards
  describe. github.com/mrinaldi97/matformer, commit 31ea12c: ``transformer_blocks`` has the layers, and
  ``matformer_module.py`` gives the stored tensors their names. q, k and v are thirds of ``qkv_proj``. The
  linear layers have no biases, but ``lm_head`` has one. The MLP's width is int(hidden size * ``ffn_factor``).
* The bias is -m * |i - j| with the ALiBi paper's slopes (commit a358cde, ``cached_stuff.py``). The stored
  ``alibi_slopes`` are not loaded; the code computes them anew. Training leaves out padding. The classes for
  transformers attend to it and ignore the attention mask (``huggingface_integration.py``); here it is masked.
* There is no pooler: classifiers read the first token's state. They are not stored in the published models.
* The head is the embeddings only if one tensor is stored, whatever ``tie_word_embeddings`` says: a bug of
  training left it untied (a comment in ``heads.py``). With a head of its own AlBERTmini has 96 million
  parameters, and its repository 386 MB in float32 (95M and 386 MB, its card and tree page).
* ``push_to_hub`` of that commit writes the weights to ``checkpoint.ckpt``, and config.json with all options
  both at the top and in ``_matformer_config_dict`` (config.json of mrinaldi/temp_model_2512).
* Trained length: 1024, on the cards of AlBERTmini and AlBERTina.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converter.config import Config, inner, is_number
from converter.errors import SourceError
from converter.families.family import Family, Trained, check_options
from converter.source.checkpoint import Tensor

HEAD = "lm_head.weight"
NESTED = "_matformer_config_dict"
NONE: tuple[Any, ...] = (None, False, {}, [])
OPTIONS: dict[str, tuple[Any, ...]] = {
    "_model_class": (None, "BERTModel"),
    "bias": (False,),
    "is_causal": (None, False),
    "training_objective": (None, "masked"),
    **dict.fromkeys(("custom_layers", "hooks", "encoder", "decoder", "entropy"), NONE),
    **dict.fromkeys(("attention_type", "has_text_autoencoder", "has_entropy_model"), NONE),
}
"""Option -> the values for which the template computes the right layers; see ``check_options``."""
LAYER: dict[str, tuple[Any, ...]] = {
    "attn_impl": (None, "flash", "sdpa", "flex", "xformers"),
    "ffn_activation": ("swiglu",),
    "hooks": NONE,
    "normalization": ("rmsnorm",),
    "normalization_position": ("pre",),
    "positional_encoding": ("alibi", ["alibi"]),
    "sliding_window_size": (None,),
}
"""The same in ``default_layer``."""
IGNORED_TENSORS = (r"\.attn_kernel\.alibi_slopes$", r"\._extra_state$")


def settings(config: Config) -> dict[str, Any]:
    """All options of the config, wherever they stand."""
    return {**inner(config, NESTED), **config}


def check_supported(config: Config) -> None:
    options = settings(config)
    layer = options.get("default_layer")
    if not isinstance(layer, dict):
        raise SourceError(f"config.json: default_layer is {layer!r}, not an object")
    heads = options.get("num_attention_heads")
    check_options(options, {**OPTIONS, "num_key_value_heads": (None, heads)}, "an AlBERTurin")
    check_options(layer, LAYER, "an AlBERTurin", "default_layer.")
    factor = options.get("ffn_factor")
    if not (is_number(factor) and 0 < factor < 100):
        raise SourceError(f"config.json: ffn_factor is {factor!r}, expected a positive number")
    if not is_number(options.get("rms_norm_eps")):
        raise SourceError("config.json has no rms_norm_eps; give the one that the model was trained with")


def rewrite(config: dict[str, Any]) -> dict[str, Any]:
    """Keeps the keys of the template and those of transformers; the rest describes the training."""
    options = settings(config)
    own = {*OPTIONS, NESTED, "default_layer", "num_key_value_heads", "rope_theta"}
    own |= {"_checkpoint_path", "_tokenizer_name"}
    kept = {key: value for key, value in options.items() if key not in own}
    return {
        **kept,
        "add_pooling_layer": False,
        "tie_word_embeddings": True,
    }  # the latter unless a tensor tells


def settings_from_tensors(config: Config, tensors: Mapping[str, Tensor]) -> dict[str, Any]:  # noqa: ARG001
    return {"tie_word_embeddings": HEAD not in tensors}


FAMILY = Family(
    name="alberturin",
    title="AlBERTurin",
    kind="encoder",
    model_types=("matformer",),
    class_prefixes=("Matformer",),
    check_supported=check_supported,
    checkpoints=(
        Trained(1024, "card", ("AlBERTurin/AlBERTmini", "AlBERTurin/AlBERTina")),
        Trained(None, "its card was not read; the smaller ones have 1024", ("AlBERTurin/AlBERTone101",)),
    ),
    length_hint="max_position_embeddings",
    rewrite=rewrite,
    settings_from_tensors=settings_from_tensors,
    base_prefix="encoder",
    layers="blocks.layers",
    embeddings="embed_tokens.weight",
    head=HEAD,
    ignored_tensors=IGNORED_TENSORS,
    restored={
        "bias": False,
        "default_layer": {
            "ffn_activation": "swiglu",
            "normalization": "rmsnorm",
            "normalization_position": "pre",
            "positional_encoding": "alibi",
        },
    },
    stock=False,
    examples=("AlBERTurin/AlBERTmini", "AlBERTurin/AlBERTina"),
)
