"""What a large parameter needs: the size from which it is updated in place, and the memory of a step."""

from __future__ import annotations

from pages.claims.words import claim
from polarstep.optim.stepping.large import peak
from polarstep.products.in_place import LARGE


@claim
def large_parameter() -> str:
    """The size of a matrix from which it is updated in place on a CPU."""
    return f"{LARGE // 2**20} MiB"


@claim
def memory_of_a_large_step() -> str:
    """What a step in place needs above X, G and C, by the formula, and the least for a square."""
    wide, square = (8192, 32768), (16384, 16384)
    told = " and ".join(f"{peak(m, n):.3g} times for {m}×{n}" for m, n in (wide, square))
    return (
        f"{told}. These are M itself, half of its Gram matrix, and a few rows. A square parameter "
        f"cannot need less than {peak(2**40, 2**40):.1f} times its memory in this way"
    )
