"""Reads and writes of NumPy memory go to NumPy where no recorder listens, and give what the ops give: values, dtypes,
errors.

A recorder, which hears nothing of interest, sends every call through the ops.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.core.op import recording

DTYPES = ["bool", "int8", "uint64", "int64", "float16", "bfloat16", "float8_e4m3fn", "float32", "float64", "complex64"]
SHAPES = [(), (0,), (1,), (6,), (2, 3), (0, 3), (2, 1, 3)]

CALLS: dict[str, Callable[[Any], Any]] = {
    "at an int": lambda x: x[1],
    "at a slice": lambda x: x[::-2],
    "at a mixture": lambda x: x[None, ..., 0:2],
    "at a list": lambda x: x[[0, -1, 0]],
    "at indices": lambda x: x[mt.asarray([[0, 1]])],
    "at a 0-d index": lambda x: x[mt.asarray(1)],
    "at a mask": lambda x: x[x != x],
    "at a mask of the rows": lambda x: x[mt.asarray([True, False])],
    "at a mask that does not fit": lambda x: x[mt.asarray([True] * 9)],
    "at indices beyond the end": lambda x: x[mt.asarray([9])],
}


class _Deaf:
    def record(self, *call: Any) -> None:
        pass

    def watches(self, x: Any) -> bool:
        return False


def sample(shape: tuple[int, ...], dtype: str) -> mt.Array:
    x = np.resize(np.array([1.5, -2.0, 0.0, 3.0, 0.5, 1.0]), shape)
    return mt.astype(mt.asarray(np.abs(x) if dtype.startswith("u") else x), getattr(mt, dtype))


def outcome(call: Callable[[], Any]) -> tuple[Any, ...]:
    try:
        out = np.asarray(call())
    except Exception as e:
        return type(e), str(e)
    return out.dtype, out.shape, out.tobytes()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_both_ways_agree(name: str) -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            x = sample(shape, dtype)
            short = outcome(lambda x=x: CALLS[name](x))
            with recording(_Deaf()):
                general = outcome(lambda x=x: CALLS[name](x))
            assert short == general, (dtype, shape)


WRITES: dict[str, tuple[Any, Any]] = {
    "a number at an int": (1, 7.0),
    "a number at a slice": (slice(None, None, 2), 7.0),
    "a number everywhere": (None, 7.0),
    "a number at a mask": ("mask", 7.0),
    "a number at a mask that does not fit": ("long mask", 7.0),
    "a number at indices": ("indices", 7.0),
    "an array at a slice": (slice(0, 3), "three"),
    "an array that does not fit": (slice(0, 2), "three"),
    "an array with ones in front": (slice(0, 3), "deep three"),
    "an array at indices": ("indices", "three"),
    "an array at a mask": ("mask", "three"),
    "too many for a mask": ("mask", "six"),
    "complex numbers": (slice(0, 3), "complex"),
    "of another dtype": (slice(0, 3), "ints"),
    "itself, backwards": (slice(None), "backwards"),
    "beyond the end": ("far", 7.0),
}


def parts(x: mt.Array) -> dict[str, Any]:
    return {
        "mask": mt.asarray([True, False, True, False, True, False]),
        "long mask": mt.asarray([True] * 7),
        "indices": mt.asarray([5, 0, 5]),
        "far": mt.asarray([0, 6]),
        "three": mt.asarray([10.0, 20.0, 30.0]),
        "deep three": mt.asarray([[[10.0, 20.0, 30.0]]]),
        "six": mt.zeros(6),
        "complex": mt.asarray([1j, 2j, 3j]),
        "ints": mt.asarray([1, 2, 3], dtype=mt.int8),
        "backwards": x[::-1],
    }


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("view", [False, True])
def test_both_ways_of_writing_agree(name: str, view: bool) -> None:
    def written() -> tuple[Any, ...]:
        base = mt.asarray(np.arange(6.0))
        x = base[:] if view else base
        place, value = (parts(x)[p] if isinstance(p, str) else p for p in WRITES[name])
        seen = mt.reshape(x, (2, 3))
        found = outcome(lambda: operator.setitem(x, place, value) or x)
        assert seen.tolist() == [[0, 1, 2], [3, 4, 5]], "a view saw the write"
        assert not view or base.tolist() == [0, 1, 2, 3, 4, 5], "the array behind the view was written"
        return (*found, x.tolist())

    short = written()
    with recording(_Deaf()):
        general = written()
    assert short == general


ALIASES: dict[str, Callable[[mt.Array], mt.Array]] = {
    "reshape": lambda x: mt.reshape(x, (6,)),
    "permute_dims": lambda x: mt.permute_dims(x, (1, 0)),
    "mT": lambda x: x.mT,
    "expand_dims": lambda x: mt.expand_dims(x, axis=0),
    "squeeze": lambda x: mt.squeeze(mt.expand_dims(x, axis=1), axis=1),
    "flip": lambda x: mt.flip(x, axis=0),
    "broadcast_to": lambda x: mt.broadcast_to(x, (2, 2, 3)),
    "a slice": lambda x: x[0:2],
    "an int": lambda x: x[0],
    "einsum": lambda x: mt.einsum("ij->ij", x),
    "einsum, turned": lambda x: mt.einsum("ij->ji", x),
    "concat of one": lambda x: mt.concat([x]),
}


@pytest.mark.parametrize("name", ALIASES)
def test_a_write_is_never_seen_by_the_other_side(name: str) -> None:
    first = (0,) * 3
    x = mt.asarray(np.arange(6.0).reshape(2, 3))
    y = ALIASES[name](x)
    before = y.tolist()
    x[0, 0] = 99.0
    assert y.tolist() == before
    x = mt.asarray(np.arange(6.0).reshape(2, 3))
    y = ALIASES[name](x)
    y[first[: y.ndim]] = 99.0
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_numbers_of_numpy_are_numbers_and_errors_are_ours() -> None:
    one = np.int64(1)
    x = mt.asarray(np.random.default_rng(0).standard_normal((4, 3)))
    for fn in (mt.argmax, mt.argmin, mt.sum, mt.mean, mt.var):
        assert fn(x, axis=one).tolist() == fn(x, axis=1).tolist()
        with pytest.raises(TypeError, match=rf"\[{fn.__name__}\]"):
            fn(x, axis="1")
    assert mt.var(x, correction=one).tolist() == mt.var(x, correction=1).tolist()
    assert mt.vecdot(x, x, axis=-one).tolist() == mt.vecdot(x, x).tolist()
    assert mt.linalg.cross(x, x + 1.0, axis=-one).tolist() == mt.linalg.cross(x, x + 1.0).tolist()
    labels = mt.asarray([0, 1, 2, 1])
    found = mt.nn.cross_entropy(x, labels, ignore_index=one, label_smoothing=np.float32(0.5))
    assert found.tolist() == mt.nn.cross_entropy(x, labels, ignore_index=1, label_smoothing=0.5).tolist()
    with pytest.raises(TypeError, match=r"\[argmax\] takes one axis"):
        mt.argmax(x, axis=(0, 1))
    with pytest.raises(ValueError, match="reduction"):
        mt.nn.cross_entropy(x, labels, reduction=3)


def test_dtypes_are_the_objects_that_kernels_know() -> None:
    """Those of files and of NumPy's `newbyteorder` are equal to them, but others: kernels would not take their
    buffers."""
    for name in ("float32", "float64", "int64", "complex64", "bfloat16"):
        plain = np.dtype(getattr(mt, name))
        other = np.ones((3, 4), plain).view(plain.newbyteorder("<"))
        for x in (
            mt.asarray(other),
            mt.asarray(other, copy=False),
            mt.asarray(other, dtype=name),
            mt.asarray(other[::2]),
        ):
            assert x._buf.dtype is plain
            np.testing.assert_array_equal(np.asarray(x), np.ones(x.shape, plain))


def test_products_of_arrays_that_travelled_have_the_same_bits() -> None:
    """A pickled array comes back with a dtype object of its own."""
    rng = np.random.default_rng(0)
    x, y = (mt.asarray(rng.standard_normal(s).astype(np.float32)) for s in ((70, 900), (900, 110)))
    sent = pickle.loads(pickle.dumps((x, y)))
    assert sent[0]._buf.dtype == x._buf.dtype
    step = mt.value_and_grad(lambda a, b: mt.sum((a @ b) ** 2), argnums=(0, 1))
    expected = [np.asarray(x @ y), *map(np.asarray, step(x, y)[1])]
    for a, b in ((x, sent[1]), (sent[0], y), sent):
        for found, same in zip([a @ b, *step(a, b)[1]], expected, strict=True):
            np.testing.assert_array_equal(np.asarray(found), same)


def test_what_is_loaded_has_the_dtypes_that_kernels_know(tmp_path) -> None:
    tree = {"a": mt.ones((3, 4), dtype="float32"), "b": mt.ones(3, dtype="bfloat16"), "c": mt.asarray([1, 2])}
    for name in ("x.zarr", "x.safetensors"):
        mt.storage.save(tmp_path / name, tree)
        for key, x in mt.storage.load(tmp_path / name).items():
            assert x._buf.dtype is tree[key]._buf.dtype, (name, key)
