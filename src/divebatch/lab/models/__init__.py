"""Models by kind. A new one is one file and one row here."""

from divebatch.lab.models.cnn import Cnn
from divebatch.lab.models.gpt import Gpt, GptTiny
from divebatch.lab.models.lstm import Lstm
from divebatch.lab.models.model import ModelSettings
from divebatch.lab.models.resnet import ResNet18, ResNet18ImageNet, ResNet20
from divebatch.lab.models.synthetic import LinearModel, LogisticRegression, Mlp

MODELS: dict[str, type[ModelSettings]] = {
    "logistic-regression": LogisticRegression,
    "linear": LinearModel,
    "mlp": Mlp,
    "cnn": Cnn,
    "lstm": Lstm,
    "resnet18": ResNet18,
    "resnet18-imagenet": ResNet18ImageNet,
    "resnet20": ResNet20,
    "gpt": Gpt,
    "gpt-tiny": GptTiny,
}

__all__ = ["MODELS", "ModelSettings"]
