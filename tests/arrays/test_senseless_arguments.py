"""Arguments that make no sense: a typed error that names the function, from every function that makes or reshapes
arrays."""

from __future__ import annotations

import inspect
import math
import operator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import dask.array as da
import numpy as np
import pytest
from scipy import sparse

import meshtape as mt
from meshtape.errors import MeshtapeError

NAN, INF = float("nan"), float("inf")
X, M = mt.asarray([1.0, 2.0, 3.0]), mt.ones((2, 3))
COUNTS = (2.5, "a", NAN, 1j, [1.5])  # no integer
SHAPES = (2.5, "a", (2, "a"), (2, None), (2, 1.5), {}, {2}, -3, (2, -3), (10**10, 10**10))

# Functions of one count.
OF_A_COUNT: dict[str, Any] = {
    "eye": mt.eye,
    "eye, columns": lambda n: mt.eye(2, n),
    "eye, diagonal": lambda n: mt.eye(2, k=n),
    "identity": mt.identity,
    "tri": mt.tri,
    "tri, diagonal": lambda n: mt.tri(2, k=n),
    "tril": lambda n: mt.tril(M, n),
    "triu": lambda n: mt.triu(M, k=n),
    "linspace": lambda n: mt.linspace(0, 1, n),
    "logspace": lambda n: mt.logspace(0, 1, n),
    "geomspace": lambda n: mt.geomspace(1, 2, num=n),
    "vander": lambda n: mt.vander(X, n),
    "diag": lambda n: mt.diag(X, n),
    "diagflat": lambda n: mt.diagflat(X, n),
    "hamming": mt.hamming,
    "hanning": mt.hanning,
    "blackman": mt.blackman,
    "bartlett": mt.bartlett,
    "kaiser": lambda n: mt.kaiser(n, 1.0),
    "tril_indices": mt.tril_indices,
    "triu_indices": lambda n: mt.triu_indices(2, n),
    "diag_indices": mt.diag_indices,
    "diag_indices, dimensions": lambda n: mt.diag_indices(2, n),
    "fftfreq": mt.fft.fftfreq,
    "rfftfreq": mt.fft.rfftfreq,
    "fft": lambda n: mt.fft.fft(X, n=n),
    "irfft": lambda n: mt.fft.irfft(X, n=n),
    "bincount": lambda n: mt.bincount(mt.asarray([1]), minlength=n),
    "diff": lambda n: mt.diff(X, n=n),
    "topk": lambda n: mt.topk(X, n),
    "rot90": lambda n: mt.rot90(M, n),
    "one_hot": lambda n: mt.nn.one_hot(mt.asarray([0, 1]), n),
    "array_split": lambda n: mt.array_split(X, n),
    "repeat": lambda n: mt.repeat(X, n),
    "roll": lambda n: mt.roll(X, n),
    "partition": lambda n: mt.partition(X, n),
    "tile": lambda n: mt.tile(X, n),
}
OF_A_SHAPE: dict[str, Any] = {
    "zeros": mt.zeros,
    "ones": mt.ones,
    "empty": mt.empty,
    "full": lambda s: mt.full(s, 1.0),
    "reshape": lambda s: mt.reshape(X, s),
    "x.reshape": lambda s: X.reshape(s),
    "broadcast_to": lambda s: mt.broadcast_to(X, s),
    "indices": mt.indices,
    "resize": lambda s: mt.resize(X, s),
}
CALLS: dict[str, Any] = {
    "arange, a step of zero": lambda: mt.arange(0, 1, 0),
    "arange to NaN": lambda: mt.arange(0, NAN),
    "arange from NaN": lambda: mt.arange(NAN, 1),
    "arange, a step of NaN": lambda: mt.arange(0, 1, NAN),
    "arange without end": lambda: mt.arange(0, INF),
    "arange beyond 64 bits": lambda: mt.arange(0, 10**30),
    "arange too long": lambda: mt.arange(0, 1e20),
    "arange of a text": lambda: mt.arange("a"),
    "arange of a list": lambda: mt.arange([1, 2]),
    "arange of None": lambda: mt.arange(None),
    "arange of a complex number": lambda: mt.arange(1j),
    "arange of nothing": lambda: mt.arange(),
    "arange of booleans": lambda: mt.arange(3, dtype=bool),
    "arange beyond the dtype": lambda: mt.arange(0, 300, dtype=mt.uint8),
    "arange below the dtype": lambda: mt.arange(-5, 5, dtype=mt.uint8),
    "linspace, a negative number": lambda: mt.linspace(0, 1, -1),
    "linspace of a text": lambda: mt.linspace("a", 1, 3),
    "linspace of None": lambda: mt.linspace(None, 1, 3),
    "linspace too long": lambda: mt.linspace(0, 1, 10**18),
    "linspace of shapes that do not fit": lambda: mt.linspace([0, 1], [1, 2, 3], 3),
    "linspace beyond the dtype": lambda: mt.linspace(0, 300, 3, dtype=mt.uint8),
    "linspace below the dtype": lambda: mt.linspace(-1, 1, 3, dtype=mt.uint8),
    "eye, negative": lambda: mt.eye(-1),
    "eye, negative columns": lambda: mt.eye(2, -1),
    "eye of a shape": lambda: mt.eye((2, 3)),
    "identity, negative": lambda: mt.identity(-1),
    "geomspace from zero": lambda: mt.geomspace(0, 1, 3),
    "geomspace of a text": lambda: mt.geomspace("a", 1, 3),
    "logspace of a text": lambda: mt.logspace("a", 1),
    "zeros of no dtype": lambda: mt.zeros(3, dtype="foo"),
    "full of a text": lambda: mt.full(2, "a"),
    "full of None": lambda: mt.full(2, None),
    "full_like of a text": lambda: mt.full_like(X, "a"),
    "ones_like of an object": lambda: mt.ones_like(object()),
    "reshape to too many": lambda: mt.reshape(X, (2, 2)),
    "reshape, two unknown": lambda: mt.reshape(X, (-1, -1)),
    "reshape, zero and unknown": lambda: mt.reshape(X, (0, -1)),
    "tile, too often": lambda: mt.tile(X, 10**18),
    "tile, negative": lambda: mt.tile(X, -1),
    "repeat, too often": lambda: mt.repeat(X, 10**18),
    "repeat, wrong counts": lambda: mt.repeat(X, [1, 2]),
    "repeat, a fraction": lambda: mt.repeat(X, [1.5, 1, 1]),
    "broadcast_to, negative": lambda: mt.broadcast_to(X, (2, -3)),
    "expand_dims, a fraction": lambda: mt.expand_dims(X, axis=1.5),
    "stack of None": lambda: mt.stack(None),
    "stack of a number": lambda: mt.stack(3),
    "concat of None": lambda: mt.concat(None),
    "concat of nothing": lambda: mt.concat([]),
    "permute_dims to None": lambda: mt.permute_dims(M, None),
    "split into too many": lambda: mt.array_split(X, 2**70),
    "split at a text": lambda: mt.split(X, "a"),
    "fftfreq of nothing": lambda: mt.fft.fftfreq(0),
    "fftfreq, no distance": lambda: mt.fft.fftfreq(4, d=0),
    "rfftfreq, negative": lambda: mt.fft.rfftfreq(-1),
    "kaiser of a text": lambda: mt.kaiser(3, "a"),
    "histogram, a text for a range": lambda: mt.histogram(X, 3, range="ab"),
    "histogram, a number for a range": lambda: mt.histogram(X, 3, range=3),
    "histogram, no such rule": lambda: mt.histogram(X, "zz"),
}


