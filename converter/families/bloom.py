"""BLOOM and its derivatives (bloomz, Poro, ...): 16, 32, 56 or 112 heads, standard slopes.

Sources: transformers' ``models/bloom`` and the configs on the Hub. Early configs call the sizes
``n_embed``, ``num_attention_heads`` and ``num_hidden_layers``. Tensor names come with and without the
``transformer.`` prefix, and the head is tied. All BigScience checkpoints were trained at 2048 tokens
(Scao et al. 2022, arXiv 2211.05100, table 3), although some configs have ``seq_length`` 4096.
"""

from __future__ import annotations

from converter.config import Config, is_number
from converter.errors import Undecided, option
from converter.families.family import Family, Trained

SIZES = ("", "-560m", "-1b1", "-1b7", "-3b", "-7b1")

CHECKPOINTS = (
    Trained(2048, "arXiv 2211.05100, table 3", tuple(f"bigscience/bloom{size}" for size in SIZES)),
    Trained(
        2048,
        "of BLOOM, its base (arXiv 2211.01786)",
        (
            *(f"bigscience/bloomz{size}" for size in SIZES),
            *("bigscience/bloomz-mt", "bigscience/bloomz-7b1-mt"),
            *("bigscience/bloomz-p3", "bigscience/bloomz-7b1-p3"),
        ),
    ),
    Trained(2048, "card", ("LumiOpen/Poro-34B", "norallm/norbloom-7b-scratch")),
    Trained(2048, "github.com/sambanova/bloomchat, its scripts", ("sambanovasystems/BLOOMChat-176B-v1",)),
    Trained(8192, "sambanova.ai/blog/bloomchat-v2", ("sambanovasystems/BLOOMChat-176B-v2",)),
    Trained(
        2048,
        "github.com/FreedomIntelligence/LLMZoo, its script",
        ("FreedomIntelligence/phoenix-chat-7b", "FreedomIntelligence/phoenix-inst-chat-7b"),
    ),
    Trained(
        2048,
        "of BLOOM, its base; fine-tuned at 300 (card)",
        ("bigscience/sgpt-bloom-7b1-msmarco",),
    ),
    Trained(
        2048,
        "of BLOOM, their base; their cards were not read",
        ("cmarkea/bloomz-560m-reranking", "cmarkea/bloomz-3b-guardrail"),
    ),
    Trained(
        2048,
        "of BLOOM, its base; its own source states no longer one",
        (
            *(f"BelleGroup/BELLE-7B-{data}" for data in ("0.2M", "0.6M", "1M", "2M")),
            "bigscience-data/sgpt-bloom-1b7-nli",
            "bofenghuang/vigogne-bloom-7b1-instruct",
            *(f"izhx/udever-bloom-{size}" for size in ("560m", "1b1", "3b", "7b1")),
            *(f"projecte-aina/FLOR-{size}" for size in ("760M", "1.3B", "6.3B")),
            "TigerResearch/tigerbot-7b-base-v2",
            "TigerResearch/tigerbot-7b-sft-v1",
            "TigerResearch/tigerbot-180b-base-v2",
            "TigerResearch/tigerbot-180b-research",
        ),
    ),
    Trained(
        None,
        "not in the cards or on turkunlp.org/gpt3-finnish; arXiv 2311.05640 was not read",
        tuple(
            f"TurkuNLP/gpt3-finnish-{size}" for size in ("small", "medium", "large", "xl", "3B", "8B", "13B")
        ),
    ),
)


def check_supported(config: Config) -> None:
    ranks = config.get("pretraining_tp")
    if config.get("slow_but_exact") and is_number(ranks) and ranks > 1:
        raise Undecided(
            f"slow_but_exact with pretraining_tp {ranks} makes transformers' BLOOM leave out the biases "
            "after attention and MLP, with which it was trained; to convert it with them, give "
            f"{option.overrides} slow_but_exact=false"
        )


FAMILY = Family(
    name="bloom",
    title="BLOOM",
    model_types=("bloom",),
    class_prefixes=("Bloom",),
    checkpoints=CHECKPOINTS,
    sizes=("n_head", "hidden_size", "n_layer"),
    spellings={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    check_supported=check_supported,
    sized={
        (250880, heads, width, layers): f"bigscience/bloom-{size}"
        for size, heads, width, layers in (
            ("560m", 16, 1024, 24),
            ("1b1", 16, 1536, 24),
            ("1b7", 16, 2048, 24),
            ("3b", 32, 2560, 30),
            ("7b1", 32, 4096, 30),
        )
    },
    length_hint="seq_length",
    length_doubt="is absent or 4096 in checkpoints that were trained at 2048",
    limited=False,
    tokenizer_class="BloomTokenizerFast",
    examples=("bigscience/bloom-560m", "bigscience/bloom-1b7", "bigscience/bloomz-7b1"),
)
