"""Finding and reading runs: order, broken files, unfinished runs."""

import json
from pathlib import Path

import pytest
from made_up_runs import LOSS, write_run

from divebatch.errors import RecordError
from divebatch.records import ReportSettings
from divebatch.report import analyse, load_runs
from divebatch.report.drawing import CHART_SIZE, draw_panels, looks_for
from divebatch.report.figures import make_charts, make_tracks
from divebatch.report.live import Watch

HEADER = '{"kind": "run", "experiment": "e", "method": "m", "seed": 9}\n'
EPOCH = {"kind": "epoch", "epoch": 1, "batch_size": 1, "lr": 1.0, "steps": 1, "samples": 1}
BROKEN = {
    "a folder": b"",
    "empty": b"",
    "half a header": b'{"kind": "run", "exp',
    "no header": json.dumps(EPOCH).encode() + b"\n",
    "a name that a terminal would obey": b'{"kind": "run", "experiment": "\\u001b[2J", "method": "m", "seed": 0}\n',
    "a label that a terminal would obey": HEADER[:-2].encode() + b', "label": "\\u001b[2J"}\n',
    "a shadow that a terminal would obey": f"{HEADER}{json.dumps({**EPOCH, 'shadows': {chr(27): 1}})}\n".encode(),
    "not UTF-8": b"\xff\xfe\n",
    "a number without end": HEADER.encode() + json.dumps({**EPOCH, "steps": 10**400}).encode() + b"\n",
    "the same epoch twice": HEADER.encode() + 2 * (json.dumps(EPOCH).encode() + b"\n"),
}


def test_runs_come_in_the_papers_order_and_by_seed(tmp_path: Path) -> None:
    methods = ["zeta", "oracle", "alpha", "divebatch", "sgd-large", "adabatch", "sgd-tuned", "sgd-small"]
    for method in methods:
        for seed in (10, 2):
            write_run(tmp_path, "e2", method, seed, [{}])
    for method in ("zeta", "alpha"):
        write_run(tmp_path, "e1", method, 0, [{}], report=ReportSettings())
    first, second = load_runs(tmp_path).experiments
    expected = ["sgd-small", "sgd-large", "sgd-tuned", "adabatch", "divebatch", "oracle", "alpha", "zeta"]
    assert (second.name, list(second.methods)) == ("e2", expected)
    assert [run.header.seed for run in second.methods["alpha"]] == [2, 10]
    assert (first.name, list(first.methods)) == ("e1", ["alpha", "zeta"])  # without an order by name


def test_runs_that_are_judged_by_another_metric_are_named_and_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, "e", "old", 0, [{}])
    path = write_run(tmp_path, "e", "new", 0, [{}], metric=LOSS)
    path.write_text(path.read_text().replace('"started": null', '"started": "2026-01-01"'))
    runs = load_runs(tmp_path)
    (experiment,) = runs.experiments
    assert (list(experiment.methods), experiment.metric) == (["new"], LOSS)
    assert runs.problems == ("e, old, seed 0: judged by val_accuracy, newer runs by val_loss; left out",)


@pytest.mark.parametrize("inner", ["", "e", "e/m"])
def test_any_of_the_three_levels_may_be_given(tmp_path: Path, inner: str) -> None:
    write_run(tmp_path, "e", "m", 0, [{}])
    (experiment,) = load_runs(tmp_path / inner).experiments
    assert (experiment.name, list(experiment.methods)) == ("e", ["m"])


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_named_and_skipped(tmp_path: Path, what: str) -> None:
    write_run(tmp_path, "e", "m", 0, [{}])
    broken = tmp_path / "e" / "m" / "seed-9.jsonl"
    if what == "a folder":
        broken.mkdir()
    else:
        broken.write_bytes(BROKEN[what])
    runs = load_runs(tmp_path)
    assert len(runs.experiments[0].runs) == 1
    (problem,) = runs.problems
    assert str(broken) in problem


