"""Converted models in vLLM: each attention backend, with the kernel's slopes and with folded channels."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import report
import torch
import torch_speed
from torch_speed import fresh, number

from gpu.attention import ROUNDING
from gpu.document import Document
from gpu.models import Variant, repositories
from gpu.prompts import Prompts, asked, said
from gpu.settings import BLOOM, Settings, shared

TITLE = "converted models in vLLM"
VARIANTS: dict[Variant, str] = {"static": "static, slopes", "position": "by position, folded"}
BACKENDS, REFUSED = ("FLASH_ATTN", "TRITON_ATTN"), "FLASHINFER"
COMPARED = 8
"""Prompts whose next token's log-probabilities are compared."""
LIKELIEST = 20
"""How many tokens are compared for each."""
INTRO = f"""\
{{geometry}}, bfloat16, random weights, not compiled. {{prompts}} *Difference*: of the log-probabilities
of the {LIKELIEST} likeliest tokens after a prompt, the largest one to transformers in float32;
*transformers*: that of its own bfloat16. With slopes, the backend {REFUSED} must be refused, because it
ignores them."""
HEAD = ["scaling", "backend", "s", "new tokens / s", "difference", "transformers"]
LogProbs = list[dict[int, float]]
"""For each prompt: token id -> log-probability of the likeliest next tokens."""


def run(settings: Settings, document: Document) -> None:
    lacking = missing(settings)
    if lacking:
        document.skip("everything", lacking)
        return
    geometry = settings.geometry(BLOOM)
    backends = settings.size(BACKENDS, ("CPU_ATTN",))
    prompts, new = asked(settings, geometry)
    document.intro = INTRO.format(geometry=geometry.said(), prompts=said(prompts, new))
    rows: list[list[str]] = []
    with repositories(settings, geometry, max(map(len, prompts)) + new, tuple(VARIANTS)) as setup:
        for variant, until in shared([*VARIANTS], settings.until):
            expected = fresh(log_probs, setup, variant, "float32", prompts[:COMPARED])
            own = difference(expected, fresh(log_probs, setup, variant, "bfloat16", prompts[:COMPARED]))
            for backend in backends:
                name = f"{VARIANTS[variant]}, {backend}"
                if time.monotonic() > until:
                    document.skip(name, "no time")
                    continue
                try:
                    taken, found = fresh(measure, setup, variant, backend, prompts, new)
                except Exception as error:  # the other ways can still be measured
                    document.fail(name, error)
                    continue
                moved = difference(expected, found)
                if not moved <= ROUNDING * own:  # nan is wrong too
                    document.fail(
                        name, f"log-probabilities differ by {moved:.2g}, transformers' by {own:.2g}"
                    )
                speed = number(len(prompts) * new / taken)
                rows.append([VARIANTS[variant], backend, number(taken), speed, f"{moved:.2g}", f"{own:.2g}"])
                document.put("Throughput", report.table(HEAD, rows, texts=2))
        if not settings.trial:
            document.put("Refused", refusal(setup, document))


def missing(settings: Settings) -> str | None:
    """Why nothing can be measured here, or None."""
    if find_spec("vllm") is None:
        return "vLLM is not installed"
    from vllm.platforms import current_platform

    if not settings.trial and not current_platform.is_cuda():
        return f"this vLLM is for {current_platform.device_name}, not for CUDA"
    return None


def log_probs(setup: torch_speed.Setup, variant: Variant, dtype: str, prompts: Prompts) -> LogProbs:
    """All log-probabilities of the next tokens, from transformers; needs a fresh process."""
    model = torch_speed.load(setup, variant, dtype)
    with torch.inference_mode():
        logits = (torch_speed.prefill(model, torch.tensor([row], device=setup.device)) for row in prompts)
        return [dict(enumerate(each.log_softmax(-1).tolist())) for each in logits]


def difference(expected: LogProbs, found: LogProbs) -> float:
    """The largest difference over the likeliest tokens of ``expected`` that both have."""
    moved = []
    for right, other in zip(expected, found, strict=True):
        likeliest = sorted(right, key=right.__getitem__)[-LIKELIEST:]
        moved += [abs(right[token] - other[token]) for token in likeliest if token in other]
    return max(moved, default=math.inf)


def engine(setup: torch_speed.Setup, variant: Variant, backend: str) -> Any:
    """An engine in this process, which must be a fresh one."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM

    from converter.vllm_plugin import register

    register()  # the checkout may not be installed
    return LLM(
        str(setup.folder / variant),
        dtype=setup.dtype,
        attention_backend=None if setup.device == "cpu" else backend,
        max_model_len=setup.longest,
        max_logprobs=2 * LIKELIEST,
        enable_prefix_caching=False,
        enforce_eager=True,
        gpu_memory_utilization=0.6,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )


def measure(
    setup: torch_speed.Setup, variant: Variant, backend: str, prompts: Prompts, new: int
) -> tuple[float, LogProbs]:
    """The seconds of all prompts, and the log-probabilities of the likeliest next tokens of some."""
    from vllm import SamplingParams

    llm = engine(setup, variant, backend)

    def generated(rows: Sequence[list[int]], tokens: int, **options: Any) -> list[Any]:
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options
        )
        outputs = llm.generate([{"prompt_token_ids": row} for row in rows], sampling, use_tqdm=False)
        return [output.outputs[0] for output in outputs]

    # This warms up, too.
    first = [output.logprobs[0] for output in generated(prompts[:COMPARED], 1, logprobs=2 * LIKELIEST)]
    started = time.perf_counter()
    generated(prompts, new)
    taken = time.perf_counter() - started
    return taken, [{token: entry.logprob for token, entry in each.items()} for each in first]


def refusal(setup: torch_speed.Setup, document: Document) -> str:
    """What vLLM says where the backend would ignore slopes."""
    try:
        fresh(engine_starts, setup)
    except Exception as error:
        if f"the attention backend {REFUSED} is not known to honour ALiBi slopes" in str(error):
            return f"{REFUSED}, with slopes: refused."
        document.skip(f"{REFUSED}, with slopes", error)  # it may not be installed
        return f"{REFUSED}, with slopes: not tried; see above."
    document.fail(REFUSED, "an engine started that ignores the slopes")
    return f"{REFUSED}, with slopes: not refused."


def engine_starts(setup: torch_speed.Setup) -> None:
    """Starts an engine that must not start."""
    engine(setup, "static", REFUSED)
