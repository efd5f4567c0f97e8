"""Probes of language models: within the one pass of their run, in bits per byte, with one optimizer and with two."""

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from divebatch.cli import app
from divebatch.lab import Run, get_experiment
from divebatch.lab.build import make_trainer
from divebatch.lab.probe import Branch, BranchTrainer, RestOfPass, find_start, run_of
from divebatch.lab.schema import FOLDER
from lab.data.text_files import write_corpus

SMALL = ["--model", "gpt-tiny", "--set", "training.precision=fp32", "--epochs", "8", "--jobs", "1", "--quiet"]
BOTH = ["adamw"]


def made(folder: Path, optimizer: str) -> Path:
    """A finished run of a pass in eight parts, with the checkpoints of the second and the fifth."""
    content = (FOLDER / "lm-bytes.toml").read_text().replace('"adamw"', f'"{optimizer}"')
    (folder / "lm.toml").write_text(content.replace('name = "lm-bytes"', 'name = "lm"'))
    data = write_corpus(folder / "data", train=60)
    run = ["run", str(folder / "lm.toml"), "--data-dir", str(data), "--out", str(folder), *SMALL]
    answer = CliRunner().invoke(app, [*run, "--methods", "fixed-8", "--keep-checkpoints", "2,5"])
    assert answer.exit_code == 0, answer.output
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return made(tmp_path_factory.mktemp("adamw"), "adamw")


def checkpoint_of(place: Path, part: int = 8) -> Path:
    return place / "lm" / "fixed-8" / ("seed-0.ckpt" if part == 8 else f"seed-0.epoch-{part}.ckpt")


def call(place: Path, *words: str, part: int = 8):
    where = [str(checkpoint_of(place, part)), "--data-dir", str(place / "data"), "--out", str(place / "probe")]
    return CliRunner().invoke(app, ["probe", str(place / "lm.toml"), *where, *words])


def branches_of(place: Path, part: int) -> BranchTrainer:
    start = find_start(checkpoint_of(place, part), "lm")
    return BranchTrainer(run_of(start, get_experiment(str(place / "lm.toml")), data_dir=place / "data"), start)


def test_checkpoints_that_a_run_keeps_lie_beside_the_last(place):
    names = sorted(path.name for path in (place / "lm" / "fixed-8").iterdir())
    assert names == [
        "seed-0.ckpt",
        "seed-0.ckpt.previous",
        "seed-0.epoch-2.ckpt",
        "seed-0.epoch-5.ckpt",
        "seed-0.jsonl",
    ]


@pytest.mark.parametrize("optimizer", BOTH)
def test_a_probe_within_the_pass_speaks_in_bits_per_byte(place, tmp_path, optimizer):
    place = place if optimizer == "adamw" else made(tmp_path, optimizer)
    answer = call(place, "--repeats", "2", "--factors", "1,2", "--window-samples", "32", part=5)
    assert answer.exit_code == 0, answer.output
    assert "lm, fixed-8, after part 5 of 8: branches of 32 samples" in answer.output
    assert "bits per byte" in answer.output
    found = json.loads((place / "probe" / "lm-fixed-8-seed-0-epoch-5.json").read_text())
    assert found["unit"] == "bits per byte"
    problems = {each["norm"]: each["problem"] for each in found["noise_scales"]}
    assert not problems["Euclidean"]
    assert not problems["preconditioned"]


def test_the_first_repeat_goes_on_with_the_pass_and_the_others_mix_the_rest(place):
    """Twin by hand: the order of the run's own trainer."""
    branches = branches_of(place, 5)
    seen = branches.start.samples
    trainer = make_trainer(
        Run(branches.run.experiment, "fixed-8", 0, place, data_dir=place / "data")  # the whole pass, from its beginning
    )
    trainer.length.parts = 1
    whole = [row for x, _ in trainer.control.loader for row in x]
    rest = [row for x, _ in branches.loader for row in x]
    assert len(rest) == len(whole) - seen
    assert all(torch.equal(one, other) for one, other in zip(rest, whole[seen:], strict=True))
    branches.loader.set_epoch(1)
    mixed = [row for x, _ in branches.loader for row in x]
    assert not all(torch.equal(one, other) for one, other in zip(rest, mixed, strict=True))
    assert sorted(map(str, (row.tolist() for row in mixed))) == sorted(map(str, (row.tolist() for row in rest)))


def test_losses_are_those_of_the_steps_over_ln_2(place):
    branches, twin = branches_of(place, 2), branches_of(place, 2)
    losses = branches.train(Branch(factor=1, batch_size=8, lr_factor=1.0, steps=3, repeat=0))
    expected = []
    for batch, _ in zip(twin.loader, range(3), strict=False):
        expected.append(twin.trainer.step(batch).item() / math.log(2))
    assert losses == pytest.approx(expected, rel=1e-6)


def test_each_repeat_of_the_rest_has_every_sample_once():
    rest = RestOfPass(20, seed=3, seen=27)  # in the second pass
    orders = []
    for repeat in range(3):
        rest.set_epoch(repeat)
        orders.append(list(rest))
    assert rest.num_left == 13
    assert [sorted(order) for order in orders] == [sorted(orders[0])] * 3
    assert orders[0] != orders[1] != orders[2]
    rest.window = 5
    assert list(rest) == orders[2][:5]


WRONG = {
    "past the end": (5, ["--window-samples", "9999"], "--window-samples 9999, and only 76 of its pass"),
    "nothing left": (8, [], "stands at the end of its pass: no sample is left"),
    "too short": (2, ["--window-samples", "3"], "--window-samples 3, shorter than one step of 8"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_exits_with_2(place, name):
    part, words, message = WRONG[name]
    answer = call(place, *words, part=part)
    assert answer.exit_code == 2, answer.output
    assert message in " ".join(answer.output.split())


def test_other_data_than_the_runs_are_refused(place, tmp_path):
    other = write_corpus(tmp_path, train=60, seed=5)
    answer = call(place, "--data-dir", str(other), part=2)
    assert answer.exit_code == 2
    assert "was trained on other data than those in the data folder" in answer.output


def test_parts_that_a_run_does_not_have_cannot_be_kept(place, tmp_path):
    run = ["run", str(place / "lm.toml"), "--data-dir", str(place / "data"), "--out", str(tmp_path)]
    for words, message in (
        ("41", "epoch 41, whose checkpoint is to stay"),
        ("x", "whole numbers"),
    ):
        answer = CliRunner().invoke(app, [*run, "--keep-checkpoints", words])
        assert answer.exit_code == 2
        assert message in answer.output


def test_a_part_that_a_large_batch_carries_over_is_kept_with_the_next(place, tmp_path):
    run = ["run", str(place / "lm.toml"), "--data-dir", str(place / "data"), "--out", str(tmp_path), *SMALL]
    assert CliRunner().invoke(app, [*run, "--methods", "fixed-64", "--keep-checkpoints", "1,7"]).exit_code == 0
    assert [each.name for each in sorted(tmp_path.rglob("*.epoch-*.ckpt"))] == [
        "seed-0.epoch-2.ckpt",
        "seed-0.epoch-7.ckpt",
    ]
