"""URLs beyond the clouds that obstore knows: file systems of fsspec, which are read; and options inside of URLs."""

import http.server
import importlib
import importlib.util
import io
import json
import os
import pickle
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import meshtape as mt
from meshtape import errors, storage
from meshtape.storage.stores import object_store
from meshtape.storage.stores import store as stores
from meshtape.storage.stores.fsspec_store import FsspecStore

fsspec = pytest.importorskip("fsspec")
fsspec_registry = importlib.import_module("fsspec.registry")

_spec = importlib.util.spec_from_file_location("store_contract", Path(__file__).with_name("test_stores.py"))
_contract = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_contract)
Reading = _contract.Reading


class _ByFsspec(Reading):
    """Fsspec itself writes what is read; `stores.at` would give these two schemes to others."""

    @pytest.fixture
    def put(self, store):
        def put(name, data):
            fs, base = fsspec.url_to_fs(store.root)
            fs.makedirs(f"{base}/{name}".rpartition("/")[0], exist_ok=True)
            fs.pipe_file(f"{base}/{name}", bytes(data))

        return put

    @pytest.fixture(autouse=True)
    def _found_again(self, monkeypatch):
        monkeypatch.setattr(stores, "at", FsspecStore)

    def test_writing_is_refused(self, store):
        acts = (
            lambda: store.put("a", b"1"),
            lambda: store.put("a", b"1", new=True),
            lambda: store.delete(["a"]),
            store.refuse_writes,
        )
        for act in acts:
            with pytest.raises(errors.StoreError, match="can only be read"):
                act()

    def test_a_column_of_a_large_matrix(self, store, put):
        w, stream = np.arange(4000 * 400.0).reshape(4000, 400), io.BytesIO()
        storage.save_safetensors(stream, {"w": w})
        put("m.safetensors", stream.getvalue())
        np.testing.assert_array_equal(mt.open_checkpoint(f"{store.root}/m.safetensors")["w"][:, 3], w[:, 3])


class TestMemory(_ByFsspec):
    @pytest.fixture
    def store(self):
        return FsspecStore(f"memory://{uuid.uuid4().hex}/run")


class TestLocal(_ByFsspec):
    @pytest.fixture
    def store(self, tmp_path):
        return FsspecStore(f"local://{tmp_path}/run")


# ----- checkpoints --------------------------------------------------------------------------------------------------


class Shelf(fsspec.get_filesystem_class("memory")):
    """A file system that nobody else knows, with an option, which fails as often as it is told."""

    protocol = "shelf"
    failures: ClassVar = []
    cachable = False

    def __init__(self, region="here", **options):
        super().__init__(**options)
        self.region = region

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("shelf://", "memory://"))

    def cat_file(self, path, start=None, end=None, **options):
        if self.failures:
            raise self.failures.pop()
        return super().cat_file(path, start=start, end=end, **options)


@pytest.fixture
def shelf():
    fsspec.register_implementation("shelf", Shelf, clobber=True)
    Shelf.failures = []
    return f"shelf://box/{uuid.uuid4().hex}"


def _copied(source, url):
    fs, base = fsspec.url_to_fs(url.replace("shelf://", "memory://"))
    fs.put(f"{source}/", f"{base}/", recursive=True)


TREE = {"w": np.arange(600.0, dtype="f4").reshape(20, 30), "b": [np.ones(3), np.zeros((0, 2))], "epoch": 3}


@pytest.mark.parametrize("form", ["ours", "safetensors", "foreign zarr"])
def test_a_checkpoint_is_read(form, shelf, tmp_path):
    if form == "foreign zarr":
        import zarr

        zarr.create_group(str(tmp_path / "a")).create_array("w", data=TREE["w"])
    else:
        mt.save(tmp_path / "a", TREE)
    if form == "safetensors":
        mt.merge(tmp_path / "a", tmp_path / "m")
        _copied(tmp_path / "m", shelf)
    else:
        _copied(tmp_path / "a", shelf)
    loaded = mt.load(shelf)
    np.testing.assert_array_equal(np.asarray(loaded["w"]), TREE["w"])
    np.testing.assert_array_equal(mt.open_checkpoint(shelf)["w"][3:5, 7], TREE["w"][3:5, 7])
    if form != "foreign zarr":
        assert mt.verify(shelf).arrays
    # It can be brought home.
    storage.convert(shelf, tmp_path / "home", format="zarr")
    np.testing.assert_array_equal(np.asarray(mt.load(tmp_path / "home")["w"]), TREE["w"])


