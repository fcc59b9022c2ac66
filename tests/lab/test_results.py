"""What lies under results/ is what its records say, and the commands that repeat it exist."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.lab.experiments.synthetic import write_ablation, write_run, write_table_2
from typer.testing import CliRunner

from polarstep.polar import auto
from polarstep.polar.cost import DEVICES
from polarstep_lab.cli import app
from polarstep_lab.cli.options import seeds_of
from polarstep_lab.config import RunConfig
from polarstep_lab.methods import all_methods, find_method, find_methods
from polarstep_lab.models.convnet import ConvNet
from polarstep_lab.models.gpt import GPT
from polarstep_lab.records.archive import ARCHIVE
from polarstep_lab.records.pack import pack
from polarstep_lab.records.record import RunRecord, find_runs
from polarstep_lab.records.settings import setting_of
from polarstep_lab.report import stale_tables, write_report
from polarstep_lab.settings_by_name import parse_assignment
from polarstep_lab.storage import StorageError, read_lines
from polarstep_lab.suites.suite import ablation_runs, comparison_runs
from polarstep_lab.training.optimizers import build_polar, optimizer_gflops

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = sorted(folder for folder in (ROOT / "results").iterdir() if [*folder.rglob(ARCHIVE)])


def test_the_reports_under_results_are_those_of_their_archives():
    for folder in PUBLISHED:
        stale = stale_tables([folder], folder)
        assert not stale, f"{stale} in {folder.relative_to(ROOT)} are out of date: make results"


def test_the_gflops_of_every_record_are_the_ledgers():
    """They follow from config and device, so that a repair of the ledger reaches older records too."""
    expected = {}
    for run in map(RunRecord.load, find_runs(PUBLISHED)):
        if run.result is None:
            continue
        device = torch.device(run.environment["device"])
        setting = (setting_of(run), device)
        if setting not in expected:
            config = RunConfig.from_dict(run.identity.config)
            if config.rule.peer is not None:
                continue  # not counted
            with torch.device("meta"):
                model = (GPT if config.benchmark == "nanogpt" else ConvNet)(config.model)
            expected[setting] = optimizer_gflops(model, config, device)
        found = run.result.optimizer_gflops_per_step
        assert found == pytest.approx(expected[setting], rel=1e-12), run.directory
    assert len(expected) > 50


def test_pages_carry_no_path_of_a_machine():
    for folder in PUBLISHED:
        for path in [*folder.rglob("*.jsonl"), *folder.glob("*.html"), *folder.glob("*.md")]:
            found = re.search(
                r"(?<![\w./~-])/(?:home|root|tmp|mnt|Users|work)/\S+", path.read_text()
            )
            assert not found, f"{path.relative_to(ROOT)}: {found[0]}"


@pytest.fixture
def published(tmp_path):
    """A folder as under results/: two archives, and the report of both."""
    folder = tmp_path / "results" / "cifar10"
    write_table_2(tmp_path / "runs" / "table2", "cifar10", seeds=2)
    write_ablation(tmp_path / "runs" / "rank", "cifar10", "rank", [16, 128], seeds=2)
    for name in ("table2", "rank"):
        pack([tmp_path / "runs" / name], folder / name)
    write_report([folder], folder)
    return folder


def test_an_edited_table_and_a_new_run_are_noticed(published, tmp_path, monkeypatch):
    assert stale_tables([published], published) == []
    table = published / "summary.md"
    original = table.read_text()
    table.write_text(original.replace("0.93", "0.94", 1))
    assert stale_tables([published], published) == ["summary.md"]
    monkeypatch.chdir(published.parent)
    checked = CliRunner().invoke(app, ["report", "cifar10", "--out", "cifar10", "--check"])
    assert checked.exit_code == 1
    assert "summary.md in cifar10 are not what the records say" in checked.stderr
    table.write_text(original)
    checked = CliRunner().invoke(app, ["report", "cifar10", "--out", "cifar10", "--check"])
    assert checked.exit_code == 0, checked.stderr
    write_ablation(tmp_path / "more", "cifar10", "steps", [1], seeds=1)
    pack([tmp_path / "more"], published / "rank")
    assert stale_tables([published], published) == ["summary.md", "summary.csv", "runs.csv"]


def test_the_report_of_archives_is_that_of_the_directories(published, tmp_path):
    """Bit for bit in its tables, but for where a run lies; test_archive.py compares figures too."""
    pages = {}
    for name in ("runs", "results/cifar10"):
        write_report([tmp_path / name], tmp_path / "page" / name)
        pages[name] = tmp_path / "page" / name
    for table in ("summary.md", "summary.csv"):
        first, second = (folder / table for folder in pages.values())
        assert first.read_bytes() == second.read_bytes()


@pytest.fixture
def module():
    """What fills the pages."""
    return importlib.import_module("pages.write")


@pytest.fixture
def tables(module):
    """The tables of the pages."""
    return importlib.import_module("pages.tables")


def test_a_page_is_filled_from_archives_and_claims_nothing_without(published, module, monkeypatch):
    for each in (module, importlib.import_module("pages.results")):
        monkeypatch.setattr(each, "ROOT", published.parent.parent)
    page = "## Results\n\n<!-- results: results/cifar10 -->\nold\n<!-- end -->\n\nmore\n"
    text = module.filled(page, "docs/results.md")
    assert "old" not in text
    assert "**cifar10**, seeds: 2, Synthetic GPU ([report](../results/cifar10/summary.md)" in text
    assert "[table2](../results/cifar10/table2/records.jsonl)" in text
    assert "| Muon (Nesterov) | 0.93" in text
    assert "0.9370 ± 0.0016" in text  # the paper's
    assert text.endswith("<!-- end -->\n\nmore\n")
    assert module.filled(text, "docs/results.md") == text
    without = page.replace("results/cifar10", "results/nothing").replace("old\n", "")
    assert module.filled(without, "docs/results.md") == without


def test_an_edited_claim_and_an_edited_table_are_noticed(module):
    page = (ROOT / "docs/which.md").read_text()
    assert module.filled(page, "docs/which.md") == page
    for pattern in (
        r"(<!-- claim: low-rank-loss -->\D*)(\d)",
        r"(<!-- choice: \S+ -->(?s:.*?×.*?))(\d)",
    ):
        edited = re.sub(pattern, lambda m: f"{m[1]}{(int(m[2]) + 1) % 10}", page, count=1)
        assert edited != page
        assert module.filled(edited, "docs/which.md") == page
    with pytest.raises(SystemExit, match="claim 'no-such': expected one of"):
        module.filled("It is <!-- claim: no-such -->good<!-- end -->.", "docs/which.md")


SIGNED = re.compile(r"[+−]\d+\.\d+(?:%|\s±|\spoints)|\d+ of (?:the )?\d+ pairs|of the \d+ pairs")
"""A signed difference, as ``+0.3%`` or ``−1.9 ± 5.5``, or a count of pairs."""
FASTER = re.compile(r"times as fast")
"""A ratio of times."""
TOLD = {
    "seeds": r"n\s=\s\d|one\sseed|\d\sseeds",
    "tokens": r"M tokens|CIFAR|accuracy",
    "baseline": r"[Aa]gainst|to full space|than|from the runs|in place of|without|from \d+ to \d+",
    "interval": r"±|95%|one\sseed",
}
"""What a claim that compares has to tell, and how it is found in its text."""
TOLD_OF_TIMES = {
    "baseline": r"times as fast as \w",
    "matrices": r"matri|shape|\d×\d",
    "machine": r"CPU|cores|H200",
    "runs": r"single runs?|rounds",
}
"""The same of a claim that is about times."""
APART = {
    "adaptive-small": "the page says that these are 120 steps of a small GPT on characters",
}
"""Claims that leave something to their page, and where it is."""


def comparisons(module, compares=SIGNED):
    texts = {name: module.made(name) for name in importlib.import_module("pages.claims").CLAIMS}
    return {name: text for name, text in texts.items() if compares.search(text)}


def untold(found, told):
    """What claims leave out of what a comparison has to tell."""
    return [
        f"{name} without {part}: {text}"
        for name, text in found.items()
        for part, pattern in told.items()
        if name not in APART and not re.search(pattern, text)
    ]


def test_a_claim_that_compares_names_seeds_tokens_baseline_and_interval(module):
    found = comparisons(module)
    assert len(found) > 40
    assert {
        "adamw-at-its-best",
        "gap-over-tokens",
        "long-run",
        "peers-ahead",
        "rank-ablation",
    } <= found.keys()
    assert {"gpt-order", "pairs-with-rows"} <= found.keys()
    missing = untold(found, TOLD)
    assert not missing, "\n".join(missing)


def test_a_claim_of_times_names_baseline_matrices_machine_and_runs(module):
    found = comparisons(module, FASTER)
    assert {"cpu-speedup", "cpu-auto", "cpu-small-matrix", "cpu-beside-full-space"} <= found.keys()
    missing = untold(found, TOLD_OF_TIMES)
    assert not missing, "\n".join(missing)


def test_a_claim_that_leaves_something_out_is_noticed():
    text = "it ends lower in 43 of 44 pairs against full space"
    assert SIGNED.search(text)
    assert untold({"a": text}, TOLD) == [
        f"a without {part}: {text}" for part in ("seeds", "tokens", "interval")
    ]
    text = "it is 7.1 times as fast on nanoGPT's matrices"
    assert FASTER.search(text)
    assert untold({"b": text}, TOLD_OF_TIMES) == [
        f"b without {part}: {text}" for part in ("baseline", "machine", "runs")
    ]


def test_intervals_are_those_of_student(module):
    from differences import change, paired

    found = paired({1: 5.0, 2: 7.0, 3: 9.0, 8: 1.0}, {1: 4.0, 2: 5.0, 3: 6.0, 9: 2.0})
    assert (found.value, found.pairs) == (2.0, 3)
    assert found.error == pytest.approx(1 / math.sqrt(3))
    assert found.interval == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)
    assert found.told(1, "%").replace("\N{NO-BREAK SPACE}", " ") == "+2.0% ± 2.5 (n = 3)"
    assert change([-0.4]).told(unit="%").replace("\N{NO-BREAK SPACE}", " ") == "−0.4% (one seed)"


COMMANDS = re.compile(r"polarstep (?:compare|ablate) (?:[^`\n\\]|\\\n)*")


def planned(command):
    """The runs that a command of a page makes."""
    words = shlex.split(command.replace("\\\n", " "), comments=True)[1:]
    options = {}
    for key, value in itertools.pairwise(words):
        if key.startswith("--"):
            options.setdefault(key, []).append(value)
    help_text = CliRunner().invoke(app, [words[0], "--help"], env={"COLUMNS": "200"}).stdout
    assert all(option in help_text for option in options), command
    overrides = dict(parse_assignment(text) for text in options.get("--set", []))
    seeds = seeds_of(options.get("--seeds", ["1"])[-1])
    if words[0] == "ablate":
        method = find_method(options.get("--method", ["rand-muon"])[-1])
        return ablation_runs(words[1], method, words[2], [], seeds, overrides, Path("x"))
    methods = find_methods(options.get("--methods", ["all"])[-1])
    return comparison_runs(words[1], methods, seeds, overrides, Path("x"))


def pages_with_commands():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return [page for page in pages if page.name != "log.md" and COMMANDS.search(page.read_text())]


@pytest.mark.parametrize("page", pages_with_commands(), ids=lambda page: page.name)
def test_the_commands_of_the_pages_can_be_planned(page):
    for command in COMMANDS.findall(page.read_text()):
        if "RECIPE" not in command and "…" not in command and ".toml" not in command:
            assert planned(command), command


def facts(config):
    """What a command must give a run: the method's optimizer, the network, the schedule, the data."""
    data = config["data"]
    length = data.get("stages") or [data.get("epochs"), data.get("batch")]
    return json.dumps(
        [config["optimizer"], config["model"], config["schedule"], length], sort_keys=True
    )


