"""Delta checkpoints: differences from an anchor, which read as the values, stay whole whatever is deleted, and never
pass for anything else."""

import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtape import errors
from meshtape.cli.main import main
from meshtape.storage import (
    CheckpointManager,
    convert,
    gc,
    load,
    merge,
    open_checkpoint,
    save,
    save_async,
    usage,
    verify,
    virtual,
)
from meshtape.storage.base.sealed import sealed, unsealed
from meshtape.storage.browse.model import layout
from meshtape.storage.commit import anchor_lock, directory_commit, object_commit
from meshtape.storage.format import chunk_grid, manifest
from meshtape.storage.format.compression import PackedZstd, ShuffledZstd
from meshtape.storage.saving import items
from meshtape.storage.saving import manager as manager_module
from meshtape.storage.stores import atomic_directory, owners, store

RNG = np.random.default_rng(7)
W, B = RNG.normal(size=(40, 33)).astype(np.float32), RNG.normal(size=9)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    # Several chunks a shard, without megabytes.
    monkeypatch.setattr(chunk_grid, "TARGET", 1 << 9)
    monkeypatch.setattr(chunk_grid, "SHORTEST_ROW", 1 << 5)
    chunk_grid.whole_grid.cache_clear()
    yield
    chunk_grid.whole_grid.cache_clear()


def tree(step):
    return {"w": W + np.float32(1e-4) * step, "b": [B + step], "n": np.int64(step)}


def step_of(path, **kw):
    """The step that all arrays of a checkpoint have."""
    got = load(path, **kw)
    (step,) = {int(got["n"]), *np.rint(np.asarray(got["b"][0]) - B).astype(int).tolist()}
    assert np.array_equal(np.asarray(got["w"]), tree(step)["w"])
    return step


def filled(home, steps=7, every=3, **options):
    manager = CheckpointManager(home, keep=None, anchor_every=every, **options)
    for step in range(1, steps + 1):
        manager.save(step, tree(step))
    return manager


def bases(manager):
    """Step, and that of its base, of all complete checkpoints."""
    found = {c.step: c.base and int(c.base.name[5:]) for c in manager._complete()}
    for step in found:
        assert step_of(manager.path(step)) == step
        verify(manager.path(step))
    return found


# ----- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["disk", "memory", "packs"])
def test_every_dtype_and_shape_on_meshes_to_the_bit(kit, tmp_path, where):
    home = f"memory://deltas/{where}" if where == "memory" else str(tmp_path)
    shapes = [*(kit.SHAPES if where == "disk" else [(), (5,)]), (19, 37)]
    first, then = (
        {f"{d}-{'x'.join(map(str, s))}": kit.random(d, s, seed) for d in kit.DTYPES for s in shapes} for seed in (1, 2)
    )
    meshes = [kit.Sharding(kit.Host({"m": n}), (0,)) for n in (2, 3)]
    big = kit.random(np.dtype("f4"), (19, 37), 3), kit.random(np.dtype("f4"), (19, 37), 4)
    save(
        f"{home}/a",
        {**first, "split": kit.split(big[0], meshes[0]), "other": np.ones(3)},
        compression="weights",
        pack=False,
    )
    pack = 64 if where == "packs" else False
    save(f"{home}/b", {**then, "split": kit.split(big[1], meshes[1]), "new": np.ones(4)}, base=f"{home}/a", pack=pack)
    ckpt = open_checkpoint(f"{home}/b")
    entries = {a.name: a.delta for a in ckpt.manifest.arrays}
    assert entries["split"]
    assert not entries["new"]
    assert entries["float32-19x37"]
    assert not entries["complex128-19x37"]
    assert entries["bool-5"] is (where != "packs")
    got = load(f"{home}/b")
    assert all(kit.same(got[n], v) for n, v in then.items())
    assert kit.same(got["split"], big[1])
    assert kit.same(ckpt["float32-19x37"][3:17:5, 2:30:3], then["float32-19x37"][3:17:5, 2:30:3])
    like = load(f"{home}/b", keys=["split"], shardings={"split": kit.Sharding(kit.Host({"m": 4}), (1,))})
    assert kit.same(like["split"].whole(), big[1])
    assert verify(ckpt).arrays == len(ckpt)
    merge(f"{home}/b", str(tmp_path / "flat"), keys=["split"])
    assert kit.same(load(tmp_path / "flat")["split"], big[1])
    convert(f"{home}/b", str(tmp_path / "plain"), format="zarr")
    plain = open_checkpoint(tmp_path / "plain")
    assert plain.base is None
    assert str(plain.compression) == "weights:1"
    assert all(kit.same(plain[n][...], v) for n, v in then.items())


