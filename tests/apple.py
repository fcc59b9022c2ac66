"""A stand-in for Apple's GPU: tensors that say they are on ``mps`` and have their numbers on the CPU.

Like the GPU it has no float64, none of the operations in :data:`ABSENT`, and mixes with no tensor of the
CPU. Inside :class:`Apple` new tensors for ``mps`` are such tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["ABSENT", "MPS", "Apple", "OnApple", "on_apple"]

MPS = torch.device("mps", 0)
# Of the operations that this package takes elsewhere, by torch 2.13's native_functions.yaml.
ABSENT = ("aten::frexp", "aten::_linalg_svd", "aten::_linalg_eigh")
# These take tensors of the CPU as well.
MIXING = ("aten::copy_", "aten::_to_copy", "aten::index", "aten::_index_put_impl_")


class OnApple(torch.Tensor):
    """A tensor on the GPU. For torch's C++ code it is on the CPU, which needs no driver."""

    there: Tensor
    device = MPS
    is_mps = True
    is_cpu = False

    @staticmethod
    def __new__(cls, there: Tensor) -> OnApple:
        _refuse(there.dtype)
        layout = {"strides": there.stride(), "storage_offset": there.storage_offset()}
        made: OnApple = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, there.shape, dtype=there.dtype, device=torch.device("cpu"), **layout
        )
        made.there = there
        return made

    def __init__(self, there: Tensor) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnApple({self.there})"

    def cpu(self, *_: Any) -> Tensor:
        """The numbers, on the CPU."""
        return self.there.clone()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As torch has it."""
        if any(str(each) == "cpu" for each in (*args, kwargs.get("device"))):
            return self.there.clone().to(*args, **kwargs)
        return super().to(*args, **kwargs)

    def tolist(self) -> Any:
        """The numbers."""
        return self.there.tolist()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class Apple(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which there is such a GPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def on_apple(X: Tensor) -> OnApple:
    """A copy of ``X`` on the GPU."""
    return OnApple(X.detach().clone())


def _refuse(dtype: torch.dtype | None) -> None:
    if dtype == torch.float64:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = tree_leaves((args, kwargs))
    ours = [x for x in given if isinstance(x, OnApple)]
    device, name = kwargs.get("device"), func._schema.name
    there = bool(ours) if device is None else torch.device(device).type == "mps"
    if device is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    if ours or there:
        if name in ABSENT:
            raise NotImplementedError(f"{name} is not implemented for the MPS device")
        if there:
            _refuse(kwargs.get("dtype"))
        others = [x for x in given if isinstance(x, Tensor) and not isinstance(x, OnApple)]
        if name not in MIXING and any(x.dim() > 0 for x in others):
            raise RuntimeError(f"{name}: tensors on mps and on the cpu")
    args, kwargs = tree_map(lambda x: x.there if isinstance(x, OnApple) else x, (args, kwargs))
    out = func(*args, **kwargs)
    if not there:
        return out
    known = {id(x.there): x for x in ours}

    def wrapped(x: Any) -> Any:
        return known.get(id(x), OnApple(x)) if isinstance(x, Tensor) else x

    return tree_map(wrapped, out)
