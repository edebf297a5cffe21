"""The options of every onnxruntime session that this project makes, and of those that others should make.

ALiBi gives far keys probabilities so small that float32 can only store them as denormal numbers (below
1.2e-38). Some processors compute many times slower with these, and none needs them: beside a row's other
probabilities they vanish. ``ENTRIES`` makes onnxruntime's CPU provider take them for zero.

Found by running onnxruntime 1.31: it applies to the threads that a session starts. The thread that calls
the session is another matter: the first session of a process decides for the thread that makes it, and for
all threads which that one starts later. It stays so, for NumPy and torch in these threads too. So here
``denormals_as_zero`` sets the thread while a graph runs, and then sets it back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

ENTRIES = {"session.set_denormal_as_zero": "1"}
"""Entries of a session's configuration, name -> value."""


def session_options() -> Any:
    """An ``onnxruntime.SessionOptions`` with ``ENTRIES``; callers add their own options."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    for name, value in ENTRIES.items():
        options.add_session_config_entry(name, value)
    return options


@contextlib.contextmanager
def denormals_as_zero() -> Iterator[None]:
    """The calling thread takes denormal numbers for zero meanwhile, as a session's own threads do."""
    import torch

    before = bool(np.float32(1e-38) / np.float32(8) == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
