"""The manager: rotation by step, and never without a complete checkpoint."""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from forked import Forked

from meshtape import errors
from meshtape.storage import CheckpointManager, load, save, usage
from meshtape.storage.format import manifest
from meshtape.storage.stores.filesystem import Files, using


def filled(directory, steps, **kw):
    manager = CheckpointManager(directory, **kw)
    for step in steps:
        manager.save(step, {"w": np.full(2, step)}, metadata={"at": step})
    return manager


def test_rotation_keeps_the_last(tmp_path):
    manager = filled(tmp_path / "run", [10, 20, 9, 100], keep=2)
    assert manager.steps() == [20, 100]
    assert manager.latest() == str(tmp_path / "run" / "step-00000100")
    assert np.asarray(manager.restore()["w"]).tolist() == [100, 100]
    assert np.asarray(manager.restore(20, keys=["w"])["w"]).tolist() == [20, 20]
    assert sorted(e.name for e in (tmp_path / "run").iterdir()) == ["step-00000020", "step-00000100"]
    assert filled(tmp_path / "all", range(5), keep=None).steps() == [0, 1, 2, 3, 4]


def test_order_is_by_step_in_the_manifest_not_by_time_or_name(tmp_path):
    manager = filled(tmp_path, [3, 1, 2], keep=3)
    for i, step in enumerate((3, 2, 1)):
        os.utime(manager.path(step), (i, i))
    assert manager.steps() == [1, 2, 3]
    save(tmp_path / "step-00000000", {"w": np.ones(1)}, step=50)
    assert manager.latest().endswith("step-00000000")


def test_eight_digits_are_not_the_end(tmp_path):
    manager = filled(tmp_path, [99_999_999, 100_000_000], keep=2)
    assert manager.steps() == [99_999_999, 100_000_000]


def test_incomplete_checkpoints_are_skipped_with_a_warning_and_never_deleted(tmp_path):
    manager = filled(tmp_path, [10, 20], keep=1)
    manager.save(30, {"w": np.ones(2)})
    (tmp_path / "step-00000030" / manifest.FILE).unlink()
    (tmp_path / "step-00000040").mkdir()
    (tmp_path / "step-abc").mkdir()
    (tmp_path / "other").mkdir()
    again = CheckpointManager(tmp_path, keep=1)
    with pytest.warns(UserWarning, match=r"step-000000[34]0.*incomplete"):
        assert again.latest() is None
    again.save(50, {"w": np.ones(2)})
    assert again.steps() == [50]
    left = sorted(e.name for e in tmp_path.iterdir())
    assert left == ["other", "step-00000030", "step-00000040", "step-00000050", "step-abc"]


def test_the_only_complete_one_is_never_deleted(tmp_path):
    manager = filled(tmp_path, [10], keep=1)
    broken = tmp_path / "step-00000020"
    save(broken, {"w": np.ones(1)}, step=20)
    (broken / manifest.FILE).write_bytes(b"{}")
    manager._rotate(str(broken))
    with pytest.warns(UserWarning, match="step-00000020"):
        assert manager.latest().endswith("step-00000010")


def test_a_lower_step_just_saved_is_kept(tmp_path):
    """After a restart from an earlier step: what was saved last is not what rotation takes."""
    manager = filled(tmp_path, [10, 20], keep=2)
    manager.save(5, {"w": np.ones(1)})
    assert 5 in manager.steps()
    assert len(manager.steps()) == 2


def test_saving_a_step_again(tmp_path):
    manager = filled(tmp_path, [10])
    with pytest.raises(errors.CheckpointExists):
        manager.save(10, {"w": np.zeros(2)})
    manager.save(10, {"w": np.zeros(2)}, overwrite=True)
    assert np.asarray(manager.restore()["w"]).tolist() == [0, 0]


def test_remains_of_dead_processes_are_collected_by_the_next_save(tmp_path):
    manager = filled(tmp_path, [10, 20])
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    from meshtape.storage.stores.owners import host as _host

    tail = f"{_host()}-{pid}-01234567"
    (tmp_path / f"step-00000030.tmp-{tail}" / "w").mkdir(parents=True)
    (tmp_path / f"step-00000005.trash-{tail}").mkdir()
    Path(manager.path(20)).rename(f"{manager.path(20)}.old-{tail}")
    # A reader finds the one that was set aside, before anybody puts it back.
    assert manager.steps() == [10, 20]
    assert manager.restore()["w"].shape == (2,)
    alive = tmp_path / f"step-00000040.tmp-{_host()}-1-01234567"
    elsewhere = tmp_path / "step-00000050.tmp-00000000-1-01234567"
    alive.mkdir()
    elsewhere.mkdir()
    before = sorted(e.name for e in tmp_path.iterdir())
    again = CheckpointManager(tmp_path)
    assert again.steps() == [10, 20]
    assert sorted(e.name for e in tmp_path.iterdir()) == before  # a manager that starts changes nothing
    again.save(30, {"w": np.ones(2)})
    left = [f"step-{n:08d}" for n in (20, 30)] + [alive.name, elsewhere.name]
    assert sorted(e.name for e in tmp_path.iterdir()) == left
    os.utime(elsewhere, (0, 0))
    again.save(40, {"w": np.ones(2)})
    assert not elsewhere.exists()


