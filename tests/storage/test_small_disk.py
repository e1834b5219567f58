"""Disks that are full, end, fail or may only be read: a typed error that names the target, nothing lost, nothing left
behind.

The disk is a real one: a file system in memory of a few hundred kilobytes, mounted by a child of the test in a name
space of its own, so that it ends with the child. Where nobody may mount, those tests say so and are skipped; failures
of single operations are injected everywhere.
"""

import contextlib
import ctypes
import errno
import os
import re
import resource
import signal
import traceback

import numpy as np
import pytest

import meshtape as mt
from meshtape import errors, storage
from meshtape.storage import CheckpointManager, load, save
from meshtape.storage.stores.filesystem import Files, using

PAGE = 4096
_NEWNS, _NEWUSER = 0x20000, 0x10000000
_RDONLY, _REMOUNT, _REC, _PRIVATE = 1, 32, 16384, 1 << 18


class CannotMount(Exception):
    pass


def _mount(source, where, kind, flags, data):
    libc = ctypes.CDLL(None, use_errno=True)
    texts = [t if t is None else t.encode() for t in (source, os.fspath(where), kind)]
    if libc.mount(*texts, ctypes.c_ulong(flags), data.encode()):
        raise CannotMount(os.strerror(ctypes.get_errno()))


def _name_space():
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_NEWNS):
        # Not root: in a name space of users of our own we are.
        if libc.unshare(_NEWNS | _NEWUSER):
            raise CannotMount(os.strerror(ctypes.get_errno()))
        try:
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
                with open(f"/proc/self/{name}", "w") as f:
                    f.write(text)
        except OSError as e:
            raise CannotMount(str(e)) from None
    _mount(None, "/", None, _REC | _PRIVATE, "")


class Disk:
    """A mounted file system of a child process."""

    def __init__(self, where):
        self.where = where

    def read_only(self):
        _mount("tmpfs", self.where, "tmpfs", _REMOUNT | _RDONLY, "")

    def leave(self, pages):
        """Fill the disk with a file until so many pages are free."""
        s = os.statvfs(self.where)
        with open(self.where / "filler", "wb") as f:
            f.write(b"x" * (PAGE * (s.f_bavail - pages)))
        assert os.statvfs(self.where).f_bavail == pages

    def free(self):
        (self.where / "filler").unlink()


def on_disk(where, work, options):
    """``work(disk)`` in a child that has mounted one; a failure there is one here."""
    if not hasattr(os, "fork") or os.uname().sysname != "Linux":
        pytest.skip("needs Linux")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(240)
            _name_space()
            _mount("tmpfs", where, "tmpfs", 0, options)
            work(Disk(where))
            status = 0
        except CannotMount as e:
            status = 2
            os.write(writer, str(e).encode())
        except BaseException:
            os.write(writer, traceback.format_exc()[-60_000:].encode())
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader, "rb") as f:
        told = f.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 2:
        pytest.skip(f"this process may not mount a file system: {told}")
    assert status == 0, told or f"the child ended with {status}"


@pytest.fixture
def disk(tmp_path):
    home = tmp_path / "disk"
    home.mkdir()
    return lambda work, options="size=400k": on_disk(home, work, options)


class Hopeful(Files):
    """Says that there is room: another process took it since."""

    def free_bytes(self, path):
        return 1 << 40


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory):
    # Import zarr and fill caches once, here: the children inherit them.
    home = tmp_path_factory.mktemp("warm")
    save(home / "c", value(0))
    storage.merge(home / "c", home / "m")


# ----- the writers: what each makes at ``home / "c"`` -----------------------------------------------------------------


def value(k):
    return {"a": np.full(3000, k, "f4"), "b": [np.full((2, 3), k), {"k": k}]}


def _async(home, source, k):
    storage.save_async(home / "c", value(k), overwrite=True).wait()


def _transfer(function, **options):
    return lambda home, source, k: function(source / str(k), home / "c", overwrite=True, **options)


def _program(home, source, k):
    held = mt.full(3000, float(k))
    mt.save_program(home / "c", lambda x: x + held, mt.zeros(3000), overwrite=True)


def _file(home, source, k):
    storage.save_safetensors(home / "c", {"a": value(k)["a"]}, overwrite=True)


def _managed(home, source, k):
    CheckpointManager(home / "run", keep=1).save(k, value(k), overwrite=True)


def _plain(home):
    return {int(v) for n in ("a", "b.0") if n in (got := load(home / "c")) for v in np.unique(np.asarray(got[n]))}


def _tree(home):
    got = load(home / "c")
    return {*map(int, np.unique(np.asarray(got["a"]))), *map(int, np.unique(np.asarray(got["b"][0]))), got["b"][1]["k"]}


def _result(home):
    return {*map(int, mt.load_program(home / "c")(mt.zeros(3000)).tolist())}


