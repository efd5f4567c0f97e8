"""The Hugging Face Trainer with our subclass: the plain loop's course, every sample, exact norms under its losses."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import ChainDataset, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from divebatch import AdaptiveLoader, DiveBatch, Fixed
from divebatch.errors import ArgumentError, CheckpointError
from divebatch.policies import NoiseDoubling
from integrations.plain_loop import GROWS_AND_SHRINKS, Course, Kept, Numbered, assert_same_sums
from integrations.trainer_runs import (
    NUMBERED,
    Regression,
    adapter,
    gpt2,
    plain_course,
    sentences,
    trainer,
    transformers,
)
from reference.adam_by_hand import train_by_hand
from reference.per_sample import diversity_of, mlp, num_hooks

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]
DIVEBATCH = DiveBatch(0.1, 24, monotone=False)


# The same as the plain loop


def test_the_course_is_the_plain_loops(tmp_path):
    run = trainer(DIVEBATCH, tmp_path, lr_coupling="linear")
    run.train()
    expected, _ = plain_course(DIVEBATCH)
    sizes = [record.batch_size for record in expected]
    assert [record.batch_size for record in run.records] == sizes
    assert max(sizes) > sizes[0] > min(sizes)  # it grows and it shrinks
    assert [r.diversity for r in run.records] == pytest.approx([r.diversity for r in expected], rel=1e-3)
    assert [r.next_lr for r in run.records] == pytest.approx([r.next_lr for r in expected])
    assert [r.steps for r in run.records] == [r.steps for r in expected]
    assert num_hooks(run.model) == 0


def test_args_are_as_they_were_and_a_second_training_begins_at_the_first_size(tmp_path):
    run = trainer(Course(GROWS_AND_SHRINKS), tmp_path, lr_coupling="linear")
    before = dict(vars(run.args))
    courses = []
    for _ in range(2):
        run.train()
        assert {key: value for key, value in vars(run.args).items() if value != before[key]} == {}
        courses.append([(r.epoch, r.batch_size, r.lr, r.steps, r.samples) for r in run.records])
    assert courses[0] == courses[1]
    assert len({size for _, size, *_ in courses[0]}) > 2
    assert len(run.model.seen) == 10 * 48


def test_adams_settings_follow_as_in_a_loop_that_sets_them_by_hand(tmp_path):
    """Up to the rounding of accumulated passes. Resumed it is the same, and a second training begins with one's own."""
    settings = {"optim": "adamw_torch", "lr_coupling": "adam", "weight_decay": 0.1, "save_strategy": "epoch"}
    run = trainer(Course(GROWS_AND_SHRINKS), tmp_path, **settings)
    run.train()
    resumed = trainer(Course(GROWS_AND_SHRINKS), tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    twin = mlp(dtype=torch.float32)
    weights, biases = ([p for p in twin.parameters() if p.ndim == ndim] for ndim in (2, 1))
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]  # as the Trainer's
    loader, optimizer = AdaptiveLoader(Numbered(), 6, seed=3), AdamW(groups, 0.03)
    train_by_hand(twin, optimizer, loader, GROWS_AND_SHRINKS)
    expected = settings_of(AdamW([{"params": [torch.ones(1)], "weight_decay": decay} for decay in (0.1, 0.0)], 0.03))
    for each in (run, resumed):
        assert settings_of(each.optimizer) == expected
        for pair in zip(each.model.net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-4)
    steps = [float(state["step"]) for state in run.optimizer.state.values()]
    with pytest.warns(UserWarning, match="begins anew"):
        run.train()
    assert settings_of(run.optimizer) == expected
    # A step more of the first size for each that it made there: both trainings saw as many samples.
    assert [float(state["step"]) for state in run.optimizer.state.values()] == pytest.approx([2 * k for k in steps])


def settings_of(optimizer: Any) -> list[Any]:
    return [optimizer.param_groups[0][name] for name in ("lr", "betas", "eps", "weight_decay")]


