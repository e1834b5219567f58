"""Checkpoints in an object store: a real S3 server behind a proxy that answers with errors, cuts, delays and loses
answers."""

import datetime
import json
import logging
import pickle
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from click.testing import CliRunner
from serving import one_in_three

import meshtape as mt
from meshtape import errors, storage
from meshtape.cli.main import main
from meshtape.storage import CheckpointManager, LoadReport, load, open_checkpoint, save
from meshtape.storage.commit import object_commit
from meshtape.storage.stores import multipart, object_store, store

pytest.importorskip("obstore")


@pytest.fixture(params=["memory", "s3"])
def place(request, tmp_path):
    """An empty place in a store of each kind that can be written to here."""
    if request.param == "memory":
        return f"memory://{abs(hash(request.node.nodeid)):x}"
    return request.getfixturevalue("s3").url


def tree(kit, seed=0, rows=300):
    return {
        "w": kit.random(np.dtype("f4"), (rows, 520), seed),
        "layers": [{"b": kit.random(np.dtype("c8"), (7,), seed)}, {"s": np.float64(seed), "e": np.zeros((0, 3))}],
        "epoch": seed,
    }


def names(url):
    return [e.name for e in store.at(url).entries()]


def equal(kit, got, wanted):
    return (
        kit.same(got["w"], wanted["w"])
        and kit.same(got["layers"][0]["b"], wanted["layers"][0]["b"])
        and got["epoch"] == wanted["epoch"]
    )


def test_save_and_load(kit, place):
    t, url = tree(kit), f"{place}/run/step-1"
    report = save(url, t, step=7, metadata={"lr": 0.1}, pack=False)
    assert report.path == url
    assert names(url) == [
        "layers.0.b/c.0",
        "layers.0.b/zarr.json",
        "layers.1.e/zarr.json",
        "layers.1.s/c",
        "layers.1.s/zarr.json",
        "meshtape.json",
        "w/c.0.0",
        "w/zarr.json",
        "zarr.json",
    ]
    assert equal(kit, load(url), t)
    ckpt = open_checkpoint(url)
    assert (ckpt.step, ckpt.metadata, ckpt.path) == (7, {"lr": 0.1}, url)
    assert kit.same(ckpt["w"][10:20, ::-7], t["w"][10:20, ::-7])
    assert storage.verify(url).files == 3
    with pytest.raises(errors.CheckpointExists):
        save(url, t)


def test_ranks_write_and_read_their_own_blocks(kit, place):
    host = kit.Host({"x": 3})
    w = kit.random(np.dtype("f4"), (7, 50))
    url = f"{place}/c"
    save(url, {"w": kit.split(w, kit.Sharding(host, (0,)))}, pack=False)
    assert [n for n in names(url) if n.startswith("w/c")] == ["w/c.0.0", "w/c.1.0", "w/c.2.0"]
    other = kit.Host({"x": 2, "y": 2})
    report = LoadReport()
    got = load(url, shardings=lambda *_: kit.Sharding(other, (1, 0)), report=report)["w"]
    assert kit.same(got.whole(), w)
    assert report.bytes_needed == w.nbytes


def test_replacing_is_one_step_and_leaves_nothing_old(kit, place):
    url = f"{place}/c"
    save(url, tree(kit, 1))
    before = pickle.dumps(open_checkpoint(url)["w"].tensor)
    save(url, tree(kit, 2), overwrite=True)
    assert equal(kit, load(url), tree(kit, 2))
    assert not any(n.startswith("w/") or n.startswith(object_commit.CLAIM) for n in names(url))
    # Who opened the old one is told, and does not read a mixture.
    with pytest.raises(errors.CheckpointReplaced):
        storage.readers.tensor.read_box(pickle.loads(before))
    save(url, {"other": np.ones(2)}, overwrite=True)
    assert list(open_checkpoint(url)) == ["other"]


def test_other_readers(kit, s3):
    import zarr
    from zarr.storage import ObjectStore

    t = tree(kit)
    save(f"{s3.url}/c", t, pack=False)
    held, prefix = object_store.client(f"{s3.url}/c")
    for generation in (t, tree(kit, 3)):
        group = zarr.open_group(ObjectStore(held, read_only=True), path=prefix, mode="r")
        (name,) = [n for n in group if n.partition("~")[0] == "w"]
        assert kit.same(group[name][...], generation["w"])
        save(f"{s3.url}/c", tree(kit, 3), overwrite=True, pack=False)
    # A group that zarr wrote there is read.
    held, prefix = object_store.client(f"{s3.url}/foreign")
    group = zarr.create_group(ObjectStore(held), path=prefix)
    group.create_array("a/b", data=t["w"], chunks=(100, 100))
    ckpt = open_checkpoint(f"{s3.url}/foreign")
    assert kit.same(ckpt["a/b"][50:150, 3:4], t["w"][50:150, 3:4])


