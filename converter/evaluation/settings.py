"""What results say of the run that they come from."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from converter.errors import UsageError
from converter.weights.files import sha256

PACKAGES = ("torch", "transformers")
"""Whose versions results name."""


def run_settings(seed: int, text: Iterable[Path], **others: Any) -> dict[str, Any]:
    """``Results.settings``: the seed, what the command adds to it, the text's SHA-256, and versions.

    Raises:
        UsageError: a text that is no plain file, and could not be read again.
    """
    digests: dict[str, str] = {}
    for path in text:
        if not path.is_file():
            raise UsageError(f"--text {path} is no plain file, which can be read twice; give one")
        digests[str(path) if path.name in digests else path.name] = sha256(path)
    return {
        "seed": seed,
        **others,
        "text": digests,
        "versions": {"python": platform.python_version()} | {each: version(each) for each in PACKAGES},
    }
