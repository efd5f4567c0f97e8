"""The rules for normalisation layers against a loop over samples, and what BatchNorm counts in train mode."""

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from divebatch.norms import DiversityMeter, forms
from reference import rules
from reference.per_sample import mean_loss, sq_norms
from reference.rules import TOLERANCE, metered, weighted

NUM_SAMPLES = 5
LAST_DIMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LayerNorm of a vector": (lambda: nn.LayerNorm(6), (6,)),
    "LayerNorm of tokens": (lambda: nn.LayerNorm(6), (4, 6)),
    "LayerNorm of tokens in two dimensions": (lambda: nn.LayerNorm([6]), (4, 3, 6)),
    "LayerNorm of matrices": (lambda: nn.LayerNorm([3, 6]), (4, 3, 6)),
    "LayerNorm of whole samples": (lambda: nn.LayerNorm([4, 3, 6]), (4, 3, 6)),
    "LayerNorm without bias": (lambda: nn.LayerNorm(6, bias=False), (4, 6)),
    "LayerNorm with large eps": (lambda: nn.LayerNorm(6, eps=0.5), (4, 6)),
    "RMSNorm of a vector": (lambda: nn.RMSNorm(6), (6,)),
    "RMSNorm of tokens": (lambda: nn.RMSNorm(6), (4, 6)),
    "RMSNorm of matrices": (lambda: nn.RMSNorm([3, 6]), (4, 3, 6)),
    "RMSNorm with large eps": (lambda: nn.RMSNorm(6, eps=0.5), (4, 6)),
}
BY_CHANNEL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "GroupNorm of a vector": (lambda: nn.GroupNorm(2, 6), (6,)),
    "GroupNorm of one group": (lambda: nn.GroupNorm(1, 6), (6, 5)),
    "GroupNorm of images": (lambda: nn.GroupNorm(3, 6), (6, 5, 4)),
    "GroupNorm of volumes": (lambda: nn.GroupNorm(2, 6, eps=0.5), (6, 3, 2, 4)),
    "GroupNorm of each channel": (lambda: nn.GroupNorm(6, 6), (6, 5)),
} | {
    f"InstanceNorm{dims}d, {'tracking' if tracks else 'not tracking'}": (
        lambda kind=kind, tracks=tracks: kind(6, affine=True, track_running_stats=tracks),
        (6, 4, 3, 5)[: dims + 1],
    )
    for dims, kind in enumerate((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), start=1)
    for tracks in (False, True)
}
BATCH_NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm1d of vectors": (lambda: nn.BatchNorm1d(6), (6,)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), (6, 5)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(6, eps=0.1), (6, 5, 4)),
    "BatchNorm2d with a mean over all batches": (lambda: nn.BatchNorm2d(6, momentum=None), (6, 5, 4)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(6), (6, 3, 2, 4)),
}
TRAIN_MODE = LAST_DIMS | BY_CHANNEL
EVAL_MODE = TRAIN_MODE | BATCH_NORMS


def layer_and_call(make: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype, *, offset: float = 0.0):
    """The layer's parameters and statistics are those of a layer that was trained a while."""
    torch.manual_seed(0)
    layer = make().to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.5, 2.0)
        if getattr(layer, "running_mean", None) is not None:
            layer.running_mean.normal_(offset)
            layer.running_var.uniform_(0.5, 2.0)
    x = torch.randn(NUM_SAMPLES, *shape, dtype=dtype) + offset
    return layer, x, torch.randn(NUM_SAMPLES, *shape, dtype=dtype)


def assert_matches_loop(layer: nn.Module, x: Tensor, dy: Tensor, *, rel: float | None = None) -> None:
    twin = copy.deepcopy(layer).double()
    if isinstance(twin, nn.RMSNorm) and twin.eps is None:
        twin.eps = torch.finfo(x.dtype).eps
    rules.assert_matches_loop(layer, x, dy, twin=twin, rel=rel)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_without_eps_takes_that_of_float32_in_16_bits(dtype: torch.dtype):
    """Inputs so small that the eps of their own type would change them by more than rounding does."""
    torch.manual_seed(0)
    layer, x, dy = (
        nn.RMSNorm(6).to(dtype),
        (0.01 * torch.randn(NUM_SAMPLES, 4, 6)).to(dtype),
        torch.randn(NUM_SAMPLES, 4, 6),
    )
    rows = [
        torch.autograd.grad(weighted(layer(x[i : i + 1]), dy[i : i + 1]), layer.weight)[0] for i in range(NUM_SAMPLES)
    ]
    expected = torch.stack(rows).double().square().sum(1)
    torch.testing.assert_close(metered(layer, x, dy.to(dtype)).double(), expected, rtol=0.05, atol=0)


