"""Checkpoints read over HTTP, from servers as they are: without ranges, with wrong ones, that redirect, compress, cut
or lie.

Each answer is the right array or an error that names the file; a short or a long one never becomes another array.
"""

import contextlib
import datetime
import gzip
import os
import re
import ssl
import warnings
import zlib

import numpy as np
import pytest
from serving import Handler, Served

import meshtape as mt
from meshtape import errors, storage
from meshtape.storage.format import documents
from meshtape.storage.stores import generations, object_store

pytest.importorskip("obstore")


class Odd(Served):
    """A server of files whose answers ``how`` says."""

    def __init__(self, root):
        self.root, self.how, self.log, self.sent = root, "right", [], 0
        self.renewed = "", 0  # of a group of Zarr: another root, of which chunks are when so many were sent
        odd = self

        class Answering(Handler):
            def answer(self):
                asked_for = (self.command, self.path, self.headers.get("range"))
                odd.log.append(asked_for)
                how, path = odd.how, self.path
                if how.isdecimal():
                    return self.out(int(how), {})
                if how == "redirect" and not path.startswith("/moved"):
                    return self.out(302, {"Location": f"/moved{path}"})
                if how == "redirect in a circle":
                    return self.out(302, {"Location": path})
                if how == "sign in":
                    return self.out(200, {"Content-Type": "text/html"}, b"<html>please sign in</html>")
                if how == "busy" and odd.log.count(asked_for) == 1:  # the first time that it is asked for this
                    return self.out(503, {"Retry-After": "0"})
                root, (other, after) = odd.root, odd.renewed
                if other and re.search(r"/c/[0-9/]+$", path):
                    sent = sum(method == "GET" and "/c/" in p for method, p, _ in odd.log)
                    root = other if sent > after else root
                try:
                    with open(root + path.removeprefix("/moved"), "rb") as f:
                        data = f.read()
                except OSError:
                    if how.endswith(" for all") and not path.endswith(("meshtape.json", "zarr.json")):
                        return self.out(200, {}, b"<html>") if how[0] == "a" else self.out(403, {})
                    return self.out(404, {})
                if how.startswith("no HEAD") and self.command == "HEAD":
                    return self.out(int(how.split(", ")[1]), {})
                facts = {"ETag": f'"{zlib.crc32(data)}"', "Last-Modified": "Sun, 22 Nov 2026 00:00:00 GMT"}
                facts = {} if how == "no facts" else facts
                if self.command == "HEAD" and how.endswith("of HEAD"):  # as a cache on the way answers
                    facts = {"ETag": '"old"'} if how == "an old tag of HEAD" else {}
                if how == "gzip":
                    return self.out(200, {**facts, "Content-Encoding": "gzip"}, gzip.compress(data))
                asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range") or "")
                if asked is None or "no ranges" in how:
                    return self.out(200, facts, data, cut=how == "no ranges, cut")
                a, b = int(asked[1]), min(int(asked[2] or len(data) - 1), len(data) - 1)
                if a >= len(data):
                    return self.out(416, {"Content-Range": f"bytes */{len(data)}"})
                part, said = data[a : b + 1], f"bytes {a}-{b}/{len(data)}"
                if how == "another range":
                    part, said = data[: b - a + 1], f"bytes 0-{b - a}/{len(data)}"
                elif how == "short":
                    part = part[: len(part) // 2]
                elif how == "long":
                    part += b"more"
                elif how == "length unknown":
                    said = f"bytes {a}-{b}/*"
                facts |= {} if how == "range not said" else {"Content-Range": said}
                return self.out(206, facts, part, cut=how == "cut")

            def out(self, status, headers, data=b"", cut=False):
                self.send_response_only(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command == "HEAD":
                    return
                odd.sent += len(data)
                # A client that has what it wants hangs up.
                with contextlib.suppress(OSError):
                    self.wfile.write(data[: len(data) // 2] if cut else data)
                self.close_connection = self.close_connection or cut

            do_GET = do_HEAD = answer

        super().__init__(Answering)


W = np.arange(100_000, dtype="f4").reshape(100, 1000)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    home = tmp_path_factory.mktemp("served")
    storage.save(home / "c", {"w": W, "b": np.arange(7)})
    storage.merge(home / "c", home / "hf")
    return home


@pytest.fixture
def odd(files, monkeypatch):
    monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(object_store, "RETRIES", 1)
    monkeypatch.setattr(object_store, "_clients", {})
    monkeypatch.setattr(object_store, "_rangeless", set())
    server = Odd(str(files))
    yield server
    server.close()


@pytest.mark.parametrize("kind", ["c", "hf"])
@pytest.mark.parametrize(
    "how", ["right", "redirect", "no HEAD, 405", "no HEAD, 501, no ranges", "an old tag of HEAD", "no facts", "busy"]
)
@pytest.mark.filterwarnings("ignore:.*ranges of bytes")
def test_servers_that_do_what_they_should_more_or_less(odd, how, kind):
    odd.how = how
    place = f"{odd.url}/{kind}"
    got = mt.load(place)
    assert np.array_equal(np.asarray(got["w"]), W)
    assert np.array_equal(mt.open_checkpoint(place)["w"][50:52, 3], W[50:52, 3])
    with pytest.raises(errors.NotACheckpoint):
        mt.open_checkpoint(f"{odd.url}/nothing")


def test_names_are_taken_as_they_are_written(odd, tmp_path):
    storage.save_safetensors(tmp_path / "a%20b.safetensors", {"w": W})
    odd.root = str(tmp_path)
    with pytest.raises(errors.NotACheckpoint, match="as they are written: %20 is no space"):
        mt.load(f"{odd.url}/a%20b.safetensors")
    assert {path for _, path, _ in odd.log} == {"/a%2520b.safetensors", "/a%2520b.safetensors/meshtape.json"}


@pytest.mark.parametrize("kind", ["c", "hf"])
def test_a_server_without_ranges(odd, kind, monkeypatch):
    """Such as ``python -m http.server``: what is wanted is taken from a download, up to a length; the user is told."""
    odd.how = "no ranges"
    place = f"{odd.url}/{kind}"
    with pytest.warns(UserWarning, match="does not answer requests for ranges of bytes"):
        got = mt.load(place)
    assert np.array_equal(np.asarray(got["w"]), W)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert np.array_equal(mt.open_checkpoint(place)["w"][99, 990:], W[99, 990:])
    asked = [path for method, path, part in odd.log if method == "GET" and part]
    assert len({*asked} - {"/hf/meshtape.json"}) == len(asked) - (kind == "hf") == 1  # not asked for ranges again
    monkeypatch.setattr(object_store, "_STREAMED", 1000)
    file = "c/w/c.0.0" if kind == "c" else "hf/model.safetensors"
    store, name = storage.stores.store.holding(f"{odd.url}/{file}")
    odd.sent = 0
    with contextlib.closing(store.reader(name)) as reader, pytest.raises(errors.StoreError, match="too long"):
        reader.readv([bytearray(10)], 200_000)
    assert odd.sent == 0


@pytest.mark.parametrize("kind", ["c", "hf"])
@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("another range", "got 0|asked for"),
        ("short", "bytes came where"),
        ("long", "bytes came where"),
        ("length unknown", "CONTENT_RANGE"),
        ("range not said", "Content-Range"),
        ("cut", "body error"),
        ("no ranges, cut", "body error|Range request not supported"),
        ("gzip", r"compressed \(gzip\)"),
        ("redirect in a circle", "redirect"),
        ("sign in", "not a manifest"),
        ("409", "was replaced"),
        ("410", "410"),
        ("412", "was replaced"),
        ("423", "423"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*ranges of bytes")
def test_servers_that_answer_something_else(odd, how, match, kind):
    odd.how = how
    place = f"{odd.url}/{kind}"
    try:
        got = mt.load(place)
    except errors.CheckpointError as e:
        told = e
    else:
        # Only where the first bytes are all that is asked for is a range from the start the right one.
        assert how == "another range"
        assert np.array_equal(np.asarray(got["w"]), W)
        return
    assert re.search(match, str(told)), told
    assert place in str(told)
    odd.how = "right"
    object_store._rangeless.clear()
    ckpt = mt.open_checkpoint(place)
    odd.how = how
    with pytest.raises(errors.CheckpointError):
        ckpt["w"][60:70, 5:9]


def test_a_certificate_that_nobody_vouches_for(odd, tmp_path):
    """The connection is refused, and what is asked for is named."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(
            name, name, key.public_key(), x509.random_serial_number(), now, now.replace(year=now.year + 1, day=1)
        )
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "both.pem").write_bytes(pem + made.public_bytes(serialization.Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "both.pem")
    odd.server.socket = context.wrap_socket(odd.server.socket, server_side=True)
    port = odd.server.server_address[1]
    with pytest.raises(errors.StoreError, match=rf"https://localhost:{port}/c/meshtape\.json"):
        mt.open_checkpoint(f"https://localhost:{port}/c")
    assert odd.log == []


def test_a_zarr_group_that_cannot_be_listed(odd, tmp_path):
    """It is not damaged: what is missing is the list of its arrays."""
    import zarr

    group = zarr.open_group(f"{odd.root}/z", mode="w", zarr_format=2)
    group.create_array("x", shape=(6,), dtype=">f8", chunks=(4,))[...] = np.arange(6.0)
    with pytest.raises(errors.StoreError, match=r"without consolidated metadata.*zarr\.consolidate_metadata"):
        mt.load(f"{odd.url}/z")
    zarr.consolidate_metadata(f"{odd.root}/z")
    assert np.asarray(mt.load(f"{odd.url}/z")["x"]).tolist() == list(range(6))
    os.unlink(f"{odd.root}/z/x/1")  # nor can a chunk be missed before it is read
    for read in (mt.load, lambda url: mt.open_checkpoint(url)["x"][4:]):
        with pytest.warns(UserWarning, match="1 chunk of key 'x' is not there"):
            read(f"{odd.url}/z")
    with pytest.raises(errors.IncompleteCheckpoint, match="1 chunk of key 'x'"):
        mt.merge(f"{odd.url}/z", tmp_path / "out")


def test_documents_that_nothing_lists(odd, tmp_path, monkeypatch):
    texts = {
        "config": {"a": 1},
        "tokenizer": {"b": 2},
        "merges.txt": "x y",
        "README.md": "# read",
        "special.json": "{}",
    }
    storage.save(tmp_path / "c", {"w": W}, documents=texts)
    storage.merge(tmp_path / "c", tmp_path / "hf")
    odd.root, usual = str(tmp_path), ["README.md", "config.json", "merges.txt", "tokenizer.json"]
    with storage.serve(tmp_path / "hf") as server:
        for url in (f"{odd.url}/hf", f"{server.url}safetensors"):
            odd.log.clear()
            found = mt.open_checkpoint(url)
            assert not [path for _, path, _ in odd.log if "tokenizer" in path]  # not before they are asked for
            assert list(found.documents) == usual
            report = storage.merge(url, tmp_path / "out", overwrite=True)
            assert found.documents["tokenizer"] == storage.open_checkpoint(tmp_path / "out").documents["tokenizer"]
            assert set(usual) < set(os.listdir(tmp_path / "out"))
            assert [
                n
                for n in report.notes
                if n.endswith("HTTP lists no files: of its documents those of usual names are taken")
            ]
    monkeypatch.setattr(documents, "MAX_NBYTES", 5)
    found = mt.open_checkpoint(f"{odd.url}/hf").documents
    assert list(found) == ["merges.txt"]
    assert found.notes[0].endswith("larger than 64 MiB: README.md, config.json, tokenizer.json")


@pytest.mark.parametrize(
    ("how", "taken", "note"),
    [
        ("a page for all", [], "answers for files that it does not have: no documents are taken"),
        ("403 for all", ["config.json", "tokenizer.json"], "HTTP lists no files"),
    ],
)
def test_documents_of_a_server_that_has_an_answer_for_every_name(odd, tmp_path, how, taken, note):
    storage.save(tmp_path / "c", {"w": W}, documents={"config": {"a": 1}, "tokenizer": {"b": 2}})
    storage.merge(tmp_path / "c", tmp_path / "hf")
    odd.root, odd.how = str(tmp_path), how
    report = storage.merge(f"{odd.url}/hf", tmp_path / "out")
    assert [n for n in sorted(os.listdir(tmp_path / "out")) if "safetensors" not in n] == taken
    assert [n for n in report.notes if note in n]


def _of_a_document(url, to):
    storage.virtual.write(f"{to}.json", storage.virtual.mean([url, url]))
    return mt.load(f"{to}.json")


def _of_a_server(url, to):
    with storage.serve(url) as server:
        return mt.load(f"{server.url}safetensors")


def _exported(url, to, **form):
    storage.convert(url, to, **form)
    return mt.load(to)


READS = {
    "load": lambda url, to: mt.load(url),
    "merge": lambda url, to: _exported(url, to, format="safetensors"),
    "convert": lambda url, to: _exported(url, to, format="zarr"),
    "dual": lambda url, to: _exported(url, to, format="zarr", layout="dual"),
    "a document": _of_a_document,
    "a server": _of_a_server,
    "as Zarr": lambda url, to: {n: a[...] for n, a in _group(storage.as_zarr(url)).arrays()},
    "from_zarr": lambda url, to: {"a": mt.from_zarr(f"{url}/a", mt.Mesh({"x": 2}), x=mt.Shard(0)).load()},
}


@pytest.mark.parametrize("version", [2, 3])
def test_a_zarr_group_whose_consolidated_metadata_are_stale(odd, tmp_path, version):
    """They alone say which arrays there are; of each its own metadata are read, and compared."""
    import zarr

    group = zarr.open_group(f"{odd.root}/z", mode="w", zarr_format=version)
    group.create_array("x", data=np.arange(6, dtype="i4"))
    group.create_array("y", data=np.arange(6, dtype="i4"))
    zarr.consolidate_metadata(f"{odd.root}/z", zarr_format=version)
    group = zarr.open_group(f"{odd.root}/z", mode="r+", use_consolidated=False)
    group.create_array("x", data=np.arange(6, dtype="f4") / 2, overwrite=True)
    assert np.asarray(mt.open_checkpoint(f"{odd.url}/z")["y"]).tolist() == list(range(6))
    told = r"'x' was opened as int32\[6\].*own metadata say float32\[6\].*zarr\.consolidate_metadata"
    for read in (mt.load, lambda url: mt.open_checkpoint(url)["x"][:2], lambda url: mt.merge(url, tmp_path / "out")):
        with pytest.raises(errors.CorruptCheckpoint, match=told):
            read(f"{odd.url}/z")
    zarr.consolidate_metadata(f"{odd.root}/z", zarr_format=version)
    assert np.asarray(mt.load(f"{odd.url}/z")["x"]).tolist() == [0, 0.5, 1, 1.5, 2, 2.5]


def _group(store):
    import zarr

    return zarr.open_group(store, mode="r")


@pytest.mark.parametrize("how", ["right", "an old tag of HEAD", "no tag of HEAD"])
@pytest.mark.parametrize("name", READS)
def test_chunks_of_others_that_are_rewritten_meanwhile_are_never_mixed(odd, tmp_path, monkeypatch, name, how):
    import zarr

    monkeypatch.setattr(generations, "ATTEMPTS", 3)  # of whoever reads from a server of what is gone

    for value in (1, 2):
        group = zarr.open_group(tmp_path / str(value) / "g", mode="w")
        for key in "ab":
            group.create_array(key, data=np.full((40, 5), float(value)), chunks=(10, 5), compressors=None)
        zarr.consolidate_metadata(group.store)
    odd.root, odd.how = str(tmp_path / "1"), how
    read, refused = READS[name], 0
    for after in (0, 1, 3, 5, 7, 100):
        odd.log.clear()
        odd.renewed = str(tmp_path / "2"), after
        try:
            found = read(f"{odd.url}/g", tmp_path / f"out{after}")
        except (errors.CheckpointReplaced, errors.ParentChanged):
            refused += 1
        else:
            assert {float(v) for a in found.values() for v in np.unique(np.asarray(a))} in ({1.0}, {2.0})
    assert bool(refused) != (name in ("load", "from_zarr"))  # these begin anew
