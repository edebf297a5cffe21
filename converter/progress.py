"""Progress: bars on stderr, or a line in the log for each long stage."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

Advance = Callable[[int], object]
"""Called with the number of bytes, tokens or steps that were just completed."""

LOG = logging.getLogger("converter")
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
def stage(title: str, level: int = logging.INFO) -> Iterator[None]:
    """Logs what runs once it has taken ``LONG``, for those who see no bar; a warning is seen by all."""
    timer = threading.Timer(LONG, LOG.log, (level, f"{title} ..."))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def steps(title: str, total: int, *, show: bool, unit: str = "it") -> Iterator[Bar]:
    """Draws a bar with its rate and the time left; without ``show``, it is a ``stage``."""
    if not show:
        with stage(title):
            yield Bar()
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=title, unit=unit, unit_scale=unit != "it", file=sys.stderr) as bar:
        yield Bar(bar)


byte_bar = partial(steps, unit="B")
token_bar = partial(steps, unit=" tokens")
