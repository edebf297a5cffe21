"""Progress bars on stderr."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

Advance = Callable[[int], object]
"""Called with the number of bytes, tokens or steps that were just completed."""


@contextmanager
def steps(title: str, total: int, *, show: bool, unit: str = "it") -> Iterator[Advance]:
    """Draws a bar with its rate and the time left; yields the function that advances it.

    Any thread may call that function. Without ``show``, nothing is drawn.
    """
    if not show:
        yield int
        return
    from tqdm import tqdm

    lock = threading.Lock()
    with tqdm(total=total, desc=title, unit=unit, unit_scale=unit != "it", file=sys.stderr) as bar:

        def advance(count: int) -> None:
            with lock:
                bar.update(count)

        yield advance


byte_bar = partial(steps, unit="B")
token_bar = partial(steps, unit=" tokens")
