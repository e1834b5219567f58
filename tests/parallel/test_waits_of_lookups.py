"""Lookups in a dimension that is split: the host waits for each rank's check of the indices, says so, and can leave it
out."""

from __future__ import annotations

import numpy as np
import pytest

import meshtape as mt
from meshtape.errors import ArrayIndexError


@pytest.mark.parametrize("dtype", ["i8", "i2", "u1"])
def test_checks_of_ranks_are_waits_and_can_be_left_out(gpus, dtype):
    with gpus(1), mt.Mesh({"a": 2}, device="cuda:0") as mesh:
        x = mt.compute(mt.distribute(np.arange(8.0), mesh, a=mt.Shard(0)))
        at = mt.compute(mt.distribute(np.array([1, 5, 7], dtype), mesh))
        with mt.host_waits() as waits:
            y = mt.compute(x[at])
        assert len([w for w in waits if w.startswith("index arrays are checked")]) >= mesh.size
        with mt.index_checks(False), mt.host_waits() as waits:
            z = mt.compute(x[at])
        assert [w for w in waits if w.startswith("index arrays")] == []
        for found in (y, z):
            np.testing.assert_array_equal(np.asarray(found), [1.0, 5.0, 7.0])


def test_without_checks_indices_wrap_around_on_every_rank(gpus):
    with gpus(1), mt.Mesh({"a": 2}, device="cuda:0") as mesh:
        x = mt.distribute(np.arange(8.0), mesh, a=mt.Shard(0))
        at = mt.distribute(np.array([-1, 9, -17]), mesh)
        with mt.index_checks(False):
            np.testing.assert_array_equal(np.asarray(x[at]), [7.0, 1.0, 7.0])
        with pytest.raises(ArrayIndexError, match="index 9 is out of bounds for axis 0 with size 8"):
            np.asarray(x[at])
