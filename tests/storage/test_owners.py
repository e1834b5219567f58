"""Who may clean up: a temporary name is its writer's for as long as the writer lives, in whatever container; no longer,
and nobody else's."""

import ctypes
import os
import shutil
import signal
import subprocess
import traceback
from pathlib import Path

import numpy as np
import pytest

from meshtape.storage import CheckpointManager, SaveReport, gc, leftovers, load, merge, save, save_safetensors
from meshtape.storage.commit import leftovers as collecting
from meshtape.storage.stores import atomic_directory, owners, store
from meshtape.storage.stores.filesystem import Files, try_lock, using


class Slow(Files):
    """Says so at the N-th operation, and waits to be told to go on."""

    def __init__(self, at, told, go_on, exchange):
        super().__init__()
        self._left, self._told, self._go_on, self._exchange = at, told, go_on, exchange

    def exchange(self, a, b):
        return self._exchange and super().exchange(a, b)


def _stopping(name):
    def operation(self, *args):
        out = getattr(Files, name)(self, *args)
        self._left -= 1
        if not self._left:
            os.write(self._told, b"x")
            os.read(self._go_on, 1)
        return out

    return operation


for _name in ("mkdir", "create", "write", "fsync", "rename", "fsync_dir", "unlink", "rmdir"):
    setattr(Slow, _name, _stopping(_name))


def _write(what, where):
    tree = {"w": np.full(1000, 2.0)}
    if what == "save":
        save(where, tree, overwrite=True)
    elif what == "file":
        save_safetensors(where, tree, overwrite=True)
    else:
        CheckpointManager(where, keep=1).save(2, tree)


def _fork_elsewhere():
    """Go on in another PID namespace of the same host name, as a container has; the process that begins waits for the
    end."""
    libc, uid, gid = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(0x10000000 | 0x20000000):  # CLONE_NEWUSER, CLONE_NEWPID: of the children
        raise OSError(ctypes.get_errno(), "unshare")
    for file, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        Path("/proc/self", file).write_text(text)
    inner = os.fork()
    if inner:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(inner, signal.SIGKILL))
        os._exit(os.waitpid(inner, 0)[1] != 0)
    libc.prctl(1, signal.SIGKILL)  # at the end of its parent


@pytest.fixture(scope="module")
def elsewhere():
    """Skips where no such namespace can be made."""
    pid = os.fork()
    if pid == 0:
        try:
            _fork_elsewhere()
            os._exit(os.getpid() != 1)
        finally:
            os._exit(2)
    if os.waitpid(pid, 0)[1]:
        pytest.skip("no PID namespace can be made here")
    return True


class Writer:
    """A process that fills a directory, and waits at the N-th operation."""

    def __init__(self, elsewhere, what, where, at, exchange=True):
        told, self._go_on, self._elsewhere = os.pipe(), os.pipe(), elsewhere
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if elsewhere:
                    _fork_elsewhere()
                with using(Slow(at, told[1], self._go_on[0], exchange)):
                    _write(what, where)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(told[1])
        assert os.read(told[0], 1) == b"x"
        os.close(told[0])

    def go_on(self):
        os.write(self._go_on[1], b"x")
        assert self._end() == 0

    def kill(self):
        os.kill(self.pid, signal.SIGTERM if self._elsewhere else signal.SIGKILL)
        assert self._end() != 0

    def _end(self):
        status = os.waitpid(self.pid, 0)[1]
        for fd in self._go_on:
            os.close(fd)
        return status


def names(home):
    return sorted(e.name for e in home.iterdir())


@pytest.mark.parametrize(("what", "at"), [("save", 3), ("file", 2), ("manager", 3)])
def test_a_live_writer_of_another_container_is_left_alone(tmp_path, elsewhere, what, at):
    where = {"save": tmp_path / "c", "file": tmp_path / "x.safetensors", "manager": tmp_path}[what]
    writer = Writer(elsewhere, what, where, at)
    before = names(tmp_path)
    assert len(before) == 1
    assert owners.host() not in before[0]
    assert [(x.dead, x.kind) for x in leftovers(tmp_path, older_than=-1)] == [(False, "tmp")]
    CheckpointManager(tmp_path)
    assert gc(tmp_path, older_than=-1) == []
    save(tmp_path / "other", {"w": np.ones(2)})
    assert names(tmp_path) == sorted([*before, "other"])
    writer.go_on()
    got = load(where if what != "manager" else CheckpointManager(tmp_path).latest())
    assert np.asarray(got["w"]).max() == 2


