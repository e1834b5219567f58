"""A real browser: Debian's Chromium without a window, driven by Selenium; and real checkpoints to look at."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.storage import save, save_safetensors
from meshtape.storage.browse import Server

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-extensions",
    "--window-size=1280,1000",
)
PATIENCE = 120  # seconds that a busy machine may take


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The driver of one browser for all tests."""
    binary = shutil.which("chromium")
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("chromium and chromedriver (Debian: chromium, chromium-driver) are not installed")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # Given by path, so that Selenium looks for nothing elsewhere.
    browser = webdriver.Chrome(options=options, service=Service(driver))
    browser.set_page_load_timeout(PATIENCE)
    yield browser
    browser.quit()


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures of the pages are kept: ``MESHTAPE_SCREENSHOTS``, or a temporary directory."""
    given = os.environ.get("MESHTAPE_SCREENSHOTS")
    where = Path(given) if given else tmp_path_factory.mktemp("screenshots")
    where.mkdir(parents=True, exist_ok=True)
    return where


class Browser:
    """One page after the other, with what a person does on it."""

    def __init__(self, driver: Any, base: str, screenshots: Path) -> None:
        self.driver, self.base, self.screenshots = driver, base, screenshots
        self.errors()  # what earlier tests left

    def go(self, view: str = "") -> Browser:
        self.driver.get(self.base + view)
        return self

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        """The first element that matches, waited for."""
        return self.until(lambda: next(iter(self.all(selector)), None), selector)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait until ``condition`` is true. Elements that a script has just replaced do not count: the driver has
        several errors for them."""
        from selenium.common.exceptions import TimeoutException, WebDriverException
        from selenium.webdriver.support.ui import WebDriverWait

        try:
            return WebDriverWait(self.driver, PATIENCE, 0.05, [WebDriverException]).until(lambda _: condition())
        except TimeoutException:
            raise AssertionError(f"never came: {what} on {self.driver.current_url}") from None

    # A script may replace an element between the moment it is found and that it is used; then it is looked for once
    # more.

    def click(self, selector: str) -> None:
        self.until(lambda: [e.click() for e in self.all(selector)[:1]], selector)

    def press(self, *keys: str) -> None:
        self.driver.switch_to.active_element.send_keys(*keys)

    def text(self, selector: str = "main") -> str:
        return self.until(lambda: [e.text for e in self.all(selector)[:1]], selector)[0]

    def wait_for(self, text: str, selector: str = "main") -> None:
        self.until(lambda: any(text in e.text for e in self.all(selector)[:1]), f"{text!r} in {selector}")

    @property
    def view(self) -> str:
        return self.driver.current_url.removeprefix(self.base)

    def picture(self, name: str) -> None:
        """A screenshot of the whole page."""
        height = self.driver.execute_script("return document.documentElement.scrollHeight")
        self.driver.set_window_size(1280, max(700, min(height + 140, 2400)))
        self.driver.save_screenshot(str(self.screenshots / f"{name}.png"))
        self.driver.set_window_size(1280, 1000)

    def errors(self) -> list[str]:
        """What the console has complained about since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def requested(self) -> set[str]:
        """Every address that the pages have asked for since the last call."""
        import json

        events = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        return {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}


@pytest.fixture
def browse(chromium: Any, screenshots: Path) -> Iterator[Callable[..., Browser]]:
    """``browse(path, …)``: a browser at a server of those paths. The console must stay silent, and nothing else be
    asked for."""
    servers: list[Server] = []
    browsers: list[Browser] = []

    def start(*paths: Any) -> Browser:
        server = Server(paths).start()
        servers.append(server)
        browser = Browser(chromium, server.url, screenshots)
        browser.requested()
        browsers.append(browser)
        return browser

    yield start
    try:
        for b in browsers:
            assert not b.errors()
            strangers = {u for u in b.requested() if not u.startswith((b.base, "data:", "about:", "chrome:"))}
            assert not strangers, f"asked for elsewhere: {strangers}"
    finally:
        chromium.get("about:blank")
        for server in servers:
            server.close()


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that is trained for real, saved from a mesh of eight ranks, with a manager's metrics."""
    home = tmp_path_factory.mktemp("browsed") / "run"
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 16)).astype(np.float32)
    y = np.sin(x @ rng.normal(size=(16, 4)).astype(np.float32))
    scale = {"up": (16, 256), "mid": (256, 256), "down": (256, 4)}
    params: dict[str, Any] = {
        "layers": [
            {k: (rng.normal(size=s) / math.sqrt(s[0])).astype(np.float32) for k, s in scale.items()} for _ in range(2)
        ],
        "norm": np.ones(256, np.float32),
    }

    def loss(p: Any) -> Any:
        total = 0.0
        for layer in p["layers"]:
            h = mt.tanh(mt.tanh(mt.asarray(x) @ layer["up"]) * p["norm"] @ layer["mid"])
            total = total + h @ layer["down"]
        return mt.mean((total - mt.asarray(y)) ** 2)

    optimizer = mt.optim.adam(1e-2)
    tree = mt.arrays.tree.tree_map(mt.asarray, params)
    state = optimizer.init(tree)
    step_fn = mt.value_and_grad(loss)
    mesh = mt.Mesh({"data": 2, "model": 4})
    manager = mt.CheckpointManager(home, keep=None, best="loss")
    for step in range(10, 61, 10):
        value, grads = step_fn(tree)
        tree, state = optimizer.update(tree, grads, state)
        split = {
            "layers": [
                {
                    "up": mt.distribute(layer["up"], mesh, model=mt.Shard(1)),
                    "mid": mt.distribute(layer["mid"], mesh, data=mt.Shard(0), model=mt.Shard(1)),
                    "down": mt.distribute(layer["down"], mesh, model=mt.Shard(0)),
                }
                for layer in tree["layers"]
            ],
            "norm": tree["norm"],
        }
        manager.save(
            step, {"params": split, "rate": 3e-3}, {"data": "sine"}, metrics={"loss": float(value), "step": step}
        )
    return home


@pytest.fixture(scope="session")
def other(run: Path) -> Path:
    """The first step of the run as safetensors, with one array less and one more."""
    ckpt = mt.open_checkpoint(run / "step-00000010")
    tensors = {name: np.asarray(a) for name, a in ckpt.items() if not name.endswith("norm")}
    tensors["extra"] = np.linspace(0, 1, 12, dtype=np.float32)
    path = run.parent / "first.safetensors"
    save_safetensors(path, tensors)
    return path


@pytest.fixture(scope="session")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """10⁴ arrays."""
    home = tmp_path_factory.mktemp("many")
    one = np.ones(4, np.float32)
    save_safetensors(
        home / "many.safetensors", {f"model.layers.{i // 50}.part.{i % 50}.weight": one for i in range(10_000)}
    )
    return home / "many.safetensors"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    names = [
        "<script>document.title='owned'</script>",
        '"><img src=x onerror="document.title=\'owned\'">',
        "\u202etxt.exe",
        "a\x1b[31m",
        "x" * 2000,
        "javascript:alert(1)",
    ]
    tree: dict[str, Any] = {n: np.array([[1.0, np.nan], [np.inf, -2.0]]) for n in names}
    tree["<b>group</b>"] = {"</table><h1>": np.zeros((3, 3)), "value": "<script>document.title='owned'</script>"}
    save(tmp_path / "hostile", tree, metadata={"note": "</pre><script>document.title='owned'</script>"})
    return tmp_path / "hostile"
