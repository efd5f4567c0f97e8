"""SGLD: the noise after each step has the variance it should, and weights wander as the theory says."""

import pytest
import torch
from torch import nn

from divebatch.errors import ArgumentError, CheckpointError
from divebatch.research import LangevinNoise

MANY = 20_000
"""Weights that wander independently: their variance is known to 1 %."""


@pytest.mark.parametrize("gradient_noise", [0.0, 3.0])
def test_the_stationary_variance_on_a_quadratic(gradient_noise):
    """x' = x - eps/2 U'(x) + N(0, eps) on U = lam x^2 / 2: (1 + eps s^2 / 4) / (lam (1 - eps lam / 4))."""
    eps, lam = 0.5, 1.5
    torch.manual_seed(0)
    weights = nn.Parameter(torch.zeros(MANY))
    optimizer = torch.optim.SGD([weights], lr=eps / 2)
    with LangevinNoise(optimizer, temperature=1.0, seed=1):
        for _ in range(30):  # each forgets all but 0.39 of the variance before
            weights.grad = lam * weights.detach() + gradient_noise * torch.randn(MANY)
            optimizer.step()
    expected = (1 + eps * gradient_noise**2 / 4) / (lam * (1 - eps * lam / 4))
    assert weights.var().item() == pytest.approx(expected, rel=0.04)


def test_each_group_has_the_variance_of_its_own_rate_and_a_change_of_it_is_followed():
    groups = [nn.Parameter(torch.zeros(MANY)) for _ in range(2)]
    optimizer = torch.optim.Adam([{"params": [groups[0]], "lr": 0.1}, {"params": [groups[1]], "lr": torch.tensor(0.4)}])
    for p in groups:
        p.grad = torch.zeros_like(p)
    noise = LangevinNoise(optimizer, temperature=0.5)
    optimizer.step()
    assert [p.var().item() for p in groups] == pytest.approx([0.1, 0.4], rel=0.05)
    before = groups[0].detach().clone()
    optimizer.param_groups[0]["lr"] = 0.9
    optimizer.step()
    assert (groups[0] - before).var().item() == pytest.approx(0.9, rel=0.05)
    assert abs((groups[0] - before).mean().item()) < 4 * (0.9 / MANY) ** 0.5
    assert noise.steps == 2


def stepped(steps, *, temperature=1.0, seed=0, start=None, state=None):
    """Weights after so many steps, and the noise's state."""
    weights = nn.Parameter(torch.ones(5) if start is None else start.clone())
    optimizer = torch.optim.SGD([weights], lr=0.1)
    noise = LangevinNoise(optimizer, temperature=temperature, seed=seed)
    if state is not None:
        noise.load_state_dict(state)
    for _ in range(steps):
        weights.grad = weights.detach().clone()
        optimizer.step()
    return weights.detach(), noise.state_dict()


def test_draws_depend_on_seed_and_step_and_a_resume_is_exact():
    whole, _ = stepped(6)
    half, state = stepped(3)
    assert torch.equal(stepped(3, seed=9, start=half, state=state)[0], whole)
    assert not torch.equal(stepped(6, seed=1)[0], whole)
    assert not torch.equal(stepped(2)[0] - stepped(1)[0] * 0.9, stepped(1)[0] - 0.9)
    with pytest.raises(CheckpointError, match="temperature"):
        stepped(1, temperature=2.0, state=state)


def test_no_temperature_no_parameter_without_gradient_and_nothing_after_close():
    assert stepped(1, temperature=0)[0].tolist() == pytest.approx([0.9] * 5)
    used, unused = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([used, unused], lr=0.1)
    used.grad = torch.zeros(3)
    noise = LangevinNoise(optimizer, temperature=1.0)
    optimizer.step()
    assert (used != 0).all()
    assert (unused == 0).all()
    noise.close()
    before = used.detach().clone()
    optimizer.step()
    assert torch.equal(used, before)


def test_a_step_that_a_grad_scaler_skips_gets_no_noise():
    weights = nn.Parameter(torch.zeros(3))
    weights.grad = torch.zeros(3)
    optimizer = torch.optim.SGD([weights], lr=0.1, fused=True)
    LangevinNoise(optimizer, temperature=1.0)
    optimizer.found_inf = torch.tensor(1.0)  # as a GradScaler tells optimizers with fused=True
    optimizer.step()
    assert (weights == 0).all()


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf"), True, "1"])
def test_a_temperature_that_cannot_be_is_refused(temperature):
    with pytest.raises(ArgumentError, match="temperature"):
        LangevinNoise(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), temperature=temperature)
    with pytest.raises(ArgumentError, match="optimizer"):
        LangevinNoise(nn.Linear(1, 1), temperature=1.0)  # type: ignore[arg-type]
