# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""ALiBi with scaled slopes, computed as part of the attention's dot product.

Softmax ignores a term that is constant along a row. Causal ALiBi, ``s * q.k - m * (i - j)``, therefore
gives the same probabilities as ``s * q.k + m * j``. The second form is itself a dot product: append m / s
to the query and the key's position j to the key, and any fused attention kernel computes ALiBi without
a bias tensor. Half precision cannot hold m or j exactly, so both are split into parts that it can hold.

Stock slopes: Press et al., ICLR 2022 (arXiv 2108.12409) and MosaicML's llm-foundry (bias_max).
NTK scaling: github.com/keezen/ntk_alibi, generalised to slopes of any number and order.
Linear scaling: Al-Khateeb et al. 2023 (arXiv 2310.13017).
Scaling by parts: the counterpart of "NTK by parts" for rotary frequencies (u/bloc97, July 2023).
A concave penalty is no scaled slope; it is in ntk_concave.py.
Temperatures: a factor on the content that grows with the length, as in YaRN (arXiv 2309.00071) and InfoScale
(arXiv 2501.08570), but one for each head.

Shapes below: B rows, H heads, T tokens, D head size.
This file is part of a converted repository and imports only torch.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

# Extra channels of a folded query or key: 2 parts of the slope x 3 digits of the position, 1 for the
# padding mask, 1 unused. Fused kernels want a multiple of 8.
CHANNELS = 8
# Positions are written in base 256: one digit is exact in bfloat16's 8 bits, and three digits reach 2 ** 24.
# The kernel sums in float32, so the rounding error grows with slope * position, as in stock models.
BASE = 256
# From so many queries on, cuDNN's kernel saves more than the 40 ms in which it plans for each new length.
PLANNED = 16384
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Keys of alibi_scaling that only these types have.
OWN_KEYS = {
    "fitted": {"exponents", "temperatures"},
    "by-parts": {"ramp"},
    "concave": {"power"},
}
# The powers that the channels of a concave penalty hold, see ntk_concave.py. Conversions write 8.
POWERS = (8, 16)
# The score of a padded key is the product of these two, below the score of any real key. float16 can
# hold both factors for every softmax scale down to 1 / 256.
PADDED_QUERY, PADDED_KEY = 128.0, -256.0


def stock_slopes(num_heads: int, bias_max: float = 8.0) -> list[float]:
    """The stock ALiBi slopes of ``num_heads`` heads, in head order."""
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-bias_max * i / whole) for i in range(1, whole + 1)]
    odd = range(1, 2 * (num_heads - whole), 2)
    return slopes + [2.0 ** (-bias_max * i / (2 * whole)) for i in odd]


def exponents(method: str, slopes: Sequence[float], ramp: Sequence[float] = ()) -> list[float]:
    """The exponent t of each head in ``m' = m * a ** -t``, where a is the scale factor.

    linear: 1. ntk: from 0 for the steepest head to 1 for the flattest, linear in the slope's logarithm
    (1 if all slopes are equal). ntk-published: the original code's (h - 1) / (H - 1), which does not
    scale the heads beyond the largest power of two. by-parts: a head's span is where its bias reaches -5
    nats; from 0 for spans up to ramp[0] tokens to 1 from ramp[1] on, linear in the span's logarithm.
    """
    heads = len(slopes)
    if method == "linear":
        return [1.0] * heads
    if method == "ntk-published":
        whole = 2 ** math.floor(math.log2(heads))
        return [(h / (heads - 1) if heads > 1 else 1.0) if h < whole else 0.0 for h in range(heads)]
    if method == "ntk":
        top, bottom = math.log(max(slopes)), math.log(min(slopes))
        if top == bottom:
            return [1.0] * heads
        return [(top - math.log(m)) / (top - bottom) for m in slopes]
    if method == "by-parts":
        if len(ramp) != 2 or not 0 < ramp[0] < ramp[1] < math.inf:
            raise ValueError(f"alibi_scaling: {ramp} is not a ramp, two numbers of tokens")
        start, end = math.log(ramp[0]), math.log(ramp[1])
        found = [min(max((math.log(5 / m) - start) / (end - start), 0.0), 1.0) for m in slopes]
        if not any(found):
            raise ValueError(f"alibi_scaling: the ramp {ramp} scales no head")
        return found
    raise ValueError(f"alibi_scaling: unknown type {method!r}")


