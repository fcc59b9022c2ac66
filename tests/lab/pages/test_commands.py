"""Commands on pages and beside records are understood, and can be run one after the other.

A directory holds one run. Where a second command of a block asks for the directory of an earlier one
with other settings, it stops there, and the reader has to find a folder for it.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
from tests.lab.pages.commands import COMMAND, planned
from typer.testing import CliRunner

from polarstep_lab.cli import SUBCOMMANDS, app
from polarstep_lab.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = re.compile(r"(python )?benchmarks/([a-z]\w*)\.py\b((?:[^`\n\\]|\\\n)*)")
"""A script of benchmarks/ with its arguments; ``NAME.py`` stands for any."""
TEXTS = [
    page
    for page in (
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        ROOT / "benchmarks/README.md",
        *sorted((ROOT / "results").rglob("README.md")),
    )
    if page.name != "log.md"
]
PAGES = [page for page in TEXTS if COMMAND.search(page.read_text(encoding="utf-8"))]


def blocks(text):
    """What stands together: the code in a fence, a row of a table, or a paragraph."""
    fenced = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
    yield from fenced.findall(text)
    for paragraph in fenced.sub("\n\n", text).split("\n\n"):
        lines = paragraph.splitlines()
        yield from lines if paragraph.startswith("|") else ["\n".join(lines)]


def filled(block):
    """A block with its shell variables in place."""
    variables = re.findall(r'^(\w+)=(?:"(.*)"|(\S+))$', block, re.MULTILINE)
    for name, quoted, plain in variables:
        block = re.sub(rf"\$\{{?{name}\b\}}?", lambda _, value=quoted or plain: value, block)
    return block


def whole_commands(block):
    """The commands of a block that can be planned, with the block's shell variables filled in.

    Left out are those with a placeholder or with a recipe that the reader makes, and mere names of
    commands.
    """
    for command in COMMAND.findall(filled(block)):
        kind, recipe, *rest = command.split()[1:]
        named = recipe in RECIPES and not re.search(r"…|\$|--help|--show|[A-Z]{4}", command)
        if named and (kind != "ablate" or (rest and not rest[0].startswith("-"))):
            yield command


def clashes(block):
    """The directories that commands of a block ask for with several settings, with these commands."""
    asked = {}
    for command in whole_commands(block):
        for run in planned(command):
            config = json.dumps(run.config.to_dict(), sort_keys=True, default=str)
            asked.setdefault(run.directory, {}).setdefault(config, command)
    return {path: [*found.values()] for path, found in asked.items() if len(found) > 1}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_stand_together_have_directories_of_their_own(page):
    found = [clashes(block) for block in blocks(page.read_text(encoding="utf-8"))]
    first = ["\n".join(next(iter(each.values()))) for each in found if each]
    assert not first, "\n\n".join(first)


def test_two_settings_of_one_method_in_one_folder_are_noticed():
    pair = "`polarstep compare nanogpt-toy --methods muon`, then `{}`"
    again = "polarstep compare nanogpt-toy --methods muon --set optimizer.lr=0.01"
    assert len(clashes(pair.format(again))) == 1
    assert not clashes(pair.format(f"{again} --out runs/other"))
    assert not clashes(pair.format("polarstep compare nanogpt-toy --methods muon --seeds 3"))
    assert not clashes(pair.format("polarstep compare nanogpt-toy --methods adamw"))
    assert not clashes(pair.format("polarstep ablate nanogpt-toy rank --values 8"))
    ranks = "polarstep ablate nanogpt-toy lr --values 1 --set optimizer.polar.rank={}\n"
    assert len(clashes(ranks.format(8) + ranks.format(16))) == 1
    runs = "`polarstep run nanogpt-toy --method muon`\n`polarstep run nanogpt-toy --method muon {}`"
    assert len(clashes(runs.format("--monitor 9"))) == 1
    assert not clashes(runs.format("--seed 3"))


def test_the_default_folders_are_those_of_the_commands():
    """As their help says, which the plans of this file repeat."""
    for command, folder in (
        ("compare", "runs/RECIPE-compare"),
        ("ablate", "runs/RECIPE-AXIS"),
        ("run", "runs/RECIPE/METHOD/seed-N"),
    ):
        told = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
        assert folder in told


def commands_of_scripts(page):
    """Script and arguments of each command of benchmarks/ on a page.

    Left out are mere names: those that do not begin with python and have at most one option.
    """
    for python, script, arguments in SCRIPT.findall(page.read_text(encoding="utf-8")):
        words, _, _ = arguments.replace("\\\n", " ").partition(">")
        if python or words.count(" --") > 1:
            yield script, words


BY_SCRIPT = [
    (page.relative_to(ROOT).as_posix(), *command)
    for page in TEXTS
    for command in commands_of_scripts(page)
]


class UnderstoodError(Exception):
    """Raised in the place of what a script does after it has read its arguments."""


@pytest.mark.parametrize(("page", "script", "arguments"), BY_SCRIPT)
def test_a_script_understands_the_arguments_that_a_page_gives_it(
    page, script, arguments, monkeypatch, capsys
):
    parse = argparse.ArgumentParser.parse_args

    def understood(parser, args=None, namespace=None):
        parse(parser, shlex.split(arguments, comments=True))
        raise UnderstoodError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", understood)
    try:
        runpy.run_path(str(ROOT / f"benchmarks/{script}.py"), run_name="__main__")
    except UnderstoodError:
        return
    except SystemExit:
        pytest.fail(f"{page}: {script}.py{arguments}: {capsys.readouterr().err}")
    pytest.fail(f"{script}.py read no arguments")


def options_given(page):
    """Subcommand and option of every command of polarstep on a page."""
    pattern = re.compile(rf"polarstep ({'|'.join(SUBCOMMANDS)})\b((?:[^`\n\\]|\\\n)*)")
    for block in blocks(page.read_text(encoding="utf-8")):
        for command, arguments in pattern.findall(filled(block)):
            for option in re.findall(r"(?<!\S)--[a-z][\w-]*", arguments):
                yield command, option


def test_options_of_polarstep_on_the_pages_exist():
    given = {page: {*options_given(page)} for page in TEXTS}
    assert sum(bool(found) for found in given.values()) > 10
    commands = {command for found in given.values() for command, _ in found}
    wide = {"COLUMNS": "200"}
    known = {each: CliRunner().invoke(app, [each, "--help"], env=wide).stdout for each in commands}
    for page, found in given.items():
        for command, option in found:
            words = f"{page.relative_to(ROOT)}: polarstep {command} {option}"
            assert re.search(rf"{option}\b", known[command]), words
