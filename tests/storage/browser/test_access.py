"""Who uses the keyboard alone, a screen reader, or a dark room: everything is reached, named, and can be read."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshtape as mt

pytestmark = pytest.mark.timeout(600)

CSS = files("meshtape.storage.browse.views").joinpath("static", "charts.css").read_text()
NAMED = {"button", "link", "textbox", "searchbox", "combobox", "checkbox", "image", "img", "dialog", "navigation"}


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("which", ["light", "dark"])
def test_texts_stand_out_from_their_ground(which: str) -> None:
    pairs = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", CSS)
    assert len(pairs) == CSS.count(": light-dark(")
    colours = {name: light if which == "light" else dark for name, light, dark in pairs}
    for text, ground in (
        *((t, g) for t in ("ink", "quiet", "accent") for g in ("bg", "panel")),
        ("ink", "tint"),
        ("accent-ink", "accent"),
        ("bad", "bad-bg"),
        ("good", "good-bg"),
        ("bad", "bg"),
        *(("ink", f"s{k}") for k in range(6)),  # the tiles of maps
        *(("accent-ink", f"s{k}") for k in (6, 7)),
    ):
        assert contrast(colours[text], colours[ground]) >= 4.5, (which, text, ground)


# Texts that stand out too little from what is painted behind them, by WCAG's formula; separators and what cannot be
# used are exempt.
FAINT = """
const parse = c => (c.match(/[\\d.]+/g) || []).map(Number);
const light = c => { const [r, g, b] = c.slice(0, 3).map(x => x / 255).map(x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
                     return .2126 * r + .7152 * g + .0722 * b; };
const solid = c => c.length === 3 || (c.length === 4 && c[3] === 1);
const behind = (el, x, y) => {
  if (el.closest('svg')) for (const shape of document.elementsFromPoint(x, y)) {
    if (!shape.matches('rect, path, circle')) continue;
    const fill = parse(getComputedStyle(shape).fill);
    if (solid(fill)) return fill;
  }
  for (; el; el = el.parentElement) { const c = parse(getComputedStyle(el).backgroundColor); if (solid(c)) return c; }
  return getComputedStyle(document.documentElement).colorScheme.startsWith('dark') ? [18, 18, 18] : [255, 255, 255];
};
const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
let texts = 0;
while (walk.nextNode()) {
  const el = walk.currentNode.parentElement, range = document.createRange();
  range.selectNodeContents(walk.currentNode);
  const box = range.getBoundingClientRect();
  if (!walk.currentNode.data.trim() || !box.width || !box.height || el.closest('.mt-slash, .mt-arrow.off, :disabled, style, title')) continue;
  const style = getComputedStyle(el), mine = parse(el.closest('svg') ? style.fill : style.color);
  const [a, b] = [light(mine), light(behind(el, box.x + box.width / 2, box.y + box.height / 2))].sort((p, q) => q - p);
  texts += 1;
  if ((a + .05) / (b + .05) < 4.5) found.push([walk.currentNode.data.trim().slice(0, 40), el.className.baseVal ?? el.className, (a + .05) / (b + .05)]);
}
return [texts, found];
"""


@pytest.fixture
def scheme(chromium: Any) -> Iterator[Callable[[str], None]]:
    """``scheme("dark")``: what the system prefers. Pages are as high as they need to be, so that each text has a place
    in the window."""

    def prefer(which: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": which}]
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    size = {"width": 1280, "height": 4000, "deviceScaleFactor": 1, "mobile": False}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    yield prefer
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


# JupyterLab's rules for the outputs of cells, as far as they colour them or set lists of facts.
JUPYTER = """
.jp-OutputArea-output :is(dl, dt, dd) { display: block; padding: 0; margin: 0; }
.jp-OutputArea-output dl { width: 100%; overflow: hidden; }
.jp-OutputArea-output dt { font-weight: bold; float: left; width: 20%; }
.jp-OutputArea-output dd { float: left; width: 80%; }
[data-jp-theme-light="true"] { --ground: #ffffff; --odd: #f5f5f5; --text: #212121; }
[data-jp-theme-light="false"] { --ground: #111111; --odd: #212121; --text: #e0e0e0; }
[data-jp-theme-light] { background: var(--ground); }
:where([data-jp-theme-light]) :is(.jp-RenderedHTMLCommon, .jp-RenderedHTMLCommon table, .jp-RenderedHTMLCommon h1) { color: var(--text); }
:where([data-jp-theme-light]) .jp-RenderedHTMLCommon :is(pre, code) { background: var(--ground); color: var(--text); }
:where([data-jp-theme-light]) .jp-RenderedHTMLCommon tbody tr:nth-child(odd) { background: var(--ground); }
:where([data-jp-theme-light]) .jp-RenderedHTMLCommon tbody tr:nth-child(even) { background: var(--odd); }
"""


OVERLAP = """
const box = e => { const r = document.createRange(); r.selectNodeContents(e); return r.getBoundingClientRect(); };
return [...document.querySelectorAll('dt')].filter(t => box(t).bottom > box(t.nextElementSibling).top + 1).map(t => t.textContent);
"""


def test_what_a_notebook_shows_follows_its_theme(browse: Any, run: Path, scheme: Callable[[str], None]) -> None:
    b = browse(run)
    ckpt = mt.open_checkpoint(run / "step-00000060")
    mesh = mt.Mesh({"data": 2, "model": 4})
    split = mt.distribute(np.ones((16, 24)), mesh, data=mt.Shard(0), model=mt.Shard(1))
    shown = [mt.arange(6.0), split, split.sharding, mesh, ckpt, ckpt["params.layers.0.mid"]]
    shown += [mt.CheckpointManager(run, best="loss"), mt.visualize(split)]
    cells = "".join(f"<div class='jp-RenderedHTMLCommon jp-OutputArea-output'>{x._repr_html_()}</div>" for x in shown)
    for name, body, system, light in (
        ("jupyter-dark", "data-jp-theme-light='false'", "light", False),
        ("jupyter-light", "data-jp-theme-light='true'", "dark", True),
        ("code-dark", "class='vscode-dark' style='background: #1f1f1f; color: #cccccc'", "light", False),
        ("code-light", "class='vscode-light' style='background: #ffffff; color: #3b3b3b'", "dark", True),
    ):
        scheme(system)
        page = f"<!doctype html><style>{JUPYTER}</style><body {body}>{cells}"
        b.driver.get(f"data:text/html;charset=utf-8;base64,{base64.b64encode(page.encode()).decode()}")
        texts, faint = b.driver.execute_script(FAINT)
        assert texts > 60
        assert not faint, name
        ground = b.driver.execute_script("return getComputedStyle(document.querySelector('.mt-embed')).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == light, name
        assert b.driver.execute_script(OVERLAP) == [], "labels and values lie over each other"
        assert all(i.get_property("naturalWidth") for i in b.all("img")), "a picture is not drawn"
        b.driver.save_screenshot(str(b.screenshots / f"notebook-{name}.png"))


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


def test_everything_that_can_be_used_has_a_name_and_can_be_read(
    browse: Any, run: Path, scheme: Callable[[str], None]
) -> None:
    b = browse(run)
    for view in VIEWS:
        b.go(view)
        for which in ("dark", "light"):
            scheme(which)
            texts, faint = b.driver.execute_script(FAINT)
            assert texts > 4, view
            assert not faint, (view, which)
        nodes = b.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        seen = [n for n in nodes if not n.get("ignored") and n.get("role", {}).get("value", "").lower() in NAMED]
        assert seen, view
        nameless = [n["role"]["value"] for n in seen if not n.get("name", {}).get("value", "").strip()]
        assert not nameless, (view, nameless)
        assert b.driver.execute_script("return document.documentElement.lang") == "en"
        assert len(b.all("main")) == 1
        assert len(b.all("h1")) == 1 or "nothing" in view, view
        doubled = b.driver.execute_script(
            "const ids = [...document.querySelectorAll('[id]')].map(e => e.id); return ids.filter((x, i) => "
            "ids.indexOf(x) !== i)"
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
    b.until(lambda: b.view.endswith("q=layers+0+mid"), "what is found for all the words")
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
