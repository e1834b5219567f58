"""A writer to an object store that is killed at any request leaves the old checkpoint or the new one, and what it left
is collected.

The store is a real server; the proxy before it kills the writer, a process of its own, when its N-th request arrives.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from meshtape import errors
from meshtape.storage import (
    CheckpointManager,
    convert,
    gc,
    load,
    merge,
    open_checkpoint,
    save,
    save_safetensors,
    verify,
)
from meshtape.storage.commit import object_commit
from meshtape.storage.stores import owners
from meshtape.storage.stores import store as stores

pytest.importorskip("obstore")

# Forks a child for each line that it reads: a child starts in milliseconds. It has one thread: of another one the child
# would have the locks that it held, and nobody to give them back.
_FORKER = """
import faulthandler, json, os, sys, tempfile, time
import numpy as np
from meshtape import storage
import obstore.store
from zarr.core.sync import cleanup_resources
storage.save(os.path.join(tempfile.mkdtemp(), "warm"), {"a": np.ones(2)})
cleanup_resources()
while len(os.listdir("/proc/self/task")) > 1:
    time.sleep(0.01)
print("ready", flush=True)
for line in sys.stdin:
    what, where, kw = json.loads(line)
    go, release = os.pipe()
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(kw.pop("seconds") * 0.9)
        os.read(go, 1)
        if what == "save":
            storage.save(where, {"a": np.full((2, 2), kw.pop("value")), "b": np.full(3, 2)}, **kw)
        elif what == "manager":
            step = kw.pop("step")
            storage.CheckpointManager(where, **{"keep": 2, **kw}).save(step, {"a": np.full((2, 2), step)})
        elif what == "delete":
            storage.CheckpointManager(where).delete(kw["step"])
        else:
            getattr(storage, what)(kw.pop("src"), where, **kw)
        os._exit(0)
    print(pid, flush=True)
    sys.stdin.readline()
    os.write(release, b"x")
    print(os.waitpid(pid, 0)[1], flush=True)
    os.close(go), os.close(release)
