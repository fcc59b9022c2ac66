"""The ``polarstep`` command, and what it says when its extra is not installed."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, or say what to install for it."""
    try:
        from polarstep_lab.cli import app
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("polarstep"):
            raise
        sys.exit(
            f"the polarstep command needs {missing.name!r}, which the core install leaves out: "
            "pip install 'polarstep[experiments]'"
        )
    app()


if __name__ == "__main__":
    main()
