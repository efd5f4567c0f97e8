"""The model of more devices: by hand, against a loop over single steps, and where nothing can be told."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_runs import GPU, write_run

from divebatch.errors import RecordError
from divebatch.records import Change, EpochRecord, RunHeader
from divebatch.report import RecordedRun, analyse, load_runs
from divebatch.report.courses import course_of
from divebatch.report.devices import (
    DeviceInputs,
    DeviceModel,
    Untold,
    assumptions,
    device_model,
    devices_table,
    read_step_times,
)
from divebatch.report.network import all_reduce, overlapped

FIXED, EACH = 1e-3, 1e-5
"""Of the made-up device: 1 ms a step and 10 us a sample."""
NUM_PARAMETERS = 80_000_000
"""320 MB of gradients."""


def rows(sizes: Sequence[int], *, samples: int = 5120, more: float = 0.0, measured: bool = False) -> list[dict]:
    """Epochs at these sizes, each over `samples`, on the made-up device; `more` seconds in every step."""
    found: list[dict[str, Any]] = []
    steps, seconds = 0, 0.0
    for epoch, size in enumerate(sizes, 1):
        count = math.ceil(samples / size)
        steps, seconds = steps + count, seconds + count * (FIXED + more) + samples * EACH
        row = {"batch_size": size, "steps": steps, "samples": samples * epoch, "train_seconds": seconds}
        found.append({**row, "measured": measured, "val_accuracy": 0.5, "val_loss": 1.0})
    return found


def write(folder: Path, method: str, epochs: list[dict], *, policy: str = "fixed", seed: int = 0, **more: Any) -> None:
    config = {"epochs": len(epochs), "method": {"batch_size": epochs[0]["batch_size"], "policy": {"kind": policy}}}
    more = {"hardware": GPU, "num_parameters": NUM_PARAMETERS, **more}
    write_run(folder, "e", method, seed, epochs, config=config, **more)


def write_two(folder: Path) -> None:
    write(folder, "small", rows([128] * 3))
    write(folder, "large", rows([512] * 3))


def runs_of(folder: Path) -> dict[str, RecordedRun]:
    (experiment,) = load_runs(folder).experiments
    return {method: runs[0] for method, runs in experiment.methods.items()}


def model_of(folder: Path, **inputs: Any) -> DeviceModel:
    found = device_model(list(runs_of(folder).values()), inputs=DeviceInputs(**inputs))
    assert isinstance(found, DeviceModel)
    return found


def why_not(folder: Path, **inputs: Any) -> str:
    found = device_model(list(runs_of(folder).values()), inputs=DeviceInputs(**inputs))
    assert isinstance(found, Untold)
    return found.note


# The network


def test_an_all_reduce_by_hand() -> None:
    assert all_reduce(1, 1e9) == 0.0
    # Two devices, 360 MB at 360 GB/s: a ring sends each half twice, two hops of 3 us.
    assert all_reduce(2, 360e6) == pytest.approx(6e-6 + 1e-3)
    # Eight devices, 8 bytes: the three levels of a tree, up and down.
    assert all_reduce(8, 8.0) == pytest.approx(6 * 3e-6, rel=1e-3)
    # 64: within machines 7/8 of 320 MB twice; between eight of them a ring over 40 MB at 40 GB/s.
    inside, across = 2 * (7 * 3e-6 + 0.875 * 320e6 / 360e9), 14 * 8e-6 + 2 * 0.875 * 1e-3
    assert all_reduce(64, 320e6) == pytest.approx(inside + across)
    assert all_reduce(57, 320e6) == all_reduce(64, 320e6)  # eight machines, too


def test_the_network_adds_what_the_backward_pass_does_not_hide() -> None:
    assert overlapped(3.0, 2.0) == 3.0
    assert overlapped(3.0, 2.5) == pytest.approx(3.5)


# What a run did


def run_of(*epochs: EpochRecord, first: int | None = 128) -> RecordedRun:
    config = {"method": {"batch_size": first}} if first is not None else {}
    return RecordedRun(RunHeader(experiment="e", method="m", seed=0, config=config), epochs)


def record(epoch: int, size: int, steps: int, samples: int, **more: Any) -> EpochRecord:
    return EpochRecord(epoch=epoch, batch_size=size, lr=0.1, steps=steps, samples=samples, **more)


def test_a_shorter_last_batch_stands_alone() -> None:
    (epoch,) = course_of(run_of(record(1, 128, 4, 400, train_seconds=2.0)))
    assert list(epoch.steps) == [(3, 128), (1, 16)]
    assert (epoch.step_seconds, epoch.samples_of_a_step) == (0.5, 100.0)
    (epoch,) = course_of(run_of(record(1, 128, 1, 100)))
    assert list(epoch.steps) == [(1, 100)]


def test_changes_within_an_epoch_begin_with_the_size_before() -> None:
    first = record(1, 256, 6, 896, changes=[Change(5, 256, 0.1)], next_batch_size=64)
    second = record(2, 32, 10, 1056, changes=[Change(7, 32, 0.1)])
    assert [list(epoch.steps) for epoch in course_of(run_of(first, second))] == [
        [(5, 128), (1, 256)],
        [(1, 64), (3, 32)],
    ]
    assert [epoch.batch_size for epoch in course_of(run_of(first, second))] == [None, None]


@pytest.mark.parametrize(
    "strange",
    [
        record(1, 128, 4, 600),  # more samples than four batches hold
        record(1, 128, 4, 100),  # fewer than three
        record(1, 256, 4, 600, changes=[Change(2, 256, 0.1)]),  # after a first size that is not known
    ],
)
def test_steps_that_do_not_fit_their_samples_have_the_mean_size(strange: EpochRecord) -> None:
    (epoch,) = course_of(run_of(strange, first=None))
    assert list(epoch.steps) == [(4, strange.samples / 4)]


def test_epochs_without_steps_or_times_are_no_obstacle() -> None:
    epochs = [record(1, 10, 2, 20), record(2, 10, 2, 20, train_seconds=1.0), record(3, 10, 4, 40, train_seconds=3.0)]
    assert [epoch.seconds for epoch in course_of(run_of(*epochs))] == [None, 2.0]


@given(
    st.lists(
        st.builds(
            record,
            st.just(1),
            st.integers(-5, 100),
            st.integers(-5, 100),
            st.integers(-5, 5000),
            train_seconds=st.none() | st.floats(-10, 10),
            measured=st.booleans(),
            next_batch_size=st.none() | st.integers(-5, 100),
            changes=st.none() | st.lists(st.builds(Change, st.integers(-5, 100), st.integers(-5, 100), st.just(0.1))),
        ),
        max_size=5,
    ),
    st.none() | st.integers(-5, 100),
)
def test_no_record_is_too_strange_for_the_model(epochs: list[EpochRecord], first: int | None) -> None:
    run = run_of(*epochs, first=first)
    model = device_model([run], inputs=DeviceInputs(num_parameters=10, step_times=[(1.0, 1.0), (2.0, 1.5)]))
    assert isinstance(model, DeviceModel)
    assert all(math.isfinite(model.seconds(run, devices)) for devices in (1, 8, 512))


# The model


def test_the_line_goes_through_the_records_and_one_device_gives_back_what_was_measured(tmp_path: Path) -> None:
    write_two(tmp_path)
    write(tmp_path, "growing", rows([100, 300, 512, 2048]), policy="auto")
    model = model_of(tmp_path)
    assert model.line == pytest.approx((FIXED, EACH))
    for run in runs_of(tmp_path).values():
        assert model.seconds(run, 1) == pytest.approx(run.epochs[-1].train_seconds)


def test_more_devices_by_hand(tmp_path: Path) -> None:
    write_two(tmp_path)
    model, run = model_of(tmp_path), runs_of(tmp_path)["large"]
    # 30 steps of 512 samples, of which 8 devices have 64 each and 64 have 8 each.
    network = {count: all_reduce(count, 320e6) for count in (8, 64, 512)}
    assert network[8] == pytest.approx(14 * 3e-6 + 1.75 * 320e6 / 360e9)
    for count, compute in {8: 1.64e-3, 64: 1.08e-3, 512: 1.01e-3}.items():
        assert model.seconds(run, count) == pytest.approx(30 * (compute + network[count] - compute * 2 / 3))
    # With few parameters the network hides behind the backward pass.
    assert model.step_seconds(512, 8, 1000) == pytest.approx(1.64e-3)


def test_a_batch_below_the_number_of_devices_leaves_some_without_work(tmp_path: Path) -> None:
    write_two(tmp_path)
    model = model_of(tmp_path)
    assert model.step_seconds(4, 8, NUM_PARAMETERS) == model.step_seconds(4, 4, NUM_PARAMETERS)
    assert model.step_seconds(9, 8, 0) == pytest.approx(FIXED + 2 * EACH)


def slowly(model: DeviceModel, sizes: Sequence[int], samples: int, devices: int) -> float:
    """Step by step, sample by sample."""
    total = 0.0
    for size in sizes:
        left = samples
        while left:
            batch = min(size, left)
            shares = [len(range(rank, batch, devices)) for rank in range(devices)]
            working = sum(share > 0 for share in shares)
            compute = max(model.line[0] + model.line[1] * share for share in shares)
            total += overlapped(compute, all_reduce(working, 4.0 * NUM_PARAMETERS))
            left -= batch
    return total


@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=4), st.integers(1, 90), st.sampled_from([1, 2, 8, 24]), st.data()
)
def test_courses_take_what_a_loop_over_their_steps_takes(sizes, samples, devices, data) -> None:
    fixed, each = data.draw(st.floats(0, 1e-2)), data.draw(st.floats(1e-6, 1e-3))
    model = DeviceModel(times=((1.0, fixed + each), (100.0, fixed + 100 * each)), source="nowhere")
    header = RunHeader(experiment="e", method="m", seed=0, num_parameters=NUM_PARAMETERS)
    epochs = tuple(
        record(epoch, sizes[epoch - 1], row["steps"], row["samples"])
        for epoch, row in enumerate(rows(sizes, samples=samples), 1)
    )
    found = model.seconds(RecordedRun(header, epochs), devices)
    assert found == pytest.approx(slowly(model, sizes, samples, devices), rel=1e-6)


def test_a_slow_first_epoch_and_a_disturbed_one_do_not_move_the_line(tmp_path: Path) -> None:
    for method, size in (("small", 128), ("large", 512)):
        epochs = rows([size] * 5)
        delayed = [{**row, "train_seconds": row["train_seconds"] + 9.0} for row in epochs]
        write(tmp_path, method, [*delayed[:4], {**delayed[4], "train_seconds": delayed[4]["train_seconds"] + 5.0}])
    assert model_of(tmp_path).line == pytest.approx((FIXED, EACH))


def test_what_measuring_adds_is_added_on_any_number_of_devices(tmp_path: Path) -> None:
    write_two(tmp_path)
    write(tmp_path, "auto", rows([128, 128, 512], more=2e-3, measured=True), policy="auto")
    write(tmp_path, "free", rows([128, 128, 512], more=-5e-4, measured=True), policy="auto")
    write(tmp_path, "other", rows([300, 300], more=2e-3, measured=True), policy="auto")
    model, runs = model_of(tmp_path), runs_of(tmp_path)
    assert model.line == pytest.approx((FIXED, EACH))
    assert model.measuring == pytest.approx({"auto": 2e-3, "free": 0.0, "other": 2e-3})
    assert model.seconds(runs["auto"], 1) == pytest.approx(runs["auto"].epochs[-1].train_seconds)
    assert model.seconds(runs["auto"], 64) == pytest.approx(model.seconds(runs["free"], 64) + 90 * 2e-3)


def test_where_records_do_not_tell_nothing_is_told(tmp_path: Path) -> None:
    write(tmp_path, "small", rows([128] * 3), num_parameters=None)
    assert "cannot be told, because the records do not say how many parameters were trained." in why_not(tmp_path)
    assert "two batch sizes, and the epochs that measured nothing on one device have those of 1" in why_not(
        tmp_path, num_parameters=7
    )
    write(tmp_path, "auto", rows([128, 512], measured=True), policy="auto")
    write(tmp_path, "changing", [{**row, "changes": [[3, 512, 0.1]]} for row in rows([512] * 2)], policy="auto")
    write(tmp_path, "ranks", rows([256] * 3), hardware={**GPU, "ranks": 2})
    assert "have those of 1" in why_not(tmp_path, num_parameters=7)
    write(tmp_path, "large", rows([512] * 3), hardware={**GPU, "name": "Another GPU"})
    assert "have those of 1" in why_not(tmp_path, num_parameters=7)


def test_parameters_that_are_given_count_where_records_have_none(tmp_path: Path) -> None:
    write(tmp_path, "small", rows([128] * 3), num_parameters=None)
    write(tmp_path, "large", rows([512] * 3))
    runs = runs_of(tmp_path)
    few, many = (model_of(tmp_path, num_parameters=number) for number in (1, 10**10))
    assert few.seconds(runs["small"], 8) < many.seconds(runs["small"], 8)
    assert few.seconds(runs["large"], 8) == many.seconds(runs["large"], 8)


# A file of step times


def test_a_file_of_step_times_comes_before_the_records(tmp_path: Path) -> None:
    write_two(tmp_path)
    path = tmp_path / "advice.json"
    times = [{"batch_size": size, "seconds": 0.5 + 0.25 * size} for size in (8, 2, 4)]
    path.write_text(json.dumps({"batch_size": 8, "step_seconds": times}))
    assert read_step_times(path) == [(2.0, 1.0), (4.0, 1.5), (8.0, 2.5)]
    model = model_of(tmp_path, step_times=read_step_times(path))
    assert model.line == pytest.approx((0.5, 0.25))
    assert "the step times of a file at 3 sizes, 2 to 8 samples" in " ".join(assumptions(model))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "holds no step times as advice has them: KeyError 'step_seconds'"),
        ("[1]", "holds no step times"),
        ("{", "holds no step times"),
        ('{"step_seconds": [{"batch_size": 8, "seconds": 1.0}]}', "positive step times of two or more batch sizes"),
        (
            '{"step_seconds": [{"batch_size": 8, "seconds": 1.0}, {"batch_size": 9, "seconds": -1}]}',
            "positive step times",
        ),
    ],
)
def test_a_file_without_step_times_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "advice.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=message):
        read_step_times(path)
    with pytest.raises(RecordError, match="cannot read"):
        read_step_times(tmp_path / "none.json")


# As a table


def test_the_table_has_the_measured_time_beside_the_models(tmp_path: Path) -> None:
    write_two(tmp_path)
    write(tmp_path, "auto", rows([128, 512], more=2e-3, measured=True), policy="auto")
    (experiment,) = load_runs(tmp_path).experiments
    table = devices_table(analyse(experiment), model_of(tmp_path))
    assert table.title == "e: training s on more devices (a model, not a measurement)"
    assert table.columns == [
        *("method", "measured here", "model: 1 device"),
        *("model: 8 devices", "model: 64 devices", "model: 512 devices"),
        "measuring adds, ms a step",
    ]
    cells = {row[0]: row[1:] for row in table.rows}
    # 120 steps of 1 ms and 15360 samples of 10 us.
    assert cells["small"][:2] == ["0.27", "0.27"]
    assert (cells["small"][-1], cells["auto"][-1]) == ("-", "2.00")
    assert table.notes[0] == "A model, not a measurement: no time on more devices was measured."
    assert (
        "takes 1 ms and 10 us a sample: a straight line through the step times of runs on A made-up GPU"
        in (table.notes[1])
    )
