"""A resumed run is the uninterrupted one, bit by bit, in another process, sketches included."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.checkpoints import resume_worker as worker
from tests.forking import fork
from tests.processes import PATIENCE
from tests.spectra import gaussian
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Parameter

from polarstep import Exact, LowRank, Muon, NewtonSchulz, muon_for
from polarstep.bucket import MOST_DRAWN
from polarstep.maps import Warm, auto


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Half of each case here, the other half in a new process."""
    folder = tmp_path_factory.mktemp("resume")
    for number, name in enumerate(worker.CASES):
        params, optimizer = worker.start(name)
        worker.train(params, optimizer, 0, worker.HALF)
        half = {"params": [p.data for p in params], "optimizer": optimizer.state_dict()}
        torch.save(half, folder / f"{number}.half.pt")
    process = fork("-m", worker.__name__, str(folder), str(torch.get_num_threads()))
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    return {
        name: torch.load(folder / f"{number}.whole.pt") for number, name in enumerate(worker.CASES)
    }


@pytest.mark.parametrize("name", worker.CASES)
def test_resumed_in_another_process(name, resumed):
    params, optimizer = worker.start(name)
    worker.train(params, optimizer, 0, worker.WHOLE)
    for p, there in zip(params, resumed[name]["params"], strict=True):
        assert torch.equal(p.data, there)
    here, there = optimizer.state_dict(), resumed[name]["optimizer"]
    assert here["param_groups"] == there["param_groups"]
    assert here["state"].keys() == there["state"].keys()
    for key, state in here["state"].items():
        assert state.keys() == there["state"][key].keys()
        for entry, value in state.items():
            assert torch.equal(value, there["state"][key][entry]), entry
            assert value.dtype == there["state"][key][entry].dtype


def test_a_parameter_without_a_gradient_has_no_state(resumed):
    never = 4  # its place in the first group
    for case in resumed.values():
        assert not case["optimizer"]["state"].get(never)


def test_state_dict_is_a_round_trip():
    params, optimizer = worker.start("warm")
    worker.train(params, optimizer, 0, 3)
    others, twin = worker.start("warm")
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares the tensors
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
        assert optimizer.state[p].keys() == twin.state[q].keys()
        for entry, value in optimizer.state[p].items():
            assert torch.equal(twin.state[q][entry], value)
    worker.train(params, optimizer, 3, 6)
    worker.train(others, twin, 3, 6)
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)


