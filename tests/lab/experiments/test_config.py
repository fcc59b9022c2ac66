"""Configs, recipes, schedules and ablations: complete, checked, and read back as written."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.lab.experiments.small import tiny_gpt

import polarstep as ps
from polarstep_lab.axes import AXES, apply_axis
from polarstep_lab.config import (
    ConfigError,
    RunConfig,
    Stage,
    with_overrides,
)
from polarstep_lab.data.shards import write_shard
from polarstep_lab.methods import METHODS, OURS, find_method, find_methods
from polarstep_lab.models.convnet import ConvNet
from polarstep_lab.models.gpt import GPT
from polarstep_lab.optimizers.build import (
    build_optimizer,
    build_polar,
    optimizer_gflops,
)
from polarstep_lab.optimizers.schedule import RunSchedule, place_in_stages
from polarstep_lab.recipes import RECIPES, find_recipe, resolve, search_space, tuned
from polarstep_lab.storage import write_json
from polarstep_lab.train.language import LanguageTask

EVERY = [(recipe, method.slug) for recipe in RECIPES for method in (*METHODS, *OURS)]


@pytest.mark.parametrize(("recipe", "method"), EVERY)
def test_every_recipe_is_complete_for_every_method_and_survives_json(recipe, method):
    config = resolve(recipe, method, seed=3)
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert (config.recipe, config.rule.slug, config.seed) == (recipe, method, 3)
    assert (config.optimizer.polar.rank is not None) == config.rule.randomized


def test_a_method_has_one_name_in_the_paper_and_one_on_a_command_line():
    both = (*METHODS, *OURS)
    assert len({name for method in both for name in (method.name, method.slug)}) == 2 * len(both)
    for method in both:
        assert find_method(method.name) is find_method(method.slug) is method


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optimizer.lrr", 1, r"no setting optimizer.lrr: did you mean 'lr'\?"),
        ("optimiser.lr", 1, r"no setting optimiser: did you mean 'optimizer'\?"),
        ("optimizer.lr.x", 1, r"no setting optimizer.lr.x"),
        ("optimizer.lr", "fast", r"optimizer.lr='fast': expected a valid number"),
        ("optimizer.lr", -1.0, r"optimizer.lr=-1.0: expected at least 0"),
        ("optimizer.lr", float("inf"), r"optimizer.lr=inf: expected a finite number"),
        ("optimizer.momentum", 1.0, r"optimizer.momentum=1.0: expected below 1"),
        ("optimizer.polar.rank", 0, r"optimizer.polar.rank=0: expected at least 1"),
        ("optimizer.polar.steps", "7", r"optimizer.polar.steps='7': expected a valid integer"),
        ("optimizer.polar.rank", 2.5, r"optimizer.polar.rank=2.5: expected a valid integer"),
        ("optimizer.polar.solver", "septic", r"optimizer.polar.solver='septic': expected one of"),
        ("optimizer.polar.power", 0.3, r"optimizer.polar.power=0.3: expected a multiple of 0.5"),
        ("model.heads", 3, r"model.width=128 with model.heads=3"),
        ("model.context", 64, r"sequences of 128 tokens are longer than model.context=64"),
        ("model.layers", True, r"model.layers=True: expected a valid integer"),
        ("data.stages", [], r"data.stages=\[\]: expected at least 1 item"),
        ("data.stages.4.steps", 3, r"no setting data.stages.4: there is 0"),
        ("data.stages.0.steps", 0, r"data.stages.0.steps=0: expected at least 1"),
        (
            "data.stages",
            [{"step": 1}],
            r"stages.0.steps: expected a value.*no setting .*0.step;",
        ),
        ("data.stages", 3, r"data.stages=3: expected a valid"),
        ("data.train", 3, r"data.train=3: expected a valid"),
        ("data.train", ["a", 3], r"data.train.1=3: expected a valid string"),
        ("data.epochs", 2, r"no setting data.epochs"),
        ("schedule.cooldown", 0.0, r"schedule.cooldown=0.0: expected above 0"),
        ("schedule.extension", 1000, r"schedule.extension=1000 leaves nothing of the 160 steps"),
        ("evaluation.every", 0, r"evaluation.every=0: expected at least 1"),
        ("runtime.precision", "half", r"runtime.precision='half': expected one of auto"),
        ("data", "", r"data='': data is a group of settings; set one of data.train, data.val"),
        ("optimizer.polar", 3, r"optimizer.polar=3: .* set one of optimizer.polar.solver"),
        ("optimizer.lr.x.y", 3, r"no setting optimizer.lr.x: optimizer.lr is the value"),
        ("seed", 5, r"seed=5: no setting to override; choose it with --seed 5 .*--seeds"),
        ("method", "adamw", r"method=adamw: .* choose it with --method adamw"),
        ("recipe", "nanogpt", r"recipe=nanogpt: .* `polarstep run nanogpt`"),
        ("benchmark", "cifar10", r"benchmark=cifar10: .* choose another recipe"),
    ],
)
def test_bad_settings_are_named(key, value, message):
    with pytest.raises(ConfigError, match=message):
        resolve("nanogpt-toy", "rand-muon", overrides={key: value})


def test_batch_norm_forbids_micro_batches():
    with pytest.raises(ConfigError, match="batch norm"):
        resolve("cifar10", "muon", overrides={"runtime.micro_batch": 4})


def test_overrides_reach_the_config_and_nothing_else():
    plain = resolve("nanogpt-toy", "rand-muon")
    changed = with_overrides(plain, {"optimizer.polar.rank": 7, "data.stages.0.steps": 9})
    assert changed.optimizer.polar.rank == 7
    assert changed.data.steps == 9
    before, after = plain.to_dict(), changed.to_dict()
    after["optimizer"]["polar"]["rank"] = before["optimizer"]["polar"]["rank"]
    after["data"]["stages"][0]["steps"] = before["data"]["stages"][0]["steps"]
    assert before == after


def test_one_pattern_need_not_be_a_list():
    config = resolve("nanogpt-small", "muon", overrides={"data.train": "a/*.bin"})
    assert config.data.train == ("a/*.bin",)


def test_model_and_data_must_be_the_benchmarks():
    text, images = resolve("nanogpt-toy", "muon").to_dict(), resolve("cifar10", "muon").to_dict()
    for key in ("model", "data"):
        with pytest.raises(ConfigError, match="does not go with this model and this data"):
            RunConfig.from_dict(text | {key: images[key]})
    with pytest.raises(ConfigError, match=r"no setting a; no setting b"):
        RunConfig.from_dict(text | {"a": 1, "b": 2})


def test_unknown_recipes_and_missing_methods():
    with pytest.raises(ConfigError, match=r"did you mean 'nanogpt-toy'\?"):
        find_recipe("nanogpt-toi")
    with pytest.raises(ConfigError, match="no method given"):
        resolve("cifar10")


def test_a_recipe_file_is_a_recipe(tmp_path):
    path = tmp_path / "best.json"
    content = {"recipe": "nanogpt-toy", "method": "muon", "overrides": {"optimizer.lr": 0.125}}
    path.write_text(json.dumps(content))
    config = resolve(str(path), overrides={"model.layers": 2})
    assert (config.optimizer.lr, config.model.layers) == (0.125, 2)
    with pytest.raises(ConfigError, match="is a recipe for muon, not for adamw"):
        resolve(str(path), "adamw")
    path.write_text(json.dumps(content | {"overrides": {"seed": 5}}))
    with pytest.raises(ConfigError, match="seed=5: no setting to override"):
        resolve(str(path))
    path.write_text("{}")
    with pytest.raises(
        ConfigError, match=r"is not a recipe file: .*as in \{.*whole config, .* is none"
    ):
        resolve(str(path))


def test_tuned_values_are_taken_over_and_can_be_overridden():
    for recipe in RECIPES:
        for method in METHODS:
            found = tuned(recipe, method)
            config = resolve(recipe, method)
            assert set(found) <= set(search_space(recipe, method))
            for key, value in found.items():
                node = config.to_dict()
                for part in key.split("."):
                    node = node[part]
                assert node == value
    assert resolve("nanogpt-toy", "muon", overrides={"optimizer.lr": 0.5}).optimizer.lr == 0.5


def test_search_spaces_name_settings_and_hold_the_recipes_values():
    for recipe in RECIPES:
        for method in METHODS:
            space = search_space(recipe, method)
            assert "optimizer.lr" in space
            config = resolve(recipe, method)
            for key, span in space.items():
                middle = (span.low + span.high) / 2
                assert with_overrides(config, {key: middle}) != config


# --- schedules -----------------------------------------------------------------------------------


def test_the_papers_nanogpt_schedule():
    config = resolve("nanogpt", "muon")
    schedule = RunSchedule(config.schedule, config.data.steps)
    stages = config.data.stages
    assert config.data.steps == 1490
    lrs = [schedule.lr(s, place_in_stages(stages, 2048, s).stage.lr) for s in range(1490)]
    assert lrs[0] == lrs[482] == 1.0
    assert lrs[483] == 1.52
    # Cool-down over the last 60% of 1450 steps, to 0.15, where the 40 extra steps stay.
    assert lrs[580] == pytest.approx(1.52)
    assert lrs[581] < 1.52
    assert lrs[1449] > lrs[1450] == lrs[1489] == 0.15
    middle = (1450 - 1015) / (0.6 * 1450)
    assert lrs[1015] == pytest.approx(middle * 1.73 + (1 - middle) * 0.15)
    momenta = [schedule.momentum(s, config.optimizer.momentum) for s in range(1490)]
    assert momenta[0] == 0.85
    assert momenta[298] == momenta[1440] == config.optimizer.momentum
    assert momenta[149] == pytest.approx((0.85 + config.optimizer.momentum) / 2)
    assert momenta[1465] == pytest.approx((0.85 + config.optimizer.momentum) / 2)


def test_places_count_windows_and_tokens():
    stages = (Stage(2, 5, 4), Stage(3, 2, 8))
    places = [place_in_stages(stages, 8, step) for step in range(6)]
    # Two sequences of 4 fit a window of 8: five need three windows.
    assert [place.windows for place in places] == [0, 3, 6, 8, 10, 12]
    assert [place.tokens for place in places] == [0, 20, 40, 56, 72, 88]
    assert [place.stage.lr for place in places] == [1.0] * 6
    with pytest.raises(ValueError, match="beyond the last stage"):
        place_in_stages(stages, 8, 6)


def test_stages_of_shorter_sequences_cut_windows():
    stages = [
        {"steps": 2, "sequences": 5, "sequence_length": 12, "lr": 1.0},
        {"steps": 2, "sequences": 2, "sequence_length": 32, "lr": 1.0},
    ]
    task = LanguageTask.build(tiny_gpt(data__stages=stages), torch.device("cpu"))
    inputs, targets = task.batch(0)
    assert inputs.shape == (5, 12)
    window, following = task.train.train(0, 0, 1)
    assert torch.equal(inputs[1], window[0, 12:24])
    assert torch.equal(targets[1], following[0, 12:24])
    # The second stage goes on where the first one stopped: no window is seen twice.
    later = task.batch(2)[0]
    assert torch.equal(later, task.train.train(0, 6, 2)[0])


@pytest.mark.parametrize(
    ("vocab_size", "fits"), [(64, False), (65, True), (128, True), (192, True), (193, False)]
)
def test_a_vocabulary_other_than_the_shards_is_refused(vocab_size, fits, tmp_path):
    for part in ("train", "val"):
        write_shard(tmp_path / f"a_{part}_0.bin", np.arange(2000) % 60)
    write_json(tmp_path / "vocabulary.json", {"vocab_size": 65})
    patterns = {f"data__{part}": str(tmp_path / f"a_{part}_*.bin") for part in ("train", "val")}
    config = tiny_gpt(**patterns, model__vocab_size=vocab_size)
    if fits:
        LanguageTask.build(config, torch.device("cpu"))
    else:
        with pytest.raises(ConfigError, match=r"vocabulary of 65: set model.vocab_size=65, or"):
            LanguageTask.build(config, torch.device("cpu"))


def test_the_schedule_reaches_the_optimizer():
    config = resolve("nanogpt", "muon", overrides={"model.layers": 1, "model.attention_free": []})
    with torch.device("meta"):
        model = GPT(config.model)
    scheduled = build_optimizer(model, config, RunSchedule(config.schedule, 1490))
    scheduled.set_step(1000, 1.73)
    muon, *others = scheduled.optimizer.param_groups
    rate = scheduled.schedule.lr(1000, 1.73)
    assert muon["lr"] == pytest.approx(rate * config.optimizer.lr)
    embedding, head = map(rate_of, others)
    assert (embedding, head) == pytest.approx((rate * 0.3, rate * 0.008))
    scheduled.set_step(0)
    assert muon["momentum"] == 0.85


def rate_of(group):
    """The learning rate of a group, of ours or of torch's."""
    return group["lr"] * group.get("lr_factor", 1.0)