@pytest.mark.parametrize("name", OF_A_COUNT)
def test_counts_are_integers(name):
    for n in COUNTS:
        with pytest.raises(MeshtapeError, match=r"^\["):
            OF_A_COUNT[name](n)
    if name not in ("repeat", "roll", "tile", "partition", "array_split", "rot90"):
        assert OF_A_COUNT[name](np.int64(2)) is not None


@pytest.mark.parametrize("name", OF_A_SHAPE)
def test_shapes_are_integers(name):
    for shape in SHAPES:
        with pytest.raises(MeshtapeError, match=r"^\["):
            OF_A_SHAPE[name](shape)


@pytest.mark.parametrize("name", CALLS)
def test_senseless_calls(name):
    with pytest.raises(MeshtapeError, match=r"^\["):
        CALLS[name]()


def test_the_call_is_shown():
    with pytest.raises(mt.errors.ArgumentError, match=r"mt\.eye\(2\.5\)"):
        mt.eye(2.5)
    with pytest.raises(mt.errors.ArgumentError, match=r"mt\.tri\(2, k='a'\)"):
        mt.tri(2, k="a")
    with pytest.raises(mt.errors.ArgumentError, match=r"float64\[3\]"):
        mt.diagflat(X, k="a")


def test_errors_of_a_function_that_was_passed_stay_as_they_are():
    def broken(*_: Any) -> Any:
        raise ValueError("mine")

    for call in (
        lambda: mt.apply_along_axis(broken, 0, X),
        lambda: mt.fromfunction(broken, (2,)),
        lambda: mt.piecewise(X, [X > 1], [broken]),
    ):
        with pytest.raises(ValueError, match=r"^mine$") as e:
            call()
        assert not isinstance(e.value, MeshtapeError)


