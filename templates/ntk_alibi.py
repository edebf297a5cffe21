# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""ALiBi with scaled slopes, computed as part of the attention's dot product.

**Scaling.** Stock slopes: Press et al., ICLR 2022 (arXiv 2108.12409) and MosaicML's llm-foundry (bias_max).
NTK scaling: github.com/keezen/ntk_alibi, generalised to slopes of any number and order.
Linear scaling: Al-Khateeb et al. 2023 (arXiv 2310.13017).
Scaling by parts: the counterpart of "NTK by parts" for rotary frequencies (u/bloc97, July 2023).
A concave penalty is no scaled slope; it is in ntk_concave.py.
Temperatures: a factor on the content that grows with the length, as in YaRN (arXiv 2309.00071) and InfoScale
(arXiv 2501.08570), but one for each head.

**Folding.** In causal ALiBi, the score of a query at position i and a key at position j is

    s * q.k - m * (i - j)        s: the factor on q.k, usually 1 / sqrt(D)        m: the head's slope

Softmax ignores a term that is the same for all keys of a query, so ``s * q.k + m * j`` gives the same
probabilities. This is itself a dot product: append m / s to the query and j to the key, and any fused
attention kernel computes ALiBi without a bias tensor. What is appended are the folded channels.

Half precision cannot hold m / s or j exactly, so both are split into parts that it can hold. A position has
three digits in base 256, which reach 2 ** 24. bfloat16 has 8 bits, so it holds a digit exactly:

    70,000  =  1 * 65536 + 17 * 256 + 112

Keys hold these three numbers divided by 256, so that they fit into float16's range too. Queries hold
w = 256 * m / s in two parts: w0 has its 8 leading bits, and w1 is the rest. So the channels are

    channel      0      1      2            3      4      5            6          7
    query        w0     w0     w0           w1     w1     w1           128 / s    0
    key          256    17     112 / 256    256    17     112 / 256    0          0

and their product is (w0 + w1) * 273.4375 = m / s * 70,000. A padded key has -256 in channel 6, and 0 in the
others: its score is then far below that of every real key. Channel 7 is unused, because fused kernels want a
multiple of 8.

Shapes below: B rows, H heads, T tokens, D head size.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.backends import cuda
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.attention import SDPBackend, sdpa_kernel

# The base of the digits of a position. Kernels sum the channels in float32, so the rounding error grows with
# slope * position, as in stock models.
BASE = 256
# The score of a padded key is the product of these two, below the score of any real key. Channel 6 of queries
# has the first one, divided by the factor on q.k; float16 can hold it for every factor down to 1 / 256.
PADDED_QUERY, PADDED_KEY = 128.0, -256.0
# From so many queries on, cuDNN's kernel saves more than the 40 ms in which it plans for each new length.
CUDNN_QUERIES = 16384
KERNELS_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Keys of alibi_scaling: of any static scaling, of any dynamic one, and those that only these types have.
STATIC_KEYS = {"type", "factor"}
DYNAMIC_KEYS = {"type", "train_seq_len", "dynamic", "rate"}
OWN_KEYS = {
    "fitted": {"exponents", "temperatures"},
    "by-parts": {"ramp"},
    "concave": {"power"},
}
# With larger exponents, slopes would not stay within float32.
LARGEST_EXPONENT = 4
# The powers that the channels of a concave penalty hold, see ntk_concave.py. Conversions write 8.
POWERS = (8, 16)


def stock_slopes(num_heads: int, bias_max: float = 8.0) -> list[float]:
    """The stock ALiBi slopes of ``num_heads`` heads, in head order."""
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-bias_max * i / whole) for i in range(1, whole + 1)]
    odd = range(1, 2 * (num_heads - whole), 2)
    return slopes + [2.0 ** (-bias_max * i / (2 * whole)) for i in odd]


def exponents(method: str, slopes: Sequence[float], ramp: Sequence[float] = ()) -> list[float]:
    """The exponent t of each head in ``m' = m * a ** -t``, where a is the scale factor.

    Args:
        method: the type of the scaling, other than fitted and concave.
        slopes: the stock slopes.
        ramp: of by-parts, two numbers of tokens.

    Raises:
        ValueError: an unknown method, or a ramp that is none or scales no head.
    """
    if method == "ntk":
        return ntk_exponents(slopes)
    if method == "by-parts":
        return by_parts_exponents(slopes, ramp)
    if method == "linear":
        return [1.0] * len(slopes)
    if method == "ntk-published":
        return published_exponents(len(slopes))
    raise ValueError(f"alibi_scaling: unknown type {method!r}")


def ntk_exponents(slopes: Sequence[float]) -> list[float]:
    """0 for the steepest head to 1 for the flattest, linear in the slope's logarithm (1 if all are equal)."""
    top, bottom = math.log(max(slopes)), math.log(min(slopes))
    if top == bottom:
        return [1.0] * len(slopes)
    return [(top - math.log(m)) / (top - bottom) for m in slopes]


