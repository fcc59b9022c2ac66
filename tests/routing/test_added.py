"""Groups that others add, their names, their checkpoints, and a step with nothing to do."""

from __future__ import annotations

import copy
import gc
import pickle
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from tests.forking import fork
from tests.processes import PATIENCE
from tests.routing.sample_models import Bag, SmallGPT, mlp
from tests.spectra import gaussian
from torch import nn
from torch.nn import Parameter

from polarstep import SGD, AdamW, LowRank, Muon, NewtonSchulz, NormalizedRows, muon_for
from polarstep.maps import Warm


def backward(model: nn.Module, seed: int = 0) -> None:
    for i, p in enumerate(model.parameters()):
        p.grad = gaussian(*p.shape, seed=seed + i).to(p.dtype)


def unpickled(whole):
    return pickle.loads(pickle.dumps(whole))


# --- groups added later


def test_vectors_are_an_error_for_a_new_optimizer_and_adamws_for_an_old_one():
    with pytest.raises(ValueError, match=r"shape \(3,\): Muon updates matrices.*give it to AdamW"):
        Muon([torch.zeros(3)])
    with pytest.raises(ValueError, match=r"w has shape \(3,\)"):
        Muon([("w", torch.zeros(3))])
    optimizer = Muon([Parameter(gaussian(4, 3))], lr=0.02)
    layer = nn.Linear(4, 5)
    optimizer.add_param_group({"params": layer.parameters(), "lr": 0.002})
    summary = [(g["algorithm"], g["lr"], len(g["params"])) for g in optimizer.param_groups]
    assert summary == [("muon", 0.02, 1), ("adamw", 0.002, 1), ("muon", 0.002, 1)]
    assert optimizer.param_groups[1]["lr_factor"] == 0.15  # a vector's
    before = [p.detach().clone() for p in layer.parameters()]
    backward(layer)
    optimizer.step()
    assert all(not torch.equal(p, q) for p, q in zip(layer.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("polar", "batches"),
    [
        (NewtonSchulz(3, "quintic"), [[(3, 3)], [(4, 3)]]),
        # The first step of a warm sketch starts from nothing, and later ones from the last step's.
        (LowRank(4, 2, sketch=Warm(), always_sketch=True), [[(3, 2), (0, 1)], [(4, 3)]]),
        # The numbers of a sketch are a function of the step.
        (LowRank(4, 2, always_sketch=True), [[(3, 2), (0, 1)], [(4, 2), (1, 1)]]),
    ],
    ids=["full space", "warm", "Gaussian"],
)
def test_matrices_of_a_group_that_was_added_later_are_in_one_batch_with_the_others(polar, batches):
    """Unless they need other random numbers. A hook sees the larger number of steps."""
    params = [Parameter(gaussian(8, 12, seed=i)) for i in range(3)]
    optimizer, seen = Muon(params[:2], polar=polar), []
    optimizer.register_polar_hook(lambda bucket: seen.append((bucket.step, len(bucket.M))))
    twin = Parameter(params[2].detach().clone())
    alone = Muon([twin], polar=polar)
    for step in range(5):
        for i, p in enumerate(params):
            p.grad = gaussian(8, 12, seed=10 * step + i)
        if step == 3:
            optimizer.add_param_group({"params": params[2:], "algorithm": "muon"})
        seen.clear()
        optimizer.step()
        if step >= 3:
            twin.grad = params[2].grad.clone()
            alone.step()
            assert seen == batches[step - 3]
            assert torch.allclose(params[2], twin, rtol=0, atol=1e-12)


def test_a_group_with_a_rule_of_its_own_is_taken_as_it_is():
    optimizer = Muon([Parameter(gaussian(4, 3))])
    optimizer.add_param_group({"params": nn.Linear(4, 5).parameters(), "algorithm": "adamw"})
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 2]
    with pytest.raises(ValueError, match="fewer than two dimensions"):
        optimizer.add_param_group({"params": [Parameter(torch.zeros(3))], "algorithm": "muon"})
    with pytest.raises(TypeError, match="lr=None: expected a finite number"):
        optimizer.add_param_group({"params": [Parameter(torch.zeros(3))], "lr": None})
    assert len(optimizer.param_groups) == 2  # nothing was added by half