def test_mistakes_are_named(tmp_path):
    with pytest.raises(errors.NotACheckpoint, match="no complete checkpoint"):
        CheckpointManager(tmp_path).restore()
    with pytest.raises(errors.CheckpointError, match="at least 1"):
        CheckpointManager(tmp_path, keep=0)
    with pytest.raises(errors.CheckpointError, match="negative"):
        CheckpointManager(tmp_path).save(-1, {})


WRITER = """
import sys
import numpy as np
from meshtape.storage import CheckpointManager

manager = CheckpointManager(sys.argv[1], keep=2)
for step in range(int(sys.argv[2]), 16, 2):
    manager.save(step, {"w": np.full((50, 50), step), "v": [np.full(9, step)]})
"""

READER = """
import sys, warnings
import numpy as np
from pathlib import Path
from meshtape.storage import CheckpointManager

warnings.simplefilter("error")
manager, last, seen = CheckpointManager(sys.argv[1], keep=2), -1, 0
while last < 14:
    tree = manager.restore()
    (step,) = {int(x) for a in (tree["w"], tree["v"][0]) for x in np.unique(np.asarray(a))}
    assert step >= last, (step, last)
    last, seen = step, seen + 1
print(seen)
"""


def test_several_processes_save_rotate_and_read_one_directory(tmp_path):
    """Whoever reads gets a whole checkpoint, and never an older one than before; whoever saves never fails."""
    CheckpointManager(tmp_path, keep=2).save(0, {"w": np.zeros((50, 50), int), "v": [np.zeros(9, int)]})
    roles = [(READER,), (WRITER, "1"), (WRITER, "2")]
    running = [Forked("-c", code, str(tmp_path), *more) for code, *more in roles]
    try:
        for process, (code, *_) in zip(running, roles, strict=True):
            out, _ = process.communicate(timeout=200)
            assert process.returncode == 0
            assert code == WRITER or int(out) > 0
    finally:
        for process in running:
            process.kill()
            process.wait()
    manager = CheckpointManager(tmp_path, keep=2)
    assert manager.steps()[-1] == 15
    assert sorted(e.name for e in tmp_path.iterdir()) == [f"step-{n:08d}" for n in manager.steps()]


@pytest.mark.parametrize("saves", [1, 7])
@pytest.mark.parametrize(
    ("use", "wanted"),
    [
        (lambda m: m.steps(), lambda n: [n]),
        (lambda m: m.branch(), lambda n: [n]),
        (lambda m: int(m.latest()[-8:]), lambda n: n),
        (lambda m: int(m.best()[-8:]), lambda n: n),
        (lambda m: np.asarray(m.restore()["w"]).tolist(), lambda n: [n, n]),
    ],
    ids=["steps", "branch", "latest", "best", "restore"],
)
@pytest.mark.filterwarnings("error")
def test_rotations_between_a_list_and_its_manifests(tmp_path, monkeypatch, use, wanted, saves):
    """All that was listed is gone when it is read: another process has saved meanwhile, once or again and again."""
    other = CheckpointManager(tmp_path, keep=1, best="loss", best_is="highest")
    other.save(10, {"w": np.full(2, 10)}, metrics={"loss": 10})
    reads, saved, read = 0, 10, manifest.read

    def rotated(root):
        nonlocal reads, saved
        if reads < saves:
            reads += 1
            monkeypatch.setattr(manifest, "read", read)
            saved += 10
            other.save(saved, {"w": np.full(2, saved)}, metrics={"loss": saved})
            monkeypatch.setattr(manifest, "read", rotated)
        return read(root)

    monkeypatch.setattr(manifest, "read", rotated)
    manager = CheckpointManager(tmp_path, keep=1, best="loss", best_is="highest")
    assert use(manager) == wanted(10 + 10 * saves)


@pytest.mark.parametrize(("code", "error"), [(errno.ENOSPC, errors.StorageFull), (errno.EIO, errors.StoreError)])
@pytest.mark.parametrize("step", [10, None])
def test_a_rollback_that_cannot_be_written(tmp_path, code, error, step):
    class Failing(Files):
        def write(self, fd, buffers, offset):
            raise OSError(code, os.strerror(code))

    manager = filled(tmp_path, [10, 20], keep=None)
    with using(Failing()), pytest.raises(error, match=r"meshtape-branch\.json"):
        manager.rollback(step)
    assert manager.latest().endswith("20")


