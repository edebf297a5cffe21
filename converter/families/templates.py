"""Where the modeling templates are, and which keys of config.json they read."""

from __future__ import annotations

import ast
from pathlib import Path

from converter.errors import OutputError
from converter.families.family import Family

PACKAGE = Path(__file__).parent.parent


def templates_folder() -> Path:
    """The folder of the modeling templates: inside an installed package, or beside it in a checkout."""
    for folder in (PACKAGE / "templates", PACKAGE.parent / "templates"):
        if (folder / "ntk_alibi.py").is_file():
            return folder
    raise OutputError(
        f"the templates are missing from the installation in {PACKAGE}; install ntk-convert again"
    )


def config_keys(family: Family) -> set[str]:
    """The keys that a family's converted config class has defaults for.

    The file is parsed and not imported, since that would import transformers.
    """
    path = templates_folder() / f"configuration_ntk_{family.name}.py"
    classes = (node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef))
    assignments = (node for node in next(classes).body if isinstance(node, ast.Assign))
    values = {ast.unparse(node.targets[0]): node.value for node in assignments}
    return {"alibi_scaling", *ast.literal_eval(values["defaults"])}
