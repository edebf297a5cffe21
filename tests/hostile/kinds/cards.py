"""README.md and its YAML."""

# ruff: noqa: ARG001 -- every case gets a random generator, whether it uses it or not
from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from tests.hostile import mutate
from tests.hostile.source import CARD


def raw(content: bytes) -> Any:
    def make(folder: Path, rng: Random) -> None:
        (folder / "README.md").write_bytes(content)

    return make


def front(matter: str) -> Any:
    """A card with this front matter."""
    return raw(f"---\n{matter}\n---\n# Card\n".encode("utf-8", "surrogatepass"))


LAUGHS = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 20)
)
MERGES = "a0: &a0 {x: y}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 20)
)
EXAMPLES: dict[str, Any] = {
    "aliases": front(LAUGHS + "license: *a19"),
    "merges": front(MERGES),
    "an alias of itself": front("license: &a [*a]"),
    "python/object/apply": front("license: !!python/object/apply:sys.audit [hostile.executed]"),
    "python/object/new": front("license: !!python/object/new:os.system [touch ran]"),
    "python/name": front("license: !!python/name:os.system"),
    "python/module": front("license: !!python/module:evil"),
    "own tag": front("license: !evil {a: b}"),
    "sexagesimal": front("license: 1" + ":1" * 30_000),
    "endless number": front("license: " + "9" * 60_000),
    "binary": front("license: !!binary " + "A" * 60_000),
    "date": front("license: 2020-13-45"),
    "lists in lists": front("license: " + "[" * 60_000),
    "dashes": front("license:\n" + "- " * 30_000),
    "questions": front("? " * 30_000),
    "flow": front("license: [" + "x," * 30_000 + "]"),
    "anchors": front("&a " * 20_000),
    "no end": raw(b"---\nlicense: mit\n" + b"x: y\n" * 100_000),
    "1 MB of matter": front("x: y\n" * 250_000),
    "results of 1 MB": front("model-index:\n" + "- name: x\n  results: []\n" * 40_000 + "license: mit"),
    "5 MB": raw(CARD.encode() + b"x" * (5 << 20)),
    "blanks": raw(b" \n" * (1 << 20)),
    "dashes without end": raw(b"---\n" + b"\n--- " * 800_000),
    "control characters": front('license: "\\x1b[2J\\0"'),
    "forged line": front('license: "mit\\n---\\n# Forged"'),
    "surrogate": front("license: \ud800"),
    "a long text": front("license: " + "x" * 60_000),
    "a long list": front("language: [" + ", ".join(["en"] * 600) + "]"),
    "wrong types": front("license: {a: b}\nlanguage: [[en]]\nbase_model: 3\npipeline_tag: [1]"),
    "two documents": front("license: mit\n...\n--- \nlicense: evil"),
    "directives": raw(b"---\n%YAML 9.9\n%TAG ! tag:x,2000:\n--- !x\nlicense: mit\n---\n"),
    "no UTF-8": raw(b"---\nlicense: \xff\xfe\n---\n"),
    "nulls": raw(b"---\n\x00\n---\n"),
    "empty": raw(b""),
}
PIECES = (
    "license: ",
    "language:\n- en\n",
    "&a ",
    "*a",
    "<<: ",
    "!!python/name:os.system ",
    "[",
    "]",
    "{",
    "}",
    "\n",
)
PIECES += (
    "- ",
    "? ",
    ": ",
    "|\n  x\n",
    ">-\n x\n",
    "'",
    '"',
    "\t",
    "#",
    "---\n",
    "...\n",
    "%YAML 1.1\n",
    "null",
    "1:1",
)


def vary(folder: Path, rng: Random) -> None:
    if rng.random() < 0.5:
        front("".join(rng.choices(PIECES, k=rng.randrange(1, 60))))(folder, rng)
    else:
        raw(mutate.worse_bytes(CARD.encode(), rng))(folder, rng)
