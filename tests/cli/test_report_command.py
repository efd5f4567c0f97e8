"""`divebatch report`: several folders, a place to write to, and what it says on the way."""

import json
from pathlib import Path

import pytest

from cli.commands import call
from report.made_up_runs import write_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "a", "e", "sgd-small", 0, [{"val_accuracy": 0.5}])
    return tmp_path / "a"


def test_several_folders_make_one_report_in_the_first(runs: Path, tmp_path: Path) -> None:
    second, empty = tmp_path / "b", tmp_path / "empty"
    empty.mkdir()
    write_run(second, "e", "divebatch", 0, [{"val_accuracy": 0.9}])
    (second / "e" / "divebatch" / "seed-1.jsonl").write_text("half a li")
    answer = call("report", runs, second, empty)
    assert answer.exit_code == 0, answer.output
    page = (runs / "report.html").read_text(encoding="utf-8")
    assert all(words in page for words in ("sgd-small", "divebatch", "seed-1.jsonl"))
    assert json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert not (second / "report.html").exists()
    assert "divebatch ends best, with accuracy 90.00 %" in answer.output
    assert f"skipped: '{second}/e/divebatch/seed-1.jsonl'" in answer.output
    assert f"Open {runs / 'report.html'}" in answer.output.splitlines()
    nothing = call("report", empty)
    assert nothing.exit_code == 1
    assert str(empty) in nothing.output


def test_out_is_where_the_report_goes(runs: Path, tmp_path: Path) -> None:
    answer = call("report", runs, "--out", tmp_path / "new" / "place")
    assert answer.exit_code == 0, answer.output
    assert (tmp_path / "new" / "place" / "report.html").exists()
    assert not (runs / "report.html").exists()


def test_a_folder_that_is_not_there_is_wrong_use_and_nothing_is_written(runs: Path, tmp_path: Path) -> None:
    answer = call("report", runs, tmp_path / "other")
    assert answer.exit_code == 2
    assert f"'{tmp_path / 'other'}' is not a folder" in answer.output
    assert not (runs / "report.html").exists()
