"""Find the samples a model finds hardest, by the norm of their gradients: here, the ones with a wrong label."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from divebatch import NormMeter

NUM_WRONG = 10


def make_data() -> tuple[TensorDataset, set[int]]:
    """Two separable classes, with a few labels exchanged."""
    torch.manual_seed(0)
    features = torch.randn(1000, 10)
    labels = (features[:, 0] > 0).long()
    clear = (features[:, 0].abs() > 1).nonzero().flatten()
    wrong = clear[torch.randperm(len(clear))[:NUM_WRONG]]
    labels[wrong] = 1 - labels[wrong]
    return TensorDataset(features, labels), set(wrong.tolist())


def train(model: nn.Module, data: TensorDataset) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(5):
        for x, y in DataLoader(data, batch_size=50, shuffle=True):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")


def gradient_norms(model: nn.Module, data: TensorDataset) -> torch.Tensor:
    """One squared norm a sample, in the dataset's order, at fixed weights."""
    norms = []
    with NormMeter(model) as meter:
        for x, y in DataLoader(data, batch_size=200):
            cross_entropy(model(x), y).backward()
            norms.append(meter.per_sample())
    model.zero_grad()
    return torch.cat(norms)


def main() -> None:
    data, wrong = make_data()
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    train(model, data)
    hardest = gradient_norms(model, data).argsort(descending=True)[:NUM_WRONG].tolist()
    print(f"{len(wrong.intersection(hardest))} of the {NUM_WRONG} hardest samples have a wrong label")


if __name__ == "__main__":
    main()
