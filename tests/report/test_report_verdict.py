"""The paragraph above the tables says no more than the records show."""

from pathlib import Path
from typing import Any

import pytest
from made_up_runs import GPU, real_config, write_real, write_run

from divebatch.report import load_runs, write_report
from divebatch.report.verdict import verdict


def trial(reached: int, seconds: float, *, epochs: int = 10, compiling: float | None = None) -> list[dict[str, Any]]:
    """Accuracy 0.5 before epoch `reached`, 0.9 from there on; an epoch takes `seconds`."""
    return [
        {
            "val_accuracy": 0.9 if epoch >= reached else 0.5,
            "train_seconds": seconds * epoch,
            "compile_seconds": compiling,
        }
        for epoch in range(1, epochs + 1)
    ]


def verdict_of(folder: Path) -> str:
    (experiment,) = load_runs(folder).experiments
    return verdict(experiment)


def write(folder: Path, fixed: dict[str, Any], adaptive: dict[str, Any]) -> None:
    write_real(folder, fixed)
    write_real(folder, adaptive, policy="divebatch")


def test_the_first_is_compared_with_both_baselines(tmp_path: Path) -> None:
    fixed = {"sgd-small": [trial(8, 5.0)] * 2, "sgd-tuned": [trial(8, 2.0)] * 2}
    write(tmp_path, fixed, {"divebatch": [trial(4, 2.5)] * 2})
    text = verdict_of(tmp_path)
    assert text.startswith("divebatch reached the common target of 89.00 % first, after 10.0 s of training (epoch 4).")
    assert "sgd-small took 4.00 times as long, 40.0 s of training (epoch 8)" in text
    assert "sgd-tuned took 1.60 times as long, 16.0 s of training (epoch 8)" in text
    assert text.count("do not overlap") == 2
    assert "chance" not in text
    assert "finished" not in text


def test_seeds_whose_times_overlap_are_called_so(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"sgd-small": [trial(5, 2.0), trial(5, 3.0)], "sgd-tuned": [trial(9, 2.0), trial(9, 3.0)]},
        {"divebatch": [trial(5, 1.0), trial(5, 2.2)]},
    )
    text = verdict_of(tmp_path)
    assert "single seeds, 5.00 s to 11.0 s (2 seeds) and 10.0 s to 15.0 s (2 seeds), overlap, so" in text
    assert "5.00 s to 11.0 s (2 seeds) and 18.0 s to 27.0 s (2 seeds), do not overlap" in text


def test_a_seed_that_never_reaches_the_target_overlaps_with_everything(tmp_path: Path) -> None:
    best = [{**row, "val_accuracy": row["val_accuracy"] + 0.08} for row in trial(2, 1.0)]
    short = [{**row, "val_accuracy": min(row["val_accuracy"], 0.85)} for row in trial(2, 1.0)]
    write(tmp_path, {"sgd-small": [trial(9, 5.0)] * 2}, {"divebatch": [best, short]})
    assert "2.00 s to never (2 seeds) and 45.0 s to 45.0 s (2 seeds), overlap" in verdict_of(tmp_path)


def test_where_a_fixed_batch_is_first_the_fastest_adaptive_method_is_named(tmp_path: Path) -> None:
    fixed = {"sgd-small": [trial(8, 5.0)] * 2, "sgd-tuned": [trial(4, 2.0)] * 2}
    write(tmp_path, fixed, {"divebatch": [trial(8, 1.5)] * 2, "adabatch": [trial(10, 2.0)] * 2})
    text = verdict_of(tmp_path)
    assert text.startswith("sgd-tuned reached the common target")
    assert "The fastest method that changes its batch size, divebatch, took 1.50 times as long, 12.0 s" in text
    assert text.count("sgd-tuned") == 1


