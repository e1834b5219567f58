"""Files that steps share: plain checkpoints, any of which can be deleted, and never a byte that was not compared."""

import errno
import itertools
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from meshtape import errors
from meshtape.storage import CheckpointManager, load, open_checkpoint, reshard, save, save_async, usage, verify
from meshtape.storage.format import chunk_grid
from meshtape.storage.stores.filesystem import Files, using


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of some hundred bytes, so that small arrays have many."""
    monkeypatch.setattr(chunk_grid, "TARGET", 1 << 10)
    monkeypatch.setattr(chunk_grid, "SHORTEST_ROW", 64)


W = np.random.default_rng(0).standard_normal((64, 48)).astype("f4")


def inodes(root):
    """The files of shards by name."""
    return {
        os.path.relpath(os.path.join(home, f), root): os.stat(os.path.join(home, f)).st_ino
        for home, _, files in os.walk(root)
        for f in files
        if f[0] == "c"
    }


def shared(a, b):
    one, two = inodes(a), inodes(b)
    return {n for n in one.keys() & two.keys() if one[n] == two[n]}


def changed(at):
    w = W.copy()
    w.reshape(-1)[at] += 1
    return w


@pytest.mark.parametrize("compression", [None, "zstd", "weights"])
def test_only_files_with_the_very_same_bytes_are_shared(kit, tmp_path, compression):
    save(tmp_path / "a", {"w": W, "s": np.float32(2), "z": np.ones((0, 3))}, compression=compression)
    cases = {
        "same": ({"w": W.copy(), "s": np.float32(2), "z": np.ones((0, 3))}, {"w/c.0.0", "s/c"}),
        "first element": ({"w": changed(0), "s": np.float32(2)}, {"s/c"}),
        "middle": ({"w": changed(W.size // 2)}, set()),
        "last element": ({"w": changed(-1), "s": np.float32(3)}, set()),
        "another type": ({"w": W.view("i4")}, set()),
        "another shape": ({"w": W.reshape(48, 64)}, set()),
        "another name": ({"v": W}, set()),
        "longer": ({"w": np.concatenate([W, W])}, set()),
    }
    for name, (tree, expected) in cases.items():
        report = save(tmp_path / name, tree, compression=compression, share=tmp_path / "a")
        assert shared(tmp_path / "a", tmp_path / name) == expected, name
        assert report.shared == sum((tmp_path / name / f).stat().st_size for f in expected)
        verify(tmp_path / name)
        assert all(kit.same(load(tmp_path / name)[k], np.asarray(v)) for k, v in tree.items()), name
        save(tmp_path / "alone", tree, compression=compression, overwrite=True)
        for f in inodes(tmp_path / name):
            assert (tmp_path / name / f).read_bytes() == (tmp_path / "alone" / f).read_bytes()
    other = "zstd:1" if compression != "zstd:1" else None
    save(tmp_path / "other", {"w": W}, compression=other, share=tmp_path / "a")
    assert not shared(tmp_path / "a", tmp_path / "other")


def test_ranks_and_background_saves_share(kit, tmp_path):
    (first, *_) = [s for s in kit.shardings(2, (2, 2)) if len(set(s.dims) - {None}) == 2]
    save(tmp_path / "a", {"w": kit.split(W, first)})
    w = changed(-1)
    report = save(tmp_path / "b", {"w": kit.split(w, first)}, share=tmp_path / "a")
    assert len(shared(tmp_path / "a", tmp_path / "b")) == 3
    assert report.shared == sum((tmp_path / "b" / f).stat().st_size for f in shared(tmp_path / "a", tmp_path / "b"))
    assert save_async(tmp_path / "c", {"w": kit.split(w, first)}, share=tmp_path / "b").wait().shared > report.shared
    assert save(tmp_path / "d", {"w": w}, share=tmp_path / "b").shared == 0  # another grid
    for name in "bcd":
        verify(tmp_path / name)
        assert kit.same(load(tmp_path / name)["w"], w)
    before = inodes(tmp_path / "b"), (tmp_path / "b" / "w" / "c.0.0").read_bytes()
    reshard(tmp_path / "c", tmp_path / "c2", mesh={"m": 2}, shardings={"w": {"m": 0}})
    save(tmp_path / "c", {"w": W}, overwrite=True, share=tmp_path / "c")  # replaced by what shares with it
    assert before == (inodes(tmp_path / "b"), (tmp_path / "b" / "w" / "c.0.0").read_bytes())
    verify(tmp_path / "b")


@pytest.mark.parametrize("order", list(itertools.permutations(range(1, 4))))
def test_any_step_is_deleted_and_the_others_verify(kit, tmp_path, order):
    manager = CheckpointManager(tmp_path, keep=None)
    trees = {s: {"frozen": W, "w": np.full(9, s)} for s in (1, 2, 3, 4)}
    for step, tree in trees.items():
        manager.save(step, tree)
    whole = usage(tmp_path)
    assert whole.nbytes < whole.steps[0].nbytes + 3 * (whole.steps[1].nbytes - W.nbytes)
    assert whole.nbytes == sum(s.freed for s in whole.steps) + (tmp_path / "step-00000001/frozen/c.0.0").stat().st_size
    for step in order:
        before = usage(tmp_path)
        manager.delete(step)
        after = usage(tmp_path)
        assert after.nbytes == before.nbytes - next(s.freed for s in before.steps if s.step == step)
        for left in manager.steps():
            verify(manager.path(left))
            assert kit.same(manager.restore(left)["frozen"], W)
    assert usage(tmp_path).steps[0].freed == usage(tmp_path).nbytes


def test_ten_steps_of_a_frozen_model_take_little_more_than_one(tmp_path, monkeypatch):
    monkeypatch.undo()
    frozen = {str(i): np.random.default_rng(i).standard_normal((95, 1000)).astype("f4") for i in range(10)}
    for share, most in ((True, 1.6), (False, 10)):
        manager = CheckpointManager(tmp_path / str(share), keep=None, share=share)
        for step in range(10):
            manager.save(step, {"frozen": frozen, "w": np.full((50, 1000), step, "f4")})
        found = usage(manager.directory)
        assert most / 1.2 < found.nbytes / found.steps[0].nbytes <= most


def test_it_is_for_disks(tmp_path):
    for target, earlier in (("memory://sharing/a", tmp_path / "a"), (tmp_path / "b", "memory://sharing/a")):
        with pytest.raises(errors.CheckpointError, match="only two places on a disk"):
            save(target, {"w": W}, share=earlier)
    manager = CheckpointManager("memory://sharing/run", keep=None)
    for step in (1, 2):
        assert manager.save(step, {"w": W}).shared == 0
    assert len({s.freed for s in usage("memory://sharing/run").steps}) <= 2
    with pytest.raises(errors.NotACheckpoint):
        usage(tmp_path)


# ----- where it cannot be ---------------------------------------------------------------------------------------------


class Refusing(Files):
    def __init__(self, code):
        self.code = code

    def link(self, source, target):
        raise OSError(self.code, os.strerror(self.code))


def test_where_links_are_refused_files_are_cloned_or_written(kit, tmp_path, monkeypatch):
    import fcntl

    save(tmp_path / "a", {"w": W})
    for number, code in enumerate((errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP)):
        with using(Refusing(code)):
            assert save(tmp_path / f"b{number}", {"w": W}, share=tmp_path / "a").shared in (0, W.nbytes + 4 * 12 + 196)
        assert kit.same(load(tmp_path / f"b{number}")["w"], W)
        verify(tmp_path / f"b{number}")
    with using(Refusing(errno.EIO)), pytest.raises(errors.StoreError):
        save(tmp_path / "c", {"w": W}, share=tmp_path / "a")
    assert not (tmp_path / "c").exists()
    # A file system that clones.
    monkeypatch.setattr(fcntl, "ioctl", lambda fd, _, source: os.pwrite(fd, os.pread(source, 1 << 20, 0), 0))
    with using(Refusing(errno.EPERM)):
        assert save(tmp_path / "d", {"w": W}, share=tmp_path / "a").shared > W.nbytes
    assert not shared(tmp_path / "a", tmp_path / "d")
    verify(tmp_path / "d")


def test_earlier_checkpoints_that_are_damaged_moved_or_replaced_harm_nothing(kit, tmp_path):
    file = tmp_path / "a" / "w" / "c.0.0"

    class Replacing(Files):
        """Another process replaces the earlier file between the comparison and the link."""

        def link(self, source, target):
            os.rename(source, f"{source}.old")
            with open(source, "wb") as f:
                f.write(b"another")
            super().link(source, target)

    def flip():
        data = file.read_bytes()
        file.write_bytes(data[:-300] + bytes([data[-300] ^ 1]) + data[-299:])

    def to_link():
        os.rename(file, tmp_path / "elsewhere")
        os.symlink(tmp_path / "elsewhere", file)

    def pipe():
        file.unlink()
        os.mkfifo(file)

    cases = {
        "flipped": flip,
        "gone": lambda: shutil.rmtree(tmp_path / "a"),
        "cut": lambda: file.write_bytes(file.read_bytes()[:-1]),
        "longer": lambda: file.write_bytes(file.read_bytes() + b"x"),
        "empty": lambda: file.write_bytes(b""),
        "a link": to_link,
        "a pipe": pipe,
        "a folder": lambda: (file.unlink(), file.mkdir()),
        "no manifest": (tmp_path / "a" / "meshtape.json").unlink,
        "damaged manifest": lambda: (tmp_path / "a" / "meshtape.json").write_bytes(b"{}"),
        "replaced": None,
    }
    for name, harm in cases.items():
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        save(tmp_path / "a", {"w": W})
        if harm is not None:
            harm()
        with using(Files() if harm is not None else Replacing()):
            assert save(tmp_path / "b", {"w": W}, share=tmp_path / "a", overwrite=True).shared == 0, name
        verify(tmp_path / "b")
        assert kit.same(load(tmp_path / "b")["w"], W), name


def test_a_flip_is_found_in_every_step_that_has_the_file(tmp_path):
    manager = CheckpointManager(tmp_path, keep=None)
    for step in (1, 2):
        manager.save(step, {"frozen": W, "w": np.full(300, step)})
    for file in sorted(p for p in tmp_path.rglob("*") if p.is_file() and p.name[0] == "c"):
        data = file.read_bytes()
        for at in (0, len(data) // 2, len(data) - 1):
            with open(file, "r+b") as f:  # in place, as no writer of ours does
                f.write(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            for step in (1, 2):
                if "frozen" in str(file) or f"{step:08d}" in str(file):
                    with pytest.raises(errors.CorruptCheckpoint):
                        verify(manager.path(step))
                else:
                    verify(manager.path(step))
        with open(file, "r+b") as f:
            f.write(data)
    # Another step's file in its place is found too: it is whole, and not the one that belongs there.
    shutil.copy(tmp_path / "step-00000001/w/c.0", tmp_path / "step-00000002/w/c.0")
    with pytest.raises(errors.CorruptCheckpoint, match="another save"):
        load(manager.path(2))
    verify(manager.path(1))


def test_plain_zarr_reads_each_step(tmp_path):
    manager = CheckpointManager(tmp_path, keep=None, compression="weights")
    for step in (1, 2):
        manager.save(step, {"frozen": W, "w": np.full(300, step)})
    assert len(shared(manager.path(1), manager.path(2))) == 1
    np.save(tmp_path / "w.npy", W)
    code = (
        f"import sys, zarr, numpy as np\nfor step in (1, 2):\n    g = zarr.open_group(f'{tmp_path}/step-{{step:08d}}', "
        f"mode='r')\n    assert np.array_equal(g['frozen'][...], np.load('{tmp_path}/w.npy')) and (g['w'][...] == "
        "step).all()\nassert 'meshtape' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
    assert open_checkpoint(manager.path(2)).compression is not None
