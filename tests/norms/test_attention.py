"""The rule for multi-head attention against a loop over samples, alone and inside transformer layers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from divebatch import NormMeter
from divebatch.errors import CoverageError
from reference import rules
from reference.per_sample import sq_norms, trainable
from reference.rules import metered, some, weighted

SAMPLES, QUERIES, KEYS, WIDTH, HEADS = 3, 4, 5, 6, 2
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "keys and values of other widths": {"kdim": 3, "vdim": 4},
    "other widths, no bias, batch first": {"kdim": 3, "vdim": 4, "bias": False, "batch_first": True},
    "a learnt key and value": {"add_bias_kv": True},
    "a zero key": {"add_zero_attn": True, "batch_first": True},
    "a learnt and a zero key, other widths": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 3, "vdim": 4},
}


def closed(*shape: int, seed: int = 2) -> Tensor:
    """Truth values; the first of the last dimension stays open, so that each query has a key."""
    mask = some(*shape, seed=seed) > 0.3
    mask[..., 0] = False
    return mask


def causal(num_queries: int, num_keys: int) -> Tensor:
    return torch.ones(num_queries, num_keys).triu(1).bool()


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"key_padding_mask": closed(SAMPLES, KEYS)},
    "padding as numbers": {"key_padding_mask": some(SAMPLES, KEYS)},
    "matrix": {"attn_mask": closed(QUERIES, KEYS)},
    "matrix as numbers": {"attn_mask": some(QUERIES, KEYS)},
    "a matrix a head": {"attn_mask": closed(SAMPLES * HEADS, QUERIES, KEYS)},
    "matrix and padding": {"attn_mask": closed(QUERIES, KEYS), "key_padding_mask": closed(SAMPLES, KEYS)},
    "causal": {"attn_mask": causal(QUERIES, KEYS), "is_causal": True},
    "causal and padding": {
        "attn_mask": causal(QUERIES, KEYS),
        "is_causal": True,
        "key_padding_mask": closed(SAMPLES, KEYS),
    },
}


class Attending(nn.Module):
    """Attention of stored samples; its input says of which. Its output: features, and weights if the call has them."""

    def __init__(self, call: dict[str, Any], *, is_self: bool = False, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.MultiheadAttention(WIDTH, HEADS, **settings).double()
        for parameter in self.layer.parameters():  # biases begin as zeros, where nothing can go wrong with them
            nn.init.normal_(parameter, std=0.5)
        self.call, self.is_self = {"need_weights": False} | call, is_self
        self.query = some(SAMPLES, QUERIES, WIDTH)
        self.key = some(SAMPLES, KEYS, settings.get("kdim", WIDTH), seed=3)
        self.value = some(SAMPLES, KEYS, settings.get("vdim", WIDTH), seed=4)

    def forward(self, samples: Tensor) -> Tensor:
        data = [self.query] * 3 if self.is_self else [self.query, self.key, self.value]
        dtype = self.layer.out_proj.weight.dtype
        chosen = [x[samples].to(dtype) for x in data]
        call = {name: self._of(samples, name, value) for name, value in self.call.items()}
        if self.layer.batch_first:
            output, weights = self.layer(*chosen, **call)
        else:
            output, weights = self.layer(*(x.transpose(0, 1) for x in chosen), **call)
            output = output.transpose(0, 1)
        parts = [output] if weights is None else [output, weights]
        return torch.cat([part.flatten(1) for part in parts], 1)

    def _of(self, samples: Tensor, name: str, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.to(self.layer.out_proj.weight.dtype)
        if name == "key_padding_mask":
            return value[samples]
        if name == "attn_mask" and value.ndim == 3:
            return value.unflatten(0, (-1, HEADS))[samples].flatten(0, 1)
        return value


EVERYONE = torch.arange(SAMPLES)


def factors_for(model: nn.Module, x: Tensor = EVERYONE) -> Tensor:
    with torch.no_grad():
        return some(*model(x).shape, seed=5)


def assert_matches_loop(model: nn.Module, x: Tensor = EVERYONE, factors: Tensor | None = None) -> None:
    factors = factors_for(model, x) if factors is None else factors
    rules.assert_matches_loop(model, x, factors)


def by_masked_losses(model: nn.Module, x: Tensor, factors: Tensor, seed: int) -> Tensor:
    """The whole batch runs with the same random numbers each time, and one sample's loss is differentiated."""
    rows = []
    for i in range(len(x)):
        torch.manual_seed(seed)
        grads = torch.autograd.grad(weighted(model(x)[i], factors[i]), trainable(model), allow_unused=True)
        rows.append(sum(g.square().sum() for g in grads if g is not None))
    return torch.stack(rows)


