"""Access to a converted repository's classes and tensors."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import types
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open

from converter.families.templates import templates_folder
from converter.model.alibi import AlibiModel
from converter.scaling.scaling import Scaling, first_layers, stretched
from converter.verification.alone import ALONE

# Sizes of the small models that checks build: enough for every layout, cheap for any head count.
PROBE_HEAD_DIM, PROBE_VOCABULARY, PROBE_LAYERS = 8, 32, 2


@dataclass(frozen=True)
class ImportedRepository:
    """A converted repository with its code imported."""

    model: AlibiModel
    modeling: types.ModuleType
    configuration: types.ModuleType

    @classmethod
    @contextlib.contextmanager
    def load(cls, model: AlibiModel) -> Iterator[ImportedRepository]:
        """Imports the code that the repository holds, and removes it from ``sys.modules`` at the end.

        The import uses this tool's own templates, which are equal to the repository's files
        (``open_converted`` compares them). In a foreign folder, Python might load bytecode, a package or a
        shared library instead of those files.
        """
        with templates() as load:
            name = model.family.name
            yield cls(model, load(f"modeling_ntk_{name}"), load(f"configuration_ntk_{name}"))

    def build_config(self, **changes: Any) -> Any:
        """The repository's config object, with some keys changed."""
        config_class = getattr(self.configuration, f"Ntk{self.model.family.camel}Config")
        return config_class(**{**self.model.result_config, **changes})

    @property
    def architecture(self) -> Any:
        """The class that the repository's config names."""
        return getattr(self.modeling, self.model.architecture)

    @property
    def backbone(self) -> Any:
        """The class of the model without a head."""
        return getattr(self.modeling, f"Ntk{self.model.family.camel}Model")

    def probe_config(self, scaling: Scaling, layers: int = PROBE_LAYERS) -> Any:
        """The config of ``layers`` small layers with the heads and options of the first ones."""
        # Where the bias depends on the head size, so do the spans. The probe's ramp follows them.
        bias_scale, head_dim = self.model.family.bias_scale, self.model.geometry.head_dim
        scaling = stretched(scaling, bias_scale(head_dim) / bias_scale(PROBE_HEAD_DIM))
        config = self.build_config(alibi_scaling=first_layers(scaling, layers).to_json())
        config.hidden_size = config.num_attention_heads * PROBE_HEAD_DIM
        config.vocab_size = PROBE_VOCABULARY
        config.num_hidden_layers = layers
        config.pad_token_id = None  # may lie outside the small vocabulary
        for width in ("ffn_hidden_size", "intermediate_size", "n_inner"):
            if getattr(config, width, None) is not None:
                setattr(config, width, 4 * config.hidden_size)
        return config

    def stored_name(self, parameter: str) -> str | None:
        """The stored tensor of a parameter of ``architecture``; None for a tied head."""
        family = self.model.family
        spellings = (parameter, family.below(parameter), *family.tensor_names(parameter))
        return next((spelling for spelling in spellings if spelling in self.model.checkpoint.tensors), None)

    def layer_of(self, name: str) -> int | None:
        """The layer to which a stored tensor belongs; None if it is outside of the layers."""
        found = re.match(rf"{re.escape(self.model.family.layers)}\.(\d+)\.", self.model.family.below(name))
        return None if found is None else int(found[1])

    def tensor(self, name: str) -> torch.Tensor:
        with self.open(name) as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def rows(self, name: str, indices: list[int]) -> torch.Tensor:
        """Some rows of a stored matrix, without reading the others."""
        with self.open(name) as file:
            matrix = file.get_slice(name)
            return torch.cat([matrix[index : index + 1] for index in indices])

    def fill(
        self, module: Any, prefix: str = "", read: Callable[[str], torch.Tensor] | None = None
    ) -> dict[str, str]:
        """Gives a module its stored weights, in float32; it may be on the device "meta".

        ``prefix`` comes before its parameters' names in ``architecture``. ``read`` gets a stored name, and
        is ``tensor`` by default. Returns the names of its parameters that are stored -> their stored names.
        """
        names = {name: stored for name in module.state_dict() if (stored := self.stored_name(prefix + name))}
        state = {name: (read or self.tensor)(stored).float() for name, stored in names.items()}
        module.load_state_dict(state, strict=False, assign=True)
        return names

    def open(self, name: str) -> Any:
        """The safetensors file that stores a tensor."""
        return safe_open(self.model.folder / self.model.checkpoint.tensors[name].file, framework="pt")


@contextlib.contextmanager
def templates() -> Iterator[Callable[[str], types.ModuleType]]:
    """Yields a function that imports one of this tool's templates by name; forgets them at the end."""
    package = f"ntk_convert_verification_{uuid.uuid4().hex}"
    module = types.ModuleType(package)
    module.__path__ = [str(templates_folder())]
    with ALONE:
        sys.modules[package] = module
        writes_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # keep that folder as it is
        try:
            yield lambda name: importlib.import_module(f"{package}.{name}")
        finally:
            sys.dont_write_bytecode = writes_bytecode
            for name in [name for name in sys.modules if name.split(".")[0] == package]:
                del sys.modules[name]


def build(model_class: Any, config: Any, device: str = "cpu") -> Any:
    """A model of the given class in float32 and evaluation mode; on device "meta" it takes no memory."""
    config.return_dict = True
    with torch.device(device):
        return model_class(config).float().eval()