ROOMS = {"": mt.arrays, "linalg.": mt.linalg, "fft.": mt.fft, "nn.": mt.nn, "random.": mt.random}
FUNCTIONS = {
    room + name: getattr(namespace, name)
    for room, namespace in ROOMS.items()
    for name in namespace.__all__
    if inspect.isroutine(getattr(namespace, name)) and getattr(namespace, name).__module__.startswith("meshtape.arrays")
}
SENSELESS = (None, "a", object(), 1j, {}, (), [], -1, 2.5, NAN, mt.zeros((0, 0)), mt.asarray([1, 2, 3]), M, [[1, 2], [3]], np.array(["a"]), Fraction(1, 3), slice(1), int, b"x")  # fmt: skip
NAMED: tuple[dict[str, Any], ...] = ({}, {"nonsense": 1}, {"axis": "a"}, {"axis": 7}, {"dtype": "foo"}, {"ord": "x"})


@pytest.mark.filterwarnings("ignore")
def test_every_function_refuses_with_our_errors_or_computes():
    """Whatever it is given. (Arguments too few or too many for a function of elements are Python's own to refuse.)"""
    calls = [((v,) * k, {}) for k in (1, 2, 3) for v in SENSELESS]
    calls += [((M, v), {}) for v in SENSELESS] + [((M,) * k, kw) for k in (1, 2) for kw in NAMED]
    others = []
    for name, fn in FUNCTIONS.items():
        for args, kwargs in [((), {}), *calls]:
            try:
                fn(*args, **kwargs)
            except Exception as e:
                ours = isinstance(e, MeshtapeError) and str(e).startswith("[")
                if not ours and not (isinstance(e, TypeError) and "positional argument" in str(e)):
                    others.append((name, args, kwargs, e))
    assert others == []


BFLOAT, INTS = mt.ones(3, dtype=mt.bfloat16), mt.asarray([1, 2, 3])
PAIRS: dict[str, Any] = {
    "matmul": lambda a, b: a @ b,
    "concat": lambda a, b: mt.concat([a, b]),
    "stack": lambda a, b: mt.stack([a, b]),
    "append": lambda a, b: mt.append(a, b),
    "block": lambda a, b: mt.block([a, b]),
    "where": lambda a, b: mt.where(INTS > 1, a, b),
    "select": lambda a, b: mt.select([INTS > 1], [a], b[0]),
    "result_type": mt.result_type,
    "isin": mt.isin,
    "union1d": mt.union1d,
    "setxor1d": mt.setxor1d,
    "setdiff1d": mt.setdiff1d,
    "searchsorted": mt.searchsorted,
    "digitize": mt.digitize,
    "dot": mt.dot,
    "vdot": mt.vdot,
    "tensordot": lambda a, b: mt.tensordot(a, b, 1),
    "einsum": lambda a, b: mt.einsum("i,i->", a, b),
    "convolve": mt.convolve,
    "correlate": mt.correlate,
    "polymul": mt.polymul,
    "average": lambda a, b: mt.average(a, weights=b),
    "ediff1d": lambda a, b: mt.ediff1d(a, to_end=b),
}


@pytest.mark.parametrize("name", PAIRS)
def test_dtypes_that_give_none_together(name):
    for pair in ((BFLOAT, INTS), (INTS, BFLOAT)):
        with pytest.raises(mt.errors.DTypeError, match="bfloat16"):
            PAIRS[name](*pair)


def test_functions_say_what_they_take():
    assert str(inspect.signature(mt.eye)).startswith("(n_rows: 'int'")


SCALAR = mt.asarray(1.5)
TENSOR = type("Tensor", (), {"__dlpack_device__": lambda _: (1, 0)})()


def _export(*_: Any, **__: Any) -> Any:
    raise BufferError("it requires a gradient, use detach()")


