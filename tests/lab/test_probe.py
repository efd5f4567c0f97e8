"""Probes of finished runs, by command: classifiers, and language models within their one pass."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from divebatch.cli import app
from divebatch.lab import Run, get_experiment, load_checkpoint, save_checkpoint
from divebatch.lab.build import make_trainer
from divebatch.lab.probe import Branch, BranchTrainer, RestOfPass, find_start, measure_noise_scales, run_of
from divebatch.lab.schema import FOLDER, Part
from lab.data.text_files import write_corpus
from lab.helpers import NAME, probed_experiment, run_it
from reference.adam_by_hand import set_by_hand


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe")
    path = probed_experiment(folder)
    run_it(path, folder / "runs", "sgd-small", "divebatch")
    return folder


def checkpoint_of(place):
    return place / "runs" / NAME / "sgd-small" / "seed-0.ckpt"


def call(place, *words, checkpoint=None):
    where = str(checkpoint or checkpoint_of(place))
    return CliRunner().invoke(app, ["probe", str(place / "tiny.toml"), where, *map(str, words)])


def branches_of(place):
    experiment = get_experiment(str(place / "tiny.toml"))
    start = find_start(checkpoint_of(place), NAME)
    return BranchTrainer(run_of(start, experiment), start)


def test_a_probe_ends_with_tables_a_file_and_a_picture(place, tmp_path):
    answer = call(place, "--out", tmp_path, "--repeats", 2)
    assert answer.exit_code == 0, answer.output
    assert re.search(r"critical batch size: (at least )?\d+ \(surely \d+", answer.output)
    name = f"{NAME}-sgd-small-seed-0-epoch-4"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.json", f"{name}.png", f"{name}.svg"]
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert [gap["batch_size"] for gap in found["gaps"]] == [16, 32, 64, 128]
    assert [gap["steps"] for gap in found["gaps"]] == [56, 28, 14, 7]
    assert found["critical"]["size"] in (16, 32, 64, 128)
    split, preconditioned = found["noise_scales"]
    assert (split["norm"], split["estimator"]) == ("Euclidean", "split")
    assert split["low"] <= split["noise_scale"] <= split["high"]
    assert "got SGD" in preconditioned["problem"]
    assert "not measured: preconditioned, by moments: preconditioned=True is for optimizers" in answer.output


def test_the_held_out_loss_can_judge_and_progress_goes_to_stderr(place, tmp_path):
    words = ("--factors", "2", "--repeats", "2", "--no-noise", "--judge", "validation", "--out", tmp_path)
    answer = call(place, *words)
    assert answer.exit_code == 0, answer.output
    assert "batch 16, repeat 1: 62 steps, loss 0." in answer.stderr
    assert "repeat" not in answer.stdout
    found = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert (found["judge"], found["unit"]) == ("validation", "loss")


def test_the_first_repeat_goes_on_as_the_run_would_have(place):
    """The branch of factor 1 is the training itself: twin by hand."""
    branches = branches_of(place)
    losses = branches.train(Branch(factor=1, batch_size=16, lr_factor=1.0, steps=5, repeat=0))
    twin = branches_of(place)
    loader, optimizer, expected = twin.loader, twin.trainer.optimizer, []
    loader.batch_size = 16
    loader.set_epoch(4)
    for (x, y), _ in zip(loader, range(5), strict=False):
        optimizer.zero_grad()
        loss = twin.trainer.loss_fn(twin.trainer.model(x), y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == expected


def test_repeats_see_other_orders_and_branches_of_one_repeat_the_same(place):
    branches = branches_of(place)
    state, seen = branches.save(), []
    for factor, repeat in ((1, 0), (2, 0), (1, 1)):
        branches.restore(state)
        losses = branches.train(
            Branch(factor=factor, batch_size=16 * factor, lr_factor=1e-9, steps=2 // factor, repeat=repeat)
        )
        seen.append(sum(losses) / len(losses))  # the weights stay, so the mean depends on the samples alone
    assert seen[0] == pytest.approx(seen[1], rel=1e-5)
    assert seen[0] != pytest.approx(seen[2], rel=1e-3)


@pytest.mark.parametrize("optimizer", [Part(kind="sgd", settings={"momentum": 0.9}), Part(kind="adamw")])
def test_every_branch_begins_with_the_optimizers_memory_as_it_was_saved(tmp_path, optimizer):
    run_it(probed_experiment(tmp_path, optimizer=optimizer), tmp_path / "runs", "sgd-small")
    branches = branches_of(tmp_path)
    state, courses = branches.save(), []
    for _ in range(3):
        branches.restore(state)
        courses.append(branches.train(Branch(factor=1, batch_size=16, lr_factor=1.0, steps=5, repeat=0)))
    assert courses[0] == courses[1] == courses[2]


def test_a_branch_by_adam_moves_betas_eps_and_weight_decay_too(tmp_path):
    """Twin by hand."""
    optimizer = Part(kind="adamw", settings={"beta2": 0.95, "weight_decay": 0.1})
    run_it(probed_experiment(tmp_path, optimizer=optimizer), tmp_path / "runs", "sgd-small")
    branches, twin = branches_of(tmp_path), branches_of(tmp_path)
    losses = branches.train(Branch(factor=2, batch_size=32, lr_factor=2**0.5, steps=5, repeat=0, coupling="adam"))
    for group in (by_hand := twin.trainer.optimizer).param_groups:
        set_by_hand(group, dict(group), 2.0)
    for state in by_hand.state.values():
        state["step"] /= 2
    assert losses == twin.train(Branch(factor=2, batch_size=32, lr_factor=1.0, steps=5, repeat=0))
    assert by_hand.param_groups[0]["betas"] == (0.9**2, 0.9025)
    answer = call(tmp_path, "--coupling", "adam", "--factors", "2", "--repeats", 2, "--no-noise", "--out", tmp_path)
    assert answer.exit_code == 0, answer.output
    assert "learning rate by adam" in answer.output


def test_with_adam_both_noise_scales_are_measured(tmp_path):
    run_it(probed_experiment(tmp_path, optimizer=Part(kind="adamw")), tmp_path / "runs", "sgd-small")
    branches = branches_of(tmp_path)
    before = branches.save()
    found = measure_noise_scales(branches, samples=0)
    after = branches.save()
    assert all(torch.equal(before["model"][key], after["model"][key]) for key in before["model"])
    assert not branches.trainer.model._forward_hooks
    assert [each.norm for each in found] == ["Euclidean", "preconditioned"]
    for each in found:
        assert not each.problem
        assert each.low <= each.noise_scale


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--window-samples", "1"], "--window-samples 1, shorter than one step of 16"),
        (["--factors", "1,64"], "factor 64 makes batches of 1024 samples, above the 1000 samples there are"),
        (["--factors", "0,2"], "factors must be an integer of at least 1, got factors=0"),
        (["--factors", "1"], "nothing to compare"),
        (["--factors", "1,two"], "--factors must be whole numbers"),
        (["--coupling", "adascale"], "unknown coupling 'adascale'; known: none, linear, sqrt"),
        (["--coupling", "-0.5"], "above 0 and at most 1, got coupling=-0.5"),
        (["--coupling", "adam"], "SGD is none of them"),
        (["--tolerance", "0"], "tolerance must be positive and finite, got tolerance=0.0"),
        (["--set", "training.precision=fp8"], "unknown precision 'fp8'; known: fp32, tf32, bf16"),
        (["--judge", "me"], "unknown judge 'me'; known: train, validation"),
    ],
)
def test_wrong_use_exits_with_2_and_says_what_is_wrong(place, tmp_path, words, message):
    answer = call(place, *words, "--out", tmp_path)
    assert answer.exit_code == 2, answer.output
    assert message in " ".join(answer.output.split())


def test_a_checkpoint_that_is_not_there_or_not_the_experiments(place, tmp_path):
    out = ["--out", str(tmp_path)]
    answer = call(place, *out, checkpoint=place / "runs")
    assert answer.exit_code == 2
    assert f"is no checkpoint, a file like seed-0.ckpt that a run leaves; name one of: {place}" in answer.output
    assert str(checkpoint_of(place)) in answer.output
    assert "is no checkpoint" in call(place, *out, checkpoint=tmp_path / "seed-0.ckpt").output
    answer = CliRunner().invoke(app, ["probe", "cifar10", str(checkpoint_of(place)), *out])
    assert answer.exit_code == 2
    assert "is a checkpoint of experiment 'tiny', not of 'cifar10'" in answer.output
    lonely = tmp_path / "seed-0.ckpt"
    lonely.write_bytes(checkpoint_of(place).read_bytes())
    assert "lacks the records of its run: 'seed-0.jsonl'" in call(place, *out, checkpoint=lonely).output


def test_a_namesake_with_other_data_is_refused(place, tmp_path):
    other = probed_experiment(tmp_path, num_samples=2000)
    answer = CliRunner().invoke(app, ["probe", str(other), str(checkpoint_of(place)), "--out", str(tmp_path)])
    assert answer.exit_code == 2
    assert "belongs to another experiment called 'tiny': its data is" in answer.output


def test_a_checkpoint_at_learning_rate_zero_is_refused(place, tmp_path, monkeypatch):
    make = BranchTrainer.__init__

    def at_zero(self, *words):
        make(self, *words)
        self.lr = 0.0

    monkeypatch.setattr(BranchTrainer, "__init__", at_zero)
    answer = call(place, "--out", tmp_path)
    assert answer.exit_code == 2
    assert "stands at learning rate 0" in answer.output


def test_the_batch_size_is_the_one_in_force_also_where_it_changed_since_the_last_record(place, tmp_path):
    path = checkpoint_of(place)
    state = load_checkpoint(path, device=torch.device("cpu"))
    state["control"]["loader"]["batch_size"] = 32  # as a decision within the epoch leaves it
    save_checkpoint(tmp_path / path.name, state)
    (tmp_path / "seed-0.jsonl").write_bytes(path.with_suffix(".jsonl").read_bytes())
    words = ("--no-noise", "--repeats", 1, "--factors", "2", "--json", "--out", tmp_path)
    found = json.loads(call(place, *words, checkpoint=tmp_path / path.name).stdout)
    assert [gap["batch_size"] for gap in found["gaps"]] == [32, 64]


def test_the_previous_checkpoint_can_be_probed_in_another_precision(place, tmp_path):
    words = ("--no-noise", "--repeats", 1, "--factors", "2", "--json", "--out", tmp_path)
    path = checkpoint_of(place).with_name("seed-0.ckpt.previous")
    answer = call(place, *words, checkpoint=path)
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert found["epoch"] == 3
    rounded = json.loads(call(place, *words, "--set", "training.precision=bf16", checkpoint=path).stdout)
    assert rounded["gaps"] != found["gaps"]


SMALL = ["--model", "gpt-tiny", "--set", "training.precision=fp32", "--epochs", "8", "--jobs", "1", "--quiet"]


@pytest.fixture(scope="module")
def lm_place(tmp_path_factory) -> Path:
    """A finished run of a pass in eight parts, with the checkpoints of the second and the fifth."""
    folder = tmp_path_factory.mktemp("lm")
    (folder / "lm.toml").write_text((FOLDER / "lm-bytes.toml").read_text().replace('"lm-bytes"', '"lm"'))
    data = write_corpus(folder / "data", train=60)
    run = ["run", str(folder / "lm.toml"), "--data-dir", str(data), "--out", str(folder), *SMALL]
    answer = CliRunner().invoke(app, [*run, "--methods", "fixed-8", "--keep-checkpoints", "2,5"])
    assert answer.exit_code == 0, answer.output
    return folder


def lm_checkpoint(lm_place: Path, part: int = 8) -> Path:
    return lm_place / "lm" / "fixed-8" / ("seed-0.ckpt" if part == 8 else f"seed-0.epoch-{part}.ckpt")


def lm_call(lm_place: Path, *words: str, part: int = 8):
    where = [str(lm_checkpoint(lm_place, part)), "--data-dir", str(lm_place / "data"), "--out", str(lm_place / "probe")]
    return CliRunner().invoke(app, ["probe", str(lm_place / "lm.toml"), *where, *words])


def lm_branches(lm_place: Path, part: int) -> BranchTrainer:
    start = find_start(lm_checkpoint(lm_place, part), "lm")
    return BranchTrainer(run_of(start, get_experiment(str(lm_place / "lm.toml")), data_dir=lm_place / "data"), start)


def test_a_probe_within_the_pass_speaks_in_bits_per_byte(lm_place):
    answer = lm_call(lm_place, "--repeats", "2", "--factors", "1,2", "--window-samples", "32", part=5)
    assert answer.exit_code == 0, answer.output
    assert "lm, fixed-8, after part 5 of 8: branches of 32 samples" in answer.output
    assert "bits per byte" in answer.output
    found = json.loads((lm_place / "probe" / "lm-fixed-8-seed-0-epoch-5.json").read_text())
    assert found["unit"] == "bits per byte"
    problems = {each["norm"]: each["problem"] for each in found["noise_scales"]}
    assert not problems["Euclidean"]
    assert not problems["preconditioned"]


def test_the_first_repeat_goes_on_with_the_pass_and_the_others_mix_the_rest(lm_place):
    """Twin by hand: the order of the run's own trainer."""
    branches = lm_branches(lm_place, 5)
    seen = branches.start.samples
    trainer = make_trainer(Run(branches.run.experiment, "fixed-8", 0, lm_place, data_dir=lm_place / "data"))
    trainer.length.parts = 1
    whole = [row for x, _ in trainer.control.loader for row in x]
    rest = [row for x, _ in branches.loader for row in x]
    assert len(rest) == len(whole) - seen
    assert all(torch.equal(one, other) for one, other in zip(rest, whole[seen:], strict=True))
    branches.loader.set_epoch(1)
    mixed = [row for x, _ in branches.loader for row in x]
    assert not all(torch.equal(one, other) for one, other in zip(rest, mixed, strict=True))
    assert sorted(map(str, (row.tolist() for row in mixed))) == sorted(map(str, (row.tolist() for row in rest)))


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


