"""Maps in full space: polynomial iterations, and a singular value decomposition as the reference.

Newton–Schulz and PolarExpress are odd polynomials that drive every singular value to one
(:mod:`polarstep.maps.coefficients`). They run on M itself, where a step is X ← P(XXᵀ)X, or on its Gram
matrix.

**The Gram form.** For odd polynomials φ_t(x) = x·P_t(x²) and wide X (m ≤ n), with G₀ = X Xᵀ (m×m):

    φ_q∘…∘φ₁(X) = W_q X,   W_t = P_t(G_{t−1}) W_{t−1},   G_t = P_t(G_{t−1}) G_{t−1} P_t(G_{t−1}).

Only two products have size m·m·n, one to form G₀ and one to apply W_q; the plain iteration has two
at every step. All other products are m×m, so the Gram form pays when n is well above m.

The price is in the small singular values. A rounding error ε in G₀ is an error in σ², so a σ near
√ε is unknown, and the error grows by P_t(0)² = a_t² a step. Before it grows too large, the
iteration restarts: X is replaced by W X and its Gram matrix is formed afresh.

There is a second price. W is large where σ is small, up to ∏a_t, so its rounding errors reach the
other singular values as ε∏a_t: 6e-5 after nine quintic steps in float32, on the wrong side of
‖T‖_op ≤ 1. A last step with φ(1) = 1 and φ'(1) = 0, as the paper's two polynomials have, squares
this error, if the step works on the Gram matrix of the X that has the error. So the iteration
restarts before such a step.

On a GPU everything runs in float16, m×m products too. The rounding errors of m² entries form a
random matrix, whose norm is smaller by √m than the sum of the errors: relative to ‖G‖ it was 2⁻⁵ of
the precision or less on every spectrum tried. With this figure the restart rule agrees with
measurements. PolarExpress in runs of 1 + 2 + 2 steps, and five of the paper's steps in one run, are
as accurate as steps on X. Longer runs are not: once rounding hides an eigenvalue, the next
polynomials may blow it up to infinity. bfloat16, with eight times the rounding, would gain little.

**Matrices of few rows on a GPU** (:func:`small_polar`): the sketches of a low-rank map, and small
layers. Their products take a few microseconds each, so a pass over memory counts as much as a step. Two
passes are saved. ‖Y‖_F² is the trace of YYᵀ, which the first step forms anyway, so Y itself is never
normalized (:meth:`polarstep.ops.Products.first_step`). And where n is well above m, the other steps run
on the Gram matrix in float16, as singular values are near one by then. The last product of the first
step rounds its result to float16. The very last product rounds its result to bfloat16 again, the
precision of a low-rank map's other factor.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from polarstep import flops
from polarstep.checked_values import check_fraction, check_integer
from polarstep.context import constant, user_stacklevel
from polarstep.maps import coefficients
from polarstep.maps.base import Draw, Lift, MapState, Polar, PolarMap, Traits, step_of, wide
from polarstep.maps.coefficients import Name, Polynomial, evaluate
from polarstep.numerics import fitting, in_float64, product_like, square_products, unit_scaled
from polarstep.ops import Products, ops_of

__all__ = [
    "GRAM_FROM",
    "SQUARINGS",
    "Exact",
    "NewtonSchulz",
    "apply_polynomials",
    "apply_to_normalized",
    "described_inside",
    "fits_float16",
    "lift_of",
    "overshoot",
    "restarts",
    "rounding",
    "scaled_gram",
    "schatten_norm",
    "small_polar",
    "suits_small",
    "weight",
]


Delta = Literal["frobenius", "spectral", "operator"]
DELTAS = 'expected "frobenius", "spectral", "operator" or a positive number'
SQUARINGS: dict[str | float, int] = {"spectral": 1, "operator": 10}
"""How often MMᵀ is squared for δ: j squarings give the Schatten norm of order 2^(j + 2)."""
Form = Literal["auto", "plain", "gram"]


@dataclass(frozen=True)
class NewtonSchulz(PolarMap):
    """``Z₀ = M/δ``, ``Z_{t+1} = φ_t(Z_t)``; T(M) = Z_q = U p_q(Σ/δ) Vᵀ (the paper's Section 2).

    ``NewtonSchulz()`` has five PolarExpress steps: the default map of :class:`polarstep.Muon`.

    With ``"cubic"`` or ``"quintic"`` and any δ ≥ ‖M‖_op this has ν = 0, up to rounding
    (:mod:`polarstep.maps.base`), and γ = 1 − Σσᵢp_q(σᵢ/δ)/Σσᵢ (Proposition 1). The other
    sets overshoot one by design: they reach the neighbourhood of one sooner and stay in it.

    Args:
        steps: q, the number of polynomials applied, at least one.
        coefficients: a name (``polarstep.maps.coefficients.names()``) or a sequence of
            polynomials ``(a, b, c)`` for ax + bx³ + cx⁵, one a step, the last one repeated.
            :func:`polarstep.maps.polar_express` makes such a sequence.
        delta: ``"frobenius"``: ‖M‖_F, the usual choice. ``"spectral"``: the Schatten-8 norm
            ‖M‖_S8 = ‖(MMᵀ)²‖_F^¼ from one extra pair of products; it is at least ‖M‖_op and at most
            min(m, n)^⅛·‖M‖_op, where ‖M‖_F may be as large as min(m, n)^½·‖M‖_op. ``"operator"``:
            ‖M‖_op itself to two thousandths, from above, by ten squarings of MMᵀ. As the inner map
            of :class:`polarstep.LowRank` this is the δ = ‖B‖_op that the paper prints for
            Algorithm 2.
            A number: this δ for every matrix; it must be at least ‖M‖_op for the bounds to hold,
            and the map is then not scale invariant.
        dtype: precision of the products. ``None`` is the fastest that the device has hardware for
            (:meth:`polarstep.ops.Products.full_dtype`): bfloat16 on most GPUs, and on CPUs with
            matrix tiles (AMX) from 192 rows on, else float32. It is float32 where the coefficients,
            for want of a safety factor, would blow up in 16 bits, and on CPUs also for an inner map.
            A warning is given if such coefficients meet an explicit 16-bit ``dtype``.
        form: ``"plain"`` iterates on M, ``"gram"`` on its small Gram matrix;
            ``"auto"`` takes the cheaper of the two for the shape.
    """

    steps: int = 5
    coefficients: Name | tuple[tuple[float, ...], ...] = "polar-express"
    delta: Delta | float = "frobenius"
    dtype: torch.dtype | None = None
    form: Form = "auto"

    _polynomials: ClassVar[tuple[Polynomial, ...]] = ()  # each map has its own

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, 1, "5 to 9 are usual")
        object.__setattr__(self, "steps", int(self.steps))  # NumPy's integers become Python's
        # Arrays and tensors become tuples of floats, so that equal maps compare and hash alike.
        if not isinstance(self.coefficients, str):
            rows = coefficients.validated(self.coefficients)
            object.__setattr__(self, "coefficients", rows)
        polynomials = coefficients.resolve(self.coefficients, self.steps)  # raises on bad ones
        object.__setattr__(self, "_polynomials", polynomials)
        if not isinstance(self.delta, str):
            object.__setattr__(self, "delta", _as_delta(self.delta))
        elif self.delta not in get_args(Delta):
            raise ValueError(f"delta={self.delta!r}: {DELTAS}")
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise TypeError(
                f"dtype={self.dtype!r}: expected a torch.dtype such as torch.float32, or None"
            )
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ValueError(
                f"dtype={self.dtype}: expected a floating-point dtype, as torch.float32, or None"
            )
        if (
            self.dtype is not None
            and self.dtype.itemsize < 4
            and not coefficients.survives_16_bits(self.polynomials)
        ):
            warnings.warn(
                f"dtype={self.dtype} with coefficients={self.coefficients!r}: rounding to 16 bits may "
                "lift a singular value above one, where these polynomials blow it up; use polynomials "
                "with a safety factor, as polarstep.maps.polar_express(lower, steps) makes them, or "
                "dtype=None",
                stacklevel=user_stacklevel(),
            )
        if self.form not in get_args(Form):
            raise ValueError(f"form={self.form!r}: expected one of {', '.join(get_args(Form))}")
        # M may be rounded unless a dtype was given or the polynomials need more than 16 bits.
        rounds = self.dtype is None and coefficients.survives_16_bits(self.polynomials)
        traits = Traits(ignores_scale=isinstance(self.delta, str), rounds_input=rounds)
        object.__setattr__(self, "_traits", traits)

    @property
    def uses_defaults(self) -> bool:
        """Whether δ is ‖M‖_F and the device may choose precision and form."""
        return self.traits.rounds_input and self.delta == "frobenius" and self.form == "auto"

    @property
    def polynomials(self) -> tuple[Polynomial, ...]:
        """The polynomials φ₁, …, φ_q themselves."""
        return self._polynomials

    def _uses_gram(self, m: int, n: int, dtype: torch.dtype, ops: Products) -> bool:
        """Whether the iteration on an m×n matrix by products in ``dtype`` runs on its Gram matrix.

        In bfloat16 the Gram form saves nothing: its m×m work must stay in float32, which a GPU runs at a
        fraction of its bfloat16 rate.
        """
        if self.form != "auto":
            return self.form == "gram"
        if dtype == torch.bfloat16:
            return False
        return self._products(m, n, dtype, ops, by_gram=True) < self._products(
            m, n, dtype, ops, by_gram=False
        )

    def _route(
        self, given: torch.dtype, m: int, n: int, ops: Products, *, inner: bool = False
    ) -> tuple[torch.dtype, bool]:
        """The precision of the products for an m×n matrix, and whether the Gram form is used.

        Where the Gram form is cheaper on a GPU, it runs in float16, which is as fast as bfloat16.
        """
        dtype = ops.dtype(given) if self.dtype is None else self.dtype
        if self.dtype is None and not self.traits.rounds_input:
            dtype = torch.promote_types(dtype, torch.float32)
        elif self.dtype is None and not inner and self.form != "gram":
            dtype = ops.full_dtype(m, n, given)
        if self.dtype is None and dtype == torch.bfloat16 and ops.gram_in_halves:
            small = self.form == "auto" and min(m, n) < ops.symmetric_from  # no halved products
            if not small and isinstance(self.delta, str) and fits_float16(self.polynomials):
                by_gram = self._uses_gram(m, n, torch.float16, ops)
                return (torch.float16 if by_gram else dtype), by_gram
        return dtype, self._uses_gram(m, n, dtype, ops)

    def step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        """p_q of the singular values of M/δ."""
        X = wide(M)
        if self.uses_defaults and suits_small(X, self.polynomials):
            return Polar.of_wide(M, small_polar(X, self.polynomials)), MapState()
        ops = ops_of(X.device)
        route = self._route(X.dtype, X.shape[-2], X.shape[-1], ops)
        return Polar.of_wide(M, self._applied(X, ops, *route)), MapState()

    def _applied(self, X: Tensor, ops: Products, dtype: torch.dtype, by_gram: bool) -> Tensor:
        """T of wide matrices ``X`` by products in ``dtype``, in the form that ``by_gram`` says."""
        if by_gram and self._is_normalized_on_the_way(X.dtype, dtype, ops):
            return apply_to_normalized(X, self.polynomials)
        X = self._divided_by_delta(X, dtype, ops)
        return (apply_polynomials if by_gram else ops.iterate)(X, self.polynomials)

    def lift(self, B: Tensor) -> Lift:
        """W and X with T(B) = WX by the Gram form, where X may be B itself; not in tiles of a CPU."""
        ops = ops_of(B.device)
        dtype, by_gram = self._route(B.dtype, B.shape[-2], B.shape[-1], ops, inner=True)
        if (
            by_gram
            and not ops.gram_in_halves
            and self._is_normalized_on_the_way(B.dtype, dtype, ops)
        ):
            weighted = weight(B, self.polynomials)
            if weighted is not None:
                W, X, G = weighted
                return Lift(X, W, G=G)
        if self.uses_defaults and suits_small(B, self.polynomials):
            return Lift(small_polar(B, self.polynomials))
        return Lift(self._applied(B, ops, dtype, by_gram))

    def _is_normalized_on_the_way(
        self, given: torch.dtype, dtype: torch.dtype, ops: Products
    ) -> bool:
        """Whether the Gram form divides by ‖M‖_F on the way, so that M/‖M‖_F is not formed.

        It reads ‖M‖_F, which is free on a CPU and not possible while torch.compile traces.
        """
        usual = self.delta == "frobenius"
        unchanged = given == dtype and dtype.itemsize >= 4 and ops.host_reads_are_free
        return usual and unchanged and not torch.compiler.is_compiling()

    def _divided_by_delta(self, M: Tensor, dtype: torch.dtype, ops: Products) -> Tensor:
        """``M/δ`` in ``dtype``; the division itself happens in float32 at least."""
        if not isinstance(self.delta, str):
            return (M.to(torch.promote_types(M.dtype, torch.float32)) / self.delta).to(dtype)
        X = ops.normalized(M, dtype)
        if self.delta == "frobenius":
            return X
        G = ops.gram(X)
        norm = schatten_norm(G, SQUARINGS[self.delta]) * (1 + 4 * torch.finfo(dtype).eps)
        return (X.to(G.dtype) / norm).to(dtype)

    def product_dtype(
        self, m: int, n: int, dtype: torch.dtype, device: torch.device
    ) -> torch.dtype:
        """The precision of the products in full space."""
        return self._route(dtype, m, n, ops_of(device))[0]

    def bounds(self, rows: int, norm: Tensor) -> tuple[Tensor, Tensor] | None:
        """max p_q over [0, 1], where the singular values of M/δ lie, and rows·δ·max x(1 − p_q(x)).

        No singular value σ loses more than σ(1 − p_q(σ/δ)). ``None`` for a number δ that may be below
        ‖M‖_op, outside what the polynomial was made for.
        """
        delta = norm
        if not isinstance(self.delta, str):
            if bool((norm > self.delta).any()):
                return None
            delta = torch.full_like(norm, self.delta)
        largest, lost = coefficients.extremes(self.polynomials)
        return torch.full_like(norm, largest), rows * delta * lost

    def flops(self, m: int, n: int) -> int:
        """The paper's count for the plain iteration, whichever form runs."""
        return sum(
            flops.newton_schulz(m, n, 1, 2 * len(p) - 1, products=square_products(p))
            for p in self.polynomials
        )

    def _products(self, m: int, n: int, dtype: torch.dtype, ops: Products, *, by_gram: bool) -> int:
        """FLOPs of the steps in one form, two per multiply-add; δ costs the same in both."""
        d0, d1 = min(m, n), max(m, n)
        form, square = (ops.symmetric_flops(d0, k, dtype) for k in (d1, d0))  # XXᵀ, and G²
        lengths = [1] * self.steps
        if by_gram:
            starts = restarts(self.polynomials, rounding(dtype))
            lengths = [end - first for first, end in pairwise([0, *starts, self.steps])]
        powers = sum(map(square_products, self.polynomials))
        small = powers + sum(3 * (length - 1) for length in lengths if length)  # W ← PW, G ← PGP
        return small * square + sum(form + 2 * d0 * d0 * d1 for each in lengths if each)

    def describe(self, m: int, n: int, device: torch.device | None = None) -> str:
        """Steps, coefficients, form, and bfloat16 on a CPU, for the routing table."""
        return self.described(m, n, device, inner=False)

    def described(self, m: int, n: int, device: torch.device | None, *, inner: bool) -> str:
        """:meth:`describe`; as the ``inner`` map of another it stays in float32 on a CPU."""
        name = self.coefficients if isinstance(self.coefficients, str) else "custom"
        ops = ops_of(device or torch.device("cpu"))
        dtype, by_gram = self._route(torch.float32, m, n, ops, inner=inner)
        form = ", Gram form" if by_gram else ""
        form += " in float16" if by_gram and dtype == torch.float16 else ""
        form += "" if self.traits.rounds_input or self.dtype is not None else ", not below float32"
        tiles = dtype == torch.bfloat16 != ops.dtype(torch.float32) and self.dtype is None
        return f"NewtonSchulz({self.steps} × {name}{form}){' in bfloat16' * tiles}"


def schatten_norm(G: Tensor, squarings: int) -> Tensor:
    """The Schatten norm of order 2^(j + 2) of X from G = XXᵀ and j squarings, as (..., 1, 1).

    It is at least ‖X‖_op, and at most d^(1/2^(j + 2))·‖X‖_op for d rows. Each square is divided by its
    Frobenius norm, so that none leaves the range of its precision. Zero matrices get a tiny number.
    """
    tiny = torch.finfo(G.dtype).tiny
    norm = torch.ones_like(G[..., :1, :1])
    power = 1 / 2
    for _ in range(squarings):
        size = torch.linalg.matrix_norm(G, keepdim=True).clamp_min(tiny)
        G, norm, power = (G / size) @ (G / size), norm * size**power, power / 2
    return (norm * torch.linalg.matrix_norm(G, keepdim=True) ** power).clamp_min(tiny)


def _as_delta(value: float) -> float:
    try:
        delta = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"delta={value!r}: {DELTAS}") from error
    if not 0 < delta < float("inf"):
        raise ValueError(
            f'delta={delta}: expected a finite number > 0, at least ‖M‖_op; "frobenius" takes ‖M‖_F'
        )
    return delta


