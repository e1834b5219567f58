"""Reading and writing by index: NumPy is the oracle, for random mixtures of every kind of key."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshtape
from meshtape import arrays as mt
from meshtape.arrays.core.errors import ArrayIndexError, ShapeError
from meshtape.arrays.core.op import recording
from meshtape.arrays.indexing import indexing

BOUNDED = settings(max_examples=150, deadline=None)

SHAPES = st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple)


def ramp(shape, dtype=np.float64):
    return np.arange(math.prod(shape), dtype=dtype).reshape(shape)


def bound(n):
    return st.none() | st.integers(-n - 2, n + 2)


def slices(n):
    step = st.none() | st.integers(-3, 3).filter(bool)
    return st.builds(slice, bound(n), bound(n), step)


@st.composite
def keys(draw, shape):
    """A key for ``shape``: ints, slices, ellipsis, newaxis, booleans, masks, integer arrays and lists, in any
    mixture."""
    items = []
    # Index arrays mostly fit together; where they do not, NumPy raises and so must we.
    common = draw(st.sampled_from([(), (1,), (2,), (3,), (2, 1), (2, 3), (0,)]))
    axis, stop = 0, draw(st.integers(0, len(shape)))
    ellipsis_at = draw(st.none() | st.integers(0, stop))
    while axis < stop:
        if ellipsis_at is not None and axis >= ellipsis_at:
            # What follows an ellipsis names the last dimensions.
            items.append(Ellipsis)
            axis += len(shape) - stop
            stop, ellipsis_at = len(shape), None
        if draw(st.integers(0, 7)) == 0:
            items.append(draw(st.sampled_from([None, None, True, False, np.True_, np.array(False)])))
        n = shape[axis]
        kind = draw(st.sampled_from(["slice", "slice", "int", "array", "mask", "mask2"]))
        if kind == "slice" or (kind == "int" and n == 0):
            items.append(draw(slices(n)))
        elif kind == "int":
            items.append(draw(st.integers(-n, n - 1).map(draw(st.sampled_from([int, np.int64])))))
        elif kind == "array":
            index_shape = draw(st.sampled_from([common, common, common[-1:], (1,)])) if n else (0,)
            size = math.prod(index_shape)
            flat = draw(st.lists(st.integers(-n, n - 1), min_size=size, max_size=size)) if n else []
            dtype = draw(st.sampled_from([np.int64, np.int32, np.int8]))
            a = np.array(flat, dtype).reshape(index_shape)
            items.append(a.tolist() if a.ndim and a.size and draw(st.booleans()) else a)
        else:
            width = 2 if kind == "mask2" and axis + 2 <= stop and ellipsis_at is None else 1
            mask_shape = shape[axis : axis + width]
            size = math.prod(mask_shape)
            flat = draw(st.lists(st.booleans(), min_size=size, max_size=size))
            items.append(np.array(flat, bool).reshape(mask_shape))
            axis += width - 1
        axis += 1
    if ellipsis_at is not None and draw(st.booleans()):
        items.append(Ellipsis)
    if draw(st.integers(0, 7)) == 0:
        items.append(draw(st.sampled_from([None, True, False])))
    key = tuple(items)
    if len(key) == 1 and draw(st.booleans()):
        key = key[0]
    return key


@st.composite
def shapes_and_keys(draw):
    shape = draw(SHAPES)
    return shape, draw(keys(shape))


@st.composite
def fitting(draw, target):
    """A shape that broadcasts to ``target``: dimensions dropped in front, some set to one, ones added in front."""
    shape = target[draw(st.integers(0, len(target))) :]
    shape = tuple(1 if draw(st.integers(0, 3)) == 0 else n for n in shape)
    return (1,) * draw(st.integers(0, 1)) + shape if len(shape) == len(target) else shape


def key_as_arrays(key):
    """The same key with our arrays in the place of NumPy's."""

    def one(k):
        return mt.asarray(k) if isinstance(k, np.ndarray) else k

    return tuple(map(one, key)) if isinstance(key, tuple) else one(key)