def _newest(home):
    manager = CheckpointManager(home / "run")
    assert len(manager.steps()) == 1 or manager.steps() == [1, 2]
    return {*map(int, np.unique(np.asarray(manager.restore()["a"])))}


WRITERS = {
    "save": (lambda home, source, k: save(home / "c", value(k), overwrite=True), _tree),
    "save_async": (_async, _tree),
    "merge": (_transfer(storage.merge, max_shard_bytes=8000), _plain),
    "reshard": (_transfer(storage.reshard, mesh={"x": 2}, shardings={"*": {"x": 0}}), _tree),
    "convert": (_transfer(storage.convert, format="zarr", dtype="float64"), _tree),
    "convert into packs": (_transfer(storage.convert, format="zarr", dtype="float64", pack=True), _tree),
    "a program": (_program, _result),
    "a file": (_file, _plain),
    "the manager": (_managed, _newest),
}
STREAMING = ("merge", "reshard", "convert", "convert into packs")  # what they have written stays for the next run


def left(home):
    return {e.name for e in home.iterdir()} - {"c", "run", "filler"}


def attempt(write, home, source, k, wanted):
    """The error of a write, checked: of our types, naming the target. None where it went through."""
    try:
        write(home, source, k)
    except wanted as e:
        told = e
    else:
        return None
    assert isinstance(told, OSError)
    assert str(home) in str(told)
    assert told.__cause__ is not None or "has" in str(told)
    return told


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    home = tmp_path_factory.mktemp("source")
    for k in (1, 2, 3):
        save(home / str(k), value(k))
    return home


# ----- full disks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_a_disk_that_fills_up_on_the_way(disk, source, name):
    """With any number of free pages, so that each write in turn is the one that finds no room."""
    write, read = WRITERS[name]

    def work(d):
        failed = set()
        for pages in range(40):
            write(d.where, source, 1)
            d.leave(pages)
            with using(Hopeful()):
                failed.add(attempt(write, d.where, source, 2, errors.StorageFull) is not None)
            assert read(d.where) in ({1}, {2})
            rest = left(d.where)
            assert rest == set() or (name in STREAMING and rest == {"c.part"})
            d.free()
            write(d.where, source, 2)
            assert read(d.where) == {2}
            assert left(d.where) == set()
            if name == "the manager":
                storage.stores.atomic_directory.discard(os.fspath(d.where / "run" / "step-00000002"))
            if False not in failed or True not in failed:
                continue
            return
        assert failed == {True, False}

    disk(work)


@pytest.mark.parametrize("name", ["save", "merge", "a program", "the manager"])
def test_a_disk_without_room_for_more_files(disk, source, name):
    """Every directory and file that is made takes an inode; a quota says the same."""
    write, read = WRITERS[name]

    def work(d):
        write(d.where, source, 1)
        before = os.statvfs(d.where).f_ffree
        with using(Hopeful()):
            assert attempt(write, d.where, source, 2, errors.StorageFull) is not None
        assert read(d.where) == {1}
        assert left(d.where) <= ({"c.part"} if name in STREAMING else set())
        assert os.statvfs(d.where).f_ffree >= before - (8 if name in STREAMING else 0)

    disk(work, {"save": "nr_inodes=14", "merge": "nr_inodes=9", "a program": "nr_inodes=6"}.get(name, "nr_inodes=16"))


@pytest.mark.parametrize("name", WRITERS)
def test_too_little_room_is_told_before_anything_is_written(disk, source, name):
    write, read = WRITERS[name]

    def work(d):
        write(d.where, source, 1)
        d.leave(1)
        e = attempt(write, d.where, source, 2, errors.StorageFull)
        assert e is not None
        assert re.search(r"needs \d+ bytes, .* has \d+ free", str(e))
        assert left(d.where) == set()
        assert os.statvfs(d.where).f_bavail == 1
        assert read(d.where) == {1}

    disk(work)


def test_a_transfer_that_a_full_disk_stopped_goes_on(disk, tmp_path):
    save(tmp_path / "big", {f"k{i}": np.full(16_000, i, "f4") for i in range(8)})

    def work(d):
        d.leave(60)
        with using(Hopeful()), pytest.raises(errors.StorageFull):
            storage.merge(tmp_path / "big", d.where / "c", max_shard_bytes=64_000, memory_limit=1, threads=1)
        d.free()
        seen = []
        storage.merge(
            tmp_path / "big", d.where / "c", max_shard_bytes=64_000, memory_limit=1, threads=1,
            progress=lambda done, total: seen.append(done),
        )  # fmt: skip
        assert 64_000 <= seen[0] < 8 * 64_000
        assert storage.diff(tmp_path / "big", d.where / "c").same

    disk(work, "size=800k")


