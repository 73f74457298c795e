"""The page in a real browser: it is silent, loads nothing, and its surfaces turn."""

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


def test_print_is_light_whole_and_without_buttons(browser, page):
    tab = browser.open(page, scheme="dark", media="print")
    assert tab.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert tab.evaluate("getComputedStyle(document.querySelector('.controls')).display") == "none"
    tab.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert tab.evaluate("[...document.querySelectorAll('details')].every(d => d.open)")
    assert tab.complaints() == []
    tab.close()


def test_everything_can_be_reached_by_keyboard(tab):
    missing = """[...document.querySelectorAll('canvas, button, a, summary, .scroll')].filter(
      e => e.tabIndex < 0 || !(e.textContent.trim() || e.getAttribute('aria-label'))).length"""
    assert tab.evaluate(missing) == 0
    unnamed = "[...document.querySelectorAll('[role=img]')].filter(e => !e.getAttribute('aria-label')).length"
    assert tab.evaluate(unnamed) == 0
