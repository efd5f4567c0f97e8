import copy
import io
import json
import threading
from dataclasses import replace

import matplotlib
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from advice.known_problem import DIM, Shift, dataset, loss_fn, true_noise_scale
from divebatch import AdaptiveLoader, Advice, Auto, Controller, Fixed, advise, gradient_diversity, micro_batches
from divebatch.advice.advice import SLACK, NoiseCourse, NoiseEstimate, StepTimes, good_size
from divebatch.advice.measure import pooled
from divebatch.errors import ArgumentError, CoverageError, DivergedError
from divebatch.measurement import Diversity, Spread


def device_with(balance):
    return lambda size: 0.01 * (1 + size / balance)


def ask(model=None, data=None, **settings):
    return ask_about(model or Shift(), loss_fn, data or dataset(), **settings)


def ask_about(model, loss, data, **settings):
    defaults = {"batch_size": 16, "steps": 120, "step_seconds": device_with(100)}
    return advise(model, loss, data, **{**defaults, **settings})


def svg_of(advice):
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        advice.draw().savefig(file, format="svg")
    return file.getvalue()


@pytest.mark.parametrize(("estimator", "distance"), [("split", 0.3), ("split", 1.0), ("moments", 0.3)])
def test_the_noise_scale_is_the_true_one_within_its_interval(estimator, distance):
    data = dataset(distance=distance)
    advice = ask(data=data, estimator=estimator, steps=400)
    truth = true_noise_scale(data, torch.zeros(DIM))
    assert advice.noise.now.low <= truth <= advice.noise.now.high
    assert advice.noise.now.value == pytest.approx(truth, rel=0.3)
    assert sum(each.low <= truth <= each.high for each in advice.noise.stretches) >= 5


def test_per_sample_norms_see_the_same_noise_as_all_samples_together():
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.randn(512, 4)
    data, mse = TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(512, 1)), nn.functional.mse_loss
    exact = gradient_diversity(model, mse, [data.tensors]).noise_scale
    found = ask_about(model, mse, data, estimator="per-sample").noise.now
    assert found.low <= exact <= found.high
    with pytest.raises(CoverageError, match="weight"):
        ask(estimator="per-sample")  # a layer of one's own has no rule


