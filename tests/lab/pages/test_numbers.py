"""README and pages say what docs/numbers.json says, and that is what the records say."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from pages import ROOT, records, write
from pages.numbers import Number
from pages.tables import TABLES, Table


def test_the_file_is_what_the_records_say(made):
    texts = [page.read_text(encoding="utf-8") for page in write.pages()]
    assert write.NUMBERS.read_text(encoding="utf-8") == write.json_of(made, texts)


def test_the_file_has_the_numbers_that_pages_name(two):
    assert "adamw" not in write.json_of(two, [GOOD.replace("adamw", "auto")])
    assert write.json_of(two, [GOOD, "<!-- table: step-cost -->\n<!-- end -->"]).count("text") == 2


@pytest.mark.parametrize("page", write.pages(), ids=lambda page: page.name)
def test_a_page_agrees_with_the_numbers(page, made):
    text = page.read_text(encoding="utf-8")
    by_hand = str(page.relative_to(ROOT)) in write.BY_HAND
    assert [*write.mistakes(text, made, by_hand=by_hand)] == []
    assert write.with_tables(text, made) == text, "a table is stale: python -m pages"


@pytest.fixture
def two():
    """Two numbers, one told apart from zero and one not."""
    return {
        "auto.gap": Number(-0.3, "−0.3% ± 0.9 (n = 3)", "x", -1.2, 0.6),
        "adamw.gap": Number(21.5, "+21.5% ± 2.0 (n = 3)", "x", 19.5, 23.5),
    }


GOOD = (
    "Against full space it has −0.3%\u00a0± 0.9\n(n = 3), and AdamW **21.5%** more.\n"
    "<!-- numbers: auto.gap adamw.gap auto.gap<0 auto.gap.high>0 auto.gap<adamw.gap -->\n"
)


def test_a_paragraph_with_its_numbers_is_right(two):
    assert [*write.mistakes(GOOD, two)] == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD.replace("0.9", "0.8").replace("(n = 3)", "").replace("−0.3", "−0.4"), "not there"),
        (GOOD.replace("21.5", "121.5"), "not there"),
        (GOOD.replace("21.5", "21.52"), "not there"),
        (GOOD.replace("auto.gap.high>0", "auto.gap.high<0"), "does not hold"),
        (GOOD.replace("auto.gap<adamw.gap", "auto.gap>adamw.gap"), "does not hold"),
        (GOOD.replace(": auto.gap", ": auto.gaps"), "no number is 'auto.gaps'"),
        ("It has +3.1% ± 0.2.\n", "no comment names it"),
    ],
)
def test_a_mistake_on_a_page_is_said(text, says, two):
    (told,) = write.mistakes(text, two)
    assert says in told


def test_a_comment_speaks_of_what_stands_before_it(two):
    bullets = (
        "- −0.3%\n  <!-- numbers: auto.gap -->\n- 21.5%\n  <!-- numbers: adamw.gap -->\n\n"
        "21.5%\n\n<!-- numbers: adamw.gap -->\n"
    )
    assert [*write.mistakes(bullets, two)] == []
    assert len([*write.mistakes(bullets.replace("- 21.5%", "- more"), two)]) == 1


def test_numbers_in_code_and_in_tables_need_no_comment(two):
    assert [*write.mistakes("```\n1 ± 2\n```\n\n| a |\n|---|\n| 1 ± 2 |\n", two)] == []


def test_new_texts_take_the_place_of_old_ones(two):
    old = {name: {"text": each.text} for name, each in two.items()}
    new = two | {"auto.gap": Number(0.1, "+0.1% ± 0.5 (n = 5)", "x", -0.4, 0.6)}
    text = write.rewritten(GOOD, old, new, Path("page.md"))
    assert "it has +0.1% ± 0.5 (n = 5), and AdamW **21.5%** more" in text
    assert [*write.mistakes(text.replace("auto.gap<0 ", ""), new)] == []


def test_two_numbers_that_look_alike_are_left_to_a_hand():
    alike = {name: Number(1.0, "1.0×", "x") for name in ("a", "b")}
    old = {name: {"text": each.text} for name, each in alike.items()}
    text = "It takes 1.0× and 1.0×.\n<!-- numbers: a b -->\n"
    with pytest.raises(SystemExit, match="by hand"):
        write.rewritten(text, old, alike | {"a": Number(2.0, "2.0×", "x")}, Path("p"))


def test_a_table_has_a_cell_for_each_number():
    numbers = {"auto.gap": Number(-0.3, "−0.3% ± 0.9 (n = 3)", "x")}
    table = Table(
        "map",
        {"gap": "{}.gap", "half": "{}.gap±", "short": "{}.gap!", "none": "{}.x"},
        {"A": "auto"},
    )
    assert table.markdown(numbers).split("\n")[-1] == (
        "| A | −0.3%\u00a0±\u00a00.9\u00a0(n\u00a0=\u00a03) | −0.3%\u00a0±\u00a00.9 | −0.3% | – |"
    )
    with pytest.raises(ValueError, match="no name begins with 'full'"):
        Table("map", {"gap": "{}.gap"}, {"F": "full"}).markdown(numbers)


def test_every_table_has_its_numbers(made):
    for name, table in TABLES.items():
        cells = [cell for row in table.markdown(made).split("\n")[2:] for cell in row.split(" | ")]
        assert sum(cell.strip("| ") == "–" for cell in cells) < len(cells) / 3, name


def test_intervals_are_those_of_student():
    found = records.change([1.0, 2.0, 3.0])
    assert math.isclose(found.interval, 4.302652729911275 / math.sqrt(3))
    assert records.change([2.0]).interval is None
    percent = records.percent({0: 11.0, 1: 12.0, 9: 1.0}, {0: 10.0, 1: 10.0})
    assert (round(percent.value, 9), percent.pairs) == (15.0, 2)


def test_numbers_have_a_source_that_is_there(made):
    for name, found in made.items():
        assert re.fullmatch(r"[a-z0-9.+-]+", name), name
        assert (ROOT / found.source).is_dir() or not found.source.startswith("results"), name
        assert math.isfinite(found.value), name
