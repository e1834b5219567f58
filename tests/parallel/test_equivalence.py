"""The promise that everything in ``parallel`` serves: a computation gives the same numbers however its operands are
split.

Each op of the table is called on random placements over random meshes, ragged and empty blocks among them, and on
operands that are still sums waiting to be made. Value and cotangents equal those of the unsplit op, and every rank
holds the block that the sharding says it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_samples import In, samples
from random_programs import bound, programs, total

import meshtape as mt
import meshtape.parallel
from meshtape.arrays import OPS
from meshtape.autodiff.tape.tape import is_differentiable
from meshtape.parallel.sharding.factors import RULES

MESHES = [(n,) for n in range(1, 9)] + [(2, 2), (2, 3), (3, 2), (1, 4), (4, 2), (2, 1, 2), (2, 2, 2), (1, 3, 2)]
NAMES = ("a", "b", "c")


# ----- random placements ----------------------------------------------------------------------------------------------


def draw_sharding(data: st.DataObject, mesh: mt.Mesh, ndim: int, *, partial: bool = False) -> mt.Sharding:
    """Any placements of an array of ``ndim`` dimensions; where axes share a dimension, in either order."""
    choices: list[Any] = [mt.Replicate(), *(mt.Shard(d) for d in range(ndim))] + [mt.Partial()] * ((ndim + 1) * partial)
    order = data.draw(st.permutations(mesh.names), label="axes")
    return mt.Sharding(mesh, **{n: data.draw(st.sampled_from(choices), label=n) for n in order})


def place(data: st.DataObject, mesh: mt.Mesh, x: np.ndarray, rng: np.random.Generator, label: str) -> mt.Array:
    """``x`` on the mesh; perhaps as a sum, over some of the axes, that nobody has carried out yet."""
    partial = summable(x) and data.draw(st.booleans(), label=f"{label} partial")
    return placed(x, draw_sharding(data, mesh, x.ndim, partial=partial), rng)


def summable(x: np.ndarray) -> bool:
    return x.dtype.kind in "fci" and x.dtype.itemsize > 1


def placed(x: np.ndarray, sharding: mt.Sharding, rng: np.random.Generator) -> mt.Array:
    """``x`` in this sharding, which may have pending sums: of parts that have nothing in common with ``x``."""
    mesh, sizes = sharding.mesh, sharding.mesh.describe()
    pending = [n for n, p in sharding.placements.items() if isinstance(p, mt.Partial)]
    if not pending:
        return mt.distribute(x, sharding)
    count = math.prod(sizes[n] for n in pending)
    parts = np.stack([In(x.shape, x.dtype, -2, 2).make(rng) for _ in range(count - 1)] + [x])
    parts[-1] -= parts[:-1].sum(axis=0, dtype=x.dtype)
    shards = {
        n: p if isinstance(p, mt.Replicate) else mt.Shard(0 if n in pending else p.dim + 1)
        for n, p in _in_nesting_order(sharding).items()
    }
    out = mt.sum(mt.distribute(parts, mesh, **shards), axis=0)
    assert {mesh.names[a] for a, _ in out.sharding.layout.partials} == {n for n in pending if sizes[n] > 1}
    return out


def _in_nesting_order(s: mt.Sharding) -> dict[str, Any]:
    first = [s.mesh.names[a] for _, axes in s.layout.shards for a in axes]
    return {n: s.placements[n] for n in (*first, *(n for n in s.mesh.names if n not in first))}


def check(mesh: mt.Mesh, got: Any, expected: np.ndarray, what: str) -> None:
    """Every rank's block is the part of ``expected`` that the sharding says."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype), what
    (whole,) = mesh.settle([got])
    blocks = mesh.runtime.fetch(whole._buf.handle, range(mesh.size))
    tolerance = 1e-9 if expected.dtype.itemsize >= 8 else 1e-5
    for rank, block in blocks.items():
        part = expected[whole.sharding.box(expected.shape, rank).slices]
        assert block.shape == part.shape, f"{what}, rank {rank}: {block.shape}, {whole.sharding} of {expected.shape}"
        if expected.dtype.kind in "biu":
            np.testing.assert_array_equal(block, part, err_msg=f"{what}, rank {rank}")
        else:
            wide = np.complex128 if expected.dtype.kind == "c" else np.float64
            np.testing.assert_allclose(
                block.astype(wide), part.astype(wide), tolerance, tolerance, err_msg=f"{what}, rank {rank}"
            )


