"""Graphs under onnxruntime: sessions on the provider that was asked for, and steps over a cache.

A session takes denormal numbers for zero (``ENTRIES``). Found by running onnxruntime 1.31: that applies to
the threads that a session starts. The thread that calls the session is another matter: the first session of
a process decides for the thread that makes it, and for all threads which that one starts later. It stays so,
for NumPy and torch in these threads too. So here ``denormals_as_zero`` sets the thread while a graph runs,
and then sets it back.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from packaging.version import Version

from converter.errors import ProviderError
from converter.onnx.options import ENTRIES, PROVIDERS
from converter.source.sentence_transformers import SENTENCES

ONNX_TYPES = {"tensor(float)": 1, "tensor(float16)": 10, "tensor(bfloat16)": 16}
"""onnxruntime's name of a dtype -> its number in onnx.proto."""
ONLY_FATAL, WARNINGS = 4, 2
"""onnxruntime's log levels, the second is its default; errors are raised in any case."""
CUDA_SINCE = "1.25.0"
"""The oldest onnxruntime-gpu with CUDA kernels for opset 21; older ones copy tensors in every layer."""
OPTIONS: Mapping[str, Mapping[str, str]] = {"cuda": {"use_tf32": "0"}, "cpu": {}}
"""Options of providers. TF32, CUDA's default, multiplies float32 with 10 bits, so results differ by 1e-3."""
PROBE = '<ir_version: 8, opset_import: ["": 17]> probe (float[1] x) => (float[1] y) { y = ReduceL2(x) }'
"""A graph, as text, that shows whether CUDA works: ReduceL2, which pooled graphs have, needs cuDNN too."""

Array = NDArray[Any]
Past = dict[str, Any]
"""Input name of a cached key or value -> its content, on the session's device."""


def check_available(provider: str) -> None:
    """Raises ``ProviderError`` if a provider does not work here; for CUDA, a graph of one node is run."""
    version, available = onnxruntime.__version__, onnxruntime.get_available_providers()
    if PROVIDERS[provider] not in available:
        raise ProviderError(
            f"onnxruntime {version} has no {PROVIDERS[provider]} here, only {', '.join(available)}; "
            "for CUDA install onnxruntime-gpu in place of onnxruntime"
        )
    if provider == "cpu":
        return
    if Version(version) < Version(CUDA_SINCE):
        raise ProviderError(
            f"onnxruntime-gpu {version} copies tensors to the CPU in every layer of these graphs; "
            f"install onnxruntime-gpu {CUDA_SINCE} or newer"
        )
    reason = cuda_fault()
    if reason is not None:
        raise ProviderError(
            f"onnxruntime-gpu {version} needs CUDA {onnxruntime.cuda_version.partition('.')[0]} and cuDNN, "
            f"which do not work here ({reason}); for the libraries: pip install "
            f"'onnxruntime-gpu[cuda,cudnn]=={version}'"
        )


def cuda_fault() -> str | None:
    """Why CUDA does not work, in a few words; None if it does. Loads its libraries and prints nothing."""
    import torch  # noqa: F401 -- has CUDA libraries of its own

    said = io.StringIO()
    onnxruntime.set_default_logger_severity(ONLY_FATAL)
    try:
        with contextlib.redirect_stdout(said):
            onnxruntime.preload_dlls()
        probe = open_session(onnx.parser.parse_model(PROBE).SerializeToString(), "cuda", quiet_options())
        probe.run(None, {"x": np.ones(1, np.float32)})
        if probe.get_providers()[0] == PROVIDERS["cuda"]:
            return None
        return said.getvalue().partition("\n")[0] or "the libraries or the driver do not load"
    except Exception as error:
        # Around the reason stand the signature of a C++ function and where the call is.
        text = " ".join(str(error).split())
        found = re.search(r"(CUDA failure \d|cuDNN is unavailable).*", text)
        return (found[0] if found else text).partition(" ; ")[0][:200]
    finally:
        onnxruntime.set_default_logger_severity(WARNINGS)


def quiet_options() -> onnxruntime.SessionOptions:
    """What every session here is given."""
    options = onnxruntime.SessionOptions()
    for entry in ENTRIES.items():
        options.add_session_config_entry(*entry)
    options.log_severity_level = ONLY_FATAL
    return options


