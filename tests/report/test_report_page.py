"""The report on disk: complete, self-contained, safe, the same twice."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_up_runs import write_accuracies, write_paper_like, write_run

from divebatch.errors import MissingExtraError, RecordError
from divebatch.report import write_report
from divebatch.report.sections import file_stems

EVIL = "<script>alert(1)</script>"
VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Collects tags and text, and checks that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
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
        self.words += data


def test_all_files_are_written_and_named(tmp_path: Path) -> None:
    write_paper_like(tmp_path, convex=True, epochs=3, trials=2)
    report = write_report(tmp_path)
    figures = [f"figures/synthetic-convex-figure{n}.{kind}" for n in (1, 2) for kind in ("svg", "png")]
    assert [path.relative_to(tmp_path).as_posix() for path in report.paths] == ["report.html", "report.md", *figures]
    assert all(path.stat().st_size > 0 for path in report.paths)
    assert report.html == tmp_path / "report.html"
    assert [table.title for table in report.tables] == ["synthetic-convex"]
    assert report.problems == ()


def test_markdown_has_the_table_the_figures_and_the_settings(tmp_path: Path) -> None:
    write_paper_like(tmp_path, convex=True, epochs=3, trials=2)
    report = write_report(tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    for method in ("sgd-small", "sgd-large", "divebatch", "oracle"):
        assert f"\n| {method} | 2 of 2 |" in text
    links = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert len(links) == 2
    assert {tmp_path / link for link in links} <= set(report.paths)
    assert "A made-up experiment" in text
    assert "| epochs | 3 |" in text
    assert "| method.policy.kind | sgd-small | sgd-large | divebatch | oracle |" in text
    assert "| versions.torch | 2.13.0 |" in text
    assert "| hardware.cpus | 2 |" in text
    assert "| git commit | 0123abcd |" in text
    assert "| seeds | 0, 1 |" in text


def test_the_page_is_whole_and_asks_for_nothing(tmp_path: Path) -> None:
    write_paper_like(tmp_path, convex=True, epochs=3, trials=2)
    write_accuracies(tmp_path, "other", "mine", [[0.5]])
    text = write_report(tmp_path).html.read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags.count("figure") == 2
    assert "prefers-color-scheme: dark" in text
    sources = [value or "" for name, value in page.attributes if name in ("src", "href")]
    assert all(source.startswith(("data:image/svg+xml;base64,", "#")) for source in sources)
    anchors = {f"#{value}" for name, value in page.attributes if name == "id"}
    assert {source for source in sources if source.startswith("#")} == anchors
    assert "128 → 4096" in page.words


def test_names_from_records_appear_as_text(tmp_path: Path) -> None:
    config = {"epochs": 1, EVIL: {"x": EVIL}, "summary": EVIL}
    write_run(tmp_path, EVIL, EVIL, 0, [{"val_loss": 1.0}], config=config, place="e/m")
    write_run(tmp_path, EVIL, 'a" onload="alert(1)', 0, [{"val_loss": 1.0}], place="e/n")
    write_run(tmp_path, EVIL, "sgd-small", 0, [{"val_loss": 1.0}], place="e/s")
    write_run(tmp_path, EVIL, EVIL, 0, [{}], place="e/twice")
    report = write_report(tmp_path)
    text = report.html.read_text(encoding="utf-8")
    page = Page(text)
    assert "script" not in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert page.words.count(EVIL) >= 5
    assert "<script" not in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert all(path.parent in (tmp_path, tmp_path / "figures") for path in report.paths)


def test_half_a_character_in_a_setting_is_no_obstacle(tmp_path: Path) -> None:
    write_run(tmp_path, "e", "sgd-small", 0, [{"val_loss": 1.0}], config={"note": "\ud800"})
    assert "| note | ? |" in write_report(tmp_path).html.with_name("report.md").read_text(encoding="utf-8")


def test_broken_files_are_named_on_the_page(tmp_path: Path) -> None:
    write_accuracies(tmp_path, "e", "sgd-small", [[0.5]])
    (tmp_path / "e" / "sgd-small" / "seed-7.jsonl").write_text("<b>not json\n")
    report = write_report(tmp_path)
    assert len(report.problems) == 1
    for file in ("report.html", "report.md"):
        assert "seed-7.jsonl" in (tmp_path / file).read_text(encoding="utf-8")


def test_a_second_report_is_the_same_to_the_byte(tmp_path: Path) -> None:
    write_paper_like(tmp_path, convex=False, epochs=3, trials=2)
    first = {path: path.read_bytes() for path in write_report(tmp_path).paths}
    assert {path: path.read_bytes() for path in write_report(tmp_path).paths} == first


def test_a_single_experiments_folder_gets_its_own_report(tmp_path: Path) -> None:
    write_accuracies(tmp_path, "e", "sgd-small", [[0.5]])
    assert write_report(tmp_path / "e").html == tmp_path / "e" / "report.html"


def test_settings_that_vary_are_listed_and_counted(tmp_path: Path) -> None:
    for seed in range(6):
        write_run(tmp_path, "e", "m", seed, [{"val_loss": 1.0}], config={"epochs": 1, "lr": seed / 10})
    write_report(tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| lr | 0.0, 0.1, 0.2, 0.3, and 2 more |" in text


def test_an_empty_folder_is_an_error_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no run in"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    write_accuracies(tmp_path, "e", "sgd-small", [[0.5]])
    (tmp_path / "report.html").mkdir()
    with pytest.raises(RecordError, match=r"cannot write '.*report\.html'"):
        write_report(tmp_path)


def test_without_matplotlib_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_accuracies(tmp_path, "e", "sgd-small", [[0.5]])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError):
        write_report(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


def test_file_stems_are_safe_and_never_meet() -> None:
    names = ["a", "A", "a/", "../../etc/passwd", "", "..", "x" * 300, "a-2"]
    stems = file_stems(names)
    assert len({stem.lower() for stem in stems}) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9-]{1,90}", stem) for stem in stems)
