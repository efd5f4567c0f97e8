"""Noise scales in other norms: against gradients kept by hand, and against the truth; on pure noise nothing is said."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from divebatch import AdaptiveLoader, Controller, Diversity
from divebatch.errors import ArgumentError, CheckpointError
from divebatch.estimators import L1, Estimator, Nuclear, Scene
from divebatch.estimators.gradient_sketch import LEAST_SIZE, SignSketch
from divebatch.estimators.l1 import STRIDE, SumOfAbsolutes
from divebatch.estimators.nuclear import SumOfSingularValues
from divebatch.measurement import Measurement
from divebatch.policies import NoiseScale
from reference.delivery import Delivered
from reference.per_sample import dataset, mean_loss, mlp
from reference.sign_sketch import sketched

BATCH, COUNT = 16, 400


class Loop:
    """A training whose gradients are given, and kept."""

    def __init__(self, estimator: Estimator, shapes: dict[str, tuple[int, ...]], *, delivered: int = 0) -> None:
        self.model = nn.ParameterDict({name: nn.Parameter(torch.zeros(s).double()) for name, s in shapes.items()})
        self.optimizer: Optimizer = AdamW(self.model.parameters(), lr=0.0)
        self.delivered, self.gradients = delivered, []
        self.attach(estimator)

    def attach(self, estimator: Estimator) -> None:
        self.estimator = estimator
        estimator.bind(Scene(self.model, Delivered(lambda: self.delivered), self.optimizer))
        estimator.start()

    def step(self, gradients: dict[str, Tensor], size: int = BATCH) -> None:
        self.delivered += size
        for name, p in self.model.items():
            p.grad = gradients[name].clone() if name in gradients else None
        self.gradients.append((size, gradients))
        self.optimizer.step()


def drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).double() + 0.5 for name, shape in shapes.items()}


def norm_of(gradients: dict[str, Tensor], dual: Callable[[Tensor], Tensor]) -> float:
    return sum(float((each * dual(each)).sum()) for each in gradients.values())


def by_hand(
    loop: Loop, dual: Callable[[Tensor], Tensor], factor: float, product: Callable[..., float]
) -> tuple[float, float]:
    rows = []
    for (_, a), (last, b), (size, c) in zip(loop.gradients, loop.gradients[1:], loop.gradients[2:], strict=False):
        one, two = (product({name: dual(each) for name, each in before.items()}, c) for before in (b, a))
        most = (norm_of(a, dual) + norm_of(b, dual)) / 2
        distance = norm_of({name: c[name] - b[name] for name in c}, dual)
        noise = factor * distance / math.sqrt(1 / size + 1 / last)
        rows.append((size, noise**2, (one + (one - two) / 0.9) * most))
    total = sum(row[0] for row in rows)
    return tuple(sum(row[0] * row[i] for row in rows) / total for i in (1, 2))


def whole(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return sum(float((one[name] * other[name]).sum()) for name in one)


def polar(matrix: Tensor) -> Tensor:
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    return u @ v


MATRICES = {"a": (3, 5), "b": (4, 2), "c": (3, 3)}
KINDS: dict[str, tuple[Callable[..., Estimator], Callable[[Tensor], Tensor], float]] = {
    "l1": (L1, torch.sign, math.sqrt(math.pi / 2)),
    "nuclear": (lambda **k: Nuclear(every_steps=1, **k), polar, 1.0),
}
any_kind = pytest.mark.parametrize("kind", KINDS)


@any_kind
def test_it_equals_products_of_gradients_that_were_kept(kind: str):
    make, dual, factor = KINDS[kind]
    loop = Loop(make(), MATRICES)
    for seed, size in enumerate((4, 4, 8, 2, 2, 5)):
        loop.step(drawn(MATRICES, seed), size)
    measured = loop.estimator.finish()
    assert (measured.trace, measured.sq_norm) == pytest.approx(by_hand(loop, dual, factor, whole), rel=1e-9)
    assert (measured.num_samples, measured.inner_variance) == (25, None)


@any_kind
def test_duals_and_gradients_are_sketched_alike(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("divebatch.estimators.sketch_choice.LEAST_SIZE", 7)
    monkeypatch.setattr("divebatch.estimators.l1.STRIDE", 1)
    make, dual, factor = KINDS[kind]
    loop = Loop(make(sketch=True), MATRICES, delivered=3)
    signs = SignSketch(dict(loop.model.items()), 7, seed=3)
    for seed in range(5):
        loop.step(drawn(MATRICES, seed))

    def product(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
        return float(sketched(signs, one) @ sketched(signs, other))

    measured = loop.estimator.finish()
    assert (measured.trace, measured.sq_norm) == pytest.approx(by_hand(loop, dual, factor, product), rel=1e-9)


@any_kind
@pytest.mark.parametrize("cut_at", [0, 1, 3])
@pytest.mark.parametrize("settings", [{}, {"sketch": True}], ids=["copies", "sketches"])
def test_a_resume_is_exact(kind: str, cut_at: int, settings: dict[str, Any]):
    found = []
    for interrupted in (False, True):
        loop = Loop(KINDS[kind][0](**settings), MATRICES)
        for seed in range(6):
            loop.step(drawn(MATRICES, seed))
            if interrupted and seed == cut_at:
                state = loop.estimator.state_dict()
                loop.estimator.close()
                loop.attach(KINDS[kind][0](**settings))
                loop.estimator.state_check()("estimator", state)
                loop.estimator.load_state_dict(state)
        found.append(loop.estimator.finish())
    assert found[0] == found[1]


@any_kind
def test_momentum_that_falls_takes_the_lower_end_away(kind: str):
    """As lr_coupling="adam" lets it fall: nothing then tells by how much the moving weights make B too large."""
    lows = []
    for beta1 in (0.9, 0.1):
        loop = Loop(KINDS[kind][0](), MATRICES)
        for seed in range(40):
            loop.step({name: each + 1 for name, each in drawn(MATRICES, seed).items()})
            loop.optimizer.param_groups[0]["betas"] = (beta1, 0.999)
        lows.append(loop.estimator.finish().noise_scale_interval()[0])
    assert lows[0] > 0
    assert lows[1] == 0


@any_kind
def test_steps_that_train_other_parameters_are_not_compared(kind: str):
    loop = Loop(KINDS[kind][0](), MATRICES)
    for seed in range(6):
        loop.step({name: each for name, each in drawn(MATRICES, seed).items() if name == "ab"[seed % 2]})
    assert not loop.estimator.finish().is_defined


def test_another_models_state_is_refused():
    loop, other = Loop(L1(), {"a": (3,)}), Loop(L1(), {"b": (3,)})
    loop.step(drawn({"a": (3,)}, 0))
    with pytest.raises(CheckpointError, match=r"chunks.duals.0.b is missing from the checkpoint"):
        other.estimator.state_check()("estimator", loop.estimator.state_dict())


# Against the truth, at weights that stand still


def vectors(kind: str, noise_scale: float, seed: int) -> tuple[Tensor, Tensor]:
    """G and the noise of each coordinate, with (sum_j s_j)^2 / |G|_1^2 as given."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.exp(torch.randn(COUNT, generator=generator)).double()
    shape = torch.randn(COUNT, generator=generator).double()
    if kind == "signs":
        shape = shape.sign()
    if kind == "few":
        shape = shape * (torch.rand(COUNT, generator=generator) < 0.05)
    mean = shape * noise
    return mean * (noise.sum() / mean.abs().sum() / math.sqrt(noise_scale)), noise


