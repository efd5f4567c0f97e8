"""Models: their sizes, their shapes, and what they must not see."""

import math

import pytest
import torch
from torch.nn.functional import gelu, layer_norm

from divebatch import gradient_diversity
from divebatch.errors import ArgumentError
from divebatch.lab import get_experiment
from divebatch.lab.models import MODELS
from divebatch.lab.tasks import TASKS
from reference.per_sample import diversity as diversity_by_loop


@pytest.mark.parametrize(
    ("kind", "num_classes", "count"),
    [
        ("logistic-regression", 1, 513),
        ("mlp", 1, 515),
        ("resnet18", 10, 11_173_962),
        ("resnet18", 100, 11_220_132),
        ("resnet18-imagenet", 1000, 11_689_512),
        ("resnet18-imagenet", 200, 11_279_112),
        ("resnet20", 10, 272_474),
    ],
)
def test_parameter_counts(kind, num_classes, count):
    model = MODELS[kind]().build(512, num_classes)
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize(("kind", "size"), [("resnet18", 32), ("resnet18-imagenet", 64), ("resnet20", 32)])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_networks_give_one_score_a_class(kind, size, norm):
    assert MODELS[kind](norm=norm).build(0, 7)(torch.randn(2, 3, size, size)).shape == (2, 7)


def test_unknown_norm():
    with pytest.raises(ArgumentError, match="unknown norm 'layer'; known: batch, group"):
        MODELS["resnet20"](norm="layer")


def tiny(**settings):
    torch.manual_seed(0)
    return MODELS["gpt-tiny"](**settings).build(0, 256)


def test_sizes_are_those_of_the_design():
    with torch.device("meta"):
        count = sum(each.numel() for each in MODELS["gpt"]().build(0, 256).parameters())
    assert count == 8 * (12 * 512**2 + 4 * 512) + (256 + 256 + 512) * 512 + 2 * 512
    assert MODELS["gpt"]().sequence_length == 512
    assert MODELS["gpt-tiny"]().sequence_length == 64
    assert sum(each.numel() for each in tiny().parameters()) < 150_000


def test_the_larger_language_model_has_the_size_that_its_file_says():
    settings = get_experiment("lm-124m").model.settings
    with torch.device("meta"):
        count = sum(each.numel() for each in MODELS["gpt"](**settings).build(0, 256).parameters())
    assert count == 12 * (12 * 896**2 + 4 * 896) + (256 + 256 + 512) * 896 + 2 * 896
    assert 116e6 < count < 117e6


def test_scores_do_not_depend_on_what_comes_after():
    model, tokens = tiny(), torch.randint(256, (2, 20))
    later = tokens.clone()
    later[:, 12:] = (later[:, 12:] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(later)
    assert before.shape == (2, 20, 256)
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


def slowly(model, tokens):
    """One sample, position by position and head by head."""
    x = torch.stack([model.tokens.weight[token] + model.positions.weight[t] for t, token in enumerate(tokens)])
    for block in model.blocks:
        heads, width = block.attention.heads, x.shape[1]
        norm, mixed = block.before_attention, torch.zeros_like(x)
        q, k, v = (layer_norm(x, (width,), norm.weight, norm.bias) @ block.attention.all_three.weight.T).chunk(3, 1)
        size = width // heads
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            for t in range(len(tokens)):
                scores = torch.stack([q[t, part] @ k[s, part] / math.sqrt(size) for s in range(t + 1)])
                mixed[t, part] = scores.softmax(0) @ v[: t + 1, part]
        x = x + mixed @ block.attention.out.weight.T
        norm = block.before_network
        hidden = gelu(layer_norm(x, (width,), norm.weight, norm.bias) @ block.up.weight.T)
        x = x + hidden @ block.down.weight.T
    return layer_norm(x, (x.shape[1],), model.last_norm.weight, model.last_norm.bias) @ model.head.weight.T


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_it_is_what_a_loop_over_positions_gives(tied):
    model, tokens = tiny(tied=tied), torch.randint(256, (2, 9))
    for sample in range(2):
        torch.testing.assert_close(model(tokens)[sample], slowly(model, tokens[sample].tolist()), rtol=1e-4, atol=1e-5)


def test_a_tied_head_is_one_parameter_less():
    assert len(list(tiny().parameters())) == len(list(tiny(tied=True).parameters())) + 1
    assert tiny(tied=True).head.weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("tied", [False, True])
def test_per_sample_norms_cover_every_parameter(tied):
    model = tiny(tied=tied)
    batch = torch.randint(256, (3, 16)), torch.randint(256, (3, 16))
    loss_fn = TASKS["next-token"].loss_fn
    found = gradient_diversity(model, loss_fn, [batch])
    assert found.value == pytest.approx(diversity_by_loop(model, loss_fn, [batch]).value, rel=1e-4)


def test_it_learns_a_repeated_text():
    model, text = tiny(), torch.tensor([list(b"abcabcabc" * 4)] * 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        loss = TASKS["next-token"].loss_fn(model(text[:, :-1]), text[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_wrong_settings_are_an_error():
    with pytest.raises(ArgumentError, match=r"heads must divide width=64, got heads=3"):
        MODELS["gpt-tiny"](heads=3)
    with pytest.raises(ArgumentError, match=r"layers must be an integer of at least 1"):
        MODELS["gpt"](layers=0)
