"""What is wrong is refused by the call that is wrong, with an error that says what would be right; and nothing has
run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import dask
import numpy as np
import pytest
import zarr
from distributed import Client, LocalCluster

import meshtape as mt
from meshtape import errors
from meshtape.arrays.core.op import ShapeDtype
from meshtape.parallel.execution.memory_limits import check_memory
from meshtape.parallel.mesh.mesh import MOST_RANKS
from meshtape.parallel.sharding.placement import Layout

MESH, OTHER = mt.Mesh({"a": 2, "b": 2}), mt.Mesh({"a": 2, "b": 2})


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a mesh of this process nor its blocks are touched."""

    def run(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something ran")

    for mesh in (MESH, OTHER):
        for name in ("load", "call", "create", "fetch"):
            monkeypatch.setattr(mesh.runtime, name, run)


# ----- unknown axes ---------------------------------------------------------------------------------------------------

X = mt.distribute(np.arange(12.0).reshape(4, 3), MESH, a=mt.Shard(0))
NO_AXIS = r"Mesh\(a=2, b=2\) has no axis 'z': its axes are 'a', 'b'"


def shard_mapped(fn: Any, mesh: mt.Mesh = MESH) -> Any:
    rows = {"a": mt.Shard(0)}
    return mt.shard_map(fn, mesh, rows, rows)


@pytest.mark.parametrize(
    "use",
    {
        "distribute": lambda: mt.distribute(np.ones(4), MESH, z=mt.Shard(0)),
        "distribute, replicated": lambda: mt.distribute(np.ones(4), MESH, z=mt.Replicate()),
        "reshard": lambda: mt.reshard(X, z=mt.Shard(0)),
        "compiled": lambda: mt.compile(lambda x: mt.reshard(x, z=mt.Shard(0)))(X),
        "sharding": lambda: mt.Sharding(MESH, z=mt.Shard(0)),
        "other placements": lambda: X.sharding.with_placements(z=mt.Shard(0)),
        "submesh": lambda: MESH.submesh(z=0),
        "from_zarr": lambda: mt.from_zarr("nowhere", MESH, z=mt.Shard(0)),
        "shard_map": lambda: mt.shard_map(lambda x: x, MESH, {"z": mt.Shard(0)}, {})(X),
        "collective": lambda: shard_mapped(lambda x: mt.all_reduce(x, "z"))(X),
        "index": lambda: shard_mapped(lambda x: x + mt.axis_index("z"))(X),
    }.items(),
    ids=lambda case: case[0],
)
def test_an_axis_that_the_mesh_does_not_have(nothing_runs, use):
    with pytest.raises(errors.MeshError, match=NO_AXIS):
        use[1]()


# ----- placements and meshes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", ["0", None, 1.5, True, mt.Shard(0), [0]], ids=repr)
def test_a_dimension_is_a_number(dim):
    with pytest.raises(errors.MeshError, match=re.escape(f"Shard takes the number of a dimension, got {dim!r}")):
        mt.Shard(dim)


def test_numbers_of_numpy_are_numbers():
    assert mt.Shard(np.int64(1)) == mt.Shard(1)
    assert repr(mt.Shard(np.int64(1))) == "Shard(1)"


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: mt.Partial("mean"), "Partial takes one of sum, prod"),
        (lambda: mt.parallel.parse_placement("Gather(0)"), "is no placement: write Shard"),
        (lambda: mt.Sharding({"a": 2}, a=mt.Shard(0)), r"a sharding is made of a Mesh and placements, got \{'a': 2\}"),
        (lambda: mt.distribute(np.ones(4), MESH, a=mt.Shard), r"must be Shard\(dim\), Replicate\(\) or Partial\(op\)"),
        (lambda: MESH.submesh(a="x"), "places 0 to 1 along axis 'a', got 'x'"),
        (lambda: MESH.coordinates(4), "has ranks 0 to 3, got 4"),
        (lambda: MESH.coordinates(-1), "has ranks 0 to 3, got -1"),
        (lambda: mt.Mesh({"a": MOST_RANKS, "b": 2}), "a mesh has at most 1,048,576 ranks, got 2,097,152"),
    ],
)
def test_what_is_no_placement_and_no_mesh(use, message):
    with pytest.raises(errors.MeshError, match=message):
        use()


def test_one_dimension_has_one_name():
    """Of Shard(0) and Shard(-2) nobody could say which is the outer one."""
    with pytest.raises(
        errors.ShardingConflict, match=r"calls one dimension of an array of shape \(4, 3\) both 0 and -2"
    ):
        mt.distribute(np.ones((4, 3)), MESH, a=mt.Shard(0), b=mt.Shard(-2))
    x = mt.distribute(np.arange(4), MESH, b=mt.Shard(-1), a=mt.Shard(-1))
    assert x.sharding == mt.Sharding(MESH, b=mt.Shard(0), a=mt.Shard(0))


# ----- arrays of two meshes -------------------------------------------------------------------------------------------

Y = mt.distribute(np.ones((4, 3)), OTHER)
WHERE = mt.distribute(np.array([0, 1]), OTHER)


def written() -> Any:
    z = X * 1
    z[0] = Y[0]
    return z


