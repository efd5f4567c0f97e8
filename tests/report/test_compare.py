import math
from collections.abc import Sequence

import numpy as np
import pytest
from typer.testing import CliRunner

from divebatch.cli import app
from divebatch.records import ReportSettings
from divebatch.report import analyse, load_runs
from divebatch.report.compare import Comparison, compare_methods, pair
from report.made_up_runs import LOSS, write_run

A = [0.90, 0.91, 0.92, 0.93, 0.94]
B = [0.88, 0.90, 0.89, 0.92, 0.91]


def write(folder, method, finals: Sequence[float], *, seconds: float = 1.0, first_seed: int = 0, **settings):
    for seed, final in enumerate(finals, first_seed):
        accuracies = [0.5, final + 0.01, final]
        rows = [
            {"val_accuracy": a, "val_loss": 1 - a, "train_seconds": seconds * (1 + 0.01 * seed) * epoch}
            for epoch, a in enumerate(accuracies, 1)
        ]
        write_run(folder, "made-up", method, seed, rows, report=ReportSettings(baselines=["b"]), **settings)


def compared(folder, first="a", second="b") -> Comparison:
    (experiment,) = load_runs(folder).experiments
    return compare_methods(analyse(experiment), first, second)


def test_a_difference_is_said_with_its_interval_and_size(tmp_path):
    write(tmp_path, "a", A)
    write(tmp_path, "b", B, seconds=2.0)
    found = compared(tmp_path)
    final, best, time = found.answers
    assert found.seeds == (0, 1, 2, 3, 4)
    # Differences of 2, 1, 3, 1, 3 points: mean 2, standard deviation 1, t = 2.7764.
    assert final.text == (
        "a is better than b by 2.00 points "
        "(a less b: 95% interval +0.76 to +3.24 points; effect size 1.60, large; 5 seeds)."
    )
    assert best.paired.mean == pytest.approx(2.0)
    assert time.measure == "time to 89.00 %"
    assert time.text == (
        "a is 2.00 times as fast as b "
        "(time of a over that of b: 0.50, 95% interval 0.50 to 0.50; the same in every seed; 5 seeds)."
    )
    assert found.cautions == ()


def test_the_other_way_round_the_better_stays_the_better(tmp_path):
    write(tmp_path, "a", A)
    write(tmp_path, "b", B, seconds=2.0)
    final, _, time = compared(tmp_path, "b", "a").answers
    assert final.text.startswith("a is better than b by 2.00 points (b less a: 95% interval -3.24 to -0.76")
    assert time.text.startswith("a is 2.00 times as fast as b (time of b over that of a: 2.00")


def test_pairs_matter_not_the_order_of_the_files(tmp_path):
    """The same seeds differ by one point each, though the methods' spreads overlap."""
    write(tmp_path, "a", [0.5, 0.6, 0.7, 0.8, 0.9])
    write(tmp_path, "b", [0.49, 0.59, 0.69, 0.79, 0.89])
    assert compared(tmp_path).answers[0].text.startswith("a is better than b by 1.00 points")


def test_no_difference_is_not_called_one(tmp_path):
    write(tmp_path, "a", A)
    write(tmp_path, "b", [0.94, 0.90, 0.93, 0.91, 0.92])
    final, _, time = compared(tmp_path).answers
    assert final.text.startswith("no difference shown between a and b: +0.00 points on average")
    assert time.text.startswith("no difference shown between a and b (time of a over")


def test_few_seeds_are_said_to_be_few_and_one_to_be_none(tmp_path):
    write(tmp_path, "a", A[:2])
    write(tmp_path, "b", B[:2])
    write(tmp_path, "c", B[:1])
    assert "2 seeds are few" in compared(tmp_path).cautions[0]
    single = compared(tmp_path, "a", "c")
    assert single.answers == ()
    assert "With a single seed nothing can be said" in single.cautions[0]


def test_only_finished_runs_of_common_seeds_count(tmp_path):
    write(tmp_path, "a", A)
    write(tmp_path, "b", B[:3], first_seed=2)
    write_run(tmp_path, "made-up", "b", 1, [{"val_accuracy": 0.1, "val_loss": 0.9}], config={"epochs": 3})
    found = compared(tmp_path)
    assert found.seeds == (2, 3, 4)
    assert "3 runs are left out" in " ".join(found.cautions)
    write(tmp_path, "c", B, first_seed=20)
    assert "have no finished run of the same seed" in compared(tmp_path, "a", "c").cautions[0]


def test_a_target_that_was_missed_has_no_average_time(tmp_path):
    write(tmp_path, "a", A)
    write(tmp_path, "b", [0.9, 0.9, 0.9, 0.9, 0.2])
    assert compared(tmp_path).answers[2].text == (
        "a reached it, with a time, in 5 of 5 seeds and b in 4 of 5: no fair average."
    )


def test_a_run_that_diverged_counts_as_nothing(tmp_path):
    write(tmp_path, "a", A[:2])
    for seed in (0, 1):
        rows = [{"val_accuracy": 0.8, "val_loss": 0.2}, {"val_accuracy": None, "val_loss": None}]
        write_run(tmp_path, "made-up", "b", seed, rows)
    assert compared(tmp_path).answers[0].paired.mean == pytest.approx(90.5)


