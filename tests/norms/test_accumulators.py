"""Tensors that are dropped on the device, and the question whether they must be."""

import math

import pytest
import torch
from torch import Tensor

from divebatch.norms.accumulators import are_finite, kept

KINDS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def tensors(*kinds: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, 2, 2, generator=generator).to(kind) for kind in kinds]


@pytest.mark.parametrize("kinds", [(kind, kind) for kind in KINDS] + [KINDS])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1.0])
def test_what_is_kept_is_as_it_was_and_what_is_not_is_zero(kinds, bad):
    given = [each.to(memory_format=torch.channels_last) for each in tensors(*kinds)]
    given[-1][1, 2, 1, 0] = bad
    for same, before in zip(kept(given, torch.tensor(True)), given, strict=True):
        assert same.dtype == before.dtype
        assert torch.equal(same.nan_to_num(7.0), before.nan_to_num(7.0))
    for gone, before in zip(kept(given, torch.tensor(False)), given, strict=True):
        assert gone.dtype == before.dtype
        assert gone.shape == before.shape
        assert not gone.any()
    assert bool(torch.isnan(given[-1]).any()) == math.isnan(bad), "gradients are the user's and stay as they are"


@pytest.mark.parametrize(("bad", "expected"), [(math.nan, False), (math.inf, False), (-math.inf, False), (1.0, True)])
def test_a_single_entry_decides(bad: float, expected: bool):
    given = tensors(torch.float32, torch.float32)
    given[1][2, 3, 1, 1] = bad
    assert bool(are_finite(given)) is expected
    assert bool(are_finite([given[0], given[1].flatten(1).to_sparse()])) is expected


def test_entries_whose_squares_are_too_large_are_finite():
    assert are_finite([torch.full((4,), 1e30)])
