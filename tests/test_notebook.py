"""examples/scaling.ipynb runs from top to bottom, and what is stored in it is what it prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "scaling.ipynb"
HELPS = """
before, after = ({each.length: each.value for each in results.measurements[i:i + 2]} for i in (0, 2))
assert before[256] == after[256] == 1, "up to the trained length, nothing changes"
assert after[2048] > before[2048] + 0.1
assert said["converted"] == said["onnx"] == asked["answer"] != said["stock"]
"""


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(cell: Any) -> str:
    """The words that a cell printed, and the kinds of what it showed; numbers differ between machines."""
    text = "".join(output.get("text", "") for output in cell.outputs)
    shown = [kind for output in cell.outputs for kind in sorted(output.get("data", {}))]
    return " ".join([*re.findall(r"[^\W\d]{2,}", text), *shown])


def test_the_stored_notebook_is_whole() -> None:
    """Run once from top to bottom, with the output of every cell that has one."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert [cell.execution_count for cell in code(notebook)] == [*range(1, len(code(notebook)) + 1)]
    kinds = {output.get("name", output.output_type) for cell in code(notebook) for output in cell.outputs}
    assert kinds == {"stdout", "execute_result"}, "an error, or a warning"
    assert all(map(outputs, code(notebook)[1:]))
    assert NOTEBOOK.stat().st_size < 300_000


@pytest.mark.slow
def test_it_runs_from_top_to_bottom() -> None:
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    stored = [*map(outputs, code(notebook))]
    notebook.cells.append(nbformat.v4.new_code_cell(HELPS))
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    client.execute()
    assert [*map(outputs, code(notebook)[:-1])] == stored, "run `make notebook`"
