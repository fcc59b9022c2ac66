"""The routing table."""

from __future__ import annotations

import pickle
import re

import pytest
import torch
from tests.routing.sample_models import Bag, Block, mlp
from torch import nn

from polarstep import AdamW, LowRank, Muon, muon_for
from polarstep.routing.routes import routes_of
from polarstep_lab.models.gpt import GPT, GPTConfig


def test_table_of_a_hundred_layers_is_short_and_aligned():
    model = GPT(GPTConfig(300, 32, 100, 2, 8, attention_free=(6,)))
    optimizer = muon_for(model, polar=LowRank(8, 4), embeddings=AdamW(lr=0.01))
    lines = str(optimizer.routes).splitlines()
    assert len(lines) <= 16
    assert max(map(len, lines)) <= 120
    assert re.split("  +", lines[0]) == [
        "parameter",
        "as matrices",
        "algorithm",
        "polar map",
        "why",
    ]
    assert re.split("  +", lines[1])[:2] == [
        "blocks.{0…5,7…99}.attention.query.weight ×99",
        "32×32",
    ]
    assert any(line.startswith("blocks.{0…99}.mlp.up.weight ×100 ") for line in lines)
    assert any(line.startswith("[1] LowRank(8+4, h=1, Gaussian) of ") for line in lines)
    starts = {line.index("hidden:") for line in lines if "hidden:" in line}
    assert starts == {lines[0].index("why")}
    assert len(optimizer.routes.rows) == 99 * 4 + 100 * 2 + 2
    muon = 99 * 4 * 32 * 32 + 100 * 2 * 128 * 32
    assert lines[-2].split()[:5] == ["Muon", f"{muon:,}", "parameters", "in", "596"]
    assert lines[-1].split()[:5] == ["AdamW", f"{2 * 300 * 32:,}", "parameters", "in", "2"]


def test_a_table_too_wide_for_120_columns_folds_and_loses_nothing():
    deep = Bag(a_very_long_name_of_a_module_that_holds_the_rest=Bag(block_of_many_words=Block()))
    model = Bag(encoder_of_the_whole_model_with_a_long_name=deep)
    optimizer = muon_for(model, polar=LowRank(2, 2, power=0))
    text = str(optimizer.routes)
    assert max(map(len, text.splitlines())) <= 120
    joined = re.sub(r"\s", "", text)
    for row in optimizer.routes:
        for part in row.name.split("."):
            assert part in joined, part
        assert re.sub(r"\s", "", row.polar) in joined


@pytest.mark.parametrize(("width", "lines"), [(80, 6), (120, 2)])
def test_a_table_is_as_wide_as_asked_and_folded_into_few_lines(width, lines):
    name = (
        "base_model.model.model.layers.0.self_attention.projection_to_queries.lora_A.default.weight"
    )
    group = {"params": [(name, nn.Parameter(torch.eye(3)))], "lr_factor": 0.0884}
    why = "adapter: LoRA A of the projection to queries 256×256, s = 5.65685"
    text = routes_of(Muon([group]).param_groups, {name: why}).table(width)
    assert max(map(len, text.splitlines())) <= width
    assert text.splitlines().index("") <= 1 + lines  # the header, and the one row


def test_a_terminal_has_its_own_width(monkeypatch):
    optimizer = muon_for(Bag(a_module_with_a_long_name_that_holds_all_others=Block()))
    assert str(optimizer.routes) == optimizer.routes.table(120)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "85")
    assert str(optimizer.routes) == optimizer.routes.table(85) != optimizer.routes.table(120)
    monkeypatch.setenv("COLUMNS", "20")
    assert str(optimizer.routes) == optimizer.routes.table(80)


def test_table_says_where_the_low_rank_map_runs_in_full_space():
    optimizer = muon_for(mlp(64, 8, 64, 64, 3), polar=LowRank(8, 4))
    assert "full space: ℓ=12 ≥ 8" in optimizer.routes["0.weight"].polar
    assert "LowRank(8+4" in optimizer.routes["4.weight"].polar


def test_collapsed_rows_stand_for_exactly_the_names_they_show():
    experts = [nn.ModuleList(Block() for _ in range(n)) for n in (3, 2, 3)]
    lines = str(muon_for(Bag(layers=nn.ModuleList(experts))).routes).splitlines()
    ups = [line.split("  ")[0] for line in lines if "up.weight" in line]
    assert ups == ["layers.{0,2}.{0…2}.up.weight ×6", "layers.1.{0…1}.up.weight ×2"]


