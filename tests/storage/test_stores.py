"""The contract of a store, kept by local directories, memory and S3 alike; what is special to each; and locations."""

import errno
import os
import pickle
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

from meshtape import errors
from meshtape.storage import save
from meshtape.storage.commit import contents
from meshtape.storage.loading.usage import usage
from meshtape.storage.stores import object_store, owners
from meshtape.storage.stores import store as stores
from meshtape.storage.stores.contract import recording


class Reading:
    """What every store promises to readers. A subclass gives the fixture ``store``, an empty one."""

    @pytest.fixture
    def put(self, store):
        return store.put

    def test_a_reader_fills_buffers_from_any_place(self, store, put):
        data = bytes(range(256)) * 8
        put("x", data)
        with closing(store.reader("x")) as r:
            a, b = bytearray(3), np.empty((2, 2), np.uint8)
            assert r.readv([a, b], 250) == 7
            assert bytes(a) + b.tobytes() == data[250:257]
            assert r.nbytes == len(data)
            tail = bytearray(10)
            assert r.readv([tail], len(data) - 4) == 4
            assert tail[:4] == data[-4:]
            assert r.readv([tail], len(data)) == 0
            assert r.readv([tail], len(data) + 100) == 0
            assert r.readv([], 0) == 0
            assert r.readv([bytearray(0)], 0) == 0

    def test_what_is_not_there_is_not_found(self, store):
        with pytest.raises(FileNotFoundError), closing(store.reader("gone")) as r:
            r.readv([bytearray(1)], 0)
        with pytest.raises(FileNotFoundError):
            store.get("gone")

    def test_names_are_listed_in_order(self, store, put):
        assert list(store.entries()) == []
        assert store.folders() == store.files() == []
        for name in ("b/10", "b/9", "a", "b.c/x", "b/d/e"):
            put(name, name.encode())
        found = list(store.entries())
        assert [e.name for e in found] == ["a", "b.c/x", "b/10", "b/9", "b/d/e"]
        assert [e.nbytes for e in found] == [len(e.name) for e in found]
        assert [e.name for e in store.entries("b")] == ["b/10", "b/9", "b/d/e"]
        assert list(store.entries("z")) == []
        assert store.folders() == ["b", "b.c"]
        assert store.files() == ["a"]
        assert stores.at(stores.join(store.root, "b")).files() == ["10", "9"]
        assert stores.at(stores.join(store.root, "b")).folders() == ["d"]
        before = found[0].tag
        put("a", b"something else")
        assert next(iter(store.entries())).tag != before

    @pytest.mark.parametrize("name", ["a%2Fb", "ü☃", "a b+c", "%7Aarr.json", "w~g0123abcd/c.0"])
    def test_any_escaped_name(self, store, put, name):
        put(name, b"x")
        assert [e.name for e in store.entries()] == [name]
        assert store.get(name) == b"x"

    def test_it_is_a_small_value(self, store, put):
        again = pickle.loads(pickle.dumps(store))
        put("x", b"1")
        assert again.get("x") == b"1"
        assert again == store
        assert stores.at(store.root) == store