class Deaf:
    """A recorder that keeps nothing."""

    def watches(self, x):
        return False

    def record(self, *args):
        pass


# ----- properties -----------------------------------------------------------------------------------------------------


@BOUNDED
@given(shapes_and_keys())
def test_getitem_is_numpys(case):
    shape, key = case
    n = ramp(shape)
    x = mt.asarray(n)
    try:
        expected = n[key]
    except IndexError:
        with pytest.raises(IndexError):
            x[key]
        return
    for k in (key, key_as_arrays(key)):
        with recording(Deaf()):  # what is recorded takes the general path, which the short ones must agree with
            recorded = x[k]
        for y in (x[k], recorded):
            assert y.shape == expected.shape
            np.testing.assert_array_equal(np.asarray(y), expected)
    template, arrays = indexing.parse(x, key)
    assert indexing.result_shape(template, shape, [a.shape for a in arrays]) == expected.shape
    assert hash(template) == hash(indexing.parse(x, key)[0])


@BOUNDED
@given(st.data())
def test_writes_are_numpys_and_the_last_one_wins(data):
    shape, key = data.draw(shapes_and_keys())
    n = ramp(shape)
    try:
        target = n[key]
    except IndexError:
        return
    value = -1.0 - ramp(data.draw(fitting(target.shape)))

    # The oracle makes the writes one by one, in C order.
    expected_set, expected_add = n.copy(), n.copy()
    places = ramp(shape, np.int64)[key].reshape(-1)
    values = np.broadcast_to(value.reshape(value.shape[max(0, value.ndim - target.ndim) :]), target.shape).reshape(-1)
    for place, v in zip(places, values, strict=True):
        expected_set.reshape(-1)[place] = v
        expected_add.reshape(-1)[place] += v

    x = mt.asarray(n)
    y = mt.asarray(n)
    y[key] = mt.asarray(value)
    np.testing.assert_array_equal(np.asarray(y), expected_set)
    np.testing.assert_array_equal(np.asarray(x.at[key].set(value)), expected_set)
    np.testing.assert_allclose(np.asarray(x.at[key].add(value)), expected_add)
    np.testing.assert_array_equal(np.asarray(x), n)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_gradient_ops_of_indexing(data):
    """``scatter`` adds what each read took; ``last_writes`` is what each write left behind."""
    shape, key = data.draw(shapes_and_keys())
    n = ramp(shape)
    try:
        target = n[key]
    except IndexError:
        return
    template, arrays = indexing.parse(mt.asarray(n), key)
    buffers = [np.asarray(a) for a in arrays]
    places = ramp(shape, np.int64)[key]
    g = 1.0 + ramp(target.shape)

    expected = np.zeros(shape)
    for place, v in zip(places.reshape(-1), g.reshape(-1), strict=True):
        expected.reshape(-1)[place] += v
    got = indexing.SCATTER.numpy(g, *buffers, template=template, shape=shape)
    np.testing.assert_allclose(got, expected)

    whole = 1.0 + n
    last = dict(zip(places.reshape(-1).tolist(), range(places.size), strict=True))
    kept = [whole.reshape(-1)[p] if last[p] == i else 0.0 for i, p in enumerate(places.reshape(-1).tolist())]
    got = indexing.LAST_WRITES.numpy(whole, *buffers, template=template)
    np.testing.assert_array_equal(got, np.array(kept).reshape(places.shape))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_value_that_does_not_fit_changes_nothing(data):
    shape, key = data.draw(shapes_and_keys())
    n = ramp(shape)
    try:
        target = n[key]
    except IndexError:
        return
    value = np.ones((*target.shape[:-1], target.shape[-1] + 2) if target.ndim else (2,))
    x = mt.asarray(n)
    with pytest.raises(ValueError, match="does not fit"):
        x[key] = value
    with pytest.raises(ShapeError, match=r"\[index_set\]"):
        x.at[key].set(value)
    np.testing.assert_array_equal(np.asarray(x), n)


# ----- examples -------------------------------------------------------------------------------------------------------