@dataclass(frozen=True)
class Exact(PolarMap):
    """``U Vᵀ`` over the nonzero singular values of ``M = U Σ Vᵀ``, computed in float64.

    It attains ``max ⟨M, O⟩`` over ``‖O‖_op ≤ 1``, which is ``‖M‖_*``: γ = ν = 0 in the paper's
    Assumption on inexact polar maps.

    Args:
        rtol: singular values up to ``rtol · σ₁`` count as zero. The default, ``max(m, n)`` times
            float64's epsilon, keeps every direction of the given matrix, even the rounding errors
            of a float32 matrix. As the inner map of a low-rank map it is ``max(m, n)`` times the
            epsilon of B = QᵀM instead: B is the result of a product, so that directions below that
            are the product's rounding errors.
    """

    rtol: float | None = None

    def __post_init__(self) -> None:
        if self.rtol is not None:
            check_fraction("rtol", self.rtol, "None is the default")

    def step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        """U Vᵀ of M as it was given."""
        T = self._sign(wide(M), torch.finfo(torch.float64).eps)
        return Polar.of_wide(M, T), MapState()

    def lift(self, B: Tensor) -> Lift:
        """T of a matrix B that is a product, rounded to the precision of ``B``."""
        return Lift(self._sign(B, torch.finfo(B.dtype).eps))

    def _sign(self, X: Tensor, epsilon: float) -> Tensor:
        """U Vᵀ without singular values up to ``rtol · σ₁``; rtol is max(m, n)·ε unless it is given."""
        # LAPACK refuses a whole batch for one NaN; here only the matrix with the NaN is lost.
        finite = X.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
        X, _ = unit_scaled(in_float64(torch.where(finite, X, 0)))
        U, S, Vh = torch.linalg.svd(X, full_matrices=False)
        rtol = max(X.shape[-2:]) * epsilon if self.rtol is None else self.rtol
        nonzero = rtol * S[..., :1] < S
        T = fitting((U * nonzero.unsqueeze(-2)) @ Vh, finite.device)
        return torch.where(finite, T, torch.nan)

    def bounds(self, rows: int, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Always one and zero."""
        return torch.ones_like(norm), torch.zeros_like(norm)

    def flops(self, m: int, n: int) -> int:
        """6d₁d₀² + 20d₀³ for a thin SVD with both factors, and the product U Vᵀ.

        The SVD is counted as the R-SVD of Golub and Van Loan, *Matrix Computations*, 8.6.
        """
        d0, d1 = min(m, n), max(m, n)
        return 6 * d1 * d0**2 + 20 * d0**3 + flops.matmul(d0, d0, d1)


def lift_of(inner: PolarMap, B: Tensor) -> Lift:
    """Z = inner(B) of wide matrices ``B``, without the last product where that is cheaper."""
    if isinstance(inner, NewtonSchulz | Exact):
        return inner.lift(B)
    return Lift(step_of(inner, B, MapState(), Draw())[0].multiplied_out())


def described_inside(inner: PolarMap, m: int, n: int, device: torch.device | None) -> str:
    """``inner.describe`` for a part of another map, which may run in another precision."""
    if isinstance(inner, NewtonSchulz):
        return inner.described(m, n, device, inner=True)
    return inner.describe(m, n, device)


# The Gram form.

# Largest error in an eigenvalue of G_t before a restart, where ‖G_t‖ ≤ 1. A negative eigenvalue of
# this size changes P(λ) by less than a tenth for every coefficient set we ship.
TOLERATED_ERROR = 2e-2
# The same after the last step, which no later step corrects, unless the last step itself settles.
TOLERATED_AT_THE_END = 4e-3

# Largest ε∏a_t for which the last step needs no restart before it to settle the error.
TOLERATED_OVERSHOOT = 4e-6


def scaled_gram(X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """X, XXᵀ and its trace ‖X‖_F², of shape (batch, 1, 1), for ``X`` on a CPU.

    Where the trace is near the limits of float32, X is scaled first. Reading the trace is free on a
    CPU.
    """
    G, trace = _gram_and_trace(X)
    if not bool(((trace > 1e-24) & (trace < 1e24)).all()):
        X, _ = unit_scaled(X)
        G, trace = _gram_and_trace(X)
    return X, G, trace


def _gram_and_trace(X: Tensor) -> tuple[Tensor, Tensor]:
    G = ops_of(X.device).gram(X)
    return G, G.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]


def rounding(dtype: torch.dtype) -> float:
    """The error in the Gram matrix of an ``X`` of this precision, relative to its norm."""
    if dtype == torch.float16:
        return torch.finfo(dtype).eps / 2**5
    return max(
        torch.finfo(torch.promote_types(dtype, torch.float32)).eps, torch.finfo(dtype).eps / 2**8
    )


def restarts(
    polynomials: tuple[Polynomial, ...], epsilon: float, *, settling: bool = True
) -> list[int]:
    """The steps before which to form the Gram matrix afresh.

    With ``settling`` the last step is one of them where it can correct the rounding errors of W.
    """
    starts, error, overshoot = [], epsilon, epsilon
    for t, polynomial in enumerate(polynomials):
        growth = polynomial[0]
        last, settles = t == len(polynomials) - 1, _settles(polynomial)
        tolerated = TOLERATED_AT_THE_END if last and not settles else TOLERATED_ERROR
        drowned = error * growth**2 > tolerated
        unsettled = settling and last and _is_to_settle(polynomial, overshoot * growth, epsilon)
        if t > 0 and (drowned or unsettled):
            starts.append(t)
            error = overshoot = epsilon
        error *= growth**2
        overshoot *= growth
    return starts


def _is_to_settle(last: Polynomial, overshoot: float, epsilon: float) -> bool:
    """Whether the last step can correct an error of ``overshoot``, and the error is worth it.

    In 16 bits the error is not worth it: the rounding errors of products are larger there.
    """
    return _settles(last) and epsilon < TOLERATED_OVERSHOOT < overshoot


def _settles(polynomial: Polynomial) -> bool:
    """Whether φ(1) = 1 and φ'(1) = 0, so that φ(1 + e) = 1 + O(e²)."""
    slope = sum((2 * k + 1) * c for k, c in enumerate(polynomial))
    return abs(sum(polynomial) - 1) < 1e-12 and abs(slope) < 1e-12


_FITS: dict[tuple[Polynomial, ...], bool] = {}


@constant
def fits_float16(polynomials: tuple[Polynomial, ...]) -> bool:
    """Whether the polynomials keep singular values from [0, 1] far from float16's limit."""
    if polynomials not in _FITS:
        x, fits = torch.linspace(0, 1, 257, dtype=torch.float64, device="cpu"), True
        for polynomial in polynomials:
            x = evaluate((polynomial,), x)
            fits &= bool(x.abs().max() < 4) and max(map(abs, polynomial)) < 100
        _FITS[polynomials] = fits
    return _FITS[polynomials]


def apply_polynomials(
    X: Tensor, polynomials: tuple[Polynomial, ...], out_dtype: torch.dtype | None = None
) -> Tensor:
    """φ_q∘…∘φ₁ on the singular values of ``X``, of shape (batch, m, n) and ‖X‖_op ≤ 1.

    The result is in ``out_dtype``, or in the precision of ``X``.
    """
    out_dtype, ops = out_dtype or X.dtype, ops_of(X.device)
    in_halves = X.dtype == torch.float16 and ops.gram_in_halves
    starts = [0, *restarts(polynomials, rounding(X.dtype)), len(polynomials)]
    for first, end in pairwise(starts):
        if first < end:
            # m×m work is in float32 at least, except in float16 on a GPU.
            G = ops.symmetric(X, X) if in_halves else ops.gram(X)
            W = ops.accumulated(G, polynomials[first:end]).to(X.dtype)
            X = ops.apply(W, X, X.dtype if end < len(polynomials) else out_dtype)
    return X.to(out_dtype)


def apply_to_normalized(X: Tensor, polynomials: tuple[Polynomial, ...]) -> Tensor:
    """φ_q∘…∘φ₁ on the singular values of X/‖X‖_F, for ``X`` on a CPU.

    No pass over X is needed to divide it, as ‖X‖_F² is the trace of XXᵀ.
    """
    X, G, trace = scaled_gram(X)
    end = next(iter(restarts(polynomials, rounding(X.dtype))), len(polynomials))
    W = _accumulated_by_trace(G, trace, polynomials[:end])
    return apply_polynomials(product_like(X, W, X), polynomials[end:])


def weight(X: Tensor, polynomials: tuple[Polynomial, ...]) -> tuple[Tensor, Tensor, Tensor] | None:
    """W, S and SSᵀ with ``WS`` = φ_q∘…∘φ₁(X/‖X‖_F), for ``X`` on a CPU; ``None`` if a restart is needed.

    S is X itself, or X times a power of two where its entries are so small or so large that W, of size
    1/‖X‖_F, or the squares of X would leave the range of float32.

    W's rounding errors of ε∏a_t could lift ‖WX‖_op above one. Instead of a restart before the last
    step, W is shrunk by ε∏a_t (1e-5 after seven quintic steps), which needs no product with X.
    """
    if restarts(polynomials, rounding(X.dtype), settling=False):
        return None
    S, G, trace = scaled_gram(X)
    W = _accumulated_by_trace(G, trace, polynomials, 1 - overshoot(polynomials, X.dtype))
    return W, S, G


def overshoot(polynomials: tuple[Polynomial, ...], dtype: torch.dtype) -> float:
    """By how much to shrink W, whose rounding errors may lift ‖WX‖_op above one."""
    epsilon = rounding(dtype)
    size = epsilon * math.prod(polynomial[0] for polynomial in polynomials)
    return size if _is_to_settle(polynomials[-1], size, epsilon) else 0.0


def _accumulated_by_trace(
    G: Tensor, trace: Tensor, polynomials: tuple[Polynomial, ...], scale: float = 1.0
) -> Tensor:
    """``scale``·W/√trace, with W for the X of norm one whose Gram matrix is G/trace."""
    trace = torch.where(trace == 0, 1, trace)
    W = ops_of(G.device).accumulated(G / trace, polynomials)
    return W.mul_(scale * trace.rsqrt())


# The ratio n/m from which steps on the m×m Gram matrix are cheaper.
GRAM_FROM = 3


def suits_small(Y: Tensor, polynomials: tuple[Polynomial, ...]) -> bool:
    """Whether :func:`small_polar` can take ``Y`` and is faster."""
    ops = ops_of(Y.device)
    return ops.fuses_first_step(Y.shape[-2], Y.dtype, polynomials[0])


def small_polar(Y: Tensor, polynomials: tuple[Polynomial, ...], *, by_gram: bool = True) -> Tensor:
    """φ_q∘…∘φ₁ on the singular values of Y/‖Y‖_F, for ``Y`` of shape (batch, m, n), m ≤ n.

    The result has the precision of ``Y``. The Gram form is used where it is cheaper, if ``by_gram``
    allows it. The result is zero where entries of Y are below 1e-18 or above 1e18, as their squares
    leave float32's range.
    """
    first, rest = polynomials[0], polynomials[1:]
    ops = ops_of(Y.device)
    by_gram &= len(rest) > 1 and Y.shape[-1] >= GRAM_FROM * Y.shape[-2]
    if by_gram and fits_float16(polynomials):
        X = ops.first_step(Y, first, torch.float16)
        return apply_polynomials(X, rest, out_dtype=Y.dtype)
    return ops.iterate(ops.first_step(Y, first, Y.dtype), rest)