def steps_of(config):
    """The steps of a GPT's run; a recipe may be run to its end in one table, and cut in another."""
    return sum(stage["steps"] for stage in config["data"].get("stages", []))


def test_the_commands_under_a_table_make_the_runs_of_the_table():
    """Method, seed, steps and settings of every run in a table come from the commands under it."""
    text = (ROOT / "docs/results.md").read_text()
    checked = 0
    for folder, block in re.findall(r"<!-- results: (\S+) -->(.*?)<!-- end -->", text, re.DOTALL):
        made = {}
        for run in (run for command in COMMANDS.findall(block) for run in planned(command)):
            config, who = json.loads(json.dumps(run.config.to_dict())), run.identity
            made[who.recipe, who.method, who.seed, steps_of(config)] = facts(config)
        names = {method.name for method in all_methods()}
        shown = names & set(re.findall(r"^\| (.*?) \|", block, re.MULTILINE))
        recipes = set(re.findall(r"^\*\*(\S+)\*\*.*?, seeds", block, re.MULTILINE))
        recorded = {}
        for run in map(RunRecord.load, find_runs([ROOT / folder])):
            who = run.identity
            if who.ablation is None and who.method in shown and who.recipe in recipes:
                config = json.loads(json.dumps(RunConfig.from_dict(who.config).to_dict()))
                recorded[who.recipe, who.method, who.seed, steps_of(config)] = facts(config)
        assert made.keys() == recorded.keys(), folder
        for who, config in recorded.items():
            assert made[who] == config, who
        checked += len(recorded)
    assert checked > 370


def test_the_commands_under_our_maps_on_cifar10_make_the_runs_of_their_tables():
    text = (ROOT / "docs/results.md").read_text()
    _, *blocks = text.partition("\n## A GPT")[0].split("<!-- accuracies: ")
    assert len(blocks) == 1

    def who(run, config):
        return run.identity.method, run.identity.seed, config["optimizer"]["polar"]["rest"]

    for block in blocks:
        folder, below = block.split(" -->", 1)
        made = {
            who(run, run.config.to_dict()): facts(run.config.to_dict())
            for command in COMMANDS.findall(below)
            for run in planned(command)
        }
        recorded = {
            who(run, run.identity.config): facts(RunConfig.from_dict(run.identity.config).to_dict())
            for run in map(RunRecord.load, find_runs([ROOT / folder]))
        }
        assert len(recorded) == 200
        assert made == recorded


def runs_of_the_page(out):
    """Map, rate and seed of the runs that commands of docs/frontier.md write to a file, and how often.

    ``None`` stands for commands that name no file. How often is after how many steps they evaluate.
    """
    page = (ROOT / "docs/frontier.md").read_text()
    made = set()
    for command in re.findall(r"benchmarks/frontier.py run (?:[^`\n\\]|\\\n)*", page):
        words = shlex.split(command.replace("\\\n", " "))
        options = dict(itertools.pairwise(words))
        if options.get("--out") == out:
            maps, rates, seeds = (options[key].split(",") for key in ("--maps", "--lr", "--seeds"))
            made |= {
                (name, float(rate), int(seed), int(options.get("--every", 0)))
                for name in maps
                for rate in rates
                for seed in seeds
            }
    return made


