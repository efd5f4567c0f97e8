"""Run by test_processes.py in two processes: prints which samples this process saw, and the course."""

import json
import sys

import torch
from accelerate import Accelerator
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader
from divebatch.errors import ArgumentError
from divebatch.integrations.accelerate import make_controller
from integrations.plain_loop import GROWS_AND_SHRINKS, UNEVEN, Watched


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer, prepared = accelerator.prepare(net, optimizer, scheduler)
    loader = AdaptiveLoader(TensorDataset(torch.arange(float(UNEVEN)).view(-1, 1)), 6, seed=0)
    parts = (accelerator, model, optimizer, loader, Watched(GROWS_AND_SHRINKS))
    spare = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    spare, prepared_spare = accelerator.prepare(spare, StepLR(spare, step_size=1))
    spare.step()
    prepared_spare.step()
    try:
        make_controller(*parts, scheduler=prepared)
        refusal = ""
    except ArgumentError as error:
        refusal = str(error)
    control = make_controller(*parts, scheduler=scheduler, lr_coupling="linear")
    seen, records = [], []
    for _ in GROWS_AND_SHRINKS:
        seen.append([])
        for (number,) in loader:
            seen[-1] += number.flatten().int().tolist()
            optimizer.zero_grad()
            accelerator.backward(mse_loss(model(number / 48), (number / 48).square()))
            optimizer.step()
        scheduler.step()
        records.append(control.step())
    answer = {
        "seen": seen,
        "sizes": [record.batch_size for record in records],
        "steps": records[-1].steps,
        "rates": [record.lr for record in records],
        "diversities": [record.diversity for record in records],
        "weight": net.weight.item(),
        "steps_of_a_prepared_scheduler": prepared_spare.scheduler.last_epoch,
        "refusal": refusal,
    }
    sys.stdout.write(json.dumps(answer) + "\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
