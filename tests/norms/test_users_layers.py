"""Layers of the user's own: a rule that says too little is named, and every entrance takes the fallback."""

import pytest
import torch
from torch import Tensor, nn

from divebatch import AdaptiveLoader, Controller, DiveBatch, NormMeter, Oracle, gradient_diversity, rule_for
from divebatch.errors import ArgumentError, CoverageError
from divebatch.norms.registry import RULES
from reference.per_sample import dataset, mean_loss, samples, sq_norms

INPUTS, TARGETS = samples(7)


class Gate(nn.Module):
    """Parameters that are not called weight and bias."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.shift = nn.Parameter(torch.ones(3).double()), nn.Parameter(torch.zeros(3).double())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.slope + self.shift


def gated() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3).double(), Gate())


@pytest.fixture
def _rules_put_back():
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def measure(model: nn.Module) -> NormMeter:
    with NormMeter(model) as meter:
        mean_loss(model(INPUTS), TARGETS).backward()
    return meter


@pytest.mark.usefixtures("_rules_put_back")
def test_a_rule_states_the_parameters_it_names():
    rule_for(Gate, parameters=("slope", "shift"))(lambda _, x, dy: {"slope": x * dy, "shift": dy})
    expected = sq_norms(gated(), mean_loss, INPUTS, TARGETS)
    torch.testing.assert_close(measure(gated()).per_sample(), expected, rtol=1e-10, atol=0)


@pytest.mark.usefixtures("_rules_put_back")
def test_a_rule_that_names_no_parameters_says_how_to():
    rule_for(Gate)(lambda _, x, dy: {"slope": x * dy, "shift": dy})
    with pytest.raises(
        CoverageError, match=r"'1.slope' of Gate \(which its rule does not state\).*rule_for\(Gate, parameters="
    ):
        NormMeter(gated())


@pytest.mark.usefixtures("_rules_put_back")
def test_a_parameter_that_a_rule_promised_and_left_out_is_named():
    rule_for(Gate, parameters=("slope", "shift"))(lambda _, x, dy: {"slope": x * dy})
    with pytest.raises(CoverageError, match=r"the rule of '1' \(Gate\) gave no gradients of 'shift'"):
        measure(gated())
    frozen = gated()
    frozen[1].shift.requires_grad_(False)
    expected = sq_norms(frozen, mean_loss, INPUTS, TARGETS)
    torch.testing.assert_close(measure(frozen).per_sample(), expected, rtol=1e-10, atol=0)


@pytest.mark.usefixtures("_rules_put_back")
def test_gradients_of_another_shape_are_refused():
    rule_for(Gate, parameters=("slope", "shift"))(lambda _, x, dy: {"slope": x * dy, "shift": dy[:, None]})
    with pytest.raises(CoverageError, match=r"shape \(7, 1, 3\) for 'shift'; .* here \(batch, 3\)"):
        measure(gated())


def test_the_exact_diversity_takes_the_fallback():
    rows = [(INPUTS, TARGETS)]
    with pytest.raises(CoverageError, match=r"fallback='vmap' \(in a controller: estimator=Trajectory\(fallback="):
        gradient_diversity(gated(), mean_loss, rows)
    found = gradient_diversity(gated(), mean_loss, rows, fallback="vmap")
    expected = sq_norms(gated(), mean_loss, INPUTS, TARGETS).sum().item()
    assert found.sum_of_sq_norms == pytest.approx(expected, rel=1e-10)


def test_the_oracle_takes_the_fallback():
    model, loader = gated(), AdaptiveLoader(dataset(12), 4, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CoverageError, match=r"'1.slope' of Gate"):
        Controller(model, optimizer, loader, DiveBatch(1.0, 8), estimator=Oracle(mean_loss))
    estimator = Oracle(mean_loss, fallback="vmap")
    with Controller(model, optimizer, loader, DiveBatch(1.0, 8), estimator=estimator) as control:
        for x, y in loader:
            optimizer.zero_grad()
            mean_loss(model(x), y).backward()
            optimizer.step()
        exact = gradient_diversity(model, mean_loss, loader.full_pass(), fallback="vmap").value
        assert control.step().diversity == pytest.approx(exact)


@pytest.mark.parametrize(
    ("batch", "named"), [({"x": INPUTS, "y": TARGETS}, "got dict"), ((INPUTS, TARGETS, TARGETS), "got tuple of 3")]
)
def test_batches_that_are_no_pairs_are_named(batch, named):
    with pytest.raises(ArgumentError, match=rf"batches must be pairs \(inputs, targets\), {named}"):
        gradient_diversity(nn.Linear(4, 3).double(), mean_loss, [batch])