def test_the_commands_of_the_page_make_the_runs_of_the_frontier(module):
    """All but those of earlier versions of a map, which the page says cannot be repeated."""
    frontier = importlib.import_module("frontier")
    recorded = {
        (run["map"], run["lr"], run["seed"], 0)
        for run in read_lines(ROOT / "results/frontier/runs.jsonl")
        if frontier.parts_of(run["map"])[0] not in frontier.EARLIER
    }
    assert runs_of_the_page(None) == recorded


CURVES = ROOT / "results/frontier/curves.jsonl"


def test_the_commands_of_the_page_make_the_curves():
    recorded = read_lines(CURVES)
    made = [(run["map"], run["lr"], run["seed"], run["curve"][0][0]) for run in recorded]
    assert runs_of_the_page("curves.jsonl") == set(made)
    assert len(made) == len(set(made))


def test_the_text_of_the_runs_is_described_by_length_and_by_the_days_it_names(module):
    from describe_text import days_named, summary

    text = "Born 4 March 2014, or March 14, 2014; not 4 March 2013, 104 March 2014 or May 2014."
    assert days_named(text, "2014-03") == {4, 14}
    assert summary(np.array([3, 9, 5])) == {"shortest": 3, "median": 5, "longest": 9}
    assert "up to the 4th is named by 7 to 10 articles, each later" in module.made(
        "day-of-the-text"
    )


def test_a_folder_without_runs_is_an_error(tmp_path):
    with pytest.raises(StorageError, match="no run directories"):
        stale_tables([tmp_path], tmp_path)


def records_of_maps():
    names = "pages.records.quality", "pages.records.maps"
    return tuple(map(importlib.import_module, names))


@pytest.fixture
def quality(module, monkeypatch):
    """Records of qualities and of maps, and the runs and times that they read, which the test fills."""
    found, maps = records_of_maps()
    runs: dict[tuple[str, float], dict[int, float]] = {}
    times: dict[tuple[str, str], dict[str, float]] = {}

    def records():
        return [
            {"map": name, "lr": lr, "seed": seed, "perplexity": perplexity, "steps": 1500}
            for (name, lr), seeds in runs.items()
            for seed, perplexity in seeds.items()
        ]

    monkeypatch.setattr(found, "records", records)
    monkeypatch.setattr(maps, "steps", lambda record=None: times)
    return found, maps, runs, times


def test_a_rate_is_chosen_on_one_seed_and_reported_on_others(quality):
    found, _, runs, _ = quality
    for rate, perplexity in ((0.01, 52.0), (0.014, 50.0), (0.02, 51.0)):
        runs["full", rate] = {3: perplexity, 0: 100.0, 1: 100.0}
        runs["low-rank", rate] = {3: 200 - perplexity, 0: 900.0}
    runs["low-rank", 0.01] |= {0: 101.0, 1: 103.0, 3: 40.0}
    assert (found.chosen("full"), found.chosen("low-rank")) == (0.014, 0.01)
    gap = found.at_chosen_rates("low-rank")
    assert gap.rate == 0.01
    assert gap.tried == {0.01: 40.0, 0.014: 150.0, 0.02: 149.0}
    assert gap.change.value == pytest.approx(2.0)
    assert gap.change.pairs == 2  # seed 3 chose, and does not count
    assert found.quality(("low-rank", 0.01)).pairs == 2
    assert (
        found.quality(("low-rank", 0.014)).pairs == 1
    )  # at the rate of full space it does not either
    runs["full", 0.014][2] = runs["low-rank", 0.014][2] = 100.0
    assert found.quality(("low-rank", 0.014)).pairs == 2
    del runs["low-rank", 0.02]
    assert found.chosen("low-rank") is None
    assert found.at_chosen_rates("low-rank") is None


def test_runs_with_halves_are_judged_by_the_test_half(quality, monkeypatch):
    found, _, runs, _ = quality
    for rate in (0.01, 0.014, 0.02):
        runs["full", rate] = {3: 50.0, 0: 50.0}
        runs["low-rank", rate] = {3: 60.0 + 100 * rate, 0: 60.0}
    whole = found.records()
    halves = {"full": 0.98, "low-rank": 1.0}  # the test half is easier for full space
    with_halves = [
        run | {"validation": run["perplexity"] + 7, "test": run["perplexity"] * halves[run["map"]]}
        for run in whole
    ]
    monkeypatch.setattr(found, "records", lambda: with_halves)
    assert found.judged_by(("full", 0.014), ("low-rank", 0.014)) == "test"
    assert found.quality(("low-rank", 0.02)).value == pytest.approx(100 * (60 / 49 - 1))
    gap = found.at_chosen_rates("low-rank")
    assert (gap.rate, gap.text) == (0.01, "test")
    assert gap.tried[0.01] == pytest.approx(68.0)  # of the validation half
    assert gap.change.value == pytest.approx(100 * (60 / 49 - 1))
    # One run without halves, and all of the held-out text counts for what it is compared with.
    places = {(run["lr"], run["seed"], run["map"]): i for i, run in enumerate(whole)}
    last = places[0.02, 0, "full"]
    with_halves[last] = whole[last]
    assert found.quality(("low-rank", 0.02)).value == pytest.approx(100 * (60 / 49 - 1))
    assert found.quality(("low-rank", 0.01), ("full", 0.02)).value == pytest.approx(20.0)
    # That run has no part in a comparison at chosen rates, but one of the seed that chooses has.
    assert found.at_chosen_rates("low-rank").text == "test"
    last = places[0.02, 3, "low-rank"]
    with_halves[last] = whole[last]
    gap = found.at_chosen_rates("low-rank")
    assert (gap.text, gap.tried[0.01]) == ("perplexity", pytest.approx(61.0))


def test_tables_that_say_test_have_the_test_half_of_every_run(module):
    found, maps = records_of_maps()
    trained = [each.trained for each in (*maps.weighed(), *maps.peers()) if each.trained]
    assert len(trained) > 15
    assert found.judged_by(*trained) == found.TEST


def test_a_peer_is_shown_in_its_fastest_form_and_at_its_best_rate(quality):
    found, maps, runs, times = quality
    runs["full", 0.014] = {0: 50.0}
    runs["peer:dion-muon", 0.014], runs["peer:dion-muon", 0.02] = {0: 52.0}, {0: 51.0}
    runs["peer:soap", 0.002] = {0: 53.0}
    forms = {
        "Muon of dion": 2.0,
        "Muon of dion, CUDA graph": 1.0,
        "Muon of dion, CUDA graph, Triton": 1.5,
    }
    for load in maps.HELD:
        for name, ms in (forms | {"torch.optim.Muon": 9.0}).items():
            times[name, load] = {"ms": ms}
    torch_muon, dion, soap = maps.peers()
    assert (dion.title, dion.timed) == ("Muon of dion", "Muon of dion, CUDA graph")
    assert dion.trained == ("peer:dion-muon", 0.02)
    assert (torch_muon.timed, torch_muon.trained) == ("torch.optim.Muon", None)
    assert (soap.timed, soap.trained) == (None, ("peer:soap", 0.002))
    for rate, perplexity in ((0.01, 50.0), (0.014, 49.0), (0.02, 51.0)):
        runs.setdefault(("peer:dion-muon", rate), {})[3] = perplexity
    runs["full", 0.014][3] = 50.0
    dion = maps.peers()[1]
    assert dion.trained == (
        "peer:dion-muon",
        0.014,
    )  # seed 3 chose it, although 0.02 has a lower mean
    assert found.quality(dion.trained).value == pytest.approx(4.0)  # of seed 0 alone
    for rate in (0.01, 0.014, 0.02):
        runs["peer:dion-muon+warmup", rate] = {3: 48.5, 0: 50.0}
    assert maps.peers()[1].trained[0] == "peer:dion-muon+warmup"  # seed 3 has it lower
    runs["peer:dion-muon", 0.014][3] = 48.0
    assert maps.peers()[1].trained == ("peer:dion-muon", 0.014)


