"""The pictures of the README and of these pages: ``python docs/pictures/make.py`` writes them to ``docs/_static``.

Needs matplotlib, scikit-learn, Chromium with its driver, and Selenium. Nothing is drawn by hand: an array that is split
over a mesh shows itself, a gradient is that of a network which this script trains, and the page is a photograph of
``meshtape browse``.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

import meshtape as mt
from meshtape.storage.browse import Server

mpl.use("Agg")
import matplotlib.pyplot as plt

OUT = Path(__file__).resolve().parents[1] / "_static"
INK = "#1c2529"


def train() -> tuple[dict[str, Any], Any, Any]:
    """A small network on handwritten digits: its parameters, the pictures and the labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, t = mt.asarray(digits.data / 16.0, dtype=mt.float32), mt.asarray(digits.target)
    k1, k2, k3 = mt.random.split(mt.random.key(1), 3)
    params = {
        "embed": {"w": mt.random.normal(k1, (64, 512), dtype=mt.float32) / 8},
        "middle": {"w": mt.random.normal(k2, (512, 512), dtype=mt.float32) / 22},
        "head": {"w": mt.random.normal(k3, (512, 10), dtype=mt.float32) / 22},
    }
    opt = mt.optim.adam(1e-3)
    state = opt.init(params)

    @mt.compile
    def step(p: Any, state: Any) -> Any:
        slopes = mt.grad(lambda p: mt.nn.cross_entropy(logits(p, x[:1500]), t[:1500]))(p)
        return opt.update(p, slopes, state)

    for _ in range(60):
        params, state = step(params, state)
    return params, x, t


def logits(p: Any, x: Any) -> Any:
    h = mt.nn.gelu(x @ p["embed"]["w"])
    return mt.nn.gelu(h @ p["middle"]["w"]) @ p["head"]["w"]


def gradient(params: Any, x: Any, t: Any) -> None:
    """Digits, and the gradient of the network's answer by their pixels."""
    # The first of each digit among those that it has not seen.
    shown = x[[1500 + int(np.argmax(np.asarray(t[1500:]) == digit)) for digit in range(7)]]
    speaks = mt.grad(lambda x: mt.sum(mt.max(logits(params, x), axis=1)))(shown)
    fig, axes = plt.subplots(2, 7, figsize=(7, 2.1))
    for i in range(7):
        reach = float(mt.max(mt.abs(speaks[i])))
        axes[0, i].imshow(np.asarray(shown[i]).reshape(8, 8), cmap="Greys")
        axes[1, i].imshow(np.asarray(speaks[i]).reshape(8, 8), cmap="BrBG", vmin=-reach, vmax=reach)
    for a in axes.flat:
        a.set_axis_off()
    fig.subplots_adjust(0.01, 0.01, 0.99, 0.99, 0.05, 0.05)
    fig.savefig(OUT / "gradient.png", dpi=110)
    plt.close(fig)


def saved(params: Any, home: Path) -> Path:
    """The parameters, saved from a mesh of eight ranks."""
    mesh = mt.Mesh({"data": 2, "model": 4})
    plan = {
        "embed": {"model": mt.Shard(1)},
        "middle": {"data": mt.Shard(0), "model": mt.Shard(1)},
        "head": {"model": mt.Shard(0)},
    }
    tree = {k: {"w": mt.distribute(v["w"], mesh, **plan[k])} for k, v in params.items()}
    mt.save(home / "digits" / "step-00000060", {"params": tree}, step=60)
    return home / "digits"


def photographs(params: Any, run: Path) -> None:
    """The page of an array, and how a split array shows itself in a notebook."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    with tempfile.TemporaryDirectory() as profile:
        for flag in (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--hide-scrollbars",
            "--window-size=1240,1330",
            f"--user-data-dir={profile}",
        ):
            options.add_argument(flag)
        browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            with Server([run]) as server:
                browser.get(server.url + "array?at=0/step-00000060&name=params.middle.w")
                WebDriverWait(browser, 60).until(lambda b: b.find_elements("css selector", "#distribution svg"))
                browser.save_screenshot(str(OUT / "array-page.png"))
            mesh = mt.Mesh({"data": 2, "model": 4})
            split = mt.distribute(
                np.asarray(params["middle"]["w"])[:8, :12].round(2), mesh, data=mt.Shard(0), model=mt.Shard(1)
            )
            page = Path(profile) / "split.html"
            page.write_text(
                "<!doctype html><meta charset=utf-8><body style='font: 14px system-ui; margin: 0; padding: 12px; "
                f"width: max-content; color: {INK}'>{split._repr_html_()}"
            )
            browser.set_window_size(640, 520)
            browser.get(page.as_uri())
            browser.find_element("css selector", "body").screenshot(str(OUT / "split.png"))
        finally:
            browser.quit()


def main() -> None:
    params, x, t = train()
    gradient(params, x, t)
    with tempfile.TemporaryDirectory() as home:
        photographs(params, saved(params, Path(home)))
    for name in ("gradient", "array-page", "split"):
        print(f"{name}.png", (OUT / f"{name}.png").stat().st_size // 1024, "KiB")


if __name__ == "__main__":
    main()
