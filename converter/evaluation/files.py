"""Results as files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from converter.evaluation.results import Results

RESULTS = "results.json"


def result_files(results: Results) -> dict[str, bytes]:
    """Name -> content: all that was measured as JSON, its values as CSV, tables as Markdown, and curves."""
    from converter.pictures.plotting import curves

    texts = {"results.csv": results.to_csv(), "results.md": results.report() + "\n"}
    found = {RESULTS: json_bytes(results.to_json())}
    return found | {name: text.encode() for name, text in texts.items()} | curves(results, "png")


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """As it stands in a file."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
