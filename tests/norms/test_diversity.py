"""`DiversityMeter` and `gradient_diversity`: both sums, samples as delivered, frozen layers, copies."""

import copy
import io
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.optim import SGD
from torch.utils.data import TensorDataset

from divebatch import (
    AdaptiveLoader,
    Controller,
    DiveBatch,
    Diversity,
    NormMeter,
    gradient_diversity,
    micro_batches,
    norms,
)
from divebatch.errors import ArgumentError, CoverageError, UndefinedDiversityError, UsageError
from divebatch.estimators import Trajectory
from divebatch.norms import DiversityMeter
from divebatch.norms.rank_weighting import weigh_gradients
from divebatch.ranks import RankShard
from reference import per_sample
from reference.per_sample import (
    assert_same_sums,
    dataset,
    diversity_of,
    gradients,
    mean_loss,
    mlp,
    num_hooks,
    samples,
    sq_norms,
    sum_loss,
    train,
)

INPUTS, TARGETS = samples(13)
BATCHES = list(zip(INPUTS.split(5), TARGETS.split(5), strict=True))


class Restless(nn.Module):
    """What a forward pass may change: batch statistics, other buffers, the random state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.norm = nn.BatchNorm1d(3, affine=False).double()
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.dropout(self.norm(self.layer(x)))


class PastForward(nn.Module):
    """Uses the weights of one of its layers without calling the layer."""

    def __init__(self, past: str, names: tuple[str, ...] = ("first", "middle", "last")) -> None:
        super().__init__()
        self.past = past
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4).double() for name in names})

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in self.layers.items():
            x = linear(x, layer.weight, layer.bias) if name == self.past else layer(x)
        return x[:, :3]


# What it is


@pytest.mark.parametrize(("loss_reduction", "loss_fn"), [("mean", mean_loss), ("sum", sum_loss)])
def test_diversity_matches_a_loop_over_samples(loss_reduction, loss_fn):
    measured = gradient_diversity(mlp(), loss_fn, BATCHES, loss_reduction=loss_reduction)
    assert_same_sums(measured, per_sample.diversity(mlp(), mean_loss, BATCHES))


def test_samples_times_diversity_is_one_plus_the_noise_scale():
    rows = per_sample.gradients(mlp(), mean_loss, INPUTS, TARGETS)
    mean = rows.mean(0)
    noise_scale = float((rows - mean).square().sum(1).mean() / mean.square().sum())
    measured = gradient_diversity(mlp(), mean_loss, BATCHES)
    assert len(rows) * measured.value == pytest.approx(1 + noise_scale, rel=1e-9)
    assert measured.noise_scale == pytest.approx(noise_scale, rel=1e-9)


def test_a_model_with_unused_layers():
    model = nn.ModuleDict({"used": mlp(), "unused": nn.Linear(2, 2)})
    model.forward = lambda x: model["used"](x)
    assert_same_sums(gradient_diversity(model, mean_loss, BATCHES), per_sample.diversity(mlp(), mean_loss, BATCHES))


def test_it_runs_where_gradients_are_switched_off():
    with torch.no_grad():
        measured = gradient_diversity(mlp(), mean_loss, BATCHES)
    assert_same_sums(measured, per_sample.diversity(mlp(), mean_loss, BATCHES))


# Where it does not exist


def test_gradients_that_sum_to_zero_have_no_diversity():
    model = nn.Linear(1, 1, bias=False)
    measured = gradient_diversity(model, lambda out, _: out.mean(), [(torch.tensor([[2.0], [-2.0]]), None)])
    assert measured == Diversity(8.0, 0.0, 2)
    with pytest.raises(UndefinedDiversityError, match="gradients of 2 samples sum to zero"):
        _ = measured.value


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_have_no_diversity(bad: float):
    inputs = INPUTS.clone()
    inputs[3, 2] = bad
    measured = gradient_diversity(mlp(), mean_loss, [(inputs, TARGETS)])
    assert not measured.is_defined
    with pytest.raises(UndefinedDiversityError, match="NaN or infinite gradients"):
        _ = measured.value


def test_no_batches_get_an_error():
    with pytest.raises(ArgumentError, match="no batches"):
        gradient_diversity(mlp(), mean_loss, [])


# Left as found


def restless_model() -> Restless:
    torch.manual_seed(0)
    model = Restless()
    mean_loss(model(INPUTS), TARGETS).backward()
    model.norm.eval()
    return model


def found(model: nn.Module) -> dict[str, Tensor]:
    return {
        **{name: tensor.clone() for name, tensor in model.state_dict().items()},
        **{f"{name}.grad": parameter.grad.clone() for name, parameter in model.named_parameters()},
        "random state": torch.get_rng_state(),
    }


def assert_as_found(model: nn.Module, before: dict[str, Tensor]) -> None:
    after = found(model)
    assert [key for key in before if not torch.equal(before[key], after[key])] == []
    assert (model.training, model.dropout.training, model.norm.training) == (True, True, False)
    assert num_hooks(model) == 0


@pytest.mark.parametrize("norm_in_training", [False, True])
def test_the_model_is_left_as_found(norm_in_training: bool):
    model = restless_model()
    model.norm.train(norm_in_training)
    before = found(model)
    gradient_diversity(model, mean_loss, BATCHES)
    model.norm.eval()
    assert_as_found(model, before)


def test_the_model_is_left_as_found_after_a_failure():
    def fail(outputs: Tensor, targets: Tensor) -> Tensor:
        raise ArithmeticError

    model = restless_model()
    before = found(model)
    with pytest.raises(ArithmeticError):
        gradient_diversity(model, fail, BATCHES)
    assert_as_found(model, before)


def test_a_buffer_that_the_forward_pass_replaced_is_put_back():
    model = mlp()
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_pre_hook(lambda module, _: setattr(module, "calls", module.calls + 1))
    gradient_diversity(model, mean_loss, BATCHES)
    assert model.calls == 0


def test_gradients_that_were_none_stay_none():
    model = mlp()
    gradient_diversity(model, mean_loss, BATCHES)
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4


@pytest.mark.parametrize("make", [NormMeter, DiversityMeter])
def test_an_attached_meter_is_not_disturbed(make):
    model, alone = mlp(), mlp()
    with make(model) as disturbed, make(alone) as meter:
        mean_loss(alone(INPUTS[:6]), TARGETS[:6]).backward()
        loss = mean_loss(model(INPUTS[:6]), TARGETS[:6])
        assert_same_sums(gradient_diversity(model, mean_loss, BATCHES), per_sample.diversity(mlp(), mean_loss, BATCHES))
        loss.backward()
        gradient_diversity(model, mean_loss, BATCHES)
        assert sums(disturbed) == sums(meter)


def sums(meter: NormMeter | DiversityMeter) -> tuple[object, ...]:
    if isinstance(meter, DiversityMeter):
        return (meter.diversity(),)
    return meter.sum_of_sq_norms(), meter.num_samples, meter.per_sample().tolist()


# Weights past their layer


@pytest.mark.parametrize("past", ["first", "middle", "last"])
def test_a_weight_used_past_its_layer_gets_an_error(past: str):
    with pytest.raises(CoverageError, match=rf"layers\.{past}\.bias', 'layers\.{past}\.weight'\] received gradients"):
        gradient_diversity(PastForward(past), mean_loss, BATCHES)


# The meter


def test_clipping_and_accumulation_do_not_matter():
    model = mlp()
    with DiversityMeter(model) as meter:
        for x, y in BATCHES:
            mean_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert_same_sums(meter.diversity(), per_sample.diversity(mlp(), mean_loss, BATCHES))


def test_a_backward_that_died_half_way_is_in_neither_sum():
    model = mlp()
    with DiversityMeter(model) as meter:
        hidden = model[:2](INPUTS)
        hidden.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            mean_loss(model[2](hidden), TARGETS).backward()
        mean_loss(model(INPUTS[:6]), TARGETS[:6]).backward()
        assert_same_sums(meter.diversity(), per_sample.diversity(mlp(), mean_loss, [(INPUTS[:6], TARGETS[:6])]))


def test_state_carries_the_sums_over():
    first, second = mlp(), mlp()
    with DiversityMeter(first) as meter:
        mean_loss(first(INPUTS[:6]), TARGETS[:6]).backward()
        state = copy.deepcopy(meter.state_dict())
        mean_loss(first(INPUTS[6:]), TARGETS[6:]).backward()
        through = meter.diversity()
    with DiversityMeter(second) as meter:
        mean_loss(second(INPUTS), TARGETS).backward()
        meter.load_state_dict(state)
        mean_loss(second(INPUTS[6:]), TARGETS[6:]).backward()
        assert meter.diversity() == through


def test_nothing_is_left_attached():
    model = mlp()
    with DiversityMeter(model) as meter:
        assert num_hooks(model) == 2 + 4 + 4
        with pytest.raises(UsageError, match="attached already"):
            meter.attach()
        assert num_hooks(model) == 2 + 4 + 4
    assert num_hooks(model) == 0
    assert not meter.is_attached


def test_a_meter_has_a_state_whether_attached_or_not():
    model = mlp()
    meter = DiversityMeter(model, compiled=True)
    states = [meter.state_dict()]
    with meter:
        x, y = samples(6)
        mean_loss(model(x), y).backward()
    states.append(meter.state_dict())
    assert [state["num_samples"] for state in states] == [0, 6]


class Scaler:
    """Like torch's, which has its scale on the device."""

    _scale = torch.tensor(8.0)


