"""The README names what exists: options, files, families, make targets."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from converter.catalogue import markdown
from converter.cli import cli
from converter.families import FAMILIES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
LONGEST = 260
"""Lines; what only few need belongs in docs/."""


def test_it_is_short() -> None:
    assert len(README.splitlines()) < LONGEST


def test_every_page_is_linked() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        assert f"](docs/{page.name})" in README


def test_every_option_is_one_of_the_command_line() -> None:
    ours = {name for command in cli.commands.values() for option in command.params for name in option.opts}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", README)) - {"--help", "--version"}
    assert named <= ours


def test_every_command_is_documented() -> None:
    for name in cli.commands:
        assert name in README


def test_every_file_of_the_layout_exists() -> None:
    layout = README.split("## How it is laid out")[1].split("```")[1]
    folder = ROOT
    for line in layout.strip().splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = ROOT / name
            assert folder.is_dir(), name
            continue
        for found in re.findall(r"[\w*/]+(?:\.py|/)(?=[\s,]|$)", line):
            assert list(folder.glob(found)), found


def test_the_table_of_families_is_what_the_command_prints() -> None:
    [table] = re.findall(r"<!-- families:.*?-->\n(.*?)\n<!-- end of families -->", README, re.DOTALL)
    assert table == markdown(), "write it again: python docs/tables.py"
    for family in FAMILIES:
        assert table.count(f"| {family.title} |") == 1


def test_the_tables_are_what_their_script_writes() -> None:
    tables = runpy.run_path(str(ROOT / "docs/tables.py"))
    for page in tables["PAGES"]:
        text = page.read_text(encoding="utf-8")
        assert tables["MARKED"].search(text), page
        assert tables["updated"](text) == text, "write them again: python docs/tables.py"


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"`make ([\w.-]+)`", README)) | {"demo", "test"}:
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target
