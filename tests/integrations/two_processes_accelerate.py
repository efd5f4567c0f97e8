"""Run by test_processes.py in two processes: prints which samples this process saw, and the courses of two loops."""

import json
import sys
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader
from divebatch.integrations.accelerate import make_controller
from integrations.plain_loop import GROWS_AND_SHRINKS, UNEVEN, Watched
from integrations.step_courses import BySteps, TinyGpt2, cosine, size_of, texts


def whole_batches() -> dict[str, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    net = torch.nn.Linear(1, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, StepLR(optimizer, step_size=1, gamma=0.5))
    loader = AdaptiveLoader(TensorDataset(torch.arange(float(UNEVEN)).view(-1, 1)), 6, seed=0)
    parts = (accelerator, model, optimizer, loader, Watched(GROWS_AND_SHRINKS))
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
    return {
        "seen": seen,
        "sizes": [record.batch_size for record in records],
        "steps": records[-1].steps,
        "rates": [record.lr for record in records],
        "diversities": [record.diversity for record in records],
        "weight": net.weight.item(),
    }


def passes(folder: str, *, resumes: bool = False) -> dict[str, Any]:
    """GPT-2 in steps of several passes, with decisions every four steps, saved after the 5th."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = TinyGpt2()
    optimizer = AdamW(net.parameters(), lr=0.01)
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, cosine(optimizer, 24))
    loader = AdaptiveLoader(texts(), 6, seed=3)
    parts = (accelerator, model, optimizer, loader, BySteps())
    control = make_controller(*parts, scheduler=scheduler, scheduler_unit="step", lr_coupling="sqrt", every_steps=4)
    if resumes:
        accelerator.load_state(folder)
    seen, records, steps = [], [], 0
    while loader.epoch < 3:
        for number, ids in loader:
            seen += number.tolist()
            with accelerator.accumulate(model):
                accelerator.backward(model(ids))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            steps += accelerator.sync_gradients
            if accelerator.sync_gradients and steps == 5 and not resumes:
                accelerator.save_state(folder)
        records.append(control.step())
    return {
        "seen": seen,
        "course": [(record.batch_size, record.steps, record.samples) for record in records],
        "weights": size_of(net),
        "schedule": scheduler.scheduler.last_epoch,
    }


def main() -> None:
    torch.set_num_threads(1)
    answer = {
        **whole_batches(),
        "passes": passes(sys.argv[1]),
        "resumed": passes(sys.argv[1], resumes=True),
    }
    sys.stdout.write(json.dumps(answer) + "\n")
    Accelerator(cpu=True).end_training()


if __name__ == "__main__":
    main()