def test_merge_convert_reshard_diff_and_estimate(kit, place, tmp_path):
    t = tree(kit)
    save(tmp_path / "local", t)
    merged = storage.merge(tmp_path / "local", f"{place}/hf", max_shard_bytes=200_000, memory_limit=200_000)
    assert names(f"{place}/hf") == [*merged.files, "model.safetensors.index.json"]
    assert storage.diff(tmp_path / "local", f"{place}/hf", drop=["epoch"]).same
    layout = {"mesh": {"m": 3}, "shardings": {"w": {"m": 1}, "*": {}}}
    storage.reshard(f"{place}/hf", f"{place}/tp3", **layout, memory_limit=200_000, pack=False)
    storage.reshard(tmp_path / "local", tmp_path / "tp3", **layout)
    assert sum(n.startswith("w/c") for n in names(f"{place}/tp3")) == 3
    for n in names(f"{place}/tp3"):
        if "/c" in n:
            assert store.at(f"{place}/tp3").get(n) == (tmp_path / "tp3" / n).read_bytes()
    assert storage.verify(f"{place}/tp3").arrays == 4
    assert storage.estimate(f"{place}/tp3").nbytes == open_checkpoint(tmp_path / "local").nbytes
    # Another format in the same place, and back.
    storage.convert(f"{place}/hf", f"{place}/tp3", format="safetensors", overwrite=True)
    assert open_checkpoint(f"{place}/tp3").kind == "Hugging Face"
    assert len(names(f"{place}/tp3")) == 2
    storage.convert(f"{place}/hf", f"{place}/tp3", format="zarr", overwrite=True, rules="w -> v, permute()")
    assert kit.same(open_checkpoint(f"{place}/tp3")["v"].read(), t["w"].T)
    assert not any(n.startswith("model") for n in names(f"{place}/tp3"))
    storage.convert(f"{place}/tp3", tmp_path / "back", format="zarr", rules="v -> w, permute()")
    assert storage.diff(tmp_path / "back", tmp_path / "local", drop=["epoch"]).same


def test_a_safetensors_file(kit, place):
    a = kit.random(np.dtype("f4"), (40, 30))
    url = f"{place}/x.safetensors"
    storage.save_safetensors(url, {"a": a.T})
    assert kit.same(storage.load_safetensors(url)["a"], a.T)
    assert kit.same(open_checkpoint(url)["a"][3:5, ::2], a.T[3:5, ::2])
    with pytest.raises(errors.CheckpointExists):
        storage.save_safetensors(url, {"a": a})


def test_the_manager(kit, place):
    manager = CheckpointManager(f"{place}/run", keep=2, best="loss")
    for step, loss in ((1, 0.5), (2, 0.1), (9, 0.3), (10, 0.4)):
        manager.save(step, {"w": np.full(3, step)}, metrics={"loss": loss})
    assert manager.steps() == [2, 10]
    assert manager.best() == f"{place}/run/step-00000002"
    assert np.asarray(manager.restore()["w"]).tolist() == [10] * 3
    assert store.at(f"{place}/run").folders() == ["step-00000002", "step-00000010"]
    background = CheckpointManager(f"{place}/run", keep=1, asynchronous=True)
    background.save(11, {"w": np.ones(3)})
    background.wait()
    assert background.steps() == [11]
    with pytest.raises(errors.NotACheckpoint, match="it holds checkpoints"):
        open_checkpoint(f"{place}/run")


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("killed", [True, False])
def test_a_checkpoint_whose_group_comes_next_is_whole(place, pack, before, killed, monkeypatch):
    """Zarr's metadata of the group comes after a manifest that replaces another: until then it tells of other arrays."""
    old, new = ({"a": np.full((2, 2), i), name: np.full(3, i)} for i, name in ((1, "old"), (2, "new")))
    place = f"{place}/at"
    save(place, old, step=1, pack=before)
    put, end = object_store.ObjectStore.put, object_commit.ObjectFolder.end
    looks = []

    class Killed(BaseException):
        pass

    def look(self, name, *args, **kwargs):
        if name == "zarr.json" and not looks:
            looks.append((load(place)["new"].tolist(), storage.verify(place).arrays))
            if killed:
                raise Killed
        return put(self, name, *args, **kwargs)

    monkeypatch.setattr(object_store.ObjectStore, "put", look)
    if killed:  # nothing is tidied up
        monkeypatch.setattr(object_commit.ObjectFolder, "end", lambda self, committed: None)
    try:
        save(place, new, step=2, overwrite=True, pack=pack)
        assert not killed
    except Killed:
        pass
    assert looks == [([2, 2, 2], 2)]
    monkeypatch.setattr(object_store.ObjectStore, "put", put)
    monkeypatch.setattr(object_commit.ObjectFolder, "end", end)
    if killed:
        assert storage.verify(place).arrays == 2
        monkeypatch.setattr(object_commit, "why_gone", lambda *args: "killed")
        object_commit.recover(place)
    assert not object_commit.is_begun(place)
    assert load(place)["new"].tolist() == [2, 2, 2]
    assert storage.verify(place).arrays == 2