def test_a_little_training_is_small(tmp_path):
    moved = {"w": (W * np.float32(1 + 1e-6)).astype(np.float32), "frozen": np.tile(W, (20, 1))}
    save(tmp_path / "a", {"w": W, "frozen": np.tile(W, (20, 1))})
    save(tmp_path / "b", moved, base=tmp_path / "a")
    sizes = {e: sum(f.stat().st_size for f in (tmp_path / "b" / e).glob("c*")) for e in moved}
    assert sizes["w"] < 0.6 * W.nbytes
    assert sizes["frozen"] < 0.25 * moved["frozen"].nbytes


# ----- managers -------------------------------------------------------------------------------------------------------


def test_deltas_of_16_bits_in_both_forms(tmp_path, monkeypatch):
    """Packed, and as version 4 of the format has them."""
    w = np.random.default_rng(0).normal(size=(301, 41)).astype(np.float16)
    save(tmp_path / "a", {"w": w})
    for codec, moved in itertools.product((PackedZstd, ShuffledZstd), (w, w * np.float16(1.01), -w[::-1])):
        monkeypatch.setattr(items, "PackedZstd", codec)
        save(tmp_path / "b", {"w": moved}, base=tmp_path / "a", overwrite=True)
        assert open_checkpoint(tmp_path / "b").manifest.version == max(4, codec.since)
        assert np.asarray(load(tmp_path / "b")["w"]).tobytes() == moved.tobytes()


def test_packed_frames_that_lie_are_refused():
    codec, rng, room = PackedZstd(), np.random.default_rng(0), np.zeros(2 * 4099 + 64, "u1")
    for most in (1, 2, 9, 1 << 15):
        d = rng.integers(-most, most, 4099).astype("<i2").view("u1")
        good = codec.compress(d)
        for at, bits in [(0, 0), *zip(*rng.integers(1, (len(good), 256), (60, 2)).T.tolist(), strict=True)]:
            frame = np.frombuffer(good, "u1").copy()
            frame[at] ^= bits
            room[:] = 77
            with contextlib.suppress(ValueError):
                codec.decompress(frame, room[:-64])
                assert bits or (room[:-64] == d).all()
            assert (room[-64:] == 77).all()


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_anchors_deletions_and_overwrites(tmp_path, where):
    home = "memory://deltas/run" if where == "memory" else tmp_path
    manager = filled(home, compression="zstd", asynchronous=True, pack=False)
    manager.wait()
    assert bases(manager) == {1: None, 2: 1, 3: 1, 4: None, 5: 4, 6: 4, 7: None}
    manager.delete(1)  # the first of its deltas takes its place
    assert bases(manager) == {2: None, 3: 2, 4: None, 5: 4, 6: 4, 7: None}
    assert str(open_checkpoint(manager.path(2)).compression) == "zstd:3"
    with pytest.warns(UserWarning, match="below step 7"):
        manager.save(4, tree(4), overwrite=True)
    manager.wait()
    assert bases(manager)[5] is None
    manager.delete(6)
    manager.delete(5)
    assert bases(manager) == {2: None, 3: 2, 4: 7, 7: None}  # of the newest anchor
    manager.rollback(3)
    manager.save(8, tree(8))
    manager.wait()
    assert bases(manager)[8] is None  # the third since the anchor of step 3
    assert CheckpointManager(home, anchor_every=3).latest() == manager.path(8)


def test_sharded_steps_keep_their_blocks_when_their_base_goes(kit, tmp_path):
    mesh = kit.Sharding(kit.Host({"m": 3}), (0,))
    manager = CheckpointManager(tmp_path, keep=None, anchor_every=4, dtype_fallback="raw")
    import ml_dtypes

    for step in (1, 2, 3):
        half = (W + step).astype(ml_dtypes.bfloat16)
        manager.save(step, {"w": kit.split(half, mesh), "t": "text"}, {"at": step}, documents={"config": {"s": step}})
    before = {s: open_checkpoint(manager.path(s)) for s in (2, 3)}
    manager.delete(1)
    for step, old in before.items():
        now = open_checkpoint(manager.path(step))
        assert now.metadata.pop(manifest.FORMER) == [old.manifest.identity]
        assert (now.meshes, now["w"].sharding_text, now.metadata) == (old.meshes, old["w"].sharding_text, old.metadata)
        assert [a.grid for a in now.manifest.arrays] == [a.grid for a in old.manifest.arrays]
        assert now.leaves == {"t": "text"}
        assert now.documents["config"] == {"s": step}
        assert json.loads((tmp_path / now.path / "w/zarr.json").read_text())["data_type"] == "uint16"
        assert kit.same(now["w"][...], (W + step).astype(ml_dtypes.bfloat16))
        with pytest.raises(errors.CheckpointReplaced):
            old["w"][...]


