"""What the pages say is what the code does and what the records hold."""

from __future__ import annotations

import doctest
import json
import pkgutil
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forking import fork
from tests.processes import PATIENCE

import polarstep as ps
from polarstep.routing.routes import Routes
from polarstep_lab import flops

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def run_blocks(page: str, namespace: dict[str, object]) -> None:
    """Execute the Python blocks of a page one after the other."""
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        exec(compile(block, page, "exec"), namespace)


def test_the_readme_runs_by_itself_and_trains_its_model() -> None:
    namespace: dict[str, Any] = {}
    run_blocks("README.md", namespace)
    optimizer, model = namespace["optimizer"], namespace["model"]
    assert isinstance(optimizer, ps.Muon)
    routes = [optimizer.routes[name].algorithm for name, _ in model.named_parameters()]
    assert routes == ["Muon", "AdamW", "Muon", "AdamW", "AdamW", "AdamW"]
    assert all(optimizer.state[p] for p in model.parameters())


@pytest.mark.usefixtures("no_tiles")
def test_getting_started_runs_and_prints_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/start.md").read_text()
    shown = re.search(r"```\n(parameter .*?)\n```", page, re.DOTALL)
    assert shown is not None
    tables: list[str] = []
    monkeypatch.setattr("builtins.print", lambda told: tables.append(_at_100_columns(told)))
    run_blocks("docs/start.md", {})
    assert tables == [shown[1]]


def test_the_recipes_build_an_optimizer_and_a_schedule() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    namespace: dict[str, Any] = {"torch": torch, "ps": ps, "model": model, "steps": 10}
    run_blocks("docs/recipes.md", namespace)
    factor = namespace["scheduler"].lr_lambdas[0]
    assert [round(factor(step), 2) for step in (0, 4, 7, 10)] == [1, 1, 0.53, 0.05]


def _at_100_columns(told: object) -> str:
    """What a terminal of 100 columns would show."""
    return told.table(100) if isinstance(told, Routes) else str(told)


@pytest.mark.usefixtures("no_tiles")
def test_the_examples_of_which_map_run() -> None:
    page = str(ROOT / "docs/which.md")
    failed, tried = doctest.testfile(page, module_relative=False, encoding="utf-8")
    assert (failed, tried > 2) == (0, True)


# The test that runs the code of a page.
RUN_BY = {
    "README.md": "tests/test_docs.py",
    "docs/coming-from.md": "tests/test_convert.py",
    "docs/distributed.md": "tests/ranks/page.py",
    "docs/extending.md": "tests/test_extending.py",
    "docs/flops.md": "tests/lab/test_flops.py",
    "docs/precision.md": "tests/lab/test_low_precision.py",
    "docs/recipes.md": "tests/test_docs.py",
    "docs/routing.md": "tests/routing/test_rules.py",
    "docs/start.md": "tests/test_docs.py",
    "docs/theory.md": "tests/theory/test_docs.py",
    "docs/tuning.md": "tests/lab/experiments/test_tune.py",
    "docs/which.md": "tests/test_docs.py",
    "docs/integrations/accelerate.md": "tests/integrations/test_accelerate.py",
    "docs/integrations/huggingface.md": "tests/integrations/test_huggingface.py",
    "docs/integrations/lightning.md": "tests/integrations/test_lightning.py",
    "docs/integrations/peft.md": "tests/integrations/test_peft.py",
    "docs/integrations/timm.md": "tests/integrations/test_timm.py",
    "docs/integrations/torchtitan.md": "tests/integrations/test_torchtitan.py",
}


def test_every_page_with_code_has_a_test_that_runs_it() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    with_code = {
        page.relative_to(ROOT).as_posix()
        for page in pages
        if re.search(r"^```(python|pycon)$", page.read_text(), re.MULTILINE)
    }
    assert with_code == set(RUN_BY)
    for page, test in RUN_BY.items():
        assert Path(page).name in (ROOT / test).read_text()


