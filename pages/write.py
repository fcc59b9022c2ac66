"""docs/numbers.json, the tables and figures of the pages, and the check that the pages agree with it.

    python -m pages            # write docs/numbers.json, the tables of the pages and the figures
    python -m pages --write    # and put new texts of numbers in the place of the old ones
    python -m pages --check    # fail where a page or a file is not what the records say
    python -m pages --list auto.gap      # the numbers whose names have this in them

README.md says how a page names its numbers.
"""

from __future__ import annotations

import argparse
import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

from pages import ROOT
from pages.numbers import Number, made
from pages.numbers.number import forms
from polarstep_lab.storage import write_atomically

NUMBERS = ROOT / "docs/numbers.json"
COMMENT = re.compile(r"<!-- numbers:(.*?)-->", re.DOTALL)
TABLE = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
CONDITION = re.compile(r"^(.+?)(<=|>=|<|>)(.+)$")
COMPARE = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge}
MEASURED = re.compile(r"± ?\d")
"""What only a measured number has: a paragraph with it needs a comment."""
BY_HAND = ("docs/log.md",)
"""Pages whose numbers were written on their day and do not change."""


def pages() -> list[Path]:
    """README.md and all pages of the site."""
    found = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_site" not in path.parts)
    return [ROOT / "README.md", *found]


