"""Convert and reshard: the same bytes for any memory and threads, and after any interruption."""

import errno
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import zarr

from meshtape import Shard, errors
from meshtape.storage import convert, load, merge, open_checkpoint, reshard, save, save_safetensors, verify
from meshtape.storage.commit.contents import JOURNAL
from meshtape.storage.stores.filesystem import Files, try_lock, using
from meshtape.storage.transform import transfer


def content(root):
    """Every file below a directory."""
    out = {}
    for home, _, files in os.walk(root):
        for file in files:
            path = os.path.join(home, file)
            with open(path, "rb") as f:
                out[os.path.relpath(path, root)] = f.read()
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory, kit):
    """A checkpoint with several windows an array at the least memory limit."""
    where = tmp_path_factory.mktemp("source") / "c"
    host = kit.Host({"x": 2, "y": 2})
    tree = {
        "a": kit.split(kit.random(np.dtype("f4"), (300, 500)), kit.Sharding(host, (0, 1))),
        "b": [kit.random(np.dtype("f8"), (90, 70), i) for i in range(2)],
        "s": np.array(3.5),
        "none": np.ones((0, 3), "i4"),
        "epoch": 4,
    }
    save(where, tree, step=11, metadata={"lr": 0.1})
    return where


LAYOUT = {"mesh": {"d": 2, "m": 3}, "shardings": {"a": {"m": 1, "d": 0}, "b.*": {"d": "Shard(0)", "m": "Replicate()"}}}
SMALL = {"memory_limit": 200_000, "threads": 1}


def test_every_dtype_and_shape_through_both_formats(kit, tmp_path):
    tree = {f"{d.name}{s}": kit.random(d, s, i) for i, d in enumerate(kit.DTYPES) for s in kit.SHAPES}
    save(tmp_path / "c", tree)
    fit = {n: a for n, a in tree.items() if a.dtype != np.dtype("c16")}
    report = convert(tmp_path / "c", tmp_path / "hf", format="safetensors", keys=list(fit), max_shard_bytes=1000)
    assert report.arrays == len(fit)
    assert len(report.files) > 3
    convert(tmp_path / "hf", tmp_path / "z", format="zarr")
    verify(tmp_path / "z")
    got = load(tmp_path / "z")
    assert all(kit.same(got[n], a) for n, a in fit.items())
    reshard(tmp_path / "c", tmp_path / "c2")
    got = load(tmp_path / "c2")
    assert all(kit.same(got[n], a) for n, a in tree.items())


def test_the_tree_its_values_step_and_metadata_stay(kit, source, tmp_path):
    report = reshard(source, tmp_path / "c", **LAYOUT)
    verify(tmp_path / "c")
    ckpt = open_checkpoint(tmp_path / "c")
    assert (ckpt.step, ckpt.metadata, ckpt.meshes) == (11, {"lr": 0.1}, [{"d": 2, "m": 3}])
    assert ckpt["a"].sharding_text == "d=Shard(0), m=Shard(1)"
    assert ckpt["s"].sharding_text is None
    got, before = load(tmp_path / "c"), load(source)
    assert got["epoch"] == 4
    assert kit.same(got["b"][1], before["b"][1])
    assert kit.same(got["a"], before["a"])
    assert report.total_size == ckpt.nbytes
    assert zarr.open(str(tmp_path / "c"))["a"].shards == (150, 168) or zarr.open(str(tmp_path / "c"))["a"].shape == (
        300,
        500,
    )


def test_the_files_are_those_that_the_target_mesh_would_save(kit, source, tmp_path):
    """Byte for byte, manifest included."""
    held = load(source)
    host = kit.Host({"d": 2, "m": 3})
    tree = {
        "a": kit.split(np.asarray(held["a"]), kit.Sharding(host, (0, 1))),
        "b": [kit.split(np.asarray(b), kit.Sharding(host, (0, None))) for b in held["b"]],
        "s": np.asarray(held["s"]),
        "none": np.asarray(held["none"]),
        "epoch": 4,
    }
    save(tmp_path / "saved", tree, step=11, metadata={"lr": 0.1})
    reshard(source, tmp_path / "resharded", **LAYOUT)
    assert content(tmp_path / "saved") == content(tmp_path / "resharded")


@pytest.mark.parametrize("format", ["zarr", "safetensors"])
def test_memory_and_threads_change_nothing(source, tmp_path, format):
    options = LAYOUT if format == "zarr" else {"max_shard_bytes": 400_000}
    expected = None
    for i, (limit, threads) in enumerate([(1 << 30, 1), (200_000, 1), (1, 3), (1_000_000, 4)]):
        out = tmp_path / str(i)
        convert(source, out, format=format, memory_limit=limit, threads=threads, **options)
        expected = content(out) if expected is None else expected
        assert content(out) == expected