class Contract(Reading):
    """What every store promises that can be written to."""

    def test_what_is_put_is_there_whole(self, store):
        assert store.put("a/b", b"hello") == 5
        assert store.get("a/b") == b"hello"
        assert store.size("a/b") == 5
        assert store.put("a/c", [b"12", memoryview(b"345"), b"", np.arange(3, dtype="u1")]) == 8
        assert store.get("a/c") == b"12345\0\1\2"
        assert store.put("empty", b"") == 0
        assert store.put("none", iter(())) == 0
        assert store.get("empty") == store.get("none") == b""
        assert (store.size("empty"), store.size("gone")) == (0, None)

    def test_a_large_object_of_reused_buffers(self, store):
        """The maker of the pieces fills one buffer again and again."""
        data = np.random.default_rng(0).integers(0, 256, 21_000_000, np.uint8)
        buffer = np.empty(1_000_000, np.uint8)

        def pieces():
            for i in range(21):
                buffer[...] = data[i * len(buffer) : (i + 1) * len(buffer)]
                yield buffer

        assert store.put("big", pieces()) == len(data)
        assert store.get("big") == data.tobytes()

    def test_a_put_replaces_whole_or_not_at_all(self, store):
        store.put("x", b"old")
        assert store.put("x", b"newer") == 5
        assert store.get("x") == b"newer"

        def broken():
            yield b"half"
            raise RuntimeError("the source broke")

        with pytest.raises(RuntimeError, match="the source broke"):
            store.put("x", broken())
        with pytest.raises(RuntimeError):
            store.put("y", broken())
        assert store.get("x") == b"newer"
        assert [e.name for e in store.entries()] == ["x"]

    def test_one_of_many_creates_a_name(self, store):
        def create(i):
            try:
                store.put("claim", b"%d" % i, new=True)
                return i
            except FileExistsError:
                return None

        with ThreadPoolExecutor(6) as pool:
            winners = [i for i in pool.map(create, range(6)) if i is not None]
        assert len(winners) == 1
        assert store.get("claim") == b"%d" % winners[0]

    def test_readers_see_the_old_or_the_new(self, store):
        store.put("x", b"0" * 100_000)
        seen, stop = set(), threading.Event()

        def read():
            while not stop.is_set():
                seen.add(store.get("x"))

        thread = threading.Thread(target=read)
        thread.start()
        for i in range(1, 8):
            store.put("x", b"%d" % i * 100_000)
        stop.set()
        thread.join()
        assert all(len(set(x)) == 1 and len(x) == 100_000 for x in seen)

    def test_deleting(self, store):
        store.put("a", b"1")
        store.put("b/c", b"2")
        store.delete(["a", "gone"])
        store.delete([])
        assert [e.name for e in store.entries()] == ["b/c"]


class TestLocal(Contract):
    @pytest.fixture
    def store(self, tmp_path):
        return stores.at(str(tmp_path))

    def test_no_temporary_file_stays(self, store, tmp_path):
        store.put("x", b"1", new=True)
        with pytest.raises(FileExistsError):
            store.put("x", b"1", new=True)
        assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize(
    "walk",
    [
        lambda root: stores.at(root).entries(),
        contents.beside,
        usage,
        owners.last_write,
    ],
    ids=["entries", "beside", "usage", "last write"],
)
def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch, walk):
    """Not an empty folder, as ``os.walk`` would have it."""
    save(tmp_path / "x", {"w": np.ones(3)})
    scandir = os.scandir

    def full(path="."):
        if str(path).endswith("w"):
            raise OSError(errno.EMFILE, "Too many open files", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", full)
    with pytest.raises(errors.StoreError, match="w cannot be listed: Too many open files"):
        walk(str(tmp_path / "x"))


class TestMemory(Contract):
    @pytest.fixture
    def store(self):
        pytest.importorskip("obstore")
        return stores.at(f"memory://{uuid.uuid4().hex}/run")


class TestS3(Contract):
    @pytest.fixture
    def store(self, s3):
        return stores.at(s3.url)

    def test_an_old_version_is_not_replaced(self, store):
        store.put("x", b"1")
        version = store.version(next(iter(store.entries())))
        store.replace("x", b"2", version)
        with pytest.raises(FileExistsError):
            store.replace("x", b"3", version)
        assert store.get("x") == b"2"

    def test_a_bucket_that_is_not_there(self, s3):
        with pytest.raises(errors.StoreError, match="bucket does not exist"):
            stores.at("s3://nosuch/x").put("a", b"1")


class TestHTTP:
    """Reading is all that it can."""

    @pytest.fixture
    def place(self, s3):
        stores.at(s3.url).put("a/b", bytes(range(200)))
        return stores.at(s3.publish(s3.url))

    def test_reading(self, place):
        assert place.get("a/b") == bytes(range(200))
        assert (place.size("a/b"), place.size("a/c")) == (200, None)
        with closing(place.reader("a/b")) as r:
            part = bytearray(10)
            assert r.readv([part], 195) == 5
            assert part[:5] == bytes(range(195, 200))

    def test_writing_and_listing_are_refused(self, place):
        for act in (lambda: place.put("a", b"1"), lambda: place.delete(["a/b"]), place.entries, place.folders):
            with pytest.raises(errors.StoreError, match=r"only be read|no lists"):
                act()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("/tmp/x/", "/tmp/x"),
        ("file:///tmp/a%20b", "/tmp/a b"),
        ("S3://Bucket//a/", "s3://Bucket/a"),
        ("memory://", "memory://"),
        ("https://host:80/a", "https://host:80/a"),
    ],
)
def test_locations(given, wanted):
    assert stores.location(given) == wanted
    assert stores.location(stores.location(given)) == wanted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nosuch://host/x", "known are s3://"),
        ("s3://AKIA:hush@bucket/x", "credentials come from the environment"),
        ("https://host/x?X-Amz-Signature=hush", "credentials come from the environment"),
        ("s3://", "names no bucket"),
        ("http:///x", None),
        ("s3://bucket/a/../b", "have no meaning"),
    ],
)
def test_locations_that_are_none(given, message):
    if message is None:
        assert stores.location(given) == "http://x"
        return
    with pytest.raises(errors.CheckpointError, match=message) as told:
        stores.location(given)
    assert "hush" not in str(told.value)


