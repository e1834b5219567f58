"""A writer to an object store that is killed at any request leaves the old checkpoint or the new one, and what it left is collected.

The store is a real server; the proxy before it kills the writer, a process of its own, when its N-th request arrives.
"""

import json
import subprocess
import sys

import numpy as np
import pytest

from meshtape import errors
from meshtape.storage import CheckpointManager, gc, load, merge, open_checkpoint, save, save_safetensors, verify
from meshtape.storage.saving import object_commit
from meshtape.storage.stores import owners
from meshtape.storage.stores import store as stores

pytest.importorskip("obstore")

# Forks a child for each line that it reads: a child starts in milliseconds, and no threads of this test's own clients are in it.
_FORKER = """
import json, os, sys
import numpy as np
from meshtape import storage
import obstore.store, tempfile
storage.save(os.path.join(tempfile.mkdtemp(), "warm"), {"a": np.ones(2)})
print("ready", flush=True)
for line in sys.stdin:
    what, where, kw = json.loads(line)
    go, release = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(go, 1)
        if what == "save":
            storage.save(where, {"a": np.full((2, 2), kw.pop("value")), "b": np.full(3, 2)}, **kw)
        elif what == "manager":
            storage.CheckpointManager(where, keep=2).save(kw["step"], {"a": np.full((2, 2), kw["step"])})
        else:
            storage.merge(kw.pop("src"), where, **kw)
        os._exit(0)
    print(pid, flush=True)
    sys.stdin.readline()
    os.write(release, b"x")
    print(os.waitpid(pid, 0)[1], flush=True)
    os.close(go), os.close(release)
"""


class Forker:
    def __init__(self, environment):
        import os

        self.process = subprocess.Popen(
            [sys.executable, "-c", _FORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment, "RUST_BACKTRACE": "0"},
        )
        assert self._line() == "ready"

    def _line(self):
        return self.process.stdout.readline().strip()

    def _send(self, text):
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def run(self, s3, n, what, where, **kw):
        """Run something in a child that is killed when its request ``n`` arrives; False when it ended before."""
        self._send(json.dumps([what, where, kw]))
        pid = int(self._line())
        s3.proxy.reset(lambda number, method, path: pid if number >= n else None)
        self._send("go")
        status = int(self._line())
        s3.proxy.reset()
        assert status in (0, 9), status
        return status == 9

    def close(self):
        self.process.stdin.close()
        self.process.wait(200)


@pytest.fixture(scope="module")
def forker(s3_server):
    held = Forker(s3_server.environment)
    yield held
    held.close()


def value(url):
    got = load(url)
    assert set(got) == {"a", "b"}
    (v,) = set(np.asarray(got["a"]).reshape(-1).tolist())
    return v


def names(url):
    return [e.name for e in stores.at(url).entries()]


def clean(url):
    """Only what the table of contents names is left."""
    held = names(url)
    assert not [n for n in held if n.startswith(".meshtape")]
    assert len(held) == (3 if any(n.startswith("pack-") for n in held) else 6)
    verify(url)


@pytest.mark.parametrize(
    "every", [9, pytest.param(1, marks=pytest.mark.slow)], ids=["one request in nine", "every request"]
)
class TestKilled:
    def test_a_first_save(self, s3, forker, every):
        for n in range(1, 100, every):
            url = f"{s3.url}/{n}"
            killed = forker.run(s3, n, "save", url, value=1, pack=n % 2 == 0)
            if names(url) and "meshtape.json" in names(url):
                assert value(url) == 1
            else:
                with pytest.raises((errors.IncompleteCheckpoint, errors.NotACheckpoint)):
                    open_checkpoint(url)
            save(url, {"a": np.full((2, 2), 3), "b": np.ones(3)}, overwrite=True)
            assert value(url) == 3
            clean(url)
            if not killed:
                break
        assert n > 5

    def test_a_save_that_replaces(self, s3, forker, every):
        saw = set()
        for n in range(1, 100, every):
            url = f"{s3.url}/{n}"
            save(url, {"a": np.full((2, 2), 1), "b": np.full(3, 1)}, step=1)
            killed = forker.run(s3, n, "save", url, value=2, step=2, overwrite=True, pack=n % 2 == 0)
            now = value(url)
            saw.add(now)
            assert open_checkpoint(url).step == now
            verify(url)
            object_commit.recover(url)
            assert value(url) == now
            clean(url)
            save(url, {"a": np.full((2, 2), 3), "b": np.ones(3)}, overwrite=True)
            assert value(url) == 3
            clean(url)
            if not killed:
                break
        assert saw == {1, 2}

    def test_rotation(self, s3, forker, every):
        saw = set()
        for n in range(1, 200, 2 * every):
            home = f"{s3.url}/{n}"
            manager = CheckpointManager(home, keep=2)
            for step in (1, 2):
                manager.save(step, {"a": np.full((2, 2), step)})
            killed = forker.run(s3, n, "manager", home, step=3)
            again = CheckpointManager(home, keep=2)
            steps = again.steps()
            assert steps in ([1, 2], [1, 2, 3], [2, 3]), steps
            saw.add(tuple(steps))
            assert np.asarray(again.restore()["a"]).max() == steps[-1]
            gc(home)
            assert again.steps() == steps
            assert stores.at(home).folders() == [f"step-{s:08d}" for s in steps]
            if not killed:
                break
        assert {(1, 2), (2, 3)} <= saw

    def test_a_merge_goes_on(self, s3, forker, every, tmp_path):
        save_safetensors(tmp_path / "x.safetensors", {f"k{i}": np.full(1000, i) for i in range(4)})
        wanted = merge(tmp_path / "x.safetensors", tmp_path / "hf", max_shard_bytes=8000)
        resumed = []
        for n in range(3, 100, min(9, 2 * every)):
            url = f"{s3.url}/{n}"
            killed = forker.run(s3, n, "merge", url, src=str(tmp_path / "x.safetensors"), max_shard_bytes=8000)
            seen = []
            done = "model.safetensors.index.json" in names(url)
            merge(
                tmp_path / "x.safetensors",
                url,
                max_shard_bytes=8000,
                overwrite=done,
                progress=lambda at, total, seen=seen: seen.append(at),
            )
            if not done:
                resumed.append(seen[0])
                assert names(url) == [*wanted.files, "model.safetensors.index.json"]
                for file in wanted.files:
                    here = tmp_path / "hf" / file  # whose header has the checksums, which an upload has in its index
                    assert stores.at(url).get(file)[-8000:] == here.read_bytes()[-8000:]
                assert verify(url).arrays == 4
            assert sorted(load(url)) == [f"k{i}" for i in range(4)]
            assert not [n for n in names(url) if n.startswith(".meshtape")]
            if not killed:
                break
        assert min(resumed) == 0
        assert max(resumed) > 0