type(TENSOR).__dlpack__ = _export
PROTOCOLS: dict[str, Any] = {
    "int of NaN": (lambda: int(mt.asarray(NAN)), ValueError, "NaN"),
    "int of infinity": (lambda: int(mt.asarray(INF)), OverflowError, "infinity"),
    "round of NaN": (lambda: round(mt.asarray(NAN)), ValueError, "NaN"),
    "floor of infinity": (lambda: math.floor(mt.asarray(-INF)), OverflowError, "infinity"),
    "ceil of NaN": (lambda: math.ceil(mt.asarray(NAN)), ValueError, "NaN"),
    "trunc of a vector": (lambda: math.trunc(X), TypeError, r"mt\.trunc"),
    "round of a vector": (lambda: round(X), TypeError, r"mt\.round"),
    "round of a complex number": (lambda: round(mt.asarray(1j)), TypeError, "real part"),
    "float of a vector": (lambda: float(X), TypeError, "0-d"),
    "index by a float": (lambda: [1, 2][SCALAR], TypeError, "0-d integer"),
    "len": (lambda: len(SCALAR), TypeError, "0-d"),
    "iteration": (lambda: list(SCALAR), TypeError, "0-d"),
    "truth": (lambda: bool(X), ValueError, "ambiguous"),
    "hash": (lambda: hash(X), TypeError, "unhashable"),
    "times a fraction": (lambda: X * Fraction(1, 3), TypeError, r"\[multiply\].*Fraction"),
    "a fraction times": (lambda: Fraction(1, 3) * X, TypeError, r"\[multiply\].*Fraction"),
    "equal to a fraction": (lambda: Fraction(1, 3) == X, TypeError, r"\[equal\].*Fraction"),
    "equal to bytes of numbers": (lambda: memoryview(np.ones(2)) == X, TypeError, r"\[equal\].*memoryview"),
    "equal to a range": (lambda: range(2) != X, TypeError, r"\[not_equal\].*range"),
    "equal to an array of Dask": (lambda: da.ones(2) == X, TypeError, r"\[equal\].*dask"),
    "a sparse array equal to": (lambda: sparse.csr_array(np.ones((1, 2))) == X, TypeError, r"\[equal\].*csr_array"),
    "plus a decimal": (lambda: X + Decimal("1.5"), TypeError, r"\[add\].*Decimal"),
    "from_dlpack": (lambda: mt.from_dlpack(TENSOR), ValueError, "detach"),
    "from_dlpack of no exporter": (lambda: mt.from_dlpack(object()), ValueError, "gives no array"),
    "a write of a complex number": (lambda: operator.setitem(mt.zeros(2), 0, 1j), TypeError, "real part"),
    "powers": (lambda: mt.asarray([2, 3]) ** -1, ValueError, r"^\[pow\]"),
    "powers by an array": (lambda: mt.asarray([2, 3]) ** mt.asarray([-1, 1]), ValueError, r"^\[pow\]"),
    "powers, compiled": (lambda: mt.compile(lambda x: x**-1)(mt.asarray([2, 3])), ValueError, r"^\[pow\]"),
    "powers by an array, compiled": (
        lambda: mt.compile(lambda x, y: x**y)(mt.asarray([2, 3]), mt.asarray([-1, 1])),
        ValueError,
        r"^\[pow\].*compiled",
    ),
    "a singular matrix, compiled": (
        lambda: mt.compile(mt.linalg.inv)(mt.zeros((2, 2))),
        np.linalg.LinAlgError,
        r"^\[inv\].*compiled",
    ),
    "T of a vector": (lambda: X.T, ValueError, r"x\[:, None\] for a column"),
    "T of three dimensions": (lambda: mt.zeros((1, 2, 3)).T, ValueError, r"use \.mT"),
    "zeros of two lengths": (lambda: mt.zeros(2, 3), TypeError, "a shape is one argument, a tuple"),
    "labels that are probabilities": (lambda: mt.nn.cross_entropy(M, M), ValueError, r"labels \* mt\.nn\.log_softmax"),
    "labels of another length": (lambda: mt.nn.cross_entropy(M, mt.asarray([1])), ValueError, "one for each row"),
    "fftfreq": (lambda: mt.fft.fftfreq(2.5), TypeError, r"^\[fft\.fftfreq\].*mt\.fft\.fftfreq\(2\.5\)"),
    "fftfreq, no distance": (lambda: mt.fft.fftfreq(4, 0), ValueError, r"^\[fft\.fftfreq\]"),
    "out by position": (lambda: mt.matmul(M, M, M), TypeError, r"^\[matmul\]"),
}


@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.filterwarnings("ignore")
def test_errors_of_ours_are_those_of_python_too(name):
    call, kind, message = PROTOCOLS[name]
    with pytest.raises(kind, match=message) as e:
        call()
    assert isinstance(e.value, MeshtapeError)


def test_frequencies_take_their_distance_by_position_as_numpy_does():
    for name in ("fftfreq", "rfftfreq"):
        want = getattr(np.fft, name)(8, 0.5)
        np.testing.assert_array_equal(np.asarray(getattr(mt.fft, name)(8, 0.5)), want)


def test_errors_of_a_function_that_was_passed_stay_as_they_are_compiled_too():
    class Mine(ValueError):
        pass

    def broken(*_: Any) -> Any:
        raise Mine("mine")

    with pytest.raises(Mine, match=r"^mine$"):
        mt.compile(lambda x: broken(x))(X)


@pytest.mark.parametrize("call", [mt.sqrt, mt.nanmean, mt.average, lambda x: mt.median(mt.log(x))])
def test_errors_that_errstate_asks_for_stay_as_they_are(call):
    with np.errstate(invalid="raise"), pytest.raises(FloatingPointError):
        call(mt.asarray([-INF, INF, -1.0]))
