"""What git says of a folder."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

__all__ = ["NoAnswer", "git", "tree_of"]

NoAnswer = (OSError, subprocess.SubprocessError)
"""What :func:`git` raises where there is no git, no repository, or an error."""


def git(folder: Path, *arguments: str, **variables: str) -> str:
    """The output of ``git`` with these arguments and environment variables in ``folder``."""
    return subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    ).stdout.strip()


def tree_of(folder: Path) -> str:
    """The hash of a folder's files as they are now, changed, new and committed ones.

    It is ``git rev-parse COMMIT:FOLDER`` of every commit that has the folder like this, so that files
    which were in use before they were committed can be found again. The repository is left as it is:
    git writes to an index and to a store of objects of their own, which are thrown away.
    """
    with tempfile.TemporaryDirectory() as place:
        objects = git(folder, "rev-parse", "--path-format=absolute", "--git-path", "objects")
        own = {
            "GIT_INDEX_FILE": f"{place}/index",
            "GIT_OBJECT_DIRECTORY": place,
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": objects,
        }
        git(folder, "add", "--all", ".", **own)
        return git(
            folder, "write-tree", f"--prefix={git(folder, 'rev-parse', '--show-prefix')}", **own
        )