def test_the_table_of_peers_says_what_is_missing(tables, quality, monkeypatch):
    _, maps, runs, times = quality
    runs["full", 0.014], runs["peer:torch-muon", 0.02] = {0: 50.0, 1: 50.0}, {0: 51.0, 1: 51.5}
    runs["peer:soap", 0.002] = {0: 53.0}
    shown = [maps.Weighed("full space", "full space", ("full", 0.014))]
    for name, ratio in (("full space", 4.0), ("torch.optim.Muon", 38.27), ("Muon of dion", 8.0)):
        for load in maps.HELD:
            times[name, load] = {
                "ms": ratio / 2,
                "ratio": ratio,
                "state_mib": 306.2,
                "extra_mib": 26.3,
            }
    faster = {"ms": 5.0, "ratio": 9.5}

    def on_hosts(name, load):
        assert name not in {each.title for each in shown}, "rows of ours changed between hosts"
        return [times[name, load], faster] if (name, load) == ("Muon of dion", "nanoGPT") else []

    times["Muon of dion", "nanoGPT"]["ms"] = 6.0
    monkeypatch.setattr(tables, "weighed", lambda: shown)
    monkeypatch.setattr(tables, "steps", lambda record=None: times)
    monkeypatch.setattr(tables, "on_hosts", on_hosts)
    monkeypatch.setattr(importlib.import_module("pages.records.long_run"), "runs", dict)
    text = tables.TABLES["peers"](ROOT).replace("\N{NO-BREAK SPACE}", " ")
    _, _, full, torch_muon, dion, soap = text.splitlines()
    assert full == "| full space | 2.00 ms, 4.00× | 2.00 ms, 4.00× | 306 + 26 | 0.014 | – |"
    assert torch_muon.startswith(
        "| torch.optim.Muon | 19.14 ms, 38.27× | 19.14 ms, 38.27× | 306 + 26 |"
    )
    assert "| 0.02 | +2.5% ± " in torch_muon
    on_two_hosts = "5.00 to 6.00 ms, 8.00 to 9.50× (2 hosts)"
    assert dion == f"| Muon of dion | {on_two_hosts} | 4.00 ms, 8.00× | 306 + 26 | – | not run |"
    assert soap == (
        "| SOAP of pytorch_optimizer | not timed | not timed | not measured | 0.002 | +6.0% (one seed) |"
    )


def test_the_price_of_auto_is_that_of_the_row_of_its_name(tables):
    """And of no row of a map that ``auto`` takes, of which the same record has another time."""
    record = json.loads((ROOT / "results/step-cost/h200-maps.json").read_text())
    ratios = {(row["optimizer"], row["workload"]): row["ratio"] for row in record["steps"]}
    lines = tables.TABLES["headline"](ROOT).replace("\N{NO-BREAK SPACE}", " ").splitlines()
    shown = [line for line in lines if "128 (17%), 512 (12%)" in line]
    names = ["auto", "auto, rows normalized", "auto, rows normalized"]
    for line, name in zip(shown, names, strict=True):
        told = [f"{ratios[name, load]:.1f}×" for load in ("nanoGPT", "8B layer")]
        assert line.split(" | ")[2:4] == told


def test_one_seed_chooses_no_map(tables, quality, monkeypatch):
    _, maps, runs, times = quality
    runs["full", 0.014], runs["low-rank", 0.014] = {0: 50.0, 1: 50.0}, {0: 52.0, 1: 52.5}
    runs["flat-48-warm", 0.014] = {0: 40.0}
    shown = [
        maps.Weighed(name, name, (name, 0.014)) for name in ("full", "low-rank", "flat-48-warm")
    ]
    for _, _, _, load in tables.PLACES:
        for name, ratio in (("full", 4.0), ("low-rank", 1.5), ("flat-48-warm", 1.2)):
            times[name, load] = {"ratio": ratio}
    monkeypatch.setattr(tables, "weighed", lambda: shown)
    monkeypatch.setattr(tables, "steps", lambda record=None: times)
    text = tables.TABLES["choice"](ROOT / "results/step-cost")
    assert "| 1.5× | low-rank |" in text
    assert "| 4.0× | full |" in text
    assert "flat-48-warm" not in text


def test_a_price_stands_beside_a_perplexity_of_the_same_part_of_the_width(
    tables, quality, monkeypatch
):
    _, maps, runs, times = quality
    runs["full", 0.014], runs["low-rank", 0.014] = {0: 50.0, 1: 50.0}, {0: 52.0, 1: 52.5}
    shown = [
        maps.Weighed("full", "full", ("full", 0.014)),
        maps.Weighed("wide", "wide", ("low-rank", 0.014), (208, 1108)),
        maps.Weighed("narrow", "narrow", ("low-rank", 0.014), (208, 256)),
    ]
    for _, _, _, load in tables.PLACES:
        for name, ratio in (("full", 4.0), ("wide", 1.5), ("narrow", 1.2)):
            times[name, load] = {"ratio": ratio}
    for each in (tables, maps):
        monkeypatch.setattr(each, "weighed", lambda: shown)
        monkeypatch.setattr(each, "steps", lambda record=None: times)
    assert [each.trained_columns for each in shown] == [None, 208, 208]
    text = tables.TABLES["choice"](ROOT / "results/step-cost")
    lines = text.replace("\N{NO-BREAK SPACE}", " ").splitlines()
    gpu, layer, arm = (
        next(k for k, line in enumerate(lines) if line.startswith(f"| {place[0]} |"))
        for place in tables.PLACES
    )
    assert "| 1.2× | narrow | 208 (27%) | 208 (27%) |" in lines[gpu]
    assert "| 1.5× | wide | 1108 (27%) | 208 (27%) |" in lines[layer]
    assert "narrow" not in "".join(lines[layer:arm])
    assert "| 1.2× | narrow | 210 (27%) | 208 (27%) |" in lines[arm]
    assert [each.title for each in maps.timed_with_less("8B layer")] == ["narrow"]
    assert maps.timed_with_less("nanoGPT") == []


def test_the_figure_of_maps_has_no_point_of_a_sketch_that_was_not_trained(module):
    figure = importlib.import_module("pages.figures.frontier")
    _, first, second = figure.draw().split(">AdamW</text>")  # above the line of each panel
    for name in ("LowRank, h = 0", "h = 1, scaled"):
        assert f">{name}<" in first
        assert f">{name}<" not in second
    assert ">Deflated 1/6<" in second
    assert "6 sketches with 6% of the width, as they were trained with 27%" in second