def test_nothing_that_is_not_ours_is_replaced(place):
    store.at(f"{place}/home").put("thesis.tex", b"x")
    with pytest.raises(errors.CheckpointExists, match="not a checkpoint"):
        save(f"{place}/home", {"w": np.ones(2)}, overwrite=True)
    assert names(f"{place}/home") == ["thesis.tex"]
    for nothing in (f"{place}/nothing", f"{place}/home"):
        with pytest.raises(errors.NotACheckpoint):
            open_checkpoint(nothing)


def test_a_damaged_checkpoint_can_be_replaced(place):
    url = f"{place}/c"
    save(url, {"w": np.ones(2)})
    store.at(url).put("meshtape.json", b"{}")
    store.at(url).put(f"{object_commit.CLAIM}~g01234567", b"{}")  # of nobody: what it named cannot be told now
    assert object_commit.recover(url) == []
    with pytest.raises(errors.CorruptCheckpoint):
        open_checkpoint(url)
    with pytest.raises(errors.CheckpointExists):
        save(url, {"w": np.zeros(2)})
    save(url, {"w": np.zeros(2)}, overwrite=True)
    assert np.asarray(load(url)["w"]).tolist() == [0, 0]
    assert not any(n.startswith("w/") for n in names(url))


def test_a_reader_reads_one_version_of_an_object(place):
    there = store.at(place)
    there.put("a", b"one")
    reader = there.reader("a")
    assert reader.nbytes == 3
    there.put("a", b"others")
    with pytest.raises(errors.CheckpointReplaced, match=r"it had 3 bytes.*now it has 6 bytes"):
        reader.readv([bytearray(3)], 0)


@pytest.mark.parametrize("kind", ["zarr", "safetensors", "dcp"])
def test_readers_beside_a_writer_get_one_version_or_the_other(place, kind, tmp_path):
    trees = [{f"a{i}": np.full((20, 30), k + 2 * i) for i in range(6)} for k in (0, 1)]
    sources = [save(tmp_path / str(k), t) and tmp_path / str(k) for k, t in enumerate(trees)]
    url, options = f"{place}/c", {"max_shard_bytes": 10_000} if kind == "safetensors" else {}

    def write(k: int) -> None:
        if kind == "zarr":
            save(url, trees[k], pack=bool(k), overwrite=True)
        else:
            storage.convert(sources[k], url, format=kind, overwrite=True, **options)

    write(0)
    over, seen = threading.Event(), set()

    def read() -> None:
        while not over.is_set():
            got = load(url)
            seen.add(tuple(int(np.asarray(got[f"a{i}"])[3, 4]) - 2 * i for i in range(6)))

    with ThreadPoolExecutor(2) as pool:
        reads = [pool.submit(read) for _ in range(2)]
        try:
            for k in range(1, 6):
                write(k % 2)
        finally:
            over.set()
        for r in reads:
            r.result()
    assert seen <= {(0,) * 6, (1,) * 6}


def test_a_whole_bucket_is_no_target(s3):
    with pytest.raises(errors.CheckpointError, match="whole bucket"):
        save("s3://bucket", {"w": np.ones(2)})


