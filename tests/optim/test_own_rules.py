"""Element-wise rules of a user's own, in ``muon_for`` and in groups of ``Muon``."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.own_parts import SignDescent
from torch import Tensor, nn

import polarstep as ps
from polarstep.others import ELEMENTWISE


@pytest.fixture(autouse=True)
def _rules_as_before() -> Iterator[None]:
    """What a test enters is taken out again."""
    before = dict(ELEMENTWISE)
    yield
    ELEMENTWISE.clear()
    ELEMENTWISE.update(before)


class Model(nn.Module):
    """An embedding, two hidden matrices, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.hidden = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)


def model(dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def put_gradients(net: nn.Module, step: int) -> None:
    g = torch.Generator().manual_seed(step)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p)


def train(net: nn.Module, optimizer: ps.Muon, steps: range) -> None:
    for step in steps:
        put_gradients(net, step)
        optimizer.step()


def reference(net: nn.Module, steps: int, lr: float, beta: float) -> dict[str, Tensor]:
    """What SignDescent makes of every parameter, written from the formulas."""
    X = {name: p.detach().clone() for name, p in net.named_parameters()}
    C = {name: torch.zeros_like(x) for name, x in X.items()}
    for step in range(steps):
        put_gradients(net, step)
        for name, p in net.named_parameters():
            assert p.grad is not None
            C[name] = beta * C[name] + p.grad
            X[name] = X[name] - lr * C[name].sign()
    return X


OF_OTHERS = {"embedding.weight", "head.weight", "head.bias", "norm.weight", "norm.bias"} | {
    "hidden.0.bias",
    "hidden.2.bias",
}
PLACES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "others": ({"others": SignDescent(0.01, 0.7)}, OF_OTHERS),
    "embeddings": ({"embeddings": SignDescent(0.01, 0.7)}, {"embedding.weight"}),
    "heads": ({"heads": SignDescent(0.01, 0.7)}, {"head.weight"}),
    "vectors": (
        {"vectors": SignDescent(0.01, 0.7)},
        OF_OTHERS - {"embedding.weight", "head.weight"},
    ),
    "rules": (
        {"rules": [("hidden.2.*", SignDescent(0.01, 0.7))]},
        {"hidden.2.weight", "hidden.2.bias"},
    ),
}


@pytest.mark.parametrize(("options", "its"), PLACES.values(), ids=PLACES)
def test_muon_for_takes_the_steps_of_the_formulas(options: dict[str, Any], its: set[str]) -> None:
    net = model()
    expected = reference(model(), 5, lr=0.01, beta=0.7)
    optimizer = ps.muon_for(net, **options)
    assert {r.name for r in optimizer.routes if r.algorithm == "SignDescent"} == its
    train(net, optimizer, range(5))
    for name, p in net.named_parameters():
        close = torch.allclose(p, expected[name], rtol=0, atol=1e-12)
        assert close == (name in its), name


def test_routers_go_to_the_rule_that_is_given() -> None:
    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(8, 4, bias=False)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.out = nn.Linear(8, 3)

    optimizer = ps.muon_for(Moe(), routers=SignDescent())
    assert optimizer.routes["router.weight"].algorithm == "SignDescent"
    assert "SignDescent, 0.001 = lr × 0.05" in str(optimizer.routes)


