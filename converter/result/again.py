"""What is found out about a converted repository that is converted again: weights, code and graphs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from converter.config import Weights
from converter.model.model import Model
from converter.result import manifest
from converter.source.tokenizer import TEMPLATE
from converter.source.weight_files import weight_files

GRAPHS = (".onnx", ".onnx_data")


def weights_of(model: Model, digests: Mapping[str, str | None]) -> Weights:
    """Whether the weights of a model are those of its original, by its record and its manifest.

    ``digests`` are the SHA-256 of its weight files, as far as they were read.
    """
    if model.provenance is None:
        return "original"
    listed, found = manifest.listed(model.source), {model.provenance.weights}
    for name, size in weight_files(model.source).items():
        entry, path = listed.get(name), model.folder / name
        if entry is None:
            found.add("unknown")
        elif entry.size != size or (entry.sha256 and entry.sha256 != digests.get(name, entry.sha256)):
            found.add("other")
        # Linked weights have no digest there. A link that is still one leads to what it was made to; in the
        # Hub's cache, all files are links.
        elif entry.sha256 is None:
            linked = path.is_symlink() or path.stat().st_nlink > 1
            found.add("original" if model.source.local and linked else "unknown")
        elif name not in digests:
            found.add("unknown")
    return next(value for value in ("other", "unknown", "original") if value in found)


def notes_on(model: Model) -> list[str]:
    """What the user should know of a converted repository that is converted again."""
    if model.provenance is None:
        return []
    found, listed = [], manifest.listed(model.source)
    edited = [
        name
        for name in (*model.templates, TEMPLATE)
        if name in model.source.files
        and (entry := listed.get(name)) is not None
        and hashlib.sha256(model.source.read(name)).hexdigest() != entry.sha256
    ]
    if edited:
        found.append(f"edited code is not taken over: {', '.join(edited)}")
    graphs = [name for name in (*model.source.files, *model.source.inside("onnx")) if name.endswith(GRAPHS)]
    if graphs:
        found.append("ONNX graphs were not copied: ntk-convert export writes them anew")
    if model.positions == "alibi" and model.provenance.limits is None:
        found.append("its input limits are kept, since the version that wrote it did not record the source's")
    return found
