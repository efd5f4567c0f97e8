"""The first sentence and the paragraph behind it say no more than the records show."""

from pathlib import Path
from typing import Any

import pytest
from made_up_runs import GPU, LOSS, real_config, write_accuracies, write_real, write_run

from divebatch.report import analyse, load_runs, write_report
from divebatch.report.detail_tables import summary_line
from divebatch.report.words import details, headline


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


def details_of(folder: Path) -> str:
    (experiment,) = load_runs(folder).experiments
    return details(analyse(experiment))


def answer(folder: Path) -> str:
    (experiment,) = load_runs(folder).experiments
    return headline(analyse(experiment))


def timed(*accuracies: float, pace: float = 1.0) -> list[dict[str, Any]]:
    return [{"val_accuracy": a, "train_seconds": pace * e, "val_loss": 1 - a} for e, a in enumerate(accuracies, 1)]


def write(folder: Path, fixed: dict[str, Any], adaptive: dict[str, Any]) -> None:
    write_real(folder, fixed)
    write_real(folder, adaptive, policy="divebatch")


def test_the_first_is_compared_with_both_baselines(tmp_path: Path) -> None:
    fixed = {"sgd-small": [trial(8, 5.0)] * 2, "sgd-tuned": [trial(8, 2.0)] * 2}
    write(tmp_path, fixed, {"divebatch": [trial(4, 2.5)] * 2})
    text = details_of(tmp_path)
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
    text = details_of(tmp_path)
    assert "single seeds, 5.00 s to 11.0 s (2 seeds) and 10.0 s to 15.0 s (2 seeds), overlap, so" in text
    assert "5.00 s to 11.0 s (2 seeds) and 18.0 s to 27.0 s (2 seeds), do not overlap" in text


def test_a_seed_that_never_reaches_the_target_overlaps_with_everything(tmp_path: Path) -> None:
    best = [{**row, "val_accuracy": row["val_accuracy"] + 0.08} for row in trial(2, 1.0)]
    short = [{**row, "val_accuracy": min(row["val_accuracy"], 0.85)} for row in trial(2, 1.0)]
    write(tmp_path, {"sgd-small": [trial(9, 5.0)] * 2}, {"divebatch": [best, short]})
    assert "2.00 s to never (2 seeds) and 45.0 s to 45.0 s (2 seeds), overlap" in details_of(tmp_path)


def test_where_a_fixed_batch_is_first_the_fastest_adaptive_method_is_named(tmp_path: Path) -> None:
    fixed = {"sgd-small": [trial(8, 5.0)] * 2, "sgd-tuned": [trial(4, 2.0)] * 2}
    write(tmp_path, fixed, {"divebatch": [trial(8, 1.5)] * 2, "adabatch": [trial(10, 2.0)] * 2})
    text = details_of(tmp_path)
    assert text.startswith("sgd-tuned reached the common target")
    assert "The fastest method that changes its batch size, divebatch, took 1.50 times as long, 12.0 s" in text
    assert text.count("sgd-tuned") == 1


def test_a_baseline_that_is_missing_or_fell_short_is_said(tmp_path: Path) -> None:
    write(tmp_path, {"sgd-small": [trial(8, 5.0)] * 2}, {"divebatch": [trial(99, 1.0)] * 2})
    text = details_of(tmp_path)
    assert text.startswith("sgd-small reached")
    assert "sgd-tuned was not run." in text
    assert "No method that changes its batch size has reached it." in text
    write(tmp_path, {"sgd-tuned": [trial(99, 1.0)] * 2}, {})
    assert "sgd-tuned has not reached it." in details_of(tmp_path)


def test_equal_times_are_a_tie(tmp_path: Path) -> None:
    fixed = {"sgd-small": [trial(8, 5.0)] * 2, "sgd-tuned": [trial(4, 2.0)] * 2}
    write(tmp_path, fixed, {"divebatch": [trial(4, 2.0)] * 2})
    text = details_of(tmp_path)
    assert text.startswith("sgd-tuned and divebatch reached the common target of 89.00 % at the same time, after 8.00")
    assert "first" not in text
    assert "sgd-small took 5.00 times as long" in text
    assert "fastest" not in text


def test_a_single_seed_may_be_chance(tmp_path: Path) -> None:
    write(tmp_path, {"sgd-small": [trial(8, 5.0)]}, {"divebatch": [trial(4, 2.0)] * 2})
    assert "with a single seed this may be chance" in details_of(tmp_path)