@pytest.mark.parametrize("how", ["manager", "save", "convert"])
def test_metadata_of_a_step_do_not_make_another_the_one_that_was_pinned(tmp_path, how):
    """A step that got another base says what it was before; what is saved with its metadata has other values."""
    manager = CheckpointManager(tmp_path / "run", keep=None, anchor_every=10)
    for step in (1, 2, 3):
        manager.save(step, {"w": W + step})
    place, document = manager.path(3), tmp_path / "d.json"
    virtual.write(document, virtual.mean([place]))
    manager.delete(1)
    assert np.array_equal(np.asarray(load(document)["w"]), W + 3)
    metadata = open_checkpoint(place).metadata
    assert manifest.FORMER in metadata
    if how == "manager":
        manager.save(3, {"w": W}, metadata, overwrite=True)
    elif how == "save":
        save(place, {"w": W}, metadata=metadata, overwrite=True)
    else:
        convert(place, tmp_path / "short", format="zarr", dtype="float16")
        shutil.rmtree(place)
        os.rename(tmp_path / "short", place)
    with pytest.raises(errors.ParentChanged):
        load(document)


def test_parents_that_documents_share_are_verified_once(tmp_path):
    manager = CheckpointManager(tmp_path / "run", keep=None, anchor_every=10)
    for step in range(1, 6):
        manager.save(step, {"w": W + step})
    alone = verify(manager.path(1)).nbytes + sum(verify(manager.path(s)).nbytes for s in range(2, 6))
    alone -= 4 * verify(manager.path(1)).nbytes  # each delta has counted its anchor
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    virtual.write(one, virtual.mean([manager.path(s) for s in range(1, 6)]))
    virtual.write(two, virtual.mean([one, virtual.cast(one, np.float32), manager.path(1)]))
    assert verify(one).nbytes == verify(two).nbytes == alone
    assert verify(two).files == verify(one).files + 1  # two documents, one of them inside the other
    opened = open_checkpoint(two)
    assert opened.base is None
    assert "delta" not in str(opened)
    with next((tmp_path / "run").glob("step-00000001/w/c*")).open("r+b") as f:
        f.write(b"xxxx")
    for damaged in (one, two):
        with pytest.raises(errors.CorruptCheckpoint, match="step-00000001"):
            verify(damaged)


def test_metadata_of_a_step_leave_its_metrics_with_it(tmp_path):
    manager = CheckpointManager(tmp_path, keep=2, best="loss")
    manager.save(1, {"w": W}, {"mine": 7}, metrics={"loss": 1.0})
    metadata = open_checkpoint(manager.latest()).metadata
    manager.save(2, {"w": W}, metadata)
    manager.save(3, {"w": W}, metadata, metrics={"loss": 5.0})
    manager.save(4, {"w": W}, metadata)
    assert (manager.steps(), manager.best()) == ([1, 4], manager.path(1))
    assert open_checkpoint(manager.latest()).metadata["mine"] == 7


def test_rotation_keeps_the_anchor_that_is_needed(tmp_path):
    manager = CheckpointManager(tmp_path, keep=1, anchor_every=3)
    seen = []
    for step in range(1, 8):
        manager.save(step, tree(step))
        seen.append(manager.steps())
        bases(manager)
    assert seen == [[1], [1, 2], [1, 3], [4], [4, 5], [4, 6], [7]]


@pytest.mark.parametrize("name", ["best", "step-2-good"])
def test_a_copy_of_a_delta_beside_its_run_keeps_what_it_needs(tmp_path, name):
    manager = filled(tmp_path, steps=3, every=5)
    shutil.copytree(manager.path(2), tmp_path / name)
    rotating = CheckpointManager(tmp_path, keep=2, anchor_every=2)
    for step in (4, 5):
        rotating.save(step, tree(step))
    with pytest.warns(UserWarning, match=f"kept .*step-00000001: {name} is a delta from it"):
        rotating.save(6, tree(6))
    assert step_of(tmp_path / name) == 2
    manager.delete(1)
    assert open_checkpoint(tmp_path / name).base is None
    assert step_of(tmp_path / name) == 2
    verify(tmp_path / name)


