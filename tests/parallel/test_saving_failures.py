"""A save whose workers die, or whose disk fills up on one of them: an error in the process that saves, the old
checkpoint whole, nothing left."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

import meshtape as mt
from meshtape.parallel.dask import streams
from meshtape.parallel.dask.workers import known_workers
from meshtape.storage import load, open_checkpoint, save, save_async
from meshtape.storage.stores import filesystem

pytestmark = pytest.mark.timeout(300)


def at_a_write(end: str) -> Callable[[], None]:
    """What makes a worker fail when it has written a part. A function within a function travels by value: workers
    cannot import this file."""

    def install() -> None:
        class Failing(filesystem.Files):
            def write(self, fd: int, buffers: Any, offset: int) -> int:
                if os.fstat(fd).st_size or offset:
                    return super().write(fd, buffers, offset)
                super().write(fd, [memoryview(buffers[0]).cast("B")[:8]], offset)
                if end == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        filesystem._active = Failing()

    return install


def restoring() -> Callable[[], None]:
    """What makes it work again."""

    def restore() -> None:
        filesystem._active = filesystem.Files()

    return restore


def in_the_background(*args: Any, **options: Any) -> None:
    save_async(*args, **options).wait()


@pytest.mark.parametrize(("end", "how"), [("kill", save), ("full", in_the_background)], ids=["kill", "full"])
def test_one_of_two_writers_fails(mortal: Client, tmp_path: Path, end: str, how: Callable[..., Any]) -> None:
    mortal.wait_for_workers(2, timeout=200)
    with mt.Mesh({"a": 2}, client=mortal) as mesh:
        x = mt.distribute(np.arange(8.0).reshape(4, 2), mesh, a=mt.Shard(0))
        save(tmp_path / "c", {"x": x}, step=1)
        held = mt.distribute(np.ones((4, 2)), mesh, a=mt.Shard(0))
        victim = sorted(known_workers(mortal))[-1]
        mortal.run(at_a_write(end), workers=[victim])
        wanted = mt.errors.StorageFull if end == "full" else (mt.errors.RankLost, mt.errors.ClusterError)
        with pytest.raises(wanted) as told:
            how(tmp_path / "c", {"x": held}, step=2, overwrite=True)
        assert "rank" in str(told.value) or end == "full"
        assert open_checkpoint(tmp_path / "c").step == 1
        assert np.array_equal(np.asarray(load(tmp_path / "c")["x"]), np.arange(8.0).reshape(4, 2))
        assert [p.name for p in tmp_path.iterdir()] == ["c"]
        if end == "full":
            mortal.run(restoring(), workers=[victim])
            how(tmp_path / "c", {"x": held}, step=2, overwrite=True)
            assert open_checkpoint(tmp_path / "c").step == 2


def test_a_writer_dies_when_its_part_is_done_and_its_answer_is_not_yet_here(
    mortal: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshtape.parallel.dask.in_flight import RunQueue

    mortal.wait_for_workers(2, timeout=200)
    with mt.Mesh({"a": 2}, client=mortal) as mesh:
        x = mt.distribute(np.arange(8.0).reshape(4, 2), mesh, a=mt.Shard(0))
        save(tmp_path / "c", {"x": x}, step=1)
        victim = sorted(known_workers(mortal))[-1]
        pid = mortal.run(os.getpid, workers=[victim])[victim]
        settle = RunQueue.wait

        def dies(self: RunQueue, this: Any) -> None:
            settle(self, this)
            if this.what == "save":
                monkeypatch.setattr(RunQueue, "wait", settle)
                os.kill(pid, signal.SIGKILL)

        monkeypatch.setattr(RunQueue, "wait", dies)
        with pytest.raises((mt.errors.RankLost, mt.errors.ClusterError)):
            save(tmp_path / "c", {"x": x}, step=2, overwrite=True)
        assert open_checkpoint(tmp_path / "c").step == 1
        assert [p.name for p in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize(
    "answer", [OSError("closed"), {"other": 1}, None], ids=["none", "of another kind", "nothing in it"]
)
def test_an_answer_that_is_lost_on_its_way(
    mortal: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    mortal.wait_for_workers(2, timeout=200)
    with mt.Mesh({"a": 2}, client=mortal) as mesh:
        x = mt.distribute(np.arange(8.0).reshape(4, 2), mesh, a=mt.Shard(0))

        async def lost(*args: Any) -> Any:
            if isinstance(answer, OSError):
                raise answer
            return answer

        monkeypatch.setattr(streams, "send_recv_to", lost)
        with pytest.raises(mt.errors.RankLost, match="save"):
            save(tmp_path / "c", {"x": x})
        monkeypatch.undo()
        assert list(tmp_path.iterdir()) == []


def test_workers_write_their_blocks_into_one_commit_of_icechunk(mortal: Client, tmp_path: Path) -> None:
    ice = pytest.importorskip("icechunk")
    mortal.wait_for_workers(2, timeout=200)
    where, rows = f"icechunk://{tmp_path / 'repo'}", np.arange(3000.0, dtype="f4").reshape(100, 30)
    with mt.Mesh({"a": 2}, client=mortal) as mesh:
        for step in (1, 2):
            split = mt.distribute(rows * step, mesh, a=mt.Shard(0))
            save(where, {"split": split, "copied": mt.distribute(rows, mesh), "whole": rows}, step=step)
            (found := load(where)).pop("whole")
            assert all(np.array_equal(np.asarray(a), rows * (step if n == "split" else 1)) for n, a in found.items())
            assert mt.verify(where).uncovered == []
        chunks = len(list((tmp_path / "repo" / "chunks").iterdir()))
        assert chunks == 6  # of each array in the first step, and what the second changed: the rest is shared
        history = ice.Repository.open(ice.local_filesystem_storage(str(tmp_path / "repo"))).ancestry
        before = [s.id for s in history(branch="main")]
        assert len(before) == 3  # the empty one, and one a step
        victim = sorted(known_workers(mortal))[-1]
        mortal.run(dying_at_a_chunk(), workers=[victim])
        with pytest.raises((mt.errors.RankLost, mt.errors.ClusterError)):
            save(where, {"split": split}, step=3)
        assert [s.id for s in history(branch="main")] == before
    assert open_checkpoint(where).step == 2


def dying_at_a_chunk() -> Callable[[], None]:
    """What kills a worker that has begun to write into a repository."""

    def install() -> None:
        from meshtape.storage.saving import icechunk_commit

        icechunk_commit.crc32c = lambda raw: os.kill(os.getpid(), signal.SIGKILL)

    return install
