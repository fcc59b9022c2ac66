"""A GPU with the kernels of :mod:`polarstep.kernels`: 16-bit products fused with their additions.

The kernels save three things. A symmetric product computes half of its tiles. Adding a matrix to a
product, or a multiple of the identity, takes no pass over memory of its own. And for matrices of
few rows, whose products take a few microseconds each, two products are one launch; for a Gram form of
at most 128 rows all products are.

**A polynomial step with all products in eight bits** (:func:`flat_step_in_eight_bits`). A deflated step
(:mod:`polarstep.maps.deflated`) is T = s·P(s²G)·X₀ with G = X₀X₀ᵀ. Its matrices X₀, G, the squares S of
G, and P can all be float8 numbers with three bits of mantissa. That halves the time of their products
and the bytes between them. Each matrix is stored times a power of two, its unit, so that its entries lie
in the middle of the format's range, [2⁻⁶, 448].

**What rounding does.** X₀ is rounded once, and the X₀ that G is made of is also the one that P is
multiplied with. So T is a polynomial of a matrix near X₀. Rounding G, S and P by 3% an entry is a random
error in P(s²G). On random matrices it lifts ν from 0.14 to 0.30 (768×768) and 0.18 (768×3072), and
changes γ by 0.01.

**What cannot happen.** Numbers above 448 are stored as 448. In X₀ this only makes another X₀. In G it
would hide a leading direction that the head has missed. But no entry of G is above its largest diagonal
entry. So a diagonal entry of 448 shows that G was cut off, and s then comes from the bound
‖X₀‖²_op ≤ ‖X₀‖²_F ≤ ℓ + (m − ℓ)/factor². The step of such a matrix is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from polarstep.context import constant
from polarstep.kernels import small
from polarstep.kernels.float8 import flattened, product_and_squares
from polarstep.kernels.norms import inverse_rest_size, lifted_norm, scale_to_one
from polarstep.kernels.norms import normalized as normalized_by_kernel
from polarstep.kernels.product import DESCRIPTORS_FROM, FLOAT8, describable, halving_pays, product
from polarstep.kernels.rows import row_numbers, row_squares
from polarstep.kernels.small import product_and_blend, product_times
from polarstep.numerics import Polynomial, Squaring, product_like, shrink_of, squarings
from polarstep.ops.base import Products
from polarstep.ops.cpu import Cpu
from polarstep.ops.cuda import Cuda
from polarstep.ops.lazy import Head, HeadPlusRest, RowProduct, ScaledRows

__all__ = ["InterpretedTriton", "Triton", "flat_step_in_eight_bits", "suits_eight_bits", "units"]


class _Kernels(Products):
    """The kernels for 16-bit matrices; other precisions go to the device's own class."""

    gram_in_halves = True
    # Wider sketches were not measured. 688 columns were, on 2304×2560 matrices.
    most_factored = 768

    def apply(self, W: Tensor, X: Tensor, dtype: torch.dtype) -> Tensor:
        """``WX`` in ``dtype``, rounded once."""
        return super().apply(W, X, dtype) if dtype == X.dtype else product(W, X, out_dtype=dtype)

    def symmetric(
        self,
        A: Tensor,
        B: Tensor,
        *,
        plus: Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 1.0,
        identity: float = 0.0,
    ) -> Tensor:
        """Half of the tiles where they are many, else torch's product.

        ``plus`` and the identity are added before tiles are stored.
        """
        extras = plus is not None or identity != 0.0
        if A.dtype.itemsize == 2 and (extras or halving_pays(*A.shape[:2])):
            return product(
                A, B.mT, alpha=alpha, D=plus, beta=beta, identity=identity, symmetric=True
            )
        return super().symmetric(A, B, plus=plus, alpha=alpha, beta=beta, identity=identity)

    def symmetric_flops(self, m: int, k: int, dtype: torch.dtype) -> int:
        """Half of a full product, without the tiles on the diagonal."""
        if dtype.itemsize == 2 and m >= self.symmetric_from:
            return m * m * k
        return super().symmetric_flops(m, k, dtype)

    def normalized(self, X: Tensor, dtype: torch.dtype) -> Tensor:
        """``X/‖X‖_F`` in two passes over memory."""
        if dtype.itemsize == 2:
            return normalized_by_kernel(X, shrink_of(dtype), dtype)
        return super().normalized(X, dtype)

    def normalized_rows(
        self,
        T: Tensor | RowProduct,
        beta2: float,
        known: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor | ScaledRows, Tensor]:
        """Two launches. The update scales the rows of T.

        T is read once more for the lengths of its rows, unless the launch that multiplies T out finds
        them.
        """
        if torch.compiler.is_compiling():
            return super().normalized_rows(T, beta2, known, dtype)
        if isinstance(T, RowProduct):
            dense, squares = product_and_squares(T.A, T.B, T.scale, T.alpha, torch.float16)
        else:
            dense = T if isinstance(T, Tensor) else T.multiplied_out()
            if dense.dtype == torch.float64:
                return super().normalized_rows(dense, beta2, known, dtype)
            dense = dense.contiguous()
            squares = row_squares(dense)
        v, factors, sizes = row_numbers(squares, dense.shape[-1], beta2, known, dtype)
        return ScaledRows(dense, factors, sizes), v

    def accumulated(self, G: Tensor, polynomials: tuple[Polynomial, ...]) -> Tensor:
        """W in one launch for small matrices.

        Larger matrices take two launches a step, three if there are few matrices, or else the steps of
        the base class.
        """
        if small.suits_accumulated(G, polynomials):
            return small.accumulated(G, polynomials)
        if _is_one_launch(G, polynomials):
            return self._in_two_launches(G, polynomials)
        few = G.dtype.itemsize == 2 and not halving_pays(*G.shape[:2])
        if few and _is_few(G) and _all_quintic(polynomials):
            return self._side_by_side(G, polynomials)
        return super().accumulated(G, polynomials)

    def iterate(self, X: Tensor, polynomials: tuple[Polynomial, ...]) -> Tensor:
        """In 16 bits: G = XXᵀ, H = P(G) and X ← HX; for few rows H and HX are one launch.

        a·X is part of HX, which saves a pass over memory. It rounds H's diagonal, by no more than X
        is rounded. Rounding does not build up: every step starts from the X that the last step
        left, and pulls it towards orthonormal rows.
        """
        if X.dtype.itemsize != 2:
            return super().iterate(X, polynomials)
        one_launch = _is_one_launch(X, polynomials)
        for polynomial in polynomials:
            G = self.symmetric(X, X)
            if one_launch:
                X = self._polynomial_times(G, X, polynomial)
            else:
                X = product_like(X, self.polynomial(G, polynomial), X)
        return X

    def inverse_rest_size(
        self,
        A: Tensor,
        B: Tensor,
        left: int,
        factor: float,
        floor: float,
        squares: Tensor | None = None,
    ) -> Tensor:
        """Two launches, and a third without ``squares``."""
        return inverse_rest_size(A, B, left, factor, floor, squares)[:, None, None]

    def dual(self, head: Head) -> Head:
        """Three launches, with results in float16 where the head is bfloat16: ‖D‖_op is near one."""
        if head.B.dtype.itemsize != 2:
            return super().dual(head)
        Q, half = head.Q, _in_halves(head.B.dtype)
        E = product(Q.mT, Q, alpha=-1, identity=1, symmetric=True, out_dtype=half)  # I − QᵀQ
        D = product(Q, E, D=Q, out_dtype=half)  # Q + QE
        if head.W is None:
            W = product(Q.mT, Q, symmetric=True, out_dtype=half)
        else:
            W = product(E, head.W, alpha=-1, D=head.W, out_dtype=half)  # W − EW
        return Head(D, head.B, head.X, W)

    def head_plus_rest(self, A: Tensor, dual: Head, inverse: Tensor) -> HeadPlusRest:
        """One launch."""
        if A.dtype.itemsize != 2:
            return super().head_plus_rest(A, dual, inverse)
        assert dual.W is not None
        at, half = inverse.reshape(-1), _in_halves(A.dtype)
        R = product(
            dual.W, dual.X, D=dual.B, beta=-1, scale=at, powers=(0, 1, 0), out_dtype=half
        )  # W'X − B/δ
        return HeadPlusRest(A, at, dual.Q, R)

    def flat_step(
        self,
        A: Tensor,
        head: Head,
        inverse: Tensor,
        polynomial: Polynomial,
        margin: float,
        *,
        most: float,
        float8: bool,
    ) -> tuple[Tensor | RowProduct, Callable[[], Tensor]]:
        """In eight bits if ``float8`` allows it and the matrices suit."""
        if not (float8 and suits_eight_bits(A, polynomial)):
            return super().flat_step(A, head, inverse, polynomial, margin, most=most, float8=float8)
        flat = self.head_plus_rest(A, self.dual(head), inverse)
        return flat_step_in_eight_bits(flat, polynomial, margin, most)

    def scaled_polynomial(self, G: Tensor, polynomial: Polynomial, scale: Tensor) -> Tensor:
        """s·P(s²G) with the powers of s multiplied to each squaring's numbers, on the way."""
        chain = squarings(polynomial)
        if G.dtype.itemsize != 2 or chain is None:
            return super().scaled_polynomial(G, polynomial, scale)
        S, s = [G], scale.reshape(-1)
        for k, each in enumerate(chain):
            last = int(each is chain[-1])
            powers = (last + 4 * (k == 0), last + 2 * (each.earlier == 0), last)
            S.append(
                product(
                    S[-1], S[-1], alpha=each.square, D=S[each.earlier], beta=each.plus,
                    identity=each.identity, symmetric=True, scale=s, powers=powers,
                )
            )  # fmt: skip
        return S[-1]

    def scale_to_one(self, G: Tensor, margin: float) -> Tensor:
        """Six launches."""
        return scale_to_one(G.contiguous(), margin)[:, None, None]

    def lifted_norm(self, P: Tensor, G: Tensor) -> Tensor:
        """Four launches."""
        return lifted_norm(P.contiguous(), G.contiguous())

    def fuses_first_step(self, rows: int, dtype: torch.dtype, first: Polynomial) -> bool:
        """True in bfloat16 for few rows; a kernel of its own normalizes larger matrices."""
        return dtype == torch.bfloat16 and rows < self.symmetric_from and len(first) <= 3

    def first_step(self, Y: Tensor, polynomial: Polynomial, dtype: torch.dtype) -> Tensor:
        """``φ(Y/‖Y‖_F)``: the kernel for the polynomial also divides by the trace of YYᵀ."""
        G = Y @ Y.mT
        if _is_one_launch(Y, (polynomial,)):
            return self._polynomial_times(G, Y, polynomial, by_trace=True, out_dtype=dtype)
        return self.apply(self.first_weight(G, polynomial), Y, dtype)

    def first_weight(self, G: Tensor, polynomial: Polynomial) -> Tensor:
        """``P(G/t)/√t`` with t = tr G, so that its product with Y is φ(Y/‖Y‖_F) for G = YYᵀ."""
        a, b, c = (*polynomial, 0.0)[:3]
        return product(G, G, alpha=c, D=G, beta=b, identity=a, symmetric=True, by_trace=True)

    def whitened_basis(
        self, Y: Tensor, runs: tuple[tuple[Polynomial, ...], ...]
    ) -> tuple[Tensor, Tensor]:
        """Rows Q = WX, stored in two precisions by one launch.

        Where W₂Q is needed next, (W₂W)X would save a launch. But entries of W₂W reach hundreds,
        where float16 rounds by tenths: ν was 0.06 on recorded momentum.
        """
        (first,), *between, last = runs
        X = self.first_step(Y, first, _in_halves(Y.dtype))
        for run in between:
            X = self.apply(self._accumulated_whole(self.symmetric(X, X), run), X, X.dtype)
        W = self._accumulated_whole(self.symmetric(X, X), last)
        Q = torch.empty_like(Y)
        return Q, product_and_blend(W, X, Q, X.dtype)

    def lift_and_leave(
        self,
        B: Tensor,
        polynomials: tuple[Polynomial, ...],
        numbers: Tensor,
        scale: float,
        S: Tensor,
        V: Tensor,
        finite: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """W and X, both float16 where ``B`` is bfloat16.

        The launch that makes X also stores S, and the launch that makes a small W also stores V.
        """
        H = self.first_weight(B @ B.mT, polynomials[0])
        X = product_and_blend(
            H, B, S, _in_halves(B.dtype), numbers=numbers, scale=scale, finite=finite
        )
        G = self.symmetric(X, X)
        if small.suits_accumulated(G, polynomials[1:]) and V.is_contiguous():
            return small.accumulated(G, polynomials[1:], V, finite), X
        W = self._accumulated_whole(G, polynomials[1:])
        if finite is None:
            product(W, W, symmetric=True, out=V)
        else:
            squared = product(W, W, symmetric=True, out_dtype=V.dtype)
            V.copy_(torch.where(finite[:, None, None] != 0, squared, V))
        return W, X

    def _accumulated_whole(self, G: Tensor, polynomials: tuple[Polynomial, ...]) -> Tensor:
        """:meth:`accumulated` without products by halves.

        P commutes with G and W only up to rounding, and a half that is mirrored is neither PW nor WP.
        The basis of a sketch has small singular values, where this shows: with halves ‖Q‖_op reached
        1.10 on a spectrum of sixteen spikes, and 1.005 without.
        """
        if not halving_pays(*G.shape[:2]):
            return self.accumulated(G, polynomials)
        return self.accumulated_by(torch.matmul, G, polynomials)

    def _polynomial_times(
        self,
        G: Tensor,
        Y: Tensor,
        polynomial: Polynomial,
        *,
        by_trace: bool = False,
        P: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """``P(G)Y`` in one launch; P(G) is also written to ``P``, if given."""
        a, b, *_ = polynomial
        H, scale = self.but_for_the_last_product(G, polynomial)
        return product_times(
            H, G, Y, alpha=scale, D=G, beta=b, identity=a,
            by_trace=by_trace, P=P, out_dtype=out_dtype,
        )  # fmt: skip

    def _in_two_launches(self, G: Tensor, polynomials: tuple[Polynomial, ...]) -> Tensor:
        """Two launches a step: W ← P(G)W, which also stores P, and G ← PGP."""
        W = P = self.polynomial(G, polynomials[0])
        for polynomial in polynomials[1:]:
            G = product_times(P, G, P)
            P = torch.empty_like(G)
            W = self._polynomial_times(G, W, polynomial, P=P)
        return W

    def _side_by_side(self, G: Tensor, polynomials: tuple[Polynomial, ...]) -> Tensor:
        """Three launches a step: P = P(G), P·[W G] as one product, and G ← (PG)P.

        ``room`` holds three m×m matrices side by side, with W in the middle. G lies on one side of
        W, so that both are one operand. PG replaces G there, and the next G is written to the other
        side.
        """

        def polynomial_to(G: Tensor, polynomial: Polynomial, out: Tensor | None = None) -> Tensor:
            a, b, *_ = polynomial
            H, scale = self.but_for_the_last_product(G, polynomial)
            return product(H, G, alpha=scale, D=G, beta=b, identity=a, symmetric=True, out=out)

        first, *rest = polynomials
        if not rest:
            return polynomial_to(G, first)
        batch, m, _ = G.shape
        at = [slice(0, m), slice(m, 2 * m), slice(2 * m, 3 * m)]
        both = {0: slice(0, 2 * m), 2: slice(m, 3 * m)}  # by the side on which G is
        room, side = G.new_empty(batch, m, 3 * m), 2
        W = polynomial_to(G, first, out=room[..., at[1]])
        torch.bmm(W @ G, W, out=room[..., at[side]])
        for polynomial in rest[:-1]:
            P, before = polynomial_to(room[..., at[side]], polynomial), room
            room = torch.empty_like(before)
            torch.bmm(P, before[..., both[side]], out=room[..., both[side]])
            torch.bmm(room[..., at[side]], P, out=room[..., at[2 - side]])
            side = 2 - side
        return polynomial_to(room[..., at[side]], rest[-1]) @ room[..., at[1]]


# A matrix of more rows does not fit in one program of product_times. For more columns two launches are
# faster: they have more programs than there are blocks of rows.
MOST_ROWS, MOST_COLUMNS = 256, 1024
# Fewer programs would leave most of a GPU idle. For three matrices of 144 rows a step of the Gram form
# takes an H200 13 µs this way, and 9 µs with a launch (and smaller tiles) for each product.
FEWEST_PROGRAMS = 32


def _is_one_launch(Y: Tensor, polynomials: tuple[Polynomial, ...]) -> bool:
    """Whether P(G)Y is one launch: for few rows in 16 bits, from degree five on."""
    return (
        Y.dtype.itemsize == 2
        and Y.shape[-2] <= MOST_ROWS
        and Y.shape[-1] <= MOST_COLUMNS
        and Y.is_contiguous()
        and not _is_few(Y)
        and _all_quintic(polynomials)
    )


def _is_few(Y: Tensor) -> bool:
    """Whether there are so few matrices that a launch for each product is faster."""
    blocks = -(-Y.shape[-2] // small.TILES["BM"])
    return blocks > 1 and len(Y) * blocks < FEWEST_PROGRAMS


def _all_quintic(polynomials: tuple[Polynomial, ...]) -> bool:
    return all(len(polynomial) >= 3 for polynomial in polynomials)


def _in_halves(dtype: torch.dtype) -> torch.dtype:
    """The dtype for matrices with singular values near one beside matrices in ``dtype``."""
    return torch.float16 if dtype == torch.bfloat16 else dtype


class Triton(_Kernels, Cuda):
    """A GPU with Triton."""

    # On an H200 sketched steps take less time than full space from here on (results/step-cost,
    # h200-between.json); fewer rows were not timed.
    sketched_from = 384

    def whitens(self, dtype: torch.dtype) -> bool:
        """True in bfloat16."""
        return dtype == torch.bfloat16


class InterpretedTriton(_Kernels, Cpu):
    """The kernels on a CPU, through Triton's interpreter, for the tests."""

    def whitens(self, dtype: torch.dtype) -> bool:
        """True in float32, the precision of a CPU's products."""
        return dtype == torch.float32


# A polynomial step in eight bits.

# Units. Entries of X₀ are near √(0.4/n), those of G near 0.4 on the diagonal.
UNIT_OF_X, UNIT_OF_G = 128.0, 64.0
# The largest number of the format.
LARGEST = torch.finfo(FLOAT8).max
# Eigenvalues of s²G reach from below zero, by rounding, to above one, where s is too large.
LOWEST, HIGHEST = -0.05, 1.4
# Where G was cut off and does not show its norm, ‖sX₀‖_op is at most this. P is near P(0) there, and
# ‖T‖_op ≤ 1 for "flat", for which P(0) = 10.
SAFE = 0.1

_UNITS: dict[Polynomial, tuple[float, ...]] = {}


def suits_eight_bits(A: Tensor, polynomial: Polynomial) -> bool:
    """Whether a step on ``A`` (batch, m, n) can run in eight bits, and gains from it.

    It takes a polynomial by squarings, a GPU with tensor descriptors, and rows and columns that are
    multiples of 16. Matrices of few rows gain nothing.
    """
    m, n = A.shape[-2:]
    return (
        A.dtype.itemsize == 2
        and m >= DESCRIPTORS_FROM
        and m % 16 == 0
        and n % 16 == 0
        and squarings(polynomial) is not None
        and describable(A if A.is_contiguous() else A.mT)
    )


@constant
def units(polynomial: Polynomial) -> tuple[float, ...]:
    """A power of two for each square of ``polynomial``, with which its eigenvalues fit the format."""
    if polynomial not in _UNITS:
        if len(_UNITS) >= 256:
            _UNITS.clear()
        chain = squarings(polynomial)
        assert chain is not None
        values = [torch.linspace(LOWEST, HIGHEST, 1025, dtype=torch.float64, device="cpu")]
        for each in chain:
            values.append(
                each.square * values[-1] ** 2 + each.plus * values[each.earlier] + each.identity
            )
        largest = [float(value.abs().max()) for value in values[1:]]
        _UNITS[polynomial] = tuple(2.0 ** math.floor(math.log2(LARGEST / x)) for x in largest)
    return _UNITS[polynomial]


def flat_step_in_eight_bits(
    flat: HeadPlusRest, polynomial: Polynomial, margin: float, most: float
) -> tuple[RowProduct, Callable[[], Tensor]]:
    """T = s·P(s²G)·X₀ for the X₀ of ``flat``, not multiplied out, and ‖T‖²_F.

    s = 1/(``margin``·√λ) for an estimate λ of ‖G‖_op, and ``most`` bounds ‖X₀‖²_F. ‖T‖²_F is a function
    to call, since few steps need it.
    """
    X, Xt = flattened(flat.A, flat.L, flat.R, flat.inverse, UNIT_OF_X)
    G = product(X, X.mT, alpha=UNIT_OF_G / UNIT_OF_X**2, symmetric=True)
    s = scale_to_one(G, margin, full_at=LARGEST, otherwise=SAFE / math.sqrt(UNIT_OF_G * most))
    chain = squarings(polynomial)
    assert chain is not None
    P, unit = _squared(G, s, chain, units(polynomial))
    # s²G has no unit, so neither has this s·X₀: it is √64 times X₀'s own.
    alpha = math.sqrt(UNIT_OF_G) / (unit * UNIT_OF_X)
    T = RowProduct(P, Xt, s, alpha)
    return T, lambda: lifted_norm(P, G, s, 1 / unit)


def _squared(
    G: Tensor, s: Tensor, chain: tuple[Squaring, ...], stored: tuple[float, ...]
) -> tuple[Tensor, float]:
    """P(s²G) in eight bits, and its unit."""
    S, unit = [G], [1.0]
    for k, (each, own) in enumerate(zip(chain, stored, strict=True)):
        last = S[-1]
        P = product(
            last, last.mT, alpha=each.square * own / unit[-1] ** 2,
            D=S[each.earlier], beta=each.plus * own / unit[each.earlier],
            identity=each.identity * own, symmetric=True,
            scale=s, powers=(4 * (k == 0), 2 * (each.earlier == 0), 0),
        )  # fmt: skip
        S.append(P)
        unit.append(own)
    return S[-1], unit[-1]