def test_selection_dtype_and_rules(kit, tmp_path):
    w = kit.random(np.dtype("f4"), (6, 8)).astype("f4")
    save(tmp_path / "c", {"m": {"q": w, "k": w[:2]}, "opt": {"t": np.array(3)}, "n": np.arange(3), "epoch": 1})
    convert(
        tmp_path / "c",
        tmp_path / "z",
        format="zarr",
        rules="m.q, m.k -> m.qk, concat(axis=0)",
        drop=["opt.*", "epoch"],
        dtype="bfloat16",
    )
    got = load(tmp_path / "z")
    assert set(got) == {"m.qk", "n"}
    with np.errstate(all="ignore"):
        assert kit.same(got["m.qk"], np.concatenate([w, w[:2]]).astype(ml_dtypes.bfloat16))
    assert kit.same(got["n"], np.arange(3))
    merge(tmp_path / "c", tmp_path / "hf", rules="m.q -> q, permute()", keys=["q", "n"], drop="n")
    assert kit.same(load(tmp_path / "hf")["q"], w.T)
    nested = tmp_path / "nested"
    convert(tmp_path / "c", nested, format="zarr", drop="m.k")
    assert set(load(nested)["m"]) == {"q"}


def test_a_plain_zarr_group_and_a_safetensors_file_as_sources(kit, tmp_path):
    a = np.arange(60.0).reshape(6, 10)
    group = zarr.create_group(str(tmp_path / "z"))
    group.create_array("x/w", shape=a.shape, dtype=a.dtype, chunks=(4, 3))[...] = a
    convert(tmp_path / "z", tmp_path / "c", format="zarr", mesh={"m": 4}, shardings={"*": {"m": 1}})
    assert kit.same(load(tmp_path / "c")["x/w"], a)
    save_safetensors(tmp_path / "f.safetensors", {"w": a})
    reshard(tmp_path / "f.safetensors", tmp_path / "r", mesh={"m": 4}, shardings={"*": {"m": 0}})
    assert len(list((tmp_path / "r" / "w").iterdir())) == 4  # blocks of 2, 2, 2 and none, and zarr.json
    assert kit.same(load(tmp_path / "r")["w"], a)


def test_shardings_by_function(kit, source, tmp_path):
    host = kit.Host({"p": 3})

    def choose(path, shape, dtype):
        return kit.Sharding(host, (0,)) if path[0] == "b" else {"m": 1} if path == ("a",) else None

    reshard(source, tmp_path / "c", mesh={"m": 5}, shardings=choose)
    ckpt = open_checkpoint(tmp_path / "c")
    assert ckpt["b.0"].sharding_text == "p=Shard(0)"
    assert ckpt["a"].sharding_text == "m=Shard(1)"
    assert ckpt.meshes == [{"m": 5}, {"p": 3}]
    verify(tmp_path / "c")


def test_mistakes_are_refused_before_writing(source, tmp_path):
    for error, match, options in [
        (errors.ReshardError, "no axis 'q'", {"mesh": {"m": 2}, "shardings": {"a": {"q": 1}}}),
        (errors.ReshardError, "cannot split dimension 2", {"mesh": {"m": 2}, "shardings": {"a": {"m": 2}}}),
        (errors.ReshardError, "is no placement", {"mesh": {"m": 2}, "shardings": {"a": {"m": "Shard"}}}),
        (errors.ReshardError, "dimension 7", {"mesh": {"m": 2}, "shardings": {"a": {"m": Shard(7)}}}),
        (errors.CheckpointKeyError, r"nothing matches \['z'\]", {"mesh": {"m": 2}, "shardings": {"z": {"m": 0}}}),
        (errors.CheckpointError, "need mesh=", {"shardings": {"a": {"m": 0}}}),
        (errors.CheckpointError, "positive length", {"mesh": {"m": 0}}),
        (errors.CheckpointError, "must be a positive whole number", {"threads": 0}),
        (errors.CheckpointError, "not int32", {"dtype": "int32"}),
        (errors.CheckpointKeyError, "nothing matches", {"drop": ["zz.*"]}),
        (errors.RuleMatchError, "'zz'", {"rules": "zz -> y"}),
    ]:
        with pytest.raises(error, match=match):
            reshard(source, tmp_path / "c", **options)
    with pytest.raises(errors.CheckpointError, match="format must be"):
        convert(source, tmp_path / "c", format="pickle")
    with pytest.raises(errors.CheckpointError, match="no block layout"):
        convert(source, tmp_path / "c", format="safetensors", mesh={"m": 2})
    with pytest.raises(errors.CheckpointError, match="max_shard_bytes is for"):
        convert(source, tmp_path / "c", format="zarr", max_shard_bytes=5)
    with pytest.raises(errors.CheckpointError, match="is the source"):
        reshard(source, source, overwrite=True)
    save(tmp_path / "d", {"w": np.ones(2)})
    with pytest.raises(errors.CheckpointExists):
        reshard(source, tmp_path / "d")
    reshard(source, tmp_path / "d", overwrite=True)
    assert "a" in open_checkpoint(tmp_path / "d")
    assert sorted(e.name for e in tmp_path.iterdir()) == ["d"]


