"""Peers: the same parameters, rates and schedule as ours, by the optimizer of another library."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest
import torch
from tests.lab.experiments.small import fake_cifar10, tiny_cnn, tiny_gpt
from tests.lab.experiments.test_train import StopAt, assert_same_run

from polarstep_lab.config import ConfigError
from polarstep_lab.methods import find_method
from polarstep_lab.models.gpt import GPT
from polarstep_lab.optimizers.build import build_optimizer, cycle_of
from polarstep_lab.optimizers.peers import FOLDERS, PEERS, _commit, find_peer, load, versions
from polarstep_lab.optimizers.schedule import RunSchedule
from polarstep_lab.recipes import resolve
from polarstep_lab.records.record import RunRecord
from polarstep_lab.train.run import Interrupted, train

# What the registry has must be there; the others are tried where POLARSTEP_PEERS names a checkout.
REGISTRY = ("torch-muon", "jordan-muon", "soap")
HERE = [
    pytest.param(
        name,
        marks=()
        if name in REGISTRY or importlib.util.find_spec(peer.module)
        else pytest.mark.skip(reason=f"{peer.package} is not installed"),
    )
    for name, peer in PEERS.items()
]


def built(name, recipe="nanogpt-toy", **overrides):
    config = resolve(recipe, f"peer:{name}", overrides=overrides)
    model = GPT(config.model, torch.Generator().manual_seed(0))
    return model, build_optimizer(model, config, RunSchedule(config.schedule, 100)), config


@pytest.mark.parametrize("name", HERE)
def test_a_peer_has_the_matrices_and_adamw_the_rest(name):
    model, scheduled, config = built(name)
    ours = build_optimizer(model, resolve("nanogpt-toy", "muon"), RunSchedule(config.schedule, 100))
    matrices, *others = scheduled.optimizer.param_groups
    muon, *rest = ours.optimizer.param_groups
    assert list(map(id, matrices["params"])) == list(map(id, muon["params"]))
    assert matrices["param_names"] == muon["param_names"]
    assert [g["param_names"] for g in others] == [g["param_names"] for g in rest]
    hidden, adamw = scheduled.optimizer.parts
    assert type(hidden) is load(find_peer(name))
    assert type(adamw) is torch.optim.AdamW
    if config.rule.algorithm == "muon":
        assert [g["lr"] for g in others] == [g["lr"] * g["lr_factor"] for g in rest]
        assert [g["betas"] for g in others] == [g["betas"] for g in rest]


@pytest.mark.parametrize("name", HERE)
def test_the_schedule_reaches_the_peer(name):
    _, scheduled, config = built(name, "nanogpt-small")
    peer = find_peer(name)
    for step in (0, 10, 99):
        scheduled.set_step(step)
        matrices = scheduled.optimizer.parts[0].param_groups[0]
        rate = config.optimizer.lr * scheduled.schedule.lr(step)
        assert float(matrices["lr"]) == pytest.approx(rate)
        if peer.momentum is not None:
            expected = scheduled.schedule.momentum(step, config.optimizer.momentum)
            assert matrices[peer.momentum] == pytest.approx(expected)
    assert (peer.momentum is None) == (name in ("dion2", "dion3", "soap"))


@pytest.mark.parametrize("name", HERE)
def test_a_peer_learns_and_resumes(name, tmp_path):
    config = tiny_gpt(f"peer:{name}")
    result = train(config, tmp_path / "whole")
    found = RunRecord.load(tmp_path / "whole")
    rows = found.rows("val")
    assert result.status == "finished"
    assert rows[-1].loss < rows[0].loss
    package = find_peer(name).package
    assert package == "torch" or versions()[package] == found.environment["packages"][package]
    with pytest.raises(Interrupted):
        train(config, tmp_path / "parts", observers=[StopAt(4, "ctrl-c")])
    train(config, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("name", HERE)
def test_matrices_without_a_gradient_stay_as_they_are(name):
    """``nanogpt`` and ``nanogpt-wiki`` have two, which the paper counts."""
    model, scheduled, _ = built(name, **SMALLER, **{"model.spare_mlps": 1})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    matrices = len(scheduled.optimizer.param_groups[0]["params"])
    for _ in range(2):  # SOAP's first step only looks at the gradient
        for name_of, p in model.named_parameters():
            p.grad = None if name_of.startswith("spare") else torch.randn_like(p)
        scheduled.set_step(0)
        scheduled.optimizer.step()
    same = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
    assert same == {"spare_mlps.0.up.weight", "spare_mlps.0.down.weight"}
    assert len(scheduled.optimizer.param_groups[0]["params"]) == matrices


def test_times_of_soap_are_means_over_the_steps_between_two_decompositions():
    _, scheduled, config = built("soap")
    hidden, _ = scheduled.optimizer.parts
    assert cycle_of(config) == hidden.param_groups[0]["precondition_frequency"]
    assert cycle_of(resolve("nanogpt-toy", "peer:torch-muon")) == 1


# A CPU without bfloat16 multiplies it slowly.
SMALLER = {"model.width": 64, "model.layers": 2, "model.heads": 2, "optimizer.lr": 0.02}


def test_the_update_of_torchs_muon_is_ours_with_jordans_steps():
    """The learning rate means the same: √max(1, m/n)·lr for an update of about unit singular values."""
    changes = {}
    for method, extra in (
        ("peer:torch-muon", {}),
        ("muon", {"optimizer.polar.solver": "empirical", "optimizer.polar.steps": 5}),
    ):
        config = resolve("nanogpt-toy", method, overrides=SMALLER | extra)
        model = GPT(config.model, torch.Generator().manual_seed(0))
        scheduled = build_optimizer(model, config, RunSchedule(config.schedule, 100))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        shuffle = torch.Generator().manual_seed(1)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=shuffle)
        scheduled.set_step(0)
        scheduled.optimizer.step()
        changes[method] = {n: p.detach() - before[n] for n, p in model.named_parameters()}
    theirs, ours = changes.values()
    for name, change in ours.items():
        # torch's steps are in bfloat16.
        assert torch.linalg.norm(change - theirs[name]) <= 0.03 * torch.linalg.norm(change), name


def test_a_missing_peer_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "dion", None)
    with pytest.raises(ConfigError, match=rf"checkout of github.com/microsoft/dion.*{FOLDERS}="):
        load(find_peer("dion-muon"))
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ConfigError, match=r"peer:soap needs SOAP of .*polarstep\[peers\]"):
        load(find_peer("soap"))


def test_a_checkout_is_found_by_the_folder_that_the_user_names(tmp_path, monkeypatch):
    (tmp_path / "dion").mkdir()
    (tmp_path / "dion" / "__init__.py").write_text("from torch.optim import SGD as Muon\n")
    for module in [m for m in sys.modules if m.partition(".")[0] == "dion"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(FOLDERS, str(tmp_path))
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "dion" not in p])
    assert load(find_peer("dion-muon")) is torch.optim.SGD
    monkeypatch.delitem(sys.modules, "dion")


def test_a_copy_inside_another_repository_has_its_own_commit(tmp_path):
    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    package = tmp_path / "build" / "dion" / "dion"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / ".gitignore").write_text("build/\n")
    git("init")
    git("add", ".gitignore")
    git("commit", "-m", "something else")
    assert _commit(package / "__init__.py") == "unknown"
    git("add", "--force", "build")
    git("commit", "-m", "the package itself")
    assert re.fullmatch("[0-9a-f]{40}", _commit(package / "__init__.py"))
    (package.parent / "COMMIT").write_text("0a059a4\n")
    assert _commit(package / "__init__.py") == "0a059a4"


def test_peers_are_for_gpt_recipes_and_their_own_scale(tmp_path):
    with pytest.raises(ConfigError, match="peers do not take convolutions"):
        tiny_cnn(fake_cifar10(tmp_path), "peer:torch-muon")
    with pytest.raises(ConfigError, match="shape_scale=rms with a peer"):
        built("torch-muon", **{"optimizer.shape_scale": "rms"})
    with pytest.raises(ConfigError, match="expected one of torch-muon"):
        find_peer("nobody")


def test_every_peer_is_a_method_with_a_folder_and_says_how_its_rate_is_meant():
    for peer in PEERS.values():
        method = find_method(f"peer:{peer.name}")
        assert method.peer == peer.name
        assert not method.has_map
        assert ":" not in method.folder
        assert peer.rate
