"""The reference of commands and experiment files is what tools/reference.py writes."""

import re
import tomllib

import pytest

from divebatch.lab.schema import parse_experiment
from docs.scripts import ROOT, tool

PAGES = ("command-line", "experiment-file")
DOCS = ROOT / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_current(name: str) -> None:
    (text,) = (text for path, text in tool("reference").pages() if path.stem == name)
    assert (DOCS / f"{name}.md").read_text() == text, "run: python tools/reference.py"


def test_every_command_has_an_example_that_names_it() -> None:
    page = (DOCS / "command-line.md").read_text()
    sections = re.findall(r"^## (\S+)\n.*?```sh\n(.*?)```", page, re.DOTALL | re.MULTILINE)
    assert len(sections) == 11
    assert [name for name, example in sections if not example.startswith(f"divebatch {name}")] == []


def test_the_complete_file_is_an_experiment() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", (DOCS / "experiment-file.md").read_text(), re.DOTALL)
    assert set(parse_experiment(tomllib.loads(block), "the page").methods) == {"fixed", "divebatch"}