# --- optimizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.slug)
def test_optimizers_are_what_table_2_compares(method):
    config = resolve("cifar10", method)
    with torch.device("meta"):
        model = ConvNet(config.model)
    optimizer = build_optimizer(model, config, RunSchedule(config.schedule, 720)).optimizer
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in model.parameters() if p.requires_grad}
    if method.algorithm == "muon":
        group = optimizer.param_groups[0]
        assert isinstance(optimizer, ps.Muon)
        assert group["nesterov"] is method.nesterov
        assert isinstance(group["polar"], ps.LowRank) is method.randomized
        assert all(p.ndim == 4 for p in group["params"])
        rest = {g["algorithm"] for g in optimizer.param_groups[1:]}
        assert rest == {"sgd"}
        if method.randomized:
            assert isinstance(group["polar"].sketch, ps.Kaczmarz) is (method.sketch == "kaczmarz")
    else:
        expected = torch.optim.AdamW if method.algorithm == "adamw" else torch.optim.SGD
        assert type(optimizer) is expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_randomized_method_sketches_every_matrix_that_is_larger_than_the_sketch(recipe, device):
    """Also on a GPU, where the library itself would take full space for small matrices."""
    for method in (method for method in METHODS if method.randomized):
        config = resolve(recipe, method)
        with torch.device("meta"):
            model = (GPT if config.benchmark == "nanogpt" else ConvNet)(config.model)
        optimizer = build_optimizer(model, config, RunSchedule(config.schedule, 10)).optimizer
        polar = optimizer.param_groups[0]["polar"]
        larger = [shape for shape in model.matrix_shapes() if min(shape) > polar.width]
        assert larger
        for m, n in larger:
            assert polar.full_space_reason(m, n, torch.device(device)) is None


