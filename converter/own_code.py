"""The modeling code that a checkpoint brings along, or names in another repository of the Hub.

Nothing here runs it. ``--trust-remote-code`` is the only way to ``find``, and verification, which does run
it, in a process of its own, is the only place that what is found here goes to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from converter.families import Config
from converter.source import Source

REFERENCE = re.compile(r"(?:([\w.-]+/[\w.-]+|[\w.-]+)--)?(\w+)\.(\w+)", re.ASCII)
"""A value of ``auto_map``: ``module.Class``, of another repository if its id and ``--`` stand before."""


@dataclass(frozen=True)
class CodeClass:
    """One class, by the folder that holds its module."""

    folder: Path
    reference: str
    """``module.Class``."""
    origin: str
    """Where it is from, for people: empty for the checkpoint's own folder, else repository and commit."""


@dataclass(frozen=True)
class OwnCode:
    """What ``auto_map`` names, on this machine."""

    classes: Mapping[str, CodeClass] = field(default_factory=dict)
    """By transformers' auto class: ``AutoConfig``, ``AutoModelForCausalLM``, ..."""
    missing: str | None = None
    """Why there is none to run."""


def find(source: Source, config: Config, *, token: str | None, cache_dir: Path | None) -> OwnCode:
    """Fetches the modules that a source's config names, all from one commit of their repository.

    Of another repository than the source's that is the newest commit, which the config cannot name.

    Args:
        source: the checkpoint.
        config: its config as read.
        token: access token for another repository; None for HF_TOKEN or the saved login.
        cache_dir: the Hub cache's folder; None for huggingface_hub's own.

    Returns:
        The classes, or why they cannot be had, which is no reason not to convert.
    """
    auto_map = config.get("auto_map")
    named = {
        str(auto): reference
        for auto, reference in (auto_map.items() if isinstance(auto_map, Mapping) else ())
        if auto == "AutoConfig" or str(auto).startswith("AutoModel")
    }
    if not any(auto.startswith("AutoModel") for auto in named):
        return OwnCode(missing="the source names no code of its own (auto_map)")
    places: dict[str | None, tuple[Path, str]] = {}
    classes = {}
    for auto, reference in named.items():
        match = REFERENCE.fullmatch(reference) if isinstance(reference, str) else None
        if match is None:
            return OwnCode(missing=f"auto_map.{auto[:80]} is {str(reference)[:80]!r}, which names no class")
        repo_id, module, name = match.groups()
        if repo_id == source.repo_id:
            repo_id = None
        try:
            if repo_id not in places:
                places[repo_id] = _fetched(repo_id, source, token, cache_dir)
        except Exception as error:  # of the client, or of the connection
            reason = " ".join(str(error).split())
            return OwnCode(missing=f"the source's own code cannot be had: {reason}")
        folder, origin = places[repo_id]
        if not (folder / f"{module}.py").is_file():
            return OwnCode(missing=f"{repo_id or 'the source'} has no {module}.py, which auto_map names")
        classes[auto] = CodeClass(folder, f"{module}.{name}", origin)
    return OwnCode(classes)


def _fetched(
    repo_id: str | None, source: Source, token: str | None, cache_dir: Path | None
) -> tuple[Path, str]:
    """The folder with a repository's Python files, and the words for where they are from."""
    if repo_id is None:
        source.fetch(name for name in source.files if name.endswith(".py"))
        return source.folder, ""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    from converter.hub import explained, shown

    quiet = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        found = snapshot_download(repo_id, allow_patterns="*.py", token=token, cache_dir=cache_dir)
    except Exception as error:
        raise explained(error, repo_id, None, "*.py") from shown(error, token)
    finally:
        if not quiet:
            enable_progress_bars()
    folder = Path(found)  # which the client names after the commit
    return folder, f"{repo_id} at {folder.name[:12]}"
