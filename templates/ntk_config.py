# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""What the configurations of all families share. A family states its keys and their defaults."""

import copy
import re
from typing import Any

import transformers

# This is the first of the repository's files that transformers imports, whatever it loads.
if tuple(map(int, transformers.__version__.split(".")[:2])) < (4, 57):
    raise ImportError(
        f"this model needs transformers>=4.57; transformers {transformers.__version__} is installed: "
        "pip install -U 'transformers>=4.57'"
    )
# Channels that attention appends to the heads of a decoder: for the slope (ntk_alibi.py), and for the curve
# that only a concave penalty has (ntk_concave.py). Fused kernels want heads of a multiple of 8.
FOLDED_CHANNELS = 8
CURVE_CHANNELS = 8


def plan_name(name: str) -> str:
    """A module's name as a plan of tensor parallelism must spell it.

    transformers 4.57 looks up names after it has replaced every number in them by ``*``.
    """
    if transformers.__version__.startswith("4."):
        return re.sub(r"\d+", "*", name)
    return name


class NtkConfig(transformers.PretrainedConfig):
    """A family's own keys, and:

    Args:
        alibi_scaling: how the slopes are scaled; None keeps the trained slopes. See ``Alibi`` in
            ntk_alibi.py for the keys.

    Each subclass names ``__init__`` again, or transformers 5 would give it one of its own.
    """

    defaults = {}
    """The family's own keys, with the values that they have where config.json lacks them."""

    def __init__(self, **kwargs: Any):
        values = {"alibi_scaling": None, **copy.deepcopy(self.defaults), **kwargs}
        for computed in ("head_dim", "num_key_value_heads"):  # some files store what is a property below
            values.pop(computed, None)
        super().__init__(**values)
        if "use_cache" in values:
            self.use_cache = values["use_cache"]  # transformers 5 leaves it out


class NtkDecoderConfig(NtkConfig):
    """The configuration of a decoder."""

    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    __init__ = NtkConfig.__init__

    @property
    def head_dim(self) -> int:
        """The size of a head in the cache, where keys and values have the folded channels too."""
        return self.hidden_size // self.num_attention_heads + self.folded_channels

    @property
    def folded_channels(self) -> int:
        """Channels that are appended to each head."""
        if self.alibi_scaling is not None and self.alibi_scaling.get("type") == "concave":
            return FOLDED_CHANNELS + CURVE_CHANNELS
        return FOLDED_CHANNELS

    @property
    def score_scale(self) -> float:
        """The factor on q.k: 1 / sqrt(head size), unless a family has another."""
        return (self.hidden_size // self.num_attention_heads) ** -0.5

    @property
    def num_key_value_heads(self) -> int:
        """The number of key and value heads; each is shared by consecutive query heads."""
        return self.num_attention_heads
