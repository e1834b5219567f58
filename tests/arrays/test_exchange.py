"""DLPack in both directions: no copy where none is needed, and never a write that the other side sees."""

from __future__ import annotations

import numpy as np
import pytest

from meshtape import arrays as mt
from meshtape.arrays.backends.dlpack import contents
from meshtape.arrays.core.dispatch import wrap


def test_export_is_the_memory_itself_but_read_only():
    x = mt.asarray([1.0, 2.0, 3.0])
    n = np.from_dlpack(x)  # NumPy 2 speaks DLPack 1: the capsule is marked read-only
    assert np.shares_memory(n, x._buf)
    with pytest.raises(ValueError, match="read-only"):
        n[0] = 9
    x[0] = 5.0  # the writer copies
    assert n.tolist() == [1, 2, 3]
    assert x.tolist() == [5, 2, 3]


class Old:
    """A consumer from before DLPack 1: it passes no version."""

    def __init__(self, x, **kwargs):
        self.x, self.kwargs = x, kwargs

    def __dlpack__(self, **ignored):
        return self.x.__dlpack__(**self.kwargs)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


READ_ONLY, COPIED = 1, 2
"""DLPACK_FLAG_BITMASK_READ_ONLY and _IS_COPIED."""


class OnDevice:
    """An array of CuPy's, as far as DLPack asks: it never says that its memory is not to be written, and refuses to
    copy on its device."""

    def __init__(self, a):
        self.a, self.dtype, self.shape, self.ndim = a, a.dtype, a.shape, a.ndim

    def copy(self):
        return OnDevice(self.a.copy())

    def view(self, dtype):
        return OnDevice(self.a.view(dtype))

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if dl_device is not None and dl_device[0] == 1:
            return self.a.copy().__dlpack__(max_version=max_version)
        if copy:
            raise BufferError("copy=True only supported for copy to CPU.")
        return self.a.__dlpack__(max_version=max_version)


REQUESTS = {
    "versioned": ({"max_version": (1, 0)}, True, True),
    "newer": ({"max_version": (1, 3)}, True, True),
    "versioned, the memory": ({"max_version": (1, 0), "copy": False}, True, True),
    "versioned, a copy": ({"max_version": (1, 0), "copy": True}, False, False),
    "old": ({}, False, None),
    "old, the memory": ({"copy": False}, True, None),
    "old, a copy": ({"copy": True}, False, None),
    "old, version 0": ({"max_version": (0, 8)}, False, None),
}


