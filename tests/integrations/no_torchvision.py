"""A stand-in for torchvision, where it is not installed.

timm imports torchvision for transforms of images, which a model and its optimizer do not use. The
torchvision of the registry loads beside torch's CUDA build only. With the stand-in timm can be imported
beside any torch.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from importlib.util import find_spec
from typing import Any

__all__ = ["put_in"]


class _Named(type):
    """A class whose attributes are their names, as the members of an enumeration."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(types.ModuleType):
    """A module that has every class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Named(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to execute."""


def put_in() -> None:
    """Import timm with the stand-in, if torchvision is not installed; nothing else sees it."""
    if find_spec("torchvision") is not None:
        return
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        import timm  # noqa: F401
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
