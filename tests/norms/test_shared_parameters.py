"""Class tokens, learned positions and scales: parameters that a model holds itself."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from divebatch import (
    AdaptiveLoader,
    Auto,
    Controller,
    DiveBatch,
    NormMeter,
    gradient_diversity,
    micro_batches,
    rule_for,
)
from divebatch.errors import ArgumentError, CoverageError
from divebatch.estimators import PerSample, Trajectory
from divebatch.norms import shared_by_samples
from divebatch.norms.registry import RULES
from reference.per_sample import diversity, sq_norms

WIDTH, CLASSES = 8, 5


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(0.1 * torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class ViT(nn.Module):
    """A vision transformer as people write them."""

    def __init__(self, dropout: float = 0.0, checkpoints: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, kernel_size=4, stride=4)
        self.cls_token = nn.Parameter(0.1 * torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(0.1 * torch.randn(1, 5, WIDTH))
        self.drop, self.checkpoints = nn.Dropout(dropout), checkpoints
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=dropout, batch_first=True, norm_first=True)
        self.scale, self.head = LayerScale(), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = self.drop(torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed)
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpoints else self.block(x)
        return self.head(self.scale(x)[:, 0])


class HuggingFaceViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.ViTConfig(
            hidden_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            image_size=8,
            patch_size=4,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.vit = transformers.ViTForImageClassification(config)

    def forward(self, images: Tensor) -> Tensor:
        return self.vit(pixel_values=images).logits


class Encoder(nn.Module):
    """torch's own, with positions that the model adds."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.patches = nn.Linear(48, WIDTH)
        self.pos_embed = nn.Parameter(0.1 * torch.randn(1, 4, WIDTH))
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder(self.patches(images.reshape(len(images), 4, 48)) + self.pos_embed).mean(1))


@pytest.fixture(autouse=True)
def rules() -> Iterator[None]:
    """The lines that the errors ask for; taken out again."""
    before = dict(RULES)
    shared_by_samples(ViT, "cls_token", "pos_embed")
    shared_by_samples(Encoder, "pos_embed")
    rule_for(LayerScale, parameters=("gamma",))(lambda _, x, dy: {"gamma": (x * dy).flatten(1, -2).sum(1)})
    yield
    RULES.clear()
    RULES.update(before)


def batch(size: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 8, 8), torch.randint(0, CLASSES, (size,))


def hugging_face() -> nn.Module:
    model = HuggingFaceViT()
    shared_by_samples(type(model.vit.vit.embeddings), "cls_token", "position_embeddings")
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a ViT": ViT,
    "a ViT in a row": lambda: nn.Sequential(ViT(), nn.LayerNorm(CLASSES)),
    "checkpointed": lambda: ViT(checkpoints=True),
    "torch's encoder": Encoder,
    "Hugging Face": hugging_face,
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_norms_are_those_of_a_loop_over_samples(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, (x, y) = make(), batch()
    expected = sq_norms(model, cross_entropy, x, y)
    with NormMeter(model) as meter:
        cross_entropy(model(x), y).backward()
        torch.testing.assert_close(meter.per_sample().double(), expected, rtol=1e-4, atol=1e-7)
        meter.reset()
        for part, weight in micro_batches((x, y), 4):
            (cross_entropy(model(part[0]), part[1]) * weight).backward()
    assert meter.sum_of_sq_norms() == pytest.approx(float(expected.sum()), rel=1e-4)


def test_training_does_not_notice_that_it_is_measured() -> None:
    torch.manual_seed(0)
    plain, (x, y) = ViT(dropout=0.3), batch()
    measured, found = copy.deepcopy(plain), []
    for model in (plain, measured):
        torch.manual_seed(1)
        if model is measured:
            meter = NormMeter(model)
            meter.attach()
        cross_entropy(model(x), y).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))
    assert "cls_token" not in measured.__dict__
    meter.detach()
    assert measured.cls_token is measured._parameters["cls_token"]