@pytest.mark.parametrize("what", ["save", "file"])
def test_a_writer_that_is_robbed_before_it_has_the_lock_takes_another_name(tmp_path, elsewhere, what):
    writer = Writer(elsewhere, what, tmp_path / "c", 1)
    assert len(gc(tmp_path)) == 1
    assert names(tmp_path) == []
    writer.go_on()
    assert names(tmp_path) == ["c"]


def test_a_live_writer_that_replaces_without_an_exchange_is_left_alone(tmp_path, elsewhere):
    """Between its two renames the checkpoint has its set-aside name alone."""
    for at in (10, 12):
        home = tmp_path / str(at)
        save(home / "c", {"w": np.full(4, 1.0)})
        writer = Writer(elsewhere, "save", home / "c", at, exchange=False)
        gc(home, older_than=-1)
        save(home / "other", {"w": np.ones(2)})
        assert np.asarray(load(home / "c")["w"]).max() in (1, 2)
        writer.go_on()
        assert np.asarray(load(home / "c")["w"]).max() == 2
        assert names(home) == ["c", "other"]


def test_what_killed_writers_of_other_containers_left_goes_with_the_next_save(tmp_path, elsewhere):
    writers = [Writer(elsewhere, "save", tmp_path / f"c{k}", 6) for k in range(3)]
    assert [x.dead for x in leftovers(tmp_path)] == [False] * 3
    for writer in writers:
        writer.kill()
    left = leftovers(tmp_path)
    assert len(left) == 3
    assert all(x.dead and x.nbytes > 0 and "lock" in x.why for x in left)
    CheckpointManager(tmp_path)
    assert len(leftovers(tmp_path)) == 3
    save(tmp_path / "mine", {"w": np.ones(2)})
    assert names(tmp_path) == ["mine"]


def test_a_killed_writer_here_and_a_live_one(tmp_path):
    dead = Writer(False, "save", tmp_path / "a", 4)
    alive = Writer(False, "save", tmp_path / "b", 4)
    dead.kill()
    assert sorted((x.path.partition(".tmp-")[0][-1], x.dead) for x in leftovers(tmp_path)) == [
        ("a", True),
        ("b", False),
    ]
    assert [x.path[len(str(tmp_path)) + 1] for x in gc(tmp_path, dry_run=True)] == ["a"]
    assert len(names(tmp_path)) == 2
    assert len(gc(tmp_path)) == 1
    assert len(names(tmp_path)) == 1
    alive.go_on()
    assert names(tmp_path) == ["b"]


def test_two_live_writers_of_one_place(tmp_path):
    writers = [Writer(False, "save", tmp_path / "c", at) for at in (3, 6)]
    for writer in writers:
        writer.go_on()
    assert np.asarray(load(tmp_path / "c")["w"]).max() == 2
    assert names(tmp_path) == ["c"]


def test_a_fork_does_not_keep_its_parents_locks(tmp_path):
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        from meshtape.storage.commit.directory_commit import replacing

        with replacing(os.fspath(tmp_path / "c"), overwrite=False, tables=frozenset()):
            if os.fork() == 0:
                os.write(writer, b"x")
                signal.pause()  # a worker of a data loader that outlives its parent
            os.write(writer, b"%d" % os.getpid())
            signal.pause()
    os.set_blocking(reader, True)
    said = b""
    while len(said) < 2:
        said += os.read(reader, 100)
    (child,) = (
        int(p) for p in subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True).stdout.split()
    )
    try:
        assert [x.dead for x in leftovers(tmp_path)] == [False]
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert [x.dead for x in leftovers(tmp_path)] == [True]
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("owner", "pid", "age", "dead"),
    [
        ("here", "self", 0, True),
        ("here", "gone", 0, True),
        ("here", "init", 0, False),
        ("here", "init", 10**10, True),  # older than the process of that number
        ("boot", "gone", 0, True),  # another namespace, same machine: the lock is free
        ("machine", "gone", 60, False),
        ("machine", "gone", 7200, True),
        ("old style", "gone", 60, False),
        ("old style", "gone", 7200, True),
    ],
)
def test_of_whom_what_tells(tmp_path, owner, pid, age, dead):
    number = {"self": os.getpid(), "gone": 2**22 + 1, "init": 1}[pid]
    who = {
        "here": owners.host(),
        "boot": f"{owners.boot()}-01234567",
        "machine": "01234567-01234567",
        "old style": "01234567",
    }[owner]
    left = tmp_path / f"c.tmp-{who}-{number}-01234567"
    left.mkdir()
    then = max(0.0, left.stat().st_mtime - age)
    os.utime(left, (then, then))
    assert [x.dead for x in leftovers(tmp_path)] == [dead]
    save(tmp_path / "other", {"w": np.ones(2)})
    assert left.exists() is not dead


