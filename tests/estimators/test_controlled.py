"""Estimators at fixed weights, and what policies need besides, under a controller."""

import json
import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from divebatch import AdaptiveLoader, Controller, DiveBatch, EpochRecord, Measurement, Oracle, micro_batches
from divebatch.errors import ArgumentError, UsageError
from divebatch.estimators import Moments, PerSample, Split
from divebatch.policies import (
    AdaDamp,
    Fixed,
    Goodput,
    NoiseScale,
    NormTest,
    Plateau,
    Policy,
    Seesaw,
    SimiGrad,
    SmithSchedule,
    SpillOver,
)
from reference.per_sample import dataset, mean_loss, mlp

pytestmark = pytest.mark.filterwarnings("ignore:.* cannot grow the batch")  # plain SGD has no momentum

DATA = dataset(240)
CAP = 64


class Training:
    """An ordinary loop that cuts its batches in two."""

    def __init__(self, policy: Policy, *, lr: float = 0.01, step_lr: float | None = None, **settings) -> None:
        self.model, self.loader = mlp(), AdaptiveLoader(DATA, 16, seed=0)
        self.optimizer = SGD(self.model.parameters(), lr)
        self.scheduler = StepLR(self.optimizer, 1, gamma=step_lr) if step_lr else None
        self.control = Controller(self.model, self.optimizer, self.loader, policy, scheduler=self.scheduler, **settings)

    def epoch(self, *, tell_loss: bool = True, stop_after: int | None = None) -> EpochRecord | None:
        losses = []
        for index, batch in enumerate(self.loader):
            self.optimizer.zero_grad()
            for (x, y), share in micro_batches(batch, math.ceil(len(batch[0]) / 2)):
                loss = mean_loss(self.model(x), y) * share
                loss.backward()
                losses.append(float(loss.detach()))
            self.optimizer.step()
            if index + 1 == stop_after:
                return None
        if self.scheduler is not None:
            self.scheduler.step()
        return self.control.step(loss=sum(losses) / len(losses)) if tell_loss else self.control.step()

    def save(self) -> dict:
        return {"model": self.model.state_dict(), "control": self.control.state_dict()}

    def load(self, state: dict) -> None:
        self.control.load_state_dict(state["control"])
        self.model.load_state_dict(state["model"])


