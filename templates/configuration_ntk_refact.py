"""Configuration of a Refact-1.6B checkpoint with scaled ALiBi slopes."""

from typing import Any

from transformers import PretrainedConfig


class NtkRefactConfig(PretrainedConfig):
    """Refact's own keys, and:

    Args:
        packed_projections: whether key and value are one tensor, and gate and up another, as in the
            checkpoint's present revision; in its first one each is a tensor of its own.
        final_norm_bias: whether ``ln_f`` has a bias, as in the first revision.
        alibi_scaling: how the slopes are scaled; None leaves them as trained. See ``Alibi`` in
            ntk_alibi.py for the keys.
    """

    model_type = "ntk_refact"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    def __init__(
        self,
        vocab_size: int = 49216,
        n_positions: int = 4096,
        n_embd: int = 2048,
        n_layer: int = 32,
        n_head: int = 32,
        n_inner: int | None = None,
        layer_norm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        packed_projections: bool = True,
        final_norm_bias: bool = False,
        alibi_scaling: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.vocab_size = vocab_size
        self.n_positions = n_positions
        self.n_embd = n_embd
        self.n_layer = n_layer
        self.n_head = n_head
        self.n_inner = n_inner
        self.layer_norm_epsilon = layer_norm_epsilon
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.packed_projections = packed_projections
        self.final_norm_bias = final_norm_bias
        self.alibi_scaling = alibi_scaling
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
