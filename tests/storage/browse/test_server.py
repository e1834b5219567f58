"""The pages over HTTP: every view of every format, what cannot be reached, and what hostile files can't do."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import meshtape as mt
from meshtape.cli.main import main
from meshtape.errors import CheckpointError
from meshtape.storage import save
from meshtape.storage.browse import Server
from meshtape.storage.browse.model.text import key

VIEWS = ("checkpoint", "map", "details", "health", "compare")


def name_of(ckpt: str) -> str:
    return "enc/w" if ckpt.endswith("foreign") else "enc.w"


def test_every_view_of_every_format(visit: Any, formats: list[Path], kit: Any) -> None:
    v = visit(*formats)
    home = v.get("")
    assert home.status == 200
    assert "file.safetensors" in kit.Markup(home.text).check().text
    for i, path in enumerate(formats):
        at, name = str(i), name_of(str(path))
        for view in VIEWS:
            r = v.get(view, at=at)
            assert r.status == 200, (path, view, r.text)
            kit.Markup(r.text).check()
        found = v.get("checkpoint", at=at, q="enc w", format="json").json
        assert [row["name"] for row in found["rows"]] == [name]
        assert found["rows"][0]["shape"] == [20, 30]
        r = v.get("array", at=at, name=name)
        assert r.status == 200
        shown = kit.Markup(r.text).check()
        assert "20 × 30" in shown.text
        values = v.get("values", at=at, name=name, index="3,4", every="1,1", rows=1, columns=0).json
        # Rows are dimension 1 here; the window moved back until it fits.
        assert values["values"][4][3] == "94"
        stats = v.get("statistics", at=at, name=name, format="json").json
        assert (stats["low"], stats["high"], stats["exact"]) == (0.0, 599.0, True)
        kit.Markup("<div>" + v.get("statistics", at=at, name=name, fragment=1).text + "</div>").check()
        assert v.get("rows", at=at, in_="enc").text.count("<tr") == (1 if path.name == "foreign" else 2)


def test_the_head_of_a_page_and_its_form_after_a_redirect(visit: Any, formats: list[Path]) -> None:
    v = visit(formats[0])
    whole, head = v.get("checkpoint", at=0), v.ask("HEAD", "/checkpoint?at=0")
    assert (head.status, head.body, head.headers["content-type"]) == (200, b"", whole.headers["content-type"])
    assert int(head.headers["content-length"]) == len(whole.body)
    assert v.ask("HEAD", "/nothing").status == 404
    r = v.get("open", at=0, format="json")
    assert (r.status, r.headers["location"]) == (302, "checkpoint?at=0&format=json")
    assert v.get(r.headers["location"]).json["rows"]


def test_a_scan_runs_in_the_background_and_reports(visit: Any, formats: list[Path], kit: Any) -> None:
    v = visit(*formats)
    for i, path in enumerate(formats):
        assert v.get("health", at=i, format="json").json["state"] == "none"
        r = v.post("health", at=str(i))
        assert r.status == 303
        assert r.headers["location"] == f"health?at={i}"
        data = v.finished("health", at=i)
        assert data["state"] == "done"
        assert data["scanned"] == data["arrays"]
        assert ("fit the manifest" in data["verified"]) == (path.name == "ours")
        kit.Markup(v.get("health", at=i).text).check()
    assert v.post("compare", a="0", b="2").status == 303
    data = v.finished("compare", a="0", b="2")
    assert {c["name"]: c["changed"] for c in data["changes"]} == {"enc.w": 0, "enc.b": 0, "n": 0}
    kit.Markup(v.get("compare", a="0", b="2").text).check()
    kit.Markup(v.get("compare", a="0", b="3").text).check()


def test_exact_statistics_of_a_large_array_are_read_on_demand(visit: Any, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(2600, 2048)).astype(np.float32)
    save_file({"w": values}, tmp_path / "x.safetensors")
    v = visit(tmp_path / "x.safetensors")
    assert v.get("statistics", at=0, name="w", format="json").json["exact"] is False
    assert v.post("statistics", at="0", name="w").status == 303
    until = time.monotonic() + 240
    while not (data := v.get("statistics", at=0, name="w", format="json").json)["exact"]:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert data["low"] == pytest.approx(float(values.min()))
    assert sum(data["counts"]) == values.size


def test_a_run_and_a_directory(visit: Any, tmp_path: Path, kit: Any) -> None:
    manager = mt.CheckpointManager(tmp_path / "all" / "run", keep=None, best="loss")
    for step in (1, 2, 3):
        manager.save(step, {"w": np.full(4, step)}, metrics={"loss": 1 / step})
    (tmp_path / "all" / ".hidden").mkdir()
    (tmp_path / "all" / "notes.txt").write_text("x")
    v = visit(tmp_path / "all")
    assert v.get("").headers["location"] == "open?at=0"
    listed = v.get("open", at="0", format="json").json
    assert listed["entries"] == [{"name": "run", "kind": "run", "at": "0/run"}]
    assert v.get("open", at="0/run").headers["location"] == "run?at=0%2Frun"
    assert v.get("open", at="0/run/step-00000001").headers["location"].startswith("checkpoint?")
    data = v.get("run", at="0/run", format="json").json
    assert (data["best"], data["latest"], len(data["steps"])) == (3, 3, 3)
    assert v.get("run", at="0/run", best="highest", format="json").json["best"] == 1
    assert v.get("run", at="0/run", metric="loss", format="json").json["best"] == 3
    text = kit.Markup(v.get("run", at="0/run").text).check().text
    assert "with 1" in text
    r = v.get("compare", at="0/run/step-00000001")
    assert "step-00000002" in r.text


def test_a_checkpoint_that_is_written_anew_is_shown_anew(visit: Any, tmp_path: Path) -> None:
    save(tmp_path / "c", {"old": np.ones(3)})
    v = visit(tmp_path / "c")
    assert "old" in v.get("checkpoint", at=0).text
    save(tmp_path / "c", {"new": np.ones(3)}, overwrite=True)
    text = v.get("checkpoint", at=0).text
    assert ">new<" in text
    assert ">old<" not in text


# ----- what cannot be reached -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "at",
    [
        "0/..",
        "0/../b",
        "0/a/../../b",
        "1",
        "-1",
        "0/",
        "0//a",
        "0/.hidden",
        "0/out",
        "0/out/c",
        "x",
        "",
        "0/a\\..\\b",
        "99999999",
        "0/%2e%2e",
        "٣",
    ],
)
def test_nothing_outside_the_roots_is_reached(at: str, visit: Any, tmp_path: Path) -> None:
    for name in ("a", "b", "root/a", "root/.hidden"):
        save(tmp_path / name, {"secret": np.ones(3)})
    (tmp_path / "root" / "out").symlink_to(tmp_path)
    (tmp_path / "c").symlink_to(tmp_path / "b")
    v = visit(tmp_path / "root")
    for view in ("open", "checkpoint", "run", "map", "health"):
        r = v.ask("GET", f"/{view}?at={at.replace('%', '%25')}") if at.isascii() else v.get(view, at=at)
        assert r.status in (404, 422) or (at == "" and r.status in (200, 302, 422)), (view, at, r.status)
        assert "secret" not in r.text
    assert [e["name"] for e in v.get("open", at="0", format="json").json["entries"]] == ["a"]


def test_static_files_are_three(visit: Any, formats: list[Path]) -> None:
    v = visit(formats[0])
    for name in ("browse.css", "browse.js", "icon.svg"):
        r = v.get(f"static/{name}")
        assert r.status == 200
        assert v.ask("GET", f"/static/{name}", If_None_Match=r.headers["etag"]).status == 304
    for name in ("../server.py", "%2e%2e/server.py", "server.py", "", "/etc/passwd"):
        assert v.get(f"static/{name}").status == 404, name


def test_another_host_name_is_refused(visit: Any, formats: list[Path]) -> None:
    v = visit(formats[0])
    for host in ("evil.example", f"evil.example:{v.server.port}", "127.0.0.1.evil.example", ""):
        r = v.ask("GET", "/checkpoint?at=0", Host=host)
        assert r.status in (400, 403), host
        assert "enc" not in r.text
    assert v.ask("GET", "/static/browse.js", Host="evil.example").status == 403
    for host in ("localhost", f"localhost:{v.server.port}", "LOCALHOST:1", "[::1]:5"):
        assert v.ask("GET", "/checkpoint?at=0", Host=host).status == 200, host


def test_forms_of_other_sites_are_refused(visit: Any, formats: list[Path]) -> None:
    v = visit(formats[0])
    assert v.ask("POST", "/health", "at=0", Origin="http://evil.example").status == 403
    assert v.ask("POST", "/health", "at=0", Sec_Fetch_Site="cross-site").status == 403
    assert v.ask("POST", "/health", "at=0", Sec_Fetch_Site="same-site", Origin=f"http://{v.host}").status == 403
    assert v.ask("POST", "/health", "at=0", Origin="null").status == 403
    assert v.get("health", at=0, format="json").json["state"] == "none"
    assert v.ask("POST", "/health", "at=0", Sec_Fetch_Site="same-origin").status == 303


def test_stop_leads_nowhere_else(visit: Any, formats: list[Path]) -> None:
    v = visit(formats[0])
    assert v.post("stop", job="none", back="health?at=0").headers["location"] == "health?at=0"
    for back in ("https://evil.example/health", "//evil.example", "../x", "health/../../x"):
        assert v.post("stop", job="none", back=back).headers["location"] == "./"


def test_every_answer_has_the_guards(visit: Any, formats: list[Path]) -> None:
    v = visit(formats[0])
    for r in (
        v.get("checkpoint", at=0),
        v.get("nowhere"),
        v.get("checkpoint", at=9),
        v.get("static/browse.js"),
        v.ask("GET", "/", Host="evil"),
    ):
        policy = r.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert r.headers["x-content-type-options"] == "nosniff"
        assert "tornado" not in json.dumps(r.headers).lower()


def test_odd_requests_are_answered_plainly(visit: Any, formats: list[Path]) -> None:
    v = visit(formats[0])
    assert v.ask("GET", "/checkpoint?at=%ff").status == 400
    assert v.get("checkpoint", at=0, q="x" * 9000).status == 400
    assert v.get("checkpoint", at=0, page="-1").status == 400
    assert v.get("checkpoint", at=0, page=10**15).status == 200
    assert v.get("checkpoint", at=0, in_=["no", "such"]).status == 404
    assert v.get("array", at=0, name="enc.W").status == 404
    assert "enc.w" in v.get("array", at=0, name="enc.W").text, "an error names what is close"
    assert v.get("array", at=0, name="enc.w", rows=7).status == 422
    assert v.get("array", at=0, name="enc.w", index="1;2").status == 400
    assert v.get("array", at=0, name="enc.w", index="9" * 19 + ",0", every="0,99999").status == 200
    assert v.get("nowhere").status == 404


def test_beyond_loopback_a_token_is_needed(formats: list[Path], kit: Any) -> None:
    with Server(formats[:1], host="0.0.0.0") as server:
        assert server.token
        v = kit.Visitor(server)
        r = v.get("checkpoint", at=0)
        assert r.status == 403
        assert "enc" not in r.text
        assert v.get("checkpoint", at=0, token="wrong").status == 403
        r = v.get("checkpoint", at=0, token=server.token)
        assert r.status == 302
        assert server.token not in r.headers["location"]
        cookie = r.headers["set-cookie"].split(";")[0]
        assert "HttpOnly" in r.headers["set-cookie"]
        assert "SameSite=Strict" in r.headers["set-cookie"]
        assert v.ask("GET", "/checkpoint?at=0", Cookie=cookie).status == 200
        for wrong in (f"{cookie}x", cookie[:-1], f"{cookie.partition('=')[0]}=guess"):
            assert v.ask("GET", "/checkpoint?at=0", Cookie=wrong).status == 403, wrong
        assert v.ask("POST", "/health", "at=0", Origin=f"http://{v.host}").status == 403


def test_a_taken_port_is_a_plain_error(formats: list[Path]) -> None:
    with Server(formats[:1]) as server, pytest.raises(CheckpointError, match=f"{server.port}"):
        Server(formats[:1], port=server.port)


# ----- hostile files --------------------------------------------------------------------------------------------------


def test_hostile_texts_stay_texts(visit: Any, hostile: Path, kit: Any) -> None:
    v = visit(hostile)
    for view in VIEWS:
        r = v.get(view, at=0)
        assert r.status == 200, (view, r.text)
        shown = kit.Markup(r.text).check()
        assert sum(tag == "script" for tag, _ in shown.elements) == 1
    for name in kit.NAMES:
        for view in ("array", "statistics"):
            r = v.get(view, at=0, name=key(name))
            assert r.status == 200, (view, name)
            assert sum(tag == "script" for tag, _ in kit.Markup(r.text).check().elements) == 1
        assert v.get("array", at=0, name=key(name), format="json").json["shape"] == [2, 3]
    found = v.get("checkpoint", at=0, q="<script>")
    assert "&lt;script&gt;alert(1)" in found.text
    v.post("health", at="0")
    v.finished("health", at=0)
    kit.Markup(v.get("health", at=0).text).check()
    kit.Markup(v.get("checkpoint", at=0, in_="deep").text).check()
    links = [
        a["href"]
        for tag, a in kit.Markup(v.get("checkpoint", at=0, sort="name").text).elements
        if tag == "a" and a.get("href", "").startswith("array?")
    ]
    assert len(links) == len(kit.NAMES) + 1
    for link in links:
        assert v.ask("GET", f"/{link}").status == 200, link


def test_hostile_texts_stay_texts_in_a_notebook(hostile: Path, kit: Any) -> None:
    ckpt = mt.open_checkpoint(hostile)
    shown = kit.Markup(ckpt._repr_html_()).check()
    assert not any(tag == "script" for tag, _ in shown.elements)
    for name in kit.NAMES:
        kit.Markup(ckpt[name]._repr_html_()).check()


def test_a_huge_shape_is_shown_at_once(visit: Any, tmp_path: Path, kit: Any) -> None:
    import zarr

    zarr.create_array(tmp_path / "z", shape=(1 << 40, 1 << 20, 3), chunks=(64, 64, 3), dtype="f4")
    v = visit(tmp_path / "z")
    started = time.monotonic()
    for view in ("checkpoint", "map", "details"):
        assert v.get(view, at=0).status == 200
    name = v.get("checkpoint", at=0, format="json", sort="name").json["rows"][0]["name"]
    r = v.get("array", at=0, name=key(name), rows=0, columns=1, every="1,1", index=f"{1 << 39},5,1")
    assert r.status == 200
    kit.Markup(r.text).check()
    assert v.get("array", at=0, name=key(name)).status in (200, 422)
    assert v.get("statistics", at=0, name=key(name), format="json").json["exact"] is False
    assert time.monotonic() - started < 200, "nothing that grows with the shape may be done"


def test_a_chunk_that_unpacks_to_all_memory_is_not_opened(visit: Any, tmp_path: Path) -> None:
    import zarr

    group = zarr.create_group(tmp_path / "z")
    group.create_array("bomb", shape=(1 << 20, 1 << 16), chunks=(1 << 20, 1 << 16), dtype="f4")
    v = visit(tmp_path / "z")
    r = v.get("array", at=0, name="bomb")
    assert r.status == 200
    assert "bytes unpacked" in r.text
    assert v.get("statistics", at=0, name="bomb").status == 422
    v.post("health", at="0")
    assert v.finished("health", at=0)["counts"] == {"unreadable": 1}


def test_damaged_files_give_plain_pages(visit: Any, tmp_path: Path, kit: Any) -> None:
    save(tmp_path / "c", {"w": np.arange(64.0), "v": np.ones(4)})
    shard = next(p for p in (tmp_path / "c" / "w").iterdir() if p.name != "zarr.json")
    data = bytearray(shard.read_bytes())
    data[3] ^= 1
    shard.write_bytes(bytes(data))
    (tmp_path / "junk.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "meshtape.json").write_text('{"format": "meshtape", "version": 1')
    v = visit(tmp_path)
    r = v.get("array", at="0/c", name="w")
    assert r.status == 200
    assert "crc32c" in kit.Markup(r.text).check().text
    assert v.get("statistics", at="0/c", name="w").status == 422
    assert "damaged" in v.get("array", at="0/c", name="w", check=1).text
    for name in ("junk.safetensors", "cut"):
        r = v.get("checkpoint", at=f"0/{name}")
        assert r.status == 422, name
        assert "CorruptCheckpoint" in kit.Markup(r.text).check().text
    v.post("health", at="0/c")
    data = v.finished("health", at="0/c")
    assert data["counts"]["unreadable"] == 1


def test_values_that_are_not_numbers(visit: Any, tmp_path: Path, kit: Any) -> None:
    tree = {
        "nan": np.full((3, 3), np.nan),
        "mixed": np.array([[np.nan, np.inf], [-np.inf, 1.0]]),
        "complex": np.array([1 + 2j, np.nan]),
        "bool": np.array([True, False]),
        "empty": np.zeros((0, 4)),
        "big": np.array([np.iinfo(np.uint64).max], np.uint64),
        "extremes": np.array([np.finfo("f8").max, np.finfo("f8").min]),
        "scalar": np.array(2.5),
        "deep": np.zeros((1,) * 30),
    }
    save(tmp_path / "c", tree)
    v = visit(tmp_path / "c")
    for name, a in tree.items():
        for view in ("array", "statistics"):
            r = v.get(view, at=0, name=name)
            assert r.status == 200, (name, view, r.text)
            kit.Markup(r.text).check()
        if a.size:
            first = v.get("values", at=0, name=name).json["values"][0][0]
            expected = a.reshape(-1)[0]
            np.testing.assert_equal(
                (
                    first == "True"
                    if a.dtype.kind == "b"
                    else type(expected)(complex(first) if a.dtype.kind == "c" else first)
                ),
                expected,
            )
    assert v.get("values", at=0, name="big").json["values"] == [["18446744073709551615"]]


@pytest.mark.parametrize("layers", [400, pytest.param(2000, marks=pytest.mark.slow)])
def test_tens_of_thousands_of_arrays(
    visit: Any, tmp_path: Path, kit: Any, capsys: pytest.CaptureFixture[str], layers: int
) -> None:
    """Fifty a layer."""
    one = np.zeros(2, np.float16)
    names = (f"model.layers.{i}.block.{k}.weight" for i in range(layers) for k in range(50))
    save_file(dict.fromkeys(names, one), tmp_path / "many.safetensors")
    v = visit(tmp_path / "many.safetensors")
    last = f"layers.{layers - 1} weight"
    lines = []
    for what, view, parameters in (
        ("first page, opening included", "checkpoint", {}),
        ("page again", "checkpoint", {}),
        ("search", "checkpoint", {"q": last}),
        ("sorted by size", "checkpoint", {"sort": "size", "down": 1}),
        ("map", "map", {}),
        ("group", "checkpoint", {"in_": ["model", "layers", "7"]}),
        ("array", "array", {"name": "model.layers.3.block.4.weight"}),
    ):
        started = time.perf_counter()
        r = v.get(view, at=0, **parameters)
        lines.append(f"{what:30} {1000 * (time.perf_counter() - started):8.0f} ms {len(r.body) / 1024:8.0f} KiB")
        assert r.status == 200
        assert len(r.body) < 400_000, "a page must not grow with the checkpoint"
        kit.Markup(r.text).check()
    assert v.get("checkpoint", at=0, q=last, format="json").json["found"] == 50
    with capsys.disabled():
        print(f"\n{50 * layers:,} arrays:", *lines, sep="\n  ")


def test_documents_beside_the_arrays_are_shown(visit: Any, tmp_path: Path, kit: Any) -> None:
    documents = {"config": {"width": 4, "<b>": "</pre><script>"}}
    save(tmp_path / "c", {"w": np.ones(2)}, documents=documents)
    v = visit(tmp_path / "c")
    shown = kit.Markup(v.get("details", at=0).text).check()
    assert '"width": 4' in shown.text
    assert sum(tag == "script" for tag, _ in shown.elements) == 1
    file = tmp_path / "c" / "config.json"
    file.write_text(file.read_text() + " ")
    r = v.get("details", at=0)
    assert r.status == 200
    assert "It cannot be read" in r.text


# ----- the other faces ------------------------------------------------------------------------------------------------


def test_a_process_is_started_and_ended(formats: list[Path]) -> None:
    command = [sys.executable, "-m", "meshtape", "browse", str(formats[0]), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as p:
        try:
            url = p.stdout.readline().strip()
            assert re.match(r"http://127\.0\.0\.1:\d+/$", url)
            with urllib.request.urlopen(url, timeout=120) as answer:
                assert b"enc" in answer.read()
            p.send_signal(signal.SIGINT)
            assert p.wait(120) == 0, p.stderr.read()
        finally:
            p.kill()


def test_browse_in_a_session_has_one_server_and_a_token(formats: list[Path], tmp_path: Path) -> None:
    from meshtape.storage import browse

    try:
        first = mt.open_checkpoint(formats[0]).browse()
        second = mt.CheckpointManager(tmp_path / "run", best="loss").browse()
        assert first.url.split("?")[0] == second.url.split("?")[0]
        assert "token=" in first.url
        with urllib.request.build_opener(urllib.request.HTTPCookieProcessor()).open(first.url, timeout=120) as answer:
            assert b"enc" in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(first.url.split("?")[0] + "?at=0", timeout=120)
        assert first.url.replace("&", "&amp;") in first._repr_html_()
    finally:
        browse.close()


def test_a_manager_shows_itself(tmp_path: Path, kit: Any) -> None:
    manager = mt.CheckpointManager(tmp_path / "run", best="acc", best_is="highest")
    assert repr(manager) == f"CheckpointManager({str(tmp_path / 'run')!r}, keep=2, best='acc', best_is='highest')"
    assert "0" in kit.Markup(manager._repr_html_()).check().text
    for step, acc in ((1, 0.5), (2, 0.75)):
        manager.save(step, {"w": np.ones(2)}, metrics={"acc": acc})
    shown = kit.Markup(manager._repr_html_()).check()
    assert "best" in shown.text
    # Where styles and drawings are stripped, words are left of the curve.
    assert [a["alt"] for tag, a in shown.elements if tag == "img"] == ["acc by step, from 0.5 to 0.75"]
    assert not any(tag == "svg" for tag, _ in shown.elements)


def test_showing_a_checkpoint_needs_no_server(formats: list[Path]) -> None:
    code = (
        "import sys, meshtape as mt\n"
        f"ckpt = mt.open_checkpoint({str(formats[0])!r}); ckpt._repr_html_(); ckpt['enc.w']._repr_html_()\n"
        "print(sorted(m for m in ('tornado', 'dask', 'zarr') if m in sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_page_says_which_steps_it_leaves_out_and_that_none_is_best(visit: Any, tmp_path: Path, kit: Any) -> None:
    manager = mt.CheckpointManager(tmp_path / "run", keep=None)
    for step in (1, 3000, 200_000_000):
        manager.save(step, {"w": np.ones(1)}, metrics={"loss": 1 / step, "rate": step})
    for step in range(1001, 3000):
        (tmp_path / "run" / f"step-{step:08d}").mkdir()
    listed = json.loads(CliRunner().invoke(main, ["ls", str(tmp_path / "run"), "--json"]).stdout)["steps"]
    assert [s["step"] for s in listed] == [1, *range(1001, 3001), 200_000_000]
    v = visit(tmp_path / "run")
    data = v.get("run", at="0", format="json").json
    assert (data["older"], len(data["steps"]), data["steps"][-1]["step"], data["best"]) == (2, 2000, 200_000_000, None)
    shown = kit.Markup(v.get("run", at="0").text).check()
    assert all(t in shown.text for t in ("2 older", "the newest 500 of 2,002", "none is marked as best"))
    assert all(f"best={d}" in v.get("run", at="0").text for d in ("lowest", "highest"))
    other = v.get("run", at="0", metric="rate", best="lowest")
    assert all(t in kit.Markup(other.text).check().text for t in ("step 3,000 of those read", "best is the lowest"))


def test_object_stores_are_browsed(visit: Any, kit: Any) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed (the extra s3)")
    manager = mt.CheckpointManager("memory://browsed/run", keep=None, best="loss")
    for step in (1, 2):
        manager.save(step, {"w": np.arange(2000.0).reshape(40, 50) * step}, metrics={"loss": 1 / step})
    v = visit("memory://browsed/run")
    assert v.get("open", at=0).headers["location"] == "run?at=0"
    data = v.get("run", at=0, format="json").json
    assert [s["step"] for s in data["steps"]] == [1, 2]
    assert data["best"] == 2
    kit.Markup(v.get("run", at=0).text).check()
    at = "0/step-00000002"
    assert v.get("checkpoint", at=at, format="json").json["rows"][0]["shape"] == [40, 50]
    r = v.get("array", at=at, name="w", check=1)
    assert "its checksum fits" in kit.Markup(r.text).check().text
    assert v.get("statistics", at=at, name="w", format="json").json["high"] == 3998.0
    v.post("compare", a="0/step-00000001", b=at)
    assert v.finished("compare", a="0/step-00000001", b=at)["changes"][0]["ratio"] == 1.0
    assert v.get("compare", at=at).status == 200
    for bad in ("0/../other", "0/..", "0/.hidden"):
        assert v.get("checkpoint", at=bad).status == 404


def test_a_renamed_checkpoint_is_compared_through_rules(tmp_path: Path, visit: Any, kit: Any) -> None:
    q, k = np.arange(6.0).reshape(2, 3), np.ones((2, 3))
    save(tmp_path / "a", {"h": [{"q": q, "k": k}], "old": np.zeros(2)})
    save(tmp_path / "b", {"layers": [{"qk": np.concatenate([q, k]) * 1.5}], "new": np.ones(4)})
    rules = "h.{i}.q, h.{i}.k -> layers.{i}.qk, concat(axis=0)\r\nold -> _"
    v = visit(tmp_path / "a", tmp_path / "b")
    page = kit.Markup(v.get("compare", a="0", b="1").text).check()
    assert ("details", {"class": "mt-ruling", "open": None}) in page.elements, "nothing in common: rules are offered"
    assert v.get("compare", a="0", b="1", format="json").json["common"] == 0
    asked = {"a": "0", "b": "1", "rules": rules}
    done = v.post("compare", **asked)
    assert done.status == 303
    data = v.finished("compare", **asked)
    (change,) = data["changes"]
    assert change["name"] == "layers.0.qk"
    assert change["ratio"] == pytest.approx(0.5)
    assert data["only_a"] == []
    assert data["only_b"] == ["new"]
    assert [r["applied"] for r in data["rules"]] == [1, 1]
    page = kit.Markup(v.get("compare", **asked).text).check()
    links = [a["href"] for tag, a in page.elements if tag == "a" and "layers.0.qk" in (a["href"] or "")]
    assert links == ["array?at=1&name=layers.0.qk"], "what a rule has made is no page of A"
    assert v.get("compare", a="0", b="1", format="json").json["state"] == "none", (
        "without rules it is another comparison"
    )


@pytest.mark.parametrize(
    "rules", ["a -> b, trnspose()", "nothing.{i} -> x", "w -> x\nw -> x", "</textarea><script>alert(1)</script>"]
)
def test_wrong_rules_are_shown_where_they_are_wrong(rules: str, tmp_path: Path, visit: Any, kit: Any) -> None:
    save(tmp_path / "a", {"w": np.ones(2)})
    v = visit(tmp_path / "a")
    answer = v.get("compare", a="0", b="0", rules=rules)
    assert answer.status == 200
    page = kit.Markup(answer.text).check()
    assert "Rule" in page.text
    assert ("button", {"class": "mt-main", "disabled": None}) in page.elements
    assert v.get("compare", a="0", b="0", rules=rules, format="json").json["error"]
    assert v.post("compare", a="0", b="0", rules=rules).status in (404, 422)


@pytest.mark.parametrize("name", ["ours", "missing"])
def test_the_frame_of_a_page_comes_before_a_slow_view(name: str, formats: list[Path], kit: Any) -> None:
    go = threading.Event()
    with Server([formats[0].parent]) as server:
        read = server.site.open

        def slow(at: str) -> Any:
            go.wait(240)
            return read(at)

        server.site.open = slow
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=240)
        connection.request("GET", f"/checkpoint?at=0/{name}", headers={"Host": f"127.0.0.1:{server.port}"})
        answer = connection.getresponse()
        first = answer.read1().decode()
        assert "Reading …" in first
        assert "<main" not in first
        go.set()
        page = kit.Markup(first + answer.read().decode()).check()
        connection.close()
    assert [t for t, _ in page.elements].count("main") == 1
    assert ("enc" in page.text) == (name == "ours")
    assert ("Not found" in page.text) == (name == "missing")