def test_rows_of_different_groups_or_shapes_are_not_collapsed():
    optimizer = muon_for(mlp(8, 8, 8, 8, 4), rules=[("2.weight", {"lr": 0.5})])
    names = [line.split("  ")[0] for line in str(optimizer.routes).splitlines()]
    assert {"2.weight", "{0,4}.weight ×2", "6.weight"} <= set(names)


def test_a_name_that_is_no_parameter_is_answered_with_the_nearest():
    with pytest.raises(KeyError, match=r"'0\.wieght' is no parameter.*nearest names are 0\.weight"):
        muon_for(mlp(8, 8, 8, 2)).routes["0.wieght"]


def test_plain_muon_has_routes_too():
    params = [nn.Parameter(torch.randn(4, 6)) for _ in range(3)]
    bias = nn.Parameter(torch.zeros(4))
    optimizer = Muon([{"params": params}, {"params": [bias], "algorithm": "sgd", "lr": 0.1}])
    text = str(optimizer.routes)
    assert "group 0, parameter {0…2} ×3" in text
    assert "group 1, parameter 0" in text
    assert optimizer.routes["group 1, parameter 0"].lr == 0.1
    assert "parameter {0…2} ×3  4×6" in str(Muon(params).routes)
    named = Muon([("w", params[0])])
    assert named.routes["w"].why == "as given"
    with pytest.raises(KeyError, match="nobody"):
        named.routes["nobody"]


def test_routes_show_the_learning_rate_of_now():
    optimizer = muon_for(mlp(4, 4, 4))
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    assert optimizer.routes["0.weight"].lr == 0.01
    assert "Muon, lr 0.01 " in str(optimizer.routes)


def test_pickling_keeps_the_routes():
    model = mlp(4, 4, 4, 2)
    model[0].requires_grad_(False)
    optimizer = muon_for(model)
    assert pickle.loads(pickle.dumps(optimizer)).routes == optimizer.routes


def test_the_reason_speaks_of_a_cut_only_where_there_is_one():
    optimizer = muon_for(mlp(4, 8, 4), splits={"*.weight": 2})
    assert optimizer.routes["0.weight"].why == "hidden: cut by splits['*.weight']"
    assert optimizer.routes["2.weight"].why == "head: the model's last layer"


def test_routes_by_name_and_by_number():
    optimizer = muon_for(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)))
    routes = optimizer.routes
    assert routes[0] is routes["0.weight"]
    assert routes[-1] is routes.rows[-1]
    assert "0.weight" in routes
    assert routes[0] in routes
    assert "7.weight" not in routes


@pytest.mark.parametrize("width", [12, 2, 0, -1])
def test_a_table_of_hardly_any_width_is_as_narrow_as_it_can_be(width):
    routes = muon_for(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))).routes
    assert routes.table(width) == routes.table(12)
    with pytest.raises(TypeError, match="width='80': expected a number of characters"):
        routes.table("80")


def test_layers_of_two_hundred_widths_are_one_row():
    net = nn.Sequential(*[nn.Linear(10 + i, 11 + i) for i in range(200)])
    lines = str(muon_for(net).routes).splitlines()
    assert len(lines) <= 12
    row = next(line for line in lines if line.startswith("{0…198}.weight ×199 "))
    assert "199 sizes, 11×10 … 209×208" in row
    assert "lr 0.02 × 1 … 1.05" in row
    few = nn.Sequential(*[nn.Linear(10 + i, 11 + i) for i in range(5)])
    assert "11×10 " in str(muon_for(few).routes)


@pytest.mark.parametrize("late", [True, False])
def test_the_table_shows_the_rate_that_a_scheduler_multiplies(late):
    optimizer = muon_for(mlp(4, 4, 4))
    before = str(optimizer.routes)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.0 if late else 1.0)
    text, note = str(optimizer.routes), "By a scheduler, now: lr 0 in place of 0.02"
    assert (note in text) == late
    assert text.replace(note + "\n\n", "") == before
    row = optimizer.routes["0.weight"]
    assert (row.lr, row.base_lr) == (0.0 if late else 0.02, 0.02)


def test_the_height_of_a_cycle_is_its_rate():
    optimizer = muon_for(mlp(4, 4, 4))
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=100)
    assert "Muon, lr 0.02 " in str(optimizer.routes)
    assert "now: lr 0.0008 in place of 0.02" in str(optimizer.routes)


def test_a_notebook_shows_a_table_with_every_cell():
    optimizer = muon_for(mlp(4, 4, 4), rules=[("0.bias", None)])
    text = optimizer._repr_html_()
    assert text == optimizer.routes._repr_html_()
    assert text.count("<tr>") == 1 + len(optimizer.routes)
    for row in optimizer.routes:
        for cell in (row.name, row.matrix, row.why.replace("'", "&#x27;")):
            assert f"{cell}</td>" in text