@pytest.mark.parametrize("method", ["adamw", "sgd", "muon"])
def test_embedding_and_head_have_rates_of_their_own_where_given(method):
    own = {"optimizer.lr": 0.5, "optimizer.embedding_lr": 0.25, "optimizer.head_lr": 0.125}
    for overrides, embedding, head in (
        (own, 0.25, 0.125),
        (own | {"optimizer.embedding_lr": 0.0, "optimizer.head_lr": 0.0}, 0.5, 0.5),
    ):
        config = resolve("nanogpt-small", method, overrides=overrides)
        with torch.device("meta"):
            model = GPT(config.model)
        optimizer = build_optimizer(model, config, RunSchedule(config.schedule, 10)).optimizer
        rates = {
            name: round(rate_of(group), 12)
            for group in optimizer.param_groups
            for name in group["param_names"]
        }
        assert rates.keys() == dict(model.named_parameters()).keys()
        hidden = {rate for name, rate in rates.items() if name.startswith("blocks.")}
        assert hidden == {0.5}
        if method != "muon" or embedding == 0.25:  # what Muon leaves to AdamW has no other rate
            assert (rates["embedding.weight"], rates["head.weight"]) == (embedding, head)


def test_the_small_gpt_is_the_papers_in_width_and_large_enough():
    model = resolve("nanogpt-small", "muon").model
    shapes = [(768, 768)] * 20 + [(3072, 768)] * 10
    with torch.device("meta"):
        assert sorted(GPT(model).matrix_shapes()) == sorted(shapes)
    assert sum(m * n for m, n in shapes) > 30e6