def test_the_maps_that_which_map_names_can_be_built() -> None:
    page = (ROOT / "docs/which.md").read_text()
    choices = re.findall(r"`(polar|transform)=(ps\.[^`]+)`", page)
    assert len(choices) >= 5
    for option, text in choices:
        made = eval(text, {"ps": ps})
        ps.Muon([torch.nn.Parameter(torch.eye(3))], **{option: made})
    lines = re.findall(r"`(ps\.muon_for\(\w*model, [^`]+\))`", page)
    assert len(lines) >= 5
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    for line in lines:
        made = eval(line, {"ps": ps, "model": model, "peft_model": model})
        assert isinstance(made, ps.Muon)


def test_the_readme_names_the_two_commands_that_the_makefile_has() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in ("demo", "test"):
        assert f"make {command}" in README
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)


def test_measured_tables_are_those_of_their_records() -> None:
    process = fork("-m", "pages", "--check")
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, out + errors


def test_the_long_run_says_which_runs_no_commit_has_and_how_many_rates_a_row_tried() -> None:
    from pages.records import long_run as study

    page = (ROOT / "results/long-run/README.md").read_text()
    named: dict[str, set[tuple[str, int]]] = {}
    for commit, cells in re.findall(r"^\| (\w+\+) \| (.*) \|$", page, re.MULTILINE):
        named[commit] = {
            (slug, int(seed))
            for slug, seeds in re.findall(r"`([\w-]+)` ([\d, and]+)", cells)
            for seed in re.findall(r"\d", seeds)
        }
    found: dict[str, set[tuple[str, int]]] = {}
    rows = [row for row in study.TABLE if row.slug in study.runs()]
    for row in rows:
        for seed, run in study.runs()[row.slug].items():
            commit = run.environment["git_commit"]
            if commit.endswith("+") and "git_tree" not in run.environment:
                found.setdefault(f"{commit[:7]}+", set()).add((row.slug, seed))
    assert named == found
    assert (
        f"{sum(map(len, found.values()))} of the {sum(len(study.runs()[r.slug]) for r in rows)}"
        in page
    )
    tried = {row.slug: len(study.rates().get(row.slug, ())) for row in rows}
    for count, cells in re.findall(r"^\| (\d|none) \| (.*) \|$", page, re.MULTILINE):
        told = re.sub(r"which ha(?:ve|s) (?:the rate|that) of `[\w-]+`", "", cells)
        expected = {
            slug for slug, number in tried.items() if number == int(count.replace("none", "0"))
        }
        assert set(re.findall(r"`([\w-]+)`", told)) == expected


