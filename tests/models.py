"""A ``Model`` of a config alone."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converter.model.model import Model
from converter.model.open import read_model
from converter.source.open import open_folder


def model_of(config: Mapping[str, Any]) -> Model:
    """What a folder with this config.json holds; it has no other files, and is gone."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(config))
        return read_model(open_folder(Path(place)))
