"""Keywords of NumPy's functions that ours lack: refused by name and by type, and passed over where they have no
effect."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.errors import MeshtapeError, NumPyFunctionError

NAMESPACES = {"": (np, mt), "linalg.": (np.linalg, mt.linalg), "fft.": (np.fft, mt.fft)}
UFUNC = ["out", "where", "casting", "order", "dtype", "subok", "signature"]


def keywords(theirs: Any) -> list[str]:
    if isinstance(theirs, np.ufunc):
        return UFUNC
    try:
        parameters = inspect.signature(theirs).parameters.values()
    except ValueError:
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def lacking() -> list[tuple[str, str]]:
    found = []
    for prefix, (theirs, ours) in NAMESPACES.items():
        for name in dir(theirs):
            fn = getattr(ours, name, None)
            if name.startswith("_") or isinstance(getattr(theirs, name), type) or not callable(fn):
                continue
            if name in ("load", "save"):  # of checkpoints
                continue
            own = inspect.signature(fn).parameters
            if not any(p.kind is p.VAR_KEYWORD for p in own.values()):
                taken = {k for k, p in own.items() if p.kind is not p.POSITIONAL_ONLY}
                found += [(prefix + name, k) for k in keywords(getattr(theirs, name)) if k not in taken]
    return found


LACKING = lacking()


def test_there_are_such_keywords():
    assert len(LACKING) > 600


@pytest.mark.filterwarnings("ignore")
def test_none_is_refused_with_an_error_of_pythons():
    """Called with nothing but a keyword, or beside arrays: right, or an error that says what is missing or not
    taken."""
    x = mt.asarray([[2.0, 1.0], [1.0, 3.0]])
    bare = []
    for path, keyword in LACKING:
        prefix, _, name = path.rpartition(".")
        fn = getattr(getattr(mt, prefix) if prefix else mt, name)
        for args in ((), (x,), (x, x)):
            try:
                fn(*args, **{keyword: object()})
            except MeshtapeError:
                pass
            except Exception as e:
                bare += [f"{path}({keyword}=): {e!r}"] if "keyword argument" in str(e) else []
    assert bare == []


REFUSED: list[tuple[str, Any]] = [
    ("out", lambda x: mt.sum(x, out=x)),
    ("out", lambda x: mt.add(x, x, out=x)),
    ("out", lambda x: mt.sin(x, out=x)),
    ("out", lambda x: mt.fft.fft(x, out=x)),
    ("dtype", lambda x: mt.concat([x, x], dtype=np.float32)),
    ("order", lambda x: mt.sort(x, order="name")),
    ("retstep", lambda x: mt.linspace(0, 1, 3, retstep=True)),
    ("UPLO", lambda x: mt.linalg.eigh(mt.eye(2), UPLO="U")),
    ("axs", lambda x: mt.sum(x, axs=0)),
    ("base", lambda x: mt.topk(x, 1, base=2)),
    ("approximate", lambda x: mt.erf(x, approximate=True)),
    ("where", lambda x: mt.sin(x, where=x > 1)),
]


@pytest.mark.parametrize(("keyword", "call"), REFUSED)
def test_what_has_an_effect_is_named(keyword, call):
    with pytest.raises(NumPyFunctionError, match=keyword):
        call(mt.asarray([3.0, 1.0, 2.0]))


X = np.asarray([3.0, 1.0, 2.0])
TAKEN: list[Any] = [
    lambda m, x: m.sum(x, out=None),
    lambda m, x: m.sum(a=x),
    lambda m, x: m.sort(x, kind="stable"),
    lambda m, x: m.argsort(x, kind="mergesort"),
    lambda m, x: m.median(x, overwrite_input=True),
    lambda m, x: m.clip(x, a_min=1.5, a_max=2.5),
    lambda m, x: m.isin(x, [1.0], assume_unique=True),
    lambda m, x: m.zeros(3, order="F"),
    lambda m, x: m.eye(N=3, M=2),
    lambda m, x: m.roll(a=x, shift=1),
    lambda m, x: m.add(x, x, dtype=np.float32),
    lambda m, x: m.add(x, x, casting="same_kind"),
    lambda m, x: m.sin(x, order="K"),
    lambda m, x: m.einsum("i,i", x, x, optimize=True),
    lambda m, x: m.delete(x, obj=1),
    lambda m, x: m.insert(x, obj=1, values=9.0),
    lambda m, x: m.tile(x, reps=2),
    lambda m, x: m.linalg.norm(x=x),
]


@pytest.mark.parametrize("call", TAKEN)
def test_what_has_none_is_taken(call):
    expected = np.asarray(call(np, X))
    x = mt.asarray(X)
    for found in (call(mt, x), mt.compile(lambda x: call(mt, x))(x)):
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-7)
    with mt.Tape() as tape:
        tape.watch(x)
        call(mt, x)


def test_signatures_say_what_a_function_takes():
    assert list(inspect.signature(mt.sin).parameters) == ["x"]
    assert list(inspect.signature(mt.sum).parameters) == ["x", "axis", "dtype", "keepdims", "initial", "where"]
    assert mt.concatenate is mt.concat


def test_errors_of_the_function_itself_pass_through():
    with pytest.raises(TypeError, match="cannot make"):
        mt.sum(None, axis=0)
    with pytest.raises(mt.errors.ShapeError):
        mt.sum(mt.ones(3), axis=4)
