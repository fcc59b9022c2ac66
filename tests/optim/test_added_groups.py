"""Groups that others add, their names, their checkpoints, and a step with nothing to do."""

from __future__ import annotations

import copy
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from tests.forking import fork
from tests.optim.sample_models import Bag, SmallGPT, mlp
from tests.processes import PATIENCE
from tests.spectra import gaussian
from torch import nn
from torch.nn import Parameter

from polarstep import SGD, AdamW, LowRank, Muon, NormalizedRows, muon_for


def backward(model: nn.Module, seed: int = 0) -> None:
    for i, p in enumerate(model.parameters()):
        p.grad = gaussian(*p.shape, seed=seed + i).to(p.dtype)


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
    # A rate for Muon's matrices; AdamW's own is lowered by as much.
    assert summary == [("muon", 0.02, 1), ("adamw", pytest.approx(3e-5), 1), ("muon", 0.002, 1)]
    before = [p.detach().clone() for p in layer.parameters()]
    backward(layer)
    optimizer.step()
    assert all(not torch.equal(p, q) for p, q in zip(layer.parameters(), before, strict=True))


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
    assert optimizer.routes["blocks.0.up.weight"].lr == 0.01
    assert optimizer.routes["blocks.0.up.bias"].lr == pytest.approx(0.05)
    assert optimizer.routes["blocks.0.up.weight"].why == "hidden: Linear, added later"


@pytest.fixture
def finetuned(tmp_path):
    """A function that trains a small Lightning model, whose backbone is unfrozen in the second epoch."""
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import BackboneFinetuning
    from lightning.pytorch.loggers import CSVLogger

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.backbone, self.head = mlp(6, 8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))

        def training_step(self, batch, _):
            return nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

        def on_train_start(self) -> None:
            if self.current_epoch > 1:  # resumed after the unfreezing
                self.backbone.requires_grad_(True)

        def configure_optimizers(self):
            return muon_for(self, lr=0.02)

    x, y = gaussian(16, 6).float(), torch.arange(16) % 3
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)

    def fit(*callbacks, resume=None, **options):
        task = Task()
        lightning.Trainer(
            max_epochs=3,
            accelerator="cpu",
            logger=CSVLogger(tmp_path),
            default_root_dir=tmp_path,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            callbacks=[BackboneFinetuning(1), *callbacks],
            **options,
        ).fit(task, data, ckpt_path=resume)
        return task

    return fit


def test_lightning_resumes_after_a_backbone_was_unfrozen(finetuned, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    whole = finetuned(ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* a gradient, but no group of this optimizer")
        resumed = finetuned(resume=tmp_path / "epoch=1.ckpt", enable_checkpointing=False)
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


def test_lightning_unfreezes_a_backbone(finetuned):
    from lightning.pytorch.callbacks import LearningRateMonitor

    monitor = LearningRateMonitor()
    task = finetuned(monitor, enable_checkpointing=False)
    start = [p.detach() for p in type(task)().backbone.parameters()]
    assert all(
        not torch.equal(p, q) for p, q in zip(task.backbone.parameters(), start, strict=True)
    )
    assert {"lr-Muon/hidden", "lr-Muon/head", "lr-Muon/vector"} <= set(monitor.lrs)


# --- names


def test_groups_have_names_of_their_own():
    names = [group["name"] for group in muon_for(SmallGPT("untied")).param_groups]
    assert names == ["hidden", "hidden-2", "embedding", "head", "vector"]
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
    options = {"lr_scale": by_width, "polar": LowRank(4, 2), "transform": NormalizedRows()}
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
    with pytest.raises(ValueError, match=r"lr_scale of the checkpoint is .*by_width"):
        other.load_state_dict(torch.load(path, weights_only=True)["optimizer"])


def test_a_checkpoint_with_other_groups_goes_on_as_it_was_saved():
    """An earlier version did not cut qkv, and had it in one group with the other matrices."""

    def trained(optimizer: Muon, model: nn.Module, steps: range) -> list[torch.Tensor]:
        for k in steps:
            backward(model, seed=100 * k)
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    torch.manual_seed(0)
    model = SmallGPT("untied")
    optimizer = muon_for(model, splits={"*.qkv.weight": 1})
    trained(optimizer, model, range(2))
    middle = {name: p.clone() for name, p in model.state_dict().items()}
    saved = copy.deepcopy(optimizer.state_dict())
    expected = trained(optimizer, model, range(2, 4))
    model.load_state_dict(middle)
    now = muon_for(model)
    assert len(now.param_groups) > len(saved["param_groups"])
    with pytest.warns(UserWarning, match=r"in 4 groups, and this optimizer had them in 5"):
        now.load_state_dict(saved)
    assert all(
        torch.equal(a, b) for a, b in zip(trained(now, model, range(2, 4)), expected, strict=True)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        now.load_state_dict(now.state_dict())


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
