"""New tokens per second for many prompts: padded, in transformers' continuous batches, and in vLLM."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any

import measuring
import report
import torch
from measuring import STOCK, Setup, fresh
from report import Document, number, ratio
from vllm_speed import ENVIRONMENT, PADDING, Prompts, in_vllm, padded

from gpu.part import BLOOM_1B7, ROUNDING, Settings, Side, available, load, repositories, shared

TITLE = "throughput of many prompts"
ROWS = 16
"""Rows that ``generate`` gets at once, and prompts that are compared in float32."""
EQUAL = 0.9
"""In float32, at least this share of the new tokens must be those of stock; random logits have near ties."""
COMPARED, LIKELIEST = 8, 20
"""Prompts of which vLLM's log-probabilities are compared, and how many of the likeliest tokens of each."""
VLLM_FOLDERS = {"static": "static, slopes", "position": "by position, folded"}
BACKENDS, REFUSED = ("FLASH_ATTN", "TRITON_ATTN"), "FLASHINFER"


@dataclass(frozen=True)
class Way(Side):
    """One way to generate in transformers."""

    continuous: bool = False


WAYS = (
    Way(f"{STOCK}, generate", STOCK, None, required=True, exact=True),
    Way("sdpa, generate", "none", "sdpa", required=True, exact=True),
    Way("sdpa, generate_batch", "none", "sdpa", required=True, exact=True, continuous=True),
    Way("flash_attention_2, generate_batch", "none", "flash_attention_2", continuous=True),
    Way("flash_attention_3, generate_batch", "none", "flash_attention_3", continuous=True),
    Way("sdpa, ntk by position, generate_batch", "position", "sdpa", exact=True, continuous=True),
)
INTRO = f"""\
{{sizes}}, random weights. {{count}} prompts of {{shortest}} to {{longest}} tokens, {{new}} new tokens each,
greedy. `generate` gets {ROWS} rows of similar length at a time, padded on the left; `generate_batch` and vLLM
get all of them. Factors are to the first line. *Right*: in transformers, the share of the new tokens that are
those of the first line, for {ROWS} prompts in float32. In vLLM, the largest difference of the
log-probabilities of the {LIKELIEST} likeliest tokens after a prompt to transformers in float32, and in
brackets that of transformers' own bfloat16. With slopes, vLLM's backend {REFUSED} must be refused, because
it ignores them."""
HEAD = ["way", "s", "new tokens / s", "factor", "right"]


