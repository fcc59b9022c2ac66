"""How long a step takes, estimated from the shape: products, bytes and launches.

A step is a sequence of operations, and an operation takes ::

    time = max(FLOPs / rate, bytes moved / bandwidth) + time of a launch

The estimate serves to choose between maps (:class:`polarstep.Auto`). tests/polar/test_cost.py compares
it with the whole steps of ``results/step-cost``, from which the rates are taken. It leaves out that a
GPU runs small buckets side by side, and the time of Python.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from polarstep import kernels
from polarstep.polar import gram
from polarstep.polar.base import PolarMap
from polarstep.polar.coefficients import Polynomial, resolve
from polarstep.polar.deflated import Deflated
from polarstep.polar.finders import Finder, Fresh, Warm
from polarstep.polar.low_rank import LowRank
from polarstep.polar.newton_schulz import NewtonSchulz
from polarstep.polar.orthonormal import whitened_polynomials
from polarstep.products.cpu import FULL_TILES_FROM, has_tiles
from polarstep.products.squarings import square_products
from polarstep.products.start_vectors import SIGNS, norm_products

__all__ = ["DEVICES", "Device", "adamw_seconds", "figures_of", "seconds"]

# Matrices of fewer rows stay in the caches, and their symmetric products are computed whole.
NARROW = 512


@dataclass(frozen=True)
class Cost:
    """Seconds that the work on a matrix takes, and the number of operations."""

    seconds: float = 0
    launches: float = 0  # which all matrices of a bucket share on a GPU

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.launches + other.launches)

    def __rmul__(self, times: float) -> Cost:
        return Cost(times * self.seconds, times * self.launches)


@dataclass(frozen=True)
class Device:
    """What the estimate needs to know of a device."""

    rate: float
    """FLOP/s of large products, in the precision of a step."""
    narrow: float
    """FLOP/s of products of an ℓ×n matrix with its transpose or with an ℓ×ℓ matrix, for ℓ < 512."""
    bandwidth: float
    """Bytes/s of a pass over parameters and momentum."""
    adamw: float
    """Bytes/s of torch's fused AdamW."""
    launch: float
    """Seconds that an operation takes without work: once for a bucket on a GPU, else per matrix."""
    itemsize: int
    """Bytes of an entry of M during a step: 2 in bfloat16."""
    halved: float
    """What a symmetric product of 512 rows and more costs, as a share of the full product."""
    half_rate: float = 0.0
    """Rows at which large products reach half of ``rate``: m rows reach m/(m + half_rate) of it."""
    tile: int = 1
    """Rows of large products are computed in multiples of this number."""
    fewer_bits: float = 1.0
    """The rate of products of half as many bits over that of others, which a single step on the rest may
    have (``float8=``): 8 over 16 bits on a GPU, 16 over 32 on a CPU. One if the device has none."""
    full_rate: float = 0.0
    """FLOP/s of large products in full space, where these have fewer bits than others, as on CPUs with
    tiles; 0 if they have as many. Symmetric products are computed whole then."""
    full_narrow: float = 0.0
    """The same for matrices of 192 to 511 rows."""
    launches_shared: bool = True
    """Whether an operation on a bucket is one launch, whatever the number of matrices."""

    @property
    def has_tensor_cores(self) -> bool:
        """Whether products are in 16 bits, with rows padded to a multiple of 16."""
        return self.itemsize == 2

    def for_rows(self, m: int) -> tuple[int, Device]:
        """The rows that a large product with m rows computes, and the device at their rate."""
        rows = -(-m // self.tile) * self.tile
        return rows, replace(self, rate=self.rate * rows / (rows + self.half_rate))

    def product(self, flops: float, entries: float) -> Cost:
        """One large product that reads and writes ``entries`` entries of M's precision."""
        return Cost(max(flops / self.rate, self.itemsize * entries / self.bandwidth), 1)

    def moved(self, nbytes: float) -> Cost:
        """One pass over memory."""
        return Cost(nbytes / self.bandwidth, 1)


def _gpu(teraflops: float, terabytes: float, fewer_bits: float = 1.0) -> Device:
    """A GPU with tensor cores from its data sheet: dense bfloat16 TFLOP/s and TB/s.

    Every GPU is taken to reach the shares of its data sheet that an H200 (989 TFLOP/s, 4.8 TB/s)
    reaches. The H200's bandwidths are from results/step-cost/h200.json: 4.1 TB/s in the momentum phase,
    3.45 with AdamW. Its products in eight bits had 1.1 to 1.4 PFLOP/s, about 1.9 times as many as in 16.
    The other figures were fitted to whole steps from 384 to 4096 rows, those of h200-between.json and of
    a run that h200-maps.json has replaced: the estimates were 8% off in the root mean square. A launch
    is short because the buckets of these steps run side by side.
    """
    return Device(
        rate=0.66e12 * teraflops,
        narrow=0.25e12 * teraflops,
        bandwidth=0.85e12 * terabytes,
        adamw=0.72e12 * terabytes,
        launch=1.5e-6,
        itemsize=2,
        halved=0.5,
        half_rate=256,
        tile=128,
        fewer_bits=fewer_bits,
    )


# Two cores of a server, results/step-cost/cpu-no-tiles.json: full-space steps, inner iterations,
# momentum, AdamW. More cores have more of each. With this time of an operation Deflated and full space
# break even at 128 to 192 rows, as measured.
CPU = Device(180e9, 120e9, 25e9, 48e9, launch=2e-5, itemsize=4, halved=0.625, launches_shared=False)
# By a part of the name that torch gives a GPU, or by the type of device. Data sheets: NVIDIA, SXM.
DEVICES: dict[str, Device] = {
    "B200": _gpu(2250, 8.0, 1.9),
    "H200": _gpu(989, 4.8, 1.9),
    "H100": _gpu(989, 3.35, 1.9),
    "A100": _gpu(312, 2.0),
    # GPUs without a row here are taken to be an H100 without products in eight bits. Launches are a
    # larger part of the time on an H100 than on slower GPUs: a sketch that pays there pays on them, too.
    "cuda": _gpu(989, 3.35),
    "cpu": CPU,
    # results/step-cost/cpu-tiles.json. Tiles multiply three to eight times as fast, but compute
    # symmetric products whole, and matrices are rounded before and after.
    "cpu with tiles": replace(CPU, fewer_bits=2.25, full_rate=0.9e12, full_narrow=0.6e12),
    # Devices of another kind: torch's own operations, in float32, launched one by one.
    "other": Device(10e12, 4e12, 0.3e12, 0.3e12, launch=1e-5, itemsize=4, halved=1.0),
}


def figures_of(device: torch.device) -> Device:
    """The row of :data:`DEVICES` for a device: by name, else by type.

    A GPU on which our kernels do not run counts as a device of another kind.
    """
    if device.type == "cuda" and torch.cuda.is_available():
        if not kernels.available(device):
            return DEVICES["other"]
        name = torch.cuda.get_device_name(device)
        for part, figures in DEVICES.items():
            if part in name:
                return figures
    name = "cpu with tiles" if device.type == "cpu" and has_tiles() else device.type
    return DEVICES.get(name, DEVICES["other"])


def seconds(polar: PolarMap, m: int, n: int, on: Device, count: int = 1) -> float:
    """The estimated time of a whole step on ``count`` matrices m×n: momentum, map and update.

    ``polar`` is a map that runs on the shape as it is (:meth:`polarstep.PolarMap.on`).
    """
    momentum = on.moved((12 + on.itemsize) * m * n)  # reads G and C, writes C and M
    cost = momentum + _map(polar, min(m, n), max(m, n), on)
    launches = cost.launches if on.launches_shared else count * cost.launches
    return count * cost.seconds + launches * on.launch


def adamw_seconds(m: int, n: int, on: Device, count: int = 1) -> float:
    """The estimated time of fused AdamW: reads G, reads and writes X and both moments, in float32."""
    return count * 28 * m * n / on.adamw + on.launch


def _map(polar: PolarMap, m: int, n: int, on: Device) -> Cost:
    """The map on a wide matrix, and the update, which reads and writes X and reads T or its factors."""
    update = on.moved((8 + on.itemsize) * m * n)
    if isinstance(polar, NewtonSchulz):
        normalized = 2 * on.moved(1.5 * on.itemsize * m * n)
        return normalized + _in_full_space(polar, m, n, on) + update
    if isinstance(polar, LowRank):
        return _sketched(polar, m, n, on) + _lift(polar, m, n, on, also_read=0)
    if isinstance(polar, Deflated):
        head = _sketched(polar.head, m, n, on)
        if polar.rest is None and on.has_tensor_cores:
            return head + _scaled_by_kernels(polar, m, n, on)
        rest = _scaled(m, n, on) if polar.rest is None else _steps(polar, polar.rest, m, n, on)
        return head + _flattened(polar, m, n, on) + rest + update
    raise TypeError(
        f"the cost of a {type(polar).__name__} map is not known: expected NewtonSchulz, LowRank or "
        "Deflated"
    )


def _in_full_space(polar: NewtonSchulz, m: int, n: int, on: Device) -> Cost:
    """The steps of a full-space map, which have fewer bits than other products where that is faster."""
    rounds = polar.rounds_input or polar.dtype == torch.bfloat16
    if on.full_rate and m >= FULL_TILES_FROM and rounds:
        small = on.itemsize // 2
        on = replace(on, rate=on.full_rate, narrow=on.full_narrow, itemsize=small, halved=1.0)
        powers = sum(map(square_products, polar.polynomials))
        return _products(polar.steps, powers, m, n, on)
    return _iteration(polar.polynomials, m, n, on)


def _iteration(polynomials: tuple[Polynomial, ...], m: int, n: int, on: Device) -> Cost:
    """Polynomial steps on a wide matrix, in the cheaper of plain and Gram form.

    A step of the plain form has XXᵀ, squarings of it, and the product with X. The Gram form has XXᵀ
    and the product with X once for several steps, and three m×m products for each step after.
    """
    powers = sum(map(square_products, polynomials))
    plain = _products(len(polynomials), powers, m, n, on)
    dtype = torch.float16 if on.has_tensor_cores else torch.float32
    if dtype == torch.float16 and not gram.fits_float16(polynomials):
        return plain
    starts = gram.restarts(polynomials, gram.rounding(dtype))
    lengths = [
        end - first for first, end in pairwise([0, *starts, len(polynomials)]) if end > first
    ]
    by_gram = _products(len(lengths), powers + 3 * sum(k - 1 for k in lengths), m, n, on)
    return min(plain, by_gram, key=lambda cost: cost.seconds)


def _products(forms: int, squares: int, m: int, n: int, on: Device) -> Cost:
    """``forms`` pairs of XXᵀ and a product with X, and ``squares`` symmetric m×m products.

    Fewer rows than 512 have a lower rate, but never take longer than 512 rows would.
    """
    if m < NARROW:
        flops = forms * 4 * m * m * n + squares * 2 * m**3
        narrow = Cost(flops / on.narrow, 2 * forms + squares)
        return min(narrow, _products(forms, squares, NARROW, n, on), key=lambda cost: cost.seconds)
    rows, at = on.for_rows(m)
    form = at.product(2 * on.halved * rows * rows * n, m * n)
    square = at.product(2 * on.halved * rows**3, 2 * m * m)
    apply = at.product(2 * rows * rows * n, 2 * m * n)
    return forms * (form + apply) + squares * square


def _padded(polar: LowRank, on: Device) -> int:
    """ℓ, with the zero columns that tensor cores need."""
    return polar.width + -polar.width % 16 if on.has_tensor_cores else polar.width


def _sketched(polar: LowRank, m: int, n: int, on: Device) -> Cost:
    """The basis, B = QᵀM and the inner map."""
    width = _padded(polar, on)
    inner = polar.inner.polynomials if isinstance(polar.inner, NewtonSchulz) else ()
    projected = on.product(2 * m * n * width, m * n)
    return _basis(polar.finder, m, n, width, on) + projected + _iteration(inner, width, n, on)


def _lift(polar: LowRank, m: int, n: int, on: Device, *, also_read: int) -> Cost:
    """An update that multiplies QZ out: reads and writes X, and reads ``also_read`` matrices like M."""
    entries = (8 / on.itemsize + also_read) * m * n
    return on.product(2 * m * n * _padded(polar, on), entries)


def _basis(finder: Finder, m: int, n: int, width: int, on: Device) -> Cost:
    """Products of M or Mᵀ with ℓ columns, and an orthonormalization after each."""
    product = on.product(2 * m * n * width, m * n)
    if isinstance(finder, Warm):
        return product + _orthonormalized(whitened_polynomials(), m, width, on)
    assert isinstance(finder, Fresh)
    rough = _orthonormalized(resolve("polar-express", 4), m, width, on)
    last = _orthonormalized(resolve("polar-express", 6), m, width, on)
    return 2 * finder.power * (product + rough) + product + last


def _orthonormalized(polynomials: tuple[Polynomial, ...], m: int, width: int, on: Device) -> Cost:
    """The polynomials on a GPU, elsewhere two passes of Cholesky-QR: a Gram matrix and a division."""
    if on.has_tensor_cores:
        return _iteration(polynomials, width, m, on)
    return Cost(2 * (3 * width * width * m + width**3) / on.narrow, 12)


def _flattened(polar: Deflated, m: int, n: int, on: Device) -> Cost:
    """‖M‖_F and X₀ = M/δ + Q(Z − B/δ)."""
    width = _padded(polar.head, on)
    small = Cost(4 * width * width * n / on.narrow, 4)
    return on.moved(on.itemsize * m * n) + small + on.product(2 * m * n * width, 2 * m * n)


def _scaled(m: int, n: int, on: Device) -> Cost:
    """An estimate of ‖R‖_op from two products with 16 columns."""
    return 2 * on.product(2 * m * n * SIGNS, m * n) + Cost(0, 16)


def _scaled_by_kernels(polar: Deflated, m: int, n: int, on: Device) -> Cost:
    """D and Z' − B/δ in four launches, δ in five that read M twice, and an update that adds M/δ to QZ.

    ‖M‖_F comes with the momentum.
    """
    width = _padded(polar.head, on)
    small = Cost(4 * width * width * n / on.narrow, 4)
    norm = 2 * on.product(2 * m * n * SIGNS, m * n) + Cost(0, 3)
    return small + norm + _lift(polar.head, m, n, on, also_read=1)


def _steps(polar: Deflated, rest: NewtonSchulz, m: int, n: int, on: Device) -> Cost:
    """The norm of XXᵀ from products with 16 columns, and the steps; a single step in fewer bits."""
    if polar.float8 and on.fewer_bits > 1 and rest.steps == 1 and m >= NARROW:
        on = replace(on, rate=on.fewer_bits * on.rate, itemsize=on.itemsize // 2)
        steps = _products(1, square_products(rest.polynomials[0]), m, n, on)
    else:
        steps = _iteration(rest.polynomials, m, n, on)
    return norm_products(m) * on.product(2 * m * m * SIGNS, m * m) + steps
