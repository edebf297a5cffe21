# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Configuration of a Refact-1.6B checkpoint with scaled ALiBi slopes."""

from .ntk_config import NtkDecoderConfig, plan_name


class NtkRefactConfig(NtkDecoderConfig):
    """The keys of a Refact config, and:

    Args:
        packed_projections: whether key and value share one tensor, and gate and up another, as in the
            checkpoint's current revision. In its first revision they are four tensors.
        final_norm_bias: whether ``ln_f`` has a bias, as in the first revision.
    """

    model_type = "ntk_refact"
    __init__ = NtkDecoderConfig.__init__
    attribute_map = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    defaults = {
        "vocab_size": 49216,
        "n_positions": 4096,
        "n_embd": 2048,
        "n_layer": 32,
        "n_head": 32,
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "use_cache": True,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "packed_projections": True,
        "final_norm_bias": False,
    }

    @property
    def num_key_value_heads(self) -> int:
        """All query heads share one key and one value head."""
        return 1

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """How tensor parallelism divides the weights.

        Every process has the one key and value head. The gate and the other half of the MLP share a tensor
        in one of the two layouts, so what they compute is gathered.
        """
        halves = ("gate_up_proj",) if self.packed_projections else ("linear_1", "linear_3")
        return {
            "h.*.attn.q": "colwise_rep",
            "h.*.attn.c_proj": "rowwise",
            **{plan_name(f"h.*.mlp.{half}"): "colwise_rep" for half in halves},
            "h.*.mlp.c_proj": "rowwise_rep",
        }

    # transformers 5.19 adds an entry for embed_tokens, which this model does not have.
    base_model_tp_plan = base_model_tp_plan.setter(lambda self, _: None)
