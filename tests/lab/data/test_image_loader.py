import pytest
import torch

from divebatch.errors import UsageError
from divebatch.lab.data import DataPlace
from divebatch.lab.data.augment import (
    CropFlip,
    CropFlipRotate,
    RandomResizedCrop,
    ResizeCentreCrop,
    Whole,
)
from divebatch.lab.data.images import Colours, HostImages, image_split

CPU = torch.device("cpu")
COLOURS = Colours(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
TRANSFORMS = {"crop": CropFlip(), "rotate": CropFlipRotate(), "resized": RandomResizedCrop(side=32, size=36)}
WHOLE = Whole()
NUM_TRAIN = 23


def numbered_images(count: int) -> HostImages:
    """Each image's label is its number."""
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(0, 256, (count, 32, 32, 3), generator=generator, dtype=torch.uint8)
    return HostImages(images, torch.arange(count))


def make_split(transform=TRANSFORMS["crop"], evaluation=WHOLE, **place):
    train, validation = numbered_images(NUM_TRAIN), numbered_images(10)
    place = DataPlace(CPU, **place)
    return image_split((train, transform), (validation, evaluation), COLOURS, 10, eval_batch_size=4, place=place)


def epoch_by_sample(loader) -> torch.Tensor:
    """The images of an epoch in the order of their numbers."""
    images, labels = map(torch.cat, zip(*loader, strict=True))
    assert sorted(labels.tolist()) == list(range(NUM_TRAIN))
    return images[labels.argsort()]


def assert_same_batches(some, others):
    some, others = list(some), list(others)
    assert len(some) == len(others)
    for (x, y), (other_x, other_y) in zip(some, others, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_augmentation_depends_on_seed_epoch_and_sample_alone(name):
    split = make_split(TRANSFORMS[name])
    small, large, other_seed = split.loader(3, seed=1), split.loader(16, seed=1), split.loader(3, seed=2)
    epochs = [epoch_by_sample(small) for _ in range(3)]
    large.set_epoch(2)
    assert torch.equal(epochs[2], epoch_by_sample(large))
    assert not torch.equal(epochs[1], epochs[2])
    assert not torch.equal(epochs[0], epoch_by_sample(other_seed))


def test_augmentation_survives_a_change_of_the_batch_size():
    split = make_split()
    steady, changing = split.loader(4, seed=0), split.loader(4, seed=0)
    for size in (4, 9, 23):
        changing.batch_size = size
        assert torch.equal(epoch_by_sample(changing), epoch_by_sample(steady))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_resume_in_the_middle_gives_the_rest_bit_by_bit(name):
    split = make_split(TRANSFORMS[name])
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
    assert torch.equal(torch.cat([y for _, y in full]), torch.arange(NUM_TRAIN))
    assert loader.samples_delivered == NUM_TRAIN
    assert torch.equal(torch.cat([x for x, _ in full]), epoch_by_sample(loader))


def test_passes_count_and_end_as_those_of_any_loader():
    loader = make_split().loader(5, seed=0)
    assert len(loader) == 5
    first = iter(loader)
    next(first)
    assert loader.samples_delivered == 5
    list(loader)
    assert loader.epoch == 1
    with pytest.raises(UsageError, match="another pass"):
        next(first)


def test_a_loop_that_counts_its_batches_goes_on_to_the_next_epoch():
    counting, plain = make_split().loader(5, seed=0), make_split().loader(5, seed=0)
    for _ in range(3):
        counted = [batch for _, batch in zip(range(len(counting)), counting, strict=False)]
        assert_same_batches(counted, plain)


def test_a_pass_that_was_left_starts_again():
    loader = make_split().loader(5, seed=0)
    left = next(iter(loader))
    assert_same_batches([left], [next(iter(loader))])


def test_batches_are_normalised_floats_of_the_asked_layout():
    data = numbered_images(10)
    for channels_last in (False, True):
        x, y = next(iter(make_split(channels_last=channels_last).validation))
        expected = (data.images[:4].double() / 255 - torch.tensor(COLOURS.mean)) / torch.tensor(COLOURS.std)
        torch.testing.assert_close(x, expected.permute(0, 3, 1, 2).float(), atol=1e-5, rtol=1e-5)
        assert x.is_contiguous(memory_format=torch.channels_last) is channels_last
        assert x.is_contiguous() is not channels_last
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("channels_last", [True, False])
def test_training_batches_have_the_asked_layout(name, channels_last):
    x, _ = next(iter(make_split(TRANSFORMS[name], channels_last=channels_last).loader(4, seed=0)))
    assert x.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def test_the_margin_of_a_crop_is_black_before_normalisation():
    black = HostImages(torch.zeros(4, 32, 32, 3, dtype=torch.uint8), torch.arange(4))
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