def test_gs_and_az_are_made_without_asking_the_network(monkeypatch):
    pytest.importorskip("obstore")
    from meshtape.storage.stores.object_store import client

    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "acct")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "aHVzaA==")
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    for root, kind in (("gs://bucket/run", "GCSStore"), ("az://box/run", "AzureStore")):
        held, prefix = client(root)
        assert (type(held).__name__, prefix) == (kind, "run")
        assert "aHVzaA" not in repr(held) + repr(stores.at(root))


def test_without_the_account_it_says_what_to_set(monkeypatch):
    pytest.importorskip("obstore")
    for name in [n for n in os.environ if n.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(errors.StoreError, match="environment variables"):
        stores.at("az://box/run").get("x")


def test_a_client_that_tells_secrets_is_not_quoted(monkeypatch):
    """Whatever text an error of the client has: neither what the environment holds, nor what an address may carry, is
    shown."""
    hush = {
        "AWS_SECRET_ACCESS_KEY": "hush-one",
        "AWS_SESSION_TOKEN": "hush-two",
        "AZURE_STORAGE_ACCOUNT_KEY": "hush-three",
        "AZURE_STORAGE_SAS_TOKEN": "hush-four",
        "GOOGLE_SERVICE_ACCOUNT_PASSWORD": "hush-five",
    }
    for name, value in hush.items():
        monkeypatch.setenv(name, value)
    for start in ("no answer", "NoSuchBucket", "401 Unauthorized", "169.254.169.254 timed out"):
        for value in hush.values():
            for text in (
                f"{start}: it was signed with {value}",
                f"{start}: https://user:{value}@host/c",
                f"{start}: https://host/c?sig=other-hush&key={value}",
            ):
                for kind in (OSError, FileNotFoundError, ValueError):
                    shown = str(object_store._explained(kind(text), "s3://bucket/c"))
                    assert "hush" not in shown, (text, shown)
                    assert "s3://bucket/c" in shown
    for name in hush:
        monkeypatch.delenv(name)
    # Not in the environment, but in an address: by whom it was signed is nobody's business either.
    for address in ("https://user:hush@host/c", "https://host/c?X-Amz-Signature=hush"):
        assert "hush" not in str(object_store._explained(OSError(f"cannot reach {address}"), "s3://bucket/c"))


def test_a_reader_that_another_thread_closes_just_now_has_its_tag(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(b"abc")
    fstat = os.fstat
    with recording() as tags:
        reader = stores.at(str(tmp_path)).reader("x")
        before = reader.tag

        def closing(fd):
            monkeypatch.undo()
            reader.close()
            return fstat(fd)

        monkeypatch.setattr(os, "fstat", closing)
        assert tags() == {str(tmp_path / "x"): before}
