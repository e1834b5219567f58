"""Saves in the background: a snapshot of one moment, errors that surface, an exit that waits."""

import errno
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import meshtape as mt
from meshtape import errors
from meshtape.storage import CheckpointManager, load, open_checkpoint, save, save_async
from meshtape.storage.saving import background
from meshtape.storage.stores.filesystem import Files, using


class Gate(Files):
    """Holds the first file of a save until it is opened; fails it then, where told to."""

    def __init__(self, fail=False):
        self.opened, self.reached, self.fail = threading.Event(), threading.Event(), fail

    def create(self, path):
        self.reached.set()
        assert self.opened.wait(200)
        if self.fail:
            raise OSError(errno.EIO, "the disk is gone")
        return super().create(path)


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory):
    save(tmp_path_factory.mktemp("warm") / "c", {"a": np.ones(2)})


def test_what_is_changed_afterwards_is_not_in_the_file(kit, tmp_path):
    host = np.arange(6.0)
    array, view = mt.asarray(np.arange(6.0)), mt.asarray(np.arange(6.0))
    half = view[:3]
    mesh = mt.Mesh({"x": 2})
    split = mt.distribute(mt.asarray(np.arange(6.0)), mesh, x=mt.Shard(0))
    pending = split + 1.0
    metadata = {"note": ["a"]}
    gate = Gate()
    with using(gate):
        tree = {"host": host, "array": array, "half": half, "split": split, "pending": pending, "epoch": 1}
        handle = save_async(tmp_path / "c", tree, metadata=metadata)
        assert not handle.done()
        host[:] = -1
        array[...] = -1
        view[...] = -1
        half[...] = -1
        split = split * 0.0
        tree["array"] = None
        metadata["note"].append("b")
        gate.opened.set()
        report = handle.wait()
    assert handle.done()
    assert report.arrays == 5
    assert report.path == str(tmp_path / "c")
    got = load(tmp_path / "c")
    for name in ("host", "array", "split"):
        assert kit.same(got[name], np.arange(6.0)), name
    assert kit.same(got["half"], np.arange(3.0))
    assert kit.same(got["pending"], np.arange(1.0, 7.0))
    assert open_checkpoint(tmp_path / "c").metadata == {"note": ["a"]}


def test_partial_values_are_reduced_before_it_returns(kit, tmp_path):
    mesh = kit.Host({"x": 2})
    a = np.arange(6.0).reshape(2, 3)
    x = kit.Split((2, 3), a.dtype, kit.Sharding(mesh, (None,), partial=True), {0: a.copy(), 1: a.copy()})
    handle = save_async(tmp_path / "c", {"x": x})
    x.blocks[0][...] = 99
    handle.wait()
    assert kit.same(load(tmp_path / "c")["x"], 2 * a)


def test_an_error_surfaces_at_wait_every_time(tmp_path):
    gate = Gate(fail=True)
    gate.opened.set()
    with using(gate):
        handle = save_async(tmp_path / "c", {"w": np.ones(3)})
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                handle.wait()
    assert "failed: " in repr(handle)
    assert list(tmp_path.iterdir()) == []
    # It was seen: the next save to the path goes through.
    save(tmp_path / "c", {"w": np.ones(3)})


@pytest.mark.parametrize("again", [save, save_async])
def test_an_error_nobody_waited_for_surfaces_at_the_next_save_to_that_path(tmp_path, again):
    gate = Gate(fail=True)
    gate.opened.set()
    with using(gate):
        handle = save_async(tmp_path / "c", {"w": np.ones(3)})
        while not handle.done():
            pass
    save(tmp_path / "other", {"w": np.ones(3)})  # another path is not concerned
    with pytest.raises(OSError, match="the disk is gone"):
        again(tmp_path / "c", {"w": np.ones(3)})
    save_async(tmp_path / "c", {"w": np.ones(3)}).wait()
    assert open_checkpoint(tmp_path / "c")["w"].shape == (3,)


def test_mistakes_are_raised_at_once(tmp_path):
    with pytest.raises(errors.CheckpointDTypeError, match="key 'x'"):
        save_async(tmp_path / "c", {"x": object()})
    save(tmp_path / "c", {"w": np.ones(3)})
    with pytest.raises(errors.CheckpointExists):
        save_async(tmp_path / "c", {"w": np.ones(3)})