# The layer


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layer", LAYERS)
def test_sq_norms_match_a_loop_over_samples(layer: str, mask: str):
    assert_matches_loop(Attending(MASKS[mask], **LAYERS[layer]))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("layer", ["plain", "batch first", "a learnt and a zero key, other widths"])
def test_a_loss_may_use_the_weights_too(layer: str, average: bool, mask: str):
    call = {"need_weights": True, "average_attn_weights": average}
    assert_matches_loop(Attending(MASKS[mask] | call, **LAYERS[layer]))


def test_a_loss_may_use_nothing_but_the_weights():
    model = Attending({"need_weights": True})
    factors = factors_for(model)
    factors[:, : QUERIES * WIDTH] = 0
    assert_matches_loop(model, factors=factors)
    assert metered(model, EVERYONE, factors).min() > 0


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("layer", ["plain", "batch first", "no bias", "a learnt key and value"])
def test_self_attention(layer: str, need_weights: bool):
    assert_matches_loop(Attending({"need_weights": need_weights}, is_self=True, **LAYERS[layer]))


@pytest.mark.parametrize("layer", LAYERS)
def test_single_precision(layer: str):
    model = Attending({"need_weights": True}, **LAYERS[layer])
    for x in (model.query, model.key, model.value):
        x.copy_(x.float())
    model.load_state_dict({name: p.float().double() for name, p in model.state_dict().items()})
    factors = factors_for(model).float().double()
    expected = sq_norms(model, weighted, EVERYONE, factors)
    fast = metered(model.float(), EVERYONE, factors.float())
    assert fast.dtype == torch.float32
    torch.testing.assert_close(fast.double(), expected, rtol=1e-5, atol=0)


@settings(max_examples=50)
@given(*[st.integers(1, 5)] * 4, st.sampled_from([1, 2, 3]), st.booleans(), st.booleans())
def test_sq_norms_match_for_any_shape(
    samples: int, queries: int, keys: int, head_width: int, heads: int, batch_first: bool, need_weights: bool
):
    width = heads * head_width
    layer = nn.MultiheadAttention(width, heads, batch_first=batch_first).double()
    data = some(samples, queries + keys, width)

    def attend(x: Tensor) -> Tensor:
        parts = [x if batch_first else x.transpose(0, 1) for x in x.split([queries, keys], 1)]
        output = layer(parts[0], parts[1], parts[1], need_weights=need_weights)[0]
        return output if batch_first else output.transpose(0, 1)

    factors = some(samples, queries, width, seed=5)
    with NormMeter(layer, loss_reduction="sum") as meter:
        weighted(attend(data), factors).backward()
    rows = [torch.autograd.grad(weighted(attend(data[[i]]), factors[[i]]), trainable(layer)) for i in range(samples)]
    expected = torch.stack([torch.cat([g.flatten() for g in row]).square().sum() for row in rows])
    torch.testing.assert_close(meter.per_sample(), expected, rtol=1e-10, atol=1e-25)


def test_a_sketch_is_unbiased_within_its_error():
    model = Attending({})
    model.requires_grad_(False).layer.in_proj_weight.requires_grad_(True)
    factors = factors_for(model)
    exact = float(metered(model, EVERYONE, factors).sum())
    with NormMeter(model, loss_reduction="sum", mode="sketch") as meter:
        for _ in range(200):
            weighted(model(EVERYONE), factors).backward()
    assert 0 < meter.standard_error() < 0.1 * 200 * exact
    assert abs(meter.sum_of_sq_norms() - 200 * exact) < 4 * meter.standard_error()


# Dropout


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("layer", ["plain", "batch first", "a learnt key and value"])
def test_dropout_is_drawn_again_as_it_was(layer: str, need_weights: bool):
    model = Attending({"need_weights": need_weights}, dropout=0.5, **LAYERS[layer])
    factors = factors_for(model)
    expected = by_masked_losses(model, EVERYONE, factors, seed=7)
    torch.manual_seed(7)
    torch.testing.assert_close(metered(model, EVERYONE, factors), expected, rtol=1e-10, atol=0)
    torch.manual_seed(8)
    assert not torch.allclose(metered(model, EVERYONE, factors), expected, rtol=1e-3)


