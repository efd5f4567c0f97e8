"""Errors put into the code on purpose: each must show in the comparison with the slow twin that guards it."""

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from divebatch import AdaBatch, AdaptiveLoader, Controller, DiveBatch, Diversity, gradient_diversity
from divebatch.data.order import Shuffled
from divebatch.lr import LrCoupling
from divebatch.norms import DiversityMeter
from divebatch.norms.eager import MeasuredPass
from divebatch.norms.loss_scale import LossScale
from reference import per_sample
from reference.per_sample import dataset, mean_loss, mlp

DATA = dataset(18)
CLEARLY = 0.01


def relative_errors(measured: Diversity, expected: Diversity) -> list[float]:
    """Of both sums and of the number of samples."""
    pairs = [
        (measured.sum_of_sq_norms, expected.sum_of_sq_norms),
        (measured.sq_norm_of_sum, expected.sq_norm_of_sum),
        (measured.num_samples, expected.num_samples),
    ]
    return [abs(mine / theirs - 1) for mine, theirs in pairs]


def errors_at_fixed_weights() -> list[float]:
    batches = list(zip(*(tensor.split(5) for tensor in DATA.tensors), strict=True))
    return relative_errors(
        gradient_diversity(mlp(), mean_loss, batches), per_sample.diversity(mlp(), mean_loss, batches)
    )


def errors_of_the_second_epoch(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The diversity the controller's policy sees in its second epoch against one kept by hand."""
    seen: list[Diversity] = []
    decide = DiveBatch.next
    monkeypatch.setattr(DiveBatch, "next", lambda self, m: seen.append(m.diversity) or decide(self, m))
    model, twin, loader, twin_loader = mlp(), mlp(), AdaptiveLoader(DATA, 5, seed=0), AdaptiveLoader(DATA, 5, seed=0)
    optimizer, twin_optimizer = SGD(model.parameters(), 0.01), SGD(twin.parameters(), 0.01)
    with Controller(model, optimizer, loader, DiveBatch(1e-9, 6)) as control:
        for _ in range(2):
            per_sample_epoch = per_sample.trajectory(twin, mean_loss, twin_optimizer, twin_loader)
            for x, y in loader:
                optimizer.zero_grad()
                mean_loss(model(x), y).backward()
                optimizer.step()
            control.step()
    return relative_errors(seen[1], per_sample_epoch)


def errors_of_the_rate() -> list[float]:
    """After each epoch, against the same scheduler uncoupled and the factor by definition."""
    model, loader = mlp(), AdaptiveLoader(DATA, 2, seed=0)
    optimizer, twin = SGD(model.parameters(), 0.01), SGD(model.parameters(), 0.01)
    scheduler, twin_scheduler = (StepLR(o, 1, gamma=0.5) for o in (optimizer, twin))
    errors = []
    with Controller(
        model, optimizer, loader, AdaBatch(8, every_epochs=1), lr_coupling="linear", scheduler=scheduler
    ) as control:
        for size in (4, 8, 8):
            for _ in loader:
                optimizer.step()
                twin.step()
            scheduler.step()
            twin_scheduler.step()
            control.step()
            expected = twin.param_groups[0]["lr"] * size / 2
            errors.append(abs(control.lr / expected - 1))
    return errors


def errors_of_an_epoch_at_fixed_weights() -> list[float]:
    """Every sample exactly once: an epoch that does not train against the whole dataset."""
    model, loader = mlp(), AdaptiveLoader(DATA, 5, seed=0)
    with DiversityMeter(model) as meter:
        for x, y in loader:
            mean_loss(model(x), y).backward()
        return relative_errors(meter.diversity(), per_sample.diversity(mlp(), mean_loss, [DATA.tensors]))


def test_without_an_error_all_comparisons_agree(monkeypatch: pytest.MonkeyPatch):
    comparisons = [
        errors_at_fixed_weights(),
        errors_of_the_second_epoch(monkeypatch),
        errors_of_the_rate(),
        errors_of_an_epoch_at_fixed_weights(),
    ]
    assert all(max(errors) < 1e-9 for errors in comparisons)


def test_norms_not_multiplied_by_the_squared_batch_size_show(monkeypatch: pytest.MonkeyPatch):
    exact = MeasuredPass.add_up

    def add_up(done: MeasuredPass) -> None:
        exact(done)
        done.sq_norms = done.sq_norms / done.num_samples**2

    monkeypatch.setattr(MeasuredPass, "add_up", add_up)
    sum_of_sq_norms, sq_norm_of_sum, num_samples = errors_at_fixed_weights()
    assert sum_of_sq_norms > 0.9
    assert max(sq_norm_of_sum, num_samples) < 1e-9


def test_gradients_not_multiplied_by_the_batch_size_show(monkeypatch: pytest.MonkeyPatch):
    scale = LossScale.of_pass
    monkeypatch.setattr(LossScale, "of_pass", lambda self, *given: scale(self, *given)._replace(factor=1))
    sum_of_sq_norms, sq_norm_of_sum, _ = errors_at_fixed_weights()
    assert min(sum_of_sq_norms, sq_norm_of_sum) > 0.9


def test_sums_that_are_not_reset_between_epochs_show(monkeypatch: pytest.MonkeyPatch):
    reset, detach = DiversityMeter.reset, DiversityMeter.detach

    def reset_once(self: DiversityMeter) -> None:
        if not self._sums:
            reset(self)

    def detach_and_keep(self: DiversityMeter) -> None:
        sums = self._sums
        detach(self)
        self._sums = sums

    monkeypatch.setattr(DiversityMeter, "reset", reset_once)
    monkeypatch.setattr(DiversityMeter, "detach", detach_and_keep)
    # Sums are told as those of n samples, so twice as many of both differ by what the weights did in between.
    assert max(errors_of_the_second_epoch(monkeypatch)) > CLEARLY


def test_a_rate_that_follows_the_batch_size_twice_shows(monkeypatch: pytest.MonkeyPatch):
    factor_at = LrCoupling.factor_at
    monkeypatch.setattr(LrCoupling, "factor_at", lambda self, batch_size: factor_at(self, batch_size) ** 2)
    assert min(errors_of_the_rate()) > CLEARLY


def test_a_scheduler_that_sees_the_coupled_rate_shows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LrCoupling, "put_back", lambda self: self.undo.clear())
    with pytest.warns(UserWarning, match="changes within the epoch"):  # the controller notices it by itself
        errors = errors_of_the_rate()
    assert max(errors) > CLEARLY


def test_a_sample_seen_twice_shows(monkeypatch: pytest.MonkeyPatch):
    draw = Shuffled.draw

    def draw_first_twice(self: Shuffled, epoch: int) -> torch.Tensor:
        order = draw(self, epoch)
        return torch.cat([order[:1], order])

    monkeypatch.setattr(Shuffled, "draw", draw_first_twice)
    assert min(errors_of_an_epoch_at_fixed_weights()) > 1e-3


def test_a_sample_seen_in_place_of_another_shows(monkeypatch: pytest.MonkeyPatch):
    draw = Shuffled.draw

    def draw_first_for_last(self: Shuffled, epoch: int) -> torch.Tensor:
        order = draw(self, epoch)
        return torch.cat([order[:1], order[:-1]])

    monkeypatch.setattr(Shuffled, "draw", draw_first_for_last)
    sum_of_sq_norms, sq_norm_of_sum, _ = errors_of_an_epoch_at_fixed_weights()
    assert min(sum_of_sq_norms, sq_norm_of_sum) > 1e-3