def test_two_saves_to_one_path_go_in_order_one_at_a_time(tmp_path):
    gate = Gate()
    order = []
    with using(gate):
        first = save_async(tmp_path / "c", {"w": np.full(3, 1)}, then=lambda: order.append(1))
        assert gate.reached.wait(200)

        def second():
            order.append("asked")
            save_async(tmp_path / "c", {"w": np.full(3, 2)}, overwrite=True, then=lambda: order.append(2)).wait()

        thread = threading.Thread(target=second)
        thread.start()
        other = save_async(tmp_path / "d", {"w": np.full(3, 3)})  # another path does not wait for it
        assert not first.done()
        with pytest.raises(TimeoutError, match="still runs"):
            first.wait(0.01)
        gate.opened.set()
        thread.join(200)
        other.wait()
    assert [x for x in order if x != "asked"] == [1, 2]
    assert np.asarray(load(tmp_path / "c")["w"]).tolist() == [2, 2, 2]


def test_what_follows_a_save_may_save_to_its_path(tmp_path):
    new = {"w": np.zeros(3)}
    save_async(tmp_path / "c", {"w": np.ones(3)}, then=lambda: save_async(tmp_path / "c", new, overwrite=True)).wait()
    assert np.asarray(load(tmp_path / "c")["w"]).tolist() == [0, 0, 0]


EXIT = """
import sys, time
import numpy as np
from meshtape.storage import save_async
from meshtape.storage.stores.filesystem import Files, using
import meshtape.storage.stores.filesystem as files
class Slow(Files):
    def create(self, path):
        time.sleep(0.05)
        if "fail" in sys.argv[1]:
            raise OSError(5, "the disk is gone")
        return super().create(path)
files._active = Slow()
save_async(sys.argv[1], {f"w{i}": np.full(3, i) for i in range(6)})
print("end of the program")
"""


def test_the_interpreter_waits_for_a_save_when_it_ends(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", EXIT, str(tmp_path / "c")], check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "end of the program\n"
    assert done.stderr == ""
    assert len(load(tmp_path / "c")) == 6


def test_an_error_at_exit_is_printed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", EXIT, str(tmp_path / "fail")], check=False, capture_output=True, text=True, timeout=120
    )
    assert "nobody waited for it" in done.stderr
    assert "the disk is gone" in done.stderr
    assert not (tmp_path / "fail").exists()


def test_a_forked_child_does_not_wait_for_its_parents_save(tmp_path):
    gate = Gate()
    earlier = save_async(tmp_path / "earlier", {"w": np.ones(3)})
    earlier.wait()
    with using(gate):
        handle = save_async(tmp_path / "c", {"w": np.ones(3)})
        assert gate.reached.wait(200)  # its thread waits, and holds no lock that the child would need
        pid = os.fork()
        if pid == 0:
            signal.alarm(120)
            try:
                gate.opened = threading.Event()  # the thread may hold the lock of the parent's
                gate.opened.set()
                save(tmp_path / "child", {"w": np.ones(3)})
                # Would wait for ever if the parent's thread were remembered.
                from meshtape.storage.saving import background

                background.finish_earlier(str(tmp_path / "c"))
                assert earlier.done()
                assert earlier.wait().arrays == 1
                for ask in (handle.done, handle.wait, lambda: handle.wait(1)):
                    with pytest.raises(errors.CheckpointError, match="belongs to the parent"):
                        ask()
                assert "running" in repr(handle)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        gate.opened.set()
        handle.wait()


def test_a_kill_in_the_background_leaves_the_old_checkpoint(kit, tmp_path):
    saw = set()
    for n in range(1, 200, 3):
        where = tmp_path / str(n) / "c"
        save(where, {"a": np.full(4, 1), "b": np.full(4, 1)})
        new = {"a": np.full(4, 2), "b": np.full(4, 2)}
        killed = kit.die_at(n, lambda where=where, new=new: save_async(where, new, overwrite=True).wait())
        values = {int(np.asarray(v).max()) for v in load(where).values()}
        assert len(values) == 1
        saw |= values
        if not killed:
            break
    assert saw == {1, 2}


# ----- the manager ----------------------------------------------------------------------------------------------------


