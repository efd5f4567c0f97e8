"""Other ways to per-sample gradient norms, as steps for the norms benchmark. Imported where used."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def _backpack(extension: str) -> Callable[[Any], Callable[[], None]]:
    def build(setting: Any) -> Callable[[], None]:
        import backpack
        from backpack import extensions

        model = backpack.extend(setting.model(), use_converter=True)
        loss_fn = backpack.extend(nn.CrossEntropyLoss())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad()
            with setting.cast():
                output = model(setting.inputs)
            loss = loss_fn(output.float(), setting.targets.flatten())
            with backpack.backpack(getattr(extensions, extension)()):
                loss.backward()
            optimizer.step()

        return step

    return build


def _opacus_hooks(setting: Any) -> Callable[[], None]:
    from opacus.grad_sample import GradSampleModule

    model = GradSampleModule(setting.model(), loss_reduction="mean")
    run = setting.step(model, model)

    def step() -> None:
        run()
        sum(p.grad_sample.flatten(1).square().sum() for p in model.parameters())
        model.zero_grad()

    return step


def _opacus_ghost(setting: Any) -> Callable[[], None]:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    model = GradSampleModuleFastGradientClipping(setting.model(), loss_reduction="mean")
    run = setting.step(model, model)

    def step() -> None:
        run()
        model.get_norm_sample()
        model.zero_grad()

    return step


def _vmap(setting: Any) -> Callable[[], None]:
    """Per-sample gradients of the whole model; their sum is the batch gradient."""
    from torch.func import functional_call, grad, vmap

    model = setting.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def loss(parameters: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return setting.problem.loss(functional_call(model, parameters, (x[None],)), y[None])

    def step() -> None:
        optimizer.zero_grad()
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        with setting.cast():
            gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, setting.inputs, setting.targets)
        for name, p in model.named_parameters():
            p.grad = gradients[name].mean(0)
        sum(g.flatten(1).square().sum(1) for g in gradients.values())
        optimizer.step()

    return step


PEERS: dict[str, Callable[[Any], Callable[[], None]]] = {
    "BackPACK BatchGrad": _backpack("BatchGrad"),
    "BackPACK BatchL2Grad": _backpack("BatchL2Grad"),
    "Opacus hooks": _opacus_hooks,
    "Opacus ghost": _opacus_ghost,
    "vmap": _vmap,
}
