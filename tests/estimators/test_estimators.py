"""The estimators: what all of them promise, then each against its twin."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Sampler, SubsetRandomSampler, TensorDataset

from divebatch import (
    AdaptiveLoader,
    Controller,
    Decision,
    Diversity,
    Measurement,
    Oracle,
    Policy,
    Trajectory,
    gradient_diversity,
    micro_batches,
)
from divebatch.errors import ArgumentError, CoverageError, UsageError
from divebatch.estimators import (
    ESTIMATORS,
    AcrossRanks,
    Estimator,
    Moments,
    PerSample,
    Split,
    TrainingContext,
    make_estimator,
)
from divebatch.ranks import Ranks
from reference import per_sample
from reference.delivery import Delivered, attach
from reference.per_sample import assert_same_sums, dataset, mean_loss, mlp, num_hooks, train

CASES: dict[str, Callable[[], Estimator]] = {
    "trajectory": Trajectory,
    "oracle": lambda: Oracle(mean_loss),
    "per-sample": PerSample,
    "split": Split,
    "split, one batch in 2": lambda: Split(every_steps=2),
    "moments": Moments,
    "ranks": AcrossRanks,
}
OF_ALL_SAMPLES = ["trajectory", "oracle"]
BY_RULES = ["trajectory", "oracle", "per-sample"]
DATA = dataset(13)


def context(model: nn.Module, loader: AdaptiveLoader, optimizer: Optimizer | None = None) -> TrainingContext:
    optimizer = optimizer or sgd(model)
    return TrainingContext(model, loader, optimizer)


def sgd(model: nn.Module, lr: float = 0.05) -> SGD:
    return SGD(model.parameters(), lr, momentum=0.9)


# What all promise


def test_every_estimator_of_the_catalog_is_in_the_case_table():
    assert {case.split(",")[0] for case in CASES} == ESTIMATORS.keys()


@pytest.mark.parametrize("case", OF_ALL_SAMPLES)
def test_at_weights_that_stand_still_the_sums_are_exact(case: str):
    model, loader, estimator = mlp(), AdaptiveLoader(DATA, 4, seed=0), CASES[case]()
    attach(estimator, context(model, loader))
    estimator.start()
    train(model, sgd(model, lr=0.0), loader)
    assert_same_sums(estimator.finish(), per_sample.diversity(mlp(), mean_loss, [DATA.tensors]))


def num_attached(model: nn.Module, optimizer: Optimizer) -> int:
    accumulated = [parameter._post_accumulate_grad_hooks or {} for parameter in model.parameters()]
    return num_hooks(model) + sum(map(len, accumulated)) + len(optimizer._optimizer_step_pre_hooks)


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_attached_outside_a_measured_epoch(case: str):
    model, loader, estimator = mlp(), AdaptiveLoader(DATA, 4, seed=0), CASES[case]()
    optimizer = sgd(model)
    attach(estimator, context(model, loader, optimizer))  # one hook, which tells of steps
    attached, within = [num_attached(model, optimizer)], []
    for end in (estimator.finish, estimator.close):
        estimator.start()
        within.append(num_attached(model, optimizer))
        train(model, optimizer, loader, parts_of=2)
        end()
        attached.append(num_attached(model, optimizer))
        assert estimator.state_dict() == {}
    assert attached == [1, 1, 1]
    assert all(each > 1 for each in within) == (case not in ("oracle", "moments"))


@pytest.mark.parametrize("case", CASES)
def test_training_is_the_same_with_and_without(case: str):
    model, plain, loader, estimator = mlp(), mlp(), AdaptiveLoader(DATA, 4, seed=0), CASES[case]()
    optimizer = sgd(model)
    attach(estimator, context(model, loader, optimizer))
    estimator.start()
    train(model, optimizer, loader, parts_of=2)
    estimator.finish()
    train(plain, sgd(plain), AdaptiveLoader(DATA, 4, seed=0), parts_of=2)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


class Traffic(TorchDispatchMode):
    """Operators that bring numbers from the host to a device, or back: on a GPU each of them waits."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Meters read one truth of a pass, whether it is finite, on a CPU alone, where nobody waits for it.
        is_truth = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.bool
        if func in (torch.ops.aten.lift_fresh.default, torch.ops.aten._local_scalar_dense.default) and not is_truth:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", CASES)
