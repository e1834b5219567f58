"""Who uses the keyboard alone, a screen reader, or a dark room: everything is reached, named, and can be read."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)

CSS = files("meshtape.storage.browse").joinpath("static", "browse.css").read_text()
NAMED = {"button", "link", "textbox", "searchbox", "combobox", "checkbox", "image", "img", "dialog", "navigation"}


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("which", ["light", "dark", "dark by choice"])
def test_texts_stand_out_from_their_ground(which: str) -> None:
    themes = re.findall(r"--bg: #[^}]*", CSS)
    assert len(themes) == 3
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", themes[["light", "dark", "dark by choice"].index(which)]))
    for text, ground in (
        *((t, g) for t in ("ink", "quiet", "accent") for g in ("bg", "panel")),
        ("ink", "tint"),
        ("accent-ink", "accent"),
        ("bad", "bad-bg"),
        ("good", "good-bg"),
        ("bad", "bg"),
    ):
        assert contrast(colours[text], colours[ground]) >= 4.5, (which, text, ground)


VIEWS = (
    "",
    "run?at=0",
    "checkpoint?at=0/step-00000060",
    "checkpoint?at=0/step-00000060&q=mid&sort=size",
    "map?at=0/step-00000060",
    "health?at=0/step-00000060",
    "compare?at=0/step-00000060",
    "compare?a=0/step-00000050&b=0/step-00000060&rules=a",
    "details?at=0/step-00000060",
    "array?at=0/step-00000060&name=params.layers.0.mid&check=1",
    "array?at=0/step-00000060&name=nothing",
)


def test_everything_that_can_be_used_has_a_name(browse: Any, run: Path) -> None:
    b = browse(run)
    for view in VIEWS:
        b.go(view)
        nodes = b.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        seen = [n for n in nodes if not n.get("ignored") and n.get("role", {}).get("value", "").lower() in NAMED]
        assert seen, view
        nameless = [n["role"]["value"] for n in seen if not n.get("name", {}).get("value", "").strip()]
        assert not nameless, (view, nameless)
        assert b.driver.execute_script("return document.documentElement.lang") == "en"
        assert len(b.all("main")) == 1
        assert len(b.all("h1")) == 1 or "nothing" in view, view
        doubled = b.driver.execute_script(
            "const ids = [...document.querySelectorAll('[id]')].map(e => e.id); return ids.filter((x, i) => ids.indexOf(x) !== i)"
        )
        assert not doubled, view
        # As the page of a missing array is one that was asked for by a test, its answer is no complaint of the console.
        if "nothing" in view:
            b.errors()


def test_a_tour_with_the_keyboard_alone(browse: Any, run: Path) -> None:
    from selenium.webdriver import Keys

    b = browse(run)

    def at(start: str) -> None:
        b.until(lambda: b.view.startswith(start) and b.all("main"), start)

    b.go("run?at=0")
    b.one("body").send_keys("j")
    b.until(lambda: b.driver.switch_to.active_element.tag_name == "a", "the first row")
    b.press(Keys.ENTER)
    at("checkpoint?")
    # Down to the array in the middle layer: rows of groups stand before it.
    b.one("body").send_keys("/")
    b.until(lambda: b.driver.switch_to.active_element.get_attribute("type") == "search", "the search")
    b.press("layers 0 mid")
    b.wait_for("1 array found")
    b.press(Keys.ESCAPE)
    b.one("body").send_keys("j", Keys.ENTER)
    at("array?")
    for _ in range(60):
        if b.driver.switch_to.active_element.get_attribute("class") == "mt-cells":
            break
        b.press(Keys.TAB)
    outlined = "return getComputedStyle(document.activeElement).outlineStyle"
    assert b.driver.execute_script(outlined) == "solid", "the focus is seen"
    b.press(Keys.ARROW_RIGHT)
    b.until(lambda: "=" in b.text(".mt-readout"), "a value")
    b.one("body").send_keys("u")
    at("checkpoint?")
    b.one("body").send_keys("3")
    at("health?")
    for _ in range(40):
        if "mt-main" in (b.driver.switch_to.active_element.get_attribute("class") or ""):
            break
        b.press(Keys.TAB)
    b.press(Keys.ENTER)
    b.wait_for("Sound")
    b.picture("keyboard-tour")
