"""Layers without a rule, adapters beside frozen layers, and parameters that samples share."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from divebatch import (
    AdaptiveLoader,
    Controller,
    DiveBatch,
    NormMeter,
    micro_batches,
    rule_for,
)
from divebatch.errors import ArgumentError, CoverageError
from divebatch.estimators import PerSample, Trajectory
from divebatch.norms import DiversityMeter, forms, shared_by_samples
from divebatch.norms.registry import RULES
from divebatch.policies import NoiseDoubling
from reference.per_sample import Calls, assert_same_sums, diversity_of, gradients, mean_loss, samples, sq_norms, train

INPUTS, TARGETS = samples(7)


class Pair(nn.Module):
    """A layer of two inputs."""

    def __init__(self, *, by_keyword: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.layer = nn.Linear(4, 3), nn.Linear(4, 2), nn.Bilinear(3, 2, 3)
        self.by_keyword = by_keyword

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.first(x).tanh(), self.second(x)
        return self.layer(first, input2=second) if self.by_keyword else self.layer(first, second)


class Gated(nn.Module):
    """A parameter of its own, and a child that has a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.child = nn.Parameter(torch.linspace(0.5, 2.0, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor, power: int = 1) -> Tensor:
        return self.child(x * self.gate**power).tanh() + self.gate[:3]


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 2.0, 3))

    def forward(self, x: Tensor, /, *more: Tensor | float, **options: float) -> Tensor:
        return options.get("factor", 1.0) * self.gain * (more[0] * x + more[1])[:, :3]