def test_one_of_another_machine_that_still_writes_is_not_silent(tmp_path):
    left = tmp_path / "c.tmp-01234567-01234567-7-01234567"
    (left / "w").mkdir(parents=True)
    os.utime(left, (0, 0))
    save(tmp_path / "other", {"w": np.ones(2)})
    assert left.exists()


@pytest.mark.parametrize("pid", ["gone", "init"])
def test_without_locks_the_number_of_the_process_tells(tmp_path, monkeypatch, pid):
    monkeypatch.setattr(owners, "try_lock", lambda fd: None)
    number = {"gone": 2**22 + 1, "init": 1}[pid]
    left = [tmp_path / f"c.tmp-{h}-{number}-01234567" for h in (owners.host(), f"{owners.boot()}-01234567")]
    for path in left:
        path.mkdir()
    save(tmp_path / "other", {"w": np.ones(2)})
    assert [p.exists() for p in left] == [pid == "init", True]


def test_an_unfinished_transfer_is_listed_and_goes_when_that_is_asked(tmp_path, kit):
    save(tmp_path / "a", {"w": np.ones(10000)})
    assert kit.die_at(6, lambda: merge(tmp_path / "a", tmp_path / "hf"))
    (left,) = leftovers(tmp_path)
    assert (left.kind, left.dead) == ("part", True)
    assert gc(tmp_path) == []
    assert names(tmp_path) == ["a", "hf.part"]
    assert len(gc(tmp_path, parts=True)) == 1
    assert names(tmp_path) == ["a"]


def test_a_checkpoint_that_was_set_aside_is_put_back(tmp_path, kit):
    save(tmp_path / "c", {"w": np.ones(3)})
    os.rename(tmp_path / "c", tmp_path / f"c.old-{owners.boot()}-01234567-7-01234567")
    assert np.asarray(load(tmp_path / "c")["w"]).tolist() == [1, 1, 1]
    assert [x.kind for x in gc(tmp_path)] == ["old"]
    assert names(tmp_path) == ["c"]


def test_in_an_object_store_another_container_is_not_asked_by_its_process_number(s3):
    import json

    url = f"{s3.url}/run/step-00000001"
    there = store.at(url)
    there.put("w/c.0", b"half")
    for owner, pid in ((f"{owners.boot()}-01234567", 1), (owners.host(), 1), ("01234567", 2**22 + 1)):
        there.put(".meshtape-writing", json.dumps({"host": owner, "pid": pid}).encode())
        assert [x.dead for x in leftovers(f"{s3.url}/run")] == [False]
        assert gc(f"{s3.url}/run") == []
    assert gc(f"{s3.url}/run", older_than=-100, dry_run=True)[0].nbytes > 4
    assert there.get("w/c.0") == b"half"
    gc(f"{s3.url}/run", older_than=-100)
    assert list(there.entries()) == []


def test_the_commands(tmp_path):
    from click.testing import CliRunner

    from meshtape.cli.main import main

    def call(*args):
        done = CliRunner().invoke(main, [*args, str(tmp_path)], env={"COLUMNS": "160"})
        assert done.exit_code == 0, done.output
        return done.output

    manager = CheckpointManager(tmp_path, keep=None)
    for step in (10, 20, 30):
        manager.save(step, {"w": np.ones(3)}, metrics={"loss": 1 / step})
    manager.rollback(10)
    manager.save(15, {"w": np.ones(3)})
    Writer(False, "save", tmp_path / "step-00000040", 4).kill()
    said = call("ls")
    for text in ("step-00000030", "step-00000015", "latest", "step-00000040.tmp-", "does not run any more"):
        assert text in said
    said = call("gc", "--dry-run")
    assert "step-00000040.tmp-" in said
    assert "does not run any more" in said
    assert len(leftovers(tmp_path)) == 1
    assert "step-00000040.tmp-" in call("gc")
    assert leftovers(tmp_path) == []
    assert "nothing" in call("gc")
    assert manager.steps() == [10, 15, 20, 30]


def elsewheres(home, name="c", kind="tmp"):
    """What a writer of another namespace of this machine has begun, which nobody has locked."""
    left = home / f"{name}.{kind}-{owners.boot()}-01234567-7-01234567"
    (left / "w").mkdir(parents=True)
    (left / "w" / "c.0").write_bytes(b"x")
    return left


