"""The same promises on ``gs://`` and ``az://``: their protocols, their conditions on writes, their credentials."""

import numpy as np
import pytest
from serving import one_in_three

import meshtape as mt
from meshtape import errors, storage
from meshtape.storage import CheckpointManager, load, save
from meshtape.storage.commit import object_commit
from meshtape.storage.stores import multipart, object_store
from meshtape.storage.stores import store as stores


def names(url):
    return [e.name for e in stores.at(url).entries()]


def test_the_contract_of_a_store(cloud):
    store = stores.at(cloud.place)
    assert store.put("a/b c%é", b"one") == 3
    with pytest.raises(FileExistsError):
        store.put("a/b c%é", b"two", new=True)
    assert store.put("a/new", b"first", new=True) == 5
    assert store.get("a/b c%é") == b"one"
    reader = store.reader("a/b c%é")
    part = bytearray(5)
    assert reader.readv([part], 1) == 2
    assert (part[:2], reader.nbytes) == (b"ne", 3)
    assert reader.readv([part], 3) == 0
    assert (store.size("a/new"), store.size("a/nothing")) == (5, None)
    with pytest.raises(FileNotFoundError):
        store.get("a/nothing")
    for i in range(8):  # lists come in pages
        store.put(f"z{i}", b"")
        store.put(f"f{i}/x", b"")
    assert len(list(store.entries())) == 18
    assert [e.name for e in store.entries("a")] == ["a/b c%é", "a/new"]
    assert store.files() == [f"z{i}" for i in range(8)]
    assert store.folders() == ["a", *(f"f{i}" for i in range(8))]
    (entry,) = store.entries("f0")
    version = store.version(entry)
    store.replace("f0/x", b"2", version)
    with pytest.raises(FileExistsError):
        store.replace("f0/x", b"3", version)
    assert store.get("f0/x") == b"2"
    store.delete(["a/new", "a/nothing", *(f"z{i}" for i in range(8))])
    assert store.files() == []
    assert [e.name for e in store.entries("a")] == ["a/b c%é"]


def test_objects_in_parts(cloud, monkeypatch):
    monkeypatch.setattr(multipart, "PART", 5 << 20)
    a = np.arange(3_000_000, dtype="f4")
    save(f"{cloud.place}/c", {"a": a})
    assert sum("partNumber" in p or "comp=block&" in p for _, p in cloud.log) == 3
    assert np.array_equal(np.asarray(load(f"{cloud.place}/c")["a"]), a)
    assert cloud.parts == {}


def test_checkpoints(cloud, tmp_path):
    url = f"{cloud.place}/c"
    for k in (1, 2, 3):
        save(url, {"w": np.full((300, 5), k), "b": [np.arange(k)]}, step=k, overwrite=k > 1)
        got = load(url)
        assert np.unique(np.asarray(got["w"])).tolist() == [k]
        assert len(names(url)) == 3
    with pytest.raises(errors.CheckpointExists):
        save(url, {"w": np.ones(2)})
    storage.verify(url)
    storage.merge(url, f"{cloud.place}/hf", max_shard_bytes=5000)
    storage.reshard(f"{cloud.place}/hf", tmp_path / "back", mesh={"m": 2}, shardings={"w": {"m": 0}})
    assert storage.diff(url, tmp_path / "back").same
    manager = CheckpointManager(f"{cloud.place}/steps", keep=1)
    for k in (1, 2):
        manager.save(k, {"w": np.full(3, k)})
    assert manager.steps() == [2]
    mt.save_program(f"{cloud.place}/p", lambda x: x * 2.0, mt.ones(2))
    mt.save_program(f"{cloud.place}/p", lambda x: x * 3.0, mt.ones(2), overwrite=True)
    assert mt.load_program(f"{cloud.place}/p")(mt.ones(2)).tolist() == [3, 3]


def test_two_savers_of_one_place(cloud, monkeypatch):
    url = f"{cloud.place}/c"
    original = object_commit.ObjectFolder.commit
    for overwrite in (False, True):
        for_other, for_us = (2, 1) if not overwrite else (3, 4)

        def late(folder, value=for_other, overwrite=overwrite):
            monkeypatch.setattr(object_commit.ObjectFolder, "commit", original)
            save(url, {"w": np.full(4, value)}, overwrite=overwrite)
            original(folder)

        monkeypatch.setattr(object_commit.ObjectFolder, "commit", late)
        with pytest.raises(errors.CheckpointExists, match="another process"):
            save(url, {"w": np.full(4, for_us)}, overwrite=overwrite)
        assert np.asarray(load(url)["w"]).tolist() == [for_other] * 4
        assert len(names(url)) == 3


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_server_that_fails_now_and_then(cloud, status):
    cloud.fault = one_in_three(status)
    url = f"{cloud.place}/c"
    for k in (1, 2):
        save(url, {"w": np.full(1000, k)}, overwrite=True)
        assert np.unique(np.asarray(load(url)["w"])).tolist() == [k]
    cloud.fault = None
    assert len(names(url)) == 3


def test_refusals_name_the_place_and_no_secret(cloud, monkeypatch):
    save(f"{cloud.place}/c", {"w": np.ones(2)})
    monkeypatch.setattr(object_store, "_clients", {})
    with pytest.raises(errors.StoreError, match=r"nosuch.*: the bucket does not exist"):
        stores.at(f"{cloud.scheme}://nosuch/x").put("a", b"1")
    cloud.fault = lambda n, method, path: 403
    for act in (lambda: load(f"{cloud.place}/c"), lambda: save(f"{cloud.place}/d", {"w": np.ones(2)})):
        with pytest.raises(errors.StoreError, match="access was refused; check the credentials") as told:
            act()
        assert cloud.place in str(told.value)
        assert cloud.secret[5:] not in str(told.value)
    held, _ = object_store.client(cloud.place)
    assert cloud.secret[5:25] not in repr(held)


def test_a_wrong_key_is_refused(cloud, monkeypatch):
    """What the environment says is what is used: the server checks the signatures."""
    save(f"{cloud.place}/c", {"w": np.ones(2)})
    other = type(cloud)()
    try:
        for name, value in other.environment.items():
            if "KEY" in name:
                monkeypatch.setenv(name, value if other.scheme == "gs" else "b3RoZXI=")
        with pytest.raises(errors.StoreError, match="access was refused"):
            load(f"{cloud.place}/c")
    finally:
        other.close()