def test_two_savers_of_one_place(kit, place, monkeypatch):
    """One wins; the other is told, and its objects are gone."""
    url = f"{place}/c"
    original = object_commit.ObjectFolder.commit

    def late(folder):
        monkeypatch.setattr(object_commit.ObjectFolder, "commit", original)
        save(url, {"w": np.full(4, 2)})  # comes and goes while the first is still writing
        original(folder)

    monkeypatch.setattr(object_commit.ObjectFolder, "commit", late)
    with pytest.raises(errors.CheckpointExists, match="another process"):
        save(url, {"w": np.full(4, 1)})
    assert np.asarray(load(url)["w"]).tolist() == [2] * 4
    storage.verify(url)
    assert sum("pack-" in n for n in names(url)) == 1
    # And where one is replaced.

    def late_again(folder):
        monkeypatch.setattr(object_commit.ObjectFolder, "commit", original)
        save(url, {"w": np.full(4, 3)}, overwrite=True)
        original(folder)

    monkeypatch.setattr(object_commit.ObjectFolder, "commit", late_again)
    with pytest.raises(errors.CheckpointExists, match="another process"):
        save(url, {"w": np.full(4, 4)}, overwrite=True)
    assert np.asarray(load(url)["w"]).tolist() == [3] * 4
    assert len(names(url)) == 3


# ----- faults on the way ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["500", "cut", "lost", "slow"])
def test_a_request_in_three_goes_wrong_and_nobody_notices(kit, s3, fault, monkeypatch):
    monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(multipart, "PART", 5 << 20)  # two parts, of which the server takes no smaller ones
    monkeypatch.setattr(object_store, "_clients", {})
    t, url = tree(kit, rows=3000), f"{s3.url}/c"
    s3.proxy.reset(one_in_three(fault))
    save(url, t)
    save(url, t, overwrite=True)
    assert equal(kit, load(url), t)
    storage.merge(url, f"{s3.url}/hf")
    manager = CheckpointManager(f"{s3.url}/run", keep=1)
    for step in (1, 2):
        manager.save(step, {"w": np.full(3, step)})
    s3.proxy.reset()
    assert manager.steps() == [2]
    storage.verify(url)
    assert storage.diff(url, f"{s3.url}/hf", drop=["epoch"]).same
    assert all(
        "/zarr.json" in n or "/c" in n or n in ("zarr.json", "meshtape.json") or n.startswith(("meshtape~", "pack-"))
        for n in names(url)
    )


def test_a_server_that_stalls_is_asked_again(kit, s3, monkeypatch):
    t, url = tree(kit), f"{s3.url}/c"
    save(url, t)
    monkeypatch.setattr(object_store, "STALL_TIMEOUT", datetime.timedelta(seconds=1))
    monkeypatch.setattr(object_store, "_clients", {})
    s3.proxy.reset(lambda n, method, path: "stall" if n in (2, 4) and method == "GET" else None)
    assert equal(kit, load(url), t)


def test_a_server_that_only_fails_is_an_error(kit, s3, monkeypatch):
    monkeypatch.setattr(object_store, "RETRIES", 2)
    monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(object_store, "_clients", {})
    save(f"{s3.url}/c", tree(kit))
    s3.proxy.reset(lambda n, method, path: "500")
    for act in (
        lambda: load(f"{s3.url}/c"),
        lambda: save(f"{s3.url}/d", tree(kit)),
        lambda: CheckpointManager(f"{s3.url}/run").latest(),
    ):
        with pytest.raises(errors.StoreError, match="500") as told:
            act()
        assert isinstance(told.value, OSError)
    s3.proxy.reset(lambda n, method, path: "cut" if method == "GET" else None)
    with pytest.raises(errors.StoreError):
        load(f"{s3.url}/c")


def test_no_attempt_begins_after_the_time_that_a_request_has():
    tried = []

    def stalls():
        tried.append(1)
        raise OSError("timed out")

    with pytest.raises(errors.StoreError, match="timed out"):
        object_store._repeated(stalls, "s3://bucket/x", end=time.monotonic())
    assert tried == [1]


def test_nobody_listens(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    monkeypatch.setattr(object_store, "RETRIES", 1)
    monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.01)
    with pytest.raises(errors.StoreError, match="s3://bucket/x"):
        open_checkpoint("s3://bucket/x")