WRITERS = {
    "save": lambda url, source: mt.save(url, TREE),
    "save over": lambda url, source: mt.save(url, TREE, overwrite=True),
    "save_async": lambda url, source: mt.save_async(url, TREE).wait(),
    "merge": lambda url, source: mt.merge(source, url),
    "convert": lambda url, source: storage.convert(source, url, format="zarr"),
    "save_safetensors": lambda url, source: storage.save_safetensors(f"{url}/m.safetensors", {"w": TREE["w"]}),
    "manager": lambda url, source: mt.CheckpointManager(url).save(1, TREE),
    "save_program": lambda url, source: mt.save_program(url, lambda x: x + 1, mt.ones(2)),
    "gc": None,
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("held", [False, True])
def test_writers_are_told_where_to_write(writer, held, shelf, tmp_path):
    mt.save(tmp_path / "a", TREE)
    if held:
        _copied(tmp_path / "a", shelf)
    before = [e.name for e in stores.at(shelf).entries()]
    if writer == "gc":  # nothing of a writer is there
        storage.gc(shelf)
    else:
        with pytest.raises((errors.StoreError, errors.CheckpointExists)):
            WRITERS[writer](shelf, tmp_path / "a")
    assert [e.name for e in stores.at(shelf).entries()] == before


def test_what_passes_is_asked_again_and_what_does_not_is_told(shelf, tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.0)
    mt.save(tmp_path / "a", TREE)
    _copied(tmp_path / "a", shelf)
    Shelf.failures = [OSError("busy"), EOFError("cut")]
    np.testing.assert_array_equal(np.asarray(mt.load(shelf)["w"]), TREE["w"])
    assert not Shelf.failures
    monkeypatch.setenv("SHELF_TOKEN", "hush-hush")
    Shelf.failures = [ValueError("with hush-hush")] * 20
    with pytest.raises(errors.StoreError, match="ValueError: with …"):
        mt.load(shelf)
    Shelf.failures = [PermissionError("no")] * 2
    with pytest.raises(errors.StoreError, match="access was refused"):
        mt.load(shelf)
    assert len(Shelf.failures) == 1


def test_a_replaced_object_is_noticed(shelf):
    fs, base = fsspec.url_to_fs(shelf)
    fs.pipe_file(f"{base}/x", b"12345")
    tag = stores.at(shelf).tag("x")
    assert stores.at(shelf).tag("x") == tag
    fs.pipe_file(f"{base}/x", b"54321")
    assert stores.at(shelf).tag("x") != tag


def test_options_of_a_file_system(shelf):
    from meshtape.storage.stores.fsspec_store import filesystem

    where = storage.options(shelf, region="there")
    fs, path = filesystem(where)
    assert (fs.region, path) == ("there", shelf.removeprefix("shelf:/"))
    with pytest.raises(errors.CheckpointError, match="credentials come from the environment") as told:
        storage.options(shelf, api_token="hush")
    assert "hush" not in str(told.value)


@pytest.mark.parametrize(
    "url", ["hf://org/name@main/x", "hf://datasets/org/name/x", "hf://spaces/org/name@refs%2Fpr%2F1/x", "hf://org/name"]
)
def test_the_hub_gets_its_own_form(url, monkeypatch):
    """The path that arrives is that of the URL, revision and kind of repository included."""
    seen = []

    class Hub(Shelf):
        protocol = "hf"

        def info(self, path, **options):
            seen.append(path)
            raise FileNotFoundError(path)

        @classmethod
        def _strip_protocol(cls, path):
            return path.removeprefix("hf://")

    monkeypatch.setattr(fsspec_registry, "_registry", {**fsspec_registry._registry, "hf": Hub})
    monkeypatch.setattr(fsspec_registry, "registry", fsspec_registry._registry)
    monkeypatch.setattr(Hub, "ls", lambda self, *a, **k: [])
    with pytest.raises(errors.CheckpointError):
        mt.open_checkpoint(url)
    assert seen
    assert all(f"{path}/".startswith(url.removeprefix("hf://") + "/") for path in seen)


def test_the_hub_by_its_own_client(tmp_path):
    """A repository with a revision, served as the hub does, and how often it is asked."""
    pytest.importorskip("huggingface_hub")
    tree = {f"w{i}": np.arange(40.0) + i for i in range(40)}
    mt.save(tmp_path / "a", tree)
    mt.merge(tmp_path / "a", tmp_path / "m", max_shard_bytes=4000)
    files = {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()}
    asked = []

    class Hub(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def do_GET(self):
            path = self.path.partition("?")[0]
            asked.append(path)
            headers = {}
            if path == "/api/models/org/name/revision/v1":
                status, body = 200, json.dumps({"id": "org/name", "sha": "a" * 40}).encode()
            elif path.startswith("/api/models/org/name/tree/v1"):
                rows = [{"type": "file", "path": n, "size": len(d), "oid": f"{hash(d):x}"} for n, d in files.items()]
                status, body = 200, json.dumps(rows).encode()
            elif (name := path.removeprefix("/org/name/resolve/v1/")) in files:
                first, last = map(int, self.headers["range"].removeprefix("bytes=").split("-"))
                status, body = 206, files[name][first : last + 1]
                headers = {"Content-Range": f"bytes {first}-{last}/{len(files[name])}"}
            else:
                status, body = 404, b"{}"
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        where = storage.options("hf://org/name@v1", endpoint=f"http://127.0.0.1:{server.server_port}")
        loaded = mt.load(where)
    finally:
        server.shutdown()
        server.server_close()
    for name, a in tree.items():
        np.testing.assert_array_equal(np.asarray(loaded[name]), a)
    listed = [path for path in asked if path.startswith("/api/")]
    assert len(listed) <= 16, asked
    assert len(asked) - len(listed) <= 2 * len(files), asked  # a header and a read of neighbours each


# ----- locations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("gcs://bucket/x", "gs://bucket/x"),
        ("s3a://bucket/x", "s3://bucket/x"),
        ("local:///tmp/x", "/tmp/x"),
        ("hdfs:///user//x", "hdfs:///user/x"),
        ("hf://org/name@rev/p/", "hf://org/name@rev/p"),
        ("github://org:repo@main/x", "github://org:repo@main/x"),
        ("abfs://box@account.dfs.core.windows.net/x", "abfs://box@account.dfs.core.windows.net/x"),
        ("s3://b;region=eu;endpoint=http%3A%2F%2Fh/x", "s3://b;endpoint=http%3A%2F%2Fh;region=eu/x"),
    ],
)
def test_locations(given, wanted):
    assert stores.location(given) == stores.location(wanted) == wanted
    above, name = stores.split(stores.join(wanted, "last"))
    assert (above, name) == (wanted, "last")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nosuch://x", "not a kind of storage"),
        ("ftp://me:hush@host/x", "credentials come from the environment"),
        ("simplecache::s3://b/x", "chained"),
        ("s3://b;secret_access_key=hush/x", "credentials come from the environment"),
        ("s3://b;endpoint=http%3A%2F%2Fme:hush%40h/x", "no address"),
        ("s3://b;endpoint=http://h/x", "no address"),
        ("s3://b;colour=blue/x", "has no option colour"),
        ("http://host;region=eu/x", "has no option region"),
    ],
)
def test_locations_that_are_none(given, message):
    with pytest.raises(errors.CheckpointError, match=message) as told:
        stores.location(given)
    assert "hush" not in str(told.value)


