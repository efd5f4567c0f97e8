"""Layers that are frozen and set free while measuring, complex parameters, and copies of a measured model."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from divebatch import AdaptiveLoader, Controller, DiveBatch, NormMeter
from divebatch.errors import CoverageError
from divebatch.norms import DiversityMeter
from divebatch.norms.rank_weighting import weigh_gradients
from reference.per_sample import dataset, gradients, mean_loss, mlp, num_hooks, samples, sq_norms

INPUTS, TARGETS = samples(6)


def backward(model: Any, inputs: Tensor = INPUTS) -> None:
    mean_loss(model(inputs), TARGETS).backward()


# Frozen and set free


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "whole"])
@pytest.mark.parametrize(("meter", "compiled"), [(NormMeter, False), (DiversityMeter, False), (DiversityMeter, True)])
def test_a_layer_set_free_while_measuring_is_an_error(meter: type, compiled: bool, frozen: str):
    model = mlp()
    chosen = list(model[0].parameters()) if frozen == "whole" else [model.get_parameter(frozen)]
    for parameter in chosen:
        parameter.requires_grad_(False)
    with meter(model, compiled=compiled):
        backward(model)
        for parameter in chosen:
            parameter.requires_grad_(True)
        with pytest.raises(CoverageError, match=r"parameter '0\.\w+'.* was frozen when measuring began"):
            backward(model)


def test_a_layer_set_free_between_epochs_is_right():
    model = mlp()
    model[0].requires_grad_(False)
    meter = DiversityMeter(model)
    with meter:
        backward(model)
    model[0].requires_grad_(True)
    with meter:
        backward(model)
        measured = meter.diversity().sum_of_sq_norms
    assert measured == pytest.approx(float(sq_norms(model, mean_loss, INPUTS, TARGETS).sum()), rel=1e-10)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.discriminator = nn.Linear(4, 4).double(), mlp()


def gan_step(gan: Gan, x: Tensor, y: Tensor) -> None:
    """The usual one: the discriminator is frozen while the generator learns."""
    fake = gan.generator(x)
    gan.discriminator.requires_grad_(False)
    mean_loss(gan.discriminator(fake), y).backward()
    gan.discriminator.requires_grad_(True)
    (mean_loss(gan.discriminator(x), y) + mean_loss(gan.discriminator(fake.detach()), -y)).backward()


@pytest.mark.parametrize("of", ["generator", "discriminator"])
def test_a_gan_that_freezes_by_turns_is_right_for_each_part(of: str):
    gan = Gan()
    fake = gan.generator(INPUTS).detach()

    def both(outputs: Tensor, targets: Tensor) -> Tensor:
        return mean_loss(outputs[:, 0], targets) + mean_loss(outputs[:, 1], -targets)

    if of == "discriminator":
        rows = gradients(_OnPairs(gan.discriminator), both, torch.stack([INPUTS, fake], 1), TARGETS)
    else:
        gan.discriminator.requires_grad_(False)
        rows = gradients(nn.Sequential(gan.generator, gan.discriminator), mean_loss, INPUTS, TARGETS)
        gan.discriminator.requires_grad_(True)
    with DiversityMeter(getattr(gan, of)) as meter:
        gan_step(gan, INPUTS, TARGETS)
        measured = meter.diversity()
    assert measured.num_samples == 6
    assert measured.sum_of_sq_norms == pytest.approx(float(rows.square().sum()), rel=1e-10)
    assert measured.sq_norm_of_sum == pytest.approx(float(rows.sum(0).square().sum()), rel=1e-10)


class _OnPairs(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pairs: Tensor) -> Tensor:
        return torch.stack([self.model(pairs[:, 0]), self.model(pairs[:, 1])], 1)


def test_a_part_that_is_frozen_when_measuring_begins_is_an_error_at_once():
    gan = Gan()
    gan.discriminator.requires_grad_(False)
    with DiversityMeter(gan), pytest.raises(CoverageError, match=r"parameter 'discriminator\.0\.weight'"):
        gan_step(gan, INPUTS, TARGETS)


def test_frozen_layers_may_be_run_without_gradients_and_cost_no_hook_afterwards():
    model = mlp()
    model[0].requires_grad_(False)
    with NormMeter(model):
        model[0].requires_grad_(True)
        with torch.no_grad():
            model(INPUTS)
        model[0].requires_grad_(False)
        backward(model)
    assert num_hooks(model) == 0


# Complex parameters


def test_complex_parameters_are_refused():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, dtype=torch.complex64))
    with pytest.raises(CoverageError, match=r"parameter '1\.weight' is complex.*estimator='moments'"):
        NormMeter(model)
    model[1].requires_grad_(False)
    NormMeter(model)


# Copies of a model under measurement


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"pickle": pickled, "torch.save": saved, "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("passes", [0, 1, 2])
def test_a_copy_of_a_measured_model_is_a_model_that_is_not_measured(how: str, compiled: bool, passes: int):
    model = mlp()
    model[0].bias.requires_grad_(False)
    with DiversityMeter(model, compiled=compiled) as meter:
        for _ in range(passes):
            backward(model)
        other = COPIES[how](model)
        backward(other)
        assert meter.norms.num_samples == 6 * passes
        backward(model)
        assert meter.norms.num_samples == 6 * passes + 6
    assert type(other[0]) is nn.Linear
    assert torch.equal(other(INPUTS), model(INPUTS))
    with DiversityMeter(other, compiled=compiled) as again:
        backward(other)
        assert again.norms.num_samples == 6


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_a_model_whose_gradients_are_weighed_is_not_weighed(how: str):
    model = mlp()
    undo = weigh_gradients(model, lambda: 3.0)
    other = COPIES[how](model)
    undo()
    backward(other)
    backward(model)
    assert torch.equal(other[2].weight.grad, model[2].weight.grad)


@pytest.mark.parametrize("how", COPIES)
def test_a_model_may_be_saved_within_an_epoch(how: str):
    model = mlp()
    optimizer, loader = SGD(model.parameters(), 0.01), AdaptiveLoader(dataset(12), 4, seed=0)
    with Controller(model, optimizer, loader, DiveBatch(delta=0.1, max_batch_size=8)) as control:
        for x, y in loader:
            mean_loss(model(x), y).backward()
            other = COPIES[how](model)
            optimizer.step()
        assert control.step().samples == 12
    backward(other)
