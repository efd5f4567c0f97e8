"""`NormMeter`: passes, samples, scales, rules of the user's own, and sums on the device."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from divebatch import AdaptiveLoader, Controller, DiveBatch, NormMeter, Oracle, gradient_diversity, rule_for
from divebatch.errors import ArgumentError, CoverageError, UsageError
from divebatch.norms.accumulators import are_finite, kept
from divebatch.norms.eager import MeasuredPass
from divebatch.norms.registry import RULES
from reference.per_sample import Calls, dataset, mean_loss, mlp, num_hooks, samples, sq_norms, sum_loss, train, twice

INPUTS, TARGETS = samples(7)


def layer_twice() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Calls(nn.Linear(4, 4), twice), nn.Linear(4, 3)).double()


def by_loop(model: nn.Module, inputs: Tensor = INPUTS, targets: Tensor = TARGETS) -> Tensor:
    return sq_norms(model, mean_loss, inputs, targets)


def assert_counted(meter: NormMeter, *expected: Tensor) -> None:
    """`expected` holds one tensor of squared norms for each backward pass."""
    torch.testing.assert_close(meter.per_sample(), expected[-1], rtol=1e-10, atol=0)
    assert meter.sum_of_sq_norms() == pytest.approx(float(torch.cat(expected).sum()), rel=1e-10)
    assert meter.num_samples == sum(map(len, expected))


# What is counted


@pytest.mark.parametrize(("loss_reduction", "loss_fn"), [("mean", mean_loss), ("sum", sum_loss)])
def test_norms_are_of_each_samples_own_unaveraged_loss(loss_reduction, loss_fn):
    model = mlp()
    with NormMeter(model, loss_reduction=loss_reduction) as meter:
        loss_fn(model(INPUTS), TARGETS).backward()
    assert_counted(meter, by_loop(model))


def test_the_users_gradients_are_those_of_a_run_without_meter():
    model, plain = mlp(), mlp()
    with NormMeter(model):
        mean_loss(model(INPUTS), TARGETS).backward()
    mean_loss(plain(INPUTS), TARGETS).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_a_layer_called_twice_is_exact():
    model = layer_twice()
    with NormMeter(model) as meter:
        mean_loss(model(INPUTS), TARGETS).backward()
    assert_counted(meter, by_loop(model))


def test_reset_forgets():
    model = mlp()
    with NormMeter(model) as meter:
        mean_loss(model(INPUTS), TARGETS).backward()
        meter.reset()
        assert (meter.sum_of_sq_norms(), meter.per_sample(), meter.num_samples) == (0.0, None, 0)
        mean_loss(model(INPUTS[:2]), TARGETS[:2]).backward()
    assert_counted(meter, by_loop(model)[:2])


def test_a_layer_called_by_keyword_counts():
    layer = nn.Linear(4, 3).double()
    with NormMeter(layer) as meter:
        mean_loss(layer(input=INPUTS), TARGETS).backward()
    assert_counted(meter, by_loop(layer))


def test_a_users_forward_hook_that_changes_the_output_is_part_of_the_loss():
    model = mlp()
    model[0].register_forward_hook(lambda layer, inputs, output: 3 * output)
    with NormMeter(model) as meter:
        mean_loss(model(INPUTS), TARGETS).backward()
    assert_counted(meter, by_loop(model))


# Forward and backward passes in unusual order


@pytest.mark.parametrize("make", [mlp, layer_twice])
def test_a_forward_without_backward_does_not_count(make):
    model = make()
    with NormMeter(model) as meter:
        model(INPUTS)
        with torch.no_grad():
            model(INPUTS)
        assert meter.num_samples == 0
        mean_loss(model(INPUTS), TARGETS).backward()
        model(INPUTS[:3])
    assert_counted(meter, by_loop(model))


@pytest.mark.parametrize("make", [mlp, layer_twice])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_then_two_backwards(make, order: tuple[int, int]):
    model = make()
    halves = [slice(0, 4), slice(4, 7)]
    with NormMeter(model) as meter:
        losses = [mean_loss(model(INPUTS[half]), TARGETS[half]) for half in halves]
        for which in order:
            losses[which].backward()
    assert_counted(meter, *(by_loop(model)[halves[which]] for which in order))


@pytest.mark.parametrize("make", [mlp, layer_twice])
def test_a_graph_run_through_twice_counts_twice(make):
    model = make()
    with NormMeter(model) as meter:
        loss = mean_loss(model(INPUTS), TARGETS)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_counted(meter, by_loop(model), by_loop(model))


def test_a_retained_graph_is_exact_although_another_forward_came_between():
    model = layer_twice()
    with NormMeter(model) as meter:
        loss = mean_loss(model(INPUTS), TARGETS)
        loss.backward(retain_graph=True)
        model[0].layer(INPUTS)
        loss.backward()
    assert_counted(meter, by_loop(model), by_loop(model))


@pytest.mark.parametrize(("make", "dies_before"), [(mlp, "2"), (layer_twice, "0.layer"), (layer_twice, "1")])
def test_a_backward_that_died_half_way_does_not_count(make, dies_before: str):
    model = make()
    with NormMeter(model) as meter:
        with failing_backward(model.get_submodule(dies_before)), pytest.raises(ArithmeticError):
            mean_loss(model(INPUTS), TARGETS).backward()
        assert meter.num_samples == 0
        mean_loss(model(INPUTS[:3]), TARGETS[:3]).backward()
    assert_counted(meter, by_loop(model)[:3])


@contextmanager
def failing_backward(layer: nn.Module) -> Iterator[None]:
    """Inside, a backward pass that has been through `layer` fails at the layer's input."""

    def fail(_: Tensor) -> None:
        raise ArithmeticError

    def watch(_: nn.Module, inputs: tuple[Tensor]) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(fail)

    handle = layer.register_forward_pre_hook(watch)
    yield
    handle.remove()


