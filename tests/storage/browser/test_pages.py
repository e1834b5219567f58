"""Every view in a real browser: it shows what it should, its script works, its keys work, the console stays silent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.storage import save_safetensors

from .test_access import VIEWS

pytestmark = pytest.mark.timeout(600)


def test_from_a_run_to_a_value(browse: Any, run: Path) -> None:
    b = browse(run)
    b.go()
    assert "step 60" in b.text()
    b.picture("run")
    b.click("tbody tr a")
    b.until(lambda: b.view.startswith("checkpoint?"), "a checkpoint")
    b.wait_for("params")
    b.picture("checkpoint")
    b.driver.find_element("link text", "up").click()
    b.one("#distribution svg.mt-histogram")
    assert "Exact" in b.text("#distribution")
    assert len(b.all("svg.mt-blocks rect")) == 4
    assert b.all("svg.mt-chunks rect")
    b.picture("array")
    b.driver.find_element("link text", "Read these chunks and check them").click()
    b.wait_for("its checksum fits")
    assert b.all(".mt-chunk.sound")
    b.picture("array-checked")


def test_values_are_read_with_the_pointer_and_the_keys(browse: Any, run: Path) -> None:
    from selenium.webdriver import ActionChains, Keys

    w = np.asarray(mt.open_checkpoint(run / "step-00000060")["params.layers.0.mid"])
    b = browse(run)
    b.go("array?at=0/step-00000060&name=params.layers.0.mid&every=1,1&index=64,128")
    picture = b.one(".mt-cells img")
    cell = picture.size["width"] / 64
    # The offset counts from the middle: this is the cell in row 10, column 20.
    ActionChains(b.driver).move_to_element_with_offset(
        picture, int((20.5 - 32) * cell), int((10.5 - 32) * cell)
    ).perform()
    b.until(lambda: "=" in b.text(".mt-readout"), "a value")
    index, value = re.match(r"\[(.*)\] = (.*)", b.text(".mt-readout")).groups()
    assert index == "74, 148"
    assert float(value) == pytest.approx(float(w[74, 148]), rel=1e-6)
    cells = b.one(".mt-cells")
    cells.send_keys(Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    b.until(lambda: "75, 149" in b.text(".mt-readout"), "the next value")
    assert float(b.text(".mt-readout").split("= ")[1]) == pytest.approx(float(w[75, 149]), rel=1e-6)
    b.picture("values")
    b.driver.execute_script("arguments[0].focus()", cells)
    cells.send_keys(Keys.SHIFT, Keys.ARROW_RIGHT)
    b.until(lambda: "index=64%2C192" in b.view, "the window moved")


def test_search_filters_while_typing_and_is_a_link(browse: Any, run: Path) -> None:
    b = browse(run)
    b.go("checkpoint?at=0/step-00000060")
    b.one("input[type=search]").send_keys("layers mid")
    # What is found for a part of the words may be shown in between.
    b.until(lambda: b.view.endswith("q=layers+mid"), "the address follows")
    b.wait_for("2 arrays found")
    assert [a.text for a in b.all(".mt-name a")] == ["params.layers.0.mid", "params.layers.1.mid"]
    b.picture("search")
    b.driver.refresh()
    b.wait_for("2 arrays found")
    assert b.one("input[type=search]").get_attribute("value") == "layers mid"


def test_groups_fold_and_rows_are_walked_with_keys(browse: Any, many: Path) -> None:
    from selenium.webdriver import Keys

    b = browse(many)
    b.go("checkpoint?at=0")
    b.one(".mt-fold")
    before = len(b.all("tr[data-row]"))
    b.click('.mt-fold[aria-expanded="false"]')
    b.until(lambda: len(b.all("tr[data-row]")) > before, "rows below the group")
    b.click('.mt-fold[aria-expanded="true"]')
    b.until(lambda: len(b.all("tr[data-row]")) < before + 1, "the group folded")
    b.go("checkpoint?at=0&in=model&in=layers")
    body = b.one("body")
    body.send_keys("j")
    b.until(lambda: b.driver.switch_to.active_element.text == "0", "the first row")
    b.press("j")
    b.until(lambda: b.driver.switch_to.active_element.text == "1", "the second row")
    b.press(Keys.ARROW_RIGHT)
    b.until(lambda: b.all('.mt-fold[aria-expanded="true"]'), "the row unfolded")
    b.press(Keys.ENTER)
    b.until(lambda: b.view.endswith("in=model&in=layers&in=1"), "the row opened")
    b.one("body").send_keys("u")
    b.until(lambda: b.view.endswith("in=model&in=layers"), "up again")
    b.one("body").send_keys("/")
    b.until(lambda: b.driver.switch_to.active_element.get_attribute("type") == "search", "the search has the focus")
    b.press(Keys.ESCAPE)
    b.one("body").send_keys("?")
    b.until(lambda: b.one("#keys").get_attribute("open") is not None, "the keys are shown")
    b.picture("keys")


def test_the_map_leads_to_arrays(browse: Any, run: Path) -> None:
    b = browse(run)
    b.go("checkpoint?at=0/step-00000060").one("body").send_keys("2")
    b.until(lambda: b.view.startswith("map?"), "the map")
    assert b.one("svg.mt-treemap")
    b.picture("map")
    tiles = [t for t in b.all("svg.mt-treemap a") if "array?" in (t.get_dom_attribute("href") or "")]
    b.driver.execute_script("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", tiles[0])
    b.until(lambda: b.view.startswith("array?"), "an array")


def test_health_is_scanned_and_shown(browse: Any, run: Path) -> None:
    b = browse(run)
    b.go("health?at=0/step-00000060")
    b.click("button.mt-main")
    b.wait_for("Sound")
    assert "files fit the manifest" in b.text()
    b.picture("health")


def test_two_checkpoints_side_by_side(browse: Any, run: Path, other: Path) -> None:
    b = browse(run, other)
    b.go("compare?at=0/step-00000060")
    b.driver.find_element("link text", "first.safetensors").click()
    b.wait_for("Only in B")
    b.click("button.mt-main")
    b.wait_for("Complete")
    assert "Most changed" in b.text()
    assert "extra" in b.text()
    assert "Update ratios" in b.text()
    b.picture("compare")
    b.driver.find_element("link text", "Swap A and B").click()
    b.wait_for("Compare values")


def test_a_renamed_checkpoint_is_compared_by_writing_rules(browse: Any, run: Path) -> None:
    renamed = run.parent / "renamed"
    mt.merge(run / "step-00000010", renamed, rules="params.layers.{i}.{w} -> blocks.{i}.{w}.weight", overwrite=True)
    b = browse(run / "step-00000060", renamed)
    b.go("compare?a=0&b=1")
    # Nothing but the norm has the same name, so the box for rules stands open.
    box = b.one("textarea[name=rules]")
    box.send_keys("params.layers.{i}.{w} -> blocks.{i}.{w}.wei")
    b.driver.find_element("css selector", ".mt-rules button").click()
    b.wait_for("blocks.0.up.wei")
    b.one("textarea[name=rules]").send_keys("ght")
    b.driver.find_element("css selector", ".mt-rules button").click()
    b.until(lambda: "wei%7D" not in b.view and "weight" in b.view, "the address has the rules")
    b.click("button.mt-main")
    b.wait_for("Complete")
    assert "Most changed" in b.text()
    assert "blocks.1.mid.weight" in b.text(".mt-changes")
    b.picture("compare-rules")
    b.one("textarea[name=rules]").send_keys(" trnspose(")
    b.driver.find_element("css selector", ".mt-rules button").click()
    b.wait_for("RuleSyntaxError")
    b.picture("compare-rules-wrong")


def test_details_and_the_start_page(browse: Any, run: Path, other: Path) -> None:
    b = browse(run, other)
    b.go()
    assert "first.safetensors" in b.text()
    b.picture("home")
    b.go("details?at=0/step-00000060")
    assert '"data": "sine"' in b.text()
    assert "0.003" in b.text()
    b.picture("details")


def test_dark_is_kept(browse: Any, run: Path) -> None:
    b = browse(run)
    b.go("array?at=0/step-00000060&name=params.layers.0.mid")
    background = "return getComputedStyle(document.body).backgroundColor"
    light = b.driver.execute_script(background)
    b.one("#distribution svg")
    b.one("body").send_keys("t")
    b.until(lambda: b.driver.execute_script(background) != light, "the dark theme")
    b.picture("array-dark")
    b.go("run?at=0")
    assert b.driver.execute_script(background) != light
    b.picture("run-dark")
    b.click("[data-theme-button]")
    b.until(lambda: b.driver.execute_script(background) == light, "the light theme")
    b.driver.execute_script("localStorage.clear()")


def test_a_narrow_window_scrolls_nothing_sideways(browse: Any, run: Path) -> None:
    b = browse(run)
    # Narrower than a window can be made.
    size = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    b.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        for view in VIEWS:
            b.go(view)
            if "nothing" in view:
                b.errors()  # it was asked for something that is not there
            wide = b.driver.execute_script(
                "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert wide <= 1, view
    finally:
        b.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_hostile_names_do_nothing(browse: Any, hostile: Path) -> None:
    b = browse(hostile)
    for view in ("checkpoint?at=0", "checkpoint?at=0&sort=name", "map?at=0", "details?at=0", "health?at=0"):
        b.go(view)
        assert b.driver.title != "owned"
        assert not b.all("main script, main h1 h1, main img[src=x]")
    b.go("checkpoint?at=0&sort=name")
    b.picture("hostile")
    for link in [a.get_attribute("href") for a in b.all(".mt-name a")]:
        b.driver.get(link)
        b.one("#distribution")
        assert b.driver.title != "owned"
    b.go("checkpoint?at=0")
    b.one("input[type=search]").send_keys("<script>")
    b.wait_for("found")
    assert b.driver.title != "owned"


def test_without_a_script_everything_is_reached_by_links(browse: Any, run: Path) -> None:
    b = browse(run)
    b.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        b.go("checkpoint?at=0/step-00000060&q=mid")
        b.driver.find_element("link text", "params.layers.0.mid").click()
        b.driver.find_element("link text", "Compute statistics").click()
        assert "Exact" in b.text()
    finally:
        b.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.mark.parametrize("number", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_first_paint_with_many_arrays(
    number: int, browse: Any, many: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if number != 10_000:
        names = (f"model.layers.{i // 50}.part.{i % 50}.weight" for i in range(number))
        many = tmp_path / "many.safetensors"
        save_safetensors(many, dict.fromkeys(names, np.ones(4, np.float32)))
    b = browse(many)
    paint = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    there = "return performance.getEntriesByType('navigation')[0]?.domContentLoadedEventEnd"
    times = []
    for view in ("checkpoint?at=0", "checkpoint?at=0", "checkpoint?at=0&q=weight", "map?at=0"):
        b.go(view)
        times.append((view, b.until(lambda: b.driver.execute_script(paint), "a paint"), b.driver.execute_script(there)))
        assert f"{number:,}" in b.text()
        assert not b.driver.find_element("css selector", ".mt-wait").is_displayed() if b.all(".mt-wait") else True
        assert len(b.driver.page_source) < 300_000, "a page is as long as what it shows"
    b.picture(f"many-{number}")
    with capsys.disabled():
        print(f"\nfirst paint and all there, {number:,} arrays:")
        for view, first, whole in times:
            print(f"  {view:28} {first:6.0f} ms {whole:6.0f} ms")
