"""Memory of a process on Linux; imports nothing else, so it runs in any environment."""

from __future__ import annotations

import resource
from pathlib import Path

HEADROOM = 2 << 30
"""Bytes of free memory that a run on the CPU leaves for other processes."""


def limit_memory() -> None:
    """Makes lack of memory an error in this process, so that no other process is killed."""
    available = proc("/proc/meminfo", "MemAvailable")
    if available:
        limit = proc("/proc/self/status", "VmData") + max(0, available - HEADROOM)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        Path("/proc/self/oom_score_adj").write_text("1000")  # if the kernel kills a process, then this one


def proc(file: str, key: str) -> int:
    """A value of a /proc file in bytes; 0 if there is no such file."""
    path = Path(file)
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:")), 0)
