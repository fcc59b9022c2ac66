"""The commands under a table make the runs of the table."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import shlex
from pathlib import Path

import numpy as np
from tests.lab.pages.commands import COMMAND, planned

from polarstep_lab.config import RunConfig
from polarstep_lab.methods import all_methods
from polarstep_lab.records.record import RunRecord, find_runs
from polarstep_lab.storage import read_lines

ROOT = Path(__file__).resolve().parents[3]


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
        for run in (run for command in COMMAND.findall(block) for run in planned(command)):
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
            for command in COMMAND.findall(below)
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
        if frontier.parts_of(run["map"])[0] not in frontier.EARLIER | frontier.GONE
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
