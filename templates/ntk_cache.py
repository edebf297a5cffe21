# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""What a forward pass finds in its cache; and a cache that grows in place.

transformers' ``DynamicCache`` copies all keys and values for every new token. ``GrowingLayer`` keeps room for
more tokens behind the last one, so a new token copies only itself.
"""

import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import Cache, DynamicCache, cache_utils
from transformers.modeling_outputs import BaseModelOutputWithPast

# Without this class, caches stay as they are.
DynamicLayer = getattr(cache_utils, "DynamicLayer", object)
# The name of a cache in arguments and outputs; transformers 5.24 shortened it.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
# Whether the model updates the cache of continuous batching, and not the attention function.
UPDATES_PAGED = CACHE == "cache"
# Up to transformers 5.3, a static cache has to be told the places of new tokens.
TAKES_SLOTS = "cache_kwargs" in inspect.signature(Cache.update).parameters

# Room is made for a sixteenth of the tokens, and for no fewer than this number.
ROOM_DIVISOR, LEAST_ROOM = 16, 128


class GrowingLayer(DynamicLayer):
    """A layer of a ``DynamicCache``. Its keys and values are views on the start of larger tensors.

    Whatever else transformers does with a layer (crop, reorder, move, ...) replaces ``keys`` and ``values``.
    The next update then finds that they are not its own views, and copies them once.
    """

    room: tuple[torch.Tensor, torch.Tensor] | None = None
    """The larger tensors of keys and values, [B, heads, more tokens, size]."""
    views: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    """``keys`` and ``values`` as the last update left them."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds keys and values [B, heads, new tokens, size]; returns all of them.

        Values may be narrower than keys. The rest of them is zeros, which the room has already.
        """
        # Autograd keeps what attention has read, and a compiled graph has no room of its own.
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            self.room, self.views = None, (None, None)
            return super().update(key_states, value_states, *args, **kwargs)
        seen, new = self.get_seq_length(), key_states.shape[-2]
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        if seen == 0:  # a prompt needs no room yet, and its keys are not copied
            missing = key_states.shape[-1] - value_states.shape[-1]
            self.keys, self.values = key_states, F.pad(value_states, (0, missing))
            return self.keys, self.values
        if key_states.shape[0] != self.keys.shape[0]:  # transformers' method says what is wrong
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.has_room(seen + new):
            self.room = self.make_room(seen + new)
        for room, states in zip(self.room, (key_states, value_states), strict=True):
            room[..., seen : seen + new, : states.shape[-1]] = states
        self.keys, self.values = self.views = tuple(room[..., : seen + new, :] for room in self.room)
        return self.keys, self.values

    def make_room(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tensors for more than so many tokens, which begin with the keys and values of those so far."""
        seen = self.keys.shape[-2]
        tokens += max(LEAST_ROOM, tokens // ROOM_DIVISOR)
        keys = self.keys.new_empty(*self.keys.shape[:2], tokens, self.keys.shape[-1])
        values = self.values.new_zeros(*self.values.shape[:2], tokens, self.values.shape[-1])
        keys[..., :seen, :], values[..., :seen, :] = self.keys, self.values
        return keys, values

    def has_room(self, tokens: int) -> bool:
        """Whether this many tokens fit behind the start of the room, and it holds this layer's states."""
        if self.room is None or self.keys is not self.views[0] or self.values is not self.views[1]:
            return False
        writable = torch.is_inference_mode_enabled() or not self.room[0].is_inference()
        return writable and tokens <= self.room[0].shape[-2]

    def __reduce__(self) -> tuple:
        """Copies and pickles are transformers' own layer, without the room."""
        state = {name: value for name, value in vars(self).items() if name not in ("room", "views")}
        for name in ("keys", "values"):
            if isinstance(state.get(name), torch.Tensor):
                state[name] = state[name].clone()
        return DynamicLayer, (), state


def grow(cache: Cache | None, layers: int) -> None:
    """Makes a ``DynamicCache`` of this many layers grow in place; leaves other layers as they are."""
    offloads = getattr(cache, "offloading", False)
    if not isinstance(cache, DynamicCache) or offloads or torch.compiler.is_compiling():
        return
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        cache.layers += [DynamicLayer() for _ in range(layers - len(cache.layers))]
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[index] = GrowingLayer()
            vars(cache.layers[index]).update(vars(layer))


def grows_in_place(cache: Cache | None) -> bool:
    """Whether all layers of the cache grow in place in this pass, so they take values without zeros."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    layers = getattr(cache, "layers", ())
    return len(layers) > 0 and all(type(layer) is GrowingLayer for layer in layers)


class CacheState(NamedTuple):
    """What a forward pass finds in its cache."""

    used: bool
    """Whether there is a cache, which may be empty."""
    seen: Any
    """Number of cached tokens: a tensor in compiled decoding over a static cache, else an int."""
    keys: int
    """Number of keys, cached and new. Compiled decoding needs a constant: all that the cache can hold."""
    capacity: int | None
    """Number of keys that a static cache can hold."""
    slots: torch.Tensor
    """int64 [Q]: the places of the new keys in the cache."""
    quantised: bool
    """Whether the cache rounds keys, so that they are folded after they leave it."""

    @property
    def static_in_graph(self) -> bool:
        """Whether this is compiled decoding over a static cache, whose number of tokens is not known."""
        return isinstance(self.seen, torch.Tensor)


def cache_state(config: Any, hidden_states: torch.Tensor, past_key_values: Any) -> CacheState:
    """What the cache holds, and what it will hold.

    Raises:
        ValueError: the cache holds heads without folded channels, as in prefix tuning.
    """
    queries = hidden_states.shape[1]
    new = torch.arange(queries, device=hidden_states.device)
    if past_key_values is None:
        return CacheState(used=False, seen=0, keys=queries, capacity=None, slots=new, quantised=False)
    layers = getattr(past_key_values, "layers", [])
    seen = past_key_values.get_seq_length()
    if isinstance(seen, torch.Tensor) and not torch.compiler.is_compiling():
        seen = int(seen)
    capacity = getattr(layers[0], "max_cache_len", None) if layers else None
    keys = capacity if isinstance(seen, torch.Tensor) else seen + queries
    quantised = any(hasattr(layer, "_quantize") for layer in layers)
    if layers and not quantised:
        check_head_size(config, layers[0])
    return CacheState(True, seen, keys, capacity, new + seen, quantised)


def check_head_size(config: Any, layer: Any) -> None:
    """Raises ValueError if the cached keys of a layer, which may be None, are not of this model."""
    keys = getattr(layer, "keys", None)
    if isinstance(keys, torch.Tensor) and keys.dim() == 4 and keys.shape[-1] != config.head_dim:
        raise ValueError(
            f"the cache holds heads of size {keys.shape[-1]}, but this model's have {config.head_dim}, "
            "with channels for positions. Prefix tuning is not supported; use LoRA"
        )
