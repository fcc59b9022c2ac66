"""A new sketch at every step: steps 1 and 2 of Algorithms 1 and 2."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polarstep import flops, products
from polarstep.checked_values import check_number
from polarstep.polar.base import Carry, Draw, PolarMap
from polarstep.polar.finders.base import Basis, Finder
from polarstep.polar.orthonormal import orthonormalize
from polarstep.sketch import Gaussian, Sketch

__all__ = ["Fresh", "check_power"]


@dataclass(frozen=True)
class Fresh(Finder):
    """Q = orth((M Mᵀ)^h M Ω), with columns made orthonormal after each product.

    This is a chain of 2h + 1 products with M and Mᵀ in turn. It ends on the short side of M, so it
    starts with M for an integer h and with Mᵀ for a half-integer h.
    """

    sketch: Sketch = field(default_factory=Gaussian)
    power: float = 1

    def __post_init__(self) -> None:
        check_power(self.power)

    def basis(self, A: Tensor, width: int, carry: Carry, draw: Draw) -> Basis:
        """The basis of this step's sketch."""
        assert draw.numbers is not None
        ops, numbers = products.of(A.device), draw.numbers
        dtype = self._product_dtype(A.shape[-2], A.shape[-1], A.dtype, A.device)
        padded = self.padded(width, A.dtype, A.device)
        further = flops.power_products(self.power)
        exact = A if further % 2 == 0 else A.mT
        factor = exact.to(dtype)
        if self.sketch.is_dense:
            Y = ops.sketched(factor, self.sketch.omega(factor, numbers), padded)
        else:
            Y = self.sketch.times(exact, numbers)
            Y = torch.nn.functional.pad(Y.mT, (0, 0, 0, padded - width)).mT
        for _ in range(further):
            factor = factor.mT
            Q = orthonormalize(ops.workable(Y), self.orth, rough=True).to(dtype)
            Y = ops.times(factor, Q)
        return Basis(orthonormalize(ops.workable(Y), self.orth).to(A.dtype))

    def _product_dtype(
        self, m: int, n: int, dtype: torch.dtype, device: torch.device
    ) -> torch.dtype:
        """The precision of the products that make the basis of m×n matrices in ``dtype``.

        Rounding M takes as long as one product gains from it, so a single product is not rounded.
        """
        count = flops.power_products(self.power) + self.sketch.is_dense
        return dtype if count < 2 else products.of(device).sketch_dtype(m, n, dtype)

    def draw(
        self,
        m: int,
        n: int,
        width: int,
        generator: torch.Generator,
        dtype: torch.dtype,
        out: Tensor | None,
    ) -> Tensor:
        """Ω, with rows for the long side of M, or for its short side if h is a half-integer."""
        whole = flops.power_products(self.power) % 2 == 0
        return self.sketch.draw(n if whole else m, width, generator, dtype, out)

    def parts(self, m: int, n: int, width: int) -> tuple[int, int, int]:
        """Costs of the sketch, of the power iterations and of the orthonormalization."""
        first = (m, n) if flops.power_products(self.power) % 2 == 0 else (n, m)
        return (
            self.sketch.flops(*first, width),
            flops.power_products(self.power) * flops.matmul(m, n, width),
            flops.qr(m, width),
        )

    def flops(self, m: int, n: int, width: int) -> int:
        """The sum of the parts."""
        return sum(self.parts(m, n, width))

    @property
    def fresh_sketch(self) -> Fresh:
        """This finder itself."""
        return self

    def makes_orthonormal(self, device: torch.device, dtype: torch.dtype) -> bool:
        """False with sampled columns, where a repeated column becomes zero."""
        return self.sketch.is_dense and super().makes_orthonormal(device, dtype)

    def describe(self, m: int, n: int, inner: PolarMap, width: int, device: torch.device) -> str:
        """The sketch, its power and the precision of its products."""
        ours = products.of(device).dtype(torch.float32)
        rounded = self._product_dtype(m, n, ours, device) != ours
        name = type(self.sketch).__name__ + (" in bfloat16" if rounded else "")
        return f"h={self.power:g}, {name}"


def check_power(power: float) -> None:
    """Raise for an h that is no multiple of ½."""
    check_number(
        "power",
        power,
        lambda h: 0 <= h < math.inf and float(2 * h).is_integer(),
        "one of 0, ½, 1, 1½, …",
        "the paper takes 1 or 2",
    )
