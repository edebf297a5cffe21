"""What a process of this tool's own, which a run has started, does for that run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

LOOK = 0.2
"""Seconds between two looks at whether the run still lives."""


def end_with(parent: int, last: Callable[[], object] = bool) -> None:
    """From now on, this process ends when its parent does, even one that was killed.

    Args:
        parent: the parent's process id, as told by the parent itself: one that is gone already has left
            this process to another.
        last: what is done then.
    """

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK)
        last()
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()
