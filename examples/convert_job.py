# /// script
# requires-python = ">=3.10"
# dependencies = ["ntk-convert[onnx]", "torch"]
#
# [tool.uv.sources]
# # Without a clone around this file: { git = "ADDRESS OF THE REPOSITORY" }
# ntk-convert = { path = "..", editable = true }
# # A conversion needs no GPU, and the CPU build is gigabytes smaller.
# torch = { index = "pytorch-cpu" }
#
# [[tool.uv.index]]
# name = "pytorch-cpu"
# url = "https://download.pytorch.org/whl/cpu"
# explicit = true
# ///
"""Convert a model and push the result, in an environment that uv makes for this one file.

    uv run examples/convert_job.py MODEL USER/NAME [OPTIONS OF ntk-convert]
    MODEL=bigscience/bloom-1b7 TARGET=ada/bloom-ntk OPTIONS="--scale 2" uv run examples/convert_job.py

Without words, the environment says what to do, as hosted jobs want it. HF_TOKEN must be allowed to write to
USER/NAME. The result is on disk until it is pushed. The last line printed is its address; a failure is one
line on stderr, and exit code 1, or 2 for wrong usage.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from pathlib import Path

from converter.cli import main


def words() -> list[str]:
    """The model, the repository to push to, and the options; of the environment if none was typed.

    Raises:
        ValueError: a quote in OPTIONS is not closed, or the model or the repository is missing.
    """
    model, target, options = (os.environ.get(name, "") for name in ("MODEL", "TARGET", "OPTIONS"))
    try:
        given = sys.argv[1:] or [model, target, *shlex.split(options)]
    except ValueError as error:
        raise ValueError(f"OPTIONS {options!r} cannot be read: {error}") from None
    if len(given) < 2 or not all(given[:2]):
        raise ValueError("give MODEL and USER/NAME, or MODEL and TARGET in the environment")
    return given


if __name__ == "__main__":
    try:
        model, target, *options = words()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "converted"
        main(["convert", *options, f"--push-to-hub={target}", f"--out={out}", "--", model])