@pytest.mark.parametrize("recipe", ["nanogpt-small", "nanogpt-wiki"])
def test_one_pass_over_the_wikipedia_slice_is_enough(recipe):
    config = resolve(recipe, "muon")
    stages, window = config.data.stages, config.data.window
    place = place_in_stages(stages, window, config.data.steps)
    assert place.windows <= (72_766_801 - 1) // window
    # All passes, forward and backward or forward alone, have one shape: compiled once.
    assert {stage.sequences % config.runtime.micro_batch for stage in stages} == {0}
    assert config.evaluation.batch == config.runtime.micro_batch
    assert config.evaluation.tokens % (config.evaluation.batch * window) == 0
    assert config.evaluation.tokens <= (335_164 // 2 - 1) // window * window


def test_airbench_rates_and_decay():
    config = resolve("cifar10", "muon")
    with torch.device("meta"):
        model = ConvNet(config.model)
    scheduled = build_optimizer(model, config, RunSchedule(config.schedule, 720))
    _, head, vectors, whitening = scheduled.optimizer.param_groups
    rates = [rate_of(group) for group in (head, vectors, whitening)]
    assert rates == pytest.approx([0.67, 0.053, 0.053])
    for group in (head, vectors, whitening):
        assert group["lr"] * group["weight_decay"] == pytest.approx(2e-6 * 500)
        assert (group["momentum"], group["nesterov"]) == (0.85, True)
    assert [peak.portion for peak in scheduled.peaks] == [1.0, 1.0, 1.0, 3 / 8]


def test_filters_are_normalized_before_the_update():
    config = resolve("cifar10", "muon", overrides={"model.widths": [8, 8, 8]})
    model = ConvNet(config.model, torch.Generator().manual_seed(0))
    scheduled = build_optimizer(model, config, RunSchedule(config.schedule, 10))
    scheduled.set_step(0)
    for group in scheduled.optimizer.param_groups:
        group["lr"] = 0.0
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    scheduled.optimizer.step()
    for group in model.groups:
        assert group.conv2.weight.norm().item() == pytest.approx(8**0.5, rel=1e-5)


# --- ablations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("benchmark", ["nanogpt", "cifar10"])
@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.name)
def test_every_value_of_every_ablation_makes_a_config(axis, benchmark):
    config = resolve(benchmark, "rand-muon")
    made = [apply_axis(config, axis.name, value) for value in axis.values(config)]
    assert len({json.dumps(c.to_dict()) for c in made}) == len(made)
    for ablated in made:
        build_polar(ablated.optimizer.polar, benchmark)


