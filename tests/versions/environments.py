"""An environment for each version of transformers, which takes a second to make.

It has transformers and what that requires; torch and all else come from the environment that runs this.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPPORTED = [
    *("4.57.0", "4.57.1", "4.57.3", "4.57.6", "5.0.0", "5.1.0", "5.2.0", "5.3.0", "5.4.0", "5.5.0", "5.5.4"),
    *("5.6.0", "5.6.2", "5.7.0", "5.8.0", "5.8.1", "5.9.0", "5.10.1", "5.10.4", "5.11.0", "5.12.0", "5.12.1"),
    *("5.13.0", "5.13.1", "5.14.0", "5.14.1", "5.15.0", "5.15.1", "5.16.0", "5.16.1", "5.17.0", "5.18.0"),
    *("5.19.0", "5.20.1", "5.20.2", "5.21.1", "5.22.0", "5.22.2", "5.23.0", "5.24.0"),
]
"""In order; of most minor versions, the first and the last patch."""
TOO_OLD = ["4.40.2", "4.50.3", "4.56.2"]
SHORT = ["4.56.2", "4.57.0", "5.0.0", "5.3.0", "5.8.1", "5.12.0", SUPPORTED[-1]]

OLDEST_SENTENCES = "3.4.1"
"""The oldest sentence-transformers that is tried, with the oldest transformers."""

NO_GPU = "continuous batching needs a GPU"
KNOWN = [
    ("4.57.0", "5.0.0", "continuous batching", NO_GPU),
    ("5.3.0", "5.3.0", "continuous batching", NO_GPU),
    ("5.0.0", "5.0.0", "prefill in chunks", "`prefill_chunk_size` is rejected, since no cache is found"),
]
"""Defects of transformers, which stock models have too: first version, last version, check, reason."""


def key(version: str) -> list[int]:
    """To sort versions by."""
    return [int(part) for part in version.split(".")]


def known(version: str) -> set[str]:
    """The checks that are left out, since a defect of transformers breaks them."""
    return {check for first, last, check, _ in KNOWN if key(first) <= key(version) <= key(last)}


def python(version: str) -> Path:
    """The interpreter of a version's environment, which is made if it is not there."""
    # Old versions cannot load code from folders with dots in their names.
    folder = ROOT / ".venv-versions" / version.replace(".", "_")
    program, ready = folder / "bin/python", folder / "ready"
    if not ready.exists():
        shutil.rmtree(folder, ignore_errors=True)
        uv("venv", "--python", sys.executable, folder)
        uv("pip", "install", "--no-build", "--python", program, f"transformers=={version}")
        if version.startswith("4."):  # newer ones need transformers 5
            other = OLDEST_SENTENCES if version == SUPPORTED[0] else "5.7.0"
            uv("pip", "install", "--no-deps", "--python", program, f"sentence-transformers=={other}")
        [packages] = folder.glob("lib/*/site-packages")
        shared = (sysconfig.get_path("purelib"), ROOT)
        (packages / "zz_shared.pth").write_text("".join(f"{path}\n" for path in shared))
        ready.touch()
    return program


def uv(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "uv", "--quiet", *map(str, words)], check=True)
