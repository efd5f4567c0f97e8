"""The real sets, or smaller ones in their format; skipped unless DIVEBATCH_DATA names the folder that holds them."""

import os
from pathlib import Path

import pytest
import torch

from divebatch.lab.data import DATASETS, DataPlace

FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python", "tiny-imagenet": "tiny-imagenet-200"}


@pytest.mark.parametrize("kind", FOLDERS)
def test_real_images_are_normalised_and_all_there(kind):
    data_dir = Path(os.environ.get("DIVEBATCH_DATA", "/nonexistent"))
    if not (data_dir / FOLDERS[kind]).is_dir():
        pytest.skip(f"DIVEBATCH_DATA names no folder with {FOLDERS[kind]}")
    split = DATASETS[kind]().load(0, DataPlace(torch.device("cpu"), data_dir))
    x, y = next(iter(split.validation))
    assert x.mean().abs() < 0.2
    assert 0.8 < x.std() < 1.4  # the stds in use for CIFAR-10 are means over single images
    loader = split.loader(256, seed=0)
    labels = torch.cat([y for _, y in split.validation])
    assert set(labels.tolist()) <= set(range(split.num_classes))
    x, y = next(iter(loader))
    assert x.isfinite().all()
    assert len(y) == 256
