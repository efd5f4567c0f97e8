"""Accelerate: a controller for what `accelerator.prepare` made, over any number of processes."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from divebatch.controller import Controller
from divebatch.data.loader import AdaptiveLoader
from divebatch.errors import ArgumentError
from divebatch.estimators import Estimator
from divebatch.integrations.versions import Requirement
from divebatch.policies import Policy
from divebatch.resolve import Trained, as_list, resolve_estimator

REQUIREMENT = Requirement(["accelerate"], extra="accelerate", oldest="1.10", too_new="2")
REQUIREMENT.installed()
_optimizer, _scheduler = import_module("accelerate.optimizer"), import_module("accelerate.scheduler")
_operations = import_module("accelerate.utils.operations")


def make_controller(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    loader: AdaptiveLoader,
    policy: Policy,
    *,
    estimator: str | Estimator | None = None,
    scheduler: Any = None,
    **settings: Any,
) -> Controller:
    """Return a `Controller` for prepared parts; its state is saved and loaded with the accelerator's.

    Prepare model, optimizer and scheduler as always, but not the loader: it delivers each process's part of a batch by
    itself, from here on to the accelerator's device, and its `batch_size` is that of all processes together.

        model, optimizer = accelerator.prepare(model, optimizer)
        loader = AdaptiveLoader(dataset, batch_size=128)
        control = make_controller(accelerator, model, optimizer, loader, Auto(max_batch_size=4096))

    Args:
        accelerator: The `accelerate.Accelerator`.
        model: The model, prepared.
        optimizer: The optimizer, prepared, or a list of all whose rates shall follow.
        loader: The `AdaptiveLoader`, not prepared.
        policy: The rule that sets its batch size.
        estimator: What measures the gradients, a name or an object; None for the policy's own.
        scheduler: The scheduler that drives the optimizer, prepared or not, or a list of all that do.
        settings: `Controller`'s: lr_coupling, loss_reduction and so on.
    """
    _check(accelerator, loader)
    schedulers = [_unwrapped(part, accelerator.num_processes) for part in as_list(scheduler)]
    # The loader is not prepared, so nobody else moves its batches to the device.
    loader.transform = _OnDevice(loader.transform, accelerator.device)
    whole = accelerator.unwrap_model(model)
    optimizers = [
        each.optimizer if isinstance(each, _optimizer.AcceleratedOptimizer) else each for each in as_list(optimizer)
    ]
    control = Controller(
        whole,
        optimizers,
        loader,
        policy,
        estimator=resolve_estimator(
            policy, estimator, Trained(whole, optimizers, loader), grad_scaler=accelerator.scaler
        ),
        scheduler=schedulers,
        **settings,
    )
    accelerator.register_for_checkpointing(control)
    return control


@dataclass(frozen=True)
class _OnDevice:
    """A loader's transform, then the batch where the model is, whatever its nesting."""

    transform: Callable[[Any], Any] | None
    device: Any

    def __call__(self, batch: Any) -> Any:
        moved = batch if self.transform is None else self.transform(batch)
        return _operations.send_to_device(moved, self.device)


def _check(accelerator: Any, loader: Any) -> None:
    if not isinstance(loader, AdaptiveLoader):
        raise ArgumentError(
            f"loader must be an AdaptiveLoader, got {type(loader).__name__}: leave the loader out of "
            f"accelerator.prepare and make it AdaptiveLoader(dataset, batch_size) or AdaptiveLoader.wrap(dataloader)"
        )
    if isinstance(loader.transform, _OnDevice):
        raise ArgumentError("this loader belongs to an accelerator already: make one for each")
    if accelerator.gradient_accumulation_steps != 1:
        raise ArgumentError(
            f"gradient_accumulation_steps={accelerator.gradient_accumulation_steps} would leave the rest of an epoch "
            f"to the next one: use 1, and cut large batches with `for part, factor in micro_batches(batch, size)`"
        )


def _unwrapped(scheduler: Any, num_processes: int) -> Any:
    """The scheduler inside a prepared one, which must step once a step: batches do not grow with the processes."""
    if not isinstance(scheduler, _scheduler.AcceleratedScheduler):
        return scheduler
    if num_processes > 1 and scheduler.step_with_optimizer and not scheduler.split_batches:
        raise ArgumentError(
            f"a prepared {type(scheduler.scheduler).__name__} steps {num_processes} times a step on {num_processes} "
            f"processes: leave it out of prepare and call accelerator.register_for_checkpointing(scheduler), or use "
            f"Accelerator(step_scheduler_with_optimizer=False)"
        )
    return scheduler.scheduler
