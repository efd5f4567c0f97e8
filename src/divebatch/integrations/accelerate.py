"""Accelerate: a controller for parts that `accelerator.prepare` made, over any number of processes."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from divebatch.controller import Controller
from divebatch.data.loader import AdaptiveLoader
from divebatch.errors import ArgumentError, UsageError
from divebatch.estimators import Estimator
from divebatch.integrations.accumulation import InMultiples, StepPasses, deliver_in_passes, load_state, state_of
from divebatch.integrations.versions import require_installed
from divebatch.norms.loss_scale import LossReduction
from divebatch.parts import as_list, require_step_cadence
from divebatch.policies import Policy
from divebatch.policies.policy import require_policy

require_installed(["accelerate"], extra="accelerate", oldest="1.10", too_new="2")
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
    """Make a `Controller` for prepared parts, whose state is saved and loaded with the accelerator's.

    Prepare model, optimizer and scheduler as usual, but not the loader. The loader itself delivers each process's part
    of a batch, now to the accelerator's device, and its `batch_size` is that of all processes together.

        model, optimizer = accelerator.prepare(model, optimizer)
        loader = AdaptiveLoader(dataset, batch_size=128)
        control = make_controller(accelerator, model, optimizer, loader, Auto(max_batch_size=4096))

    With `Accelerator(gradient_accumulation_steps=k)` and a loop under `accelerator.accumulate(model)`, the loader's
    batches are the passes of a step and keep their size. The number of passes in a step changes, and the policy's sizes
    are those of a step, in multiples of a pass. `loader.batch_size` becomes the size of a step. A loader with a
    `delivery_size` has the same effect.

    Args:
        accelerator: The `accelerate.Accelerator`.
        model: The prepared model.
        optimizer: The prepared optimizer, or a list of all optimizers whose rates follow the batch size.
        loader: The `AdaptiveLoader`, not prepared.
        policy: The rule that sets the loader's batch size.
        estimator: The estimator of gradient noise, by name or as an object. None: the policy's own.
        scheduler: The optimizer's scheduler, prepared or not, or a list of schedulers.
        settings: Other arguments of `Controller`, such as lr_coupling and loss_reduction.
    """
    _check(accelerator, loader)
    require_policy(policy)
    require_step_cadence(settings.get("every_steps"), policy)
    in_passes = accelerator.gradient_accumulation_steps != 1 or loader.delivery_size is not None
    if in_passes:
        if accelerator.distributed_type.value in ("DEEPSPEED", "MEGATRON_LM"):
            raise ArgumentError(
                f"{accelerator.distributed_type.value} accumulates gradients by itself, a fixed number of passes: use "
                f"gradient_accumulation_steps=1 and no delivery_size"
            )
        deliver_in_passes(loader, accelerator.gradient_accumulation_steps, "gradient_accumulation_steps")
    schedulers = [_unwrapped(part) for part in as_list(scheduler)]
    # Nothing else moves the batches of an unprepared loader to the device.
    loader.transform = _OnDevice(loader.transform, accelerator.device)
    whole = accelerator.unwrap_model(model)
    optimizers = [
        each.optimizer if isinstance(each, _optimizer.AcceleratedOptimizer) else each for each in as_list(optimizer)
    ]
    control = Controller(
        whole,
        optimizers,
        loader,
        InMultiples(policy, loader.delivery_size) if loader.delivery_size else policy,
        estimator=estimator,
        grad_scaler=accelerator.scaler,
        scheduler=schedulers,
        **settings,
    )
    passes = _accumulated(accelerator, control, settings.get("loss_reduction", "mean")) if in_passes else None
    accelerator.register_for_checkpointing(_Saved(control, passes))
    return control


def _accumulated(accelerator: Any, control: Controller, loss_reduction: LossReduction) -> StepPasses:
    """Let the accelerator's steps have as many passes as the loader's batch size takes."""

    def begin_step(count: int) -> None:
        # An epoch's last step may have fewer passes. Accelerate knows only the end of prepared loaders, and would carry
        # these passes over into the next epoch.
        accelerator.gradient_accumulation_steps, accelerator.step = count, 0

    passes = StepPasses(control, begin_step, loss_reduction=loss_reduction)
    accelerator.backward = _Weighed(passes, accelerator.backward)
    return passes


@dataclass(frozen=True)
class _Weighed:
    """An accelerator's `backward` on a pass's loss times the weight of the pass in its step."""

    passes: StepPasses
    backward: Callable[..., None]

    def __call__(self, loss: Tensor, **settings: Any) -> None:
        self.passes.weigh(loss)
        self.backward(loss, **settings)


@dataclass(frozen=True)
class _Saved:
    """The controller's state between optimizer steps, in a form that the accelerator saves and loads."""

    control: Controller
    passes: StepPasses | None

    def state_dict(self) -> dict[str, Any]:
        if self.passes is not None and self.passes.is_within_step:
            raise UsageError(
                "save_state was called between the passes of an optimizer step, whose gradients would be lost: call it "
                "where accelerator.sync_gradients is True, after optimizer.step()"
            )
        return state_of(self.control)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_state(self.control, state)


@dataclass(frozen=True)
class _OnDevice:
    """A loader's transform that also moves the batch, however nested, to the model's device."""

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
        raise ArgumentError("this loader belongs to an accelerator already: make a loader for each")
    if isinstance(accelerator.backward, _Weighed):
        raise ArgumentError(
            "this accelerator accumulates another loader's passes, and their number has changed since it was made: "
            "make a new Accelerator(gradient_accumulation_steps=...) for another training"
        )


def _unwrapped(scheduler: Any) -> Any:
    """Return the scheduler inside a prepared one."""
    if not isinstance(scheduler, _scheduler.AcceleratedScheduler):
        return scheduler
    # Otherwise it would step once per process, as if each had its own batches, but processes share each batch.
    scheduler.split_batches = True
    return scheduler.scheduler