def test_the_manager_saves_in_the_background_and_rotates_there(tmp_path):
    with CheckpointManager(tmp_path, keep=2, asynchronous=True) as manager:
        w = np.zeros(3)
        for step in range(1, 6):
            w[:] = step
            assert manager.save(step, {"w": w}).path == manager.path(step)
    assert manager.steps() == [4, 5]
    assert np.asarray(manager.restore(4)["w"]).tolist() == [4, 4, 4]
    assert sorted(e.name for e in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]


def test_a_busy_manager_waits_or_skips_and_counts(tmp_path):
    gate = Gate()
    with using(gate):
        manager = CheckpointManager(tmp_path, keep=None, asynchronous=True, when_busy="skip")
        assert manager.save(1, {"w": np.ones(3)}) is not None
        assert manager.save(2, {"w": np.ones(3)}) is None
        assert manager.save(3, {"w": np.ones(3)}) is None
        gate.opened.set()
        manager.wait()
        assert manager.save(4, {"w": np.ones(3)}) is not None
        manager.wait()
    assert manager.skipped == 2
    assert manager.steps() == [1, 4]


def test_a_failed_background_save_surfaces_at_the_managers_next_save(tmp_path):
    gate = Gate(fail=True)
    gate.opened.set()
    manager = CheckpointManager(tmp_path, asynchronous=True)
    with using(gate):
        manager.save(1, {"w": np.ones(3)})
        with pytest.raises(OSError, match="the disk is gone"):
            manager.save(2, {"w": np.ones(3)})
    manager.save(2, {"w": np.ones(3)})
    manager.wait()
    assert manager.steps() == [2]


@pytest.mark.parametrize(
    ("arguments", "values", "left"),
    [
        ({"keep": 2, "best": "loss"}, {10: 0.1, 20: 0.5, 30: 0.4, 40: 0.3, 50: 0.2}, [10, 50]),
        ({"keep": 1, "best": "loss"}, {10: 0.1, 20: 0.5, 50: 0.2}, [10, 50]),
        ({"keep": 1, "best": "loss"}, {10: 0.3, 20: 0.1}, [20]),
        ({"keep": 2, "best": "loss"}, {10: 0.3, 20: 0.2, 30: 0.1}, [20, 30]),
        ({"keep": 2, "best": "loss", "best_is": "highest"}, {10: 0.1, 20: 0.5, 30: 0.4}, [20, 30]),
        ({"keep": 3, "best": "loss", "keep_best": 2}, {10: 1, 20: 9, 30: 2, 40: 8, 50: 7}, [10, 30, 50]),
        ({"keep": 2, "best": "loss"}, {10: float("nan"), 20: 0.5, 30: float("nan"), 40: 0.9}, [20, 40]),
        ({"keep": 1, "keep_every": 20}, {10: 0, 20: 0, 30: 0, 40: 0, 50: 0}, [20, 40, 50]),
        ({"keep": 2, "keep_every": 20}, {10: 0, 20: 0, 30: 0, 40: 0, 50: 0}, [20, 30, 40, 50]),
        ({"keep": 2, "keep_every": 10}, {7: 0, 8: 0, 9: 0, 10: 0}, [8, 9, 10]),
        ({"keep": 1, "keep_every": 10, "best": "loss"}, {10: 0, 11: 1, 12: 2}, [10, 12]),
        ({"keep": None, "best": "loss"}, {10: 0, 20: 0}, [10, 20]),
    ],
)
def test_what_is_kept(tmp_path, arguments, values, left):
    manager = CheckpointManager(tmp_path, **arguments)
    for step, value in values.items():
        manager.save(step, {"w": np.full(2, step)}, metrics={"loss": value}, metadata={"at": step})
    assert manager.steps() == left
    assert open_checkpoint(manager.latest()).metadata["at"] == max(values)
    if "best" in arguments:
        assert manager.best() is not None
    else:
        assert manager.best() is None


def test_the_best_is_known_after_a_restart_and_equals_go_to_the_newest(tmp_path):
    manager = CheckpointManager(tmp_path, keep=1, best="acc", best_is="highest")
    manager.save(1, {"w": np.ones(1)}, metrics={"acc": np.float32(0.5), "loss": 3})
    again = CheckpointManager(tmp_path, keep=1, best="acc", best_is="highest")
    again.save(2, {"w": np.ones(1)}, metrics={"acc": 0.25})
    again.save(3, {"w": np.ones(1)})
    assert again.steps() == [1, 3]
    assert again.best() == again.path(1)
    again.save(4, {"w": np.ones(1)}, metrics={"acc": 0.5})
    assert again.steps() == [4]


