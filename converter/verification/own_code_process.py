"""The process in which a source's own code runs.

``python -m converter.verification.own_code_process FOLDER RUN`` reads the request in FOLDER and writes there
what the code computes, or the reason why it fails. It ends when the process RUN, which started it, ends, and
then removes the folder.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from converter.child import end_with
from converter.result.converted import open_converted
from converter.verification.own_code import FAILURE, OUTPUTS, REQUEST, result
from converter.verification.patched import Patched
from converter.verification.slice import Slice

COUNTS = ("n_layer", "n_layers", "num_layers")
"""Names other than ``num_hidden_layers`` that such code uses for the number of layers."""
NOT_PASSED = ("auto_map", "model_type", "architectures", "alibi_scaling")


def main(folder: Path) -> None:
    """Computes the request. Any failure is written down, even when the code itself exits the process."""
    try:
        request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
        outputs = compute(request)
    except BaseException as error:
        (folder / FAILURE).write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        raise
    save_file(outputs, folder / OUTPUTS)


@torch.no_grad()
def compute(request: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Row -> what the code's class computes for it, float32 [1, TOKENS, vocabulary or hidden].

    Raises:
        RuntimeError: the class's layers or tensors differ from the checkpoint's.
        Exception: whatever the code raises.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    with Patched.load(open_converted(Path(request["repository"]))) as patched:
        family, part = patched.family, Slice.of(patched)
        classes = {
            auto: get_class_from_dynamic_module(reference, place, local_files_only=True)
            for auto, (place, reference) in request["classes"].items()
        }
        model_class: Any = classes[request["auto"]]
        config_class: Any = classes.get("AutoConfig") or model_class.config_class
        config = config_class(**{k: v for k, v in request["config"].items() if k not in NOT_PASSED})
        part.shrink(config)
        for name in COUNTS:
            if hasattr(config, name):
                setattr(config, name, part.layers)
        config.use_cache, config.return_dict = False, True
        # Not built on the meta device: such code may fill buffers that the checkpoint does not store.
        model = model_class(config).float().eval()
        prefix = f"{family.layers}."
        below = [family.below(name) for name in model.state_dict()]
        built = {name[len(prefix) :].split(".")[0] for name in below if name.startswith(prefix)}
        if len(built) != part.layers:
            raise RuntimeError(f"it builds {len(built)} layers where {part.layers} were asked for")
        missing = part.fill(model)
        # A parameter that is not stored, such as a pooler's, may be unused. NaN shows whether it is used.
        for name in missing:
            model.get_parameter(name).fill_(torch.nan)
        outputs = {str(row): result(model(ids[None])).float() for row, ids in enumerate(part.ids)}
        if missing and not all(bool(output.isfinite().all()) for output in outputs.values()):
            raise RuntimeError(f"it needs {missing[0]}, which the checkpoint does not store")
        return {row: output.contiguous() for row, output in outputs.items()}


if __name__ == "__main__":
    place = Path(sys.argv[1])
    end_with(int(sys.argv[2]), lambda: shutil.rmtree(place, ignore_errors=True))
    main(place)
