import pytest
import torch

from divebatch.errors import ArgumentError
from divebatch.lab.data import DataPlace
from divebatch.lab.data.synthetic import Synthetic
from divebatch.lab.models import MODELS

CPU = DataPlace(torch.device("cpu"))
PAPER = Synthetic(num_samples=20_000, num_features=512, noise_variance=0.1, train_fraction=0.8)


def train_tensors(split):
    return split.loader(128, seed=0).dataset.tensors


def test_the_papers_data():
    split = PAPER.load(0, CPU)
    features, labels = train_tensors(split)
    assert features.shape == (16_000, 512)
    assert split.validation[0][0].shape == (4_000, 512)
    assert features.min() >= -1
    assert features.max() <= 1
    assert abs(features.mean()) < 0.01
    assert abs(features.var() - 1 / 3) < 0.01
    assert set(labels.unique().tolist()) == {0.0, 1.0}
    assert 0.4 < labels.mean() < 0.6


def test_labels_follow_the_weights_but_for_the_noise():
    clean = Synthetic(num_samples=2_000, num_features=8, noise_variance=1e-12, train_fraction=0.5).load(3, CPU)
    features, labels = train_tensors(clean)
    signs = labels * 2 - 1
    # A separator exists: the perceptron finds it within a bounded number of mistakes.
    weights = torch.zeros(8, 1)
    for _ in range(500):
        wrong = (features @ weights) * signs <= 0
        if not wrong.any():
            break
        weights += (features * signs * wrong).sum(0, keepdim=True).T
    assert not ((features @ weights) * signs <= 0).any()


def test_each_seed_has_its_own_data_and_always_the_same():
    first, again, other = (train_tensors(PAPER.load(seed, CPU))[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("kind", "num_classes", "count"),
    [
        ("logistic-regression", 1, 513),
        ("mlp", 1, 515),
        ("resnet18", 10, 11_173_962),
        ("resnet18", 100, 11_220_132),
        ("resnet18-imagenet", 1000, 11_689_512),
        ("resnet18-imagenet", 200, 11_279_112),
        ("resnet20", 10, 272_474),
    ],
)
def test_parameter_counts(kind, num_classes, count):
    model = MODELS[kind]().build(512, num_classes)
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize(("kind", "size"), [("resnet18", 32), ("resnet18-imagenet", 64), ("resnet20", 32)])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_networks_give_one_score_a_class(kind, size, norm):
    assert MODELS[kind](norm=norm).build(0, 7)(torch.randn(2, 3, size, size)).shape == (2, 7)


def test_unknown_norm():
    with pytest.raises(ArgumentError, match="unknown norm 'layer'; known: batch, group"):
        MODELS["resnet20"](norm="layer")