def test_a_baseline_that_is_missing_or_fell_short_is_said(tmp_path: Path) -> None:
    write(tmp_path, {"sgd-small": [trial(8, 5.0)] * 2}, {"divebatch": [trial(99, 1.0)] * 2})
    text = verdict_of(tmp_path)
    assert text.startswith("sgd-small reached")
    assert "sgd-tuned was not run." in text
    assert "No method that changes its batch size has reached it." in text
    write(tmp_path, {"sgd-tuned": [trial(99, 1.0)] * 2}, {})
    assert "sgd-tuned has not reached it." in verdict_of(tmp_path)


def test_equal_times_are_a_tie(tmp_path: Path) -> None:
    fixed = {"sgd-small": [trial(8, 5.0)] * 2, "sgd-tuned": [trial(4, 2.0)] * 2}
    write(tmp_path, fixed, {"divebatch": [trial(4, 2.0)] * 2})
    text = verdict_of(tmp_path)
    assert text.startswith("sgd-tuned and divebatch reached the common target of 89.00 % at the same time, after 8.00")
    assert "first" not in text
    assert "sgd-small took 5.00 times as long" in text
    assert "fastest" not in text


def test_a_single_seed_may_be_chance(tmp_path: Path) -> None:
    write(tmp_path, {"sgd-small": [trial(8, 5.0)]}, {"divebatch": [trial(4, 2.0)] * 2})
    assert "with a single seed this may be chance" in verdict_of(tmp_path)


@pytest.mark.parametrize(("compiling", "is_said"), [(4.0, False), (6.0, True)])
def test_compilation_that_turns_the_order_is_said(tmp_path: Path, compiling: float, is_said: bool) -> None:
    fixed = {"sgd-small": [trial(8, 5.0)] * 2, "sgd-tuned": [trial(4, 3.0, compiling=1.0)] * 2}
    write(tmp_path, fixed, {"divebatch": [trial(4, 2.0, compiling=compiling)] * 2})
    text = verdict_of(tmp_path)
    assert text.startswith("divebatch reached")
    assert ("With compilation counted, sgd-tuned was first: 13.0 s." in text) == is_said


def test_unfinished_runs_and_different_machines_are_cautions(tmp_path: Path) -> None:
    write(tmp_path, {"sgd-small": [trial(8, 5.0)] * 2}, {"divebatch": [trial(4, 2.0)] * 2})
    config = real_config(10, "fixed")
    rows = trial(2, 1.0)[:3]
    write_run(tmp_path, "cifar10", "sgd-tuned", 0, rows, config=config, hardware={**GPU, "name": "Another"})
    text = verdict_of(tmp_path)
    assert text.startswith("sgd-tuned reached")
    assert text.endswith("do not compare. Not all runs have finished, so this may change.")


@pytest.mark.parametrize(
    "methods",
    [
        {"sgd-small": [trial(8, 5.0)] * 2},
        {"sgd-small": [[{"val_accuracy": 0.9}]], "sgd-tuned": [[{"val_accuracy": 0.9}]]},
        {"sgd-small": [[{"train_seconds": 1.0}]], "sgd-tuned": [[{"train_seconds": 2.0}]]},
    ],
)
def test_with_nothing_to_compare_nothing_is_said(tmp_path: Path, methods: dict[str, Any]) -> None:
    write_real(tmp_path, methods)
    assert verdict_of(tmp_path) == ""


@pytest.mark.usefixtures("quick_figures")
def test_the_answer_stands_before_the_first_table_and_the_verdict_after_it(tmp_path: Path) -> None:
    write(tmp_path, {"sgd-small": [trial(8, 5.0)] * 2}, {"divebatch": [trial(4, 2.0)] * 2})
    report = write_report(tmp_path)
    (text,) = report.verdicts
    page = report.html.read_text(encoding="utf-8")
    assert page.index(report.answers[0]) < page.index("<table") < page.index(text) < page.index("<figure")
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert text in markdown
    assert markdown.index(text) < markdown.index("### cifar10: validation accuracy")