@pytest.mark.parametrize(
    "use",
    {
        "an op": lambda: X + Y,
        "a product": lambda: X @ Y.mT,
        "many operands": lambda: mt.concat([X, Y]),
        "a choice": lambda: mt.where(X > 0, Y, X),
        "an index": lambda: X[WHERE],
        "values that are written": lambda: X.at[0].set(Y[0]),
        "in place": written,
        "compiled": lambda: mt.compile(lambda x, y: x + y)(X, Y),
        "compiled, from around": lambda: mt.compile(lambda x: x + Y)(X),
        "a gradient": lambda: mt.grad(lambda x: mt.sum(x * Y))(X),
        "an optimizer": lambda: (opt := mt.optim.adam(0.1)).update({"w": X}, {"w": Y}, opt.init({"w": X})),
        "explain": lambda: mt.explain(lambda x, y: x + y, X, Y),
        "per-rank code": lambda: shard_mapped(lambda x: x)(Y),
        "a loop": lambda: mt.scan(lambda c, y: (c + y, None), X, [Y]),
    }.items(),
    ids=lambda case: case[0],
)
def test_arrays_of_two_meshes(nothing_runs, use):
    with pytest.raises(errors.MeshError, match="arrays of two meshes"):
        use[1]()


@pytest.mark.parametrize(
    "use",
    {
        "a compiled argument": lambda: mt.compile(lambda x, y: (x + 1, y + 1))(X, Y),
        "an argument that is not read": lambda: mt.compile(lambda x, y: x + 1)(X, Y),
        "a result from around": lambda: mt.compile(lambda x: (x + 1, Y))(X),
        "a carry from around": lambda: mt.scan(lambda c, _: (c + 1, Y), X, length=2),
        "blocks": lambda: MESH.run_on_blocks(print, [Y], {0: None}),
        "a value to be settled": lambda: MESH.settle([Y]),
    }.items(),
    ids=lambda case: case[0],
)
def test_values_of_another_mesh_that_meet_in_no_op(use):
    with pytest.raises(errors.MeshError, match=r"is on another mesh: Mesh\(.*\), not Mesh\("):
        use[1]()


# ----- more than the workers can hold ---------------------------------------------------------------------------------


@pytest.fixture
def small() -> Iterator[Client]:
    """A worker that may use 8 MB."""
    calm = {f"distributed.worker.memory.{k}": False for k in ("target", "spill", "pause", "terminate")}
    with (
        dask.config.set(calm),
        LocalCluster(1, processes=False, memory_limit="8 MB", dashboard_address=None, silence_logs=50) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.mark.timeout(300)
def test_a_program_that_the_workers_have_no_memory_for(small, runs, tmp_path):
    value = np.ones(2_000_000)  # 16 MB
    message = r"may use 7\.\d MiB: take more workers, split what is replicated"
    with mt.Mesh({"a": 4}, client=small) as mesh:
        with runs(small) as done:
            for placement in (mt.Shard(0), mt.Replicate()):  # what ranks of a worker share is there once
                x = mt.distribute(value, mesh, a=placement)
                with pytest.raises(
                    errors.OutOfMemory, match=r"\[program\] ranks 0-3 .* would hold 15\.3 MiB.*" + message
                ):
                    np.asarray(mt.sum(x))
            y = mt.distribute(value[:1000], mesh, a=mt.Shard(0))
            grows = mt.compile(lambda y: mt.sum(y) + mt.zeros(2_000_000))
            with pytest.raises(errors.OutOfMemory, match=r"\[<?\w+>?\] ranks 0-3 .*" + message):
                grows(y)
            zarr.create_array(tmp_path / "x", shape=(2_000_000,), chunks=(500_000,), dtype="f8")
            stored = mt.from_zarr(tmp_path / "x", mesh, a=mt.Shard(0))
            with pytest.raises(MemoryError, match=message):
                stored.load()
        assert done == []
        assert float(mt.sum(y)) == 1000  # the mesh goes on
        assert float(mt.stream(lambda x: mt.sum(x), stored, memory="100 kB")) == 0


def test_what_is_certain_to_be_held_is_counted_and_nothing_else():
    f8 = np.dtype("f8")
    rows, whole, pending = Layout(((0, (0,)),)), Layout(), Layout((), ((0, "sum"),))
    homes, names = (0, 0, 1, 1), {0: "ranks 0-1", 1: "ranks 2-3"}

    def check(layout: Layout, limits: list[int | None], length: int = 5) -> None:
        check_memory("f", [(ShapeDtype((length,), f8), layout)], (4,), homes, limits, names)

    check(rows, [32, 8])  # blocks of 2, 2, 1 and 0
    with pytest.raises(
        errors.OutOfMemory, match=r"\[f\] ranks 0-1 would hold 32 B of blocks at once, and may use 31 B"
    ):
        check(rows, [31, 8])
    with pytest.raises(errors.OutOfMemory, match="ranks 2-3 would hold 8 B"):
        check(rows, [None, 7])
    check(whole, [40, 40])  # ranks of one process share it
    with pytest.raises(errors.OutOfMemory, match="ranks 0-1 would hold 80 B"):
        check(pending, [79, 80])  # contributions are each their own
    check(pending, [None, None])
    check(rows, [1, 1], length=0)
