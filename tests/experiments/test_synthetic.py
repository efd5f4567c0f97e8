import torch

from divebatch.experiments.datasets.synthetic import Synthetic
from divebatch.experiments.models import MODELS

CPU = torch.device("cpu")
PAPER = Synthetic(num_samples=20_000, num_features=512, noise_variance=0.1, train_fraction=0.8)


def test_the_papers_data():
    split = PAPER.load(0, CPU)
    features, labels = split.train.tensors
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
    features, labels = clean.train.tensors
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
    first, again, other = (PAPER.load(seed, CPU).train.tensors[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_parameter_counts_of_the_paper():
    counts = {kind: sum(p.numel() for p in settings().build(512).parameters()) for kind, settings in MODELS.items()}
    assert counts == {"logistic-regression": 513, "mlp": 515}
