"""Multi-head attention, which runs again in its rule with four Linear layers as projections.

Shapes: B samples, T queries, S keys, H heads, E features.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from divebatch.norms.forms import Explicit, Form, Outer, Stacked
from divebatch.norms.registry import require_batch, rule_for
from divebatch.norms.rules.rerun import Rerun, gradients, product

PARAMETERS = (
    *("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"),
    *("bias_k", "bias_v", "out_proj.weight", "out_proj.bias"),
)


@rule_for(nn.MultiheadAttention, parameters=PARAMETERS, reruns=True)
def multihead_attention(layer: Any, run: Rerun, dy: Tensor) -> dict[str, Form]:
    """Measure the layer exactly with every mask and option; dropout repeats its random numbers."""
    require_batch(layer, run.arguments["query"], 3)
    inputs = [_batch_first(layer, run.arguments[name]) for name in ("query", "key", "value")]
    with run.surroundings.restored():
        projected = [product(x, *weights) for x, weights in zip(inputs, _input_projections(layer), strict=True)]
        extra = _extra_positions(layer, len(inputs[0]))
        context, weights = _attend(layer, run.arguments, projected, extra)
        output = product(context, layer.out_proj.weight, layer.out_proj.bias)
        result = _batch_first(layer, output) if run.output == 0 else weights
        found = gradients(result, dy, [*projected, output, *extra])
    return {
        **_of_input_projections(inputs, found[:3]),
        "out_proj.weight": Outer(found[3], context.detach()),
        "out_proj.bias": Explicit(found[3].sum(1)),
        **{name: Explicit(d[:, None]) for name, d in zip(("bias_k", "bias_v"), found[4:], strict=False)},
    }


def _of_input_projections(inputs: list[Tensor], dys: tuple[Tensor, ...]) -> dict[str, Form]:
    """Return the gradients of the input projections, as one matrix and as three; missing ones are ignored."""
    outers = [Outer(dy, x) for dy, x in zip(dys, inputs, strict=True)]
    bias = Explicit(torch.cat([dy.sum(1) for dy in dys], 1))
    separate = dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), outers, strict=True))
    return {"in_proj_weight": Stacked(outers), "in_proj_bias": bias, **separate}


def _batch_first(layer: Any, x: Tensor) -> Tensor:
    """Change between the layer's own layout and batch first."""
    return x if layer.batch_first else x.transpose(0, 1)


def _input_projections(layer: Any) -> list[tuple[Tensor, Tensor | None]]:
    """Return weight and bias for queries, keys and values."""
    weights = [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
    if layer.in_proj_weight is not None:
        weights = layer.in_proj_weight.chunk(3)
    biases = [None] * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    return list(zip(weights, biases, strict=True))


def _extra_positions(layer: Any, num_samples: int) -> list[Tensor]:
    """Return the key and the value, (B, 1, E), that the layer has learned for all samples, each with a gradient."""
    if layer.bias_k is None:
        return []
    return [p.detach()[0].repeat(num_samples, 1, 1).requires_grad_() for p in (layer.bias_k, layer.bias_v)]


def _attend(
    layer: Any, arguments: dict[str, Any], projected: list[Tensor], extra: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the context (B, T, E) and the attention weights, using the layer's own kernels, so that dropout agrees."""
    queries, keys, values = projected
    # Positions that every sample has in addition to its own.
    zeros = [torch.zeros_like(keys[:, :1])] if layer.add_zero_attn else []
    extended = [torch.cat([x, *extra[i : i + 1], *zeros], 1) for i, x in enumerate((keys, values))]
    q, k, v = (x.unflatten(2, (layer.num_heads, -1)).transpose(1, 2) for x in (queries, *extended))
    mask, is_causal = _mask(layer, arguments, q, keys.shape[1], k.shape[2])
    p = layer.dropout if layer.training else 0.0
    if not arguments.get("need_weights", True):
        context = scaled_dot_product_attention(q, k, v, mask, p, is_causal)
        return context.transpose(1, 2).flatten(2), context
    scores = (q / math.sqrt(q.shape[3])) @ k.mT
    weights = dropout((scores if mask is None else scores + mask).softmax(-1), p)
    averaged = weights.mean(1) if arguments.get("average_attn_weights", True) else weights
    return (weights @ v).transpose(1, 2).flatten(2), averaged


def _mask(
    layer: Any, arguments: dict[str, Any], q: Tensor, num_keys: int, num_positions: int
) -> tuple[Tensor | None, bool]:
    """Return the sum of masks, (B or 1, H or 1, T or 1, positions), and whether the kernel itself masks causally.

    Positions after the samples' own keys are open to every query.
    """
    padding, mask = arguments.get("key_padding_mask"), arguments.get("attn_mask")
    if arguments.get("is_causal", False) and padding is None and not arguments.get("need_weights", True):
        return None, True
    terms = []
    if mask is not None:
        terms.append(_added(mask, q).reshape(-1, layer.num_heads if mask.ndim == 3 else 1, q.shape[2], num_keys))
    if padding is not None:
        terms.append(_added(padding, q)[:, None, None, :])
    if not terms:
        return None, False
    return nn.functional.pad(sum(terms[1:], terms[0]), (0, num_positions - num_keys)), False


def _added(mask: Tensor, scores: Tensor) -> Tensor:
    """Turn a boolean mask (true: closed) into an additive one."""
    if mask.dtype != torch.bool:
        return mask.to(scores.dtype)
    return torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(mask, -math.inf)