def test_when_it_is_time(tmp_path, monkeypatch):
    from meshtape.storage.saving import manager as module

    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    assert CheckpointManager(tmp_path).should_save(7)
    every = CheckpointManager(tmp_path, every_steps=10)
    assert [s for s in range(35) if every.should_save(s)] == [10, 20, 30]
    timed = CheckpointManager(tmp_path, every_minutes=5, every_steps=100)
    assert not timed.should_save(1)
    now[0] += 301
    assert timed.should_save(2)
    timed.save(2, {"w": np.ones(1)})
    assert not timed.should_save(3)
    assert timed.should_save(100)


def test_wrong_policies_are_refused(tmp_path):
    for wrong in (
        {"every_steps": 0},
        {"every_minutes": 0},
        {"keep_every": 0},
        {"keep_best": 0},
        {"best_is": "max"},
        {"when_busy": "block"},
    ):
        (name,) = wrong
        with pytest.raises(errors.CheckpointError, match=name):
            CheckpointManager(tmp_path, **wrong)


def test_a_save_in_the_background_leaves_the_training_a_processor(tmp_path, monkeypatch):
    """Its threads are one fewer than the processors, and behind the others in the queue; the caller's stay as they
    are."""
    from meshtape.storage.base import threads
    from meshtape.storage.saving import write_shards

    monkeypatch.setattr(write_shards.os, "cpu_count", lambda: 2)
    real, seen = write_shards.in_threads, []

    def look(work, items, threads=None, **how):
        if threads is None:
            seen.append((write_shards.writers(), _priority()))
        return real(work, items, threads, **how)

    monkeypatch.setattr(write_shards, "in_threads", look)
    tree = {f"w{i}": np.ones(100) for i in range(4)}
    mine = _priority()
    save(tmp_path / "a", tree)
    assert seen
    assert all(s == (threads.THREADS, mine) for s in seen)
    seen.clear()
    save_async(tmp_path / "b", tree).wait()
    assert seen
    assert all(s == (1, min(mine + threads.NICER, 19) if sys.platform == "linux" else mine) for s in seen)
    assert _priority() == mine


def _priority():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id() if sys.platform == "linux" else 0)


def test_a_save_whose_wait_ctrl_c_has_ended_is_waited_for_again(tmp_path):
    waits, goes, caught = threading.Event(), threading.Event(), threading.Event()

    def interrupt(*_):
        if not caught.is_set():
            caught.set()
            raise KeyboardInterrupt

    def work():
        waits.wait()
        while not caught.wait(0.01):  # a signal just before a wait for a lock does not end that
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        goes.wait()
        return "saved"

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        handle = background.start(str(tmp_path / "c"), work)
        manager = mt.CheckpointManager(tmp_path / "run", asynchronous=True)
        manager._running = handle
        with pytest.raises(KeyboardInterrupt):
            waits.set() or manager.wait()
        assert not handle.done()
    finally:
        signal.signal(signal.SIGINT, before)
        goes.set()
    manager.wait()
    assert handle.done()
    assert handle.wait() == "saved"


def test_a_save_does_not_wait_for_itself(tmp_path):
    found = []

    def then():
        with pytest.raises(mt.errors.CheckpointError, match="waits for itself"):
            found[0].wait()
        found.append("told")

    starts = threading.Event()
    handle = background.start(str(tmp_path / "c"), lambda: (starts.wait(), then()))
    found.append(handle)
    starts.set()
    handle.wait()
    assert found[1:] == ["told"]


def test_an_error_that_was_raised_is_not_raised_by_the_next_save(tmp_path):
    manager = mt.CheckpointManager(tmp_path / "run", asynchronous=True)

    def work():
        raise errors.StoreError("no place")

    manager._running = handle = background.start(str(tmp_path / "run" / "step-00000002"), work)
    with pytest.raises(errors.StoreError, match="no place"):
        handle.wait()
    manager.save(3, {"w": np.ones(3)})
    manager.wait()
    assert manager.steps() == [3]
