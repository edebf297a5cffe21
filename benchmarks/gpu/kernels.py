"""Which attention runs, by torch's profiler."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch

KINDS = {
    "flash": r"flash_fwd|flash_attn|flashattn|flash_attention|::flash::",
    "memory-efficient": r"fmha_cutlass|efficient_attention|attentionkernel",
    "XQA": r"kernel_mha|xqa",
    "cuDNN": r"cudnn\S*(sdpa|attention|flash)|native_sdpa",
    "flex": r"flex_attention|triton_tem",
    "softmax of a matrix": r"softmax",
}
"""Kind of attention -> its kernels' names, in lower case; the first kind that is found counts."""
SAID = "*Kernels*: the kind of attention by their names, and its share of the time of all kernels."


def profile(call: Callable[[], object], device: str) -> dict[str, float]:
    """Name of a kernel (on the CPU, of an operator) -> its microseconds in one call."""
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
    return times


def described(times: Mapping[str, float]) -> str:
    """The kind of attention, and its kernels' share of the time."""
    for kind, pattern in KINDS.items():
        taken = [time for name, time in times.items() if re.search(pattern, name.lower())]
        if taken:
            return f"{kind}, {sum(taken) / max(sum(times.values()), 1e-9):.0%}"
    return "not found"
