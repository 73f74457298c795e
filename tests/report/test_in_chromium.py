"""The page in a real browser: it is silent, loads nothing, and its surfaces turn."""

import base64
import re

import pytest

from steppe.cli import run

STATE = "JSON.stringify(document.querySelector('canvas').dataset)"
PIXELS = "[...document.querySelectorAll('canvas')].map(c => c.toDataURL()).join()"


@pytest.fixture(scope="module")
def page(lab):
    file = lab / "page.html"
    store = ["--store", str(lab / "runs")]
    assert run(["report", str(lab / "comparison.json"), *store, "-o", str(file), "-q"]) == 0
    return file


@pytest.fixture
def tab(browser, page):
    opened = browser.open(page)
    yield opened
    assert opened.complaints() == []
    assert opened.requests() == [page.resolve().as_uri()]
    opened.close()


def test_surfaces_turn_by_mouse_key_and_button(tab):
    assert tab.evaluate("document.querySelectorAll('canvas').length") == 3
    seen = {tab.evaluate(PIXELS)}
    states = [tab.evaluate(STATE)]
    tab.evaluate(
        "document.querySelector('canvas').scrollIntoView({block: 'center', behavior: 'instant'})"
    )
    tab.settle()
    place = "(r => [r.x + r.width / 2, r.y + r.height / 2])(document.querySelector('canvas').getBoundingClientRect())"
    x, y = tab.evaluate(place)
    tab.drag(x, y, 80, 30)
    seen.add(tab.evaluate(PIXELS))
    states.append(tab.evaluate(STATE))
    tab.evaluate("document.querySelector('canvas').focus()")
    for key in ("ArrowLeft", "ArrowUp", "+"):
        tab.press(key)
        seen.add(tab.evaluate(PIXELS))
        states.append(tab.evaluate(STATE))
    tab.evaluate("document.querySelector('[data-turn=right]').click()")
    tab.settle()
    seen.add(tab.evaluate(PIXELS))
    states.append(tab.evaluate(STATE))
    assert len(seen) == len(set(states)) == 6
    tab.press("Home")
    assert tab.evaluate(STATE) == states[0]


def test_all_surfaces_turn_together(tab):
    turned = "new Set([...document.querySelectorAll('canvas')].map(c => c.dataset.azimuth))"
    tab.evaluate("document.querySelector('[data-turn=left]').click()")
    tab.settle()
    assert tab.evaluate(f"{turned}.size") == 1


def test_a_name_in_the_legend_brings_its_lines_to_the_front(tab):
    tab.evaluate("document.querySelector('#radius [data-pick=\"0\"]').click()")
    dim = "document.querySelectorAll('#radius .series.dim').length"
    lit = "document.querySelectorAll('#radius .series[data-series=\"0\"]:not(.dim)').length"
    assert tab.evaluate(dim) > 0
    assert tab.evaluate(lit) > 0
    tab.evaluate("document.querySelector('#radius [data-pick=\"0\"]').click()")
    assert not tab.evaluate("document.querySelector('#radius').classList.contains('picked')")


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (1200, "dark"), (390, "light")])
def test_nothing_is_wider_than_the_screen(browser, page, width, scheme):
    tab = browser.open(page, width=width, scheme=scheme)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) == (scheme == "dark")
    assert tab.complaints() == []
    tab.close()


def test_text_stands_out_from_its_ground(browser, page):
    """WCAG's 4.5 for ordinary text, in both schemes."""
    code = """[...document.querySelectorAll('p, td, th, figcaption, a, summary, button, code')].map(e => {
      let ground = e;
      while (getComputedStyle(ground).backgroundColor === 'rgba(0, 0, 0, 0)') ground = ground.parentElement;
      return [getComputedStyle(e).color, getComputedStyle(ground).backgroundColor].map(
        c => c.match(/[0-9.]+/g).slice(0, 3).map(Number));
    })"""
    for scheme in ("light", "dark"):
        tab = browser.open(page, scheme=scheme)
        for ink, ground in tab.evaluate(code):
            bright, dull = sorted((luminance(ink), luminance(ground)), reverse=True)
            assert (bright + 0.05) / (dull + 0.05) >= 4.5, (scheme, ink, ground)
        tab.close()


def luminance(colour):
    parts = [c / 255 for c in colour]
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def test_print_is_light_short_and_without_buttons(browser, page):
    tab = browser.open(page, scheme="dark", media="print")
    assert tab.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert tab.evaluate("getComputedStyle(document.querySelector('.controls')).display") == "none"
    printed = base64.b64decode(tab.send("Page.printToPDF", printBackground=True)["data"])
    assert 1 < len(re.findall(rb"/Type\s*/Page\b", printed)) <= 5
    assert tab.complaints() == []
    tab.close()


def test_everything_can_be_reached_by_keyboard(tab):
    missing = """[...document.querySelectorAll('canvas, button, a, summary, .scroll')].filter(
      e => e.tabIndex < 0 || !(e.textContent.trim() || e.getAttribute('aria-label'))).length"""
    assert tab.evaluate(missing) == 0
    unnamed = "[...document.querySelectorAll('[role=img]')].filter(e => !e.getAttribute('aria-label')).length"
    assert tab.evaluate(unnamed) == 0


OVERLAPS = """[...document.querySelectorAll('svg.chart')].flatMap(chart => {
  const boxes = [...chart.querySelectorAll('text')].map(e => [e.textContent, e.getBoundingClientRect()]);
  return boxes.flatMap(([a, r], i) => boxes.slice(i + 1).filter(([, s]) =>
    r.left < s.right - 1 && s.left < r.right - 1 && r.top < s.bottom - 3 && s.top < r.bottom - 3
  ).map(([b]) => a + ' / ' + b));
})"""


@pytest.mark.parametrize("width", [1200, 390])
def test_words_in_charts_never_collide(browser, page, width):
    tab = browser.open(page, width=width)
    assert tab.evaluate(OVERLAPS) == []
    tab.close()


def test_tables_are_whole_on_a_phone(browser, page):
    tab = browser.open(page, width=390)
    cut = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
    assert tab.evaluate(cut) == 0
    tab.close()


def test_no_two_methods_look_alike(browser, page):
    """The colours of seven series differ, in both schemes, by more than a shade."""
    code = "[0,1,2,3,4,5,6].map(i => getComputedStyle(document.documentElement).getPropertyValue(`--s${i}`).trim())"
    for scheme in ("light", "dark"):
        tab = browser.open(page, scheme=scheme)
        colours = [bytes.fromhex(colour[1:]) for colour in tab.evaluate(code)]
        for i, first in enumerate(colours):
            for second in colours[:i]:
                assert sum((a - b) ** 2 for a, b in zip(first, second, strict=True)) > 60**2
        tab.close()
