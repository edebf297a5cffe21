"""Where a model runs, in which dtype, and with how many rows at once."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from converter.errors import UsageError

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 32768}
"""Tokens in a batch, with padding; larger batches are not faster on a CPU."""
SHARE = 0.6
"""Share of the free memory that weights may take."""


@dataclass(frozen=True)
class Hardware:
    """A device, and how it is used."""

    device: torch.device
    dtype: torch.dtype | None
    """None: ``dtype_of`` chooses."""
    batch_size: int | None
    """Most rows at once; None: as many as ``TOKENS_AT_ONCE`` allows."""

    def dtype_of(self, parameters: int | None) -> torch.dtype | str:
        """The dtype in which to load a model with so many parameters.

        On an accelerator, the dtype as stored. On a CPU, float32 if it fits into memory, since half precision
        is slow there.
        """
        if self.dtype is not None:
            return self.dtype
        if self.device.type == "cpu" and (parameters or 0) * 4 <= SHARE * free_memory(self.device):
            return torch.float32
        return "auto"

    def rows(self, length: int) -> int:
        """How many rows of ``length`` tokens to run at once."""
        fit = max(1, TOKENS_AT_ONCE[self.device.type] // max(length, 1))
        return fit if self.batch_size is None else min(fit, self.batch_size)


def choose(device: str | None, dtype: str | None, batch_size: int | None) -> Hardware:
    """The user's choice, checked; the default device is CUDA if there is one, else the CPU."""
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name not in TOKENS_AT_ONCE:
        raise UsageError(f"`device` {name!r} is unknown; choose one of {', '.join(TOKENS_AT_ONCE)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("`device` cuda: torch finds no CUDA device; drop `device` to run on the CPU")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"`dtype` {dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"`batch_size` {batch_size} is out of range; give at least 1")
    return Hardware(torch.device(name), DTYPES[dtype] if dtype else None, batch_size)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Replaces torch's out-of-memory error by a ``UsageError`` of one line that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UsageError(
            "the device does not have enough memory; give shorter lengths, a smaller `batch_size`, or "
            "`device` cpu"
        ) from error


def free_memory(device: torch.device) -> int:
    """Bytes available without swapping, according to Linux or CUDA; on other systems, half of all memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        found = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