def test_steps_neither_read_from_the_device_nor_send_to_it(case: str, monkeypatch: pytest.MonkeyPatch):
    for module in ("accumulators", "meter"):  # as if the tensors here were on another device
        monkeypatch.setattr(f"divebatch.norms.{module}.is_at_hand", lambda tensor: False)
    model, loader, estimator = mlp(), AdaptiveLoader(DATA, 4, seed=0), CASES[case]()
    optimizer = sgd(model)
    attach(estimator, context(model, loader, optimizer))
    estimator.start()
    traffic = Traffic()
    for batch in loader:
        with traffic:
            train(model, optimizer, [batch], parts_of=2)
    estimator.close()
    assert traffic.seen == []


@pytest.mark.parametrize("case", CASES)
def test_a_state_from_within_an_epoch_carries_on(case: str):
    results = []
    for interrupted in (False, True):
        model, loader, estimator = mlp(), AdaptiveLoader(DATA, 4, seed=0), CASES[case]()
        optimizer = sgd(model)
        attach(estimator, context(model, loader, optimizer))
        estimator.start()
        for index, batch in enumerate(loader):
            train(model, optimizer, [batch], parts_of=2)
            if interrupted and index == 2:
                state = estimator.state_dict()
                estimator.close()
                estimator = CASES[case]()
                attach(estimator, context(model, loader, optimizer))
                estimator.start()
                estimator.load_state_dict(state)
        results.append(estimator.finish())
    assert results[0] == results[1]


@pytest.mark.parametrize("case", BY_RULES)
def test_a_model_that_cannot_be_measured_gets_the_error_at_once(case: str):
    model = nn.Sequential(mlp(), nn.PReLU())
    with pytest.raises(CoverageError, match=r"'1\.weight' of PReLU"):
        CASES[case]().bind(context(model, AdaptiveLoader(DATA, 4, seed=0)))


@pytest.mark.parametrize("case", CASES)
def test_an_estimator_serves_one_controller(case: str):
    estimator = CASES[case]()
    attach(estimator, context(mlp(), AdaptiveLoader(DATA, 4, seed=0)))
    with pytest.raises(UsageError, match="make one for each"):
        attach(estimator, context(mlp(), AdaptiveLoader(DATA, 4, seed=0)))


@pytest.mark.parametrize("case", CASES)
def test_an_estimator_without_controller_gets_an_error(case: str):
    with pytest.raises(UsageError, match=r"bind\(\) comes first"):
        CASES[case]().finish()
    CASES[case]().close()


def test_an_unknown_name_gets_an_error_that_lists_the_known_ones():
    with pytest.raises(ArgumentError, match="'magic'; known: trajectory, oracle, per-sample, split, moments, ranks"):
        make_estimator("magic")


# Trajectory


def test_trajectory_equals_the_sums_of_all_kept_gradients_epoch_by_epoch():
    model, twin, loader, estimator = mlp(), mlp(), AdaptiveLoader(DATA, 4, seed=0), Trajectory()
    optimizer, twin_optimizer, twin_loader = sgd(model), sgd(twin), AdaptiveLoader(DATA, 4, seed=0)
    attach(estimator, context(model, loader))
    for _ in range(3):
        estimator.start()
        train(model, optimizer, loader)
        assert_same_sums(estimator.finish(), per_sample.trajectory(twin, mean_loss, twin_optimizer, twin_loader))


# Oracle