def test_a_document_over_steps_that_get_another_base_stays(tmp_path):
    manager = filled(tmp_path / "run", steps=4, every=9)
    where = virtual.write(
        tmp_path / "mean.json", virtual.mean([virtual.with_rules(manager.path(s), "n -> _") for s in (2, 4)])
    )
    manager.delete(1)
    manager.delete(3)
    assert np.array_equal(np.asarray(load(where)["w"]), (tree(2)["w"] + tree(4)["w"]) / 2)
    manager.save(4, tree(5), overwrite=True)
    with pytest.raises(errors.ParentChanged, match="another by now"):
        open_checkpoint(where)


def test_commands_tell_the_truth(tmp_path, capsys):
    manager = filled(tmp_path, 5)

    def run(*args):
        with contextlib.suppress(SystemExit):
            main([*args, "--json"], standalone_mode=False)
        return json.loads(capsys.readouterr().out)

    anchor = manager.path(1)
    assert [s["base"] for s in run("ls", str(tmp_path))["steps"]] == [
        None,
        *["step-00000001"] * 2,
        None,
        "step-00000004",
    ]
    assert run("ls", manager.path(2))["base"] == anchor
    assert run("show", manager.path(2), "w")["rule"] == "step-00000001 + differences"
    told = usage(tmp_path)
    assert [s["freed"] for s in run("du", str(tmp_path))["steps"]] == [s.freed for s in told.steps]
    assert told.steps[0].freed == told.steps[1].freed < told.steps[0].nbytes
    array = open_checkpoint(manager.path(2))["w"]
    assert "differences" in layout.stored(array).how
    assert {c.state for c in layout.chunk_map(array, 0, 1, (0, 0), check=True).chunks} == {"sound"}
    shutil.rmtree(anchor)
    assert gc(tmp_path) == []
    notes = [s["note"] for s in run("ls", str(tmp_path))["steps"]]
    assert [bool(n) for n in notes] == [True, True, False, False]
    assert "step-00000001" in notes[0]
    assert [s["step"] for s in run("du", str(tmp_path))["steps"]] == [4, 5]
    unread = run("du", str(tmp_path))["unread"]
    assert [u["path"] for u in unread] == [manager.path(2), manager.path(3)]
    told = usage(tmp_path)
    assert sum(s.nbytes for s in (*told.steps, *told.unread)) == told.nbytes
    with contextlib.suppress(SystemExit):
        main(["du", str(tmp_path)], standalone_mode=False)
    shown = capsys.readouterr().out
    assert all(f"{u['path']}: its base step-00000001 is not there any more" in shown for u in unread)
    with pytest.warns(UserWarning, match="base step-00000001 is not there"):
        assert manager.latest() == manager.path(5)
    assert manager.steps() == [4, 5]
    with pytest.raises(errors.ParentChanged, match="step-00000001"):
        manager.restore(2)
    shutil.rmtree(manager.path(4))
    with pytest.raises(errors.NotACheckpoint, match=r"no step of .*step-00000005: its base step-00000004 is not there"):
        usage(tmp_path)
    (tmp_path / "step-00000009").symlink_to(tmp_path / "step-00000009")
    with pytest.raises(errors.NotACheckpoint, match="step-00000009: the link leads nowhere"):
        usage(tmp_path)
    manager.save(10, tree(1))
    assert [u.nbytes > 0 for u in usage(tmp_path).unread] == [True, True, True, False]


# ----- what must not pass ---------------------------------------------------------------------------------------------


def edit(path, change):
    file = path / "meshtape.json"
    body = json.loads(unsealed(file.read_bytes())[0])
    change(body)
    file.write_bytes(sealed(json.dumps(body).encode()))


def gone(home):
    shutil.rmtree(home / "step-00000001")


def replaced(home):
    gone(home)
    save(home / "step-00000001", tree(9))


def same_again(home):
    gone(home)
    save(home / "step-00000001", tree(1), step=1)


def a_file(home):
    gone(home)
    (home / "step-00000001").write_text("no checkpoint")


def alone(home):
    shutil.move(home / "step-00000002", home / "elsewhere")
    os.mkdir(home / "step-00000002")
    shutil.move(home / "elsewhere", home / "step-00000002" / "x")
    for f in (home / "step-00000002" / "x").iterdir():
        shutil.move(f, home / "step-00000002")
    gone(home)


def circle(home):
    edit(home / "step-00000002", lambda b: b.update(base=["step-00000002", b["base"][1]]))


