"""Run by test_processes.py in two processes: prints which samples this process saw, and the courses of several runs."""

import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import mse_loss
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from divebatch import AdaptiveLoader, Policy
from divebatch.integrations.lightning import BatchSizeCallback, NoiseScaleCallback
from divebatch.policies import NoiseDoubling
from integrations.plain_loop import GROWS_AND_SHRINKS, UNEVEN, Numbered, Watched
from integrations.step_courses import BySteps, TinyGpt2, cosine, size_of, texts
from reference.per_sample import mean_loss, mlp

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
STEPS = 24
"""Of 12 samples, in three epochs."""


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


class Gpt2(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = TinyGpt2()
        self.seen: list[int] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen += batch[0].tolist()
        loss: torch.Tensor = self.model(batch[1])
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=0.01)
        scheduler = cosine(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(dtype=torch.float32)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return mean_loss(self.net(batch[1]), batch[2])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.003, momentum=0.9)


def trainer(*callbacks: Any, processes: int = 2, **settings: Any) -> Trainer:
    strategy = "ddp" if processes > 1 else "auto"
    settings = {"enable_checkpointing": False, "reload_dataloaders_every_n_epochs": 1, **QUIET, **settings}
    return Trainer(accelerator="cpu", devices=processes, strategy=strategy, callbacks=list(callbacks), **settings)


def whole_batches() -> dict[str, Any]:
    loader = AdaptiveLoader(TensorDataset(torch.arange(float(UNEVEN)).view(-1, 1)), 6, seed=0)
    callback = BatchSizeCallback(loader, Watched(GROWS_AND_SHRINKS), lr_coupling="linear")
    module, fitting = Module(), trainer(callback, max_epochs=len(GROWS_AND_SHRINKS))
    fitting.fit(module, loader)
    return {
        "seen": list(module.seen.values()),
        "sizes": [record.batch_size for record in callback.records],
        "steps": fitting.global_step,
        "rates": [record.lr for record in callback.records],
        "diversities": [record.diversity for record in callback.records],
        "weight": module.net.weight.item(),
    }


def passes(folder: Path | None, *, saves: bool = False, resumes: bool = False) -> dict[str, Any]:
    """GPT-2 in steps of several passes, with decisions every four steps, saved and resumed after the 5th."""
    loader = AdaptiveLoader(texts(), 6, seed=3)
    callback = BatchSizeCallback(loader, BySteps(), lr_coupling="sqrt", every_steps=4)
    saver = ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=5, filename="{step}")
    module = Gpt2()
    fitting = trainer(
        callback,
        *([saver] if saves else []),
        max_steps=STEPS,
        accumulate_grad_batches=2,
        enable_checkpointing=saves,
    )
    fitting.fit(module, loader, ckpt_path=folder / "step=5.ckpt" if resumes and folder else None)
    return {
        "seen": module.seen,
        "course": [(record.batch_size, record.steps, record.samples) for record in callback.records],
        "diversities": [record.diversity for record in callback.records],
        "weights": size_of(module),
        "schedule": fitting.lr_scheduler_configs[0].scheduler.last_epoch,
    }


def measured(policy: Policy, estimator: str | None, *, processes: int = 2, **settings: Any) -> dict[str, Any]:
    """Uneven sizes, in passes of 7 samples: two processes have 4 and 3 of them."""
    loader = AdaptiveLoader(Numbered(97), 7, seed=3)
    callback = BatchSizeCallback(loader, policy, estimator=estimator, every_steps=4)
    module = Regression()
    trainer(callback, processes=processes, max_epochs=2, accumulate_grad_batches=2, **settings).fit(module, loader)
    return {
        "sizes": [record.batch_size for record in callback.records],
        "diversities": [record.diversity for record in callback.records],
        "weights": size_of(module),
    }


def noise() -> dict[str, Any]:
    """Without our loader: Lightning gives each process half of the data, in batches of 4."""
    readings = []
    for told in (None, 8):
        callback = NoiseScaleCallback(every_steps=10, batch_size=told)
        trainer(callback, max_epochs=2).fit(Regression(), DataLoader(Numbered(88), batch_size=4))
        readings.append([(reading.low, reading.steps) for reading in callback.readings])
    return {"counted": readings[0], "told": readings[1]}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as mine:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else mine)
        answer = {
            **whole_batches(),
            "passes": passes(folder, saves=True),
            "resumed": passes(folder, resumes=True),
            "auto": measured(NoiseDoubling(56), "moments"),
            "ranks": measured(BySteps(sizes=(14, 35, 21)), "ranks"),
            "per-sample": measured(BySteps(sizes=(14, 35, 21)), "per-sample"),
            "noise": noise(),
        }
    sys.stdout.write(json.dumps(answer) + "\n")  # one write: two processes share the pipe


if __name__ == "__main__":
    main()