# Attaching


def test_no_hooks_are_left():
    model = mlp()
    with NormMeter(model):
        assert num_hooks(model) == 2 + 4
        mean_loss(model(INPUTS), TARGETS).backward()
        assert num_hooks(model) == 2  # parameters are looked at in the first pass alone
    assert num_hooks(model) == 0


def test_a_backward_after_the_end_does_not_count():
    model = mlp()
    with NormMeter(model) as meter:
        loss = mean_loss(model(INPUTS), TARGETS)
    loss.backward()
    assert (meter.sum_of_sq_norms(), meter.num_samples) == (0.0, 0)


def test_two_meters_count_side_by_side():
    model = mlp()
    with NormMeter(model) as outer, NormMeter(model) as inner:
        mean_loss(model(INPUTS), TARGETS).backward()
    assert_counted(outer, by_loop(model))
    assert_counted(inner, by_loop(model))


# Coverage


def test_every_uncovered_parameter_is_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Bilinear(4, 4, 4), nn.Sequential(nn.PReLU()))
    with pytest.raises(CoverageError, match="no norm rule covers") as error:
        NormMeter(model)
    message = str(error.value)
    for named in ("'1.weight' of Bilinear", "'1.bias' of Bilinear", "'2.0.weight' of PReLU", "Linear"):
        assert named in message
    assert "'0.weight'" not in message


def test_frozen_parameters_need_no_rule():
    model = nn.Sequential(nn.Linear(4, 4), nn.PReLU().requires_grad_(False))
    assert [layer.name for layer in NormMeter(model)._layers] == ["0"]


def test_a_model_without_trainable_parameter_gets_an_error():
    with pytest.raises(CoverageError, match="Sequential has no trainable parameter"):
        NormMeter(mlp().requires_grad_(False))


def test_tied_weights_are_squared_once_over_their_sum():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    model[2].weight = model[0].weight
    with NormMeter(model) as meter:
        mean_loss(model(INPUTS), TARGETS).backward()
    assert_counted(meter, by_loop(model))


def test_a_subclass_of_a_known_layer_is_refused():
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    with pytest.raises(CoverageError, match=r"'0\.weight' of Doubled; '0\.bias' of Doubled"):
        NormMeter(nn.Sequential(Doubled(4, 3)))


def test_a_parameter_that_the_layers_rule_does_not_know_is_named():
    model = mlp()
    model[2].gain = nn.Parameter(torch.ones(3))
    with pytest.raises(CoverageError, match=r"2\.gain"):
        NormMeter(model)


# The batch dimension


WITHOUT_BATCH: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Linear(4, 3), (4,)),
    (nn.Conv1d(2, 3, 1), (2, 5)),
    (nn.ConvTranspose2d(2, 3, 1), (2, 5, 5)),
    (nn.LayerNorm(6), (6,)),
    (nn.InstanceNorm1d(6, affine=True), (6, 4)),
    (nn.LSTM(2, 5), (4, 2)),
    (nn.GRUCell(2, 3), (2,)),
    (nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), (4, 6)),
]


@pytest.mark.parametrize(("layer", "shape"), WITHOUT_BATCH, ids=lambda each: type(each).__name__)
def test_an_input_without_batch_dimension_gets_an_error(layer: nn.Module, shape: tuple[int, ...]):
    with NormMeter(layer), pytest.raises(CoverageError, match="the batch dimension is missing"):
        layer(torch.ones(shape))[0].sum().backward()


def test_a_merged_batch_dimension_gets_an_error():
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0, 1), nn.Linear(4, 1))
    with NormMeter(model), pytest.raises(UsageError, match=r"layer '0' saw 5 samples and a later one 10 .*unmerged"):
        model(torch.randn(5, 2, 4)).mean().backward()


def test_sums_stay_where_they_are_so_that_a_replayed_pass_finds_them():
    meter, one = NormMeter(mlp()), torch.ones((), dtype=torch.float64)
    meter._finish(MeasuredPass("sketch", one, one, torch.tensor(2)))
    before = [meter._total, meter._variance, meter._num_samples]
    meter._finish(MeasuredPass("sketch", one, one, torch.tensor(3)))
    after = [meter._total, meter._variance, meter._num_samples]
    assert all(old is new for old, new in zip(before, after, strict=True))
    assert (meter.sum_of_sq_norms(), meter.num_samples, float(one)) == (4.0 + 9.0, 5, 1.0)


