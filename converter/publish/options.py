"""Where a converted repository is pushed to, and how."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class PushOptions:
    """A repository on the Hub, and how it is pushed to."""

    repo_id: str
    """``user/name``; created if it does not exist."""
    private: bool = False
    """Create it private; an existing one must be private already."""
    branch: str | None = None
    """Branch that gets the commit, created if it does not exist; None for the default branch."""
    create_pr: bool = False
    """Open a pull request instead."""
    overwrite: bool = False
    """Replace whatever the target holds."""
    token: str | None = field(default=None, repr=False)
    """Hub access token; None for HF_TOKEN or the saved login."""

    def command(self, folder: Path) -> str:
        """The command line that pushes a folder with these options, without the token."""
        words = ["ntk-convert", "push", str(folder), self.repo_id]
        words += ["--private"] * self.private + ["--create-pr"] * self.create_pr
        words += ["--overwrite"] * self.overwrite + (["--branch", self.branch] if self.branch else [])
        return shlex.join(words)