def test_without_credentials_it_ends_soon(s3, monkeypatch, tmp_path):
    """The service of a cloud's machine is asked where the environment has none; where there is no such service, that is
    said at once."""
    for name in s3.environment:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", s3.environment["AWS_ENDPOINT_URL"])
    monkeypatch.setattr(object_store, "RETRIES", 1)
    monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.01)
    s3.proxy.reset(lambda n, method, path: "500")
    with pytest.raises(errors.StoreError, match="no credentials in the environment"):
        open_checkpoint("s3://bucket/x")
    assert s3.proxy.count < object_store.ATTEMPTS


def test_damage_is_found(kit, s3):
    url = f"{s3.url}/c"
    save(url, tree(kit), pack=False)
    there = store.at(url)
    data = bytearray(there.get("w/c.0.0"))
    data[100] ^= 1
    there.put("w/c.0.0", bytes(data))
    with pytest.raises(errors.CorruptCheckpoint, match=r"w/c\.0\.0.*crc32c"):
        load(url)
    with pytest.raises(errors.CorruptCheckpoint, match=r"1 damaged"):
        storage.verify(url)
    there.put("w/c.0.0", bytes(data[:-10]))
    with pytest.raises(errors.CorruptCheckpoint, match="the manifest says"):
        load(url)
    there.delete(["w/c.0.0"])
    with pytest.raises(errors.IncompleteCheckpoint, match="missing"):
        load(url)
    there.delete(["meshtape.json"])
    with pytest.raises(errors.IncompleteCheckpoint):
        load(url)


# ----- reading little -------------------------------------------------------------------------------------------------


def test_what_is_read_is_what_is_needed(kit, s3):
    w = kit.random(np.dtype("f4"), (2048, 1024))
    save(f"{s3.url}/c", {"w": w, "v": w})
    ckpt = open_checkpoint(f"{s3.url}/c")
    s3.proxy.reset()
    opened = open_checkpoint(f"{s3.url}/c")
    assert len(s3.proxy.log) <= 6  # the manifest, and of so few arrays the group's own file
    s3.proxy.reset()
    assert kit.same(opened["w"][100:110, 5:9], w[100:110, 5:9])
    assert len(s3.proxy.log) <= 2
    assert ckpt["w"].tensor.planned(mt.arrays.core.blocks.Box((100, 5), (10, 4))) < w.nbytes // 4


def test_over_http(kit, s3):
    t = tree(kit)
    save(f"{s3.url}/c", t)
    storage.merge(f"{s3.url}/c", f"{s3.url}/hf")
    web = s3.publish(s3.url)
    assert equal(kit, load(f"{web}/c"), t)
    assert storage.verify(f"{web}/c").arrays == 4
    assert kit.same(open_checkpoint(f"{web}/hf")["w"][5], t["w"][5])
    assert kit.same(open_checkpoint(f"{web}/hf/model.safetensors")["w"][5], t["w"][5])
    with pytest.raises(errors.StoreError, match="only be read"):
        save(f"{web}/d", t)
    with pytest.raises(errors.StoreError, match="only be read"):
        CheckpointManager(f"{web}/run")
    with pytest.raises(errors.NotACheckpoint):
        open_checkpoint(f"{web}/nothing")


# ----- secrets --------------------------------------------------------------------------------------------------------


def test_no_secret_is_in_any_message_repr_plan_or_log(kit, s3, monkeypatch, caplog, capfd, tmp_path):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session-token-hush")
    monkeypatch.setattr(object_store, "RETRIES", 1)
    monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.01)
    url = f"{s3.url}/c"
    save(url, tree(kit))
    ckpt = open_checkpoint(url)
    told = [
        repr(ckpt),
        ckpt._repr_html_(),
        repr(ckpt["w"].tensor),
        repr(store.at(url)),
        repr(object_store.client(url)),
        repr(object_store._clients),
    ]
    told.append(pickle.dumps(ckpt["w"].tensor).decode("latin-1"))
    told.append(json.dumps([e.name for e in store.at(url).entries()]))
    told += [store.at(url).get(n).decode("latin-1") for n in names(url)]

    def fail(act):
        with pytest.raises(errors.MeshtapeError) as e:
            act()
        told.append("".join(traceback.format_exception(e.value)))

    s3.proxy.reset(lambda n, method, path: "500")
    fail(lambda: load(url))
    fail(lambda: save(f"{url}2", tree(kit)))
    told.append(CliRunner().invoke(main, ["ls", url]).output)
    s3.proxy.reset()
    fail(lambda: open_checkpoint("s3://nosuch/x"))
    fail(lambda: open_checkpoint(f"https://user:{s3.SECRET}@host/x"))
    fail(lambda: open_checkpoint(f"https://host/x?X-Amz-Security-Token={s3.SECRET}"))
    told.append(CliRunner().invoke(main, ["ls", url, "--json"]).output)
    told += [r.getMessage() for r in caplog.records] + list(capfd.readouterr())
    for text in told:
        for secret in (s3.SECRET, s3.KEY, "session-token-hush"):
            assert secret not in text


