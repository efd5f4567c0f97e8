"""`divebatch report`: several folders, a place to write to, and what it says on the way."""

import json
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from divebatch.cli import app
from divebatch.records import EpochRecord, RecordWriter, RunHeader


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["report", *words])


def write_run(folder: Path, method: str, accuracy: float) -> None:
    with RecordWriter(folder / "e" / method / "seed-0.jsonl") as writer:
        writer.write(RunHeader(experiment="e", method=method, seed=0, config={"epochs": 1}))
        writer.write(EpochRecord(epoch=1, batch_size=8, lr=0.1, steps=1, samples=8, val_accuracy=accuracy))


def test_several_folders_make_one_report_in_the_first(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    write_run(first, "sgd-small", 0.5)
    write_run(second, "divebatch", 0.9)
    (second / "e" / "divebatch" / "seed-1.jsonl").write_text("half a li")
    answer = call(str(first), str(second))
    assert answer.exit_code == 0, answer.output
    page = (first / "report.html").read_text(encoding="utf-8")
    assert "sgd-small" in page
    assert "divebatch" in page
    assert "seed-1.jsonl" in page
    assert not (second / "report.html").exists()
    assert "divebatch ends best, with accuracy 90.00 %" in answer.output
    assert f"skipped: '{second}/e/divebatch/seed-1.jsonl'" in answer.output
    assert f"Open {first / 'report.html'}" in answer.output.splitlines()


def test_out_is_where_the_report_goes(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "sgd-small", 0.5)
    answer = call(str(tmp_path / "runs"), "--out", str(tmp_path / "new" / "place"))
    assert answer.exit_code == 0, answer.output
    assert (tmp_path / "new" / "place" / "report.html").exists()
    assert not (tmp_path / "runs" / "report.html").exists()


def test_a_folder_that_is_not_there_is_wrong_use_and_nothing_is_written(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "sgd-small", 0.5)
    answer = call(str(tmp_path / "runs"), str(tmp_path / "other"))
    assert answer.exit_code == 2
    assert f"'{tmp_path / 'other'}' is not a folder" in answer.output
    assert not (tmp_path / "runs" / "report.html").exists()


def test_an_empty_folder_beside_a_full_one_is_no_obstacle(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "sgd-small", 0.5)
    (tmp_path / "empty").mkdir()
    answer = call(str(tmp_path / "empty"), str(tmp_path / "runs"))
    assert answer.exit_code == 0, answer.output
    assert json.loads((tmp_path / "empty" / "report.html").read_text().split('id="data">')[1].split("</script>")[0])