def test_the_advice_follows_from_noise_and_time():
    data = dataset(distance=0.3)
    model = Shift()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)  # the weights hardly move
    advice = ask(model, data, optimizer=optimizer, step_seconds=device_with(200), steps=300)
    noise, sizes = advice.noise.now.value, advice.times.sizes
    assert sizes == (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    took = {size: (1 + noise / size) * device_with(200)(size) for size in sizes}
    best = min(took.values())
    assert advice.batch_size == min(size for size in sizes if took[size] <= (1 + SLACK) * best)
    assert 8 < advice.batch_size < 256
    assert advice.lr == pytest.approx(1e-6 * (1 + noise / 16) / (1 + noise / advice.batch_size))
    throughput = {size: size / device_with(200)(size) for size in sizes}
    assert advice.max_batch_size == min(s for s in sizes if throughput[s] * (1 + SLACK) >= max(throughput.values()))
    assert advice.policy == Auto(advice.max_batch_size)
    assert advice.lr_coupling == "linear"


def test_words_numbers_and_json_agree():
    advice = ask(data=dataset(distance=0.3), steps=300)
    words = str(advice)
    assert words.startswith(f"Start with batch {advice.batch_size}, {advice.lr_factor:.3g} times the learning rate")
    assert f"Auto({advice.max_batch_size})" in words
    assert f"Growth stops paying at batch {advice.max_batch_size}" in words
    assert advice.lr is None
    values = json.loads(json.dumps(advice.to_dict()))
    assert values["batch_size"] == advice.batch_size
    assert values["noise_scale"]["now"]["value"] == advice.noise.now.value
    assert values["words"] == words


def test_noise_that_grows_along_the_run_is_seen_to_grow():
    model = Shift(start=5.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    advice = ask(model, dataset(distance=0.0), optimizer=optimizer, steps=300)
    assert "It grows" in str(advice)
    values = [each.value for each in advice.noise.stretches[:4]]
    assert values == sorted(values)
    assert advice.noise.now.first == 151
    assert advice.noise.now.value > advice.noise.stretches[2].value  # where it stands, not where it came from


def test_too_much_noise_is_said_and_nothing_advised():
    advice = ask(data=dataset(distance=0.0), batch_size=2, steps=24)
    assert not advice.is_clear
    assert (advice.batch_size, advice.lr, advice.lr_factor, advice.policy) == (None, None, None, None)
    assert "too noisy to advise: the mean gradient cannot be told from zero" in str(advice)
    assert "Start with" not in str(advice)
    assert "Too noisy to advise" in svg_of(advice)
    assert "growth stops paying" in svg_of(advice)


def test_an_interval_that_leads_to_very_different_batches_is_too_noisy():
    times = StepTimes(tuple((2**power, device_with(100)(2**power)) for power in range(3, 12)))

    def advice(low, high):
        now = NoiseEstimate(1, 100, 200.0, low, high)
        return Advice(
            noise=NoiseCourse((now,), now), times=times, reference_batch_size=16, reference_lr=0.1, adaptive=False
        )

    assert advice(150.0, 300.0).batch_size == good_size(times, 200.0)
    assert advice(1.0, 40_000.0).batch_size is None
    assert "as well as to batch" in str(advice(1.0, 40_000.0))


def test_where_a_step_takes_as_long_as_its_samples_small_batches_stay():
    advice = ask(step_seconds=lambda size: 0.001 * size, steps=200)
    assert advice.batch_size == 8
    assert advice.policy == Fixed()
    assert "would gain nothing here" in str(advice)
    assert "takes 1 ms a sample, which fits within 0%." in str(advice)  # no fixed cost to speak of
    largest = ask(data=dataset(distance=0.3), step_seconds=lambda size: 1.0, batch_sizes=[16, 32], steps=200)
    assert "Fixed()" in str(largest)
    assert "the largest that was timed, and still the fastest" in str(largest)
    assert "is fixed cost" not in str(ask(step_seconds=device_with(0.5), steps=200))
    assert "Your batch 16 would take about as long" in str(
        ask(data=dataset(distance=0.3), step_seconds=lambda size: 0.001 * size, batch_sizes=[15])
    )


def test_times_that_are_on_no_line_are_said_to_be_so():
    times = {8: 1.0, 16: 1.0, 32: 3.0, 64: 3.0, 128: 0.5, 256: 8.0}
    advice = ask(data=dataset(distance=0.3), batch_sizes=sorted(times), step_seconds=times.__getitem__)
    assert advice.times.misfit > 0.25
    assert "fits badly" in str(advice)
    assert advice.max_batch_size == 128  # the most samples a second, whatever the line


class Homemade(torch.optim.SGD):
    """Known by its base."""


class Unknown(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        return None


def test_the_coupling_of_an_optimizer_that_nobody_knows_must_be_named():
    model = Shift()
    assert ask(model, optimizer=Homemade(model.parameters(), lr=1e-6)).lr_coupling == "linear"
    with pytest.raises(ArgumentError, match="Unknown"):
        ask(model, optimizer=Unknown(model.parameters(), lr=1e-6))
    found = ask(model, optimizer=Unknown(model.parameters(), lr=1e-6), lr_coupling="sqrt", steps=24)
    assert found.lr_coupling == "sqrt"


def test_adam_gets_square_roots():
    model = Shift()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    advice = ask(model, dataset(distance=0.3), optimizer=optimizer)
    plain = (1 + advice.noise.now.value / 16) / (1 + advice.noise.now.value / advice.batch_size)
    assert advice.lr_factor == pytest.approx(plain**0.5)
    assert advice.lr_coupling == "sqrt"
    assert "square root" in str(advice)
    assert advice.policy == Auto(advice.max_batch_size)


@pytest.mark.parametrize(
    "make_optimizer",
    [lambda weights: torch.optim.SGD(weights, 0.01, momentum=0.9), lambda weights: torch.optim.Adam(weights, 0.05)],
    ids=["sgd", "adam"],
)
def test_the_advised_start_and_policy_train_and_grow(make_optimizer):
    data, model = dataset(distance=0.0), Shift(start=5.0)  # the nearer the minimum, the more noise
    optimizer = make_optimizer(model.parameters())
    advice = ask(model, data, optimizer=optimizer, steps=24)
    optimizer.param_groups[0]["lr"] = advice.lr
    loader = AdaptiveLoader(data, advice.batch_size, seed=0)
    policy = replace(advice.policy, total_samples=12 * len(data))
    control = Controller(model, optimizer, loader, policy)
    for _ in range(12):
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
        record = control.step()
    assert advice.batch_size < record.next_batch_size <= advice.max_batch_size


def test_it_leaves_everything_as_it_was():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)).eval()
    data = TensorDataset(torch.randn(256, 4), torch.randint(2, (256,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1]).backward()
    optimizer.step()
    loader = AdaptiveLoader(data, 32, seed=3)
    next(iter(loader))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), loader.state_dict(), torch.get_rng_state()))
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    advice = advise(model, nn.functional.cross_entropy, loader, optimizer=optimizer, steps=24, batch_sizes=[16, 32, 64])
    after = model.state_dict(), optimizer.state_dict(), loader.state_dict(), torch.get_rng_state()
    assert json.dumps(before, default=lambda tensor: tensor.tolist()) == json.dumps(
        after, default=lambda tensor: tensor.tolist()
    )
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert not model.training
    assert not model[0]._forward_hooks
    assert advice.times.sizes == (16, 32, 64)  # really timed
    assert advice.device == "cpu"
    assert loader.batch_size == 32


