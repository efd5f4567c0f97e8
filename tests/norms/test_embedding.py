"""The rules for embeddings against a loop over samples."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from divebatch import NormMeter
from divebatch.errors import CoverageError, UsageError
from divebatch.norms import DiversityMeter
from divebatch.norms.rules.embedding import embedding
from reference.per_sample import assert_same_sums, diversity_of, gradients
from reference.rules import TOLERANCE, assert_matches_loop, metered, weighted

NUM_TOKENS, WIDTH, PADDING = 6, 3, 2
SHAPES = {
    "a token a sample": (5,),
    "one sample": (1, 4),
    "one position": (5, 1),
    "sequences with repeated tokens": (5, 9),
    "rank three": (4, 3, 5),
}
TABLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"padding_idx": PADDING},
    "sparse": {"sparse": True},
    "sparse with padding": {"sparse": True, "padding_idx": PADDING},
    "capped rows": {"max_norm": 1.0},
}


def tokens_of(*shape: int) -> Tensor:
    return torch.randint(0, NUM_TOKENS, shape, generator=torch.Generator().manual_seed(0))


def dense_twin(layer: Any) -> Any:
    twin = copy.deepcopy(layer).double()
    twin.sparse = False
    return twin


# Embedding


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("case", SHAPES)
def test_sq_norms_match_a_loop_over_samples(case: str, table: str, dtype: torch.dtype):
    torch.manual_seed(0)
    x = tokens_of(*SHAPES[case])
    layer = nn.Embedding(NUM_TOKENS, WIDTH, **TABLES[table], dtype=dtype)
    assert_matches_loop(layer, x, torch.randn(*x.shape, WIDTH, dtype=dtype), twin=dense_twin(layer))


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(1, 5),
    st.sampled_from([None, 0, -1]),
    st.sampled_from(list(TOLERANCE)),
    st.integers(0, 99),
)
def test_sq_norms_match_for_any_shape(shape: list[int], num_tokens: int, padding_idx: int | None, dtype, seed: int):
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Embedding(num_tokens, WIDTH, padding_idx=padding_idx, dtype=dtype)
    # Whole numbers are exact in both precisions, so that no cancellation can hide behind the tolerance.
    dy = torch.randint(-3, 4, (*shape, WIDTH), generator=generator).to(dtype)
    assert_matches_loop(layer, torch.randint(0, num_tokens, shape, generator=generator), dy)


@pytest.mark.parametrize("table", TABLES)
def test_the_diversity_meter_adds_gradients_of_any_table(table: str):
    torch.manual_seed(0)
    layer = nn.Embedding(NUM_TOKENS, WIDTH, **TABLES[table]).double()
    x, dy = tokens_of(5, 9), torch.randn(5, 9, WIDTH).double()
    with DiversityMeter(layer, loss_reduction="sum") as meter:
        for part in (slice(0, 2), slice(2, 5)):
            weighted(layer(x[part]), dy[part]).backward()
        assert_same_sums(meter.diversity(), diversity_of(gradients(dense_twin(layer), weighted, x, dy)))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("table", ["plain", "padding"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_comparing_all_pairs_is_the_same_as_sorting(shape: tuple[int, ...], table: str, dtype: torch.dtype):
    """A GPU compares, a CPU sorts."""
    layer = nn.Embedding(NUM_TOKENS, WIDTH, dtype=dtype, **TABLES[table])
    form = embedding(layer, tokens_of(*shape), torch.randn(*shape, WIDTH, dtype=dtype))["weight"]
    found = form._by_comparing(form.per_sample)
    torch.testing.assert_close(found, form._by_sorting(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


# EmbeddingBag

BAGS = ([3, 1, 3, PADDING], [], [PADDING, PADDING], [0], [5, 5, 4, 0, 1])
"""Of different lengths: one is empty, and one of nothing but padding."""
SUMS: dict[str, dict[str, Any]] = {
    f"{mode}{', padding' if padding is not None else ''}{', sparse' if sparse else ''}": {
        "mode": mode,
        "padding_idx": padding,
        "sparse": sparse,
    }
    for mode in ("sum", "mean")
    for padding in (None, PADDING)
    for sparse in (False, True)
}


def bag_layer(dtype: torch.dtype = torch.float64, **settings: Any) -> nn.EmbeddingBag:
    torch.manual_seed(0)
    return nn.EmbeddingBag(NUM_TOKENS, WIDTH, **settings, dtype=dtype)


def flat(bags: Any, *, include_last_offset: bool = False) -> tuple[Tensor, Tensor]:
    """All tokens in a row, and where each bag begins."""
    ends = torch.tensor([len(bag) for bag in bags]).cumsum(0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), ends])
    tokens = torch.tensor([token for bag in bags for token in bag])
    return tokens, offsets if include_last_offset else offsets[:-1]


def by_bags(layer: nn.EmbeddingBag, dy: Tensor, bags: Any, weights: list[Tensor] | None = None) -> Tensor:
    """One bag at a time."""
    twin, rows = dense_twin(layer), []
    twin.include_last_offset = False
    for i, bag in enumerate(bags):
        tokens, offsets = torch.tensor(bag, dtype=torch.long), torch.zeros(1, dtype=torch.long)
        output = twin(tokens, offsets, None if weights is None else weights[i].double())
        (gradient,) = torch.autograd.grad(weighted(output, dy[i : i + 1].double()), [twin.weight])
        rows.append(gradient.square().sum())
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("include_last_offset", [False, True])
@pytest.mark.parametrize("case", SUMS)
def test_bags_by_offsets(case: str, include_last_offset: bool, dtype: torch.dtype):
    layer = bag_layer(dtype, include_last_offset=include_last_offset, **SUMS[case])
    dy = torch.randn(len(BAGS), WIDTH, dtype=dtype)
    tokens, offsets = flat(BAGS, include_last_offset=include_last_offset)
    expected = by_bags(layer, dy, BAGS)
    for args, kwargs in (((tokens, offsets), {}), ((tokens,), {"offsets": offsets})):
        fast = metered(layer, args, dy, **kwargs)
        torch.testing.assert_close(fast.double(), expected, rtol=TOLERANCE[dtype], atol=0)


@pytest.mark.parametrize("case", SUMS)
def test_bags_as_rows_of_a_matrix(case: str):
    layer, x, dy = bag_layer(**SUMS[case]), tokens_of(5, 7), torch.randn(5, WIDTH).double()
    torch.testing.assert_close(metered(layer, x, dy), by_bags(layer, dy, x.tolist()), rtol=1e-10, atol=0)


@pytest.mark.parametrize("padding_idx", [None, PADDING])
def test_bags_with_weights(padding_idx: int | None):
    layer, dy = bag_layer(mode="sum", padding_idx=padding_idx), torch.randn(len(BAGS), WIDTH).double()
    weights = [torch.randn(len(bag)).double() for bag in BAGS]
    expected = by_bags(layer, dy, BAGS, weights)
    fast = metered(layer, flat(BAGS), dy, per_sample_weights=torch.cat(weights))
    torch.testing.assert_close(fast, expected, rtol=1e-10, atol=0)


@given(
    st.lists(st.lists(st.integers(0, NUM_TOKENS - 1), max_size=5), min_size=1, max_size=6), st.sampled_from(list(SUMS))
)
def test_bags_of_any_lengths(bags: list[list[int]], case: str):
    layer, (tokens, offsets) = bag_layer(**SUMS[case]), flat(bags)
    dy = torch.randn(len(bags), WIDTH).double()
    fast = metered(layer, (tokens.long(), offsets), dy)
    torch.testing.assert_close(fast, by_bags(layer, dy, bags), rtol=1e-10, atol=0)


@pytest.mark.parametrize("fallback", [None, "vmap"])
@pytest.mark.parametrize(
    ("settings", "named"),
    [({"mode": "max"}, "mode='max'"), ({"mode": "sum", "scale_grad_by_freq": True}, "scale_grad_by_freq=True")],
)
def test_other_bags_are_refused(settings: dict[str, Any], named: str, fallback: str | None):
    layer = bag_layer(**settings)
    with pytest.raises(CoverageError, match="EmbeddingBag") as raised, NormMeter(layer, fallback=fallback):
        layer(tokens_of(5, 2)).sum().backward()
    assert named in str(raised.value)
    assert "use fallback" not in str(raised.value)  # nobody would ask it: the layer has a rule


# In a language model


class LanguageModel(nn.Module):
    """Token and position embeddings, and an output layer that may be the token embedding."""

    def __init__(self, *, tied: bool, sparse: bool = False, positions_of: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(NUM_TOKENS, 4, sparse=sparse), nn.Embedding(7, 4)
        self.hidden, self.head = nn.Linear(4, 4), nn.Linear(4, NUM_TOKENS, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.positions_of = positions_of or (lambda x: torch.arange(x.shape[1]).expand(len(x), -1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.tokens(x) + self.positions(self.positions_of(x))).tanh())


def next_token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("tied", [False, True])
def test_a_language_model_is_exact(tied: bool):
    model, x, targets = LanguageModel(tied=tied).double(), tokens_of(5, 7), tokens_of(5, 7).flip(0)
    rows = gradients(model, next_token_loss, x, targets)
    with DiversityMeter(model) as meter:
        next_token_loss(model(x), targets).backward()
        torch.testing.assert_close(meter.norms.per_sample(), rows.square().sum(1), rtol=1e-10, atol=0)
        assert_same_sums(meter.diversity(), diversity_of(rows))


@pytest.mark.parametrize("meter", [NormMeter, DiversityMeter])
@pytest.mark.parametrize("num_samples", [5, 7])
def test_positions_without_batch_dimension_get_an_error_that_says_what_to_do(meter, num_samples: int):
    """Also if there are as many positions as samples."""
    model = LanguageModel(tied=False, positions_of=lambda x: torch.arange(x.shape[1])).double()
    tokens, message = tokens_of(num_samples, 7), r"'positions' .* the numbers 0 to 6 .*positions\.expand\(batch, -1\)"
    with meter(model), pytest.raises(CoverageError, match=message):
        next_token_loss(model(tokens), tokens).backward()


@pytest.mark.parametrize("num_samples", [3, 7])
def test_shared_inputs_that_are_no_positions_get_an_error_unless_they_are_as_many_as_samples(num_samples: int):
    model = LanguageModel(tied=False, positions_of=lambda x: torch.arange(x.shape[1]).flip(0)).double()
    tokens = tokens_of(num_samples, 6)
    with NormMeter(model), pytest.raises(UsageError, match=r"layer 'positions' saw 6 samples .*positions\.expand"):
        next_token_loss(model(tokens), tokens).backward()