def test_a_package_that_is_missing_is_named():
    with pytest.raises(errors.StoreError, match=r"not installed: .*gdrive"):
        mt.open_checkpoint("gdrive://x/y")


# ----- options of buckets ---------------------------------------------------------------------------------------------


def _head(s3, url, name):
    """The headers that moto's record gives for an object."""
    return s3.request("HEAD", f"{url.removeprefix('s3:/')}/{name}")


def test_options_reach_the_server(s3, monkeypatch):
    """Endpoint, encryption and storage class, of small objects and of those that go in parts; and the address alone
    tells a reader."""
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_REGION")
    where = storage.options(
        s3.url, endpoint=endpoint, region="us-east-1", encryption="AES256", storage_class="STANDARD_IA"
    )
    big = np.arange(3_000_000, dtype="f4")
    mt.save(where, {"w": big, "b": np.ones(3)})
    np.testing.assert_array_equal(np.asarray(mt.load(where)["w"]), big)
    for entry in stores.at(where).entries():
        headers = _head(s3, s3.url, entry.name)
        assert headers.get("x-amz-storage-class") == "STANDARD_IA", entry.name
        assert headers.get("x-amz-server-side-encryption") == "AES256", entry.name
    manager = mt.CheckpointManager(f"{where}/runs")
    manager.save(1, {"w": np.ones(2)})
    assert manager.latest() == f"{stores.location(where)}/runs/step-00000001"
    assert "anonymous" not in where
    assert storage.options(where, storage_class="STANDARD").count("storage_class") == 1


