"""Checkpoints of other optimizers go on with the same trajectory."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.routing.sample_models import SmallGPT
from tests.spectra import gaussian
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import Parameter

import polarstep as ps

SHAPES = [(12, 8), (8, 12), (6, 6)]
POLAR = ps.NewtonSchulz(5, "jordan")
JORDAN = (3.4445, -4.775, 2.0315)
PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"


@contextmanager
def silent() -> Iterator[None]:
    """No warning is given: nothing was lost."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def fresh() -> list[Parameter]:
    return [Parameter(gaussian(*shape, seed=7).float()) for shape in SHAPES]


def run(optimizer: torch.optim.Optimizer, params: list[Any], steps: range) -> list[Tensor]:
    """Steps whose gradients depend on the parameters, so that an error would grow."""
    for k in steps:
        for i, p in enumerate(params):
            noise = gaussian(*p.shape, seed=50 * k + i).to(p.dtype)
            p.grad = p.detach() + noise
        optimizer.step()
    return [p.detach().clone() for p in params]


# --- the real torch.optim.Muon


def in_our_precision(M: Tensor, coefficients: Any, steps: int, eps: float) -> Tensor:
    """torch's map runs in bfloat16 wherever it runs."""
    return ps.NewtonSchulz(steps, (tuple(coefficients),))(M)


TORCHS = [
    {},
    {"nesterov": False, "momentum": 0.8},
    {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
    {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5)},
]


@pytest.mark.parametrize("theirs", TORCHS, ids=str)
@pytest.mark.parametrize("same_map", [True, False], ids=["float32", "bfloat16"])
def test_torchs_muon_goes_on(theirs, same_map, monkeypatch):
    """Five steps of theirs and five of ours are ten of theirs: exactly, if they had our precision."""
    if same_map:
        monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", in_our_precision)
    params = fresh()
    optimizer = torch.optim.Muon(params, lr=0.05, **theirs)
    run(optimizer, params, range(5))
    saved, middle = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    expected = run(optimizer, params, range(5, 10))

    again = [Parameter(p) for p in middle]
    mine = ps.Muon(again, **ps.convert.options(saved))
    mine.load_state_dict(ps.convert.state_dict(saved, mine))
    found = run(mine, again, range(5, 10))
    tolerance = 1e-5 if same_map else 0.02
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()

    # The average must have become a sum: taken as it is, it leads elsewhere.
    wrong = [Parameter(p) for p in middle]
    naive = ps.Muon(wrong, **ps.convert.options(saved))
    content = ps.convert.state_dict(saved, naive, source="keller-2024")
    naive.load_state_dict(content)
    missed = run(naive, wrong, range(5, 10))
    gap = max((a - b).norm() / b.norm() for a, b in zip(missed, expected, strict=True))
    assert gap > 2 * tolerance


def rows_of_a_new_run() -> list[tuple[str | None, str]]:
    """Values of torch's ``adjust_lr_fn`` in the table of the page, with our ``shape_scale``."""
    table = PAGE.read_text().partition("## A new run")[2].partition("\n- ")[0]
    rows: list[tuple[str | None, str]] = []
    for theirs, ours in re.findall(
        r"^\| `torch.optim.Muon`, (.*?) \| (.*?) \|", table, re.MULTILINE
    ):
        (scale,) = re.findall(r'shape_scale="([\w-]+)"', ours)
        rows += [(name, scale) for name in re.findall(r'adjust_lr_fn="(\w+)"', theirs)]
        rows += [(None, scale)] * ("or none" in theirs)
    return rows


