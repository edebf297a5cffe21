"""A language model in Triton's Python backend: model.py in a repository that triton_repository.py writes.

Each request gets a slot of ``onnx_slots.Service`` and a thread, and a response for each token. The request
ends with its last token, with an error, or when the client cancels it.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as utils
from generate_onnx import Model
from onnx_slots import Refused, Service


class TritonPythonModel:
    """The name and the methods that Triton looks for."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the graph and allocates all slots; what it raises is Triton's error for the model."""
        parameters = json.loads(args["model_config"])["parameters"]
        given = {key: value["string_value"] for key, value in parameters.items()}
        folder, sizes = Path(given["folder"]), [int(given[key]) for key in ("slots", "length", "queue")]
        self.service = Service(Model(folder), folder, *sizes)

    def execute(self, requests: list[Any]) -> None:
        """Returns at once, so that Triton can give the model more requests."""
        for request in requests:
            body = {"input_ids": utils.get_input_tensor_by_name(request, "input_ids").as_numpy().tolist()}
            new = utils.get_input_tensor_by_name(request, "max_new_tokens")
            if new is not None:
                body["max_new_tokens"] = int(new.as_numpy()[0])
            threading.Thread(target=self.answer, args=(body, request.get_response_sender())).start()

    def answer(self, body: dict[str, Any], sender: Any) -> None:
        """Sends the tokens of a request, or why there are none, and always the end."""
        try:
            request = self.service.parse(json.dumps(body).encode())
            with self.service.slot() as batch:
                for new in self.service.steps(batch, request):
                    if sender.is_cancelled():
                        break
                    for token in new:
                        tensor = utils.Tensor("token", np.array([token], np.int64))
                        sender.send(utils.InferenceResponse([tensor]))
        except Refused as refused:
            full = refused.status == 503
            code = utils.TritonError.UNAVAILABLE if full else utils.TritonError.INVALID_ARG
            sender.send(utils.InferenceResponse(error=utils.TritonError(str(refused), code)))
        except Exception as error:
            sender.send(utils.InferenceResponse(error=utils.TritonError(f"the model failed: {error!r}")))
        finally:
            sender.send(flags=utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