def of_a_delta(home):
    identity = open_checkpoint(home / "step-00000003").manifest.identity
    edit(home / "step-00000002", lambda b: b.update(base=["step-00000003", identity]))


def says(**said):
    return lambda home: edit(home / "step-00000002", lambda b: b.update(said))


def array_says(**said):
    return lambda home: edit(home / "step-00000002", lambda b: b["arrays"][0].update(said))


def without_base(home):
    edit(home / "step-00000002", lambda b: b.pop("base"))


BAD = {
    "gone": (gone, errors.ParentChanged, "step-00000001.*not there"),
    "replaced": (replaced, errors.ParentChanged, "step-00000001.*another by now"),
    "replaced by the same tree": (same_again, errors.ParentChanged, "step-00000001.*another by now"),
    "a file": (a_file, errors.ParentChanged, "step-00000001"),
    "copied alone": (alone, errors.ParentChanged, "step-00000001"),
    "circle": (circle, errors.ParentChanged, "step-00000002"),
    "delta of a delta": (of_a_delta, errors.ParentChanged, "step-00000003 is a delta"),
    "above": (says(base=["../x", "meshtape:00000000"]), errors.CorruptCheckpoint, "refused"),
    "absolute": (says(base=["/etc", "meshtape:00000000"]), errors.CorruptCheckpoint, "refused"),
    "below": (says(base=["a/b", "meshtape:00000000"]), errors.CorruptCheckpoint, "not one name"),
    "null": (says(base=[None, "meshtape:00000000"]), errors.CorruptCheckpoint, "is no base"),
    "no text": (says(base=["a", 7]), errors.CorruptCheckpoint, "no base"),
    "one member": (says(base=["a"]), errors.CorruptCheckpoint, "base"),
    "no base": (without_base, errors.CorruptCheckpoint, "only there together"),
    "delta 1": (array_says(delta=1), errors.CorruptCheckpoint, "a delta is"),
    "not compressed": (array_says(compression=None), errors.CorruptCheckpoint, "a delta is"),
    "a later version": (says(version=99), errors.UnsupportedVersion, "99"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_delta_whose_base_is_not_the_one_is_refused(tmp_path, what):
    filled(tmp_path, 3)
    change, error, match = BAD[what]
    change(tmp_path)
    for use in (open_checkpoint, load, verify, lambda p: merge(p, tmp_path / "out")):
        with pytest.raises(error, match=match):
            use(tmp_path / "step-00000002")
    assert not (tmp_path / "out").exists()


def test_bases_that_cannot_be_are_refused_before_anything_is_written(tmp_path):
    filled(tmp_path, 2)
    save(tmp_path / "other" / "a", tree(1))
    target = tmp_path / "step-00000003"
    for base, options, match in [
        ("step-00000002", {}, "a delta itself"),
        ("step-00000003", {}, "no other checkpoint"),
        ("other/a", {}, "in the folder"),
        ("step-00000001", {"layout": "dual"}, "leave out base="),
    ]:
        with pytest.raises(errors.CheckpointError, match=match):
            save(target, tree(3), base=tmp_path / base, **options)
    with pytest.raises(errors.NotACheckpoint):
        save(target, tree(3), base=tmp_path / "nothing")
    with pytest.raises(errors.CheckpointError, match="anchor_every"):
        CheckpointManager(tmp_path, anchor_every=0)
    assert not target.exists()
    # Another shape or dtype is stored plainly, and without any delta it is a plain checkpoint of a version that is read
    # everywhere.
    save(target, {"w": W[1:], "b": [B.astype(np.float32)]}, base=tmp_path / "step-00000001")
    assert open_checkpoint(target).base is None
    assert json.loads((target / "meshtape.json").read_text())["version"] == 1


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_a_base_is_not_replaced_under_its_deltas(tmp_path, where):
    home = "memory://deltas/replaced" if where == "memory" else str(tmp_path / "run")
    manager = filled(home, 3, pack=False)
    save(f"{home}/mine", tree(4), base=manager.path(1), pack=False)
    source = save(tmp_path / "other", tree(9)).path
    for replace in (
        lambda: save(manager.path(1), tree(1), step=1, overwrite=True),
        lambda: convert(source, manager.path(1), format="zarr", overwrite=True),
        lambda: save_async(manager.path(1), tree(1), overwrite=True).wait(),
    ):
        with pytest.raises(
            errors.CheckpointExists, match=r"step-00000002, step-00000003, mine, which .*delete\(step\)"
        ):
            replace()
    assert bases(manager) == {1: None, 2: 1, 3: 1}
    shutil.rmtree(tmp_path / "run" / "mine") if where == "disk" else object_commit.discard(f"{home}/mine")
    save(manager.path(3), tree(3), step=3, overwrite=True, base=manager.path(1), pack=False)  # neither a delta,
    with pytest.warns(UserWarning, match="below step 3"):
        manager.save(1, tree(1), overwrite=True)  # nor one whose deltas get another base first
    assert bases(manager) == {1: 2, 2: None, 3: 2}
    # One that comes while the other is written is found before that takes the place of its base.
    for step in (1, 3):
        save(manager.path(step), tree(step), step=step, overwrite=True)
    folders = atomic_directory.Folder if where == "disk" else object_commit.ObjectFolder
    commit = folders.commit

    def late(folder):
        patch.undo()
        save(manager.path(2), tree(2), step=2, overwrite=True, base=manager.path(1), pack=False)
        commit(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "commit", late)
        with pytest.raises(errors.CheckpointExists, match="the base of the deltas step-00000002"):
            save(manager.path(1), tree(7), step=7, overwrite=True)
    assert bases(manager) == {1: None, 2: 1, 3: None}


def test_other_readers_refuse_it_by_name(tmp_path):
    zarr = pytest.importorskip("zarr")
    filled(tmp_path, 2)
    assert json.loads((tmp_path / "step-00000002/meshtape.json").read_text())["version"] == 4
    with pytest.raises(Exception, match=r"meshtape\.delta"):
        zarr.open_array(tmp_path / "step-00000002" / "w", mode="r")
    (tmp_path / "step-00000002" / "meshtape.json").unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match=r"meshtape\.json is missing"):
        load(tmp_path / "step-00000002")
    assert zarr.open_array(tmp_path / "step-00000001" / "w", mode="r")[3, 4] == tree(1)["w"][3, 4]


@pytest.mark.parametrize("every", [307, pytest.param(7, marks=pytest.mark.slow)], ids=["some bytes", "many bytes"])
def test_every_flipped_byte_of_a_delta_and_of_its_base_is_found(tmp_path, every):
    filled(tmp_path, 2)
    files = [f for f in sorted(tmp_path.rglob("*")) if f.is_file() and f.name != "meshtape-branch.json"]
    rng = np.random.default_rng(0)
    for file in files:
        data = file.read_bytes()
        for at in range(int(rng.integers(every)) % len(data), len(data), every):
            file.write_bytes(data[:at] + bytes([data[at] ^ 1 << int(rng.integers(8))]) + data[at + 1 :])
            with pytest.raises(errors.CheckpointError):
                verify(tmp_path / "step-00000002")
            with contextlib.suppress(errors.CheckpointError):
                assert step_of(tmp_path / "step-00000002") == 2
        file.write_bytes(data)
    verify(tmp_path / "step-00000002")


# ----- kills and races ------------------------------------------------------------------------------------------------


def begin(home):
    filled(home, 3, every=9)


WORKS = {
    "save": (lambda home: CheckpointManager(home, keep=None, anchor_every=9).save(4, tree(4)), 1),
    "delete": (lambda home: CheckpointManager(home, anchor_every=9).delete(1), 2),
    "overwrite": (lambda home: CheckpointManager(home, keep=None).save(1, tree(1), overwrite=True), 2),
    "rotate": (lambda home: CheckpointManager(home, keep=1, anchor_every=3).save(4, tree(4)), 1),
}


@pytest.mark.parametrize(
    ("every", "exchange"),
    [(31, True), *(pytest.param(1, e, marks=pytest.mark.slow) for e in (True, False))],
    ids=["some", "every operation", "every operation, two renames"],
)
@pytest.mark.parametrize("what", WORKS)
def test_killed_at_any_operation(kit, quick, what, exchange, every):
    work, first = WORKS[what]
    for n in range(1, 2000, every):
        home = quick / str(n)
        begin(home)
        killed = kit.die_at(n, lambda home=home: work(home), exchange)
        manager = CheckpointManager(home, keep=None, anchor_every=9)
        steps = bases(manager)
        if what != "rotate":
            assert set(range(first, 4)) <= set(steps), steps
        assert steps.keys() >= {4} or steps.keys() >= {2, 3}, steps
        manager.save(5, tree(5))  # clears up, and goes on
        assert 5 in bases(manager)
        assert [e.name for e in home.iterdir() if not e.name.startswith("step-") or "." in e.name] == []
        if not killed:
            break
    assert n > 20


def keep_saving(home, stop):
    for step in range(2, 10**6):
        if stop.is_set():
            return
        manager = CheckpointManager(home, keep=4, anchor_every=3)
        manager.save(step, tree(step))
        if step % 3 == 2:
            manager.delete(manager.steps()[0])


@pytest.mark.parametrize("seconds", [1, pytest.param(60, marks=pytest.mark.slow)], ids=["short", "long"])
def test_readers_beside_a_writer_that_deletes_bases(quick, seconds):
    CheckpointManager(quick, anchor_every=3).save(1, tree(1))
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    process = context.Process(target=keep_saving, args=(quick, stop))
    process.start()
    seen, refused, until = set(), [], time.monotonic() + seconds
    try:
        reader = CheckpointManager(quick)
        while time.monotonic() < until or len(seen) < 5:
            assert process.is_alive()
            with contextlib.suppress(errors.NotACheckpoint):  # it was rotated away
                step = int(reader.restore()["n"])
                paths = [c.path for c in reader._complete()]
                assert paths
                for path in paths[-3:]:
                    try:
                        ckpt = open_checkpoint(path)
                        held = np.asarray(ckpt["w"][3]), int(ckpt["n"][...])
                        assert np.array_equal(held[0], tree(held[1])["w"][3])
                        seen.add(step_of(path))
                    except errors.CheckpointError as e:
                        refused.append(type(e))
                assert np.array_equal(tree(step)["w"], tree(step)["w"])
    finally:
        stop.set()
        process.join(60)
        process.kill()
    assert set(refused) <= {errors.CheckpointReplaced, errors.NotACheckpoint, errors.IncompleteCheckpoint}, refused
    for path in [c.path for c in CheckpointManager(quick)._complete()]:
        verify(path)


# ----- a run of ours --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.2), ("float32", 0.7)])
def test_fine_tuning_of_a_decoder(tmp_path, monkeypatch, dtype, most):
    monkeypatch.undo()  # chunks as they are
    chunk_grid.whole_grid.cache_clear()
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from storage_deltas import ANCHOR, run

    manager = CheckpointManager(tmp_path, keep=None, anchor_every=ANCHOR, compression="weights")
    for step, params, state in run(np.dtype(dtype)):
        manager.save(step, {"p": params} if dtype == "bfloat16" else {"p": params, "s": state})
    files = [f for f in tmp_path.rglob("c*") if f.is_file()]  # without the metadata, which weigh in so small a model
    assert sum(f.stat().st_size for f in files) <= most * sum(s.total_size for s in usage(tmp_path).steps)
    assert verify(manager.latest()).arrays


# ----- several managers, and damage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pause", [0.0, 0.005, 0.02])
def test_a_save_beside_a_deletion_of_its_anchor(quick, pause):
    home, large = quick / "run", np.random.default_rng(0).normal(size=40_000)
    a, b = CheckpointManager(home, keep=None, anchor_every=10, asynchronous=True), CheckpointManager(home, keep=None)
    for step in (1, 2):
        a.save(step, {"w": large + step})
    a.wait()
    handle = a.save(3, {"w": large + 3})
    time.sleep(pause)
    b.delete(1)
    handle.wait()
    assert a.steps() == [2, 3]
    for step in (2, 3):
        assert np.array_equal(np.asarray(load(a.path(step))["w"]), large + step)


def test_a_damaged_anchor_stops_no_run(quick):
    manager = filled(quick / "run", steps=2, every=10)
    shard = next(
        p for p in Path(manager.path(1)).rglob("*") if p.is_file() and p.parent.name == "w" and p.name[0] == "c"
    )
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    with pytest.warns(UserWarning, match="stored plainly, as its base cannot be read"):
        manager.save(3, tree(3))
    manager.save(4, tree(4))
    assert [step_of(manager.path(s)) for s in (3, 4)] == [3, 4]
    assert open_checkpoint(manager.path(3)).base is None
    assert open_checkpoint(manager.path(4)).base.path == manager.path(3)


@pytest.mark.parametrize("read", [load, verify, open_checkpoint])
def test_a_run_whose_deltas_lost_their_anchor_names_it(tmp_path, read):
    """Or a step that can be opened, where there is one."""
    manager = CheckpointManager(tmp_path, keep=None, anchor_every=3)
    for step in range(1, 7):
        manager.save(step, tree(step))
    shutil.rmtree(manager.path(4))
    with pytest.raises(errors.NotACheckpoint, match=r"it holds checkpoints, such as .*step-00000003$"):
        read(tmp_path)
    shutil.rmtree(manager.path(1))
    lost = f"no step of it can be opened: {manager.path(6)}: its base step-00000004 is not there any more"
    with pytest.raises(errors.NotACheckpoint, match=lost):
        read(tmp_path)
    with pytest.raises(
        errors.CheckpointKeyError, match=r"can be opened \(.*: its base step-0000000\d is not there any"
    ):
        virtual.mean(tmp_path)


def test_deltas_that_lost_their_base_are_deleted_by_name(quick):
    manager = filled(quick / "run", steps=4, every=2)
    shutil.rmtree(manager.path(1))
    assert manager.steps() == [3, 4]
    manager.delete(2)
    assert not Path(manager.path(2)).exists()
    with pytest.raises(errors.NotACheckpoint):
        manager.delete(2)


@pytest.mark.parametrize("owner", ["dead", "foreign", "foreign and silent", "of this process"])
def test_turns_in_an_object_store(monkeypatch, owner):
    home = f"memory://turns/{owner.replace(' ', '-')}"
    manager = filled(home, 3, every=9, pack=False)
    monkeypatch.setattr(anchor_lock, "PATIENCE", 0.3)
    there = store.at(f"{home}/{anchor_lock._FOLDER}")
    assert there.files() == []
    there.put("notes", b"of nobody's")
    who = {"dead": f"{owners.host()}-{2**22 + 1}", "of this process": f"{owners.host()}-{os.getpid()}"}
    held = who.get(owner, "0123abcd-89abcdef-7")
    if owner.endswith("silent"):
        monkeypatch.setattr(anchor_lock, "_SILENCE", -60.0)
    for kind, number in (("shared", 4), ("alone", 5)):
        with contextlib.ExitStack() as stack:
            name = f"{kind}-{held}-00000000"
            there.put(name, b"")
            if lives := owner in ("foreign", "of this process"):
                monkeypatch.setattr(anchor_lock, "_mine", {name})
                stack.enter_context(pytest.raises(errors.CheckpointError, match="another saves deltas or deletes"))
            manager.delete(manager.steps()[0])
        if lives and kind == "alone":
            with pytest.warns(UserWarning, match="stored plainly, .* another has been deleting"):
                manager.save(number, tree(number))
        else:
            manager.save(number, tree(number))
        assert set(there.files()) == {"notes", *[name] * lives}
        there.delete([name])
        assert (bases(manager)[number] is None) is (lives and kind == "alone")
    assert len(manager.steps()) == (5 if lives else 3)


def test_a_deleter_that_lost_its_turn_while_it_stood_still_deletes_nothing(monkeypatch):
    home = "memory://turns/lost"
    run = filled(home, 3, every=9, pack=False)
    there, before = store.at(f"{home}/{anchor_lock._FOLDER}"), run.steps()
    monkeypatch.setattr(
        manager_module, "release", lambda *_: there.delete([n for n in there.files() if n.startswith("alone")])
    )
    with pytest.raises(errors.CheckpointError, match="was not deleted: this process stood still"):
        run.delete(before[0])
    assert run.steps() == before


def test_a_lock_that_another_does_not_give_back_ends_the_wait(quick, monkeypatch):
    manager = filled(quick / "run", steps=3, every=3)
    monkeypatch.setattr(anchor_lock, "PATIENCE", 0.05)
    with anchor_lock.locked(str(quick / "run"), shared=True):
        with pytest.raises(errors.CheckpointError, match="another saves deltas"):
            manager.delete(1)
        manager.save(4, tree(4))  # savers share it
    assert manager.steps() == [1, 2, 3, 4]


def test_of_two_saves_of_one_step_the_later_one_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the lock of the folder with others, and must not wait for itself to have it alone."""
    run = CheckpointManager(tmp_path / "run", keep=None, anchor_every=4)
    run.save(1, {"w": np.arange(2000.0, dtype=np.float32)})
    swap, late = directory_commit._swap_in, tmp_path / "run/step-00000002"

    def after_another(*args: Any) -> None:
        monkeypatch.setattr(directory_commit, "_swap_in", swap)
        another = threading.Thread(target=save, args=(str(late), {"w": np.ones(3)}))
        another.start()
        another.join()
        swap(*args)

    monkeypatch.setattr(directory_commit, "_swap_in", after_another)
    with pytest.raises(errors.CheckpointExists):
        run.save(2, {"w": np.arange(2000.0, dtype=np.float32) + 1e-3})
    assert load(str(late))["w"].tolist() == [1, 1, 1]
    run.save(3, {"w": np.ones(3)})
    assert run.steps() == [1, 2, 3]
