"""Progress on stderr: bars in a terminal, and elsewhere a line for each long stage."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

Advance = Callable[[int], object]
"""Called with the number of bytes, tokens or steps that were just completed."""

LONG = 5.0
"""Seconds of a stage without a word; a shorter one needs none."""


class Bar:
    """A bar, which a call with a number advances; any thread may do so."""

    def __init__(self, drawn: Any = None) -> None:
        self._drawn, self._lock = drawn, threading.Lock()

    def __call__(self, count: int) -> None:
        """Advances the bar, if one is drawn."""
        if self._drawn is not None:
            with self._lock:
                self._drawn.update(count)

    def rename(self, title: str) -> None:
        """Says what runs now."""
        if self._drawn is not None:
            with self._lock:
                self._drawn.set_description(title)


@contextmanager
def stage(title: str, *, show: bool) -> Iterator[None]:
    """Says what runs, where no terminal draws a bar, once it has taken ``LONG``."""

    def say() -> None:
        with suppress(OSError):  # nobody has to read it
            print(f"{title} ...", file=sys.stderr, flush=True)

    timer = threading.Timer(LONG, say)
    timer.daemon = True
    if show and not sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def steps(title: str, total: int, *, show: bool, unit: str = "it") -> Iterator[Bar]:
    """Draws a bar with its rate and the time left, or is a ``stage``. Without ``show``, it does nothing."""
    if not show or not sys.stderr.isatty():
        with stage(title, show=show):
            yield Bar()
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=title, unit=unit, unit_scale=unit != "it", file=sys.stderr) as bar:
        yield Bar(bar)


byte_bar = partial(steps, unit="B")
token_bar = partial(steps, unit=" tokens")