def test_oracle_is_exact_at_the_weights_the_epoch_ended_with():
    model, loader, estimator = mlp(), AdaptiveLoader(DATA, 4, seed=0), Oracle(mean_loss)
    attach(estimator, context(model, loader))
    estimator.start()
    train(model, sgd(model), loader)
    exact = per_sample.diversity(model, mean_loss, [DATA.tensors])
    assert_same_sums(estimator.finish(), exact)
    assert_same_sums(gradient_diversity(model, mean_loss, [DATA.tensors]), exact)


def test_oracle_measures_the_samples_that_an_own_sampler_draws():
    chosen = [1, 4, 5, 9, 11]
    wrapped = DataLoader(DATA, batch_size=2, sampler=SubsetRandomSampler(chosen))
    model, loader, estimator = mlp(), AdaptiveLoader.wrap(wrapped, seed=0), Oracle(mean_loss)
    attach(estimator, context(model, loader))
    train(model, sgd(model, lr=0.0), loader)
    subset = [tensor[chosen] for tensor in DATA.tensors]
    assert_same_sums(estimator.finish(), per_sample.diversity(mlp(), mean_loss, [subset]))


class Halves(Sampler[int]):
    """The first half of the data in epoch 0, the second in epoch 1."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        return iter(range(6 * self.epoch, 6 * self.epoch + 6))

    def __len__(self) -> int:
        return 6


def wrapped_halves(data: TensorDataset) -> AdaptiveLoader:
    return AdaptiveLoader.wrap(DataLoader(data, batch_size=4, sampler=Halves()), seed=0)


def test_oracle_measures_the_samples_of_a_resumed_epoch():
    loader = wrapped_halves(DATA)
    list(loader)
    next(iter(loader))
    model, resumed, estimator = mlp(), wrapped_halves(DATA), Oracle(mean_loss)
    resumed.load_state_dict(loader.state_dict())
    attach(estimator, context(model, resumed))
    train(model, sgd(model, lr=0.0), resumed)
    second_half = [tensor[6:12] for tensor in DATA.tensors]
    assert_same_sums(estimator.finish(), per_sample.diversity(mlp(), mean_loss, [second_half]))


def test_oracle_without_a_loss_gets_an_error_that_says_how_to_give_one():
    with pytest.raises(ArgumentError, match=r"needs the loss: pass estimator=Oracle\(loss_fn\)"):
        make_estimator("oracle")
    with pytest.raises(ArgumentError, match="loss_fn must be a function of outputs and targets, got loss_fn=None"):
        Oracle(None)


def seen_by(estimator: Split, batches: list, *, cut_all: bool) -> Diversity:
    """Of a moving model; batches that need not be cut go through whole, unless `cut_all`."""
    model, delivered = mlp(), 0
    optimizer = sgd(model)
    attach(estimator, TrainingContext(model, Delivered(lambda: delivered), optimizer))
    estimator.start()
    for batch in batches:
        delivered += len(batch[0])
        train(model, optimizer, [batch], parts_of=2 if cut_all else len(batch[0]) // estimator.min_micro_batches)
    return estimator.finish()


@pytest.mark.parametrize("cut_all", [False, True])
def test_one_batch_in_three_is_looked_at_wherever_the_loop_cuts(cut_all: bool):
    """Against gradients kept by hand, of the halves of those batches at the weights they met."""
    batches = [tuple(part[at : at + 4] for part in dataset(28).tensors) for at in range(0, 28, 4)]
    found = seen_by(Split(every_steps=3), batches, cut_all=cut_all)
    model, pairs = mlp(), []
    optimizer = sgd(model)
    for number, (x, y) in enumerate(batches):
        if number in (0, 3, 6):
            halves = [per_sample.gradients(model, mean_loss, x[half], y[half]) for half in (slice(2), slice(2, 4))]
            pairs.append(per_sample.pair_of(halves))
        train(model, optimizer, [(x, y)])
    trace, sq_norm = (sum(each) / 3 for each in zip(*pairs, strict=True))
    assert (found.trace, found.sq_norm) == (pytest.approx(trace, rel=1e-9), pytest.approx(sq_norm, rel=1e-9))
    assert found.num_samples == 28


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
@pytest.mark.parametrize("kind", [Split, Moments])
def test_every_must_be_a_whole_number(kind, every):
    with pytest.raises(ArgumentError, match=r"every_steps must be an integer of at least 1, got every_steps="):
        kind(every_steps=every)


def test_a_resumed_epoch_looks_at_the_batches_it_would_have_looked_at():
    turns = []
    for stop in range(6):
        model, loader = mlp(), AdaptiveLoader(dataset(28), 4, seed=0)
        optimizer, estimator, resumed = sgd(model), Split(every_steps=3), Split(every_steps=3)
        for each in (estimator, resumed):
            attach(each, context(model, loader, optimizer))
        estimator.start()
        for _, batch in zip(range(stop), loader, strict=False):
            train(model, optimizer, [batch], parts_of=2)
        resumed.start()
        resumed.load_state_dict(estimator.state_dict())
        turns.append((estimator.min_micro_batches, resumed.min_micro_batches))
    assert turns == [(2, 2), (1, 1), (1, 1), (2, 2), (1, 1), (1, 1)]


def test_a_batch_that_showed_nothing_leaves_its_turn_to_the_next():
    """Adam has nothing to divide by before its first step."""
    model, loader, estimator = mlp(), AdaptiveLoader(DATA, 4, seed=0), Split(every_steps=8, preconditioned=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    attach(estimator, context(model, loader, optimizer))
    estimator.start()
    train(model, optimizer, loader, parts_of=2)
    assert estimator.finish().num_samples == 9  # the first four are in no estimate at all


# The fewest samples that an estimator can see anything in: no policy goes below


LEAST = {"trajectory": 1, "oracle": 1, "moments": 1, "per-sample": 2, "split": 2, "ranks": 2}


class ToOne(Policy):
    """Wants as few samples as there can be."""

    needs = frozenset({"diversity"})

    def next(self, seen: Measurement) -> Decision:
        return Decision(batch_size=1, reason="one")


def made(name: str):
    return make_estimator(name, **({"loss_fn": nn.functional.mse_loss} if ESTIMATORS[name].takes("loss_fn") else {}))


def test_every_estimator_has_its_row():
    assert set(LEAST) == set(ESTIMATORS)


@pytest.mark.parametrize("name", LEAST)
def test_a_policy_that_wants_one_sample_gets_what_the_estimator_needs(name: str):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=1e-3, momentum=0.9)
    loader = AdaptiveLoader(TensorDataset(torch.randn(12, 3), torch.randn(12, 1)), batch_size=4, seed=0)
    control = Controller(model, optimizer, loader, ToOne(), estimator=made(name), lr_coupling="linear")
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            for (x, y), weight in micro_batches(batch, -(-len(batch[0]) // control.plan().min_micro_batches)):
                (nn.functional.mse_loss(model(x), y) * weight).backward()
            optimizer.step()
        record = control.step()
    assert record.batch_size == record.next_batch_size == LEAST[name]
    assert record.measured
    assert record.lr == pytest.approx(1e-3 * LEAST[name] / 4)
    assert ("raised to the 2 samples" in record.reason) == (LEAST[name] == 2)


@pytest.mark.parametrize(("name", "least"), [("per-sample", 5), ("split", 5), ("ranks", 4), ("moments", 1)])
def test_ranks_share_a_batch(name: str, least: int):
    delivered = Delivered(lambda: 0)
    delivered.ranks = Ranks.alone()
    delivered.ranks.size = 4
    model, estimator = nn.Linear(3, 1), made(name)
    estimator.bind(TrainingContext(model, delivered, SGD(model.parameters(), lr=0.1)))
    assert estimator.min_batch_size == least
