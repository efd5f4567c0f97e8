"""Sketches of gradients: against the matrix they stand for, against their promised error, and in an estimate."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, AdamW

from divebatch.errors import ArgumentError, CheckpointError
from divebatch.estimators import Moments, TrainingContext
from divebatch.estimators.average import PairAverage, read
from divebatch.estimators.moments import KEPT, SuccessiveGradients
from divebatch.estimators.second_moment import Preconditioner, StepGradients
from divebatch.estimators.sketch import LEAST_SIZE, MOST_SIZE, SignSketch, fitting_size
from divebatch.lab.models import GptNetwork
from reference.delivery import Delivered, Loop, attach, cut
from reference.per_sample import mean_loss, mlp, samples
from reference.sign_sketch import matrices, sketched


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {str(number): nn.Parameter(torch.randn(shape, dtype=dtype)) for number, shape in enumerate(shapes)}


def sq_norm(norms: Any) -> float:
    return read([norms])[0]


# The map


@given(
    numels=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    size=st.integers(1, 13),
    seed=st.integers(0, 99),
    cuts=st.lists(st.integers(0, 30), max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_it_is_the_matrix_by_its_definition_also_shard_by_shard(numels, size, seed, cuts):
    held = parameters(*((numel,) for numel in numels))
    signs = SignSketch(held, size, seed=seed)
    whole, own = signs.of(StepGradients(held, scale=-0.5))
    expected_square = 0.25 * sum(float(each.detach().square().sum()) for each in held.values())
    expected = -0.5 * sketched(signs, held)
    torch.testing.assert_close(whole, expected)
    assert sq_norm(own) == pytest.approx(expected_square)
    total, square = torch.zeros_like(whole), 0.0
    for begin, end in itertools.pairwise(sorted({0, 30, *cuts})):  # as ranks hold them: each a part of each parameter
        shards = {name: each[begin:end] for name, each in held.items()}
        part, own = signs.of(StepGradients(shards, scale=-0.5, offsets=dict.fromkeys(shards, begin)))
        total, square = total + part, square + sq_norm(own)
    torch.testing.assert_close(total, expected)
    assert square == pytest.approx(expected_square)


@pytest.mark.parametrize("kind", ["channels_last", "bfloat16", "complex", "sparse", "missing"])
def test_gradients_of_all_kinds(kind: str):
    held = parameters((2, 3, 4, 2), (9, 2))
    gradients = {name: each.detach() for name, each in held.items()}
    if kind == "channels_last":
        gradients["0"] = gradients["0"].contiguous(memory_format=torch.channels_last)
    if kind == "bfloat16":
        gradients = {name: each.to(torch.bfloat16) for name, each in gradients.items()}
    if kind == "complex":
        gradients["1"] = torch.view_as_complex(gradients["1"])
        held = {name: nn.Parameter(each) for name, each in gradients.items()}
    if kind == "sparse":
        gradients["1"] = torch.diag(torch.tensor([1.0, 0.0, 2.0]))[:, :2].double().repeat(3, 1).to_sparse()
    if kind == "missing":
        del gradients["0"]
    signs = SignSketch(held, 5, seed=0)
    found, own = signs.of(StepGradients(gradients))
    plain = {name: torch.view_as_real(g) if g.is_complex() else g.to_dense().double() for name, g in gradients.items()}
    torch.testing.assert_close(found.double(), sketched(signs, plain))
    assert found.dtype == torch.float64
    assert sq_norm(own) == pytest.approx(sum(float(each.square().sum()) for each in plain.values()))


@pytest.mark.parametrize("shape", ["random", "few columns", "constant", "nearly parallel"])
def test_products_are_unbiased_and_as_exact_as_promised(shape: str):
    """Over draws of the signs, also for gradients whose large entries all lie in the same columns."""
    size, rows, draws = 16, 5, 600
    generator = torch.Generator().manual_seed(1)
    one, other = torch.randn(2, rows, size, generator=generator, dtype=torch.float64)
    if shape == "few columns":
        one[:, 2:], other[:, 2:] = 0.01 * one[:, 2:], 0.01 * other[:, 2:]
    if shape == "constant":
        one, other = torch.ones_like(one), torch.ones_like(one)
    if shape == "nearly parallel":
        other = one + 0.1 * other
    held, found = {"": nn.Parameter(one)}, []
    for seed in range(draws):
        signs = SignSketch(held, size, seed=seed)
        first, second = (signs.of(StepGradients({"": each}))[0] for each in (one, other))
        found.append(float(first @ second))
    values, truth = torch.tensor(found, dtype=torch.float64), float((one * other).sum())
    assert abs(float(values.mean()) - truth) < 4 * float(values.std()) / math.sqrt(draws)
    promised = (float(one.square().sum() * other.square().sum()) + truth**2) / size
    # Lines that are all alike meet with equal signs once in a while, which a table twice as long as a line allows.
    assert float(values.var()) < (1.6 if shape == "constant" else 1.2) * promised
    if shape == "nearly parallel":  # and the constant error of ||G||^2 is what the interval is told, or less
        assert 0.5 < float(values.var()) / truth**2 / signs.relative_variance < 1.2


def test_what_divides_adams_steps_divides_what_is_sketched():
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        mean_loss(model(samples(8)[0]), samples(8)[1]).backward()
        optimizer.step()
    held = dict(model.named_parameters())
    step = StepGradients({name: p.grad for name, p in held.items()}, preconditioner=Preconditioner(optimizer, held))
    signs, divided = SignSketch(held, 7, seed=1), {name: g.clone() for name, g in step}
    found, own = signs.of(step)
    torch.testing.assert_close(found, sketched(signs, divided))
    assert sq_norm(own) == pytest.approx(sum(float(each.square().sum()) for each in divided.values()))


# How much memory it takes, and when it is used


def gpt(width: int, layers: int, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    with torch.device("meta"):
        net = GptNetwork(256, 512, layers=layers, width=width, heads=8, tied=False).to(dtype)
    return dict(net.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "layers", "sizes"), [(512, 8, (2**16, 2**15)), (2048, 24, (MOST_SIZE, MOST_SIZE))])
def test_all_sketches_together_take_one_percent_of_the_parameters(width, layers, sizes, dtype):
    held = gpt(width, layers, dtype)
    size = fitting_size(list(held.values()), sketches=KEPT)
    assert size == sizes[dtype is torch.bfloat16]
    signs, lines = SignSketch(held, size, seed=0), sum(-(-p.numel() // size) for p in held.values())
    on_gpus = lines * 36  # where a kernel finds each line
    taken = signs.num_bytes + KEPT * size * signs.dtype.itemsize + on_gpus
    assert taken <= 0.01 * sum(p.numel() * p.element_size() for p in held.values())


def test_large_models_are_sketched_and_small_ones_copied():
    optimizer = SGD([nn.Parameter(torch.zeros(1))], 0.1, momentum=0.9)
    small, large = ({"": nn.Parameter(torch.zeros(count))} for count in (6_100_000, 6_300_000))

    def size(held: dict[str, nn.Parameter], **settings: Any) -> int | None:
        signs = SuccessiveGradients(held, optimizer, PairAverage(), **settings).signs
        return None if signs is None else signs.size

    assert (size(small), size(large)) == (None, LEAST_SIZE)
    assert (size(small, sketch=True), size(large, sketch=False)) == (LEAST_SIZE, None)
    assert size(small, sketch_size=100) == 100


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"sketch": "yes"}, r"unknown sketch 'yes'; known: None, True, False"),
        ({"sketch_size": 0}, r"sketch_size must be an integer of at least 1"),
        ({"sketch": False, "sketch_size": 64}, r"sketch=False keeps whole gradients: leave sketch_size=64 out"),
    ],
)
def test_wrong_settings(wrong: dict[str, Any], told: str):
    with pytest.raises(ArgumentError, match=told):
        Moments(**wrong)


# In an estimate


def looped(estimator: Moments, *, delivered: int = 0) -> Loop:
    return Loop(estimator, lambda p: SGD(p, 0.01, momentum=0.9), delivered=delivered)


def means(rows: list[tuple[float, ...]]) -> tuple[float, ...]:
    """Of rows that begin with their weight."""
    total = sum(weight for weight, *_ in rows)
    return tuple(sum(row[0] * row[i] for row in rows) / total for i in (1, 2))


def test_extrapolated_it_is_made_of_exact_norms_and_sketched_products():
    loop, rows = looped(Moments(sketch_size=11), delivered=5), []
    for x, y in cut(43, 4):
        loop.step((x, y))
    signs = SignSketch(dict(loop.model.named_parameters()), 11, seed=5)  # of the samples delivered before
    held = dict(loop.model.named_parameters())
    parts = [each.split([p.numel() for p in held.values()]) for each in loop.gradients]
    named = [{name: part.view_as(held[name]) for name, part in zip(held, each, strict=True)} for each in parts]
    found = [sketched(signs, gradients) for gradients in named]
    for before, last, own, gradients, size in zip(found, found[1:], found[2:], named[2:], loop.sizes[2:], strict=False):
        square = (1 + 1 / 0.9) * float(own @ last) - 1 / 0.9 * float(own @ before)
        norm = sum(float(each.square().sum()) for each in gradients.values())
        rows.append((size, size * (norm - square), square))
    measured = loop.estimator.finish()
    assert (measured.trace, measured.sq_norm) == pytest.approx(means(rows), rel=1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_sketch_without_collisions_is_as_good_as_copies(momentum: float):
    """Also in the noise along the gradient. One line for each parameter, and no two of them meet: found by search."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    held = dict(model.named_parameters())
    free = (seed for seed in range(99) if sum(matrices(SignSketch(held, 9, seed=seed)).values()).abs().sum() > 0)
    seed = next(s for s in free if _meets_nowhere(SignSketch(held, 9, seed=s)))
    found = []
    for extra in ({"sketch": False}, {"sketch_size": 9}):
        delivered, optimizer = [seed], SGD(model.parameters(), 0.0, momentum=momentum)
        estimator = Moments(**extra)
        attach(estimator, TrainingContext(model, Delivered(lambda count=delivered: count[0]), optimizer))
        estimator.start()
        generator = torch.Generator().manual_seed(2)
        for size in (3, 4, 5, 2, 3, 3, 1):
            delivered[0] += size
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype) / math.sqrt(size) + 1
            optimizer.step()
        found.append(estimator.finish())
    values = [(each.trace, each.sq_norm, each.inner_variance) for each in found]
    assert values[0] == pytest.approx(values[1], rel=1e-9)


