"""Maps in full space: polynomial iterations, and a singular value decomposition as the reference.

Newton–Schulz and PolarExpress are odd polynomials that drive every singular value to one
(:mod:`polarstep.maps.coefficients`). They run on M itself or on its Gram matrix
(:mod:`polarstep.maps.gram`).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from polarstep import flops
from polarstep.checked_values import check_fraction, check_integer
from polarstep.context import user_stacklevel
from polarstep.maps import coefficients, gram
from polarstep.maps.base import PolarMap
from polarstep.maps.coefficients import Name, Polynomial
from polarstep.maps.gram import small_polar, suits_small
from polarstep.maps.result import Lift
from polarstep.numerics import fitting, in_float64, square_products, unit_scaled
from polarstep.ops import Products, ops_of

__all__ = ["SQUARINGS", "Exact", "NewtonSchulz", "schatten_norm"]


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
        form: ``"plain"`` iterates on M, ``"gram"`` on its small Gram matrix
            (:mod:`polarstep.maps.gram`); ``"auto"`` takes the cheaper of the two for the shape.
    """

    steps: int = 5
    coefficients: Name | tuple[tuple[float, ...], ...] = "polar-express"
    delta: Delta | float = "frobenius"
    dtype: torch.dtype | None = None
    form: Form = "auto"

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, 1, "5 to 9 are usual")
        object.__setattr__(self, "steps", int(self.steps))  # NumPy's integers become Python's
        # Arrays and tensors become tuples of floats, so that equal maps compare and hash alike.
        if not isinstance(self.coefficients, str):
            rows = coefficients.validated(self.coefficients)
            object.__setattr__(self, "coefficients", rows)
        coefficients.resolve(self.coefficients, self.steps)  # raises on what it cannot use
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
        if self.dtype is not None and self.dtype.itemsize < 4 and not self._survives_16_bits():
            warnings.warn(
                f"dtype={self.dtype} with coefficients={self.coefficients!r}: rounding to 16 bits may "
                "lift a singular value above one, where these polynomials blow it up; use polynomials "
                "with a safety factor, as polarstep.maps.polar_express(lower, steps) makes them, or "
                "dtype=None",
                stacklevel=user_stacklevel(),
            )
        if self.form not in get_args(Form):
            raise ValueError(f"form={self.form!r}: expected one of {', '.join(get_args(Form))}")

    @property
    def rounds_input(self) -> bool:
        """True unless a ``dtype`` was given, or the polynomials need more than 16 bits."""
        return self.dtype is None and self._survives_16_bits()

    def _survives_16_bits(self) -> bool:
        return coefficients.survives_16_bits(self.polynomials)

    @property
    def uses_defaults(self) -> bool:
        """Whether δ is ‖M‖_F and the device may choose precision and form."""
        return self.rounds_input and self.delta == "frobenius" and self.form == "auto"

    @property
    def ignores_scale(self) -> bool:
        """True unless δ is a number."""
        return isinstance(self.delta, str)

    @property
    def polynomials(self) -> tuple[Polynomial, ...]:
        """The polynomials φ₁, …, φ_q themselves."""
        return coefficients.resolve(self.coefficients, self.steps)

    @property
    def polynomials_to_fuse(self) -> tuple[Polynomial, ...] | None:
        """All polynomials, if :attr:`uses_defaults`."""
        return self.polynomials if self.uses_defaults else None

    def uses_gram(self, m: int, n: int, dtype: torch.dtype = torch.float32) -> bool:
        """Whether the iteration on an m×n matrix on a CPU runs on its Gram matrix.

        ``dtype`` is the precision of the products. In bfloat16 the Gram form saves nothing: its m×m
        work must stay in float32, which a GPU runs at a fraction of its bfloat16 rate.
        """
        return self._uses_gram(m, n, dtype, ops_of(torch.device("cpu")))

    def _uses_gram(self, m: int, n: int, dtype: torch.dtype, ops: Products) -> bool:
        """:meth:`uses_gram` for the device of ``ops``."""
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
        if self.dtype is None and not self.rounds_input:
            dtype = torch.promote_types(dtype, torch.float32)
        elif self.dtype is None and not inner and self.form != "gram":
            dtype = ops.full_dtype(m, n, given)
        if self.dtype is None and dtype == torch.bfloat16 and ops.gram_in_halves:
            small = self.form == "auto" and min(m, n) < ops.symmetric_from  # no halved products
            if not small and isinstance(self.delta, str) and gram.fits_float16(self.polynomials):
                by_gram = self._uses_gram(m, n, torch.float16, ops)
                return (torch.float16 if by_gram else dtype), by_gram
        return dtype, self._uses_gram(m, n, dtype, ops)

    def _polar(self, X: Tensor, numbers: Tensor | None) -> Tensor:
        if self.uses_defaults and suits_small(X, self.polynomials):
            return small_polar(X, self.polynomials)
        ops = ops_of(X.device)
        return self._applied(X, ops, *self._route(X.dtype, X.shape[-2], X.shape[-1], ops))

    def _applied(self, X: Tensor, ops: Products, dtype: torch.dtype, by_gram: bool) -> Tensor:
        """T of wide matrices ``X`` by products in ``dtype``, in the form that ``by_gram`` says."""
        if by_gram and self._is_normalized_on_the_way(X.dtype, dtype, ops):
            return gram.apply_to_normalized(X, self.polynomials)
        X = self._divided_by_delta(X, dtype, ops)
        return (gram.apply_polynomials if by_gram else ops.iterate)(X, self.polynomials)

    def lift(self, B: Tensor) -> Lift:
        """W and X with T(B) = WX by the Gram form, where X may be B itself; not in tiles of a CPU."""
        ops = ops_of(B.device)
        dtype, by_gram = self._route(B.dtype, B.shape[-2], B.shape[-1], ops, inner=True)
        if (
            by_gram
            and not ops.gram_in_halves
            and self._is_normalized_on_the_way(B.dtype, dtype, ops)
        ):
            weighted = gram.weight(B, self.polynomials)
            if weighted is not None:
                W, X, G = weighted
                return Lift(X, W, G=G)
        if B.numel() == 0 or (self.uses_defaults and suits_small(B, self.polynomials)):
            return super().lift(B)
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

    def largest_value(self, norm: Tensor) -> Tensor | None:
        """max p_q over [0, 1], where the singular values of M/δ lie."""
        if not isinstance(self.delta, str) and bool((norm > self.delta).any()):
            return None  # δ may be below ‖M‖_op, outside what the polynomial was made for
        return torch.full_like(norm, coefficients.extremes(self.polynomials)[0])

    def alignment_loss(self, rows: int, norm: Tensor) -> Tensor | None:
        """rows·δ·max x(1 − p_q(x)): no singular value σ loses more than σ(1 − p_q(σ/δ))."""
        delta = norm
        if not isinstance(self.delta, str):
            if bool((norm > self.delta).any()):
                return None
            delta = torch.full_like(norm, self.delta)
        return rows * delta * coefficients.extremes(self.polynomials)[1]

    def flops(self, m: int, n: int) -> int:
        """The paper's count for the plain iteration, whichever form runs."""
        return sum(
            flops.newton_schulz(m, n, 1, 2 * len(p) - 1, products=square_products(p))
            for p in self.polynomials
        )

    def product_flops(self, m: int, n: int) -> int:
        """FLOPs of the matrix products that a call in float32 runs on a CPU, two per multiply-add."""
        ops = ops_of(torch.device("cpu"))
        by_gram = self.uses_gram(m, n)
        return self._products(m, n, torch.float32, ops, by_gram=by_gram)

    def _products(self, m: int, n: int, dtype: torch.dtype, ops: Products, *, by_gram: bool) -> int:
        d0, d1 = min(m, n), max(m, n)
        form, square = (ops.symmetric_flops(d0, k, dtype) for k in (d1, d0))  # XXᵀ, and G²
        squarings = SQUARINGS.get(self.delta, 0)
        extra = form + squarings * 2 * d0**3 if squarings else 0
        lengths = [1] * self.steps
        if by_gram:
            starts = gram.restarts(self.polynomials, gram.rounding(dtype))
            lengths = [end - first for first, end in pairwise([0, *starts, self.steps])]
        powers = sum(map(square_products, self.polynomials))
        small = powers + sum(3 * (length - 1) for length in lengths if length)  # W ← PW, G ← PGP
        return extra + small * square + sum(form + 2 * d0 * d0 * d1 for each in lengths if each)

    def describe(self, m: int, n: int, device: torch.device | None = None) -> str:
        """Steps, coefficients, form, and bfloat16 on a CPU, for the routing table."""
        return self._described(m, n, device, inner=False)

    def describe_as_inner(self, m: int, n: int, device: torch.device | None = None) -> str:
        """:meth:`describe` for an inner map, which stays in float32 on a CPU."""
        return self._described(m, n, device, inner=True)

    def _described(self, m: int, n: int, device: torch.device | None, *, inner: bool) -> str:
        name = self.coefficients if isinstance(self.coefficients, str) else "custom"
        ops = ops_of(device or torch.device("cpu"))
        dtype, by_gram = self._route(torch.float32, m, n, ops, inner=inner)
        form = ", Gram form" if by_gram else ""
        form += " in float16" if by_gram and dtype == torch.float16 else ""
        form += "" if self.rounds_input or self.dtype is not None else ", not below float32"
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

    def _polar(self, X: Tensor, numbers: Tensor | None) -> Tensor:
        return self._sign(X, torch.finfo(torch.float64).eps)

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

    def largest_value(self, norm: Tensor) -> Tensor:
        """Always one."""
        return torch.ones_like(norm)

    def alignment_loss(self, rows: int, norm: Tensor) -> Tensor:
        """Always zero."""
        return torch.zeros_like(norm)

    def flops(self, m: int, n: int) -> int:
        """6d₁d₀² + 20d₀³ for a thin SVD with both factors, and the product U Vᵀ.

        The SVD is counted as the R-SVD of Golub and Van Loan, *Matrix Computations*, 8.6.
        """
        d0, d1 = min(m, n), max(m, n)
        return 6 * d1 * d0**2 + 20 * d0**3 + flops.matmul(d0, d0, d1)