def leaves(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


def equivalent(
    name: str,
    fn: Callable[..., Any],
    values: list[np.ndarray],
    operands: list[mt.Array],
    seed_sharding: Callable[[int], mt.Sharding],
    rng: np.random.Generator,
    *,
    compiled: bool,
) -> None:
    """Value and cotangents of ``fn(*operands)`` are those of ``fn(*values)``."""
    mesh = operands[0].sharding.mesh
    expected = leaves(fn(*map(mt.asarray, values)))
    run = mt.compile(fn) if compiled else fn
    what = f"{name} of {', '.join(str(x.sharding) for x in operands)}"
    for got, want in zip(leaves(run(*operands)), expected, strict=True):
        check(mesh, got, np.asarray(want), what)

    smooth = [i for i, e in enumerate(expected) if is_differentiable(e.dtype)]
    if OPS[name].nondifferentiable or not smooth or not any(is_differentiable(x.dtype) for x in values):
        return
    seeds = [In(expected[i].shape, expected[i].dtype).make(rng) for i in smooth]

    def cotangents(seeds: list[Any], *args: Any) -> Any:
        def outputs(*args: Any) -> Any:
            out = leaves(fn(*args))
            return [out[i] for i in smooth]

        return mt.vjp(outputs, *args)[1](seeds)

    want_all = cotangents([mt.asarray(s) for s in seeds], *map(mt.asarray, values))
    on_mesh = [mt.distribute(s, seed_sharding(s.ndim)) for s in seeds]
    pull = mt.compile(cotangents) if compiled else cotangents
    for i, (got, want) in enumerate(zip(pull(on_mesh, *operands), want_all, strict=True)):
        assert (got is None) == (want is None)
        if got is not None:
            check(mesh, got, np.asarray(want), f"cotangent {i} of {what}")


def draw_mesh(data: st.DataObject, device: str | None = None) -> mt.Mesh:
    sizes = data.draw(st.sampled_from(MESHES), label="mesh")
    return mt.Mesh(dict(zip(NAMES, sizes, strict=False)), device=device)


bounded = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)


# ----- the tests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_op_has_a_sharding_rule_and_a_sample(name):
    op = OPS[name]
    assert op in RULES or op.replicate_only, f"{name} has neither a sharding rule nor a replicate_only reason"
    assert samples("split", name) or name == "reshard", f"{name} has no sample in tests/op_samples.py"


def split_equals_unsplit(name: str, data: st.DataObject, mesh: mt.Mesh) -> None:
    """One random case."""
    sample = data.draw(st.sampled_from(samples("split", name)), label="sample")
    rng = np.random.default_rng(data.draw(st.integers(0, 1000), label="seed"))
    with np.errstate(all="ignore"):
        values = sample.make(rng)
        operands = [place(data, mesh, x, rng, f"operand {i}") for i, x in enumerate(values)]
        compiled = data.draw(st.booleans(), label="compiled")
        equivalent(name, sample.fn, values, operands, lambda n: draw_sharding(data, mesh, n), rng, compiled=compiled)


NAMES_OF_OPS = sorted(n for n in OPS if samples("split", n))


@pytest.mark.parametrize("name", NAMES_OF_OPS)
@settings(bounded, max_examples=6)
@given(data=st.data())
def test_split_equals_unsplit(name, data):
    split_equals_unsplit(name, data, draw_mesh(data))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("device", [None, "cuda:1"])
def test_split_equals_unsplit_many_times(gpus, device):
    """Some 23,000 cases over the table of ops, and a quarter of these on an emulated GPU."""
    with gpus(2):
        for name in NAMES_OF_OPS:

            @settings(bounded, max_examples=40 if device else 160)
            @given(data=st.data())
            def sample(data):
                split_equals_unsplit(name, data, draw_mesh(data, device))  # noqa: B023 (it is called at once)

            sample()


ON_PROCESSES = [
    "matmul",
    "getitem",
    "index_set",
    "concat",
    "sum",
    "max",
    "layer_norm",
    "softmax",
    "conv",
    "sort",
    "argmax",
    "where",
]


