"""Rotary models in float64: what LLaMA and GPT-NeoX compute, stated from their papers and checkpoints.

Rotation: Su et al., RoFormer (arXiv 2104.09864), with channel i of a head paired with channel i + d/2,
as both store them. LLaMA: Touvron et al. 2023 (arXiv 2302.13971), with shared keys and values and, for
Qwen2, biases. GPT-NeoX: Black et al. 2022 (arXiv 2204.06745); its fused map holds, of each head, query,
key and value in turn. The frequencies are an argument, and so is the amplitude that YaRN gives the rotation
(Peng et al., arXiv 2309.00071): nothing here knows how they were scaled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.reference.layers import Array, Config, Ints, Tensors, gelu_exact


def turned(states: Array, positions: Ints, frequencies: Array, amplitude: float) -> Array:
    """Each pair of the first 2 * len(frequencies) channels, turned and stretched; [heads, L, head_dim]."""
    half = len(frequencies)
    angles = positions[:, None] * frequencies
    cosine, sine = amplitude * np.cos(angles), amplitude * np.sin(angles)
    first, second, rest = states[..., :half], states[..., half : 2 * half], states[..., 2 * half :]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1)


def attention(query: Array, key: Array, value: Array) -> Array:
    """Causal attention; [heads, L, head_dim], of keys and values perhaps fewer heads."""
    groups = len(query) // len(key)
    key, value = key.repeat(groups, axis=0), value.repeat(groups, axis=0)
    scores = query @ key.swapaxes(1, 2) / math.sqrt(query.shape[-1])
    length = scores.shape[-1]
    scores = np.where(np.tril(np.ones((length, length), dtype=bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed: Array = (weights / weights.sum(axis=-1, keepdims=True)) @ value
    return mixed.swapaxes(0, 1).reshape(length, -1)


def logits(
    config: Config,
    tensors: Mapping[str, NDArray[Any]],
    tokens: Ints,
    frequencies: tuple[float, ...],
    amplitude: float = 1.0,
) -> Array:
    """[L, vocabulary] of one row of tokens."""
    network = {"gpt_neox": _neox}.get(config["model_type"], _llama)
    return network(config, tensors, tokens, np.array(frequencies), amplitude)


def _heads(states: Array, size: int) -> Array:
    return states.reshape(len(states), -1, size).swapaxes(0, 1)


def _llama(
    config: Config, stored: Mapping[str, NDArray[Any]], tokens: Ints, frequencies: Array, amplitude: float
) -> Array:
    tensors = Tensors(stored, prefix="model.")
    epsilon = config.get("rms_norm_eps", 1e-6)
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    positions = np.arange(len(tokens))

    def norm(x: Array, name: str) -> Array:
        scale: Array = tensors[f"{name}.weight"]
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * scale

    def project(x: Array, name: str) -> Array:
        return tensors.linear(x, name, bias=f"model.{name}.bias" in stored)

    x: Array = tensors["embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        block = f"layers.{layer}"
        y = norm(x, f"{block}.input_layernorm")
        query, key, value = (_heads(project(y, f"{block}.self_attn.{part}_proj"), size) for part in "qkv")
        query, key = (turned(states, positions, frequencies, amplitude) for states in (query, key))
        x = x + project(attention(query, key, value), f"{block}.self_attn.o_proj")
        y = norm(x, f"{block}.post_attention_layernorm")
        gate = project(y, f"{block}.mlp.gate_proj")
        x = x + project(
            gate / (1 + np.exp(-gate)) * project(y, f"{block}.mlp.up_proj"), f"{block}.mlp.down_proj"
        )
    result: Array = norm(x, "norm") @ tensors["lm_head.weight"].T
    return result


def _neox(
    config: Config, stored: Mapping[str, NDArray[Any]], tokens: Ints, frequencies: Array, amplitude: float
) -> Array:
    tensors = Tensors(stored, prefix="gpt_neox.")
    epsilon = config.get("layer_norm_eps", 1e-5)
    positions = np.arange(len(tokens))
    heads = config["num_attention_heads"]

    x: Array = tensors["embed_in.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        block = f"layers.{layer}"
        y = tensors.layer_norm(x, f"{block}.input_layernorm", epsilon)
        fused = tensors.linear(y, f"{block}.attention.query_key_value", bias=True)
        query, key, value = fused.reshape(len(tokens), heads, 3, -1).transpose(2, 1, 0, 3)
        query, key = (turned(states, positions, frequencies, amplitude) for states in (query, key))
        mixed = tensors.linear(attention(query, key, value), f"{block}.attention.dense", bias=True)
        y = tensors.layer_norm(x, f"{block}.post_attention_layernorm", epsilon)
        y = gelu_exact(tensors.linear(y, f"{block}.mlp.dense_h_to_4h", bias=True))
        x = x + mixed + tensors.linear(y, f"{block}.mlp.dense_4h_to_h", bias=True)
    result: Array = tensors.layer_norm(x, "final_layer_norm", epsilon) @ tensors["embed_out.weight"].T
    return result
