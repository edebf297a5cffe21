"""GPTQ: weights of 4 bits with which a layer computes almost the same on the user's text.

Rounding to the nearest treats all inputs of a layer alike. GPTQ (Frantar et al., ICLR 2023, arXiv
2210.17323) rounds a weight one input after another. It moves the error of each to the inputs that are still
to come, by how they go together on the text. The graph has the same form and size.

The model's layers are loaded one after another. Each is calibrated on the results of the quantised layers
before it, so that it also makes up for their errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from safetensors.numpy import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from converter.model.alibi import AlibiModel
from converter.onnx.rounding import BLOCK, block_parameters, dequantised
from converter.progress import steps
from converter.scaling.scaling import Scaling
from converter.texts import load_tokenizer, read_windows
from converter.verification.imported import ImportedRepository, build

WINDOW, WINDOWS = 512, 64
"""Tokens in a window of the text, and the most windows."""
DAMPING = 0.01
"""What is added to the inputs' products, in parts of the mean of their squares (section 3.3 of the paper)."""
BAND = 128
"""Inputs whose errors are moved to all later ones at once. A multiple of ``BLOCK``."""


def calibrate(
    repository: AlibiModel,
    files: Sequence[Path],
    folder: Path,
    scales: DTypeLike = np.float32,
    *,
    progress: bool = False,
) -> dict[str, Path]:
    """Quantises the linear layers of a model's blocks to 4 bits, by what they compute on a text.

    Stored name of each weight -> the file in ``folder`` with its numbers and scales of dtype ``scales``.
    Raises ``UsageError`` for a text that cannot be read or is shorter than a window, ``SourceError`` if the
    tokenizer does not load.
    """
    found: dict[str, Path] = {}
    with ImportedRepository.load(repository) as imported, torch.no_grad():
        tokenizer = load_tokenizer(repository.folder, str(repository.folder), imported)
        length = min(WINDOW, repository.trained.tokens or WINDOW)
        known, ids = np.unique(read_windows(tokenizer, files, length, WINDOWS), return_inverse=True)
        model = Layers(imported, repository.scaling, known.tolist())
        states = [model.enter(torch.from_numpy(row[None])) for row in ids.reshape(-1, length)]
        with steps("calibrating", len(model.layers), show=progress) as advance:
            for index, layer in enumerate(model.layers):
                model.load(layer)
                tensors: dict[str, Any] = {}
                file = folder / f"calibrated-{index}.safetensors"
                for module, products in input_products(layer, states, model.others[index]).items():
                    by_column = isinstance(module, Conv1D)
                    weight = module.weight.T if by_column else module.weight
                    parts = [np.ascontiguousarray(part.numpy()) for part in gptq(weight, products, scales)]
                    values = torch.from_numpy(dequantised(*parts))
                    module.weight.copy_(values.T if by_column else values)
                    name = model.stored[module.weight]
                    for end, part in zip(("numbers", "scales", "zeros"), parts, strict=True):
                        tensors[f"{name} {end}"] = part
                    found[name] = file
                save_file(tensors, file)
                states = [layer(row, *model.others[index])[0] for row in states]
                layer.to("meta")
                advance(1)
    return found


class Layers:
    """A model's layers, of which only one has its weights in memory.

    ``tokens`` are the ids that will be used. Their places in this list take their place.
    """

    def __init__(self, imported: ImportedRepository, scaling: Scaling, tokens: list[int]):
        config = imported.build_config(alibi_scaling=scaling.to_json())
        config.vocab_size = len(tokens)
        config.pad_token_id = None  # the ids are others
        if imported.model.decoder:
            config.use_cache = False
        model = build(imported.architecture, config, device="meta")
        self._imported = imported
        self._backbone = backbone = model.base_model
        self._names = {module: name for name, module in model.named_modules()}
        self._seen = backbone.decoder_layers if imported.model.decoder else backbone.encoder_layers
        self.layers = list(self._seen)
        """The modules, with weights on the device "meta" until they are loaded."""
        self.others: list[tuple[Any, ...]] = []
        """What each layer is called with beside its input."""
        self.stored: dict[nn.Parameter, str] = {}
        """Parameter of a loaded layer -> its stored name."""
        for index in range(len(self.layers)):
            self._seen[index] = Seen()
        tables = imported.model.family.tensor_names(imported.model.family.embeddings)

        def read(stored: str) -> torch.Tensor:
            return imported.rows(stored, tokens) if stored in tables else imported.tensor(stored)

        prefix = self._names[backbone]
        imported.fill(backbone, f"{prefix}." if prefix else "", read)

    def enter(self, ids: torch.Tensor) -> torch.Tensor:
        """The first layer's input [1, L, hidden] for a window of tokens, int64 [1, L]."""
        self._backbone(ids)
        # The windows have the same length and no padding, so the layers are called alike for all of them.
        self.others = self.others or [stand_in.others for stand_in in self._seen]
        states: torch.Tensor = self._seen[0].states
        return states

    def load(self, layer: nn.Module) -> None:
        """Reads a layer's weights, in float32."""
        names = self._imported.fill(layer, f"{self._names[layer]}.")
        layer.requires_grad_(False)
        self.stored = {parameter: names[name] for name, parameter in layer.named_parameters()}


