"""The report package stands on records and errors alone, and takes matplotlib only where it draws."""

import ast
from collections.abc import Iterator
from pathlib import Path

import divebatch.report

FILES = sorted(Path(divebatch.report.__file__).parent.glob("*.py"))
OURS = {"divebatch.records", "divebatch.errors"}


def imported(nodes: Iterator[ast.AST] | list[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(node.module or "")
    return names


def test_no_file_imports_torch_or_another_part_of_the_package() -> None:
    assert len(FILES) > 5
    for file in FILES:
        for name in imported(ast.walk(ast.parse(file.read_text(encoding="utf-8")))):
            assert name.split(".")[0] not in {"torch", "pandas"}, file.name
            if name.split(".")[0] == "divebatch":
                assert name in OURS or name.startswith("divebatch.report"), f"{file.name} imports {name}"


def test_matplotlib_is_not_imported_with_the_module() -> None:
    for file in FILES:
        at_once = imported(ast.parse(file.read_text(encoding="utf-8")).body)
        assert not any(name.split(".")[0] == "matplotlib" for name in at_once), file.name