def test_a_wrong_value_gets_an_error_that_shows_it_and_there_is_no_every():
    with pytest.raises(ArgumentError, match="unknown mode 'rough'; known: exact, sketch"):
        NormMeter(mlp(), mode="rough")
    with pytest.raises(TypeError, match="every"):
        NormMeter(mlp(), every=2)


# Layers of the user's own: a rule that says too little is named, and every entrance takes the fallback


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


@pytest.fixture(autouse=True)
def rules_put_back():
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def measure(model: nn.Module) -> NormMeter:
    with NormMeter(model) as meter:
        mean_loss(model(INPUTS), TARGETS).backward()
    return meter


def test_a_rule_states_the_parameters_it_names_also_of_a_layer_called_twice():
    rule_for(Gate, parameters=("slope", "shift"))(lambda _, x, dy: {"slope": x * dy, "shift": dy})
    twice = nn.Sequential(*gated(), nn.Tanh())
    twice.append(twice[1])
    for model in (gated(), twice):
        expected = sq_norms(model, mean_loss, INPUTS, TARGETS)
        torch.testing.assert_close(measure(model).per_sample(), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("kind", [Gate, nn.Linear])
def test_a_second_rule_for_a_layer_is_refused(kind: type[nn.Module]):
    entry = RULES.setdefault(kind, RULES[nn.Linear])
    with pytest.raises(ArgumentError, match=f"{kind.__name__} already has a rule"):
        rule_for(kind)(lambda _, x, dy: {})
    assert RULES[kind] is entry


def test_a_rule_that_names_no_parameters_says_how_to():
    rule_for(Gate)(lambda _, x, dy: {"slope": x * dy, "shift": dy})
    with pytest.raises(
        CoverageError, match=r"'1.slope' of Gate \(which its rule does not state\).*rule_for\(Gate, parameters="
    ):
        NormMeter(gated())


def test_a_parameter_that_a_rule_promised_and_left_out_is_named():
    rule_for(Gate, parameters=("slope", "shift"))(lambda _, x, dy: {"slope": x * dy})
    with pytest.raises(CoverageError, match=r"the rule of '1' \(Gate\) gave no gradients of 'shift'"):
        measure(gated())
    frozen = gated()
    frozen[1].shift.requires_grad_(False)
    expected = sq_norms(frozen, mean_loss, INPUTS, TARGETS)
    torch.testing.assert_close(measure(frozen).per_sample(), expected, rtol=1e-10, atol=0)


def test_gradients_of_another_shape_are_refused():
    rule_for(Gate, parameters=("slope", "shift"))(lambda _, x, dy: {"slope": x * dy, "shift": dy[:, None]})
    with pytest.raises(CoverageError, match=r"shape \(7, 1, 3\) for 'shift', not \(batch, 3\)"):
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
        train(model, optimizer, loader)
        exact = gradient_diversity(model, mean_loss, loader.full_pass(), fallback="vmap").value
        assert control.step().diversity == pytest.approx(exact)


@pytest.mark.parametrize(
    ("batch", "named"), [({"x": INPUTS, "y": TARGETS}, "got dict"), ((INPUTS, TARGETS, TARGETS), "got tuple of 3")]
)
def test_batches_that_are_no_pairs_are_named(batch, named):
    with pytest.raises(ArgumentError, match=rf"batches must be pairs \(inputs, targets\), {named}"):
        gradient_diversity(nn.Linear(4, 3).double(), mean_loss, [batch])


# Tensors that are dropped on the device, and the question whether they must be


KINDS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def tensors(*kinds: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, 2, 2, generator=generator).to(kind) for kind in kinds]


@pytest.mark.parametrize("kinds", [(kind, kind) for kind in KINDS] + [KINDS])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1.0])
def test_what_is_kept_is_as_it_was_and_what_is_not_is_zero(kinds, bad):
    given = [each.to(memory_format=torch.channels_last) for each in tensors(*kinds)]
    given[-1][1, 2, 1, 0] = bad
    for same, before in zip(kept(given, torch.tensor(True)), given, strict=True):
        assert same.dtype == before.dtype
        assert torch.equal(same.nan_to_num(7.0), before.nan_to_num(7.0))
    for gone, before in zip(kept(given, torch.tensor(False)), given, strict=True):
        assert gone.dtype == before.dtype
        assert gone.shape == before.shape
        assert not gone.any()
    assert bool(torch.isnan(given[-1]).any()) == math.isnan(bad), "gradients are the user's and stay as they are"


@pytest.mark.parametrize(("bad", "expected"), [(math.nan, False), (math.inf, False), (-math.inf, False), (1.0, True)])
def test_a_single_entry_decides(bad: float, expected: bool):
    given = tensors(torch.float32, torch.float32)
    given[1][2, 3, 1, 1] = bad
    assert bool(are_finite(given)) is expected
    assert bool(are_finite([given[0], given[1].flatten(1).to_sparse()])) is expected


def test_entries_whose_squares_are_too_large_are_finite():
    assert are_finite([torch.full((4,), 1e30)])
