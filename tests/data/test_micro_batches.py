import itertools
import pickle
from collections import UserDict, namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from divebatch import AdaptiveLoader, Controller, DiveBatch, NormMeter, micro_batches
from divebatch.errors import ArgumentError, CoverageError, UsageError
from divebatch.norms import DiversityMeter
from divebatch.ranks import RankShard
from reference import per_sample

Pair = namedtuple("Pair", "first second")


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3))
    return layers.double()


def data(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_samples)
    inputs = torch.randn(num_samples, 2, 5, 5, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(3, (num_samples,), generator=generator)


@settings(deadline=None, max_examples=25)
@given(num_samples=st.integers(1, 20), size=st.integers(1, 25), reduction=st.sampled_from(["mean", "sum"]))
def test_gradients_and_norms_are_those_of_one_backward_pass(num_samples, size, reduction):
    whole, parts = network(), network()
    inputs, targets = data(num_samples)
    with NormMeter(whole, loss_reduction=reduction) as once:
        cross_entropy(whole(inputs), targets, reduction=reduction).backward()
    with NormMeter(parts, loss_reduction=reduction) as often:
        for (x, y), weight in micro_batches((inputs, targets), size, loss_reduction=reduction):
            (cross_entropy(parts(x), y, reduction=reduction) * weight).backward()
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)
    assert often.sum_of_sq_norms() == pytest.approx(once.sum_of_sq_norms(), rel=1e-10)


