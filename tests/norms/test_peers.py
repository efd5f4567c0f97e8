"""The other libraries that give per-sample gradients: we agree where they are right, and are right where they are not.

Written against Opacus 1.6.0 and BackPACK 1.7.1. Should a later version mend one of the cases at the end, its test
fails, and the case belongs into the tables above.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from divebatch import NormMeter
from reference.per_sample import sq_norms, sum_loss

pytest.importorskip("opacus", reason="Opacus is not installed (make install)")
pytest.importorskip("backpack", reason="BackPACK is not installed (make install)")

from backpack import backpack, extend
from backpack.extensions import BatchGrad, BatchL2Grad
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")

SAMPLES = 5
Case = tuple[Callable[[], nn.Module], tuple[int, ...]]
"""A model, and the shape of a sample."""

BOTH: dict[str, Case] = {
    "linear": (lambda: nn.Linear(6, 3), (6,)),
    "linear on sequences": (lambda: nn.Linear(6, 3), (4, 6)),
    "linear without bias": (lambda: nn.Linear(6, 3, bias=False), (6,)),
    "layers": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), (6,)),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3, stride=2, padding=1), (2, 8)),
    "conv2d, stride and padding": (lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1), (2, 6, 6)),
    "conv2d, uneven": (lambda: nn.Conv2d(2, 4, (3, 1), stride=(1, 2), padding=(0, 2)), (2, 6, 5)),
    "conv2d, dilation": (lambda: nn.Conv2d(2, 4, 3, dilation=2), (2, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 4, 4, 3)),
    "conv2d, transposed": (lambda: nn.ConvTranspose2d(2, 4, 3, stride=2), (2, 4, 4)),
    "conv net": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)),
        (2, 6, 6),
    ),
}
GROUPED: Case = (lambda: nn.Conv2d(4, 4, 3, groups=2), (4, 6, 6))
SAME: Case = (lambda: nn.Conv2d(2, 4, 3, padding="same"), (2, 6, 6))
LAYER_NORM: Case = (lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)), (6,))
GROUP_NORM: Case = (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), (2, 6, 6))
PADDED: Case = (lambda: nn.Embedding(7, 3, padding_idx=2), ())
RANK_FOUR: Case = (lambda: nn.Linear(6, 3), (2, 4, 6))

ONLY_OPACUS: dict[str, Case] = {
    "groups": GROUPED,
    "padding 'same'": SAME,
    "layer norm": LAYER_NORM,
    "group norm": GROUP_NORM,
    "instance norm": (lambda: nn.InstanceNorm1d(3, affine=True), (3, 7)),
    "RMS norm": (lambda: nn.RMSNorm(5), (4, 5)),
    "embedding": (lambda: nn.Embedding(7, 3), ()),
}


def made(case: Case) -> tuple[nn.Module, Tensor, Tensor]:
    """Model, inputs and targets, in double precision."""
    torch.manual_seed(0)
    make, shape = case
    model = make().double()
    x = torch.randn(SAMPLES, *shape).double() if shape else torch.randint(0, 7, (SAMPLES, 9))
    return model, x, torch.randn_like(model(x))


def ours(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    with NormMeter(model, loss_reduction="sum") as meter:
        sum_loss(model(x), targets).backward()
    return meter.per_sample()


def by_opacus(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    wrapped = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    sum_loss(wrapped(x), targets).backward()
    return sum(p.grad_sample.flatten(1).square().sum(1) for p in wrapped.parameters())


def by_opacus_ghost(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    """Norms without gradients: what its fast clipping uses."""
    how = {"loss_reduction": "sum", "max_grad_norm": 1.0, "use_ghost_clipping": True}
    wrapped = GradSampleModuleFastGradientClipping(copy.deepcopy(model), **how)
    sum_loss(wrapped(x), targets).backward()
    return wrapped.get_norm_sample().square()


def run_backpack(model: nn.Module, x: Tensor, targets: Tensor, extension: Any) -> nn.Module:
    extended, loss = extend(copy.deepcopy(model)), extend(nn.MSELoss(reduction="sum"))
    with backpack(extension):
        loss(extended(x), targets).backward()
    return extended


def by_backpack_gradients(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    """Parameters that got nothing count as zero, as they do for somebody who adds up what is there."""
    extended = run_backpack(model, x, targets, BatchGrad())
    return sum(p.grad_batch.flatten(1).square().sum(1) for p in extended.parameters() if hasattr(p, "grad_batch"))


def by_backpack_norms(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    extended = run_backpack(model, x, targets, BatchL2Grad())
    return sum(p.batch_l2 for p in extended.parameters() if hasattr(p, "batch_l2"))


Peer = Callable[[nn.Module, Tensor, Tensor], Tensor]
PEERS: dict[str, Peer] = {
    "Opacus": by_opacus,
    "Opacus, ghost norms": by_opacus_ghost,
    "BackPACK, gradients": by_backpack_gradients,
    "BackPACK, norms": by_backpack_norms,
}

# Where they are right


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("case", BOTH)
def test_all_agree(case: str, peer: str):
    problem = made(BOTH[case])
    torch.testing.assert_close(ours(*problem), PEERS[peer](*problem), rtol=1e-10, atol=0)


@pytest.mark.parametrize("peer", ["Opacus", "Opacus, ghost norms"])
@pytest.mark.parametrize("case", ONLY_OPACUS)
def test_we_agree_with_opacus(case: str, peer: str):
    problem = made(ONLY_OPACUS[case])
    torch.testing.assert_close(ours(*problem), PEERS[peer](*problem), rtol=1e-10, atol=0)


def agree_on_first_result(layer: nn.Module, twin: nn.Module, *inputs: Tensor, batch_first: bool = True) -> None:
    """Opacus cannot measure the layer, but a twin of its own that is built from Linear layers."""
    twin.load_state_dict(layer.state_dict())
    wrapped = GradSampleModule(twin.double(), loss_reduction="sum", batch_first=batch_first)
    wrapped(*inputs)[0].sin().sum().backward()
    theirs = sum(p.grad_sample.flatten(1).square().sum(1) for p in wrapped.parameters())
    with NormMeter(layer, loss_reduction="sum") as meter:
        layer(*inputs)[0].sin().sum().backward()
    torch.testing.assert_close(meter.per_sample(), theirs, rtol=1e-10, atol=0)


@pytest.mark.parametrize(("kind", "twin"), [(nn.RNN, DPRNN), (nn.LSTM, DPLSTM), (nn.GRU, DPGRU)])
def test_recurrent_layers_agree_with_opacus_own(kind: type[nn.Module], twin: type[nn.Module]):
    torch.manual_seed(0)
    sizes = {"input_size": 6, "hidden_size": 3, "num_layers": 2, "bidirectional": True, "batch_first": True}
    x = torch.randn(SAMPLES, 4, 6).double()
    agree_on_first_result(kind(**sizes).double(), twin(**sizes), x)


@pytest.mark.parametrize("more", [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_attention_agrees_with_opacus_own(more: dict[str, bool]):
    torch.manual_seed(0)
    layer, twin = nn.MultiheadAttention(6, 2, **more).double(), DPMultiheadAttention(6, 2, **more)
    inputs = [torch.randn(steps, SAMPLES, 6).double() for steps in (4, 7)]
    agree_on_first_result(layer, twin, inputs[0], inputs[1], inputs[1], batch_first=False)


# Where they are not


def assert_only_we_are_right(case: Case, peer: str, *, at_least: float) -> None:
    """`at_least`: how far off the sum of squared norms is, relatively. It depends on the shapes; none is tiny."""
    model, x, targets = made(case)
    expected = sq_norms(model, sum_loss, x, targets)
    torch.testing.assert_close(ours(model, x, targets), expected, rtol=1e-10, atol=0)
    theirs = PEERS[peer](model, x, targets)
    assert abs(float(theirs.sum() / expected.sum()) - 1) > at_least


@pytest.mark.parametrize("case", [LAYER_NORM, GROUP_NORM], ids=["layer norm", "group norm"])
@pytest.mark.parametrize("peer", ["BackPACK, gradients", "BackPACK, norms"])
def test_backpack_skips_normalisation_layers_with_no_more_than_a_warning(case: Case, peer: str):
    with pytest.warns(UserWarning, match=r"does not have an extension for Module .*Norm"):
        assert_only_we_are_right(case, peer, at_least=0.1)


def test_backpack_norms_of_grouped_convolutions():
    assert_only_we_are_right(GROUPED, "BackPACK, norms", at_least=0.1)
    model, x, targets = made(GROUPED)  # its gradients are right
    torch.testing.assert_close(by_backpack_gradients(model, x, targets), ours(model, x, targets), rtol=1e-10, atol=0)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
def test_backpack_ignores_padding_same():
    assert_only_we_are_right(SAME, "BackPACK, gradients", at_least=0.1)
    with pytest.raises(TypeError, match="padding"):  # and its norms fail
        by_backpack_norms(*made(SAME))


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
@pytest.mark.parametrize("peer", PEERS)
def test_all_of_them_take_any_padding_mode_for_zeros(mode: str, peer: str):
    case = (lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode=mode), (2, 6, 6))
    assert_only_we_are_right(case, peer, at_least=0.1)


@pytest.mark.parametrize("peer", ["Opacus", "Opacus, ghost norms"])
def test_opacus_gives_gradients_to_the_padding_of_an_embedding(peer: str):
    assert_only_we_are_right(PADDED, peer, at_least=0.05)


def test_opacus_ghost_norms_have_no_linear_layer_of_rank_four():
    model, x, targets = made(RANK_FOUR)
    torch.testing.assert_close(ours(model, x, targets), sq_norms(model, sum_loss, x, targets), rtol=1e-10, atol=0)
    with pytest.raises(AttributeError, match="_norm_sample"):
        by_opacus_ghost(model, x, targets)
