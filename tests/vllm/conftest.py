"""Runs these tests only where vLLM is installed, which is in an environment of its own."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # vLLM reads these when it is imported. Engines run in the process of the tests, in one thread.
    os.environ.update(
        HF_HUB_OFFLINE="1",
        TORCH_COMPILE_DISABLE="1",
        VLLM_CACHE_ROOT=tempfile.mkdtemp(prefix="ntk-convert-vllm-"),
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
    )
    atexit.register(shutil.rmtree, os.environ["VLLM_CACHE_ROOT"], ignore_errors=True)


@contextmanager
def quick_engines() -> Iterator[None]:
    """Leaves out what takes most of the time of an engine's start, and is not needed again.

    vLLM imports each model's class once in a process of its own, to keep CUDA out of this one. It looks for
    kernels in all modules whenever an engine starts. And it collects garbage several times for each engine;
    that is slow unless what was imported is left out, which vLLM would undo.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform
    from vllm.v1.engine import core

    find_kernels = staticmethod(functools.cache(current_platform.register_triton_kernel_overrides))
    gc.freeze()
    with (
        mock.patch.object(registry, "_run_in_subprocess", lambda function: function()),
        mock.patch.object(type(current_platform), "register_triton_kernel_overrides", find_kernels),
        mock.patch.object(core, "freeze_gc_heap"),
        mock.patch.object(gc, "unfreeze"),
    ):
        yield


@pytest.fixture(scope="session", autouse=True)
def _quick_engines() -> Iterator[None]:
    with quick_engines():
        yield