@pytest.mark.parametrize("recipe", ["nanogpt", "nanogpt-small", "cifar10"])
@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.name)
def test_to_apply_the_value_that_a_config_has_changes_nothing(axis, recipe):
    """And the value that a config has is the value that was applied to it."""
    config = resolve(recipe, "rand-muon")
    for made in (config, *(apply_axis(config, axis.name, v) for v in axis.values(config))):
        own = axis.own(made)
        assert own is None or apply_axis(made, axis.name, own) == made
    values = axis.values(config)
    assert [axis.own(apply_axis(config, axis.name, value)) for value in values] == [*values]
    unknown = {"auto"} | ({"sequence-length"} if recipe == "cifar10" else set())
    assert (axis.own(config) is None) is (axis.name in unknown)


def test_rates_lie_around_the_recipes_own():
    (axis,) = [axis for axis in AXES if axis.name == "lr"]
    config = resolve("nanogpt-small", "muon")
    assert axis.values(config) == (0.015, 0.021, 0.03, 0.042, 0.06)
    assert apply_axis(config, "lr", 0.021).optimizer.lr == 0.021
    assert apply_axis(resolve("nanogpt-small", "adamw"), "lr", 0.002).optimizer.lr == 0.002


def test_the_papers_solvers():
    polar = resolve("nanogpt", "rand-muon").optimizer.polar
    built = {
        solver: build_polar(type(polar)(solver=solver, steps=9), "nanogpt")
        for solver in ("cubic", "quintic", "empirical", "polar-express")
    }
    first = {name: solver.polynomials[0] for name, solver in built.items()}
    assert first["cubic"] == (1.5, -0.5)
    assert first["quintic"] == (15 / 8, -10 / 8, 3 / 8)
    assert first["empirical"] == (3.4445, -4.7750, 2.0315)
    assert first["polar-express"] == pytest.approx((8.1566, -22.4833, 15.8788), abs=1e-4)


def test_longer_sequences_mean_fewer_steps_over_the_same_tokens():
    config = resolve("nanogpt", "rand-muon")
    total = place_in_stages(config.data.stages, config.data.window, config.data.steps).tokens
    for length in (1024, 4096):
        data = apply_axis(config, "sequence-length", length).data
        assert data.window == length
        tokens = place_in_stages(data.stages, data.window, data.steps).tokens
        assert tokens == pytest.approx(total, rel=0.01)
    assert apply_axis(config, "sequence-length", 4096).data.steps == 746


def test_the_papers_sequence_length_is_a_batch():
    """In the authors' code it is a factor of the batch: 1024 is half of it, and lengths stay."""
    config = resolve("nanogpt", "rand-muon")
    (axis,) = [axis for axis in AXES if axis.name == "batch"]
    assert axis.values(config) == (72, 144, 288)
    assert axis.values(resolve("nanogpt-toy", "rand-muon")) == (4, 8, 16)
    for value, length in zip(axis.values(config), (1024, 2048, 4096), strict=True):
        stages = apply_axis(config, "batch", value).data.stages
        shares = [
            s.sequences / o.sequences for s, o in zip(stages, config.data.stages, strict=True)
        ]
        assert shares == [length / 2048] * 3
        assert [s.sequence_length for s in stages] == [896, 2048, 2048]


def test_lengths_are_in_the_papers_proportions_to_the_recipes_own():
    (axis,) = [axis for axis in AXES if axis.name == "sequence-length"]
    assert axis.values(resolve("nanogpt", "rand-muon")) == (1024, 2048, 4096)
    config = resolve("nanogpt-small", "rand-muon")
    assert axis.values(config) == (512, 1024, 2048)
    stages = [apply_axis(config, axis.name, length).data.stages[0] for length in (512, 1024, 2048)]
    assert len({stage.steps * stage.sequences * stage.sequence_length for stage in stages}) == 1
    # The number of validations stays, and one shape serves training and validation.
    for length in (512, 1024, 2048):
        ablated = apply_axis(config, axis.name, length)
        assert ablated.data.steps / ablated.evaluation.every == pytest.approx(5)
        assert ablated.evaluation.batch == ablated.data.stages[0].sequences
        assert ablated.evaluation.tokens % (ablated.evaluation.batch * length) == 0


