"""Packages that a command needs: asked for before it starts, so that no work is lost for want of one."""

from __future__ import annotations

from importlib.util import find_spec

from polarstep_lab.storage import StorageError

__all__ = ["REPORT", "need"]

REPORT = ("jinja2", "matplotlib", "pandas", "scipy")


def need(what: str, *packages: str) -> None:
    """Raise an error with the command to install, if a package that ``what`` needs is missing.

    >>> need("counting", "collections", "a_package_of_nobody")
    Traceback (most recent call last):
    polarstep_lab.storage.StorageError: counting needs 'a_package_of_nobody', which is not installed: ...
    """
    for package in packages:
        if find_spec(package) is None:
            raise StorageError(
                f"{what} needs {package!r}, which is not installed: "
                "pip install 'polarstep[experiments]'"
            )
