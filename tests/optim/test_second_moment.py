"""Transforms and momentum rules, each one class: as written, in low precision, saved and skipped."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.own_parts import RULES, PerEntry, SecondMoment
from tests.spectra import gaussian
from torch import Tensor
from torch.nn import Parameter

import polarstep as ps
from polarstep.state import ENTRIES

POLAR = ps.NewtonSchulz(3, "quintic")
STEPS = 4


def stepped(p: Parameter, optimizer: ps.Muon, steps: range, bad: int | None = None) -> None:
    for k in steps:
        p.grad = gaussian(*p.shape, seed=k).to(p.dtype)
        if k == bad:
            p.grad[0, 0] = torch.nan
        optimizer.step()


def kept(p: Parameter, optimizer: ps.Muon) -> Tensor:
    """What the rule keeps of ``p`` beside the momentum."""
    (found,) = (X for key, X in optimizer.state[p].items() if key not in ENTRIES)
    return found


def of_T(v: Tensor, G: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
    """The update and the second moment after a step."""
    T = POLAR(M)
    v = 0.9 * v + 0.1 * T.square()
    return T / (v.sqrt() + 1e-8), v


def of_G(v: Tensor, G: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
    v = 0.9 * v + 0.1 * G.square()
    return POLAR(M / v.sqrt()), v


@pytest.mark.parametrize(
    ("rule", "update"),
    [({"transform": SecondMoment()}, of_T), ({"momentum_rule": PerEntry()}, of_G)],
    ids=["of T", "of G"],
)
@pytest.mark.parametrize("shape", [(8, 12), (12, 8)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_it_steps_as_written(rule: dict[str, Any], update, shape, nesterov: bool) -> None:
    p = Parameter(torch.zeros(shape, dtype=torch.float64))
    options = {"lr": 0.1, "momentum": 0.5, "shape_scale": "none", "weight_decay": 0.2}
    optimizer = ps.Muon([p], polar=POLAR, nesterov=nesterov, **rule, **options)
    stepped(p, optimizer, range(STEPS))
    X, C, v = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
    for k in range(STEPS):
        G = gaussian(*shape, seed=k)
        C = 0.5 * C + G
        U, v = update(v, G, G + 0.5 * C if nesterov else C)
        X = (1 - 0.1 * 0.2) * X - 0.1 * U
    torch.testing.assert_close(p.detach(), X)
    torch.testing.assert_close(kept(p, optimizer).view(shape), v)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float64, {}),
        (torch.bfloat16, {"rounding": "compensated"}),
        (torch.float16, {}),
        (torch.float32, {"momentum_dtype": torch.int8}),
    ],
    ids=str,
)
def test_a_run_goes_on_from_a_file_bit_for_bit_and_skips_bad_gradients(
    rule: dict[str, Any], dtype, options
) -> None:
    ends = []
    for saved in (False, True):
        p = Parameter(torch.zeros(8, 128, dtype=dtype))
        make = lambda p: ps.Muon([p], polar=POLAR, nonfinite="skip", **rule, **options)  # noqa: E731
        optimizer = make(p)
        stepped(p, optimizer, range(1))
        before = kept(p, optimizer).clone()
        stepped(p, optimizer, range(1, 2), bad=1)
        assert torch.equal(kept(p, optimizer), before)
        if saved:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer = make(p)
            optimizer.load_state_dict(torch.load(file))
        stepped(p, optimizer, range(2, STEPS))
        v = kept(p, optimizer)
        assert v.dtype == torch.promote_types(dtype, torch.float32)
        assert not torch.equal(v, before)
        assert bool(p.isfinite().all())
        ends.append((p.detach(), v))
    assert all(map(torch.equal, *ends))


def test_a_momentum_rule_for_some_groups_and_a_resized_parameter() -> None:
    p, q = (Parameter(torch.zeros(8, 12)) for _ in range(2))
    optimizer = ps.Muon([{"params": [p], "momentum_rule": PerEntry()}, {"params": [q]}])
    for _ in range(2):
        p.grad = q.grad = gaussian(8, 12).float()
        optimizer.step()
    assert "momentum.square" in optimizer.state[p]
    assert "momentum.square" not in optimizer.state[q]
    p.data, p.grad = torch.zeros(9, 12), None
    optimizer.state[p]["momentum_buffer"] = torch.zeros(9, 12)
    with pytest.raises(ValueError, match=r"momentum.square of parameter 0 is \(8, 12\)"):
        optimizer.step()


def test_what_is_no_momentum_rule_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"momentum_rule=0\.9: expected a rule.*β is the option mom"
    ):
        ps.Muon([Parameter(torch.zeros(2, 2))], momentum_rule=0.9)


@pytest.mark.parametrize(
    ("made", "found"), [(lambda G: None, "a NoneType"), (lambda G: G[:1], r"\(1, 2\)")]
)
def test_what_a_momentum_rule_may_not_return(made, found: str) -> None:
    @dataclass(frozen=True)
    class Slip(ps.Momentum):
        def step(self, group, G, C, kept, finite=None):
            return made(G)

    W = Parameter(torch.zeros(2, 2))
    W.grad = torch.ones(2, 2)
    with pytest.raises(TypeError, match=rf"Slip\.step returned {found}: expected M.*\(2, 2\)"):
        ps.Muon([W], momentum_rule=Slip()).step()
    assert not W.any()


def test_a_string_as_entries_is_refused() -> None:
    with pytest.raises(TypeError, match=r"has entries='square': .*as \('square',\)"):
        type("Slip", (ps.Momentum,), {"entries": "square"})
