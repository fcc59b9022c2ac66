"""What a command on a page would run, planned as the program plans it."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

from tests.lab.experiments.small import ablation_runs, comparison_runs

from polarstep_lab.cli.runs import overrides_of, seeds_of
from polarstep_lab.jobs.job import plan_run
from polarstep_lab.methods import find_method, find_methods
from polarstep_lab.settings_by_name import parse_assignment

COMMAND = re.compile(r"polarstep (?:run|compare|ablate) (?:[^`\n\\]|\\\n)*")


def planned(command):
    """The runs of a command, each in its directory."""
    words = shlex.split(command.replace("\\\n", " "), comments=True)[1:]
    kind, recipe, *rest = words
    options = {"--set": []}
    for key, value in itertools.pairwise(rest):
        if key.startswith("-"):
            options.setdefault(key, []).append(value)

    def last(default, *names):
        return next((options[name][-1] for name in names if name in options), default)

    out = last(None, "--out", "-o")
    monitor, noise = (last(None, name) for name in ("--monitor", "--noise"))
    how = (last(None, "--device"), monitor and int(monitor), noise and int(noise))
    overrides = overrides_of(options["--set"], *how)
    if kind == "run":
        axis = parse_assignment(options["--vary"][-1]) if "--vary" in options else None
        seed = int(last(0, "--seed", "-s"))
        method = last(None, "--method", "--methods", "-m")
        return [plan_run(recipe, method, seed, overrides, out and Path(out), axis)]
    seeds = seeds_of(last("1", "--seeds"))
    if kind == "compare":
        given = [m for name in ("--methods", "--method", "-m") for m in options.get(name, [])]
        methods = find_methods(",".join(given or ["all"]))
        folder = Path(out or f"runs/{recipe}-compare")
        return comparison_runs(recipe, methods, seeds, overrides, folder)
    axis = rest[0]
    values = [parse_assignment(f"v={v}")[1] for v in filter(None, last("", "--values").split(","))]
    method = find_method(last("rand-muon", "--method", "--methods", "-m"))
    folder = Path(out or f"runs/{recipe}-{axis}")
    return ablation_runs(recipe, method, axis, values, seeds, overrides, folder)