def test_under_a_scaler_a_stand_ins_pass_counts_for_nothing_too():
    model, (x, y) = mlp(), samples(6)
    found = []
    for sizes in ((6, 0, 6), (6, 6)):
        shards = iter([RankShard(6, mine) for mine in sizes])
        with DiversityMeter(model, grad_scaler=Scaler(), rank_shard=lambda shards=shards: next(shards)) as meter:
            for mine in sizes:
                (mean_loss(model(x), y) * 8.0 * (mine / 6)).backward()
            found.append(meter.diversity())
    assert found[0] == found[1]


# Measured passes over more samples than were delivered are an error: a second backward pass is not another batch


Step = Callable[[nn.Module, Tensor, Tensor], None]


def plain(model: nn.Module, x: Tensor, y: Tensor) -> None:
    mean_loss(model(x), y).backward()


def in_parts(model: nn.Module, x: Tensor, y: Tensor) -> None:
    for (part_x, part_y), weight in micro_batches((x, y), 2):
        (mean_loss(model(part_x), part_y) * weight).backward()


def attacked(model: nn.Module, x: Tensor, y: Tensor) -> None:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(mean_loss(model(x), y), x)
    plain(model, x.detach() + 0.1 * slope.sign(), y)


def two_losses(model: nn.Module, x: Tensor, y: Tensor) -> None:
    outputs = model(x)
    outputs.square().mean().backward(retain_graph=True)
    mean_loss(outputs, y).backward()