@pytest.mark.parametrize(
    ("recipe", "ranks"),
    [
        ("nanogpt", (50, 100, 200, 400)),
        ("nanogpt-small", (50, 100, 200, 400)),
        ("nanogpt-toy", (8, 16, 32, 64)),
        ("cifar10", (16, 32, 64, 128)),
        ("cifar10-tiny", (2, 4, 8, 16)),
    ],
)
def test_ranks_are_in_the_papers_proportions_and_all_of_them_sketch(recipe, ranks):
    (axis,) = [axis for axis in AXES if axis.name == "rank"]
    config = resolve(recipe, "rand-muon")
    assert axis.values(config) == ranks
    assert config.optimizer.polar.rank in ranks
    spent = []
    for rank in ranks:
        ablated = apply_axis(config, "rank", rank)
        with torch.device("meta"):
            model = (GPT if config.benchmark == "nanogpt" else ConvNet)(ablated.model)
        polar = build_polar(ablated.optimizer.polar, config.benchmark)
        assert not all(polar.full_space_reason(m, n) for m, n in model.matrix_shapes())
        spent.append(optimizer_gflops(model, ablated))
    assert spent == sorted(set(spent))


@pytest.mark.parametrize("axis", ["sketch", "solver"])
def test_the_axes_name_every_value_there_is(axis):
    (found,) = [each for each in AXES if each.name == axis]
    with pytest.raises(ConfigError, match="expected one of") as error:
        apply_axis(resolve("nanogpt", "rand-muon"), axis, "none")
    named = str(error.value).partition("expected one of ")[2].split(", ")
    assert {*found.nanogpt, *found.also} == set(named)


