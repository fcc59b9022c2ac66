"""What git says of a folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["NoAnswer", "git"]

NoAnswer = (OSError, subprocess.SubprocessError)
"""What :func:`git` raises where there is no git, no repository, or an error."""


def git(folder: Path, *arguments: str) -> str:
    """The output of ``git`` with these arguments in ``folder``."""
    return subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()
