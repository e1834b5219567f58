"""What a power cut leaves: no name is given to bytes that are not on the disk, and a call that returned left nothing in
memory alone.

A killed process loses nothing that it has written; a machine that goes down does. So the order of writes, syncs and
renames is watched itself.
"""

import os
import threading
from pathlib import Path

import numpy as np

import meshtape as mt
from meshtape import storage
from meshtape.storage.stores.filesystem import Files, using

LAST = {"meshtape.json", "model.safetensors.index.json"}


class Watched(Files):
    """Knows which files and folders have changed since they were last synced; refuses a name for what is not
    durable."""

    def __init__(self, exchanges=True):
        self.exchanges = exchanges
        self.files, self.folders, self.open_files = set(), set(), {}
        self.named = []
        self.lock = threading.Lock()

    def below(self, path):
        return sorted(p for p in self.files | self.folders if p == path or p.startswith(f"{path}/"))

    def mkdir(self, path):
        super().mkdir(path)
        with self.lock:
            self.folders.add(os.path.dirname(path))

    def create(self, path):
        if os.path.basename(path) in LAST:
            # It says that the folder is complete, so all else must be durable before.
            assert not self.below(os.path.dirname(path)), path
        fd = super().create(path)
        with self.lock:
            self.open_files[fd] = path
            self.files.add(path)
            self.folders.add(os.path.dirname(path))
        return fd

    def open(self, path):
        fd = super().open(path)
        with self.lock:
            self.open_files[fd] = path
        return fd

    def write(self, fd, buffers, offset):
        with self.lock:
            self.files.add(self.open_files[fd])
        return super().write(fd, buffers, offset)

    def fsync(self, fd):
        super().fsync(fd)
        with self.lock:
            if fd in self.open_files:
                self.files.discard(self.open_files[fd])
            else:  # opened to be read, and linked
                same = os.fstat(fd)
                self.files = {p for p in self.files if not os.path.samestat(os.stat(p), same)}

    def link(self, source, target):
        super().link(source, target)
        with self.lock:
            if ".tmp-" not in os.path.basename(
                os.path.dirname(target)
            ):  # a shard: its first writer may not have synced it
                self.files.add(target)
            self.folders.add(os.path.dirname(target))

    def close(self, fd):
        with self.lock:
            self.open_files.pop(fd, None)
        super().close(fd)

    def fsync_dir(self, path):
        super().fsync_dir(path)
        with self.lock:
            self.folders.discard(path)

    def _moved(self, source, target):
        name = os.path.basename(target)
        if not any(mark in name for mark in (".tmp-", ".old-", ".trash-")):
            assert not self.below(source), f"{target} is to be what a power cut would take"
            self.named.append(name)
        for held in (self.files, self.folders):
            gone = [p for p in held if p == source or p.startswith(f"{source}/")]
            held.difference_update(gone)
            held.update(target + p[len(source) :] for p in gone)
        self.folders |= {os.path.dirname(source), os.path.dirname(target)}

    def rename(self, source, target):
        with self.lock:
            self._moved(source, target)
        super().rename(source, target)

    def exchange(self, a, b):
        if not self.exchanges or not super().exchange(a, b):
            return False
        with self.lock:
            self._moved(a, b)
        return True

    def unlink(self, path):
        super().unlink(path)
        with self.lock:
            self.files.discard(path)

    def rmdir(self, path):
        super().rmdir(path)
        with self.lock:
            self.folders.discard(path)


TREE = {"a": np.arange(24, dtype=np.float32).reshape(4, 6), "b": [np.ones(3), {"c": np.zeros(()), "n": 1}]}


def _twice(home):
    for step in (1, 2):
        storage.save(home / "c", TREE, step=step, overwrite=True, documents={"config": {"n": step}})


def _managed(home):
    manager = storage.CheckpointManager(home / "c", keep=1)
    for step in (1, 2, 3):
        manager.save(step, TREE)


def _file(home):
    for value in (1, 2):
        storage.save_safetensors(home / "c", {"a": np.full(5, value)}, overwrite=True)


CALLS = {
    "a save": lambda home: storage.save(home / "c", TREE, documents={"config": {"n": 1}}),
    "a save below folders that it makes": lambda home: storage.save(home / "new" / "er" / "c", TREE),
    "compressed": lambda home: storage.save(home / "c", TREE, compression="zstd"),
    "in the background": lambda home: storage.save_async(home / "c", TREE).wait(),
    "one over another": _twice,
    "a rotation": _managed,
    "a file over another": _file,
    "a program": lambda home: storage.save_program(home / "c", lambda x: x + mt.ones(3), mt.ones(3)),
    "merge": lambda home: storage.merge(home.parent / "source", home / "c", max_shard_bytes=100),
    "reshard": lambda home: storage.reshard(
        home.parent / "source", home / "c", mesh={"m": 2}, shardings={"a": {"m": 1}}
    ),
    "convert into packs": lambda home: storage.convert(home.parent / "source", home / "c", format="zarr", pack=True),
    "convert, compressed": lambda home: storage.convert(
        home.parent / "source", home / "c", format="zarr", compression="zstd"
    ),
}


# Where one generation replaces another, once more without the exchange of two names.
ALL = [(what, call, True) for what, call in CALLS.items()] + [
    ("one over another, in two renames", _twice, False),
    ("a rotation, in two renames", _managed, False),
]


def test_nothing_has_its_name_before_it_is_durable(tmp_path):
    storage.save(tmp_path / "source", TREE)
    for number, (what, call, exchanges) in enumerate(ALL):
        home = tmp_path / str(number)
        home.mkdir()
        with using(Watched(exchanges)) as watched:
            call(home)
        assert watched.named, what
        assert not watched.below(str(home)), f"{what}: left to chance when the call returned"


def test_the_watch_sees_what_is_left_out(tmp_path):
    """Each sync is needed: without any one of them the watch speaks."""

    class Without(Watched):
        def __init__(self, left_out):
            super().__init__()
            self.left_out, self.done = left_out, 0

        def skips(self):
            self.done += 1
            return self.done == self.left_out

        def fsync(self, fd):
            if not self.skips():
                super().fsync(fd)

        def fsync_dir(self, path):
            if not self.skips():
                super().fsync_dir(path)

    n = missed = 0
    while True:
        n += 1
        watched = Without(n)
        home = Path(tmp_path, str(n))
        home.mkdir()
        try:
            with using(watched):
                storage.save(home / "c", {"a": np.ones(3)})
        except (AssertionError, mt.errors.MeshtapeError):
            continue
        if watched.done < n:
            break
        missed += not watched.below(str(home))
    assert n > 5
    assert missed == 0
