"""Ends a helper process together with the run that started it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

LOOK = 0.2
"""Seconds between two checks whether the parent still runs."""


def end_with(parent: int, last: Callable[[], object] = bool) -> None:
    """Makes this process end when its parent ends, even if the parent was killed.

    Args:
        parent: the parent's process id, passed on by the parent: if the parent has already ended,
            ``os.getppid`` gives the id of another process.
        last: called before this process ends.
    """

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK)
        last()
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()
