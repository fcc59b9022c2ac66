"""``muon_for``: options, rules, errors, and training with what it builds."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.routing.sample_models import VOCABULARY, Bag, Block, SmallGPT, mlp
from torch import Tensor, nn

import polarstep
from polarstep import SGD, AdamW, LowRank, Muon, NewtonSchulz, muon_for
from polarstep.routing.roles import RULES
from polarstep_lab.models.convnet import ConvNet, ConvNetConfig

PAGE = Path(__file__).parents[2] / "docs" / "routing.md"


def test_every_role_has_its_rule_and_its_group():
    optimizer = muon_for(
        SmallGPT("untied"),
        lr=0.03,
        polar=NewtonSchulz(3, "cubic"),
        others=SGD(lr=0.5),
        embeddings=AdamW(lr=0.2, betas=(0.8, 0.9)),
        heads=AdamW(lr=0.1),
        nonfinite="skip",
        seed=3,
    )
    summary = [
        (g["role"], g["algorithm"], g["lr"], g["lr_factor"] * 0.03, g["nonfinite"])
        for g in optimizer.param_groups
    ]
    assert summary == [
        ("hidden", "muon", 0.03, 0.03, "skip"),  # q, k, v
        ("hidden", "muon", 0.03, 0.03, "skip"),
        ("embedding", "adamw", 0.03, pytest.approx(0.2), "skip"),
        ("head", "adamw", 0.03, pytest.approx(0.1), "skip"),
        ("vector", "sgd", 0.03, pytest.approx(0.5), "skip"),
    ]
    assert optimizer.param_groups[0]["polar"] == NewtonSchulz(3, "cubic")
    assert optimizer.param_groups[0]["seed"] == 3
    assert optimizer.param_groups[2]["betas"] == (0.8, 0.9)


def test_all_parameters_are_routed_exactly_once():
    for model in (SmallGPT("tied"), ConvNet(ConvNetConfig((8, 8, 8))), nn.LSTM(4, 4, 2)):
        optimizer = muon_for(model)
        grouped = [p for group in optimizer.param_groups for p in group["params"]]
        expected = [p for p in model.parameters() if p.requires_grad]
        assert len(grouped) == len(expected)
        assert {id(p) for p in grouped} == {id(p) for p in expected}


def test_rules_come_first_and_the_first_match_wins():
    model = SmallGPT("untied")
    optimizer = muon_for(
        model,
        rules=[
            ("blocks.0.up.weight", {"lr": 0.5, "polar": LowRank(4, 2)}),
            ("blocks.0.*", SGD(lr=0.25)),
            (nn.LayerNorm, None),
            (lambda name, p: p.shape[0] == VOCABULARY, "muon"),
        ],
    )
    assert optimizer.routes["blocks.0.up.weight"].factors == (25 * 4**0.5,)  # 0.5 = 0.02 × 25
    assert optimizer.routes["blocks.0.up.bias"].factors == (12.5,)
    assert (
        optimizer.routes["blocks.0.up.weight"].why == "hidden, by rules[0] ('blocks.0.up.weight')"
    )
    assert optimizer.routes["blocks.0.down.weight"].algorithm == "SGD"
    assert optimizer.routes["blocks.0.norm.weight"].algorithm == "SGD"
    assert optimizer.routes["blocks.1.norm.weight"].algorithm == "left out"
    assert optimizer.routes["wte.weight"].algorithm == "Muon"
    assert optimizer.routes["wte.weight"].role == "embedding"
    assert all(p is not model.norm.weight for g in optimizer.param_groups for p in g["params"])


def test_muon_rules_pass_over_biases():
    optimizer = muon_for(nn.Linear(4, 4), rules=[(nn.Linear, "muon")])
    assert optimizer.routes["weight"].algorithm == "Muon"
    assert optimizer.routes["bias"].algorithm == "AdamW"


def test_a_rule_finds_a_name_with_brackets():
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("a[0]", "b", "head")})
    optimizer = muon_for(model, rules=[("a[0].weight", SGD())])
    assert optimizer.routes["a[0].weight"].algorithm == "SGD"
    assert optimizer.routes["b.weight"].algorithm == "Muon"


def test_a_rule_for_a_module_holds_for_all_inside_it():
    model = SmallGPT("untied")
    optimizer = muon_for(model, rules=[(model.blocks[1], AdamW(lr=0.5)), (model.head, "muon")])
    for row in optimizer.routes:
        assert (row.factors == (25.0,)) == row.name.startswith("blocks.1.")
    assert optimizer.routes["head.weight"].why == "head, by rules[1] (a Linear)"
    with pytest.raises(ValueError, match=r"rules\[0\] \(a Linear\) matches no parameter"):
        muon_for(model, rules=[(nn.Linear(2, 2), None)])
    with pytest.raises(
        TypeError, match=r"a rule for a tensor of shape \(50, 16\): expected a patt"
    ):
        muon_for(model, rules=[(model.head.weight, None)])


def test_a_rule_for_a_class_holds_for_all_inside_it():
    optimizer = muon_for(SmallGPT("untied"), heads=AdamW(lr=0.1), rules=[(Block, {"lr": 0.5})])
    factors = {g["lr_factor"] for g in optimizer.param_groups if g["role"] == "hidden"}
    assert factors == {25.0}
    optimizer = muon_for(
        Bag(attention=nn.MultiheadAttention(8, 2), trunk=mlp(8, 8, 3)),
        rules=[(nn.MultiheadAttention, SGD())],
    )
    assert optimizer.routes["attention.out_proj.weight"].algorithm == "SGD"
    assert optimizer.routes["trunk.0.weight"].algorithm == "Muon"


@pytest.mark.parametrize("parts", [3, (16, 16, 16), (32, 8, 8)])
def test_fused_projections(parts):
    optimizer = muon_for(SmallGPT("untied"), splits={"*.qkv.weight": parts})
    split = (16, 16, 16) if parts == 3 else parts
    matrix = "3·(16×16)" if split == (16, 16, 16) else "32×16 + 8×16 + 8×16"
    assert optimizer.routes["blocks.1.qkv.weight"].matrix == matrix
    assert optimizer.routes["blocks.1.up.weight"].matrix == "64×16"
    assert [g["split_sizes"] for g in optimizer.param_groups if g["algorithm"] == "muon"] == [
        split,
        None,
    ]


# --- errors

ERRORS = {
    "nothing for Muon":
        (lambda: muon_for(nn.Linear(3, 3)), ValueError,
         r"no parameter of Linear(.|\n)*weight: head: the model's last layer\n(.|\n)*"
     r'rules=\[\("weight", "muon"\)\]'),
    "vectors only": (lambda: muon_for(nn.LayerNorm(3)), ValueError, "none is trainable here"),
    "all frozen":
        (lambda: muon_for(mlp(3, 3, 3).requires_grad_(False)), ValueError,
         r"would be updated by Muon:\n  all 4 parameters: frozen, requires_grad=False\nUnfreeze"),
    "all by rules":
        (lambda: muon_for(mlp(3, 3, 3), rules=[("0.*", AdamW())]), ValueError,
         r"0\.weight and 0|hidden, by rules\[0\]"),
    "no parameters": (lambda: muon_for(nn.ReLU()), ValueError, "ReLU has no parameters: expected a"),
    "no module": (lambda: muon_for([1]), TypeError, r"model is a list.*polarstep\.Muon\(params\)"),
    "torch's AdamW":
        (lambda: muon_for(mlp(3, 3, 3), others=torch.optim.AdamW), TypeError,
         r"others=.*expected polarstep\.AdamW\(\.\.\.\)"),
    "others=None": (lambda: muon_for(mlp(3, 3, 3), others=None), TypeError, "others=None"),
    "heads='muon'": (lambda: muon_for(mlp(3, 3, 3), heads="muon"), TypeError, r"heads='muon'.*rules="),
    "typo in a pattern":
        (lambda: muon_for(SmallGPT("untied"), rules=[("haed.weight", AdamW())]), ValueError,
         r"rules\[0\] \('haed\.weight'\) matches no parameter; the nearest names are head\.weight"),
    "type that is not there":
        (lambda: muon_for(mlp(3, 3, 3), rules=[(nn.Conv2d, AdamW())]), ValueError,
         r"rules\[0\] \(Conv2d\) matches no parameter; there are names such as 0\.weight"),
    "shadowed rule":
        (lambda: muon_for(mlp(3, 3, 3), rules=[("*", "muon"), ("0.weight", AdamW())]), ValueError,
         r"rules\[1\] \('0\.weight'\) has no effect: rules\[0\] \('\*'\) came first"),
    "vector to Muon":
        (lambda: muon_for(mlp(3, 3, 3), rules=[("*.bias", "muon")]), ValueError,
         r"sends 0\.bias and 1 more to Muon.*expected parameters of two dimensions"),
    "unknown target":
        (lambda: muon_for(mlp(3, 3, 3), rules=[("*", "adam")]), TypeError,
         r"rules\[0\] \('\*'\) has the target 'adam': expected polarstep\.AdamW"),
    "algorithm in options":
        (lambda: muon_for(mlp(3, 3, 3), rules=[("*", {"algorithm": "sgd"})]), ValueError,
         "'algorithm' among its options"),
    "misspelt option":
        (lambda: muon_for(mlp(3, 3, 3), rules=[("0.*", {"momentun": 0.5})]), ValueError,
         "did you mean 'momentum'"),
    "no pair":
        (lambda: muon_for(mlp(3, 3, 3), rules=["head.*"]), TypeError,
         r"rules\[0\] is 'head\.\*': expected a pair"),
    "strange matcher":
        (lambda: muon_for(mlp(3, 3, 3), rules=[(3, "muon")]), TypeError,
         "a rule for 3: expected a pattern"),
    "splits match nothing":
        (lambda: muon_for(SmallGPT("untied"), splits={"*.kqv.weight": 3}), ValueError,
         r"splits\['\*\.kqv\.weight'\] matches no parameter .* blocks\.0\.qkv\.weight"),
    "splits do not divide":
        (lambda: muon_for(SmallGPT("untied"), splits={"*.qkv.weight": 5}), ValueError,
         r"=5: blocks\.0\.qkv\.weight has 48 rows, which 5 does not divide"),
    "splits of wrong size":
        (lambda: muon_for(SmallGPT("untied"), splits={"*.qkv.weight": (16, 16)}), ValueError,
         r"blocks\.0\.qkv\.weight has split_sizes=\(16, 16\), which sum to 32"),
    "splits of another type":
        (lambda: muon_for(SmallGPT("untied"), splits={"*.qkv.weight": 3.0}), TypeError,
         r"splits\['\*\.qkv\.weight'\]=3\.0: expected the number of equal parts, or the rows of each"),
    "splits of a head":
        (lambda: muon_for(mlp(8, 8, 8), splits={"2.weight": 2}), ValueError,
         r"splits\['2\.weight'\] has no effect: 2\.weight goes to AdamW \(head: the model's last layer\)"
     r'.*rules=\[\("2\.weight", "muon"\)\]'),
    "splits of what a rule sent away":
        (lambda: muon_for(mlp(8, 8, 8, 8), splits={"0.weight": 2}, rules=[("0.*", None)]), ValueError,
         r"has no effect: 0\.weight is left out \(hidden, by rules\[0\]"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript itself
def test_a_scripted_model_is_trained_through_the_module_it_was_made_from():
    model = mlp(4, 4, 4, 2)
    scripted = torch.jit.script(model)
    with pytest.raises(TypeError, match="expected the module it was made from; its parameters are"):
        muon_for(scripted)
    optimizer = muon_for(model)
    before = scripted(torch.ones(2, 4)).sum()
    before.backward()
    optimizer.step()
    assert scripted(torch.ones(2, 4)).sum() < before


@pytest.mark.parametrize("where", ["itself", "inside", "unflattened"])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.export itself
def test_an_exported_model_is_trained_through_the_module_that_was_exported(where):
    """torch.export hides the types of layers; Muon would update the embedding."""
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    batch = torch.tensor([1, 2])
    program = torch.export.export(model, (batch,))
    exported = torch.export.unflatten(program) if where == "unflattened" else program.module()
    given, told = exported, "model is a .* made by torch.export, .*: expected the module that was "
    if where == "inside":
        given, told = nn.Sequential(exported), "model has at '0' a .* made by torch.export"
    with pytest.raises(TypeError, match=told):
        muon_for(given)
    if where == "itself":
        optimizer = muon_for(model)
        before = exported(batch).sum()
        before.backward()
        optimizer.step()
        assert exported(batch).sum() < before


def test_a_traced_model_is_routed_as_its_module():
    model = nn.Sequential(nn.Embedding(8, 4), mlp(4, 4, 4, 2))
    model.bare = nn.Parameter(torch.ones(4, 4))
    traced = torch.fx.symbolic_trace(model)
    found = {row.name: row.algorithm for row in muon_for(traced).routes}
    assert found == {row.name: row.algorithm for row in muon_for(model).routes if row.name in found}


def test_splits_may_match_others_beside_muons():
    """A broad pattern, and a weight that is frozen for now, are no misunderstanding."""
    model = mlp(8, 8, 8, 8)
    model[2].weight.requires_grad_(False)
    routes = muon_for(model, splits={"[04].weight": 2, "2.weight": 4}).routes
    assert (routes["0.weight"].matrix, routes["4.weight"].matrix) == ("2·(4×8)", "8×8")


@pytest.mark.parametrize("case", ERRORS)
def test_errors_state_value_expectation_and_remedy(case):
    call, kind, text = ERRORS[case]
    with pytest.raises(kind, match=text):
        call()


# --- training


def batches(seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(0, VOCABULARY, (16, 1), generator=generator)
        yield (start + torch.arange(8)) % VOCABULARY


def train(model: nn.Module, optimizer: Muon, steps: int, seed: int = 0) -> list[float]:
    losses = []
    for _, tokens in zip(range(steps), batches(seed), strict=False):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("head", ["untied", "tied", "functional"])
def test_training_decreases_the_loss(head):
    torch.manual_seed(0)
    model = SmallGPT(head)
    optimizer = muon_for(
        model, others=AdamW(lr=0.01), splits={"*.qkv.weight": 3}, polar=LowRank(8, 2)
    )
    losses = train(model, optimizer, 60)
    assert losses[-1] < 0.5 * losses[0]


def test_state_moves_between_two_optimizers_for_the_same_model(tmp_path):
    torch.manual_seed(0)
    model = SmallGPT("tied")
    options = {"polar": LowRank(8, 2), "others": AdamW(lr=0.01), "seed": 5}
    optimizer = muon_for(model, **options)
    train(model, optimizer, 3)
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "checkpoint.pt")
    expected = train(model, optimizer, 3, seed=1)

    weights, state = torch.load(tmp_path / "checkpoint.pt")
    resumed = SmallGPT("tied")
    resumed.load_state_dict(weights)
    second = muon_for(torch.compile(resumed, backend="eager"), **options)
    second.load_state_dict(state)
    assert second.routes == optimizer.routes
    assert train(resumed, second, 3, seed=1) == expected


def test_a_scheduler_may_have_a_curve_for_each_role():
    optimizer = muon_for(SmallGPT("untied"), lr=0.02, heads=AdamW(lr=0.1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        [
            (lambda k: 0.5**k) if g["role"] == "head" else (lambda k: 1.0)
            for g in optimizer.param_groups
        ],
    )
    optimizer.step()
    scheduler.step()
    rates = {g["role"]: g["lr"] for g in optimizer.param_groups}
    assert rates == {"hidden": 0.02, "embedding": 0.02, "head": 0.01, "vector": 0.02}


# --- the page about it


def test_examples_of_the_docs_run():
    failed, tried = doctest.testfile(
        str(PAGE),
        module_relative=False,
        optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS,
        encoding="utf-8",
    )
    assert tried > 5
    assert failed == 0


def test_the_training_step_to_capture_runs(monkeypatch):
    """Without a GPU nothing is captured, and the block of the page is a step as it stands."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    model = mlp(8, 8, 8, 2)
    before = model[0].weight.detach().clone()
    names = {
        "torch": torch,
        "model": model,
        "optimizer": muon_for(model),
        "batch": torch.ones(2, 8),
    }
    exec(compile(block, str(PAGE), "exec"), names | {"loss_of": lambda y: y.square().mean()})
    assert not torch.equal(model[0].weight, before)


def test_docs_list_the_built_in_rules_in_order():
    table = PAGE.read_text("utf-8").partition("| rule |")[2].partition("\n\n")[0]
    listed = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert listed == [rule.__name__ for rule in RULES]


def test_muon_for_is_public():
    assert polarstep.muon_for is muon_for
    assert "muon_for" in polarstep.__all__
