"""Arrays are values: whatever is written through one, no other changes; and who is alone writes in place."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtape import arrays as mt
from meshtape.arrays.core.errors import DTypeError, ShapeError

START = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def make() -> mt.Array:
    return mt.asarray(START)


def place(x: mt.Array) -> int:
    return x._buf.__array_interface__["data"][0]


# Everything that makes a second array out of a first.
WAYS = {
    "slice": lambda x: x[1:],
    "row": lambda x: x[0],
    "reversed": lambda x: x[::-1],
    "element": lambda x: x[0, 0],
    "newaxis": lambda x: x[None],
    "everything": lambda x: x[...],
    "view of a view": lambda x: x[1:][:, 1:],
    "view of a temporary view": lambda x: x.T[1:].T,
    "transpose": lambda x: x.T,
    "matrix transpose": lambda x: x.mT,
    "reshape": lambda x: x.reshape(-1),
    "permute": lambda x: mt.permute_dims(x, (1, 0)),
    "flip": lambda x: mt.flip(x),
    "squeeze": lambda x: mt.squeeze(x[None], 0),
    "broadcast": lambda x: mt.broadcast_to(x, (4, 2, 3)),
    "broadcast arrays": lambda x: mt.broadcast_arrays(x, mt.zeros((2, 3)))[0],
    "asarray with copy": lambda x: mt.asarray(x, copy=True),
    "astype": lambda x: x.astype(x.dtype),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "stop_gradient": lambda x: mt.stop_gradient(x),
    "positive": lambda x: +x,
    "clip without bounds": lambda x: mt.clip(x),
    "real part": lambda x: mt.real(x),
    "iteration": lambda x: next(iter(x)),
    "getitem by arrays": lambda x: x[[0, 1]],
    "concat": lambda x: mt.concat([x]),
    "at": lambda x: x.at[0].set(9.0),
    "moveaxis": lambda x: mt.moveaxis(x, 0, 1),
    "item assignment source": lambda x: _assigned(x),
}


def _assigned(x):
    y = mt.zeros((2, 3))
    y[...] = x
    return y


@pytest.mark.parametrize("way", WAYS)
def test_writing_to_one_side_never_changes_the_other(way):
    x = make()
    y = WAYS[way](x)
    before = y.tolist()
    x[...] = -1.0
    assert y.tolist() == before
    x = make()
    y = WAYS[way](x)
    y[...] = -1.0
    assert x.tolist() == START


@pytest.mark.parametrize("way", WAYS)
def test_in_place_operators_change_one_array_alone(way):
    x = make()
    y = WAYS[way](x)
    z, before = y, np.array(y.numpy())
    y += 1.0
    y *= y
    assert x.tolist() == START
    assert z is y
    np.testing.assert_array_equal(y.numpy(), (before + 1) ** 2)
    x -= 5.0
    np.testing.assert_array_equal(y.numpy(), (before + 1) ** 2)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(WAYS)), st.integers(0, 5), st.booleans()), min_size=1, max_size=6))
def test_chains_of_views_and_writes(steps):
    """A family of arrays, grown and written at random, against copies made at every step."""
    family = [(make(), np.array(START))]
    for way, who, write in steps:
        x, model = family[who % len(family)]
        if write:
            x[...] = float(who) + 0.5
            model[...] = float(who) + 0.5
        elif x.ndim == 2 and 0 not in x.shape:
            y = WAYS[way](x) if x.shape == (2, 3) else x[1:]
            family.append((y, np.array(y.numpy())))
        for a, m in family:
            np.testing.assert_array_equal(np.asarray(a), m)


# ----- memory of others -----------------------------------------------------------------------------------------------


def test_asarray_copies_a_users_buffer():
    n = np.array(START)
    x = mt.asarray(n)
    n[0, 0] = 99
    assert x.tolist() == START
    x[0, 0] = -1
    assert n[0, 0] == 99


def test_asarray_without_copy_shares_until_we_write():
    n = np.array(START)
    x = mt.asarray(n, copy=False)
    assert place(x) == n.__array_interface__["data"][0]
    x[0, 0] = -1
    assert n.tolist() == START
    assert x[0, 0].item() == -1


def test_asarray_without_copy_of_a_temporary_and_of_a_view():
    n = np.array(START)
    x = mt.asarray(n[1:], copy=False)
    x[...] = 0
    assert n.tolist() == START
    read_only = np.array(START)
    read_only.flags.writeable = False
    y = mt.asarray(read_only, copy=False)
    y[...] = 0
    assert read_only.tolist() == START
    bytes_ = np.frombuffer(b"\0" * 16)
    z = mt.asarray(bytes_, copy=False)
    z[0] = 1
    assert bytes_[0] == 0


def test_numpy_exports_are_read_only_and_keep_their_value():
    x = make()
    n = np.asarray(x)
    with pytest.raises(ValueError, match="read-only"):
        n[0, 0] = 1
    x[0, 0] = 7
    assert n.tolist() == START
    # No export can be made writable behind our back: its base is not writable by this view.
    own = np.array(x)
    own[...] = 0
    assert x[0, 0].item() == 7
    mine = x.numpy()
    mine[...] = 0
    assert x[0, 0].item() == 7
    assert np.asarray(x, dtype=np.float32).dtype == np.float32
    assert np.array(x, copy=True).flags.writeable


def test_a_value_written_is_not_shared_with_its_source():
    x, row = make(), mt.asarray([7.0, 8.0, 9.0])
    x[0] = row
    row[0] = -1
    assert x[0].tolist() == [7, 8, 9]
    n = np.array([1.0, 2.0, 3.0])
    x[1] = n
    n[0] = -1
    assert x[1].tolist() == [1, 2, 3]


# ----- writing in place -----------------------------------------------------------------------------------------------


def test_a_sole_owner_writes_in_place():
    for x in (mt.zeros(1000), mt.ones(10) * 2, mt.arange(10), make()):
        at = place(x)
        x[0] = 1
        x[1:] = 2
        x[[0]] = 3
        assert place(x) == at


def test_an_owner_is_alone_again_when_the_view_is_gone():
    x = make()
    at = place(x)
    y = x[1:]
    x[0, 0] = 9
    assert place(x) != at
    del y
    at = place(x)
    x[0, 0] = 8
    assert place(x) == at


def test_a_second_name_is_the_same_array():
    x = make()
    y = x
    x[0, 0] = 9
    assert y[0, 0].item() == 9


def test_an_array_in_a_list_and_in_a_closure_still_writes_in_place():
    xs = [mt.zeros(10)]
    at = place(xs[0])
    xs[0][0] = 1.0
    assert place(xs[0]) == at


def test_a_failing_write_changes_nothing():
    for key, value in [(5, 1.0), (slice(None), [1.0, 2.0]), ((0, slice(None)), 1j), ([0, 7], 1.0)]:
        x = make()
        y = x[...]
        with pytest.raises((IndexError, ValueError, TypeError)):
            x[key] = value
        assert x.tolist() == START
        assert y.tolist() == START


# ----- DLPack ---------------------------------------------------------------------------------------------------------


def test_dlpack_out():
    x = make()
    n = np.from_dlpack(x)
    assert n.tolist() == START
    x[0, 0] = 9
    assert n.tolist() == START, "an export kept its value"
    if n.flags.writeable:
        before = x.tolist()
        n[...] = -1
        assert x.tolist() == before
    assert x.__dlpack_device__() == (1, 0)


def test_dlpack_in():
    if not hasattr(mt, "from_dlpack"):
        pytest.skip("meshtape.arrays has no from_dlpack")
    n = np.array(START)
    x = mt.from_dlpack(n)
    assert x.tolist() == START
    x[0, 0] = 9
    assert n.tolist() == START


def test_pickles_of_views_hold_the_view_alone():
    x = mt.zeros(100_000)
    assert len(pickle.dumps(x[:2])) < 1000
    assert pickle.loads(pickle.dumps(x[:2])).shape == (2,)
    b = mt.ones(2, dtype=mt.bfloat16)
    assert pickle.loads(pickle.dumps(b)).dtype == mt.bfloat16


# ----- in-place operators ---------------------------------------------------------------------------------------------


def test_in_place_operators_keep_shape_and_dtype():
    i, x = mt.arange(3), mt.ones(3, dtype=mt.float32)
    with pytest.raises(DTypeError, match=r"\[divide\] an array of int64 cannot take a result of float64"):
        i /= 2
    with pytest.raises(ShapeError, match=r"\[add\] an array of shape \(3,\) cannot take"):
        x += mt.ones((2, 3))
    with pytest.raises(TypeError):
        x += "text"
    assert i.tolist() == [0, 1, 2]
    assert x.tolist() == [1, 1, 1]
    x += mt.ones(3)  # float64: rounded back
    assert x.dtype == mt.float32
    i += 1
    i *= i
    i //= 2
    i %= 3
    i **= 2
    i |= 8
    i ^= 1
    i &= 15
    i <<= 2
    i >>= 1
    want = np.arange(3)
    want = (((((((want + 1) ** 2) // 2) % 3) ** 2) | 8) ^ 1) & 15
    assert i.tolist() == ((want << 2) >> 1).tolist()
    m = mt.eye(2)
    m @= mt.asarray([[1.0, 2.0], [3.0, 4.0]])
    assert m.tolist() == [[1, 2], [3, 4]]


def test_in_place_operators_use_the_memory_again_where_nobody_else_holds_it():
    x = mt.ones(1000)
    before = x._buf.ctypes.data
    x *= 2.0
    x += mt.ones(1000)
    assert x._buf.ctypes.data == before
    view = x[1:]
    x -= 1.0
    assert x._buf.ctypes.data != before
    assert view[0].tolist() == 3


def test_in_place_operators_are_differentiable():
    import meshtape

    def loss(x):
        y = x * 1.0
        y *= x
        y += 2.0
        y /= x
        return mt.sum(y)

    x = np.array([1.0, 2.0])
    np.testing.assert_allclose(np.asarray(meshtape.grad(loss)(mt.asarray(x))), 1 - 2 / x**2)
    a = mt.asarray(x)
    with meshtape.Tape() as tape:
        tape.watch(a)
        y = mt.sum(a * a)
    a += 100.0  # what the tape saved is not touched
    assert tape.gradient(y, a).tolist() == [2, 4]
