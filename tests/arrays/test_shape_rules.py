"""The shape rule of every op gives the shape and dtype of what the op computes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from op_samples import WIDE, calls, recast

from meshtape import arrays as mt
from meshtape.arrays.core.errors import ShapeError
from meshtape.arrays.core.op import OPS, Op, ShapeDtype, op_named

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def in_every_dtype(name: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The calls of an op, and the same with all floats in another dtype; of arrays that cannot be written."""
    others = (np.float32,) if name in WIDE else (np.float32, np.float16, mt.bfloat16, np.complex64)
    seen = set()
    for args, params in calls(name):
        for cast in (args, *(tuple(recast(a, t) for a in args) for t in others)):
            key = repr((tuple(map(aval, cast)), params))
            if key not in seen:
                seen.add(key)
                for a in cast:
                    if isinstance(a, np.ndarray):
                        a.flags.writeable = False
                yield cast, params


def aval(x: Any) -> Any:
    return ShapeDtype(x.shape, x.dtype) if isinstance(x, np.ndarray) else x


def results(op: Op, out: Any) -> tuple[Any, ...]:
    return tuple(out) if op.nout > 1 else (out,)


@pytest.mark.parametrize("name", sorted(OPS))
def test_the_shape_rule_gives_the_shape_and_dtype_of_the_result(name):
    op = OPS[name]
    for args, params in in_every_dtype(name):
        avals = tuple(map(aval, args))
        try:
            outs = results(op, op.numpy(*args, **params))
        except TypeError:
            with pytest.raises(TypeError):
                op.avals(avals, params)
        else:
            assert tuple(aval(np.asarray(o)) for o in outs) == op.avals(avals, params), (args, params)


@pytest.mark.parametrize("name", sorted(n for n, op in OPS.items() if op.decompose is not None))
def test_a_decomposition_computes_the_same(name):
    op = OPS[name]
    for args, params in in_every_dtype(name):
        if any(isinstance(a, np.ndarray) and a.dtype.kind == "c" for a in args):
            continue
        expected = results(op, op.numpy(*args, **params))
        found = results(op, op.decompose(*(mt.asarray(a) if isinstance(a, np.ndarray) else a for a in args), **params))
        for got, want in zip(found, expected, strict=True):
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            wide = np.complex128 if want.dtype.kind == "c" else np.float64
            size = want.dtype.itemsize
            np.testing.assert_allclose(
                np.asarray(got).astype(wide),
                want.astype(wide),
                rtol=0.05 if size == 2 else 1e-5,
                atol={2: 0.05, 4: 2e-6}.get(size, 1e-9),
                err_msg=str((args, params)),
            )


@pytest.mark.parametrize("name", sorted(n for n, op in OPS.items() if op.linear or op.zero_preserving))
def test_what_the_record_says_is_so(name):
    """Of zero comes zero; and in each set of operands the op is additive, the others as they are."""
    op = OPS[name]
    for args, params in calls(name):
        if any(getattr(a, "dtype", np.dtype(float)).kind not in "fib" for a in args) or "dtype" in params:
            continue
        if op.zero_preserving:
            assert not np.any(op.numpy(*(a * 0 for a in args), **params))
        for group in op.linear:
            if all(isinstance(args[i], np.ndarray) for i in group):
                turned = [np.flip(a) if i in group else a for i, a in enumerate(args)]
                both = [a + b if i in group else a for i, (a, b) in enumerate(zip(args, turned, strict=True))]
                one, other, together = (op.numpy(*given, **params) for given in (args, turned, both))
                np.testing.assert_allclose(together, one + other, rtol=1e-6)


# ----- the op table ---------------------------------------------------------------------------------------------------


def test_an_op_is_its_name():
    op = OPS["add"]
    assert pickle.loads(pickle.dumps(op)) is op
    assert op_named("add") is op
    with pytest.raises(KeyError, match="nonsense"):
        op_named("nonsense")
    with pytest.raises(ValueError, match="add"):
        Op("add", ("x",), "add", lambda *a: a)


@pytest.mark.parametrize("name", sorted(OPS))
def test_operands_are_named(name):
    """By as many names as every call has operands; each op has a call."""
    op = OPS[name]
    assert calls(name), f"op {name!r} has no sample: add a row to tests/op_samples.py"
    assert len(set(op.operands)) == len(op.operands)
    for args, _ in calls(name):
        named = [o for o in op.operands if not o.startswith("*")]
        assert len(args) == len(named) or (len(args) >= len(named) and len(named) < len(op.operands))


@pytest.mark.parametrize(
    ("name", "shapes", "params"),
    [
        ("add", [(2,), (3,)], {}),
        ("matmul", [(2, 3), (2, 3)], {}),
        ("matmul", [(2, 2, 3), (3, 3, 4)], {}),
        ("concat", [(2, 3), (2, 4)], {"axis": 0}),
    ],
)
def test_shape_rules_refuse_what_the_op_refuses(name, shapes, params):
    op = OPS[name]
    with pytest.raises(ShapeError, match=rf"\[{name}\]"):
        op.avals(tuple(ShapeDtype(s, np.dtype(float)) for s in shapes), params)
    with pytest.raises(ValueError, match=r"."):
        op.numpy(*(np.ones(s) for s in shapes), **params)
