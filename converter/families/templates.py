"""Where the modeling templates are."""

from __future__ import annotations

from pathlib import Path

from converter.errors import OutputError

PACKAGE = Path(__file__).parent.parent


def templates_folder() -> Path:
    """The folder of the modeling templates: inside an installed package, or beside it in a checkout."""
    for folder in (PACKAGE / "templates", PACKAGE.parent / "templates"):
        if (folder / "ntk_alibi.py").is_file():
            return folder
    raise OutputError(
        f"the templates are missing from the installation in {PACKAGE}; install ntk-convert again"
    )
