"""One learning rate for all groups: the factor of each group, how it is measured, saved and shown."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import pytest
import torch
from tests.routing.sample_models import SmallGPT, mlp
from tests.spectra import gaussian
from torch import Tensor, nn
from torch.nn import Parameter

from polarstep import SGD, AdamW, Elementwise, Muon, muon_for
from polarstep.rates import as_rule_sees


def backward(model: nn.Module, seed: int = 0) -> None:
    for i, p in enumerate(model.parameters()):
        p.grad = gaussian(*p.shape, seed=seed + i).to(p.dtype)


def trained(optimizer: Muon, model: nn.Module, steps: range, before=lambda k: None) -> list[Tensor]:
    for k in steps:
        backward(model, seed=100 * k)
        before(k)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def factors(optimizer: Muon) -> dict[str, float | None]:
    return {group["name"]: group["lr_factor"] for group in optimizer.param_groups}


def rms(p: Tensor) -> float:
    return p.detach().double().square().mean().sqrt().item()


class Classifier(nn.Module):
    """Embeddings of three sizes, a head that begins at zero, norms and biases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(50, 16), nn.Embedding(9, 16)
        self.kinds = nn.Embedding(2, 16)
        self.trunk, self.norm, self.head = mlp(16, 16, 16), nn.LayerNorm(16), nn.Linear(16, 50)
        nn.init.normal_(self.places.weight, std=0.02)
        nn.init.normal_(self.kinds.weight, std=1e-4)
        nn.init.zeros_(self.head.weight)


# --- the factor of each group


def test_every_group_has_the_same_rate_and_its_own_factor():
    model = Classifier()
    optimizer = muon_for(model)
    assert {group["lr"] for group in optimizer.param_groups} == {0.02}
    assert factors(optimizer) == {
        "hidden": 1.0,
        "embedding": None,
        "embedding-2": None,
        "embedding-3": None,
        "head": None,
        "vector": 0.15,
    }
    sizes = [rms(p) for p in (model.tokens.weight, model.places.weight)]
    trained(optimizer, model, range(1))
    found = factors(optimizer)
    # To three digits, so that the order of the sum does not matter.
    assert found["embedding"] == pytest.approx(7.5 * sizes[0], rel=5e-3)
    assert found["embedding-2"] == pytest.approx(7.5 * sizes[1], rel=5e-3)
    assert found["embedding-3"] == found["head"] == 0.15  # nearly zero, and zero
    trained(optimizer, model, range(1, 3))
    assert factors(optimizer) == found  # though the entries have grown


def test_the_part_of_adamw_steps_at_its_rate():
    model = Classifier()
    optimizer, twin = muon_for(model, lr=0.01), copy.deepcopy(model)
    groups = [
        {
            "params": [twin.tokens.weight],
            "lr": 0.01 * 7.5 * float(f"{rms(model.tokens.weight):.3g}"),
        },
        {"params": [twin.head.weight, twin.norm.weight], "lr": 0.01 * 0.15},
    ]
    beside = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    for k in range(3):
        for each in (model, twin):
            backward(each, seed=10 * k)
        optimizer.step()
        beside.step()
    for name in ("tokens.weight", "head.weight", "norm.weight"):
        torch.testing.assert_close(model.get_parameter(name), twin.get_parameter(name))


@pytest.mark.parametrize(("inputs", "factor"), [(32, 6**0.5), (192, 2.0), (768, 1.0), (3072, 0.5)])
def test_a_head_steps_by_the_root_of_its_inputs(inputs, factor):
    model = nn.Sequential(nn.Linear(8, inputs), nn.ReLU(), nn.Linear(inputs, 10))
    optimizer = muon_for(model)
    size = rms(model[-1].weight)
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    assert factors(optimizer)["head"] == pytest.approx(7.5 * factor * size, rel=5e-3)


def test_a_tied_head_has_the_factor_of_the_embedding():
    model = SmallGPT("tied")
    optimizer = muon_for(model)
    trained(optimizer, model, range(1))
    assert [group["role"] for group in optimizer.param_groups].count("head") == 0
    assert optimizer.routes["wte.weight"].why == "embedding: Embedding, tied to head.weight"