def test_a_second_run_of_the_same_seed_is_named_and_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, "e", "m", 0, [{"val_loss": 1.0}])
    write_run(tmp_path, "e", "m", 0, [{"val_loss": 2.0}], place="e/m-copy")
    runs = load_runs(tmp_path)
    (run,) = runs.experiments[0].methods["m"]
    assert run.epochs[0].val_loss == 1.0
    assert "a second run of e, m, seed 0" in runs.problems[0]


def test_a_half_written_last_line_costs_that_epoch_only(tmp_path: Path) -> None:
    path = write_run(tmp_path, "e", "m", 0, [{}, {}], config={"epochs": 3})
    with path.open("a") as file:
        file.write('{"kind": "epo')
    runs = load_runs(tmp_path)
    assert len(runs.experiments[0].runs[0].epochs) == 2
    (problem,) = runs.problems
    assert str(path) in problem
    assert "half-written" in problem


def test_several_folders_are_read_as_one_and_each_file_once(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "e", "m", 0, [{}])
    write_run(tmp_path / "b", "e", "m", 1, [{}])
    write_run(tmp_path / "b", "e", "n", 0, [{}])
    runs = load_runs(tmp_path / "a", tmp_path / "b", tmp_path / "b" / "e")
    assert {method: len(group) for method, group in runs.experiments[0].methods.items()} == {"m": 2, "n": 1}
    assert not runs.problems


@pytest.mark.parametrize(("content", "problem"), [(None, "no run in"), (b"broken\n", "no readable run in")])
def test_no_run_at_all_is_an_error_that_names_the_folder(tmp_path: Path, content: bytes | None, problem: str) -> None:
    if content:
        (tmp_path / "e" / "m").mkdir(parents=True)
        (tmp_path / "e" / "m" / "seed-0.jsonl").write_bytes(content)
    with pytest.raises(RecordError, match=f"{problem} '{tmp_path}'"):
        load_runs(tmp_path)
    with pytest.raises(RecordError, match="is not a folder"):
        load_runs(tmp_path / "nowhere")


def test_finished_means_the_configured_length_or_else_the_longest(tmp_path: Path) -> None:
    write_run(tmp_path, "e", "planned", 0, [{}] * 3, config={"epochs": 3})
    write_run(tmp_path, "e", "planned", 1, [{}] * 2, config={"epochs": 3})
    for seed, count in enumerate((5, 4, 0)):
        write_run(tmp_path, "e", "open", seed, [{}] * count, config={})
    write_run(tmp_path, "e2", "m", 0, [{}] * 3, config={"epochs": 4})
    write_run(tmp_path, "e3", "m", 0, [], config={})
    experiment, *others = load_runs(tmp_path).experiments
    finished = [run.is_finished(length=experiment.longest) for run in experiment.runs]
    assert finished == [True, False, False, True, False]  # open, then planned
    assert [each.length for each in (experiment, *others)] == [3, 4, 0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("val_loss", "1e999"),
        ("val_loss", "-1e308"),
        ("epoch", str(2**63)),
        ("total_seconds", "1e308"),
        ("samples", "1" + "0" * 400),
    ],
)
def test_numbers_that_no_arithmetic_survives_end_in_no_traceback(tmp_path, key, value):
    for seed in (0, 1):
        path = write_run(tmp_path, "e", "m", seed, [{"val_loss": 0.5, "total_seconds": 1.0}] * 3, config={"epochs": 3})
    *lines, last = path.read_text().splitlines()
    last = json.dumps({**json.loads(last), key: "it"}).replace('"it"', value)
    path.write_text("\n".join([*lines, last]) + "\n")
    (experiment,) = load_runs(tmp_path).experiments
    analysis = analyse(experiment)
    for chart in make_charts(analysis, make_tracks(analysis, looks_for(["m"]))):
        draw_panels(chart.name, "t", "e", [chart], "", CHART_SIZE)
    assert Watch(tmp_path).look()
