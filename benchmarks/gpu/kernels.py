"""Which kernels run: the profile of a prompt and of a decoded token, for each attention."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping

import report
import torch
import torch_speed

from gpu import attention
from gpu.document import Document
from gpu.models import Side, available, load, repositories
from gpu.settings import BLOOM, Settings, shared

TITLE = "which kernels run in torch"
KINDS = {
    "flash": r"flash_fwd|flash_attn|flashattn|flash_attention|::flash::",
    "memory-efficient": r"fmha_cutlass|efficient_attention|attentionkernel",
    "cuDNN": r"cudnn\S*(sdpa|attention|flash)|native_sdpa",
    "flex": r"flex_attention|triton_tem",
    "softmax of a matrix": r"softmax",
}
"""Kind of attention -> its kernels' names, in lower case; the first kind that is found counts."""
TOP = 3
"""How many kernels a line names."""
LONGEST_NAME = 60
SIDES = (
    *attention.SIDES,
    Side("flash_attention_2, ntk by position", "position", "flash_attention_2"),
    Side("sdpa, ntk static", "static", "sdpa", required=True),
)
LAYERS = 2
INTRO = f"""\
The profile of torch over one run, after others that were not profiled. *Prefill*: a prompt of {{length}}
tokens; *decoding*: a token over a cache of {{length}}. Models have {LAYERS} layers, since all layers run
the same kernels.

*Attention* is told by the names of kernels; *share* is the share of its kernels in the time of all. The
last column names the kernels that took most time, with their share."""
HEAD = ["side", "dtype", "run", "attention", "share", "kernels"]


def run(settings: Settings, document: Document) -> None:
    length = settings.size(8192, 32)
    document.intro = INTRO.format(length=length)
    for head_dim, until in shared(settings.size([128, 64], [16]), settings.until):
        geometry = settings.geometry(BLOOM, head_dim=head_dim, layers=LAYERS, vocabulary=32768)
        rows: list[list[str]] = []
        with repositories(settings, geometry, length, ("none", "static", "position")) as setup:
            for side, side_until in shared(available(document, setup, SIDES), until):
                try:
                    for row in profiles(setup, side, length, side_until):
                        rows.append(row)
                        document.put(f"Heads of size {head_dim}", report.table(HEAD, rows, texts=len(HEAD)))
                except Exception as error:  # the other sides can still be profiled
                    document.fail(f"{side.name}, heads of size {head_dim}", error)
                torch_speed.release()


@torch.inference_mode()
def profiles(setup: torch_speed.Setup, side: Side, length: int, until: float) -> Iterator[list[str]]:
    """A line for each dtype and kind of run, as far as there is time."""
    model = load(setup, side)
    for dtype in side.dtypes:
        model.to(getattr(torch, dtype))
        cache = torch_speed.random_cache(setup, model, length)
        counts = itertools.count(length + 1)

        def prompt() -> None:
            torch_speed.prefill(model, torch_speed.tokens(setup, length))

        def token(cache: object = cache, counts: Iterator[int] = counts) -> None:
            mask = torch.ones(1, next(counts), dtype=torch.int64, device=setup.device)
            torch_speed.decode(model, torch_speed.tokens(setup, 1), mask, cache)

        for name, call in (("prefill", prompt), ("decoding", token)):
            if time.monotonic() > until:
                yield [side.name, dtype, name, "no time", "-", "-"]
            else:
                yield [side.name, dtype, name, *described(profile(call, setup.device))]


def profile(call: Callable[[], object], device: str) -> dict[str, float]:
    """Name of a kernel (on the CPU, of an operator) -> its microseconds in one call, the longest first."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    for _ in range(2):
        call()
    cuda = device != "cpu"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with torch_profile(activities=activities) as found:
        call()
        if cuda:
            torch.cuda.synchronize()
    kind = DeviceType.CUDA if cuda else DeviceType.CPU
    times: dict[str, float] = {}
    for event in found.key_averages():
        # Regions that torch.compile marks are not kernels.
        if event.device_type == kind and not getattr(event, "is_user_annotation", False):
            taken = event.self_device_time_total if cuda else event.self_cpu_time_total
            times[event.key] = times.get(event.key, 0.0) + taken
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def described(times: Mapping[str, float]) -> list[str]:
    """The kind of attention, its kernels' share of the time, and the kernels that took most time."""
    total = max(sum(times.values()), 1e-9)
    top = [f"`{short(name)}` {taken / total:.0%}" for name, taken in list(times.items())[:TOP]]
    for kind, pattern in KINDS.items():
        taken = [time for name, time in times.items() if re.search(pattern, name.lower())]
        if taken:
            return [kind, f"{sum(taken) / total:.0%}", ", ".join(top)]
    return ["not found", "-", ", ".join(top) or "-"]


def short(name: str) -> str:
    """A kernel's name without its template arguments and parameters."""
    name = re.sub(r"^void |\(anonymous namespace\)::", "", name)
    name = re.split(r"[<(]", name)[0] or name
    return name.replace("|", "/").replace("`", "'")[:LONGEST_NAME]
