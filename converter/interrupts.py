"""Ctrl-C and SIGTERM: what they end, and when they have to wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_came = threading.Event()


class Interrupted(KeyboardInterrupt):
    """The user stopped the run; says what became of it."""


def listen() -> None:
    """Makes both signals a KeyboardInterrupt, and remembers that one came.

    Libraries that are interrupted while they import something make an error of their own of it, which
    would be reported in its place.
    """
    _came.clear()
    for number in SIGNALS:
        signal.signal(number, _stop)


def ignore() -> None:
    """Lets neither end the process any more: what is left takes no time, and its result has been told."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def came() -> bool:
    """Whether one came since ``listen``."""
    return _came.is_set()


@contextmanager
def held() -> Iterator[list[int]]:
    """Yields the signals that come meanwhile, which end nothing.

    For moments in which half of what is done would be no right end, such as one folder taking another's
    place.
    """
    waiting: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():  # signals reach no other
        for number in SIGNALS:
            handlers[number] = signal.signal(number, lambda number, _: waiting.append(number))
    try:
        yield waiting
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _stop(*_: object) -> None:
    _came.set()
    raise KeyboardInterrupt
