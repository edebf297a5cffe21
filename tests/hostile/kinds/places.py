"""Links, pipes, sockets, devices and folders in place of files."""

# ruff: noqa: ARG001 -- every case gets a random generator, whether it uses it or not
from __future__ import annotations

import os
import socket
from pathlib import Path
from random import Random
from typing import Any

NAMES = (
    "config.json",
    "model.safetensors",
    "README.md",
    "tokenizer_config.json",
    "tokenizer.json",
    "LICENSE",
)
NAMES += ("modules.json", "generation_config.json", "vocab.txt", "1_Pooling", "additional_chat_templates")
TARGETS = (
    "../outside/secret.json",
    "/etc/passwd",
    "/proc/self/environ",
    "/proc/self/mem",
    "/dev/zero",
    "/dev/stdin",
    "/dev/full",
    "/nowhere",
    "..",
    ".",
    "evil.py",
    "../outside",
)


def link(name: str, target: str) -> Any:
    """A link in place of a file."""

    def make(folder: Path, rng: Random) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return make


def loop(name: str) -> Any:
    """Two links that point to each other."""

    def make(folder: Path, rng: Random) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("other-link")
        (folder / "other-link").symlink_to(name)

    return make


def pipe(name: str) -> Any:
    def make(folder: Path, rng: Random) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def listening(name: str) -> Any:
    """A socket in place of a file."""

    def make(folder: Path, rng: Random) -> None:
        (folder / name).unlink(missing_ok=True)
        before = Path.cwd()
        os.chdir(folder)  # the path of a socket may have only 100 bytes
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(name)
        finally:
            os.chdir(before)

    return make


def directory(name: str) -> Any:
    def make(folder: Path, rng: Random) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return make


def unreadable(name: str) -> Any:
    def make(folder: Path, rng: Random) -> None:
        (folder / name).chmod(0)

    return make


def long_chain(folder: Path, rng: Random) -> None:
    """Thirty links, one after another, that lead out of the folder."""
    (folder / "LICENSE").unlink()
    for number in range(30):
        (folder / f"l{number}").symlink_to(f"l{number + 1}")
    (folder / "l30").symlink_to("../outside/secret.json")
    (folder / "LICENSE").symlink_to("l0")


def sparse(name: str) -> Any:
    """A sparse file of 8 TB without data."""

    def make(folder: Path, rng: Random) -> None:
        with (folder / name).open("wb") as file:
            file.truncate(1 << 43)

    return make


EXAMPLES: dict[str, Any] = {
    **{f"{name} -> {target}": link(name, target) for name in NAMES[:6] for target in TARGETS},
    **{f"{name} in a loop": loop(name) for name in NAMES},
    **{f"{name} a pipe": pipe(name) for name in NAMES},
    **{f"{name} a socket": listening(name) for name in NAMES},
    **{f"{name} a folder": directory(name) for name in NAMES},
    **{f"{name} not to be read": unreadable(name) for name in NAMES[:6]},
    **{f"{name} of 8 TB": sparse(name) for name in NAMES[:6]},
    "a chain of links": long_chain,
}


def vary(folder: Path, rng: Random) -> None:
    for name in rng.sample(NAMES, rng.choice((1, 1, 2, 3))):
        make = rng.choice((loop, pipe, directory, None))
        (link(name, rng.choice(TARGETS)) if make is None else make(name))(folder, rng)
        if (folder / "other-link").is_symlink():
            break
