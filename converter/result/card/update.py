"""Changes to a card that exists, which keep its owner's text.

A card is a front matter, an introduction, and sections that begin with a title of the second level.
"""

from __future__ import annotations

import ast
import re

from converter.result.card.examples import LOADING, literal, serve_command
from converter.result.card.older import LONGEST_TEXT, kept_body
from converter.result.card.sections import SECTIONS, SIGNATURE
from converter.source.card import read_front_matter, split_front_matter
from converter.source.source import plain_text

GRAPHS = "ONNX"
"""Title of the section that an export adds."""
ADDED = "Longer contexts"
"""Title of the section about the conversion in a card that somebody else wrote."""
ORIGINAL = "The original model card"
"""Title of the section that quotes the card of the source."""
SIGNED = re.compile(rf"^{SIGNATURE} \d", re.MULTILINE)
"""Matches a card that a conversion wrote or added to, by the version. Older versions wrote no other mark."""
FENCE = re.compile(r" {0,3}(```|~~~)")
"""Begins or ends a block of code, in which a line with ## is no title."""


def with_kept_text(fresh: str, older: str) -> str:
    """The card of a repository that is converted again: ``fresh`` describes the result.

    An older card that a conversion wrote is replaced, but the sections that somebody added are kept. Any
    other card keeps its text, and gets the fresh one as a section. A section about graphs goes, since graphs
    are not copied.
    """
    older = _without_section(older.replace("\r\n", "\n"), GRAPHS)
    _, body = split_front_matter(older)
    if not body.strip():
        return fresh
    if SIGNED.search(body) and f"\n## {ADDED}\n" not in body:
        return _with_added_sections(fresh, body)
    return _with_section_on_conversion(older, fresh)


def with_original(fresh: str, older: str, name: str) -> str:
    """A fresh card that quotes the text of the source's at its end; ``name`` is the source's.

    In a quotation, nothing is taken for front matter, a section or a mark of this tool's. It also ends what
    the text leaves open, such as a block of code. A card that a conversion wrote is not quoted: of that, the
    sections that somebody added are kept.
    """
    body = kept_body(older)
    if SIGNED.search(body):
        return with_kept_text(fresh, older)
    if not body or len(body) > LONGEST_TEXT:
        return fresh
    quoted = "\n".join(f"> {line}" if line else ">" for line in body.splitlines())
    about = f"What the card of {plain_text(name)} said when it was converted. Its examples load that model."
    return with_section(fresh, ORIGINAL, f"{about}\n\n{quoted}\n")


def with_section(card: str, title: str, text: str) -> str:
    """A card with one more section at its end, which replaces an older one of the same title."""
    rest = _without_section(card, title).rstrip("\n")
    return f"{rest}\n\n## {title}\n\n{text}"


def with_place(card: str, place: str, revision: str | None = None) -> str:
    """A card whose examples load the model from another folder or Hub id, or from its branch ``revision``.

    A card that no conversion wrote stays as it is.
    """
    # In somebody else's card, the examples of the conversion stand in its own section.
    theirs, title, card = card.rpartition(f"\n## {ADDED}\n")
    found = LOADING.search(card)
    if found is None or not SIGNED.search(card):
        return theirs + title + card
    arguments = literal(place)
    if revision:
        arguments += f", revision={literal(revision)}"
    # All calls that name this place, spelled as here: older versions wrote other quotation marks.
    older_call = re.compile(rf"\({re.escape(found['arguments'])}(?=[,)])")
    lines = card.splitlines(keepends=True)
    # What is quoted of the source's card is not changed.
    card = "".join(
        line if line.startswith(">") else older_call.sub(lambda _: f"({arguments}", line) for line in lines
    )
    older_place, older_revision = ast.literal_eval(found["place"]), None
    if found["revision"]:
        older_revision = ast.literal_eval(found["revision"])
    older_command = serve_command(older_place, older_revision)
    card = card.replace(f"\n{older_command} ", f"\n{serve_command(place, revision)} ")
    return theirs + title + card


def is_by_hand(card: bytes) -> bool:
    """Whether a card has text, and none that a conversion wrote."""
    text = card.decode(errors="replace")
    _, body = split_front_matter(text)
    return bool(body.strip()) and not SIGNED.search(text)


def _with_added_sections(fresh: str, older_body: str) -> str:
    """The fresh card with those sections of an older one that ``describe`` does not write."""
    added = [
        f"## {title}\n\n{text.strip()}\n" for title, text in _sections(older_body) if title not in SECTIONS
    ]
    return "\n".join([fresh, *added])


def _sections(body: str) -> list[tuple[str, str]]:
    """Title and text of each section of a card, in order."""
    found: list[tuple[str, str]] = []
    in_code = False
    for line in body.splitlines(keepends=True):
        if FENCE.match(line):
            in_code = not in_code
        if line.startswith("## ") and not in_code:
            found.append((line.removeprefix("## ").strip(), ""))
        elif found:
            title, text = found[-1]
            found[-1] = (title, text + line)
    return found


def _with_section_on_conversion(older: str, fresh: str) -> str:
    """Somebody's card with the fresh one as a section, and with the fresh front matter."""
    header, body = split_front_matter(older)
    fresh_header, fresh_body = split_front_matter(fresh)
    # Front matter that cannot be read stays as it is.
    if not header or read_front_matter(older):
        header = fresh_header
    _, _, text = fresh_body.strip().partition("\n")  # without the title
    text = re.sub("^##", "###", text.strip(), flags=re.MULTILINE)
    return header + with_section(body, ADDED, f"{text}\n")


def _without_section(card: str, title: str) -> str:
    return re.sub(rf"\n## {re.escape(title)}\n.*?(?=\n## |\Z)", "", card, flags=re.DOTALL)