@pytest.mark.parametrize("dtype", ["float64", "int8", "bool", "complex64", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_capsules_of_shared_memory_are_marked_read_only(device, request_, dtype):
    """Read from the C structure: who may not be told gets memory of his own."""
    asked, shares, marked = REQUESTS[request_]
    host = np.asarray(mt.astype(mt.asarray([1.0, 0.0, 1.0]), dtype)).copy()
    x = wrap(host if device == "cpu" else OnDevice(host))
    capsule = x.__dlpack__(**asked)
    found = contents(capsule)
    assert (found.tensor.data == host.ctypes.data) is shares
    if marked is None:
        assert not hasattr(found, "flags")
    else:
        assert bool(found.flags & READ_ONLY) is marked
    assert found.tensor.dtype.bits * found.tensor.dtype.lanes == host.dtype.itemsize * 8


def test_what_goes_to_the_host_is_a_copy_and_the_consumers():
    host = np.ones(3)
    capsule = wrap(OnDevice(host)).__dlpack__(max_version=(1, 0), dl_device=(1, 0))
    found = contents(capsule)
    assert found.tensor.data != host.ctypes.data
    assert not found.flags & READ_ONLY


def test_a_backend_that_cannot_mark_is_refused(monkeypatch):
    class Stubborn(OnDevice):
        def __dlpack__(self, **options):
            return self.a.__dlpack__()

    with pytest.raises(BufferError, match=r"marked read-only.*copy=True"):
        wrap(Stubborn(np.ones(3))).__dlpack__(max_version=(1, 0))


def test_an_old_consumer_gets_a_copy_unless_it_asks_for_the_memory():
    x = mt.asarray([1.0, 2.0])
    assert not np.shares_memory(np.from_dlpack(Old(x)), x._buf)
    shared = np.from_dlpack(Old(x, copy=False))
    assert np.shares_memory(shared, x._buf)
    x[0] = 7.0
    assert shared.tolist() == [1, 2]


def test_import_copies_unless_told_not_to():
    n = np.arange(3.0)
    x, y = mt.from_dlpack(n), mt.from_dlpack(n, copy=False)
    assert not np.shares_memory(x._buf, n)
    assert np.shares_memory(y._buf, n)
    y[0] = 9.0
    assert n.tolist() == [0, 1, 2]
    assert mt.from_dlpack(n, device="cpu", copy=True).device == mt.device("cpu")


def test_between_arrays():
    x = mt.asarray([1, 2])
    y = mt.from_dlpack(x)
    y[0] = 5
    assert x.tolist() == [1, 2]
    assert x.__dlpack_device__() == (1, 0)


def test_read_only_memory_can_be_exported_in_every_way():
    frozen = mt.broadcast_to(mt.asarray(1.0), (2,))
    for kwargs in (
        {},
        {"copy": False},
        {"copy": True},
        {"max_version": (1, 0)},
        {"max_version": (1, 0), "copy": False},
    ):
        assert np.from_dlpack(Old(frozen, **kwargs)).tolist() == [1, 1]


def test_asarray_shares_memory_only_when_told_to():
    n = np.arange(3.0)
    m = memoryview(n)
    x, y = mt.asarray(m), mt.asarray(m, copy=False)
    n[0] = 9.0
    assert x.tolist() == [0, 1, 2]
    assert np.shares_memory(y._buf, n)
    for obj, dtype in (([1, 2], None), (n, mt.float32)):
        with pytest.raises(ValueError, match="copy"):
            mt.asarray(obj, dtype=dtype, copy=False)


def test_versions_of_the_standard():
    x = mt.asarray(1)
    assert x.__array_namespace__(api_version="2024.12") is mt
    assert mt.__array_api_version__ == "2025.12"
    with pytest.raises(ValueError, match=r"2031.*2025\.12"):
        x.__array_namespace__(api_version="2031.12")


class Foreign:
    """An array of another library: all that is known of it is that it speaks DLPack."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_short_floats_are_exchanged_as_what_they_are(name):
    x = mt.astype(mt.asarray([[0.5, -2.0, mt.inf], [mt.nan, 0.0, 1.0]]), name)
    for key in (..., (slice(None), slice(None, None, 2)), (0, 0), slice(0, 0)):
        part = x[key]
        shared, copied = mt.from_dlpack(Foreign(part), copy=False), mt.asarray(Foreign(part))
        for y in (shared, copied):
            assert (y.dtype, y.shape) == (part.dtype, part.shape)
            bits = f"u{x.dtype.itemsize}"
            np.testing.assert_array_equal(np.asarray(y).view(bits), np.asarray(part).view(bits))
        if part.size:
            assert np.shares_memory(shared._buf, part._buf)
            assert not np.shares_memory(copied._buf, part._buf)
    with pytest.raises((BufferError, RuntimeError), match="dtype"):
        np.from_dlpack(x)  # NumPy says that it knows no such dtype, and takes it for no other


def test_short_floats_of_capsules_without_a_version():
    x = mt.ones(3, dtype=mt.bfloat16)
    assert mt.from_dlpack(Old(x)).dtype == mt.bfloat16


def test_pytorch_and_we_share_memory():
    torch = pytest.importorskip("torch")
    for dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "float32", "int8", "bool", "complex64"):
        theirs = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).to(getattr(torch, dtype))
        ours = mt.from_dlpack(theirs, copy=False)
        assert ours.dtype.name == dtype
        assert ours._buf.ctypes.data == theirs.data_ptr()
        back = torch.from_dlpack(ours)
        assert back.dtype == theirs.dtype
        assert back.data_ptr() == theirs.data_ptr()
        assert ours.astype(mt.complex64).tolist() == [[1, 0], [1, 1]]
    assert torch.from_dlpack(mt.arange(3)[::-1]).tolist() == [2, 1, 0]


def test_views_that_run_backwards_are_exported_as_copies():
    x = mt.arange(6).reshape(2, 3)
    for view in (x[::-1], x[:, ::-1], x[::-1, :0]):
        taken = np.from_dlpack(view)
        assert all(s >= 0 or n < 2 for s, n in zip(taken.strides, taken.shape, strict=True))
        np.testing.assert_array_equal(taken, view.numpy())
    with pytest.raises(BufferError, match="backwards"):
        x[::-1].__dlpack__(copy=False)
    assert np.shares_memory(np.from_dlpack(x[:1, ::1]), x._buf)


def test_numpy_is_told_where_a_copy_cannot_be_avoided():
    x = mt.ones(3)
    assert np.shares_memory(np.asarray(x, copy=False), x._buf)
    assert not np.shares_memory(np.array(x), x._buf)
    with pytest.raises(ValueError, match="copy=False"):
        np.asarray(x, dtype=np.float32, copy=False)


def test_only_arrays_on_a_gpu_speak_the_protocol_of_cuda():
    assert not hasattr(mt.ones(3), "__cuda_array_interface__")


def test_a_sign_that_pytorch_holds_back_is_read():
    """``z.conj().imag`` is a view of the imaginary parts with a bit that says "negative", which its DLPack leaves
    out."""

    class Negative(Old):
        def is_neg(self):
            return True

        def resolve_neg(self):
            return Old(-self.x)

    for copy in (None, True, False):
        assert mt.from_dlpack(Negative(np.ones(2)), copy=copy).tolist() == [-1.0, -1.0]
    assert mt.asarray(Negative(np.ones(2))).tolist() == [-1.0, -1.0]


class Parameter(Old):
    """A tensor of PyTorch that requires a gradient, which exports nothing; ``detach`` gives one that does not."""

    requires_grad = True
    is_leaf = True

    def __dlpack__(self, **options):
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")

    def __array__(self, *args, **kwargs):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")

    def detach(self):
        return Old(self.x)


def test_parameters_are_read_and_what_is_computed_of_them_is_not():
    """A leaf has no history that would be lost; the result of a calculation has."""
    weights = np.arange(3.0)
    for read in (mt.asarray, mt.from_dlpack):
        x = read(Parameter(weights))
        weights[0] = 7
        assert x.tolist() == [0, 1, 2]
        weights[0] = 0
        computed = Parameter(weights)
        computed.is_leaf = False
        with pytest.raises(mt.errors.ArgumentError, match="detach"):
            read(computed)
