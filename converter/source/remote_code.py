"""The modeling code in a checkpoint's repository, or in another repository of the Hub that it names.

Nothing here runs the code. ``find`` is called with ``--trust-remote-code`` only, and only verification uses
its result: it runs the code in a separate process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from converter.config import Config
from converter.source.base import Source

REFERENCE = re.compile(r"(?:([\w.-]+/[\w.-]+|[\w.-]+)--)?(\w+)\.(\w+)", re.ASCII)
"""A value of ``auto_map``: ``module.Class``, or ``repository--module.Class`` for another repository."""


@dataclass(frozen=True)
class CodeClass:
    """One class and the folder of its module."""

    folder: Path
    reference: str
    """``module.Class``."""
    origin: str
    """Where it is from, for messages: repository and commit, or empty for the checkpoint's own folder."""


@dataclass(frozen=True)
class OwnCode:
    """The classes that ``auto_map`` names, as local files."""

    classes: Mapping[str, CodeClass] = field(default_factory=dict)
    """By auto class of transformers: ``AutoConfig``, ``AutoModelForCausalLM``, ..."""
    missing: str | None = None
    """Why there is no code to run; None if there is."""


def find(source: Source, config: Config, *, token: str | None, cache_dir: Path | None) -> OwnCode:
    """Fetches the modules that a source's config names, all from one commit of their repository.

    For another repository than the source's this is its newest commit, because a config cannot name one.

    Args:
        source: the checkpoint.
        config: its config.json.
        token: access token for another repository; None for HF_TOKEN or the saved login.
        cache_dir: folder of the Hub cache; None for huggingface_hub's default.

    Returns:
        The classes, or why there are none. The conversion goes on in both cases.
    """
    auto_map = config.get("auto_map")
    named = {
        str(auto): reference
        for auto, reference in (auto_map.items() if isinstance(auto_map, Mapping) else ())
        if auto == "AutoConfig" or str(auto).startswith("AutoModel")
    }
    if not any(auto.startswith("AutoModel") for auto in named):
        return OwnCode(missing="the source's config names no code (auto_map)")
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
        except Exception as error:  # an error of the client or of the connection
            reason = " ".join(str(error).split())
            return OwnCode(missing=f"the source's own code cannot be downloaded: {reason}")
        folder, origin = places[repo_id]
        if not (folder / f"{module}.py").is_file():
            return OwnCode(missing=f"{repo_id or 'the source'} has no {module}.py, which auto_map names")
        classes[auto] = CodeClass(folder, f"{module}.{name}", origin)
    return OwnCode(classes)


def _fetched(
    repo_id: str | None, source: Source, token: str | None, cache_dir: Path | None
) -> tuple[Path, str]:
    """The folder with a repository's Python files, and the text for where they are from."""
    if repo_id is None:
        source.fetch(name for name in source.files if name.endswith(".py"))
        return source.folder, ""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    from converter.source.hub import explained, shown

    quiet = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        found = snapshot_download(repo_id, allow_patterns="*.py", token=token, cache_dir=cache_dir)
    except Exception as error:
        raise explained(error, repo_id, None, "*.py") from shown(error, token)
    finally:
        if not quiet:
            enable_progress_bars()
    folder = Path(found)  # the client names it after the commit
    return folder, f"{repo_id} at {folder.name[:12]}"