def test_the_state_of_a_parameter_in_no_group_is_named():
    """torch has a KeyError with a number there."""
    params = [Parameter(gaussian(4, 3, seed=i).float()) for i in range(2)]
    optimizer = Muon(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    del optimizer.param_groups[0]["params"][0]
    told = r"shape \(4, 3\) that is in no group: expected .* optimizer\.state\.pop"
    with pytest.raises(ValueError, match=told):
        optimizer.state_dict()
    optimizer.state.pop(params[0])
    assert list(optimizer.state_dict()["state"]) == [0]


def test_a_checkpoint_brings_its_hyperparameters_and_says_so_once():
    W = Parameter(gaussian(8, 12))
    saved = Muon([W], lr=0.3, momentum=0.5, polar=LowRank(3, 2), weight_decay=0.1, seed=7)
    loaded = Muon([W])
    with pytest.warns(UserWarning, match="the checkpoint had other options") as told:
        loaded.load_state_dict(saved.state_dict())
    assert loaded.param_groups[0]["polar"] == LowRank(3, 2)
    assert (loaded.param_groups[0]["lr"], loaded.param_groups[0]["seed"]) == (0.3, 7)
    assert len(told) == 1
    assert told[0].filename == __file__
    words = str(told[0].message)
    assert f"polar={NewtonSchulz()} → {LowRank(3, 2)}, seed=0 → 7, weight_decay=0.0 → 0.1" in words
    assert "momentum" not in words  # schedules change it

    loaded, state_dict = Muon([W]), saved.state_dict()
    exec(words.partition("before it is loaded: ")[2], {"state_dict": state_dict})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded.load_state_dict(state_dict)
        Muon([W]).load_state_dict(Muon([W], lr=0.3, momentum=0.5).state_dict())
    assert loaded.param_groups[0]["polar"] == NewtonSchulz()


def test_a_map_that_is_set_after_loading_goes_on_with_the_momentum():
    W = Parameter(gaussian(8, 12).float())
    saved = Muon([W], polar=LowRank(3, 2, sketch=Warm(), always_sketch=True))
    W.grad = torch.ones_like(W)
    saved.step()
    loaded = Muon([W], polar=Exact())
    with pytest.warns(UserWarning, match="polar=Exact"):
        loaded.load_state_dict(saved.state_dict())
    loaded.param_groups[0]["polar"] = Exact()
    before, C = W.detach().clone(), loaded.state[W]["momentum_buffer"].clone()
    loaded.step()
    M = 0.95 * (0.95 * C + W.grad) + W.grad
    U, _, Vt = torch.linalg.svd(M, full_matrices=False)
    ranked = U[:, :1] @ Vt[:1]  # a gradient of ones has rank one
    torch.testing.assert_close(W, before - 0.02 * ranked, rtol=0, atol=1e-5)


def test_other_rules_in_a_checkpoint_are_told_of():
    b = Parameter(gaussian(5).float())
    saved = Muon([{"params": [b], "algorithm": "sgd"}]).state_dict()
    with pytest.warns(UserWarning, match="algorithm=adamw → sgd"):
        Muon([{"params": [b], "algorithm": "adamw"}]).load_state_dict(saved)


def test_what_an_older_checkpoint_lacks_stays_as_it_is():
    """An option that came later: as given to this optimizer, group by group."""
    W, b = Parameter(gaussian(8, 12).float()), Parameter(gaussian(5).float())

    def optimizer_of(nonfinite):
        groups = [{"params": [W]}, {"params": [b], "algorithm": "adamw"}]
        return Muon(groups, lr=0.3, nonfinite=nonfinite)

    checkpoint = optimizer_of("propagate").state_dict()
    for group in checkpoint["param_groups"]:
        del group["nonfinite"], group["weight_decay"]
    loaded = optimizer_of("skip")
    loaded.param_groups[1]["weight_decay"] = 0.25
    loaded.load_state_dict(checkpoint)
    assert [group["nonfinite"] for group in loaded.param_groups] == ["skip", "skip"]
    assert [group["weight_decay"] for group in loaded.param_groups] == [0.0, 0.25]
    W.grad, b.grad = torch.ones_like(W), torch.ones_like(b)
    loaded.step()


def test_a_schedulers_keys_in_a_checkpoint_are_kept():
    W = Parameter(gaussian(8, 12).float())
    saved = Muon([W])
    torch.optim.lr_scheduler.OneCycleLR(saved, 0.1, 10)
    loaded = Muon([W])
    for _ in range(2):
        loaded.load_state_dict(saved.state_dict())
        assert loaded.param_groups[0].keys() == saved.param_groups[0].keys()
    assert loaded.param_groups[0]["max_momentum"] == saved.param_groups[0]["max_momentum"]


def test_a_warm_start_is_part_of_the_state():
    params, optimizer = worker.start("warm")
    worker.train(params, optimizer, 0, 2)
    assert {"momentum_buffer", "basis"} <= optimizer.state[params[0]].keys()
    cold, other = worker.start("Gaussian")
    worker.train(cold, other, 0, 2)
    assert other.state[cold[0]].keys() == {"momentum_buffer"}


def test_torchs_own_adamw_checkpoint_reads_alike():
    p, q = (Parameter(gaussian(5).float()) for _ in range(2))
    ours = Muon([{"params": [p], "algorithm": "adamw"}])
    theirs = torch.optim.AdamW([q])
    p.grad = q.grad = gaussian(5).float()
    ours.step()
    theirs.step()
    assert ours.state_dict()["state"][0].keys() == theirs.state_dict()["state"][0].keys()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_a_checkpoint_read_to_the_cpu_goes_on_on_the_gpu():
    p = Parameter(gaussian(5).float().cuda())
    optimizer = Muon([{"params": [p], "algorithm": "adamw"}])
    p.grad = torch.ones_like(p)
    optimizer.step()
    state = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t.cpu(), optimizer.state_dict()
    )
    optimizer.load_state_dict(state)
    optimizer.step()
    assert optimizer.state[p]["step"] == 2