"""


class Forker:
    """Runs things in children; one that does not end is killed, and the next begins with a process of its own."""

    SECONDS = 100  # for a child; far more than one needs, and less than pytest gives a test

    def __init__(self, environment):
        self.environment = {**os.environ, **environment, "RUST_BACKTRACE": "0", "OPENBLAS_NUM_THREADS": "1"}
        self.process = None

    def _start(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", _FORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=self.environment,
            process_group=0,
        )
        assert self.process.stdout.readline().strip() == "ready"

    def run(self, s3, n, what, where, **kw):
        """Run something in a child that is killed when its request ``n`` arrives; False when it ended before."""
        if self.process is None:
            self._start()
        pipes, late = self.process, []

        def give_up():
            late.append(True)
            os.killpg(pipes.pid, signal.SIGKILL)

        deadline = threading.Timer(self.SECONDS, give_up)
        deadline.start()
        ended = False
        try:
            pipes.stdin.write(json.dumps([what, where, {"seconds": self.SECONDS, **kw}]) + "\n")
            pid = int(pipes.stdout.readline())
            s3.proxy.reset(lambda number, method, path: pid if number >= n else None)
            pipes.stdin.write("go\n")
            said = pipes.stdout.readline()
            assert not late, f"{what} at request {n} has not ended in {self.SECONDS} s, after {s3.proxy.log}"
            status = int(said)
            ended = True
        finally:
            deadline.cancel()
            self.requests = s3.proxy.count
            s3.proxy.reset()
            if not ended:  # whatever is still in the pipes is no answer to the next
                self.close()
        assert status in (0, 9), status
        return status == 9

    def close(self):
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            self.process.wait(200)
            self.process = None


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


def as_transformers(url):
    """The value of the model that transformers would read: of the one file, or else of those that the index names."""
    there = stores.at(url)
    if "model.safetensors" in names(url):
        files = {"model.safetensors"}
    else:
        files = set(json.loads(there.get("model.safetensors.index.json"))["weight_map"].values())
    (v,) = {float(x) for file in files for a in load(f"{url}/{file}").values() for x in np.asarray(a)}
    return v


def names(url):
    return [e.name for e in stores.at(url).entries()]


def open_if_there(url):
    """A checkpoint, or None where its manifest is missing."""
    return open_checkpoint(url) if "meshtape.json" in names(url) else None


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
            url = f"{s3.url}/{n}/at"  # a folder of its own: who replaces looks whether a delta beside needs it
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

    @pytest.mark.parametrize("what", ["manager", "delete"])
    def test_deltas(self, s3, forker, every, what):
        home, options = f"{s3.url}/run", {"keep": None, "anchor_every": 3, "pack": False}

        def save(step):
            CheckpointManager(home, **options).save(step, {"a": np.full((2, 2), step)})

        def steps():
            found = set()
            for name in stores.at(home).folders():
                if (ckpt := open_if_there(f"{home}/{name}")) is not None:
                    verify(ckpt)
                    found.add(step := int(name[5:]))
                    assert np.asarray(ckpt["a"]).max() == step
            return found

        for step in (1, 2, 3):
            save(step)
        newest, before = 3, {1, 2, 3}
        for n in range(1, 300, 2 * every):
            if what == "manager":
                killed = forker.run(s3, n, "manager", home, step=newest + 1, **options)
                assert before <= steps() <= {*before, newest + 1}
                save(newest := newest + 2)
                CheckpointManager(home).delete(min(before))  # which the locks of dead savers do not hold up
            else:
                killed = forker.run(s3, n, "delete", home, step=min(before))
                assert before - {min(before)} <= steps() <= before
                save(newest := newest + 1)  # nor those of dead deleters
                if min(before) in steps():
                    CheckpointManager(home).delete(min(before))
            before = steps()
            assert newest in before
            if not killed:
                break
        assert n > 20
        assert not stores.at(f"{home}/.meshtape-turns").files()

    @pytest.mark.parametrize("format", ["safetensors", "dcp"])
    def test_a_conversion_goes_on(self, s3, forker, every, format, tmp_path):
        save_safetensors(tmp_path / "x.safetensors", {f"k{i}": np.full(1000, i) for i in range(4)})
        options = {"format": format, "max_shard_bytes": 8000}
        wanted = convert(tmp_path / "x.safetensors", tmp_path / "hf", **options)
        last = ".metadata" if format == "dcp" else "model.safetensors.index.json"
        resumed = []
        for n in range(3, 100, min(9, 2 * every)):
            url = f"{s3.url}/{n}"
            killed = forker.run(s3, n, "convert", url, src=str(tmp_path / "x.safetensors"), **options)
            seen = []
            done = last in names(url)
            convert(
                tmp_path / "x.safetensors",
                url,
                **options,
                overwrite=done,
                progress=lambda at, total, seen=seen: seen.append(at),
            )
            if not done:
                resumed.append(seen[0])
                assert sorted(names(url)) == sorted([*wanted.files, last])
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

    @pytest.mark.filterwarnings("ignore:.* holds two models")
    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ("one file", "shards"),
            ("one file", "zarr"),
            ("shards", "zarr"),
            ("zarr", "one file and an index"),
            *(
                pytest.param(*pair, marks=pytest.mark.slow)
                for pair in [
                    ("one file", "one file and an index"),
                    ("shards", "one file and an index"),
                    ("shards", "shards"),
                    ("one file and an index", "shards"),
                    ("one file and an index", "one file and an index"),
                    ("one file and an index", "zarr"),
                    ("zarr", "shards"),
                ]
            ),
        ],
    )
    def test_an_export_that_replaces_another(self, s3, forker, every, tmp_path, before, after):
        old, new = ({k: np.full(500, v) for k in "ab"} for v in (1.0, 2.0))
        sources = [tmp_path / "old.safetensors", tmp_path / "new.safetensors"]
        for source, tree in zip(sources, (old, new), strict=True):
            save_safetensors(source, tree)
        shards = {"max_shard_bytes": 5000}
        what, kw = (
            ("convert", {"format": "zarr"}) if after == "zarr" else ("merge", shards if after == "shards" else {})
        )
        saw = set()

        def attempt(n):
            url = f"{s3.url}/{n}/c"  # alone in its folder: others there would be asked for deltas
            if before == "one file":
                save_safetensors(f"{url}/model.safetensors", old)
            elif before == "zarr":
                convert(sources[0], url, format="zarr")
            else:
                merge(sources[0], url, **(shards if before == "shards" else {}))
            killed = forker.run(s3, n, what, url, src=str(sources[1]), overwrite=True, **kw)
            for recovered in (False, True):
                if recovered:
                    object_commit.recover(url)
                held = set(names(url))
                saw.add(now := set(np.asarray(load(url)["a"])).pop())
                if "meshtape.json" not in held:
                    assert as_transformers(url) == now
                elif recovered:
                    assert not held & {"model.safetensors", "model.safetensors.index.json"}
            assert now == 1.0 or "model.safetensors" not in held
            assert not [name for name in held if name.startswith(".meshtape")]
            return killed

        assert not attempt(1000)  # which tells how many requests there are; the replacement is among the last
        n = max(1, forker.requests - 9) if every > 1 else 1
        while attempt(n):
            n += 1
        assert saw == {1.0, 2.0}


_RACER = """
import collections, json, random, sys, time
import numpy as np
from meshtape import errors, storage
what, home, seconds, me = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
chance, end, told, step = random.Random(me), time.monotonic() + seconds, collections.Counter(), me
manager = storage.CheckpointManager(home, keep=None, anchor_every=4, pack=False)
while time.monotonic() < end:
    step += 10
    try:
        if what == "save":
            manager.save(step, {"a": np.full((2, 2), step)})
        elif there := manager.steps()[:-3]:
            manager.delete(chance.choice(there[:3]))
        told["done"] += 1
    except errors.MeshtapeError as e:
        told[f"{type(e).__name__}: {str(e).partition(':')[2][:60]}"] += 1
print(json.dumps(told))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_savers_of_deltas_beside_deleters(s3):
    """No delta outlives its base, whoever saves and deletes at once."""
    home = f"{s3.url}/run"
    CheckpointManager(home, keep=None, anchor_every=4, pack=False).save(1, {"a": np.full((2, 2), 1)})
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER, what, home, "90", str(me)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for me, what in enumerate(("save", "save", "delete", "delete"), 2)
    ]
    told = [json.loads(r.communicate(timeout=300)[0]) for r in racers]
    assert all(t["done"] > 5 for t in told), told
    bases = set()
    for name in stores.at(home).folders():
        if (ckpt := open_if_there(f"{home}/{name}")) is not None:  # which raises where the base of a delta is gone
            verify(ckpt)
            bases.add(ckpt.base is not None)
    assert bases == {True, False}
    assert not stores.at(f"{home}/.meshtape-turns").files()
    print(told)


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


def test_a_child_that_does_not_end_is_killed(s3, forker, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # which never answers
        monkeypatch.setattr(forker, "SECONDS", 1)
        src = f"http://127.0.0.1:{silent.getsockname()[1]}/x.safetensors"
        with pytest.raises(AssertionError, match="has not ended"):
            forker.run(s3, 1000, "merge", f"{s3.url}/a", src=src)
    monkeypatch.setattr(forker, "SECONDS", Forker.SECONDS)
    assert not forker.run(s3, 1000, "save", f"{s3.url}/b", value=1)


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