@pytest.mark.parametrize("rounding", ["nearest", "compensated"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(dtype: torch.dtype, rounding: Any) -> None:
    """A count of 301 is one in bfloat16 too, where 301 is no number."""
    net, options = model(dtype), {"others": SignDescent(0.01), "rounding": rounding}
    optimizer = ps.muon_for(net, **options)
    train(net, optimizer, range(2))
    for of_parameter in optimizer.state.values():
        if "count" in of_parameter:
            of_parameter["count"] += 299
    file = io.BytesIO()
    torch.save([net.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, saved = torch.load(file)
    again = model(dtype)
    again.load_state_dict(weights)
    resumed = ps.muon_for(again, **options | {"others": SignDescent(0.5, 0.1)})
    resumed.load_state_dict(saved)
    for each in (net, again):
        train(each, optimizer if each is net else resumed, range(2, 4))
    for p, q in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
        assert optimizer.state[p].keys() == resumed.state[q].keys()
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, resumed.state[q][key]), key
            assert value.dtype == resumed.state[q][key].dtype, key
    assert resumed.state[again.norm.bias]["count"] == 303


def test_a_checkpoint_is_refused_where_the_class_is_not_defined() -> None:
    net = model()
    saved = ps.muon_for(net, others=SignDescent()).state_dict()
    del ELEMENTWISE["test-sign"]
    optimizer = ps.muon_for(net)
    with pytest.raises(ValueError, match=r"algorithm='test-sign'.*import its module before"):
        optimizer.load_state_dict(saved)


def test_a_state_of_another_shape_is_refused() -> None:
    net = model()
    optimizer = ps.muon_for(net, others=SignDescent())
    train(net, optimizer, range(1))
    net.embedding.weight.data = torch.zeros(13, 8, dtype=torch.float64)
    put_gradients(net, 1)
    with pytest.raises(ValueError, match=r"average of embedding.weight is \(11, 8\).*\(13, 8\)"):
        optimizer.step()


def test_parameters_that_come_later_get_the_rule() -> None:
    """Frozen ones that are added, and vectors that the model did not have."""
    net = model()
    net.embedding.requires_grad_(False)
    optimizer = ps.muon_for(net, 0.02, others=SignDescent(0.01))
    net.embedding.requires_grad_(True)
    late = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [net.embedding.weight, late], "lr": 0.01})
    for group in optimizer.param_groups[-2:]:
        assert (group["algorithm"], group["lr"], group["lr_factor"]) == ("test-sign", 0.01, 0.5)


def grouped(**options: Any) -> ps.Muon:
    b = nn.Parameter(torch.zeros(3))
    b.grad = torch.ones(3)
    return ps.Muon([{"params": [b], "algorithm": "test-sign", **options}])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"betta": 0.5}, "option 'betta'.*did you mean 'beta'"),
        ({"betas": (0.9, 0.95)}, "option 'betas'.*expected some of algorithm, beta, lr"),
        ({"beta": 1.5}, "beta=1.5: expected 0 ≤ beta < 1"),
        ({"lr": -1.0}, "lr=-1.0: expected a finite number"),
    ],
)
def test_options_are_checked_as_those_of_adamw(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        grouped(**options)


@pytest.mark.parametrize("given", [SignDescent, "sgd", torch.optim.AdamW], ids=str)
def test_what_is_no_rule_is_refused(given: Any) -> None:
    words = r"another polarstep\.Elementwise"
    if given is SignDescent:
        words += r".*give an instance, as SignDescent\(\)"
    with pytest.raises(TypeError, match=words):
        ps.muon_for(model(), others=given)
    with pytest.raises(TypeError, match=words):
        ps.muon_for(model(), rules=[("head.*", given)])


MEMBERS = {
    "algorithm": "test-new",
    "new_state": staticmethod(SignDescent.new_state),
    "update": staticmethod(SignDescent.update),
}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"algorithm": "adamw"},
            r"New has algorithm='adamw'.* of polarstep\.\S*AdamW: expected a name",
        ),
        ({"algorithm": "muon"}, r"algorithm='muon', which is the name of Muon"),
        ({"algorithm": "test-sign"}, r"'test-sign'.*SignDescent: expected a name that no other"),
        ({"algorithm": 3}, r"algorithm=3: expected its name.* as algorithm = 'new'"),
        ({"update": None}, r"New has no static method update: expected update\(group, params"),
        ({"new_state": None}, r"New has no static method new_state: expected new_state\(p\)"),
        ({"update": SignDescent.update}, r"no static method update: .* under @staticmethod"),
        ({"buffers": "average"}, r"buffers='average': expected a tuple of names"),
    ],
)
def test_wrong_members_are_refused_when_the_class_is_defined(
    changed: dict[str, Any], words: str
) -> None:
    members = {key: value for key, value in (MEMBERS | changed).items() if value is not None}
    before = dict(ELEMENTWISE)
    with pytest.raises((TypeError, ValueError), match=words):
        type(ps.Elementwise)("New", (ps.Elementwise,), members)
    assert before == ELEMENTWISE


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        (None, r"New is no dataclass: expected @dataclass\(frozen=True\)"),
        ({"rate": float}, r"New has no field lr"),
        ({"lr": float, "role": str}, r"New has a field 'role', which is a key of every"),
        ({"lr": float, "algorithm": str}, r"a field 'algorithm'.*are constants, without a type"),
    ],
)
def test_wrong_fields_are_refused_when_the_rule_is_used(
    annotations: dict[str, Any] | None, words: str
) -> None:
    members = MEMBERS | {"lr": 0.1, "rate": 0.1, "role": "", "__annotations__": annotations or {}}
    kind = type(ps.Elementwise)("New", (ps.Elementwise,), members)
    if annotations is not None:
        kind = dataclass(frozen=True)(kind)
    with pytest.raises(TypeError, match=words):
        ps.muon_for(model(), others=kind())
    with pytest.raises(TypeError, match=words):
        ps.Muon([{"params": [nn.Parameter(torch.zeros(3))], "algorithm": "test-new"}])
    ps.muon_for(model())  # other optimizers are not affected


