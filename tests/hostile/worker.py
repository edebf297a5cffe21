"""The process that runs cases: ``python -m tests.hostile.worker KIND SEED CASE...``, one JSON line each.

Its own memory is limited, and so is that of what it starts. Before each case it says which one it begins.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
from pathlib import Path

LIMIT = 6 << 30
"""Bytes of memory that the process may allocate, torch and all."""


def main() -> None:
    name, seed, cases = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    from tests.hostile.case import run
    from tests.hostile.guard import Guard
    from tests.hostile.kinds import KINDS

    with tempfile.TemporaryDirectory(prefix="hostile-hf-") as cache:
        os.environ |= {"HF_HOME": cache, "HF_HUB_OFFLINE": "1"}
        os.environ.pop("HF_TOKEN", None)
        _warm(torch=KINDS[name].verify)
        guard = Guard()
        for case in cases:
            print(json.dumps({"begin": case}), file=answers, flush=True)
            print(json.dumps(run(name, case, seed, guard).to_json()), file=answers, flush=True)


def _warm(*, torch: bool) -> None:
    """What a run imports is imported before any is watched and measured."""
    import huggingface_hub
    import safetensors
    import yaml

    import converter.cli
    import converter.inspection
    import converter.pipeline
    import converter.report
    import converter.weights.worker

    assert all((converter.cli, huggingface_hub, safetensors, yaml))
    if torch:
        import transformers

        import converter.pictures.card
        from tests import tiny

        assert converter.pictures.card  # matplotlib makes its folders in the user's home once
        with tempfile.TemporaryDirectory() as folder:
            tiny.bloom(Path(folder) / "x", 2)
        assert transformers


if __name__ == "__main__":
    main()
