import numpy as np
import pytest
import torch
from slow_images import crop_box, crop_flip, resize, resized_crop, rotate

from divebatch.lab.data.augment import (
    TRIES,
    CropFlip,
    CropFlipRotate,
    RandomResizedCrop,
    ResizeCentreCrop,
    Whole,
    with_margin,
)

TRANSFORMS = {
    "crop": CropFlip(),
    "rotate": CropFlipRotate(),
    "resized": RandomResizedCrop(side=32, size=40),
    "whole": Whole(),
    "middle": ResizeCentreCrop(size=40, resize=48),
}


def random_images(count: int, side: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(1, 256, (count, side, side, 3), generator=generator, dtype=torch.uint8)


def random_uniforms(count: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, columns, generator=torch.Generator().manual_seed(seed))


def augmented(transform, images, uniforms, which=None):
    which = torch.arange(len(images)) if which is None else which
    plan = transform.plan(uniforms)
    return transform.apply(with_margin(images, transform.padding), which, plan[which])


def test_crop_and_flip_equal_those_of_single_images():
    images, uniforms = random_images(60), random_uniforms(60, 3)
    expected = np.stack([crop_flip(i.numpy(), u.tolist()) for i, u in zip(images, uniforms, strict=True)])
    assert torch.equal(augmented(CropFlip(), images, uniforms), torch.from_numpy(expected))


def test_rotation_equals_that_of_single_pixels_after_crop_and_flip():
    images, uniforms = random_images(12), random_uniforms(12, 4)
    expected = [
        rotate(crop_flip(image.numpy(), row.tolist()), (2 * row[3].item() - 1) * 15)
        for image, row in zip(images, uniforms, strict=True)
    ]
    assert torch.equal(augmented(CropFlipRotate(), images, uniforms), torch.from_numpy(np.stack(expected)))


def test_what_a_rotation_uncovers_is_zero_also_where_the_uncropped_image_goes_on():
    images = torch.full((1, 32, 32, 3), 200, dtype=torch.uint8)
    uniforms = torch.tensor([[0.0, 0.0, 0.9, 0.999]])  # the upper left corner, not mirrored, almost 15 degrees
    turned = augmented(CropFlipRotate(), images, uniforms)[0]
    assert turned[31, 31].tolist() == [0, 0, 0]
    assert turned[16, 16].tolist() == [200, 200, 200]


def test_offsets_are_uniform_and_half_is_mirrored():
    plan = CropFlip().plan(random_uniforms(90_000, 3))
    mirrored = plan[:, 2] == -1
    left = torch.where(mirrored, plan[:, 1] - 31, plan[:, 1])
    for offsets in (plan[:, 0], left):
        counts = torch.bincount(offsets, minlength=9)
        assert len(counts) == 9
        assert (counts - 10_000).abs().max() < 400  # four standard deviations
    assert abs(mirrored.float().mean() - 0.5) < 0.007
    together = torch.bincount(9 * plan[:, 0] + left, minlength=81)
    assert (together - 90_000 / 81).abs().max() < 150


def test_angles_fill_fifteen_degrees_to_both_sides():
    plan = CropFlipRotate().plan(random_uniforms(20_000, 4))
    degrees = torch.rad2deg(torch.atan2(plan[:, 4].double(), plan[:, 3].double()))
    assert degrees.abs().max() <= 15
    quarters = torch.histc(degrees, bins=4, min=-15, max=15)
    assert (quarters - 5_000).abs().max() < 250


def test_the_largest_uniform_stays_inside():
    edge = torch.full((1, 23), 1 - 2**-24)
    assert CropFlip().plan(edge[:, :3]).tolist() == [[8, 8, 1]]
    top, left, height, width, _ = RandomResizedCrop(side=64, size=224).plan(edge)[0].tolist()
    assert 0 <= top <= 64 - height
    assert 0 <= left <= 64 - width


def test_boxes_equal_those_of_single_images():
    transform = RandomResizedCrop(side=64, size=224)
    uniforms = random_uniforms(500, transform.num_uniforms)
    plan = transform.plan(uniforms)
    assert [tuple(row[:4]) for row in plan.long().tolist()] == [crop_box(u, side=64) for u in uniforms.tolist()]
    assert torch.equal(plan[:, 4] > 0, uniforms[:, -1] < 0.5)


def test_the_whole_image_where_no_box_fits():
    hopeless = torch.ones(1, 23) * (1 - 2**-24)  # all of the area at ratio 4/3 is wider than the image
    assert RandomResizedCrop(side=64, size=224).plan(hopeless)[0].tolist() == [0, 0, 64, 64, 0]
    late = hopeless.clone()
    late[0, TRIES - 1] = 0.0  # only the last try fits: 8 % of the area
    assert RandomResizedCrop(side=64, size=224).plan(late)[0, 2:4].tolist() == [16, 21]


def test_a_resized_crop_equals_crop_then_resize():
    transform = RandomResizedCrop(side=24, size=60)
    images, uniforms = random_images(20, 24), random_uniforms(20, 23)
    result = augmented(transform, images, uniforms)
    for image, row, ours in zip(images, uniforms.tolist(), result, strict=True):
        theirs = resized_crop(image, crop_box(row, side=24), size=60, mirrored=row[-1] < 0.5)
        torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0)  # of 255 levels


def test_the_test_image_is_resized_then_cut():
    images = random_images(3, 64)
    ours = augmented(ResizeCentreCrop(size=224, resize=256), images, torch.empty(3, 0))
    theirs = torch.stack([resize(image, 256)[16:240, 16:240] for image in images])
    torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_batch_is_the_samples_it_asks_for(name):
    transform = TRANSFORMS[name]
    images, uniforms = random_images(9), random_uniforms(9, transform.num_uniforms)
    everything = augmented(transform, images, uniforms)
    which = torch.tensor([7, 0, 0, 4])
    assert torch.equal(augmented(transform, images, uniforms, which), everything[which])
