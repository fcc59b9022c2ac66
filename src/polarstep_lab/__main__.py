"""The ``polarstep`` command, and its message when the extra ``experiments`` is not installed."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, or say what to install for it."""
    try:
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