# The log is dated.
APART = {"log.md"}
NUMBERED = [
    "README.md",
    *(
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "docs").rglob("*.md"))
        if path.name not in APART
    ),
]
MEASURED = re.compile(
    r"±\s?\d[\d.]*|\d[\d.,]*\s?(?:×(?!\s?\d)|%|(?:ms|µs|s|TB/s|[KMG]i?B|points|seconds|times)\b)"
    r"|^\|.*\d\.\d.*$|(?<![\w.,])\d+\.\d+(?!\w|\.\d)|\d[\d,]* to \d{1,3}(?:,\d{3})+|\d+ of \d+ pairs",
    re.MULTILINE,
)
"""With a unit, in a table, with a decimal point, as a range of large numbers, or as a count of pairs."""
STATED = {
    "goals, not measurements": (
        "1.5 times AdamW's step",
        "5 and 12 times for full",
        "2 and 4 times AdamW's step",
        "a loss of 0.05 points at most",
        "Our goal was 2.5.",
        "So 2.5 is out of reach for the map",
    ),
    "definitions": (
        "95%",
        "hold 512 MiB together",
        'A "smaller δ" is 1.5 times',
        "995 times in 1000",
        "from 1.25 to 2",
        "(35.4M parameters in them)",
        "over three seeds 4.3 standard errors",
        "the factor of torch and Moonlight, 0.2·√max(m, n)",
        "(RMS) of 0.2·lr",
        "the factor is 0.2·√(mn)/‖T‖_F. The RMS is less than 0.2·lr",
        "at most 0.6·√(mn/ℓ)",
        "a safety factor of 1.02, polarstep's for 1.01",
        "soft cap, 23·sigmoid((x + 5)/7.5)",
        "for singular values from 0.03 on",
        "hold 512 MiB together",
        "and from 0.03 on they",
        "a norm's gain of 1.0",
        "Apache-2.0",
        "CC BY-SA 3.0",
        "Python 3.11",
        "torch 2.9",
        "compute capability 8.0",
    ),
    "rates and momenta that were set": (
        "0.15 times the size of",
        "7.5 × RMS",
        "0.15 × RMS",
        "entries begin at 0.02",
        "other vectors have 0.15",
        "an RMS below 0.002, have 0.15 too",
        "(0.1)",
        "(0.01)",
        "(0.02)",
        "betas of (0.9, 0.95)",
        "torch's AdamW has (0.9, 0.999) and 0.01",
        "AdamW at 0.01",
        "the same rate is 1.64",
        "have 0.008 for embedding and head",
        "The 0.008 of the authors' script",
        "of size 0.005",
        "a rate of 0.008",
        "AdamW's head has 0.004",
        "2000 for the embedding and 0.1 for the matrices",
        "in full space at 0.014",
        "our full space at 0.014",
        "with full space at 0.014",
        "where they are not 0.014",
        "best of three rates was the highest, 0.02",
        "always with 0.95",
        "stays at 0.95",
        "has the rate 0.014",
        "**Rate**: 0.014",
        "higher at 0.02 than at 0.014, so rows at 0.02",
        "at β₂ = 0.95",
        "up to β₂ = 0.99; the default is 0.95. At β₂ = 0.999",
        "from 0.85 to 0.95 and from 0.8 to 0.9",
    ),
    "asserted by the test that the page names, or by code on it": (
        "at most 1.06 times",
        "PolarExpress steps 0.15 to 0.20",
        "with low-rank maps 0.200",
        "steps 0.11 to 0.19",
        "one step 0.19 to 0.21",
        "with low-rank maps 0.200",
        "gradients of size 0.1, v is 0.26 where float32 has 0.027",
        "above γ by 0.15 to 0.45 with a power iteration, and by up to 0.65 without",
        "below 0.8 without and below 0.55 with a power iteration, where γ is below 0.1",
        "within 0.1 on Pareto",
        "within 0.03 on α-stable",
    ),
}


def unmarked_numbers(text: str) -> list[str]:
    """Numbers that look measured and stand in no marked table, claim or block of code."""
    for block in (
        r"```.*?```",
        r"<!-- (?:results|claim): \S+ -->.*?<!-- end -->",
        r"<!-- [a-z-]+: \S+ -->\n\n(?:\|[^\n]*\n)+",
        r"<!-- rates: .*?<!-- /rates -->",
        r"<!-- mutants -->.*?<!-- end of mutants -->",  # tests/mutants/test_mutants.py checks it
        r"`[^`\n]*`",
        r"\[[^]]*\]\([^)]*\)",
    ):
        text = re.sub(block, "", text, flags=re.DOTALL)
    for workload in (flops.NANOGPT, flops.CIFAR10):
        text = text.replace(flops.markdown(workload), "")  # tests/lab/test_flops.py compares them
    for words in STATED.values():
        for stated in words:
            text = re.sub(re.escape(stated).replace(r"\ ", r"\s+"), "", text)
    return [match[0] for match in MEASURED.finditer(text)]


def test_what_is_stated_of_numbers_is_still_on_a_page() -> None:
    pages = "\n".join((ROOT / page).read_text() for page in NUMBERED)
    for words in STATED.values():
        for stated in words:
            assert re.search(re.escape(stated).replace(r"\ ", r"\s+"), pages), stated


def test_a_number_outside_of_a_marked_block_is_found() -> None:
    assert unmarked_numbers("It takes 3.2 ms, 2.6× AdamW's, and loses 6% ± 2.") == [
        "3.2 ms",
        "2.6×",
        "6%",
        "± 2.",
    ]
    assert unmarked_numbers("A rank receives 3.5 MB of 4 GiB.") == ["3.5 MB", "4 GiB"]
    assert unmarked_numbers("The median γ is 0.043, and 0.12 or +1.0.") == ["0.043", "0.12", "1.0"]
    assert unmarked_numbers("Lower in 43 of 44 pairs.") == ["43 of 44 pairs"]
    assert unmarked_numbers("34,000 to 69,000 FLOPs") == ["34,000 to 69,000"]
    assert (
        unmarked_numbers("It has 1.5\ntimes AdamW's step, in torch 2.9.1 and version 1.2.3.") == []
    )
    marked = "It takes <!-- claim: cost -->3.2 ms<!-- end -->, with 95% intervals of 768×768."
    assert unmarked_numbers(marked) == []