def _meets_nowhere(signs: SignSketch) -> bool:
    every = torch.cat(list(matrices(signs).values()), 1)
    return bool((every.abs().sum(1) <= 1).all())


def test_the_interval_knows_of_the_error_that_all_steps_share():
    """Of 100 draws of signs and noise; without that error every third interval would miss."""
    generator, numel, size = torch.Generator().manual_seed(0), 200, 50
    mean = torch.full((numel,), 1 / math.sqrt(numel), dtype=torch.float64)
    noise = 0.2  # the variance of the mean gradient of a step of 4 samples
    parameter, held = {"": nn.Parameter(mean.clone())}, [0, 0]
    optimizer = SGD(parameter.values(), 0.1, momentum=0.9)
    for seed in range(100):
        average = PairAverage()
        history = SuccessiveGradients(parameter, optimizer, average, sketch_size=size, seed=seed)
        for row in torch.randn(12, numel, generator=generator, dtype=torch.float64) * math.sqrt(noise / numel):
            parameter[""].grad = mean + row
            history.add(optimizer, 4)
        for widens in (False, True):
            average.relative_variance = 2 / size if widens else 0.0
            low, high = average.diversity().noise_scale_interval()
            held[widens] += low <= 4 * noise <= high
    assert (held[0] < 60, held[1] >= 93) == (True, True), held


# State


@pytest.mark.parametrize("settings_", [{}, {"every_steps": 5}])
@pytest.mark.parametrize("cut_at", [1, 4])
def test_a_resume_goes_on_with_the_same_signs(settings_: dict[str, Any], cut_at: int):
    found = []
    for interrupted in (False, True):
        loop = looped(Moments(sketch_size=11, **settings_), delivered=3)
        for number, (x, y) in enumerate(cut(43, 4)):
            loop.step((x, y))
            if interrupted and number == cut_at:
                loop.resume(Moments(sketch_size=6, **settings_))  # what was begun goes on as it was
        found.append(loop.estimator.finish())
    assert found[0] == found[1]


def test_gradients_of_another_model_are_refused():
    loop, other = looped(Moments(sketch_size=11)), Moments()
    for x, y in cut(12, 4):
        loop.step((x, y))
    model = nn.Linear(3, 2)
    other.bind(TrainingContext(model, Delivered(lambda: 0), SGD(model.parameters(), 0.1, momentum=0.9)))
    other.start()
    with pytest.raises(CheckpointError, match=r"are another model's: .*'0.weight'.* there where .*'weight', 6"):
        other.load_state_dict(loop.estimator.state_dict())
