"""Memory that other libraries get: nothing that NumPy offers makes it writable, and no write reaches an array or a
gradient."""

from __future__ import annotations

import contextlib
import pickle

import numpy as np
import pytest

import meshtape as mt
from meshtape import errors

EVERY_DTYPE = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
]

LAYOUTS = {
    "whole": lambda x: x,
    "part": lambda x: x[1:],
    "backwards": lambda x: x[::-1],
    "columns": lambda x: x[:, ::2],
    "turned": lambda x: x.T,
    "spread": lambda x: mt.broadcast_to(x[0], (5, 4)),
    "empty": lambda x: x[:0],
    "number": lambda x: x[1, 2],
    "new axis": lambda x: x[None],
    "large": lambda x: mt.concat([x] * 20000),
}


def bits(a):
    return np.ascontiguousarray(a).view(np.uint8).copy() if a.ndim else np.asarray(a).tobytes()


def chain(a):
    """The arrays that are reached from one through ``base``, and what is there instead of one at the end."""
    while isinstance(a, np.ndarray):
        yield a
        a = a.base
    yield a


def cannot_be_written(n):
    *arrays, end = chain(n)
    for a in arrays:
        assert not a.flags.writeable
        if a.base is not None:  # memory of its own is nobody else's
            with pytest.raises(ValueError, match=r"WRITEABLE|writeable"):
                a.flags.writeable = True
    for reached in (end, getattr(end, "obj", None)):
        assert not isinstance(reached, np.ndarray | memoryview | bytearray)
    if n.size:
        with pytest.raises(ValueError, match="read-only"):
            n[...] = 0
    assert n.__array_interface__["data"][1]


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_what_numpy_is_given_cannot_be_made_writable(dtype):
    for name, layout in LAYOUTS.items():
        x = layout(mt.astype(mt.reshape(mt.arange(20) % 2, (5, 4)), dtype))
        n = np.asarray(x)
        assert (n.shape, n.dtype, n.strides) == (x._buf.shape, x._buf.dtype, x._buf.strides), name
        before = bits(n)
        cannot_be_written(n)
        assert np.all(bits(np.asarray(x)) == before), name
        if n.size:
            assert np.shares_memory(n, x._buf), name  # without a copy


def test_strides_within_an_element_are_copied():
    raw = np.zeros(5, [("a", "u1"), ("b", "<f8")])
    raw["b"] = 1.0
    x = mt.asarray(raw["b"], copy=False)
    n = np.asarray(x)
    assert n.tolist() == [1.0] * 5
    assert not n.flags.writeable


def through_asarray(x):
    return np.asarray(x)


def through_array(x):
    return np.array(x, copy=False)


def through_dlpack(x):
    return np.from_dlpack(x)


def through_a_numpy_function(x):
    return np.broadcast_to(x, x.shape)


def through_to_dask(x):
    return x.to_dask().compute(scheduler="sync")


def through_blocks_of_dask(x):
    seen = []

    def look(block):
        seen.append(block)
        return block

    x.to_dask().map_blocks(look, dtype=x.dtype, meta=np.empty(0)).compute(scheduler="sync")
    return seen[-1]


def through_pandas(x):
    pandas = pytest.importorskip("pandas")
    return pandas.Series(np.asarray(x), copy=False).to_numpy()


def through_pickled_buffers(x):
    buffers = []
    pickle.dumps(x, 5, buffer_callback=buffers.append)
    return np.frombuffer(buffers[0].raw(), x.dtype)


WAYS = [v for k, v in list(globals().items()) if k.startswith("through_")]


def tries(n):
    """Every way to write to what was handed out, through NumPy."""

    def flag(a):
        a.flags.writeable = True
        a[...] = 9

    def setflags(a):
        a.setflags(write=True)
        a[...] = 9

    def assigned(a):
        a[...] = 9

    def through_a_buffer(a):
        memoryview(a).cast("B")[0] = 9

    def out(a):
        np.add(a, 1, out=a)

    for a in chain(n):
        if isinstance(a, np.ndarray):
            for attempt in (assigned, flag, setflags, through_a_buffer, out):
                with contextlib.suppress(ValueError, TypeError, BufferError):
                    attempt(a)


@pytest.mark.parametrize("way", WAYS)
def test_writes_change_neither_the_array_nor_a_pending_gradient(way):
    x = mt.asarray(np.arange(8.0))
    y, pull = mt.vjp(lambda x: x * x * x, x)
    tries(way(x))
    tries(way(y))
    assert x.tolist() == list(range(8))
    assert y.tolist() == [i**3 for i in range(8)]
    assert pull(mt.ones(8))[0].tolist() == [3.0 * i * i for i in range(8)]


@pytest.mark.parametrize("way", WAYS)
def test_a_write_to_the_array_does_not_reach_what_was_handed_out(way):
    x = mt.asarray(np.arange(8.0))
    n = way(x)
    x[0] = 9.0
    x += 1.0
    assert n.tolist() == list(range(8))