def test_layers_that_were_frozen_get_the_rules_they_would_have_had():
    options = {"lr": 0.02, "polar": LowRank(4, 2), "vectors": SGD(lr=0.1), "heads": AdamW(lr=1e-3)}
    whole = muon_for(SmallGPT("untied"), **options)
    model = SmallGPT("untied")
    model.blocks[0].requires_grad_(False)
    model.wte.requires_grad_(False)
    optimizer = muon_for(model, **options)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    optimizer.add_param_group({"params": frozen, "lr": 0.01})
    assert optimizer.param_groups[-1]["algorithm"] == "muon"  # callers go on to write to the last
    for name in (name for name, _ in model.named_parameters()):
        ours, expected = optimizer.routes[name], whole.routes[name]
        assert (ours.algorithm, ours.matrix, ours.role) == (
            expected.algorithm,
            expected.matrix,
            expected.role,
        )
    for name, factor in (("weight", 2.0), ("bias", 5.0)):  # √(m/n), and 0.1/0.02
        route = optimizer.routes[f"blocks.0.up.{name}"]
        assert (route.lr, route.factors) == (0.01, (pytest.approx(factor),))
    assert optimizer.routes["blocks.0.up.weight"].why == "hidden: Linear, added later"


# --- options of a group added later


def test_options_reach_the_rules_that_are_not_muons():
    model = SmallGPT("untied")
    optimizer = muon_for(model, others=AdamW(weight_decay=0.1))
    options = {
        "weight_decay": 0.0,
        "betas": (0.5, 0.5),
        "nonfinite": "skip",
        "name": "mine",
        "tag": 1,
    }
    optimizer.add_param_group({"params": [Parameter(torch.zeros(3))], **options})
    assert {key: optimizer.param_groups[-1][key] for key in options} == options
    optimizer.add_param_group({"params": [Parameter(torch.zeros(3))], "name": "mine"})
    assert optimizer.param_groups[-1]["name"] == "mine-2"
    assert optimizer.param_groups[-1]["weight_decay"] == 0.1


def test_options_reach_frozen_layers_of_every_rule():
    model = SmallGPT("untied")
    model.blocks[0].requires_grad_(False)
    model.wte.requires_grad_(False)
    optimizer = muon_for(model, vectors=SGD())
    before = len(optimizer.param_groups)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    options = {"weight_decay": 0.3, "nesterov": False, "betas": (0.5, 0.6), "polar": LowRank(4, 2)}
    optimizer.add_param_group({"params": frozen, **options})
    added = optimizer.param_groups[before:]
    assert {group["algorithm"] for group in added} == {"muon", "sgd", "adamw"}
    known = {"muon": {"nesterov", "polar"}, "sgd": {"nesterov"}, "adamw": {"betas"}}
    for group in added:
        fitting = known[group["algorithm"]] | {"weight_decay"}
        assert {key: group[key] for key in fitting} == {key: options[key] for key in fitting}
        assert not (options.keys() - fitting) & group.keys()


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        (
            "vector",
            {"momentun": 0.3},
            r"'momentun'.*'adamw': did you mean 'momentum'.*expected some of",
        ),
        ("vector", {"wd": 0.3}, r"'wd'.*give weight_decay;"),
        ("vector", {"polar": LowRank(4)}, r"'polar' in a group with algorithm='adamw'"),
        ("vector", {"momentum": 0.3}, r"'momentum' in a group with algorithm='adamw'"),
        ("vector", {"use_muon": True}, r"shape \(3,\): Muon updates matrices"),
        ("matrix", {"betas": (0.5, 0.5)}, r"'betas' in a group with algorithm='muon'"),
        ("both", {"momentun": 0.3}, r"'momentun'"),
        ("both", {"use_moun": 1, "learning_rate": 1}, r"'learning_rate'.*give lr;"),
        ("both", {"betas": (0.5, 1.5)}, r"betas=.*expected two numbers"),
    ],
)
def test_options_that_no_rule_of_the_added_parameters_knows(params, options, message):
    optimizer = muon_for(SmallGPT("untied"))
    count = len(optimizer.param_groups)
    vector, matrix = Parameter(torch.zeros(3)), Parameter(gaussian(4, 3))
    added = {"vector": [vector], "matrix": [matrix], "both": [matrix, vector]}[params]
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": added, **options})
    assert len(optimizer.param_groups) == count