def test_names_in_a_figure_do_not_meet(module):
    svg = importlib.import_module("pages.figures.svg")
    frame = svg.Frame(50, 60, 370, 388, (0.5, 30.0), (-3.0, 10.0))
    marks = [(*frame.at(1.0 + 0.1 * k, 0.3 * k), f"optimizer {k}") for k in range(6)]
    drawn = [
        (float(x), float(y), anchor, words)
        for text in frame.names(marks)
        for x, y, anchor, words in re.findall(
            r'x="(.*?)" y="(.*?)" text-anchor="(\w+)".*>(.*)<', text
        )
    ]
    assert [words for *_, words in drawn] == [words for *_, words in marks]
    boxes = []
    for x, y, anchor, words in drawn:
        left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * 6 * len(words)
        boxes.append((left, y - 9, left + 6 * len(words), y + 2))
    boxes += [(x - 6, y - 6, x + 6, y + 6) for x, y, _ in marks]
    for first, second in itertools.combinations(boxes[: len(marks)], 2):
        assert not svg.meet(first, second)
    for name, mark in itertools.product(boxes[: len(marks)], boxes[len(marks) :]):
        assert not svg.meet(name, mark)


def test_an_axis_has_four_to_eleven_evenly_spaced_round_ticks(module):
    svg = importlib.import_module("pages.figures.svg")
    assert [*svg.even_ticks((1.6, 2.24)).values()] == [
        "1.6",
        "1.7",
        "1.8",
        "1.9",
        "2.0",
        "2.1",
        "2.2",
    ]
    assert [*svg.even_ticks((-130.0, 20.0)).values()] == [*map(str, range(-120, 21, 20))]
    assert [*svg.round_ticks((10.0, 150.0)).values()] == ["10", "20", "30", "40", "50", "70", "100"]
    for k in range(200):
        low, length = 0.37 * k - 20, 0.003 * 1.07**k
        at = [*svg.even_ticks((low, low + length))]
        assert 4 <= len(at) <= 11
        assert low - 1e-9 < at[0] < at[-1] < low + length + 1e-9


def test_the_gaps_are_drawn_and_told_from_their_records(module, tmp_path, monkeypatch):
    names = ("pages.records.scaling", "pages.figures.gaps", "pages.claims.scaling", "scaling")
    records, figure, claims, study = map(importlib.import_module, names)
    rows = [
        {"map": name, "seed": seed, "lr": 0.014, "steps": steps, "width": width}
        | {"test": 50 * (1 + (gap + 0.2 * seed) / 100)}
        for steps, width, gap_of_low_rank in ((375, 768, 4), (750, 768, 5), (1500, 384, 6))
        for seed in (0, 1)
        for name, gap in (("full", 0.0), ("deflated-sixth", 0.5), ("low-rank", gap_of_low_rank))
    ]
    rows += [row | {"width": 768} for row in rows if row["width"] == 384]
    for row in rows:
        if row["map"] == "full":
            row["test"] = 50.0
    path = tmp_path / records.RUNS
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(study, "FRONTIER", tmp_path / "none.jsonl")
    for each in (records, module):
        monkeypatch.setattr(each, "ROOT", tmp_path)
    drawn = figure.draw()
    # Six pairs of runs over tokens and four over width, of each of two maps.
    assert drawn.count("<circle") == 2 * (6 + 4)
    assert drawn.count('class="bar') == 4
    over_tokens, over_width = claims.gap_over_tokens(), claims.gap_over_width()
    assert "the map of `auto` to full space does not change clearly, +0.00" in over_tokens.replace(
        "−", "+"
    )
    assert "that of `LowRank` grows by this fit, +1.00" in over_tokens
    assert (
        "n = 6 pairs of runs at 3 lengths, 6.1M to 24.6M tokens; +1.00 to +1.00 with any"
        in over_tokens
    )
    assert "n = 4 pairs of runs at 2 widths, width 384 to 768, 24.6M tokens)" in over_width
    assert "one seed" not in over_tokens
    kept = [row for row in rows if (row["seed"], row["steps"]) != (1, 375)]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert "6.1M to 24.6M tokens; 1 of 3 lengths has one seed;" in claims.gap_over_tokens()
    page = "<!-- over-width: results/scaling/runs.jsonl -->\n\n| old |\n\nmore\n"
    text = module.filled(page, "docs/which.md").replace("\N{NO-BREAK SPACE}", " ")
    assert "| 384 | +0.6% ± 1.3 (n = 2) | +6.1% ± 1.3 (n = 2) |" in text


@pytest.fixture
def long_run(module, tmp_path, monkeypatch):
    """Archives of the long run, made by the test: full space and the paper's sketch have two seeds."""
    names = ("pages.records.long_run", "pages.figures.over_time", "long_run")
    found, figures, study = map(importlib.import_module, names)
    for slug, seed, final in (
        ("muon-polar-express", 1, 40.0),
        ("muon-polar-express", 2, 50.0),
        ("rand-muon", 1, 42.0),
        ("rand-muon", 2, 53.0),
        ("deflated", 1, 41.0),
        ("muon-polar-express-slow", 1, 50.0),
        ("deflated-48-slow", 1, 51.0),
        ("deflated-120-slow", 1, 49.0),
        ("adamw", 1, 80.0),
        ("muon", 1, 44.0),
    ):
        (row,) = (row for row in study.ROWS if row.slug == slug)
        write_planned(
            study.whole_run(row, seed, 0.018, tmp_path / ("slow" if row.earlier else "runs")),
            final=final,
            status="diverged" if slug == "muon" else "finished",
            validation=final + 1,
        )
    for slug, lr, final, status in (
        ("adamw", 0.01, 310.0, "finished"),
        ("adamw", 0.018, 300.0, "finished"),
        ("adamw", 0.5, 9.0, "diverged"),
        ("adamw-head", 0.01, 200.0, "finished"),
        ("adamw-head", 0.018, 250.0, "finished"),
        ("adamw-slow", 0.018, 450.0, "finished"),
        ("muon-polar-express", 0.018, 30.0, "finished"),
        ("muon-polar-express-rows", 0.032, 31.0, "finished"),
    ):
        (row,) = (row for row in study.ROWS if row.slug == slug)
        write_planned(
            study.short_run(
                row, study.SEED_OF_RATES, lr, tmp_path / ("slow-rates" if row.earlier else "rates")
            ),
            final=final,
            status=status,
            validation=final,
        )
    pack([tmp_path / "runs"], tmp_path / found.FOLDER)
    pack([tmp_path / "slow"], tmp_path / found.SLOW_FOLDER)
    pack([tmp_path / "rates"], tmp_path / found.RATES)
    pack([tmp_path / "slow-rates"], tmp_path / found.SLOW_RATES)
    better = importlib.import_module("pages.records.best_rates")
    full = study.find_rows("muon-polar-express")
    (planned,) = study.other_rate_runs(full, [1], 0.0097, tmp_path / "other")
    write_planned(planned, 38.0, "finished", validation=39.0)
    pack([tmp_path / "other"], tmp_path / better.OTHER_RATES)
    monkeypatch.setattr(better, "ROOT", tmp_path)
    monkeypatch.setattr(found, "ROOT", tmp_path)
    monkeypatch.setattr(
        found,
        "steps",
        lambda: {("AdamW, fused", "nanoGPT"): {"state_mib": 612.0, "extra_mib": 0.1}},
    )
    for cached in (found.runs, found.rates, better.ends):
        cached.cache_clear()
    yield found, figures, study
    for cached in (found.runs, found.rates, better.ends):
        cached.cache_clear()


def write_planned(planned, final, status, validation=None):
    """A made-up run in the place of a planned one, with its identity."""
    folder = write_run(planned.directory, final=final, status=status, metric="test_perplexity")
    planned.identity.save(folder)
    if validation is not None:
        result = json.loads((folder / "result.json").read_text())
        (folder / "result.json").write_text(json.dumps(result | {"validation": validation}))
    return folder


