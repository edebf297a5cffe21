"""One of two processes that share models: ``torchrun --nproc-per-node 2 -m tests.vllm.ranks JOBS``.

JOBS is a JSON file: name -> folder of a converted model, a free port, and the head of a pooled model or null.
The first process puts the results in its place: name -> the largest difference of log-probabilities, vectors
or scores from those of transformers. If a name starts with ``wrong``, both processes take the slopes of the
first one's heads.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from unittest import mock

from tests.vllm.conftest import quick_engines  # sets vLLM's environment, too

PROCESSES = 2


def first_heads(setup: object) -> slice:
    return slice(setup.config.num_attention_heads // PROCESSES)  # type: ignore[attr-defined]


def main(jobs: Path) -> None:
    from converter.vllm_plugin.attention import Setup
    from tests.vllm.engines import HeadReference, Reference, engine, furthest, pooled, random_prompts, worst

    options = {"tensor_parallel_size": PROCESSES, "distributed_executor_backend": "external_launcher"}
    results, prompts = {}, random_prompts(24, 200)
    # Each engine ends its process group, and torchrun's own store would remember the old addresses.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for name, (folder, port, head) in json.loads(jobs.read_text(encoding="utf-8")).items():
        os.environ["MASTER_PORT"] = str(port)
        wrong = mock.patch.object(Setup, "own_heads", property(first_heads))
        with (
            wrong if name.startswith("wrong") else contextlib.nullcontext(),
            engine(folder, seed=0, runner="pooling" if head else "auto", **options) as llm,
        ):
            if head:
                expected = [*map(HeadReference(folder, head), prompts)]
                results[name] = furthest(pooled(llm, head, prompts), expected)
            else:
                results[name] = worst(llm, Reference(folder), prompts)
        print(name, results[name], flush=True)
    if os.environ["RANK"] == "0":
        jobs.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    with quick_engines():
        main(Path(sys.argv[1]))