@pytest.mark.timeout(300)
def test_split_equals_unsplit_on_processes(processes):
    """A sample of the same on real worker processes: blocks travel, programs are pickled."""
    with mt.Mesh({"a": 2, "b": 2}, client=processes) as mesh:

        @settings(bounded, max_examples=24)
        @given(data=st.data())
        def sample(data):
            split_equals_unsplit(data.draw(st.sampled_from(ON_PROCESSES), label="op"), data, mesh)

        sample()


def test_split_equals_unsplit_on_a_device(gpus):
    """A sample of the same with blocks on an emulated GPU, where nothing may take them for NumPy's arrays."""
    with gpus(2):

        @settings(bounded, max_examples=60)
        @given(data=st.data())
        def sample(data):
            name = data.draw(st.sampled_from(NAMES_OF_OPS), label="op")
            split_equals_unsplit(name, data, draw_mesh(data, "cuda:1"))

        sample()


@pytest.mark.parametrize("name", NAMES_OF_OPS)
def test_operands_that_are_pending_sums(name):
    """Each operand in turn, and all together: a sum is put off only where the op is linear in just what is pending."""
    mesh, rng = mt.Mesh({"a": 2}), np.random.default_rng(3)
    pending, whole = mt.Sharding(mesh, a=mt.Partial()), mt.Sharding(mesh)
    with np.errstate(all="ignore"):
        for sample in samples("split", name):
            values = sample.make(rng)
            able = [i for i, x in enumerate(values) if summable(x)]
            for group in [[i] for i in able] + [able] * (len(able) > 1):
                operands = [placed(x, pending if i in group else whole, rng) for i, x in enumerate(values)]
                equivalent(name, sample.fn, values, operands, lambda n: whole, rng, compiled=False)


@pytest.mark.parametrize("name", [n for n in NAMES_OF_OPS if n.startswith("random_") and n != "random_fold_in"])
@settings(bounded, max_examples=8)
@given(data=st.data())
def test_a_rank_draws_only_its_part(name, data):
    """A draw that is wanted split is made in parts: the same numbers, and nothing moves."""
    sample = data.draw(st.sampled_from(samples("split", name)), label="sample")
    mesh, fn = draw_mesh(data), sample.fn
    key, *values = sample.make(np.random.default_rng(0))
    expected = fn(mt.asarray(key), *map(mt.asarray, values))
    wanted = draw_sharding(data, mesh, expected.ndim)
    on_mesh = mt.distribute(key, mesh)

    def draw(k: mt.Array) -> mt.Array:
        return mt.reshard(fn(k, *map(mt.asarray, values)), wanted)

    check(mesh, draw(on_mesh), np.asarray(expected), name)
    program = mesh.rank_program(mt.compile(draw).program(on_mesh), [on_mesh.sharding])
    assert program.moved_bytes() == 0
    if any(mesh.sizes[a] > 1 for _, axes in wanted.layout.shards for a in axes):
        draws = [s for s in program.steps if getattr(s, "op", None) is OPS[name]]
        assert [program.layouts[s.outputs[0]] for s in draws] == [wanted.layout]


# ----- whole programs -------------------------------------------------------------------------------------------------


@settings(bounded, max_examples=60)
@given(program=programs(7, smooth=True), data=st.data())
def test_programs_of_many_ops(program, data):
    """Chains of ops, where moves are put off, joined and shared; value and gradient."""
    mesh, rng = draw_mesh(data), np.random.default_rng(data.draw(st.integers(0, 100), label="seed"))
    values = [In((4, 6)).make(rng, exact=False) for _ in range(2)]
    run = bound(program)

    def both(*operands: mt.Array) -> Any:
        def fn(*operands: mt.Array) -> tuple[mt.Array, mt.Array]:
            found = run(*operands)
            return found[-1], total(found)

        out, pull = mt.vjp(fn, *operands)
        return (*out, *pull((mt.ones_like(out[0]), mt.asarray(1.0))))

    operands = [place(data, mesh, x, rng, f"operand {i}") for i, x in enumerate(values)]
    compiled = mt.compile(both) if data.draw(st.booleans(), label="compiled") else both
    expected = both(*map(mt.asarray, values))
    for k, (got, want) in enumerate(zip(compiled(*operands), expected, strict=True)):
        scale = max(1.0, float(np.max(np.abs(np.asarray(want)), initial=0)))
        check(mesh, mt.asarray(got) / scale, np.asarray(want) / scale, f"output {k} of {[s[0] for s in program]}")
