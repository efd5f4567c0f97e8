"""The loop of the README, in parts: what tests of a controller train."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim import SGD

from divebatch import AdaptiveLoader, Controller, EpochRecord
from divebatch.policies import Policy
from reference.per_sample import dataset, mean_loss, mlp

DATA = dataset(40)


class Training:
    """A model in training on `data`, samples or a loader; `settings` are the controller's."""

    def __init__(
        self,
        policy: Policy,
        *,
        data: Any = DATA,
        model: nn.Module | None = None,
        optimizer: Callable[[Any], Any] = lambda parameters: SGD(parameters, 0.01),
        scheduler: Callable[[Any], Any] | None = None,
        loss: Callable[[Any, Any], Any] = mean_loss,
        batch_size: int = 4,
        **settings: Any,
    ) -> None:
        self.model, self.loss = mlp() if model is None else model, loss
        self.optimizer = optimizer(self.model.parameters())
        self.scheduler = None if scheduler is None else scheduler(self.optimizer)
        self.loader = data if isinstance(data, AdaptiveLoader) else AdaptiveLoader(data, batch_size, seed=3)
        self.control = Controller(self.model, self.optimizer, self.loader, policy, scheduler=self.scheduler, **settings)

    def batches(self) -> Iterator[int]:
        """Train for an epoch; yield the samples of each batch after its step."""
        for x, y in self.loader:
            self.optimizer.zero_grad()
            self.loss(self.model(x), y).backward()
            self.optimizer.step()
            yield len(x)

    def train(self) -> None:
        for _ in self.batches():
            pass

    def epoch(self) -> EpochRecord:
        self.train()
        return self.control.step()

    def epochs(self, count: int) -> list[EpochRecord]:
        return [self.epoch() for _ in range(count)]

    @property
    def lr(self) -> float:
        return self.control.lr
