"""Progress bars on stderr."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], object]
"""Called with the number of bytes, tokens or steps that were just completed."""


@contextmanager
def byte_bar(title: str, total: int, *, show: bool) -> Iterator[Advance]:
    """Draws a bar of ``total`` bytes with their rate; yields the function that advances it.

    Any thread may call that function. Without ``show``, nothing is drawn.
    """
    if not show:
        yield int
        return
    from tqdm import tqdm

    lock = threading.Lock()
    with tqdm(total=total, desc=title, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr) as bar:

        def advance(count: int) -> None:
            with lock:
                bar.update(count)

        yield advance


@contextmanager
def token_bar(title: str, total: int, *, show: bool) -> Iterator[Advance]:
    """Draws a bar of ``total`` tokens with their rate and the time left; see ``byte_bar``."""
    if not show:
        yield int
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=title, unit=" tokens", unit_scale=True, file=sys.stderr) as bar:
        yield bar.update


@contextmanager
def steps(title: str, total: int, *, show: bool) -> Iterator[Advance]:
    """Draws a bar of ``total`` steps; see ``byte_bar``."""
    if not show:
        yield int
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=title, file=sys.stderr) as bar:
        yield bar.update