def test_a_renamed_folder_is_the_step_that_its_manifest_says(tmp_path):
    m = CheckpointManager(tmp_path, keep=None)
    for step in (1, 2, 3):
        m.save(step, {"g": step})
    one, three = m.path(1), m.path(3)
    Path(one).rename(tmp_path / "aside")
    Path(three).rename(one)
    (tmp_path / "aside").rename(three)
    assert [m.restore(s)["g"] for s in (1, 2, 3)] == [1, 2, 3]
    with pytest.raises(errors.CheckpointExists, match="holds step 3"):
        m.save(1, {"g": 9}, overwrite=True)
    assert m.rollback(1) == three
    m.rollback(3)
    m.delete(1)
    assert (m.steps(), m.restore()) == ([2, 3], {"g": 3})
    shutil.copytree(m.path(2), m.path(7))
    with pytest.raises(errors.NotACheckpoint, match="no complete checkpoint of step 7"):
        m.restore(7)


def test_links_that_lead_to_themselves_are_no_steps(tmp_path):
    manager = filled(tmp_path, [1, 2])
    for name in ("lp", "step-00000009"):
        (tmp_path / name).symlink_to(name)
    assert manager.steps() == [1, 2]
    with pytest.warns(UserWarning, match="skipped .*step-00000009: the link leads nowhere"):
        assert manager.latest() == manager.path(2)
    with pytest.warns(UserWarning, match="step-00000009"):
        assert np.asarray(manager.restore()["w"]).tolist() == [2, 2]
    manager.save(3, {"w": np.ones(2)})
    manager.rollback(2)
    with pytest.raises(errors.NotACheckpoint, match="it holds checkpoints"):
        load(tmp_path)


def test_a_directory_that_cannot_be_listed_is_an_error_of_ours(tmp_path, monkeypatch):
    manager = filled(tmp_path, [1])

    def refused(path):
        raise OSError(errno.EMFILE, "Too many open files", path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(errors.StoreError, match="cannot be listed: Too many open files"):
        manager.steps()


class Unmoved(Files):
    """A disk on which no folder of a checkpoint can be renamed."""

    def __init__(self, number):
        self.number = number

    def rename(self, source, target):
        if ".tmp-" not in source and ".part" not in source:
            raise OSError(self.number, os.strerror(self.number), source)
        super().rename(source, target)

    def exchange(self, a, b):
        raise OSError(self.number, os.strerror(self.number), a)


KINDS = [errno.EXDEV, errno.EBUSY, errno.EROFS, errno.EACCES, errno.EPERM]
CURES = {errno.EXDEV: "overlayfs", errno.EBUSY: "mount point"}


@pytest.mark.parametrize("number", KINDS)
def test_rotation_says_that_a_step_cannot_be_removed(tmp_path, number):
    filled(tmp_path / "run", [1, 2])
    manager = CheckpointManager(tmp_path / "run", keep=1)
    with using(Unmoved(number)), pytest.warns(UserWarning, match="rotation cannot remove") as told:
        manager.save(3, {"w": np.zeros(2)})
    said = [str(w.message) for w in told]
    assert len(said) == 2
    for step, text in zip((1, 2), said, strict=True):
        assert str(tmp_path / "run" / f"step-0000000{step}") in text
        assert os.strerror(number) in text
        assert CURES.get(number, "") in text
    assert manager.steps() == [1, 2, 3]


@pytest.mark.parametrize("number", KINDS)
@pytest.mark.parametrize("anchor_every", [None, 3])
def test_a_deletion_that_the_system_refuses_is_typed_and_leaves_all(tmp_path, number, anchor_every):
    rows = np.arange(99_999, dtype="f4")
    manager = CheckpointManager(tmp_path / "run", keep=None, anchor_every=anchor_every)
    for step in (1, 2, 3):
        manager.save(step, {"w": rows * np.float32(1 + step * 1e-6)})
    told = rf"step-00000001 cannot be deleted.*{os.strerror(number)}.*{CURES.get(number, '')}"
    if anchor_every:  # the delta is written anew first
        told = rf"step-00000002 cannot be written.*{os.strerror(number)}.*{CURES.get(number, '')}"
    with using(Unmoved(number)), pytest.raises(errors.StoreError, match=told):
        manager.delete(1)
    assert sorted(os.listdir(tmp_path / "run")) == [f"step-0000000{n}" for n in (1, 2, 3)]
    for step in (1, 2, 3):
        np.testing.assert_array_equal(manager.restore(step)["w"], rows * np.float32(1 + step * 1e-6))


def test_a_run_that_may_not_be_listed_is_typed(tmp_path, monkeypatch):
    manager, scandir, opened = filled(tmp_path / "run", [1, 2]), os.scandir, os.open

    def refused(open_it):
        def one(path, *more, **named):
            if str(path) == str(tmp_path / "run"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return open_it(path, *more, **named)

        return one

    for name, made in (("scandir", scandir), ("open", opened), ("listdir", os.listdir)):
        monkeypatch.setattr(os, name, refused(made))
    for use in (manager.steps, lambda: manager.delete(1), lambda: usage(tmp_path / "run")):
        with pytest.raises(errors.StoreError, match=r"run cannot be (listed|locked).*Permission denied"):
            use()
