"""A process killed, or an operation failing, at any point leaves the old or the new checkpoint whole, and no
mixture."""

import errno
import os

import numpy as np
import pytest

from meshtape import errors
from meshtape.storage import CheckpointManager, gc, load, merge, open_checkpoint, save, save_safetensors
from meshtape.storage.stores.filesystem import Files, using


def tree(generation):
    # The last array is in every generation: steps of a manager share its file.
    return {
        "a": np.full((2, 2), generation),
        "same": np.arange(5),
        "b": [np.full(3, generation), {"generation": generation}],
    }


def generation(path, **kw):
    got = load(path, **kw)
    seen = {int(np.asarray(got["a"]).max()), int(np.asarray(got["a"]).min()), int(np.asarray(got["b"][0]).max())}
    seen.add(got["b"][1]["generation"])
    assert len(seen) == 1, f"a mixture of {seen}"
    return seen.pop()


EVERY = pytest.mark.parametrize(
    "every", [5, pytest.param(1, marks=pytest.mark.slow)], ids=["one operation in five", "every operation"]
)


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory):
    # Import zarr and fill caches once, here: the children inherit them.
    save(tmp_path_factory.mktemp("warm") / "c", tree(0))


@EVERY
@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_overwriting_save_killed_at_any_operation(kit, quick, exchange, every):
    saw = set()
    for n in range(1, 1000, every):
        home = quick / str(n)
        home.mkdir()
        save(home / "c", tree(1), step=1)
        killed = kit.die_at(n, lambda home=home: save(home / "c", tree(2), step=2, overwrite=True), exchange)
        now = generation(home / "c")
        saw.add(now)
        assert open_checkpoint(home / "c").step == now
        # The next save clears up and goes through, whatever was left.
        save(home / "c", tree(3), overwrite=True)
        assert generation(home / "c") == 3
        assert [e.name for e in home.iterdir()] == ["c"]
        if not killed:
            break
    assert saw == {1, 2}
    assert n > 20


@EVERY
def test_first_save_killed_at_any_operation(kit, quick, every):
    for n in range(1, 1000, every):
        home = quick / str(n)
        home.mkdir()
        killed = kit.die_at(n, lambda home=home: save(home / "c", tree(2)))
        if (home / "c").exists():
            assert generation(home / "c") == 2
        else:
            with pytest.raises((errors.IncompleteCheckpoint, errors.NotACheckpoint)):
                load(home / "c")
        if not killed:
            break


@EVERY
@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_rotation_killed_at_any_operation(kit, quick, exchange, every):
    saw = set()
    for n in range(1, 1000, min(every, 2)):  # few operations lie between the new step's name and the end of the old one
        home = quick / str(n)
        manager = CheckpointManager(home, keep=2)
        manager.save(1, tree(1))
        manager.save(2, tree(2))
        killed = kit.die_at(n, lambda home=home: CheckpointManager(home, keep=2).save(3, tree(3)), exchange)
        again = CheckpointManager(home, keep=2)
        steps = again.steps()
        assert steps in ([1, 2], [1, 2, 3], [2, 3]), steps
        saw.add(tuple(steps))
        assert generation(again.latest()) == steps[-1]
        again.save(4, tree(4))
        assert {e for e in [e.name for e in home.iterdir()] if not e.startswith("step-") or "-" in e[5:]} == set()
        assert again.steps()[-1] == 4
        assert len(again.steps()) == 2
        if not killed:
            break
    assert saw == {(1, 2), (1, 2, 3), (2, 3)}


@EVERY
def test_overwriting_merge_killed_at_any_operation(kit, quick, every):
    for g in (1, 2):
        save(quick / f"c{g}", {"a": np.full(4, g), "b": np.full(4, g)})
    for n in range(1, 1000, every):
        home = quick / str(n)
        home.mkdir()
        merge(quick / "c1", home / "hf", max_shard_bytes=32)
        killed = kit.die_at(n, lambda home=home: merge(quick / "c2", home / "hf", overwrite=True, max_shard_bytes=16))
        got = load(home / "hf")
        assert {int(np.asarray(v).max()) for v in got.values()} in ({1}, {2})
        if not killed:
            break


def test_safetensors_file_killed_at_every_operation(kit, quick):
    path = quick / "x.safetensors"
    for n in range(1, 100):
        save_safetensors(path, {"a": np.full(5, 1)}, overwrite=True)
        killed = kit.die_at(n, lambda: save_safetensors(path, {"a": np.full(5, 2)}, overwrite=True))
        assert np.asarray(load(path)["a"]).tolist() in ([1] * 5, [2] * 5)
        if not killed:
            break
        save_safetensors(path, {"a": np.full(5, 1)}, overwrite=True)
        assert [e.name for e in quick.iterdir()] == ["x.safetensors"]


@EVERY
@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_an_operation_that_fails_is_an_error_and_leaves_nothing(kit, quick, code, exchange, every):
    def fail():
        raise OSError(code, os.strerror(code))

    for n in range(1, 1000, every):
        home = quick / str(n)
        home.mkdir()
        save(home / "c", tree(1))
        files = kit.Counting(n, fail, exchange)
        failed = None
        with using(files):
            try:
                save(home / "c", tree(2), overwrite=True)
            except OSError as e:
                failed = e
        if failed is not None and code == errno.ENOSPC:
            assert isinstance(failed, errors.StorageFull)
        now = generation(home / "c")
        assert now == 2 or failed is not None
        save(home / "c", tree(3), overwrite=True)
        assert [e.name for e in home.iterdir()] == ["c"]
        if files.done < n:
            break
    assert n > 20


