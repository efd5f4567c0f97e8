"""The sketch kernel against the plain sketch; without a GPU by Triton's interpreter."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, RMSprop

pytest.importorskip("triton", reason="needs triton")

from divebatch.estimators import sketch
from divebatch.estimators.average import read
from divebatch.estimators.second_moment import Preconditioner, StepGradients
from divebatch.estimators.sketch import KernelSketch, SignSketch

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Triton's interpreter
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
SHAPES = ((70, 50), (3,), (2, 5, 4, 4), (1100,))


def drawn(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return {str(number): nn.Parameter(each.to(DEVICE, dtype)) for number, each in enumerate(found)}


def assert_same(signs: SignSketch, step: StepGradients, *, by_kernel: KernelSketch | None = None) -> None:
    plain, square = signs.of(step)
    found, own = (by_kernel or KernelSketch(signs)).of(step)
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4 * float(plain.norm()))
    assert read([own]) == pytest.approx(read([square]), rel=1e-5)


@pytest.mark.parametrize("size", [300, 1024, 1500, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_plain_sketch(size: int, dtype: torch.dtype):
    held = drawn(dtype)
    assert_same(SignSketch(held, size, seed=1), StepGradients(held, scale=-0.5, grad_scale=8.0))


def test_types_may_differ_and_gradients_move_or_be_missing():
    held = drawn()
    held["1"] = nn.Parameter(held["1"].detach().bfloat16())
    signs = SignSketch(held, 600, seed=1)
    by_kernel = KernelSketch(signs)
    for number in range(3):
        gradients: dict[str, Tensor] = {name: each.detach() * (number + 1) for name, each in held.items()}
        gradients["2"] = gradients["2"].contiguous(memory_format=torch.channels_last)
        if number == 1:
            del gradients["3"]
        assert_same(signs, StepGradients(gradients), by_kernel=by_kernel)


def test_shards_add_up():
    """The last ones without rows of small parameters, or of any."""
    held = drawn()
    signs, total = SignSketch(held, 300, seed=1), torch.zeros(300, device=DEVICE)
    for begin, end in ((0, 1), (1, 37), (37, 1100), (1100, 1200)):
        shards = {name: each[begin:end] for name, each in held.items()}
        starts = {name: begin * each[0].numel() for name, each in held.items()}
        step = StepGradients(shards, offsets=starts)
        assert_same(signs, step)
        total += KernelSketch(signs).of(step)[0]
    torch.testing.assert_close(total, signs.of(StepGradients(held))[0], rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("make", [AdamW, lambda p: RMSprop(p, alpha=0.9)], ids=["AdamW", "RMSprop"])
def test_it_divides_as_the_optimizer_does(make):
    held = drawn()
    optimizer = make(held.values())
    for _ in range(2):
        for p in held.values():
            p.grad = p.detach().clone()
        optimizer.step()
    divides = Preconditioner(optimizer, held)
    gradients = {name: p.grad for name, p in held.items()}
    assert_same(SignSketch(held, 700, seed=1), StepGradients(gradients, grad_scale=4.0, preconditioner=divides))


def test_it_is_compared_with_the_plain_path_before_its_first_use(monkeypatch: pytest.MonkeyPatch):
    sketch._agrees.cache_clear()
    assert sketch._agrees(DEVICE)
    sketch._agrees.cache_clear()
    monkeypatch.setattr(sketch, "TOLERANCE", -1.0)
    with pytest.warns(UserWarning, match=r"the sketch kernel does not work on .*another result.*a slower way"):
        assert not sketch._agrees(DEVICE)
    sketch._agrees.cache_clear()
