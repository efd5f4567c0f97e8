"""How Sphinx makes the site: `make docs`.

The whole repository is the source folder, so that links from `docs/` to `results/` and to CONTRIBUTING.md lead to pages
of the site just as they do on a code host. `PAGES` says which files these are, in the order of the side bar.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, get_origin

from myst_parser.parsers.sphinx_ import MystParser
from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

import divebatch  # noqa: E402

FILES = ["CONTRIBUTING", "CHANGELOG", "SECURITY"]
NOTEBOOK = "examples/first_look"
PAGES = {
    "Start": ["install", f"/{NOTEBOOK}", "when-it-pays"],
    "How to": [
        "own-loops",
        "integrations",
        "learning-rate",
        "noise-meter",
        "advise",
        "distributed",
        "troubleshooting",
    ],
    "Concepts": ["noise-scale"],
    "Reference": [
        "policies",
        "estimators",
        "command-line",
        "experiment-file",
        "report",
        "API <api/divebatch>",
    ],
    "Lab": ["training", "search", "probe"],
    "Results": ["results"],
    "Project": ["/CONTRIBUTING"],
}
BELOW = {
    "docs/estimators": ["norms"],
    "docs/api/divebatch": sorted(f"/docs/api/{each.stem}" for each in ROOT.glob("docs/api/*.md"))[1:],
    "docs/results": [
        f"/results/{each.parent.name}/{each.stem}"
        for each in sorted(
            [
                *ROOT.glob("results/*/README.md"),
                *ROOT.glob("results/*/summary.md"),
            ]
        )
    ],
    "CONTRIBUTING": ["docs/design", "CHANGELOG", "SECURITY"],
}
"""Pages that unfold below another one in the side bar."""
NOT_SEARCHED = (
    "CHANGELOG",
    "SECURITY",
    "CONTRIBUTING",
    "docs/design",
    "results/",
)
"""Pages with every word in them, which would stand before the page that explains it."""
AUTODATA = "\n```{{eval-rst}}\n.. autodata:: {name}\n   :no-value:\n```\n"

project = "divebatch"
author = "The divebatch authors"
copyright = author
release = version = divebatch.__version__
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/api/*.md",
    "results/*/*.md",
    *(f"{name}.md" for name in FILES),
]
include_patterns += [f"{NOTEBOOK}.ipynb"]
source_suffix = {".md": "markdown", ".ipynb": "notebook"}
exclude_patterns = [
    ".*",
    "build",
    "dist",
    "runs",
    "data",
]  # not searched for pages

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
html_search_scorer = str(ROOT / "docs" / "site" / "search.js")
html_copy_source = False
html_show_sourcelink = False


def complete(app: Any, name: str, source: list[str]) -> None:
    """Add what would be noise in the files themselves: the side bar to index.md, constants to the pages of the API."""
    if name == NOTEBOOK:
        source[0] = as_markdown(json.loads(source[0]))
    if name == root_doc:
        source[0] += "".join(toctree(pages, caption) for caption, pages in PAGES.items())
    if name in BELOW:
        source[0] += toctree(BELOW[name])
    if name.endswith("/summary"):
        source[0] = source[0].replace("# Report\n", f"# Tables of {name.split('/')[1]}\n", 1)
    if name.startswith(NOT_SEARCHED):
        source[0] = f"---\nnosearch: true\n---\n{source[0]}"
    for module in re.findall(r"^\.\. automodule:: (\S+)$", source[0], flags=re.MULTILINE):
        source[0] += "".join(AUTODATA.format(name=f"{module}.{constant}") for constant in constants(module))


def toctree(pages: Sequence[str], caption: str = "") -> str:
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["\n```{toctree}", *options, "", *pages, "```\n"])


def as_markdown(notebook: Mapping[str, Any]) -> str:
    """Return the text, the code, and what the code printed and drew."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            if "text" in output:
                parts.append("```text\n{}\n```".format("".join(output["text"]).rstrip()))
            elif (picture := output.get("data", {}).get("image/png")) is not None:
                parts.append(f"![drawn by the code above](data:image/png;base64,{''.join(picture).strip()})")
    return "\n\n".join(parts) + "\n"


class NotebookParser(MystParser):
    """Reads what `as_markdown` makes of a notebook."""

    supported = ("notebook",)


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
    app.add_source_parser(NotebookParser)
    app.connect("source-read", complete)
    app.connect("autodoc-skip-member", leave_out_twins)
    app.connect("autodoc-process-docstring", describe_constant, priority=300)
    app.connect("autodoc-process-docstring", read_as_plain_text, priority=400)  # before napoleon's 500
