"""Write docs/command-line.md and docs/experiment-file.md from the commands and settings themselves.

`python tools/reference.py` writes both anew; a test fails if either is not current.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import typer

from divebatch.cli.app import app
from divebatch.lab.data import DATASETS
from divebatch.lab.models import MODELS
from divebatch.lab.optimizers import OPTIMIZERS
from divebatch.lab.schedules import SCHEDULES
from divebatch.lab.schema import Experiment, Method
from divebatch.lab.step import DeviceOptions
from divebatch.lab.tasks import TASKS
from divebatch.records import Metric, ReportSettings

DOCS = Path(__file__).parents[1] / "docs"

COMMANDS = """# The command line

<!-- Written by tools/reference.py: change the commands, and run it again. -->

`divebatch COMMAND --help` prints the same. The extra `cli` is needed, `report` for figures
([install](install.md)). Every command exits with 0 if all is well, with 1 if a run failed or was stopped, and
with 2 if it was used wrongly.

| command | does |
|---|---|
"""
EXAMPLES = {
    "list": "divebatch list\ndivebatch list synthetic-convex",
    "run": "divebatch run synthetic-convex --trials 2 --epochs 20 --out runs\n"
    "divebatch run cifar10 --data-dir DATA --device cuda \\\n"
    "    --set training.precision=bf16 --set training.compile=true",
    "report": "divebatch report runs --out report",
    "compare": "divebatch compare runs divebatch sgd-small",
    "frontier": "divebatch frontier results/frontier --out frontier",
    "watch": "divebatch watch runs --once",
    "search": "divebatch search synthetic-convex --method divebatch",
    "probe": "divebatch probe cifar10 runs/cifar10/sgd-small/seed-0.ckpt \\\n    --data-dir DATA",
    "advise": "divebatch advise cifar10 --data-dir DATA\ndivebatch advise my_training:parts --batch-size 64",
    "ramp": "divebatch ramp --batch-size 64 --max-batch-size 512 \\\n    --samples 1000000",
    "doctor": "divebatch doctor",
}
COMMON = ("--set", "--data-dir", "--device")
READ_MORE = {
    "run": "[The reference trainer](training.md)",
    "report": "[Reports](report.md#reports)",
    "compare": "[How two methods are compared](report.md#comparing-two-methods)",
    "frontier": "[How it is scored](report.md#scoring-against-fixed-batches)",
    "watch": "[Watching runs](report.md#in-the-terminal)",
    "search": "[Searches](search.md)",
    "probe": "[Probes](probe.md)",
    "advise": "[Advice](advise.md)",
}

EXPERIMENTS = """# The experiment file

<!-- Written by tools/reference.py: change the settings there or in the code, and run it again. -->

`divebatch run FILE.toml` trains what a TOML file describes. `divebatch list` lists the files that come with the
package. `--set KEY=VALUE` overrides any key on the command line: `--set training.precision=bf16`. If a key is missing
or unknown, or its value has the wrong type, an error names the file and the key.

## A complete file

```toml
name = "mine"
summary = "logistic regression: a fixed batch and the paper's method"
paper = "none"
trials = 3
epochs = 40

[data]
kind = "synthetic"
num_samples = 20000
num_features = 512
noise_variance = 0.1
train_fraction = 0.8

[model]
kind = "logistic-regression"

[schedule]
kind = "step"
factor = 0.75
every_epochs = 8

[report]
baselines = ["fixed"]

[methods.fixed]
label = "SGD (128)"
batch_size = 128
lr = 16.0
policy = "fixed"

[methods.divebatch]
label = "DiveBatch"
batch_size = 128
lr = 16.0
lr_coupling = "linear"
policy = { kind = "divebatch", delta = 1.0, max_batch_size = 4096 }
```

Some parts are chosen by name: `data`, `model`, `task`, `optimizer`, `schedule`, `policy` and `estimator`. Write such a
part as a table with `kind` and its settings. If it needs no settings, the bare name is enough.

