"""benchmarks/step_cost.py and its parts: what is measured, how two versions are compared, the figure."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import polarstep as ps

ROOT = Path(__file__).parents[2]
PARTS = ("cost", "workloads", "optimizers", "times", "phases", "sweeps", "beside")


@pytest.fixture(scope="module")
def step():
    """The parts of the benchmark: ``step.beside`` is the module ``step_beside``."""
    return SimpleNamespace(**{name: importlib.import_module(f"step_{name}") for name in PARTS})


@pytest.fixture
def command(step, tmp_path, monkeypatch):
    """Call the command with options; returns the record it wrote. Each turn is a single step."""
    monkeypatch.setattr(step.times, "LEAST_MILLISECONDS", 0)

    def run(*options):
        out = tmp_path / "record.json"
        argv = ["step_cost.py", "--device=cpu", "--quick", f"--json={out}", *options]
        monkeypatch.setattr("sys.argv", argv)
        step.cost.main()
        return json.loads(out.read_text(encoding="utf-8"))

    return run


def test_only_steps_measures_adamw_and_the_optimizers_asked_for(command, capsys):
    record = command("--only-steps", "--optimizer=auto")
    assert record.keys() == {"machine", "steps"}
    assert f"package: {Path(ps.__file__).resolve()}\n" in capsys.readouterr().out
    assert [row["optimizer"] for row in record["steps"]] == ["AdamW, fused", "auto"]
    adamw, auto = record["steps"]
    assert adamw.keys() == auto.keys() == {"workload", "optimizer", "ms", "ratio"}
    assert adamw["ratio"] == 1
    assert auto["ratio"] == auto["ms"] / adamw["ms"]


def test_a_whole_run_has_phases_and_a_floor(command):
    record = command("--optimizer=LowRank, warm")
    assert record.keys() == {"machine", "steps", "phases", "floor", "rates"}
    assert list(record["phases"]["small"]) == [
        "momentum",
        "sketch",
        "orthonormalization",
        "project",
        "inner iteration",
        "lift and update",
    ]
    assert record["floor"].keys() == {"small"}


def test_an_unknown_workload_is_refused(command, capsys):
    with pytest.raises(SystemExit):
        command("--workload=nope")
    assert "--workload nope: expected one of small" in capsys.readouterr().err


def test_an_unknown_optimizer_is_refused(command, capsys):
    with pytest.raises(SystemExit):
        command("--only-steps", "--optimizer=nope")
    assert "--optimizer nope: expected one of: AdamW, fused; LowRank" in capsys.readouterr().err


@pytest.mark.parametrize("record", ["h200-before", "h200-steps"])
def test_only_the_record_of_a_whole_run_is_drawn(step, monkeypatch, capsys, record):
    path = ROOT / "results" / "step-cost" / f"{record}.json"
    monkeypatch.setattr("sys.argv", ["step_cost.py", f"--figure={path}"])
    with pytest.raises(SystemExit):
        step.cost.main()
    assert "expected the record of a whole run, with phases" in capsys.readouterr().err


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
    rows = command("--only-steps", *(f"--optimizer={name}" for name in forced))["steps"]
    assert [row["optimizer"] for row in rows] == ["AdamW, fused", *forced]


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
    rows = command("--only-steps", "--workload=width 640", "--optimizer=auto")["steps"]
    assert {row["workload"] for row in rows} == {"width 640"}


def test_an_optimizer_that_the_package_lacks_is_left_out(step, capsys):
    def lacking():
        raise TypeError("unexpected keyword argument 'depth'")

    def made():
        return None

    assert list(step.times._that_run([("new", lacking), ("old", made)])) == [("old", made)]
    assert "left out: new: unexpected keyword argument 'depth'" in capsys.readouterr().out


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


def test_the_floor_counts_bytes_and_products(step):
    workload = step.workloads.Workload([(2, 3, 5), (1, 7, 11)], rank=3, oversample=1)
    entries = 2 * 3 * 5 + 7 * 11
    never = float("inf")
    bytes_alone = step.phases.floor(workload, {"bytes_per_ms": 1, "flops_per_ms": never})
    flops_alone = step.phases.floor(workload, {"bytes_per_ms": never, "flops_per_ms": 1})
    assert bytes_alone == 26 * entries
    assert flops_alone == 3 * (2 * entries * 4)


def test_the_exponent_of_a_power_law(step):
    rows = [{"x": x, "map": 3 * x**2.5 + (x < 8) * 50} for x in (2, 4, 8, 16, 32, 64)]
    assert step.sweeps.exponent(rows, "map") == pytest.approx(2.5)


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
            out.write_text(json.dumps({"steps": []}), encoding="utf-8")
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


@pytest.mark.rendered
@pytest.mark.parametrize("record", ["h200", "cpu"])  # with sweeps and without
def test_a_record_is_drawn(step, tmp_path, monkeypatch, record):
    copy = tmp_path / "record.json"
    copy.write_bytes((ROOT / "results" / "step-cost" / f"{record}.json").read_bytes())
    monkeypatch.setattr("sys.argv", ["step_cost.py", f"--figure={copy}"])
    step.cost.main()
    assert copy.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"


FOLDER = ROOT / "results" / "step-cost"
PAGES = ("docs/speed.md", "results/step-cost/README.md")


def printed_commands(page):
    """The words of each command of ``step_cost.py`` on a page, after the name of the script."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        words = shlex.split(block.replace("\\\n", " "), comments=True)
        names = [i for i, word in enumerate(words) if word.endswith("step_cost.py")]
        if names:
            (at,) = names
            yield words[at + 1 :]


