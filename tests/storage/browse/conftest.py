"""A small client of the browser, and checkpoints that mean harm."""

from __future__ import annotations

import base64
import http.client
import json
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlencode
from xml.etree import ElementTree

import numpy as np
import pytest
from safetensors.numpy import save_file

from meshtape.storage import save
from meshtape.storage.browse import Server


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Visitor:
    """Asks a server as a browser would, without following redirects unless asked to."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.host = f"127.0.0.1:{server.port}"

    def ask(self, method: str, path: str, body: str | None = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        try:
            sent = {"Host": self.host} | {k.replace("_", "-"): v for k, v in headers.items()}
            if body is not None:
                sent["Content-Type"] = "application/x-www-form-urlencoded"
            connection.request(method, path, body, sent)
            r = connection.getresponse()
            return Answer(r.status, {k.lower(): v for k, v in r.getheaders()}, r.read())
        finally:
            connection.close()

    def get(self, view: str, **parameters: Any) -> Answer:
        query = urlencode([(k.rstrip("_"), v) for k, v in parameters.items()], doseq=True)
        return self.ask("GET", f"/{view}" + (f"?{query}" if query else ""))

    def post(self, view: str, **fields: str) -> Answer:
        return self.ask("POST", f"/{view}", urlencode(fields), Origin=f"http://{self.host}")

    def finished(self, view: str, **parameters: Any) -> Any:
        """The data of a scan, once it is no longer running."""
        until = time.monotonic() + 240
        while time.monotonic() < until:
            data = self.get(view, format="json", **parameters).json
            if data["state"] not in ("waiting", "running"):
                return data
            time.sleep(0.05)
        raise AssertionError("the scan did not end")


class Markup(HTMLParser):
    """What a browser would see: elements, their attributes, and the text."""

    VOID = frozenset(["meta", "link", "input", "img", "br", "hr"])

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.unbalanced: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def check(self) -> Markup:
        """Sound, harmless markup: balanced, nothing that runs or loads from elsewhere."""
        assert not self.unbalanced
        assert not self.open
        for tag, attributes in self.elements:
            assert tag in KNOWN, tag
            assert not any(k.startswith("on") or k == "style" for k in attributes), (tag, attributes)
            for k in ("href", "src", "action", "data-load", "data-values", "data-unfold", "data-poll"):
                value = attributes.get(k) or ""
                assert not re.match(r"\s*(javascript|data:text|[a-z]+:)?//", value), (tag, value)
                assert ":" not in value.split("?")[0] or value.startswith(("data:image/png;base64,", SVG)), (tag, value)
                if value.startswith(SVG):
                    text = base64.b64decode(value.removeprefix(SVG)).decode()
                    ElementTree.fromstring(text)  # well-formed
                    Markup(text).check()
        for c in self.text:
            assert c.isprintable() or c in "\n ", repr(c)
        return self


SVG = "data:image/svg+xml;base64,"
KNOWN = frozenset(
    re.findall(
        r"\w+",
        "html head meta title link script body a header nav svg rect path line polyline circle text span button main "
        "div h1 h2 p dl dt dd dialog form kbd section table thead tbody tr th td select option input label i img "
        "output code pre strong br details summary style textarea",
    )
)

HOSTILE_NAMES = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'; drop table--",
    "a\x1b[31mred\x1b[0m",
    "line\nbreak\r\ttab",
    "\u202egnp.exe",
    "nul\x00byte",
    "&lt;already&gt;",
    "javascript:alert(1)",
    "../../etc/passwd",
    "~tilde",
    " spaces ",
    "",
    "x" * 3000,
    "ünïcödé 漢字 🎉",
    "{{7*7}}${7*7}",
    "%2e%2e%2f?at=1&name=w#x",
]


@pytest.fixture
def hostile(tmp_path):
    """A checkpoint whose every text means harm."""
    tree = {n: np.arange(6.0).reshape(2, 3) for n in HOSTILE_NAMES}
    tree["deep"] = {"</td></table>": {"<b>": np.ones(2)}, "value": "<i>no markup</i>"}
    save(
        tmp_path / "<u>hostile", tree, metadata={"</pre><script>alert(2)</script>": ["\x1b]0;title\x07", float("nan")]}
    )
    return tmp_path / "<u>hostile"


class Kit:
    Answer, Visitor, Markup, NAMES = Answer, Visitor, Markup, HOSTILE_NAMES


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit


@pytest.fixture
def visit() -> Iterator[Any]:
    """``visit(path, …)``: a visitor of a server of those paths, which ends with the test."""
    servers = []

    def start(*paths: Any, **options: Any) -> Visitor:
        server = Server(paths, **options).start()
        servers.append(server)
        return Visitor(server)

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def formats(tmp_path_factory):
    """The same arrays in every format that can be browsed; nobody writes to them."""
    import zarr

    tmp_path = tmp_path_factory.mktemp("formats")
    tree = {"enc.w": np.arange(600, dtype=np.float32).reshape(20, 30), "enc.b": np.ones(5), "n": np.array(3)}
    save(tmp_path / "ours", {"enc": {"w": tree["enc.w"], "b": tree["enc.b"]}, "n": tree["n"], "lr": 0.1}, step=7)
    save_file(tree, tmp_path / "file.safetensors", {"format": "np"})
    (tmp_path / "hf").mkdir()
    save_file({k: v for k, v in tree.items() if k != "n"}, tmp_path / "hf" / "model-1.safetensors")
    save_file({"n": tree["n"]}, tmp_path / "hf" / "model-2.safetensors")
    index = {
        "metadata": {"total_size": 1},
        "weight_map": {"enc.w": "model-1.safetensors", "enc.b": "model-1.safetensors", "n": "model-2.safetensors"},
    }
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    group = zarr.create_group(tmp_path / "foreign")
    z = group.create_array("enc/w", shape=(20, 30), chunks=(7, 10), dtype="f4")
    z[:] = tree["enc.w"]
    return [tmp_path / n for n in ("ours", "file.safetensors", "hf", "foreign")]