def test_too_little_room_is_an_error_before_anything_is_written(quick):
    class Full(Files):
        def free_bytes(self, path):
            return 1000

    with using(Full()), pytest.raises(errors.StorageFull, match=r"needs \d+ bytes, .* has 1000 free"):
        save(quick / "c", {"w": np.zeros(1000)})
    assert list(quick.iterdir()) == []


def test_a_rank_that_fails_fails_the_save_and_leaves_nothing(kit, quick):
    host = kit.Host({"x": 3}, processes=3)
    w = kit.split(np.arange(6.0), kit.Sharding(host, (0,)))
    w.blocks[1] = None
    with pytest.raises(AttributeError):
        save(quick / "c", {"w": w, "b": np.ones(3)})
    assert list(quick.iterdir()) == []


def test_a_worker_that_does_not_see_the_directory_says_so(kit, quick, monkeypatch):
    from meshtape.storage.saving import write_shards

    monkeypatch.setattr(write_shards.time, "sleep", lambda s: None)
    with pytest.raises(errors.CheckpointError, match=r"rank 3 does not see .*gone.*share"):
        write_shards.write_blocks({3: (str(quick / "gone"), [])}, {3: []})


def test_a_rank_that_forgets_a_shard_is_found_out(kit, quick):
    class Forgetful(kit.Host):
        def run_on_blocks(self, fn, arrays, payloads):
            return super().run_on_blocks(fn, arrays, payloads)[:-1]

    w = kit.split(np.arange(6.0), kit.Sharding(Forgetful({"x": 2}), (0,)))
    with pytest.raises(errors.CheckpointError, match=r"did not write \['w c.1'\]"):
        save(quick / "c", {"w": w})
    assert list(quick.iterdir()) == []


def test_overwrite_never_replaces_what_is_not_a_checkpoint(quick):
    (quick / "home").mkdir()
    (quick / "home" / "thesis.tex").write_text("x")
    (quick / "file").write_text("x")
    for name in ("home", "file"):
        with pytest.raises(errors.CheckpointExists, match="not a"):
            save(quick / name, tree(1), overwrite=True)
    save(quick / "c", tree(1))
    with pytest.raises(errors.CheckpointExists, match="overwrite=True"):
        save(quick / "c", tree(2))
    assert generation(quick / "c") == 1
    (quick / "empty").mkdir()
    save(quick / "empty", tree(2), overwrite=True)
    assert generation(quick / "empty") == 2
    assert (quick / "home" / "thesis.tex").read_text() == "x"


def test_a_running_save_of_another_process_is_left_alone(kit, quick):
    """A manager that starts meanwhile must not collect the directory that a live process is filling."""
    reader, writer = os.pipe()
    go, release = os.pipe()
    pid = os.fork()
    if pid == 0:

        def pause():
            os.write(writer, b"x")
            os.read(go, 1)

        with using(kit.Counting(4, pause)):
            save(quick / "step-00000001", tree(1), step=1)
        os._exit(0)
    os.read(reader, 1)
    assert CheckpointManager(quick).latest() is None
    assert len(list(quick.iterdir())) == 1
    os.write(release, b"x")
    assert os.waitpid(pid, 0)[1] == 0
    assert CheckpointManager(quick).steps() == [1]


@pytest.mark.parametrize("kills", [8, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_a_run_that_is_killed_again_and_again(kit, quick, kills):
    """Save, rotate, merge over the last export; die anywhere; start again: what was complete stays, and steps never go
    back."""
    rng = np.random.default_rng(kills)
    run, export = quick / "run", quick / "export"

    def train(first):
        manager = CheckpointManager(run, keep=2, best="loss")
        for step in range(first, first + 3):
            manager.save(step, tree(step), metrics={"loss": 1 / step}, overwrite=True)
            merge(manager.latest(), export, overwrite=True)

    train(1)
    died, newest, exported = 0, 3, 3
    while died < kills:
        died += kit.die_at(int(rng.integers(1, 260)), lambda first=newest + 1: train(first), bool(rng.integers(2)))
        manager = CheckpointManager(run, keep=2, best="loss")
        steps = manager.steps()
        assert 2 <= len(steps) <= 4, steps
        assert steps[-1] >= newest
        newest = steps[-1]
        for step in steps:
            assert generation(manager.path(step)) == step
        got = load(export)
        (now,) = {int(np.asarray(got[n]).max()) for n in ("a", "b.0")}
        assert exported <= now <= newest
        exported = now
        gc(run)
        assert [e.name for e in run.iterdir() if "." in e.name] == []  # whatever was half done is collected


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_directory_that_cannot_be_written_to(quick, code):
    """Even where this process may write anything, as root may."""
    save(quick / "c", tree(1))

    class ReadOnly(Files):
        def mkdir(self, path):
            raise OSError(code, os.strerror(code), path)

    before = sorted(p.name for p in quick.rglob("*"))
    with using(ReadOnly()):
        for act in (
            lambda: save(quick / "d", tree(2)),
            lambda: save(quick / "c", tree(2), overwrite=True),
            lambda: merge(quick / "c", quick / "m"),
            lambda: CheckpointManager(quick / "new"),
        ):
            with pytest.raises(OSError, match=os.strerror(code)):  # StorageFull, of a full quota, is one too
                act()
    assert sorted(p.name for p in quick.rglob("*")) == before
    assert generation(quick / "c") == 1
