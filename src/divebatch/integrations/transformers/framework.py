"""The names of Hugging Face Transformers that the adapter builds on, and which releases it was written for."""

from importlib import import_module
from typing import Any

from divebatch.integrations.versions import Requirement

# Before 5.5.4 the Trainer and Accelerate both divide some losses by the number of passes.
REQUIREMENT = Requirement(["transformers"], extra="transformers", oldest="5.5.4", too_new="5.24")
REQUIREMENT.installed()

Trainer: Any = import_module("transformers").Trainer
TrainerCallback: Any = import_module("transformers").TrainerCallback
LabelSmoother: Any = import_module("transformers.trainer_pt_utils").LabelSmoother
Conv1D: Any = import_module("transformers.pytorch_utils").Conv1D
# Below "transformers", whose verbosity decides what is shown.
logger: Any = import_module("transformers.utils.logging").get_logger("transformers.divebatch")
