"""Memory between the host, the device and other libraries: prefetching, exchange protocols, memory that is used up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import meshtape as mt

cp = pytest.importorskip("cupy")


def batches(n: int, shape: tuple[int, ...]) -> Iterator[dict[str, np.ndarray]]:
    for i in range(n):
        yield {"x": np.full(shape, i, np.float32), "i": np.asarray(i)}


@pytest.mark.parametrize("staging", [1 << 10, 32 << 20])
def test_prefetched_batches_are_intact_while_slow_kernels_read_them(staging: int, emulated: bool) -> None:
    """The consumer drops each batch at once, while the device still reads it: its memory must not be used again too
    early."""
    sums = []
    busy = cp.ones((64 if emulated else 4096,) * 2, cp.float32)
    for batch in mt.prefetch(batches(100, (512, 1024)), depth=3, staging_bytes=staging):
        busy = (
            busy @ busy * 1e-4
        )  # keeps the stream busy, so that the sum below is made long after the host has gone on
        sums.append((mt.sum(batch["x"]), batch["i"]))
        del batch
    for i, (total, number) in enumerate(sums):
        assert float(total) == i * 512 * 1024
        assert int(number) == i


def test_items_that_are_kept_stay_as_they_are() -> None:
    kept = list(mt.prefetch(batches(30, (64, 64)), depth=2))
    assert all(str(b["x"].device) == "cuda:0" for b in kept)
    assert [float(b["x"][0, 0]) for b in kept] == list(range(30))


def test_memory_of_a_long_run_is_bounded() -> None:
    pool = cp.get_default_memory_pool()
    pool.free_all_blocks()
    shape = (256, 1024)
    for batch in mt.prefetch(batches(200, shape), depth=2):
        mt.sum(batch["x"])
    cp.cuda.Device().synchronize()
    assert pool.total_bytes() < 16 * 4 * 256 * 1024


def test_another_stream_may_take_the_items() -> None:
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        sums = [mt.sum(b["x"]) for b in mt.prefetch(batches(20, (256, 256)))]
    stream.synchronize()
    assert [float(s) for s in sums] == [i * 65536.0 for i in range(20)]


# ----- other libraries ------------------------------------------------------------------------------------------------


def test_cupy_reads_the_memory_itself_and_sees_no_later_write() -> None:
    x = mt.asarray(np.arange(4.0))
    for take in (cp.asarray, cp.from_dlpack):
        taken = take(x)
        assert taken.data.ptr == x._buf.data.ptr
        x[0] = 9.0
        others = [cp.full(4, 99.0) for _ in range(3)]  # which would take memory that was given back
        assert taken.get().tolist() == [0, 1, 2, 3]
        x[0] = 0.0
        del others
    assert x.__cuda_array_interface__["data"][1]  # read-only


def test_who_takes_many_values_of_an_array_is_told_what_that_keeps() -> None:
    """Consumers of the older protocol do not say when they let go; DLPack's do."""
    x = mt.asarray(np.arange(4.0))

    def taken_and_written(take: Any) -> None:
        for _ in range(20):
            take(x)
            x[0] = 9.0

    taken_and_written(cp.from_dlpack)
    with pytest.warns(RuntimeWarning, match="16 values of one array is kept.*from_dlpack"):
        taken_and_written(cp.asarray)


def test_arrays_of_cupy_come_in() -> None:
    theirs = cp.arange(4.0)
    copied, shared = mt.asarray(theirs), mt.from_dlpack(theirs, copy=False)
    assert shared._buf.data.ptr == theirs.data.ptr
    shared[0] = 5.0
    assert theirs.get().tolist() == [0, 1, 2, 3]
    assert copied.tolist() == [0, 1, 2, 3]
    ours = [mt.asarray(theirs), mt.array(theirs), mt.asarray(theirs, copy=True), mt.asarray(theirs, dtype=mt.float64)]
    ours += [mt.asarray(theirs, device="cuda:0"), mt.asarray(theirs[::-1]), mt.from_dlpack(theirs)]
    held = mt.asarray(theirs, copy=False)
    assert held._buf.data.ptr == theirs.data.ptr
    held[0] = 7.0
    theirs[:] = -1
    assert [sorted(x.tolist()) for x in ours] == [[0, 1, 2, 3]] * len(ours)
    assert held.tolist() == [7, 1, 2, 3]


def test_batches_go_to_the_cpu_that_is_asked_for() -> None:
    items = [{"ours": mt.asarray([1.0, 2.0]), "theirs": cp.arange(2.0), "host": np.ones(2), "number": 3}]
    (moved,) = mt.prefetch(items, device="cpu")
    assert [str(moved[n].device) for n in ("ours", "theirs", "host")] == ["cpu"] * 3
    with mt.use_device("cpu"):
        (left,) = mt.prefetch(items)
    assert [str(left["ours"].device), str(left["host"].device)] == ["cuda:0", "cpu"]
    for call in (lambda: mt.prefetch(items, device="cuda:7"), lambda: mt.zeros(2, device="cuda:7")):
        with pytest.raises(mt.errors.DeviceError, match="there is no cuda:7"):
            call()


def test_pytorch_and_we_share_memory() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    for dtype in ("float32", "bfloat16", "float16", "int64"):
        theirs = torch.arange(4, device="cuda").to(getattr(torch, dtype))
        ours = mt.from_dlpack(theirs, copy=False)
        assert ours.dtype.name == dtype
        assert ours._buf.data.ptr == theirs.data_ptr()
        assert torch.from_dlpack(ours).data_ptr() == theirs.data_ptr()


def test_numbers_of_numpy_join_arrays_on_the_device() -> None:
    x = mt.asarray(np.ones(3, np.float32))
    for number in (np.float32(2), np.int64(2), np.bool_(True)):
        assert str((x * number).device) == "cuda:0"
        assert str((number + x).device) == "cuda:0"


def test_created_where_it_lives() -> None:
    for make in (mt.zeros, mt.ones, lambda s, dtype: mt.full(s, 3, dtype=dtype)):
        for dtype in (mt.float32, mt.bfloat16, mt.int8, mt.bool):
            x = make((2, 3), dtype=dtype)
            assert (str(x.device), x.shape, x.dtype) == ("cuda:0", (2, 3), dtype)


def test_memory_that_is_used_up_is_an_error_with_the_sizes() -> None:
    huge = 2**50
    for fn in (
        lambda: mt.zeros(huge, dtype=mt.int8),
        lambda: mt.broadcast_to(mt.asarray(np.ones(1, np.float32)), (huge,)) + 1.0,
        lambda: mt.compile(lambda a: a * 2.0 + 1.0)(mt.broadcast_to(mt.asarray(np.ones(1, np.float32)), (huge,))),
    ):
        with pytest.raises(mt.errors.OutOfMemory, match=r"are free, CuPy holds") as e:
            fn()
        assert isinstance(e.value, MemoryError)
    assert float(mt.sum(mt.ones(10))) == 10.0  # the device is as usable as before


def same_error(fn: Any) -> None:
    texts = []
    for where in ("cpu", "cuda:0"):
        with mt.use_device(where), pytest.raises(mt.errors.MeshtapeError) as e:
            fn()
        texts.append((type(e.value), str(e.value)))
    assert texts[0] == texts[1]


def test_errors_are_those_of_the_cpu() -> None:
    same_error(lambda: mt.ones(2) + mt.ones(3))
    same_error(lambda: mt.ones(2) & 1)
    same_error(lambda: mt.ones(2, dtype=mt.int8) + 300)
    same_error(lambda: mt.zeros(2, dtype=object))