@pytest.mark.parametrize(("compiling", "is_said"), [(4.0, False), (6.0, True)])
def test_compilation_that_turns_the_order_is_said(tmp_path: Path, compiling: float, is_said: bool) -> None:
    fixed = {"sgd-small": [trial(8, 5.0)] * 2, "sgd-tuned": [trial(4, 3.0, compiling=1.0)] * 2}
    write(tmp_path, fixed, {"divebatch": [trial(4, 2.0, compiling=compiling)] * 2})
    text = details_of(tmp_path)
    assert text.startswith("divebatch reached")
    assert ("With compilation counted, sgd-tuned was first: 13.0 s." in text) == is_said


def test_unfinished_runs_and_different_machines_are_cautions(tmp_path: Path) -> None:
    write(tmp_path, {"sgd-small": [trial(8, 5.0)] * 2}, {"divebatch": [trial(4, 2.0)] * 2})
    config = real_config(10, "fixed")
    rows = trial(2, 1.0)[:3]
    write_run(tmp_path, "cifar10", "sgd-tuned", 0, rows, config=config, hardware={**GPU, "name": "Another"})
    text = details_of(tmp_path)
    assert text.startswith("sgd-tuned reached")
    assert text.endswith("do not compare. Not all runs have finished, so this may change.")


@pytest.mark.parametrize(
    "methods",
    [
        {"sgd-small": [trial(8, 5.0)] * 2},
        {"sgd-small": [[{"train_seconds": 1.0}]], "sgd-tuned": [[{"train_seconds": 2.0}]]},
    ],
)
def test_with_nothing_to_compare_nothing_is_said(tmp_path: Path, methods: dict[str, Any]) -> None:
    write_real(tmp_path, methods)
    assert details_of(tmp_path) == ""


def test_without_times_epochs_are_compared(tmp_path: Path) -> None:
    write_real(tmp_path, {"sgd-small": [[{"val_accuracy": 0.9}]], "sgd-tuned": [[{"val_accuracy": 0.9}]]})
    expected = "sgd-small and sgd-tuned reached the common target of 89.00 % at the same time, after 1 epoch."
    assert details_of(tmp_path).startswith(expected)


def test_a_method_that_trained_as_another_is_no_winner(tmp_path: Path) -> None:
    def rows(pace: float) -> list[dict[str, Any]]:
        return [{**row, "lr": 0.1} for row in trial(4, pace)]

    write(tmp_path, {"sgd-small": [rows(2.0)] * 2, "sgd-large": [trial(8, 5.0)] * 2}, {"divebatch": [rows(1.9)] * 2})
    text = answer(tmp_path)
    assert text.startswith("divebatch and sgd-small, which trained the same, got to 89.00 % validation accuracy first")
    assert "sgd-large took" in text
    assert "sgd-small took" not in text + details_of(tmp_path)


def test_a_loss_is_told_as_a_loss(tmp_path: Path) -> None:
    for method, losses in (("sgd-small", [3.0, 2.5, 2.0]), ("divebatch", [2.9, 2.0, 1.9])):
        rows = [{"val_loss": loss, "train_seconds": 10.0 * n} for n, loss in enumerate(losses, 1)]
        write_run(tmp_path, "lm", method, 0, rows, metric=LOSS)
    assert answer(tmp_path) == (
        "divebatch got to a validation loss of 2.02 first, in 20.0 s of training: "
        "sgd-small took 1.50 times as long (a single seed, so it may be chance)."
    )


@pytest.mark.usefixtures("quick_figures")
def test_the_answer_stands_before_the_first_table_and_the_details_after_it(tmp_path: Path) -> None:
    write(tmp_path, {"sgd-small": [trial(8, 5.0)] * 2}, {"divebatch": [trial(4, 2.0)] * 2})
    report = write_report(tmp_path)
    (text,) = report.details
    page = report.html.read_text(encoding="utf-8")
    assert page.index(report.answers[0]) < page.index("<table") < page.index(text) < page.index("<figure")
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert text in markdown
    assert markdown.index(text) < markdown.index("### cifar10: validation accuracy")


# One sentence


