"""An older version of a model in the repository that it is pushed to: what an update of it changes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from converter.config import Config, Provenance, read_provenance
from converter.errors import SourceError
from converter.model.model import Model
from converter.publish.hub import Hub, Target
from converter.result import manifest
from converter.result.again import GRAPHS
from converter.source.jsonfile import parse_object
from converter.source.source import CONFIG

SIZES = (
    "model_type",
    "hidden_size",
    "n_embd",
    "d_model",
    "n_layer",
    "n_layers",
    "num_hidden_layers",
    "vocab_size",
)
"""Keys of config.json in which the versions of a model agree; local sources may have the same name."""


@dataclass(frozen=True)
class RemoteVersion:
    """What a target holds that was converted from the same original."""

    hub: Hub
    target: Target
    config: Config
    listed: Mapping[str, str | None]
    """File in its manifest -> SHA-256; None for linked weights, and in older manifests."""

    def wrote(self, name: str) -> bool:
        """Whether a file of the target is as it was written and listed; a small one is downloaded."""
        if name not in self.listed:
            return False
        remote, digest = self.target.files[name], self.listed[name]
        if digest is None:
            return True
        if remote.lfs is not None:
            return digest == str(remote.lfs.sha256)
        return digest == hashlib.sha256(self.hub.read(name, self.target.head)).hexdigest()

    def update(
        self, changed: Sequence[str], others: Sequence[str], model: Model
    ) -> tuple[Sequence[str], Sequence[str]]:
        """What is deleted as a model replaces it, for it lists that; and graphs that stay and are stale."""
        graphs = [name for name in others if name.endswith(GRAPHS)]
        weights = {*changed} & model.checkpoint.files.keys()
        fit = not weights and self.config.get("alibi_scaling") == model.result_config.get("alibi_scaling")
        deleted = [name for name in others if name not in graphs and self.wrote(name)]
        return deleted, () if fit else graphs


def find_remote_version(hub: Hub, target: Target, origin: Provenance, config: Config) -> RemoteVersion | None:
    """The older version of a result with this origin and config in a target; None if that holds none."""
    if not {CONFIG, manifest.MANIFEST} <= target.files.keys():
        return None
    try:
        theirs = parse_object(hub.read(CONFIG, target.head), CONFIG)
        listed = manifest.digests(parse_object(hub.read(manifest.MANIFEST, target.head), manifest.MANIFEST))
        older = read_provenance(theirs)
    except SourceError:
        return None
    same = older is not None and (older.source, older.subfolder) == (origin.source, origin.subfolder)
    if not same or any(theirs.get(key) != config.get(key) for key in SIZES):
        return None
    return RemoteVersion(hub, target, theirs, listed)
