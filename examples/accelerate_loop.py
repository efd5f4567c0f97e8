"""An Accelerate loop with a batch size that follows the gradients. Needs: pip install 'divebatch[accelerate]'."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader, DiveBatch
from divebatch.integrations.accelerate import make_controller


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads only slow down a model this small
    inputs = torch.randn(1000, 20)
    dataset = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = AdaptiveLoader(dataset, batch_size=16, seed=0)  # was: DataLoader(dataset, batch_size=16, shuffle=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5 * len(loader))
    accelerator = Accelerator()
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)  # all but the loader
    policy = DiveBatch(delta=0.1, max_batch_size=256)
    control = make_controller(accelerator, model, optimizer, loader, policy, scheduler=schedule, scheduler_unit="step")
    for _ in range(5):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(x), y))
            optimizer.step()
            schedule.step()
        accelerator.print(control.step())
    control.close()


if __name__ == "__main__":
    main()