def open_session(
    source: str | bytes, provider: str, options: onnxruntime.SessionOptions
) -> onnxruntime.InferenceSession:
    """A session, which may still have fallen back to the CPU if the CUDA libraries do not load."""
    names = dict.fromkeys((provider, "cpu"))
    asked = [(PROVIDERS[name], dict(OPTIONS[name])) for name in names]
    with denormals_as_zero():
        return onnxruntime.InferenceSession(source, options, providers=asked, enable_fallback=0)


class Ran(NamedTuple):
    provider: str
    """onnxruntime's name."""
    operator: str
    elements: int
    """Of its largest output."""


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
    """One graph, a file or its bytes, on one provider.

    ``folder``: of the weights, for bytes. ``profile``: folder for a record of what ran where, for ``ran``.
    ``check_available`` comes first. Raises ``ProviderError`` if onnxruntime fell back to the CPU.
    """

    def __init__(
        self, model: Path | bytes, provider: str, *, folder: Path | None = None, profile: Path | None = None
    ):
        options = quiet_options()
        if folder is not None and isinstance(model, bytes):
            key = "session.model_external_initializers_file_folder_path"
            options.add_session_config_entry(key, str(folder))
        if profile is not None:
            options.enable_profiling = True
            options.profile_file_prefix = str(profile / "run")
        self.session = open_session(model if isinstance(model, bytes) else str(model), provider, options)
        found = self.session.get_providers()[0]
        if found != PROVIDERS[provider]:
            raise ProviderError(f"onnxruntime was asked for {PROVIDERS[provider]} and fell back to {found}")
        self.device = provider
        self.buffer: Past | None = None
        """The cache of ``shared``."""
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        outputs = [value.name for value in self.session.get_outputs()]
        self.results = [name for name in outputs if not name.startswith("present.")]
        """Names of the outputs but the cache: logits, hidden states and vectors of texts, or the two scores
        of an answer's ends."""

    def step(self, ids: Array, mask: Array, past: Past | None = None) -> tuple[Outputs, Past]:
        """Runs new tokens, int64 [B, S], under a mask [B, T] over a cache, which gets new memory.

        In a session with one buffer, the width of the mask tells how much of it is in use.
        """
        past = self.buffer or past or self.buffers(len(ids), 0)
        binding = self.session.io_binding()
        binding.bind_cpu_input("input_ids", ids)
        binding.bind_cpu_input("attention_mask", mask)
        if "token_type_ids" in self.inputs:
            binding.bind_cpu_input("token_type_ids", np.zeros_like(ids))
        for name in self.results:
            binding.bind_output(name)
        for name, content in past.items():
            binding.bind_ortvalue_input(name, content)
            present = name.replace("past_key_values.", "present.")
            if self.buffer:
                binding.bind_ortvalue_output(present, content)
            else:
                binding.bind_output(present, self.device)
        with denormals_as_zero():
            self.session.run_with_iobinding(binding)
        outputs, count = binding.get_outputs(), len(self.results)
        results = [output.numpy().astype(np.float32, copy=False) for output in outputs[:count]]
        sentences = results.pop(self.results.index(SENTENCES)) if SENTENCES in self.results else None
        presents = dict(zip(past, outputs[count:], strict=True))
        return Outputs(stacked(results, ids.shape[1]), sentences), presents

    def shared(self, rows: int, length: int) -> Session:
        """The same with one buffer for past and present, of ``length`` tokens, for the profile ``ort``."""
        session = copy.copy(self)
        session.buffer = self.buffers(rows, length)
        return session

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

    def ran(self) -> list[Ran]:
        """The operators that ran, for a session with a profile, which ends here."""
        # Names of nodes and values are in there as the graph has them, which may not be UTF-8.
        profile = Path(self.session.end_profiling()).read_text(encoding="utf-8", errors="replace")
        found = []
        for event in json.loads(profile):
            args = event.get("args", {})
            if event.get("cat") == "Node" and args.get("provider"):
                sizes = [math.prod(shape) for value in args["output_type_shape"] for shape in value.values()]
                found.append(Ran(args["provider"], args["op_name"], max(sizes, default=0)))
        return found


def stacked(results: Sequence[Array], tokens: int) -> Array:
    """Results of a model as one array [B, S or 1, any]; two are the scores of an answer's ends, [B, S]."""
    if len(results) > 1:
        return np.stack(results, axis=-1)
    [result] = results
    return result if result.ndim == 3 and result.shape[1] in (1, tokens) else result[:, None]
