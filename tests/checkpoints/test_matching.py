"""A checkpoint goes to its parameters by name, or by order, and never to others in silence."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from tests.routing.sample_models import mlp
from tests.spectra import gaussian
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Parameter

from polarstep import Muon, muon_for


def named(names) -> list[tuple[str, Parameter]]:
    return [(name, Parameter(gaussian(4, 4, seed=i).float())) for i, name in enumerate(names)]


def stepped(params, **options) -> Muon:
    """An optimizer after one step, in which each parameter has a gradient of its own."""
    optimizer = Muon(params, **options)
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        p.grad = gaussian(*p.shape, seed=10 + i).float()
    optimizer.step()
    return optimizer


def momenta(optimizer: Muon) -> dict[str, torch.Tensor]:
    return {
        name: optimizer.state[p]["momentum_buffer"]
        for group in optimizer.param_groups
        for name, p in zip(group["param_names"], group["params"], strict=True)
    }


def frozen(layer: int) -> tuple[nn.Module, Muon]:
    """A model with one of its four equal layers frozen, and its optimizer."""
    torch.manual_seed(0)
    model = mlp(8, 8, 8, 8, 8, 2)
    linear = [part for part in model if isinstance(part, nn.Linear)]
    linear[layer].requires_grad_(False)
    return model, muon_for(model)


def names_of(optimizer: Muon) -> list[list[str]]:
    return [group["param_names"] for group in optimizer.param_groups]


# --- some names in common


def test_a_run_with_another_layer_frozen_is_refused():
    model, first = frozen(1)
    for i, p in enumerate(model.parameters()):
        p.grad = gaussian(*p.shape, seed=i).float() if p.requires_grad else None
    first.step()
    saved = first.state_dict()
    _, second = frozen(2)
    before = names_of(second)
    assert [len(names) for names in before] == [len(names) for names in names_of(first)]
    with pytest.raises(
        ValueError, match=r"the checkpoint alone has .*weight.*the optimizer alone"
    ) as told:
        second.load_state_dict(saved)
    for words in ("both have 0.weight and", "freeze and unfreeze the same layers", "by the order"):
        assert words in str(told.value)
    assert names_of(second) == before
    assert not second.state


@pytest.mark.parametrize("names", ["kqw", "wkq", "qkw", "vxy"])
def test_a_partial_overlap_of_names_is_refused_wherever_the_names_are(names):
    saved = stepped(named("qkv")).state_dict()
    second = Muon(named(names))
    with pytest.raises(ValueError, match=r"both have .*by their order, parameters would get"):
        second.load_state_dict(saved)
    assert not second.state


def test_no_more_than_three_names_of_a_side_are_listed():
    saved = stepped(named("abcdefgh")).state_dict()
    with pytest.raises(
        ValueError, match=r"checkpoint alone has b, c, d and 4 more; .*has s, t, u and 4"
    ):
        Muon(named("astuvwxy")).load_state_dict(saved)


def test_a_partial_overlap_in_another_group_is_refused():
    a, b = named("ab"), named("bc")
    saved = stepped([{"params": a[:1]}, {"params": a[1:]}]).state_dict()
    with pytest.raises(ValueError, match=r"both have b, but the checkpoint alone has a; the opt"):
        Muon([{"params": b[:1]}, {"params": b[1:]}]).load_state_dict(saved)


def test_the_remedy_for_renamed_parameters_loads_by_the_order():
    first = stepped(named("qkv"))
    saved = first.state_dict()
    for group in saved["param_groups"]:
        del group["param_names"]
    second = Muon(named("qkw"))
    second.load_state_dict(saved)
    assert list(momenta(second)) == ["q", "k", "w"]
    assert torch.equal(momenta(second)["w"], momenta(first)["v"])


def test_two_parameters_of_one_name_in_other_groups_are_refused():
    saved = stepped([{"params": named("ww")}, {"params": named("v")}]).state_dict()
    other = Muon([{"params": named("wv")}, {"params": named("w")}])
    with pytest.raises(ValueError, match=r"both have w and 2 more, but w is number \d there"):
        other.load_state_dict(saved)


# --- the same names


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_of_wrappers_make_no_difference(prefix):
    first = stepped(named("qkv"))
    second = Muon(named([f"{prefix}{name}" for name in "qkv"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.load_state_dict(first.state_dict())
    for name, value in momenta(first).items():
        assert torch.equal(momenta(second)[f"{prefix}{name}"], value)
    with pytest.raises(ValueError, match="q is number 0 there and number 2 here"):
        Muon(named([f"{prefix}{name}" for name in "kvq"])).load_state_dict(first.state_dict())


def test_a_layer_that_is_called_module_is_no_wrapper():
    first = stepped(named(["module.w", "w"]))
    with pytest.raises(ValueError, match=r"module\.w is number 0 there and number 1 here"):
        Muon(named(["w", "module.w"])).load_state_dict(first.state_dict())


# --- no name in common


def test_without_a_name_in_common_the_order_counts_and_the_names_stay():
    first, second = stepped(named("qkv")), Muon(named("xyz"))
    second.load_state_dict(first.state_dict())
    assert list(momenta(second)) == ["x", "y", "z"]
    for ours, theirs in zip(momenta(second).values(), momenta(first).values(), strict=True):
        assert torch.equal(ours, theirs)


def test_an_optimizer_without_names_does_not_take_those_of_a_checkpoint():
    first, second = stepped(named("qkv")), Muon([p for _, p in named("xyz")])
    second.load_state_dict(first.state_dict())
    assert "param_names" not in second.param_groups[0]
    assert len(second.state) == 3


def test_names_that_were_made_up_for_an_added_group_fit_any():
    def grown(names: str, *added) -> Muon:
        optimizer = Muon(named(names))
        optimizer.add_param_group({"params": list(added)})
        return optimizer

    (_, p), (_, q) = named("pq")
    first = grown("ab", p)
    assert names_of(first) == [["a", "b"], ["parameter 2"]]
    second = grown("ab", ("c", q))
    second.load_state_dict(first.state_dict())
    assert names_of(second) == [["a", "b"], ["c"]]
    # A name that is elsewhere on the other side does not fit.
    third = grown("cb", ("a", q))
    with pytest.raises(ValueError, match="the optimizer both have"):
        third.load_state_dict(first.state_dict())


# --- hooks and torch.distributed.checkpoint


def test_a_hook_may_adapt_a_checkpoint_to_other_parameters():
    """As torch's recipe for named parameters does it: from the optimizer's own state_dict()."""
    first, second = stepped(named("qkv")), Muon(named("kqw"), lr=0.5)

    def by_name(optimizer, content):
        adapted = copy.deepcopy(optimizer.state_dict())
        names = content["param_groups"][0]["param_names"]
        for index, name in enumerate(adapted["param_groups"][0]["param_names"]):
            if name in names:
                adapted["state"][index] = content["state"][names.index(name)]
        return adapted

    second.register_load_state_dict_pre_hook(by_name)
    second.load_state_dict(first.state_dict())
    own = dict(zip("kqw", second.param_groups[0]["params"], strict=True))
    for name in "kq":
        assert torch.equal(second.state[own[name]]["momentum_buffer"], momenta(first)[name])
    assert own["w"] not in second.state
    assert second.param_groups[0]["lr"] == 0.5


def test_what_a_hook_leaves_is_checked():
    first, second = stepped(named("qkv")), Muon(named("kqw"))
    second.register_load_state_dict_pre_hook(lambda _, content: None)
    with pytest.raises(ValueError, match="both have k and 1 more"):
        second.load_state_dict(first.state_dict())


@pytest.mark.parametrize("flat", [False, True])
def test_torchs_checkpoints_of_a_run_with_another_layer_frozen_go_by_name(flat):
    """torch refuses a missing state; with strict=False what is there goes to its own layer."""
    model, first = frozen(1)
    for i, p in enumerate(model.parameters()):
        p.grad = gaussian(*p.shape, seed=i).float() if p.requires_grad else None
    first.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = get_optimizer_state_dict(model, first, options=options)
    other, second = frozen(2)
    with pytest.raises(
        (RuntimeError, ValueError), match=r"Missing|momentum_buffer of 2\.weight is dict"
    ):
        set_optimizer_state_dict(other, second, saved, options=options)
    if flat:
        return  # torch has an empty dict for each entry that is missing
    set_optimizer_state_dict(other, second, saved, options=StateDictOptions(strict=False))
    assert names_of(second) == names_of(frozen(2)[1])
    for name, p in model.named_parameters():
        q = other.get_parameter(name)
        if p.requires_grad and q.requires_grad:
            for key, value in first.state[p].items():
                assert torch.equal(second.state[q][key], value)
        else:
            assert not second.state.get(q)


@pytest.mark.parametrize("slow", [1, 2])
def test_groups_that_torchs_checkpoints_mix_up_are_pointed_out(slow):
    """torch gives a group the options of a saved group that shares a parameter with it."""

    def made(layer: int) -> tuple[nn.Module, Muon]:
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
        rules = [(f"{layer}.weight", {"lr": 0.01}), ("*", "muon")]
        return model, muon_for(model, rules=rules)

    (model, first), (other, second) = made(2), made(slow)
    for i, p in enumerate(model.parameters()):
        p.grad = gaussian(8, 8, seed=i).float()
    first.step()
    saved = get_optimizer_state_dict(model, first)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_optimizer_state_dict(other, second, saved)
    told = [
        str(w.message) for w in caught if "had another group in the checkpoint" in str(w.message)
    ]
    factors, expected = (
        {name: g["lr_factor"] for g in optimizer.param_groups for name in g["param_names"]}
        for optimizer in (second, first)
    )
    assert bool(told) == (slow == 1) == (factors != expected)
