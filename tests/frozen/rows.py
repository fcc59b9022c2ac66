"""The table of steps that ``python -m tests.frozen`` compares: every option is written out.

A row is made anew in each tree, so what it has is a function of ``polarstep`` and of no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import polarstep as ps

__all__ = ["Row", "rows"]

Shapes = list[tuple[int, ...]]


@dataclass(frozen=True)
class Row:
    """One optimizer to step. ``make`` returns the options that hold a map or a transform."""

    name: str
    make: Callable[[], dict[str, Any]]
    shapes: Shapes
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    size: float = 1.0  # of the gradients
    steps: int = 5
    layout: str = ""  # "channels_last"; or "rows", "columns", "stack" and "copies" on ranks


def sketched(**options: Any) -> ps.LowRank:
    """A sketch of ℓ = 6, which the shapes below do not turn into full space."""
    few = {"power": 0.0, "always_sketch": True, "inner": ps.NewtonSchulz(3, "quintic")}
    return ps.LowRank(4, 2, **(few | options))


MAPS: dict[str, Callable[[], Any]] = {
    "polar express": lambda: ps.NewtonSchulz(5, "polar-express"),
    "cubic, plain form": lambda: ps.NewtonSchulz(4, "cubic", "spectral", form="plain"),
    "quintic, gram form": lambda: ps.NewtonSchulz(4, "quintic", "operator", form="gram"),
    "number": lambda: ps.NewtonSchulz(4, "quintic", 30.0),
    "exact": lambda: ps.Exact(),
    "gaussian": lambda: sketched(),
    "gaussian, h=½": lambda: sketched(power=0.5, orth="cholesky"),
    "kaczmarz, h=1": lambda: sketched(power=1, sketch=ps.Kaczmarz(), orth="householder"),
    "products": lambda: sketched(power=1, orth="products"),
    "warm": lambda: sketched(sketch=ps.Warm()),
    "warm, h=1": lambda: sketched(sketch=ps.Warm(), power=1),
    "deflated, flat": lambda: ps.Deflated(sketched(sketch=ps.Warm()), ps.NewtonSchulz(1, "flat")),
    "deflated, quintic": lambda: ps.Deflated(sketched(), ps.NewtonSchulz(2, "quintic")),
    "auto": lambda: ps.Auto(),
}
# The parameters of each layout; two have one shape, so that they are one batch.
LAYOUTS: dict[str, tuple[Shapes, dict[str, Any]]] = {
    "wide and tall": ([(12, 20), (20, 12), (12, 20)], {}),
    "stack": ([(3, 12, 20), (12, 20), (0, 12, 20)], {}),
    "conv": ([(12, 2, 3, 3), (12, 2, 3, 3), (12, 18)], {"layout": "conv"}),
    "transposed": ([(20, 24), (20, 24)], {"layout": "transposed", "split_sizes": (12, 12)}),
    "equal parts": ([(24, 20), (24, 20), (24, 16)], {"split_sizes": (12, 12)}),
    "unequal parts": ([(30, 20), (30, 20), (2, 30, 20)], {"split_sizes": (12, 18)}),
    "columns": ([(24, 30), (24, 30)], {"split_sizes": (12, 12), "split_columns": (18, 12)}),
    "repeats": ([(48, 20), (48, 20)], {"split_sizes": (8, 8), "split_repeats": 3}),
}
TRANSFORMS: dict[str, Callable[[], Any]] = {"": lambda: None, "rows": lambda: ps.NormalizedRows()}
SCALES = ("spectral", "none", "rms", "fan-ratio")
PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "bfloat16, wide momentum": (torch.bfloat16, {"momentum_dtype": torch.float32}),
    "compensated": (torch.bfloat16, {"rounding": "compensated"}),
    "float16": (torch.float16, {}),
    "float16, compensated": (torch.float16, {"rounding": "compensated"}),
    "eight bits": (torch.float32, {"momentum_dtype": torch.int8}),
    "float32, narrow momentum": (torch.float32, {"momentum_dtype": torch.bfloat16}),
}


def made(polar: str, transform: str = "") -> Callable[[], dict[str, Any]]:
    return lambda: {"polar": MAPS[polar](), "transform": TRANSFORMS[transform]()}


def alone() -> Iterator[Row]:
    """Steps of one process on a CPU."""
    for i, polar in enumerate(MAPS):
        for j, (layout, (shapes, view)) in enumerate(LAYOUTS.items()):
            k = i + j
            transform = "rows" if (i + j // 2) % 2 else ""
            options = {
                "shape_scale": SCALES[k % 4],
                "nesterov": (k // 4) % 2 == 0,
                "weight_decay": (0.0, 0.1)[(i + j // 4) % 2],
                "nonfinite": ("propagate", "skip")[(i // 2 + j) % 2],
                "lr_factor": (1.0, 0.5)[k % 3 == 0],
                **view,
            }
            last = "channels_last" if layout == "conv" and i % 2 else ""
            name = ", ".join(filter(None, (polar, layout, transform, last)))
            yield Row(name, made(polar, transform), shapes, options, layout=last)
    for i, (precision, (dtype, options)) in enumerate(PRECISIONS.items()):
        for j, polar in enumerate(("polar express", "warm", "deflated, flat", "gaussian, h=½")):
            transform = "rows" if (i + j) % 2 else ""
            more = {
                "weight_decay": 0.1,
                "nesterov": (i + j // 2) % 2 == 0,
                "nonfinite": ("propagate", "skip")[(i // 2 + j) % 2],
                "shape_scale": SCALES[j],
            }
            shapes, view = list(LAYOUTS.values())[(i + 2 * j) % len(LAYOUTS)]
            name = ", ".join(filter(None, (precision, polar, transform)))
            yield Row(name, made(polar, transform), shapes, options | more | view, dtype)
    shapes = LAYOUTS["wide and tall"][0]
    for size in (2.0**-100, 2.0**100):
        for polar in ("polar express", "warm, h=1", "deflated, flat"):
            yield Row(
                f"{polar}, gradients × {size:.0e}", made(polar), shapes, {}, torch.float32, size
            )
    for polar in ("polar express", "warm", "gaussian"):
        options = {"momentum": 1e-4, "nonfinite": "skip"}
        yield Row(f"{polar}, rests", made(polar), LAYOUTS["unequal parts"][0], options)
    yield Row("auto, 768", made("auto"), [(768, 768)], {}, torch.float32, steps=2)


def kernels() -> Iterator[Row]:
    """Steps by Triton's interpreter; rows are multiples of 16 bytes."""
    maps = ("polar express", "gaussian", "warm", "deflated, flat", "auto")
    for i, polar in enumerate(maps):
        for j, (nesterov, decay, skip, transform) in enumerate(
            [(True, 0.1, False, ""), (False, 0.0, True, "rows"), (True, 0.1, True, "")]
        ):
            dtype = (torch.float32, torch.bfloat16)[(i + j) % 2]
            options = {
                "nesterov": nesterov,
                "weight_decay": decay,
                "nonfinite": "skip" if skip else "propagate",
                "shape_scale": SCALES[(i + j) % 4],
            }
            shapes: Shapes = [(16, 32), (32, 16), (16, 32)] if j != 1 else [(2, 16, 32), (16, 32)]
            if j == 2:
                shapes, options = [(32, 32), (32, 32)], options | {"split_sizes": (16, 16)}
            name = ", ".join(filter(None, (polar, str(dtype), transform, f"option set {j}")))
            yield Row(name, made(polar, transform), shapes, options, dtype, steps=4)


