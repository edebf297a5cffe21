"""The process that runs cases: ``python -m tests.hostile.worker KIND SEED CASE...``.

It prints two lines of JSON per case: which case begins, and its result. The memory of this process and of
those that it starts is limited.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
from pathlib import Path

LIMIT = 6 << 30
"""Bytes of memory that the process may allocate, torch included."""


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
    """Imports what the runs import, so that no run is watched and measured while importing."""
    import huggingface_hub
    import safetensors
    import yaml

    import converter.cli
    import converter.cli.report
    import converter.inspection
    import converter.pipeline
    import converter.weights.worker

    assert all((converter.cli, huggingface_hub, safetensors, yaml))
    if torch:
        import transformers

        import converter.pictures.per_head
        from tests import tiny

        assert converter.pictures.per_head  # on its first import, matplotlib makes folders in the user's home
        with tempfile.TemporaryDirectory() as folder:
            tiny.FACTORIES["bloom"](Path(folder) / "x", 2)
        assert transformers


if __name__ == "__main__":
    main()
