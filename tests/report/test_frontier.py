"""Ratios against the frontier of fixed batches, by laws whose ratios are known."""

import csv
import json
import math
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from divebatch.cli import app
from divebatch.report.frontier import Frontier, Trial, draw, read_trials, score
from report.made_up_runs import write_run

SAMPLES = 2**17
SIZES = (16, 32, 64, 128, 256)


def law(steps: float) -> float:
    """A straight line in log2 of the steps: what lies between two sizes is exact."""
    return 4 - 0.2 * math.log2(steps)


def trial(method: str, size: int, steps: float, loss: float, *, seed: int = 0, lr: float = 0.1) -> Trial:
    return Trial(workload="w", method=method, batch_size=size, lr=lr, seed=seed, steps=round(steps), loss=loss)


def fixed(seeds=(0, 1, 2), law=law, scatter=0.0) -> list[Trial]:
    """All sizes on all seeds, and two worse rates on the first; what a seed does, it does to all sizes."""
    found = []
    for place, size in enumerate(SIZES):
        steps = SAMPLES // size
        for seed in seeds:
            chance = scatter * math.sin(7 * place + 3 * seed)
            found.append(trial("fixed", size, steps, law(steps) + 0.1 * seed + chance, seed=seed))
        found += [trial("fixed", size, steps, law(steps) + 2.0, lr=lr) for lr in (0.05, 0.2)]
    return found


def scored(*more: Trial, **of_fixed) -> Frontier:
    (found,) = score([*fixed(**of_fixed), *more])
    return found


@settings(max_examples=10)  # each draws 2000 samples of the seeds
@given(st.floats(600, 8000), st.floats(0.3, 1.5))
def test_a_known_law_gives_the_known_ratio(needed, ratio):
    own = [trial("rule", 64, needed * ratio, law(needed) + 0.1 * seed, seed=seed) for seed in range(3)]
    (found,) = scored(*own).scores
    assert found.ratio == pytest.approx(own[0].steps / needed, rel=1e-6)
    assert found.interval == pytest.approx((found.ratio, found.ratio), rel=1e-6)
    assert found.against_first == pytest.approx((law(needed) + 0.1) / (law(2048) + 0.1) - 1)


def test_the_interval_covers_what_seeds_change():
    own = [trial("rule", 64, 2048, law(2048) + 0.1 * seed + 0.02 * (seed - 1), seed=seed) for seed in range(3)]
    (found,) = scored(*own).scores
    assert found.ratio == pytest.approx(1.0)
    # 0.02 are a tenth of an octave of this law.
    assert found.interval == pytest.approx((2**-0.1, 2**0.1), rel=1e-3)


def flat(steps: float) -> float:
    """Nothing is gained beyond 2048 steps."""
    return max(law(steps), law(2048))


def test_nothing_is_scored_on_the_flat_part():
    slow, quick = trial("slow", 64, 4096, law(2048) - 1e-4), trial("quick", 64, 1024, law(2048) - 0.1)
    found = scored(slow, quick, seeds=(0,), law=flat)
    assert found.knee == 64
    scores = {each.method: each for each in found.scores}
    assert scores["slow"].ratio is None
    assert "flat" in scores["slow"].problem
    # It is better than every fixed size, so the knee's steps are the fewest that the frontier would need.
    assert scores["quick"].ratio == pytest.approx(0.5)
    assert scores["quick"].is_bound


def test_noise_makes_the_knee_wider():
    found = scored(scatter=1.0)
    assert found.noise > 0.1
    assert found.knee > scored(scatter=0.0).knee == 16


@pytest.mark.parametrize(
    ("left", "problem"),
    [
        (lambda each: each.lr != 0.2, "2 rates were tried"),
        (lambda each: (each.lr, each.seed) != (0.1, 0), "2 rates were tried"),
        (lambda each: each.batch_size == 16, "at least two fixed sizes"),
    ],
)
def test_what_is_not_tuned_is_not_scored(left, problem):
    (found,) = score([each for each in fixed() if left(each)] + [trial("rule", 64, 900, 1.0)])
    assert problem in " ".join(found.problems)
    assert found.scores == []


def test_a_best_rate_at_the_edge_is_said():
    lowest = [trial("fixed", 32, 4096, 0.5, lr=0.01)]
    (found,) = score([*fixed(), *lowest])
    assert "fixed 32" in found.problems[0]
    assert "lowest" in found.problems[0]
    # A higher rate that diverges is no edge.
    (found,) = score([*fixed(), trial("fixed", 32, 4096, 0.5, lr=0.4), trial("fixed", 32, 0, math.inf, lr=0.8)])
    assert found.problems == []


def test_a_method_that_diverges_or_is_worse_than_all_has_no_ratio():
    lost = [trial("lost", 64, 900, loss, seed=seed) for seed, loss in enumerate((1.5, math.inf, 1.5))]
    scores = {
        each.method: each for each in scored(*lost, trial("bad", 64, 900, 9.0), trial("alone", 64, 9, 1, seed=7)).scores
    }
    assert "1 of 3 seeds" in scores["lost"].problem
    assert "worse" in scores["bad"].problem
    assert "seed" in scores["alone"].problem


def write_lines(path, trials):
    lines = [{**asdict(each), "loss": each.loss if math.isfinite(each.loss) else None, "course": []} for each in trials]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))


def test_the_command_shows_a_table_and_writes_what_it_found(tmp_path):
    method = trial("rule", 64, 1024, law(2048))
    write_lines(tmp_path / "w.jsonl", [*fixed(), method, trial("lost", 64, 0, math.inf)])
    words = ["frontier", str(tmp_path), "--out", str(tmp_path / "out")]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 0, answer.output
    assert "0.500" in answer.output
    assert "no ratio for lost from 64" in answer.output
    table = list(csv.DictReader((tmp_path / "out" / "frontier.csv").read_text().splitlines()))
    assert [float(row["ratio"]) for row in table if row["method"] == "rule"] == [pytest.approx(0.5)]
    assert sum(row["method"] == "fixed" for row in table) == len(SIZES)
    assert (tmp_path / "out" / "frontier-w.svg").stat().st_size > 1000
    assert CliRunner().invoke(app, [*words, "--workload", "v"]).exit_code == 2
    assert CliRunner().invoke(app, ["frontier", str(tmp_path / "none")]).exit_code == 2
    (tmp_path / "w.jsonl").write_text('{"method": 3}\n')
    broken = CliRunner().invoke(app, words)
    assert broken.exit_code == 1
    assert "line 1" in broken.output


def test_records_of_runs_are_trials(tmp_path):
    for method, kind, size in (("small", "fixed", 8), ("grown", "auto", 16)):
        config = {"epochs": 1, "method": {"batch_size": size, "lr": 0.5, "policy": {"kind": kind}}}
        write_run(tmp_path, "made-up", method, 3, [{"val_loss": 0.25, "steps": 12}], config=config)
    trials = {each.method: each for each in read_trials(tmp_path)}
    assert trials["fixed"] == Trial(
        workload="made-up", method="fixed", batch_size=8, lr=0.5, seed=3, steps=12, loss=0.25
    )
    assert trials["grown"].batch_size == 16


def test_a_picture_holds_the_frontier_and_every_method():
    figure = draw(scored(trial("rule", 64, 1024, law(2048)), trial("other", 64, 900, 9.0)))
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["frontier", "rule", "other (above: 9)"]