def ranks() -> Iterator[Row]:
    """Steps of two ranks; ``layout`` says how they share the parameters."""
    ways = {
        "rows": [(12, 20), (20, 13), (13, 20), (12, 20)],
        "columns": [(12, 20), (20, 12), (12, 20)],
        "stack": [(3, 12, 20), (4, 12, 20)],
        "copies": [(12, 20), (20, 12), (12, 20)],
    }
    plans = {
        "rows": ("auto", "owner", "gather"),
        "columns": ("owner",),
        "stack": ("auto", "gather"),
        "copies": ("auto", "local"),
    }
    for i, polar in enumerate(MAPS):
        if polar in ("number", "auto"):
            continue
        for j, (way, plan) in enumerate(
            [(way, plan) for way, its in plans.items() for plan in its]
        ):
            transform = "rows" if (i + j) % 3 == 0 else ""
            options = {
                "plan": plan,
                "shape_scale": SCALES[(i + j) % 4],
                "nesterov": (i + j // 2) % 2 == 0,
                "weight_decay": 0.1,
                "nonfinite": ("propagate", "skip")[(i // 2 + j) % 2],
            }
            name = ", ".join(filter(None, (way, plan, polar, transform)))
            yield Row(name, made(polar, transform), ways[way], options, layout=way, steps=4)
    for way in ("rows", "stack", "copies"):
        for precision in ("compensated", "eight bits", "float16"):
            dtype, options = PRECISIONS[precision]
            shapes: Shapes = [(8, 128), (10, 128)] if way != "stack" else [(3, 8, 128)]
            yield Row(f"{way}, {precision}", made("warm"), shapes, options, dtype, layout=way)


def rows(selection: str) -> list[Row]:
    """The rows of "alone", "kernels" or "ranks"."""
    return list({"alone": alone, "kernels": kernels, "ranks": ranks}[selection]())