class Watch(Policy):
    """Any policy, with what it saw kept."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.needs, self.seen = policy, policy.needs, list[Measurement]()

    def next(self, seen: Measurement):
        self.seen.append(seen)
        return self.policy.next(seen)

    def measures(self, epoch: int, batch_size: int) -> bool:
        return self.policy.measures(epoch, batch_size)

    def check_start(self, batch_size: int) -> None:
        self.policy.check_start(batch_size)

    def __repr__(self) -> str:
        return repr(self.policy)


@pytest.mark.parametrize("estimator", ["split", "per-sample", "moments"])
def test_the_papers_rule_on_an_honest_estimate(estimator: str):
    watch = Watch(DiveBatch(0.5, CAP, monotone=False))
    training = Training(watch, estimator=estimator)
    for _ in range(3):
        record = training.epoch()
        diversity = watch.seen[-1].diversity
        low, high = diversity.noise_scale_interval()
        value = diversity.noise_scale if diversity.is_defined else low
        assert low <= value < high
        assert record.diversity == (diversity.value if diversity.is_defined else None)
        is_certain = not low <= watch.seen[-1].batch_size / 0.5 - 1 <= high
        wanted = max(1, min(CAP, int(0.5 * (1 + value)))) if is_certain else record.batch_size
        assert record.next_batch_size == wanted


def test_estimates_at_fixed_weights_are_near_the_oracles_where_the_papers_is_not():
    values = {}
    for estimator in ("oracle", "per-sample", "split", "trajectory"):
        watch = Watch(DiveBatch(1e-9, CAP))
        Training(watch, estimator=Oracle(mean_loss) if estimator == "oracle" else estimator, lr=0.02).epoch()
        values[estimator] = watch.seen[0].diversity
    exact = values["oracle"].noise_scale
    for estimator in ("per-sample", "split"):
        low, high = values[estimator].noise_scale_interval()
        assert low < exact < high
        assert values[estimator].noise_scale == pytest.approx(exact, rel=0.6)


@pytest.mark.parametrize("estimator", [Split, Moments, PerSample])
@pytest.mark.parametrize("stop_after", [1, 3])
def test_a_resume_in_the_middle_of_an_epoch_gives_the_same_decision(estimator: type, stop_after: int):
    """Without losses: those of this loop are of the batches since the resume."""
    whole = Training(NoiseScale(CAP), estimator=estimator())
    expected = [whole.epoch(tell_loss=False), whole.epoch(tell_loss=False)]
    stopped = Training(NoiseScale(CAP), estimator=estimator())
    first = stopped.epoch(tell_loss=False)
    stopped.epoch(stop_after=stop_after)
    resumed = Training(NoiseScale(CAP), estimator=estimator())
    resumed.load(stopped.save())
    assert [first, resumed.epoch(tell_loss=False)] == expected


@pytest.mark.filterwarnings("ignore:epoch . was left after")
def test_a_pass_left_early_is_forgotten():
    plain, tried = (Training(NoiseScale(CAP), lr=0.0, estimator="split") for _ in range(2))
    tried.epoch(stop_after=3)
    assert tried.epoch() == plain.epoch()


def test_history_is_kept_and_saved():
    watch = Watch(Plateau(CAP, patience=2))
    training = Training(watch, lr=0.0)  # the loss stays as it is, but for rounding
    first = training.epoch()
    assert (watch.seen[0].history.first_loss, watch.seen[0].history.decisions_at_size) == (watch.seen[0].loss, 1)
    resumed_watch = Watch(Plateau(CAP, patience=2))
    resumed = Training(resumed_watch, lr=0.0)
    resumed.load(training.save())
    assert first.next_batch_size == 16
    resumed.epoch()
    history = resumed_watch.seen[0].history
    assert history.first_loss == watch.seen[0].loss
    assert history.decisions_at_size == 2


def test_a_policy_that_needs_the_loss_must_get_it_and_can_have_it_then():
    training = Training(AdaDamp(CAP))
    with pytest.raises(
        UsageError, match=r"AdaDamp.* needs the epoch's mean training loss: control\.step\(loss=\.\.\.\)"
    ):
        training.epoch(tell_loss=False)
    assert training.control.step(loss=1.0).epoch == 1


@pytest.mark.parametrize(("policy", "coupling"), [(SmithSchedule, "linear"), (Seesaw, "sqrt"), (SimiGrad, "sqrt")])
def test_a_policy_with_a_coupling_of_its_own_gets_it_or_an_error(policy: type, coupling: str):
    with pytest.raises(ArgumentError, match=f"{policy.__name__} moves the learning rate.*lr_coupling='{coupling}'"):
        Training(policy(CAP), estimator="split", lr_coupling="none")
    with pytest.raises(ArgumentError, match="lr_coupling"):
        Training(SpillOver(policy(CAP)), estimator="split", lr_coupling="none")
    for given in (coupling, None):
        training = Training(SpillOver(policy(CAP)), estimator="split", lr_coupling=given)
        assert training.control.state_dict()["settings"]["lr_coupling"] == [coupling]


def test_smith_keeps_the_learning_rate_until_the_cap_and_the_ratio_always():
    training = Training(SmithSchedule(CAP), lr=0.01, step_lr=0.5, lr_coupling="linear")
    records = [training.epoch() for _ in range(4)]
    assert [record.next_batch_size for record in records] == [32, 64, 64, 64]
    assert [record.next_lr for record in records] == pytest.approx([0.01, 0.01, 0.005, 0.0025])
    for epoch, record in enumerate(records, 1):
        assert record.next_lr / record.next_batch_size == pytest.approx(0.01 * 0.5**epoch / 16)


def test_seesaw_lowers_the_rate_by_the_root():
    training = Training(Seesaw(CAP), lr=0.01, step_lr=0.5, lr_coupling="sqrt")
    record = training.epoch()
    assert (record.next_batch_size, record.next_lr) == (32, pytest.approx(0.01 / math.sqrt(2)))


def test_throughput_is_measured_where_a_policy_needs_it_and_only_there():
    for policy, sizes in ((Goodput(CAP), [16]), (NoiseScale(CAP), [])):
        watch = Watch(policy)
        Training(watch, estimator="split").epoch()
        throughputs = watch.seen[0].history.throughputs
        assert [size for size, _ in throughputs] == sizes
        assert all(speed > 0 for _, speed in throughputs)


def test_shadows_watch_and_change_nothing():
    watchers = {"noise": NoiseScale(CAP), "tenth": DiveBatch(0.1, CAP, monotone=False), "loss": AdaDamp(CAP)}
    alone, watched = (Training(Fixed(), **settings) for settings in ({}, {"estimator": "split", "shadows": watchers}))
    for _ in range(2):
        expected, record = alone.epoch(), watched.epoch()
        assert expected.shadows is None
        assert (record.next_batch_size, record.next_lr, record.batch_size) == (16, 0.01, 16)
        assert record.shadows.keys() == watchers.keys()
        assert record.shadows["tenth"] <= record.shadows["noise"]
    for mine, theirs in zip(alone.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_shadow_says_what_it_would_do_as_the_driver():
    drives = Training(NormTest(CAP), estimator="per-sample")
    watches = Training(Fixed(), estimator="per-sample", shadows={"norm": NormTest(CAP)})
    assert drives.epoch().next_batch_size == watches.epoch().shadows["norm"] > 16


def test_what_only_a_shadow_needs_is_asked_for_too():
    training = Training(Fixed(), shadows={"loss": AdaDamp(CAP)})
    with pytest.raises(UsageError, match=r"AdaDamp.* needs the epoch's mean training loss"):
        training.epoch(tell_loss=False)
    seldom = Training(Fixed(), estimator="split", shadows={"third": NoiseScale(CAP, every_epochs=3)})
    assert [seldom.epoch().measured for _ in range(4)] == [False, False, True, False]


def test_the_record_has_the_interval_of_an_estimate():
    watch = Watch(NoiseScale(CAP))
    record = Training(watch, lr=0.0, estimator="per-sample").epoch()
    low, high = watch.seen[0].diversity.noise_scale_interval()
    assert (240 * record.diversity_low, 240 * record.diversity_high) == pytest.approx((1 + low, 1 + high))
    exact = Training(NoiseScale(CAP), estimator=Oracle(mean_loss)).epoch()
    assert (exact.diversity_low, exact.diversity_high) == (None, None)
    unsure = Training(NoiseScale(CAP), estimator=Moments(every_steps=14)).epoch()  # a single estimate
    assert (unsure.diversity_low, unsure.diversity_high) == (1 / 240, None)
    assert EpochRecord.from_dict(json.loads(record.to_json())) == record


def cuts_of_an_epoch(training: Training) -> list[int]:
    """Before each batch the least number of micro-batches."""
    cuts: list[int] = []
    training.control.then = lambda _: cuts.append(training.control.plan().min_micro_batches)
    training.epoch()
    training.control.then = None
    return cuts


def test_the_controller_says_in_how_many_parts_a_batch_must_come():
    training = Training(NoiseScale(CAP, every_epochs=2), estimator="split")
    assert [cuts_of_an_epoch(training)[0] for _ in range(3)] == [1, 2, 1]
    assert cuts_of_an_epoch(Training(NoiseScale(CAP), estimator="moments"))[0] == 1
    training = Training(NoiseScale(CAP), estimator=Split(every_steps=4))
    assert cuts_of_an_epoch(training)[:9] == [2, 1, 1, 1, 2, 1, 1, 1, 2]


@pytest.mark.parametrize("kind", [Split, Moments])
def test_decisions_that_would_see_no_two_estimates_are_refused(kind):
    told = rf"every_steps=5 leaves a decision less than two estimates of {kind.__name__}, .* at least 6"
    with pytest.raises(ArgumentError, match=told):
        Training(NoiseScale(CAP), estimator=kind(every_steps=3), every_steps=5)
    for settings in ({"every_steps": 3, "decay": 0.9}, {"every_steps": 2}, {}):
        Training(NoiseScale(CAP), estimator=kind(**settings), every_steps=5 if settings else 1)


def test_moments_work_with_any_model_and_optimizer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.PReLU(), nn.Linear(6, 3)).double()
    loader, optimizer = AdaptiveLoader(DATA, 16, seed=0), Adam(model.parameters(), 1e-3)
    with Controller(model, optimizer, loader, NoiseScale(CAP), estimator="moments") as control:
        for x, y in loader:
            optimizer.zero_grad()
            mean_loss(model(x), y).backward()
            optimizer.step()
        assert control.step().diversity is not None


REPLAYED = {"trajectory": True, "moments": True, "split": True, "per-sample": False}


@pytest.mark.parametrize(("estimator", "is_replayed"), REPLAYED.items())
def test_what_needs_python_in_each_pass_is_not_replayed(estimator, is_replayed):
    model = mlp()
    optimizer = SGD(model.parameters(), 0.1)
    control = Controller(model, optimizer, AdaptiveLoader(DATA, 16, seed=0), DiveBatch(0.1, 64), estimator=estimator)
    assert not control.plan().measuring
    next(iter(control.loader))
    assert control.plan().measuring
    x, y = DATA[:16]
    mean_loss(model(x), y).backward()  # the first pass of norms is checked, and not recorded
    before = control.plan().replay_token
    assert (before is not None) == is_replayed
    next(iter(control.loader))  # a new pass: the sums of trajectory begin anew
    assert (control.plan().replay_token == before) == (estimator != "trajectory")
