"""The files that ``eval`` and ``tune`` write with ``--out``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from converter.evaluation.results import RESULTS, Results


def result_files(results: Results) -> dict[str, bytes]:
    """Name -> content: all measurements as JSON, their values as CSV, tables as Markdown, and curves."""
    from converter.pictures.plotting import curves

    texts = {"results.csv": results.to_csv(), "results.md": results.report() + "\n"}
    found = {RESULTS: json_bytes(results.to_json())}
    return found | {name: text.encode() for name, text in texts.items()} | curves(results, "png")


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """A value as the content of a JSON file."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
