"""Sizes and command lines, as they are printed."""

from __future__ import annotations


def bytes_text(size: int) -> str:
    """A number of bytes in a readable unit, e.g. ``3.4 GB``."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


def argv(command: str | None, *arguments: str, **options: object) -> list[str]:
    """The words of ``ntk-convert COMMAND ARGUMENTS OPTIONS``; without ``command``, of a conversion.

    An option has its name with underscores: ``target_length=8192`` becomes ``--target-length 8192``. True
    gives the flag alone; None, False and what is empty leave it out. A tuple follows one flag
    (``--ramp 0.125 0.5``), and each item of a list has a flag of its own (``--set A=1 --set B=2``).
    ``shlex.join`` makes the line for a shell.
    """
    words = ["ntk-convert"]
    if command is not None:
        words.append(command)
    words += arguments
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is None or value is False or value in ("", (), []):
            continue
        if value is True:
            words.append(flag)
        elif isinstance(value, list):
            for item in value:
                words += [flag, str(item)]
        elif isinstance(value, tuple):
            words += [flag, *map(str, value)]
        else:
            words += [flag, str(value)]
    return words
