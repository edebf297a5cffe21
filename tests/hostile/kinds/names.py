"""Odd names of MODEL, the source's folder and its files."""

# ruff: noqa: ARG001 -- every case gets a random generator, whether it uses it or not
# ruff: noqa: PTH102, PTH104, PTH123 -- names that are not valid text
from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

ODD = (
    b"a\nerror: forged",
    b"\x1b[2J",
    b"caf\xe9",
    b"\xff\xfe",
    b"-rf",
    b"--help",
    b" ",
    b"'\"`$(touch ran)",
    b"*?[x]",
    b"x" * 255,
    "\u202egnp".encode(),
    b"..json",
    b"~",
    b"%s",
    b"\\..\\x",
    b"CON",
    b"a\tb",
    b"\r",
)
MODELS = (
    "",
    ".",
    "..",
    "-",
    "a\x00b",
    "a\nb",
    "\x1b[2J",
    "x" * 300,
    "x" * 5000,
    "a/" * 3000,
    "\udce9",
    "//",
    "~nobody/x",
)
MODELS += (
    "../source\n",
    "./" * 2000,
    "file:///etc/passwd",
    "http://x/y",
    "a/b/../c",
    "~",
    "~/",
    "/dev/null",
    "/proc/self/mem",
    "~a\x00b",
)


def model(text: str) -> Any:
    """Gives this text as MODEL instead of the source's folder."""
    return lambda folder, rng: text


def folder_named(name: bytes, given: str = "path") -> Any:
    """A source in a folder with this name; MODEL is its path, or ``.`` inside the folder."""

    def make(folder: Path, rng: Random) -> str | None:
        place = os.fsencode(folder) + b"/" + name
        os.mkdir(place)
        for entry in list(os.scandir(os.fsencode(folder))):
            if entry.path != place:
                os.rename(entry.path, place + b"/" + entry.name)
        if given == "dot":
            os.chdir(place)
            return "."
        return os.fsdecode(place)

    return make


def file_named(name: bytes, *ends: bytes) -> Any:
    """Adds files with this name to the source."""

    def make(folder: Path, rng: Random) -> None:
        for end in ends or (b"", b".json", b".txt", b".safetensors", b".py"):
            path = os.fsencode(folder) + b"/" + (name + end)[-255:]
            with open(path, "wb") as file:
                file.write(b"{}")

    return make


EXAMPLES: dict[str, Any] = {
    **{f"MODEL {text[:20]!r}": model(text) for text in MODELS},
    **{f"folder {name[:20]!r}": folder_named(name) for name in ODD},
    **{f"inside {name[:20]!r}": folder_named(name, "dot") for name in ODD},
    **{f"file {name[:20]!r}": file_named(name) for name in ODD},
}


def vary(folder: Path, rng: Random) -> str | None:
    name = bytes(
        rng.choice(b"ab./\\-~\n\r\t\x1b\x7f\xff\xc3\xa9\x00 %'\"$`*?[]{}")
        for _ in range(rng.randrange(1, 40))
    )
    choice = rng.randrange(3)
    if choice == 0:
        text = os.fsdecode(name)
        return text if not text.startswith("-") else f"./{text}"
    name = name.replace(b"/", b"_").replace(b"\x00", b"_")
    if name.strip(b".") == b"":
        name = b"x"
    if choice == 1:
        return folder_named(name, rng.choice(("path", "dot")))(folder, rng)  # type: ignore[no-any-return]
    file_named(name)(folder, rng)
    return None