def test_different_hardware_is_said(tmp_path):
    write(tmp_path, "a", A)
    write(tmp_path, "b", B, hardware={"device": "cuda", "name": "another"})
    assert "different hardware" in " ".join(compared(tmp_path).cautions)


def call(*words):
    return CliRunner().invoke(app, ["compare", *map(str, words)])


def test_the_command_says_it_in_words(tmp_path):
    write(tmp_path / "one", "a", A)
    write(tmp_path / "one", "b", B)
    write(tmp_path / "two", "b", B)
    answer = call(tmp_path / "one", "a", "b")
    assert answer.exit_code == 0, answer.output
    assert "made-up: a against b\n  final accuracy: a is better than b by 2.00 points" in answer.output
    other = call(tmp_path / "one", "a", "b", "--against", tmp_path / "two", "--experiment", "made-up")
    assert other.exit_code == 0, other.output
    assert f"a against b in {tmp_path / 'two'}" in other.output


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["a", "c"], 2, "no run of method 'c'; known: a, b"),
        (["a", "b", "--experiment", "poems"], 2, "experiment 'poems' has not both methods; known: made-up"),
        (["a", "b", "--against", "/no/such/folder"], 2, "'/no/such/folder' is not a folder"),
    ],
)
def test_wrong_use_says_what_is_known(tmp_path, words, code, message):
    write(tmp_path, "a", A)
    write(tmp_path, "b", B)
    answer = call(tmp_path, *words)
    assert answer.exit_code == code
    assert message in answer.output


def test_losses_are_better_lower_and_one_that_is_not_finite_has_no_average(tmp_path):
    for seed in range(3):
        write_run(tmp_path, "lm", "a", seed, [{"val_loss": 1.0 + 0.1 * seed}], metric=LOSS)
        write_run(tmp_path, "lm", "b", seed, [{"val_loss": 1.2 + 0.1 * seed}], metric=LOSS)
        rows = [{"val_loss": 1.0}, {"val_loss": None if seed else 1.0}]
        write_run(tmp_path, "lm", "c", seed, rows, metric=LOSS)
    final, best, _ = compared(tmp_path).answers
    assert final.measure == "final loss"
    assert final.text.startswith("a is better than b by 0.2 (a less b: 95% interval -0.2 to -0.2")
    assert best.paired.mean == pytest.approx(-0.2)
    diverged, *_ = compared(tmp_path, "a", "c").answers
    assert diverged.text == "a has one in 3 of 3 seeds and c in 1 of 3: no fair average."


def test_methods_that_trained_the_same_are_said_to(tmp_path):
    for method in ("a", "b"):
        for seed in range(2):
            write_run(tmp_path, "made-up", method, seed, [{"val_accuracy": 0.5, "val_loss": 0.5, "lr": 0.1}])
    assert "a and b trained exactly the same: they can only differ in time." in compared(tmp_path).cautions


# Paired differences


def test_a_worked_example():
    """Five differences with mean 2 and standard deviation sqrt(2.5)."""
    found = pair([0.0, 1.0, 2.0, 3.0, 4.0])
    assert (found.mean, found.std, found.num_pairs) == (2.0, pytest.approx(math.sqrt(2.5)), 5)
    half = 2.7764 * math.sqrt(2.5) / math.sqrt(5)
    assert found.interval == (pytest.approx(2 - half, abs=1e-4), pytest.approx(2 + half, abs=1e-4))
    assert found.excludes_zero
    assert found.effect == pytest.approx(2 / math.sqrt(2.5) * 0.8)  # Hedges: 1 - 3 / (4 * 4 - 1)
    assert found.effect_in_words == "effect size 1.01, large; 5 seeds"


def test_intervals_hold_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(0)
    truth, held = 0.3, 0
    for _ in range(2000):
        low, high = pair(rng.normal(truth, 1.0, 4).tolist()).interval
        held += low <= truth <= high
    assert 0.935 < held / 2000 < 0.965


def test_two_pairs_have_a_wide_interval():
    found = pair([1.0, 2.0])
    assert found.interval == (pytest.approx(1.5 - 6.3531, abs=1e-3), pytest.approx(1.5 + 6.3531, abs=1e-3))
    assert not found.excludes_zero


def test_two_pairs_have_no_effect_size():
    """The correction for few pairs is zero there: it would call every difference negligible."""
    found = pair([1.0, 20.0])
    assert math.isnan(found.effect)
    assert found.effect_in_words == "too few for an effect size; 2 seeds"
    assert pair([1.0, 20.0, 11.0]).effect_in_words.startswith("effect size 0.64, medium")


def test_differences_without_spread():
    assert pair([0.0, 0.0]).effect == 0
    assert not pair([0.0, 0.0]).excludes_zero
    same = pair([0.1, 0.1, 0.1])
    assert same.effect == math.inf
    assert same.excludes_zero
    assert same.effect_in_words == "the same in every seed; 3 seeds"