def published_exponents(heads: int) -> list[float]:
    """The original code's (h - 1) / (H - 1). It does not scale the heads beyond the largest power of two."""
    if heads == 1:
        return [1.0]
    whole = 2 ** math.floor(math.log2(heads))
    return [h / (heads - 1) for h in range(whole)] + [0.0] * (heads - whole)


def by_parts_exponents(slopes: Sequence[float], ramp: Sequence[float]) -> list[float]:
    """From 0 for spans up to ramp[0] tokens to 1 from ramp[1] on, linear in the span's logarithm.

    A head's span is the distance at which its bias reaches -5 nats.
    """
    if len(ramp) != 2 or not 0 < ramp[0] < ramp[1] < math.inf:
        raise ValueError(f"alibi_scaling: {ramp} is not a ramp, two numbers of tokens")
    start, end = math.log(ramp[0]), math.log(ramp[1])
    found = [min(max((math.log(5 / m) - start) / (end - start), 0.0), 1.0) for m in slopes]
    if not any(found):
        raise ValueError(f"alibi_scaling: the ramp {ramp} scales no head")
    return found


def fitted_rows(rows: Any, heads: int, counts: set[int]) -> list[list[float]]:
    """The rows of a fitted scaling: as many as ``counts`` allows, of one number per head; or a ValueError."""
    shape = []
    if isinstance(rows, list):
        shape = [len(row) if isinstance(row, list) else 0 for row in rows]
    if len(shape) not in counts or any(length != heads for length in shape):
        wanted = " or ".join(map(str, sorted(counts)))
        raise ValueError(f"alibi_scaling: expected {wanted} rows of {heads} numbers, got rows of {shape}")
    return rows


