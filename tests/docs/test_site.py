"""The site as `make docs` builds it, and in a browser. Skipped where Sphinx or Chromium is not installed."""

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from chromium import Browser, find_chromium, open_browser
from docs.scripts import ROOT

for tool in ("sphinx", "myst_parser", "furo"):
    pytest.importorskip(tool)

PARTS = ("", ".policies", ".estimators", ".norms", ".data", ".advice", ".research", ".report", ".lab.probe")
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
PHONE = 390


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = ["--fail-on-warning", "--keep-going", "--quiet", "-c", "docs", "-d", str(folder / "doctrees"), "."]
    command = [sys.executable, "-m", "sphinx", *words, str(folder / "html")]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return folder / "html"


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    """The address of a server on this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            """Nothing."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # a page asks for dozens of files at once, and 5 may wait by default

    with Server(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if find_chromium() is None:
        pytest.skip("no Chromium on this machine")
    with open_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """Light and wide; whatever a page complains about, also a request to another host, fails the test."""
    chromium.complaints.clear()
    chromium.resize(1200, 900)
    chromium.prefer("light")
    yield chromium
    assert chromium.complaints == []


def test_every_public_name_is_described(site: Path) -> None:
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    described = {name for kind, names in inventory.items() if kind.startswith("py:") for name in names}
    modules = [f"divebatch{part}" for part in PARTS]
    public = [(module, name) for module in modules for name in getattr(importlib.import_module(module), "__all__", ())]
    assert len(public) > 70
    assert [each for each in public if not described & {".".join(each), f"divebatch.{each[1]}"}] == []


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loading = re.compile(r"""<(?:script|img|iframe|link)[^>]+(?:src|href)=["'](?:https?:)?//[^"']*""")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    assert [found for page in pages for found in loading.findall(page.read_text())] == []


def test_the_first_page_leads_to_the_landing_page(site: Path, browser: Browser) -> None:
    browser.open(site / "index.html")
    browser.wait_for("location.pathname.endsWith('docs/index.html') && document.readyState === 'complete'")
    assert browser.evaluate("document.querySelector('h1').textContent").startswith("divebatch")
    assert browser.evaluate("[...document.images].every(image => image.naturalWidth > 0)")


def test_a_search_finds_pages_and_names(served: str, browser: Browser) -> None:
    """Through a server: from a disk the browser shows what was found without the lines around it."""
    browser.send("Page.navigate", url=f"{served}/docs/index.html")
    browser.wait_for("document.readyState === 'complete' && document.forms.length > 0")
    browser.evaluate("document.querySelector('input[name=q]').value = 'noise scale'; document.forms[0].submit()")
    browser.wait_for("document.querySelector('p.search-summary')?.textContent.includes('found')")
    browser.wait_for("document.querySelectorAll('ul.search p.context').length > 5")
    found = browser.evaluate("[...document.querySelectorAll('ul.search a')].map(link => link.href)")
    assert any("docs/estimators.html" in address for address in found)
    assert any("divebatch.policies.NoiseScale" in address for address in found)
    browser.complaints[:] = [told for told in browser.complaints if not told.startswith(f"request: {served}/")]


def test_types_lead_to_their_description(site: Path, browser: Browser) -> None:
    browser.open(site / "docs" / "api" / "divebatch.html")
    link = """document.querySelector("[id='divebatch.Controller'] + dd a[href$='#divebatch.Policy']")"""
    browser.evaluate(f"{link}.click()")
    browser.wait_for("decodeURI(location.hash) === '#divebatch.Policy'")
    assert browser.evaluate("document.querySelector(':target').id") == "divebatch.Policy"


@pytest.mark.parametrize(
    "page", ["docs/index", "docs/install", "docs/troubleshooting", "docs/policies", "docs/api/divebatch"]
)
def test_pages_fit_a_phone(site: Path, browser: Browser, page: str) -> None:
    browser.resize(PHONE, 800, phone=True)
    browser.open(site / "docs" / f"{page}.html")
    assert browser.evaluate("document.documentElement.scrollWidth") == PHONE


def test_a_dark_screen_gets_a_dark_page(site: Path, browser: Browser) -> None:
    browser.open(site / "docs" / "index.html")
    light = browser.evaluate(BACKGROUND)
    browser.prefer("dark")
    browser.wait_for(f"{BACKGROUND} !== '{light}'")
    shades = [int(shade) for shade in re.findall(r"\d+", browser.evaluate(BACKGROUND))]
    assert max(shades[:3]) < 64


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("install", "docs/install.html"),
        ("learning rate", "docs/learning-rate.html"),
        ("BatchNorm", "docs/estimators.html"),
        ("quickstart", "docs/install.html"),
    ],
)
def test_the_page_that_answers_is_found_first(served: str, browser: Browser, words: str, page: str) -> None:
    browser.send("Page.navigate", url=f"{served}/search.html?q={words.replace(' ', '+')}")
    browser.wait_for("document.querySelector('p.search-summary')?.textContent.includes('found')")
    assert browser.evaluate("document.querySelector('ul.search a').href").split("?")[0].endswith(page)
    browser.complaints[:] = [told for told in browser.complaints if not told.startswith(f"request: {served}/")]