@pytest.mark.parametrize(("theirs", "ours"), rows_of_a_new_run(), ids=str)
@pytest.mark.parametrize("same_map", [True, False], ids=["float32", "bfloat16"])
def test_a_new_run_steps_as_torchs_muon_and_adamw(theirs, ours, same_map, monkeypatch):
    """The page's call from the first step on, with the iteration of torch."""
    if same_map:
        monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", in_our_precision)
    torch.manual_seed(0)
    sizes = [(32, 64), (64, 64), (64, 48), (48, 8)]
    model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
    twin = copy.deepcopy(model)
    hidden = [layer.weight for layer in list(twin)[:3]]
    rest = [p for p in twin.parameters() if not any(p is q for q in hidden)]
    rate = {"lr": 0.02} if ours != "rms" else {"lr": 2e-3}
    options: dict[str, Any] = {} if theirs is None else {"adjust_lr_fn": theirs}
    pair = [
        torch.optim.Muon(hidden, **rate, weight_decay=0.1, **options),
        torch.optim.AdamW(rest, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    mine = ps.muon_for(
        model,
        **rate,
        weight_decay=0.1,
        shape_scale=ours,
        polar=POLAR,
        transform=None,
        others=ps.AdamW(lr=3e-4),
    )
    for k in range(5):
        for i, (p, q) in enumerate(zip(model.parameters(), twin.parameters(), strict=True)):
            p.grad = q.grad = gaussian(*p.shape, seed=50 * k + i).float()
        for optimizer in (mine, *pair):
            optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p - q).norm() <= (1e-5 if same_map else 0.02) * q.norm()


def test_torchs_muon_and_adamw_side_by_side():
    """Two optimizers of theirs become one of ours, for a whole model."""

    def loss(model: SmallGPT, step: int) -> Tensor:
        tokens = torch.randint(50, (4, 8), generator=torch.Generator().manual_seed(step))
        return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    def train(model: SmallGPT, optimizers: list[Any], steps: range) -> list[Tensor]:
        for step in steps:
            model.zero_grad()
            loss(model, step).backward()
            for optimizer in optimizers:
                optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    torch.manual_seed(0)
    model = SmallGPT("untied")
    hidden = [
        p for name, p in model.named_parameters() if name.startswith("blocks") and p.ndim == 2
    ]
    rest = [p for p in model.parameters() if not any(p is q for q in hidden)]
    pair = [
        torch.optim.Muon(hidden, lr=0.02, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    train(model, pair, range(5))
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in pair]
    middle = copy.deepcopy(model.state_dict())
    expected = train(model, pair, range(5, 10))
    model.load_state_dict(middle)
    ours = ps.muon_for(
        model,
        **ps.convert.options(saved[0]),
        others=ps.AdamW(lr=1e-3, betas=(0.9, 0.95)),
        splits={"*.qkv.weight": 1},
    )
    with pytest.raises(ValueError, match="no names of parameters, and muon_for has put them"):
        ps.convert.state_dict(saved, ours)
    ours.load_state_dict(ps.convert.state_dict(saved, ours, params=[*hidden, *rest]))
    found = train(model, [ours], range(5, 10))
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 0.02 * b.norm() + 1e-6


# --- the others, by the recurrences that their code has


def newton_schulz(M: Tensor) -> Tensor:
    return POLAR(M)


class Keller(torch.optim.Optimizer):
    """The recurrence and the names of KellerJordan/Muon."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                B = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                B.lerp_(p.grad, 1 - group["momentum"])
                T = newton_schulz(p.grad.lerp(B, group["momentum"]).flatten(1))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                scale = max(1, p.shape[-2] / p.shape[-1]) ** 0.5  # for a filter: of kh and kw
                p.add_(T.view_as(p), alpha=-group["lr"] * scale)


class Summing(torch.optim.Optimizer):
    """A sum for momentum, with the names and the scale given."""

    def __init__(self, params: Any, defaults: Any, scale: Callable[..., float], names: Any) -> None:
        self.scale, self.names = scale, names
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        buffer, beta, decay = self.names
        for group in self.param_groups:
            for p in group["params"]:
                C = self.state[p].setdefault(buffer, torch.zeros_like(p))
                C.mul_(group[beta]).add_(p.grad)
                M = p.grad.add(C, alpha=group[beta]) if group["nesterov"] else C
                p.mul_(1 - group["lr"] * group[decay])
                p.add_(newton_schulz(M), alpha=-group["lr"] * self.scale(*p.shape))
            if "step" in group:
                group["step"] += 1


def moonlight(params: Any) -> Summing:
    defaults = {"lr": 0.02, "wd": 0.1, "momentum": 0.9, "nesterov": True, "ns_steps": 5}
    defaults |= {"adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8}
    names = ("momentum_buffer", "momentum", "wd")
    return Summing(params, defaults, lambda m, n: 0.2 * math.sqrt(max(m, n)), names)


def dion(params: Any) -> Summing:
    defaults = {"lr": 0.02, "mu": 0.9, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1}
    defaults |= {"cautious_wd": False, "algorithm": "muon", "step": 0, "epsilon": 1e-8}
    defaults |= {"nesterov": False, "flatten": False, "adjust_lr": "spectral_norm"}
    names = ("momentum", "mu", "weight_decay")
    return Summing(params, defaults, lambda m, n: math.sqrt(m / n), names)


@pytest.mark.parametrize("make", [Keller, moonlight, dion])
def test_the_recurrences_of_others_go_on(make):
    params = fresh()
    optimizer = make(params)
    run(optimizer, params, range(5))
    saved, middle = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    expected = run(optimizer, params, range(5, 10))
    again = [Parameter(p) for p in middle]
    mine = ps.Muon(again, **(ps.convert.options(saved) | {"polar": POLAR}))
    mine.load_state_dict(ps.convert.state_dict(saved, mine))
    for a, b in zip(run(mine, again, range(5, 10)), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert mine.param_groups[0]["step"] == (10 if make is dion else 5)


def test_moments_of_their_adamw():
    W, bias = Parameter(gaussian(4, 3).float()), Parameter(torch.zeros(4))
    m, v = torch.full((4,), 0.1), torch.full((4,), 0.2)
    C = gaussian(4, 3, seed=1).float()
    keller = {
        "state": {0: {"exp_avg": m, "exp_avg_sq": v, "step": 7}, 1: {"momentum_buffer": C}},
        "param_groups": [
            {"use_muon": False, "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0,
             "params": [0]},
            {"use_muon": True, "lr": 0.02, "momentum": 0.9, "weight_decay": 0, "params": [1]},
        ],
    }  # fmt: skip
    moonlights = {
        "state": {
            0: {"use_muon": False, "moment1": m, "moment2": v, "step": 7},
            1: {"use_muon": True, "momentum_buffer": C},
        },
        "param_groups": [moonlight([W]).state_dict()["param_groups"][0] | {"params": [0, 1]}],
    }
    dions = {
        "state": {
            0: {"momentum": m, "variance": v, "step_dev": torch.tensor(7.0)},
            1: {"momentum": C},
        },
        "param_groups": [
            dion([W]).state_dict()["param_groups"][0]
            | {"algorithm": name, "params": [i], "step": 7}
            for i, name in enumerate(("adamw", "muon"))
        ],
    }
    for theirs, share in ((keller, 0.1), (moonlights, 1), (dions, 1)):
        optimizer = ps.Muon([{"params": [W]}, {"params": [bias], "algorithm": "adamw"}])
        optimizer.load_state_dict(ps.convert.state_dict(theirs, optimizer, params=[bias, W]))
        state = optimizer.state[bias]
        for key, value in (("exp_avg", m), ("exp_avg_sq", v), ("step", torch.tensor(7.0))):
            assert torch.equal(state[key], value)
        torch.testing.assert_close(optimizer.state[W]["momentum_buffer"], C / share)


def test_the_usual_coefficients_are_known_by_name():
    W = Parameter(gaussian(4, 3).float())
    usual = ps.convert.options(torch.optim.Muon([W]).state_dict())
    assert usual["polar"] == POLAR
    others = torch.optim.Muon([W], ns_coefficients=(3.0, -3.2, 1.2)).state_dict()
    assert ps.convert.options(others)["polar"] == ps.NewtonSchulz(5, ((3.0, -3.2, 1.2),))


def test_groups_with_other_options_are_refused():
    one, two = (Parameter(gaussian(4, 3, seed=seed).float()) for seed in (1, 2))
    alike = torch.optim.Muon([{"params": [one]}, {"params": [two]}], lr=0.1)
    assert ps.convert.options(alike.state_dict())["lr"] == 0.1
    other = torch.optim.Muon([{"params": [one]}, {"params": [two], "lr": 0.2}], lr=0.1)
    with pytest.raises(ValueError, match=r"lr=0.1 and 0.2: expected the same for all"):
        ps.convert.options(other.state_dict())


def test_a_parameter_that_had_no_gradient_has_no_state():
    params = fresh()
    theirs = torch.optim.Muon(params)
    params[0].grad = torch.ones_like(params[0])
    theirs.step()
    optimizer = ps.Muon(params)
    with silent():
        content = ps.convert.state_dict(theirs.state_dict(), optimizer)
    assert list(content["state"]) == [0]


def test_moments_before_the_first_step_are_counted_from_zero():
    bias = Parameter(torch.zeros(4))
    group = torch.optim.AdamW([bias]).state_dict()["param_groups"][0]
    for counter in ({"step": torch.tensor(0.0)}, {}):
        state = {"exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)} | counter
        theirs = {"state": {0: state}, "param_groups": [group]}
        mine = Parameter(bias.detach().clone())
        optimizer = ps.Muon([{"params": [mine], "algorithm": "adamw", "lr": 0.5}])
        optimizer.load_state_dict(ps.convert.state_dict(theirs, optimizer))
        mine.grad = torch.ones(4)
        optimizer.step()
        # AdamW's first step is lr·sign(G): the moments are divided by 1 − β, not by 1 − β².
        torch.testing.assert_close(mine.detach(), torch.full((4,), -0.5))


def test_a_rule_that_changed_starts_anew_and_says_so():
    W = Parameter(gaussian(4, 3).float())
    theirs = torch.optim.AdamW([W])
    W.grad = torch.ones_like(W)
    theirs.step()
    optimizer = ps.Muon([W])
    with pytest.warns(UserWarning, match="parameter 0 had another rule in the checkpoint"):
        content = ps.convert.state_dict(theirs.state_dict(), optimizer)
    assert content["state"] == {}


def test_names_match_parameters_whatever_their_order():
    a, b = (("a", Parameter(gaussian(4, 3).float())), ("b", Parameter(gaussian(4, 3).float())))
    theirs = torch.optim.Muon([a, b])
    for k, (_, p) in enumerate((a, b)):
        p.grad = torch.full_like(p, k + 1.0)
    theirs.step()
    optimizer = ps.Muon([b, a])
    optimizer.load_state_dict(ps.convert.state_dict(theirs.state_dict(), optimizer))
    assert optimizer.state[a[1]]["momentum_buffer"].mean() == pytest.approx(1)
    assert optimizer.state[b[1]]["momentum_buffer"].mean() == pytest.approx(2)


def stepped(params: Any, **options: Any) -> dict[str, Any]:
    """The checkpoint of torch's Muon after a step whose gradients are all ones."""
    theirs = torch.optim.Muon(params, **options)
    for group in theirs.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    theirs.step()
    return theirs.state_dict()


@pytest.mark.parametrize("wrapped", ["module.{}", "_orig_mod.{}", "module._orig_mod.{}"])
def test_names_match_parameters_of_a_wrapped_model(wrapped):
    model = SmallGPT("untied")
    hidden = [
        (wrapped.format(name), p)
        for name, p in model.named_parameters()
        if "blocks" in name and p.ndim == 2
    ]
    optimizer = ps.muon_for(model)
    with pytest.warns(UserWarning, match="none of the checkpoints has wte.weight and"):
        content = ps.convert.state_dict(stepped(hidden), optimizer)
    optimizer.load_state_dict(content)
    assert hidden
    assert all(optimizer.state[p]["momentum_buffer"].eq(1).all() for _, p in hidden)


def test_names_in_place_of_numbers_match_parameters():
    """As torch.distributed.checkpoint.state_dict.get_optimizer_state_dict has them."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)))
    params = list(model.parameters())
    theirs = torch.optim.Muon(params[:2])
    for p in params[:2]:
        p.grad = torch.ones_like(p)
    theirs.step()
    content = get_optimizer_state_dict(model, theirs)
    assert content["param_groups"][0]["params"] == ["0.weight", "1.weight"]
    optimizer = ps.muon_for(model)
    with pytest.warns(UserWarning, match=r"none of the checkpoints has 2\.weight, so"):
        content = ps.convert.state_dict(content, optimizer)
    optimizer.load_state_dict(content)
    assert all(optimizer.state[p]["momentum_buffer"].eq(1).all() for p in params[:2])


def test_an_empty_slot_of_the_state_is_no_state():
    content = stepped([W])
    content["state"][0]["momentum_buffer"] = None
    with silent():
        assert ps.convert.state_dict(content, ps.Muon([W]))["state"] == {}


@pytest.mark.parametrize("option", ["maximize", "amsgrad"])
def test_moments_of_an_adamw_that_does_something_else_are_refused(option):
    adamw = torch.optim.AdamW([W], **{option: True})
    W.grad = torch.ones_like(W)
    adamw.step()
    optimizer = ps.Muon([{"params": [W], "algorithm": "adamw"}])
    content = adamw.state_dict()
    with pytest.raises(ValueError, match=f"{option}=True in a group .*: expected False.* = False"):
        ps.convert.state_dict(content, optimizer)
    content["param_groups"][0][option] = False
    assert set(ps.convert.state_dict(content, optimizer)["state"][0]) == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }


W = Parameter(torch.zeros(4, 3))
V = Parameter(torch.zeros(4, 3))
U = Parameter(torch.zeros(4, 3))
MUON, TWO = (torch.optim.Muon(params).state_dict() for params in ([W], [W, V]))
WHOLE = {"model": {}, "optimizer": MUON}


def changed(theirs: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A checkpoint with other options in all of its groups."""
    return theirs | {"param_groups": [group | options for group in theirs["param_groups"]]}


ODD_DION = {"mu": 0.9, "epsilon": 0.0, "adjust_lr": "odd", "params": [0], "algorithm": "muon"}
UNREADABLE = [
    (MUON, {"source": "jax"}, ValueError, "source='jax': expected one of"),
    (torch.optim.AdamW([W]).state_dict(), {}, ValueError, "no group"),
    ([MUON], {}, TypeError, "theirs is a list .*of several optimizers give Muon"),
    (MUON, {"source": "moonlight"}, ValueError,
     "has no 'wd', only .*: expected the format 'moonlight'; leave source= out"),
    (MUON, {"source": "dion"}, ValueError, "has no 'adjust_lr', only"),
    ({"state": {}, "param_groups": [ODD_DION]}, {}, ValueError,
     "adjust_lr='odd' in the checkpoint: expected one of 'spectral_norm', 'rms_norm', None"),
    (changed(MUON, adjust_lr_fn="odd"), {}, ValueError,
     "adjust_lr_fn='odd' in the checkpoint: expected one of None, 'original', 'match_rms_adamw'"),
    (torch.optim.Muon([W]), {}, TypeError, "theirs is a Muon without 'state' and 'param_groups': exp"),
    (WHOLE, {}, TypeError, r"only 'model', 'optimizer'.*checkpoint\["),
    (ps.Muon([W]).state_dict(), {}, ValueError,
     r"polarstep's own.*optimizer\.load_state_dict as it is"),
]  # fmt: skip


@pytest.mark.parametrize(("theirs", "options", "error", "message"), UNREADABLE)
def test_options_that_cannot_be_read(theirs, options, error, message):
    with pytest.raises(error, match=message):
        ps.convert.options(theirs, **options)


def kept(value: object, key: object = 0) -> dict[str, Any]:
    """A checkpoint of torch's Muon with this momentum, under this key."""
    return MUON | {"state": {key: {"momentum_buffer": value}}}


WITHOUT_BETA = {"params": [0], "use_muon": True, "beta": 0.9}
UNCONVERTED = [
    ({"state": {}, "param_groups": [{"params": [0], "rho": 0.05}]}, ValueError, "options params, rho"),
    (torch.optim.SGD([W]).state_dict(), ValueError,
     "is of torch.optim.SGD: expected Muon's.*leave the checkpoint of SGD out"),
    ({}, TypeError, "without 'state'"),
    ([], ValueError, "theirs is empty"),
    (WHOLE, TypeError, r"only 'model', 'optimizer'.*checkpoint\["),
    (kept(torch.zeros(3, 4)), ValueError,
     r"shape \(3, 4\) in the checkpoint, and the parameter \(4, 3\)"),
    (kept([[0.0] * 3] * 4), TypeError,
     "momentum_buffer of parameter 0 is a list in the checkpoint: expected a tensor"),
    (kept(torch.zeros(4, 3), "0"), ValueError,
     "has the keys '0', …, and its groups name the parameters 0, …: expected the same keys"),
    (stepped([W], momentum=1.0), ValueError,
     "momentum=1.0 in a group of the checkpoint: expected 0 ≤ β < 1"),
    (kept(torch.zeros(4, 3)) | {"param_groups": [WITHOUT_BETA]}, ValueError,
     "has no 'momentum', only beta, params, use_muon: expected the format 'keller'"),
]  # fmt: skip


@pytest.mark.parametrize(("theirs", "error", "message"), UNCONVERTED)
def test_states_that_cannot_be_converted(theirs, error, message):
    with pytest.raises(error, match=message):
        ps.convert.state_dict(theirs, ps.Muon([W]))


def test_a_state_goes_on_in_polarsteps_muon():
    with pytest.raises(
        TypeError, match=r"is a torch\.optim[.\w]*\.Muon: expected the polarstep\.M"
    ):
        ps.convert.state_dict(MUON, torch.optim.Muon([W]))


def named(*params: tuple[str, Parameter]) -> dict[str, Any]:
    return torch.optim.Muon(list(params)).state_dict()


UNMATCHED = [
    (MUON, [W, V], None, "1 parameters and the optimizer 2"),
    (MUON, [W], [U], r"params\[0\] is not in the optimizer"),
    (TWO, [W, V], [W, W], "1 different params: expected the 2 parameters of the checkpoint"),
    (TWO, [W, V], [W, V, W],
     "3 params, some of them twice: expected the 2 parameters of the checkpoint"),
    ([named((name, W)) for name in ("b", "a", "module.a")], [("a", W), ("b", V)], None,
     "3 parameters and the optimizer 2 .'a' is there twice, so names do not match them"),
    (named(("body.0", W)), [("trunk.0", W), ("trunk.1", V)], None,
     "1 parameters and the optimizer 2 .the optimizer has no 'body.0', so names"),
    (named(("a", W), ("module.b", V)), [("b", W), ("c", V)], None,
     "'module.b' is number 1 in the checkpoint and number 0 in the optimizer .*has no 'a', so"),
]  # fmt: skip


@pytest.mark.parametrize(("theirs", "ours", "params", "message"), UNMATCHED)
def test_parameters_that_cannot_be_matched(theirs, ours, params, message):
    """A momentum that another parameter had would be taken on in silence."""
    with pytest.raises(ValueError, match=message):
        ps.convert.state_dict(theirs, ps.Muon(ours), params=params)


def test_the_order_matches_parameters_that_were_renamed():
    content = stepped([("trunk.0", W), ("trunk.1", V)])
    content["state"][1]["momentum_buffer"] *= 2
    optimizer = ps.Muon([("body.0", W), ("trunk.1", V)])
    found = ps.convert.state_dict(content, optimizer)["state"]
    assert [float(found[i]["momentum_buffer"].mean()) for i in (0, 1)] == pytest.approx([1, 2])


def test_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)


@pytest.mark.parametrize(("kernel", "theirs"), [((2, 2), 1.0), ((4, 1), 2.0)])
def test_filters_whose_steps_had_another_scale_are_named(kernel, theirs):
    """KellerJordan's Muon scales a filter by kh/kw; a group with that scale goes on as before."""
    tall, wide = (Parameter(gaussian(m, 16).float().view(m, -1, *kernel)) for m in (36, 8))
    optimizer = Keller([tall, wide])
    run(optimizer, [tall, wide], range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    again = [Parameter(p.detach().clone()) for p in (tall, wide)]
    expected = run(optimizer, [tall, wide], range(3, 6))
    options = ps.convert.options(saved)
    named = [("tall", again[0]), ("wide", again[1])]
    which = "tall" if theirs == 1 else "tall and 1 more"
    factor = "" if theirs == 1 else r" and lr_factor=2"
    message = (
        rf"{which}: KellerJordan's Muon .* of tall are multiplied by 1\.5 where they were by "
        rf'{theirs:g}; .* a group with shape_scale="none"{factor}$'
    )
    with pytest.warns(UserWarning, match=message):
        ps.convert.state_dict(saved, ps.Muon(named, **options))
    mine = ps.Muon(
        named, **(options | {"shape_scale": "none", "lr_factor": theirs, "polar": POLAR})
    )
    with silent():
        mine.load_state_dict(ps.convert.state_dict(saved, mine))
    for a, b in zip(run(mine, again, range(3, 6)), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("source", ps.convert.FORMATS)
def test_filters_of_other_muons_keep_their_scale(source):
    """KellerJordan's Muon since 2025 alone takes the scale of a filter from kh and kw."""
    p = Parameter(gaussian(36, 16).float().view(36, 4, 2, 2))
    key = ps.convert.FORMATS[source].momentum
    group = {"params": [0], "momentum": 0.9}
    theirs = {"state": {0: {key: torch.ones_like(p)}}, "param_groups": [group]}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = ps.convert.state_dict(theirs, ps.Muon([p]), source=source)
    assert found["state"][0]["momentum_buffer"].shape == p.shape
    assert len(told) == (source == "keller")


@pytest.mark.parametrize("option", ["lr", "weight_decay"])
def test_the_page_has_the_defaults_of_both(option: str) -> None:
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{option}`"))
    shown = [float(number) for number in re.findall(r"\(([\d.e-]+)\)", row)][:2]
    params = [Parameter(torch.eye(3))]
    assert shown == [
        optimizer.param_groups[0][option]
        for optimizer in (ps.Muon(params), torch.optim.Muon(params))
    ]


def test_parameters_that_no_checkpoint_has_are_named():
    """Muon's checkpoint without AdamW's: AdamW would start anew beside a Muon that goes on."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4), torch.nn.Linear(4, 2))
    hidden = [(name, p) for name, p in model.named_parameters() if name in ("0.weight", "1.weight")]
    others = [(name, p) for name, p in model.named_parameters() if "bias" in name or "2" in name]
    optimizer = ps.muon_for(model, rules=[("[01].weight", "muon")])
    saved = stepped(hidden)
    message = r"none of the checkpoints has 2.weight and 3 more.*start anew.*list of checkpoints"
    with pytest.warns(UserWarning, match=message):
        content = ps.convert.state_dict(saved, optimizer)
    assert len(content["state"]) == 2
    with pytest.warns(UserWarning, match=message):
        ps.convert.state_dict(saved, optimizer, params=[p for _, p in hidden])
    adamw = torch.optim.AdamW(others)
    for each in ([saved, adamw.state_dict()], torch.optim.Muon(hidden).state_dict()):
        with silent():
            ps.convert.state_dict(each, optimizer)


@pytest.mark.parametrize("algorithm", ["lion", "dion"])
def test_a_momentum_of_another_rule_of_dions_is_not_muons(algorithm):
    """Lion keeps an average for its signs, and Dion takes from its momentum what it has applied."""
    W = Parameter(gaussian(4, 3).float())
    group = dion([W]).state_dict()["param_groups"][0] | {"algorithm": algorithm, "step": 3}
    theirs = {"state": {0: {"momentum": torch.ones(4, 3)}}, "param_groups": [group]}
    with pytest.warns(UserWarning, match="parameter 0 had another rule in the checkpoint"):
        assert ps.convert.state_dict(theirs, ps.Muon([W]))["state"] == {}


@pytest.mark.parametrize("transform", [None, ps.NormalizedRows()])
def test_the_momentum_of_normuon_goes_on_and_its_moments_of_rows_are_named(transform):
    W = Parameter(gaussian(4, 3).float())
    group = dion([W]).state_dict()["param_groups"][0] | {"algorithm": "normuon", "muon_beta2": 0.9}
    state = {"momentum": torch.ones(4, 3), "variance_neuron": torch.ones(4, 1)}
    theirs = {"state": {0: state}, "param_groups": [group]}
    remedy = r"; .* transform=polarstep\.NormalizedRows\(beta2\), .*" if transform is None else ""
    message = rf"^parameter 0: .*variance_neuron, are not .* the momentum goes on{remedy}$"
    with pytest.warns(UserWarning, match=message):
        found = ps.convert.state_dict(theirs, ps.Muon([W], transform=transform))["state"]
    assert torch.equal(found[0]["momentum_buffer"], torch.ones(4, 3))
    del state["variance_neuron"]
    with silent():
        ps.convert.state_dict(theirs, ps.Muon([W], transform=transform))


@pytest.mark.parametrize(
    ("option", "value"), [("num_heads", 4), ("split_sizes", (2, 2)), ("split_sizes", [2, 2])]
)
def test_a_group_of_dions_that_cuts_its_matrices_is_cut_alike(option, value):
    """Its names say which weights; without names, muon_for could cut others."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3))
    theirs = dion([model[0].weight]).state_dict()
    expected = ps.convert.options(theirs)
    (group,) = theirs["param_groups"]
    group[option] = 1 if option == "num_heads" else None  # dion's "not cut"
    assert ps.convert.options(theirs) == expected
    group[option] = value
    with pytest.raises(
        ValueError, match=rf"{option}=.* without names.*muon_for\(model, per_head=True\)"
    ):
        ps.convert.options(theirs)
    group["param_names"] = ["module.0.weight"]
    found = ps.convert.options(theirs)
    parts = 4 if option == "num_heads" else (2, 2)
    assert found == expected | {"splits": {"0.weight": parts}}
    matrix = ps.muon_for(model, **found).routes["0.weight"].matrix
    assert matrix == ("4·(1×3)" if option == "num_heads" else "2·(2×3)")


def test_a_checkpoint_of_moonlights_from_before_a_gradient():
    """Its states hold use_muon from the start, and no tensor until a parameter has a gradient."""
    params = fresh()
    theirs = moonlight(params).state_dict()
    theirs["state"] = {i: {"use_muon": True} for i in range(len(params))}
    assert ps.convert.options(theirs)["lr"] == 0.02
    with silent():
        assert ps.convert.state_dict(theirs, ps.Muon(params))["state"] == {}
    theirs["state"] = {i: {"use_muon": False} for i in range(len(params))}
    with pytest.raises(ValueError, match="no group of the checkpoint is updated by Muon"):
        ps.convert.options(theirs)


def test_the_muon_of_2024_goes_on_with_filters_and_adamw():
    """It kept the momentum of a filter as a matrix, and AdamW's moments as moment1 and moment2."""
    W, bias = Parameter(gaussian(6, 16).float().view(6, 4, 2, 2)), Parameter(torch.zeros(4))
    C, m, v = gaussian(6, 16, seed=1).float(), torch.full((4,), 0.1), torch.full((4,), 0.2)
    group = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "ns_steps": 6, "adamw_lr_ratio": 0.1}
    group |= {"adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8, "adamw_wd": 0, "params": [0, 1]}
    theirs = {
        "state": {
            0: {"use_muon": True, "momentum_buffer": C},
            1: {"use_muon": False, "moment1": m, "moment2": v, "step": 7},
        },
        "param_groups": [group],
    }
    optimizer = ps.Muon([{"params": [W]}, {"params": [bias], "algorithm": "adamw"}])
    with silent():
        optimizer.load_state_dict(ps.convert.state_dict(theirs, optimizer))
    assert torch.equal(optimizer.state[W]["momentum_buffer"], C.view_as(W))
    assert torch.equal(optimizer.state[bias]["exp_avg"], m)
    assert torch.equal(optimizer.state[bias]["exp_avg_sq"], v)
    assert optimizer.state[bias]["step"] == 7


@pytest.mark.parametrize("flags", [{}, {"use_muon": True}], ids=str)
def test_a_checkpoint_of_one_rank_of_several_says_whose_momentum_it_lacks(flags):
    """KellerJordan's Muon shares its matrices among the ranks; a rank has the momentum of its own."""
    params = fresh()
    theirs = Keller(params)
    run(theirs, params, range(1))
    whole = theirs.state_dict()
    of_rank = whole | {"state": {0: whole["state"][0]} | ({1: flags, 2: flags} if flags else {})}
    optimizer = ps.Muon(params)
    message = "no momentum of parameter 1 and 1 more, so it starts anew .* of all their checkpoints"
    with pytest.warns(UserWarning, match=message):
        assert list(ps.convert.state_dict(of_rank, optimizer)["state"]) == [0]
    for complete in (whole, whole | {"state": {}}):
        with silent():
            ps.convert.state_dict(complete, optimizer)


def test_moments_that_had_no_gradient_are_no_sign_of_ranks():
    """AdamW's groups of KellerJordan's MuonWithAuxAdam are on every rank."""
    bias = Parameter(torch.zeros(4))
    adamw = {"use_muon": False, "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-10, "params": [1]}
    muon = {"use_muon": True, "lr": 0.02, "momentum": 0.9, "weight_decay": 0, "params": [0]}
    theirs = kept(torch.ones(4, 3)) | {"param_groups": [muon, adamw]}
    optimizer = ps.Muon([{"params": [W]}, {"params": [bias], "algorithm": "adamw"}])
    with silent():
        ps.convert.state_dict(theirs, optimizer)


def test_float16_momentum_stays_finite():
    """B/(1 − β) of a gradient of 5,000 is beyond float16, and C of a float16 parameter is float32."""
    W = Parameter(gaussian(4, 3).half())
    theirs = torch.optim.Muon([W])
    for _ in range(60):
        W.grad = torch.full_like(W, 5e3)
        theirs.step()
    optimizer = ps.Muon([W])
    optimizer.load_state_dict(ps.convert.state_dict(theirs.state_dict(), optimizer))
    C = optimizer.state[W]["momentum_buffer"]
    assert C.dtype == torch.float32
    torch.testing.assert_close(C, torch.full((4, 3), 1e5 * (1 - 0.95**60)), rtol=1e-2, atol=0)


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("shape", [(6, 4, 5), (6, 4, 2, 3)], ids=str)
def test_tensors_that_were_other_matrices_are_named(shape, flatten):
    """dion's flatten=False reads a filter as a stack of kh × kw, and flatten=True a stack as one."""
    p = Parameter(gaussian(6, math.prod(shape[1:])).float().view(shape))
    theirs = dion([p]).state_dict()
    theirs["param_groups"][0]["flatten"] = flatten
    theirs["state"] = {0: {"momentum": torch.ones(shape)}}
    layouts = {True: "conv", False: "stack"}
    same = flatten == (len(shape) == 4)  # as layout="auto" reads them
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ps.convert.state_dict(theirs, ps.Muon([("w", p)]))
    assert len(told) == (not same)
    if told:
        words = rf'^w: .* read w as .*, and this .* with layout="{layouts[flatten]}"$'
        assert re.search(words, str(told[0].message))
    with silent():
        ps.convert.state_dict(theirs, ps.Muon([p], layout=layouts[flatten]))


def test_what_goes_on_does_not_share_its_state_with_the_other():
    """Two optimizers that are compared side by side would both have written to AdamW's moments."""
    bias = Parameter(torch.zeros(4))
    theirs = torch.optim.AdamW([bias])
    bias.grad = torch.ones(4)
    theirs.step()
    mine = Parameter(bias.detach().clone())
    optimizer = ps.Muon([{"params": [mine], "algorithm": "adamw"}])
    optimizer.load_state_dict(ps.convert.state_dict(theirs.state_dict(), optimizer))
    before = {key: value.clone() for key, value in optimizer.state[mine].items()}
    theirs.step()
    for key, value in optimizer.state[mine].items():
        assert torch.equal(value, before[key]), key


def test_a_rate_in_a_tensor_is_read_as_a_number():
    """dion keeps the rate, and weight decay on demand, as tensors on the device of the run."""
    params = fresh()
    theirs = dion(params).state_dict()
    theirs["param_groups"][0] |= {"lr": torch.tensor(0.25), "weight_decay": torch.tensor(0.5)}
    options = ps.convert.options(theirs)
    assert (options["lr"], options["weight_decay"]) == (0.25, 0.5)
    assert not any(isinstance(value, Tensor) for value in options.values())
    ps.Muon(params, **options)


# A group of each version without its parameters, whether it keeps an average, and its weight decay: an
# error where the options mean something else than their names say.
OF_2024 = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "ns_steps": 5}
UPDATED = {"update_buffer": torch.zeros(1, 12), "update_buffer_views": [torch.zeros(12)]}
OF_2025 = OF_2024 | {"weight_decay": 0.1}
BARE = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
OF_TIMM = {"ns_coefficients": JORDAN, "adjust_lr_fn": None, "conv_mode": "flatten"}
OTHERS = {"use_muon": True, "use_adjusted_lr": True}
UNREAD = "is of {}'s Muon.* convert the state alone"
VERSIONS = {
    "Keller Jordan, 2024": (OF_2024, False, 0.0),
    "Keller Jordan, February 2025": (OF_2024 | UPDATED, True, 0.0),
    "Keller Jordan, May 2025": (OF_2025, True, 0.1),
    "Keller Jordan": ({"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}, True, 0.1),
    "with a scheduler": (
        {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "initial_lr": 0.02},
        True,
        0.1,
    ),
    "timm": (OF_2025 | OF_TIMM, True, UNREAD.format("timm")),
    "pytorch_optimizer": (OF_2025 | OTHERS, True, UNREAD.format("pytorch_optimizer")),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_which_muons_keep_an_average_and_which_a_sum(version):
    """After a first gradient of ones C is 1, and an average with β = 0.9 is 0.1."""
    group, averages, decay = VERSIONS[version]
    momentum = torch.full((4, 3), 0.1 if averages else 1.0)
    theirs = {
        "state": {0: {"momentum_buffer": momentum}},
        "param_groups": [group | {"params": [0]}],
    }
    found = ps.convert.state_dict(theirs, ps.Muon([W]))["state"][0]["momentum_buffer"]
    torch.testing.assert_close(found, torch.ones(4, 3))
    if isinstance(decay, str):
        with pytest.raises(ValueError, match=decay):
            ps.convert.options(theirs)
    else:
        options = ps.convert.options(theirs)
        assert (options["weight_decay"], options["momentum"], options["polar"]) == (
            decay,
            0.9,
            POLAR,
        )


@pytest.mark.parametrize("source", ps.convert.FORMATS)
def test_a_format_may_be_named(source):
    its = ps.convert.FORMATS[source]
    momentum = torch.full((4, 3), 0.1 if its.averages else 1.0)
    theirs = {
        "state": {0: {its.momentum: momentum}},
        "param_groups": [{"params": [0], its.beta: 0.9}],
    }
    found = ps.convert.state_dict(theirs, ps.Muon([W]), source=source)["state"][0]
    torch.testing.assert_close(found["momentum_buffer"], torch.ones(4, 3))


def test_a_sum_that_looks_like_an_average_is_refused():
    """MuonClip of pytorch_optimizer has the keys of its Muon, and another momentum under them."""
    group = OF_2025 | {"use_muon": True, "qk_clip_threshold": 100.0, "params": [0]}
    theirs = {"state": {0: {"momentum_buffer": torch.ones(4, 3)}}, "param_groups": [group]}
    with pytest.raises(ValueError, match=r"MuonClip, which keeps a sum .*'keller-2024' reads"):
        ps.convert.state_dict(theirs, ps.Muon([W]))
    found = ps.convert.state_dict(theirs, ps.Muon([W]), source="keller-2024")["state"][0]
    torch.testing.assert_close(found["momentum_buffer"], torch.ones(4, 3))