def test_a_copy_belongs_to_the_caller():
    x = mt.asarray([1.0, 2.0])
    for n in (x.numpy(), x.to_numpy(), np.array(x), np.asarray(x, copy=True)):
        n[0] = 9.0
    assert x.tolist() == [1.0, 2.0]


def test_an_array_is_no_buffer_of_its_own():
    with pytest.raises(TypeError):
        memoryview(mt.ones(2))
    assert not hasattr(mt.ones(2), "__array_interface__")


# ----- the other way --------------------------------------------------------------------------------------------------


def imported_by_asarray(n):
    return mt.asarray(n)


def imported_by_asarray_with_a_dtype(n):
    return mt.asarray(n, dtype=n.dtype)


def imported_by_array(n):
    return mt.asarray(n, copy=True)


def imported_as_a_buffer(n):
    return mt.asarray(memoryview(n))


def imported_by_dlpack(n):
    return mt.from_dlpack(n)


def imported_as_an_operand(n):
    return mt.positive(n)


def imported_by_reshape(n):
    return mt.reshape(n, (2, 2))


def imported_to_a_mesh(n):
    return mt.distribute(n, mt.Mesh({"a": 2}), a=mt.Shard(0))


def imported_from_dask(n):
    import dask
    import dask.array as da

    with dask.config.set(scheduler="sync"):
        return mt.from_dask(da.from_array(n, chunks=2), mt.Mesh({"a": 2}), a=mt.Shard(0))


def imported_from_a_persisted_dask_array(n):
    import dask
    import dask.array as da

    with dask.config.set(scheduler="sync"):
        graph = {("n", 0): n[:2], ("n", 1): n[2:]}
        return mt.from_dask(da.Array(graph, "n", ((2, 2),), n.dtype), mt.Mesh({"a": 2}), a=mt.Shard(0))


def imported_by_full(n):
    return mt.full((4,), n)


def imported_by_stack(n):
    return mt.stack([n, n])[0]


def imported_by_prefetch(n):
    with mt.prefetch([n]) as batches:
        return next(batches)


def imported_by_broadcast(n):
    return mt.broadcast_to(n, (4,))


def imported_by_unpickling(n):
    buffers = []
    pickled = pickle.dumps(mt.asarray(n), 5, buffer_callback=buffers.append)
    return pickle.loads(pickled, buffers=[memoryview(n)])


@pytest.mark.parametrize("how", [v for k, v in list(globals().items()) if k.startswith("imported_")])
def test_writes_to_the_source_do_not_reach_the_array(how):
    n = np.arange(4.0)
    x = how(n)
    before = np.array(x)
    n[:] = 9.0
    np.testing.assert_array_equal(np.asarray(x), before)


def test_memory_that_is_lent_is_not_written_by_us():
    n = np.arange(4.0)
    for x in (mt.asarray(n, copy=False), mt.from_dlpack(n, copy=False)):
        assert np.shares_memory(x._buf, n)
        x[0] = 5.0
        x += 1.0
    assert n.tolist() == [0, 1, 2, 3]
    assert "promises not to write" in mt.asarray.__doc__


# ----- pickles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_every_protocol(dtype, protocol):
    x = mt.astype(mt.reshape(mt.arange(6) % 2, (2, 3)), dtype)
    for part in (x, x.T, x[:, ::-1], x[:0], x[0, 1]):
        y = pickle.loads(pickle.dumps(part, protocol))
        assert (y.shape, y.dtype) == (part.shape, part.dtype)
        assert (
            bits(np.asarray(y)) == bits(np.asarray(part))
            if not y.ndim
            else np.all(bits(np.asarray(y)) == bits(np.asarray(part)))
        )
        if y.ndim == 2 and y.size:
            y[0, 0] = 0


def test_out_of_band_buffers_cost_no_copy_and_are_read_only():
    x = mt.ones(1000)
    buffers = []
    pickled = pickle.dumps(x, 5, buffer_callback=buffers.append)
    assert len(pickled) < 500
    assert buffers[0].raw().readonly
    y = pickle.loads(pickled, buffers=buffers)
    assert np.shares_memory(y._buf, x._buf)
    x[0] = 5.0
    y[1] = 7.0
    assert (float(x[1]), float(y[0])) == (1.0, 1.0)
    received = bytearray(buffers[0].raw())  # what a transport hands in, and may use again
    z = pickle.loads(pickled, buffers=[received])
    received[:] = bytes(len(received))
    assert z.tolist() == [1.0] * 1000


def test_snapshots_are_not_written_by_later_steps(tmp_path):
    x, n = mt.asarray(np.arange(1e5)), np.arange(1e5)
    handle = mt.save_async(str(tmp_path / "c"), {"x": x, "n": n})
    x[:] = 0.0
    n[:] = 0.0
    handle.wait()
    held = mt.load(str(tmp_path / "c"))
    assert float(held["x"].sum()) == float(held["n"].sum()) == float(np.arange(1e5).sum())
    tries(np.asarray(held["x"]))
    assert float(held["x"].sum()) == float(np.arange(1e5).sum())


def test_errors_are_typed():
    assert issubclass(errors.ConcurrentWriteError, RuntimeError)