# Layers that keep samples apart


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", TRAIN_MODE)
def test_sq_norms_match_a_loop_over_samples_in_train_mode(case: str, dtype: torch.dtype):
    assert_matches_loop(*layer_and_call(*TRAIN_MODE[case], dtype))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", EVAL_MODE)
def test_sq_norms_match_a_loop_over_samples_in_eval_mode(case: str, dtype: torch.dtype):
    layer, x, dy = layer_and_call(*EVAL_MODE[case], dtype)
    assert_matches_loop(layer.eval(), x, dy)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("case", [case for case in EVAL_MODE if "RMSNorm" not in case and "without" not in case])
def test_frozen_parameters_do_not_count(case: str, frozen: str):
    layer, x, dy = layer_and_call(*EVAL_MODE[case], torch.float64)
    getattr(layer, frozen).requires_grad_(False)
    assert_matches_loop(layer.eval(), x, dy)


@pytest.mark.parametrize("chunk_bytes", [1, 300])
@pytest.mark.parametrize("case", EVAL_MODE)
def test_chunks_do_not_change_the_norms(case: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forms, "CHUNK_BYTES", chunk_bytes)
    layer, x, dy = layer_and_call(*EVAL_MODE[case], torch.float64)
    assert_matches_loop(layer.eval(), x, dy)


@pytest.mark.parametrize("cache_bytes", [1, 2**20])
@pytest.mark.parametrize("case", [case for case, (_, shape) in (BY_CHANNEL | BATCH_NORMS).items() if len(shape) == 3])
def test_channels_last(case: str, cache_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forms, "CACHE_BYTES", cache_bytes)
    layer, x, dy = layer_and_call(*EVAL_MODE[case], torch.float64)
    expected = sq_norms(copy.deepcopy(layer.eval()), weighted, x, dy)
    x, dy = (each.to(memory_format=torch.channels_last) for each in (x, dy))
    fast = metered(layer, x.requires_grad_(), dy)  # without a gradient of x torch's own GroupNorm crashes here
    torch.testing.assert_close(fast, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("case", TRAIN_MODE)
def test_inputs_far_from_zero_in_single_precision(case: str):
    assert_matches_loop(*layer_and_call(*TRAIN_MODE[case], torch.float32, offset=100.0), rel=1e-3)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from([nn.LayerNorm, nn.RMSNorm]),
    st.integers(0, 99),
)
def test_any_rank_of_the_normalized_shape(shape: list[int], rank: int, kind: type[nn.Module], seed: int):
    rank = min(rank, len(shape))
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(3, *shape, generator=generator).double() for _ in range(2))
    assert_matches_loop(kind(shape[-rank:], eps=1e-2).double(), x, dy)


@given(st.integers(1, 3), st.integers(2, 3), st.lists(st.integers(1, 4), max_size=3), st.integers(0, 99))
def test_any_number_of_groups(num_groups: int, channels_a_group: int, size: list[int], seed: int):
    generator = torch.Generator().manual_seed(seed)
    channels = num_groups * channels_a_group
    x, dy = (torch.randn(3, channels, *size, generator=generator).double() for _ in range(2))
    assert_matches_loop(nn.GroupNorm(num_groups, channels, eps=1e-2).double(), x, dy)


# BatchNorm that mixes samples: contributions


def normalized(layer: nn.Module, x: Tensor) -> Tensor:
    """By the statistics of the batch."""
    dims = [dim for dim in range(x.ndim) if dim != 1]
    mean = x.mean(dims, keepdim=True)
    return (x - mean) / ((x - mean).square().mean(dims, keepdim=True) + layer.eps).sqrt()


