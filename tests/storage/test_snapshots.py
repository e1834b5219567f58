"""Snapshots in slices between steps: equal to the state at their step, bounded, and never in each other's way."""

import errno
import threading

import numpy as np
import pytest

import meshtape as mt
from meshtape import errors
from meshtape.storage import load, open_checkpoint
from meshtape.storage.saving.snapshots import Snapshots
from meshtape.storage.stores.filesystem import Files, using


class Slow(Files):
    """A writer that waits until it may; or fails."""

    def __init__(self, fail=False):
        self.go, self.fail = threading.Event(), fail

    def create(self, path):
        assert self.go.wait(200)
        if self.fail:
            raise OSError(errno.EIO, "the disk is gone")
        return super().create(path)


def test_the_file_holds_the_state_of_its_step_though_training_went_on(kit, tmp_path):
    mesh = mt.Mesh({"x": 2})
    w, ours = np.arange(1000.0).reshape(10, 100), mt.asarray(np.arange(5.0))
    split = mt.distribute(np.arange(6.0), mesh, x=mt.Shard(0))
    frozen = np.ones(3)  # parameters that nobody trains are there too
    state = {
        "w": w,
        "t": w.T,
        "ours": ours,
        "split": split,
        "frozen": frozen,
        "s": np.array(3.0),
        "e": np.zeros((0, 2)),
        "n": 1,
    }
    with Snapshots(f"{tmp_path}/{{step}}", slice_nbytes=1600) as snapshots:
        assert snapshots.begin(5, state)
        copied = []
        while snapshots.pending:
            copied.append(snapshots.advance())
            ours[...] = -1  # a value: what was begun does not change
        assert max(copied) <= 1600
        assert len(copied) >= 10
        w += 1
        frozen[...] = 7
        assert snapshots.advance() == 0
    got = load(tmp_path / "5")
    assert kit.same(got["w"], np.arange(1000.0).reshape(10, 100))
    assert kit.same(got["t"], np.ascontiguousarray(np.arange(1000.0).reshape(10, 100).T))
    assert kit.same(got["ours"], np.arange(5.0))
    assert kit.same(got["split"], np.arange(6.0))
    assert kit.same(got["frozen"], np.ones(3))
    assert got["n"] == 1
    assert open_checkpoint(tmp_path / "5").step == 5


def test_one_micro_step_and_work_for_the_average_alone_do_not_wait_for_each_other(tmp_path):
    """With a single micro-step there is no further hook before the update: what is left is copied there."""
    snapshots = Snapshots(f"{tmp_path}/{{step}}", slice_nbytes=8)
    w = np.zeros(100)
    for step in range(1, 4):
        snapshots.begin(step, {"ema": w})
        snapshots.advance()  # the only slot of this step
        snapshots.must_finish()
        w += 1
    snapshots.finalize()
    assert [float(np.asarray(load(tmp_path / str(s))["ema"])[0]) for s in (1, 2, 3)] == [0, 1, 2]


@pytest.mark.parametrize("policy", ["block", "skip"])
def test_a_writer_slower_than_the_interval(tmp_path, policy):
    slow = Slow()
    w = np.zeros(4)
    with using(slow):
        snapshots = Snapshots(f"{tmp_path}/{{step}}", when_busy=policy)
        assert snapshots.begin(1, {"w": w})
        snapshots.must_finish()
        if policy == "block":
            threading.Timer(0.2, slow.go.set).start()
            assert snapshots.begin(2, {"w": w})  # returns when the first is written
            assert open_checkpoint(tmp_path / "1").step == 1
            snapshots.finalize()
            assert snapshots.skipped == 0
        else:
            assert not snapshots.begin(2, {"w": w})
            assert not snapshots.begin(3, {"w": w})
            assert snapshots.skipped == 2
            slow.go.set()
            snapshots.finalize()
            assert snapshots.begin(4, {"w": w})
            snapshots.finalize()
            assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "4"]


@pytest.mark.parametrize("call", ["begin", "advance", "finalize"])
def test_an_error_of_the_writer_is_raised_by_the_next_call_once(tmp_path, call):
    slow = Slow(fail=True)
    slow.go.set()
    with using(slow):
        snapshots = Snapshots(f"{tmp_path}/{{step}}")
        snapshots.begin(1, {"w": np.ones(2)})
        snapshots.must_finish()
        while snapshots._writing is not None and not snapshots._writing.done():
            pass
        arguments = (2, {"w": np.ones(2)}) if call == "begin" else ()
        with pytest.raises(OSError, match="the disk is gone"):
            getattr(snapshots, call)(*arguments)
    assert snapshots.begin(3, {"w": np.ones(2)})
    assert snapshots.finalize().path == str(tmp_path / "3")


def test_an_error_of_the_writer_that_is_waited_for_is_raised_once(tmp_path):
    slow = Slow(fail=True)
    with using(slow):
        snapshots = Snapshots(f"{tmp_path}/{{step}}")
        snapshots.begin(1, {"w": np.ones(2)})
        snapshots.must_finish()
        threading.Timer(0.2, slow.go.set).start()
        with pytest.raises(OSError, match="the disk is gone"):
            snapshots.begin(2, {"w": np.ones(2)})
    assert snapshots.begin(3, {"w": np.ones(2)})
    assert snapshots.finalize().path == str(tmp_path / "3")


def test_a_state_of_other_shapes_takes_fresh_memory(kit, tmp_path):
    snapshots = Snapshots(lambda step: str(tmp_path / str(step)), slice_nbytes=24)
    snapshots.begin(1, {"w": np.ones((4, 3)), "v": np.ones(2)})
    snapshots.finalize()
    kept = snapshots._buffers["v",]
    snapshots.begin(2, {"w": np.full((2, 5), 2, "f4"), "v": np.full(2, 3.0)})
    snapshots.must_finish()
    snapshots.finalize()
    assert snapshots._buffers["v",] is kept  # and equal shapes the memory of before
    assert kit.same(load(tmp_path / "2")["w"], np.full((2, 5), 2, "f4"))
    assert kit.same(load(tmp_path / "1")["w"], np.ones((4, 3)))


def test_a_second_one_finishes_the_first(tmp_path):
    snapshots = Snapshots(f"{tmp_path}/{{step}}", slice_nbytes=8)
    w = np.zeros(10)
    snapshots.begin(1, {"w": w})
    snapshots.begin(2, {"w": w}, metadata={"loss": 0.5})
    snapshots.finalize()
    assert open_checkpoint(tmp_path / "1").step == 1
    assert open_checkpoint(tmp_path / "2").metadata == {"loss": 0.5}


def test_mistakes(tmp_path):
    with pytest.raises(errors.CheckpointError, match="'block' or 'skip'"):
        Snapshots("x", when_busy="wait")
    with pytest.raises(errors.CheckpointError, match="positive"):
        Snapshots("x", slice_nbytes=0)
    snapshots = Snapshots(str(tmp_path / "x"))
    assert snapshots.finalize() is None
    assert snapshots.advance() == 0
    with pytest.raises(errors.CheckpointDTypeError, match="key 'x'"):
        snapshots.begin(1, {"x": object()})