X = ramp((2, 3), np.int64)
Y = ramp((2, 3, 4))


@pytest.mark.parametrize(
    ("key", "error", "words"),
    [
        (2, IndexError, ["axis 0", "index 2", "size 2"]),
        (-3, IndexError, ["axis 0", "index -3", "size 2"]),
        ((0, 3), IndexError, ["axis 1", "index 3", "size 3"]),
        ((0, 0, 0), IndexError, ["too many", "2-dimensional", "3"]),
        (slice(None, None, 0), ValueError, ["step"]),
        (1.0, IndexError, ["float", "1.0"]),
        ("a", IndexError, ["str", "'a'"]),
        ({}, IndexError, ["dict"]),
        (slice(0, 1.5), TypeError, ["float", "1.5"]),
        ((..., ...), IndexError, ["ellipsis"]),
        ([0, 2], IndexError, ["axis 0", "index 2", "size 2"]),
        ((slice(None), [0, -4]), IndexError, ["axis 1", "index -4", "size 3"]),
        ([0.0, 1.0], IndexError, ["float64"]),
        (np.array([True, False, True]), IndexError, ["axis 0", "is 2", "is 3"]),
        (np.ones((2, 3, 1), bool), IndexError, ["too many"]),
        (([0, 1], [0, 1, 2]), IndexError, ["broadcast", "(2,)", "(3,)"]),
        (np.zeros((5, 0), bool), IndexError, ["axis 0"]),
    ],
)
def test_errors_of_an_index_say_axis_index_and_size(key, error, words):
    x = mt.asarray(X)
    for act in (lambda: x[key], lambda: x.at[key].set(1), lambda: x.__setitem__(key, 1)):
        with pytest.raises(error) as raised:
            act()
        assert all(w in str(raised.value) for w in words), str(raised.value)
        if error is IndexError:
            assert isinstance(raised.value, ArrayIndexError)
    np.testing.assert_array_equal(np.asarray(x), X)


def test_an_index_of_a_zero_length_axis():
    with pytest.raises(IndexError, match="size 0"):
        mt.arange(0)[0]
    assert mt.arange(0)[::-1].shape == (0,)
    with pytest.raises(IndexError):
        mt.asarray(1.0)[0]


@pytest.mark.parametrize(
    "key",
    [
        (slice(5, None),),
        (slice(None, -5),),
        (slice(10, -10, -1), ...),
        (),
        ...,
        (slice(None), slice(2, 0, -1)),
        slice(1, 1),
        True,
        False,
        np.True_,
        np.array(True),
        (True, 0),
        (0, True),
        (None, True),
        (0, None, True),
        (slice(None), True),
        (True, [0, 1]),
        ([True, True], [0, 2]),
        (slice(None), np.array([True, False, True])),
        np.zeros((2, 3), bool),
        [[0, 1], [1, 0]],
        [-1, -2],
        [],
        np.array([0, 1, 1], np.uint8),
        np.array([0, -1], np.int8),
    ],
)
def test_keys_of_the_requirements(key):
    y = mt.asarray(X)[key]
    assert y.shape == X[key].shape
    assert y.dtype == X.dtype
    np.testing.assert_array_equal(np.asarray(y), X[key])


def test_index_arrays_apart_come_first_and_ints_count():
    y = mt.asarray(Y)
    assert y[0, :, [0, 1]].shape == (2, 3)
    assert y[[0, 1], :, [0, 1]].shape == (2, 3)
    assert y[:, [0, 1], [0, 1]].shape == (2, 2)
    assert y[[[0, 1], [1, 0]]].shape == (2, 2, 3, 4)


def test_a_boolean_beside_a_zero_dimensional_array():
    x = mt.asarray(7.0)
    assert x[True].shape == (1,)
    assert x[False].shape == (0,)
    assert x[...].shape == x[()].shape == ()
    assert x[None].shape == (1,)
    x[False] = 1.0
    assert float(x) == 7.0
    x[True] = 5.0
    assert float(x) == 5.0


