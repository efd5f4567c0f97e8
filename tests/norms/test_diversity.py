"""gradient_diversity and DiversityMeter against a loop that keeps every gradient."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from divebatch import Diversity, NormMeter, gradient_diversity
from divebatch.errors import ArgumentError, CoverageError, UndefinedDiversityError, UsageError
from divebatch.norms import DiversityMeter
from divebatch.ranks import RankShard
from reference import per_sample
from reference.per_sample import mean_loss, mlp, num_hooks, samples, sum_loss

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


def assert_same(measured: Diversity, expected: Diversity, rel: float = 1e-10) -> None:
    assert measured.sum_of_sq_norms == pytest.approx(expected.sum_of_sq_norms, rel=rel)
    assert measured.sq_norm_of_sum == pytest.approx(expected.sq_norm_of_sum, rel=rel)
    assert measured.num_samples == expected.num_samples


# What it is


@pytest.mark.parametrize(("loss_reduction", "loss_fn"), [("mean", mean_loss), ("sum", sum_loss)])
def test_diversity_matches_a_loop_over_samples(loss_reduction, loss_fn):
    measured = gradient_diversity(mlp(), loss_fn, BATCHES, loss_reduction=loss_reduction)
    assert_same(measured, per_sample.diversity(mlp(), mean_loss, BATCHES))


def test_diversity_in_single_precision():
    model, batches = mlp(dtype=torch.float32), [(x.float(), y.float()) for x, y in BATCHES]
    expected = per_sample.diversity(mlp(dtype=torch.float32).double(), mean_loss, BATCHES)
    assert_same(gradient_diversity(model, mean_loss, batches), expected, rel=1e-5)


def test_diversity_does_not_depend_on_how_the_samples_are_batched():
    whole = gradient_diversity(mlp(), mean_loss, [(INPUTS, TARGETS)])
    for size in (1, 4, 12):
        batches = zip(INPUTS.split(size), TARGETS.split(size), strict=True)
        assert_same(gradient_diversity(mlp(), mean_loss, batches), whole)


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
    assert_same(gradient_diversity(model, mean_loss, BATCHES), per_sample.diversity(mlp(), mean_loss, BATCHES))


def test_it_runs_where_gradients_are_switched_off():
    with torch.no_grad():
        measured = gradient_diversity(mlp(), mean_loss, BATCHES)
    assert_same(measured, per_sample.diversity(mlp(), mean_loss, BATCHES))


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
        assert_same(gradient_diversity(model, mean_loss, BATCHES), per_sample.diversity(mlp(), mean_loss, BATCHES))
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


def test_the_only_layers_weight_used_past_it_gets_the_same_error():
    with pytest.raises(CoverageError, match=r"layers\.only\..* received gradients"):
        gradient_diversity(PastForward("only", names=("only",)), mean_loss, BATCHES)


def test_a_weight_used_past_its_layer_gets_the_error_in_training_too():
    model = PastForward("only", names=("only",))

    def measured() -> Diversity:
        with DiversityMeter(model) as meter:
            mean_loss(model(INPUTS), TARGETS).backward()
            return meter.diversity()

    with pytest.raises(CoverageError, match=r"layers\.only\..* received gradients"):
        measured()


# The meter


def test_clipping_and_accumulation_do_not_matter():
    model = mlp()
    with DiversityMeter(model) as meter:
        for x, y in BATCHES:
            mean_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert_same(meter.diversity(), per_sample.diversity(mlp(), mean_loss, BATCHES))


def test_a_backward_that_died_half_way_is_in_neither_sum():
    model = mlp()
    with DiversityMeter(model) as meter:
        hidden = model[:2](INPUTS)
        hidden.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            mean_loss(model[2](hidden), TARGETS).backward()
        mean_loss(model(INPUTS[:6]), TARGETS[:6]).backward()
        assert_same(meter.diversity(), per_sample.diversity(mlp(), mean_loss, [(INPUTS[:6], TARGETS[:6])]))


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
