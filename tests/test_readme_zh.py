"""README.zh.md keeps step with README.md: the same blocks, code, links, tables and numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENGLISH = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh.md").read_text(encoding="utf-8")

CODE = re.compile(r"^```.*?^```$|(?:^ {4}.*?\n)+", re.DOTALL | re.MULTILINE)
GENERATED = re.compile(r"<!-- (?!end of ).*?<!-- end of .*?-->", re.DOTALL)
HEADING = re.compile(r"#+ ")
KIND = re.compile(r"#+ |\* |> |\||!\[|<!-- |```| {4}|")
HAN = re.compile(r"[\u4e00-\u9fff]")

# What a translation keeps, whatever the order of the words in a section.
KEPT = {
    "inline code": r"`[^`]+`",
    "links": r"\]\(([^)\s]+)\)",
    "table rows": r"^\|",
    "table cells": r"(?<!\\)\|",
    "list items": r"^\* ",
    "bold": r"\*\*",
    "numbers": r"\d+(?:[.,]\d+)*(?:e-?\d+)?",
}


def blocks(text: str) -> list[str]:
    """Headings, paragraphs, lists, tables and the like: what blank lines separate."""
    return re.split(r"\n{2,}", text.strip("\n"))


def sections(text: str) -> list[str]:
    """What stands between headings of level 2, without code blocks; the first is the introduction."""
    return re.split(r"^## ", CODE.sub("", text), flags=re.MULTILINE)


def kept(pattern: str, section: str) -> list[str]:
    """What the pattern finds, sorted; a line break within inline code is a space."""
    return sorted(" ".join(found.split()) for found in re.findall(pattern, section, re.MULTILINE))


def kinds(text: str) -> list[str]:
    """What each block begins with: "## ", "* ", "|", ..., or nothing for a paragraph."""
    return [found.group() for block in blocks(text) if (found := KIND.match(block))]


def test_the_same_headings_and_blocks_in_the_same_order() -> None:
    assert kinds(ENGLISH).count("## ") > 10
    assert kinds(CHINESE) == kinds(ENGLISH)


def test_the_same_code_blocks() -> None:
    code = CODE.findall(ENGLISH)
    assert {block[:3] for block in code} == {"```", "   "}, "fenced and indented ones"
    assert CODE.findall(CHINESE) == code


def test_the_same_generated_blocks() -> None:
    generated = GENERATED.findall(ENGLISH)
    assert {block.split()[1] for block in generated} == {"evidence", "families:"}
    assert GENERATED.findall(CHINESE) == generated, "copy them from README.md"


@pytest.mark.parametrize("pattern", KEPT.values(), ids=KEPT)
def test_every_section_keeps(pattern: str) -> None:
    # Each README links to the other: the one link that is not the same.
    english = ENGLISH.replace("(README.zh.md)", "(README.md)")
    assert kept(pattern, CODE.sub("", english))
    for ours, theirs in zip(sections(CHINESE), sections(english), strict=True):
        assert kept(pattern, ours) == kept(pattern, theirs), theirs.splitlines()[0]


def test_each_links_to_the_other() -> None:
    assert ENGLISH.count("[中文](README.zh.md)") == 1
    assert CHINESE.count("[English](README.md)") == 1


def test_the_chinese_one_introduces_rope_by_its_name() -> None:
    following = [text[1:5] for text in CHINESE.split("旋转位置编码")[1:]]
    assert (following[0], following.count("RoPE")) == ("RoPE", 1)


def test_nothing_is_left_in_english() -> None:
    for block in blocks(GENERATED.sub("", CODE.sub("", CHINESE))):
        assert HAN.search(block) or HEADING.match(block), block