def main() -> int:
    """Write, or with --check compare, what is made from the records."""
    parser = argparse.ArgumentParser(prog="python -m pages")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if stale")
    parser.add_argument("--write", action="store_true", help="replace old texts of numbers")
    parser.add_argument("--list", metavar="PART", help="show numbers by a part of their names")
    options = parser.parse_args()
    numbers = made()
    if options.list is not None:
        for name, number in numbers.items():
            if options.list in name:
                print(f"{name:45} {number.text}")
        return 0
    from pages.figures import FIGURES

    texts: dict[Path, str] = {}
    old = json.loads(NUMBERS.read_text(encoding="utf-8")) if NUMBERS.exists() else {}
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if options.write:
            text = rewritten(text, old, numbers, page)
        texts[page] = with_tables(text, numbers)
    wrong = [
        f"{page.relative_to(ROOT)}: {what}"
        for page, text in texts.items()
        for what in mistakes(text, numbers, by_hand=str(page.relative_to(ROOT)) in BY_HAND)
    ]
    texts[NUMBERS] = json_of(numbers, texts.values())
    texts |= {ROOT / name: draw(numbers) for name, draw in FIGURES.items()}
    stale = [
        path
        for path, text in texts.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if not options.check:
        for path in stale:
            write_atomically(path, partial(_fill, text=texts[path]))
    names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
    print("\n".join([f"{'stale' if options.check else 'written'}: {names or 'nothing'}", *wrong]))
    return 1 if wrong or (stale and options.check) else 0


def _fill(file: IO[bytes], text: str) -> None:
    file.write(text.encode())


def json_of(numbers: Mapping[str, Number], texts: Iterable[str]) -> str:
    """The content of docs/numbers.json: a line for each number that the pages' texts name."""
    names = {name for text in texts for name in named(text)}
    lines = (
        f"  {json.dumps(name)}: {json.dumps(number.to_json(), ensure_ascii=False)}"
        for name, number in numbers.items()
        if name in names
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def named(text: str) -> Iterator[str]:
    """The names of numbers in a page's comments, conditions and tables."""
    from pages.tables import TABLES

    for *_, words in paragraphs(text):
        for word in words:
            condition = CONDITION.match(word)
            for name in (condition[1], condition[3]) if condition else (word,):
                yield name.removesuffix(".low").removesuffix(".high")
    for table in TABLE.finditer(text):
        yield from TABLES[table[2]].names()


# --- what a page says ---------------------------------------------------------------------------


def paragraphs(text: str) -> Iterator[tuple[int, int, list[str]]]:
    """Where each paragraph with a comment begins and ends, and the words of its comment.

    It is what stands before the comment, back to an empty line or to another comment.
    """
    for comment in COMMENT.finditer(text):
        end = len(text[: comment.start()].rstrip())
        begin = 0
        for mark in ("\n\n", "-->"):
            if (place := text.rfind(mark, 0, end)) >= 0:
                begin = max(begin, place + len(mark))
        yield begin, end, comment[1].split()


def mistakes(text: str, numbers: Mapping[str, Number], *, by_hand: bool = False) -> Iterator[str]:
    """What is wrong with a page: unknown names, missing texts, conditions that do not hold."""
    covered = []
    for begin, end, words in paragraphs(text):
        paragraph = plain_text(text[begin:end])
        covered.append((begin, end))
        start = f"paragraph {paragraph[:40]!r}: "
        for word in words:
            condition = CONDITION.match(word)
            name = condition[1] if condition else word
            number = numbers.get(name.removesuffix(".low").removesuffix(".high"))
            if number is None:
                yield f"{start}no number is {name!r}; python -m pages --list shows all"
                continue
            if condition and not COMPARE[condition[2]](
                value(condition[1], numbers), value(condition[3], numbers)
            ):
                yield f"{start}{word} does not hold: {name} is {number.text}"
            if not condition and not any(found(form, paragraph) for form in forms(number.text)):
                yield f"{start}{name} is {number.text}, which is not there"
    if by_hand:
        return
    for block in re.finditer(r"[^\n].*?(?=\n\s*\n|\Z)", without_code(text), re.DOTALL):
        told = any(begin < block.end() and block.start() < end for begin, end in covered)
        if MEASURED.search(block[0]) and not told and not block[0].lstrip().startswith("|"):
            yield f"{block[0].strip()[:60]!r} has a measured number and no comment names it"


def value(word: str, numbers: Mapping[str, Number]) -> float:
    """The value of a number by its name, of an end of its interval, or of a literal."""
    if word in numbers:
        return numbers[word].value
    name, _, end = word.rpartition(".")
    if name in numbers and end in ("low", "high"):
        found = getattr(numbers[name], end)
        return float(found) if found is not None else float("nan")
    return float(word)


def plain_text(text: str) -> str:
    """A paragraph on one line, without emphasis and with plain spaces."""
    return re.sub(r"\s+", " ", text.replace("\N{NO-BREAK SPACE}", " ").replace("**", "")).strip()


def without_code(text: str) -> str:
    """The page with blank lines in the place of its blocks of code, and so of equal length."""
    blank = partial(re.sub, r"[^\n]", "\n")
    return re.sub(r"^```.*?^```", lambda match: blank(match[0]), text, flags=re.M | re.S)


def found(form: str, paragraph: str) -> bool:
    """Whether a number stands in a paragraph, and not as a part of another one."""
    return pattern(form).search(paragraph) is not None


def pattern(form: str) -> re.Pattern[str]:
    """A number on a page, whose spaces may be line breaks."""
    spaced = re.escape(form).replace(r"\ ", r"\s+")
    return re.compile(rf"(?<![\w.,]){spaced}(?!\d|[.,]\d)")


def rewritten(text: str, old: Mapping[str, Any], numbers: Mapping[str, Number], page: Path) -> str:
    """The page with new texts of its numbers. Raises ``SystemExit`` where two old ones look alike."""
    for begin, end, words in reversed([*paragraphs(text)]):
        paragraph = text[begin:end]
        changes: dict[str, set[str]] = {}
        for name in words:
            if name in old and name in numbers and old[name]["text"] != numbers[name].text:
                pairs = zip(forms(old[name]["text"]), forms(numbers[name].text), strict=True)
                for before, after in pairs:
                    if pattern(before).search(paragraph):
                        changes.setdefault(before, set()).add(after)
                        break
        for before, afters in changes.items():
            unchanged = [
                name
                for name in words
                if name in old
                and name in numbers
                and old[name]["text"] == numbers[name].text
                and before in forms(old[name]["text"])
            ]
            if len(afters) > 1 or unchanged:
                raise SystemExit(
                    f"{page}: two numbers read {before!r}; change this paragraph by hand"
                )
            paragraph = pattern(before).sub(afters.pop(), paragraph)
        text = text[:begin] + paragraph + text[end:]
    return text


def with_tables(text: str, numbers: Mapping[str, Number]) -> str:
    """The page with every marked table made anew."""
    from pages.tables import TABLES

    def table(match: re.Match[str], numbers: Mapping[str, Number]) -> str:
        opening, name, end = match.groups()
        if name not in TABLES:
            raise SystemExit(f"no table is {name!r}: pages/tables.py has {', '.join(TABLES)}")
        return f"{opening}\n{TABLES[name].markdown(numbers)}\n\n{end}"

    return TABLE.sub(partial(table, numbers=numbers), text)
