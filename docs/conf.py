"""How Sphinx makes the site: `make docs`.

The whole repository is the source folder, so that links from `docs/` to `results/` and to CONTRIBUTING.md lead to pages
of the site just as they do on a code host. `PAGES` says which files those are, and in which order the side bar has them.
"""

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

import divebatch  # noqa: E402

PAGES = {
    "Begin": ["own-loops", "integrations"],
    "Library": ["policies", "learning-rate", "estimators", "norms", "data", "distributed", "advise"],
    "Laboratory": ["training", "language-models", "report", "search", "probe", "logging"],
    "Measured": ["benchmarks", "reproduction", "reproduction-cifar10", "reproduction-tiny-imagenet"],
    "API": [f"api/{page.stem}" for page in sorted((ROOT / "docs" / "api").glob("*.md"))],
    "Project": ["design", "/CONTRIBUTING", "/CHANGELOG", "/SECURITY"],
    "Records": [f"/results/{page.parent.name}/summary" for page in sorted(ROOT.glob("results/*/summary.md"))],
}
TOCTREE = "\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"

project = "divebatch"
author = "The divebatch authors"
copyright = author
release = version = divebatch.__version__
root_doc = "docs/index"
include_patterns = ["docs/*.md", "docs/api/*.md", "results/*/summary.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
exclude_patterns = [".*", "build", "dist", "runs", "data"]  # not searched for pages

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
nitpicky = True  # a type that is nowhere described is a warning, and warnings are errors
nitpick_ignore_regex = [
    ("py:obj", ".*"),  # `code` in docstrings: a link where it names something public, else code
    ("py:.*", r"(?!divebatch\.).*"),  # types of torch and of Python: links to them would need their sites
]
default_role = "py:obj"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"divebatch {release}"
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_extra_path = ["site/root"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"source_repository": ""}


def add_navigation(app: Any, name: str, source: list[str]) -> None:
    """The side bar's pages, told here: as a directive in index.md they would be noise on a code host."""
    if name == root_doc:
        source[0] += "".join(TOCTREE.format(caption=each, pages="\n".join(pages)) for each, pages in PAGES.items())


def skip_described_above(app: Any, what: str, name: str, obj: object, skip: bool, options: Any) -> bool | None:
    """What `divebatch` itself exports is described there, and not again in the part it comes from."""
    module = app.env.temp_data.get("autodoc:module")
    return True if module not in (None, "divebatch") and name in divebatch.__all__ else None


def read_as_plain_text(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text, where `*` is a product and an indented block is code."""
    for number, line in enumerate(lines):
        blank, block = (*lines[number + 1 : number + 3], "", "")[:2]
        if line.endswith(":") and not blank and block.startswith("    "):
            line += ":"
        lines[number] = re.sub(r"(`[^`]*`)|([*|])", lambda found: found[1] or "\\" + found[2], line)


def setup(app: Any) -> None:
    app.connect("source-read", add_navigation)
    app.connect("autodoc-skip-member", skip_described_above)
    app.connect("autodoc-process-docstring", read_as_plain_text, priority=400)  # before napoleon's 500