"""

Words = dict[str, str]
TOP: Words = {
    "name": "name of the experiment, and of its folder",
    "summary": "one line for `divebatch list`",
    "paper": "where the paper has it, or `none`",
    "trials": "number of seeds",
    "epochs": "passes over the data; with `one_pass`, the number of equal parts",
    "data": "[what is trained on](#data)",
    "model": "[the network](#model)",
    "schedule": "[the course of the learning rate](#schedule)",
    "optimizer": "[the optimizer](#optimizer); `sgd` if the table names none",
    "methods": "[the methods](#methods) that are compared, one table each",
    "task": "[loss and scores](#task)",
    "training": "[use of the device](#training)",
    "metric": "[the number that runs are judged by](#metric); the task's own if there is no table",
    "report": "[what the report compares](#report)",
    "one_pass": "a run is one pass over the data",
    "samples": "samples after which a one-pass run ends",
    "seconds": "seconds of training after which a one-pass run ends",
    "repeat": "a one-pass run may go through the data again",
    "clip_norm": "largest norm of the gradient; larger ones are scaled down to it",
    "held_out": "fraction of the training data, drawn by the seed, to evaluate on; 0: the test data",
}
METHOD: Words = {
    "label": "name in tables and figures",
    "batch_size": "the first batch size",
    "lr": "the first learning rate",
    "policy": "a [policy](policies.md#all-policies) by name; its settings are the class's arguments",
    "lr_coupling": "how the learning rate [follows](learning-rate.md); if not given, the policy's own",
    "estimator": "an [estimator](estimators.md) by name; if not given, the policy's own",
    "warmup_epochs": "the learning rate rises linearly over these epochs",
    "every_steps": "also decide within an epoch, every N steps",
    "base_batch_size": "the batch size that `lr` belongs to, if that is not `batch_size`",
    "multiple_of": "round the policy's sizes down to multiples of this",
    "measure_always": "measure every epoch, also those the policy does not ask for",
    "quantize": "round gradients at random to this many levels ([why](../results/inducing/README.md))",
    "shadows": "policies by name that [only watch](policies.md#watching-others)",
}
TRAINING: Words = {
    "precision": '`"fp32"`, `"tf32"` or `"bf16"` (autocast); weights stay in float32',
    "channels_last": "memory format of images",
    "compile": "compile full batches; on a GPU, replay them as CUDA graphs",
    "cuda_graphs": "`false`: compile without CUDA graphs",
    "norms": '`"exact"` or `"sketch"`: how per-sample norms are measured',
    "micro_batch_size": "most samples of one backward pass; larger batches are accumulated",
}
METRIC: Words = {
    "name": '`"val_accuracy"`, `"val_loss"` or `"bits_per_byte"`',
    "better": '`"higher"` or `"lower"`',
}
REPORT: Words = {
    "baselines": "methods that others are compared with; the first gives the common target",
    "order": "order of the rows; if empty, that of the file",
    "chance": "the metric of a model that has learned nothing",
    "figures": "the paper's figures and their methods; `[]` for all methods",
    "customary": "the method with the batch size that one would take without thinking",
}
KINDS: Mapping[str, tuple[str, Mapping[str, type[Any]], Words]] = {
    "data": (
        "Image and text data come from the [data folder](training.md#datasets); other kinds are drawn from the seed.",
        DATASETS,
        {
            "synthetic": "two classes, separable up to noise, as in the paper",
            "linear-spectrum": "linear regression whose features have falling variances",
            "teacher-student": "regression on the outputs of a random network",
            "cifar10": "CIFAR-10, cropped and flipped",
            "cifar100": "CIFAR-100, also rotated",
            "tiny-imagenet": "Tiny-ImageNet at 224 pixels",
            "text": "bytes of text, cut into sequences",
        },
    ),
    "model": (
        "",
        MODELS,
        {
            "logistic-regression": "one linear layer for two classes",
            "linear": "one linear layer for regression",
            "mlp": "linear layers with ReLU",
            "cnn": "a small convolutional network",
            "lstm": "an LSTM for bytes",
            "resnet18": "ResNet-18 for small images",
            "resnet18-imagenet": "ResNet-18 for images of 224 pixels",
            "resnet20": "ResNet-20 for small images",
            "gpt": "a byte-level GPT; `tied = true` ties the last layer to the embedding",
            "gpt-tiny": "the same, small",
        },
    ),
    "task": (
        "",
        TASKS,
        {
            "classification": "cross-entropy; `val_loss` and `val_accuracy`",
            "next-token": "cross-entropy at each position; `val_loss` and `bits_per_byte`",
            "regression": "squared error; `val_loss`",
        },
    ),
    "optimizer": (
        "",
        OPTIMIZERS,
        {"sgd": "`torch.optim.SGD`", "adamw": "`torch.optim.AdamW`; `decay_vectors = false` decays matrices only"},
    ),
    "schedule": (
        "`--epochs` also scales all settings that count epochs.",
        SCHEDULES,
        {
            "constant": "the learning rate stays",
            "step": "times `factor` after every `every_epochs` epochs",
            "cosine": "half a cosine, down to zero after `over_epochs` epochs",
            "milestones": "times `factor` after each of the epochs in `after_epochs`",
            "warmup-cosine": "by samples: up over the first part `warmup` of the run, then half a cosine down to "
            "the part `floor`",
        },
    ),
}
FILLED_IN = {(Experiment, "optimizer"): '`"sgd"`', (Experiment, "task"): '`"classification"`'}
"""Defaults that reading a file fills in."""


# The commands


def command_page() -> str:
    """Return the reference of all commands, from the application that runs them."""
    commands: Mapping[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    rows = [f"| [`{name}`](#{name}) | {in_cell(each.help.partition(chr(10))[0])} |" for name, each in commands.items()]
    texts = [command_text(name, each) for name, each in commands.items()]
    return "\n".join([COMMANDS.rstrip(), *rows, "", common_options(commands), *texts])


def command_text(name: str, command: Any) -> str:
    about = " ".join(command.help.split())
    more = f" {READ_MORE[name]}." if name in READ_MORE else ""
    rows = [option_row(each) for each in command.params if not is_common(each)]
    if common := [f"`{each.opts[0]}`" for each in command.params if is_common(each)]:
        rows.append(f"| {', '.join(common)} | [as everywhere](#options-of-several-commands) |")
    table = "\n".join(["| argument | meaning |", "|---|---|", *rows])
    return f"## {name}\n\n{about}{more}\n\n```sh\n{EXAMPLES[name]}\n```\n\n{table}\n"


def is_common(option: Any) -> bool:
    return option.opts[0] in COMMON


def common_options(commands: Mapping[str, Any]) -> str:
    """Return the table of the options that mean the same in several commands."""
    found = {each.opts[0]: each for command in commands.values() for each in command.params if is_common(each)}
    rows = [option_row(found[name]) for name in COMMON]
    return "\n".join(["## Options of several commands\n", "| option | meaning |", "|---|---|", *rows, ""])


def option_row(option: Any) -> str:
    return f"| {shown_option(option)} | {in_cell(option.help)}{default_of(option)} |"


def shown_option(option: Any) -> str:
    if option.param_type_name == "argument":
        name = option.name.upper() + ("..." if option.nargs == -1 else "")
        return f"`{name}`" if option.required else f"`[{name}]`"
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    return names if option.is_flag else f"{names} `{kind_of(option)}`"


def kind_of(option: Any) -> str:
    words = {"int": "N", "float": "X", "Path": "PATH", "str": "TEXT"}
    return next((shown for kind, shown in words.items() if kind in str(option.type_descriptor.annotation)), "TEXT")


def default_of(option: Any) -> str:
    """Return what holds if the option is left out, where its help does not say so."""
    if option.param_type_name == "argument" or option.is_flag:
        return ""
    parts = ["Required."] if option.required else []
    if option.default is not None:
        parts.append(f"Default: `{option.default}`.")
    if option.envvar:
        parts.append(f"Environment: `{option.envvar}`.")
    return "".join(f" {part}" for part in parts)


def in_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# The experiment file


def experiment_page() -> str:
    """Return the reference of the experiment file, from the dataclasses that check it."""
    parts = [
        EXPERIMENTS,
        "## Top level\n\n" + table_of(Experiment, TOP),
        "## Methods\n\nEach `[methods.NAME]` describes one way of training. Its folder has the same name.\n\n"
        + table_of(Method, METHOD),
        *(f"## {name.capitalize()}\n\n{kinds_of(*each)}" for name, each in KINDS.items()),
        "## Training\n\n" + table_of(DeviceOptions, TRAINING),
        "## Metric\n\n" + table_of(Metric, METRIC),
        "## Report\n\n`[report]` does not affect training; it is copied into each record.\n\n"
        + table_of(ReportSettings, REPORT),
    ]
    return "\n".join(parts)


def table_of(cls: type[Any], words: Words) -> str:
    rows = [
        f"| `{each.name}` | {words[each.name]} | {FILLED_IN.get((cls, each.name)) or shown_default(each)} |"
        for each in fields(cls)
    ]
    require_all(cls.__name__, words, (each.name for each in fields(cls)))
    return "\n".join(["| key | meaning | default |", "|---|---|---|", *rows]) + "\n"


def kinds_of(about: str, kinds: Mapping[str, type[Any]], words: Words) -> str:
    require_all(f"KINDS of tools/reference.py, beside {', '.join(kinds)}", words, kinds)
    rows = [f"| `{kind}` | {words[kind]} | {settings_of(cls)} |" for kind, cls in kinds.items()]
    table = "\n".join(["| `kind` | what | settings |", "|---|---|---|", *rows]) + "\n"
    return f"{about}\n\n{table}" if about else table


def settings_of(cls: type[Any]) -> str:
    own = [each for each in fields(cls) if each.init] if hasattr(cls, "__dataclass_fields__") else []
    return ", ".join(f"`{each.name}{with_default(each)}`" for each in own)


def with_default(entry: Field[Any]) -> str:
    shown = shown_default(entry)
    return f" = {shown.strip('`')}" if shown.startswith("`") else ""


def shown_default(entry: Field[Any]) -> str:
    value = entry.default if entry.default is not MISSING else MISSING
    factory: Callable[[], Any] | Any = entry.default_factory
    if value is MISSING and factory is not MISSING:
        value = factory()
    if value is MISSING:
        return "required"
    return f"`{in_toml(value)}`" if isinstance(value, bool | int | float | str | list) else "none"


def in_toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(in_toml(each) for each in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def require_all(place: str, words: Words, known: Any) -> None:
    """Raise unless the words describe what the code knows, and nothing else."""
    if odd := set(words).symmetric_difference(known):
        raise SystemExit(f"{place}: describe exactly what the code knows; differing: {', '.join(sorted(odd))}")


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each file that this script writes, and its text."""
    for name, text in (("command-line", command_page()), ("experiment-file", experiment_page())):
        yield DOCS / f"{name}.md", re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


if __name__ == "__main__":
    for file, text in pages():
        file.write_text(text)
