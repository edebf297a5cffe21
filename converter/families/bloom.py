"""BLOOM and its derivatives (bloomz, Poro, ...): 16, 32, 56 or 112 heads, standard slopes.

Facts from transformers' ``models/bloom`` and the configs on the Hub: early ones spell the sizes
``n_embed``, ``num_attention_heads`` and ``num_hidden_layers``; tensor names come with and without
the ``transformer.`` prefix; the head is tied. All BigScience checkpoints were trained at 2048
tokens (Scao et al. 2022, arXiv 2211.05100, table 3), although some configs say ``seq_length`` 4096.
"""

from __future__ import annotations

from typing import Any

from converter import slopes
from converter.families.base import Config, Family, Geometry, count, head_dim, respelled

SPELLINGS = {"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
SIZES = ("", "-560m", "-1b1", "-1b7", "-3b", "-7b1")


def check(config: Config) -> None:
    """Every BLOOM is an ALiBi model; there is nothing to refuse."""


def geometry(config: Config) -> Geometry:
    heads = count(config, "n_head", "num_attention_heads")
    return Geometry(
        num_heads=heads,
        head_dim=head_dim(count(config, "hidden_size", "n_embed"), heads),
        num_layers=count(config, "n_layer", "num_hidden_layers"),
        num_kv_heads=heads,
    )


def stock_slopes(config: Config) -> slopes.Slopes:
    return slopes.stock_slopes(geometry(config).num_heads)


def normalise(config: Config) -> dict[str, Any]:
    return respelled(config, SPELLINGS)


FAMILY = Family(
    name="bloom",
    title="BLOOM",
    camel="Bloom",
    model_types=("bloom",),
    class_prefixes=("Bloom",),
    check=check,
    geometry=geometry,
    stock_slopes=stock_slopes,
    train_lengths={f"bigscience/bloom{z}{size}": 2048 for z in ("", "z") for size in SIZES}
    | {f"bigscience/bloomz{size}-mt": 2048 for size in ("", "-7b1")}
    | {"bigscience/bloomz-7b1-p3": 2048, "bigscience/bloomz-p3": 2048},
    length_hint="seq_length",
    length_doubt="is absent or 4096 in checkpoints that were trained at 2048",
    normalise=normalise,
    tokenizer_class="BloomTokenizerFast",
    examples=("bigscience/bloom-560m", "bigscience/bloom-1b7", "bigscience/bloomz-7b1"),
)
