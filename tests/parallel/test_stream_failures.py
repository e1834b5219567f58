"""Streams that fail: the error names the file and the worker, and what they have written is taken for no array."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client
from forked import Forked

import meshtape as mt
from meshtape import errors

pytestmark = pytest.mark.timeout(300)
HOST = np.random.default_rng(0).normal(size=(64, 4)) + 3


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "in" / "x"
    zarr.create_array(str(path), shape=HOST.shape, chunks=(4, 4), dtype=HOST.dtype)[...] = HOST
    return str(path)


def at_chunk(last: int, what: Any) -> Callable[[], None]:
    """Writing fails from some chunk on with an error's number, or waits for a file to be there. It travels by value."""

    def install() -> None:
        import time
        from pathlib import Path

        from zarr.storage import LocalStore

        true = getattr(LocalStore.set, "true", LocalStore.set)
        written = []

        async def fails(self: Any, key: str, value: Any, **options: Any) -> None:
            if "zarr.json" not in key:
                written.append(key)
                if len(written) > last and isinstance(what, int):
                    raise OSError(what, os.strerror(what), key)
                while len(written) > last and not Path(what).exists():
                    time.sleep(0.01)
            await true(self, key, value, **options)

        fails.true = true  # type: ignore[attr-defined]
        LocalStore.set = fails if what else true

    return install


class Where:
    """A virtual mesh, or one of worker processes, of which one fails to write."""

    def __init__(self, client: Client | None) -> None:
        self.client = client
        self.mesh = mt.Mesh({"a": 2}, client=client)

    def put(self, last: int, what: Any) -> None:
        if self.client is None:
            at_chunk(last, what)()
        else:
            self.client.run(at_chunk(last, what), workers=[self.mesh.runtime.addresses[1]])


@pytest.fixture(params=["virtual", "processes"])
def place(request: pytest.FixtureRequest) -> Iterator[Where]:
    where = Where(None if request.param == "virtual" else request.getfixturevalue("processes"))
    try:
        yield where
    finally:
        where.put(0, 0)
        where.mesh.close()


def _one(x: Any) -> Any:
    return mt.exp(x)


def _two(x: Any) -> Any:
    return mt.exp(x), mt.sum(x, axis=1), mt.sum(x)


def _in_two_passes(x: Any) -> Any:
    return x - mt.mean(x, axis=0)


WAYS = {
    "one": (_one, "out", [np.exp(HOST)]),
    "two": (_two, ("out", "sums", "total"), [np.exp(HOST), HOST.sum(axis=1), HOST.sum()]),
    "passes": (_in_two_passes, "out", [HOST - HOST.mean(axis=0)]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("number", "error", "text"),
    [
        (errno.ENOSPC, errors.StorageFull, "filled up"),
        (errno.EDQUOT, errors.StorageFull, "filled up"),
        (errno.EIO, errors.StoreError, "cannot be written"),
    ],
    ids=["full", "quota", "broken"],
)
def test_a_rank_that_cannot_write(place, source, tmp_path, eventually, way, number, error, text):
    fn, names, wanted = WAYS[way]
    home = tmp_path / "results"
    to = str(home / names) if isinstance(names, str) else tuple(str(home / n) for n in names)
    x = mt.from_zarr(source, place.mesh, a=mt.Shard(0))
    place.put(1, number)
    with pytest.raises(error, match=text) as e:
        mt.stream(fn, x, memory=1000, to=to)
    assert str(home) in str(e.value)
    if place.client is not None:
        assert f"worker {place.mesh.runtime.addresses[1]}" in str(e.value)
    for name in (names,) if isinstance(names, str) else names:
        with pytest.raises(errors.NotACheckpoint):
            mt.from_zarr(home / name, place.mesh)
    place.put(0, 0)
    out = mt.stream(fn, x, memory=1000, to=to)
    for o, w in zip([out] if isinstance(names, str) else out, wanted, strict=True):
        np.testing.assert_allclose(o.load(), w)
        np.testing.assert_allclose(zarr.open(o.path)[...], w)
    eventually(lambda: sorted(p.name for p in home.iterdir()) == sorted([names] if isinstance(names, str) else names))


KILLED = """
import os, sys
import meshtape as mt
from distributed import Client
exec(sys.argv[4])
client = Client(sys.argv[3], set_as_default=False) if sys.argv[3] else None
x = mt.from_zarr(sys.argv[1], mt.Mesh({"a": 2}, client=client), a=mt.Shard(0))
print("ready", flush=True)
mt.stream(lambda x: mt.exp(x), x, memory=1000, to=sys.argv[2])
print("whole", flush=True)
"""
DIES = """
from zarr.storage import LocalStore
true, keys = LocalStore.set, []
async def set(self, key, value, **o):
    keys.append(key)
    if len(keys) > 3:
        os.kill(os.getpid(), 9)
    await true(self, key, value, **o)
LocalStore.set = set
"""


def test_a_process_that_is_killed_leaves_no_array(source, tmp_path):
    out = tmp_path / "out"
    p = Forked("-c", KILLED, source, str(out), "", DIES)
    assert p.communicate()[0] == "ready\n"
    assert p.returncode == -signal.SIGKILL
    mesh = mt.Mesh({"a": 2})
    with pytest.raises(errors.NotACheckpoint):
        mt.from_zarr(out, mesh)
    assert [(x.kind, x.dead) for x in mt.storage.leftovers(tmp_path)] == [("tmp", True)]
    again = mt.stream(mt.exp, mt.from_zarr(source, mesh, a=mt.Shard(0)), memory=1000, to=out)
    np.testing.assert_allclose(again.load(), np.exp(HOST))
    assert mt.storage.leftovers(tmp_path) == []


def test_a_client_that_is_killed_while_workers_write(processes, source, tmp_path, eventually):
    out, gate = tmp_path / "out", tmp_path / "gate"
    processes.run(at_chunk(1, str(gate)))
    try:
        address = processes.scheduler.address
        p = Forked("-c", KILLED, source, str(out), address, "")
        eventually(lambda: list(tmp_path.glob("out.tmp-*/c/*")) or p.poll() is not None)
        p.kill()
        assert p.communicate()[0] == "ready\n"
        mesh = mt.Mesh({"a": 2})
        with pytest.raises(errors.NotACheckpoint):
            mt.from_zarr(out, mesh)
        again = mt.stream(mt.exp, mt.from_zarr(source, mesh, a=mt.Shard(0)), memory=1000, to=out)
    finally:
        gate.touch()
        processes.run(at_chunk(0, 0))
    np.testing.assert_allclose(again.load(), np.exp(HOST))
    with mt.Mesh({"a": 2}, client=processes) as mesh:  # the workers go on, and what is there stays right
        assert float(mt.sum(mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0)))) == 6.0
    np.testing.assert_allclose(zarr.open(str(out))[...], np.exp(HOST))