@pytest.mark.parametrize("page", NUMBERED)
def test_every_measured_number_is_made_from_a_record(page: str) -> None:
    found = unmarked_numbers((ROOT / page).read_text())
    assert not found, (
        f"{page} has {found} in its text: make them claims of pages/claims, or say in "
        "STATED why they are no measurements"
    )


def test_the_command_of_the_fuzzer_is_that_of_its_record() -> None:
    page = (ROOT / "docs/reliability.md").read_text()
    found = re.search(r"^python -m tests\.fuzz (.*) --json (\S+)$", page, re.MULTILINE)
    assert found is not None
    record = json.loads((ROOT / found[2]).read_text())
    assert found[1] == f"--seed {record['seed']} --cases {record['cases']}"
    assert (record["first"], record["only"]) == (0, None)


def test_no_line_begins_with_a_claim_inside_a_paragraph() -> None:
    """Such a line would begin a block of raw HTML on the site."""
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        found = re.findall(r"^\s*<!-- claim: (\S+) -->[^\n]", page.read_text(), re.MULTILINE)
        assert not found, f"{page.name}: put a word before {found}"


def test_the_page_of_the_benchmarks_lists_scripts_and_their_parts() -> None:
    page = (ROOT / "benchmarks/README.md").read_text()
    sections = re.findall(r"^\| (script|part) \|.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    listed = {
        (name, kind == "script")
        for kind, rows in sections
        for name in re.findall(r"^\| \[(\w+\.py)\]", rows, re.MULTILINE)
    }
    found = {
        (path.name, "__main__" in path.read_text()) for path in (ROOT / "benchmarks").glob("*.py")
    }
    assert listed == found


def test_links_between_pages_lead_somewhere() -> None:
    inside = [
        page
        for name in ("docs", "benchmarks", "pages", "results")
        for page in (ROOT / name).rglob("*.md")
    ]
    for page in [*ROOT.glob("*.md"), *inside]:
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
            if not target.startswith(("http", "mailto")):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("suffix", ["py", "md"])
def test_names_of_the_package_that_pages_and_messages_give_exist(suffix: str) -> None:
    # The log and the changes speak of names that are gone.
    files = [*ROOT.glob("src/**/*.py")] if suffix == "py" else [*ROOT.glob("docs/**/*.md")]
    found = {
        name
        for file in files
        if file.name != "log.md"
        for name in re.findall(r"\bpolarstep(?:_lab)?(?:\.[A-Za-z]\w*)+", file.read_text())
        if not name.endswith((".py", ".md"))
    }
    assert len(found) > 30
    for name in sorted(found):
        try:
            pkgutil.resolve_name(name)
        except (AttributeError, ImportError):
            pytest.fail(f"{name} is named and does not exist")


def test_on_a_package_index_every_link_of_the_readme_is_absolute() -> None:
    module = runpy.run_path(str(ROOT / "docs/_site/absolute_links.py"))
    text = module["absolute"](README, "https://example.org/polarstep", "v1.2.3")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 20
    assert all(link.startswith("https://") for link in links)
    assert "(https://example.org/polarstep/blob/v1.2.3/docs/which.md)" in text
    assert "(https://example.org/polarstep/raw/v1.2.3/docs/assets/headline.svg)" in text
    assert module["absolute"](text, "https://elsewhere.org", "v2") == text


def test_the_newest_section_of_the_changes_is_the_version() -> None:
    first = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert first[1] == ps.__version__


def test_the_version_is_the_same_everywhere() -> None:
    assert f'version = "{ps.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"version: {ps.__version__}" in (ROOT / "CITATION.cff").read_text()
