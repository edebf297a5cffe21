"""The patched torch model with the repository's own code and weights, whole or its first layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from converter.onnx.build import Repository
from converter.verification.patched import Patched, build

Array = NDArray[Any]


class Reference:
    """What the graph must compute: the torch model, in float32."""

    def __init__(self, model: Any):
        self.model = model

    @classmethod
    @contextlib.contextmanager
    def load(cls, repository: Repository, layers: int, vocabulary: int) -> Iterator[Reference]:
        """Loads the first ``layers`` layers and the first ``vocabulary`` rows of the embeddings."""
        with Patched.load(repository.folder, repository.family) as patched:
            config = patched.build_config()
            config.num_hidden_layers = layers
            config.vocab_size = vocabulary
            config.pad_token_id = None  # may lie outside a shortened vocabulary
            model = build(patched.architecture, config, device="meta")
            tables = {f"transformer.{repository.family.embeddings}", "lm_head.weight"}
            stored = patched.checkpoint.tensors
            state = {}
            for name in model.state_dict():
                found = next((n for n in (name, name.removeprefix("transformer.")) if n in stored), None)
                if found is None:
                    continue  # a tied head
                whole = name not in tables or stored[found].shape[0] == vocabulary
                tensor = patched.tensor(found) if whole else patched.first_rows(found, vocabulary)
                state[name] = tensor.float()
            model.load_state_dict(state, strict=False, assign=True)
            model.tie_weights()
            yield cls(model)

    def step(self, ids: Array, mask: Array, past: Any = None) -> tuple[Array, Any]:
        """As ``Session.step``: logits, float32 [B, S, vocabulary], and the cache."""
        with torch.no_grad():
            output = self.model(
                torch.from_numpy(ids),
                attention_mask=torch.from_numpy(mask),
                past_key_values=past,
                use_cache=True,
                return_dict=True,
            )
        logits: NDArray[np.float32] = output.logits.numpy()
        return logits, output.past_key_values
