from collections import UserDict, namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from divebatch import AdaptiveLoader, Controller, DiveBatch, NormMeter, micro_batches
from divebatch.errors import ArgumentError
from divebatch.norms.share import current_share

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
        for (x, y), factor in micro_batches((inputs, targets), size, loss_reduction=reduction):
            (cross_entropy(parts(x), y, reduction=reduction) * factor).backward()
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)
    assert often.sum_of_sq_norms() == pytest.approx(once.sum_of_sq_norms(), rel=1e-10)


def epoch(size: int | None) -> tuple[float, torch.Tensor]:
    model = network()
    loader = AdaptiveLoader(torch.utils.data.TensorDataset(*data(23)), 7, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Controller(model, optimizer, loader, DiveBatch(0.1, 16)) as control:
        for batch in loader:
            optimizer.zero_grad()
            for (x, y), factor in micro_batches(batch, size or 100):
                (cross_entropy(model(x), y) * factor).backward()
            optimizer.step()
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
    assert [factor for _, factor in micro_batches(batch, 2)] == [0.4, 0.4, 0.2]


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


def test_unknown_reduction():
    with pytest.raises(ArgumentError, match="unknown loss_reduction 'median'; known: mean, sum"):
        list(micro_batches(torch.arange(3), 1, loss_reduction="median"))


def test_leaving_the_loop_early_leaves_no_trace():
    for _ in micro_batches(torch.arange(4), 1):
        assert current_share() == 0.25
        break
    assert current_share() == 1.0
