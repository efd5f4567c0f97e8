"""A loop of your own with checkpoint and resume: stops after three epochs, then goes on in fresh objects."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from divebatch import AdaptiveLoader, Controller, DiveBatch


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        features = torch.randn(512, 8)
        data = TensorDataset(features, features.sum(1, keepdim=True).tanh())
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = StepLR(self.optimizer, step_size=3, gamma=0.5)
        self.loader = AdaptiveLoader.wrap(DataLoader(data, batch_size=16, shuffle=True), seed=0)
        policy = DiveBatch(delta=0.2, max_batch_size=128)
        self.control = Controller(
            self.model, self.optimizer, self.loader, policy, lr_coupling="linear", scheduler=self.scheduler
        )
        self.parts: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "control": self.control,
        }

    def run_epoch(self) -> None:
        for x, y in self.loader:
            self.optimizer.zero_grad()
            mse_loss(self.model(x), y).backward()
            self.optimizer.step()
        self.scheduler.step()
        print(self.control.step())

    def save(self, path: Path) -> None:
        torch.save({name: part.state_dict() for name, part in self.parts.items()}, path)

    def load(self, path: Path) -> None:
        for name, state in torch.load(path, weights_only=True).items():
            self.parts[name].load_state_dict(state)


def main() -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        first = Training()
        for _ in range(3):
            first.run_epoch()
        first.save(path)
        print("stopped; going on in fresh objects")
        second = Training()
        second.load(path)
        for _ in range(3):
            second.run_epoch()


if __name__ == "__main__":
    main()