def epoch(size: int | None) -> tuple[float, torch.Tensor]:
    model = network()
    loader = AdaptiveLoader(torch.utils.data.TensorDataset(*data(23)), 7, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Controller(model, optimizer, loader, DiveBatch(0.1, 16)) as control:
        per_sample.train(model, optimizer, loader, parts_of=size or 100, loss_fn=cross_entropy)
        return control.step().diversity, model[0].weight.detach()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_controller_measures_the_same_diversity_whatever_the_cut(size):
    diversity, weight = epoch(size)
    diversity_whole, weight_whole = epoch(None)
    assert diversity == pytest.approx(diversity_whole, rel=1e-9)
    torch.testing.assert_close(weight, weight_whole)


def test_any_nesting_is_cut_and_what_is_no_tensor_goes_to_every_part():
    batch = {"x": torch.arange(5), "pair": Pair(torch.arange(5) * 2, [torch.arange(5) * 3]), "name": "text"}
    parts = [part for part, _ in micro_batches(batch, 2)]
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert [part["pair"].second[0].tolist() for part in parts] == [[0, 3], [6, 9], [12]]
    assert all(isinstance(part["pair"], Pair) and part["name"] == "text" for part in parts)
    assert [weight for _, weight in micro_batches(batch, 2)] == [0.4, 0.4, 0.2]


def test_mappings_that_are_no_dicts_are_cut_too():
    """Hugging Face's BatchEncoding is a UserDict."""
    parts = [part for part, _ in micro_batches(UserDict(input_ids=torch.arange(3), labels=torch.arange(3)), 2)]
    assert [{key: value.tolist() for key, value in part.items()} for part in parts] == [
        {"input_ids": [0, 1], "labels": [0, 1]},
        {"input_ids": [2], "labels": [2]},
    ]


@pytest.mark.parametrize(
    ("batch", "size", "message"),
    [
        (torch.arange(3), 0, "size must be an integer of at least 1, got size=0"),
        (torch.arange(3), 1.5, "got size=1.5"),
        ((torch.arange(3), torch.arange(4)), 2, "one and the same first dimension, found: 3, 4"),
        (torch.tensor(1.0), 2, "first dimension, found: None"),
        (["text"], 2, "found: no tensor"),
    ],
)
def test_wrong_use_is_named(batch, size, message):
    with pytest.raises(ArgumentError, match=message):
        list(micro_batches(batch, size))


# However the micro-batches are gone through


def mean_over(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(x), y)


def in_the_loop(model, batch):
    for (x, y), weight in micro_batches(batch, 3):
        (mean_over(model, x, y) * weight).backward()


def from_a_list(model, batch):
    for (x, y), weight in list(micro_batches(batch, 3)):
        (mean_over(model, x, y) * weight).backward()


def backwards(model, batch):
    for (x, y), weight in reversed(list(micro_batches(batch, 3))):
        (weight * mean_over(model, x, y)).backward()


def zipped(model, batch):
    for ((x, y), weight), _ in zip(micro_batches(batch, 3), range(10), strict=False):
        torch.mul(mean_over(model, x, y), weight).backward()


def all_forward_passes_first(model, batch):
    losses = [mean_over(model, x, y) * weight for (x, y), weight in micro_batches(batch, 3)]
    for loss in losses:
        loss.backward()


def in_place(model, batch):
    for (x, y), weight in micro_batches(batch, 3):
        loss = mean_over(model, x, y)
        loss *= weight
        loss.backward()


def with_gradients_taken_by_hand(model, batch):
    parameters = list(model.parameters())
    for (x, y), weight in micro_batches(batch, 3):
        gradients = torch.autograd.grad(mean_over(model, x, y) * weight, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def in_two_losses_of_one_weight(model, batch):
    for (x, y), weight in micro_batches(batch, 3):
        loss = mean_over(model, x, y)
        (0.25 * loss * weight + weight * loss * 0.75).backward()


def by_reentrant_checkpoints(model, batch):
    for (x, y), weight in micro_batches(batch, 3):
        x.requires_grad_()
        loss = checkpoint(lambda x, y=y, w=weight: mean_over(model, x, y) * w, x, use_reentrant=True)
        loss.backward()


def with_the_last_generator_suspended(model, batch):
    suspended = micro_batches(batch, 2)
    part, _ = next(suspended)
    assert len(part[0]) == 2
    in_the_loop(model, batch)
    del suspended


WAYS = (
    in_the_loop,
    from_a_list,
    backwards,
    zipped,
    all_forward_passes_first,
    in_place,
    with_gradients_taken_by_hand,
    in_two_losses_of_one_weight,
    by_reentrant_checkpoints,
    with_the_last_generator_suspended,
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_norms_and_gradients_are_those_of_each_sample_by_itself(way):
    model, batch = network(), data(8)
    with NormMeter(model) as meter:
        way(model, batch)
    expected = per_sample.sq_norms(network(), cross_entropy, *batch)
    assert meter.sum_of_sq_norms() == pytest.approx(float(expected.sum()), rel=1e-10)
    plain = network()
    mean_over(plain, *batch).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("again", [1, 2])
def test_a_retained_graph_has_its_weight_each_time(again: int):
    model, batch = network(), data(6)
    (x, y), weight = next(micro_batches(batch, 2))
    with NormMeter(model) as meter:
        loss = mean_over(model, x, y) * weight
        for _ in range(again):
            loss.backward(retain_graph=True)
    one = float(per_sample.sq_norms(network(), cross_entropy, x, y).sum())
    assert meter.sum_of_sq_norms() == pytest.approx(again * one, rel=1e-10)


@pytest.mark.parametrize("scaled_first", [False, True])
def test_with_a_scale_of_the_loss(scaled_first: bool):
    model, batch = network(), data(8)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with NormMeter(model, grad_scaler=scaler) as meter:
        for (x, y), weight in list(micro_batches(batch, 3)):
            loss = mean_over(model, x, y)
            (scaler.scale(loss) * weight if scaled_first else scaler.scale(loss * weight)).backward()
    expected = per_sample.sq_norms(network(), cross_entropy, *batch)
    assert meter.sum_of_sq_norms() == pytest.approx(float(expected.sum()), rel=1e-6)


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.slow
def test_a_compiled_loss_has_its_weight():
    model, batch = network(), data(8)
    meter = NormMeter(model, compiled=True)
    weighted = torch.compile(lambda x, y, weight: mean_over(model, x, y) * weight, backend="aot_eager")
    with meter:
        for (x, y), weight in list(micro_batches(batch, 4)):
            weighted(x, y, weight).backward()
    torch.compiler.reset()
    expected = per_sample.sq_norms(network(), cross_entropy, *batch)
    assert meter.sum_of_sq_norms() == pytest.approx(float(expected.sum()), rel=1e-10)


# What would be wrong is an error

WRONG = {
    "a float of it": lambda loss, weight: loss * float(weight),
    "a product": lambda loss, weight: (2 * weight) * loss / 2,
    "the number of parts": lambda loss, weight: loss / 3,
    "nothing": lambda loss, weight: loss,
}


@pytest.mark.parametrize("drawn", [lambda parts: parts, list], ids=["in a loop", "as a list"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_measured_pass_that_leaves_its_weight_out_is_an_error(wrong: str, drawn):
    model, parts = network(), iter(drawn(micro_batches(data(9), 3)))
    (x, y), weight = next(parts)
    meter = DiversityMeter(model, rank_shard=lambda: RankShard(9, 9), delivered=itertools.count(0, 9).__next__)
    with meter, pytest.raises(CoverageError, match=r"3 samples, and its batch has 9: .* \* weight"):
        WRONG[wrong](mean_over(model, x, y), weight).backward()


def test_a_pass_over_the_sum_of_all_losses_is_an_error():
    model = network()
    with NormMeter(model), pytest.raises(UsageError, match="the losses of two micro-batches"):
        sum(mean_over(model, x, y) * weight for (x, y), weight in micro_batches(data(9), 3)).backward()


def test_what_is_no_measured_pass_may_use_weights_as_numbers():
    model, (inputs, targets) = network(), data(9)
    with torch.no_grad():
        total = sum(mean_over(model, x, y).item() * weight for (x, y), weight in micro_batches((inputs, targets), 3))
        assert type(total) is float
        assert total == pytest.approx(mean_over(model, inputs, targets).item())
        kept = list(micro_batches((inputs, targets), 3))
    assert pickle.loads(pickle.dumps(kept[0][1])).num_samples == 3
    with NormMeter(model) as meter:  # as many samples as the parts have that were drawn for evaluation
        mean_over(model, *kept[0][0]).backward()
    assert meter.num_samples == 3
