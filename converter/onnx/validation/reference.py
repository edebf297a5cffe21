"""The patched torch model with the repository's own code and weights, whole or its first layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from numpy.typing import NDArray

from converter.onnx.build import Repository
from converter.onnx.session import stacked
from converter.verification.patched import Patched, build

Array = NDArray[Any]
VOCABULARY_TENSORS = (
    "lm_head.weight",
    "cls.predictions.bias",
    "cls.predictions.decoder.weight",
    "cls.predictions.decoder.bias",
)
"""Those of the heads that have a row for each token of the vocabulary."""
RESULTS = ("last_hidden_state", "logits", "start_logits", "end_logits")
"""What a model may compute, in the order of a graph's outputs."""


class Reference:
    """What the graph must compute: the torch model, in float32."""

    def __init__(self, model: Any, *, has_cache: bool):
        self.model = model
        self.has_cache = has_cache

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
            family = repository.family
            tables = {*family.tensor_names(family.embeddings), *VOCABULARY_TENSORS}
            stored = patched.checkpoint.tensors
            state = {}
            for name in model.state_dict():
                found = next((n for n in (name, family.below(name)) if n in stored), None)
                if found is None:
                    continue  # a tied head
                whole = name not in tables or stored[found].shape[0] == vocabulary
                tensor = patched.tensor(found) if whole else patched.first_rows(found, vocabulary)
                state[name] = tensor.float()
            model.load_state_dict(state, strict=False, assign=True)
            model.tie_weights()
            yield cls(model, has_cache=repository.decoder)

    def step(self, ids: Array, mask: Array, past: Any = None) -> tuple[Array, Any]:
        """As ``Session.step``: what it computes, float32 [B, S or 1, any], and the cache."""
        cache = {"past_key_values": past, "use_cache": True} if self.has_cache else {}
        with torch.no_grad():
            output = self.model(
                torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), return_dict=True, **cache
            )
        results = [output[name].numpy() for name in RESULTS if name in output]
        return stacked(results, ids.shape[1]), output.get("past_key_values")