@pytest.mark.parametrize("passes", [1, 3])
def test_norms_are_exact_under_a_token_weighted_loss(passes, tmp_path):
    """Each sequence alone and unpadded, with the weight its tokens have in its step's loss."""
    data, size, kept = sentences(23), 2 * passes, Kept()  # the last pass has one sequence, and its step is short
    settings = {"estimator": kept, "learning_rate": 0.0, "num_train_epochs": 1, "gradient_accumulation_steps": passes}
    run = trainer(DIVEBATCH, tmp_path, model=gpt2(), data=data, **settings)
    run.train()
    rows = []
    for step in AdaptiveLoader(data, size, seed=3):
        weight = len(step["labels"]) / int(run._get_num_items_in_batch([step], torch.device("cpu")))
        rows += [gradient(gpt2(), ids[mask.bool()]) * weight for ids, mask in zip(*two(step), strict=True)]
    assert_same_sums(kept.sums, diversity_of(torch.stack(rows)), rel=1e-4)


def two(step: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return step["input_ids"], step["attention_mask"]


def gradient(model: nn.Module, ids: Tensor) -> Tensor:
    loss = cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="sum")
    return torch.cat([part.flatten().double() for part in torch.autograd.grad(loss, list(model.parameters()))])


# Checkpoints, schedules, logs


def test_a_resumed_run_is_the_whole_run(tmp_path):
    settings = {"lr_coupling": "linear", "lr_scheduler_type": "cosine", "num_train_epochs": 4}
    whole = trainer(DIVEBATCH, tmp_path, save_strategy="epoch", **settings)
    whole.train()
    checkpoint = tmp_path / f"checkpoint-{whole.records[1].steps}"
    resumed = trainer(DIVEBATCH, tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.records == whole.records[2:]
    for here, there in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(here, there)


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path):
    trainer(Fixed(), tmp_path, save_strategy="epoch", num_train_epochs=1).train()
    (tmp_path / "checkpoint-8" / adapter.STATE_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"has no divebatch.pt or .*: it was not saved by a BatchSizeTrainer"):
        trainer(Fixed(), tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))


