"""Zarr arrays larger than the memory that is allowed: computed block by block, with the numbers of the whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr

import meshtape as mt
from meshtape import errors
from meshtape.parallel.transforms import stream
from meshtape.storage.checkpoint.checkpoint import StoredArray


@pytest.fixture
def stored(tmp_path):
    host = np.random.default_rng(0).normal(size=(101, 6))
    zarr.create_array(str(tmp_path / "x"), shape=host.shape, chunks=(8, 6), dtype=host.dtype)[...] = host
    return host, str(tmp_path / "x")


def where(tmp_path, name="out"):
    return str(tmp_path / name)


@pytest.mark.parametrize("sizes", [{"a": 1}, {"a": 3}, {"a": 2, "b": 2}])
@pytest.mark.parametrize("memory", [1_200, 10_000, "1 MiB"])
def test_elementwise_work_and_reductions(tmp_path, stored, sizes, memory):
    host, path = stored
    mesh = mt.Mesh(sizes)
    x = mt.from_zarr(path, mesh, a=mt.Shard(0))

    def fn(x):
        y = mt.tanh(x) * 2
        return {"y": y, "sum": mt.sum(y, axis=0), "max": mt.max(x), "mean": mt.mean(x, axis=0)}

    to = {"y": where(tmp_path), "sum": None, "max": None, "mean": None}
    out = mt.stream(fn, x, memory=memory, to=to)
    y = np.tanh(host) * 2
    np.testing.assert_allclose(zarr.open(out["y"].path)[...], y)
    np.testing.assert_allclose(np.asarray(out["sum"]), y.sum(axis=0))
    np.testing.assert_allclose(np.asarray(out["mean"]), host.mean(axis=0))
    assert float(out["max"]) == host.max()
    np.testing.assert_allclose(np.asarray(out["y"].load()), y)
    assert sizes["a"] == 1 or out["y"].load().sharding.placements["a"] == mt.Shard(0)


def test_rows_are_worked_on_whole(tmp_path, stored):
    """Products, softmax and norms along what is not split need nothing of other rows."""
    host, path = stored
    x = mt.from_zarr(path, mt.Mesh({"a": 2}), a=mt.Shard(0))
    w = np.random.default_rng(1).normal(size=(6, 3))
    out = mt.stream(lambda x, w: mt.nn.softmax(mt.layer_norm(x, 6) @ w, axis=1), x, w, memory=4_000, to=where(tmp_path))
    want = mt.nn.softmax(mt.layer_norm(mt.asarray(host), 6) @ mt.asarray(w), axis=1)
    np.testing.assert_allclose(zarr.open(out.path)[...], np.asarray(want), 1e-9)


def test_two_stored_arrays_and_columns(tmp_path, stored):
    host, path = stored
    mesh = mt.Mesh({"a": 2, "b": 2})
    x = mt.from_zarr(path, mesh, a=mt.Shard(0), b=mt.Shard(1))
    assert mt.stream(lambda x, y: mt.sum(x * y), x, x, memory=1_000).shape == ()
    np.testing.assert_allclose(float(mt.stream(lambda x, y: mt.sum(x * y), x, x, memory=1_000)), (host * host).sum())


def test_what_needs_collectives_is_refused_before_anything_is_written(tmp_path, stored):
    _, path = stored
    x = mt.from_zarr(path, mt.Mesh({"a": 2}), a=mt.Shard(0))
    with pytest.raises(errors.ShardingConflict, match=r"needs all_gather.*sort needs dimension 0 whole"):
        mt.stream(lambda x: mt.sort(x, axis=0), x, to=where(tmp_path))
    with pytest.raises(errors.ShardingConflict, match=r"Split a dimension that .* or load the array"):
        mt.stream(lambda x: mt.cumulative_sum(x, axis=0), x, to=where(tmp_path))
    with pytest.raises(errors.ShardingConflict, match=r"result 0 is split over the blocks: say where"):
        mt.stream(lambda x: x * 2, x)
    with pytest.raises(MemoryError, match=r"the smallest blocks need .* a rank, and 10 B are allowed"):
        mt.stream(lambda x: x * 2, x, memory=10, to=where(tmp_path))
    assert not (tmp_path / "out").exists()


PASSES = {
    "centred": (lambda x: x - mt.mean(x, axis=0), 2),
    "standardized": (lambda x: (x - mt.mean(x, axis=0)) / mt.std(x, axis=0), 3),
    "scaled by the largest": (lambda x: x / mt.max(mt.abs(x)), 2),
    "softmax over rows": (lambda x: mt.nn.softmax(x, axis=0), 3),
    "one reduction of another": (lambda x: mt.sum((x - mt.mean(x, axis=0)) ** 2, axis=0), 2),
    "of columns": (lambda x: x - mt.mean(x, axis=1, keepdims=True), 1),
    "covariance": (lambda x: (x - mt.mean(x, axis=0)).mT @ (x - mt.mean(x, axis=0)), 2),
    "gradient": (lambda x: mt.grad(lambda x: mt.sum(mt.tanh(x)) ** 2)(x), 2),
}


@pytest.mark.parametrize("sizes", [{"a": 1}, {"a": 3}, {"b": 2, "a": 2}], ids=str)
@pytest.mark.parametrize("name", PASSES)
def test_what_all_blocks_give_is_found_first(tmp_path, stored, sizes, name):
    """A reduction that later work needs: the blocks are read once more, and stay within the limit."""
    host, path = stored
    fn, _ = PASSES[name]
    x = mt.from_zarr(path, mt.Mesh(sizes), a=mt.Shard(0))
    want = np.asarray(fn(mt.asarray(host)))
    got = mt.stream(fn, x, memory=3_000, to=where(tmp_path) if want.shape[0] == 101 else None)
    np.testing.assert_allclose(zarr.open(got.path)[...] if want.shape[0] == 101 else np.asarray(got), want, 1e-9, 1e-9)


@pytest.mark.parametrize("name", PASSES)
def test_there_are_as_many_passes_as_reductions_that_follow_one_another(monkeypatch, tmp_path, stored, name):
    _, path = stored
    fn, passes = PASSES[name]
    runs = []
    run = stream._run_pass
    monkeypatch.setattr(stream, "_run_pass", lambda *args: runs.append(args) or run(*args))
    x = mt.from_zarr(path, mt.Mesh({"a": 2}), a=mt.Shard(0))
    mt.stream(fn, x, to=where(tmp_path))
    assert len(runs) == passes


def test_columns_that_are_split_too_are_joined(tmp_path, stored):
    """What is reduced over the blocks may be split over other ranks."""
    host, path = stored
    x = mt.from_zarr(path, mt.Mesh({"a": 2, "b": 2}), a=mt.Shard(0), b=mt.Shard(1))
    np.testing.assert_allclose(np.asarray(mt.stream(lambda x: mt.sum(x, axis=0), x, memory=500)), host.sum(axis=0))
    out = mt.stream(
        lambda x: (x - mt.max(x, axis=0), mt.sum(x, axis=0)), x, memory=500, to=(where(tmp_path), where(tmp_path, "s"))
    )
    np.testing.assert_allclose(zarr.open(out[0].path)[...], host - host.max(axis=0))
    np.testing.assert_allclose(zarr.open(out[1].path)[...], host.sum(axis=0))


ALONG_ROWS = {
    "sums": lambda x: mt.sum(x, axis=1),
    "largest": lambda x: mt.max(x, axis=1),
    "centred": lambda x: x - mt.mean(x, axis=1, keepdims=True),
    "standardized": lambda x: (x - mt.mean(x, axis=1, keepdims=True)) / mt.std(x, axis=1, keepdims=True),
    "softmax": lambda x: mt.nn.softmax(x, axis=1),
    "layer_norm": lambda x: mt.layer_norm(x, 6),
    "sorted": lambda x: mt.sort(x, axis=1),
    "distance": lambda x: mt.sum(mt.abs(x - mt.mean(x, axis=1, keepdims=True))),
}


@pytest.mark.parametrize("memory", [2_500, "1 MiB"])
@pytest.mark.parametrize("name", ALONG_ROWS)
def test_rows_whose_columns_are_split_too_go_by_way_of_a_store(tmp_path, stored, name, memory):
    """Ranks that hold other parts of a row meet in a store, which is empty afterwards."""
    host, path = stored
    x = mt.from_zarr(path, mt.Mesh({"a": 2, "b": 2}), a=mt.Shard(0), b=mt.Shard(1))
    want = np.asarray(ALONG_ROWS[name](mt.asarray(host)))
    got = mt.stream(ALONG_ROWS[name], x, memory=memory, to=where(tmp_path) if want.ndim else None)
    np.testing.assert_allclose(zarr.open(got.path)[...] if want.ndim else np.asarray(got), want, 1e-9, 1e-9)
    assert sorted(p.name for p in tmp_path.iterdir()) == (["out", "x"] if want.ndim else ["x"])


def test_sums_of_rows_of_small_numbers_are_rounded_once(tmp_path):
    path, (ones, small) = str(tmp_path / "x"), (256.0, 1.0)  # 256 + 1 is 256 in bfloat16
    host = np.array([[ones, small, small, small]] * 4, ml_dtypes.bfloat16)
    mt.stream(lambda x: x.astype(mt.bfloat16), _stored(tmp_path, host.astype("f4")), to=path)
    x = mt.from_zarr(path, mt.Mesh({"a": 1, "b": 4}), a=mt.Shard(0), b=mt.Shard(1))
    out = mt.stream(lambda x: mt.sum(x, axis=1), x, memory=64, to=where(tmp_path))
    np.testing.assert_array_equal(np.asarray(out.load(), np.float32), np.float32([260.0] * 4))


def test_the_store_between_blocks_is_emptied_after_an_error_too(tmp_path, stored, monkeypatch):
    _, path = stored
    x = mt.from_zarr(path, mt.Mesh({"a": 2, "b": 2}), a=mt.Shard(0), b=mt.Shard(1))
    run, calls = stream._run_pass, []

    def fail_at_the_second(*args):
        calls.append(args)
        if len(calls) > 1:
            raise OSError("the disk is full")
        return run(*args)

    monkeypatch.setattr(stream, "_run_pass", fail_at_the_second)
    room = tmp_path / "room"
    with pytest.raises(OSError, match="the disk is full"):
        mt.stream(lambda x: mt.sum(x, axis=1), x, to=where(tmp_path), scratch=room)
    assert len(calls) == 2
    assert list(room.iterdir()) == []


def _stored(tmp_path, host: np.ndarray) -> mt.parallel.Stored:
    zarr.create_array(str(tmp_path / "host"), shape=host.shape, chunks=host.shape, dtype=host.dtype)[...] = host
    return mt.from_zarr(tmp_path / "host", mt.Mesh({"a": 1}), a=mt.Shard(0))


def test_many_small_numbers_are_added_in_float32(tmp_path):
    """A sum over many blocks of bfloat16 is rounded once."""
    host = np.full((512, 2), 1.0, ml_dtypes.bfloat16)
    path = str(tmp_path / "x")
    mt.stream(lambda x: x.astype(mt.bfloat16), _stored_ones(tmp_path), to=path)
    x = mt.from_zarr(path, mt.Mesh({"a": 1}), a=mt.Shard(0))
    total = mt.stream(lambda x: mt.sum(x, axis=0), x, memory=64)
    assert total.dtype == host.dtype
    np.testing.assert_array_equal(np.asarray(total, np.float32), [512, 512])


def _stored_ones(tmp_path) -> mt.parallel.Stored:
    zarr.create_array(str(tmp_path / "ones"), shape=(512, 2), chunks=(64, 2), dtype="f4")[...] = 1
    return mt.from_zarr(tmp_path / "ones", mt.Mesh({"a": 1}), a=mt.Shard(0))


def test_bad_input(tmp_path, stored):
    _, path = stored
    mesh = mt.Mesh({"a": 2})
    with pytest.raises(FileNotFoundError):
        mt.from_zarr(tmp_path / "nothing", mesh)
    with pytest.raises(errors.ShardingConflict, match="splits dimension 2"):
        mt.from_zarr(path, mesh, a=mt.Shard(2))
    with pytest.raises(errors.MeshError, match=r"needs an argument from mt\.from_zarr"):
        mt.stream(lambda x: x, mt.ones(3))
    with pytest.raises(errors.MeshError, match="arrays of two meshes"):
        mt.stream(lambda x, y: x + y, mt.from_zarr(path, mesh), mt.from_zarr(path, mt.Mesh({"a": 2})))
    x = mt.from_zarr(path, mesh, a=mt.Shard(0))
    assert repr(x).startswith("Stored(")
    assert x.ndim == 2
    for use in (np.asarray, np.mean, mt.asarray):
        with pytest.raises(errors.MeshError, match=r"is not loaded: use x\.load\(\), or mt\.stream"):
            use(x)
    group = zarr.open_group(tmp_path / "group", mode="w")
    group.create_array("t", shape=(3,), dtype="f4")
    with pytest.raises(errors.MeshError, match="group is a group, not an array; its arrays are t"):
        mt.from_zarr(tmp_path / "group", mesh)


def test_memory_stays_within_the_limit(tmp_path, peak_of):
    """Twelve megabytes of numbers, worked on with one."""
    path = str(tmp_path / "x")
    array = zarr.create_array(path, shape=(1500, 1000), chunks=(25, 1000), dtype="f8")
    for i in range(0, 1500, 25):
        array[i : i + 25] = i
    x = mt.from_zarr(path, mt.Mesh({"a": 1}), a=mt.Shard(0))
    run = lambda: mt.stream(lambda x: mt.sum(mt.sin(x) * 2), x, memory="1 MB")  # noqa: E731
    np.testing.assert_allclose(float(run()), 2000 * np.sin(np.arange(0, 1500, 25)).sum() * 25)
    assert peak_of(run, 3e6) < 3e6 < x.nbytes


def test_on_worker_processes(processes, tmp_path, stored):
    host, path = stored
    with mt.Mesh({"a": 3}, client=processes) as mesh:
        x = mt.from_zarr(path, mesh, a=mt.Shard(0))
        np.testing.assert_allclose(np.asarray(x.load()), host)
        centred = mt.stream(lambda x: x - mt.mean(x, axis=0), x, memory=2_000, to=where(tmp_path, "centred"))
        np.testing.assert_allclose(zarr.open(centred.path)[...], host - host.mean(axis=0))
        out = mt.stream(lambda x: (mt.exp(x), mt.sum(x)), x, memory=2_000, to=(where(tmp_path), None))
        np.testing.assert_allclose(zarr.open(out[0].path)[...], np.exp(host))
        np.testing.assert_allclose(float(out[1]), host.sum())
    with mt.Mesh({"a": 2, "b": 2}, client=processes) as mesh:
        x = mt.from_zarr(path, mesh, a=mt.Shard(0), b=mt.Shard(1))
        distance = ALONG_ROWS["distance"]
        with pytest.raises(errors.ShardingConflict, match="say where, with scratch="):
            mt.stream(distance, x, memory=2_000)
        found = mt.stream(distance, x, memory=2_000, scratch=tmp_path / "room")
        np.testing.assert_allclose(float(found), float(distance(mt.asarray(host))))


STREAMED = {
    "an argument": lambda x, w: mt.stream(lambda x, w: mt.sum(x * w), x, w),
    "a number from around it": lambda x, w: mt.stream(lambda x: mt.sum(x * w), x),
    "made from one around it": lambda x, w: mt.stream(lambda x: mt.sum(x * mt.exp(2 * w)), x),
}


@pytest.mark.parametrize("way", STREAMED)
def test_streams_say_that_they_have_no_derivative(stored, way):
    _, path = stored
    x, w = mt.from_zarr(path, mt.Mesh({"a": 2}), a=mt.Shard(0)), mt.asarray(0.5)
    assert np.isfinite(float(STREAMED[way](x, w)))
    with pytest.raises(errors.GradientError, match=r"\[stream\].*no derivative"):
        mt.grad(lambda w: STREAMED[way](x, w))(w)
    with pytest.raises(errors.TracedValueError):
        mt.compile(lambda w: STREAMED[way](x, w))(w)
    assert float(mt.grad(lambda w: w * STREAMED[way](x, mt.stop_gradient(w)))(w)) != 0


# ----- arrays that are replaced ---------------------------------------------------------------------------------------


def _other_puts(path, value, rows=8):
    """A whole new array under the same name, as another program puts it there."""
    zarr.create_array(f"{path}.new", shape=(rows, 3), chunks=(4, 3), dtype="f4", overwrite=True)[...] = value
    shutil.rmtree(path, ignore_errors=True)
    Path(f"{path}.new").rename(path)


def _ours_puts(path, value, rows=8):
    mt.save(Path(path).parent, {"x": np.full((rows, 3), value, "f4")}, overwrite=True)


@pytest.fixture(params=[_other_puts, _ours_puts], ids=["zarr-python", "mt.save"])
def puts(request):
    return request.param


@pytest.fixture
def replacing(tmp_path, monkeypatch):
    """A path, and a function that says what happens after each of the next reads of blocks."""
    path, acts = str(tmp_path / "ckpt" / "x"), []
    (tmp_path / "ckpt").mkdir()

    def read(array, index, plain=StoredArray.__getitem__):
        found = plain(array, index)
        if acts:
            acts.pop(0)()
        return found

    monkeypatch.setattr(StoredArray, "__getitem__", read)
    return path, acts.extend


def test_a_load_beside_a_writer_has_one_state(replacing, puts):
    path, then = replacing
    puts(path, 1)
    x = mt.from_zarr(path, mt.Mesh({"a": 2}), a=mt.Shard(0))
    then([lambda: puts(path, 2), lambda: None, lambda: puts(path, 3)])
    assert np.unique(np.asarray(x.load())).tolist() == [3]
    then([lambda v=v: puts(path, v) for v in range(1, 41)])
    with pytest.raises(errors.CheckpointReplaced, match="was replaced"):
        x.load()


def test_a_stream_beside_a_writer_has_one_state(replacing, puts, tmp_path):
    path, then = replacing
    puts(path, 1)
    x = mt.from_zarr(path, mt.Mesh({"a": 2}), a=mt.Shard(0))
    then([lambda: puts(path, 2)])
    with pytest.raises(errors.CheckpointReplaced, match="was replaced"):
        mt.stream(lambda v: mt.sum(v, axis=0), x, memory=100)
    then([lambda: puts(path, 3)])
    with pytest.raises(errors.CheckpointReplaced, match="was replaced"):
        mt.stream(lambda v: v * 2, x, memory=100, to=where(tmp_path))
    assert not (tmp_path / "out").exists()
    assert np.asarray(mt.stream(lambda v: mt.sum(v, axis=0), x, memory=100)).tolist() == [24] * 3


def test_an_array_of_another_shape_by_now_is_told(replacing, puts):
    path, _ = replacing
    puts(path, 1)
    x = mt.from_zarr(path, mt.Mesh({"a": 2}), a=mt.Shard(0))
    puts(path, 1, rows=16)
    for read in (x.load, lambda: mt.stream(mt.sum, x)):
        with pytest.raises(errors.CheckpointReplaced, match=r"was replaced by float32 of shape \(16, 3\)"):
            read()