def test_the_long_run_names_what_is_missing_and_claims_nothing_from_one_seed(long_run, module):
    found, _, _ = long_run
    text = "\n".join(found.table()).replace("\N{NO-BREAK SPACE}", " ")
    assert (
        "| AdamW | 0.018 | 80.00 (one seed) | +100.0% (one seed) | 2.0 | 52.0 | 612 + 0 |" in text
    )
    assert re.search(
        r"\| Muon \(PolarExpress 5\) \| 0\.018 \| 45\.00 ± 63\.53 \(n = 2\) \| – \|", text
    )
    # +5% and +6%: the t-interval of two seeds is 12.7 standard errors to either side.
    assert "| +5.5% ± 6.4 (n = 2) |" in text
    assert "| Muon (Nesterov) | 0.018 | diverged | – |" in text
    assert "not measured" in text
    missing = module.made("long-run-missing")
    assert re.search(r"all seeds of [^;]*`deflated-rows`[^;]*`sgd`", missing)
    assert re.search(r"seeds 2 and 3 of [^;]*`adamw`", missing)
    assert "seed 3 of `muon-polar-express`, `rand-muon`" in missing
    assert "slow" not in missing  # not run again
    claim = module.made("long-run").replace("\N{NO-BREAK SPACE}", " ")
    assert "after 72.7M tokens" in claim
    assert "Rand Muon (Nes.-Gaussian): +5.5% ± 6.4 (n = 2)" in claim


@pytest.fixture
def peers_of_the_long_run(long_run):
    """``long_run`` with a run and short runs of two peers."""
    found, _, study = long_run
    for slug, final in (("dion-normuon", 39.0), ("soap", 38.0)):
        (row,) = study.find_rows(slug)
        short = study.rates_runs([row], found.ROOT / "peer-rates")
        for k, planned in enumerate(short):
            write_planned(planned, 200.0, "finished", validation=200.0 + k % 3)
        lr = study.best_rates(found.ROOT / "peer-rates")[slug]
        write_planned(study.whole_run(row, 1, lr, found.ROOT / "peers"), final, "finished")
    pack([found.ROOT / "peers"], found.ROOT / found.FOLDER)
    pack([found.ROOT / "peer-rates"], found.ROOT / found.RATES)
    return long_run


def test_without_a_run_of_a_peer_no_page_speaks_of_peers(long_run, module):
    found, figures, study = long_run
    titles = [row.title for row in study.PEER_TABLE]
    assert len(titles) == 7
    made = [*found.table(), *found.table_of_rates(), figures.long_run(), module.made("long-run")]
    assert not [title for title in titles if title in "\n".join(made)]
    assert "dash" not in figures.long_run()
    assert "soap" not in module.made("long-run-missing")


def test_a_run_of_a_peer_is_a_row_a_line_and_a_column(peers_of_the_long_run, module, tables):
    found, figures, _ = peers_of_the_long_run
    text = "\n".join(found.table()).replace("\N{NO-BREAK SPACE}", " ")
    assert "| NorMuon of dion | 0.0097 | 39.00 (one seed) | −2.5% (one seed) | 2.0 |" in text
    assert "| SOAP of pytorch_optimizer | 0.00031 | 38.00 (one seed) | −5.0% (one seed) |" in text
    assert "| SOAP of pytorch_optimizer | **0.00031: 200.0**" in "\n".join(found.table_of_rates())
    drawn = figures.long_run()
    assert drawn.count("stroke-dasharray") == 2
    assert "NorMuon, 39.0" in drawn
    assert "Dashed: other libraries, without a CUDA graph." in drawn
    missing = module.made("long-run-missing")
    assert re.search(r"all seeds of [^;]*`torch-muon`", missing)
    assert re.search(r"seeds 2 and 3 of [^;]*`soap`", missing)
    assert "NorMuon of dion: −2.5% (one seed)" in module.made("long-run").replace(
        "\N{NO-BREAK SPACE}", " "
    )
    lines = tables.TABLES["peers"](ROOT).replace("\N{NO-BREAK SPACE}", " ").splitlines()
    assert lines[0].endswith("| test, after 72.7M tokens |")
    (normuon,) = (line for line in lines if line.startswith("| NorMuon of dion"))
    assert normuon.endswith("| −2.5% (one seed), at 0.0097 against 0.018 |")
    (jordan,) = (line for line in lines if line.startswith("| Muon of K. Jordan"))
    assert jordan.endswith("| not run |")


def test_peers_have_the_rates_of_our_rows_and_four_of_their_own(long_run):
    _, _, study = long_run
    rows = study.find_rows("peers")
    assert [row.slug for row in rows] == [row.slug for row in study.PEER_TABLE]
    (ours,) = study.find_rows("muon-polar-express")
    settings = study.whole_run(ours, 1, 0.03).config.optimizer
    for row in rows:
        config = study.whole_run(row, 1, 0.03).config
        assert config.rule.peer == row.slug
        for name in ("embedding_lr", "head_lr", "vector_lr", "other_momentum", "weight_decay"):
            assert getattr(config.optimizer, name) == getattr(settings, name), (row.slug, name)
        assert len(list(study.rates_runs([row], Path()))) == len(study.FACTORS_OF_MUON)


def test_two_ranks_of_one_method_are_two_rows(long_run):
    found, _, study = long_run
    text = "\n".join(found.table(study.SLOW_TABLE)).replace("\N{NO-BREAK SPACE}", " ")
    first = "| Deflated Muon, rank 48, smaller δ | 0.018 | 51.00 (one seed) | +2.0% (one seed) |"
    assert first in text  # against full space of its own table
    assert "| Deflated Muon, rank 120 | 0.018 | 49.00 (one seed) | −2.0% (one seed) |" in text
    assert "| Deflated Muon | " not in text
    assert "rank 120" not in "\n".join(found.table())


def test_perplexity_over_time_has_a_line_for_each_row(long_run):
    found, figures, _ = long_run
    drawn = figures.long_run()
    assert "Muon (full space), 40.0" in drawn  # the lower of two seeds, the middle one of three
    assert "Each line is of the run with the middle end" in drawn
    assert len(re.findall(r'class="line', drawn)) == 3
    assert drawn.count('class="line full"') == 1
    assert "Above the figure: AdamW (80.0)" in drawn
    times = found.seconds(found.runs()["adamw"][1])
    assert times[-1] == (pytest.approx(200 * 0.052), pytest.approx(80.0))  # 52 ms a step


def test_of_several_runs_the_one_in_the_middle_is_drawn(module):
    middle = importlib.import_module("pages.figures.over_time").middle
    runs = [[(1.0, 90.0), (2.0, end)] for end in (43.0, 42.5, 42.7)]
    assert middle(runs) == runs[2]
    assert middle(runs[:2]) == runs[1]
    assert middle(runs[:1]) == runs[0]


def test_a_run_that_shared_the_gpu_has_no_times_and_no_line(long_run):
    found, figures, study = long_run
    (row,) = study.find_rows("adamw-warmup")
    folder = write_planned(study.whole_run(row, 1, 0.018, found.ROOT / "shared"), 41.5, "finished")
    environment = folder / "environment.json"
    known = json.loads(environment.read_text())
    for shared, lines in ((True, 3), (False, 4)):
        environment.write_text(json.dumps(known | {"device_shared": shared}))
        pack([found.ROOT / "shared"], found.ROOT / found.FOLDER, force=True)
        found.runs.cache_clear()
        assert len(re.findall(r'class="line', figures.long_run())) == lines
        (told,) = (line for line in found.table() if line.startswith("| AdamW, warm-up |"))
        assert ("| not timed | not timed |" in told) == shared
        assert (found.times("adamw-warmup") is None) == shared