# ----- operations that fail -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [n for n in WRITERS if n not in ("save", "save_async")])
def test_any_operation_that_fails(kit, quick, source, name, every):
    """EIO at the N-th operation (``test_kill`` has the same for `save`, for every N)."""
    write, read = WRITERS[name]

    def fail():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for n in range(1, 1000, every):
        home = quick / str(n)
        home.mkdir(parents=True)
        write(home, source, 1)
        files = kit.Counting(n, fail)
        with using(files):
            e = attempt(write, home, source, 2, errors.StoreError)
        assert e is None or e.errno == errno.EIO
        assert read(home) == ({1} if e is not None and name != "the manager" else {2}) or files.done >= n
        write(home, source, 3)
        assert read(home) == {3}
        assert left(home) == set()
        if files.done < n:
            break
    assert n > 7


def test_a_limit_on_the_length_of_files(kit, tmp_path, source):
    """``ulimit -f``, which every system has."""

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, PAGE))
        for name, (write, read) in WRITERS.items():
            home = tmp_path / "home" / name
            e = attempt(write, home, source, 2, errors.StoreError)
            assert e is not None, name
            assert e.errno == errno.EFBIG
            assert read(home) == {1}, name

    for name, (write, _) in WRITERS.items():
        (tmp_path / "home" / name).mkdir(parents=True)
        write(tmp_path / "home" / name, source, 1)
    kit.die_at(0, work)


def test_a_disk_that_cannot_be_read(tmp_path, source, monkeypatch):
    """Each file that is read is named, and a transfer keeps what it has for when the disk is mended."""
    from meshtape.storage.stores import local

    def broken(fd, buffers, offset, *flags):
        if "/c." in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(fd, buffers, offset, *flags)

    original = os.preadv
    if not os.path.exists("/proc/self/fd"):
        pytest.skip("needs /proc")
    with monkeypatch.context() as m:
        m.setattr(local, "preadv", broken)
        m.setattr(os, "preadv", broken)  # of what the system has in memory
        for act in (
            lambda: load(source / "1"),
            lambda: mt.open_checkpoint(source / "1")["a"][2:5],
            lambda: storage.merge(source / "1", tmp_path / "m"),
        ):
            with pytest.raises(errors.StoreError, match=r"/c\.0\S* cannot be read: Input/output error") as told:
                act()
            assert told.value.errno == errno.EIO
    storage.merge(source / "1", tmp_path / "m")
    assert storage.diff(source / "1", tmp_path / "m", drop=["b.1.k"]).same


# ----- disks that may only be read ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_a_disk_that_may_only_be_read(disk, source, name):
    write, read = WRITERS[name]

    def work(d):
        write(d.where, source, 1)
        before = sorted(p for p in d.where.rglob("*"))
        d.read_only()
        e = attempt(write, d.where, source, 2, errors.StoreError)
        assert e is not None
        assert e.errno == errno.EROFS
        assert read(d.where) == {1}
        assert sorted(p for p in d.where.rglob("*")) == before

    disk(work)


def test_everything_that_reads_works_on_a_disk_that_may_only_be_read(disk, source, tmp_path):
    def work(d):
        with CheckpointManager(d.where / "run") as manager:
            manager.save(1, value(1))
        gone = d.where / "run" / f"step-00000002.tmp-{storage.stores.owners.host()}-{2**22 + 1}-00000000"
        gone.mkdir()  # what a killed writer left; nobody can collect it now
        storage.merge(manager.path(1), d.where / "hf")
        d.read_only()
        again = CheckpointManager(d.where / "run")
        assert again.steps() == [1]
        assert again.restore()["b"][1]["k"] == 1
        assert storage.verify(again.latest()).arrays == 2
        assert storage.diff(again.latest(), d.where / "hf", drop=["b.1.k"]).same
        assert storage.estimate(d.where / "hf").nbytes > 0
        storage.merge(d.where / "hf", tmp_path / "out")
        assert gone.exists()

    disk(work)


def test_a_place_below_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    for act in (
        lambda: save(tmp_path / "file" / "c", value(1)),
        lambda: mt.save_program(tmp_path / "file" / "c", lambda x: x, mt.ones(2)),
        lambda: storage.save_safetensors(tmp_path / "file" / "c" / "x", {"a": np.ones(2)}),
        lambda: CheckpointManager(tmp_path / "file" / "run"),
    ):
        with pytest.raises(errors.StoreError, match=r"file.*cannot be written") as told:
            act()
        assert told.value.errno in (errno.ENOTDIR, errno.EEXIST)
    assert (tmp_path / "file").read_text() == "mine"


def test_an_error_keeps_its_number_on_the_way_from_a_worker():
    import pickle

    from meshtape.storage.stores.contract import failed

    e = pickle.loads(pickle.dumps(failed(OSError(errno.EIO, "Input/output error"), "x cannot be read")))
    assert (type(e), e.errno, str(e)) == (errors.StoreError, errno.EIO, "x cannot be read: Input/output error")
    with contextlib.suppress(OSError):
        raise e