def test_another_process_needs_the_text_alone(s3, monkeypatch):
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_REGION")
    where = storage.options(s3.url, endpoint=endpoint, region="us-east-1")
    mt.save(where, {"w": np.ones(3)})
    assert pickle.loads(pickle.dumps(stores.at(where))) == stores.at(where)
    code = "import sys, meshtape as mt; print(mt.load(sys.argv[1])['w'].tolist())"
    done = subprocess.run([sys.executable, "-P", "-c", code, where], capture_output=True, text=True)
    assert done.stdout.strip() == "[1.0, 1.0, 1.0]", done.stderr


def test_anonymous_asks_without_signature(s3, monkeypatch):
    stores.at(s3.url).put("x", b"1")
    s3.publish(s3.url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    assert stores.at(storage.options(s3.url, anonymous=True)).get("x") == b"1"


def test_a_local_path_has_no_options(tmp_path):
    with pytest.raises(errors.CheckpointError, match="no options"):
        storage.options(tmp_path, endpoint="http://h")


def test_a_mesh_saves_and_loads_through_a_url_with_options(kit, s3, monkeypatch):
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    where = storage.options(s3.url, endpoint=endpoint, encryption="AES256")
    sharding = kit.Sharding(kit.Host({"a": 2}), (0,))
    a = np.arange(24.0).reshape(6, 4)
    mt.save(where, {"w": kit.split(a, sharding)})
    back = mt.load(where, shardings={"w": sharding})
    np.testing.assert_array_equal(back["w"].whole(), a)


@pytest.mark.parametrize(
    ("url", "given", "kind", "config"),
    [
        ("s3://b/x", {"region": "eu", "virtual_hosted": True}, "S3Store", {"region": "eu"}),
        ("s3://b/x", {"encryption": "aws:kms", "kms_key": "arn:aws:kms:1", "bucket_key": True}, "S3Store", {}),
        ("s3://b/x", {"requester_pays": True, "storage_class": "GLACIER_IR"}, "S3Store", {}),
        ("gs://b/x", {"endpoint": "http://h:1", "anonymous": True, "storage_class": "NEARLINE"}, "GCSStore", {}),
        ("az://b/x", {"endpoint": "http://h:1", "account": "me", "anonymous": True}, "AzureStore", {"account_name": "me"}),
    ],
)  # fmt: skip
def test_each_option_is_one_that_its_client_knows(url, given, kind, config, monkeypatch):
    pytest.importorskip("obstore")
    for name in [n for n in os.environ if n.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    where = storage.options(url, **given)
    assert stores.location(where) == where
    held, prefix = object_store.client(where)
    assert (type(held).__name__, prefix) == (kind, "x")
    for name, value in config.items():
        assert held.config[name] == value
    assert object_store.client(url)[0] is not held if kind != "AzureStore" else True


# ----- arrays of Zarr stores ------------------------------------------------------------------------------------------


def _zarr_array(home, name="a", **options):
    import zarr

    values = np.arange(84.0, dtype="f4").reshape(12, 7)
    zarr.create_array(home / name, shape=(12, 7), chunks=(5, 7), dtype="f4", **options)[...] = values
    return values


def test_from_zarr_reads_what_fsspec_opens_and_asks_again(shelf, tmp_path):
    """As checkpoints are opened: with the options of the URL, and where a request failed, once more."""
    values = _zarr_array(tmp_path)
    _copied(tmp_path, shelf)
    mesh = mt.Mesh({"x": 3})
    Shelf.failures = [OSError("busy"), ConnectionError("lost")]
    x = mt.from_zarr(storage.options(f"{shelf}/a", region="there"), mesh, x=mt.Shard(0))
    assert Shelf.failures == []
    Shelf.failures = [OSError("busy"), TimeoutError("slow")]
    assert np.array_equal(np.asarray(x.load()), values)
    assert Shelf.failures == []
    total = mt.stream(lambda x: mt.sum(x, axis=0), x, memory=400)
    assert np.array_equal(np.asarray(total), values.sum(0))
    Shelf.failures = [OSError("busy")] * 40
    with pytest.raises(errors.StoreError, match="shelf://box"):
        x.load()


def test_from_zarr_of_what_is_no_array(shelf, tmp_path):
    import zarr

    mesh = mt.Mesh({"x": 2})
    _zarr_array(tmp_path)
    zarr.open_group(tmp_path / "group", mode="w").create_array("t", shape=(3,), dtype="f4")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "array"}')
    _copied(tmp_path, shelf)
    for root in (tmp_path, shelf):
        with pytest.raises(errors.NotACheckpoint, match="there is no Zarr array"):
            mt.from_zarr(f"{root}/nothing", mesh)
        with pytest.raises(errors.MeshError, match="is a group, not an array; its arrays are t"):
            mt.from_zarr(f"{root}/group", mesh)
        with pytest.raises(errors.StoreError, match="cannot be read as a Zarr array"):
            mt.from_zarr(f"{root}/broken", mesh)
    with pytest.raises(errors.CheckpointError, match="is not a kind of storage"):
        mt.from_zarr("no-such-kind://box/a", mesh)
    with pytest.raises(errors.CheckpointError, match="no user, password, query") as told:
        mt.from_zarr("s3://user:hush@bucket/a", mesh)
    assert "hush" not in str(told.value)
    x = mt.from_zarr(f"{shelf}/a", mesh, x=mt.Shard(0))
    with pytest.raises(errors.StoreError, match="can only be read"):
        mt.stream(lambda x: x + 1, x, memory=400, to=f"{shelf}/out")


def test_from_zarr_knows_the_true_dtype_of_what_is_stored_as_integers(tmp_path):
    import ml_dtypes

    w = np.arange(24).reshape(6, 4).astype(ml_dtypes.bfloat16)
    for fallback in (None, "raw"):
        mt.save(tmp_path / str(fallback), {"w": w}, dtype_fallback=fallback)
        x = mt.from_zarr(tmp_path / str(fallback) / "w", mt.Mesh({"x": 2}), x=mt.Shard(0))
        assert x.dtype == w.dtype
        assert np.array_equal(np.asarray(x.load()).view("u2"), w.view("u2"))
        (found,) = storage.open_checkpoint(tmp_path / str(fallback) / "w").values()
        assert found.dtype == w.dtype
        assert np.array_equal(found[...].view("u2"), w.view("u2"))


def test_from_zarr_in_a_bucket_with_options(s3, tmp_path, monkeypatch):
    values = _zarr_array(tmp_path)
    for e in stores.at(str(tmp_path)).entries():
        stores.at(s3.url).put(e.name, stores.at(str(tmp_path)).get(e.name))
    where = storage.options(f"{s3.url}/a", endpoint=s3.environment["AWS_ENDPOINT_URL"], region="us-east-1")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    x = mt.from_zarr(where, mt.Mesh({"x": 3}), x=mt.Shard(0))
    assert np.array_equal(np.asarray(x.load()), values)
    out = storage.options(f"{s3.url}/out", endpoint=s3.environment["AWS_ENDPOINT_URL"], region="us-east-1")
    y = mt.stream(lambda x: x * 2, x, memory=400, to=out)
    assert np.array_equal(np.asarray(y.load()), values * 2)
    s3.proxy.reset()
    mt.stream(lambda x: mt.sum(x), x, memory=400)
    reads = [path for method, path in s3.proxy.log if method == "GET" and path.endswith("zarr.json")]
    assert len(reads) <= 2 * 3 + 1  # once for each rank, and for the plan, and to see that it is the same array still


def test_a_link_out_of_an_array_is_not_followed(tmp_path):
    _zarr_array(tmp_path)
    chunk = tmp_path / "a" / "c" / "0" / "0"
    (tmp_path / "secret").write_bytes(chunk.read_bytes())
    chunk.unlink()
    chunk.symlink_to(tmp_path / "secret")
    x = mt.from_zarr(tmp_path / "a", mt.Mesh({"x": 2}), x=mt.Shard(0))
    with pytest.raises(errors.CheckpointError, match="link out of"):
        x.load()


def test_a_file_and_a_checkpoint_do_not_share_a_name():
    """Neither sees the other there, so that one would be lost without a word."""
    one, two, root = {"w": np.float32([1])}, {"w": np.float32([2])}, f"memory://{uuid.uuid4().hex}"
    storage.save_safetensors(f"{root}/f.safetensors", one)
    mt.save(f"{root}/g.safetensors", one)
    for overwrite in (False, True):
        with pytest.raises(errors.CheckpointExists, match="is a file"):
            mt.save(f"{root}/f.safetensors", two, overwrite=overwrite)
        with pytest.raises(errors.CheckpointExists, match="is a directory"):
            storage.save_safetensors(f"{root}/g.safetensors", two, overwrite=overwrite)
        with pytest.raises(errors.CheckpointError, match="whole bucket"):
            storage.save_safetensors(root, two, overwrite=overwrite)
    storage.save_safetensors(f"{root}/model", one)  # without an ending
    for name in ("f.safetensors", "g.safetensors", "model"):
        assert mt.load(f"{root}/{name}")["w"].tolist() == [1.0]
    with pytest.raises(errors.NotACheckpoint):
        mt.load(f"{root}/nothing.safetensors")