def test_a_writer_that_lives_is_left_alone(s3, forker, monkeypatch):
    """A manager that starts meanwhile, or a second writer, must not collect what a living process is filling."""
    url = f"{s3.url}/run/step-00000001"
    original = object_commit.ObjectFolder.commit

    def meanwhile(folder):
        monkeypatch.setattr(object_commit.ObjectFolder, "commit", original)
        before = names(url)
        assert object_commit.CLAIM in before
        assert CheckpointManager(f"{s3.url}/run").latest() is None
        assert not forker.run(s3, 1000, "manager", f"{s3.url}/run", step=2)
        assert names(url) == before
        original(folder)

    monkeypatch.setattr(object_commit.ObjectFolder, "commit", meanwhile)
    with pytest.warns(UserWarning, match="incomplete"):
        save(url, {"a": np.ones((2, 2)), "b": np.ones(3)}, step=1)
    clean(url)
    assert CheckpointManager(f"{s3.url}/run").steps() == [1, 2]


def test_a_writer_of_another_machine_counts_as_gone_after_a_day(s3, monkeypatch):
    url = f"{s3.url}/c"
    there = stores.at(url)
    there.put(object_commit.CLAIM, json.dumps({"host": "feedbeef", "pid": 1}).encode())
    there.put("w/c.0", b"rest")
    assert object_commit.recover(url) == []
    save(url, {"a": np.full((2, 2), 1), "b": np.ones(3)})  # under names of its own
    assert value(url) == 1
    assert "w/c.0" in names(url)
    monkeypatch.setattr(owners, "FOREIGN_AGE", -60.0)
    assert set(object_commit.recover(url)) == {object_commit.CLAIM, "w/c.0"}
    clean(url)


def test_a_deletion_that_had_not_begun_does_not_happen(s3):
    url = f"{s3.url}/run/step-00000001"
    save(url, {"a": np.full((2, 2), 1), "b": np.ones(3)}, step=1)
    stores.at(url).put(object_commit.TRASH, b"")
    assert gc(f"{s3.url}/run") != []
    assert CheckpointManager(f"{s3.url}/run").steps() == [1]
    clean(url)
    stores.at(url).put(object_commit.TRASH, b"")
    stores.at(url).delete(["meshtape.json"])
    assert gc(f"{s3.url}/run") != []
    assert CheckpointManager(f"{s3.url}/run").steps() == []
    assert names(url) == []


@pytest.mark.parametrize("merged", [False, True])
def test_what_a_dead_writer_leaves_goes_and_what_the_user_put_there_stays(s3, merged, tmp_path):
    where = f"{s3.url}/beside-{merged}"
    save(tmp_path / "c" if merged else where, {"a": np.ones(3)})
    if merged:
        merge(tmp_path / "c", where)
    store = stores.at(where)
    store.put("notes.bin", b"mine")
    store.put("1_Pooling/config.json", b"{}")
    claim = json.dumps({"host": owners.host(), "pid": 2**22 + 1, "id": "x"}).encode()
    store.put(f"{object_commit.CLAIM}~g00000000", claim)
    store.put("a~g00000000/c.0", b"half")
    gone = object_commit.recover(where)
    assert sorted(gone) == [f"{object_commit.CLAIM}~g00000000", "a~g00000000/c.0"]
    assert store.get("notes.bin") == b"mine"
    assert store.get("1_Pooling/config.json") == b"{}"
    assert load(where)["a"].tolist() == [1, 1, 1]
