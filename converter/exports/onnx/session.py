"""Graphs under onnxruntime: sessions on the provider that was asked for, and steps over a cache.

A session takes denormal numbers for zero (``ENTRIES``). Found by running onnxruntime 1.31: that applies to
the threads that a session starts. The thread that calls the session is another matter: the first session of
a process decides for the thread that makes it, and for all threads which that one starts later. It stays so,
for NumPy and torch in these threads too. So here ``denormals_as_zero`` sets the thread while a graph runs,
and then sets it back.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from converter.errors import ProviderError
from converter.exports.onnx.choices import ENTRIES, PROVIDERS
from converter.source.sentence_transformers import SENTENCES

ONNX_TYPES = {"tensor(float)": 1, "tensor(float16)": 10, "tensor(bfloat16)": 16}
"""onnxruntime's name of a dtype -> its number in onnx.proto."""
ONLY_FATAL = 4
"""onnxruntime's log level; errors are raised in any case."""

Array = NDArray[Any]
Past = dict[str, Any]
"""Input name of a cached key or value -> its content, on the session's device."""


def check_available(provider: str) -> None:
    """Raises ``ProviderError`` if onnxruntime has no such provider here; a session may still not get it."""
    if PROVIDERS[provider] not in onnxruntime.get_available_providers():
        raise ProviderError(
            f"onnxruntime {onnxruntime.__version__} has no {PROVIDERS[provider]} here, only "
            f"{', '.join(onnxruntime.get_available_providers())}; for CUDA install onnxruntime-gpu in "
            "place of onnxruntime"
        )


class Outputs(NamedTuple):
    """What a model computes in a step."""

    values: Array
    """float32: logits [B, S or 1, vocabulary], or what a model without a cache gives, [B, S or 1, any]."""
    sentences: Array | None = None
    """float32 [B, any]: one vector of each text, of a model that pools."""


@contextlib.contextmanager
def denormals_as_zero() -> Iterator[None]:
    """The calling thread takes denormal numbers for zero meanwhile, as a session's own threads do."""
    import torch

    before = bool(np.float32(1e-38) / np.float32(8) == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


class Session:
    """One graph, a file or its bytes, on one provider; an ``Engine`` of the cases.

    ``folder``: of the weights, for bytes. ``profile``: folder for a record of what ran where, for
    ``operators``. Raises ``ProviderError`` if onnxruntime has no such provider or fell back to another.
    """

    def __init__(
        self, model: Path | bytes, provider: str, *, folder: Path | None = None, profile: Path | None = None
    ):
        check_available(provider)
        options = onnxruntime.SessionOptions()
        for entry in ENTRIES.items():
            options.add_session_config_entry(*entry)
        options.log_severity_level = ONLY_FATAL
        if folder is not None and isinstance(model, bytes):
            key = "session.model_external_initializers_file_folder_path"
            options.add_session_config_entry(key, str(folder))
        if profile is not None:
            options.enable_profiling = True
            options.profile_file_prefix = str(profile / "run")
        if provider == "cuda":
            import torch  # noqa: F401 -- brings the CUDA libraries that onnxruntime needs

            onnxruntime.preload_dlls()
        asked = list(dict.fromkeys((PROVIDERS[provider], PROVIDERS["cpu"])))
        source: Any = model if isinstance(model, bytes) else str(model)
        with denormals_as_zero():
            self.session = onnxruntime.InferenceSession(source, options, providers=asked)
        self.session.disable_fallback()
        found = self.session.get_providers()[0]
        if found != asked[0]:
            raise ProviderError(
                f"onnxruntime was asked for {asked[0]} and fell back to {found}; "
                "its CUDA libraries do not load here"
            )
        self.device = provider
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        outputs = [value.name for value in self.session.get_outputs()]
        self.results = [name for name in outputs if not name.startswith("present.")]
        """Names of the outputs but the cache: logits, hidden states and vectors of texts, or the two scores
        of an answer's ends."""

    def step(self, ids: Array, mask: Array, past: Past | None = None) -> tuple[Outputs, Past]:
        """Runs new tokens, int64 [B, S], under a mask [B, T] over a cache, which gets new memory."""
        past = past or self.buffers(len(ids), 0)
        outputs, presents = self._run(ids, mask, past, {})
        return outputs, dict(zip(past, presents, strict=True))

    def shared(self, rows: int, length: int) -> SharedCache:
        """An engine whose past and present share memory, for at most ``length`` tokens."""
        return SharedCache(self, self.buffers(rows, length))

    def buffers(self, rows: int, length: int) -> Past:
        """Memory for the cache of so many rows and tokens."""
        found = {}
        for name, value in self.inputs.items():
            if name.startswith("past_key_values."):
                shape = (rows, value.shape[1], length, value.shape[3])
                found[name] = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
                    shape, ONNX_TYPES[value.type], self.device, 0
                )
        return found

    def _run(self, ids: Array, mask: Array, past: Past, present: Past) -> tuple[Outputs, list[Any]]:
        """What the graph computes, and its new cache; ``present``: where to write that, by input name."""
        binding = self.session.io_binding()
        binding.bind_cpu_input("input_ids", ids)
        binding.bind_cpu_input("attention_mask", mask)
        if "token_type_ids" in self.inputs:
            binding.bind_cpu_input("token_type_ids", np.zeros_like(ids))
        for name in self.results:
            binding.bind_output(name)
        for name, buffer in past.items():
            binding.bind_ortvalue_input(name, buffer)
            output = name.replace("past_key_values.", "present.")
            if name in present:
                binding.bind_ortvalue_output(output, present[name])
            else:
                binding.bind_output(output, self.device)
        with denormals_as_zero():
            self.session.run_with_iobinding(binding)
        outputs, count = binding.get_outputs(), len(self.results)
        results = [output.numpy().astype(np.float32, copy=False) for output in outputs[:count]]
        sentences = results.pop(self.results.index(SENTENCES)) if SENTENCES in self.results else None
        return Outputs(stacked(results, ids.shape[1]), sentences), outputs[count:]

    def operators(self) -> Mapping[str, Mapping[str, int]]:
        """Provider -> operator -> how often it ran, for a session with a profile, which ends here."""
        # Names of nodes and values are in there as the graph has them, which may not be UTF-8.
        profile = Path(self.session.end_profiling()).read_text(encoding="utf-8", errors="replace")
        counts: dict[str, Counter[str]] = {}
        for event in json.loads(profile):
            arguments = event.get("args", {})
            if event.get("cat") == "Node" and arguments.get("provider"):
                counts.setdefault(arguments["provider"], Counter())[arguments["op_name"]] += 1
        return {provider: dict(found) for provider, found in counts.items()}


class SharedCache:
    """Steps as a server runs them, for graphs with the ``ort`` profile."""

    def __init__(self, session: Session, buffers: Past):
        self.session = session
        self.buffers = buffers

    def step(self, ids: Array, mask: Array, past: Any = None) -> tuple[Outputs, Any]:
        """See ``Session.step``; the width of the mask tells how much of the buffers is in use."""
        del past  # is in the buffers
        return self.session._run(ids, mask, self.buffers, self.buffers)[0], None


def stacked(results: Sequence[Array], tokens: int) -> Array:
    """Results of a model as one array [B, S or 1, any]; two are the scores of an answer's ends, [B, S]."""
    if len(results) > 1:
        return np.stack(results, axis=-1)
    [result] = results
    return result if result.ndim == 3 and result.shape[1] in (1, tokens) else result[:, None]
