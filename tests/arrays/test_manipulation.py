"""Shapes, joining, casting, creation and matrix products: NumPy is the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from meshtape import arrays as mt
from meshtape.arrays.core.errors import DTypeError, ShapeError

BOUNDED = settings(max_examples=60, deadline=None)

SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


def ramp(shape, dtype=np.float64):
    return np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)


def same(got, expected):
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(got), expected)


@BOUNDED
@given(SHAPES, st.data())
def test_transposes(shape, data):
    n = ramp(shape)
    x = mt.asarray(n)
    axes = data.draw(st.permutations(range(n.ndim)))
    same(mt.permute_dims(x, axes), n.transpose(axes))
    same(mt.permute_dims(x, [a - n.ndim for a in axes]), n.transpose(axes))
    if n.ndim >= 2:
        same(mt.matrix_transpose(x), np.swapaxes(n, -1, -2))
        same(x.mT, np.swapaxes(n, -1, -2))
        count = data.draw(st.integers(1, n.ndim))
        source = data.draw(st.permutations(range(n.ndim)))[:count]
        target = data.draw(st.permutations(range(n.ndim)))[:count]
        same(mt.moveaxis(x, source, target), np.moveaxis(n, source, target))


@BOUNDED
@given(SHAPES, st.data())
def test_reshape_of_views(shape, data):
    n = ramp(shape)
    axes = data.draw(st.permutations(range(n.ndim)))
    wanted = list(data.draw(st.permutations(shape)))
    x = mt.permute_dims(mt.asarray(n), axes)
    same(mt.reshape(x, wanted), n.transpose(axes).reshape(wanted))
    same(x.reshape(-1), n.transpose(axes).reshape(-1))
    if wanted and 0 not in shape:
        wanted[data.draw(st.integers(0, len(wanted) - 1))] = -1
        same(x.reshape(*wanted), n.transpose(axes).reshape(wanted))


@BOUNDED
@given(SHAPES, st.data())
def test_flip_expand_squeeze(shape, data):
    n = ramp(shape)
    x = mt.asarray(n)
    same(mt.flip(x), np.flip(n))
    axis = data.draw(st.integers(-n.ndim - 1, n.ndim))
    same(mt.expand_dims(x, axis=axis), np.expand_dims(n, axis))
    same(mt.squeeze(mt.expand_dims(x, axis=axis), axis), n)
    if n.ndim:
        axis = data.draw(st.integers(-n.ndim, n.ndim - 1))
        same(mt.flip(x, axis=axis), np.flip(n, axis))


@BOUNDED
@given(SHAPES, st.data())
def test_concat_and_stack(shape, data):
    count = data.draw(st.integers(1, 3))
    if shape:
        axis = data.draw(st.integers(-len(shape), len(shape) - 1))
        parts = []
        for _ in range(count):
            s = list(shape)
            s[axis] = data.draw(st.integers(0, 3))
            parts.append(ramp(s, data.draw(st.sampled_from([np.float64, np.float32, np.int64]))))
        same(mt.concat([mt.asarray(p) for p in parts], axis=axis), np.concatenate(parts, axis))
        same(mt.concat(parts, axis=None), np.concatenate(parts, None))
    axis = data.draw(st.integers(-len(shape) - 1, len(shape)))
    n = [ramp(shape) + i for i in range(count)]
    same(mt.stack([mt.asarray(p) for p in n], axis=axis), np.stack(n, axis))


@BOUNDED
@given(hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=4, min_side=0, max_side=3))
def test_broadcasting(found):
    a, b = (ramp(s) for s in found.input_shapes)
    same(mt.broadcast_to(mt.asarray(a), found.result_shape), np.broadcast_to(a, found.result_shape))
    for got, expected in zip(mt.broadcast_arrays(a, mt.asarray(b)), np.broadcast_arrays(a, b), strict=True):
        same(got, expected)


@BOUNDED
@given(hnp.mutually_broadcastable_shapes(signature=np.matmul.signature, max_dims=4, min_side=0, max_side=3), st.data())
def test_matmul_is_numpys(found, data):
    dtypes = [data.draw(st.sampled_from([np.float64, np.float32, np.int64, np.complex128])) for _ in found.input_shapes]
    a, b = (ramp(s, d) for s, d in zip(found.input_shapes, dtypes, strict=True))
    if a.ndim == 0 or b.ndim == 0:
        return
    same(mt.matmul(mt.asarray(a), mt.asarray(b)), np.asarray(np.matmul(a, b)))
    same(mt.asarray(a) @ b, np.asarray(np.matmul(a, b)))


@BOUNDED
@given(
    st.sampled_from(["float64", "float32", "float16", "int32", "uint8", "bool"]),
    st.sampled_from(["float64", "float32", "int64", "bool", "complex64"]),
)
def test_astype_is_numpys(source, target):
    n = np.array([0, 1, 2], source)
    x = mt.asarray(n)
    same(mt.astype(x, target), n.astype(target))
    same(x.astype(getattr(mt, target)), n.astype(target))
    assert mt.astype(x, source, copy=False) is x


def test_float8_and_bfloat16_casts():
    x = mt.asarray([0.0, 1.0, -2.5, 300.0])
    for dtype in (mt.bfloat16, mt.float8_e4m3fn, mt.float8_e5m2):
        assert x.astype(dtype).dtype == dtype
        assert x.astype(dtype).astype(mt.float64)[:2].tolist() == [0.0, 1.0]


# ----- creation -------------------------------------------------------------------------------------------------------


def test_creation_is_numpys():
    same(mt.zeros((2, 3)), np.zeros((2, 3)))
    same(mt.ones(3, dtype=mt.int32), np.ones(3, np.int32))
    same(mt.full((2,), 7), np.full((2,), 7))
    same(mt.arange(5), np.arange(5))
    same(mt.arange(1, 10, 3), np.arange(1, 10, 3))
    same(mt.arange(5, 0, -2.0), np.arange(5, 0, -2.0))
    same(mt.linspace(0, 1, 5), np.linspace(0, 1, 5))
    same(mt.linspace(0, 1, 4, endpoint=False), np.linspace(0, 1, 4, endpoint=False))
    same(mt.eye(2, 3, k=1), np.eye(2, 3, 1))
    assert mt.empty((0, 2)).shape == (0, 2)
    x = mt.ones((2, 2), dtype=mt.float32)
    same(mt.zeros_like(x), np.zeros((2, 2), np.float32))
    same(mt.ones_like(x, dtype=mt.int8), np.ones((2, 2), np.int8))
    same(mt.full_like(x, 3), np.full((2, 2), 3, np.float32))


@pytest.mark.parametrize("obj", [3, 2.5, True, 1j, [1, 2], [[1.0], [2.0]], (), [], np.float32(2), range(3)])
def test_asarray_is_numpys(obj):
    same(mt.asarray(obj), np.asarray(obj))


def test_asarray_of_nested_arrays():
    assert mt.asarray([mt.asarray(1.0), 2.0]).tolist() == [1.0, 2.0]
    assert mt.asarray([mt.arange(2), mt.arange(2)]).tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize("obj", ["text", [object()], None, {"a": 1}])
def test_asarray_refuses_what_is_no_number(obj):
    with pytest.raises(DTypeError, match=r"\[asarray\]"):
        mt.asarray(obj)


# ----- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: mt.reshape(x, (4, 2)), r"\[reshape\].*\(2, 3\).*\(4, 2\)"),
        (lambda x: mt.reshape(x, (-1, -1)), r"\[reshape\]"),
        (lambda x: mt.reshape(x, (-2, 3)), r"\[reshape\]"),
        (lambda x: mt.reshape(mt.zeros((0, 3)), (-1, 0)), r"\[reshape\]"),
        (lambda x: mt.permute_dims(x, (0,)), r"\[permute_dims\]"),
        (lambda x: mt.permute_dims(x, (0, 0)), r"\[permute_dims\]"),
        (lambda x: mt.moveaxis(x, 0, 2), r"\[moveaxis\]"),
        (lambda x: mt.moveaxis(x, (0, 1), 0), r"\[moveaxis\]"),
        (lambda x: mt.broadcast_to(x, (3, 2)), r"\[broadcast_to\]"),
        (lambda x: mt.broadcast_to(x, (3,)), r"\[broadcast_to\]"),
        (lambda x: mt.squeeze(x, 0), r"\[squeeze\].*\(2, 3\)"),
        (lambda x: mt.expand_dims(x, axis=4), r"\[expand_dims\]"),
        (lambda x: mt.flip(x, axis=2), r"\[flip\]"),
        (lambda x: mt.concat([]), r"\[concat\]"),
        (lambda x: mt.concat([x, mt.ones((2, 2))], axis=0), r"\[concat\].*\(2, 3\), \(2, 2\)"),
        (lambda x: mt.concat([x, mt.ones(2)]), r"\[concat\]"),
        (lambda x: mt.matrix_transpose(mt.ones(2)), r"\[matrix_transpose\]"),
        (lambda x: mt.ones(2).T, r"\[T\]"),
        (lambda x: mt.matmul(x, x), r"\[matmul\].*\(2, 3\) @ \(2, 3\)"),
        (lambda x: mt.matmul(x, mt.asarray(1.0)), r"\[matmul\]"),
        (lambda x: mt.zeros((2, -1)), r"negative"),
        (lambda x: x.item(), r"\[item\].*\(2, 3\)"),
    ],
)
def test_errors_name_the_function_and_the_shapes(call, words):
    with pytest.raises(ShapeError, match=words):
        call(mt.asarray(ramp((2, 3))))


def test_python_numbers_from_arrays():
    assert float(mt.asarray(2.5)) == 2.5
    assert int(mt.asarray(2)) == 2
    assert complex(mt.asarray(1j)) == 1j
    assert [10, 20, 30][mt.asarray(1)] == 20
    assert bool(mt.asarray([True]))
    for bad in (lambda: float(mt.ones(2)), lambda: int(mt.asarray(1j)), lambda: [1][mt.asarray(0.0)], lambda: len(mt.asarray(1))):  # fmt: skip
        with pytest.raises(TypeError):
            bad()
    with pytest.raises(ValueError, match="ambiguous"):
        bool(mt.ones(2))
    with pytest.raises(TypeError):
        hash(mt.ones(2))
    with pytest.raises(TypeError, match="asarray"):
        mt.Array()
    assert len(mt.ones((3, 2))) == 3
    assert [r.tolist() for r in mt.asarray([[1], [2]])] == [[1], [2]]


def test_text_forms():
    assert repr(mt.arange(3)) == "Array([0, 1, 2])"
    assert repr(mt.asarray([True])) == "Array([ True])"
    assert repr(mt.ones(2, dtype=mt.float32)) == "Array([1., 1.], dtype=float32)"
    assert repr(mt.zeros((0, 3))) == "Array([], shape=(0, 3), dtype=float64)"
    assert f"{mt.asarray(1.5):.2f}" == "1.50"
    html = mt.ones((2, 3))._repr_html_()
    assert "(2, 3)" in html
    assert "float64" in html


# ----- repeating, rolling, taking apart -------------------------------------------------------------------------------


def n(x):
    return np.asarray(x)


def test_tile_roll_unstack_are_numpys():
    x = np.arange(6).reshape(2, 3)
    a = mt.asarray(x)
    for reps in ((2,), (2, 1), (1, 0), (3, 1, 2), ()):
        np.testing.assert_array_equal(n(mt.tile(a, reps)), np.tile(x, reps))
    for shift, axis in ((1, None), (-7, 1), ((1, 2), (0, 1)), (2, (0, 1)), (0, 0), ((1, 1), (0, 0))):
        np.testing.assert_array_equal(n(mt.roll(a, shift, axis=axis)), np.roll(x, shift, axis))
    np.testing.assert_array_equal(n(mt.roll(mt.zeros((0, 2)), 3, axis=0)), np.zeros((0, 2)))
    for axis in (0, 1, -1):
        for got, want in zip(mt.unstack(a, axis=axis), np.unstack(x, axis=axis), strict=True):
            np.testing.assert_array_equal(n(got), want)


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_repeat_is_numpys(axis):
    x = np.arange(6).reshape(2, 3)
    a = mt.asarray(x)
    size = x.size if axis is None else x.shape[axis]
    for r in (0, 2, np.array(3), np.array([2]), np.arange(size)):
        np.testing.assert_array_equal(n(mt.repeat(a, mt.asarray(r), axis=axis)), np.repeat(x, r, axis))
    with pytest.raises(ShapeError, match=r"\[repeat\]"):
        mt.repeat(a, mt.asarray([1] * (size + 1)), axis=axis)
    with pytest.raises(ValueError, match="negative"):
        mt.repeat(a, -1, axis=axis)


def test_triangles_and_grids():
    x = np.arange(24).reshape(2, 3, 4)
    for k in (-3, -1, 0, 2, 4):
        np.testing.assert_array_equal(n(mt.tril(mt.asarray(x), k=k)), np.tril(x, k))
        np.testing.assert_array_equal(n(mt.triu(mt.asarray(x), k=k)), np.triu(x, k))
    assert mt.tril(mt.ones((2, 2), dtype=mt.bool)).dtype == mt.bool
    parts = [np.arange(2), np.arange(3.0), np.arange(4)]
    for indexing in ("xy", "ij"):
        for got, want in zip(
            mt.meshgrid(*map(mt.asarray, parts), indexing=indexing), np.meshgrid(*parts, indexing=indexing), strict=True
        ):
            np.testing.assert_array_equal(n(got), want)
            assert got.dtype == want.dtype
    with pytest.raises(ShapeError, match="one dimension"):
        mt.meshgrid(mt.ones((2, 2)))


def test_broadcast_shapes():
    assert mt.broadcast_shapes((2, 1), (3,), ()) == (2, 3)
    assert mt.broadcast_shapes((None, 3), (1, 3)) == (None, 3)
    assert mt.broadcast_shapes((None,), (4,)) == (4,)
    with pytest.raises(ShapeError, match=r"\(2,\), \(3,\)"):
        mt.broadcast_shapes((2,), (3,))


def test_expand_dims_by_several_axes():
    x = mt.ones((2, 3))
    for axis in (0, 1, 2, -1, (0, 1), (0, -1), (1, 3), (-2, 0), ()):
        assert mt.expand_dims(x, axis).shape == np.expand_dims(np.ones((2, 3)), axis).shape
    for axis in (3, -4):
        with pytest.raises(IndexError, match="out of bounds"):
            mt.expand_dims(x, axis)
