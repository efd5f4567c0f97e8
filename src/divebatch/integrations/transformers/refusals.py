"""Settings of the Trainer that would go wrong without a word where the batch size changes."""

import inspect
from typing import Any

from torch.utils.data import IterableDataset

from divebatch.errors import ArgumentError
from divebatch.integrations.transformers.framework import LabelSmoother


def refuse_settings(trainer: Any) -> None:
    """Raise an error that names all of them."""
    wrong = {**_of_data(trainer), **_of_processes(trainer)}
    found = [what for what, is_wrong in wrong.items() if is_wrong]
    if found:
        raise ArgumentError(f"with a batch size that changes these settings do not work: {'; '.join(found)}")


def _of_data(trainer: Any) -> dict[str, bool]:
    args = trainer.args
    smoother_knows_step = "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters
    return {
        f"auto_find_batch_size={args.auto_find_batch_size}": args.auto_find_batch_size,
        f"train_sampling_strategy={args.train_sampling_strategy!r} (use 'random' or 'sequential')": (
            args.train_sampling_strategy not in ("random", "sequential")
        ),
        f"label_smoothing_factor={args.label_smoothing_factor} (this version of transformers makes the gradient as "
        f"many times too large as there are accumulated passes: use 5.15 or later)": (
            args.label_smoothing_factor > 0 and trainer.model_accepts_loss_kwargs and not smoother_knows_step
        ),
    }


def _of_processes(trainer: Any) -> dict[str, bool]:
    args, accelerator = trainer.args, trainer.accelerator
    together = args.world_size > 1
    is_stream = isinstance(trainer.train_dataset, IterableDataset)
    return {
        f"n_gpu={args.n_gpu} (DataParallel: start it with torchrun, or set CUDA_VISIBLE_DEVICES to one)": (
            args.n_gpu > 1
        ),
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled,
        "parallelism_config": getattr(accelerator, "parallelism_config", None) is not None,
        f"an IterableDataset on {args.world_size} processes (use a map-style dataset)": together and is_stream,
        "average_tokens_across_devices=False on several processes (each would weigh its tokens by its own number)": (
            together and not args.average_tokens_across_devices
        ),
        "accelerator_config.split_batches=True (per_device_train_batch_size is that of one process)": (
            together and bool(args.accelerator_config.split_batches)
        ),
    }
