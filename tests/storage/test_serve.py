"""`serve`: checkpoints of any kind over HTTP, as safetensors and as Zarr v3."""

import contextlib
import errno
import http.client
import itertools
import json
import os
import re
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from urllib.parse import quote, unquote, urlsplit

import numpy as np
import pytest
from click.testing import CliRunner
from obstore.store import HTTPStore

import meshtape as mt
from meshtape import errors
from meshtape.cli.main import main
from meshtape.storage import virtual
from meshtape.storage.base import names
from meshtape.storage.browse.server import half_closed
from meshtape.storage.readers.compressed import CompressedTensor
from meshtape.storage.serving import sending, virtual_files, zarr_view
from meshtape.storage.serving import server as serving
from meshtape.storage.serving.served import ServedCheckpoint

R = np.random.default_rng(0)
TREE = {
    "embed.weight": R.normal(size=(600, 50)).astype("f4"),
    "b": R.normal(size=(7, 3)),
    "s": np.asarray(np.int32(4)),
    "empty": np.zeros((0, 2), "f4"),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(sending, "SMALL", 5000)  # all ways of sending are taken
    monkeypatch.setattr(virtual_files, "_WINDOW", 10_000)


def ask(url, method="GET", **headers):
    parts = urlsplit(url)
    c = http.client.HTTPConnection(parts.hostname, parts.port, timeout=200)
    c.request(method, parts.path, headers={k.replace("_", "-"): v for k, v in headers.items()})
    answer = c.getresponse()
    data = answer.read()
    c.close()
    return answer.status, {k.title().replace("Etag", "ETag"): v for k, v in answer.getheaders()}, data


def until(condition):
    end = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def file(where):
    path = os.fspath(where / "a.safetensors")
    mt.storage.save_safetensors(path, TREE)
    return path


def ours(where):
    mt.save(where / "ours", TREE, documents={"config": {"model_type": "x"}})
    return os.fspath(where / "ours")


def zstd(where):
    mt.save(where / "zstd", TREE, compression="zstd")
    return os.fspath(where / "zstd")


def dual(where):
    mt.save(where / "dual", TREE, layout="dual")
    return os.fspath(where / "dual")


def hugging_face(where):
    mt.storage.merge(ours(where), where / "hf", max_shard_bytes=2000)
    return os.fspath(where / "hf")


@pytest.mark.parametrize("make", [file, ours, zstd, dual, hugging_face])
def test_every_kind_is_served_as_both(tmp_path, make):
    zarr = pytest.importorskip("zarr")
    made = make(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    with mt.storage.serve(made) as server:
        ckpt = mt.open_checkpoint(server.url + "safetensors/")
        for name, want in TREE.items():
            got = ckpt[name].read()
            assert (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes())
        np.testing.assert_array_equal(ckpt["embed.weight"][7:300:50, 3], TREE["embed.weight"][7:300:50, 3])
        seen = mt.open_checkpoint(server.url + "zarr")
        for name, want in TREE.items():
            np.testing.assert_array_equal(seen[name].read(), want)
        store = zarr.storage.ObjectStore(
            HTTPStore.from_url(server.url + "zarr", client_options={"allow_http": True}), read_only=True
        )
        group = zarr.open_group(store, mode="r", use_consolidated=True)
        np.testing.assert_array_equal(group["embed.weight"][5:500:9], TREE["embed.weight"][5:500:9])
        index = json.loads(ask(server.url + "safetensors/model.safetensors.index.json")[2])["weight_map"]
        assert set(index) == set(TREE)
        if make in (file, hugging_face):
            status, _, data = ask(server.url + f"safetensors/{index['b']}")
            there = made if make is file else os.path.join(made, index["b"])
            with open(there, "rb") as f:
                assert (status, data) == (200, f.read())
        if make in (ours, hugging_face):
            assert json.loads(ask(server.url + "safetensors/config.json")[2]) == {"model_type": "x"}
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}


@pytest.mark.parametrize("make", [file, zstd])
def test_ranges(tmp_path, make):
    with mt.storage.serve(make(tmp_path)) as server:
        url = server.url + "safetensors/model.safetensors"
        status, head, whole = ask(url)
        n = len(whole)
        assert status == 200
        assert head["Accept-Ranges"] == "bytes"
        assert int(head["Content-Length"]) == n
        tag = head["ETag"]
        status, again, data = ask(url, "HEAD")
        assert (status, data, again["Content-Length"], again["ETag"]) == (200, b"", str(n), tag)
        for said, start, stop in [
            ("3-9", 3, 10),
            (f"{n - 5}-", n - 5, n),
            ("-7", n - 7, n),
            ("100-90000", 100, 90_001),
            (f"5-{9 * n}", 5, n),
            ("0" * 30 + "5-" + "9" * 30, 5, n),
        ]:
            status, head, data = ask(url, Range=f"bytes={said}")
            assert (status, data) == (206, whole[start:stop]), said
            assert head["Content-Range"] == f"bytes {start}-{stop - 1}/{n}"
        for odd in ("bytes=9-3", "bytes=0-1,4-5", "bytes=-", "lines=1-2"):
            assert ask(url, Range=odd)[0] == 200, odd
        status, head, _ = ask(url, Range=f"bytes={n}-")
        assert (status, head["Content-Range"]) == (416, f"bytes */{n}")
        assert ask(url, Range="bytes=0-3", If_Range=tag)[0] == 206
        assert ask(url, Range="bytes=0-3", If_Range='"other"')[0] == 200
        assert ask(url, If_None_Match=tag)[0] == 304
        assert ask(url, If_None_Match="*")[0] == 304
        assert ask(url, If_Match='"other"')[0] == 412
        assert ask(url, If_Match=f'"other", {tag}')[0] == 200


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("said", ["0-9", "0-20000", "0-"])
def test_a_client_that_closes_its_side_gets_its_answer(tmp_path, monkeypatch, version, said):
    """In each way of sending, and where the end comes before the answer begins."""
    made, ended = zstd(tmp_path), threading.Event()
    find = ServedCheckpoint.find

    def late(self, path):
        ended.wait(200)
        return find(self, path)

    with mt.storage.serve(made) as server:
        whole = ask(server.url + "safetensors/model.safetensors")[2]
        monkeypatch.setattr(ServedCheckpoint, "find", late)
        closes, read = threading.Event(), half_closed.IOStream.read_from_fd

        def seen(self, buf):
            if (found := read(self, buf)) == 0:
                closes.set()
            return found

        monkeypatch.setattr(half_closed.IOStream, "read_from_fd", seen)
        with socket.create_connection(("127.0.0.1", server.port), timeout=200) as s:
            path = "/safetensors/model.safetensors"
            s.sendall(f"GET {path} HTTP/{version}\r\nHost: localhost\r\nRange: bytes={said}\r\n\r\n".encode())
            s.shutdown(socket.SHUT_WR)
            closes.wait(200)
            ended.set()
            got = b"".join(iter(lambda: s.recv(1 << 16), b""))
    stop = int(said[2:] or len(whole) - 1) + 1
    head, _, body = got.partition(b"\r\n\r\n")
    assert b" 206 " in head.splitlines()[0]
    assert body == whole[:stop]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_clients_that_take_nothing_keep_nobody_waiting(tmp_path, monkeypatch, compression):
    """More of them than there are threads; they get all when they read on, also what was forgotten meanwhile."""
    monkeypatch.setattr(virtual_files, "_WINDOW", 1 << 20)
    monkeypatch.setattr(sending, "_TURN", 0.02)
    monkeypatch.setattr(sending, "_KEPT", 2)
    mt.save(tmp_path / "c", {"w": R.normal(size=(4000, 1000)).astype("f4")}, compression=compression)
    with mt.storage.serve(tmp_path / "c") as server, contextlib.ExitStack() as opened:
        server.sender.senders = ThreadPoolExecutor(2)
        whole = ask(server.url + "safetensors/model.safetensors")[2]
        slow = [opened.enter_context(socket.socket()) for _ in range(5)]
        for s in slow:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            s.settimeout(200)
            s.connect(("127.0.0.1", server.port))
            s.sendall(b"GET /safetensors/model.safetensors HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        until(lambda: server.sender._waiting == len(slow))
        assert ask(server.url + "safetensors/model.safetensors")[2] == whole
        for s in slow[1:]:
            got = b"".join(iter(lambda s=s: s.recv(1 << 16), b""))
            assert got.partition(b"\r\n\r\n")[2] == whole
        assert server.sender._waiting == len(server.sender._busy) == 1


def test_a_client_that_takes_nothing_for_too_long_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(sending, "_TURN", 0.02)
    monkeypatch.setattr(sending, "PATIENCE", 0.1)
    mt.storage.save_safetensors(tmp_path / "a.safetensors", {"w": np.zeros((4000, 1000), "f4")})
    with mt.storage.serve(tmp_path / "a.safetensors") as server, socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.settimeout(200)
        s.connect(("127.0.0.1", server.port))
        s.sendall(b"GET /safetensors/model.safetensors HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: server.sender._waiting == 1)
        until(lambda: not server.sender._busy)
        got = b"".join(iter(lambda: s.recv(1 << 16), b""))
        assert len(got.partition(b"\r\n\r\n")[2]) < 16_000_000


def test_only_the_checkpoint_is_reached(tmp_path):
    made = ours(tmp_path)
    (tmp_path / "secret").write_text("x")
    with mt.storage.serve(made) as server:
        for path in (
            "safetensors/../../secret",
            "safetensors/%2e%2e/secret",
            "zarr/../meshtape.json",
            "meshtape.json",
            "zarr/b/c/9/9",
            "safetensors/none",
            "zarr/%00",
        ):
            assert ask(server.url + path)[0] == 404, path
        assert ask(server.url, Host="evil.example")[0] == 403
        assert ask(server.url + "zarr/zarr.json", "POST")[0] == 405
        for folder, name in (
            ("", "zarr/"),
            ("zarr/", "embed.weight/"),
            ("safetensors/", "model.safetensors"),
            ("zarr/b/", "zarr.json"),
        ):
            assert f'href="{name}"' in ask(server.url + folder)[2].decode()
    with mt.storage.serve(made, token="to/ken") as server:
        origin = server.url.removesuffix("to%2Fken/")
        assert ask(origin + "zarr/zarr.json")[0] == 403
        assert ask(origin + "zarr/zarr.json", Authorization="Bearer to/ken")[0] == 200


def test_a_token_is_a_part_of_the_path(tmp_path):
    with mt.storage.serve(ours(tmp_path), token="abc") as server:
        assert server.url.endswith("/abc/")
        np.testing.assert_array_equal(mt.open_checkpoint(server.url + "safetensors")["b"].read(), TREE["b"])


@pytest.mark.parametrize("token", [None, "abc"])
def test_the_start_page_names_what_lies_below(tmp_path, token):
    with mt.storage.serve(ours(tmp_path), token=token) as server:
        out = CliRunner().invoke(main, ["ls", server.url])
        assert out.exit_code == 1
        assert f"open {server.url}safetensors or {server.url}zarr" in out.output


@pytest.mark.parametrize("follow", [False, True])
def test_a_document_that_is_replaced_or_over_one_that_is(tmp_path, follow):
    steps = [mt.save(tmp_path / str(i), {"w": np.full(4, float(i))}).path for i in range(4)]
    inner, outer = tmp_path / "inner.json", tmp_path / "outer.json"
    virtual.write(inner, virtual.mean(steps[:2]))
    virtual.write(outer, virtual.cast(inner, np.float32))
    with mt.storage.serve(inner, follow=follow) as one, mt.storage.serve(outer, follow=follow) as over:
        urls = [server.url + "safetensors/model.safetensors" for server in (one, over)]
        before = [ask(url)[1]["ETag"] for url in urls]
        virtual.write(inner, virtual.mean(steps[2:]), overwrite=True)
        found = [ask(url) for url in urls]
        assert [status for status, *_ in found] == ([200, 422] if follow else [409, 409])  # its parent is another
        if follow:
            assert found[0][1]["ETag"] != before[0]
            assert mt.load(one.url + "safetensors")["w"].tolist() == [2.5] * 4
        os.remove(inner)
        assert ask(urls[0])[0] in ((503, 404) if follow else (409,))


def test_arrays_called_as_the_files_of_a_checkpoint(tmp_path):
    names = ("meshtape.json", "model.safetensors", "model.safetensors.index.json")
    mt.save(tmp_path / "c", {n: np.full(3, i) for i, n in enumerate(names)})
    with mt.storage.serve(tmp_path / "c") as server:
        assert [ask(f"{server.url}zarr/{n}")[0] for n in names] == [404] * 3
        found = mt.load(f"{server.url}zarr")
        assert [found[n].tolist() for n in names] == [[i] * 3 for i in range(3)]


def test_replacement_and_damage(tmp_path):
    path = file(tmp_path)
    with mt.storage.serve(path, follow=True) as server:
        url = server.url + "safetensors/model.safetensors"
        first = ask(url, "HEAD")[1]["ETag"]
        ckpt = mt.open_checkpoint(server.url + "safetensors")
        mt.storage.save_safetensors(path, {**TREE, "b": TREE["b"] + 1}, overwrite=True)
        assert ask(url, Range="bytes=9-20")[0] == 409
        status, head, _ = ask(url, "HEAD")
        assert status == 200
        assert head["ETag"] != first
        with pytest.raises(mt.errors.CheckpointError):
            ckpt["b"].read()
        ckpt = mt.open_checkpoint(server.url + "safetensors")
        np.testing.assert_array_equal(ckpt["b"].read(), TREE["b"] + 1)
        mt.storage.save_safetensors(path, TREE, overwrite=True)
        with pytest.raises(mt.errors.CheckpointReplaced):
            ckpt["embed.weight"][0, 0]
    made = zstd(tmp_path)
    shard = tmp_path / "zstd" / "embed.weight" / "c.0.0"
    shard.write_bytes(b"\1" + shard.read_bytes()[1:])
    with mt.storage.serve(made) as server:
        status, _, text = ask(server.url + "zarr/embed.weight/c/0/0")
        assert status == 422
        assert b"CorruptCheckpoint" in text


@pytest.mark.parametrize("make", [file, ours, zstd, dual])
def test_a_checkpoint_that_is_replaced_or_gone_is_never_mixed_nor_absent(tmp_path, make):
    """Zarr takes 404 for the fill value, and its clients look at no ETag."""
    made = make(tmp_path)
    with mt.storage.serve(made) as server:
        keys = ["zarr/zarr.json", "zarr/embed.weight/c/0/0", "zarr/b/c/0/0", "safetensors/model.safetensors"]
        assert [ask(server.url + key)[0] for key in keys] == [200] * 4
        if make is file:
            mt.storage.save_safetensors(made, {"other": np.ones(3)}, overwrite=True)
        else:
            mt.save(made, {"other": np.ones(3)}, overwrite=True)
        for _ in range(2):
            assert [ask(server.url + key)[0] for key in keys] == [409] * 4
        shutil.rmtree(made) if os.path.isdir(made) else os.remove(made)
        assert [ask(server.url + key)[0] for key in keys] == [409] * 4
    with mt.storage.serve(make(tmp_path), follow=True) as server:
        shutil.rmtree(made) if os.path.isdir(made) else os.remove(made)
        assert [ask(server.url + key)[0] for key in keys] == [503] * 4


def test_damage_that_shows_late_is_told_to_the_next_request(tmp_path, monkeypatch):
    monkeypatch.setattr(virtual_files, "_WINDOW", 1 << 20)
    values = R.normal(size=(4000, 256)).astype("f4")
    mt.save(tmp_path / "c", {"w": values})
    shard = tmp_path / "c" / "w" / "c.0.0"
    with open(shard, "r+b") as f:
        f.seek(3_500_000)
        f.write(b"damaged")
    with mt.storage.serve(tmp_path / "c") as server:
        for _ in range(2):
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                ask(server.url + "zarr/w/c/0/0")
            until(lambda: server.told)
            status, _, text = ask(server.url + "zarr/w/c/0/0")
            assert status == 422
            assert b"does not fit its crc32c" in text


def test_damage_of_a_checkpoint_that_was_replaced_is_not_told_of_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(virtual_files, "_WINDOW", 1 << 20)
    values = R.normal(size=(4000, 256)).astype("f4")
    mt.save(tmp_path / "c", {"w": values})
    with open(tmp_path / "c" / "w" / "c.0.0", "r+b") as f:
        f.seek(3_500_000)
        f.write(b"damaged")
    with mt.storage.serve(tmp_path / "c", follow=True) as server:
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            ask(server.url + "zarr/w/c/0/0")
        until(lambda: server.told)
        mt.save(tmp_path / "c", {"w": values + 1}, overwrite=True)
        assert ask(server.url + "zarr/zarr.json")[0] == 200
        status, _, found = ask(server.url + "zarr/w/c/0/0")
        assert (status, found) == (200, (values + 1).tobytes())


def test_absent_chunks_of_others_are_refused(tmp_path):
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(tmp_path / "z", mode="w", zarr_format=2)
    group.create_array("a", data=np.ones((8, 1000), "f4"), chunks=(1, 1000))
    (tmp_path / "z" / "a" / "3.0").unlink()
    with pytest.raises(mt.errors.IncompleteCheckpoint, match='missing="fill"'):
        mt.storage.serve(tmp_path / "z")
    with mt.storage.serve(tmp_path / "z", missing="fill") as server:
        held = mt.open_checkpoint(server.url + "zarr")["a"].read()
        assert held.sum(1).tolist() == [1000] * 3 + [0] + [1000] * 4
    with pytest.raises(mt.errors.CheckpointError, match="missing is"):
        mt.storage.serve(tmp_path / "z", missing="warn")


def test_a_dtype_that_safetensors_lacks_is_told_at_the_start(tmp_path):
    mt.save(tmp_path / "c", {"z": np.ones(3, "c16"), "w": np.ones(3)})
    with pytest.warns(UserWarning, match="safetensors/ is not there: .*'z'"):
        server = mt.storage.serve(tmp_path / "c")
    with server:
        assert ask(server.url + "safetensors/model.safetensors")[0] == 422
        assert ask(server.url + "zarr/w/c/0")[2] == np.ones(3).tobytes()


def test_packed_bits_are_served_as_the_file_that_they_lie_in(tmp_path):
    head = json.dumps({"p": {"dtype": "F4", "shape": [2, 8], "data_offsets": [0, 8]}}).encode()
    data = len(head).to_bytes(8, "little") + head + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.warns(UserWarning, match="p .packed bits.") as told:
        server = mt.storage.serve(tmp_path / "model.safetensors")
    with server:
        assert ask(server.url + "safetensors/model.safetensors")[2] == data
    assert "safetensors/ is not there" not in str(told[0].message)


def test_clients_that_escape_names_or_do_not_find_the_same(tmp_path):
    zarr = pytest.importorskip("zarr")
    tree = {n: np.full(3, i + 1.0) for i, n in enumerate(["dense/kernel:0", "w+b", "w%2Bb", "layers[0]", "a b", "~x"])}
    mt.save(tmp_path / "c", tree)
    with mt.storage.serve(tmp_path / "c") as server:
        view = mt.storage.as_zarr(tmp_path / "c")
        store = HTTPStore.from_url(server.url + "zarr", client_options={"allow_http": True})
        held = zarr.open_group(zarr.storage.ObjectStore(store, read_only=True), mode="r", use_consolidated=True)
        for name, want in zip(names.zarr_paths(list(tree)), tree.values(), strict=True):
            np.testing.assert_array_equal(held[name][:], want)
            np.testing.assert_array_equal(zarr.open_group(view, mode="r")[name][:], want)
            for path in {name, quote(name)} - {name if " " in name else ""}:  # as fsspec and obstore send it
                assert ask(f"{server.url}zarr/{path}/c/0")[2] == want.tobytes()


def test_chunks_of_others_that_are_replaced_are_told(tmp_path):
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(tmp_path / "z", mode="w")
    group.create_array("a", data=np.ones((8, 1000), "f4"), chunks=(1, 1000))
    shown = mt.storage.as_zarr(tmp_path / "z")
    with mt.storage.serve(tmp_path / "z", follow=True) as server:
        url = server.url + "safetensors/model.safetensors"
        status, head, whole = ask(url)
        assert status == 200
        time.sleep(0.02)
        zarr.open_group(tmp_path / "z", mode="r+")["a"][...] = 2
        wanted = {"Range": f"bytes={len(whole) - 8000}-", "If_Range": head["ETag"]}
        assert ask(url, **wanted)[0] == 409
        status, now, data = ask(url, **wanted)
        assert status == 200
        assert now["ETag"] != head["ETag"]
        assert np.frombuffer(data[-32000:], "f4").tolist() == [2] * 8000
    with pytest.raises(errors.CheckpointReplaced):
        zarr.open_group(shown, mode="r")["a"][:]


def test_open_checkpoints_are_served_as_they_are(tmp_path):
    path = file(tmp_path)
    ckpt = mt.open_checkpoint(path)
    double = {n: a + a if a.dtype.kind == "f" else a for n, a in TREE.items()}
    for given, want in [
        (ckpt, TREE),
        (ckpt.below("embed"), {"weight": TREE["embed.weight"]}),
        (mt.storage.virtual.add(ckpt, ckpt), double),
    ]:
        with mt.storage.serve(given) as server:
            for form in ("safetensors", "zarr"):
                seen = mt.open_checkpoint(server.url + form)
                assert set(seen) == set(want)
                for name, value in want.items():
                    np.testing.assert_array_equal(seen[name].read(), value)
    with mt.storage.serve(ckpt) as server, mt.storage.serve(mt.storage.virtual.add(ckpt, ckpt)) as other:
        tags = {ask(s.url + "safetensors/model.safetensors", "HEAD")[1]["ETag"] for s in (server, other)}
        assert len(tags) == 2
        mt.storage.save_safetensors(path, TREE, overwrite=True)
        for url in (server.url, other.url):
            assert ask(url + "zarr/zarr.json")[0] == 409
    with pytest.raises(mt.errors.CheckpointError, match="a path"):
        mt.storage.serve({"w": np.ones(2)})


def test_a_file_that_changes_while_it_is_sent_ends_early(tmp_path, monkeypatch):
    path = file(tmp_path)
    real = socket.socket.sendfile

    def touched(self, file, offset, count):
        os.utime(path, ns=(1, 1))
        return real(self, file, offset, count)

    monkeypatch.setattr(socket.socket, "sendfile", touched)
    with mt.storage.serve(path) as server, pytest.raises((http.client.IncompleteRead, ConnectionError)):
        ask(server.url + "safetensors/model.safetensors")


@pytest.mark.parametrize("shape", [(3000, 1100), (21_500, 256)], ids=["boxes", "runs of two pieces"])
def test_chunks_that_follow_are_made_ahead_and_none_of_a_checkpoint_that_is_gone(tmp_path, monkeypatch, shape):
    zarr = pytest.importorskip("zarr")
    values, made, read = R.normal(size=shape).astype("f4"), [], sending.read

    def seen(file, start, stop):
        if isinstance(file, virtual_files.ChunkFile) and start == 0:
            made.append(file.key)
        return read(file, start, stop)

    monkeypatch.setattr(virtual_files, "_WINDOW", 1 << 20)
    monkeypatch.setattr(zarr_view, "_COMPUTED", 1 << 20)
    monkeypatch.setattr(zarr_view, "LIMIT", 2 << 20)
    monkeypatch.setattr(sending, "read", seen)
    monkeypatch.setattr(sending, "_AHEAD", 2)
    mt.save(tmp_path / "c", {"w": values}, compression="zstd")
    with mt.storage.serve(tmp_path / "c", follow=True) as server:
        grid = server.source._held.zarr.grids["w"]
        coords = list(grid.shards())
        assert len(coords) > 8
        file = server.source.find("zarr/w/" + zarr_view.slashed_key(coords[0])).file
        assert (file.cut(0) < file.nbytes) == (shape[1] == 256)

        def chunk(n):
            status, _, data = ask(server.url + "zarr/w/" + zarr_view.slashed_key(coords[n]))
            wait([future for _, future in server.sender._ahead.values()])
            return np.frombuffer(data, "f4").reshape(grid.chunk) if status == 200 else status

        def right(n, by=0):
            box = grid.shard_box(coords[n])
            np.testing.assert_array_equal(chunk(n)[tuple(map(slice, box.shape))], values[box.slices] + np.float32(by))

        for n in (5, 1, 3):  # no run of chunks
            right(n)
        assert len(made) == 3
        for n in range(len(coords)):
            right(n)
        assert not server.sender._ahead
        assert len(set(made[3:])) == len(made[3:]) <= len(coords)  # each once
        for n in range(3):
            right(n)
        assert len(server.sender._ahead) == 2
        mt.save(tmp_path / "c", {"w": values + np.float32(1)}, compression="zstd", overwrite=True)
        assert chunk(3) == 409
        right(3, 1)
        store = HTTPStore.from_url(server.url + "zarr", client_options={"allow_http": True})
        group = zarr.open_group(zarr.storage.ObjectStore(store, read_only=True), mode="r", use_consolidated=True)
        np.testing.assert_array_equal(group["w"][:], values + np.float32(1))


def test_many_clients_at_once(tmp_path):
    with mt.storage.serve(ours(tmp_path)) as server:
        whole, wrong = ask(server.url + "safetensors/model.safetensors")[2], []

        def one(k):
            for i in range(5):
                a = 997 * (k + i)
                data = ask(server.url + "safetensors/model.safetensors", Range=f"bytes={a}-{a + 20_000}")[2]
                wrong.extend([] if data == whole[a : a + 20_001] else [a])

        threads = [threading.Thread(target=one, args=(k,)) for k in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not wrong


def test_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(serving.CheckpointServer, "run", lambda self: None)
    out = CliRunner().invoke(main, ["serve", ours(tmp_path)])
    assert out.exit_code == 0
    assert "/safetensors/" in out.output
    said = json.loads(CliRunner().invoke(main, ["serve", os.fspath(tmp_path / "ours"), "--json"]).stdout)
    assert set(said) == {"safetensors", "zarr", "path", "skipped"}
    assert said["skipped"] == []
    assert CliRunner().invoke(main, ["serve", os.fspath(tmp_path / "none")]).exit_code not in (0, 2)


@pytest.mark.slow
def test_fsspec_and_safetensors_open_it(tmp_path):
    pytest.importorskip("aiohttp")
    fsspec, zarr, safetensors = (pytest.importorskip(n) for n in ("fsspec", "zarr", "safetensors.numpy"))
    with mt.storage.serve(zstd(tmp_path)) as server:
        store = zarr.storage.FsspecStore(fsspec.filesystem("http", asynchronous=True), path=server.url + "zarr")
        group = zarr.open_group(store, mode="r", use_consolidated=True)
        np.testing.assert_array_equal(group["embed.weight"][5:500:9], TREE["embed.weight"][5:500:9])
        fs = fsspec.filesystem("http")
        held = safetensors.load(fs.cat_file(server.url + "safetensors/model.safetensors"))
        for name, want in TREE.items():
            np.testing.assert_array_equal(held[name], want)
        names = {f["name"].rpartition("/")[2] for f in fs.ls(server.url + "safetensors/")}
        assert names == {"model.safetensors", "model.safetensors.index.json"}


# ----- pieces ---------------------------------------------------------------------------------------------------------


def tiles(where):
    mt.save(where / "tiles", LARGE)
    return os.fspath(where / "tiles")


def packed(where):
    mt.save(where / "packed", LARGE | {f"small.{i}": np.full(300, i) for i in range(40)}, pack=True)
    return os.fspath(where / "packed")


def frames(where):
    mt.save(where / "frames", LARGE, compression="zstd")
    return os.fspath(where / "frames")


def dcp(where):
    mt.convert(tiles(where), where / "dcp", format="dcp")
    return os.fspath(where / "dcp")


@pytest.fixture
def middle(monkeypatch):
    monkeypatch.setattr(virtual_files, "_WINDOW", 400_000)


LARGE = {
    "wide": R.normal(size=(700, 1100)).astype("f4"),  # chunks are tiles: 3 MB
    "deep": R.integers(0, 9, (3, 500, 600)),
    "odd": R.normal(size=(9, 7)).astype("f2"),
}


@pytest.mark.usefixtures("middle")
@pytest.mark.parametrize("make", [tiles, packed, frames, dcp])
def test_ranges_meet_pieces_anywhere(tmp_path, make):
    reader = pytest.importorskip("safetensors.numpy")
    made = make(tmp_path)
    with mt.storage.serve(made) as server, mt.storage.serve(mt.storage.virtual.mean([made, made])) as mean:
        url = server.url + "safetensors/model.safetensors"
        whole = ask(url)[2]
        held = reader.load(whole)
        assert {n: held[n].tobytes() for n in LARGE} == {n: a.tobytes() for n, a in LARGE.items()}
        assert {n: a.tobytes() for n, a in held.items()} == {
            n: np.asarray(a).tobytes() for n, a in mt.load(made).items()
        }
        places = sorted({0, len(whole), *R.integers(0, len(whole), 40).tolist()})
        for start, stop in itertools.pairwise(places):
            data = ask(url, Range=f"bytes={start}-{stop - 1}")[2]
            assert data == whole[start:stop], (start, stop)
        if make is not packed:  # no mean of its integers
            assert ask(mean.url + "safetensors/model.safetensors")[2] == whole


@pytest.mark.usefixtures("middle")
def test_consecutive_ranges_unpack_a_chunk_once(tmp_path, monkeypatch):
    made, unpacked = frames(tmp_path), []
    real = CompressedTensor.unpack

    def counted(self, path, coord, number, *rest):
        unpacked.append((path, number))
        return real(self, path, coord, number, *rest)

    monkeypatch.setattr(CompressedTensor, "unpack", counted)
    with mt.storage.serve(made) as server:
        url = server.url + "safetensors/model.safetensors"
        whole = ask(url)[2]
        assert len(unpacked) == len(set(unpacked)) > 10
        unpacked.clear()
        got = [ask(url, Range=f"bytes={a}-{a + 99_999}")[2] for a in range(0, len(whole), 100_000)]
        assert b"".join(got) == whole
        assert len(unpacked) == len(set(unpacked))
        virtual_files._windows.__init__()
        unpacked.clear()
        with ThreadPoolExecutor(6) as pool:  # at once, too
            got = list(pool.map(lambda a: ask(url, Range=f"bytes={a}-{a + 99_999}")[2], range(0, len(whole), 100_000)))
        assert b"".join(got) == whole
        assert len(unpacked) == len(set(unpacked))
        mt.save(made, {"wide": LARGE["wide"] + 1}, overwrite=True, compression="zstd")
        assert ask(url, Range=f"bytes={len(whole) - 99}-")[0] == 409  # though its window is still there


@pytest.mark.usefixtures("middle")
def test_an_answer_leaves_the_connection_open(tmp_path):
    with mt.storage.serve(tiles(tmp_path)) as server:
        whole = ask(server.url + "safetensors/model.safetensors")[2]
        parts = urlsplit(server.url)
        client = http.client.HTTPConnection(parts.hostname, parts.port, timeout=200)
        client.connect()
        used = client.sock
        for _ in range(3):
            client.request("GET", f"{parts.path}zarr/wide/c/0/0")
            answer = client.getresponse()
            assert answer.read()[: LARGE["wide"].shape[1] * 4] == LARGE["wide"][0].tobytes()
            client.request("GET", f"{parts.path}safetensors/model.safetensors")  # of many pieces
            answer = client.getresponse()
            assert answer.read() == whole
            client.request("HEAD", f"{parts.path}safetensors/model.safetensors")
            client.getresponse().read()
            assert client.sock is used
        client.request("GET", f"{parts.path}safetensors/model.safetensors", headers={"Connection": "close"})
        answer = client.getresponse()
        assert answer.headers["Connection"] == "close"
        assert answer.read() == whole
        client.close()
        # Requests that are sent without waiting are answered one after the other.
        asked = f"GET {parts.path}safetensors/model.safetensors HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        with socket.create_connection((parts.hostname, parts.port), timeout=200) as s:
            s.sendall(3 * asked)
            s.shutdown(socket.SHUT_WR)
            got = b"".join(iter(lambda: s.recv(1 << 16), b""))
        answers = got.split(b"HTTP/1.1 200 OK\r\n")[1:]
        assert [a.partition(b"\r\n\r\n")[2] == whole for a in answers] == [True] * 3


@pytest.mark.usefixtures("middle")
@pytest.mark.parametrize("kind", ["file", "ours", "zstd", "dual", "dcp"])
def test_a_checkpoint_that_is_replaced_while_it_is_sent_is_cut(tmp_path, kind):
    old, new = ({"w": R.normal(size=(2000, 3000)).astype("f4")} for _ in range(2))
    where = tmp_path / "run"

    def write(tree):
        if kind == "file":
            mt.storage.save_safetensors(where, tree, overwrite=True)
        elif kind == "dcp":
            mt.save(tmp_path / "source", tree, overwrite=True)
            mt.convert(tmp_path / "source", where, format="dcp", overwrite=True)
        else:
            how = {"compression": kind} if kind == "zstd" else {"layout": kind} if kind == "dual" else {}
            mt.save(where, tree, overwrite=True, **how)

    write(old)
    with mt.storage.serve(where, follow=True) as server:
        parts = urlsplit(server.url)
        with socket.create_connection((parts.hostname, parts.port)) as s:
            s.sendall(
                f"GET {parts.path}safetensors/model.safetensors HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode()
            )
            got = s.recv(1000)
            write(new)
            while more := s.recv(1 << 20):
                got += more
        body = got.partition(b"\r\n\r\n")[2]
        values = body[8 + int.from_bytes(body[:8], "little") :]
        assert len(values) < old["w"].nbytes
        assert values == old["w"].tobytes()[: len(values)]
        again = ask(server.url + "safetensors/model.safetensors")
        assert again[0] == 200
        assert again[2].endswith(new["w"].tobytes())


def test_names_in_the_lists_of_folders_are_those_of_arrays(tmp_path):
    zarr = pytest.importorskip("zarr")
    values = {"a b": 1, "\u00fc": 2, "n:o": 3, "p%20q": 4}
    mt.save(tmp_path / "c", {n: np.full(3, v) for n, v in values.items()})
    with mt.storage.serve(tmp_path / "c") as server:
        known = mt.storage.as_zarr(tmp_path / "c")
        names = set(zarr.open_group(known, mode="r").array_keys())
        listed = re.findall('href="([^"]+)/"', ask(server.url + "zarr/")[2].decode())
        assert set(listed) == {n.replace("%", "%25").replace(":", "%3A") for n in names}
        for to in listed:
            assert ask(server.url + "zarr/" + quote(unquote(to)) + "/zarr.json")[0] == 200


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_without_descriptors_connections_wait_and_silent_ones_are_closed(tmp_path, monkeypatch, caplog, number):
    """Each turn of the loop tried again, with a traceback; here every request that an open connection makes is some."""
    mt.save(tmp_path / "c", {"w": np.ones(3)})
    accept, tried = socket.socket.accept, []

    def short(sock):
        if sock.getsockname()[1:2] != (server.port,):  # of something else in this process
            return accept(sock)
        tried.append(sock)
        raise OSError(number, os.strerror(number))

    def told():
        return [r.message for r in caplog.records if r.name == "meshtape.browse"]

    def connect():
        held = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        held.connect()
        return contextlib.closing(held)

    def answers(held):
        held.request("GET", "/")
        with held.getresponse() as response:
            response.read()
        return response.status == 200

    monkeypatch.setattr(half_closed, "PAUSE", 3600)
    with mt.storage.serve(tmp_path / "c") as server, connect() as busy, connect() as silent:
        assert answers(busy)
        assert answers(silent)
        monkeypatch.setattr(socket.socket, "accept", short)
        with connect():
            while not tried:
                assert answers(busy)
            for _ in range(50):
                assert answers(busy)
        assert len(tried) == 1
        assert told() == [
            f"{os.strerror(number)}: new connections wait, 0 silent ones were closed; allow more by ulimit -n"
        ]
    caplog.clear()
    monkeypatch.setattr(socket.socket, "accept", accept)
    monkeypatch.setattr(half_closed, "PAUSE", 0.01)
    monkeypatch.setattr(half_closed, "IDLE", 0)
    with mt.storage.serve(tmp_path / "c") as server, connect() as silent:
        assert answers(silent)
        monkeypatch.setattr(socket.socket, "accept", lambda s: accept(s) if len(tried) > 3 else short(s))
        with connect() as later:
            assert answers(later)
        assert silent.sock.recv(1) == b""
        assert len(told()) == 1
