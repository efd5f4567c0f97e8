"""Rules that every page of the documentation keeps, and messages that one of them quotes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.scripts import ROOT

DOCS = ROOT / "docs"
SRC = ROOT / "src" / "divebatch"


def templates(file: Path) -> Iterator[str]:
    """Yield the texts of a source file, with … in the place of what is filled in."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def quoted_messages() -> list[str]:
    """Return the messages in the first column of troubleshooting: code with a blank in it that is no code."""
    rows = re.findall(r"^\| (.*?) \|", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)
    return [each for row in rows for each in re.findall(r"`([^`]+)`", row) if " " in each]


def test_quoted_messages_are_those_of_the_library() -> None:
    known = {template for file in SRC.rglob("*.py") for template in templates(file)}
    filled = re.compile(r"'?…'?(?:=…)?")
    plain = {filled.sub("…", template) for template in known}
    missing = []
    for message in quoted_messages():
        pieces = [piece for piece in re.split(r"['(]*…[')]*", message) if len(piece) > 3]
        pattern = re.compile(".*".join(re.escape(piece) for piece in pieces), re.DOTALL)
        if not any(pattern.search(template) for template in plain):
            missing.append(message)
    assert len(quoted_messages()) > 30
    assert missing == []


PAGES = sorted(DOCS.glob("*.md"))
WIDTH = 80
"""Characters of a line of code that a page of the site shows without scrolling."""
FENCED = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
UNWANTED = ("goes by", "go by", "going by", "in force", "tells", "stands in", "goes on", "so many")
"""What the project writes in other words: is based on, current, reports, replaces, continues, every N."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_needs_no_scrolling(page: Path) -> None:
    """Not of blocks without a language, or of text: the site wraps them."""
    blocks = [code for language, code in FENCED.findall(page.read_text()) if language not in ("", "text")]
    assert [line for code in blocks for line in code.splitlines() if len(line) > WIDTH] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_prose_is_without_unwanted_phrases(page: Path) -> None:
    prose = " ".join(re.sub(r"`[^`\n]*`", "", FENCED.sub("", page.read_text())).split())
    found = re.findall(rf".{{0,30}}\b(?:{'|'.join(UNWANTED)})\b.{{0,30}}", prose, flags=re.IGNORECASE)
    assert found == []