def test_an_object_store_has_no_metadata_before_the_end(source, monkeypatch, tmp_path):
    from meshtape.storage.readers.local_zarr import LocalZarrStore

    out = f"memory://{tmp_path.name}/out"
    true, keys = LocalZarrStore.set, []

    async def fails(self: Any, key: str, value: Any, **options: Any) -> None:
        keys.append(key)
        if len(keys) > 3:
            raise ConnectionError("the store went away")
        await true(self, key, value, **options)

    monkeypatch.setattr(LocalZarrStore, "set", fails)
    mesh = mt.Mesh({"a": 2})
    x = mt.from_zarr(source, mesh, a=mt.Shard(0))
    with pytest.raises((errors.StoreError, ConnectionError)):
        mt.stream(mt.exp, x, memory=1000, to=out)
    assert not any("zarr.json" in k for k in keys)
    monkeypatch.undo()
    with pytest.raises(errors.NotACheckpoint):
        mt.from_zarr(out, mesh)
    np.testing.assert_allclose(mt.stream(mt.exp, x, memory=1000, to=out).load(), np.exp(HOST))


def test_what_is_there_already_stays(source, tmp_path):
    x = mt.from_zarr(source, mt.Mesh({"a": 2}), a=mt.Shard(0))
    file, folder, array, group, empty = (tmp_path / n for n in ("file", "folder", "array", "group", "empty"))
    file.write_text("mine")
    (folder / "below").mkdir(parents=True)
    zarr.create_array(str(array), shape=(1,), dtype="f4")[...] = 7
    zarr.open_group(str(group), mode="w")
    empty.mkdir()
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    for taken in (file, folder, array, group):
        with pytest.raises(errors.CheckpointExists, match=f"{taken.name} .*choose another path"):
            mt.stream(mt.exp, x, memory=1000, to=taken)
    same = str(tmp_path / "new")
    with pytest.raises(errors.MeshError, match=r"names .*new twice: each result needs a path of its own"):
        mt.stream(lambda x: (x, x + 1), x, memory=1000, to=(same, f"{tmp_path}/folder/../new"))
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
    np.testing.assert_allclose(mt.stream(mt.exp, x, memory=1000, to=empty).load(), np.exp(HOST))
    np.testing.assert_allclose(
        mt.stream(mt.exp, x, memory=1000, to=tmp_path / "deep" / "er").load(), np.exp(HOST)
    )  # folders on the way are made
