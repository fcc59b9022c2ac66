"""One row of the routing table."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Route"]


@dataclass(frozen=True)
class Route:
    """One parameter: what it is, which algorithm updates it, how, and why."""

    name: str
    shape: tuple[int, ...]
    matrix: str
    """The matrices as Muon reads them; the plain shape for other algorithms."""
    algorithm: str
    """``"Muon"``, ``"AdamW"``, the class of another rule, or ``"left out"``."""
    lr: float | None
    """The learning rate of its group."""
    factors: tuple[float, ...]
    """What ``lr`` is multiplied by, for each kind of matrix in it; none where it is not measured yet."""
    factor_from: str
    """How the factor is measured; empty where it is given (:mod:`polarstep.rates`)."""
    polar: str
    """The polar map on this shape; ``"–"`` where there is none."""
    role: str | None
    why: str
    group: int | None
    """The index of its group in ``optimizer.param_groups``."""
    parameters: int
    """The number of entries."""