def test_the_rate_with_the_lowest_validation_perplexity_is_chosen(long_run, module):
    found, _, study = long_run
    assert found.rates()["adamw"] == {0.01: 310.0, 0.018: 300.0, 0.5: math.inf}
    lines = [*found.table_of_rates()]
    assert "| AdamW | 0.01: 310.0, **0.018: 300.0**, 0.5: diverged |" in lines
    assert "| AdamW, head at the rate of the matrices | **0.01: 200.0**, 0.018: 250.0 |" in lines
    assert not any("450" in line for line in lines)
    assert "| AdamW | **0.018: 450.0** |" in [*found.table_of_rates(study.SLOW_TABLE)]
    assert study.best_rates(found.ROOT / found.RATES, found.ROOT / found.SLOW_RATES) == {
        "adamw": 0.018,
        "adamw-head": 0.01,
        "adamw-slow": 0.018,
        "muon-polar-express": 0.018,
        "muon-polar-express-rows": 0.032,
        "deflated-rows": 0.032,  # that of full space with normalized rows
    }
    assert module.made("long-run-edges") == (
        "Muon (PolarExpress 5); Muon (PolarExpress 5, normalized rows); "
        "AdamW, head at the rate of the matrices"
    )


def test_validation_chooses_the_best_rate_over_all_steps(long_run):
    found, _, study = long_run
    better = importlib.import_module("pages.records.best_rates")
    for slug, seed, lr, test, validation, status in (
        ("muon-polar-express", 2, 0.0097, 44.0, 45.0, "finished"),
        ("deflated", 1, 0.0097, 38.38, 40.0, "finished"),
        ("deflated", 2, 0.0097, 44.88, 46.0, "finished"),
        ("deflated", 1, 0.0053, 30.0, 90.0, "finished"),  # lowest on the text that does not choose
        ("rand-muon", 2, 0.0097, 20.0, 20.0, "finished"),  # not with the seed that chooses
        ("adamw", 1, 0.0097, 9.0, 9.0, "diverged"),
    ):
        (row,) = study.find_rows(slug)
        (planned,) = study.other_rate_runs([row], [seed], lr, found.ROOT / "other")
        write_planned(planned, test, status, validation)
    pack([found.ROOT / "other"], found.ROOT / better.OTHER_RATES)
    assert {row.slug for row in better.rows()} == {"muon-polar-express", "deflated"}
    assert better.tried("deflated") == {0.0053: 90.0, 0.0097: 40.0, 0.018: 42.0}
    assert (better.best("muon-polar-express"), better.best("deflated")) == (0.0097, 0.0097)
    assert [row.slug for row in better.at_an_end()] == ["muon-polar-express"]
    assert better.gap("deflated").value == pytest.approx(1.5)  # +1% and +2%, each of its seed
    text = "\n".join(better.table()).replace("\N{NO-BREAK SPACE}", " ")
    assert (
        "| 0.0053: 90.00, **0.0097: 40.00**, 0.018: 42.00 | 41.63 ± 41.30 (n = 2) | +1.5%" in text
    )
    told = better.told_gap("adamw").replace("\N{NO-BREAK SPACE}", " ")
    assert told == "+100.0% (one seed), both at 0.018"  # at the rate of full space's table
    assert better.told_gap("deflated") == better.gap("deflated").told(unit="%")
    assert better.told_gap("sgd") is None
    # The runs that tables show: two at the best rate, where the table of one rate has one.
    assert (len(better.sources("deflated")), len(found.sources("deflated"))) == (2, 1)
    assert better.sources("adamw") == found.sources("adamw")


def test_a_row_of_an_earlier_map_is_shown_and_not_run_again(long_run):
    found, _, study = long_run
    assert "deflated-48-slow" in found.runs()
    with pytest.raises(ValueError, match="--methods deflated-48-slow: expected some of"):
        study.find_rows("deflated-48-slow")


def test_a_run_with_settings_of_no_row_is_refused(long_run):
    found, _, study = long_run
    (row,) = study.find_rows("deflated")
    other = study.Row("deflated-24", "rank 24", row.method, {"optimizer.polar.rank": 24})
    write_planned(study.whole_run(other, 1, 0.018, found.ROOT / "more"), 38.0, "finished")
    pack([found.ROOT / "more"], found.ROOT / found.FOLDER)
    with pytest.raises(StorageError, match=r"optimizer\.polar\.rank=24.*is no run of this study"):
        found.runs()


def test_the_archived_long_runs_are_those_that_the_program_plans(module):
    """Started again with the archives unpacked, ``long_run.py`` makes none of their runs again."""
    found, best_rates, study = map(
        importlib.import_module,
        ("pages.records.long_run", "pages.records.best_rates", "long_run"),
    )
    rates = study.best_rates(ROOT / found.RATES, ROOT / found.SLOW_RATES)
    plans = {}
    for folder, folder_of_rates, rows in (
        (found.FOLDER, found.RATES, study.SHOWN),
        (found.SLOW_FOLDER, found.SLOW_RATES, study.SLOW_TABLE),
    ):
        own = [row for row in rows if row.rate_of is None]
        plans[folder_of_rates] = [*study.rates_runs(own, Path())]
        known = [row for row in rows if row.slug in rates]
        plans[folder] = [*study.table_runs(known, [1, 2, 3], rates, Path())]
    plans[best_rates.OTHER_RATES] = [
        planned
        for lr in (0.00031, 0.00054, 0.0097, 0.018)
        for planned in study.other_rate_runs(study.SHOWN, [1, 2, 3], lr, Path())
    ]
    for folder, runs in plans.items():
        planned = {str(run.directory): run.identity for run in runs}
        archive = ROOT / folder / ARCHIVE
        for path in find_runs([archive.parent]):
            recorded = RunRecord.load(path).identity
            made = planned[str(path.relative_to(archive))]
            assert (made.method, made.command) == (recorded.method, recorded.command)
            assert made.config == recorded.config, path


def test_auto_takes_the_deflated_map_of_the_long_run_for_its_matrices(module, monkeypatch):
    """So that the runs of ``deflated-120`` say what ``auto`` reaches on an H200."""
    study = importlib.import_module("long_run")
    monkeypatch.setattr(auto, "figures_of", lambda device: DEVICES["H200"])
    monkeypatch.setattr(auto, "_CHOICES", {})
    (row,) = study.find_rows("deflated-120")
    config = study.whole_run(row, 1, 0.018).config
    ran = build_polar(config.optimizer.polar, config.benchmark)
    with torch.device("meta"):
        shapes = set(GPT(config.model).matrix_shapes())
    assert shapes
    for m, n in shapes:
        taken = auto.Auto().on(m, n, torch.device("cuda"))
        assert (taken.rest, taken.float8) == (ran.rest, ran.float8)
        assert replace(taken.head, always_sketch=True) == ran.head


def test_a_line_is_cut_where_it_crosses_the_top(module):
    curves = importlib.import_module("pages.records.curves")
    line = [(0.0, 90.0), (10.0, 70.0), (20.0, 50.0)]
    assert curves.under(line, 60.0) == [(15.0, 60.0), (20.0, 50.0)]
    assert curves.under(line, 100.0) == line
    assert curves.under(line, 40.0) == []


