"""Empty modules in place of torchvision, which timm imports for its transforms of images.

PyPI's torchvision loads with torch's CUDA build only. timm's models and schedulers, which the page
uses, call nothing of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

import pytest


class _Named(type):
    """A class whose members are their own names."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Empty(ModuleType):
    """A module in which every name is a class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = name.partition(".")[0] == "torchvision"
        return ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in_for_torchvision(patch: pytest.MonkeyPatch) -> None:
    """For one test, let ``import torchvision`` give empty modules where it is not installed."""
    if find_spec("torchvision") is None:
        patch.setattr(sys, "meta_path", [*sys.meta_path, _Finder()])
