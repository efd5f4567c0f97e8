"""Models under `torch.compile`, and meters that are not made for them."""

import warnings

from torch import nn

WAY_OUT = (
    "make the meter with compiled=True, in a controller estimator=Trajectory(compiled=True), or take an estimator "
    "without norms ('split', 'moments')"
)


def uncompiled(model: nn.Module) -> nn.Module:
    """The model that `torch.compile` wraps; any other model as it is."""
    wrapped = getattr(model, "_orig_mod", model)
    assert isinstance(wrapped, nn.Module)
    return wrapped


def is_compiled(model: nn.Module) -> bool:
    """Whether the model, or a module in it, is under `torch.compile`."""
    return any(module._compiled_call_impl is not None or uncompiled(module) is not module for module in model.modules())


def warn_if_compiled(model: nn.Module) -> None:
    """Hooks on a compiled model break its graph, and code that was compiled before them does not call them."""
    if is_compiled(model):
        told = (
            "the model is under torch.compile and this meter is not: its hooks break the compiler's graph, and code "
            f"that was compiled before measures nothing; {WAY_OUT}"
        )
        warnings.warn(told, stacklevel=3)