def attacked_by_backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
    x = x.clone().requires_grad_()
    plain(model, x, y)
    model.zero_grad()
    plain(model, (x + 0.1 * x.grad.sign()).detach(), y)


def two_views(model: nn.Module, x: Tensor, y: Tensor) -> None:
    plain(model, torch.cat([x, -x]), torch.cat([y, y]))


def epoch(step: Step, *, compiled: bool = False) -> int:
    model = mlp()
    optimizer, loader = SGD(model.parameters(), 0.01), AdaptiveLoader(dataset(12), 4, seed=0)
    policy, estimator = DiveBatch(delta=0.1, max_batch_size=8), Trajectory(compiled=compiled)
    with Controller(model, optimizer, loader, policy, estimator=estimator) as control:
        for x, y in loader:
            optimizer.zero_grad()
            step(model, x, y)
            optimizer.step()
        return control.step().samples


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("step", [plain, in_parts, attacked])
def test_passes_over_what_was_delivered_are_right(step: Step, compiled: bool):
    assert epoch(step, compiled=compiled) == 12


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("step", [two_losses, attacked_by_backward, two_views])
def test_a_second_pass_on_a_batch_is_an_error(step: Step, compiled: bool):
    # Compiled passes but the first have their samples on the device, read at the end of the epoch.
    with pytest.raises(CoverageError, match=r"(8 samples .* delivered 4|24 samples .* delivered 12): .*'moments'"):
        epoch(step, compiled=compiled)