def slices(layer: nn.Module, x: Tensor, dy: Tensor) -> Tensor:
    """(B, 2 * C): each sample's part of the weight's and the bias's gradient."""
    x, dy = x.double(), dy.double()
    parts = [(normalized(layer, x) * dy).reshape(*x.shape[:2], -1).sum(2), dy.reshape(*x.shape[:2], -1).sum(2)]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", BATCH_NORMS)
def test_batch_norm_in_train_mode_counts_each_samples_slice(case: str, dtype: torch.dtype):
    layer, x, dy = layer_and_call(*BATCH_NORMS[case], dtype)
    rows = slices(layer, x, dy)
    fast = metered(layer, x, dy)
    torch.testing.assert_close(fast.double(), rows.square().sum(1), rtol=TOLERANCE[dtype], atol=0)
    gradient = torch.cat([layer.weight.grad, layer.bias.grad]).double()
    torch.testing.assert_close(rows.sum(0), gradient, rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=1e-5)


@pytest.mark.parametrize("case", BATCH_NORMS)
def test_batch_norm_in_train_mode_far_from_zero_in_single_precision(case: str):
    layer, x, dy = layer_and_call(*BATCH_NORMS[case], torch.float32, offset=100.0)
    expected = slices(layer, x, dy).square().sum(1)
    torch.testing.assert_close(metered(layer, x, dy).double(), expected, rtol=1e-3, atol=0)


def test_batch_norm_without_running_statistics_mixes_samples_in_eval_mode_too():
    layer, x, dy = layer_and_call(lambda: nn.BatchNorm2d(6, track_running_stats=False), (6, 3, 4), torch.float64)
    fast = metered(layer.eval(), x, dy)
    torch.testing.assert_close(fast, slices(layer, x, dy).square().sum(1), rtol=1e-10, atol=0)


class Network(nn.Module):
    """Keeps what passed between its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.relu, self.head = nn.ReLU(), nn.Linear(3 * 5 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.between = [x, self.conv(x)]
        self.between.append(self.norm(self.between[-1]))
        self.between.append(self.relu(self.between[-1]).flatten(1))
        self.between.append(self.head(self.between[-1]))
        return self.between[-1]


def contributions(model: Network, x: Tensor, targets: Tensor) -> Tensor:
    """(B, P): each layer's gradient from each sample's slice of its input and of the gradient of its output."""
    loss = mean_loss(model(x), targets)
    x, conv_out, norm_out, head_in, head_out = model.between
    conv_dy, norm_dy, head_dy = (len(x) * dy for dy in torch.autograd.grad(loss, [conv_out, norm_out, head_out]))
    conv_rows, head_rows = of_slices(model.conv, x, conv_dy), of_slices(model.head, head_in.detach(), head_dy)
    return torch.cat([conv_rows, slices(model.norm, conv_out, norm_dy).detach(), head_rows], 1)


def of_slices(layer: nn.Module, x: Tensor, dy: Tensor) -> Tensor:
    rows = []
    for i in range(len(x)):
        parts = torch.autograd.grad(weighted(layer(x[i : i + 1]), dy[i : i + 1]), list(layer.parameters()))
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


def test_contributions_in_a_network_add_up_to_the_batch_gradient():
    model = Network().double()
    x, targets = torch.randn(7, 2, 5, 4).double(), torch.randn(7, 3).double()
    rows = contributions(model, x, targets)
    with DiversityMeter(model) as meter:
        mean_loss(model(x), targets).backward()
        torch.testing.assert_close(meter.norms.per_sample(), rows.square().sum(1), rtol=1e-10, atol=0)
        measured = meter.diversity()
    sq_norm = 7**2 * float(sum(parameter.grad.square().sum() for parameter in model.parameters()))
    assert measured.sum_of_sq_norms == pytest.approx(float(rows.square().sum()), rel=1e-10)
    assert measured.sq_norm_of_sum == pytest.approx(sq_norm, rel=1e-10)
    assert float(rows.sum(0).square().sum()) == pytest.approx(sq_norm, rel=1e-10)
