"""Run under torchrun by test_processes.py: prints which samples this process saw, epoch by epoch, and the course."""

import json
import logging
import sys
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader
from divebatch.integrations.lightning import BatchSizeCallback
from integrations.plain_loop import GROWS_AND_SHRINKS, UNEVEN, Watched


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(1, 1)
        self.seen: dict[int, list[int]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (number,) = batch
        self.seen.setdefault(self.trainer.current_epoch, []).extend(number.flatten().int().tolist())
        return mse_loss(self(number / 48), (number / 48).square())  # within the call that Lightning makes of itself

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    loader = AdaptiveLoader(TensorDataset(torch.arange(float(UNEVEN)).view(-1, 1)), 6, seed=0)
    callback = BatchSizeCallback(loader, Watched(GROWS_AND_SHRINKS), lr_coupling="linear")
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=len(GROWS_AND_SHRINKS),
        callbacks=[callback],
        reload_dataloaders_every_n_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, loader)
    answer = {
        "seen": list(module.seen.values()),
        "sizes": [record.batch_size for record in callback.records],
        "steps": trainer.global_step,
        "rates": [record.lr for record in callback.records],
        "diversities": [record.diversity for record in callback.records],
        "weight": module.net.weight.item(),
    }
    sys.stdout.write(json.dumps(answer) + "\n")  # one write: two processes share the pipe


if __name__ == "__main__":
    main()
