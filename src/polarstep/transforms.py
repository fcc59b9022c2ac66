"""Transforms: changes of the update T after the polar map.

A transform takes T of a batch of matrices, with outputs along the rows, and returns the matrices to
apply instead. It may carry tensors from step to step, as a map does. ``Muon(transform=…)``
combines any map with any transform; hooks, certificates and checkpoints see the transformed T.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polarstep.checked_values import check_fraction
from polarstep.maps import Draw, MapState, Polar, PolarMap
from polarstep.maps.base import Captured, Containing, Traits, step_of
from polarstep.maps.checks import pair_of
from polarstep.ops import ops_of
from polarstep.ops.lazy import RowProduct, ScaledRows

__all__ = ["NormalizedRows", "Transform", "followed"]


class Transform(ABC):
    """A change of T. Subclasses are frozen dataclasses."""

    @property
    def carries(self) -> tuple[str, ...]:
        """The names of the tensors that a step leaves for the next step."""
        return ()

    @property
    def wide_carries(self) -> tuple[str, ...]:
        """The names in :attr:`carries` of tensors that are kept in float32 at least."""
        return ()

    @abstractmethod
    def step(self, T: Tensor, M: Tensor, carry: MapState) -> tuple[Tensor, MapState]:
        """The matrices to apply instead of ``T`` (batch, m, n), and the carry for the next step.

        At the first step of a matrix ``carry`` is empty.
        """

    def follow(self, polar: Polar, carry: MapState) -> tuple[Tensor | ScaledRows, MapState]:
        """:meth:`step` on T as the map left it, perhaps in factors; may leave T' in factors as well."""
        return self.step(polar.dense, polar.M, carry)

    def resumes(self, carry: MapState, m: int, n: int) -> bool:
        """Whether a step on m×n matrices can continue from ``carry``, perhaps another transform's."""
        return all(name in carry for name in self.carries)

    def describe(self) -> str:
        """The transform in a few words, for the routing table."""
        return repr(self)


@dataclass(frozen=True)
class NormalizedRows(Transform):
    """Divide each row of T by the root of its second moment, as NorMuon does (arXiv 2510.05491).

    For row i of T, with one number vᵢ that is kept from step to step::

        vᵢ ← β₂vᵢ + (1 − β₂)·mean_j T²ᵢⱼ
        T'ᵢⱼ = Tᵢⱼ/√vᵢ,  rescaled so that ‖T'‖_F = ‖T‖_F

    Each row of T belongs to a neuron, and the rows of T may differ much in length. T' moves all neurons
    about equally far. In return ‖T'‖_op may exceed one, and T' is less aligned with M than T is.
    Certificates are about T'.

    Args:
        beta2: β₂ in [0, 1).
    """

    beta2: float = 0.95

    def __post_init__(self) -> None:
        check_fraction("beta2", self.beta2, "0.95 is the default")

    @property
    def carries(self) -> tuple[str, ...]:
        """The name of v, which has shape (batch, m)."""
        return ("rows",)

    @property
    def wide_carries(self) -> tuple[str, ...]:
        """The name of v: in 16 bits (1 − β₂)·T² may be too small to change v."""
        return ("rows",)

    def resumes(self, carry: MapState, m: int, n: int) -> bool:
        """Whether ``carry`` has a v for matrices of m rows."""
        return super().resumes(carry, m, n) and carry["rows"].shape[1:] == (m,)

    def step(self, T: Tensor, M: Tensor, carry: MapState) -> tuple[Tensor, MapState]:
        """T' and v."""
        scaled, left = self._normalized(T, M, carry)
        return scaled if isinstance(scaled, Tensor) else scaled.multiplied_out(), left

    def follow(self, polar: Polar, carry: MapState) -> tuple[Tensor | ScaledRows, MapState]:
        """T' and v; a device with kernels for it forms T' in the update of X."""
        T = polar.dense if polar.T is None or isinstance(polar.T, ScaledRows) else polar.T
        return self._normalized(T, polar.M, carry)

    def _normalized(
        self, T: Tensor | RowProduct, M: Tensor, carry: MapState
    ) -> tuple[Tensor | ScaledRows, MapState]:
        # M may have 16 bits, in which v would stand still.
        wide = torch.promote_types(M.dtype, torch.float32)
        ops = ops_of(M.device)
        scaled, v = ops.normalized_rows(T, self.beta2, carry.get("rows"), wide)
        return scaled, MapState(rows=v)

    def describe(self) -> str:
        """What happens to T."""
        return "rows normalized"


def followed(polar: PolarMap, transform: Transform | None, *, transposed: bool = False) -> PolarMap:
    """``polar`` followed by ``transform``, as one map for the optimizer.

    ``transposed``: the matrices are stored inputs × outputs, and the transform takes their transposes.
    """
    return polar if transform is None else _Followed(polar, transform, transposed)


@dataclass(frozen=True)
class _Followed(Containing):
    """A map followed by a transform. It breaks T(Mᵀ) = T(M)ᵀ, since it treats rows as rows."""

    polar: PolarMap
    transform: Transform
    transposed: bool = False

    @property
    def contained(self) -> PolarMap:
        """The map."""
        return self.polar

    @property
    def traits(self) -> Traits:
        """Those of the map; the names are those that map and transform carry."""
        its = self.polar.traits
        return replace(
            its,
            carries=(*its.carries, *self.transform.carries),
            wide_carries=(*its.wide_carries, *self.transform.wide_carries),
        )

    def resumes(self, carry: MapState, m: int, n: int) -> bool:
        """Whether map and transform can both continue from ``carry``."""
        of_map, of_transform = self._parted(carry)
        if not self.polar.resumes(of_map, m, n):
            return False
        return self.transform.resumes(of_transform, *((n, m) if self.transposed else (m, n)))

    def _parted(self, carry: MapState) -> tuple[MapState, MapState]:
        """What the map carries, and what the transform carries."""
        names = self.transform.carries
        of_transform = MapState({name: carry[name] for name in names if name in carry})
        return MapState({name: X for name, X in carry.items() if name not in names}), of_transform

    def step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        """The map, then the transform of its T."""
        names, (of_map, ours) = self.transform.carries, self._parted(carry)
        polar, left = step_of(self.polar, M, of_map, draw)
        T: Tensor | ScaledRows
        method = f"{type(self.transform).__name__}.step"
        if self.transposed:
            found = self.transform.step(polar.dense.mT, M.mT, ours)
            T, kept = pair_of(found, M.mT, names, method)
            T = T.mT
        else:
            T, kept = pair_of(self.transform.follow(polar, ours), M, names, method)
        captured = polar.captured
        if polar.factors is not None and draw.shown:
            captured = Captured(polar.M, polar.factors, self.polar)
        # A transform is taken to keep the norm, as NormalizedRows does.
        transformed = Polar(M, T, squared_norm=polar.squared_norm, captured=captured)
        return transformed, MapState(left | kept)

    def describe(self, m: int, n: int, device: torch.device | None = None) -> str:
        """The map and the transform."""
        return f"{self.polar.describe(m, n, device)}, {self.transform.describe()}"
