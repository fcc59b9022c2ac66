"""Momentum: how M is made of G and of what earlier steps have left, entry by entry.

:class:`Momentum` is that of equation (1). A subclass makes M in another way, and may keep more than C;
``Muon(momentum_rule=…)`` takes it. The tensors that it names in ``entries`` have the shape of their
parameter. They are sharded as it is, saved and loaded, and kept in float32 at least.

The kernels of a fused step have the momentum of equation (1) only. Under another rule torch's operations
touch C, M and X, and T is computed as ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

__all__ = ["Momentum", "put"]


@dataclass(frozen=True)
class Momentum:
    """C ← βC + G, and M = βC + G (Nesterov) or M = C (Polyak).

    Subclasses are frozen dataclasses with a :meth:`step` of their own. They get this rank's part of a
    sharded parameter, so a step treats each entry by itself.
    """

    entries: ClassVar[tuple[str, ...]] = ()
    """The names of the tensors that a rule keeps beside C. They begin at zero."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise for a string as ``entries``, whose letters would be taken for names."""
        super().__init_subclass__(**options)
        if isinstance(cls.entries, str):
            raise TypeError(
                f"{cls.__name__} has entries={cls.entries!r}: expected a tuple of names, as "
                f"({cls.entries!r},)"
            )

    def step(
        self,
        group: dict[str, Any],
        G: Tensor,
        C: Tensor,
        kept: dict[str, Tensor],
        finite: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Change C, and the tensors ``kept`` by name, in place; return M, which may be C itself.

        β is ``group["momentum"]``, which schedulers change. ``finite``, a flag on the device, is given
        with ``nonfinite="skip"``: where it is false nothing may change, as with :func:`put`. ``out`` is
        where M may be written; only this class gets it.
        """
        beta = group["momentum"]
        if finite is None:
            torch.add(G, C, alpha=beta, out=C)  # one pass over memory
        else:
            put(C, beta * C + G, finite)
        return torch.add(G, C, alpha=beta, out=out) if group["nesterov"] else C


def put(X: Tensor, new: Tensor, finite: Tensor | None) -> None:
    """``X ← new`` in place, unless ``finite`` is false."""
    X.copy_(new if finite is None else torch.where(finite, new, X))
