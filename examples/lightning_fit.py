"""Lightning with a batch size that follows the gradients. Needs: pip install 'divebatch[lightning]'."""

import logging
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader, DiveBatch
from divebatch.integrations.lightning import BatchSizeCallback

warnings.filterwarnings("ignore", category=FutureWarning, message=".*LeafSpec")  # Lightning 2.6 on torch 2.13
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = int(self.trainer.estimated_stepping_batches)  # of the first batch size; samples count from there
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads only slow down a model this small
    inputs = torch.randn(1000, 20)
    dataset = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    loader = AdaptiveLoader(dataset, batch_size=16, seed=0)  # was: DataLoader(dataset, batch_size=16, shuffle=True)
    callback = BatchSizeCallback(loader, DiveBatch(delta=0.1, max_batch_size=256), lr_coupling="linear")
    trainer = Trainer(
        max_epochs=5,
        accelerator="cpu",
        callbacks=[callback],
        reload_dataloaders_every_n_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loader)
    print(*callback.records, sep="\n")


if __name__ == "__main__":
    main()