@pytest.fixture
def all_peers(monkeypatch):
    """Every peer can be loaded, dion's CUDA graph too; none of them is made."""
    monkeypatch.setattr("polarstep_lab.optimizers.peers.load", lambda peer: torch.optim.SGD)
    graphs = SimpleNamespace(CudaGraphOptimizer=None)
    monkeypatch.setitem(sys.modules, "dion", SimpleNamespace(cuda_graph=graphs))
    monkeypatch.setitem(sys.modules, "dion.cuda_graph", graphs)


def selected_rows(step, options, device):
    """Workload and name of every row that a command measures."""
    usual = step.workloads.WORKLOADS if device.type == "cuda" else step.workloads.ON_A_CPU
    known = usual | step.workloads.BETWEEN
    for workload in options.workload or usual:
        _, rank, oversample = known[workload]
        others = not (options.only_steps or options.beside)
        made = step.optimizers.optimizers(
            [torch.zeros(768, 768)], rank, oversample, device, others=others
        )
        for label, _ in step.times.selected(made, options.optimizer):
            yield workload, label


# Rows of maps that the package had when the records were made.
GONE = {
    "LowRank, Gaussian h=0, kept 4 steps",
    "Deflated, Gaussian h=1, rest scaled",
    "Deflated, Gaussian h=1, rest scaled, rows normalized",
    "Deflated 120, warm, rest scaled",
    "Deflated 120, warm, rest scaled, rows normalized",
}
COMMANDS = [words for page in PAGES for words in printed_commands(page)]


@pytest.mark.parametrize("words", COMMANDS, ids=[words[-1] for words in COMMANDS])
def test_a_printed_command_makes_the_rows_of_its_record(step, all_peers, words):
    """Exactly these rows, in this order; nothing is measured here."""
    options = step.cost._parser().parse_args(words)
    record = json.loads((ROOT / options.json).read_text(encoding="utf-8"))
    on_a_cpu = record["machine"].startswith("CPU")
    assert ("--device" in words) == on_a_cpu  # a GPU is the default where there is one
    rows = record["beside" if options.beside else "steps"]
    expected = [(row["workload"], row["optimizer"]) for row in rows if row["optimizer"] not in GONE]
    device = torch.device("cpu" if on_a_cpu else "cuda")
    assert [*selected_rows(step, options, device)] == expected
    assert ("phases" in record) == (not options.only_steps and not options.beside)
    assert ("sweeps" in record) == options.sweep
    assert not options.beside or record["rounds"] == options.rounds


def test_every_record_has_one_command(step):
    """On the page under its table, or in the folder's README, which also says where there is none."""
    made = [step.cost._parser().parse_args(words).json.as_posix() for words in COMMANDS]
    assert len(made) == len(set(made))
    page = (ROOT / "docs/speed.md").read_text(encoding="utf-8")
    marked = set(re.findall(r"<!-- (?:table|speedup|device): (\S+) -->", page))
    assert marked == {words[-1] for words in printed_commands("docs/speed.md")}
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`([\w-]+\.(?:json|txt|png))`", readme))
    assert listed == {path.name for path in FOLDER.iterdir()} - {"README.md"}
    without = {path.name for path in FOLDER.glob("*.json")} - {Path(path).name for path in made}
    assert without == {"cpu-bare.json", "h200-rest-scaled.json"}
    assert "bare_products.py --json results/step-cost/cpu-bare.json" in readme
    assert "`h200-rest-scaled.json` was made by a prototype" in readme


def test_the_products_of_a_step_are_recorded_and_can_be_replayed(step):
    """As many of a shape as the step has, on numbers of their own."""
    bare = importlib.import_module("bare_products")
    p = torch.nn.Parameter(torch.zeros(24, 40))
    p.grad = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    optimizer = ps.Muon([p], lr=1e-3, polar=ps.NewtonSchulz(3, "quintic", form="plain"))
    optimizer.step()
    before = p.detach().clone()
    products = bare.recorded(optimizer)
    assert not torch.equal(p, before)  # the step was made
    before = p.detach().clone()
    shapes = [tuple(again().shape[-2:]) for again in products]
    assert torch.equal(p, before)  # and the replay changed nothing of it
    # XXᵀ and its square have 24×24 entries, the product with X has 24×40, three times each.
    assert len(shapes) >= 6
    assert set(shapes) <= {(24, 24), (24, 40)}