def test_matrices_of_one_role_and_shape_share_a_factor():
    model = SmallGPT("untied")
    optimizer = muon_for(model, rules=[("*.up.weight", AdamW()), ("blocks.0.qkv.weight", AdamW())])
    shared = ["blocks.0.up.weight", "blocks.1.up.weight"]
    assert shared in [group["param_names"] for group in optimizer.param_groups]
    together = torch.stack([model.get_parameter(name).detach().clone() for name in shared])
    trained(optimizer, model, range(1))
    (factors,) = {optimizer.routes[name].factors for name in shared}
    assert factors == (pytest.approx(7.5 * rms(together), rel=5e-3),)


def test_a_rule_with_a_rate_of_its_own_keeps_it():
    model = SmallGPT("untied")
    optimizer = muon_for(model, lr=0.01, others=AdamW(lr=1e-3), vectors=SGD(), heads=AdamW(lr=0.0))
    assert factors(optimizer) == {
        "hidden": 1.0,
        "hidden-2": 1.0,
        "embedding": 0.1,
        "head": 0.0,
        "vector": 1.0,
    }
    optimizer = muon_for(model, rules=[("*.up.weight", {"lr": 0.01, "lr_factor": 3.0})])
    assert optimizer.routes["blocks.0.up.weight"].lr == 0.02
    assert optimizer.routes["blocks.0.up.weight"].factors == (3.0,)  # 0.01/0.02 × 3 × √(64/16)


@pytest.mark.parametrize(
    "options", [{"others": AdamW(lr=1e-3)}, {"heads": SGD()}, {"rules": [("*up*", {"lr": 0.1})]}]
)
def test_a_rate_of_its_own_beside_no_rate(options):
    with pytest.raises(ValueError, match=r"beside lr=0: expected an lr above zero.*give an lr"):
        muon_for(SmallGPT("untied"), lr=0.0, **options)
    muon_for(SmallGPT("untied"), lr=0.0)