def test_the_answer_compares_with_the_baselines(tmp_path: Path) -> None:
    write_real(tmp_path, {"sgd-small": [timed(0.1, 0.5, 0.9)] * 2, "sgd-tuned": [timed(0.1, 0.9, 0.9)] * 2})
    write_real(tmp_path, {"divebatch": [timed(0.9, 0.9, 0.9)] * 2, "adabatch": [timed(0.1, 0.1, 0.1)] * 2})
    assert answer(tmp_path) == (
        "divebatch got to 89.00 % validation accuracy first, in 1.00 s of training: "
        "sgd-small took 3.00 times as long (no seeds overlap); sgd-tuned took 2.00 times as long (no seeds overlap)."
    )


def test_the_answer_says_what_may_be_chance(tmp_path: Path) -> None:
    early, late = timed(0.9, 0.9, 0.9), timed(0.1, 0.1, 0.9)
    write_real(tmp_path, {"sgd-small": [early, late], "divebatch": [timed(0.9, 0.9, 0.9, pace=1.5)] * 2})
    assert "(seeds overlap, so it may be chance)" in answer(tmp_path)


def test_the_answer_goes_by_epochs_where_times_do_not_compare(tmp_path: Path) -> None:
    for method, rows in {"sgd-small": timed(0.1, 0.9), "divebatch": timed(0.9, 0.9, pace=9.0)}.items():
        config = {"epochs": 3, "data": {"kind": "cifar"}}
        write_run(tmp_path, "e", method, 0, [*rows, rows[-1]], config=config, hardware={"name": f"{method}'s"})
    text = answer(tmp_path)
    assert "divebatch got to 89.00 % validation accuracy first, in 1 epoch: sgd-small took 2.00 times as many" in text
    assert "(a single seed, so it may be chance)" in text


def test_unfinished_runs_make_the_answer_a_provisional_one(tmp_path: Path) -> None:
    write_accuracies(tmp_path, "e", "sgd-small", [[0.1, 0.9]])
    write_run(tmp_path, "e", "divebatch", 0, timed(0.9), config={"epochs": 2})
    assert answer(tmp_path).startswith("So far, divebatch got to 89.00 %")


def test_a_leading_baseline_is_compared_with_the_next(tmp_path: Path) -> None:
    write_accuracies(tmp_path, "e", "sgd-small", [[0.9, 0.9]])
    write_accuracies(tmp_path, "e", "mine", [[0.1, 0.9]])
    assert "sgd-small got to" in answer(tmp_path)
    assert "mine took 2.00 times as many" in answer(tmp_path)


def test_of_many_that_came_first_three_are_named(tmp_path: Path) -> None:
    for method in "abcde":
        write_accuracies(tmp_path, "e", method, [[0.1, 0.5]])
    expected = "a and b and c and 2 more got to 49.00 % validation accuracy first, in 2 epochs"
    assert answer(tmp_path) == f"{expected}: no other method has reached it."


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({"a": 0.5, "b": 0.25}, "b has the lowest last validation loss, 0.25; a comes next with 0.5."),
        ({"a": 0.5}, "Only a was run, so there is nothing to compare."),
        ({"a": None, "b": None}, "No answer yet: fewer than two methods have a validation loss."),
    ],
)
def test_there_is_an_answer_without_accuracies(tmp_path: Path, losses: dict[str, float | None], expected: str) -> None:
    for method, loss in losses.items():
        write_run(tmp_path, "e", method, 0, [{"val_loss": loss}])
    assert answer(tmp_path) == expected


def test_courses_that_are_the_same_until_the_target_have_no_winner(tmp_path: Path) -> None:
    """The second grows its batch after the target: that it was quicker until then is the machine's noise."""
    rows = trial(4, 2.0)
    later = [
        {**row, "lr": 0.1, "train_seconds": 1.9 * epoch, "batch_size": 128 if epoch < 6 else 512}
        for epoch, row in enumerate(rows, 1)
    ]
    write(tmp_path, {"sgd-small": [[{**row, "lr": 0.1} for row in rows]]}, {"divebatch": [later]})
    text = answer(tmp_path)
    assert text.startswith("No method was faster: ")
    assert "trained the same until they got to 89.00 % validation accuracy." in text
    assert "first" not in text


def test_the_summary_names_the_model_that_ran(tmp_path: Path) -> None:
    config = {"epochs": 1, "summary": "ResNet-18 on CIFAR-10.", "model": {"kind": "resnet20", "settings": {}}}
    write_run(tmp_path, "e", "m", 0, [{"val_accuracy": 0.5}], config=config)
    (experiment,) = load_runs(tmp_path).experiments
    assert summary_line(experiment) == "ResNet-18 on CIFAR-10. Model that ran: resnet20"
