"""What transformers calls for FlashAttention 2 and 3, computed on the CPU in float64.

The arguments, layouts and the alignment of the causal mask (the last query sees the last key) are those of
the packages ``flash_attn`` 2 and ``flash_attn_interface`` (3). Like theirs, these functions take no mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import modeling_flash_attention_utils as flash

IMPLEMENTATIONS = ("flash_attention_2", "flash_attention_3")
TENSORS = ("q", "k", "v")
BOUNDS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
OPTIONS = {
    "flash_attention_2": {
        "dropout_p": 0.0,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "alibi_slopes": None,
        "deterministic": False,
    },
    "flash_attention_3": {
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "attention_chunk": 0,
        "softcap": 0.0,
        "num_splits": 1,
        "deterministic": False,
    },
}
"""Arguments after the tensors, and their defaults."""
IMPLEMENTED = {"softmax_scale", "causal", "alibi_slopes", "dropout_p"}


class Calls:
    """What the functions were called with."""

    def __init__(self) -> None:
        self.plain: list[tuple[int, ...]] = []
        """Shapes [B, Q, H, D] of the queries of ``flash_attn_func``."""
        self.varlen: list[list[int]] = []
        """``cu_seqlens_q`` of ``flash_attn_varlen_func``."""

    def rows(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
        """``flash_attn_func``: tensors [B, tokens, heads, D]."""
        assert q.shape[0] == k.shape[0] == v.shape[0]
        self.plain.append(tuple(q.shape))
        return torch.stack([attention(*row, **how) for row in zip(q, k, v, strict=True)])

    def packed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *bounds: Any, **how: Any
    ) -> torch.Tensor:
        """``flash_attn_varlen_func``: tensors [tokens, heads, D]. Where documents start and end is int32."""
        ends_q, ends_k, longest_q, longest_k = bounds
        assert ends_q.dtype == ends_k.dtype == torch.int32
        assert ends_q.diff().max() <= longest_q
        assert ends_k.diff().max() <= longest_k
        self.varlen.append(ends_q.tolist())
        slopes = how.pop("alibi_slopes", None)
        pieces = []
        for row, (a, b, c, d) in enumerate(zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False)):
            if slopes is not None:
                how["alibi_slopes"] = slopes if slopes.dim() == 1 else slopes[row]
            pieces.append(attention(q[a:b], k[c:d], v[c:d], **how))
        return torch.cat([*pieces, torch.zeros_like(q[ends_q[-1] :])])


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    alibi_slopes: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """One document: queries [Q, H, D], keys and values [K, H or fewer, D]; outputs like the queries.

    ``alibi_slopes`` [H] are those of a bias of -slope * |distance|, with the last query at the last key.
    """
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
    assert q.dtype == k.dtype == v.dtype
    groups = q.shape[1] // k.shape[1]
    query, key, value = (states.double().transpose(0, 1) for states in (q, k, v))
    scores = query @ key.repeat_interleave(groups, 0).transpose(1, 2) * softmax_scale
    if causal:
        later = torch.ones_like(scores[0]).bool().triu(len(k) - len(q) + 1)
        scores = scores.masked_fill(later, -torch.inf)
    if alibi_slopes is not None:
        assert alibi_slopes.dtype == torch.float32
        places = torch.arange(len(q))[:, None] + (len(k) - len(q))
        scores = scores - alibi_slopes.double()[:, None, None] * (places - torch.arange(len(k))).abs()
    output = F.dropout(scores.softmax(-1), dropout_p) @ value.repeat_interleave(groups, 0)
    return output.transpose(0, 1).to(q.dtype)


def with_signature(
    function: Callable[..., torch.Tensor], tensors: tuple[str, ...], options: dict[str, Any]
) -> Any:
    """A function with these arguments, which transformers looks at, and those options alone that it has."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in tensors]
    parameters += [inspect.Parameter(name, kind, default=value) for name, value in options.items()]
    signature = inspect.Signature(parameters)

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        for name in options.keys() - IMPLEMENTED:
            assert given.arguments[name] == options[name], name
        return function(
            *(given.arguments[name] for name in tensors),
            **{name: given.arguments[name] for name in sorted(IMPLEMENTED & options.keys())},
        )

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def install(monkeypatch: pytest.MonkeyPatch, implementation: str) -> Calls:
    """Puts the functions where transformers would import the package's."""
    calls, options = Calls(), OPTIONS[implementation]
    functions = (
        with_signature(calls.rows, TENSORS, options),
        with_signature(calls.packed, TENSORS + BOUNDS, options),
    )

    def imports(*_: Any, **__: Any) -> tuple[Any, ...]:
        paged = [None] if hasattr(flash, "_flash_with_kvcache_fn") else []  # not in transformers 4.57
        return (*functions, *paged, flash._pad_input, flash._unpad_input)

    monkeypatch.setattr(flash, "_lazy_imports", imports)
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_process_flash_kwargs_fn"):
        monkeypatch.setattr(flash, name, None, raising=False)
    # The packages take half precision only. So transformers looks for the dtype of a Linear layer, and ends
    # with StopIteration if a model has Conv1D instead, as JAIS.
    monkeypatch.setattr("transformers.integrations.flash_attention.next", first, raising=False)
    return calls


def first(linear_layers: Iterator[Any]) -> Any:
    """The first layer, or one in float32 if there is none."""
    return next(linear_layers, torch.nn.Linear(1, 1))