SECONDS_A_STEP = {
    ("full", 0.014): 0.0235,
    ("full+fans", 0.02): 0.0235,
    ("lift-120-warm", 0.014): 0.0222,
    ("lift-120-warm+rows+fans", 0.02): 0.0224,
    ("low-rank", 0.014): 0.0220,
    ("adamw+warmup", 0.001): 0.0212,
    ("peer:dion-normuon", 0.014): 0.0275,
    ("peer:torch-muon", 0.02): 0.0380,
    ("peer:soap+warmup", 0.002): 0.0750,
}
"""Made up, for runs of the table."""


def made_up_curves():
    """Runs of the table with curves that fall to its perplexities, and the time of a step."""
    table = [
        run
        for run in read_lines(ROOT / "results/frontier/runs.jsonl")
        if (run["map"], run["lr"]) in SECONDS_A_STEP and run["seed"] == 0
    ]
    assert len(table) == len(SECONDS_A_STEP)
    for run in table:
        curve = [[step, run["validation"] * (1500 / step) ** 0.5] for step in range(100, 1501, 100)]
        yield run | {"step_ms": 1000 * SECONDS_A_STEP[run["map"], run["lr"]], "curve": curve}


@pytest.fixture
def over_time(module, tmp_path, monkeypatch):
    """``curves`` of the records, and a function that writes those that it reads."""
    found = importlib.import_module("pages.records.curves")
    path = tmp_path / found.CURVES
    path.parent.mkdir(parents=True)
    monkeypatch.setattr(found, "ROOT", tmp_path)

    def write(rows):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(made_up_curves())
    return found, write


def test_curves_are_whole_runs_of_a_gpu(over_time):
    found, _ = over_time
    for run in (*found.recorded(), *read_lines(CURVES)):
        assert [step for step, _ in run["curve"]] == [*range(100, 1501, 100)], run["map"]
        assert run["curve"][-1][1] == pytest.approx(run["validation"], rel=1e-4)
        assert (run["steps"], run["width"], run["device"]) == (1500, 768, "NVIDIA H200")
        assert run["step_ms"] > 0


def test_the_figure_of_the_curves_is_on_its_page(module):
    figure = "assets/frontier-over-time.svg"
    page = (ROOT / "docs/frontier.md").read_text()
    assert f"docs/{figure}" in module.FIGURES
    assert f"]({figure})" in page
    assert "time-of-a-run -->" in page


def test_curves_have_a_line_for_each_run_over_its_own_time(over_time):
    found, write = over_time
    draw = importlib.import_module("pages.figures.over_time").frontier
    lines = found.curves()
    assert lines.keys() == {name for name, _ in SECONDS_A_STEP}
    soap, full = lines["peer:soap+warmup"], lines["full"]
    assert (soap.name, soap.kind) == ("SOAP", found.LIBRARY)
    assert (full.name, full.kind) == ("full space", found.FULL)
    assert lines["low-rank"].kind == lines["lift-120-warm"].kind == found.SKETCHED
    assert lines["full+fans"].kind == lines["adamw+warmup"].kind == found.OTHER
    assert soap.points[0][0] == pytest.approx(100 * 0.075)
    assert soap.seconds == pytest.approx(1500 * 0.075)
    drawn = draw()
    assert drawn.count('class="line') == len(lines)
    assert drawn.count('class="line full"') == 1
    assert drawn.count("stroke-dasharray") == 3
    assert drawn.count('class="line"') == 3
    assert lines["adamw+warmup"].end == pytest.approx(71.5, abs=0.05)  # the worst of its seeds
    assert "AdamW, fused, 68.2 to 71.5" in drawn
    assert "SOAP, 58.7 to 59.3" in drawn
    assert "24.6M tokens. Each line is of seed 0; the numbers are the ends of all 3 seeds" in drawn
    assert "Dashed: other libraries, without a CUDA graph." in drawn
    assert "Above the figure" not in drawn
    named = re.findall(r'<text x="[\d.]+" y="([\d.]+)"[^>]*>(\S.*), [\d.]+ to [\d.]+</text>', drawn)
    told = [name for _, name in sorted(named, key=lambda each: float(each[0]))]
    assert told == [each.name for each in sorted(lines.values(), key=lambda each: -each.end)]
    high = [
        run | {"curve": [[step, 2 * value] for step, value in run["curve"]]}
        if run["map"] == "adamw+warmup"
        else run
        for run in made_up_curves()
    ]
    write(high)
    drawn = draw()
    assert drawn.count('class="line') == len(lines) - 1
    assert "Above the figure: AdamW, fused (68.2 to 71.5)." in drawn  # of the table's runs


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": 0.02}, "rate 0.02, seed 0: expected one run of each map"),
        ({"seed": 3}, "seed 3: expected a run that the tables"),
        ({"steps": 750}, "seed 0: expected a run that the tables"),
        ({"map": "full+rows+fans"}, "full\\+rows\\+fans, rate 0.014, seed 0: expected a run"),
        ({"seed": 1}, "seed 1: expected one run of each map"),
    ],
)
def test_a_curve_that_is_no_run_of_the_table_is_refused(over_time, change, words):
    found, write = over_time
    rows = [*made_up_curves()]
    (full,) = (row for row in rows if row["map"] == "full")
    write([*rows, full | change])
    with pytest.raises(ValueError, match=words):
        found.curves()


def test_a_line_reaches_a_perplexity_where_it_stays_below(over_time):
    found, _ = over_time
    line = found.Line("a", [(10.0, 80.0), (20.0, 60.0), (30.0, 70.0), (40.0, 50.0)], found.OTHER)
    assert line.reaches(65.0) == pytest.approx(32.5)
    assert line.reaches(90.0) == 10.0
    assert line.reaches(49.0) is None
    assert line.reaches(50.0) == 40.0


def test_claims_over_time_are_in_order_and_say_that_it_is_one_seed(over_time, module):
    names = (
        "time-of-a-run",
        "time-to-full-space",
        "time-to-a-perplexity",
        "curves-beside-the-table",
    )
    run, full, level, again = told = [module.made(name) for name in names]
    for text in told:
        assert re.search(r"n = 1|one seed", text), text
        assert "24.6M tokens" in text, text
    assert "AdamW, fused 31.8 s (21.2 ms a step); Deflated 1/6 33.3 s (22.2 ms a step)" in run
    assert run.endswith("SOAP 112.5 s (75.0 ms a step)")
    whole = module.made("whole-step")
    assert whole.startswith(
        "22.2 ms a step with the map of `auto`, 23.5 in full space and 21.2 with AdamW"
    )
    # A curve falls as 1/√step, between evaluations along a straight line.
    assert "Full space ends at 57.6 after 35.2 s" in full
    order = ["1/6 + rows + fan-ratio", "Deflated 1/6", "full space + fan-ratio", "NorMuon"]
    assert re.findall(r" s by ([^;.]*)", full) == order
    assert full.endswith(
        "These end above it: AdamW, fused; LowRank, h = 0, rate 0.014; torch; SOAP"
    )
    # Eight of nine runs end below 65, and seven below 60, which is less than four fifths.
    assert "Most runs reach 65 (one seed" in level
    assert level.endswith("These end above it: AdamW, fused")
    assert "these 9 runs ended 0.0% from" in again
    assert "1.6 of 5.6 ms with Muon of dion, 1.7 of 6.8 ms with NorMuon" in module.made(
        "graph-of-dion"
    )