# ----- interruption ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["zarr", "safetensors", "dcp"])
def test_killed_at_any_operation_and_called_again(kit, source, tmp_path, format):
    options = {**SMALL, **(LAYOUT if format == "zarr" else {"max_shard_bytes": 400_000})}
    convert(source, tmp_path / "expected", format=format, **options)
    expected = content(tmp_path / "expected")
    resumed = set()
    counting = kit.Counting(0, None)
    with using(counting):
        convert(source, tmp_path / "0" / "c", format=format, **options)
    # Evenly over all of it, and the steps at its end, which are others.
    last = counting.done
    for n in sorted({*range(1, last, last // 8), *range(last - 5, last + 2, 2)}):
        out = tmp_path / str(n) / "c"
        killed = kit.die_at(n, lambda out=out: convert(source, out, format=format, **options))
        if out.exists():
            assert content(out) == expected
        else:
            resumed.add(convert(source, out, format=format, **options).resumed)
            assert content(out) == expected
        assert [e.name for e in out.parent.iterdir()] == ["c"]
        assert killed == (n <= last)
    total = open_checkpoint(source).nbytes
    assert 0 in resumed
    assert any(0 < r < total for r in resumed)  # some went on in the middle
    if format != "zarr":
        assert total in resumed  # and some had only the end left


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_replacing_killed_at_any_operation(kit, source, tmp_path, exchange):
    saw = set()
    for n in range(1, 2000, 5):
        out = tmp_path / str(n) / "c"
        save(out, {"old": np.ones(2)})
        work = lambda out=out: convert(source, out, format="safetensors", overwrite=True)  # noqa: E731
        killed = kit.die_at(n, work, exchange)
        names = set(open_checkpoint(out))
        assert names in ({"old"}, {"a", "b.0", "b.1", "s", "none"})
        saw.add("old" in names)
        work()
        assert "a" in open_checkpoint(out)
        assert [e.name for e in out.parent.iterdir()] == ["c"]
        if not killed:
            break
    assert saw == {True, False}


class Failing(Files):
    def __init__(self, after, code):
        self.left, self.code = after, code

    def write(self, fd, buffers, offset):
        self.left -= 1
        if self.left < 0:
            raise OSError(self.code, os.strerror(self.code))
        return super().write(fd, buffers, offset)


def interrupted(source, out, after=6, code=errno.ENOSPC, **options):
    with using(Failing(after, code)), pytest.raises(OSError):
        reshard(source, out, **{**SMALL, **LAYOUT, **options})


def test_a_full_disk_keeps_what_is_there_and_progress_goes_on_from_it(source, tmp_path):
    with using(Failing(6, errno.ENOSPC)), pytest.raises(errors.StorageFull):
        reshard(source, tmp_path / "c", **SMALL, **LAYOUT)
    assert [e.name for e in tmp_path.iterdir()] == ["c.part"]
    with pytest.raises(errors.NotACheckpoint):
        open_checkpoint(tmp_path / "c")
    seen = []
    report = reshard(source, tmp_path / "c", **SMALL, **LAYOUT, progress=lambda *x: seen.append(x))
    total = open_checkpoint(source).nbytes
    assert 0 < report.resumed < total
    assert seen[0] == (report.resumed, total)
    assert seen[-1] == (total, total)
    assert [a for a, _ in seen] == sorted(a for a, _ in seen)
    verify(tmp_path / "c")


def test_what_was_damaged_meanwhile_is_done_again(kit, source, tmp_path):
    interrupted(source, tmp_path / "a")
    interrupted(source, tmp_path / "b")
    part = tmp_path / "b.part"
    journal = part / transfer.JOURNAL
    with journal.open("ab") as f:
        f.write(b"[3, [1,2\nnonsense\n[-1, []]\n[99999, []]\n[true, 0]\n[1")
    shard = next(p for p in sorted((part / "a").iterdir()) if p.stat().st_size > 50)
    data = bytearray(shard.read_bytes())
    data[20] ^= 1
    shard.write_bytes(data)
    a = reshard(source, tmp_path / "a", **SMALL, **LAYOUT)
    b = reshard(source, tmp_path / "b", **SMALL, **LAYOUT)
    assert b.resumed < a.resumed
    assert content(tmp_path / "a") == content(tmp_path / "b")


@pytest.mark.parametrize(
    "options", [{}, {"compression": "zstd"}, {"format": "safetensors"}, {"format": "dcp"}], ids=str
)
def test_files_that_grew_meanwhile_have_their_lengths_again(source, tmp_path, options):
    options = {"format": "zarr", **SMALL, **options}
    convert(source, tmp_path / "expected", **options)
    with using(Failing(160 if options["format"] == "dcp" else 9, errno.ENOSPC)), pytest.raises(errors.StorageFull):
        convert(source, tmp_path / "c", **options)
    grown = [p for p in (tmp_path / "c.part").rglob("*") if p.is_file() and p.name != transfer.JOURNAL]
    for path in grown:
        with path.open("ab") as f:
            f.write(bytes(100))
    report = convert(source, tmp_path / "c", **options)
    assert report.resumed > 0 or "compression" in options  # a compressed shard that grew is made anew
    assert grown
    assert content(tmp_path / "c") == content(tmp_path / "expected")
    verify(tmp_path / "c")


def test_a_merge_tells_what_it_went_on_from(source, tmp_path):
    with using(Failing(9, errno.ENOSPC)), pytest.raises(errors.StorageFull):
        merge(source, tmp_path / "c", **SMALL)
    assert merge(source, tmp_path / "c", **SMALL).resumed > 0
    assert merge(source, tmp_path / "d", **SMALL).resumed == 0


def test_another_plan_or_a_changed_source_starts_anew(kit, tmp_path):
    src = tmp_path / "src"
    save(src, {"w": kit.random(np.dtype("f8"), (300, 300))})
    options = {"mesh": {"d": 2}, "shardings": {"w": {"d": 0}}}
    interrupted(src, tmp_path / "c", 3, **options)
    assert reshard(src, tmp_path / "c", **SMALL, mesh={"d": 3}, shardings={"w": {"d": 0}}).resumed == 0
    interrupted(src, tmp_path / "d", 3, **options)
    new = kit.random(np.dtype("f8"), (300, 300), 1)
    save(src, {"w": new}, overwrite=True)
    assert reshard(src, tmp_path / "d", **{**SMALL, **options}).resumed == 0
    assert kit.same(load(tmp_path / "d")["w"], new)


def test_damage_in_the_source_removes_the_part(kit, tmp_path):
    save(tmp_path / "c", {"w": kit.random(np.dtype("f8"), (300, 300))})
    shard = tmp_path / "c" / "w" / "c.0.0"
    data = bytearray(shard.read_bytes())
    data[-2000] ^= 1
    shard.write_bytes(data)
    for format in ("zarr", "safetensors"):
        with pytest.raises(errors.CorruptCheckpoint, match="key 'w'"):
            convert(tmp_path / "c", tmp_path / "x", format=format, **SMALL)
    assert [e.name for e in tmp_path.iterdir()] == ["c"]


def test_what_does_not_read_back_is_not_committed(source, tmp_path):
    class Lying(Files):
        def write(self, fd, pieces, offset):
            # Some bytes of every large file are not what was written.
            n = super().write(fd, pieces, offset)
            if os.fstat(fd).st_size > 100_000:
                os.pwrite(fd, b"\x01\x02\x03\x04\x05\x06\x07\x08", 70_000)
            return n

    with using(Lying()), pytest.raises(errors.CorruptCheckpoint, match="does not read back"):
        convert(source, tmp_path / "c", format="safetensors")
    assert list(tmp_path.iterdir()) == []


def test_two_at_once_and_things_in_the_way(source, tmp_path):
    (tmp_path / "x.part").mkdir()
    (tmp_path / "x.part" / "thesis.tex").write_text("x")
    with pytest.raises(errors.CheckpointExists, match="in the way"):
        reshard(source, tmp_path / "x")
    assert (tmp_path / "x.part" / "thesis.tex").read_text() == "x"
    inner = []

    def progress(done, total):
        if not inner:
            inner.append(None)
            with pytest.raises(errors.CheckpointError, match="another process is working"):
                reshard(source, tmp_path / "c", **SMALL)
            inner.append("refused")

    reshard(source, tmp_path / "c", **SMALL, progress=progress)
    assert inner == [None, "refused"]
    verify(tmp_path / "c")


def test_a_part_that_another_process_makes_just_now_is_that_of_a_process(source, tmp_path, monkeypatch):
    (tmp_path / "c.part").mkdir()

    def listing(folder, plain=os.listdir):
        if str(folder).endswith("c.part"):  # between the look for a journal and the listing
            monkeypatch.setattr(os, "listdir", plain)
            fd = os.open(tmp_path / "c.part" / JOURNAL, os.O_RDWR | os.O_CREAT)
            assert try_lock(fd)
            opened.append(fd)
        return plain(folder)

    opened = []
    monkeypatch.setattr(os, "listdir", listing)
    try:
        with pytest.raises(errors.CheckpointError, match="another process is working"):
            reshard(source, tmp_path / "c")
    finally:
        list(map(os.close, opened))
    assert opened


def test_a_part_that_is_being_removed_is_that_of_a_process(source, tmp_path):
    class Watched(Files):
        def unlink(self, path):
            super().unlink(path)
            if watching and JOURNAL in os.listdir(tmp_path / "c.part"):
                watching.append(path)
                with pytest.raises(errors.CheckpointError, match="another process is working"):
                    reshard(source, tmp_path / "c", **SMALL)

    def progress(done, total):
        if done:
            watching.append("")
            raise errors.CorruptCheckpoint("as damage in the source is")

    watching = []
    with using(Watched()), pytest.raises(errors.CorruptCheckpoint, match="as damage"):
        reshard(source, tmp_path / "c", **SMALL, progress=progress)
    assert len(watching) > 2
    assert [p.name for p in tmp_path.iterdir()] == []


SCRIPT = """
import sys
import numpy as np, google_crc32c, zarr
from meshtape.storage import convert, save, open_checkpoint
from meshtape.storage.format.zarr_dtypes import register
import tempfile
home = tempfile.mkdtemp()
save(home + "/warm", {"w": np.ones((2, 2), "f4")})
convert(home + "/warm", home + "/x", format="zarr")
def peak():  # in kB; getrusage would count the process that started this one
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
convert(sys.argv[1], sys.argv[2], format="zarr", mesh={"m": 2}, shardings={"*": {"m": 1}},
        rules="w -> w, permute(), cast(bfloat16)", memory_limit=16 << 20)
print(peak() - before)
"""


def test_memory_is_bounded_through_a_transpose_a_cast_and_a_reshard(kit, tmp_path):
    w = np.zeros((5600, 5600), "f4")
    w[::7, ::5] = 3
    save(tmp_path / "c", {"w": kit.split(w, kit.Sharding(kit.Host({"x": 4}), (1,)))})
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "c"), str(tmp_path / "z")],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert int(done.stdout) < (16 + 60) << 10  # kB; the array has 125 MB
    assert np.array_equal(open_checkpoint(tmp_path / "z")["w"][2000:2100].astype("f4"), w.T[2000:2100])


@pytest.mark.parametrize("kind", ["safetensors", "npy", "zarr"])
def test_a_source_without_checksums_that_is_written_in_place_with_its_old_time_starts_anew(tmp_path, kind):
    src, old, new = tmp_path / f"s.{kind}", np.zeros(90_000), np.ones(90_000)
    if kind == "safetensors":
        save_safetensors(src, {"w": old}, checksums=False)
        file = src
    elif kind == "npy":
        np.save(src, old)
        file = src
    else:
        zarr.create_array(src, shape=old.shape, dtype="f8", chunks=old.shape, compressors=None, fill_value=5)[...] = old
        file = src / "c" / "0"
    with using(Failing(4, errno.ENOSPC)), pytest.raises(errors.StorageFull):
        convert(src, tmp_path / "c", format="zarr", **SMALL)
    then, data = file.stat(), file.read_bytes()
    assert data[-new.nbytes :] == old.tobytes()
    with file.open("r+b") as f:
        f.seek(len(data) - new.nbytes)
        f.write(new.tobytes())
    os.utime(file, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns, file.stat().st_ino) == (
        then.st_size,
        then.st_mtime_ns,
        then.st_ino,
    )
    assert convert(src, tmp_path / "c", format="zarr", **SMALL).resumed == 0
    (got,) = load(tmp_path / "c").values()
    np.testing.assert_array_equal(np.asarray(got), new)