def without_its_weight(model: nn.Module, x: Tensor, y: Tensor) -> None:
    for (part_x, part_y), weight in micro_batches((x, y), 2):
        (mean_loss(model(part_x), part_y) * float(weight)).backward()


def a_part(model: nn.Module, x: Tensor, y: Tensor) -> None:
    plain(model, x[:3], y[:3])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("step", [without_its_weight, a_part])
def test_a_pass_over_fewer_samples_than_its_batch_is_an_error(step: Step, compiled: bool):
    with pytest.raises(CoverageError, match=r"went through \d samples, and its batch has 4: .*weight"):
        epoch(step, compiled=compiled)


class TimeFirst(nn.Module):
    """Sequences (time, batch, features) through layers that take the first dimension for the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.transpose(0, 1)).mean(0)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_with_the_time_first_is_an_error(compiled: bool):
    model, data = TimeFirst(), TensorDataset(torch.randn(12, 6, 4).double(), torch.randn(12, 1).double())
    optimizer, loader = SGD(model.parameters(), 0.01), AdaptiveLoader(data, 4, seed=0)
    estimator = Trajectory(compiled=compiled)
    with Controller(model, optimizer, loader, DiveBatch(delta=0.1, max_batch_size=8), estimator=estimator):
        x, y = next(iter(loader))
        with pytest.raises(CoverageError, match=r"6 samples .* 4"):
            (model(x) - y).square().mean().backward()


def test_a_loop_that_fetches_a_batch_ahead_is_right():
    model = mlp()
    optimizer, loader = SGD(model.parameters(), 0.01), AdaptiveLoader(dataset(6), 4, seed=0)
    meter = DiversityMeter(model, rank_shard=lambda: loader.rank_shard, delivered=lambda: loader.samples_delivered)
    with meter:
        for _ in range(2):
            train(model, optimizer, list(loader))
        assert meter.diversity().num_samples == 12


# Layers that are frozen and set free while measuring, complex parameters, and copies of a measured model


SIX_INPUTS, SIX_TARGETS = samples(6)


def backward(model: Any, inputs: Tensor = SIX_INPUTS) -> None:
    mean_loss(model(inputs), SIX_TARGETS).backward()


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
    assert measured == pytest.approx(float(sq_norms(model, mean_loss, SIX_INPUTS, SIX_TARGETS).sum()), rel=1e-10)


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
    fake = gan.generator(SIX_INPUTS).detach()

    def both(outputs: Tensor, targets: Tensor) -> Tensor:
        return mean_loss(outputs[:, 0], targets) + mean_loss(outputs[:, 1], -targets)

    if of == "discriminator":
        rows = gradients(_OnPairs(gan.discriminator), both, torch.stack([SIX_INPUTS, fake], 1), SIX_TARGETS)
    else:
        gan.discriminator.requires_grad_(False)
        rows = gradients(nn.Sequential(gan.generator, gan.discriminator), mean_loss, SIX_INPUTS, SIX_TARGETS)
        gan.discriminator.requires_grad_(True)
    with DiversityMeter(getattr(gan, of)) as meter:
        gan_step(gan, SIX_INPUTS, SIX_TARGETS)
        measured = meter.diversity()
    assert_same_sums(measured, diversity_of(rows))


class _OnPairs(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pairs: Tensor) -> Tensor:
        return torch.stack([self.model(pairs[:, 0]), self.model(pairs[:, 1])], 1)


def test_frozen_layers_may_be_run_without_gradients_and_cost_no_hook_afterwards():
    model = mlp()
    model[0].requires_grad_(False)
    with NormMeter(model):
        model[0].requires_grad_(True)
        with torch.no_grad():
            model(SIX_INPUTS)
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
    assert torch.equal(other(SIX_INPUTS), model(SIX_INPUTS))
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


def test_a_measured_pass_makes_few_calls():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    calls, root = [], str(Path(norms.__file__).parent)

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            calls.append(frame.f_code.co_qualname)

    with DiversityMeter(model, skip_nonfinite=True):
        for profile in (None, note):  # the first pass is checked
            sys.setprofile(profile)
            try:
                mean_loss(model(INPUTS), TARGETS).backward()
            finally:
                sys.setprofile(None)
    assert len(calls) <= 70, calls
