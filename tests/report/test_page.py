"""The report on disk: complete, self-contained, safe, the same twice; and what the package ships and imports."""

import base64
import hashlib
import html
import json
import re
import sys
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
from made_up_runs import write_accuracies, write_cifar_like, write_run, write_synthetic

from divebatch.errors import MissingExtraError, RecordError
from divebatch.report import Report, load_runs, write_report
from divebatch.report.page import file_stems

EVIL = "</script><script>alert(1)</script>"
VOID = {"meta", "img", "br", "input"}


class Page(HTMLParser):
    """Collects tags and text, and checks that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.scripts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts.append(data)
        else:
            self.words += data


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("runs")
    write_synthetic(folder)
    return write_report(folder)


def names(report: Report) -> list[str]:
    return [path.relative_to(report.html.parent).as_posix() for path in report.paths]


def test_all_files_are_written_and_named(synthetic: Report) -> None:
    both = [f"figures/synthetic-figure{n}.{kind}" for n in (1, 2) for kind in ("svg", "png")]
    own = ("accuracy", "batchsize", "diversity", "loss", "lr", "target")
    pictures = [f"figures/synthetic-{name}.{kind}" for name in own for kind in ("svg", "png")]
    numbers = [f"figures/synthetic-{name}.csv" for name in own]
    tables = [f"tables/synthetic-{name}.csv" for name in ("summary", "results", "gains", "cost")]
    settings = "tables/synthetic-settings.json"
    assert names(synthetic) == ["report.html", "report.md", *both, *pictures, *numbers, *tables, settings]
    assert all(path.stat().st_size > 0 for path in synthetic.paths)
    assert synthetic.problems == ()


def test_markdown_has_the_tables_the_figures_and_the_settings(synthetic: Report) -> None:
    text = synthetic.html.with_name("report.md").read_text(encoding="utf-8")
    for method in ("sgd-small", "sgd-large", "divebatch", "oracle"):
        assert f"\n| {method} | 2 of 2 |" in text
    links = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert len(links) == 8
    assert set(links) <= set(names(synthetic))
    assert f"**{synthetic.sections[0].verdict}**" in text
    assert "A made-up experiment" in text
    settings = json.loads(text.split("```json")[1].split("```")[0])
    assert (settings["all runs"]["epochs"], settings["all runs"]["seeds"]) == (3, [0, 1])
    assert settings["oracle"] == {"method.policy.kind": "oracle"} | settings["oracle"]


@pytest.mark.usefixtures("quick_figures")
def test_a_terminal_gets_at_most_20_lines_an_experiment(tmp_path: Path) -> None:
    write_synthetic(tmp_path)
    for number in range(30):
        write_accuracies(tmp_path, "many", f"method-{number}", [[0.5 + number / 100], [0.5]])
    many, few = write_report(tmp_path).sections
    lines = few.text()
    assert lines[0] == "synthetic, 3 epochs, 2 seeds"
    assert lines[1].split() == ["method", "batch", "steps", "accuracy", "seconds"]
    assert [line.split()[0] for line in lines[2:6]] == ["sgd-small", "sgd-large", "divebatch", "oracle"]
    assert " ".join(line.strip() for line in lines[6:]) == few.verdict
    assert max(map(len, lines)) <= 80
    assert len(many.text()) <= 20
    assert "method-29" in "".join(many.text())
    assert any("16 more" in line for line in many.text())


@pytest.mark.usefixtures("quick_figures")
def test_the_page_is_whole_and_asks_for_nothing(tmp_path: Path) -> None:
    write_accuracies(tmp_path, "e", "sgd-small", [[0.5, 0.6]])
    write_accuracies(tmp_path, "other", "mine", [[0.5]])
    report = write_report(tmp_path)
    text = report.html.read_text(encoding="utf-8")
    page = Page(text)
    assert not [value for name, value in page.attributes if name == "src"]
    targets = [value or "" for name, value in page.attributes if name == "href"]
    anchors = {f"#{value}" for name, value in page.attributes if name == "id"}
    assert {target for target in targets if target.startswith("#")} == {"#main", "#e", "#other"} <= anchors
    assert {target for target in targets if not target.startswith("#")} == set(names(report)[2:])
    assert "url(" not in text
    assert "@import" not in text


def test_only_the_pages_own_scripts_may_run_and_nothing_be_fetched(synthetic: Report) -> None:
    text = synthetic.html.read_text(encoding="utf-8")
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[0]
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 2
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert "Permission is hereby granted" in text  # uPlot's licence goes with every copy
    assert policy.startswith("default-src 'none'; ")
    assert policy.endswith(f"script-src 'sha256-{hashes[0]}' 'sha256-{hashes[1]}'")


def test_verdict_small_table_and_three_charts_come_first_and_the_rest_is_folded(synthetic: Report) -> None:
    text = synthetic.html.read_text(encoding="utf-8")
    body, folded = text[text.index("<main") :].split('<details class="more">', 1)
    assert body.index(html.escape(synthetic.sections[0].verdict)) < body.index("<table") < body.index("<figure")
    assert [body.count("<table"), body.count("<figure")] == [1, 3]
    assert [folded.count("data-chart="), folded.count('<figure class="bars"')] == [2, 1]
    assert "128 -&gt; 4096" in body


def test_every_figure_has_its_controls_and_files(synthetic: Report) -> None:
    page = Page(synthetic.html.read_text(encoding="utf-8"))
    assert page.tags.count("figure") == 6
    assert [v for n, v in page.attributes if n == "data-chart"] == ["0", "1", "2", "3", "4"]
    assert page.attributes.count(("type", "radio")) == 4
    assert page.attributes.count(("data-log", None)) == 5
    assert [v for n, v in page.attributes if n == "data-axis"] == ["seconds", "epochs", "steps", "samples"]
    labels = [value or "" for name, value in page.attributes if name == "aria-label"]
    for kind in ("SVG", "PNG", "CSV"):
        assert f"Validation loss as {kind}" in labels
    assert "Cost as CSV" in labels


def test_names_from_records_appear_as_text(tmp_path: Path) -> None:
    config = {"epochs": 1, EVIL: {"x": EVIL}, "summary": EVIL}
    for place, method in enumerate((EVIL, 'a" onload="alert(1)', "sgd-small", EVIL)):  # the last one is left out
        write_run(tmp_path, EVIL, method, 0, [{"val_loss": 1.0}], config=config, place=f"e/{place}")
    report = write_report(tmp_path)
    page = Page(report.html.read_text(encoding="utf-8"))
    assert page.tags.count("script") == 3
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert page.words.count(EVIL) >= 5
    assert EVIL not in page.scripts[0]
    assert json.loads(page.scripts[0])["sections"][0]["methods"][1]["name"] == EVIL
    assert "<script" not in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert {path.parent for path in report.paths} == {tmp_path, tmp_path / "figures", tmp_path / "tables"}


@pytest.mark.usefixtures("quick_figures")
def test_the_page_of_50_runs_is_under_one_megabyte(tmp_path: Path) -> None:
    write_cifar_like(tmp_path, epochs=200, trials=5)
    assert len(load_runs(tmp_path).experiments[0].runs) == 50
    assert write_report(tmp_path).html.stat().st_size < 1e6


@pytest.mark.usefixtures("quick_figures")
def test_half_a_character_and_broken_files_are_no_obstacle(tmp_path: Path) -> None:
    write_run(tmp_path, "e", "sgd-small", 0, [{"val_loss": 1.0}], config={"note": "\ud800"})
    (tmp_path / "e" / "sgd-small" / "seed-7.jsonl").write_text("<b>not json\n")
    report = write_report(tmp_path / "e")  # an experiment's own folder gets its own report
    assert report.html == tmp_path / "e" / "report.html"
    assert len(report.problems) == 1
    texts = [report.html.with_name(name).read_text(encoding="utf-8") for name in ("report.html", "report.md")]
    assert all("seed-7.jsonl" in text for text in texts)
    assert '"note": "?"' in texts[1]


def test_a_second_report_is_the_same_to_the_byte(tmp_path: Path) -> None:
    write_accuracies(tmp_path, "e", "sgd-small", [[0.5, 0.6], [0.4, 0.7]])
    first = {path: path.read_bytes() for path in write_report(tmp_path).paths}
    assert {path: path.read_bytes() for path in write_report(tmp_path).paths} == first


@pytest.mark.usefixtures("quick_figures")
def test_what_cannot_be_written_is_an_error_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecordError, match="no run in"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []
    write_accuracies(tmp_path / "runs", "e", "sgd-small", [[0.5]])
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    with pytest.raises(RecordError, match=r"cannot write '.*report\.html'"):
        write_report(tmp_path / "runs", out=tmp_path / "out")
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"matplotlib .*divebatch\[report\]"):
        write_report(tmp_path / "runs")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["e"]


def test_file_stems_are_safe_and_never_meet() -> None:
    names = ["a", "A", "a/", "../../etc/passwd", "", "..", "x" * 300, "a-2"]
    stems = file_stems(names)
    assert len({stem.lower() for stem in stems}) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9-]{1,90}", stem) for stem in stems)


# What is shipped

ASSETS = files("divebatch.report").joinpath("assets")
PUBLISHED = {
    # From https://registry.npmjs.org/uplot/-/uplot-1.6.32.tgz (MIT): dist/ and LICENSE.
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_uplot_is_as_it_was_published(name: str) -> None:
    assert hashlib.sha256(ASSETS.joinpath(name).read_bytes()).hexdigest() == PUBLISHED[name]


def test_our_own_assets_end_no_element_and_set_no_html() -> None:
    script, style = (ASSETS.joinpath(name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    assert "</s" not in script + style
    assert not [word for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write") if word in script]
