"""pandas with Arrays as masks, indices and columns: what it makes of NumPy's, or an error; never rows that nobody asked
for."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import meshtape as mt

pd = pytest.importorskip("pandas")

VALUES, MASK, PLACES = np.array([1.0, 2.0, 3.0]), np.array([True, False, True]), np.array([2, 0])
FRAME = pd.DataFrame({"a": [1, 2, 3], "b": [4.0, 5.0, 6.0]})
SERIES = pd.Series([1.0, 2.0, 5.0])


def put(target: Any, where: str, key: Any, value: Any) -> Any:
    out = target.copy()
    (getattr(out, where) if where else out)[key] = value
    return out


# Of values, a mask and indices.
CALLS: dict[str, Any] = {
    "df[mask]": lambda x, m, i: FRAME[m],
    "series[mask]": lambda x, m, i: SERIES[m],
    "df.loc[mask]": lambda x, m, i: FRAME.loc[m],
    "df.loc[mask, name]": lambda x, m, i: FRAME.loc[m, "a"],
    "series.loc[mask]": lambda x, m, i: SERIES.loc[m],
    "df.iloc[mask]": lambda x, m, i: FRAME.iloc[m],
    "series.iloc[mask]": lambda x, m, i: SERIES.iloc[m],
    "df.iloc[indices]": lambda x, m, i: FRAME.iloc[i],
    "df.loc[indices]": lambda x, m, i: FRAME.loc[i],
    "series[indices]": lambda x, m, i: SERIES[i],
    "series.take(indices)": lambda x, m, i: SERIES.take(i),
    "series.reindex(indices)": lambda x, m, i: SERIES.reindex(i),
    "df[name] =": lambda x, m, i: put(FRAME, "", "c", x),
    "df.assign": lambda x, m, i: FRAME.assign(c=x, d=m),
    "df.loc[mask, name] =": lambda x, m, i: put(FRAME, "loc", (m, "b"), x[:2]),
    "df.loc[mask, name] = number": lambda x, m, i: put(FRAME, "loc", (m, "b"), 9.0),
    "df.iloc[indices, place] =": lambda x, m, i: put(FRAME, "iloc", (i, 1), x[:2]),
    "series[mask] =": lambda x, m, i: put(SERIES, "", m, 0.0),
    "series.where": lambda x, m, i: SERIES.where(m, x),
    "series.mask": lambda x, m, i: SERIES.mask(m, x),
    "series.isin": lambda x, m, i: SERIES.isin(x),
    "Series": lambda x, m, i: pd.Series(x),
    "Series of a mask": lambda x, m, i: pd.Series(m),
    "Series with an index": lambda x, m, i: pd.Series([1, 2], index=i),
    "DataFrame": lambda x, m, i: pd.DataFrame(x.reshape(1, 3)),
    "DataFrame of columns": lambda x, m, i: pd.DataFrame({"x": x, "m": m}),
    "Index": lambda x, m, i: pd.Index(x),
    "Categorical": lambda x, m, i: pd.Categorical(i),
    "concat": lambda x, m, i: pd.concat([pd.Series(x), SERIES]),
    "series + values": lambda x, m, i: SERIES + x,
    "series > values": lambda x, m, i: x < SERIES,
    "isna": lambda x, m, i: pd.isna(x),
    "cut": lambda x, m, i: pd.cut(SERIES, x),
}
# Of these pandas asks for its own types, or NumPy's.
REFUSING: dict[str, Any] = {
    "factorize": lambda x, m, i: pd.factorize(x),
    "unique": lambda x, m, i: pd.unique(x),
    "groupby": lambda x, m, i: FRAME.groupby(x).sum(),
    "set_index": lambda x, m, i: FRAME.set_index(x),
}

NOT_OF_VALUES = {
    *(n for n in CALLS if n.startswith(("df[mask]", "series[mask]", "df.iloc[mask]", "series.iloc", "series.loc"))),
    *("df.loc[mask]", "df.loc[mask, name]", "df.iloc[indices]", "df.loc[indices]", "series[indices]"),
    *("series.take(indices)", "series.reindex(indices)", "df.loc[mask, name] = number", "Series of a mask"),
    *("Series with an index", "Categorical"),
}


def text(found: Any) -> tuple[str, ...]:
    return type(found).__name__, str(found), str(getattr(found, "dtype", getattr(found, "dtypes", "")))


@pytest.mark.parametrize("name", CALLS)
def test_as_of_numpys_arrays(name):
    want = CALLS[name](VALUES, MASK, PLACES)
    mesh = mt.Mesh({"data": 2})
    for put in (mt.asarray, lambda v: mt.distribute(mt.asarray(v), mesh, data=mt.Shard(0))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert text(CALLS[name](put(VALUES), put(MASK), put(PLACES))) == text(want)


@pytest.mark.parametrize("name", [*CALLS, *REFUSING])
def test_history_is_not_lost_in_silence(name):
    call = {**CALLS, **REFUSING}[name]

    def watched(x: Any) -> Any:
        call(2.0 * x, MASK, PLACES)
        return (x * x).sum()

    def traced(x: Any) -> Any:
        call(x, x > 1.5, mt.astype(x[:2], mt.int64))
        return x.sum()

    x = mt.asarray(VALUES)
    if name not in NOT_OF_VALUES:
        with pytest.raises((mt.errors.GradientError, TypeError)):
            mt.grad(watched)(x)
    with pytest.raises((mt.errors.TracedValueError, mt.errors.GradientError, TypeError)):
        mt.compile(traced)(x)


@pytest.mark.parametrize("name", REFUSING)
def test_what_pandas_refuses_it_refuses_with_an_error(name):
    with pytest.raises(TypeError):
        REFUSING[name](*map(mt.asarray, (VALUES, MASK, PLACES)))
