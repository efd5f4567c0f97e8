"""Embeddings: a token's row gets the gradients of all positions with this token, added up before squaring."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from divebatch.errors import CoverageError
from divebatch.norms.forms import Form, chunk_size, in_chunks, sq_norms_of_rows
from divebatch.norms.registry import rule_for
from divebatch.norms.sketch import sum_dtype

MOST_COMPARED = 2048
"""The most entries of a sample for which a GPU compares all pairs."""

FEWEST_POSITIONS = 4
"""The fewest consecutive numbers that count as positions; fewer may be a batch of single tokens."""


@dataclass(slots=True)
class Rows(Form):
    """The gradients of a table's rows: entry m adds `values[m]` to row `rows[m]` of sample `samples[m]`."""

    samples: Tensor
    """The sample of each entry, (M,)."""
    rows: Tensor
    """The row of each entry, (M,)."""
    values: Tensor
    """The gradient of each entry, (M, width)."""
    batch_size: int
    num_rows: int
    per_sample: int | None = None
    """The number of consecutive entries per sample; None if samples differ."""

    def sq_norms(self) -> Tensor:
        """Use the faster of two equivalent ways: a GPU multiplies faster than it sorts."""
        if self.per_sample and self.per_sample <= MOST_COMPARED and self.values.is_cuda:
            return self._by_comparing(self.per_sample)
        return self._by_sorting()

    def _by_comparing(self, per_sample: int) -> Tensor:
        """Add up v_t . v_s over the pairs of a sample's entries t, s that have the same row."""
        values_BTW = self.values.view(self.batch_size, per_sample, self.values.shape[1])
        rows_BT = self.rows.view(self.batch_size, per_sample)
        return in_chunks(_over_equal, values_BTW, rows_BT, chunk_size(values_BTW, 3 * per_sample**2))

    def _by_sorting(self) -> Tensor:
        """Add entries of the same sample and row, then square. Sorting needs no synchronisation."""
        keys, order = (self.samples * self.num_rows + self.rows).sort()
        is_new = torch.ones_like(keys)
        is_new[1:] = (keys[1:] != keys[:-1]).to(keys.dtype)
        segment = is_new.cumsum(0) - 1
        values = self.values[order].to(sum_dtype(self.values.dtype))
        sums = torch.zeros_like(values).index_add_(0, segment, values)
        segment_sq_norms = sq_norms_of_rows(sums)
        sample_of = torch.zeros_like(segment).index_copy_(0, segment, self.samples[order])
        return segment_sq_norms.new_zeros(self.batch_size).index_add_(0, sample_of, segment_sq_norms)

    @property
    def num_samples(self) -> int:
        return self.batch_size

    def explicit(self, samples: slice) -> Tensor:
        first, last, _ = samples.indices(self.batch_size)
        chosen = (self.samples >= first) & (self.samples < last)
        table = self.values.new_zeros(last - first, self.num_rows, self.values.shape[1])
        place = (self.samples[chosen] - first, self.rows[chosen])
        return table.index_put_(place, self.values[chosen], accumulate=True)

    def summed(self) -> Tensor:
        values = self.values.to(sum_dtype(self.values.dtype))
        return values.new_zeros(self.num_rows, values.shape[1]).index_add_(0, self.rows, values)


def _over_equal(values_BTW: Tensor, rows_BT: Tensor) -> Tensor:
    """Add up products of the values over pairs with equal rows, (B,)."""
    values_BTW = values_BTW.to(sum_dtype(values_BTW.dtype))
    is_same = rows_BT[:, :, None] == rows_BT[:, None, :]
    return (values_BTW @ values_BTW.mT).mul_(is_same).sum((1, 2))


def _shared_positions(layer: Any, x: Tensor) -> str | None:
    """Return an error for consecutive numbers without a second dimension: positions, embedded once for all samples."""
    if x.ndim != 1 or len(x) < FEWEST_POSITIONS or bool((x.diff() != 1).any()):
        return None
    return (
        f"was given the numbers {int(x[0])} to {int(x[-1])} without a batch dimension: they look like positions that "
        f"all samples share"
    )


@rule_for(nn.Embedding, input_check=_shared_positions)
def embedding(layer: Any, x: Tensor, dy: Tensor) -> dict[str, Form]:
    """Add up the gradients of repeated tokens; padding_idx gets no gradient."""
    if layer.scale_grad_by_freq:
        raise CoverageError("Embedding(scale_grad_by_freq=True) mixes the samples of a batch: it cannot be measured")
    tokens = x.reshape(len(x), -1)
    samples = torch.arange(len(x), device=x.device).repeat_interleave(tokens.shape[1])
    form = _rows(layer, samples, tokens.flatten(), dy.reshape(-1, layer.embedding_dim), len(x))
    return {"weight": replace(form, per_sample=tokens.shape[1])}


@rule_for(nn.EmbeddingBag, all_inputs=True)
def embedding_bag(layer: Any, inputs: dict[str, Any], dy: Tensor) -> dict[str, Form]:
    """Measure bags, one per sample, in mode sum or mean, given as rows of a matrix or by offsets."""
    if layer.scale_grad_by_freq:
        raise CoverageError("EmbeddingBag(scale_grad_by_freq=True) mixes the samples of a batch: it cannot be measured")
    if layer.mode == "max":
        raise CoverageError("EmbeddingBag(mode='max') cannot be measured: the modes sum and mean can")
    tokens, weights = inputs["input"], inputs.get("per_sample_weights")
    if tokens.ndim == 2:
        samples = torch.arange(len(tokens), device=tokens.device).repeat_interleave(tokens.shape[1])
    else:
        starts = inputs["offsets"][: len(dy)]
        samples = torch.searchsorted(starts, torch.arange(len(tokens), device=tokens.device), right=True) - 1
    values = dy[samples]
    if weights is not None:
        values = values * weights.reshape(-1, 1)
    if layer.mode == "mean":
        kept = (tokens.flatten() != (-1 if layer.padding_idx is None else layer.padding_idx)).to(dy.dtype)
        counts = dy.new_zeros(len(dy)).index_add_(0, samples, kept)
        # A bag of only padding has a count of zero and a gradient of zero.
        values = values / counts.clamp_(min=1)[samples, None]
    return {"weight": _rows(layer, samples, tokens.flatten(), values, len(dy))}


def _rows(layer: Any, samples: Tensor, rows: Tensor, values: Tensor, num_samples: int) -> Rows:
    if layer.padding_idx is not None:
        values = values * (rows != layer.padding_idx)[:, None]
    return Rows(samples, rows, values, num_samples, layer.num_embeddings)
