"""When a pass is recorded and what a recording serves, with a stand-in for the GPU's own recording."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from divebatch.estimators import Scene, Split
from divebatch.training import Clock, Passes, Setup, Step
from divebatch.training import passes as module
from divebatch.training.distributed import Parallel
from divebatch.training.recording import Recording


class Played(Recording):
    """Goes through the pass anew each time, seen by no hook that waits for an accumulated gradient. As a graph does, it
    writes its loss and its gradients where it wrote them before."""

    made = replayed = 0

    def __init__(self, parameters, run, inputs, targets):
        Played.made += 1
        self._run, self._parameters, self._totals = run, parameters, {}
        self._loss = torch.full((), torch.nan, dtype=torch.float64)
        self.gradients = {name: torch.full_like(each, torch.nan) for name, each in parameters.items()}

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        Played.replayed += 1
        loss = self._run(inputs, targets)
        for name, new in zip(self.gradients, torch.autograd.grad(loss, list(self._parameters.values())), strict=True):
            self.gradients[name].copy_(new)
        return self._loss.copy_(loss.detach())


@pytest.fixture
def on_a_gpu(monkeypatch):
    Played.made = Played.replayed = 0
    monkeypatch.setattr(module, "Recording", Played)
    monkeypatch.setattr(Passes, "_may_record", lambda self, variant: variant[0] == self.full_size)


def make_passes(model: nn.Module | None = None) -> Passes:
    model = model or nn.Linear(3, 1)
    return Passes(Parallel.alone(model), mse_loss, Setup(), Clock(torch.device("cpu")))


@pytest.fixture
def passes(on_a_gpu):
    made = make_passes()
    made.begin_epoch(4)
    return made


def run(passes: Passes, size: int = 4, *, share: float = 1.0, measuring: bool = False, token: object = True) -> bool:
    """One pass; whether it came from a recording."""
    before = Played.replayed
    passes.parallel.model.zero_grad()
    passes(torch.ones(size, 3), torch.ones(size, 1), share=share, measuring=measuring, token=token)
    return Played.replayed > before


def test_the_second_pass_is_recorded_and_a_short_one_is_not(passes):
    assert [run(passes), run(passes)] == [False, True]
    assert [run(passes, 3), run(passes)] == [False, True]
    assert Played.made == 1


def test_parts_of_a_batch_have_a_recording_of_their_own(passes):
    assert [run(passes, share=0.5) for _ in range(3)] == [False, True, True]
    assert [run(passes) for _ in range(3)] == [False, True, True]
    assert Played.made == 2
    assert not any(run(passes, share=0.0) for _ in range(3))  # keeps others company


def test_sums_that_begin_anew_run_once_kernel_by_kernel_before_they_are_recorded(passes):
    first, second = object(), object()
    assert [run(passes, measuring=True, token=first) for _ in range(3)] == [False, True, True]
    assert [run(passes, measuring=True, token=second) for _ in range(3)] == [False, True, True]
    assert Played.made == 2


def test_without_a_token_nothing_is_recorded(passes):
    assert not any(run(passes, measuring=True, token=None) for _ in range(3))


def test_another_size_drops_the_recording(passes):
    assert [run(passes), run(passes)] == [False, True]
    passes.expect(5)
    assert passes._recording is None
    assert [run(passes, 5), run(passes, 5)] == [False, True]


class Watched:
    """A model trained in parts of a batch, watched by `split`."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.optimizer, self.delivered = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9), 0
        self.split = Split()
        self.split.bind(Scene(self.model, lambda: iter(()), "mean", mse_loss, self.optimizer, lambda: self.delivered))
        passes = make_passes(self.model)
        self.step = Step(passes, self.optimizer, min_parts=lambda: 2, on_replay=self.split.see_replay)

    def train(self, sizes: list[int]) -> list[float]:
        losses = []
        self.split.start()
        self.step.passes.begin_epoch(self.step.part_size(sizes[0]))
        for size in sizes:
            self.delivered += size
            batch = torch.randn(size, 3, dtype=torch.float64), torch.randn(size, 1, dtype=torch.float64)
            losses.append(float(self.step(batch)))
        return losses


def test_replayed_parts_are_seen_and_train_as_plain_ones_do(request):
    sizes = [8, 8, 8, 7, 8, 5]  # 7 goes through in 4 and 3
    plain = Watched()
    expected_losses, expected = plain.train(sizes), plain.split.finish()
    request.getfixturevalue("on_a_gpu")
    replayed = Watched()
    losses, found = replayed.train(sizes), replayed.split.finish()
    assert (Played.made, Played.replayed) == (1, 7)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert (found.trace, found.sq_norm, found.num_samples) == pytest.approx(
        (expected.trace, expected.sq_norm, sum(sizes)), rel=1e-10
    )
    for mine, theirs in zip(replayed.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
