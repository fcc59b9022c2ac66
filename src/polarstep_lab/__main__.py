"""The ``polarstep`` command, and its message when the extra ``experiments`` is not installed."""

from __future__ import annotations

import sys
from io import TextIOWrapper

from polarstep_lab.train.interrupt import ctrl_c_ends_the_process

__all__ = ["main"]


def main() -> None:
    """Run the command line, or say what to install for it."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal or file without UTF-8 gets ? in place of γ, ×, … and the lines of tables.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        with ctrl_c_ends_the_process():
            from polarstep_lab.cli import app
        app()
    except ModuleNotFoundError as missing:
        package = (missing.name or "polarstep").partition(".")[0]
        if package.startswith("polarstep"):
            raise
        sys.exit(
            f"the polarstep command needs {package!r}, which is not installed: "
            "pip install 'polarstep[experiments]'"
        )


if __name__ == "__main__":
    main()
