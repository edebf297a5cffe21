"""Graphs under onnxruntime: sessions on the provider that was asked for, and steps over a cache."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from converter.errors import ProviderError
from converter.exports.onnx.choices import PROVIDERS
from converter.exports.onnx.session_options import denormals_as_zero, session_options
from converter.source.pooling import SENTENCES

ONNX_TYPES = {"tensor(float)": 1, "tensor(float16)": 10, "tensor(bfloat16)": 16}
"""onnxruntime's name of a dtype -> its number in onnx.proto."""
ONLY_FATAL = 4
"""onnxruntime's log level; errors are raised in any case."""

Array = NDArray[Any]
Past = dict[str, Any]
"""Input name of a cached key or value -> its content, on the session's device."""


def available(provider: str) -> bool:
    """Whether this installation of onnxruntime has the provider; a session may still fail to get it."""
    return PROVIDERS[provider] in onnxruntime.get_available_providers()


def check_available(provider: str) -> None:
    """Raises ``ProviderError`` if onnxruntime has no such provider here."""
    if not available(provider):
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


class Session:
    """One graph on one provider; an ``Engine`` of the cases.

    While it runs, denormal numbers are zeros; see ``session_options``.

    Args:
        model: the graph's file, or its bytes.
        provider: ``cpu`` or ``cuda``.
        folder: of the weights, for a graph given as bytes.
        profile: folder for a record of which operator ran where, which ``operators`` reads.

    Raises:
        ProviderError: onnxruntime has no such provider, or fell back to another.
        Exception: whatever onnxruntime raises for a graph that it cannot load.
    """

    def __init__(
        self, model: Path | bytes, provider: str, *, folder: Path | None = None, profile: Path | None = None
    ):
        check_available(provider)
        options = session_options()
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
        self.providers: list[str] = self.session.get_providers()
        if self.providers[0] != asked[0]:
            raise ProviderError(
                f"onnxruntime was asked for {asked[0]} and fell back to {self.providers[0]}; "
                "its CUDA libraries do not load here"
            )
        self.device = provider
        inputs = self.session.get_inputs()
        self.pasts = [value for value in inputs if value.name.startswith("past_key_values.")]
        self.has_types = any(value.name == "token_type_ids" for value in inputs)
        self.results = [
            value.name for value in self.session.get_outputs() if not value.name.startswith("present.")
        ]
        """Names of the outputs: logits, hidden states and vectors of texts, or the two scores of an answer's
        ends."""

    def step(self, ids: Array, mask: Array, past: Past | None = None) -> tuple[Outputs, Past]:
        """Runs new tokens over a cache, which gets new memory at every step.

        Args:
            ids: int64 [B, S].
            mask: int64 [B, T].
            past: from the previous step; None for an empty cache.

        Returns:
            What the graph computes, and the cache with the new tokens.
        """
        binding = self._bind(ids, mask)
        past = past or self._buffers(len(ids), 0)
        for name, buffer in past.items():
            binding.bind_ortvalue_input(name, buffer)
            binding.bind_output(present(name), self.device)
        self._run(binding)
        outputs = binding.get_outputs()
        count = len(self.results)
        results = [output.numpy().astype(np.float32, copy=False) for output in outputs[:count]]
        sentences = results.pop(self.results.index(SENTENCES)) if SENTENCES in self.results else None
        found = Outputs(stacked(results, ids.shape[1]), sentences)
        return found, dict(zip(past, outputs[count:], strict=True))

    def shared(self, rows: int, length: int) -> SharedCache:
        """An engine whose past and present share memory, for at most ``length`` tokens."""
        return SharedCache(self, self._buffers(rows, length))

    def operators(self) -> Mapping[str, Mapping[str, int]]:
        """Provider -> operator -> how often it ran, for a session with a profile, which ends here."""
        # Names of nodes and values are in there as the graph has them, which may not be UTF-8.
        profile = Path(self.session.end_profiling()).read_text(encoding="utf-8", errors="replace")
        events: Sequence[dict[str, Any]] = json.loads(profile)
        counts: dict[str, dict[str, int]] = {}
        for event in events:
            arguments = event.get("args", {})
            if event.get("cat") == "Node" and arguments.get("provider"):
                ran = counts.setdefault(arguments["provider"], {})
                ran[arguments["op_name"]] = ran.get(arguments["op_name"], 0) + 1
        return counts

    def _bind(self, ids: Array, mask: Array) -> Any:
        binding = self.session.io_binding()
        binding.bind_cpu_input("input_ids", ids)
        binding.bind_cpu_input("attention_mask", mask)
        if self.has_types:
            binding.bind_cpu_input("token_type_ids", np.zeros_like(ids))
        for name in self.results:
            binding.bind_output(name)
        return binding

    def _run(self, binding: Any) -> None:
        with denormals_as_zero():
            self.session.run_with_iobinding(binding)

    def _buffers(self, rows: int, length: int) -> Past:
        def buffer(value: Any) -> Any:
            shape = (rows, value.shape[1], length, value.shape[3])
            kind = ONNX_TYPES[value.type]
            return onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, kind, self.device, 0)

        return {value.name: buffer(value) for value in self.pasts}


class SharedCache:
    """Steps as a server runs them, for graphs with the ``ort`` profile."""

    def __init__(self, session: Session, buffers: Past):
        self.session = session
        self.buffers = buffers

    def step(self, ids: Array, mask: Array, past: Any = None) -> tuple[Outputs, Any]:
        """See ``Session.step``; the width of the mask tells how much of the buffers is in use."""
        del past  # is in the buffers
        binding = self.session._bind(ids, mask)
        for name, buffer in self.buffers.items():
            binding.bind_ortvalue_input(name, buffer)
            binding.bind_ortvalue_output(present(name), buffer)
        self.session._run(binding)
        logits: Array = binding.get_outputs()[0].numpy()
        return Outputs(logits.astype(np.float32, copy=False)), None


def stacked(results: Sequence[Array], tokens: int) -> Array:
    """The results of a model as one array [B, S or 1, any].

    Args:
        results: logits or hidden states [B, S, any]; scores of rows [B, any]; or two scores of tokens [B, S].
        tokens: S.
    """
    if len(results) > 1:
        return np.stack(results, axis=-1)
    [result] = results
    return result if result.ndim == 3 and result.shape[1] in (1, tokens) else result[:, None]


def present(past: str) -> str:
    """``past_key_values.0.key`` -> ``present.0.key``."""
    return past.replace("past_key_values.", "present.")