class Seen(nn.Module):
    """Stands in for a layer: keeps what it is called with and hands the states on."""

    states: torch.Tensor
    others: tuple[Any, ...]

    def forward(self, states: torch.Tensor, *others: Any) -> tuple[torch.Tensor, None]:
        """See ``AlibiDecoder`` and ``AlibiEncoder`` in the templates."""
        self.states, self.others = states, others
        return states, None


def input_products(
    layer: nn.Module, states: Sequence[torch.Tensor], others: tuple[Any, ...]
) -> dict[Any, torch.Tensor]:
    """Runs a layer; each linear layer in it -> the sum of x xᵀ over its inputs, float32 [inputs, inputs]."""
    products: dict[Any, torch.Tensor] = {}

    def add(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        inputs = arguments[0].flatten(0, -2)
        if module not in products:
            products[module] = inputs.new_zeros(inputs.shape[1], inputs.shape[1])
        products[module].addmm_(inputs.T, inputs)

    linear = [module for module in layer.modules() if isinstance(module, nn.Linear | Conv1D)]
    hooks = [module.register_forward_pre_hook(add) for module in linear]
    for row in states:
        layer(row, *others)
    for hook in hooks:
        hook.remove()
    return products


def gptq(
    weight: torch.Tensor, products: torch.Tensor, dtype: DTypeLike = np.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Algorithm 1 of the paper, with a scale and a zero point for each block of ``BLOCK`` inputs.

    The weight is float32 [outputs, inputs]; ``products``, which is overwritten, is the sum of x xᵀ over the
    inputs x, float32 [inputs, inputs]; the scales are numbers of ``dtype``. Returns the numbers 0 to 15,
    uint8 [outputs, inputs]; scales, float32, and zero points, uint8 [outputs, blocks].
    """
    left = weight.T.contiguous().clone()  # [inputs, outputs]: what is still to be rounded
    inputs, outputs = left.shape
    factor = inverse_factor(products)
    numbers = torch.empty(inputs, outputs, dtype=torch.uint8)
    scales, zeros = torch.empty(0), torch.empty(0)
    all_scales, all_zeros = [], []
    for start in range(0, inputs, BAND):
        stop = min(start + BAND, inputs)
        errors = torch.empty(stop - start, outputs)
        for index in range(start, stop):
            if index % BLOCK == 0:
                block = left[index : index + BLOCK].T.numpy()
                parameters = block_parameters(block, 4, dtype)
                scales, zeros = torch.from_numpy(parameters.scales), torch.from_numpy(parameters.zeros)
                all_scales.append(scales)
                all_zeros.append(zeros)
            found = (left[index] / scales + zeros).round_().clamp_(0, 15)
            numbers[index] = found
            error = (left[index] - (found - zeros) * scales) / factor[index, index]
            left[index + 1 : stop].addr_(factor[index, index + 1 : stop], error, alpha=-1)
            errors[index - start] = error
        left[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    return numbers.T, torch.stack(all_scales, dim=1), torch.stack(all_zeros, dim=1)


def inverse_factor(products: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor U of the inverse UᵀU of the damped products [inputs, inputs]."""
    diagonal = products.diagonal()
    diagonal[diagonal == 0] = 1  # an input that is always 0
    damping = DAMPING * diagonal.mean()
    while True:
        diagonal.add_(damping)
        lower, failed = torch.linalg.cholesky_ex(products)
        if not failed:
            break
        damping *= 10  # too little for the rounding of float32
    upper: torch.Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return upper