def fitted_rows(rows: Any, heads: int, layers: set[int]) -> list[list[float]]:
    """The rows of a scaling of type fitted: as many as ``layers`` allows, of one number per head."""
    shape = [len(row) if isinstance(row, list) else 0 for row in rows] if isinstance(rows, list) else []
    if len(shape) not in layers or any(length != heads for length in shape):
        wanted = " or ".join(map(str, sorted(layers)))
        raise ValueError(f"alibi_scaling: expected {wanted} rows of {heads} numbers, got rows of {shape}")
    return rows


class Alibi:
    """The slopes of one model, scaled as ``alibi_scaling`` in its config says, and its temperatures.

    A fitted scaling may have temperatures u. They multiply the content of a query, not its bias, so the score
    is ``s * a ** u * q.k - m * a ** -t * (i - j)``.

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

    def __init__(self, slopes: Sequence[float], scaling: Mapping[str, Any] | None = None, layers: int = 1):
        # One row for all layers, or one row per layer.
        self.slopes = [list(slopes)]
        self.exponents = [[0.0] * len(slopes)]
        # Like the slopes, those of a static scaling are the scaled ones, a ** u.
        self.temperatures: list[list[float]] | None = None
        self.dynamic: str | None = None
        # Of a concave penalty, which is not a scaled slope; its channels are in ntk_concave.py.
        self.power: int | None = None
        self._tensors: dict[torch.device, torch.Tensor] = {}
        if scaling is not None:
            try:
                if scaling.get("type") == "concave":
                    self._read_concave(scaling)
                else:
                    self._read(slopes, scaling, layers)
            except (AttributeError, KeyError, TypeError) as error:  # something else stands for a number
                raise ValueError(f"alibi_scaling: cannot honour {scaling}") from error

    def _read(self, slopes: Sequence[float], scaling: Mapping[str, Any], layers: int) -> None:
        """Takes over a scaling; raises ValueError for one that cannot be honoured."""
        kind, static = scaling.get("type"), "factor" in scaling
        known = {"type", "factor"} if static else {"type", "train_seq_len", "dynamic", "rate"}
        if unknown := set(scaling) - known - OWN_KEYS.get(kind, set()):
            raise ValueError(f"alibi_scaling: {dict(scaling)} has no use for {', '.join(sorted(unknown))}")
        if kind == "fitted":
            self.exponents = fitted_rows(scaling.get("exponents"), len(slopes), {1, layers})
            if "temperatures" in scaling:
                self.temperatures = fitted_rows(scaling["temperatures"], len(slopes), {len(self.exponents)})
        else:
            self.exponents = [exponents(kind, slopes, scaling.get("ramp", ()))]
        self.dynamic = None if static else scaling.get("dynamic", "length")
        self.train_length = float(scaling.get("train_seq_len", int(static)))
        self.rate, factor = (float(scaling.get(name, 1.0)) for name in ("rate", "factor"))
        strengths = (self.train_length, self.rate, factor)
        powers = [t for row in (*self.exponents, *(self.temperatures or ())) for t in row]
        sound = all(0 < value < math.inf for value in strengths) and factor >= 1
        # With larger exponents, slopes would not stay within float32.
        sound = sound and all(isinstance(t, int | float) and abs(t) <= 4 for t in powers)
        if not sound or self.dynamic not in (None, "length", "position"):
            raise ValueError(f"alibi_scaling: cannot honour {dict(scaling)}")
        # The strength of a dynamic scaling depends on the positions, see ``at``.
        self.slopes = [[m * factor**-t for m, t in zip(slopes, row, strict=True)] for row in self.exponents]
        if static and self.temperatures is not None:
            self.temperatures = [[factor**u for u in row] for row in self.temperatures]

    def _read_concave(self, scaling: Mapping[str, Any]) -> None:
        """Takes over a concave penalty; raises ValueError for one that cannot be honoured."""
        length, power = scaling["train_seq_len"], scaling["power"]
        sound = set(scaling) == {"type", "train_seq_len", "dynamic", "power"}
        if not (sound and scaling["dynamic"] == "position" and 0 < length < math.inf and power in POWERS):
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
        tensor = self._tensors.get(device)
        if tensor is None:
            with torch.inference_mode(False):  # training cannot use a tensor made in inference mode
                rows = [self.slopes, self.exponents, *([self.temperatures] if self.temperatures else [])]
                values = torch.tensor(rows, dtype=torch.float32, device=device)
                tensor = values[:, :, None, :, None]
            # While a graph is traced, this is only a placeholder for a tensor: do not keep it.
            if type(tensor) is torch.Tensor and not torch.compiler.is_compiling():
                self._tensors[device] = tensor
        return tensor

    def at(
        self,
        positions: torch.Tensor,
        lengths: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The slopes for queries at the given positions, in one row for all layers or one row per layer.

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
        slopes, power = (self.on(positions.device) if values is None else values)[:2]
        return slopes if self.dynamic is None else slopes * self.factors(positions, lengths) ** -power

    def query_factors(
        self,
        positions: torch.Tensor,
        lengths: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """``a ** u``, to multiply the queries by, like the slopes of ``at``; None without temperatures."""
        if self.temperatures is None:
            return None
        temperatures = (self.on(positions.device) if values is None else values)[2]
        return temperatures if self.dynamic is None else self.factors(positions, lengths) ** temperatures

    def factors(self, positions: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """The factor a of a dynamic scaling, float32 [B or 1, 1, 1 or T]; see ``at``."""
        if self.dynamic == "position" or lengths is None:
            lengths = positions + 1 if self.dynamic == "position" else positions[:, -1:] + 1
        return (self.rate * lengths.float() / self.train_length).clamp(min=1.0)[:, None, :]


def query_channels(slopes: torch.Tensor, scaling: float) -> torch.Tensor:
    """The channels to append to the queries.

    The product of a query's and a key's channels is slope * position / ``scaling``. The slope is split in
    two, its 8 leading bits and the rest, so 16 bits of it survive rounding to bfloat16.

    Args:
        slopes: float32 [..., B or 1, H, 1 or T], from ``Alibi.at``.
        scaling: the factor on q.k.

    Returns:
        float32 [..., B or 1, H, 1 or T, CHANNELS].
    """
    weight = slopes * (BASE / scaling)
    leading = weight.to(torch.bfloat16).float()
    rest = weight - leading
    padding = torch.full_like(weight, PADDED_QUERY / scaling)
    return torch.stack([*[leading] * 3, *[rest] * 3, padding, torch.zeros_like(weight)], dim=-1)


def key_channels(positions: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """The channels to append to the keys: the digits of their positions twice, and whether they are padding.

    Args:
        positions: int64 [B or 1, T].
        real: bool [B or 1, T], False for padded tokens; None without padding.

    Returns:
        float32 [B or 1, 1, T, CHANNELS].
    """
    positions = positions.float()
    padded = torch.zeros_like(positions)
    if real is not None:
        # At position 0, a padded key's score is below that of every real key, however long the row is.
        positions, padded = positions * real, (~real) * PADDED_KEY
    digits = [positions // BASE**2 * BASE, positions // BASE % BASE, positions % BASE / BASE]
    return torch.stack([*digits * 2, padded, torch.zeros_like(padded)], dim=-1)[:, None]


def sdpa_kernels(query: torch.Tensor) -> Any:
    """A context for queries [B, H, Q, D] without cuDNN's sdpa, in inference: each token is a new length."""
    if query.device.type != "cuda" or torch.is_grad_enabled() or query.shape[2] >= PLANNED:
        return nullcontext()
    allowed = torch.compiler.is_compiling() or cuda.cudnn_sdp_enabled()
    return sdpa_kernel(KERNELS) if allowed else nullcontext()


def fold(states: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Appends channels [B or 1, heads or 1, T or 1, C] to states [B, heads, T, D]."""
    channels = channels.to(states.dtype).expand(*states.shape[:-1], channels.shape[-1])
    return torch.cat([states, channels], dim=-1)
