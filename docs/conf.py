"""How Sphinx makes the site: `make docs`.

The whole repository is the source folder, so that links from `docs/` to `results/` and to CONTRIBUTING.md lead to pages
of the site just as they do on a code host. `PAGES` says which files these are, in the order of the side bar.
"""

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, get_origin

from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

import divebatch  # noqa: E402

ALL_NAMES = ROOT / "docs" / "api" / "divebatch.md"
FILES = ["CONTRIBUTING", "CHANGELOG", "SECURITY"]
PAGES = {
    "Begin": ["when-it-pays", "which-learning-rate", "own-loops", "integrations", "migrating"],
    "Library": ["policies", "learning-rate", "estimators", "noise-meter", "norms", "data", "distributed", "advise"],
    "Laboratory": ["training", "language-models", "report", "search", "probe", "logging", "results"],
    "API": ["api/divebatch", *(f"api/{page.stem}" for page in sorted(ROOT.glob("docs/api/*.md")) if page != ALL_NAMES)],
    "Project": ["design", *(f"/{name}" for name in FILES)],
}
RESULTS = [
    f"/results/{page.parent.name}/{page.stem}"
    for page in sorted([*ROOT.glob("results/*/README.md"), *ROOT.glob("results/*/summary.md")])
]
NOT_SEARCHED = ("CHANGELOG", "docs/design", "results/")
"""Pages with every word in them, which would stand before the page that explains it."""
TOCTREE = "\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"
AUTODATA = "\n```{{eval-rst}}\n.. autodata:: {name}\n   :no-value:\n```\n"

project = "divebatch"
author = "The divebatch authors"
copyright = author
release = version = divebatch.__version__
root_doc = "docs/index"
include_patterns = ["docs/*.md", "docs/api/*.md", "results/*/*.md", *(f"{name}.md" for name in FILES)]
exclude_patterns = [".*", "build", "dist", "runs", "data"]  # not searched for pages

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
default_role = "py:obj"  # `code` in docstrings: a link where it names something that is described, else code

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
html_css_files = ["divebatch.css"]
html_favicon = "site/static/favicon.svg"
html_extra_path = ["site/root"]
html_copy_source = False
html_show_sourcelink = False


def complete(app: Any, name: str, source: list[str]) -> None:
    """Add what would be noise in the files themselves: the side bar to index.md, constants to the pages of the API."""
    if name == root_doc:
        source[0] += "".join(TOCTREE.format(caption=each, pages="\n".join(pages)) for each, pages in PAGES.items())
    if name == "docs/results":
        source[0] += TOCTREE.format(caption="Records", pages="\n".join(RESULTS))
    if name.endswith("/summary"):
        source[0] = source[0].replace("# Report\n", f"# Tables of {name.split('/')[1]}\n", 1)
    if name.startswith(NOT_SEARCHED):
        source[0] = f"---\nnosearch: true\n---\n{source[0]}"
    for module in re.findall(r"^\.\. automodule:: (\S+)$", source[0], flags=re.MULTILINE):
        source[0] += "".join(AUTODATA.format(name=f"{module}.{constant}") for constant in constants(module))


def constants(module: str) -> list[str]:
    """Public names, neither classes nor functions, that are defined elsewhere: Sphinx finds only a module's own."""
    part = import_module(module)
    own = ModuleAnalyzer.for_module(module).find_attr_docs()
    names = [name for name in getattr(part, "__all__", ()) if ("", name) not in own]
    return [name for name in names if not callable(getattr(part, name)) or is_alias(part, name)]


def is_alias(part: object, name: str) -> bool:
    """Whether it is a type such as Literal["a", "b"], which can be called but is no class."""
    return get_origin(getattr(part, name)) is not None


def leave_out_twins(app: Any, what: str, name: str, obj: object, skip: bool, options: Any) -> bool | None:
    """What `divebatch` itself exports is described there, and not again in the part it comes from."""
    is_twin = app.env.current_document.autodoc_module != "divebatch" and name in divebatch.__all__
    return True if is_twin else None


def describe_constant(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Sphinx looks for the text below a constant where it is exported; ours stands where it is defined."""
    if what == "data":
        part, _, constant = name.rpartition(".")
        modules = [module for module in sys.modules if module.startswith(f"{part}.")]
        texts = [ModuleAnalyzer.for_module(module).find_attr_docs().get(("", constant)) for module in modules]
        lines[:] = next(filter(None, texts), [])


def read_as_plain_text(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text, where `*` is a product and an indented block is code."""
    for number, line in enumerate(lines):
        blank, block = (*lines[number + 1 : number + 3], "", "")[:2]
        if line.endswith(":") and not blank and block.startswith("    "):
            line += ":"
        lines[number] = re.sub(r"(`[^`]*`)|([*|])", lambda found: found[1] or "\\" + found[2], line)


def setup(app: Any) -> None:
    app.connect("source-read", complete)
    app.connect("autodoc-skip-member", leave_out_twins)
    app.connect("autodoc-process-docstring", describe_constant, priority=300)
    app.connect("autodoc-process-docstring", read_as_plain_text, priority=400)  # before napoleon's 500
