"""The timetable of growth for loops with a loader of their own."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from divebatch import Auto, Measurement
from divebatch.cli import app
from divebatch.errors import ArgumentError
from divebatch.policies import SampleSchedule
from divebatch.ramp import Ramp

TOTAL = 200_000


def walk(ramp: Ramp, samples: int = 0) -> list[tuple[int, int, float]]:
    """Every step of a training: samples before it, batch size, factor."""
    found = []
    while samples < ramp.total_samples:
        size, factor = ramp.at(samples)
        found.append((samples, size, factor))
        samples += size
    return found


def warmed(part: float) -> float:
    return part / 0.1 if part < 0.1 else (1 + math.cos(math.pi * (part - 0.1) / 0.9)) / 2


def test_the_timetable_is_what_a_loop_walks_through():
    ramp = Ramp(64, 1024, warmed, TOTAL)
    steps = walk(ramp)
    assert len(steps) == ramp.steps == sum(each.steps for each in ramp.timetable())
    for each in ramp.timetable():
        assert (each.first_sample, each.batch_size, each.lr_factor) in steps
    assert [ramp.samples_before(step) for step in range(0, len(steps), 50)] == [each[0] for each in steps[::50]]
    assert ramp.samples_before(len(steps)) == TOTAL
    assert ramp.steps < 0.65 * TOTAL / 64
    assert [size for _, size, _ in steps] == sorted(size for _, size, _ in steps)


@given(st.integers(0, 3000))
def test_a_resume_goes_on_exactly(steps: int):
    whole = walk(Ramp(64, 1024, warmed, TOTAL))
    place = steps % len(whole)
    assert walk(Ramp(64, 1024, warmed, TOTAL), whole[place][0]) == whole[place:]


@pytest.mark.parametrize(("coupling", "power"), [("sqrt", 0.5), ("linear", 1.0), (0.7, 0.7)])
def test_the_rate_follows_and_never_exceeds_the_highest(coupling, power):
    steps = walk(Ramp(64, 1024, warmed, TOTAL, lr_coupling=coupling))
    for samples, size, factor in steps:
        rate = warmed(samples / TOTAL)
        assert factor <= (size / 64) ** power + 1e-12
        assert rate * factor <= 1 + 1e-9
        assert (factor == 1) == (size == 64) or rate * factor == pytest.approx(1.0, abs=1e-3)
    assert max(factor for *_, factor in steps) > 3**power


def test_nothing_grows_in_a_warm_up_nor_close_to_the_end():
    ramp = Ramp(64, 4096, warmed, TOTAL)
    for samples, size, _ in walk(ramp):
        assert size == 64 or samples > 0.1 * TOTAL
    last = ramp.timetable()[-1]
    assert (TOTAL - last.first_sample) / last.batch_size >= 39


def test_at_a_constant_rate_the_horizon_counts_and_the_rate_stays():
    ramp = Ramp(64, 4096, "constant", TOTAL)
    assert ramp.at(0) == (64, 1.0)
    assert ramp.at(TOTAL * 51 // 100) == (128, 1.0)
    assert ramp.at(TOTAL * 76 // 100) == (256, 1.0)


def test_the_unit_of_the_schedule_does_not_count_and_a_rate_that_rises_again_shrinks_nothing():
    assert (
        walk(Ramp(64, 512, lambda part: 3e-4 * warmed(part), TOTAL))[-1][1] == walk(Ramp(64, 512, warmed, TOTAL))[-1][1]
    )
    steps = walk(Ramp(64, 512, lambda part: 1 - 2 * part if part < 0.4 else 1.0, TOTAL))
    assert steps[-1][1] == max(size for _, size, _ in steps)
    assert steps[-1][2] == 1.0


def test_it_is_what_the_policy_decides():
    ramp = Ramp(64, 1024, warmed, TOTAL)
    for samples, size, _ in walk(ramp)[::7]:
        part = samples / TOTAL
        seen = Measurement(
            epoch=1,
            batch_size=64,
            dataset_size=TOTAL,
            samples=samples,
            lr_schedule_ratio=warmed(part) if part > 0.1 else 1.0,
        )
        decided = Auto(1024, total_samples=TOTAL).next(seen).batch_size
        # The room for a size shrinks towards the end, and what has grown stays; the timetable lags by 1/8192.
        assert decided in (size, ramp.at(samples + TOTAL // 8000)[0]) or (TOTAL - samples) / 40 < size


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((64, 32, "cosine", TOTAL), "max_batch_size=32 is below batch_size=64"),
        ((0, 32, "cosine", TOTAL), "batch_size"),
        ((64, 512, "cosine", 0), "total_samples"),
        ((64, 512, "tan", TOTAL), "schedule"),
        ((64, 512, lambda part: -1.0, TOTAL), "rate from 0 up"),
        ((64, 512, lambda part: 0.0, TOTAL), "no rate above 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, named):
    with pytest.raises(ArgumentError, match=named):
        Ramp(*arguments)
    with pytest.raises(ArgumentError, match="lr_coupling"):
        Ramp(64, 512, "cosine", TOTAL, lr_coupling="adascale")


WORDS = ["ramp", "--batch-size", "768", "--max-batch-size", "6144", "--samples", "10000000", "--warmup", "0.01"]


def test_the_command_prints_text_json_and_entries():
    text = CliRunner().invoke(app, WORDS)
    assert text.exit_code == 0
    assert "1152" in text.output
    table = json.loads(CliRunner().invoke(app, [*WORDS, "--form", "json"]).output)
    assert [each["batch_size"] for each in table] == [768, 1152, 1536, 2304, 3072, 4608, 6144]
    entries = CliRunner().invoke(app, [*WORDS, "--form", "entries", "--sequence-length", "2048"]).output.strip()
    parsed = SampleSchedule(entries, sequence_length=2048).entries()
    assert parsed == [(each["first_sample"], each["batch_size"]) for each in table]
    wrong = CliRunner().invoke(app, [*WORDS, "--schedule", "tan"])
    assert wrong.exit_code == 2
    assert "tan" in wrong.output
