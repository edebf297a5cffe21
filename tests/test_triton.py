"""Triton model repositories: their configs by the published schema, and what Triton would run in them.

Triton itself is not run here. A stand-in for its Python module calls the decoder's model.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from converter import OnnxOptions, export
from tests import tiny
from tests.patched import Convert
from tests.test_onnx_example import NEW, expected
from tests.test_onnx_pooled import encoder

pytest.importorskip("onnxruntime")

import onnxruntime
from triton_repository import main, write

SIZES = {"batch": 16, "slots": 2, "length": 96, "queue": 1}


@pytest.fixture(scope="module")
def schema() -> ModuleType:
    """The published schema. It is loaded by its file, because the package around it needs grpcio."""
    found = importlib.util.find_spec("tritonclient")
    if found is None or not found.submodule_search_locations:
        pytest.skip("tritonclient is not installed; the extra dev has it")
    path = Path(found.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    return imported("model_config_pb2", path)


def imported(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parsed(schema: ModuleType, model: Path) -> Any:
    from google.protobuf import text_format

    config = text_format.Parse((model / "config.pbtxt").read_text(), schema.ModelConfig())
    assert config.name == model.name, "Triton compares it with the folder's name"
    return config


def pooled(tmp_path: Path) -> Path:
    folder = encoder(tmp_path)
    export(folder, OnnxOptions(pooled=True, standalone=True, dtype="fp32", validate=False))
    write(folder, tmp_path / "models" / "jina", **SIZES)
    return tmp_path / "models" / "jina"


def language_model(converted: Convert, tmp_path: Path, scaling: str = "ntk-position") -> tuple[Path, Path]:
    folder = converted("bloom", 4, scaling)
    export(folder, OnnxOptions(validate=False))
    write(folder, tmp_path / "models" / "bloom", **SIZES)
    return folder, tmp_path / "models" / "bloom"


def test_the_config_of_an_encoder(schema: ModuleType, tmp_path: Path) -> None:
    """Its names, types and sizes are those of the graph, which runs where Triton looks for it."""
    model = pooled(tmp_path)
    config = parsed(schema, model)
    assert (config.backend, config.max_batch_size) == ("onnxruntime", 16)
    assert config.HasField("dynamic_batching")
    session = onnxruntime.InferenceSession(model / "1" / config.default_model_filename)
    assert [item.name for item in config.input] == [item.name for item in session.get_inputs()]
    assert {(item.data_type, *item.dims) for item in config.input} == {(schema.TYPE_INT64, -1)}
    [output] = config.output
    vectors = session.run([output.name], {item.name: np.ones((3, 7), np.int64) for item in config.input})[0]
    assert (output.name, output.data_type) == ("sentence_embedding", schema.TYPE_FP32)
    assert (vectors.dtype, vectors.shape) == (np.float32, (3, *output.dims))


def test_the_config_of_a_language_model(schema: ModuleType, converted: Convert, tmp_path: Path) -> None:
    folder, model = language_model(converted, tmp_path)
    config = parsed(schema, model)
    assert (config.backend, config.max_batch_size) == ("python", 0)
    assert config.model_transaction_policy.decoupled
    assert [(item.name, list(item.dims), item.optional) for item in config.input] == [
        ("input_ids", [-1], False),
        ("max_new_tokens", [1], True),
    ]
    given = {key: value.string_value for key, value in config.parameters.items()}
    assert given == {"folder": str(folder), "slots": "2", "length": "96", "queue": "1"}


def test_a_mistake_in_a_config_is_found(schema: ModuleType, converted: Convert, tmp_path: Path) -> None:
    from google.protobuf.text_format import ParseError

    _, model = language_model(converted, tmp_path)
    path = model / "config.pbtxt"
    right = path.read_text()
    for old, new in (("decoupled:", "decouple:"), ("TYPE_INT32", "INT32"), ("-1", '"-1"'), ("]", "")):
        path.write_text(right.replace(old, new))
        with pytest.raises(ParseError):
            parsed(schema, model)


class Sender:
    """What a request sends its responses to; ``stop`` cancels it after so many."""

    def __init__(self, stop: int | None = None):
        self.responses: list[Any] = []
        self.final = False
        self.stop = stop

    def send(self, response: Any = None, flags: int = 0) -> None:
        assert not self.final, "nothing may follow the end"
        self.responses += [] if response is None else [response]
        self.final = bool(flags)

    def is_cancelled(self) -> bool:
        return self.stop is not None and len(self.responses) >= self.stop

    def wait(self) -> list[Any]:
        until = time.monotonic() + 20
        while not self.final:
            assert time.monotonic() < until
            time.sleep(0.005)
        return self.responses

    @property
    def tokens(self) -> list[int]:
        return [int(response.output_tensors[0].array[0]) for response in self.wait()]

    @property
    def error(self) -> tuple[str, int]:
        [response] = self.wait()
        return response.error


class Tensor:
    def __init__(self, name: str, array: np.ndarray):
        self.name, self.array = name, array

    def as_numpy(self) -> np.ndarray:
        return self.array


class TritonError(tuple[str, int]):
    UNKNOWN, INTERNAL, INVALID_ARG, UNAVAILABLE = range(4)

    def __new__(cls, message: str, code: int = INTERNAL) -> TritonError:
        return super().__new__(cls, (message, code))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The part of Triton's Python module that the model uses, as its sources say."""
    module: Any = ModuleType("triton_python_backend_utils")
    module.Tensor, module.TritonError = Tensor, TritonError
    module.InferenceResponse = lambda output_tensors=(), error=None: SimpleNamespace(
        output_tensors=output_tensors, error=error
    )
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    module.get_input_tensor_by_name = lambda request, name: request.tensors.get(name)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def loaded(model: Path) -> Any:
    """The model as Triton loads it."""
    config = (model / "config.pbtxt").read_text()
    names = ("folder", "slots", "length", "queue")
    words = [config.split(f'"{name}" value {{ string_value: "')[1].split('"')[0] for name in names]
    parameters = {name: {"string_value": word} for name, word in zip(names, words, strict=True)}
    made = imported("triton_model", model / "1" / "model.py").TritonPythonModel()
    made.initialize({"model_config": json.dumps({"parameters": parameters})})
    return made