def run(settings: Settings, document: Document) -> None:
    count, longest, new = settings.size((64, 2048, 128), (6, 24, 4))
    random = torch.Generator().manual_seed(0)
    # Many are short and few are long.
    lengths = (
        (longest * torch.rand(count, generator=random) ** 2).long().clamp(min=max(1, longest // 32)).tolist()
    )
    setup = settings.setup("throughput", BLOOM_1B7, longest + new)
    prompts = [torch.randint(1, setup.vocabulary, (n,), generator=random).tolist() for n in lengths]
    words = {"sizes": setup.said(), "shortest": min(lengths), "longest": max(lengths), "new": new}
    document.intro = INTRO.format(count=count, **words)
    table: list[list[str]] = []
    first: list[float] = []

    def add(name: str, taken: float, right: str) -> None:
        first.append(taken)
        row = [name, number(taken), number(count * new / taken)]
        table.append([*row, ratio(first[0], taken) if table else "-", right])
        document.put("Throughput", report.table(HEAD, table))

    with repositories(setup, "none", "static", "position"):
        [(_, until), (_, vllm_until)] = shared(["transformers", "vLLM"], settings.until)
        expected: list[list[int]] = []
        for way, way_until in shared(available(document, setup, WAYS), until):
            try:
                model, right = load(setup, way), "-"
                if way.exact:
                    found = generated(setup, model.float(), way, prompts[:ROWS], new)
                    expected = expected or found
                    right = f"{(share := equal(expected, found)):.0%}"
                    if share < EQUAL:
                        document.fail(way.name, f"only {right} of the tokens in float32 are those of {STOCK}")
                    model.to(torch.bfloat16)
                if time.monotonic() > way_until:
                    document.skip(way.name, "no time")
                else:
                    generated(setup, model, way, prompts[:2], new)  # warms up
                    call = lambda: generated(setup, model, way, prompts, new)  # noqa: B023, E731
                    add(way.name, measuring.timed(setup.device, call)[0], right)
            except Exception as error:  # the other ways can still be measured
                document.fail(way.name, error)
            finally:
                model = None
                measuring.release()
        if lacking := lacks_vllm(settings):
            document.skip("vLLM", lacking)
            return
        os.environ |= ENVIRONMENT
        for folder, folder_until in shared(list(VLLM_FOLDERS), vllm_until):
            right_ = fresh(log_probs, setup, folder, "float32", prompts[:COMPARED])
            own = moved(right_, fresh(log_probs, setup, folder, "bfloat16", prompts[:COMPARED]))
            for backend in settings.size(BACKENDS, ("CPU_ATTN",)):
                name = f"vLLM, {VLLM_FOLDERS[folder]}, {backend}"
                if time.monotonic() > folder_until:
                    document.skip(name, "no time")
                    continue
                try:
                    taken, found_ = fresh(measure_vllm, setup, folder, backend, prompts, new)
                except Exception as error:
                    document.fail(name, error)
                    continue
                gap = moved(right_, found_)
                if not gap <= ROUNDING * own:  # nan is wrong too
                    document.fail(name, f"log-probabilities differ by {gap:.2g}, transformers' by {own:.2g}")
                add(name, taken, f"{gap:.2g} ({own:.2g})")
        if not settings.trial:
            document.put("Refused", refusal(setup, document))


def generated(setup: Setup, model: Any, way: Way, prompts: Prompts, new: int) -> list[list[int]]:
    """The new tokens of each prompt.

    Raises:
        RuntimeError: continuous batching failed, which it only logs, or gave fewer tokens.
    """
    rows = continuous(setup, model, prompts, new) if way.continuous else padded(model, prompts, new, ROWS)
    if [len(row) for row in rows] != [new] * len(prompts):
        raise RuntimeError(f"{sum(map(len, rows))} tokens came back instead of {new * len(prompts)}")
    return rows


def continuous(setup: Setup, model: Any, prompts: Prompts, new: int) -> list[list[int]]:
    """With ``generate_batch``.

    By default, sdpa would become flash attention where that is installed, and a trial on the CPU would take
    all memory for its cache. Not all releases of transformers have these settings.
    """
    import transformers

    config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=new, eos_token_id=-1, pad_token_id=PADDING
    )
    options: dict[str, Any] = {}
    if kind := getattr(transformers, "ContinuousBatchingConfig", None):
        small = {"num_blocks": 16, "max_batch_tokens": 64} if setup.device == "cpu" else {}
        wanted: dict[str, Any] = {"auto_switch_to_flash": False, **small}
        known = {field.name for field in fields(kind)}
        settings = kind(**{key: wanted[key] for key in wanted.keys() & known})
        options["continuous_batching_config"] = settings
    outputs = model.generate_batch(inputs=list(prompts), generation_config=config, **options).values()
    if error := next((output.error for output in outputs if output.error), None):
        raise RuntimeError(error)
    return [output.generated_tokens for output in outputs]


def equal(expected: Sequence[list[int]], found: Sequence[list[int]]) -> float:
    """The share of tokens that are as expected."""
    pairs = [pair for rows in zip(expected, found, strict=True) for pair in zip(*rows, strict=True)]
    return sum(one == other for one, other in pairs) / max(1, len(pairs))


# --- vLLM

LogProbs = list[dict[int, float]]
"""For each prompt: token id -> log-probability of the likeliest next tokens."""


def lacks_vllm(settings: Settings) -> str | None:
    """Why vLLM cannot be measured here, or None."""
    if find_spec("vllm") is None:
        return "not installed"
    from vllm.platforms import current_platform

    if not settings.trial and not current_platform.is_cuda():
        return f"this vLLM is for {current_platform.device_name}, not for CUDA"
    return None


@torch.inference_mode()
def log_probs(setup: Setup, folder: str, dtype: str, prompts: Prompts) -> LogProbs:
    """All log-probabilities of the next tokens, from transformers; needs a fresh process."""
    model = measuring.load(setup, folder, dtype)
    logits = (measuring.prefill(model, torch.tensor([row], device=setup.device)) for row in prompts)
    return [dict(enumerate(each.log_softmax(-1).tolist())) for each in logits]


def moved(expected: LogProbs, found: LogProbs) -> float:
    """The largest difference over the likeliest tokens of ``expected`` that both have."""
    gaps = []
    for right, other in zip(expected, found, strict=True):
        likeliest = sorted(right, key=right.__getitem__)[-LIKELIEST:]
        gaps += [abs(right[token] - other[token]) for token in likeliest if token in other]
    return max(gaps, default=math.nan)


def engine(setup: Setup, folder: str, backend: str) -> Any:
    """An engine of vLLM in this process, which must be a fresh one, and how to run it."""
    return in_vllm(
        setup,
        folder,
        attention_backend=None if setup.device == "cpu" else backend,
        max_logprobs=2 * LIKELIEST,
        enforce_eager=True,
        gpu_memory_utilization=0.6,
    )


def measure_vllm(
    setup: Setup, folder: str, backend: str, prompts: Prompts, new: int
) -> tuple[float, LogProbs]:
    """The seconds of all prompts, and the log-probabilities of the likeliest next tokens of some."""
    from vllm import SamplingParams

    llm, generate = engine(setup, folder, backend)
    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=2 * LIKELIEST, detokenize=False)
    inputs = [{"prompt_token_ids": row} for row in prompts[:COMPARED]]
    first = [output.outputs[0].logprobs[0] for output in llm.generate(inputs, sampling, use_tqdm=False)]
    started = time.perf_counter()
    generate(prompts, new)
    taken = time.perf_counter() - started
    return taken, [{token: entry.logprob for token, entry in each.items()} for each in first]


def start_refused(setup: Setup) -> None:
    """Starts an engine that must not start."""
    engine(setup, "static", REFUSED)


def refusal(setup: Setup, document: Document) -> str:
    """What vLLM says where the backend would ignore slopes."""
    try:
        fresh(start_refused, setup)
    except Exception as error:
        if f"the attention backend {REFUSED} is not known to honour ALiBi slopes" in str(error):
            return f"{REFUSED}, with slopes: refused."
        document.skip(f"{REFUSED}, with slopes", error)  # it may not be installed
        return f"{REFUSED}, with slopes: not tried; see above."
    document.fail(REFUSED, "an engine started that ignores the slopes")
    return f"{REFUSED}, with slopes: not refused."
