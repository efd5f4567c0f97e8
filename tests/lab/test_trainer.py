"""A trainer's state, taken after any step, continues to the same bits."""

import io
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, StepLR
from torch.utils.data import TensorDataset

from divebatch import AdaBatch, AdaptiveLoader, Controller, DiveBatch, Fixed
from divebatch.errors import CheckpointError, DivergedError
from divebatch.estimators import make_estimator
from divebatch.lab import Clock, DeviceOptions, Trainer
from divebatch.lab.tasks import TASKS
from divebatch.policies import GradientDamp, SampleSchedule

CPU = torch.device("cpu")
NUM_SAMPLES, NUM_FEATURES, EPOCHS = 44, 6, 4
COSTS = {*("train_seconds", "eval_seconds", "compile_seconds", "measure_seconds", "total_seconds"), "peak_memory_bytes"}


def step_lr(optimizer: SGD) -> list[LRScheduler]:
    return [StepLR(optimizer, step_size=2, gamma=0.5)]


def cosine_with_warm_up(optimizer: SGD) -> list[LRScheduler]:
    return [CosineAnnealingLR(optimizer, T_max=EPOCHS), LinearLR(optimizer, start_factor=0.5, total_iters=2)]


@dataclass(frozen=True, kw_only=True)
class Case:
    policy: Any = field(default_factory=lambda: DiveBatch(1.0, 40))
    estimator: Callable[[], Any] = lambda: make_estimator("trajectory")
    coupling: str = "linear"
    schedulers: Callable[[SGD], list[LRScheduler]] = step_lr
    dropout: float = 0.0
    options: DeviceOptions = field(default_factory=DeviceOptions)
    log_exact: bool = False
    wrap: Callable[[TensorDataset], Any] = lambda data: data
    every_steps: int | None = None


CASES = {
    "exact": Case(),
    "sketch": Case(
        estimator=lambda: make_estimator("trajectory", mode="sketch"), options=DeviceOptions(norms="sketch")
    ),
    "oracle": Case(
        estimator=lambda: make_estimator("oracle", loss_fn=binary_cross_entropy_with_logits), log_exact=True
    ),
    "may shrink": Case(policy=DiveBatch.algorithm_1(1.0, 40), coupling="sqrt"),
    "every second epoch": Case(policy=DiveBatch(2.0, 40, every_epochs=2)),
    "adabatch with warm-up": Case(policy=AdaBatch(32, every_epochs=1, lr_decay=0.9), schedulers=cosine_with_warm_up),
    "dropout": Case(dropout=0.5),
    "dropout, sketch, through a DataLoader": Case(
        dropout=0.5, estimator=lambda: make_estimator("trajectory", mode="sketch"), wrap=list
    ),
    "micro-batches": Case(options=DeviceOptions(micro_batch_size=3)),
    "within epochs": Case(
        policy=GradientDamp(20), estimator=lambda: make_estimator("split"), every_steps=2, coupling="adascale"
    ),
}


def build(case: Case, *, lr: float = 0.5) -> Trainer:
    torch.manual_seed(0)
    features = torch.randn(NUM_SAMPLES + 20, NUM_FEATURES)
    labels = (features[:, :1] + 0.5 * torch.randn(len(features), 1) > 0).float()
    train = TensorDataset(features[:NUM_SAMPLES], labels[:NUM_SAMPLES])
    model = nn.Sequential(
        nn.Unflatten(1, (3, 2)),  # three positions: a sketch of one would be exact
        nn.Linear(2, 5),
        nn.ReLU(),
        nn.Dropout(case.dropout),
        nn.Flatten(),
        nn.Linear(15, 1),
    )
    optimizer = SGD(model.parameters(), lr=lr, momentum=0.9)
    schedulers = case.schedulers(optimizer)
    control = Controller(
        model,
        optimizer,
        AdaptiveLoader(case.wrap(train), 8, seed=3),
        case.policy,
        estimator=case.estimator(),
        lr_coupling=case.coupling,
        scheduler=schedulers,
        every_steps=case.every_steps,
    )
    return Trainer(
        model=model,
        optimizer=optimizer,
        schedulers=schedulers,
        control=control,
        task=TASKS["classification"](),
        validation=[(features[NUM_SAMPLES:], labels[NUM_SAMPLES:])],
        clock=Clock(CPU),
        options=case.options,
        log_exact=case.log_exact,
    )


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)  # type: ignore[no-any-return]


def run_on(trainer: Trainer, after_step: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    records = []
    with trainer.control:
        while trainer.control.epoch < EPOCHS:
            record = asdict(trainer.run_epoch(after_step=after_step))
            records.append({key: value for key, value in record.items() if key not in COSTS})
    return records


def weights(trainer: Trainer) -> list[torch.Tensor]:
    momenta = [state["momentum_buffer"] for state in trainer.optimizer.state.values()]
    return [*trainer.model.state_dict().values(), *momenta, torch.get_rng_state()]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_state_taken_after_any_step_continues_to_the_same_bits(case):
    whole = build(case)
    states = [through_a_file(whole.state_dict())]
    records = run_on(whole, lambda: states.append(through_a_file(whole.state_dict())))
    final = weights(whole)
    sizes = [record["batch_size"] for record in records]
    assert len(set(sizes)) > 1, sizes
    assert len(states) == records[-1]["steps"] + 1
    for state in states:
        resumed = build(case)
        torch.manual_seed(99)  # another life draws other numbers before it loads
        resumed.load_state_dict(state)
        done = state["control"]["epoch"]
        assert run_on(resumed) == records[done:]
        assert all(map(torch.equal, weights(resumed), final))


def test_a_size_that_changes_within_an_epoch_is_the_full_size_from_then_on():
    trainer = build(
        Case(policy=SampleSchedule("0:8 16:5 26:9"), every_steps=1, options=DeviceOptions(micro_batch_size=7))
    )
    full_sizes: list[int] = []
    with trainer.control:
        record = trainer.run_epoch(after_step=lambda: full_sizes.append(trainer.step.full_size))
    assert full_sizes == [7, 7, 5, 5, 7, 7]  # parts of 8, 8, 5, 5, 9, 9
    assert [change[:2] for change in record.changes or []] == [(2, 5), (4, 9)]
    assert {size for size, _ in trainer.step.variants} == {7, 5}


def test_a_state_of_another_method_is_refused_and_changes_nothing():
    state = through_a_file(build(CASES["exact"]).state_dict())
    other = build(CASES["adabatch with warm-up"])
    before = through_a_file(other.state_dict())
    with pytest.raises(CheckpointError, match=r"policy\.class is 'DiveBatch' in the checkpoint, and 'AdaBatch'"):
        other.load_state_dict(state)
    assert all(map(torch.equal, other.model.state_dict().values(), before["model"].values()))
    assert other.control.epoch == 0


@pytest.mark.parametrize("lr", [1e30, float("inf")])
def test_a_loss_that_is_not_finite_stops_the_epoch(lr):
    trainer = build(Case(policy=Fixed(), schedulers=lambda _: []), lr=lr)
    with pytest.raises(DivergedError, match=r"the training loss of epoch 1 is (nan|inf)"), trainer.control:
        trainer.run_epoch()
    assert trainer.control.epoch == 0
