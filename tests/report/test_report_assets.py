"""What is ours to ship and what is others': the plotting library, unchanged, with its licence."""

import hashlib
from importlib.resources import files

import pytest

ASSETS = files("divebatch.report").joinpath("assets")
UPLOT_VERSION = "1.6.32"
PUBLISHED = {
    # From https://registry.npmjs.org/uplot/-/uplot-1.6.32.tgz (MIT): dist/ and LICENSE.
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_uplot_is_as_it_was_published(name: str) -> None:
    assert hashlib.sha256(ASSETS.joinpath(name).read_bytes()).hexdigest() == PUBLISHED[name]


def test_the_page_names_the_librarys_version_and_home() -> None:
    assert f"https://github.com/leeoniya/uPlot (v{UPLOT_VERSION})" in ASSETS.joinpath("uPlot.iife.min.js").read_text()


@pytest.mark.parametrize("name", ["page.js", "page.css"])
def test_our_own_assets_are_short_and_end_no_element(name: str) -> None:
    text = ASSETS.joinpath(name).read_text(encoding="utf-8")
    assert len(text.splitlines()) < 400
    assert "</s" not in text


def test_text_from_records_is_never_set_as_html() -> None:
    text = ASSETS.joinpath("page.js").read_text(encoding="utf-8")
    assert not [word for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write") if word in text]