def test_credentials_of_the_shared_files(s3, monkeypatch, tmp_path):
    pytest.importorskip("boto3")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    file.write_text(f"[default]\naws_access_key_id = {s3.KEY}\naws_secret_access_key = {s3.SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    save(f"{s3.url}/c", {"w": np.ones(3)})
    assert np.asarray(load(f"{s3.url}/c")["w"]).tolist() == [1, 1, 1]


def test_an_interrupted_upload_goes_on_and_another_plan_starts_anew(kit, place, tmp_path):
    storage.save_safetensors(tmp_path / "x.safetensors", {f"k{i}": np.full(1000, i) for i in range(4)})

    def stop(done, total):
        if done > 8000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        storage.merge(tmp_path / "x.safetensors", f"{place}/m", max_shard_bytes=8000, threads=1, progress=stop)
    assert object_commit.JOURNAL in names(f"{place}/m")
    with pytest.raises(errors.IncompleteCheckpoint):
        open_checkpoint(f"{place}/m")
    seen = []
    storage.merge(
        tmp_path / "x.safetensors", f"{place}/m", max_shard_bytes=8000, threads=1, progress=lambda d, t: seen.append(d)
    )
    assert seen[0] > 8000
    assert len(names(f"{place}/m")) == 5
    with pytest.raises(KeyboardInterrupt):
        storage.merge(tmp_path / "x.safetensors", f"{place}/n", max_shard_bytes=8000, threads=1, progress=stop)
    storage.merge(tmp_path / "x.safetensors", f"{place}/n", max_shard_bytes=16000, progress=lambda d, t: seen.append(d))
    assert 0 in seen
    assert len(names(f"{place}/n")) == 3
    assert sorted(load(f"{place}/n")) == sorted(load(f"{place}/m"))


@pytest.mark.parametrize(
    ("count", "nbytes", "requests"), [(64, 4_000, 1), (64, 200_000, 2), (20, 800_000, 2), (3, 4_000_000, 3)]
)
def test_neighbours_in_one_object_share_requests(s3, count, nbytes, requests):
    held = {f"w{i:02}": np.full(nbytes // 4, i, np.float32) for i in range(count)}
    storage.save_safetensors(f"{s3.url}/a.safetensors", held)
    s3.proxy.reset()
    got = storage.load(f"{s3.url}/a.safetensors")
    assert all(np.array_equal(got[name], a) for name, a in held.items())
    assert [method for method, _ in s3.proxy.log] == ["GET"] * (
        2 + requests
    )  # the kind of the file, its header, and the arrays
    s3.proxy.reset()
    some = storage.load(f"{s3.url}/a.safetensors", keys=["w00", "w02"])
    assert sorted(some) == ["w00", "w02"]
    near = nbytes < 1 << 20  # between the two lies less than a request costs
    assert len(s3.proxy.log) == (3 if near else 4)


def test_one_file_that_is_written_beside_an_export_is_what_everybody_opens(place, tmp_path):
    """As transformers opens it, also where the files of the export bear a writer's mark."""
    where = f"{place}/hf"
    for value in (1.0, 2.0):
        storage.save_safetensors(tmp_path / "w.safetensors", {"w": np.full(9, value)}, overwrite=True)
        storage.merge(tmp_path / "w.safetensors", where, overwrite=value > 1)
    storage.save_safetensors(f"{where}/model.safetensors", {"w": np.full(9, 3.0)})
    with pytest.warns(UserWarning, match="two models"):
        assert np.asarray(storage.load(where)["w"]).max() == 3.0
    storage.merge(tmp_path / "w.safetensors", where, overwrite=True)
    assert "model.safetensors" not in names(where)
    assert np.asarray(storage.load(where)["w"]).max() == 2.0