def test_a_loader_that_was_left_within_an_epoch_is_as_good_as_another():
    data = TensorDataset(torch.randn(256, 4), torch.randint(2, (256,)))
    found = []
    for batches in range(4):
        loader = AdaptiveLoader(data, 32, seed=3)
        for _ in zip(range(batches), loader, strict=False):
            pass
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        found.append(advise(model, nn.functional.cross_entropy, loader, steps=24, batch_sizes=[16, 32, 64]).noise)
    assert all(each == found[0] for each in found)


def test_a_dataloader_keeps_its_collate_and_batch_size():
    seen = []

    def collate(samples):
        seen.append(len(samples))
        x, y = zip(*samples, strict=True)
        return {"x": torch.stack(x)}, torch.stack(y)

    class FromDict(Shift):
        def forward(self, batch):
            return super().forward(batch["x"])

    loader = DataLoader(dataset(), batch_size=32, collate_fn=collate, shuffle=True)
    advice = advise(FromDict(), loss_fn, loader, steps=24, batch_sizes=[32, 64])
    assert advice.reference_batch_size == 32
    assert set(seen) == {32}
    assert advice.times.sizes == (32, 64)


def test_a_sampler_of_a_dataloader_does_not_move_on():
    generator = torch.Generator().manual_seed(0)
    sampler = WeightedRandomSampler(torch.ones(256), 256, generator=generator)
    loader = DataLoader(dataset(num_samples=256), batch_size=16, sampler=sampler)
    before = generator.get_state()
    ask(data=loader, batch_size=None, steps=24)
    assert torch.equal(generator.get_state(), before)
    assert loader.sampler is sampler


def test_out_of_memory_ends_the_sizes():
    class Small(Shift):
        def forward(self, x):
            if len(x) > 64:
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(x)

    advice = advise(Small(), loss_fn, dataset(), batch_size=16, steps=24)
    assert advice.times.sizes == (8, 16, 32, 64)
    assert "batch 128 does not fit into memory" in str(advice)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 3}, "steps must be an integer of at least 24"),
        ({"batch_size": 1}, "batch_size must be at least 2"),
        ({"batch_size": None}, "pass batch_size"),
        ({"batch_size": 3000}, "batch_size=3000 is more than the 2048 samples there are"),
        ({"model": dataset()}, "model must be a torch.nn.Module, got TensorDataset"),
        ({"batch_sizes": [8, 4096]}, "batch_sizes: 4096 is more than the 2048 samples there are"),
        ({"batch_sizes": [16]}, "nothing to choose from beside batch 16"),
        ({"estimator": "trajectory"}, "unknown estimator 'trajectory'; known: per-sample, split"),
        ({"precision": "fp8"}, "unknown precision 'fp8'; known: fp32, bf16"),
        ({"timing_seconds": 0}, "timing_seconds must be positive"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ArgumentError, match=message):
        ask(**settings)


def test_data_and_models_that_cannot_be_used_are_named():
    with pytest.raises(ArgumentError, match=r"batches must be pairs \(inputs, targets\), got list of 1"):
        ask(data=TensorDataset(torch.zeros(64, DIM)))
    model = Shift()
    model.lock = threading.Lock()
    with pytest.raises(ArgumentError, match="Shift cannot be copied"):
        ask(model)
    with pytest.raises(ArgumentError, match="Flatten has no trainable parameter"):
        ask(nn.Flatten())


def test_another_training_step_can_be_handed_in():
    made = []

    def make_step(model, optimizer, batch_size, estimator):
        made.append((batch_size, estimator is not None))

        def step(batch):
            optimizer.zero_grad()
            parts = [(loss_fn(model(x), y) * share, share) for (x, y), share in micro_batches(batch, batch_size // 2)]
            for loss, _ in parts:
                loss.backward()
            optimizer.step()
            return sum(loss.detach() for loss, _ in parts)

        return step

    own = advise(Shift(), loss_fn, dataset(), batch_size=16, steps=24, batch_sizes=[32], make_step=make_step)
    assert made == [(16, True), (16, False), (32, False)]
    assert own.noise == advise(Shift(), loss_fn, dataset(), batch_size=16, steps=24, batch_sizes=[32]).noise


def test_a_run_that_diverges_says_so():
    model = Shift(start=1.0)
    with pytest.raises(DivergedError, match="learning rate is too large"):
        ask(model, optimizer=torch.optim.SGD(model.parameters(), lr=1e30))


def test_pooling_keeps_the_mean_and_divides_the_variance():
    spread = Spread(trace_variance=4.0, sq_norm_variance=0.04, covariance=0.1, degrees=10)
    each = Diversity.from_noise(30.0, 1.0, 100, spread=spread)
    both = pooled([each, each])
    assert (both.trace, both.sq_norm, both.num_samples) == pytest.approx((30.0, 1.0, 200))
    assert both.spread == Spread(trace_variance=2.0, sq_norm_variance=0.02, covariance=0.05, degrees=20)
    assert pooled([Diversity.from_noise(30.0, 1.0, 100)]).spread is None