class LowRank(nn.Module):
    """A frozen layer and a small trainable detour around it."""

    def __init__(self, num_inputs: int, num_outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.frozen = nn.Linear(num_inputs, num_outputs).requires_grad_(False)
        self.A, self.B = nn.Linear(num_inputs, rank, bias=False), nn.Linear(rank, num_outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + 0.5 * self.B(self.A(x))


class Listed(nn.Module):
    """Its own parameters are in a container that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gains = nn.Linear(4, 3), nn.ParameterList([torch.ones(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.gains[0]


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 2.0, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.gain, x - self.gain


class MyAttention(nn.MultiheadAttention):
    """No rule: it may compute something else."""


class MyLSTM(nn.LSTM):
    """No rule either."""


class MyEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.layer = MyAttention(4, 2), nn.Linear(4, 4)


CASES = {
    "PReLU with one slope": lambda: nn.Sequential(nn.Linear(4, 3), nn.PReLU()),
    "PReLU with a slope a channel": lambda: nn.Sequential(nn.Linear(4, 3), nn.PReLU(3)),
    "PReLU before other layers": lambda: nn.Sequential(nn.PReLU(4), nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 3)),
    "Bilinear": Pair,
    "Bilinear by keyword": lambda: Pair(by_keyword=True),
    "own parameter and covered child": Gated,
    "own parameter inside a model": lambda: nn.Sequential(nn.Linear(4, 4), Gated(), nn.PReLU()),
    "an argument that is no tensor": lambda: Calls(Gated(), lambda layer, x: layer(x, power=2)),
    "arguments without name": lambda: Calls(Optional(), lambda layer, x: layer(x, 2.0, x.flip(1), factor=3.0)),
    "called twice": lambda: nn.Sequential(Calls(nn.PReLU(4), lambda layer, x: layer(layer(x) - 0.5)), nn.Linear(4, 3)),
}
REFUSED = {
    "attention": (lambda: MyAttention(4, 2), "'in_proj_weight' of MyAttention"),
    "attention inside a layer": (MyEncoder, "'attention.in_proj_weight' of MyAttention"),
    "recurrent": (lambda: MyLSTM(4, 3), "'weight_ih_l0' of MyLSTM"),
}


SLOW_BILINEAR = pytest.mark.filterwarnings("ignore:There is a performance drop .*_trilinear:UserWarning")
EVERY_CASE = [pytest.param(name, marks=SLOW_BILINEAR if "Bilinear" in name else ()) for name in CASES]


def made(make) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


# On request


@pytest.mark.parametrize("chunk_bytes", [1, 16 * 2**20])
@pytest.mark.parametrize("case", EVERY_CASE)
def test_vmap_matches_a_loop_over_samples(case: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forms, "CHUNK_BYTES", chunk_bytes)
    model = made(CASES[case])
    with NormMeter(model, fallback="vmap") as meter:
        mean_loss(model(INPUTS), TARGETS).backward()
    torch.testing.assert_close(meter.per_sample(), sq_norms(model, mean_loss, INPUTS, TARGETS), rtol=1e-10, atol=0)


def test_a_users_forward_hook_that_changes_the_output_is_part_of_the_loss():
    model = made(CASES["PReLU with one slope"])
    model[1].register_forward_hook(lambda layer, inputs, output: 3 * output)
    with NormMeter(model, fallback="vmap") as meter:
        mean_loss(model(INPUTS), TARGETS).backward()
    torch.testing.assert_close(meter.per_sample(), sq_norms(model, mean_loss, INPUTS, TARGETS), rtol=1e-10, atol=0)


# Refused


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (CASES["PReLU with one slope"], r"'1\.weight' of PReLU\."),
        (Pair, r"'layer\.weight' of Bilinear; 'layer\.bias' of Bilinear\."),
        (Gated, r"'gate' of Gated\."),
    ],
)
def test_layers_without_rule_are_named(make, named: str):
    with pytest.raises(CoverageError, match=f"no norm rule covers: {named} .*fallback='vmap'"):
        NormMeter(made(make))


@pytest.mark.parametrize("fallback", [None, "vmap"])
@pytest.mark.parametrize("case", REFUSED)
def test_fused_layers_of_another_type_are_refused_with_and_without_fallback(case: str, fallback: str | None):
    make, named = REFUSED[case]
    with pytest.raises(CoverageError, match="no norm rule covers: ") as raised:
        NormMeter(made(make), fallback=fallback)
    assert named in str(raised.value)


@pytest.mark.parametrize(
    ("make", "named"), [(Listed, "of ParameterList"), (lambda: weight_norm(nn.Linear(4, 3)), "of ParametrizationList")]
)
def test_parameters_that_no_call_with_samples_uses_are_refused(make, named: str):
    with pytest.raises(CoverageError, match=named):
        NormMeter(made(make), fallback="vmap")


def test_a_layer_with_several_outputs_is_refused():
    model = made(lambda: Calls(Halves(), lambda layer, x: torch.mul(*layer(x))[:, :3]))
    with NormMeter(model, fallback="vmap"), pytest.raises(CoverageError, match="Halves"):
        mean_loss(model(INPUTS), TARGETS).backward()


@pytest.mark.parametrize("meter", [NormMeter, DiversityMeter])
def test_an_unknown_fallback_gets_an_error_that_lists_the_known_ones(meter):
    with pytest.raises(ArgumentError, match="unknown fallback 'loop'; known: None, vmap"):
        meter(nn.Linear(4, 3), fallback="loop")


# Adapters


@pytest.mark.parametrize("fallback", [None, "vmap"])
def test_an_adapter_beside_a_frozen_layer_is_exact(fallback: str | None):
    model = made(lambda: nn.Sequential(LowRank(4, 5), nn.Tanh(), LowRank(5, 3)))
    rows = gradients(model, mean_loss, INPUTS, TARGETS)
    with DiversityMeter(model, fallback=fallback) as meter:
        mean_loss(model(INPUTS), TARGETS).backward()
        torch.testing.assert_close(meter.norms.per_sample(), rows.square().sum(1), rtol=1e-10, atol=0)
        assert_same_sums(meter.diversity(), diversity_of(rows))
    assert rows.shape[1] == 2 * (4 + 5) + 2 * (5 + 3)


# Arguments of which the shape does not tell whether they hold samples


class Masked(nn.Module):
    """Mixes the positions of each sample by a weight and a mask that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor, scale: Tensor, mask: Tensor) -> Tensor:
        return (self.weight * mask) @ x * scale[:, None, None]


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.weight * (x - x.mean(0)) * other


def with_mask() -> nn.Module:
    return Calls(Masked(), lambda layer, x: layer(x, x.sum((1, 2)), torch.ones(5, 5, dtype=x.dtype).tril()))


def with_mixing() -> nn.Module:
    return Calls(Mixing(), lambda layer, x: layer(x, x.tanh()))


@pytest.mark.parametrize("num_samples", [4, 6])
def test_a_mask_that_samples_share_has_another_number_of_rows(num_samples: int):
    model, x = with_mask().double(), torch.randn(num_samples, 5, 2, dtype=torch.float64)
    with NormMeter(model, fallback="vmap") as meter:
        mean_loss(model(x), x).backward()
    torch.testing.assert_close(meter.per_sample(), sq_norms(model, mean_loss, x, x), rtol=1e-10, atol=0)


@pytest.mark.parametrize("make", [with_mixing, with_mask])
def test_mixed_samples_and_a_mask_with_a_row_a_sample_are_errors(make):
    model, x = make().double(), torch.randn(5, 5, 3, dtype=torch.float64)
    with NormMeter(model, fallback="vmap"), pytest.raises(CoverageError, match=r"add up .* '\w+\.weight'.*vmap"):
        mean_loss(model(x), x).backward()


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x if x.sum() > 0 else x - self.weight


def test_errors_of_vmap_name_the_layer():
    model, x = nn.Sequential(Deciding()).double(), torch.randn(4, 3, dtype=torch.float64)
    told = r"layer '0' \(Deciding\): fallback='vmap' cannot run it sample by sample: .*estimator='moments'"
    with NormMeter(model, fallback="vmap"), pytest.raises(CoverageError, match=f"(?s){told}"):
        mean_loss(model(x), x).backward()


# Class tokens, learned positions and scales: parameters that a model holds itself


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


@pytest.mark.parametrize("policy", [NoiseDoubling(64), DiveBatch(0.1, 64)], ids=["NoiseDoubling", "DiveBatch"])
def test_measured_policies_take_it(policy: Any) -> None:
    """SGD without momentum: "per-sample" stands in for NoiseDoubling's "moments" as soon as there are rules."""
    torch.manual_seed(0)
    model, data = ViT(), TensorDataset(*batch(32))
    optimizer, loader = SGD(model.parameters(), 0.01), AdaptiveLoader(data, 8, seed=0)
    with Controller(model, optimizer, loader, policy) as control:
        train(model, optimizer, loader, loss_fn=cross_entropy)
        assert control.step().measured
        expected = PerSample if isinstance(policy, NoiseDoubling) else Trajectory
        assert type(control._estimator) is expected


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


def test_one_rule_is_asked_for_if_a_layer_has_a_weight_of_one_row():
    with pytest.raises(CoverageError, match=r"rule_for\(Bilinear, parameters=\('weight', 'bias'\)\)") as refused:
        NormMeter(nn.Bilinear(3, 3, 1))
    assert "shared_by_samples" not in str(refused.value)