def test_the_schedule_follows_the_samples_and_logs_show_the_true_rate(tmp_path):
    """Linear to zero over four epochs: after three, a quarter of the first rate, times the batch size's factor."""
    settings = {"lr_coupling": "linear", "lr_scheduler_type": "linear", "num_train_epochs": 4}
    run = trainer(Course((6, 12, 12, 4)), tmp_path, save_strategy="epoch", **settings)
    run.train()
    assert [r.next_lr for r in run.records] == pytest.approx([0.03 * 0.75 * 2, 0.03 * 0.5 * 2, 0.03 * 0.25 * 4 / 6, 0])
    folder = max(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    logs = [entry for entry in history if "loss" in entry]
    assert [entry["batch_size"] for entry in logs] == [6, 12, 12, 4]
    assert logs[1]["learning_rate"] == pytest.approx(0.03 * 0.5625 * 2)  # before the epoch's last step of 12 samples


@pytest.mark.parametrize("stop_at", [None, 12], ids=["at-the-end", "in-the-second-epoch"])
def test_an_epoch_counts_only_when_it_is_complete(stop_at, tmp_path):
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step == stop_at

    run = trainer(Fixed(), tmp_path, num_train_epochs=2, dataloader_drop_last=True, data=NUMBERED[:47])
    run.add_callback(Stop())
    run.train()
    assert [record.samples for record in run.records] == ([46, 92] if stop_at is None else [46])


def test_after_an_error_no_hook_is_left(tmp_path):
    run = trainer(DIVEBATCH, tmp_path)
    run.log = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.train()
    assert num_hooks(run.model) == 0


# What would go wrong without a word


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='group_by_length'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_do_not_work_are_refused(settings, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        trainer(Fixed(), tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_gpu": 2}, "n_gpu=2 .*torchrun"),
        ({"is_deepspeed_enabled": True}, "DeepSpeed"),
        ({"is_fsdp_enabled": True}, "FSDP"),
        ({"parallelism_config": object()}, "parallelism_config"),
        ({"world_size": 2, "average_tokens_across_devices": False}, "average_tokens_across_devices=False"),
        ({"world_size": 2, "split_batches": True}, "split_batches=True"),
        ({"world_size": 2, "train_dataset": ChainDataset([])}, "an IterableDataset on 2 processes"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 .*use 5.15"),
    ],
    ids=lambda value: list(value)[-1] if isinstance(value, dict) else "",
)
def test_ways_to_train_that_do_not_work_are_refused(settings, message, monkeypatch):
    monkeypatch.setattr(adapter, "LabelSmoother", OldSmoother)
    adapter._refuse_settings(made_of())
    with pytest.raises(ArgumentError, match=message):
        adapter._refuse_settings(made_of(**settings))


def made_of(**settings: Any) -> Any:
    """What a Trainer and its parts show of such settings."""
    usual = {"auto_find_batch_size": False, "train_sampling_strategy": "random", "label_smoothing_factor": 0.0}
    usual |= {"n_gpu": 1, "world_size": 1, "average_tokens_across_devices": True, "split_batches": False}
    usual |= {"is_deepspeed_enabled": False, "is_fsdp_enabled": False, "parallelism_config": None}
    parts = SimpleNamespace(**usual | {"train_dataset": [], "model_accepts_loss_kwargs": True} | settings)
    parts.args = parts.accelerator = parts.accelerator_config = parts
    return parts


class OldSmoother:
    """Has never heard of the other passes of a step, as in transformers 5.12."""

    def __call__(self, model_output: Any, labels: Any, shift_labels: bool = False) -> Any: ...


@pytest.mark.parametrize("sampler", [SequentialSampler(NUMBERED), RandomSampler(NUMBERED)])
def test_a_plain_sampler_of_a_subclass_is_followed(sampler: Any, tmp_path: Path):
    run = trainer(Fixed(), tmp_path, num_train_epochs=1)
    run._get_train_sampler = lambda *_: sampler
    run.train()
    assert sorted(run.model.seen) == list(range(48))
    assert (run.model.seen == list(range(48))) is isinstance(sampler, SequentialSampler)


def test_samplers_and_loaders_of_a_subclass_are_not_left_out_unasked(tmp_path: Path):
    run = trainer(Fixed(), tmp_path)
    for sampler in (WeightedRandomSampler([1.0] * 48, 48), RandomSampler(NUMBERED, num_samples=10)):
        run._get_train_sampler = lambda *_, sampler=sampler: sampler
        with pytest.raises(ArgumentError, match=f"has a [a-zA-Z]*{type(sampler).__name__}.*_get_train_sampler"):
            run.train()
    run.get_train_dataloader = lambda: DataLoader(NUMBERED, batch_size=2)
    with pytest.raises(ArgumentError, match="get_train_dataloader of BatchSizeTrainer returns a DataLoader"):
        run.train()


@pytest.mark.parametrize("policy", [None, "auto", NoiseDoubling])
def test_what_is_no_policy_is_refused(policy: Any, tmp_path: Path):
    with pytest.raises(ArgumentError, match="policy must be a policy object"):
        trainer(policy, tmp_path)


def test_schedules_that_count_steps_are_refused(tmp_path):
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch", "eval_dataset": NUMBERED}
    with pytest.raises(ArgumentError, match="makes a ReduceLROnPlateau, which cannot be driven by samples"):
        trainer(Fixed(), tmp_path, **plateau).train()
    model = Regression()
    optimizer = SGD(model.parameters(), lr=0.03)
    mine = (optimizer, LambdaLR(optimizer, lambda step: 0.9**step))
    with pytest.raises(ArgumentError, match="LambdaLR is stepped once an optimizer step"):
        trainer(Fixed(), tmp_path, model=model, optimizers=mine)
    run = trainer(Fixed(), tmp_path, model=model, optimizers=mine, step_schedule=True, num_train_epochs=1)
    run.train()
    assert run.records[0].next_lr == pytest.approx(0.03 * 0.9**8)


@pytest.mark.parametrize(("optim", "coupling"), [("sgd", "linear"), ("adamw_torch", "sqrt")])
def test_auto_needs_nothing_else(tmp_path: Path, optim: str, coupling: str):
    run = trainer(NoiseDoubling(24), tmp_path, model=Regression(), optim=optim, num_train_epochs=2)
    run.train()
    assert [record.measured for record in run.records] == [True, True]
    state = run.batch_control.state_dict()
    estimator = "PerSample" if optim == "sgd" else "Moments"  # which needs momentum
    assert (state["settings"]["estimator"], state["settings"]["lr_coupling"][0]) == (estimator, coupling)


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")  # Accelerate watches for skipped steps that way
def test_under_a_grad_scaler_auto_measures_the_same(tmp_path: Path):
    plain, scaled = (trainer(NoiseDoubling(24), tmp_path, model=Regression(), num_train_epochs=2) for _ in range(2))
    scaled.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # floats stay what they were
    for run in (plain, scaled):
        run.train()
    assert scaled.accelerator.scaler.get_scale() == 1024.0
    assert scaled.records == plain.records
    assert plain.records[0].noise_scale is not None
