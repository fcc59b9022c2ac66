"""What people do to a torch optimizer, they do to this one."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from tests.routing.sample_models import mlp
from tests.spectra import gaussian
from torch import nn
from torch.optim import lr_scheduler as schedulers

from polarstep import (
    AdamW,
    Exact,
    LowRank,
    Muon,
    NewtonSchulz,
    Warm,
    muon_for,
)


def model(width=6):
    layers = [nn.utils.skip_init(nn.Linear, *sizes) for sizes in ((5, width), (width, 3))]
    net = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(0.3 * gaussian(*p.shape, seed=i))
    return net


def optimizer_of(net, **options):
    matrices = [p for p in net.parameters() if p.ndim == 2]
    vectors = [p for p in net.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "algorithm": "adamw", "lr": 1e-2}]
    return Muon(groups, **({"lr": 0.05, "weight_decay": 0.01} | options))


DATA = gaussian(16, 5).float(), gaussian(16, 3, seed=1).float()


def backward(net, scale=1.0):
    loss = nn.functional.mse_loss(net(DATA[0]), DATA[1])
    (scale * loss).backward()
    return loss


def train(net, optimizer, steps=4, scheduler=None):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(float(backward(net).detach()))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return losses


def weights(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def trained(steps=4, **options):
    net = model()
    train(net, optimizer_of(net, **options), steps)
    return weights(net)


def test_it_trains(untouched_rng):
    net = model()
    losses = train(net, optimizer_of(net), 40)
    assert losses[-1] < 0.5 * losses[0]


def test_closure():
    net = model()
    optimizer = optimizer_of(net)

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        return backward(net)

    losses = [optimizer.step(closure).item() for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert torch.equal(weights(net), trained(4))
    assert optimizer.step() is None


def test_grad_scaler():
    net = model()
    optimizer, scaler = optimizer_of(net), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(5):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(DATA[0]), DATA[1])
        scaler.scale(loss).backward()
        if step == 2:
            net[0].weight.grad[0, 0] = float("inf")
            before, state = weights(net), copy.deepcopy(optimizer.state_dict())
        scaler.step(optimizer)
        scaler.update()
        if step == 2:  # the scaler skips the whole step
            assert torch.equal(weights(net), before)
            assert str(optimizer.state_dict()) == str(state)
            assert scaler.get_scale() == 2.0**9
    torch.testing.assert_close(weights(net), trained(4), atol=1e-5, rtol=0)


SCHEDULES = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, T_max=5),
    "one-cycle": lambda o: schedulers.OneCycleLR(o, max_lr=[0.1, 0.02], total_steps=8),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "sequential": lambda o: schedulers.SequentialLR(
        o,
        [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
def test_schedulers(name, tensor_lr):
    """A schedule sets the learning rates (and momenta) that a loop by hand would set."""
    if tensor_lr and name in ("one-cycle", "cyclic", "plateau"):
        pytest.skip("torch's schedule wants a number")
    net, by_hand = model(), model()
    lr = torch.tensor(0.05) if tensor_lr else 0.05
    optimizer, reference = optimizer_of(net, lr=lr), optimizer_of(by_hand)
    scheduler = SCHEDULES[name](optimizer)
    seen = []
    for _ in range(6):
        for group, other in zip(optimizer.param_groups, reference.param_groups, strict=True):
            other["lr"] = float(group["lr"])
            if "betas" in group:  # a cycled momentum is β₁ of AdamW
                other["betas"] = (group.get("momentum", group["betas"][0]), group["betas"][1])
            else:
                other["momentum"] = group["momentum"]
        seen.append([float(group["lr"]) for group in optimizer.param_groups])
        train(net, optimizer, 1)
        train(by_hand, reference, 1)
        scheduler.step(*([1.0] if name == "plateau" else []))
    assert len({str(lrs) for lrs in seen}) > 1  # it did set something
    torch.testing.assert_close(weights(net), weights(by_hand), atol=1e-5, rtol=0)
    if tensor_lr:
        assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)


@pytest.mark.parametrize("lr", [torch.tensor(0.05), torch.tensor([0.05])], ids=["0-d", "1-d"])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_a_learning_rate_in_a_tensor(lr, nonfinite):
    torch.testing.assert_close(
        trained(lr=lr, nonfinite=nonfinite), trained(nonfinite=nonfinite), atol=1e-5, rtol=0
    )


def test_step_and_state_dict_hooks():
    net = model()
    optimizer, calls = optimizer_of(net), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_state_dict_post_hook(lambda o, state: state | {"extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, state: calls.append("load"))
    train(net, optimizer, 2)
    state = optimizer.state_dict()
    assert state.pop("extra") == 1
    optimizer.load_state_dict(state)
    assert calls == ["before", "after", "before", "after", "load"]


def test_a_hook_after_loading_has_the_last_word():
    """Momentum in a precision of its own was written once more after the hooks."""
    w = torch.nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16))
    optimizer = Muon([w], momentum_dtype=torch.float32)
    w.grad = torch.full_like(w, 1 / 3)
    optimizer.step()
    content, seen = optimizer.state_dict(), []

    def reset(opt):
        momentum = opt.state[w]["momentum_buffer"]
        seen.append(momentum.clone())
        momentum.zero_()

    optimizer.register_load_state_dict_post_hook(reset)
    optimizer.load_state_dict(content)
    assert seen[0].dtype == torch.float32
    assert torch.equal(seen[0], content["state"][0]["momentum_buffer"])
    assert not optimizer.state[w]["momentum_buffer"].any()


def test_a_hook_after_saving_gets_plain_data_and_may_return_anything():
    optimizer, seen = optimizer_of(model(), polar=Exact()), []
    optimizer.register_state_dict_post_hook(lambda _, content: seen.append(content))
    optimizer.register_state_dict_post_hook(lambda _, content: {"optimizer": content})
    assert optimizer.state_dict()["optimizer"] is seen[0]
    assert all(group.get("polar", "{").startswith("{") for group in seen[0]["param_groups"])
    assert len(optimizer._optimizer_state_dict_post_hooks) == 2


def test_add_param_group_later():
    net = model()
    optimizer = Muon([net[0].weight], lr=0.1, polar=Exact())
    optimizer.add_param_group({"params": net[2].weight, "lr": 0.2})
    optimizer.add_param_group({"params": [net[0].bias], "algorithm": "sgd"})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2, 0.01]
    assert optimizer.param_groups[1]["polar"] == Exact()
    assert "polar" not in optimizer.param_groups[2]
    assert "betas" not in optimizer.param_groups[2]
    before = weights(net)
    train(net, optimizer, 1)
    assert (weights(net) != before).sum() == weights(net).numel() - 3  # but for the last bias


def test_named_parameters():
    net = model(5)
    named = [(name, p) for name, p in net.named_parameters() if p.ndim == 2]
    optimizer = Muon(named)
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "2.weight"]
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["0.weight", "2.weight"]
    seen = []
    optimizer.register_polar_hook(lambda bucket: seen.extend(bucket.names))
    train(net, optimizer, 1)
    assert sorted(seen) == ["0.weight", "2.weight"]
    grouped = Muon([{"params": named[:1]}, {"params": iter(named[1:])}])
    assert grouped.param_groups[1]["param_names"] == ["2.weight"]


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_go_on_alike(copier):
    net = model()
    optimizer = optimizer_of(net, polar=LowRank(2, 1, always_sketch=True))
    optimizer.register_polar_hook(lambda bucket: None)
    train(net, optimizer, 2)
    twin_net, twin = copier((net, optimizer))
    assert twin.param_groups[0]["params"][0] is twin_net[0].weight
    train(net, optimizer, 2)
    train(twin_net, twin, 2)
    assert torch.equal(weights(net), weights(twin_net))
    assert str(twin.routes) == str(optimizer.routes)
    assert repr(twin)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_keeps_its_plan(copier):
    optimizer = Muon([torch.nn.Parameter(torch.eye(3))], plan="owner")
    assert copier(optimizer)._distribution.plan == "owner"


def test_a_copy_knows_the_rules_of_frozen_layers():
    net = model()
    net[-1].requires_grad_(False)
    twin_net, twin = copy.deepcopy((net, muon_for(net)))
    twin_net[-1].requires_grad_(True)
    with pytest.warns(UserWarning, match=r"weight and 1 more have a gradient, but no group"):
        train(twin_net, twin, 1)
    twin.add_param_group({"params": list(twin_net[-1].parameters())})
    last = len(net) - 1
    assert twin.routes[f"{last}.weight"].algorithm == "AdamW"
    assert twin.routes[f"{last}.weight"].why.startswith("head: the model's last layer")


class Agent(torch.nn.Module):
    """A model that holds its optimizer, as agents do of which a copy is the target network."""

    def __init__(self):
        super().__init__()
        self.net = model()
        self.net[-1].requires_grad_(False)
        self.optimizer = muon_for(self)


def test_a_copy_of_a_model_that_holds_its_optimizer():
    agent = Agent()
    train(agent.net, agent.optimizer, 2)
    twin = copy.deepcopy(agent)
    before = weights(agent.net)
    train(twin.net, twin.optimizer, 2)
    torch.testing.assert_close(weights(agent.net), before, rtol=0, atol=0)
    train(agent.net, agent.optimizer, 2)
    torch.testing.assert_close(weights(agent.net), weights(twin.net), rtol=0, atol=0)
    twin.net[-1].requires_grad_(True)
    twin.optimizer.add_param_group({"params": list(twin.net[-1].parameters())})
    last = f"net.{len(twin.net) - 1}.weight"
    assert twin.optimizer.routes[last].why == "head: the model's last layer, added later"
    third = copy.deepcopy(twin)
    third.net[0].weight = torch.nn.Parameter(third.net[0].weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"net\.0\.weight .*been replaced in the model"):
        train(third.net, third.optimizer, 1)


def test_a_compiled_model_trains():
    net = model()
    compiled = torch.compile(net, backend="aot_eager")
    optimizer = optimizer_of(net)
    for _ in range(4):
        optimizer.zero_grad()
        backward(compiled)
        optimizer.step()
    torch.testing.assert_close(weights(net), trained(4), atol=1e-6, rtol=0)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_step_inside_torch_compile_is_the_step_itself(backend):
    """It is called as it is: nothing to warn of, and nothing to compile again at the next step."""

    def steps(wrapped):
        net = model()
        optimizer = optimizer_of(net, polar=LowRank(2, 1, sketch=Warm(), always_sketch=True))
        step = wrapped(optimizer.step)
        for _ in range(5):
            optimizer.zero_grad()
            backward(net)
            step()
            optimizer.param_groups[0]["lr"] *= 0.9
        return weights(net)

    torch.compiler.reset()
    with warnings.catch_warnings(), torch._dynamo.config.patch(error_on_recompile=True):
        warnings.simplefilter("error", UserWarning)  # torch has others of its own
        compiled = steps(lambda step: torch.compile(step, backend=backend))
    assert torch.equal(compiled, steps(lambda step: step))


def test_a_compiled_step_returns_the_loss_of_its_closure():
    net = model()
    optimizer = optimizer_of(net)

    def closure():
        optimizer.zero_grad()
        return backward(net)

    before, step = weights(net), torch.compile(optimizer.step, backend="eager")
    assert step(closure) > step(closure)
    assert not torch.equal(weights(net), before)


def test_no_gradient_no_change():
    net = model()
    optimizer = optimizer_of(net, weight_decay=0.5)
    before = copy.deepcopy(net.state_dict())
    optimizer.step()  # nobody has one
    backward(net)
    net[0].weight.grad = net[0].bias.grad = None
    optimizer.step()
    assert torch.equal(net[0].weight, before["0.weight"])
    assert torch.equal(net[0].bias, before["0.bias"])
    assert not torch.equal(net[2].weight, before["2.weight"])
    assert not optimizer.state[net[0].weight]


def test_gradients_are_read_only():
    net = model()
    backward(net)
    gradients = [p.grad.clone() for p in net.parameters()]
    optimizer_of(net, nesterov=False).step()
    for p, gradient in zip(net.parameters(), gradients, strict=True):
        assert torch.equal(p.grad, gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "muon"},
        {"algorithm": "muon", "polar": LowRank(2, 1, always_sketch=True)},
        {"algorithm": "muon", "nonfinite": "skip", "rounding": "compensated"},
        {"algorithm": "adamw"},
        {"algorithm": "adamw", "rounding": "compensated"},
        {"algorithm": "sgd"},
        {"algorithm": "sgd", "nonfinite": "skip"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_graph_from_before_a_step_is_not_used_after_it(options, dtype):
    # A step changes the weights in place, and the graph has saved them: autograd knows by their version.
    x = gaussian(4, 5).to(dtype).requires_grad_()
    W = nn.Parameter(gaussian(5, 6, seed=1).to(dtype))
    loss = (x @ W).square().sum()
    loss.backward(retain_graph=True)
    Muon([{"params": [W], **options}]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_profiler_shows_the_step():
    net = model()
    optimizer = optimizer_of(net)
    with torch.profiler.profile() as profile:
        train(net, optimizer, 1)
    assert any("Optimizer.step#Muon.step" in event.key for event in profile.key_averages())


def test_steps_inside_inference_mode_are_as_any_other():
    """The state that such a step makes can be changed outside, and the parameters are the same."""
    ends = []
    for mode in (torch.inference_mode, contextlib.nullcontext):
        model = mlp(8, 8, 8, 2)
        for i, p in enumerate(model.parameters()):
            p.data = gaussian(*p.shape, seed=i).float()
        optimizer = muon_for(model)
        for k in range(3):
            for i, p in enumerate(model.parameters()):
                p.grad = gaussian(*p.shape, seed=10 * k + i).float()
            with mode() if k < 2 else contextlib.nullcontext():
                optimizer.step()
        ends.append([p.detach().clone() for p in model.parameters()])
        assert not any(p.is_inference() for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("polar", [NewtonSchulz(), LowRank(2, 1, always_sketch=True)], ids=type)
def test_a_parameter_that_is_taken_out_is_let_go(polar):
    """Its memory would otherwise be held as long as the optimizer lives."""
    params = [nn.Parameter(gaussian(6, 6, seed=i).float()) for i in range(2)]
    optimizer = Muon(params, polar=polar)
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    gone = weakref.ref(params[0])
    optimizer.state.pop(params[0])
    del params[0], optimizer.param_groups[0]["params"][0], p
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    gc.collect()
    assert gone() is None


def test_print_has_a_line_for_each_role():
    optimizer = muon_for(mlp(8, 8, 8, 2), heads=AdamW(lr=1e-3))
    assert str(optimizer) == (
        "Muon (\n"
        "  hidden: Muon with Auto, NormalizedRows, lr 0.02, 128 parameters in 2 tensors\n"
        "  head: AdamW, lr 0.02 × 0.05, 16 parameters in 1 tensor\n"
        "  vector: AdamW, lr 0.02 × 0.15, 18 parameters in 3 tensors\n"
        ")"
    )
    embedding = muon_for(nn.Sequential(nn.Embedding(9, 4), *mlp(4, 4, 4)))
    assert "embedding: AdamW, lr 0.02 × a factor to be measured, 36 parameters" in str(embedding)
