"""Ctrl-C, SIGTERM and SIGHUP: how they stop a run, and when they have to wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_came = threading.Event()


class Interrupted(KeyboardInterrupt):
    """The user stopped the run; the message says what is left of it."""


def listen() -> None:
    """Makes these signals raise KeyboardInterrupt, and remembers that one arrived.

    A library that is interrupted during an import may raise an error of its own, which would otherwise be
    reported instead of the interruption.
    """
    _came.clear()
    for number in _signals():
        signal.signal(number, _stop)


def ignore() -> None:
    """Ignores these signals from now on: the result is already printed, and what is left takes no time."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def came() -> bool:
    """Whether a signal arrived since ``listen``."""
    return _came.is_set()


def forget() -> None:
    """Goes on as if no signal had arrived: the run that it stopped has a result."""
    _came.clear()


@contextmanager
def held() -> Iterator[list[int]]:
    """Collects arriving signals in the list that it yields, instead of letting them stop the run.

    For steps that must not be left half done, such as replacing a folder by another one.
    """
    waiting: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():  # no other thread receives signals
        for number in _signals():
            handlers[number] = signal.signal(number, lambda number, _: waiting.append(number))
    try:
        yield waiting
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _signals() -> list[signal.Signals]:
    """``SIGNALS``, without SIGHUP in a run that ``nohup`` started."""
    return [each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]


def _stop(*_: object) -> None:
    _came.set()
    raise KeyboardInterrupt
