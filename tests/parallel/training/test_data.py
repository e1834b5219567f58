"""Sampling, sources and loading: pure functions of position, the same rows on every mesh, errors that reach the run."""

from __future__ import annotations

import pickle

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape.parallel.training.data.batching import batch_sizes
from meshtape.parallel.training.data.sources import as_source

tr = mt.training


# ----- batch arithmetic -----------------------------------------------------------------------------------------------


def test_accumulation_follows_from_the_global_batch():
    assert tr.batch_sizes(32, ranks=2, micro=4).accumulation == 4
    assert tr.batch_sizes(32, ranks=4, micro=4).accumulation == 2  # the global batch stays when ranks change
    assert tr.batch_sizes(32, ranks=2, accumulation=2).micro == 8
    assert tr.batch_sizes(32, ranks=2).micro == 16


@pytest.mark.parametrize(
    ("batch", "given_sizes", "message"),
    [
        (30, {"ranks": 2, "micro": 4}, r"a batch of 30 is no multiple of micro 4 \* ranks 2 = 8: 24 and 32 are"),
        (3, {"ranks": 2}, "3 is no multiple"),
        (32, {"ranks": 2, "micro": 4, "accumulation": 3}, "is not the batch 32"),
        (0, {"ranks": 1}, "at least 1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(batch, given_sizes, message):
    with pytest.raises(mt.errors.BatchSizeError, match=message):
        batch_sizes(batch, **given_sizes)


# ----- sampler --------------------------------------------------------------------------------------------------------


@given(
    size=st.integers(1, 60),
    seed=st.integers(0, 3),
    drop_last=st.booleans(),
    cuts=st.lists(st.integers(1, 20), min_size=1, max_size=12),
)
@settings(max_examples=60, deadline=None)
def test_every_epoch_has_every_sample_once_whatever_the_batch_sizes(size, seed, drop_last, cuts):
    """Batch sizes may change at any time, as after a resume on another world: the order goes on where it was."""
    sampler = tr.Sampler(size, seed=seed, drop_last=False)
    whole = [np.asarray(sampler.order(e)) for e in range(40)]
    assert all(sorted(o) == list(range(size)) for o in whole[:3])
    consumed = 0
    for n in cuts:
        ids, after = tr.Sampler(size, seed=seed).take(consumed, n)  # a new one each time: nothing is remembered
        epoch, offset = divmod(consumed, size)
        assert list(ids) == list(whole[epoch][offset : offset + n])
        assert 0 < len(ids) <= n
        assert after == consumed + len(ids)
        consumed = after


def test_resume_on_another_world_size_goes_on_at_the_49th_sample():
    """100 samples, batches of 4 on 2 ranks, 2 accumulation steps: 48 consumed after 3 steps."""
    order = tr.Sampler(100, seed=5).order(0)
    sampler, consumed = tr.Sampler(100, seed=5), 0
    for _ in range(3):
        _, consumed = sampler.take(consumed, 4 * 2 * 2)
    assert consumed == 48
    ids, _ = tr.Sampler(100, seed=5).take(consumed, 4)
    assert list(ids) == list(order[48:52])


def test_each_epoch_and_each_seed_has_an_order_of_its_own():
    orders = [tuple(tr.Sampler(50, seed=s).order(e)) for s in (0, 1) for e in (0, 1)]
    assert len(set(orders)) == 4
    assert tuple(tr.Sampler(50, shuffle=False).order(3)) == tuple(range(50))


def test_where_a_run_of_several_epochs_goes_on():
    """25 steps of two micro-batches, ten steps an epoch: two epochs are over, and ten micro-batches of the third."""
    micro, accumulation, per_epoch = 4, 2, 10
    size, consumed = micro * accumulation * per_epoch, 0
    for _ in range(25):
        _, consumed = tr.Sampler(size).take(consumed, micro * accumulation)
    assert tr.Sampler(size).epoch(consumed) == 2
    assert consumed % size == 10 * micro
    assert list(tr.Sampler(size).take(consumed, micro)[0]) == list(tr.Sampler(size).order(2)[40:44])


def test_at_the_end_of_an_epoch_the_next_one_begins():
    sampler = tr.Sampler(10, seed=0)
    ids, after = sampler.take(10, 4)
    assert len(ids) == 4
    assert sampler.epoch(10) == 1
    assert after == 14
    assert list(sampler.take(8, 4)[0]) == list(sampler.order(0)[8:])  # ragged: what is left, and no more


def test_drop_last_skips_what_is_no_full_batch():
    sampler = tr.Sampler(10, seed=0, drop_last=True)
    ids, after = sampler.take(8, 4)
    assert list(ids) == list(sampler.order(1)[:4])
    assert after == 14
    assert sampler.batches_per_epoch(4) == 2
    assert [sampler.take(at, 4)[1] for at in (0, 4, 10)] == [4, 10, 14]  # the epoch ends with its last full batch
    assert [sampler.take(at, 5)[1] for at in (0, 5)] == [5, 10]
    with pytest.raises(mt.errors.DataError, match="larger than the 10 samples"):
        sampler.take(0, 11)


def test_an_empty_data_set_is_refused():
    with pytest.raises(mt.errors.DataError, match="empty"):
        tr.Sampler(0)
    with pytest.raises(mt.errors.DataError, match="too few"):
        tr.TokenSource(np.arange(3), 5)
    with pytest.raises(mt.errors.DataError, match="common first dimension"):
        tr.ArraySource({"x": np.ones(3), "y": np.ones(4)})


# ----- sources --------------------------------------------------------------------------------------------------------

ROWS = {"x": np.arange(66, dtype=np.float32).reshape(22, 3), "y": np.arange(22)}


def zarr_source(tmp_path):
    import zarr

    group = zarr.open_group(str(tmp_path / "d.zarr"), mode="w")
    for n, a in ROWS.items():
        group.create_array(n, shape=a.shape, dtype=a.dtype, chunks=(5, *a.shape[1:]))[...] = a
    return tr.ZarrSource(tmp_path / "d.zarr")


def parquet_source(tmp_path):
    import pyarrow.parquet as pq

    for i, table in enumerate(arrow_tables()):
        pq.write_table(table, tmp_path / f"{i}.parquet", row_group_size=4)
    return tr.ParquetSource(tmp_path, cached=2)


def arrow_tables():
    """The rows in two tables, the second of several batches."""
    pa = pytest.importorskip("pyarrow")
    x = pa.array(ROWS["x"].tolist(), pa.list_(pa.float32()))
    whole = pa.table({"x": x, "y": ROWS["y"]})
    return whole[:9], pa.concat_tables([whole[9:15], whole[15:]])


def arrow_source(tmp_path):
    import pyarrow as pa

    first, second = arrow_tables()
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), first.schema) as file:
        file.write_table(first)
    with pa.ipc.new_stream(str(tmp_path / "b.arrow"), second.schema) as file:
        file.write_table(second)
    return pickle.loads(pickle.dumps(tr.ArrowSource(tmp_path)))  # as it goes to a worker


def dask_source(tmp_path):
    parts = [dask.delayed({n: a[lo:hi] for n, a in ROWS.items()}) for lo, hi in ((0, 7), (7, 7), (7, 22))]
    return tr.DaskSource(parts, cached=1)


SOURCES = {
    "arrays": lambda tmp_path: tr.ArraySource(ROWS),
    "zarr": zarr_source,
    "parquet": parquet_source,
    "arrow": arrow_source,
    "an arrow table": lambda tmp_path: as_source(pytest.importorskip("pyarrow").concat_tables(arrow_tables())),
    "dask": dask_source,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_gives_the_rows_in_the_order_asked_for(kind, tmp_path):
    source = SOURCES[kind](tmp_path)
    assert isinstance(source, tr.Source)
    assert len(source) == 22
    for ids in (np.array([3, 21, 0, 9, 8]), np.array([5]), np.array([4, 4, 20])):
        got = source.read(ids)
        for n, a in ROWS.items():
            np.testing.assert_array_equal(got[n], a[ids])
            assert got[n].dtype == a.dtype


def test_zarr_arrays_are_as_their_own_metadata_say(tmp_path):
    """Consolidated metadata are older than the array, and know nothing of the other."""
    import zarr

    zarr_source(tmp_path)
    zarr.consolidate_metadata(tmp_path / "d.zarr")
    group = zarr.open_group(tmp_path / "d.zarr", mode="r+", use_consolidated=False)
    n = group["y"].shape[0]
    group.create_array("y", data=np.arange(n) / 2, overwrite=True)
    group.create_array("z", data=np.arange(n))
    found = tr.ZarrSource(tmp_path / "d.zarr", ["y", "z"]).read(np.array([7]))
    assert (found["y"].tolist(), found["z"].tolist()) == ([3.5], [7])


def test_a_zarr_array_alone_and_chosen_columns(tmp_path):
    zarr_source(tmp_path)
    np.testing.assert_array_equal(tr.ZarrSource(tmp_path / "d.zarr" / "y").read(np.array([7])), [7])
    assert list(tr.ZarrSource(tmp_path / "d.zarr", ["y"]).read(np.array([7]))) == ["y"]
    with pytest.raises(mt.errors.DataError, match=r"no array \['z'\]"):
        tr.ZarrSource(tmp_path / "d.zarr", ["z"])
    with pytest.raises(mt.errors.DataError, match="no Zarr"):
        tr.ZarrSource(tmp_path / "nothing")


def test_a_flipped_bit_in_layout_dual_is_no_sample(tmp_path):
    rows = np.arange(4000.0, dtype="f4").reshape(1000, 4)
    mt.save(tmp_path / "c", {"x": rows, "y": np.arange(1000)}, layout="dual")
    ids = np.array([7, 999, 3, 7])
    both, alone = tr.ZarrSource(tmp_path / "c"), tr.ZarrSource(tmp_path / "c" / "x")
    np.testing.assert_array_equal(both.read(ids)["x"], rows[ids])
    np.testing.assert_array_equal(both.read(ids)["y"], ids)
    np.testing.assert_array_equal(alone.read(ids), rows[ids])
    assert alone.read(ids[:0]).shape == (0, 4)
    file = tmp_path / "c" / "x" / "c.0.0"
    held = bytearray(file.read_bytes())
    held[len(held) // 2] ^= 64
    file.write_bytes(held)
    for source in (tr.ZarrSource(tmp_path / "c", ["x"]), tr.ZarrSource(tmp_path / "c" / "x")):
        with pytest.raises(mt.errors.CorruptCheckpoint, match="crc32c"):
            source.read(ids)


def test_a_dask_array_and_a_data_frame():
    x = da.from_array(ROWS["x"], chunks=(4, 2))
    np.testing.assert_array_equal(tr.DaskSource(x).read(np.array([21, 2])), ROWS["x"][[21, 2]])
    pd = pytest.importorskip("pandas")
    dd = pytest.importorskip("dask.dataframe")
    frame = dd.from_pandas(pd.DataFrame({"y": ROWS["y"], "z": ROWS["y"] * 2.0}), npartitions=3)
    got = tr.DaskSource(frame).read(np.array([20, 1]))
    np.testing.assert_array_equal(got["z"], [40.0, 2.0])

    frame = as_source(pd.DataFrame({"y": ROWS["y"], 3: ROWS["y"] * 2.0}))
    assert {n: a.tolist() for n, a in frame.read(np.array([20, 1])).items()} == {"y": [20, 1], "3": [40.0, 2.0]}


def test_tables_that_do_not_fit_are_refused(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": [1.0, None]}), tmp_path / "a.parquet")
    with pytest.raises(mt.errors.DataError, match="1 missing values"):
        tr.ParquetSource(tmp_path / "a.parquet").read(np.array([0]))
    with pytest.raises(mt.errors.DataError, match="the Arrow table: column 'x' has 1 missing values"):
        tr.ArrowSource(pa.table({"x": [1.0, None]})).read(np.array([0, 1]))
    with pytest.raises(mt.errors.DataError, match=r"no column \['z'\]; it has \['x'\]"):
        tr.ArrowSource(pa.table({"x": [1.0]}), ["z"])
    with pytest.raises(mt.errors.DataError, match="no rows"):
        tr.ArrowSource(pa.table({"x": pa.array([], pa.int64())}))
    with pytest.raises(mt.errors.DataError, match=r"a\.parquet is no Arrow file"):
        tr.ArrowSource(tmp_path / "a.parquet")
    with pytest.raises(mt.errors.DataError, match="no Arrow files"):
        tr.ArrowSource(tmp_path)
    assert list(tr.ArrowSource(pa.table({"x": [1.0], "y": [2]}), ["y"]).read(np.array([0]))) == ["y"]


# ----- loader ---------------------------------------------------------------------------------------------------------


def loader(source, mesh=None, batch=8, accumulation=2, placement=None, **options):
    sharding = None if mesh is None else mt.Sharding(mesh, **(placement or {"data": mt.Shard(0)}))
    ranks = 1 if mesh is None else mesh.describe().get("data", 1)
    sizes = batch_sizes(batch, ranks=ranks, accumulation=accumulation)
    return tr.Loader(source, sizes, tr.Sampler(len(source), seed=1, **options), mesh, sharding)


def rows_of(batches):
    return [np.concatenate([np.asarray(m["y"]) for m in b.micro]).tolist() for b in batches]


def test_batches_are_the_same_on_every_mesh_and_the_last_is_ragged():
    source = tr.ArraySource(ROWS)
    order = tr.Sampler(22, seed=1).order(0).tolist()
    wanted = [order[:8], order[8:16], order[16:]]
    for mesh in (None, mt.Mesh({"data": 2}), mt.Mesh({"data": 4, "model": 2})):
        batches = list(loader(source, mesh).batches(0, epochs=1))
        assert rows_of(batches) == wanted
        assert [b.consumed for b in batches] == [8, 16, 22]
        assert [len(b.micro) for b in batches] == [2, 2, 2]
        np.testing.assert_array_equal(np.asarray(batches[2].micro[1]["x"]), ROWS["x"][order[20:]])


def test_batches_begin_at_any_position():
    order = tr.Sampler(22, seed=1).order(0).tolist()
    assert rows_of(loader(tr.ArraySource(ROWS)).batches(5, epochs=1))[0] == order[5:13]


def test_the_sequence_is_split_too_where_the_sharding_says_so():
    mesh = mt.Mesh({"data": 2, "context": 3})
    placed = {"data": mt.Shard(0), "context": mt.Shard(1)}
    batch = next(loader(tr.ArraySource(ROWS), mesh, placement=placed).batches(0))
    assert batch.micro[0]["x"].sharding.block_shape((4, 3)) == (2, 1)
    assert batch.micro[0]["y"].sharding == mt.Sharding(mesh, data=mt.Shard(0))  # it has no second dimension


class Broken:
    """Fails at its third batch."""

    def __init__(self, remote):
        self.remote = remote

    def __len__(self):
        return 22

    def read(self, ids):
        if (np.asarray(ids) >= 16).any():
            raise OSError("disk on fire")
        return {"y": np.asarray(ids)}


def test_what_a_source_raises_reaches_the_run_with_its_rows():
    batches = loader(Broken(False), shuffle=False).batches(0)
    assert rows_of([next(batches), next(batches)]) == [list(range(8)), list(range(8, 16))]
    with pytest.raises(mt.errors.DataError, match="Broken failed at rows 16, 17, 18, 19: OSError: disk on fire"):
        next(batches)


def test_texts_and_wrong_numbers_of_rows_are_refused():
    class Texts(Broken):
        def read(self, ids):
            return {"y": np.array(["a"] * len(ids))}

    class Short(Broken):
        def read(self, ids):
            return {"y": np.zeros(1)}

    with pytest.raises(mt.errors.DataError, match="tokenise"):
        next(loader(Texts(False)).batches(0))
    with pytest.raises(mt.errors.DataError, match=r"shape \(1,\) for 4 rows"):
        next(loader(Short(False)).batches(0))


def test_workers_read_their_own_rows(processes, tmp_path):
    """The same batches as read here; only the workers open the files."""
    source = zarr_source(tmp_path)
    with mt.Mesh({"data": 2, "context": 2}, client=processes) as mesh:
        far = loader(source, mesh, placement={"data": mt.Shard(0), "context": mt.Shard(1)})
        assert far.remote
        batches = list(far.batches(0, epochs=1))
        assert rows_of(batches) == rows_of(loader(source).batches(0, epochs=1))
        order = tr.Sampler(22, seed=1).order(0)
        np.testing.assert_array_equal(np.asarray(batches[1].micro[0]["x"]), ROWS["x"][order[8:12]])


def test_what_a_source_raises_on_a_worker_reaches_the_run(processes):
    class Remote:  # workers cannot import this module; a class of a function is sent whole
        remote = True

        def __len__(self):
            return 22

        def read(self, ids):
            if (ids >= 16).any():
                raise OSError("disk on fire")
            return {"y": ids}

    with mt.Mesh({"data": 2}, client=processes) as mesh:
        batches = loader(Remote(), mesh, shuffle=False).batches(0)
        next(batches)
        next(batches)
        with pytest.raises(mt.errors.DataError, match="rows 16, 17: OSError: disk on fire"):
            next(batches)
        again = loader(tr.ArraySource(ROWS), mesh).batches(0)  # the mesh is usable as before
        assert len(next(again).micro) == 2


def test_a_source_that_workers_cannot_import_is_an_error_not_a_hang(processes):
    with mt.Mesh({"data": 2}, client=processes) as mesh, pytest.raises(mt.errors.DataError, match="remote = False"):
        next(loader(Broken(True), mesh).batches(0))
