"""Models by kind. A new one is one file and one row here."""

from divebatch.lab.experiments.models.cnn import Cnn
from divebatch.lab.experiments.models.gpt import Gpt, GptTiny
from divebatch.lab.experiments.models.lstm import Lstm
from divebatch.lab.experiments.models.model import ModelSettings
from divebatch.lab.experiments.models.resnet import ResNet18, ResNet18ImageNet, ResNet20
from divebatch.lab.experiments.models.resnet9 import ResNet9
from divebatch.lab.experiments.models.synthetic import LinearModel, LogisticRegression, Mlp

MODELS: dict[str, type[ModelSettings]] = {
    "logistic-regression": LogisticRegression,
    "linear": LinearModel,
    "mlp": Mlp,
    "cnn": Cnn,
    "lstm": Lstm,
    "resnet18": ResNet18,
    "resnet18-imagenet": ResNet18ImageNet,
    "resnet20": ResNet20,
    "resnet9": ResNet9,
    "gpt": Gpt,
    "gpt-tiny": GptTiny,
}

__all__ = ["MODELS", "ModelSettings"]
