"""The weight files of a source: which they are, and whether they are what the Hub has.

Unlike small files, they may be links that lead out of the folder, since only tensors are copied of them. Of
the Hub's digests, those of indexes are compared as they are fetched, and those of weights where all of their
bytes are read anyway, or by ``check_weights``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from converter.errors import SourceError, option
from converter.source.checkpoint import (
    BIN,
    BIN_INDEX,
    INDEXES,
    PICKLED,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    read_header,
    read_weight_map,
    weights_entry,
)
from converter.source.jsonfile import check_pointer, read_object
from converter.source.source import Source, check_digest, explain_missing

DEEPSPEED = "ds_inference_config.json"
"""The file that DeepSpeed-inference writes beside its weights."""
SHARD = re.compile(r".*[-_]\d+-of-\d+\.(safetensors|bin)")
WEIGHTS = re.compile(
    r"(?!training_args|optimizer|scheduler|rng_state|adapter_).*\.(safetensors|bin|pt|pth|ckpt)"
)
"""Files that can be a model's weights; a Trainer and PEFT write the others."""


def is_weight_file(name: str) -> bool:
    """Whether a file has weights, or is an index of them."""
    return name in INDEXES or name.endswith((".safetensors", *PICKLED))


def weights_index(source: Source) -> str | None:
    """The index of the weight files in use; None if there is no index."""
    entry = weights_entry(source.files)
    return entry if entry in INDEXES else None


def weight_files(source: Source) -> dict[str, int | None]:
    """The weight files in use and their sizes in bytes, without the index; empty if there are none.

    The index is downloaded. Raises ``SourceError`` if it is damaged, a shard is missing on the Hub, or the
    files are of a kind that no library loads.
    """
    entry = weights_entry(source.files)
    if entry is None:
        if source.offline:
            raise SourceError(
                f"the cache has no weights of {source.name}, and the Hub cannot be reached; check the "
                "connection (and HF_HUB_OFFLINE, HF_ENDPOINT)"
            )
        explain_missing(source.name, source.files)
        explain_missing_weights(source.name, source.files)
        return {}
    names = [entry]
    if entry in INDEXES:
        fetch_weights(source, entry)
        weight_map = read_weight_map(entry, read_object(source.folder / entry))
        names = sorted(set(weight_map.values()))
    sizes = _sizes(source, names)
    missing = [name for name in names if name not in sizes]
    if missing and not (source.local or source.offline):
        raise SourceError(
            f"{source.name} lacks {len(missing)} of its {len(names)} shards (first: {missing[0]!r}); "
            f"choose another {option.revision}, or tell its owner"
        )
    if source.local:
        for name in sizes:
            check_pointer(source.folder / name)
    return {name: sizes.get(name) for name in names}


def stored_dtypes(source: Source) -> set[str] | None:
    """The safetensors dtypes of the weights; None if they are not known before loading or a download."""
    if weights_entry(source.files) not in (SAFETENSORS, SAFETENSORS_INDEX):
        return None
    if not source.local:
        return set(source.parameters) if source.parameters else None
    dtypes = set()
    for name in weight_files(source):
        for tensor in read_header(source.folder / name).values():
            dtypes.add(tensor.dtype)
    return dtypes


def fetch_weights(source: Source, name: str) -> None:
    """Makes a weight file or an index available in ``folder``; raises ``SourceError`` for a pointer to it."""
    if source.download is not None:
        source.download(name)
    check_pointer(source.folder / name)
    if name in INDEXES:
        check_weights(source, [name])


def check_weights(source: Source, names: Iterable[str]) -> None:
    """Compares weights with the Hub's digests; a ``SourceError`` names a file that differs."""
    for name in names:
        if (source.folder / name).is_file():
            check_digest(source.folder / name, source.digest(name))


def _sizes(source: Source, names: Iterable[str]) -> dict[str, int | None]:
    """Those of these files that there are, and their sizes in bytes, as far as they are known."""
    listed = {**source.files, **(source.nested or {})}
    sizes = {}
    for name in names:
        if name in listed:
            sizes[name] = listed[name]
        elif source.nested is None and "/" in name and (source.folder / name).is_file():
            sizes[name] = (source.folder / name).stat().st_size
    return sizes


def explain_missing_weights(source: str, names: Collection[str]) -> None:
    """Raises ``SourceError`` for weights that no library finds, since their names are not the usual ones."""
    if DEEPSPEED in names:
        raise SourceError(
            f"{source} has {DEEPSPEED}: weights in DeepSpeed-inference's format cannot be converted; give "
            "the checkpoint that they were made from"
        )
    for name in sorted(names):
        if SHARD.fullmatch(name):
            index = BIN_INDEX if name.endswith(".bin") else SAFETENSORS_INDEX
            raise SourceError(f"{source} has shards such as {name}, but no {index}; download it, too")
        if WEIGHTS.fullmatch(name):
            raise SourceError(
                f"{source} has neither {SAFETENSORS} nor {BIN}, but {name}; if this is the whole model, give "
                "it the usual name"
            )
