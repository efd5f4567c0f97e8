"""The page in a real browser: every control is used, and nothing complains."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up_runs import GPU, real_config, write_run

from chromium import Browser, find_chromium, open_browser
from divebatch.report import write_report

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_chromium() is None, reason="no Chromium on this machine")]

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
METHODS = ("sgd-small", "divebatch", EVIL)
PLOTS = "[...document.querySelectorAll('.plot canvas')].map(canvas => canvas.toDataURL())"
PLOT = "[data-chart='0'] .plot"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, quick_figures_of_module: None) -> Path:
    """Three methods, one of them with a hostile name, different in every quantity."""
    folder = tmp_path_factory.mktemp("page")
    for number, method in enumerate(METHODS):
        for seed in range(2):
            rows = [
                {
                    **{"batch_size": 128 * (1 + number * epoch), "lr": 0.1 / (epoch + number), "steps": 40 * epoch},
                    **{"val_accuracy": 0.9 - 0.5 / epoch - 0.01 * number - 0.01 * seed, "samples": 1000 * epoch},
                    **{"val_loss": 2.0 / epoch**2 + 0.1 * number, "train_loss": 2.0 / epoch + 0.1 * seed},
                    **{"diversity": epoch + 0.1 * number, "exact_diversity": 2.0 * epoch + seed},
                    **{
                        "noise_scale": 50.0 * epoch + number,
                        "train_seconds": (2.0 - 0.5 * number) * epoch,
                        "peak_memory_bytes": 2**20 * (99 + number),
                    },
                }
                for epoch in range(1, 16)
            ]
            config = {**real_config(15, "fixed", seed=seed), "note": EVIL}
            write_run(folder, "e", method, seed, rows, config=config, place=f"e/{number}", hardware=GPU)
    return write_report(folder).html


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser, page: Path) -> Iterator[Browser]:
    """A fresh load of the page; a complaint after any test fails it."""
    chromium.complaints.clear()
    chromium.resize(1200, 900)
    chromium.prefer("light")
    chromium.open(page)
    chromium.wait_for("document.querySelectorAll('.plot canvas').length === 3")
    chromium.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    chromium.wait_for("document.querySelectorAll('.plot canvas').length === 8")
    yield chromium
    assert chromium.complaints == []


def plots(browser: Browser) -> list[str]:
    return list(browser.evaluate(PLOTS))


def changed(before: list[str], after: list[str]) -> list[bool]:
    return [one != other for one, other in zip(before, after, strict=True)]


def readout(browser: Browser, chart: int = 0) -> str:
    return str(browser.evaluate(f"document.querySelector('[data-chart=\"{chart}\"] .readout').innerText"))


def choose(browser: Browser, selector: str, value: str) -> None:
    """As a keyboard does it: a headless browser does not open the list."""
    browser.evaluate(
        f"""(() => {{
            const list = document.querySelector({json.dumps(selector)});
            list.value = {json.dumps(value)};
            list.dispatchEvent(new Event("change", {{bubbles: true}}));
        }})()"""
    )


def test_all_charts_are_drawn_and_names_are_text(browser: Browser) -> None:
    blank = "(() => { const c = document.createElement('canvas'); return c.toDataURL(); })()"
    assert browser.evaluate(blank) not in plots(browser)
    text = " ".join(readout(browser).split())
    assert all(words in text for words in ("At the end", "86.17 ± 0.50", EVIL))
    assert browser.evaluate("document.querySelectorAll('script').length") == 3
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert EVIL in browser.evaluate("document.querySelector('.methods').innerText")


@pytest.mark.parametrize(("axis", "label"), [("steps", "600"), ("samples", "15000"), ("seconds", "30")])
def test_each_axis_draws_all_charts_anew(browser: Browser, axis: str, label: str) -> None:
    before = plots(browser)
    browser.click(f".axis input[value={axis}]")
    assert all(changed(before, plots(browser)))
    browser.evaluate(f"document.querySelector({json.dumps(PLOT)}).focus()")
    browser.press("End")
    assert readout(browser).splitlines()[0].endswith(f" {label}")
    browser.click(".axis input[value=epochs]")
    browser.press("Escape")
    assert plots(browser) == before


def test_methods_can_be_hidden_and_shown(browser: Browser) -> None:
    before = plots(browser)
    browser.click(".methods input[data-method='1']")
    assert all(changed(before, plots(browser)))
    assert "divebatch" not in readout(browser)
    assert browser.evaluate("document.querySelector('.bars tr[data-method=\"1\"]').offsetParent") is None
    browser.click("[data-all='']")
    assert readout(browser) == "No method is chosen."
    browser.click("[data-all='1']")
    assert plots(browser) == before
    assert "divebatch" in readout(browser)


@pytest.mark.parametrize("chart", range(8))
def test_each_chart_has_its_own_log_scale(browser: Browser, chart: int) -> None:
    before = plots(browser)
    browser.click(f"[data-chart='{chart}'] [data-log]")
    assert changed(before, plots(browser)) == [number == chart for number in range(8)]
    browser.click(f"[data-chart='{chart}'] [data-log]")
    assert plots(browser) == before


def test_hovering_shows_the_values_there_in_every_chart(browser: Browser) -> None:
    x, y = browser.middle_of(f"{PLOT} .u-over")
    browser.move_mouse(x, y)
    assert readout(browser).splitlines()[0] == "Epoch 8"
    assert "83.25 ± 0.50" in " ".join(readout(browser).split())
    assert readout(browser, 1).splitlines()[0] == "Epoch 8"


def test_arrow_keys_move_and_speak(browser: Browser) -> None:
    browser.evaluate(f"document.querySelector({json.dumps(PLOT)}).focus()")
    browser.press("ArrowLeft")
    assert readout(browser).splitlines()[0] == "Epoch 14"
    assert browser.evaluate("document.querySelector('[data-chart=\"0\"] .spoken').textContent").startswith("Epoch 14")
    browser.press("Home")
    assert readout(browser).splitlines()[0] == "Epoch 1"
    browser.press("Escape")
    assert readout(browser).splitlines()[0] == "At the end"


def test_dragging_zooms_and_the_button_goes_back(browser: Browser) -> None:
    before = plots(browser)
    x, y = browser.middle_of(f"{PLOT} .u-over")
    browser.drag((x - 80, y), (x + 80, y))
    assert changed(before, plots(browser))[0]
    browser.move_mouse(2, 2)
    browser.click("[data-reset]")
    assert plots(browser) == before


def test_the_bars_change_their_unit(browser: Browser) -> None:
    shown = "[...document.querySelectorAll('.bars table')].filter(t => t.offsetParent).map(t => t.caption.innerText)"
    assert browser.evaluate(shown)[0].startswith("Training time (s) to the common target of ")
    for unit, words in {"epochs": "Epoch", "steps": "Optimizer steps", "samples": "Samples"}.items():
        choose(browser, "[data-unit]", unit)
        assert [text.split(" to the ")[0] for text in browser.evaluate(shown)] == [words]


def test_light_and_dark_by_system_and_by_choice(browser: Browser) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light, drawn = browser.evaluate(background), plots(browser)
    browser.prefer("dark")
    browser.wait_for(f"{background} !== '{light}'")
    browser.wait_for(f"({PLOTS}).every((plot, place) => plot !== {json.dumps(drawn)}[place])")
    dark = browser.evaluate(background)
    choose(browser, "#theme", "light")
    assert (browser.evaluate(background), plots(browser)) == (light, drawn)
    browser.prefer("light")
    choose(browser, "#theme", "dark")
    assert browser.evaluate(background) == dark
    choose(browser, "#theme", "system")
    assert browser.evaluate(background) == light


def test_nothing_is_cut_on_a_screen_or_a_phone(browser: Browser) -> None:
    for width, is_phone in ((1400, False), (390, True)):
        browser.resize(width, 844, phone=is_phone)
        browser.wait_for(f"document.querySelector({json.dumps(PLOT)}).clientWidth < {width}")
        browser.wait_for(f"document.querySelector({json.dumps(PLOT + ' .uplot')}).clientWidth < {width}")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        wider = "[...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth).length"
        assert browser.evaluate(wider) == 0


def test_every_control_has_a_name_and_every_link_its_file(browser: Browser, page: Path) -> None:
    nameless = """[...document.querySelectorAll('button, input, select, a, [tabindex]')].filter(element =>
        !(element.ariaLabel || element.textContent.trim() || element.labels?.[0]?.innerText.trim())).length"""
    assert browser.evaluate(nameless) == 0
    links = browser.evaluate("[...document.querySelectorAll('.files a')].map(link => link.getAttribute('href'))")
    folders = (page.parent / "figures", page.parent / "tables")
    written = {path.relative_to(page.parent).as_posix() for folder in folders for path in folder.iterdir()}
    assert set(links) == written
    browser.click('.files a[href="figures/e-memory.svg"]')
    browser.wait_for_tab((page.parent / "figures" / "e-memory.svg").as_uri())


def test_it_prints_in_light_colours_and_comes_back(browser: Browser, tmp_path: Path) -> None:
    choose(browser, "#theme", "dark")
    before = plots(browser)
    browser.print_to(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    assert plots(browser) == before
