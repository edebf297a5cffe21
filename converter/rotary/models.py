"""The rotary model types that transformers can scale through the config, and those rejected with an error.

Each entry of ``MODELS`` was tried on transformers 4.57.6 and 5.23 with every scaling that it lists. An
entry gives a default only if both versions agree on it. Where they disagree (Cohere's base is 10000 in one
and 500000 in the other), config.json must have the value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["linear", "dynamic", "yarn"]


@dataclass(frozen=True)
class RotaryModel:
    """The names and defaults of one model_type's rotary settings."""

    model_type: str
    base: float | None = 10_000.0
    """The base if config.json has none; None if versions disagree, so config.json must have one."""
    base_key: str = "rope_theta"
    partial: float | None = None
    """The fraction of a head that is rotated if config.json does not say; None if it is always the whole."""
    partial_key: str = "partial_rotary_factor"
    own_head_dim: bool = False
    """Whether config.json must have head_dim, since its default is not hidden_size / num_attention_heads."""
    reads: tuple[RopeType, ...] = ("linear", "dynamic", "yarn")
    """The types of ``rope_scaling`` that both versions honour with the factors used here. A dynamic scaling
    always has factor 1 here; OLMo's class in 4.57 requires a larger one."""
    legacy: bool = False
    """Whether 4.57 accepts only the keys type and factor in ``rope_scaling``."""
    ties: bool = False
    """Whether head and embeddings share one tensor if config.json does not say."""
    needs_head_dim: bool = False
    """Whether dynamic scaling fails if config.json has no head_dim, in 4.57 or in both versions."""


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
SEVERAL = "it has different rotary bases for local and global layers, and it is unclear which to scale"
HYBRID = "only some of its layers use attention, and scaling it was not tested"
SCALED = "it already has a scaling of its own (YaRN or Llama 3's), which a second one would distort"
LATENT = "it rotates part of each head, by frequencies that come with YaRN, and scaling it was not tested"

REFUSED: dict[str, str] = {
    **dict.fromkeys(("codegen", "gptj", "roformer", "esm"), FIXED),
    **dict.fromkeys(("chatglm", "exaone", "internlm", "internlm2", "minicpm", "qwen"), FOREIGN),
    **dict.fromkeys(("gemma3", "gemma3_text", "modernbert", "modernbert-decoder", "olmo3"), SEVERAL),
    **dict.fromkeys(("bamba", "falcon_h1", "jamba", "lfm2", "qwen3_next", "zamba2"), HYBRID),
    **dict.fromkeys(("apertus", "cwm", "gpt_oss", "llama4", "llama4_text", "ministral3"), SCALED),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), LATENT),
    "hf_olmo": "transformers has no class for it; convert the same model in transformers' layout "
    "(model_type olmo, whose names end in -hf)",
    "jais2": "unlike the first Jais, Jais 2 has no ALiBi, and transformers 4.57 has no class for it",
    "nemotron": "transformers 4.57 ignores rope_scaling for it",
    "phimoe": "transformers reads only longrope for it",
}
"""model_type -> why it is refused."""
