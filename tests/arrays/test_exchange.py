"""DLPack in both directions: no copy where none is needed, and never a write that the other side sees."""

from __future__ import annotations

import numpy as np
import pytest

from meshtape import arrays as mt


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
