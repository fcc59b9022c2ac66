"""Random batches of matrices: every way a momentum matrix can be hard, side by side in one batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tests.fuzz.cases import Choices
from torch import Tensor

__all__ = ["LAYOUTS", "SCALES", "Batch", "laid_out", "random_batch"]

ENTRIES = 50_000  # of a batch, so that small matrices come by the thousand
DTYPES = (torch.float32, torch.float32, torch.float64, torch.float64, torch.bfloat16, torch.float16)
# Powers of two by which matrices are scaled, as exponents of two.
SCALES = {
    torch.float64: (-900, 900),
    torch.float32: (-120, 126),
    torch.bfloat16: (-120, 126),
    torch.float16: (-6, 14),
}
LAYOUTS = ("contiguous", "transposed", "strided", "offset")


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape in one precision."""

    M: Tensor  # (count, m, n), contiguous
    kinds: tuple[str, ...]  # the name of each matrix's spectrum


def random_batch(choose: Choices, largest: float | None = None) -> Batch:
    """As many matrices as fit; ``largest`` bounds ‖M‖_op, for maps with a δ of their own."""
    m, n = _side(choose), _side(choose)
    dtype = choose.one_of(*DTYPES)
    count = max(6, min(2000, ENTRIES // (m * n)))
    names = choose.random.choices(tuple(KINDS), k=min(count, 8))
    parts = torch.tensor_split(torch.arange(count), len(names))
    kinds = tuple(name for name, part in zip(names, parts, strict=True) for _ in part)
    made = [KINDS[name](choose, len(part), m, n) for name, part in zip(names, parts, strict=True)]
    M = torch.cat(made)
    norm = torch.linalg.matrix_norm(M, keepdim=True)
    M = M / torch.where(norm > 0, norm, 1)
    if largest is None:
        low, high = SCALES[dtype]
        exponents = torch.randint(low, high + 1, (count, 1, 1), generator=choose.torch)
        M = torch.ldexp(M, exponents)
    else:
        M = M * (largest * torch.rand(count, 1, 1, generator=choose.torch, dtype=torch.float64))
    return Batch(M.to(dtype), kinds)


def _side(choose: Choices) -> int:
    return choose.one_of(1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24, 31, 32, 33, 48)


def _orthonormal(choose: Choices, count: int, rows: int, columns: int) -> Tensor:
    return torch.linalg.qr(choose.normal(count, rows, columns)).Q


def _of_spectrum(sigma: Callable[[Choices, int], Tensor]) -> Callable[..., Tensor]:
    def make(choose: Choices, count: int, m: int, n: int) -> Tensor:
        k = min(m, n)
        U, V = _orthonormal(choose, count, m, k), _orthonormal(choose, count, n, k)
        return (U * sigma(choose, k)) @ V.mT

    return make


def _falling(choose: Choices, k: int) -> Tensor:
    return torch.arange(1, k + 1).double() ** -choose.random.uniform(0.3, 3)


def _spiked(choose: Choices, k: int) -> Tensor:
    leading = (torch.arange(k) < choose.random.randint(1, k)).double()
    return leading + 10 ** -choose.random.uniform(1, 12)


def _cut(choose: Choices, k: int) -> Tensor:
    return torch.linspace(1, 0.1, k).double() * (torch.arange(k) < choose.random.randint(1, k))


def _exponential(choose: Choices, k: int) -> Tensor:
    return 10.0 ** -torch.linspace(0, choose.random.uniform(1, 15), k).double()


def _gaussian(choose: Choices, count: int, m: int, n: int) -> Tensor:
    return choose.normal(count, m, n)


def _zero(choose: Choices, count: int, m: int, n: int) -> Tensor:
    return torch.zeros(count, m, n, dtype=torch.float64)


def _ones(choose: Choices, count: int, m: int, n: int) -> Tensor:
    return torch.ones(count, m, n, dtype=torch.float64)


def _rank_one(choose: Choices, count: int, m: int, n: int) -> Tensor:
    return choose.normal(count, m, 1) @ choose.normal(count, 1, n)


def _duplicates(choose: Choices, count: int, m: int, n: int) -> Tensor:
    """Equal rows or columns, as tied weights and repeated tokens leave them."""
    few = choose.normal(count, m, max(1, n // 3))
    which = torch.randint(few.shape[-1], (n,), generator=choose.torch)
    return few[..., which]


def _sparse(choose: Choices, count: int, m: int, n: int) -> Tensor:
    """Few entries, so that whole rows and columns are zero."""
    kept = torch.rand(count, m, n, generator=choose.torch) < choose.random.uniform(0.02, 0.4)
    return choose.normal(count, m, n) * kept


def _one_entry(choose: Choices, count: int, m: int, n: int) -> Tensor:
    M = torch.zeros(count, m * n, dtype=torch.float64)
    M[torch.arange(count), torch.randint(m * n, (count,), generator=choose.torch)] = 1
    return M.view(count, m, n)


def _uneven_rows(choose: Choices, count: int, m: int, n: int) -> Tensor:
    """Rows whose sizes differ by many orders, as those of rare tokens do."""
    return choose.normal(count, m, n) * 10 ** (
        -12 * torch.rand(count, m, 1, generator=choose.torch)
    )


def _huge_ratio(choose: Choices, count: int, m: int, n: int) -> Tensor:
    """One entry that towers over all others."""
    return choose.normal(count, m, n) + 10 ** choose.random.uniform(2, 14) * _one_entry(
        choose, count, m, n
    )


KINDS: dict[str, Callable[[Choices, int, int, int], Tensor]] = {
    "gaussian": _gaussian,
    "flat": _of_spectrum(lambda choose, k: torch.ones(k, dtype=torch.float64)),
    "power law": _of_spectrum(_falling),
    "spiked": _of_spectrum(_spiked),
    "rank-deficient": _of_spectrum(_cut),
    "exponential": _of_spectrum(_exponential),
    "zero": _zero,
    "ones": _ones,
    "rank one": _rank_one,
    "duplicates": _duplicates,
    "sparse": _sparse,
    "one entry": _one_entry,
    "uneven rows": _uneven_rows,
    "huge ratio": _huge_ratio,
}


def laid_out(M: Tensor, layout: str) -> Tensor:
    """``M`` with the same values, elsewhere in memory."""
    if layout == "transposed":
        return M.mT.contiguous().mT
    if layout == "strided":
        wide = M.new_full((*M.shape[:-2], 2 * M.shape[-2], 3 * M.shape[-1]), math.nan)
        view = wide[..., ::2, 1::3]
        view.copy_(M)
        return view
    if layout == "offset":
        flat = M.new_full((M.numel() + 1,), math.nan)
        view = flat[1:].view(M.shape)
        view.copy_(M)
        return view
    return M.contiguous()