def test_dropout_is_off_in_eval_mode():
    assert_matches_loop(Attending({}, dropout=0.5).eval())


def test_the_users_gradients_and_random_numbers_are_those_of_a_run_without_meter():
    model, plain = (Attending({"need_weights": True}, dropout=0.5) for _ in range(2))
    factors, found = factors_for(model), []
    for each, meters in ((model, [NormMeter(model)]), (plain, [])):
        torch.manual_seed(7)
        for meter in meters:
            meter.attach()
        weighted(each(EVERYONE), factors).backward()
        found.append([*(p.grad for p in each.parameters()), torch.get_rng_state()])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_under_a_checkpoint(use_reentrant: bool):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), encoder_layer(dropout=0.3)).double()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

    model, x = Checkpointed(), some(SAMPLES, QUERIES, WIDTH).requires_grad_()
    factors = factors_for(model, x)
    expected = by_masked_losses(model.inner, x, factors, seed=7)
    torch.manual_seed(7)
    torch.testing.assert_close(metered(model, x, factors), expected, rtol=1e-10, atol=0)


# Low precision


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_autocast(dropout: float):
    model, x = encoder_layer(dropout=dropout), some(8, QUERIES, WIDTH).float()
    factors, found = some(8, QUERIES, WIDTH).float(), []
    for enabled in (False, True):
        torch.manual_seed(7)
        with NormMeter(model, loss_reduction="sum") as meter:
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                outputs = model(x)
            weighted(outputs.float(), factors).backward()
        found.append(meter.per_sample().float())
    torch.testing.assert_close(found[1], found[0], rtol=0.1, atol=0)
    assert not torch.equal(found[1], found[0])


# Whole models


def encoder_layer(**settings: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 8, **{"dropout": 0.0, "batch_first": True} | settings)


class Decoding(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 8, **{"dropout": 0.0, "batch_first": True} | settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, :QUERIES], x[:, QUERIES:], tgt_is_causal=True, tgt_mask=causal(QUERIES, QUERIES))


class Translating(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.whole = nn.Transformer(WIDTH, HEADS, 2, 2, 8, **{"dropout": 0.0, "batch_first": True} | settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x[:, QUERIES:], x[:, :QUERIES])


MODELS: dict[str, Callable[..., nn.Module]] = {
    "encoder layer": encoder_layer,
    "encoder layer, norm first": lambda **more: encoder_layer(norm_first=True, activation="gelu", **more),
    "encoder": lambda **more: nn.TransformerEncoder(encoder_layer(**more), 2, enable_nested_tensor=False),
    "decoder layer": Decoding,
    "encoder and decoder": Translating,
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("case", MODELS)
def test_transformers(case: str, train: bool):
    model, x = MODELS[case]().double().train(train), some(SAMPLES, QUERIES + KEYS, WIDTH)
    assert_matches_loop(model, x)


@pytest.mark.parametrize("case", MODELS)
def test_transformers_with_dropout(case: str):
    model, x = MODELS[case](dropout=0.2).double(), some(SAMPLES, QUERIES + KEYS, WIDTH)
    factors = factors_for(model, x)
    expected = by_masked_losses(model, x, factors, seed=7)
    torch.manual_seed(7)
    torch.testing.assert_close(metered(model, x, factors), expected, rtol=1e-10, atol=0)


# Refused


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_transformer_layers_with_the_time_first_are_refused(kind: type[nn.Module]):
    with pytest.raises(CoverageError, match=rf"'0' \({kind.__name__}\) .* make it with batch_first=True"):
        NormMeter(nn.Sequential(kind(WIDTH, HEADS, 8)))


def test_another_parameter_of_the_output_projection_is_named():
    layer = nn.MultiheadAttention(WIDTH, HEADS)
    layer.out_proj.extra = nn.Parameter(torch.zeros(1))
    with pytest.raises(CoverageError, match=r"no norm rule covers: 'out_proj\.extra' of MultiheadAttention"):
        NormMeter(layer)