class Alibi:
    """The slopes of one model, scaled as ``alibi_scaling`` in its config says, and its temperatures.

    With slopes m, exponents t, the scale factor a and the factor s on q.k, the score is

        s * q.k - m * a ** -t * (i - j)

    A fitted scaling may have temperatures u. They multiply the content, not the bias:

        s * a ** u * q.k - m * a ** -t * (i - j)

    The factor a of a static scaling is a constant. That of a dynamic one grows with the tokens of the row
    ("length") or those that a query sees ("position"), so each forward pass computes it.

    Do not change an instance: its slopes are copied to a device once and reused. Make a new one.

    Args:
        slopes: the stock slopes, one per head.
        scaling: None (no scaling); ``{"type", "factor"}`` (static); or ``{"type", "train_seq_len"}``
            with optional ``"dynamic"`` ("length", the default, or "position") and ``"rate"`` (1.0). The type
            by-parts, and no other, has a ``"ramp"``; the type fitted, and no other, has ``"exponents"``,
            and may have ``"temperatures"`` in as many rows. The type concave has ``"train_seq_len"``,
            ``"dynamic"``: "position", and a ``"power"``.
        layers: the number of layers, which fitted exponents may tell apart.

    Raises:
        ValueError: the scaling is unknown or incomplete. The model must not silently run unscaled.
    """

    slopes: list[list[float]]
    """One row for all layers, or one per layer: m * a ** -t if the scaling is static, else m."""
    exponents: list[list[float]]
    """t, in as many rows."""
    temperatures: list[list[float]] | None
    """In as many rows: a ** u if the scaling is static, else u. None without temperatures."""
    dynamic: str | None
    """What the factor a grows with: "length" or "position"; None if it does not."""
    train_length: float
    """Of a dynamic scaling or a concave penalty, the trained length in tokens."""
    rate: float
    """Of a dynamic scaling, whose factor a is ``rate * tokens / train_length``, and at least 1."""
    power: int | None
    """Of a concave penalty, which is not a scaled slope: its channels are in ntk_concave.py."""

    def __init__(self, slopes: Sequence[float], scaling: Mapping[str, Any] | None = None, layers: int = 1):
        self.slopes = [list(slopes)]
        self.exponents = [[0.0] * len(slopes)]
        self.temperatures = None
        self.dynamic = None
        self.power = None
        self._tensors: dict[Hashable, torch.Tensor] = {}
        if scaling is None:
            return
        try:
            if scaling.get("type") == "concave":
                self._read_concave(scaling)
            else:
                self._read_scaled_slopes(scaling, layers)
        except (AttributeError, KeyError, TypeError) as error:  # something else stands for a number
            raise ValueError(f"alibi_scaling: cannot honour {scaling}") from error

    def _read_scaled_slopes(self, scaling: Mapping[str, Any], layers: int) -> None:
        """Takes over a scaling of the slopes; raises ValueError for one that cannot be honoured."""
        method, is_static = scaling.get("type"), "factor" in scaling
        known = STATIC_KEYS if is_static else DYNAMIC_KEYS
        if unknown := set(scaling) - known - OWN_KEYS.get(method, set()):
            raise ValueError(f"alibi_scaling: {dict(scaling)} has no use for {', '.join(sorted(unknown))}")
        self._read_exponents(scaling, layers)
        if is_static:
            self._read_factor(scaling)
        else:
            self._read_growth(scaling)

    def _read_exponents(self, scaling: Mapping[str, Any], layers: int) -> None:
        """Takes over what differs from head to head: exponents and temperatures."""
        [slopes] = self.slopes
        if scaling.get("type") == "fitted":
            self.exponents = fitted_rows(scaling.get("exponents"), len(slopes), {1, layers})
            if "temperatures" in scaling:
                self.temperatures = fitted_rows(scaling["temperatures"], len(slopes), {len(self.exponents)})
        else:
            self.exponents = [exponents(scaling.get("type"), slopes, scaling.get("ramp", ()))]
        for row in (*self.exponents, *(self.temperatures or ())):
            for number in row:
                if not (isinstance(number, int | float) and abs(number) <= LARGEST_EXPONENT):
                    raise ValueError(f"alibi_scaling: cannot honour {dict(scaling)}")

    def _read_factor(self, scaling: Mapping[str, Any]) -> None:
        """Scales the slopes, and the temperatures, by a static factor."""
        factor = float(scaling["factor"])
        if not 1 <= factor < math.inf:
            raise ValueError(f"alibi_scaling: cannot honour {dict(scaling)}")
        [slopes] = self.slopes
        self.slopes = [[m * factor**-t for m, t in zip(slopes, row, strict=True)] for row in self.exponents]
        if self.temperatures is not None:
            self.temperatures = [[factor**u for u in row] for row in self.temperatures]

    def _read_growth(self, scaling: Mapping[str, Any]) -> None:
        """Takes over how the factor of a dynamic scaling grows; the slopes stay as they are."""
        self.train_length = float(scaling.get("train_seq_len", 0))
        self.rate = float(scaling.get("rate", 1.0))
        self.dynamic = scaling.get("dynamic", "length")
        is_sound = 0 < self.train_length < math.inf and 0 < self.rate < math.inf
        if not is_sound or self.dynamic not in ("length", "position"):
            raise ValueError(f"alibi_scaling: cannot honour {dict(scaling)}")
        [slopes] = self.slopes
        self.slopes = [list(slopes) for _ in self.exponents]

    def _read_concave(self, scaling: Mapping[str, Any]) -> None:
        """Takes over a concave penalty; raises ValueError for one that cannot be honoured."""
        length, power = scaling["train_seq_len"], scaling["power"]
        is_complete = set(scaling) == {"type", "train_seq_len", "dynamic", "power"}
        is_sound = scaling["dynamic"] == "position" and 0 < length < math.inf and power in POWERS
        if not (is_complete and is_sound):
            raise ValueError(f"alibi_scaling: cannot honour {dict(scaling)}")
        self.dynamic, self.train_length, self.power = "position", float(length), int(power)

    def __getstate__(self) -> dict[str, Any]:
        # A copy, or a pickle that is loaded on another device, starts without tensors.
        return {**self.__dict__, "_tensors": {}}

    def on(self, device: torch.device) -> torch.Tensor:
        """Slopes and exponents as one tensor, float32 [2, rows, 1, H, 1], copied to the device on first use.

        With temperatures, which come third, it is [3, rows, 1, H, 1].

        This is not a buffer, because ``from_pretrained`` of transformers 5 would leave it uninitialised and
        ``model.half()`` would round it. A graph that is compiled before the first eager forward pass on its
        device has the values as constants instead.
        """

        def make() -> torch.Tensor:
            rows = [self.slopes, self.exponents]
            if self.temperatures is not None:
                rows.append(self.temperatures)
            return torch.tensor(rows, dtype=torch.float32, device=device)[:, :, None, :, None]

        return self._kept(device, make)

    def static_query_channels(self, device: torch.device, dtype: torch.dtype, scaling: float) -> torch.Tensor:
        """``query_channels`` of a scaling that is not dynamic, [rows, 1, H, 1, 8], made once and reused.

        Args:
            dtype: that of the channels.
            scaling: the factor on q.k.
        """

        def make() -> torch.Tensor:
            return query_channels(self.on(device)[0], scaling).to(dtype)

        return self._kept((device, dtype, scaling), make)

    def _kept(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The tensor that ``make`` made when it was first asked for."""
        tensor = self._tensors.get(key)
        if tensor is None:
            with torch.inference_mode(False):  # training cannot use a tensor made in inference mode
                tensor = make()
            # While a graph is traced, this is only a placeholder for a tensor: do not keep it.
            if type(tensor) is torch.Tensor and not is_traced():
                self._tensors[key] = tensor
        return tensor

    def slopes_at(
        self,
        positions: torch.Tensor,
        lengths: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The scaled slopes for queries at these positions, in one row for all layers or one row per layer.

        Args:
            positions: int64 [B or 1, T], the queries' positions.
            lengths: int64 [B or 1, 1 or T], the number of tokens in the row, or the document, of each query;
                None if a row's last position is its length - 1.
            values: from ``on``, for models that keep them on their device.

        Returns:
            float32 [rows, 1, H, 1] (static), [rows, B or 1, H, 1 or T] (length) or [rows, B or 1, H, T]
            (position).

        Raises:
            ValueError: the scaling is concave, so its penalty has no slope.
        """
        if self.power is not None:
            raise ValueError("alibi_scaling: the type concave works in decoders only")
        if values is None:
            values = self.on(positions.device)
        slopes, powers = values[:2]
        if self.dynamic is None:
            return slopes
        return slopes * self.growing_factor(positions, lengths) ** -powers

    def query_factors(
        self,
        positions: torch.Tensor,
        lengths: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """``a ** u``, to multiply the queries by; None without temperatures.

        Arguments and shapes are those of ``slopes_at``.
        """
        if self.temperatures is None:
            return None
        if values is None:
            values = self.on(positions.device)
        temperatures = values[2]
        if self.dynamic is None:
            return temperatures
        return self.growing_factor(positions, lengths) ** temperatures

    def growing_factor(self, positions: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """The factor a of a dynamic scaling, float32 [B or 1, 1, 1 or T]; see ``slopes_at``."""
        if self.dynamic == "position":
            tokens = positions + 1
        elif lengths is not None:
            tokens = lengths
        else:
            tokens = positions[:, -1:] + 1
        return (self.rate * tokens.float() / self.train_length).clamp(min=1.0)[:, None, :]


def query_channels(slopes: torch.Tensor, scaling: float) -> torch.Tensor:
    """The folded channels of queries: the slope in two parts; see the head of this file.

    Both parts together have 16 bits of the slope, however bfloat16 rounds the second.

    Args:
        slopes: float32 [..., B or 1, H, 1 or T], from ``Alibi.slopes_at``.
        scaling: the factor on q.k.

    Returns:
        float32 [..., B or 1, H, 1 or T, 8].
    """
    weight = slopes * (BASE / scaling)
    leading = weight.to(torch.bfloat16).float()
    rest = weight - leading
    padding = torch.full_like(weight, PADDED_QUERY / scaling)
    unused = torch.zeros_like(weight)
    channels = [leading, leading, leading, rest, rest, rest, padding, unused]
    return torch.stack(channels, dim=-1)


def key_channels(positions: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """The folded channels of keys: the digits of their positions twice, and whether they are padding.

    Args:
        positions: int64 [B or 1, T].
        real: bool [B or 1, T], False for padded tokens; None without padding.

    Returns:
        float32 [B or 1, 1, T, 8].
    """
    positions = positions.float()
    padding = torch.zeros_like(positions)
    if real is not None:
        # At position 0, a padded key's score is below that of every real key, however long the row is.
        positions, padding = positions * real, (~real) * PADDED_KEY
    first = positions // BASE**2 * BASE
    second = positions // BASE % BASE
    third = positions % BASE / BASE
    unused = torch.zeros_like(padding)
    channels = [first, second, third, first, second, third, padding, unused]
    return torch.stack(channels, dim=-1)[:, None]


def fold(states: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Appends channels [B or 1, heads or 1, T or 1, C] to states [B, heads, T, D]."""
    channels = channels.to(states.dtype).expand(*states.shape[:-1], channels.shape[-1])
    return torch.cat([states, channels], dim=-1)


def sdpa_kernels(device: torch.device, queries: int) -> AbstractContextManager:
    """A context in which so many queries are not given to cuDNN's kernel if it would plan for too long.

    It plans for each new length, and in inference each token is a new length.
    """
    if device.type != "cuda" or torch.is_grad_enabled() or queries >= CUDNN_QUERIES:
        return nullcontext()
    if torch.compiler.is_compiling():  # which cannot see what is allowed
        return sdpa_kernel(KERNELS_WITHOUT_CUDNN)
    if not cuda.cudnn_sdp_enabled():
        return nullcontext()
    allowed = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
    kernels = [
        kernel for kernel, is_allowed in zip(KERNELS_WITHOUT_CUDNN, allowed, strict=True) if is_allowed
    ]
    if not kernels:  # nothing but cuDNN's
        return nullcontext()
    return sdpa_kernel(kernels)


def is_traced() -> bool:
    """Whether this pass makes a graph, which is for other rows, too."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or get_proxy_mode() is not None:
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
