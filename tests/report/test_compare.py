"""Two methods by name, adaptive methods against fixed batches, and what is said of them: by hand and in words."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import GPU, LOSS, REAL, write_run
from typer.testing import CliRunner

from divebatch.cli import app
from divebatch.records import Metric, ReportSettings
from divebatch.report import Analysis, analyse, load_runs
from divebatch.report.compare import (
    BEST,
    CUSTOMARY,
    Comparison,
    Difference,
    Gain,
    best_fixed,
    compare_methods,
    find_gains,
    metric_in_words,
    note_on,
    ratio_in_words,
    verdict,
)

A = [0.90, 0.91, 0.92, 0.93, 0.94]
B = [0.88, 0.90, 0.89, 0.92, 0.91]
ACCURACY = Metric()


def analysis_of(folder: Path) -> Analysis:
    (experiment,) = load_runs(folder).experiments
    return analyse(experiment)


# Differences


def test_a_worked_example() -> None:
    """Five differences with mean 2 and standard deviation sqrt(2.5), and three ratios."""
    found = Difference((0.0, 1.0, 2.0, 3.0, 4.0))
    half = 2.7764 * math.sqrt(2.5) / math.sqrt(5)
    assert (found.value, found.std) == (2.0, pytest.approx(math.sqrt(2.5)))
    assert found.interval == (pytest.approx(2 - half, abs=1e-4), pytest.approx(2 + half, abs=1e-4))
    assert found.is_shown
    assert found.effect == pytest.approx(2 / math.sqrt(2.5) * 0.8)  # Hedges: 1 - 3 / (4 * 4 - 1)
    ratio = Difference(tuple(map(math.log, (0.5, 0.25, 0.125))), is_ratio=True)
    assert ratio.value == pytest.approx(0.25)
    assert math.prod(ratio.interval or ()) == pytest.approx(0.25**2)
    assert Difference((1000.0,) * 3, is_ratio=True).value == math.inf


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    truth, held = 0.3, 0
    for _ in range(2000):
        low, high = Difference(tuple(rng.normal(truth, 1.0, 4).tolist())).interval or (0.0, 0.0)
        held += low <= truth <= high
    assert 0.935 < held / 2000 < 0.965


@pytest.mark.parametrize(
    ("values", "is_shown"),
    [
        ((5.0,), None),  # a single seed shows nothing
        ((1.0, 2.0), False),
        ((1.0, 1.01), True),
        ((0.1, 0.1, 0.1), True),
        ((0.0, 0.0, 0.0), False),
    ],
)
def test_below_three_seeds_and_where_all_agree_there_is_no_interval(values: Any, is_shown: bool | None) -> None:
    found = Difference(values)
    assert (found.interval, found.effect, found.is_shown) == (None, None, is_shown)
    assert "(" not in metric_in_words(found, ACCURACY)
    assert "(" not in ratio_in_words(Difference(values, is_ratio=True))


@pytest.mark.parametrize(
    ("values", "metric", "text"),
    [
        ((2.0, 1.0, 3.0, 1.0, 3.0), ACCURACY, "2.00 points better (0.76 to 3.24)"),
        ((-2.0, -1.0, -3.0, -1.0, -3.0), ACCURACY, "2.00 points worse (0.76 to 3.24)"),
        ((-1.0, 0.0, 1.0), ACCURACY, "no difference shown: +0.00 points (-2.48 to +2.48)"),
        ((0.5, 0.51, 0.49), LOSS, "0.5 better (0.4752 to 0.5248)"),
    ],
)
def test_a_difference_in_words(values: Any, metric: Metric, text: str) -> None:
    assert metric_in_words(Difference(values), metric) == text


# Two methods by name


def write(
    folder: Path, method: str, finals: Sequence[float], *, seconds: float = 1.0, first_seed: int = 0, **more: Any
) -> None:
    for seed, final in enumerate(finals, first_seed):
        accuracies = [0.5, final + 0.01, final]
        rows = [
            {"val_accuracy": a, "val_loss": 1 - a, "train_seconds": seconds * (1 + 0.01 * seed) * epoch}
            for epoch, a in enumerate(accuracies, 1)
        ]
        write_run(folder, "made-up", method, seed, rows, report=ReportSettings(baselines=["b"]), **more)


def compared(folder: Path, first: str = "a", second: str = "b") -> Comparison:
    return compare_methods(analysis_of(folder), first, second)


def test_two_methods_compare_seed_by_seed(tmp_path: Path) -> None:
    write(tmp_path, "a", A)
    write(tmp_path, "b", B, seconds=2.0)
    found, other = compared(tmp_path), compared(tmp_path, "b", "a")
    # Differences of 2, 1, 3, 1, 3 points: mean 2, standard deviation 1, t = 2.7764.
    assert list(found.answers) == ["final accuracy", "best accuracy", "seconds to 89.00 %"]
    assert found.answers["final accuracy"] == "2.00 points better (0.76 to 3.24); effect size 1.60, large"
    assert found.answers["seconds to 89.00 %"] == "0.50 times"
    assert (found.seeds, found.cautions) == ((0, 1, 2, 3, 4), ())
    assert other.answers["final accuracy"].startswith("2.00 points worse")
    assert other.answers["seconds to 89.00 %"] == "2.00 times"


def test_few_seeds_are_said_to_be_few_and_one_to_be_none(tmp_path: Path) -> None:
    for method, finals in (("a", A[:2]), ("b", B[:2]), ("c", B[:1])):
        write(tmp_path, method, finals)
    assert "2 seeds show little" in compared(tmp_path).cautions[0]
    single = compared(tmp_path, "a", "c")
    assert (single.answers, single.cautions[0][:18]) == ({}, "With a single seed")


def test_only_finished_runs_of_common_seeds_count(tmp_path: Path) -> None:
    write(tmp_path, "a", A)
    write(tmp_path, "b", B[:3], first_seed=2)
    write_run(tmp_path, "made-up", "b", 1, [{"val_accuracy": 0.1, "val_loss": 0.9}], config={"epochs": 3})
    found = compared(tmp_path)
    assert found.seeds == (2, 3, 4)
    assert "3 runs are left out" in " ".join(found.cautions)
    write(tmp_path, "c", B, first_seed=20)
    assert "no finished run of the same seed" in compared(tmp_path, "a", "c").cautions[0]


def test_where_a_run_fell_short_there_is_no_fair_average(tmp_path: Path) -> None:
    write(tmp_path, "a", A)
    write(tmp_path, "b", [0.9, 0.9, 0.9, 0.9, 0.2])
    assert "no fair average: 5 and 4 of 5 seeds" in list(compared(tmp_path).answers.values())[2]
    for seed in (0, 1):
        write_run(tmp_path, "made-up", "c", seed, [{"val_accuracy": 0.8, "val_loss": 0.2}, {"val_accuracy": None}])
    # An accuracy of 0 if a run diverged.
    assert compared(tmp_path, "a", "c").answers["final accuracy"] == "90.50 points better"


def test_losses_are_better_lower_and_one_that_is_not_finite_has_no_average(tmp_path: Path) -> None:
    for seed in range(3):
        for method, rows in {
            "a": [{"val_loss": 1.0 + 0.1 * seed}],
            "b": [{"val_loss": 1.2 + 0.1 * seed}],
            "c": [{"val_loss": 1.0}, {"val_loss": None if seed else 1.0}],
        }.items():
            write_run(tmp_path, "lm", method, seed, rows, metric=LOSS)
    assert compared(tmp_path).answers["final loss"] == "0.2 better"
    assert "no fair average: 3 and 1 of 3 seeds" in compared(tmp_path, "a", "c").answers["final loss"]


def test_times_that_do_not_compare_and_methods_that_are_equal_are_said(tmp_path: Path) -> None:
    write(tmp_path, "a", A)
    write(tmp_path, "b", B, hardware={"device": "cuda", "name": "another"})
    assert "different hardware" in " ".join(compared(tmp_path).cautions)
    for seed in range(2):
        for method in ("c", "d"):
            write_run(tmp_path / "same", "e", method, seed, [{"val_accuracy": 0.5, "lr": 0.1}])
    assert "trained exactly the same" in " ".join(compared(tmp_path / "same", "c", "d").cautions)


def call(*words: object):
    return CliRunner().invoke(app, ["compare", *map(str, words)])


def test_the_command_prints_a_line_a_measure(tmp_path: Path) -> None:
    write(tmp_path / "one", "a", A)
    write(tmp_path / "one", "b", B)
    write(tmp_path / "two", "b", B)
    answer = call(tmp_path / "one", "a", "b")
    assert answer.exit_code == 0, answer.output
    assert answer.output.splitlines()[:2] == [
        "made-up: a against b, 5 seeds",
        "  final accuracy      2.00 points better (0.76 to 3.24); effect size 1.60, large",
    ]
    other = call(tmp_path / "one", "a", "b", "--against", tmp_path / "two", "--experiment", "made-up")
    assert other.exit_code == 0, other.output
    assert f"a against b in {tmp_path / 'two'}" in other.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "c"], "no run of method 'c'; known: a, b"),
        (["a", "b", "--experiment", "poems"], "known: made-up"),
        (["a", "b", "--against", "/no/such/folder"], "'/no/such/folder' is not a folder"),
    ],
)
def test_wrong_use_says_what_is_known(tmp_path: Path, words: list[str], message: str) -> None:
    write(tmp_path, "a", A)
    write(tmp_path, "b", B)
    answer = call(tmp_path, *words)
    assert (answer.exit_code, message in answer.output) == (2, True)


# Adaptive methods against fixed batches

SETTINGS = ReportSettings(customary="small")


def write_sized(
    folder: Path,
    method: str,
    finals: Sequence[float | None],
    *,
    policy: str | None = "fixed",
    sizes: Sequence[int] = (100, 100),
    speed: float = 1.0,
    settings: ReportSettings = SETTINGS,
    **more: Any,
) -> None:
    """A run a seed over two epochs of 1000 samples; a step takes 1 ms and 10 us a sample, over `speed`."""
    config = {"epochs": 2, "method": {"batch_size": sizes[0], **({"policy": {"kind": policy}} if policy else {})}}
    for seed, final in enumerate(finals):
        epochs, steps = [], 0
        for epoch, (size, value) in enumerate(zip(sizes, (0.5, final), strict=True), 1):
            steps += math.ceil(1000 / size)
            numbers = {"batch_size": size, "steps": steps, "samples": 1000 * epoch}
            numbers |= {"train_seconds": (1e-3 * steps + 1e-2 * epoch) / speed}
            lr = 0.1 + seed + 1e-9 * len(method) / speed
            epochs.append({**numbers, "val_accuracy": value, "val_loss": value, "lr": lr})
        write_run(folder, "e", method, seed, epochs, config=config, **{"hardware": GPU, "report": settings, **more})


def gains_of(folder: Path) -> dict[tuple[str, str], Gain]:
    return {(gain.result.method, gain.baseline.method): gain for gain in find_gains(analysis_of(folder))}


def verdict_of(folder: Path) -> str:
    analysis = analysis_of(folder)
    return verdict(analysis, find_gains(analysis))


def notes_of(folder: Path) -> dict[str, str]:
    analysis = analysis_of(folder)
    gains, best = find_gains(analysis), best_fixed(analysis)
    return {result.method: note_on(result, gains, best) for result in analysis.methods}


def best_of(folder: Path) -> str | None:
    best = best_fixed(analysis_of(folder))
    return best.method if best else None


def test_gains_by_hand_and_in_words_with_accuracy_before_speed(tmp_path: Path) -> None:
    write_sized(tmp_path, "small", B, speed=0.5)
    write_sized(tmp_path, "auto", A, policy="auto", sizes=(100, 500))
    # 2 points; 10 and 2 steps against 10 and 10; 12 ms and 20 ms against twice 20 ms and 20 ms.
    assert verdict_of(tmp_path) == (
        "auto against small: accuracy 2.00 points better (0.76 to 3.24), 0.60 times the steps, 0.40 times the seconds."
    )
    assert notes_of(tmp_path) == {"auto": "better", "small": "best fixed batch"}
    write_sized(tmp_path, "tuned", [0.9] * 5, sizes=(200, 200))
    gain = gains_of(tmp_path)["auto", "small"]
    assert (gain.num_seeds, gain.roles) == (5, (CUSTOMARY,))
    for change, value in ((gain.metric, 2.0), (gain.steps, 12 / 20), (gain.seconds, 32 / 80)):
        assert change is not None
        assert change.value == pytest.approx(value)
    assert gains_of(tmp_path)["auto", "tuned"].roles == (BEST,)


def test_the_best_fixed_batch_is_the_quickest_of_those_within_noise(tmp_path: Path) -> None:
    write_sized(tmp_path, "small", [0.90, 0.92, 0.94])
    write_sized(tmp_path, "quick", [0.93, 0.89, 0.93], sizes=(200, 200))  # 0.33 points less, +- 2.0
    write_sized(tmp_path, "quicker", [0.80, 0.82, 0.84], sizes=(500, 500))
    write_sized(tmp_path, "single", [0.91], sizes=(500, 500))
    assert best_of(tmp_path) == "quick"
    write_sized(tmp_path, "quick", [0.89, 0.91, 0.94], sizes=(200, 200))  # 0.67 points less, +- 0.33
    assert best_of(tmp_path) == "small"


def test_a_fixed_batch_that_diverged_once_is_not_the_best(tmp_path: Path) -> None:
    write_sized(tmp_path, "small", [0.5, 0.5])
    write_sized(tmp_path, "large", [0.95, None])
    assert best_of(tmp_path) == "small"
    assert notes_of(tmp_path)["large"] == "1 of 2 seeds diverged"


def test_methods_that_have_nothing_to_choose_come_first(tmp_path: Path) -> None:
    for method, policy in (("a", "divebatch"), ("b", "fixed"), ("c", "auto"), ("d", "adabatch")):
        write_sized(tmp_path, method, B, policy=policy)
    assert [gain.result.method for gain in find_gains(analysis_of(tmp_path))] == ["c", "a", "d"]


def test_without_a_named_policy_a_method_that_kept_its_size_is_fixed(tmp_path: Path) -> None:
    write_sized(tmp_path, "kept", B, policy=None)
    write_sized(tmp_path, "grown", A, policy=None, sizes=(100, 500))
    assert set(gains_of(tmp_path)) == {("grown", "kept")}


# The verdict, and a few words on each method


def test_what_shows_no_difference_is_said_together_with_its_intervals(tmp_path: Path) -> None:
    write_sized(tmp_path, "small", A)
    write_sized(tmp_path, "auto", [0.94, 0.90, 0.93, 0.91, 0.92], policy="auto", speed=1 - 1e-9)
    text = verdict_of(tmp_path)
    assert "no difference shown in accuracy (-3.1" in text
    assert " points)" in text
    assert text.endswith("1.00 times the steps, 1.00 times the seconds.")
    assert notes_of(tmp_path)["auto"] == "slower"


def test_one_or_two_seeds_have_a_verdict_without_intervals(tmp_path: Path) -> None:
    write_sized(tmp_path, "small", [0.9, 0.8])
    write_sized(tmp_path, "auto", [0.8, 0.9], policy="auto", sizes=(100, 500))
    assert verdict_of(tmp_path) == (
        "auto against small: no difference shown in accuracy, 0.60 times the steps, 0.80 times the seconds."
    )
    assert notes_of(tmp_path)["auto"] == "fewer steps"
    for method in ("small", "auto"):
        (tmp_path / "e" / method / "seed-1.jsonl").unlink()
    text = verdict_of(tmp_path)
    assert text.startswith("auto against small: accuracy 10.00 points worse, 0.60 times the steps")
    assert "one seed" in text
    assert notes_of(tmp_path)["auto"] == ""


def test_a_run_that_diverged_has_no_difference_in_loss(tmp_path: Path) -> None:
    write_sized(tmp_path, "small", [2.0, 2.0], metric=LOSS)
    write_sized(tmp_path, "auto", [1.0, None], policy="auto", metric=LOSS)
    assert "a run diverged" in verdict_of(tmp_path)


def test_unfinished_runs_make_the_verdict_a_provisional_one_without_seconds_of_other_machines(tmp_path: Path) -> None:
    write_sized(tmp_path, "small", B)
    write_sized(tmp_path, "auto", A, policy="auto", hardware={**GPU, "name": "Another GPU"})
    assert "seconds" not in verdict_of(tmp_path)
    write_run(tmp_path, "e", "auto", 9, [{"val_accuracy": 0.5}], config={"epochs": 2}, hardware=GPU)
    assert verdict_of(tmp_path).startswith("So far: auto against small")
    assert notes_of(tmp_path)["auto"].endswith("5 of 6 seeds finished")


def test_a_method_at_chance_has_learned_nothing(tmp_path: Path) -> None:
    settings = ReportSettings(chance=0.5)
    write_sized(tmp_path, "small", [0.9, 0.9, 0.9], settings=settings)
    write_sized(tmp_path, "large", [0.5, 0.49, 0.51], sizes=(500, 500), settings=settings)
    write_sized(tmp_path, "auto", [0.9, 0.5, 0.9], policy="auto", settings=settings)
    notes = notes_of(tmp_path)
    assert (notes["large"], notes["auto"]) == ("learned nothing", "learned nothing in 1 of 3 seeds")


@pytest.mark.parametrize(
    ("methods", "text"),
    [
        ({"m": 0.25}, "m ends best, with loss 0.25; there is nothing to compare with."),
        ({"m": 0.25, "n": 0.5}, "m ends best, with loss 0.25."),
        ({"m": 0.25, "n": 0.25}, "m and n end best, with loss 0.25."),
        (dict.fromkeys("abcde", 0.25), "a and b and c and 2 more end best, with loss 0.25."),
        ({"m": None}, "no run has a validation loss."),
    ],
)
def test_without_a_fixed_and_an_adaptive_method_the_best_one_is_named(tmp_path: Path, methods: Any, text: str) -> None:
    for method, loss in methods.items():
        write_run(tmp_path, "e", method, 0, [{"val_loss": loss}], report=REAL)
    assert verdict_of(tmp_path) == text
