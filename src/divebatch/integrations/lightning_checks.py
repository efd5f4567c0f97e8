"""What of a Lightning trainer would go wrong without a word once the batch size changes."""

from typing import Any

from divebatch.errors import ArgumentError


def check_epochs(trainer: Any, *, in_passes: bool) -> None:
    """Refuse what would end an epoch before all samples were seen, or break it later.

    Args:
        trainer: The trainer.
        in_passes: Whether the loader's batches keep their size, as passes of a step.
    """
    if trainer.reload_dataloaders_every_n_epochs != 1 and not in_passes:
        raise ArgumentError(
            f"Trainer(reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}) never learns "
            f"of a new batch size, or drops samples: pass reload_dataloaders_every_n_epochs=1"
        )
    if not trainer.fast_dev_run and (trainer.limit_train_batches != 1.0 or trainer.overfit_batches):
        raise ArgumentError(
            f"limit_train_batches={trainer.limit_train_batches} and overfit_batches={trainer.overfit_batches} end "
            f"an epoch before all samples were seen: train on a Subset instead"
        )
    counts_batches = isinstance(trainer.val_check_interval, int) and trainer.check_val_every_n_epoch is not None
    if counts_batches and not in_passes:
        raise ArgumentError(
            f"val_check_interval={trainer.val_check_interval} counts batches, and an epoch may come to have fewer: "
            f"use a part of an epoch, such as 0.5"
        )


def check_accumulation(trainer: Any, module: Any) -> None:
    """Refuse what else sets how many passes make a step."""
    if not module.automatic_optimization:
        raise ArgumentError(
            f"{type(module).__name__} has automatic_optimization=False, and only Lightning's own optimization can make "
            f"a step of several passes: leave out every_steps and the loader's delivery_size, and accumulate in "
            f"training_step"
        )
    if trainer.strategy.handles_gradient_accumulation:
        raise ArgumentError(
            f"{type(trainer.strategy).__name__} accumulates gradients by itself, a fixed number of passes: leave out "
            f"accumulate_grad_batches, every_steps and the loader's delivery_size"
        )


def check_optimizer(trainer: Any) -> None:
    """Refuse several optimizers, and schedules that are stepped once in so many batches."""
    if len(trainer.optimizers) != 1:
        raise ArgumentError(f"one optimizer can be followed, the module has {len(trainer.optimizers)}")
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step" and config.frequency != 1:
            raise ArgumentError(
                f"{type(config.scheduler).__name__} has interval='step' and frequency={config.frequency}, which "
                f"Lightning counts in batches, and their number changes: use frequency=1 and a schedule that is as "
                f"much slower"
            )


def check_unchanged(trainer: Any, loader: Any, passes: int) -> None:
    """Refuse another loader, and an accumulation that somebody else has set."""
    if trainer.train_dataloader is not loader:
        raise ArgumentError(
            f"the trainer's loader is a {type(trainer.train_dataloader).__name__} and not the callback's: pass the "
            f"callback's loader to fit, or return that very object from train_dataloader() each time"
        )
    if trainer.accumulate_grad_batches is not passes:
        raise ArgumentError(
            f"accumulate_grad_batches went from {passes} to {trainer.accumulate_grad_batches}: take out what sets it, "
            f"such as a GradientAccumulationScheduler, and leave the size of a step to the policy"
        )
