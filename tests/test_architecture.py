"""The layering of the package, kept true over the syntax tree."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "divebatch"
BASE = {"errors", "checks", "state_checks"}
CORE = {"lr", "ranks", "measurement", "records", "policies", "norms", "estimators", "data"}
LIBRARY = (
    BASE | CORE | {"student", "step_line", "metric", "controller", "resolve", "recording", "record_line", "measuring"}
)
LIBRARY |= {
    "step_count",
    "size_limit",
    "finished_epoch",
    "control_state",
    "advice",
    "integrations",
    "noise_meter",
    "warming",
}
MAY_IMPORT = {
    "errors": set(),
    "checks": {"errors"},
    "state_checks": {"errors"},
    "student": set(),
    "step_line": set(),
    "metric": BASE,
    "ranks": BASE,
    "measurement": BASE | {"student"},
    "record_line": {"records"},
    "records": BASE | {"record_line", "metric"},
    "policies": BASE | {"measurement", "step_line"},
    "norms": BASE | {"measurement", "ranks"},
    "estimators": BASE | {"norms", "measurement", "ranks"},
    "data": BASE | {"ranks", "norms"},
    "lr": BASE | {"data", "measurement"},
    "resolve": BASE | CORE,
    "recording": BASE | {"measurement", "records"},
    "measuring": BASE | {"data", "estimators", "measurement", "policies"},
    "step_count": BASE | {"measurement", "policies"},
    "size_limit": BASE | {"measurement"},
    "finished_epoch": BASE | {"data"},
    "control_state": BASE | {"data", "measurement", "measuring", "policies", "lr", "size_limit", "step_count"},
    "controller": BASE
    | CORE
    | {"resolve", "recording", "measuring", "step_count", "size_limit", "finished_epoch", "control_state"},
    "noise_meter": BASE | {"estimators", "norms"},
    "integrations": BASE | CORE | {"controller", "resolve", "step_count", "noise_meter"},
    "advice": BASE | CORE | {"step_line"},
    "warming": BASE | {"controller", "data", "measurement", "norms"},
    "research": BASE | {"data", "estimators", "norms", "ranks"},
    "lab.training": LIBRARY,
    "lab.loggers": BASE | {"records"},
    "lab.experiments": LIBRARY | {"research", "lab.training", "lab.loggers"},
    "lab.probe": LIBRARY | {"lab.training", "lab.experiments"},
    "lab.search": LIBRARY | {"lab.training", "lab.experiments"},
    "report": BASE | {"records", "measurement", "student", "step_line"},
    "cli": LIBRARY | {"report", "lab.training", "lab.experiments", "lab.search", "lab.loggers", "lab.probe"},
}
WITHOUT_TORCH = {"errors", "checks", "state_checks", "student", "step_line", "measurement", "policies", "report"}
WITHOUT_TORCH |= {"metric", "records", "record_line", "recording"}


def part_of(names: Sequence[str]) -> str:
    """The part that a module belongs to, from the names of its path: `lab` has parts of its own."""
    return ".".join(names[:2]) if names[0] == "lab" else names[0]


def files() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        part = part_of(path.relative_to(PACKAGE).with_suffix("").parts)
        if part not in ("__init__", "__main__", "lab.__init__"):
            yield part, path


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize(("part", "path"), list(files()), ids=lambda value: getattr(value, "name", value))
def test_a_file_imports_only_what_its_part_may(part: str, path: Path) -> None:
    for module in imports(path):
        if module.startswith("divebatch."):
            target = part_of(module.split(".")[1:])
            assert target in MAY_IMPORT[part] | {part}, f"{path.name} imports {target}"
        elif part in WITHOUT_TORCH:
            assert module.split(".")[0] != "torch", f"{path.name} imports torch"


def test_every_part_has_its_rule() -> None:
    assert {part for part, _ in files()} == set(MAY_IMPORT)


def test_no_file_is_over_400_lines() -> None:
    too_long = {path.name: n for _, path in files() if (n := len(path.read_text().splitlines())) > 400}
    assert not too_long


def test_the_core_needs_torch_and_numpy_alone() -> None:
    blocked = ["typer", "rich", "matplotlib", "PIL"]
    blocked += ["lightning", "pytorch_lightning", "transformers", "accelerate"]
    program = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); from divebatch import *; print(Controller)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip()


def test_the_library_loads_nothing_of_the_laboratory() -> None:
    program = "import sys; from divebatch import *; print(*(name for name in sys.modules if 'divebatch.' in name))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[1] for name in answer.stdout.split()}
    assert loaded
    assert not loaded & {"lab", "report", "cli", "integrations", "research"}


def test_the_library_does_not_load_the_compiler() -> None:
    """It takes a second, and only compiled models need it."""
    program = "import sys; from divebatch import *; print(*(name for name in sys.modules if 'torch.' in name))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = answer.stdout.split()
    assert "torch.nn" in loaded
    assert not [
        name for name in loaded if name.startswith(("torch._dynamo", "torch._inductor", "torch.distributed.fsdp"))
    ]


def test_the_command_line_names_the_extra_it_lacks() -> None:
    program = "import sys; sys.modules['typer'] = None; from divebatch.__main__ import main; main()"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert "pip install 'divebatch[cli]'" in answer.stderr


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["search", "--help"], ["--version"]])
def test_help_does_not_wait_for_torch(words: list[str]) -> None:
    program = (
        "import sys; from divebatch.__main__ import main\n"
        "try: main()\n"
        "finally: print(*(name for name in sys.modules), file=sys.stderr)"
    )
    answer = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in answer.stderr.split()}
    assert "divebatch" in loaded
    assert not loaded & {"torch", "matplotlib", "optuna", "PIL"}


def test_at_most_24_public_names_and_all_exist() -> None:
    import divebatch

    assert len(divebatch.__all__) <= 24
    assert all(hasattr(divebatch, name) for name in divebatch.__all__)


def test_the_gain_of_a_batch_has_one_home() -> None:
    from divebatch import lr, measurement
    from divebatch.policies import goodput

    assert lr.COUPLINGS["adascale"] is vars(goodput)["gain"] is measurement.gain