def ask(model: Any, ids: list[int], new: int | None = NEW, stop: int | None = None) -> Sender:
    sender = Sender(stop)
    tensors = {"input_ids": Tensor("input_ids", np.array(ids, np.int64))}
    if new is not None:
        tensors["max_new_tokens"] = Tensor("max_new_tokens", np.array([new], np.int32))
    model.execute([SimpleNamespace(tensors=tensors, get_response_sender=lambda: sender)])
    return sender


def test_a_language_model_s_responses(converted: Convert, tmp_path: Path, stand_in: Any) -> None:
    """The tokens of transformers, an error for what cannot be run, and slots that become free."""
    folder, path = language_model(converted, tmp_path)
    assert {file.name for file in (path / "1").iterdir()} == {"model.py", "generate_onnx.py", "onnx_slots.py"}
    model = loaded(path)
    rows = [row[:length].tolist() for row, length in zip(tiny.token_ids(3, 60), (60, 12, 5), strict=True)]
    senders = [ask(model, row) for row in rows]
    assert [sender.tokens for sender in senders] == [expected(folder, row) for row in rows]
    assert len(ask(model, rows[2], None).tokens) <= 32

    line = "97 tokens and max_new_tokens 16 are more than the 96 of a slot"
    assert ask(model, [5] * 97).error == (line, stand_in.TritonError.INVALID_ARG)
    model.service.model.end_tokens = []
    assert len(ask(model, rows[2], 90, stop=2).tokens) == 2
    with model.service.slot(), model.service.slot():
        waiting = ask(model, rows[2], 2)
        until = time.monotonic() + 20
        while model.service.places.acquire(blocking=False):
            model.service.places.release()
            assert time.monotonic() < until
        message, code = ask(model, rows[2], 2).error
        assert (message, code) == (
            "all slots are taken and the queue is full; try again",
            stand_in.TritonError.UNAVAILABLE,
        )
    assert len(waiting.tokens) == 2
    until = time.monotonic() + 20
    while model.service.slots.qsize() < 2:
        assert time.monotonic() < until


def test_a_model_that_fails(converted: Convert, tmp_path: Path, stand_in: Any) -> None:
    model = loaded(language_model(converted, tmp_path)[1])
    model.service.steps = None
    message, code = ask(model, [5]).error
    assert message.startswith("the model failed: TypeError")
    assert code == stand_in.TritonError.INTERNAL
    assert model.service.slots.qsize() == 2


def test_what_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = encoder(tmp_path), tmp_path / "models" / "jina"

    def refused(*words: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["triton_repository.py", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            main()
        return str(stopped.value.code)

    assert refused(folder, out).startswith("error: no ONNX graph in ")
    export(folder, OnnxOptions(validate=False))
    assert refused(folder, out) == (
        f"error: the weights of {folder / 'model.onnx'} are elsewhere; export with --onnx-standalone"
    )
    assert not out.exists()
    export(folder, OnnxOptions(standalone=True, dtype="fp32", validate=False))
    monkeypatch.setattr(
        sys, "argv", ["triton_repository.py", str(folder), str(out), "--graph", "onnx/model.onnx"]
    )
    main()
    assert capsys.readouterr().out.endswith(f"{out}\n")
    assert "File exists" in refused(folder, out, "--graph", "onnx/model.onnx")