def test_index_may_be_an_array_of_ours():
    x = mt.asarray(X)
    assert x[mt.asarray(1)].tolist() == [3, 4, 5]
    assert x[mt.asarray(0) : mt.asarray(1)].shape == (1, 3)
    assert x[mt.asarray([1, 0]), mt.asarray(2)].tolist() == [5, 2]
    assert x[x > 2].tolist() == [3, 4, 5]


def test_the_last_write_in_c_order_wins_whatever_the_layout_of_the_index():
    index = mt.asarray([[1, 0], [0, 1]])
    value = mt.asarray([[1, 2], [3, 4]])
    for i in (index, mt.asarray(np.asfortranarray(np.asarray(index))), index.T.T, mt.asarray(np.asarray(index).T).T):
        x = mt.zeros(2, dtype=mt.int64)
        x[i] = value
        assert x.tolist() == [3, 4]
        assert mt.zeros(2, dtype=mt.int64).at[i].set(value).tolist() == [3, 4]
    assert mt.zeros(2, dtype=mt.int64).at[index.T].set(value).tolist() == [3, 4]
    big = mt.zeros(3).at[mt.asarray([0] * 1000 + [2] * 1000)].set(mt.arange(2000) * 1.0)
    assert big.tolist() == [999.0, 0.0, 1999.0]


def test_overlapping_writes_read_before_they_write():
    x = mt.arange(5)
    x[1:] = x[:-1]
    assert x.tolist() == [0, 0, 1, 2, 3]
    x = mt.arange(5)
    x[[1, 2, 3, 4]] = x[:-1]
    assert x.tolist() == [0, 0, 1, 2, 3]
    x = mt.arange(5)
    x[::-1] = x
    assert x.tolist() == [4, 3, 2, 1, 0]
    x = mt.arange(3)
    x[x] = x[::-1]
    assert x.tolist() == [2, 1, 0]


def test_values_of_other_dtypes():
    x = mt.zeros(2, dtype=mt.int64)
    x[0] = 2.7
    assert x.tolist() == [2, 0]
    b = mt.zeros(2, dtype=mt.bool)
    b[0] = 5
    assert b.tolist() == [True, False]
    for value in (1j, mt.asarray([1j, 2j]), np.array([1j, 2j])):
        f = mt.zeros(2)
        with pytest.raises(TypeError, match="complex"):
            f[:] = value
        with pytest.raises(TypeError, match="complex"):
            mt.zeros(2).at[:].set(value)
        assert f.tolist() == [0.0, 0.0]
    with pytest.raises(TypeError):
        mt.zeros(2)[0] = None


def test_values_of_other_shapes():
    z = mt.zeros((2, 3))
    z[np.array([[True, False, True], [False, True, False]])] = [1, 2, 3]
    assert z.tolist() == [[1, 0, 2], [0, 3, 0]]
    before = z.tolist()
    for key, value in [
        (np.array([[True, False, True], [False, True, False]]), [1, 2]),
        (0, np.ones((2, 3))),
        (slice(0, 0), [1, 2]),
    ]:
        with pytest.raises(ValueError, match=r"shape"):
            z[key] = value
        assert z.tolist() == before
    z[:, 1] = [1, 2]
    z[0] = mt.asarray([[7, 8, 9]])
    assert z.tolist() == [[7, 8, 9], [0, 2, 0]]


def test_zero_size_writes():
    z = mt.zeros((0, 3))
    z[:] = 5
    z[[]] = mt.ones((0, 3))
    z[np.zeros(0, bool)] = 1
    assert z.shape == (0, 3)
    assert mt.zeros((0, 3)).at[:].add(1.0).shape == (0, 3)
    x = mt.ones(3)
    x[1:1] = 9
    x[False] = 9
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [mt.float32, mt.float16, mt.bfloat16, mt.int8, mt.complex64, mt.bool])
def test_at_keeps_the_dtype(dtype):
    x = mt.ones(3, dtype=dtype)
    assert x.at[0].set(0).dtype == dtype
    assert x.at[[0, 0]].add(1).dtype == dtype
    assert x[[0, 1]].dtype == dtype