def test_a_warm_sketch_draws_its_numbers_once(monkeypatch):
    """They are the same at every step; drawing them is a tenth of a step on a CPU."""
    draws = []
    draw = LowRank.numbers

    def counted(self, m, n, *rest):
        draws.append((m, n))
        return draw(self, m, n, *rest)

    monkeypatch.setattr(LowRank, "numbers", counted)
    W = [Parameter(gaussian(8, 12, seed=i)) for i in range(2)]
    optimizer = Muon(W, lr=0.1, polar=LowRank(3, 2, sketch=Warm(), always_sketch=True))
    for step in range(4):
        for p in W:
            p.grad = gaussian(8, 12, seed=step)
        optimizer.step()
        if step == 0:
            first = len(draws)
    assert len(draws) == first


def test_numbers_of_earlier_seeds_are_dropped():
    W = Parameter(gaussian(8, 12))
    optimizer = Muon([W], lr=0.1, polar=LowRank(3, 2, sketch=Warm(), always_sketch=True))
    for seed in range(MOST_DRAWN + 8):
        optimizer.param_groups[0]["seed"] = seed
        W.grad = gaussian(8, 12, seed=seed)
        optimizer.step()
    assert len(optimizer._draws._kept) == MOST_DRAWN


def test_warm_and_cold_are_told_apart_by_the_map_alone():
    assert LowRank(3, sketch=Warm()).traits.carries == ("basis", "whitening")
    assert not LowRank(3).traits.carries


@pytest.mark.parametrize("flat", [False, True])
def test_torchs_checkpoints_by_name_load_into_a_model_with_its_layers_in_another_order(flat):
    def model(names: str) -> nn.Module:
        """One layer for each name, and a head."""
        return nn.ModuleDict({name: nn.Linear(8, 8) for name in names} | {"head": nn.Linear(8, 2)})

    saved, loaded = model("ab"), model("ba")
    for seed, p in enumerate(saved.parameters()):
        p.grad = gaussian(*p.shape, seed=seed).float()
    first = muon_for(saved, rules=[("b.weight", "muon")])
    first.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    content = get_optimizer_state_dict(saved, first, options=options)
    second = muon_for(loaded, rules=[("b.weight", "muon")])
    set_optimizer_state_dict(loaded, second, content, options=options)
    for name, p in saved.named_parameters():
        q = loaded.get_parameter(name)
        assert all(
            torch.equal(second.state[q][key], value) for key, value in first.state[p].items()
        )
        assert second.routes[name].why == first.routes[name].why
    names = {
        name: p
        for group in second.param_groups
        for name, p in zip(group["param_names"], group["params"], strict=True)
    }
    assert all(names[name] is p for name, p in loaded.named_parameters())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("no_tiles")
def test_a_checkpoint_of_auto_with_another_rank_loads_by_name_without_its_basis(
    tmp_path, monkeypatch
):
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 2))
    for seed, p in enumerate(model.parameters()):
        p.grad = gaussian(*p.shape, seed=seed).float()
    with monkeypatch.context() as earlier:
        earlier.setattr(auto, "SIXTH", 12)
        first = muon_for(model, polar="auto")
        first.step()
        saved = get_optimizer_state_dict(model, first)
        dcp.save({"optimizer": saved}, checkpoint_id=tmp_path)
    second = muon_for(model, polar="auto")
    for p in model.parameters():
        p.grad = None
    state = {"optimizer": get_optimizer_state_dict(model, second)}
    with pytest.raises(dcp.api.CheckpointException, match="Size mismatch"):
        dcp.load(state, checkpoint_id=tmp_path)
    for entries in state["optimizer"]["state"].values():
        for name in [name for name in entries if name.startswith(("basis", "whitening"))]:
            del entries[name]
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(model, second, state["optimizer"])
    W = model[0].weight
    assert torch.equal(second.state[W]["momentum_buffer"], first.state[W]["momentum_buffer"])
    W.grad = gaussian(256, 256).float()
    second.step()
    assert second.state[W]["basis"].shape[1] == 48
    assert first.state[W]["basis"].shape[1] == 32
