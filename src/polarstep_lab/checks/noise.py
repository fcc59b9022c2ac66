"""Statistics of stochastic gradient noise at fixed weights.

The paper assumes E‖G^i − ∇f‖_F^α ≤ σ₀^α + σ₁^α‖∇f‖_F^α for the gradient G^i of one example, with
α ∈ (1, 2]. To measure this noise, :func:`mean_gradient` estimates ∇f from some batches, and
:func:`draw_noise` draws further gradients G. With ξ = G − ∇f, it keeps three numbers per draw and
parameter: ‖ξ‖², ⟨ξ, ∇f⟩ and the inner product of ξ with the ξ of the previous draw. No gradient is
stored and the device is read once, at the end, so the memory needed is that of a few gradients.

:meth:`NoiseDraws.summary` reports, for one matrix or for several taken together:

``moments``    (E‖ξ‖_F^p)^{1/p}, the σ of the assumption for α = p.
``tail``       Hill's index of ‖ξ‖_F, together with the index that the same estimator gives for
               Gaussian noise of the same *effective dimension* (tr Σ)²/tr Σ². The reference is
               needed because norms of high-dimensional vectors concentrate and every finite sample
               has a largest value. An estimate close to the reference shows no heavy tail. The
               effective dimension comes from the inner products of successive draws.
``along``      the index of an α-stable law fitted to ⟨ξ, ∇f⟩, the noise in the direction of the
               gradient. It is 2 for a Gaussian and less for any more peaked law, whether or not the
               variance is finite: it describes a shape, not a tail.
``growth``     α from how sums of draws grow with their number. The theorems use α in this sense:
               the noise of B examples shrinks like B^{−(α−1)/α}.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from polarstep.checked_values import is_integer
from polarstep.numerics import in_float64
from polarstep.rng import generator
from polarstep.theory.tail_index import SMALLEST, TailIndex, growth, hill, stable

__all__ = [
    "MeanGradient",
    "NoiseDraws",
    "draw_noise",
    "gaussian_reference",
    "held_still",
    "mean_gradient",
]

MOMENTS = (1.25, 1.5, 1.75, 2.0)
"""Orders p of the moments (E‖ξ‖^p)^{1/p}; the paper's α is in (1, 2]."""
RATIO = 4
"""Sums have 4, 16, 64, … terms, as long as the draws suffice for 8 such sums."""
GAUSSIAN_REPEATS = 40
"""Gaussian samples behind each reference interval."""

Backward = Callable[[int], object]
"""Adds the gradients of batch number i to the parameters', as ``loss(i).backward()`` does."""


