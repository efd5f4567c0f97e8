"""The compiled preparation of a batch; its slow twin is `prepare`, operator by operator."""

import shutil
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from divebatch.lab import Run, get_experiment
from divebatch.lab.build import place_for
from divebatch.lab.data import DataPlace, images
from divebatch.lab.data.augment import (
    CropFlip,
    CropFlipRotate,
    RandomResizedCrop,
    ResizeCentreCrop,
    Whole,
)
from divebatch.lab.data.images import Colours, HostImages, image_split

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")  # torch's own
NEEDS_COMPILER = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile on a CPU needs a C++ compiler"
)
COLOURS = Colours(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
"""Neighbouring pixel values are at least 0.009 apart once normalised."""
LAST_BIT = 1e-6
"""Of values up to 3."""
NUM_TRAIN = 23
TRANSFORMS = {
    "crop": (CropFlip(), Whole()),
    "rotate": (CropFlipRotate(), Whole()),
    "resized": (RandomResizedCrop(side=32, size=36), ResizeCentreCrop(size=36, resize=40)),
}


def numbered_images(count: int) -> HostImages:
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(0, 256, (count, 32, 32, 3), generator=generator, dtype=torch.uint8)
    return HostImages(images, torch.arange(count))


def make_split(name: str, *, compile: bool, **place):
    (training, evaluation), place = TRANSFORMS[name], DataPlace(torch.device("cpu"), compile=compile, **place)
    return image_split((numbered_images(NUM_TRAIN), training), (numbered_images(10), evaluation), COLOURS, 10, 4, place)


def num_compiled() -> int:
    return counters["stats"]["unique_graphs"]


def assert_same_but_for_rounding(batches, others) -> None:
    for (x, y), (other_x, other_y) in zip(batches, others, strict=True):
        torch.testing.assert_close(x, other_x, atol=LAST_BIT, rtol=0)
        assert x.stride() == other_x.stride()
        assert torch.equal(y, other_y)
        assert (x.dtype, y.dtype) == (other_x.dtype, other_y.dtype)


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's front end alone, which is quick: it decides what is compiled anew and what its code computes."""
    torch.compiler.reset()  # one function has a limited number of variants, and each test adds some
    traced = torch.compile(images.prepare, backend="aot_eager", dynamic=False, fullgraph=True)
    monkeypatch.setattr(images, "_compiled", lambda: traced)


@NEEDS_COMPILER
@pytest.mark.slow
def test_generated_code_prepares_what_the_operators_do():
    compare("crop")


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_compiled_batches_are_the_plain_ones_and_one_compilation_serves_all_sizes(name):
    compare(name)


def compare(name: str) -> None:
    plain, compiled = (make_split(name, compile=each, channels_last=True) for each in (False, True))
    here, there = plain.loader(4, seed=1), compiled.loader(4, seed=1)
    before = num_compiled()
    for size in (4, 7, 22, 23, 2):  # their last batches have 3, 2, 1, 23 and 1 samples
        here.batch_size = there.batch_size = size
        assert_same_but_for_rounding(there, here)
    with torch.no_grad():
        assert_same_but_for_rounding(there.full_pass(), here.full_pass())
        assert_same_but_for_rounding(compiled.validation, plain.validation)
    assert_same_but_for_rounding(compiled.loader(9, seed=2), plain.loader(9, seed=2))
    assert num_compiled() == before


@pytest.mark.usefixtures("traced_only")
def test_a_model_is_compiled_for_the_size_of_its_batch_and_for_no_other():
    seen = []

    def watch(graph, inputs):
        seen.extend(inputs)
        return graph.forward

    model = torch.compile(lambda x, y: x.sum() + y.sum(), dynamic=False, backend=watch)
    model(*next(iter(make_split("crop", compile=True).loader(4, seed=1))))
    assert [type(size) for tensor in seen for size in tensor.shape] == [int] * 5


@pytest.mark.usefixtures("traced_only")
def test_a_loader_is_compiled_when_it_is_made_and_leaves_no_trace_in_its_course():
    before = num_compiled()
    assert make_split("crop", compile=False).loader(4, seed=0).samples_delivered == 0
    assert num_compiled() == before
    torch.compiler.reset()
    loader = make_split("crop", compile=True, channels_last=True).loader(4, seed=0)
    assert num_compiled() == before + 2  # training and validation
    assert (loader.samples_delivered, loader.epoch) == (0, 0)


@pytest.mark.parametrize(
    ("device", "compile", "expected"), [("cuda:0", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_runs_that_compile_on_a_gpu_prepare_their_batches_so(device, compile, expected):
    run = Run(get_experiment("cifar10").with_training(compile=compile), "sgd-small", 0, Path(), device)
    assert place_for(run).compile is expected
