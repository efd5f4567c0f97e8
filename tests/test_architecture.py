"""The layering of the package, kept true over the syntax tree."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "divebatch"
OUTSIDE_THE_LIBRARY = {"lab", "report", "cli"}
MAY_NOT_IMPORT = {
    "report": {"lab", "cli"},
    "lab": {"report", "cli"},
    "cli": set(),
    "research": OUTSIDE_THE_LIBRARY | {"integrations"},
    "integrations": OUTSIDE_THE_LIBRARY | {"research"},
}
"""Parts by what they must not import; all others, the core, import none of these parts."""
CORE_MAY_NOT_IMPORT = OUTSIDE_THE_LIBRARY | {"integrations", "research"}
WITHOUT_TORCH = {"report", "policies"}


def files() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if part not in ("__init__", "__main__"):
            yield part, path


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_each_part_imports_only_what_it_may() -> None:
    wrong = []
    for part, path in files():
        forbidden = MAY_NOT_IMPORT.get(part, CORE_MAY_NOT_IMPORT)
        for module in imports(path):
            names = module.split(".")
            if names[0] == "divebatch" and len(names) > 1 and names[1] in forbidden:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {module}")
            if names[0] == "torch" and part in WITHOUT_TORCH:
                wrong.append(f"{path.relative_to(PACKAGE)} imports torch")
    assert not wrong


def test_the_library_needs_torch_and_numpy_alone_and_loads_neither_the_laboratory_nor_the_compiler() -> None:
    """The compiler takes a second, and only compiled models need it."""
    blocked = ["typer", "rich", "matplotlib", "PIL", "lightning", "pytorch_lightning", "transformers", "accelerate"]
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); from divebatch import *; print(*sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = answer.stdout.split()
    assert {"torch.nn", "divebatch.controller"} <= set(loaded)
    outside = tuple(f"divebatch.{part}" for part in CORE_MAY_NOT_IMPORT)
    assert not [name for name in loaded if name.startswith((*outside, "torch._dynamo", "torch._inductor"))]
    assert "torch.distributed.fsdp" not in loaded


def test_the_command_line_names_the_extra_it_lacks() -> None:
    program = "import sys; sys.modules['typer'] = None; from divebatch.__main__ import main; main()"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert "pip install 'divebatch[cli]'" in answer.stderr


def test_help_does_not_wait_for_torch() -> None:
    program = (
        "import sys; from divebatch.__main__ import main\n"
        "try: main()\n"
        "finally: print(*(name for name in sys.modules), file=sys.stderr)"
    )
    answer = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in answer.stderr.split()}
    assert "divebatch" in loaded
    assert not loaded & {"torch", "matplotlib", "optuna", "PIL"}


def test_at_most_24_public_names_and_all_exist() -> None:
    import divebatch

    assert len(divebatch.__all__) <= 24
    assert all(hasattr(divebatch, name) for name in divebatch.__all__)