def measured_l1(mean: Tensor, noise: Tensor, *, steps: int, seed: int, **settings: Any) -> Diversity:
    loop, generator = Loop(L1(**settings), {"w": tuple(mean.shape)}), torch.Generator().manual_seed(1000 + seed)
    for _ in range(steps):
        draw = torch.randn(mean.shape, generator=generator).double()
        loop.step({"w": mean + noise * draw / math.sqrt(BATCH)})
    return loop.estimator.finish()


@pytest.mark.parametrize(
    ("kind", "low", "high"), [("normal", 0.9, 1.15), ("signs", 0.95, math.pi / 2), ("few", 0.2, 1)]
)
@pytest.mark.parametrize("ratio", [0.3, 3])
def test_l1_is_right_within_its_assumptions_and_its_interval_always_holds(kind, low, high, ratio):
    """Right for normal G_j / s_j; too large by at most pi / 2; and too small where few coordinates hold all of it."""
    truth = ratio * BATCH
    found = [measured_l1(*vectors(kind, truth, seed), steps=40, seed=seed) for seed in range(12)]
    values = sorted(each.noise_scale / truth for each in found)
    assert low < values[len(values) // 2] < high
    intervals = [each.noise_scale_interval() for each in found]
    assert sum(below <= truth <= above for below, above in intervals) >= 11
    assert sum(below > 0 and above < math.inf for below, above in intervals) >= 11  # and a policy can act on it


@pytest.mark.parametrize("steps", [20, 100])
def test_on_pure_noise_l1_says_nothing(steps: int):
    """The plug-in estimate would say b * pi / 2 and grow."""
    _, noise = vectors("normal", 1.0, 0)
    decisions = []
    for seed in range(20):
        found = measured_l1(torch.zeros_like(noise), noise, steps=steps, seed=seed)
        seen = Measurement(epoch=1, batch_size=BATCH, dataset_size=10_000, diversity=found)
        decisions.append(NoiseScale(4096).next(seen).batch_size)
        if decisions[-1] == BATCH:
            assert found.noise_scale_interval() == (0.0, math.inf)
    assert sum(size != BATCH for size in decisions) <= 2  # one in forty, by its confidence


def test_one_coordinate_in_many_tells_the_noise():
    """Of matrices as of vectors, whatever their place among the others."""
    torch.manual_seed(0)
    scales = torch.exp(torch.randn(256))  # other columns have other noise
    one, other = (torch.randn(2, 2000, 256) * scales).unbind()
    norm, everything = SumOfAbsolutes(STRIDE), SumOfAbsolutes(1)
    truth = everything.distance([(everything.sample(one, 0), everything.sample(other, 0))], 1.0)
    for place in (0, 77, 10_001):
        pairs = [(norm.sample(one, place), norm.sample(other, place))]
        assert float(norm.distance(pairs, one.numel() / len(pairs[0][0]))) == pytest.approx(float(truth), rel=0.1)
    whole, parts = norm.sample(one, 0), [norm.sample(part, 256 * 100 * n) for n, part in enumerate(one.split(100))]
    assert torch.equal(torch.cat(parts), whole)


def test_large_models_are_sampled_and_sketched():
    loop = Loop(L1(), {"w": (7_000_000,)})
    loop.step({"w": torch.ones(7_000_000).double()})
    state = loop.estimator.state_dict()["source"]
    assert len(state["chunks"]["samples"]["w"]) == math.ceil(7_000_000 / STRIDE)
    assert state["made_with"]["sketch"]["size"] >= LEAST_SIZE


def test_the_nuclear_one_is_right_for_a_strong_signal_and_says_nothing_without():
    rows, columns, truth = 6, 60, 0.5 * BATCH
    torch.manual_seed(0)
    noise = torch.diag(torch.linspace(0.5, 2, rows)).double()  # rows of covariance noise^2 * columns
    flat = polar(torch.randn(rows, columns).double())
    mean = flat / rows * float(noise.trace()) * math.sqrt(columns / truth)
    for strength in (1.0, 0.0):
        loop, generator = Loop(Nuclear(every_steps=1), {"w": (rows, columns)}), torch.Generator().manual_seed(1)
        for _ in range(40):
            draw = noise @ torch.randn(rows, columns, generator=generator).double() / math.sqrt(BATCH)
            loop.step({"w": strength * mean + draw})
        found = loop.estimator.finish()
        if strength:
            assert found.noise_scale == pytest.approx(truth, rel=0.25)
            low, high = found.noise_scale_interval()
            assert 0 < low < truth < high < math.inf
        else:
            assert found.noise_scale_interval() == (0.0, math.inf)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4)])
