"""The settings that results record about their run."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from converter.errors import UsageError
from converter.weights.files import sha256

PACKAGES = ("torch", "transformers")
"""Packages whose versions are recorded."""


def run_settings(seed: int, text: Iterable[Path], **others: Any) -> dict[str, Any]:
    """``Results.settings``: the seed, the command's own settings, the text's SHA-256, and versions.

    Raises:
        UsageError: a text is not a plain file, so it could not be read a second time.
    """
    digests: dict[str, str] = {}
    for path in text:
        if not path.is_file():
            raise UsageError(f"`text` {path} is not a plain file; give one, because the text is read twice")
        digests[str(path) if path.name in digests else path.name] = sha256(path)
    return {
        "seed": seed,
        **others,
        "text": digests,
        "versions": {"python": platform.python_version()} | {each: version(each) for each in PACKAGES},
    }
