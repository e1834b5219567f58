"""Work that is put off until a value is needed: done once, only where somebody waits for it, with errors where they
belong."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays import OPS
from meshtape.parallel.mesh import sharded_array
from meshtape.parallel.partition.rank_program import LocalCall


class Runs:
    """What a mesh's runtime was asked to run: the names of the ops of each program, each time it ran."""

    def __init__(self, mesh: mt.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
        self.programs: list[list[str]] = []
        self.loads = 0
        load = mesh.runtime.load

        def noted(program: Any, names: Any) -> Any:
            self.loads += 1
            run = load(program, names)

            def call(handles: Any) -> Any:
                self.programs.append([s.op.name for s in program.steps if isinstance(s, LocalCall)])
                return run(handles)

            return call

        monkeypatch.setattr(mesh.runtime, "load", noted)


@pytest.fixture
def mesh() -> mt.Mesh:
    return mt.Mesh({"a": 2, "b": 2})


@pytest.fixture
def runs(mesh: mt.Mesh, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(mesh, monkeypatch)


def put(mesh: mt.Mesh, *shape: int) -> mt.Array:
    return mt.distribute(np.ones(shape), mesh, a=mt.Shard(0))


# ----- once, and only what is wanted ----------------------------------------------------------------------------------


def test_plots_read_an_array_at_once(monkeypatch):
    """And not element by element, each of which would be a run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    mesh = mt.Mesh({"a": 2})
    host = np.random.default_rng(0).normal(size=500)
    x = mt.compute(mt.distribute(host, mesh, a=mt.Shard(0)) + 0)
    read = []
    fetch = mesh.runtime.fetch
    monkeypatch.setattr(mesh.runtime, "fetch", lambda *args: read.append(args) or fetch(*args))
    counts, _, _ = plt.hist(x, bins=10)
    plt.plot(x)
    plt.close("all")
    np.testing.assert_array_equal(counts, np.histogram(host, 10)[0])
    assert 0 < len(read) < 20


def test_shape_dtype_and_sharding_are_known_before_anything_runs(mesh, runs):
    x = put(mesh, 4, 6)
    y = mt.nn.relu(x @ mt.distribute(np.ones((6, 2), "f4"), mesh, b=mt.Shard(1)))
    assert (y.shape, y.dtype, y.sharding) == ((4, 2), np.float64, mt.Sharding(mesh, a=mt.Shard(0), b=mt.Shard(1)))
    assert runs.programs == []


def test_nothing_is_computed_twice_while_it_is_alive(mesh, runs):
    y = mt.exp(put(mesh, 4))
    z = y + 1
    np.asarray(z)
    np.asarray(y)
    np.asarray(y * z)
    assert [op for program in runs.programs for op in program] == ["exp", "add", "multiply"]


def test_what_nobody_holds_is_not_computed(mesh, runs):
    x = put(mesh, 4)
    dropped, kept = mt.exp(x), mt.sin(x)
    inner = mt.cos(x)
    outer = inner + 1
    del dropped, inner
    gc.collect()
    mt.compute(kept)
    assert runs.programs == [["sin", "cos", "add"]]
    assert float(outer[0]) == np.cos(1) + 1


def test_nothing_pending_is_no_run(mesh, runs):
    x = put(mesh, 4)
    y = x + 1
    del y
    gc.collect()
    mt.compute(x)
    np.asarray(x)
    assert runs.programs == []


def test_a_loop_is_prepared_once(mesh, runs):
    x = put(mesh, 4)
    for _ in range(5):
        x = mt.compute(mt.tanh(x) * 2)
    assert (runs.loads, len(runs.programs)) == (1, 5)


def test_the_same_call_twice_is_one(mesh, runs):
    x = put(mesh, 4)
    a, b = mt.exp(x), mt.exp(x)
    np.testing.assert_array_equal(a, b)
    assert runs.programs == [["exp"]]


def test_endless_loops_are_run_in_pieces(mesh, runs, monkeypatch):
    monkeypatch.setattr(sharded_array, "PENDING_LIMIT", 50)
    x = put(mesh, 4)
    for _ in range(120):
        x = x + 1
    assert [len(p) for p in runs.programs] == [50, 50]
    assert len(mesh.pending) == 20
    np.testing.assert_array_equal(x, np.full(4, 121.0))


def test_a_write_makes_another_value(mesh):
    x = put(mesh, 4)
    y = x + 0
    x[1] = 5.0
    np.testing.assert_array_equal(y, [1, 1, 1, 1])
    np.testing.assert_array_equal(x, [1, 5, 1, 1])


def test_small_local_arrays_are_copied_to_every_rank(mesh):
    x = put(mesh, 4, 3)
    np.testing.assert_array_equal(x + mt.arange(3), np.ones((4, 3)) + np.arange(3))
    np.testing.assert_array_equal(np.arange(3) * x, np.ones((4, 3)) * np.arange(3))


def test_a_sum_is_still_there_to_be_carried_out(mesh):
    x = put(mesh, 4)
    y = mt.sum(x)
    assert y.sharding == mt.Sharding(mesh, a=mt.Partial())
    mt.compute(y)
    assert float(y) == 4.0
    assert np.asarray(mt.distribute(y, mesh)).shape == ()


# ----- errors at the op -----------------------------------------------------------------------------------------------


def test_errors_are_raised_by_the_call_that_is_wrong(mesh, runs):
    x = put(mesh, 4, 6)
    with pytest.raises(mt.errors.ShapeError, match=r"\[add\] shapes do not broadcast together: \(4, 6\), \(5,\)"):
        x + mt.ones(5)
    with pytest.raises(mt.errors.ShapeError, match=r"\[matmul\] the contracted lengths differ: \(4, 6\) @ \(4, 6\)"):
        x @ x
    with pytest.raises(mt.errors.ArrayIndexError, match="index 9 is out of bounds for axis 0 with size 4"):
        x[9]
    with pytest.raises(TypeError):
        mt.bitwise_and(x, 1)
    with pytest.raises(mt.errors.MeshError, match=r"no axis 'model': its axes are 'a', 'b'"):
        mt.distribute(np.ones(3), mesh, model=mt.Shard(0))
    assert len(mesh.pending) == 0
    assert runs.programs == []
    np.testing.assert_array_equal(mt.sum(x), 24)


def test_two_meshes_do_not_mix(mesh):
    other = mt.Mesh({"a": 2})
    x, y = put(mesh, 4), put(other, 4)
    message = r"\[add\] arrays of two meshes in one op: Mesh\(a=2, b=2\) and Mesh\(a=2\)"
    with pytest.raises(mt.errors.MeshError, match=message):
        x + y
    with pytest.raises(mt.errors.MeshError, match=message):
        mt.compile(lambda x, y: x + y)(x, y)


def test_large_local_arrays_must_be_distributed_by_name(mesh):
    x = mt.distribute(np.ones(200_000), mesh, a=mt.Shard(0))
    message = r"\[multiply\] a local array of shape \(200000,\) \(1\.5 MiB\) beside arrays on .*use mt\.distribute"
    with pytest.raises(mt.errors.MeshError, match=message):
        x * mt.arange(200_000.0)
    np.testing.assert_array_equal(mt.sum(x * mt.distribute(np.ones(200_000), mesh)), 200_000)


def test_a_mask_of_a_split_array_has_no_length_yet(mesh):
    x = put(mesh, 4)
    with pytest.raises(mt.errors.ArrayIndexError, match=r"use mt\.where\(mask, x, 0\)"):
        x[x > 0]


def test_an_error_within_a_run_leaves_the_mesh_usable(mesh, monkeypatch):
    x = put(mesh, 8)
    safe = mt.compute(x + 1)

    def fails(block: np.ndarray) -> np.ndarray:
        raise MemoryError("too much")

    with monkeypatch.context() as m:
        y, z = mt.exp(x), mt.sin(x)
        m.setattr(OPS["exp"], "numpy", fails)
        with pytest.raises(mt.errors.RankLost, match=r"rank 0 failed in exp, called at .*test_deferred.*MemoryError"):
            np.asarray(y)
        for lost in (y, z):
            for use in (np.asarray, repr, lambda a: a + 1, mt.compute):
                with pytest.raises(mt.errors.MeshError, match="never computed, as the run that would have made it"):
                    use(lost)
    np.testing.assert_array_equal(mt.exp(x) + safe, np.exp(1) + np.full(8, 2.0))


def test_an_interrupted_run_is_not_taken_for_a_result(mesh, monkeypatch):
    def interrupted(block: np.ndarray) -> np.ndarray:
        raise KeyboardInterrupt

    y = mt.exp(put(mesh, 8))
    with monkeypatch.context() as m:
        m.setattr(OPS["exp"], "numpy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mt.compute(y)
    with pytest.raises(mt.errors.MeshError, match="KeyboardInterrupt"):
        np.asarray(y)


def test_a_constant_of_no_dimensions_is_an_array_on_every_rank():
    """Its block was a NumPy scalar once, which no view could be made of."""
    mesh = mt.Mesh({"a": 2})
    x, s = mt.distribute(mt.ones(4), mesh, a=mt.Shard(0)), mt.distribute(mt.asarray(2.0), mesh)
    g = mt.compile(mt.grad(lambda x, s: (x + s).sum(), argnums=1))(x, s)
    assert type(g._concrete()) is np.ndarray
    assert np.asarray(g) == 4.0


def test_an_error_of_an_argument_has_the_type_that_it_has_in_one_process(mesh):
    x = mt.distribute(np.arange(1, 9), mesh)
    for operands, place in (((x, x - 4), mesh), ((mt.asarray([1, 2]), mt.asarray([1, -1])), None)):
        with pytest.raises(mt.errors.ArgumentError, match="rank 0 failed in pow" if place else r"\[pow\]"):
            np.asarray(operands[0] ** operands[1])
