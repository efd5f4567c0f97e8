"""Links of the documentation lead to a file of the repository and, where they name one, to a heading of it."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("results/*/*.md"),
    *ROOT.glob("examples/*.py"),
]
CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]*`", flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[str]:
    """The targets that lie in this repository."""
    found = re.findall(r"\]\(([^()\s]+)\)", CODE.sub("", page.read_text()))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """What a code host calls the headings of a page: repeated ones get a number."""
    headings = re.findall(r"^#+ +(.*?) *$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.M), re.M)
    seen: Counter[str] = Counter()
    names = set()
    for heading in headings:
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        names.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return names


def problem(page: Path, target: str) -> str | None:
    path, _, anchor = target.partition("#")
    file = (page.parent / path) if path else page
    if not file.exists():
        return f"{target}: no such file"
    if anchor and anchor not in anchors(file):
        return f"{target}: no such heading; there are {sorted(anchors(file))}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not [told for target in links(page) if (told := problem(page, target))]


def test_what_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n## Two, three\n## One\n[a](#one-1) [b](#two-three) [c](#four) [d](other.md) `[e](f.md)`\n")
    assert links(page) == ["#one-1", "#two-three", "#four", "other.md"]
    assert [target for target in links(page) if problem(page, target)] == ["#four", "other.md"]


@pytest.mark.parametrize("page", [page.stem for page in ROOT.glob("docs/*.md") if page.stem != "index"])
def test_every_page_is_in_the_side_bar(page: str) -> None:
    shown = (ROOT / "docs" / "conf.py").read_text()
    assert re.search(rf"[\"/]{page}\"", shown), "add it to PAGES, or to BELOW, in docs/conf.py"