def test_groups_of_a_plain_muon_have_the_factor_one():
    params = [Parameter(gaussian(4, 3)), Parameter(torch.ones(3))]
    optimizer = Muon([{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw"}])
    assert factors(optimizer) == {"muon": 1.0, "adamw": 1.0}
    assert optimizer.param_groups[1]["lr"] == 3e-4


@pytest.mark.parametrize("factor", [-1.0, float("nan"), "large"])
def test_a_bad_factor(factor):
    optimizer = muon_for(SmallGPT("untied"))
    optimizer.param_groups[-1]["lr_factor"] = factor
    with pytest.raises((ValueError, TypeError), match=r"lr_factor=.*1 leaves lr as it is"):
        optimizer.step()
    optimizer.param_groups[-1]["lr_factor"] = 1.0
    optimizer.param_groups[0]["lr_factor"] = None
    with pytest.raises(TypeError, match="lr_factor=None"):
        optimizer.step()


# --- weight decay


def test_weight_decay_follows_lr_alone():
    """Without a gradient to speak of, every parameter shrinks by 1 − lr·λ."""
    model = Classifier()
    optimizer = muon_for(model, lr=0.1, weight_decay=0.5, others=AdamW(weight_decay=0.5))
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, was in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), 0.95 * was)


@pytest.mark.parametrize("lr", [0.02, 0.3])
def test_a_rule_with_a_rate_of_its_own_decays_as_torchs_does(lr):
    model = mlp(8, 8, 8, 3)
    twin = copy.deepcopy(model)
    optimizer = muon_for(model, lr=lr, others=AdamW(lr=1e-3, weight_decay=0.1))
    names = [n for n, _ in model.named_parameters() if optimizer.routes[n].algorithm == "AdamW"]
    params = [twin.get_parameter(n) for n in names]
    beside = torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for k in range(3):
        for each in (model, twin):
            backward(each, seed=10 * k)
        optimizer.step()
        beside.step()
    for name in names:
        torch.testing.assert_close(model.get_parameter(name), twin.get_parameter(name))


@dataclass(frozen=True)
class Seen(Elementwise):
    """A rule without a rate of its own, which notes what it reads."""

    lr: float | None = None
    weight_decay: float = 0.0
    algorithm = "test-rates-seen"

    @staticmethod
    def new_state(p):
        return {}

    @staticmethod
    def update(group, params, grads, states, found_inf=None):
        SEEN.append((group["lr"], group["weight_decay"], len(params)))


SEEN: list[tuple[float, float, int]] = []


def test_what_a_rule_of_ones_own_reads():
    SEEN.clear()
    model = mlp(8, 8, 8, 3)
    optimizer = muon_for(model, lr=0.1, others=Seen(weight_decay=0.3))
    size = rms(model[-1].weight)
    trained(optimizer, model, range(1))
    (lr, decay, _), vectors = SEEN
    assert lr == pytest.approx(0.75 * math.sqrt(6) * size, rel=5e-3)  # a narrow head
    assert lr * decay == pytest.approx(0.03)
    assert vectors == (pytest.approx(0.015), pytest.approx(2.0), 3)


# --- what changes the rate


def one_rate(optimizer: Muon, rate: float) -> None:
    """As nanoGPT's loop does."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def test_a_smaller_rate_is_smaller_for_everything():
    moved = []
    for lr in (0.02, 0.002):
        torch.manual_seed(0)
        model = Classifier()
        before = [p.detach().clone() for p in model.parameters()]
        after = trained(muon_for(model, lr), model, range(1))
        moved.append([(a - b).norm() for a, b in zip(after, before, strict=True)])
    for far, near in zip(*moved, strict=True):
        torch.testing.assert_close(far, 10 * near, rtol=1e-3, atol=0)


def test_a_rate_in_a_tensor_is_multiplied_on_its_device():
    """On meta, where a number cannot be read."""
    rate = torch.tensor(0.02, device="meta")
    seen = as_rule_sees({"lr": rate, "lr_factor": 0.5, "weight_decay": 0.1})
    assert seen["lr"].is_meta
    assert seen["weight_decay"] == 0.2


# --- when it is measured


def test_nothing_is_measured_at_a_rate_of_zero():
    """A warm-up begins there, and torch.distributed.checkpoint steps so before it loads anything."""
    model = Classifier()
    optimizer = muon_for(model)
    one_rate(optimizer, 0.0)
    trained(optimizer, model, range(2))
    assert factors(optimizer)["embedding"] is None
    with torch.no_grad():
        model.tokens.weight.fill_(0.3)
    one_rate(optimizer, 0.02)
    trained(optimizer, model, range(2, 3))
    assert factors(optimizer)["embedding"] == pytest.approx(7.5 * 0.3)


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path):
    model = Classifier()
    optimizer = muon_for(model)
    trained(optimizer, model, range(2))
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "checkpoint.pt")
    expected = trained(optimizer, model, range(2, 4))
    resumed = Classifier()
    weights, state = torch.load(tmp_path / "checkpoint.pt")
    resumed.load_state_dict(weights)
    again = muon_for(resumed)
    again.load_state_dict(state)
    assert factors(again) == factors(optimizer)
    assert all(map(torch.equal, trained(again, resumed, range(2, 4)), expected))
    assert again.routes == optimizer.routes


def test_a_checkpoint_from_before_the_first_step_is_measured_later():
    model = Classifier()
    optimizer = muon_for(model)
    optimizer.load_state_dict(muon_for(model).state_dict())
    trained(optimizer, model, range(1))
    assert factors(optimizer)["embedding"] == pytest.approx(7.5, rel=0.1)


# --- the table


def test_the_table_says_where_each_rate_comes_from():
    model = SmallGPT("untied")
    nn.init.constant_(model.head.weight, 0.02)
    optimizer = muon_for(model)
    text = optimizer.routes.table(200)
    assert "AdamW, lr × 7.5 × RMS, measured at the first step" in text
    assert "AdamW, 0.003 = lr × 0.15  " in text  # vectors
    trained(optimizer, model, range(1))
    text = optimizer.routes.table(200)
    assert "AdamW, 0.00735 = lr × 0.367, 18.4 × RMS 0.02  " in text
    one_rate(optimizer, 0.002)
    for each in (optimizer, copy.deepcopy(optimizer)):
        assert "AdamW, 0.000735 = lr × 0.367, 18.4 × RMS 0.02  " in each.routes.table(200)
    for group in optimizer.param_groups:
        if group["role"] == "head":
            group["lr_factor"] *= 2
    assert "AdamW, 0.00147 = lr × 0.735  " in optimizer.routes.table(200)
    own = muon_for(model, others=AdamW(lr=1e-3))
    assert "AdamW, 0.001 = lr × 0.05  " in own.routes.table(200)