def test_accumulation_with_repeated_places():
    x = mt.asarray(X)
    index = ([0, 0, 1], [1, 1, 2])
    assert x.at[index].set(mt.asarray([10, 20, 30])).tolist() == [[0, 20, 2], [3, 4, 30]]
    assert x.at[index].add(mt.asarray([10, 20, 30])).tolist() == [[0, 31, 2], [3, 4, 35]]


@pytest.mark.slow
def test_writes_beyond_two_to_the_31_elements():
    n = 2**31 + 8
    x = mt.zeros(n, dtype=mt.int8)
    x[-1] = 3
    x[2**31 - 2 : 2**31 + 2] = mt.asarray([1, 2, 3, 4], dtype=mt.int8)
    assert x[2**31 - 3 : 2**31 + 3].tolist() == [0, 1, 2, 3, 4, 0]
    assert x[mt.asarray([n - 1, 2**31])].tolist() == [3, 3]


# ----- multiplying, smaller and larger ones ---------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_functional_writes_are_numpys_ufunc_at(data):
    shape, key = data.draw(shapes_and_keys())
    n = np.asarray(ramp(shape) - 3.0)
    try:
        target = n[key]
    except IndexError:
        return
    v = np.asarray(data.draw(st.integers(0, 100)) + np.arange(target.size).reshape(target.shape) % 5 - 2, float)
    for name, ufunc in (("multiply", np.multiply), ("min", np.minimum), ("max", np.maximum), ("add", np.add)):
        expected = n.copy()
        ufunc.at(expected, key, v)
        x = mt.asarray(n)
        np.testing.assert_array_equal(np.asarray(getattr(x.at[key_as_arrays(key)], name)(mt.asarray(v))), expected)
        np.testing.assert_array_equal(np.asarray(x), n)


def test_functional_writes_of_numbers_keep_the_dtype():
    for dtype in (mt.float32, mt.bfloat16, mt.int8):
        x = mt.asarray([1, 2, 3], dtype=dtype)
        for name in ("set", "add", "multiply", "min", "max"):
            for key in (1, slice(1, None), [0, 0, 2], mt.asarray([True, False, True])):
                assert getattr(x.at[key], name)(2).dtype == dtype
    with pytest.raises(TypeError, match="complex"):
        mt.ones(2).at[0].multiply(1j)
    with pytest.raises(ShapeError, match=r"\[index_min\]"):
        mt.ones(2).at[[0, 1]].min(mt.ones(3))


def test_an_ellipsis_of_no_dimension_still_separates():
    n = ramp((2, 3, 4))
    for key in ((0, ..., [0, 1], [1, 2]), ([0, 1], ..., [0, 2], [0, 1]), (None, 0, ..., np.ones((3, 4), bool))):
        np.testing.assert_array_equal(np.asarray(mt.asarray(n)[key]), n[key])


def test_a_mask_axis_of_no_length_selects_nothing():
    x = mt.asarray(ramp((2, 3)))
    assert x[np.zeros((2, 0), bool)].shape == (0,)
    assert x[np.ones((0,), bool)].shape == (0, 3)
    with pytest.raises(IndexError, match="axis 0"):
        x[np.zeros((5, 0), bool)]


@pytest.mark.parametrize(
    "read",
    [
        lambda x, i: x[i],
        lambda x, i: mt.take(x, i, axis=0),
        lambda x, i: meshtape.compile(lambda a, b: a[b])(x, i),
        lambda x, i: meshtape.compile(lambda a, b: a.at[b].add(1.0))(x, i),
        lambda x, i: mt.nn.embedding(i, x[:, None]),
        lambda x, i: x.__setitem__(i, 3.0),
    ],
)
def test_an_unsigned_index_does_not_wrap_around(read):
    """NumPy reads the last element for 2**64 - 1."""
    x = mt.arange(5.0)
    with pytest.raises(IndexError, match="18446744073709551615 is out of bounds"):
        read(x, mt.asarray(np.array([1, 2**64 - 1], np.uint64)))
    read(x, mt.asarray(np.array([1, 4], np.uint64)))
