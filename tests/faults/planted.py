"""Defects for the harness to find. A launcher imports this module to break the converter.

``NTK_CONVERT_TEST_PLANTED`` names the defect.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from converter import plan
from converter.result import staging
from converter.weights.transfer import transfer
from tests.faults.hook import PLANTED


def copied_into_place(folder: Path, place: Path, **_: Any) -> None:
    """Publishes file by file."""
    shutil.copytree(folder, place)


def removed_first(folder: Path, place: Path, **_: Any) -> None:
    """Removes the old folder before the new one is in place."""
    shutil.rmtree(place, ignore_errors=True)
    folder.rename(place)


def touches(function: Callable[..., Any]) -> Callable[..., Any]:
    """Opens the source's weights for writing."""

    def changed(checkpoint: Any, source: Path, *arguments: Any, **options: Any) -> Any:
        for path in source.glob("*.safetensors"):
            os.utime(path)
        return function(checkpoint, source, *arguments, **options)

    return changed


def starts(function: Callable[..., Any]) -> Callable[..., Any]:
    """Starts a process and never ends it."""

    def changed(*arguments: Any, **options: Any) -> Any:
        subprocess.Popen(["sleep", "60"], start_new_session=True)
        return function(*arguments, **options)

    return changed


DEFECTS: dict[str, Callable[[], None]] = {
    "publishes file by file": lambda: setattr(staging, "_publish", copied_into_place),
    "removes the old folder first": lambda: setattr(staging, "_publish", removed_first),
    "touches the source": lambda: setattr(plan, "transfer", touches(transfer)),
    "leaves a process": lambda: setattr(plan, "transfer", starts(transfer)),
    "leaves its folders": lambda: setattr(staging, "remove_leftovers", lambda place, but=None: None),
}
if PLANTED in os.environ:
    DEFECTS[os.environ[PLANTED]]()
