"""When a pass is recorded and what a recording serves, with a stand-in for the GPU's own recording."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader, Controller, EpochRecord
from divebatch.estimators import Split, optimizer_events
from divebatch.lab.training import Clock, Passes, Setup, Step, Tally, train_epoch
from divebatch.lab.training import forward_backward as module
from divebatch.lab.training.cuda_graph import Recording
from divebatch.lab.training.distributed import Parallel
from divebatch.policies import NoiseScale


class Written:
    """In place of a CUDA graph."""

    under_way = False

    def replay(self) -> None:
        """`Played` does it."""


@contextmanager
def written(_: Written) -> Iterator[None]:
    Written.under_way = True
    try:
        yield
    finally:
        Written.under_way = False


class Played(Recording):
    """Goes through the pass anew each time, seen by no hook that waits for an accumulated gradient. As a graph does, it
    writes its loss and its gradients where it wrote them before."""

    made = replayed = 0

    def __init__(self, parameters, run, inputs, targets):
        Played.made += 1
        self._run = run
        super().__init__(parameters, run, inputs, targets)

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
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Written)
    monkeypatch.setattr(torch.cuda, "graph", written)
    monkeypatch.setattr(optimizer_events, "is_recorded", lambda _: Written.under_way)


def make_passes(model: nn.Module, micro_batch_size: int | None = None) -> Passes:
    return Passes(Parallel.alone(model), mse_loss, Setup(micro_batch_size=micro_batch_size), Clock(torch.device("cpu")))


@pytest.fixture
def passes(on_a_gpu):
    made = make_passes(nn.Linear(3, 1))
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


def test_parts_of_all_batches_have_one_recording(passes):
    assert [run(passes, share=share) for share in (0.5, 0.5, 0.25, 1.0)] == [False, True, True, True]
    assert Played.made == 1
    assert not any(run(passes, share=0.0) for _ in range(3))  # keeps others company


def test_a_recording_that_fails_leaves_the_gradients_of_earlier_parts(passes, monkeypatch):
    run(passes, share=0.5)
    before = passes.parallel.model.weight.grad
    monkeypatch.setattr(passes, "_loss", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        passes(torch.ones(4, 3), torch.ones(4, 1), share=0.5, measuring=False)
    assert passes.parallel.model.weight.grad is before


@pytest.mark.parametrize("compiles", [True, False])
def test_the_first_pass_of_each_size_is_compiling_where_it_is_compiled(compiles, monkeypatch):
    monkeypatch.setattr(module, "compiled_loss_of", lambda **_: module.loss_of)
    passes = Passes(Parallel.alone(nn.Linear(3, 1)), mse_loss, Setup(compile=compiles), Clock(torch.device("cpu")))
    passes.begin_epoch(4)
    laps = []
    monkeypatch.setattr(passes.clock, "lap", lambda name: laps.append(name) or nullcontext())
    for size in (4, 4, 3, 4, 3, 2):
        run(passes, size)
    assert laps == ["compile" if compiles else "train"] * 3
    assert passes.num_compiled == (1 if compiles else 0)  # a short batch is not


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
    assert not passes._recorded
    assert [run(passes, 5), run(passes, 5)] == [False, True]


def test_there_is_no_recording_beside_one_that_measures_or_has_another_token(passes):
    for measuring, token in ((False, 1), (True, 1), (True, 2), (False, 2)):
        assert [run(passes, measuring=measuring, token=token) for _ in range(3)] == [False, True, True]
        assert [(variant, each.token) for variant, each in passes._recorded.items()] == [((4, measuring), token)]


def test_a_size_that_comes_back_runs_once_kernel_by_kernel(passes):
    assert [run(passes) for _ in range(2)] == [False, True]
    passes.expect(5)
    passes.expect(4)
    assert [run(passes) for _ in range(2)] == [False, True]


def parts(passes: Passes, size: int, batch_size: int) -> bool:
    passes.expect(size, batch_size=batch_size)
    return run(passes, size, share=size / batch_size)


def test_whole_batches_and_halves_have_a_recording_each_until_the_size_changes(passes):
    assert [parts(passes, size, 8) for size in (4, 8, 4, 8, 8, 4)] == [False, False, True, True, True, True]
    assert (Played.made, len(passes._recorded)) == (2, 2)
    assert parts(passes, 8, 16)  # halves of larger batches: what was recorded serves on
    assert [variant[0] for variant in passes._recorded] == [8]
    assert Played.made == 2


@pytest.mark.parametrize("other", [{"token": 2}, {"measuring": True}])
def test_a_recording_of_another_kind_takes_the_place_of_those_of_all_sizes(passes, other):
    for size in (4, 8) * 2:
        parts(passes, size, 8)
    assert len(passes._recorded) == 2
    passes.expect(4, batch_size=8)
    assert [run(passes, 4, share=0.5, **other) for _ in range(2)] == [False, True]
    assert len(passes._recorded) == 1


INPUTS = torch.linspace(-1, 2, 183, dtype=torch.float64).view(61, 3).sin()
DATA = TensorDataset(INPUTS, 3 + INPUTS.sum(1, keepdim=True))


def expected_step(step: Step, batch: object) -> Tensor:
    step.passes.expect(step.part_size(8), batch_size=8)
    return step(batch)


def trained(estimator: str | Split, micro_batch_size: int | None) -> tuple[list[EpochRecord], list[Tensor]]:
    """Three epochs with batches of 8, the last of them of 5."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    loader, passes = AdaptiveLoader(DATA, 8, seed=0), make_passes(model, micro_batch_size)
    records = []
    with Controller(model, optimizer, loader, NoiseScale(8), estimator=estimator) as control:
        step = Step.under(control, passes, optimizer)
        for _ in range(3):
            passes.begin_epoch(step.part_size(8), batch_size=8)
            loss = train_epoch(partial(expected_step, step), loader, Tally(), lambda: None)
            records.append(control.step(loss=loss))
    return records, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("micro_batch_size", [None, 2, 3])
@pytest.mark.parametrize("kind", ["split", "moments", "split, one batch in 3"])
def test_what_is_replayed_trains_and_is_measured_as_what_is_not(kind, micro_batch_size, request):
    make = (lambda: Split(every_steps=3)) if "," in kind else lambda: kind
    expected, expected_weights = trained(make(), micro_batch_size)
    request.getfixturevalue("on_a_gpu")
    found, weights = trained(make(), micro_batch_size)
    assert Played.made == (2 if "," in kind and micro_batch_size is None else 1)
    assert Played.replayed >= 3 * 7 - 1
    for one, other in zip(found, expected, strict=True):
        assert one.measured == other.measured
        assert (one.diversity, one.diversity_low, one.train_loss) == pytest.approx(
            (other.diversity, other.diversity_low, other.train_loss), rel=1e-9
        )
    for mine, theirs in zip(weights, expected_weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)
