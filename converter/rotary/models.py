"""The rotary model types whose frequencies transformers scales by config, and those refused by name.

Each of ``MODELS`` was tried on transformers 4.57.6 and 5.23 with every scaling that it is listed for. What
a config may leave out is listed as both versions agree on it: where they do not (Cohere's base is 10000
in one and 500000 in the other), it has to be in config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["linear", "dynamic"]


@dataclass(frozen=True)
class RotaryModel:
    """How one model_type spells its rotary settings."""

    model_type: str
    base: float | None = 10_000.0
    """The base if config.json has none; None if versions disagree about that, so that it must have one."""
    base_key: str = "rope_theta"
    partial: float | None = None
    """The part of a head that is turned if config.json does not say; None if it is always all of it."""
    partial_key: str = "partial_rotary_factor"
    own_head_dim: bool = False
    """Whether head_dim must be in config.json: hidden_size / num_attention_heads is not its default."""
    reads: tuple[RopeType, ...] = ("linear", "dynamic")
    """The types of ``rope_scaling`` that both versions honour, with the factors that are needed here: a
    dynamic one has 1, and OLMo's class in 4.57 wants more."""
    legacy: bool = False
    """Whether 4.57 accepts ``rope_scaling`` with the keys type and factor alone."""
    ties: bool = False
    """Whether head and embeddings are one tensor if config.json does not say."""
    needs_head_dim: bool = False
    """Whether a dynamic scaling fails where head_dim is only implied, on 4.57 or on both."""


MODELS: dict[str, RotaryModel] = {
    model.model_type: model
    for model in (
        RotaryModel("arcee"),
        RotaryModel("bitnet", base=500_000.0),
        RotaryModel("cohere", base=None, ties=True),
        RotaryModel("cohere2", ties=True),
        RotaryModel("diffllama"),
        RotaryModel("ernie4_5", base=500_000.0, own_head_dim=True, ties=True),
        RotaryModel("exaone4"),
        RotaryModel("flex_olmo", base=500_000.0),
        RotaryModel("gemma", own_head_dim=True, ties=True),
        RotaryModel("gemma2", own_head_dim=True, ties=True),
        RotaryModel("glm", partial=0.5, own_head_dim=True),
        RotaryModel("glm4", partial=0.5, own_head_dim=True),
        RotaryModel("glm4_moe", partial=0.5, own_head_dim=True),
        RotaryModel("gpt_neox", base_key="rotary_emb_base", partial=0.25, partial_key="rotary_pct"),
        RotaryModel("granite"),
        RotaryModel("granitemoe"),
        RotaryModel("granitemoeshared"),
        RotaryModel("helium", base=100_000.0, own_head_dim=True),
        RotaryModel("llama"),
        RotaryModel("mistral", needs_head_dim=True),
        RotaryModel("mixtral", base=1_000_000.0, needs_head_dim=True),
        RotaryModel("olmo", reads=("linear",), legacy=True),
        RotaryModel("olmo2", reads=("linear",), legacy=True),
        RotaryModel("olmoe"),
        RotaryModel("persimmon", base=None, partial=0.5),
        RotaryModel("phi", partial=0.5),
        RotaryModel("phi3", partial=1.0, reads=()),
        RotaryModel("qwen2"),
        RotaryModel("qwen2_moe"),
        RotaryModel("qwen3", own_head_dim=True),
        RotaryModel("qwen3_moe", own_head_dim=True),
        RotaryModel("seed_oss", own_head_dim=True),
        RotaryModel("smollm3", base=2_000_000.0, ties=True),
        RotaryModel("stablelm", partial=0.25),
        RotaryModel("starcoder2", ties=True),
        RotaryModel("vaultgemma", own_head_dim=True, ties=True),
    )
}

FIXED = "its code computes fixed rotary frequencies and reads no scaling from config.json"
FOREIGN = "transformers has no class for it, and the checkpoint's own code is not known to read a scaling"
SEVERAL = "it has several rotary bases, for local and global layers, and which to scale is not clear"
HYBRID = "only some of its layers are attention, and it was not tried"
SCALED = "it is made with a scaling of its own (YaRN or Llama 3's), which a second one would distort"
LATENT = "it turns a part of its heads by frequencies that come with YaRN, and it was not tried"

REFUSED: dict[str, str] = {
    **dict.fromkeys(("codegen", "gptj", "roformer", "esm"), FIXED),
    **dict.fromkeys(("chatglm", "exaone", "internlm", "internlm2", "minicpm", "qwen"), FOREIGN),
    **dict.fromkeys(("gemma3", "gemma3_text", "modernbert", "modernbert-decoder", "olmo3"), SEVERAL),
    **dict.fromkeys(("bamba", "falcon_h1", "jamba", "lfm2", "qwen3_next", "zamba2"), HYBRID),
    **dict.fromkeys(("apertus", "cwm", "gpt_oss", "llama4", "llama4_text", "ministral3"), SCALED),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), LATENT),
    "nemotron": "transformers 4.57 ignores rope_scaling for it",
    "phimoe": "transformers reads only longrope for it",
}
"""model_type -> why not."""
