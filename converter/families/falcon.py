"""Falcon-RW: the Falcon checkpoints that were trained with ALiBi (``alibi: true``).

Sources: transformers' ``models/falcon`` and ``configuration_RW`` of the first revisions. Those revisions
have the model_type ``RefinedWebModel`` or ``RefinedWeb`` and call the sizes ``n_head``, ``n_layer`` and
``n_head_kv``; their ``multi_query`` and ``parallel_attn`` are false by default, those of transformers true.
Every published Falcon with ALiBi has sequential layers and a key for every head. Falcon's other layouts are
those of its rotary models.
The bias is divided by sqrt(head_dim) together with the scores. The models were trained at 2048 tokens
(Penedo et al. 2023, arXiv 2306.01116), which no config stores.
"""

from __future__ import annotations

from typing import Any

from converter.config import Config, with_current_keys
from converter.errors import UnsupportedModel
from converter.families.family import Family, Trained, check_options

OLD_TYPES = ("RefinedWebModel", "RefinedWeb")
SPELLINGS = {
    "n_embed": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_head_kv": "num_kv_heads",
}
LAYOUTS = {"multi_query": True, "parallel_attn": True, "new_decoder_architecture": False}
"""Flags of Falcon's other layouts, with transformers' defaults."""


def check_supported(config: Config) -> None:
    if config.get("alibi") is not True:
        raise UnsupportedModel(
            f"alibi is {config.get('alibi', False)!r}: this Falcon, like falcon-7b and falcon-40b, has "
            "rotary positions, so it has no slopes to scale; set rope scaling in its config.json instead"
        )
    flags = {**LAYOUTS, **rewrite(with_current_keys(config, SPELLINGS))}
    check_options(flags, dict.fromkeys(LAYOUTS, (False,)), "a Falcon")


def rewrite(config: dict[str, Any]) -> dict[str, Any]:
    if config.get("model_type") not in OLD_TYPES:
        return config
    grouped = config.get("num_kv_heads") is not None
    old = {"multi_query": False, "parallel_attn": False, "new_decoder_architecture": grouped}
    return {**old, **config}


FAMILY = Family(
    name="falcon",
    title="Falcon-RW",
    model_types=("falcon", *OLD_TYPES),
    class_prefixes=("Falcon", "RW"),
    check_supported=check_supported,
    checkpoints=(
        Trained(2048, "arXiv 2306.01116", ("tiiuae/falcon-rw-1b", "tiiuae/falcon-rw-7b")),
        Trained(
            2048,
            "of Falcon-RW, its base",
            (
                "ayoolaolafenwa/ChatLM",
                "mfernezir/falcon-rw-1b-alpaca",
                "yuanzhoulvpi/chinese_falcon_7b_chat",
            ),
        ),
    ),
    spellings=SPELLINGS,
    rewrite=rewrite,
    bias_scale=lambda head_dim: head_dim**-0.5,
    examples=("tiiuae/falcon-rw-1b", "tiiuae/falcon-rw-7b"),
)
