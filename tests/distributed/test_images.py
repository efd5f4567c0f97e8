"""Augmented images over ranks: the same as in one process."""

from typing import Any

import torch
from torch import Tensor

from distributed.rank_pool import RankPool
from divebatch.lab.data import DataPlace
from divebatch.lab.data.augment import CropFlip, Whole
from divebatch.lab.data.dataset import LabelledSamples
from divebatch.lab.data.images import Colours, image_split
from divebatch.ranks import Ranks


def numbered_images(count: int) -> LabelledSamples:
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(0, 256, (count, 32, 32, 3), generator=generator, dtype=torch.uint8)
    return LabelledSamples(images, torch.arange(count))


def batches(ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    """Two epochs of this rank's images, without stand-ins. The loader finds the ranks by itself."""
    place = DataPlace(torch.device("cpu"))
    colours = Colours(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    train, validation = (numbered_images(23), CropFlip()), (numbered_images(5), Whole())
    loader: Any = image_split(train, validation, colours, 10, eval_batch_size=4, place=place).loader(7, seed=1)
    assert loader.ranks.size == ranks.size
    return [(x[: loader.rank_shard.mine], y[: loader.rank_shard.mine]) for _ in range(2) for x, y in loader]


def test_ranks_see_the_images_of_one_process(pool: RankPool) -> None:
    shared = pool.run(4, batches)
    for whole, *parts in zip(batches(Ranks.alone()), *shared, strict=True):
        assert torch.equal(torch.cat([images for images, _ in parts]), whole[0])
        assert torch.equal(torch.cat([labels for _, labels in parts]), whole[1])
