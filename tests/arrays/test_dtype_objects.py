"""The dtypes as users name them: equal to what they name, to nothing else, and good wherever a dtype is."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from meshtape import arrays as mt
from meshtape.arrays.core import dtypes

NAMES = list(dtypes.DTYPES)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_equals_what_it_names_and_nothing_else(name: str) -> None:
    d, plain = getattr(mt, name), dtypes.DTYPES[name]
    assert type(d) is mt.DType
    assert d.dtype is plain
    assert d == plain
    assert plain == d
    assert hash(d) == hash(plain)
    assert {d: 1}[plain] == {plain: 1}[d] == 1
    assert mt.zeros(2, dtype=d).dtype == d
    assert [other for other in NAMES if getattr(mt, other) == d] == [name]
    for other in (None, object(), 3, "nope", (), mt.sum):
        assert d != other
        assert other != d


def test_no_answer_is_no_dtype() -> None:
    # NumPy: None == numpy.dtype("float64").
    table = {(mt.int8, mt.int16): mt.int16}
    assert table.get((mt.int8, mt.float32)) != mt.float64
    assert mt.float64 not in (None,)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_survives_text_copies_and_pickles_as_itself(name: str) -> None:
    d = getattr(mt, name)
    assert str(d) == name
    assert repr(d) == f"meshtape.{name}"
    assert dtypes.parse(str(d)) is d
    assert copy.copy(d) is d
    assert copy.deepcopy({"a": [d]})["a"][0] is d
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(d, protocol)) is d


def test_attributes_are_those_of_a_number_not_of_an_array() -> None:
    assert (mt.bfloat16.itemsize, mt.int8.kind, mt.float32.name, mt.uint64.str) == (2, "i", "float32", "<u8")
    assert mt.float32.type is np.float32
    assert mt.int32.newbyteorder(">") == np.dtype(">i4")
    for absent in ("shape", "ndim", "fields"):
        assert not hasattr(mt.float32, absent)
    with pytest.raises(AttributeError):
        mt.float32.flavour = 1
    with pytest.raises(TypeError, match=r"meshtape\.float32"):
        mt.DType()


TAKEN = {
    "dtype": lambda d: np.dtype(d),
    "zeros": lambda d: np.zeros(2, d).dtype,
    "asarray": lambda d: np.asarray([1, 0], d).dtype,
    "astype": lambda d: np.ones(2).astype(d).dtype,
    "view": lambda d: np.zeros(16, np.uint8).view(d).dtype,
    "frombuffer": lambda d: np.frombuffer(bytes(16), d).dtype,
    "promote_types": lambda d: np.promote_types(d, d),
    "result_type": lambda d: np.result_type(d, np.zeros(2, d.dtype)),
    "asarray of an Array": lambda d: np.asarray(mt.ones(2), dtype=d).dtype,
    "__array__": lambda d: mt.ones(2).__array__(d).dtype,
    "a field": lambda d: np.dtype([("a", d)])["a"],
}


@pytest.mark.parametrize("what", TAKEN)
def test_numpy_takes_it(what: str) -> None:
    for name in NAMES:
        d = getattr(mt, name)
        assert TAKEN[what](d) == d.dtype, name


def test_numpy_answers_questions_on_it() -> None:
    assert isinstance(mt.float32, np.dtype)
    assert np.isdtype(mt.float32, "real floating")
    assert not np.isdtype(mt.int8, "real floating")
    assert np.issubdtype(mt.int8, np.integer)
    assert np.can_cast(mt.int8, mt.int16)
    assert np.finfo(mt.float32).bits == 32
    assert np.iinfo(mt.int8).max == 127
    assert np.add(1, 2, dtype=mt.float32).dtype == mt.float32
    assert np.ones(2).sum(dtype=mt.float32).dtype == mt.float32


def _all_spellings(name: str) -> list[Any]:
    d = getattr(mt, name)
    return [d, d.dtype, d.type, name]


EVERYWHERE = {
    "asarray": lambda d: mt.asarray([1, 0], dtype=d).dtype,
    "arange": lambda d: mt.arange(2, dtype=d).dtype,
    "full_like": lambda d: mt.full_like(mt.ones(2), 1, dtype=d).dtype,
    "astype": lambda d: mt.ones(2).astype(d).dtype,
    "sum": lambda d: mt.sum(mt.ones(2), dtype=d).dtype,
    "prod": lambda d: mt.prod(mt.ones(2), dtype=d).dtype,
    "cumulative_sum": lambda d: mt.cumulative_sum(mt.ones(2), dtype=d).dtype,
    "trace": lambda d: mt.linalg.trace(mt.eye(2), dtype=d).dtype,
    "one_hot": lambda d: mt.nn.one_hot(mt.asarray([1]), 2, dtype=d).dtype,
    "finfo": lambda d: mt.finfo(d).dtype,
    "result_type": lambda d: mt.result_type(d, d),
    "isdtype": lambda d: mt.isdtype(d, ("bool", mt.float32)) and mt.float32,
    "can_cast": lambda d: mt.can_cast(d, d) and mt.float32,
    "uniform": lambda d: mt.random.uniform(mt.random.key(0), 2, dtype=d).dtype,
    "normal": lambda d: mt.random.normal(mt.random.key(0), 2, dtype=d).dtype,
    "shape and dtype": lambda d: mt.zeros(2, dtype=mt.ShapeDtype((2,), d).dtype).dtype,
}


@pytest.mark.parametrize("what", EVERYWHERE)
def test_every_function_takes_every_spelling(what: str) -> None:
    for d in _all_spellings("float32"):
        got = EVERYWHERE[what](d)
        assert got == np.float32
        assert type(got) is mt.DType or type(got) is np.dtype(np.float32).__class__


def test_integers_and_bits_take_every_spelling() -> None:
    for d in _all_spellings("uint32"):
        assert mt.random.bits(mt.random.key(0), 2, d).dtype == mt.uint32
        assert mt.random.integers(mt.random.key(0), 2, 0, 9, d).dtype == mt.uint32
        assert mt.iinfo(d).max == 2**32 - 1


def test_arrays_and_programs_hold_plain_dtypes() -> None:
    # What is kept is NumPy's: nothing that reads a program or a checkpoint needs to know the names.
    assert type(mt.ones(2, dtype=mt.float32).dtype) is not mt.DType
    assert type(dtypes.as_dtype(mt.bfloat16)) is not mt.DType
    assert all(type(d) is not mt.DType for d in dtypes.DTYPES.values())
    info = mt.__array_namespace_info__()
    assert all(type(d) is mt.DType for d in (*info.dtypes().values(), *info.default_dtypes().values()))
