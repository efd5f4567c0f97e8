"""Models, optimizers, schedules and tasks."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, gelu, layer_norm

from divebatch import gradient_diversity
from divebatch.errors import ArgumentError
from divebatch.lab import Run, check_parts, evaluate, get_experiment, make_trainer
from divebatch.lab.models import MODELS
from divebatch.lab.optimizers import AdamW
from divebatch.lab.schedules import SCHEDULES
from divebatch.lab.schema import Method, Part
from divebatch.lab.tasks import TASKS
from lab.helpers import shrunk, small
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


@pytest.mark.parametrize("tied", [False, True])
def test_per_sample_norms_cover_every_parameter(tied):
    model = tiny(tied=tied)
    batch = torch.randint(256, (3, 16)), torch.randint(256, (3, 16))
    loss_fn = TASKS["next-token"].loss_fn
    found = gradient_diversity(model, loss_fn, [batch])
    assert found.value == pytest.approx(diversity_by_loop(model, loss_fn, [batch]).value, rel=1e-4)


def test_wrong_settings_are_an_error():
    with pytest.raises(ArgumentError, match=r"heads must divide width=64, got heads=3"):
        MODELS["gpt-tiny"](heads=3)


def test_adamw_decays_matrices_alone_where_it_is_told():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = AdamW(beta2=0.95, weight_decay=0.1, decay_vectors=False).build(model, 1e-3)
    matrices, vectors = optimizer.param_groups
    assert [each.ndim for each in matrices["params"]] == [2]
    assert [each.ndim for each in vectors["params"]] == [1, 1, 1]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert all(group["betas"] == (0.9, 0.95) and group["lr"] == 1e-3 for group in optimizer.param_groups)
    (alone,) = AdamW().build(model, 1e-3).param_groups
    assert len(alone["params"]) == 4


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("adamw", {"beta1": 1.0}, "beta1: must be less than 1, got 1.0"),
        ("adamw", {"eps": 0.0}, "eps: must be greater than 0"),
        ("adamw", {"momentum": 0.9}, "unknown key 'momentum'; known: beta1, beta2"),
        ("sgd", {"dampening": 0.1}, "unknown key 'dampening'; known: momentum, weight_decay"),
        ("sgd", {"nesterov": True}, "nesterov=True needs a momentum above 0"),
        ("sgd", {"weight_decay": -1.0}, "weight_decay: must be greater than or equal to 0"),
        ("lion", {}, "unknown optimizer kind 'lion'; known: sgd, adamw"),
    ],
)
def test_wrong_settings_are_refused_before_any_work(kind, settings, message):
    experiment = replace(get_experiment("synthetic-convex"), optimizer=Part(kind=kind, settings=settings))
    with pytest.raises(ArgumentError, match=message):
        check_parts(experiment)


@pytest.mark.filterwarnings("ignore:epoch . has ended, no step")
def test_an_experiment_lets_adams_settings_follow(tmp_path):
    grows = Part(kind="adabatch", settings={"max_batch_size": 32, "every_epochs": 1})
    method = Method(label="it", batch_size=8, lr=0.1, lr_coupling="adam", policy=grows)
    optimizer = Part(kind="adamw", settings={"beta2": 0.95, "decay_vectors": False})
    parts = {"methods": {"it": method}, "schedule": Part(kind="constant"), "optimizer": optimizer}
    experiment = replace(shrunk("synthetic-convex", 4, 64, 4), **parts)
    trainer = make_trainer(Run(experiment, "it", 0, tmp_path))
    list(trainer.control.loader), trainer.control.step()
    used: list[dict[str, Any]] = []
    trainer.optimizer.register_step_pre_hook(lambda o, *_: used.extend(map(dict, o.param_groups)))
    trainer.optimizer.step()
    for group in used:
        assert (group["lr"], group["betas"]) == (pytest.approx(0.1 * 2**0.5), (0.9**2, 0.9025))
    assert [group["weight_decay"] for group in used] == pytest.approx([0.01 * 2**0.5, 0.0])


def test_adams_coupling_with_another_optimizer_is_refused_before_any_work():
    policy = Part(kind="auto", settings={"max_batch_size": 32})
    method = Method(label="it", batch_size=8, lr=0.1, lr_coupling="adam", policy=policy)
    experiment = replace(get_experiment("synthetic-convex"), methods={"it": method})
    with pytest.raises(ArgumentError, match=r"\[methods.it\] has lr_coupling='adam'.*this one is 'sgd'"):
        check_parts(experiment)


def test_a_warm_up_leads_to_the_rate_and_a_cosine_to_the_floor():
    course = SCHEDULES["warmup-cosine"](warmup=0.1, floor=0.2).course
    assert [course(x) for x in (0.0, 0.05, 0.1, 0.55, 1.0)] == pytest.approx([0.0, 0.5, 1.0, 0.6, 0.2])
    assert course(0.325) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert SCHEDULES["warmup-cosine"](warmup=0.0).course(0.0) == 1.0


@pytest.mark.parametrize("batch_size", [3, 7, 32])
def test_an_experiment_of_epochs_ends_at_the_floor_whatever_the_size(tmp_path, batch_size):
    experiment = small()
    method = replace(experiment.method("sgd-small"), batch_size=batch_size, lr=0.5)
    schedule = Part(kind="warmup-cosine", settings={"warmup": 0.1, "floor": 0.25})
    planned = replace(experiment, schedule=schedule, methods={"it": method})
    trainer = make_trainer(Run(planned, "it", 0, tmp_path))
    rates, places = [], []
    loader = trainer.control.loader
    trainer.optimizer.register_step_pre_hook(lambda *_: rates.append(trainer.optimizer.param_groups[0]["lr"]))
    trainer.optimizer.register_step_pre_hook(lambda *_: places.append(loader.samples_delivered))
    for _ in range(planned.epochs):
        trainer.run_epoch()
    course, total = SCHEDULES["warmup-cosine"](warmup=0.1, floor=0.25).course, planned.epochs * len(loader.dataset)
    assert rates[-1] == pytest.approx(0.25 * 0.5)
    # A step that is shorter than the batch size, at an epoch's end, has the rate of a whole one.
    whole = [(r, p) for r, p, before in zip(rates, places, [0, *places], strict=False) if p - before == batch_size]
    assert len(whole) > 3
    assert [rate for rate, _ in whole] == pytest.approx([0.5 * course(place / total) for _, place in whole])


def test_a_step_twice_at_one_place_changes_nothing_and_the_state_is_plain():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    place = [0.01]
    scheduler = SCHEDULES["warmup-cosine"]().build(optimizer, lambda: place[0])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.0)
    place[0] = 1.0
    optimizer.step()
    for _ in range(3):
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
    assert all(isinstance(value, int | float | list | bool | None) for value in scheduler.state_dict().values())


def test_warm_ups_by_epochs_are_not_for_a_single_pass():
    experiment = get_experiment("lm-bytes")
    methods = {"it": replace(experiment.method("fixed-8"), warmup_epochs=2)}
    with pytest.raises(ArgumentError, match=r"method it has warmup_epochs, and lm-bytes is one pass: set the schedule"):
        replace(experiment, methods=methods)


CLASSIFICATION, NEXT_TOKEN = TASKS["classification"](), TASKS["next-token"]()


def test_evaluation_counts_samples_not_batches_and_puts_the_mode_back():
    model = nn.Identity()
    batches = [(torch.tensor([[2.0], [-1.0], [3.0]]), torch.tensor([[1.0], [1.0], [1.0]]))]
    batches.append((torch.tensor([[-4.0]]), torch.tensor([[0.0]])))
    seen = evaluate(model, batches, CLASSIFICATION)
    assert seen.accuracy == 0.75
    assert seen.bits_per_byte is None
    together = [torch.cat(parts) for parts in zip(*batches, strict=True)]
    assert seen.loss == pytest.approx(binary_cross_entropy_with_logits(*together).item())
    assert model.training


def test_of_a_text_every_byte_counts_alike_and_there_is_no_accuracy():
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(samples, length, 256, generator=generator), torch.randint(256, (samples, length)))
        for samples, length in ((3, 5), (1, 2))
    ]
    seen = evaluate(nn.Identity(), batches, NEXT_TOKEN)
    losses = [
        -scores[i, t].log_softmax(0)[targets[i, t]].item()
        for scores, targets in batches
        for i in range(targets.shape[0])
        for t in range(targets.shape[1])
    ]
    assert len(losses) == 17
    assert seen.loss == pytest.approx(sum(losses) / 17, rel=1e-6)
    assert seen.bits_per_byte == pytest.approx(sum(losses) / 17 / math.log(2), rel=1e-6)
    assert seen.accuracy is None


@pytest.mark.parametrize(("task", "scores"), [(CLASSIFICATION, (2, 3, 5)), (NEXT_TOKEN, (2, 4, 3))])
def test_outputs_of_another_shape_are_an_error(task, scores):
    """Token targets once gave an accuracy of 5.0."""
    outputs, targets = torch.zeros(scores), torch.zeros(2, 5, dtype=torch.long)
    with pytest.raises(ArgumentError, match=r"outputs of shape .* do not fit targets of shape \(2, 5\)"):
        evaluate(nn.Identity(), [(outputs, targets)], task)
