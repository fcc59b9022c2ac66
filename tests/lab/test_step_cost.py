"""benchmarks/step_cost.py and whole_step.py: what is measured, and how two versions are compared."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import polarstep as ps
from polarstep_lab.records import read
from polarstep_lab.records.pack import pack

ROOT = Path(__file__).parents[2]
PARTS = ("cost", "workloads", "optimizers", "times", "beside")


@pytest.fixture(scope="module")
def step():
    """The parts of the benchmark: ``step.beside`` is the module ``step_beside``."""
    return SimpleNamespace(**{name: importlib.import_module(f"step_{name}") for name in PARTS})


@pytest.fixture
def command(step, tmp_path, monkeypatch):
    """Call the command with options; returns the lines it wrote. Each turn is a single step."""
    monkeypatch.setattr(step.times, "LEAST_MILLISECONDS", 0)

    def run(*options):
        out = tmp_path / "record.jsonl"
        argv = ["step_cost.py", "--device=cpu", "--quick", f"--json={out}", *options]
        monkeypatch.setattr("sys.argv", argv)
        step.cost.main()
        return read(out)

    return run


def test_only_steps_measures_adamw_and_the_optimizers_asked_for(command, capsys, tmp_path):
    adamw, auto = command("--only-steps", "--optimizer=auto", "--part=here")
    assert f"package: {Path(ps.__file__).resolve()}\n" in capsys.readouterr().out
    assert [line["variant"] for line in (adamw, auto)] == ["AdamW, fused", "auto"]
    assert adamw["result"].keys() == auto["result"].keys() == {"ms", "ratio"}
    assert adamw["result"]["ratio"] == 1
    assert auto["result"]["ratio"] == auto["result"]["ms"] / adamw["result"]["ms"]
    assert auto["config"] == {"workload": "small"}
    assert auto["part"] == "here"
    pack([tmp_path / "record.jsonl"], tmp_path / "step-cost")
    assert read(tmp_path / "step-cost") == [adamw, auto]


def test_an_unknown_workload_is_refused(command, capsys):
    with pytest.raises(SystemExit):
        command("--workload=nope")
    assert "--workload nope: expected one of small" in capsys.readouterr().err


def test_an_unknown_optimizer_is_refused(command, capsys):
    with pytest.raises(SystemExit):
        command("--only-steps", "--optimizer=nope")
    assert "--optimizer nope: expected one of: AdamW, fused; LowRank" in capsys.readouterr().err


def test_rows_that_are_asked_for_sketch_every_shape_and_the_table_does_not_have_them(command, step):
    forced = step.optimizers.forced(4096)
    inner = step.optimizers.INNER
    heads = {"a sixth": 680, "an eighth": 504, "a twelfth": 344}
    assert {name: make() for name, make in forced.items()} == {
        f"Deflated, ℓ = {part}": ps.Deflated(
            ps.LowRank(rank, 8, sketch=ps.Warm(), inner=inner, always_sketch=True),
            ps.NewtonSchulz(1, "flat"),
        )
        for part, rank in heads.items()
    } | {"LowRank, ℓ = a quarter": ps.LowRank(1016, 8, 0, inner=inner, always_sketch=True)}
    lines = command("--only-steps", *(f"--optimizer={name}" for name in forced))
    assert [line["variant"] for line in lines] == ["AdamW, fused", *forced]


def test_the_table_leaves_out_what_is_only_asked_for(step, monkeypatch):
    seen = []
    monkeypatch.setattr(step.times, "_that_run", lambda made: seen.extend(made) or iter(()))
    step.times.whole_steps("small", step.workloads.QUICK["small"], torch.device("cpu"))
    labels = [label for label, _ in seen]
    assert "auto" in labels
    assert not set(labels) & set(step.optimizers.ASKED_FOR)


def test_widths_between_those_of_the_table_are_measured_by_name(command, step, monkeypatch):
    assert not step.workloads.BETWEEN.keys() & step.workloads.WORKLOADS.keys()
    assert step.workloads.BETWEEN["width 640"].shapes == [(48, 640, 640), (24, 2560, 640)]
    monkeypatch.setitem(
        step.workloads.BETWEEN, "width 640", step.workloads.Workload([(2, 64, 64)], 8, 8)
    )
    lines = command("--only-steps", "--workload=width 640", "--optimizer=auto")
    assert {line["config"]["workload"] for line in lines} == {"width 640"}


def test_an_optimizer_that_the_package_lacks_is_left_out(step, capsys):
    def lacking():
        raise TypeError("unexpected keyword argument 'depth'")

    def made():
        return None

    assert list(step.times._that_run([("new", lacking), ("old", made)])) == [("old", made)]
    assert "left out: new: unexpected keyword argument 'depth'" in capsys.readouterr().out


def test_peers_come_from_the_folders_that_are_named_and_none_is_needed(
    step, tmp_path, monkeypatch, capsys
):
    """On their fastest path: dion's graph with every set of kernels, and others' best options."""
    files = {
        "dion/__init__.py": "from torch.optim import SGD as Muon, SGD as NorMuon, SGD as Dion2",
        "dion/cuda_graph.py": "def CudaGraphOptimizer(made, warmup_steps): return made",
        "muonium.py": "from torch.optim import SGD as Muon",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("POLARSTEP_PEERS", str(tmp_path))
    monkeypatch.setattr("sys.path", [*sys.path])
    for name in [name for name in sys.modules if name.split(".")[0] in ("dion", "muonium")]:
        monkeypatch.delitem(sys.modules, name)
    params = step.workloads.parameters([(1, 4, 4)], torch.device("cpu"))
    names = [name for name, _ in step.optimizers.peers(params)]
    graph = "Muon of dion, CUDA graph"
    assert {"torch.optim.Muon", "Muon of dion", "Muon of muonium", graph} <= {*names}
    assert {f"{graph}, Triton", f"{graph}, gram-newton-schulz"} <= {*names}
    told = capsys.readouterr().out
    assert "left out: Dion3 (a quarter of the rows): " in told
    assert "left out: Muon of Emerging-Optimizers, SYRK: No module named" in told
    for name in ("dion", "dion.cuda_graph", "muonium"):
        sys.modules.pop(name, None)


def test_muon_by_hand_takes_the_steps_of_the_package(step):
    """Two steps of the loop, of the batches and of polarstep.Muon lead to the same parameters."""
    moved = []
    for make in (
        lambda params: step.optimizers.HandWritten(params, 7),
        lambda params: step.optimizers.Batched(params, 7),
        lambda params: ps.Muon(
            params, lr=1e-5, momentum=0.95, polar=ps.NewtonSchulz(7, "quintic"), shape_scale="none"
        ),
    ):
        torch.manual_seed(0)
        params = step.workloads.parameters([(2, 12, 20), (1, 20, 12)], torch.device("cpu"))
        optimizer = make([torch.nn.Parameter(torch.zeros_like(p)) for p in params])
        for mine, p in zip(optimizer.param_groups[0]["params"], params, strict=True):
            mine.grad = p.grad
        optimizer.step()
        optimizer.step()
        moved.append([p.detach() / 1e-5 for p in optimizer.param_groups[0]["params"]])
    by_hand, batched, ours = moved
    torch.testing.assert_close(batched, by_hand)
    torch.testing.assert_close(ours, by_hand, rtol=1e-4, atol=1e-5)


@pytest.fixture
def versions(step, tmp_path, monkeypatch):
    """Two versions with known times, and the order in which they are measured."""
    asked = []
    times = {
        step.beside.ROOT: [{"old": 1, "both": 2}, {"both": 6}, {"both": 4}],
        tmp_path: [{"both": 4, "gone": 1}, {"both": 6}, {"both": 2}],
    }
    rounds = {root: iter(each) for root, each in times.items()}

    def steps_of(root, names, options):
        asked.append(root)
        assert (names, options) == (["load"], ["--quick"])
        return {("load", name): {"ms": ms} for name, ms in next(rounds[root]).items()}

    monkeypatch.setattr(step.beside, "_steps_of", steps_of)
    return asked


def test_two_versions_take_turns_and_swap_their_order(step, versions, tmp_path):
    step.beside.beside(tmp_path, ["load"], 3, ["--quick"])
    here, there = step.beside.ROOT, tmp_path
    assert versions == [here, there, there, here, here, there]


def test_ratios_are_of_pairs_measured_in_one_round(step, versions, tmp_path, capsys):
    (row,) = step.beside.beside(tmp_path, ["load"], 3, ["--quick"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "both" in line]
    assert [line.split("ratio ")[1][:5] for line in lines] == ["0.500", "0.750", "1.000"]
    assert row == {
        "workload": "load",
        "optimizer": "both",
        "ms": 4,
        "ms_before": 4,
        "ms_ratio": 1,
        "ms_ratios": [0.5, 1, 2],
    }


@pytest.fixture
def child(step, monkeypatch):
    """Replace the process that measures: it fails, or says that it ran the given package."""

    def answer(package, returncode=0):
        def run(command, env, **_):
            out = Path(command[command.index("--json") + 1])
            out.write_text("", encoding="utf-8")
            said = f"a CPU\npackage: {package}\n"
            return subprocess.CompletedProcess(command, returncode, said, "no such device")

        monkeypatch.setattr(step.beside.subprocess, "run", run)

    return answer


def test_a_checkout_whose_package_was_not_measured_is_an_error(step, child, tmp_path):
    child(ROOT / "src" / "polarstep" / "__init__.py")
    assert step.beside._steps_of(ROOT, [], []) == {}
    with pytest.raises(RuntimeError, match="give --beside the root of a checkout"):
        step.beside._steps_of(tmp_path, [], [])


def test_a_measurement_that_fails_says_why(step, child):
    child(ROOT / "src" / "polarstep" / "__init__.py", returncode=1)
    with pytest.raises(RuntimeError, match="no such device"):
        step.beside._steps_of(ROOT, [], [])


def test_whole_steps_have_the_part_of_the_optimizer(tmp_path, monkeypatch, capsys):
    """Every row of the table, over one model whose weights all of them move."""
    whole = importlib.import_module("whole_step")
    out = tmp_path / "whole.jsonl"
    words = ["whole_step.py", "--device=cpu", "--quick", f"--json={out}", "--commit=abc"]
    monkeypatch.setattr("sys.argv", words)
    whole.main()
    lines = read(out)
    rows = [*whole.optimizers(torch.nn.Linear(4, 4))]
    assert [line["variant"] for line in lines] == rows
    assert rows[0] == "AdamW"
    assert {"muon_for", "muon_for, full space", "muon_for, cheap", "torch.optim.Muon"} < {*rows}
    for line in lines:
        result = line["result"]
        assert 0 < result["optimizer_ms"] < result["ms"]
        assert result["share"] == result["optimizer_ms"] / result["ms"]
        assert len(result["ms_by_round"]) == 2
        assert line["config"]["width"] == 32
        assert line["environment"]["commit"] == "abc"
    assert lines[0]["result"]["ratio"] == 1
    assert "AdamW" in capsys.readouterr().out


def test_a_whole_step_updates_every_parameter_once():
    """By torch's Muon and AdamW together, and by ours alone."""
    whole = importlib.import_module("whole_step")
    model = torch.nn.Sequential(
        torch.nn.Embedding(8, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 8)
    )
    for make in whole.optimizers(model).values():
        held = [p for part in make() for group in part.param_groups for p in group["params"]]
        assert sorted(map(id, held)) == sorted(map(id, model.parameters()))