def test_a_hyperparameter_without_a_default_is_refused() -> None:
    @dataclass(frozen=True)
    class Bare(ps.Elementwise):
        lr: float
        algorithm = "test-bare"
        new_state = staticmethod(SignDescent.new_state)
        update = staticmethod(SignDescent.update)

    with pytest.raises(TypeError, match=r"Bare\.lr has no default: expected a default for every"):
        ps.muon_for(model(), others=Bare(0.1))


def test_a_rule_may_be_defined_again_and_have_slots() -> None:
    def define(slots: bool) -> Any:
        @dataclass(frozen=True, slots=slots)
        class Again(ps.Elementwise):
            lr: float = 0.1
            beta: float = 0.9
            algorithm = "test-again"
            buffers = ("average",)
            new_state = staticmethod(SignDescent.new_state)
            update = staticmethod(SignDescent.update)

        return Again

    for slots in (False, True, True):
        kind = define(slots)
        assert ELEMENTWISE["test-again"] is kind
        net = model()
        train(net, ps.muon_for(net, others=kind()), range(2))


def test_a_derived_rule_needs_a_name_of_its_own() -> None:
    @dataclass(frozen=True)
    class Derived(SignDescent):
        beta: float = 0.5

    with pytest.raises(
        ValueError, match=r"Derived has algorithm='test-sign'.* as algorithm = 'derived'"
    ):
        ps.muon_for(model(), others=Derived())
    assert ELEMENTWISE["test-sign"] is SignDescent


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"average": None, "count": 3}, r"has 'count' as a int: expected a tensor"),
        ({"count": torch.zeros(())}, r"has nothing for the buffer 'average'"),
        (
            {"average": torch.zeros(2)},
            r"shape \(2,\) for the buffer 'average'.*expected torch.zeros_like",
        ),
        (None, r"returned a NoneType: expected a dict of tensors"),
    ],
)
def test_a_state_that_cannot_be_saved_is_refused(
    state: dict[str, Any] | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if state is not None and state.get("average", ...) is None:
        state["average"] = torch.zeros(3)
    optimizer = grouped()
    monkeypatch.setattr(SignDescent, "new_state", staticmethod(lambda p: state))
    with pytest.raises((TypeError, ValueError), match=words):
        optimizer.step()


def test_a_new_tensor_in_a_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def update(group: Any, params: Any, grads: Any, states: Any, found_inf: Any = None) -> None:
        states[0]["average"] = states[0]["average"] + grads[0]

    monkeypatch.setattr(SignDescent, "update", staticmethod(update))
    with pytest.raises(ValueError, match=r"at 'average' of a state.*state\['average'\]\.copy_"):
        grouped().step()


LAYER = nn.Linear(30, 30)


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ((list(LAYER.parameters()),), {}),
        ((LAYER.parameters(),), {"lr": 1e-3}),
        ((), {"lr": LAYER.weight}),
        (([("weight", LAYER.weight)],), {}),
        (([{"params": list(LAYER.parameters())}],), {"lr": 1e-3}),
    ],
)
def test_a_rule_that_is_given_parameters_says_what_it_is(given: Any, options: Any) -> None:
    for rule in (ps.AdamW, ps.SGD, SignDescent):
        words = rf"^{rule.__name__} got a \w+ as its lr: .*set of options.*takes no parameters"
        with pytest.raises(TypeError, match=words) as error:
            rule(*given, **options)
        assert len(str(error.value)) < 300