@pytest.mark.parametrize(
    ("part", "words", "message"),
    [
        (5, ["--window-samples", "9999"], "--window-samples 9999, and only 76 of its pass"),
        (8, [], "stands at the end of its pass: no sample is left"),
        (2, ["--window-samples", "3"], "--window-samples 3, shorter than one step of 8"),
    ],
)
def test_wrong_use_exits_with_2(lm_place, part, words, message):
    answer = lm_call(lm_place, *words, part=part)
    assert answer.exit_code == 2, answer.output
    assert message in " ".join(answer.output.split())


def test_parts_that_a_run_does_not_have_cannot_be_kept(lm_place, tmp_path):
    run = ["run", str(lm_place / "lm.toml"), "--data-dir", str(lm_place / "data"), "--out", str(tmp_path)]
    for words, message in (("41", "epoch 41, whose checkpoint is to stay"), ("x", "whole numbers")):
        answer = CliRunner().invoke(app, [*run, "--keep-checkpoints", words])
        assert answer.exit_code == 2
        assert message in answer.output


def test_a_part_that_a_large_batch_carries_over_is_kept_with_the_next(lm_place, tmp_path):
    run = ["run", str(lm_place / "lm.toml"), "--data-dir", str(lm_place / "data"), "--out", str(tmp_path), *SMALL]
    assert CliRunner().invoke(app, [*run, "--methods", "fixed-64", "--keep-checkpoints", "1,7"]).exit_code == 0
    kept = [each.name for each in sorted(tmp_path.rglob("*.epoch-*.ckpt"))]
    assert kept == ["seed-0.epoch-2.ckpt", "seed-0.epoch-7.ckpt"]