def test_larger_batches_mean_fewer_steps_over_the_same_tokens():
    config = resolve("nanogpt-toy", "rand-muon")
    first = config.data.stages[0]
    doubled = apply_axis(config, "batch", 2 * first.sequences).data.stages[0]
    assert (doubled.sequences, doubled.steps) == (2 * first.sequences, first.steps // 2)


@pytest.mark.parametrize(
    ("recipe", "method", "axis", "value", "message"),
    [
        ("nanogpt", "adamw", "rank", 8, "has no polar map"),
        ("nanogpt", "muon", "sketch", "kaczmarz", "does not sketch"),
        ("nanogpt", "muon", "power", 0, "does not sketch"),
        ("cifar10", "rand-muon", "sequence-length", 8, "images have no sequences"),
        ("nanogpt", "rand-muon", "batch", 0, "expected a whole number"),
        ("nanogpt", "rand-muon", "depth", 3, "expected one of rank, power, steps"),
        ("nanogpt", "rand-muon", "solver", "octic", "expected one of cubic"),
        ("nanogpt-toy", "rand-muon", "rank", 120, r"ℓ = 120 \+ 8 ≥ 128, .* expected 1 to 119"),
        ("nanogpt-toy", "rand-muon", "rank", None, "full space is `polarstep run"),
        ("nanogpt-toy", "rand-muon", "batch", 100_000, "leaves nothing of the 1 steps"),
        ("cifar10", "rand-muon", "rank", 246, r"ℓ = 246 \+ 10 ≥ 256, .* expected 1 to 245"),
    ],
)
def test_ablations_that_make_no_sense(recipe, method, axis, value, message):
    # The number of steps after the schedule is rounded like the others: of one step nothing is left.
    extended = {"schedule.extension": 159} if recipe == "nanogpt-toy" else {}
    with pytest.raises(ConfigError, match=message):
        apply_axis(resolve(recipe, method, overrides=extended), axis, value)


@pytest.mark.parametrize(
    ("name", "sketch", "power"),
    [
        ("warm-fast", ps.Warm(), 1),
        ("gaussian-fast", ps.Gaussian(), 0),
    ],
)
def test_a_run_may_sketch_fast(name, sketch, power):
    fast = apply_axis(resolve("nanogpt-toy", "rand-muon"), "sketch", name)
    polar = build_polar(fast.optimizer.polar, fast.benchmark)
    assert (polar.sketch, polar.power) == (sketch, power)
    assert polar.inner == ps.NewtonSchulz(4, "polar-express-sketch")


@pytest.mark.parametrize("rest", ["dropped", "lifted"])
def test_a_run_may_keep_the_rest_of_its_sketch(rest):
    plain = resolve("nanogpt-toy", "rand-muon")
    config = apply_axis(plain, "rest", rest)
    with torch.device("meta"):
        model = GPT(config.model)
    optimizer = build_optimizer(model, config, RunSchedule(config.schedule, 10)).optimizer
    head = build_polar(plain.optimizer.polar, plain.benchmark)
    polar = optimizer.param_groups[0]["polar"]
    if rest == "dropped":
        assert polar == head
        return
    assert (polar.head, polar.full) == (head, head.inner)
    assert polar.rest == ps.NewtonSchulz(1, "flat")
    more = sum(polar.flops(m, n) - head.flops(m, n) for m, n in model.matrix_shapes())
    spent = optimizer_gflops(model, config) - optimizer_gflops(model, plain)
    assert spent == pytest.approx(more / 1e9)
    assert more > 0


def test_there_is_no_rest_in_full_space():
    with pytest.raises(ConfigError, match=r"rest=lifted: expected dropped with .*set a rank"):
        resolve("nanogpt-toy", "muon", overrides={"optimizer.polar.rest": "lifted"})
    with pytest.raises(ConfigError, match="does not sketch; ablate a randomized one"):
        apply_axis(resolve("nanogpt-toy", "muon"), "rest", "lifted")


def test_the_flops_of_a_run_are_those_of_its_sketch():
    """Also where the sketch is not the method's own."""

    def spent(method, **polar):
        overrides = {f"optimizer.polar.{key}": value for key, value in polar.items()}
        config = resolve("cifar10", method, overrides=overrides)
        with torch.device("meta"):
            return optimizer_gflops(ConvNet(config.model), config)

    assert spent("rand-muon", sketch="kaczmarz") == spent("rand-muon-kaczmarz")
    assert spent("rand-muon", sketch="kaczmarz-filled") == spent("rand-muon-kaczmarz")
    assert spent("rand-muon-kaczmarz", sketch="gaussian") == spent("rand-muon")
    # A warm sketch iterates once a step, whatever the power it starts with.
    assert spent("rand-muon", sketch="warm") == spent("rand-muon", power=0)
    assert spent("rand-muon", sketch="warm") < spent("rand-muon", sketch="kaczmarz")
    assert spent("rand-muon", rank=None) == spent("muon")
    # As wide as every matrix: the map runs in full space, and that is what it costs.
    assert spent("rand-muon", rank=246) == spent("rand-muon", rank=999) == spent("muon")
    assert spent("rand-muon", rank=999, solver="cubic") == spent("muon", solver="cubic")
    assert spent("rand-muon", rank=245) != spent("muon")


# --- methods beside Table 2 ----------------------------------------------------------------------


def polar_and_transform(method, recipe="nanogpt-wiki", **overrides):
    config = resolve(recipe, method, overrides=overrides)
    with torch.device("meta"):
        model = (GPT if config.benchmark == "nanogpt" else ConvNet)(config.model)
    optimizer = build_optimizer(model, config, RunSchedule(config.schedule, 10)).optimizer
    group = optimizer.param_groups[0]
    return group["polar"], group["transform"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_our_methods_run_our_maps(recipe):
    full = ps.NewtonSchulz(5, "polar-express")
    assert polar_and_transform("muon-polar-express", recipe) == (full, None)
    rows = ps.NormalizedRows()
    assert polar_and_transform("muon-polar-express-rows", recipe) == (full, rows)
    assert polar_and_transform("auto", recipe) == (ps.Auto("balanced"), None)
    assert polar_and_transform("auto-rows", recipe) == (ps.Auto("balanced"), rows)
    paper, _ = polar_and_transform("rand-muon", recipe)
    assert polar_and_transform("rand-muon-rows", recipe) == (paper, rows)
    deflated, transform = polar_and_transform("deflated", recipe)
    assert polar_and_transform("deflated-rows", recipe) == (deflated, rows)
    assert transform is None
    inner = ps.NewtonSchulz(4, "polar-express-sketch")
    head = ps.LowRank(56, 8, sketch=ps.Warm(), inner=inner, always_sketch=True)
    assert deflated.head == head
    assert (deflated.rest, deflated.float8) == (ps.NewtonSchulz(1, "flat"), True)


@pytest.mark.parametrize("slug", ["muon-polar-express", "rand-muon", "deflated", "auto"])
def test_normalized_rows_train_at_the_rate_of_their_map_on_cifar10(slug):
    rows, without = (resolve("cifar10", name).optimizer for name in (f"{slug}-rows", slug))
    assert rows == replace(without, normalize_rows=True)
    assert not without.normalize_rows


def test_auto_is_a_setting_an_axis_and_recorded():
    polar, _ = polar_and_transform("muon", **{"optimizer.polar.auto": "cheap"})
    assert polar == ps.Auto("cheap")
    for method in ("muon", "rand-muon", "deflated"):
        config = apply_axis(resolve("nanogpt-toy", method), "auto", "full")
        assert build_polar(config.optimizer.polar, "nanogpt") == ps.Auto("full")
        assert RunConfig.from_dict(config.to_dict()) == config
        assert config.to_dict()["optimizer"]["polar"]["auto"] == "full"
    with pytest.raises(ConfigError, match="auto='best': expected one of full, balanced, cheap"):
        apply_axis(resolve("nanogpt-toy", "muon"), "auto", "best")
    with pytest.raises(ConfigError, match="AdamW has no polar map"):
        apply_axis(resolve("nanogpt-toy", "adamw"), "auto", "full")


@pytest.mark.parametrize(("key", "value"), [("rank", 16), ("steps", 5), ("sketch", "warm")])
def test_auto_goes_with_no_other_setting_of_the_map(key, value):
    with pytest.raises(ConfigError, match=rf"polar\.{key}={value}.*which chooses the map itself"):
        resolve("nanogpt-toy", "auto", overrides={f"optimizer.polar.{key}": value})


def test_eight_bits_are_for_a_rest_that_is_lifted():
    with pytest.raises(
        ConfigError, match=r"float8=true with optimizer\.polar\.rest=dropped: expected"
    ):
        resolve("nanogpt-toy", "rand-muon", overrides={"optimizer.polar.float8": True})
    with pytest.raises(
        ConfigError, match=r"set optimizer\.polar\.float8=false too, or .*rest=dropped"
    ):
        resolve("nanogpt-toy", "deflated", overrides={"optimizer.polar.rest": "dropped"})
    both = {"optimizer.polar.rest": "dropped", "optimizer.polar.float8": False}
    assert resolve("nanogpt-toy", "deflated", overrides=both).optimizer.polar.rest == "dropped"


def test_the_rest_of_the_deflated_method_can_be_varied():
    config = resolve("nanogpt-toy", "deflated")
    assert apply_axis(config, "rest", "lifted") == config
    polar = apply_axis(config, "rest", "dropped").optimizer.polar
    assert (polar.rest, polar.float8) == ("dropped", False)


def test_lists_of_methods_may_hold_groups_and_keep_the_order():
    assert find_methods("all") == [*METHODS]
    found = find_methods("auto,adamw,ours")
    assert [method.slug for method in found[:3]] == ["auto", "adamw", "default"]
    assert len(found) == len(OURS) + 1


@pytest.mark.usefixtures("no_tiles")
def test_gflops_of_auto_are_those_of_the_map_on_the_device():
    """On a GPU CIFAR-10's filters are in full space; on a CPU without tiles the wide ones are not."""
    auto, full = (resolve("cifar10", slug) for slug in ("auto", "muon-polar-express"))
    with torch.device("meta"):
        model = ConvNet(auto.model)
    on_gpu = optimizer_gflops(model, auto, torch.device("cuda"))
    assert on_gpu == pytest.approx(optimizer_gflops(model, full), rel=0.01)
    assert optimizer_gflops(model, auto) < 0.5 * on_gpu


def test_gflops_of_our_methods():
    gflops = {}
    for slug in ("muon-polar-express", "muon-polar-express-rows", "deflated", "auto", "auto-rows"):
        rank = {"optimizer.polar.rank": 120} if slug == "deflated" else {}
        config = resolve("nanogpt-wiki", slug, overrides=rank)
        with torch.device("meta"):
            gflops[slug] = optimizer_gflops(GPT(config.model), config)
    # Auto takes the deflated map of rank 120 for both shapes; the paper's ledger puts the basis of tall
    # matrices on their long side, Deflated on the short one.
    assert gflops["auto"] == pytest.approx(gflops["deflated"], rel=0.03)
    assert gflops["deflated"] < 0.35 * gflops["muon-polar-express"]
    extra = 8 * (40 * 768 * 768 + 24 * 3072 * 768) / 1e9
    for slug in ("muon-polar-express", "auto"):
        assert gflops[f"{slug}-rows"] - gflops[slug] == pytest.approx(extra)


def test_the_delta_of_algorithm_2_reaches_the_map():
    overrides = {"optimizer.polar.delta": "operator"}
    polar = resolve("nanogpt-toy", "rand-muon-kaczmarz", overrides=overrides).optimizer.polar
    assert build_polar(polar, "nanogpt").inner.delta == "operator"
