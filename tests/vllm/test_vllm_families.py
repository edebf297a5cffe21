"""Every family in vLLM, static and position-dynamic, and every option that changes what it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.patched import FAMILIES, FITTED, VARIANTS
from tests.vllm.engines import BOUND, FELT, Reference, converted_tiny, engine, random_prompts, worst

# The tiny models are scaled for 24 tokens.
LENGTHS = (5, 24, 100, 400)
PLAIN = {
    f"{family}-{scaling}": (family, scaling, {}) for family in FAMILIES for scaling in ("ntk", "ntk-position")
}
# Slopes and channels are code that all families share, so an option needs one of the two.
OPTIONS = {
    name: (family, ("ntk", "ntk-position")[number % 2], changes)
    for number, (name, (family, changes)) in enumerate(VARIANTS.items())
}
# Temperatures too, which multiply the queries of a family.
TEMPERATURES = {
    f"{family}-{scaling}": (family, scaling, {})
    for number, family in enumerate(FAMILIES)
    for scaling in (FITTED[number % 2],)
} | {
    f"falcon-{scaling}": ("falcon", scaling, {})  # its bias has a factor, which the ramp follows
    for scaling in ("by-parts-tempered", "by-parts-position-tempered")
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {**PLAIN, **OPTIONS, **TEMPERATURES}


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities(case: str, tmp_path: Path) -> None:
    family, scaling, changes = CASES[case]
    folder = converted_tiny(tmp_path, family, scaling, **changes)
    reference, prompts = Reference(folder), random_prompts(*LENGTHS)
    assert reference.felt(prompts[-1]) > FELT
    with engine(folder) as llm:
        assert worst(llm, reference, prompts) < BOUND