def test_polar_factors_and_nuclear_norms_are_those_of_singular_values(shape: tuple[int, int]):
    norm, matrix = SumOfSingularValues(), torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(norm.dual(matrix), polar(matrix))
    torch.testing.assert_close(norm.size(matrix), torch.linalg.svdvals(matrix).sum())
    thin = matrix[:, :1] @ matrix[:1, :]  # of rank one: the polar factor is one pair of vectors
    torch.testing.assert_close((norm.dual(thin) * thin).sum(), torch.linalg.svdvals(thin)[0])


# In use


def test_a_controller_takes_it_and_the_record_shows_it():
    model = mlp()
    optimizer, loader = AdamW(model.parameters(), lr=1e-4), AdaptiveLoader(dataset(400), 8, seed=0)
    with Controller(model, optimizer, loader, NoiseScale(16), estimator="l1") as control:
        for x, y in loader:
            optimizer.zero_grad()
            mean_loss(model(x), y).backward()
            optimizer.step()
        record = control.step()
    assert record.noise_scale_low is not None
    assert record.noise_scale is not None


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
def test_muons_matrices_are_measured_beside_another_optimizer():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3, bias=False)).double()
    matrices, rest = [model[0].weight, model[1].weight], [model[0].bias]
    optimizers = [torch.optim.Muon(matrices, lr=1e-3), AdamW(rest, lr=1e-3)]
    loader = AdaptiveLoader(dataset(400), 8, seed=0)
    estimator = Nuclear(every_steps=1)
    with Controller(model, optimizers, loader, NoiseScale(16), estimator=estimator) as control:
        for x, y in loader:
            for each in optimizers:
                each.zero_grad()
            mean_loss(model(x), y).backward()
            for each in optimizers:
                each.step()
        made_of = estimator.state_dict()["source"]["chunks"]["samples"].keys()
        record = control.step()
    assert made_of == {"0.weight", "1.weight"}
    assert record.noise_scale_low is not None


@pytest.mark.parametrize("make", [L1, Nuclear])
def test_without_momentum_it_is_refused_at_once(make: Callable[[], Estimator]):
    model = nn.Linear(2, 2)
    estimator = make()
    with pytest.raises(ArgumentError, match=rf"'{estimator.name}' needs a momentum of at least 0.4.*: SGD has none"):
        estimator.bind(Scene(model, Delivered(lambda: 0), SGD(model.parameters(), 0.1)))


def test_without_a_matrix_there_is_nothing_to_measure():
    model, estimator = nn.LayerNorm(3), Nuclear()
    estimator.bind(Scene(model, Delivered(lambda: 0), SGD(model.parameters(), 0.1, momentum=0.9)))
    with pytest.raises(ArgumentError, match="'nuclear' has no parameter of SGD to measure"):
        estimator.start()