@pytest.mark.parametrize("policy", [Auto(64), DiveBatch(0.1, 64)], ids=["Auto", "DiveBatch"])
def test_measured_policies_take_it(policy: Any) -> None:
    """SGD without momentum: "per-sample" stands in for Auto's "moments" as soon as there are rules."""
    torch.manual_seed(0)
    model, data = ViT(), TensorDataset(*batch(32))
    optimizer, loader = SGD(model.parameters(), 0.01), AdaptiveLoader(data, 8, seed=0)
    with Controller(model, optimizer, loader, policy) as control:
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        assert control.step().measured
        expected = PerSample if isinstance(policy, Auto) else Trajectory
        assert type(control._measuring.estimator) is expected


def test_the_diversity_is_that_of_a_loop_over_samples() -> None:
    torch.manual_seed(0)
    model, (x, y) = ViT(), batch(8)
    expected = diversity(model, cross_entropy, [(x, y)])
    assert gradient_diversity(model, cross_entropy, [(x, y)]).value == pytest.approx(expected.value, rel=1e-4)


def test_a_frozen_token_costs_nothing_and_a_failed_forward_leaves_nothing() -> None:
    model, (x, y) = ViT(), batch()
    model.cls_token.requires_grad_(False)
    expected = sq_norms(model, cross_entropy, x, y)
    with NormMeter(model) as meter:
        with pytest.raises(RuntimeError):
            model(torch.randn(6, 1, 8, 8))
        assert not {"cls_token", "pos_embed"} & model.__dict__.keys()
        cross_entropy(model(x), y).backward()
    torch.testing.assert_close(meter.per_sample().double(), expected, rtol=1e-4, atol=1e-7)


class RowTakenOut(Encoder):
    def forward(self, images: Tensor) -> Tensor:
        return self.head((self.patches(images.reshape(len(images), 4, 48)) + self.pos_embed[0]).mean(1))


class SummedUp(Encoder):
    def forward(self, images: Tensor) -> Tensor:
        return self.head((self.patches(images.reshape(len(images), 4, 48)) + self.pos_embed.mean()).mean(1))


@pytest.mark.parametrize("kind", [RowTakenOut, SummedUp])
def test_what_is_not_broadcast_is_an_error(kind: type[Encoder]) -> None:
    model, (x, y) = kind(), batch()
    model.encoder = nn.Identity()
    shared_by_samples(kind, "pos_embed")
    with (
        NormMeter(model),
        pytest.raises(CoverageError, match="'pos_embed' is not used by broadcasting over the samples"),
    ):
        cross_entropy(model(x), y).backward()


def test_only_a_first_dimension_of_1_can_stand_for_the_batch() -> None:
    RULES.pop(LayerScale)
    shared_by_samples(LayerScale, "gamma")
    with pytest.raises(CoverageError, match=r"'scale\.gamma' has the shape \(8,\)"):
        NormMeter(ViT()).attach()
    with pytest.raises(ArgumentError, match="which parameters of ViT"):
        shared_by_samples(ViT)
    with pytest.raises(ArgumentError, match="ViT already has a rule"):
        shared_by_samples(ViT, "cls_token")


def test_a_compiled_meter_refuses() -> None:
    model = Encoder()
    model.encoder = nn.Identity()
    told = r"compiled meter cannot measure parameters that samples share, as in '\(model"
    with pytest.raises(CoverageError, match=told):
        NormMeter(model, compiled=True)


def test_the_error_says_which_line_to_write() -> None:
    del RULES[ViT], RULES[LayerScale]
    with pytest.raises(CoverageError) as error:
        NormMeter(ViT())
    told = str(error.value)
    assert "'cls_token' of ViT; 'pos_embed' of ViT; 'scale.gamma' of LayerScale" in told
    assert "estimator='moments' or 'split', which need no norm rules" in told
    assert "divebatch.norms.shared_by_samples(ViT, 'cls_token', 'pos_embed')" in told
    assert "@divebatch.rule_for(LayerScale, parameters=('gamma',))" in told
    assert "estimator=Trajectory(fallback='vmap')" in told