@contextmanager
def held_still(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers and training modes of ``model``, and torch's generators, at the end.

    Weights are not saved, since computing gradients does not change them.
    """
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    for p, _ in gradients:
        p.grad = None
    try:
        with torch.random.fork_rng(devices=sorted(devices, key=str)):
            yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for module, training in modes:
            module.training = training


@dataclass(frozen=True)
class MeanGradient:
    """∇f by parameter name, as the mean gradient of ``examples`` examples."""

    values: Mapping[str, Tensor]
    examples: int


@torch.no_grad()
def mean_gradient(
    model: nn.Module, backward: Backward, batches: Sequence[int], size: int, scale: float = 1.0
) -> MeanGradient:
    """The mean of the gradients of ``batches``, of ``size`` examples each.

    ``scale`` turns the gradients of ``backward`` into those of the mean loss: it is 1/size where
    ``backward`` sums over the batch.
    """
    _check_draws(batches, size)
    total: dict[str, Tensor] = {}
    for i in batches:
        for name, gradient in _gradient(model, backward, i).items():
            if name in total:
                total[name].add_(gradient)
            else:
                total[name] = gradient.to(torch.float32, copy=True)
    factor = scale / len(batches)
    return MeanGradient({name: g.mul_(factor) for name, g in total.items()}, len(batches) * size)


@torch.no_grad()
def draw_noise(
    model: nn.Module,
    backward: Backward,
    batches: Sequence[int],
    size: int,
    mean: MeanGradient,
    scale: float = 1.0,
) -> NoiseDraws:
    """The noise of ``batches`` of ``size`` examples each around ``mean``.

    None of these batches may be among the batches behind ``mean``: the correction of norms for the
    error of ``mean`` assumes that the two are independent.
    """
    _check_draws(batches, size)
    names = tuple(mean.values)
    reference = [mean.values[name] for name in names]
    squares: list[Tensor] = []
    along: list[Tensor] = []
    pairs: list[Tensor] = []
    levels = [level for level in _levels(len(batches)) if level > 1]
    sums: dict[int, list[Tensor]] = {level: [] for level in levels}
    running: dict[int, list[Tensor]] = {}
    before: list[Tensor] = []
    for number, i in enumerate(batches, start=1):
        noise = _noise(_gradient(model, backward, i), mean, scale)
        squares.append(_squares(noise))
        along.append(_inner(noise, reference))
        if before:
            pairs.append(_inner(noise, before))
        part = noise
        for level in levels:
            if level not in running:
                running[level] = [x.clone() for x in part]
            else:
                torch._foreach_add_(running[level], part)
            if number % level:
                break
            part = running.pop(level)
            sums[level].append(_squares(part))
        before = noise
    gradient = _squares(reference)
    return NoiseDraws(
        names=names,
        size=size,
        reference=mean.examples,
        gradient=gradient.double().cpu(),
        squares=_table(squares),
        along=_table(along),
        pairs=_table(pairs),
        sums={level: _table(rows) for level, rows in sums.items()},
    )


@dataclass(frozen=True)
class NoiseDraws:
    """Statistics of K draws of noise: a row for each draw, a column for each parameter."""

    names: tuple[str, ...]
    size: int
    """Examples behind each draw."""
    reference: int
    """Examples behind ∇f."""
    gradient: Tensor
    squares: Tensor
    along: Tensor
    pairs: Tensor
    sums: Mapping[int, Tensor]
    """Squared norms of sums of consecutive draws, by the number of draws in a sum."""

    @property
    def count(self) -> int:
        """How many draws there are."""
        return len(self.squares)

    def norms(self, names: Sequence[str], level: int = 1) -> Tensor:
        """‖ξ‖_F of each mean of ``level`` consecutive draws, over all of ``names`` together.

        ∇f is estimated from N examples. Its error makes E‖ξ‖² larger by a factor 1 + b/N for a mean
        over b examples; the norms are divided by the root of this factor.
        """
        squares = self.squares if level == 1 else self.sums[level] / level**2
        excess = 1 + level * self.size / self.reference
        return (squares[:, self._columns(names)].sum(1) / excess).sqrt()

    def dimension(self, names: Sequence[str]) -> float:
        """(tr Σ)²/tr Σ² of the covariance Σ of the noise: n for equal variance in n directions.

        For independent draws E⟨ξ, ξ'⟩² = tr Σ².
        """
        columns = self._columns(names)
        trace = float(self.squares[:, columns].sum(1).mean())
        square = float(self.pairs[:, columns].sum(1).var()) if len(self.pairs) > 1 else math.nan
        return max(1.0, trace**2 / square) if square > 0 else math.nan

    def summary(self, names: Sequence[str]) -> dict[str, Any]:
        """Statistics of ``names`` taken together; the module docstring explains the entries.

        An estimate is left out where there are too few draws for it, or no noise.
        """
        columns = self._columns(names)
        norms = self.norms(names)
        mean_square = float(norms.square().mean())
        # The squared norm of the estimate exceeds ‖∇f‖² by the noise that averaging left in it.
        left = mean_square * self.size / self.reference
        found: dict[str, Any] = {
            "gradient": math.sqrt(max(0.0, float(self.gradient[columns].sum()) - left)),
            "noise": float(norms.mean()),
            "moments": {f"{p:g}": float(norms.pow(p).mean() ** (1 / p)) for p in MOMENTS},
        }
        if not (math.isfinite(mean_square) and bool((norms > 0).all())):
            return found
        dimension = self.dimension(names)
        found["dimension"] = dimension
        largest = norms.topk(min(SMALLEST + 1, self.count)).values
        if self.count > SMALLEST and largest[0] > largest[-1]:
            found["tail"] = _entry(hill(norms))
            if math.isfinite(dimension):
                found["tail"]["gaussian"] = list(gaussian_reference(self.count, dimension))
        along = self.along[:, columns].sum(1)
        if self.count >= 2 * SMALLEST and float(along.abs().median()) > 0:
            found["along"] = _entry(stable(along))
        found["growth"] = [
            {"examples": self.size * level, "noise": float(self.norms(names, level).mean())}
            | _entry(self._growth(names, level))
            for level in self.sums
        ]
        return found

    def _growth(self, names: Sequence[str], level: int) -> TailIndex:
        """α from sums of ``level`` draws against sums of a quarter as many."""
        sums = self.norms(names, level) * level
        parts = self.norms(names, level // RATIO) * (level // RATIO)
        return growth(parts[: RATIO * len(sums)], sums)

    def _columns(self, names: Sequence[str]) -> Tensor:
        unknown = [name for name in names if name not in self.names]
        if isinstance(names, str) or unknown or not names:
            what = f"names={names!r}" if isinstance(names, str) or not names else repr(unknown[0])
            raise ValueError(
                f"{what}: expected a list of parameters whose noise was drawn, some of "
                f"{', '.join(self.names[:6])}{', …' if len(self.names) > 6 else ''}"
            )
        return torch.tensor([self.names.index(name) for name in names], device="cpu")


def gaussian_reference(count: int, dimension: float) -> tuple[float, float, float]:
    """2½%, 50% and 97½% points of the α̂ of :func:`hill` for ``count`` norms of Gaussian noise.

    ‖ξ‖² of a Gaussian is close to a multiple of χ² with as many degrees of freedom as its effective
    dimension (Satterthwaite). The dimension is rounded to within a tenth, which is precise enough
    and lets calls with similar dimensions share a cached result.
    """
    return _gaussian_reference(count, round(math.log(dimension) / 0.2))


@lru_cache(maxsize=256)
def _gaussian_reference(count: int, rounded: int) -> tuple[float, float, float]:
    g = generator("gaussian noise", count, rounded)
    of: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    shape = torch.full((GAUSSIAN_REPEATS, count), math.exp(0.2 * rounded) / 2, **of)
    norms = torch._standard_gamma(shape, generator=g).sqrt()
    found = torch.tensor([hill(row).alpha for row in norms], **of)
    low, middle, high = found.quantile(torch.tensor([0.025, 0.5, 0.975], **of))
    return float(low), float(middle), float(high)


def _check_draws(batches: Sequence[int], size: int) -> None:
    if len(batches) == 0 or not is_integer(size) or size < 1:
        raise ValueError(
            f"{len(batches)} batches of size={size!r}: expected at least one batch, of at least one "
            "example each"
        )


def _entry(found: TailIndex) -> dict[str, Any]:
    return {"alpha": found.alpha, "low": found.low, "high": found.high, "used": found.used}


def _levels(count: int) -> list[int]:
    """1, 4, 16, … terms, as long as ``count`` draws make 8 sums of them."""
    levels = [1]
    while count // (levels[-1] * RATIO) >= 8:
        levels.append(levels[-1] * RATIO)
    return levels


def _gradient(model: nn.Module, backward: Backward, i: int) -> dict[str, Tensor]:
    """The gradients of batch ``i``, by parameter name; valid until the next call."""
    for p in model.parameters():
        p.grad = None
    with torch.enable_grad():
        backward(i)
    found = {
        name: p.grad
        for name, p in model.named_parameters()
        if p.requires_grad and p.grad is not None
    }
    if not found:
        raise ValueError(
            f"backward left no gradient of batch {i} in the model's parameters: expected a function "
            "that adds the gradients of batch i, as lambda i: loss(i).backward(), of this model"
        )
    return found


def _noise(gradients: dict[str, Tensor], mean: MeanGradient, scale: float) -> list[Tensor]:
    """ξ = scale·G − ∇f of every parameter in ``mean``; G is zero where a batch has none."""
    names = tuple(mean.values)
    if not any(name in gradients for name in names):
        raise ValueError(
            f"the model has gradients of {', '.join(list(gradients)[:3])}, …, and mean has those of "
            f"{', '.join(names[:3])}, …: expected the mean_gradient of the same model"
        )
    given = [
        gradients[name].float() if name in gradients else torch.zeros_like(m)
        for name, m in mean.values.items()
    ]
    noise = list(torch._foreach_mul(given, scale))
    torch._foreach_sub_(noise, list(mean.values.values()))
    return noise


def _squares(tensors: list[Tensor]) -> Tensor:
    """‖x‖² of each, in float64, on the device if it has float64."""
    return in_float64(torch.stack(torch._foreach_norm(tensors))).square()


def _inner(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """⟨x, y⟩ of each pair, in float64, on the device if it has float64."""
    return in_float64(torch.stack([product.sum() for product in torch._foreach_mul(a, b)]))


def _table(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows).cpu() if rows else torch.empty(0, 0, dtype=torch.float64, device="cpu")
