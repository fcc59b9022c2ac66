"""What the pages say is what the code does and what the records hold."""

from __future__ import annotations

import doctest
import pkgutil
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import polarstep as ps
from polarstep.routing.routes import Routes
from polarstep_lab import records

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def run_blocks(page: str, namespace: dict[str, object]) -> None:
    """Execute the Python blocks of a page one after the other."""
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        exec(compile(block, page, "exec"), namespace)


def test_the_readme_takes_a_step_of_a_model() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    before = model[0].weight.detach().clone()
    namespace: dict[str, Any] = {"model": model, "loss": model(torch.ones(4, 8)).square().mean()}
    run_blocks("README.md", namespace)
    optimizer = namespace["optimizer"]
    assert isinstance(optimizer, torch.optim.Optimizer)
    routes = [optimizer.routes[name].algorithm for name, _ in model.named_parameters()]
    assert routes == ["Muon", "AdamW", "Muon", "AdamW", "AdamW", "AdamW"]
    assert not torch.equal(model[0].weight, before)


@pytest.mark.usefixtures("no_tiles")
def test_getting_started_runs_and_prints_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/start.md").read_text()
    shown = re.search(r"```\n(parameter .*?)\n```", page, re.DOTALL)
    assert shown is not None
    tables: list[str] = []
    monkeypatch.setattr("builtins.print", lambda told: tables.append(_at_100_columns(told)))
    run_blocks("docs/start.md", {})
    assert tables == [shown[1]]


def test_the_example_of_low_precision_takes_a_step() -> None:
    namespace: dict[str, Any] = {}
    run_blocks("docs/precision.md", namespace)
    optimizer, model = namespace["optimizer"], namespace["model"]
    assert all(optimizer.state[p] for p in model.parameters())
    assert optimizer.state[model[2].weight]["momentum_buffer"].dtype == torch.int8


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
    "docs/asked.md": "tests/routing/test_asked.py",
    "docs/coming-from.md": "tests/checkpoints/test_convert.py",
    "docs/distributed.md": "tests/ranks/page.py",
    "docs/extending.md": "tests/test_extending.py",
    "docs/flops.md": "tests/lab/test_flops.py",
    "docs/precision.md": "tests/test_docs.py",
    "docs/recipes.md": "tests/test_docs.py",
    "docs/routing.md": "tests/routing/test_rules.py",
    "docs/start.md": "tests/test_docs.py",
    "docs/theory.md": "tests/theory/test_docs.py",
    "docs/experiments.md": "tests/lab/experiments/test_tune.py",
    "docs/which.md": "tests/test_docs.py",
    "docs/integrations/accelerate.md": "tests/integrations/test_accelerate.py",
    "docs/integrations/huggingface.md": "tests/integrations/test_huggingface.py",
    "docs/integrations/lightning.md": "tests/integrations/test_lightning.py",
    "docs/integrations/peft.md": "tests/integrations/test_peft.py",
    "docs/integrations/timm.md": "tests/integrations/test_timm.py",
    "docs/integrations/torchtitan.md": "tests/integrations/test_torchtitan.py",
    "docs/integrations/trl.md": "tests/integrations/test_trl.py",
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


def test_the_readme_names_the_two_commands_that_the_makefile_has() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in ("demo", "test"):
        assert f"make {command}" in README
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)


def test_the_command_of_the_fuzzer_is_that_of_its_record() -> None:
    page = (ROOT / "docs/reliability.md").read_text()
    found = re.search(r"^python -m tests\.fuzz (.*) --json \S+$", page, re.MULTILINE)
    assert found is not None
    (line,) = (
        each for each in records.read(ROOT / "results/certificates") if each["kind"] == "fuzz"
    )
    asked = line["config"]
    assert found[1] == f"--seed {asked['seed']} --cases {asked['cases']}"
    assert (asked["first"], asked["only"]) == (0, None)


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
        text = re.sub(r"`[^`\n]*`", "", page.read_text())
        for target in re.findall(r"\]\(([^)#\s]+)\)", text):
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
    assert len(found) > 20
    for name in sorted(found):
        try:
            pkgutil.resolve_name(name)
        except (AttributeError, ImportError):
            pytest.fail(f"{name} is named and does not exist")


def test_on_a_package_index_every_link_of_the_readme_is_absolute() -> None:
    module = runpy.run_path(str(ROOT / "docs/_site/absolute_links.py"))
    text = module["absolute"](README, "https://example.org/polarstep", "v1.2.3")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 15
    assert all(link.startswith("https://") for link in links)
    assert "(https://example.org/polarstep/blob/v1.2.3/docs/which.md)" in text
    assert "(https://example.org/polarstep/raw/v1.2.3/docs/assets/loss-over-seconds.svg)" in text
    assert module["absolute"](text, "https://elsewhere.org", "v2") == text


def test_the_newest_section_of_the_changes_is_the_version() -> None:
    first = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert first[1] == ps.__version__


def test_the_version_is_the_same_everywhere() -> None:
    assert f'version = "{ps.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"version: {ps.__version__}" in (ROOT / "CITATION.cff").read_text()