def test_a_layout_given_with_a_group_replaces_the_cut_that_was_found():
    model = SmallGPT("untied")
    model.blocks[0].requires_grad_(False)
    optimizer = muon_for(model)
    qkv = model.blocks[0].qkv.weight
    width = qkv.shape[1]
    optimizer.add_param_group({"params": [qkv], "split_columns": (width // 2, width // 2)})
    group = optimizer.param_groups[-1]
    assert (group["split_sizes"], group["split_columns"]) == (None, (width // 2, width // 2))


# --- learning rates of a group added later


def added_rates(optimizer: Muon, **options) -> list[tuple[float, float]]:
    """The rates of AdamW and of Muon in a group of both that is added, and their factors."""
    params = [Parameter(gaussian(4, 3)), Parameter(torch.zeros(3))]
    optimizer.add_param_group({"params": params, **options})
    return [(group["lr"], group["lr_factor"]) for group in optimizer.param_groups[-2:]]


def test_the_rules_of_an_added_group_have_one_rate():
    model = SmallGPT("untied")
    optimizer = muon_for(model, lr=0.5)
    optimizer.load_state_dict(muon_for(model, lr=0.02).state_dict())
    for each in (optimizer, copy.deepcopy(optimizer), unpickled(optimizer)):
        assert added_rates(each, lr=0.01) == [(0.01, 0.15), (0.01, 1.0)]
        assert added_rates(each) == [(0.5, 0.15), (0.5, 1.0)]  # that of the call, as in torch
    optimizer.add_param_group(
        {"params": [Parameter(torch.zeros(3))], "lr": 0.01, "initial_lr": 0.02}
    )
    group = optimizer.param_groups[-1]
    assert (group["lr"], group["initial_lr"], group["lr_factor"]) == (0.01, 0.02, 0.15)


def test_an_added_group_keeps_the_proportions_of_a_rule_with_a_rate_of_its_own():
    optimizer = muon_for(SmallGPT("untied"), lr=0.02, vectors=SGD(lr=0.1))
    ((lr, factor), _) = added_rates(optimizer, lr=0.002)
    assert lr * factor == pytest.approx(0.01)


# --- parameters that the model did not have


def with_new_layers(**options) -> tuple[nn.Module, Muon]:
    """A model that has got a head, an embedding and a hidden layer since its optimizer was made."""
    model = Bag(wte=nn.Embedding(50, 16), trunk=mlp(16, 16, 16), head=nn.Linear(16, 50))
    optimizer = muon_for(model, **options)
    model.wpe = nn.Embedding(9, 16)
    model.trunk.append(nn.Linear(16, 16))
    model.second = nn.Linear(16, 50)
    return model, optimizer


def new_parameters(model: nn.Module) -> list[Parameter]:
    return [p for part in (model.wpe, model.trunk[-1], model.second) for p in part.parameters()]


def test_new_layers_get_the_rules_of_their_twins():
    model, optimizer = with_new_layers(embeddings=AdamW(lr=5e-3), heads=SGD(lr=0.1))
    optimizer.add_param_group({"params": new_parameters(model)})
    last = len(model.trunk) - 1
    found = {row.name: (row.algorithm, row.factors, row.why) for row in optimizer.routes}
    assert found["wpe.weight"] == ("AdamW", (0.25,), "embedding: Embedding, added later")
    why = "head: a row for each entry of wte"
    assert found["head.weight"] == ("SGD", (5.0,), why)
    assert found["second.weight"] == ("SGD", (5.0,), f"{why}, added later")
    assert found["second.bias"] == ("AdamW", (0.15,), "vector: bias of Linear, added later")
    assert found[f"trunk.{last}.weight"] == ("Muon", (1.0,), "hidden: Linear, added later")
    assert {row.lr for row in optimizer.routes} == {0.02}
    assert optimizer.param_groups[-1]["algorithm"] == "muon"
    assert len(optimizer.routes) == len(list(model.parameters()))
    backward(model)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["DataParallel", "compile"])
def test_new_layers_are_known_after_the_wrapper_is_gone(wrap):
    """As where DDP is made anew around a model that has got a layer."""
    model = SmallGPT("untied")
    optimizer = muon_for(wrap(model))
    gc.collect()
    model.second = nn.Linear(model.head.in_features, model.head.out_features, bias=False)
    optimizer.add_param_group({"params": [model.second.weight]})
    route = optimizer.routes["second.weight"]
    assert (route.algorithm, route.role) == ("AdamW", "head")


def test_the_callers_rules_hold_for_new_layers():
    rules = [("head.*", SGD(lr=0.3)), ("*wpe*", "muon"), ("second.bias", None)]
    model = Bag(wte=nn.Embedding(50, 16), wpe=nn.Embedding(9, 16), head=nn.Linear(16, 50))
    model.second, model.trunk = nn.Linear(16, 50), mlp(16, 16, 16)
    splits = {"trunk.0.weight": 2}
    optimizer = muon_for(model, rules=rules, splits=splits, layouts={"trunk.0.weight": "auto"})
    rules.clear()
    splits.clear()
    model.more = Bag(wpe=nn.Embedding(9, 16))
    optimizer.add_param_group({"params": [model.more.wpe.weight, model.second.bias]})
    route = optimizer.routes["more.wpe.weight"]
    assert (route.algorithm, route.why) == ("Muon", "embedding, by rules[1] ('*wpe*'), added later")
    # A parameter that a rule leaves out, and that is added all the same.
    assert optimizer.routes["second.bias"].why == "vector: bias of Linear, added later"


def test_a_group_that_names_muon_gets_it():
    for says in ({"algorithm": "muon"}, {"use_muon": True}):
        model, optimizer = with_new_layers()
        optimizer.add_param_group({"params": [model.second.weight], **says})
        assert optimizer.routes["second.weight"].algorithm == "Muon"


def test_a_new_parameter_does_not_take_the_name_of_the_one_it_replaces():
    model = Bag(wte=nn.Embedding(50, 16), trunk=mlp(16, 16, 16), head=nn.Linear(16, 50))
    optimizer = muon_for(model)
    model.head = nn.Linear(16, 50)
    optimizer.add_param_group({"params": list(model.head.parameters())})
    assert optimizer.routes["head.weight-2"].algorithm == "AdamW"
    names = [row.name for row in optimizer.routes]
    assert len(set(names)) == len(names)


def test_a_copy_routes_new_layers_too():
    model, optimizer = copy.deepcopy(with_new_layers())
    optimizer.add_param_group({"params": new_parameters(model)})
    assert optimizer.routes["second.weight"].algorithm == "AdamW"


def test_layers_of_no_known_model_are_taken_as_given():
    model, optimizer = unpickled(with_new_layers())
    optimizer.add_param_group({"params": new_parameters(model)})
    assert [(g["algorithm"], len(g["params"])) for g in optimizer.param_groups[-2:]] == [
        ("adamw", 2),
        ("muon", 3),
    ]


@pytest.mark.parametrize(
    ("copier", "name"),
    [
        (lambda both: both, None),
        (lambda both: both, "mine"),
        (copy.deepcopy, None),
        (copy.deepcopy, "mine"),
        (unpickled, "wte.weight"),
    ],
)
def test_a_frozen_embedding_that_is_added_is_listed_once(copier, name):
    model = Bag(wte=nn.Embedding(50, 16), trunk=mlp(16, 16, 16), head=nn.Linear(16, 50))
    model.wte.requires_grad_(False)
    model, optimizer = copier((model, muon_for(model)))
    p = model.wte.weight.requires_grad_()
    optimizer.add_param_group({"params": [p] if name is None else [(name, p)]})
    rows = [row for row in optimizer.routes if row.shape == (50, 16) and "head" not in row.name]
    assert len(rows) == 1
    assert rows[0].algorithm != "left out"


# --- names


def test_groups_have_names_of_their_own():
    names = [group["name"] for group in muon_for(SmallGPT("untied")).param_groups]
    assert names == ["hidden", "hidden-2", "embedding", "embedding-2", "head", "vector"]
    optimizer = Muon([Parameter(gaussian(4, 3))])
    optimizer.add_param_group({"params": [Parameter(gaussian(4, 3))], "name": "mine"})
    optimizer.add_param_group({"params": [Parameter(gaussian(4, 3))]})
    assert [group["name"] for group in optimizer.param_groups] == ["muon", "mine", "muon-2"]


def test_a_checkpoint_without_names_leaves_the_names():
    optimizer = Muon([Parameter(gaussian(4, 3))])
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["name"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["name"] == "muon"


# --- checkpoints


def by_width(m: int, n: int) -> float:
    return m / n


def test_a_checkpoint_opens_where_polarstep_is_not_installed(tmp_path):
    model = SmallGPT("untied")
    options = {"shape_scale": by_width, "polar": LowRank(4, 2), "transform": NormalizedRows()}
    optimizer = muon_for(model, **options)
    backward(model)
    optimizer.step()
    path = tmp_path / "checkpoint.pt"
    torch.save({"optimizer": optimizer.state_dict()}, path)
    script = f"""
        import sys
        sys.modules["polarstep"] = None  # importing it is an error from here on
        import torch
        content = torch.load({str(path)!r}, weights_only=True)["optimizer"]
        try:
            import polarstep
        except ImportError:
            print(len(content["state"]), content["param_groups"][0]["name"])
    """
    process = fork("-c", textwrap.dedent(script), imported=("torch",))
    out, errors = process.communicate(timeout=PATIENCE)
    assert out.split() == [str(len(list(model.parameters()))), "hidden"], errors
    again = muon_for(model, **options)
    again.load_state_dict(torch.load(path, weights_only=True)["optimizer"])
    assert again.param_groups[0]["shape_scale"] is by_width
    assert again.param_groups[0]["polar"] == LowRank(4, 2)
    other = muon_for(model, polar=LowRank(4, 2))
    with pytest.raises(ValueError, match=r"shape_scale of the checkpoint is .*by_width"):
        other.load_state_dict(torch.load(path, weights_only=True)["optimizer"])


# --- nothing to do


def test_a_step_without_any_gradient_is_pointed_out_once():
    model = Bag(trunk=mlp(6, 8, 8), head=nn.Linear(8, 3))
    optimizer = muon_for(model)
    model.trunk[0] = nn.Linear(6, 8)  # as get_peft_model does, for all layers
    with pytest.warns(
        UserWarning, match=r"no gradient for any of the optimizer's 6.*muon_for"
    ) as told:
        optimizer.step()
    assert Path(told[0].filename).name == Path(__file__).name  # the caller's own line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        partly = muon_for(model)
        model.head.weight.grad = torch.ones_like(model.head.weight)
        partly.step()  # some have one: usual
