"""Byte counts formatted for people."""

from __future__ import annotations


def bytes_text(size: int) -> str:
    """A number of bytes in a readable unit, e.g. ``3.4 GB``."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"
