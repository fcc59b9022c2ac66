"""The page, its figures and the folder they are written to."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from tests.lab.experiments.synthetic import write_comparison, write_run

from polarstep_lab.methods import all_methods
from polarstep_lab.records.record import Ablation
from polarstep_lab.report import report_files, write_report
from polarstep_lab.report.figures import curve_of
from polarstep_lab.report.folder import MANIFEST
from polarstep_lab.report.grouping import sections_of
from polarstep_lab.report.palette import CHROME, SERIES, look_of
from polarstep_lab.report.panels import Drawing, Panel, Series
from polarstep_lab.report.runs import collect_runs
from polarstep_lab.storage import StorageError


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("records") / "runs"
    write_comparison(root / "compare", "nanogpt", "nanogpt", seeds=2)
    write_run(root / "lost", recipe="nanogpt", seed=5, status="diverged")
    for value in (16, 64):
        write_run(root / f"rank-{value}", recipe="nanogpt", ablation=Ablation("rank", value))
    return root


@pytest.fixture(scope="module")
def files(runs):
    return report_files([runs])


class Outline(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, key, value or "") for key, value in attrs]

    def handle_data(self, data):
        self.text += data


@pytest.mark.rendered
def test_the_same_records_give_the_same_bytes(runs, files):
    assert report_files([runs]) == files


def test_the_page_needs_no_network(files):
    page = Outline(files["index.html"].decode())
    loads = [(t, k, v) for t, k, v in page.attributes if k in ("src", "srcset", "data")]
    assert all(value.startswith("data:") for _, _, value in loads)
    links = [v for tag, key, v in page.attributes if tag in ("a", "link") and key == "href"]
    assert all(v.startswith("#") or v in files for v in links)
    assert "@import" not in files["index.html"].decode()


def test_the_page_says_everything(files, runs):
    text = Outline(files["index.html"].decode()).text
    for method in SERIES:
        assert text.count(method) >= 2
        assert f"polarstep run nanogpt --method '{method}' --seed 1" in text
    assert "28.077" in text
    assert "28.0773 ± 0.3372" in text
    assert "1 diverged" in text
    assert "Synthetic CPU" in text
    assert str(runs.parent) not in text


def page_of(root):
    return report_files([root])["index.html"].decode().replace("&#39;", "'")


def test_the_first_sentence_of_the_page_is_the_best_row_against_adamw(tmp_path):
    for seed in range(3):
        write_run(
            tmp_path / f"a{seed}",
            method="Muon (Nesterov)",
            seed=seed,
            final=29.0 + seed,
        )
        write_run(tmp_path / f"b{seed}", method="AdamW", seed=seed, final=31.0 + seed)
    page = report_files([tmp_path])["index.html"].decode()
    first = re.search(r"<p[ >].*?</p>", page, re.DOTALL)
    assert first is not None
    expected = (
        "Muon (Nesterov) has validation perplexity 30.00 ± 1.00, AdamW 32.00 ± 1.00: 2.00 ± "
        "0.00 lower (95% t-interval, 3 common seeds); a whole step takes 1.00 times as long."
    )
    assert expected in first[0]
    assert expected in report_files([tmp_path])["summary.md"].decode()


def test_without_adamw_the_best_row_is_named(tmp_path):
    write_run(tmp_path / "a", method="Muon (Polyak)", final=30.0)
    assert "lowest" not in page_of(tmp_path)
    write_run(tmp_path / "b", method="Muon (Nesterov)", final=31.0)
    text = "Muon (Polyak) has the lowest validation perplexity of 2 rows, 30.00."
    assert text in page_of(tmp_path)


def test_a_section_that_compares_methods_comes_before_one_with_ablations_alone(tmp_path):
    write_run(tmp_path / "a", method="AdamW", final=31.0)
    folder = write_run(tmp_path / "b", ablation=Ablation("rank", 16), final=30.0)
    result = json.loads((folder / "result.json").read_text())
    result |= {"metric": "test_perplexity", "validation": 30.5}
    (folder / "result.json").write_text(json.dumps(result))
    titles = re.findall("^## (.*)$", report_files([tmp_path])["summary.md"].decode(), re.MULTILINE)
    assert [title.endswith("validation only") for title in titles] == [True, False]


def test_rows_of_one_method_are_drawn_apart(tmp_path):
    for lr in (0.01, 0.02, 0.03):
        write_run(tmp_path / str(lr), method="AdamW", overrides={"optimizer.lr": lr})
    (section,), _ = sections_of(collect_runs([tmp_path]))
    assert len({(look.dash, look.marker) for look in section.looks.values()}) == 3


HOSTILE = "x|y <script>alert(1)</script>\n# [a](b) `c` **d** &amp;"


@pytest.mark.rendered
def test_text_from_records_cannot_become_html_or_break_a_table(tmp_path):
    folder = write_run(tmp_path / HOSTILE.replace("/", ""), recipe=HOSTILE, method=HOSTILE)
    write_run(tmp_path / "other", recipe=HOSTILE, method="AdamW", final=31.0)
    (tmp_path / "<b>broken").mkdir()
    (tmp_path / "<b>broken" / "config.json").write_text("{")
    config = json.loads((folder / "config.json").read_text())
    config["command"] = "polarstep\n```\n<script>alert(2)</script>"
    (folder / "config.json").write_text(json.dumps(config))
    files = report_files([tmp_path])
    page, text = (files[name].decode() for name in ("index.html", "summary.md"))
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    outside, fence = [], None
    for line in text.splitlines():
        ticks = re.match("`{3,}", line)
        if ticks and fence in (None, line):
            fence = None if fence else ticks[0]
        elif fence is None:
            outside.append(line)
    assert fence is None  # no command ends its block early
    assert not any("<" in line for line in outside)
    assert not any(line.startswith("# [a]") for line in outside)
    rows = [line for line in outside if line.startswith("| ")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in rows}) == 1
    assert any(
        r"x\|y &lt;script&gt;alert(1)&lt;/script&gt; # \[a\](b) \`c\` \*\*d\*\* &amp;amp;" in line
        for line in rows
    )


def test_every_figure_is_on_the_page_and_beside_it(files):
    names = {name.split("/")[1].rsplit(".", 1)[0] for name in files if name.startswith("figures/")}
    assert any("trajectories" in name for name in names)
    assert any("ablations" in name for name in names)
    assert any("gamma" in name for name in names)
    page = files["index.html"].decode()
    for name in names:
        ElementTree.fromstring(files[f"figures/{name}.svg"])
        assert files[f"figures/{name}.png"].startswith(b"\x89PNG")
        assert f'aria-labelledby="{name}-caption"' in page
        assert f'id="{name}-caption"' in page


def test_the_ids_of_a_page_are_unique_and_resolve(files):
    page = files["index.html"].decode()
    ids = re.findall(r'\bid="([^"]+)"', page)
    clips = [name for name in ids if re.fullmatch(r"p[0-9a-f]{10,}", name)]
    assert clips
    assert len(clips) == len(set(clips))
    assert set(re.findall(r'url\(#([^)"]+)\)', page)) <= set(ids)


def test_figures_follow_the_theme_of_the_page(files):
    page = files["index.html"].decode()
    drawn = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    for look in SERIES.values():
        assert f"var({look.variable})" in drawn
        assert look.light not in drawn
        assert f"{look.variable}:{look.dark}" in page
    alone = files["figures/nanogpt-nanogpt-trajectories.svg"].decode()
    assert "var(" not in alone
    assert SERIES["AdamW"].light in alone


def test_a_band_is_one_deviation_and_a_lost_run_stays_out_of_it(runs):
    (section,), _ = sections_of(collect_runs([runs]))
    curve = curve_of(section.rows[0], "nanogpt")
    last = [run.rows("val")[-1].perplexity for run in section.rows[0].finished["record"]]
    assert curve.final == pytest.approx(np.mean(last))
    assert curve.points["std"].iloc[-1] == pytest.approx(np.std(last, ddof=1))
    assert [status for status, _ in curve.broken] == ["diverged"]


@pytest.mark.rendered
def test_a_run_monitored_without_a_finite_value_still_has_its_figure(tmp_path):
    folder = write_run(tmp_path / "a", gamma=True)
    row = {"step": 0, "parameter": "a", "gamma": None, "nu": None}
    (folder / "gamma.jsonl").write_text(json.dumps(row) + "\n")
    assert any("gamma" in name for name in report_files([tmp_path]))


def test_environments_are_told_apart_and_may_be_missing(tmp_path):
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1)
    write_run(tmp_path / "c", seed=2, device="Another CPU")
    (write_run(tmp_path / "d", seed=3) / "environment.json").unlink()
    page = page_of(tmp_path).split("<h2>Environment</h2>")[1]
    cells = re.findall(r"<t[dh][^>]*>([^<]*)</t", page)
    devices = ["Another CPU, 2 threads", "Synthetic CPU, 2 threads", "unknown device"]
    assert cells[:8] == ["device", *devices, "runs", "1", "2", "1"]
    assert cells[cells.index("torch") :][:4] == ["torch", "2.13.0", "2.13.0", "not recorded"]
    (tmp_path / "d").rename(tmp_path.parent / "d")
    assert "unknown device" in page_of(tmp_path.parent / "d")


def test_runs_that_did_not_finish_are_listed_with_their_message(tmp_path):
    write_run(tmp_path / "good")
    assert "Runs that did not finish" not in page_of(tmp_path)
    write_run(tmp_path / "bad", seed=1, status="diverged")
    write_run(tmp_path / "open", seed=2, status=None)
    page = page_of(tmp_path).split("<h2>Runs that did not finish</h2>")[1]
    assert "the loss was not finite at step 66" in page
    assert "no result recorded" in page


def test_no_runs_and_no_finished_runs_are_errors(tmp_path):
    with pytest.raises(StorageError, match="no run directories"):
        report_files([tmp_path])
    write_run(tmp_path / "a", status="stopped")
    with pytest.raises(StorageError, match="none of the 1 runs has finished"):
        report_files([tmp_path])


class TestFolder:
    """Only what a report wrote is a report's to replace."""

    @pytest.fixture
    def small(self, tmp_path):
        write_run(tmp_path / "runs" / "a")
        return tmp_path / "runs"

    def test_writing_again_changes_nothing(self, small, tmp_path):
        out = tmp_path / "out"
        page = write_report([small], out)
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        assert write_report([small], out) == page
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before

    def test_a_foreign_file_is_left_alone_and_stops_the_report(self, small, tmp_path):
        out = tmp_path / "out"
        out.mkdir()
        (out / "index.html").write_text("mine")
        with pytest.raises(StorageError, match=r"index\.html.*choose another --out"):
            write_report([small], out)
        assert sorted(path.name for path in out.iterdir()) == ["index.html"]
        assert (out / "index.html").read_text() == "mine"

    def test_an_edited_file_is_left_alone(self, small, tmp_path):
        out = tmp_path / "out"
        write_report([small], out)
        (out / "summary.md").write_text("my notes")
        write_run(small / "b", seed=1)
        with pytest.raises(StorageError, match=r"summary\.md"):
            write_report([small], out)
        assert (out / "summary.md").read_text() == "my notes"

    def test_new_records_replace_the_old_report(self, small, tmp_path):
        out = tmp_path / "out"
        write_run(small / "rank", ablation=Ablation("rank", 8))
        write_report([small], out)
        stale = next(out.glob("figures/*ablation*.svg"))
        (small / "rank" / "config.json").unlink()
        write_report([small], out)
        assert not stale.exists()
        assert not list(out.rglob("*.part"))

    def test_an_interrupted_write_can_be_repeated(self, small, tmp_path, monkeypatch):
        out = tmp_path / "out"
        import polarstep_lab.report.folder as folder

        real, calls = folder.write_atomically, itertools.count()

        def fails(path, write):
            if path.name != MANIFEST and next(calls) == 3:
                raise KeyboardInterrupt
            real(path, write)

        monkeypatch.setattr(folder, "write_atomically", fails)
        with pytest.raises(KeyboardInterrupt):
            write_report([small], out)
        monkeypatch.setattr(folder, "write_atomically", real)
        assert write_report([small], out).exists()


# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protan": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deutan": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritan": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour):
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    t = XYZ @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("sight", BLINDNESS)
def test_methods_can_be_told_apart_by_every_sight(theme, sight):
    ours = [m.name for m in all_methods()[len(SERIES) :] if m.peer is None]
    colours = {getattr(look_of(method), theme) for method in (*SERIES, *ours)}
    assert len(colours) == len(SERIES) + 3  # with normalized rows a map keeps its colour
    seen = [lab(np.array(BLINDNESS[sight]) @ linear(colour)) for colour in colours]
    # A difference (CIE76) of 2.3 is just noticeable; lines of 2 px need several times that.
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 20


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_stand_out_from_the_page(theme):
    def luminance(colour):
        return linear(colour) @ XYZ[1]

    chrome = {look.variable: getattr(look, theme) for look in CHROME}
    page = luminance(chrome["--page"])

    def contrast(colour):
        low, high = sorted((page, luminance(colour)))
        return (high + 0.05) / (low + 0.05)

    looks = [look_of(method.name) for method in all_methods() if method.peer is None]
    assert all(contrast(getattr(look, theme)) >= 3 for look in looks)  # WCAG 1.4.11
    assert all(contrast(chrome[name]) >= 4.5 for name in ("--ink", "--ink-soft", "--alarm"))


def test_names_below_a_figure_do_not_take_the_height_of_its_panels():
    look = next(iter(SERIES.values()))
    heights = []
    for count in (2, 24):
        line = [
            Series(f"{'a long name of a method ' * 4}{i}", look, [1, 2], [1, 2])
            for i in range(count)
        ]
        drawing = Drawing.of_panels("names", "", "", (9.0, 3.0), [Panel(line)], 1)
        figure = Figure(figsize=drawing.size, layout="constrained")
        drawing.paint(figure)
        figure.draw_without_rendering()
        (axes,), (names,) = figure.axes, figure.legends
        assert names.get_window_extent().y1 < axes.get_window_extent().y0
        heights.append(axes.get_position().height * figure.get_figheight())
    assert heights[1] > 0.8 * heights[0]