@pytest.mark.parametrize(
    "use",
    [gc, lambda home: save(home / "other", {"w": np.ones(2)}), lambda home: atomic_directory.recover(os.fspath(home))],
    ids=["gc", "save", "recover"],
)
@pytest.mark.parametrize("kind", ["tmp", "trash", "old"])
def test_a_writer_that_locks_after_a_collector_has_looked_keeps_its_folder(tmp_path, monkeypatch, use, kind):
    left, why, held = elsewheres(tmp_path, kind=kind), owners.why_gone, []

    def looked(path, *args):
        found = why(path, *args)
        if found and not held:
            held.append(os.open(path, os.O_RDONLY))
            assert try_lock(held[0])
        return found

    monkeypatch.setattr(owners, "why_gone", looked)
    try:
        done = use(tmp_path)
        assert (left / "w" / "c.0").exists()
        assert done == [] or isinstance(done, SaveReport)
    finally:
        os.close(held[0])
    monkeypatch.undo()
    assert len(gc(tmp_path)) == 1
    assert not left.exists()


def test_a_collector_holds_the_lock_until_all_is_gone(tmp_path):
    left, seen = elsewheres(tmp_path), []

    class Looking(Files):
        def remove_tree(self, path):
            fd = os.open(path, os.O_RDONLY)
            seen.append(try_lock(fd))
            os.close(fd)
            super().remove_tree(path)

        def rename(self, a, b):
            fd = os.open(a, os.O_RDONLY)
            seen.append(try_lock(fd))
            super().rename(a, b)
            os.close(fd)

    with using(Looking()):
        atomic_directory.recover(os.fspath(tmp_path))
    assert not left.exists()
    assert seen[:2] == [False, False]


def test_an_unfinished_transfer_that_somebody_takes_up_stays(tmp_path, kit, monkeypatch):
    save(tmp_path / "a", {"w": np.ones(10000)})
    assert kit.die_at(6, lambda: merge(tmp_path / "a", tmp_path / "hf"))
    found = leftovers(tmp_path)
    fd = os.open(tmp_path / "hf.part" / ".meshtape-transfer", os.O_RDONLY)
    monkeypatch.setattr(collecting, "leftovers", lambda *a, **kw: found)
    assert try_lock(fd)
    assert gc(tmp_path, parts=True) == []
    os.close(fd)
    assert (tmp_path / "hf.part" / ".meshtape-transfer").exists()
    assert len(gc(tmp_path, parts=True)) == 1
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("kind", ["tmp", "trash", "old", "part"])
def test_what_another_collector_has_taken_stops_nobody(tmp_path, kit, monkeypatch, kind):
    if kind == "part":
        save(tmp_path / "a", {"w": np.ones(10000)})
        assert kit.die_at(6, lambda: merge(tmp_path / "a", tmp_path / "hf"))
        first = tmp_path / "hf.part"
    else:
        first = elsewheres(tmp_path, "b", kind)
    second = elsewheres(tmp_path, "z")
    found = leftovers(tmp_path)
    assert len(found) == 2
    shutil.rmtree(first)
    monkeypatch.setattr(collecting, "leftovers", lambda *a, **kw: found)
    gc(tmp_path, parts=True)
    assert not second.exists()


def test_two_that_delete_one_folder(tmp_path):
    where = tmp_path / "x"
    for k in range(3):
        (where / f"d{k}").mkdir(parents=True)
        (where / f"d{k}" / "f").write_bytes(b"x")

    class Late(Files):
        def unlink(self, path):
            super().unlink(path)
            raise FileNotFoundError(path)

        def rmdir(self, path):
            super().rmdir(path)
            raise FileNotFoundError(path)

    Late().remove_tree(os.fspath(where))
    assert not where.exists()


@pytest.mark.parametrize("when", ["mkdir", "gone"])
def test_transfers_that_begin_at_once(tmp_path, monkeypatch, when):
    """The part directory is made by another process, or removed by one, between the look and the deed."""
    save(tmp_path / "a", {"w": np.ones(10)})
    part, isdir, once = os.fspath(tmp_path / "hf.part"), os.path.isdir, [when, "the first look, before the plan"]

    def looked(path):
        if path == part and once and not isdir(path):
            if len(once) == 2:
                once.pop()
                return False
            once.pop()
            if when == "mkdir":
                os.mkdir(part)
                return False
            return True
        return isdir(path)

    monkeypatch.setattr(os.path, "isdir", looked)
    merge(tmp_path / "a", tmp_path / "hf")
    assert not once
    assert names(tmp_path) == ["a", "hf"]
