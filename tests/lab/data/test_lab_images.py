"""Batches of images: a function of seed, epoch and sample alone; compiled ones are the plain ones."""

import shutil
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from divebatch.lab import Run, get_experiment
from divebatch.lab.build import place_for
from divebatch.lab.data import DataPlace, images
from divebatch.lab.data.augment import CropFlip, CropFlipRotate, RandomResizedCrop, ResizeCentreCrop, Whole
from divebatch.lab.data.dataset import LabelledSamples
from divebatch.lab.data.images import Colours, image_split

CPU = torch.device("cpu")
COLOURS = Colours(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
"""Neighbouring pixel values are at least 0.009 apart once normalised."""
TRANSFORMS = {
    "crop": (CropFlip(), Whole()),
    "rotate": (CropFlipRotate(), Whole()),
    "resized": (RandomResizedCrop(side=32, size=36), ResizeCentreCrop(size=36, resize=40)),
}
"""For training and for validation."""
TOTAL = 23


def numbered_images(count: int) -> LabelledSamples:
    """Each image's label is its number."""
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(0, 256, (count, 32, 32, 3), generator=generator, dtype=torch.uint8)
    return LabelledSamples(images, torch.arange(count))


CROP, WHOLE = TRANSFORMS["crop"]


def make_split(training=CROP, evaluation=WHOLE, **place):
    train, validation = (numbered_images(TOTAL), training), (numbered_images(10), evaluation)
    return image_split(train, validation, COLOURS, 10, eval_batch_size=4, place=DataPlace(CPU, **place))


def epoch_by_sample(loader) -> torch.Tensor:
    """The images of an epoch in the order of their numbers."""
    images, labels = map(torch.cat, zip(*loader, strict=True))
    assert sorted(labels.tolist()) == list(range(TOTAL))
    return images[labels.argsort()]


def assert_same_batches(some, others):
    some, others = list(some), list(others)
    assert len(some) == len(others)
    for (x, y), (other_x, other_y) in zip(some, others, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_augmentation_depends_on_seed_epoch_and_sample_alone(name):
    split = make_split(TRANSFORMS[name][0])
    small, large, other_seed = split.loader(3, seed=1), split.loader(16, seed=1), split.loader(3, seed=2)
    epochs = [epoch_by_sample(small) for _ in range(3)]
    large.set_epoch(2)
    assert torch.equal(epochs[2], epoch_by_sample(large))
    assert not torch.equal(epochs[1], epochs[2])
    assert not torch.equal(epochs[0], epoch_by_sample(other_seed))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_resume_in_the_middle_gives_the_rest_bit_by_bit(name):
    split = make_split(TRANSFORMS[name][0])
    loader = split.loader(4, seed=5)
    list(loader)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    state = loader.state_dict()
    resumed = split.loader(7, seed=99)  # seed and size come from the state
    resumed.load_state_dict(state)
    assert_same_batches(batches, resumed)
    assert resumed.epoch == 2
    assert_same_batches(loader, resumed)


def test_a_full_pass_shows_the_epoch_to_come_in_fixed_order_and_counts_nothing():
    loader = make_split().loader(4, seed=0)
    list(loader)
    full = list(loader.full_pass())
    assert torch.equal(torch.cat([y for _, y in full]), torch.arange(TOTAL))
    assert loader.samples_delivered == TOTAL
    assert torch.equal(torch.cat([x for x, _ in full]), epoch_by_sample(loader))


def test_batches_are_normalised_floats_of_the_asked_layout():
    data = numbered_images(10)
    for channels_last in (False, True):
        x, y = next(iter(make_split(channels_last=channels_last).validation))
        expected = (data.inputs[:4].double() / 255 - torch.tensor(COLOURS.mean)) / torch.tensor(COLOURS.std)
        torch.testing.assert_close(x, expected.permute(0, 3, 1, 2).float(), atol=1e-5, rtol=1e-5)
        assert x.is_contiguous(memory_format=torch.channels_last) is channels_last
        assert x.is_contiguous() is not channels_last
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)


def test_the_margin_of_a_crop_is_black_before_normalisation():
    black = LabelledSamples(torch.zeros(4, 32, 32, 3, dtype=torch.uint8), torch.arange(4))
    split = image_split((black, CropFlip()), (black, Whole()), COLOURS, 4, 4, DataPlace(CPU))
    x, _ = next(iter(split.loader(4, seed=0)))
    assert x.amin((0, 2, 3)).tolist() == x.amax((0, 2, 3)).tolist()
    torch.testing.assert_close(x[0, :, 0, 0], torch.tensor([-2.5, -4 / 3, -0.75]))


@pytest.mark.parametrize("evaluation", [WHOLE, ResizeCentreCrop(size=36, resize=40)], ids=["whole", "middle"])
def test_validation_can_be_iterated_again_and_again(evaluation):
    split = make_split(evaluation=evaluation)
    assert [len(y) for _, y in split.validation] == [4, 4, 2]
    assert_same_batches(split.validation, split.validation)
    iterators = [iter(split.validation) for _ in range(2)]  # also side by side
    assert_same_batches(*iterators)


def test_the_global_random_state_is_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(make_split().loader(5, seed=0))
    assert torch.equal(torch.get_rng_state(), before)


pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")  # torch's own

NEEDS_COMPILER = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile on a CPU needs a C++ compiler"
)

LAST_BIT = 1e-6
"""Of values up to 3."""


def compiled_split(name: str, *, compile: bool, **place):
    return make_split(*TRANSFORMS[name], compile=compile, **place)


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
    monkeypatch.setattr(images, "compiled", lambda _: traced)


@NEEDS_COMPILER
@pytest.mark.slow
def test_generated_code_prepares_what_the_operators_do():
    compare("crop")


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_compiled_batches_are_the_plain_ones_and_one_compilation_serves_all_sizes(name):
    compare(name)


def compare(name: str) -> None:
    plain, compiled = (compiled_split(name, compile=each, channels_last=True) for each in (False, True))
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
    model(*next(iter(compiled_split("crop", compile=True).loader(4, seed=1))))
    assert [type(size) for tensor in seen for size in tensor.shape] == [int] * 5


@pytest.mark.usefixtures("traced_only")
def test_a_loader_is_compiled_when_it_is_made_and_leaves_no_trace_in_its_course():
    before = num_compiled()
    assert compiled_split("crop", compile=False).loader(4, seed=0).samples_delivered == 0
    assert num_compiled() == before
    torch.compiler.reset()
    loader = compiled_split("crop", compile=True, channels_last=True).loader(4, seed=0)
    assert num_compiled() == before + 2  # training and validation
    assert (loader.samples_delivered, loader.epoch) == (0, 0)


@pytest.mark.parametrize(
    ("device", "compile", "expected"), [("cuda:0", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_runs_that_compile_on_a_gpu_prepare_their_batches_so(device, compile, expected):
    run = Run(get_experiment("cifar10").with_training(compile=compile), "sgd-small", 0, Path(), device)
    assert place_for(run).compile is expected
