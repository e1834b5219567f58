"""Matplotlib, pandas, xarray, SciPy and scikit-learn on our arrays, as code that was written for NumPy uses them: what
they give on NumPy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.interpolate
import scipy.ndimage
import scipy.optimize
import scipy.signal
import scipy.sparse
import scipy.spatial
import scipy.stats

import meshtape as mt

RNG = np.random.default_rng(0)
V = RNG.normal(size=30)
P = np.abs(V) + 0.1
S = np.sort(V)
A = RNG.normal(size=(30, 4))
N = np.where(A > 1.5, np.nan, A)
G = RNG.random((6, 7))
Y = (A[:, 0] > 0).astype(int)

Make = Callable[[np.ndarray], Any]


def plain(found: Any) -> list[Any]:
    if isinstance(found, tuple | list):
        return [p for f in found for p in plain(f)]
    for way in ("toarray", "to_numpy"):
        if hasattr(found, way):
            return plain(getattr(found, way)())
    return [np.asarray(found)]


def compare(call: Callable[[Make], Any]) -> None:
    want, got = plain(call(np.array)), plain(call(mt.asarray))
    for w, g in zip(want, got, strict=True):
        assert w.shape == g.shape
        if w.dtype.kind in "biufc":
            np.testing.assert_allclose(np.asarray(g), w, rtol=1e-6)
        else:
            assert w.tolist() == g.tolist()


DRAWN: dict[str, Callable[[Any, Make], Any]] = {
    "plot": lambda ax, m: ax.plot(m(S), m(A)),
    "bar": lambda ax, m: ax.bar(m(np.arange(5.0)), m(P[:5]), width=m(P[5:10]), yerr=m(P[:5])),
    "hist": lambda ax, m: ax.hist(m(V), bins=m(np.linspace(-2, 2, 6)), weights=m(P), density=True),
    "hist2d": lambda ax, m: ax.hist2d(m(V), m(P), bins=(4, 5), density=True),
    "imshow": lambda ax, m: ax.imshow(m(G), vmin=m(P)[0]),
    "scatter": lambda ax, m: ax.scatter(m(V), m(P), c=m(V), s=m(P)),
    "contourf": lambda ax, m: ax.contourf(m(G), levels=m(np.linspace(0, 1, 5))),
    "errorbar": lambda ax, m: ax.errorbar(m(S), m(V), yerr=m(P), xerr=m(P)),
    "fill_between": lambda ax, m: ax.fill_between(m(S), m(V), m(P), where=m(V) > 0, interpolate=True),
    "boxplot": lambda ax, m: ax.boxplot(m(A)),
}


@pytest.mark.parametrize("name", DRAWN)
def test_matplotlib(name: str) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    def picture(make: Make) -> Any:
        fig = figure.Figure(figsize=(2, 2))
        canvas = FigureCanvasAgg(fig)
        DRAWN[name](fig.add_subplot(), make)
        canvas.draw()
        return np.array(canvas.buffer_rgba())

    compare(picture)


def frame(x: Any) -> Any:
    import pandas as pd

    df = pd.DataFrame({"a": [1.0, 2.0, 3.0]})
    df["c"] = x
    return df.to_numpy()


PANDAS: dict[str, Callable[[Any, Any], Any]] = {
    "Series": lambda pd, x: pd.Series(x),
    "column": lambda pd, x: frame(x),
    "isin": lambda pd, x: pd.Series([1.0, 5.0, 3.0]).isin(x),
    "Index.isin": lambda pd, x: pd.Index([1.0, 5.0, 3.0]).isin(x),
    "DataFrame.isin": lambda pd, x: pd.DataFrame({"a": [1.0, 5.0]}).isin(x),
    "isin of elements": lambda pd, x: pd.Series([1.0, 5.0, 3.0]).isin([x[0], x[1]]),
    "cut": lambda pd, x: pd.cut(x, 3).codes,
    "Categorical": lambda pd, x: pd.Categorical(x).codes,
    "arithmetic": lambda pd, x: pd.Series([1.0, 5.0, 3.0]) * x - x,
    "replace": lambda pd, x: pd.Series([1.0, 5.0, 3.0]).replace(x[1], 7.0),
    "where": lambda pd, x: pd.Series([1.0, 5.0, 3.0]).where(x > 1, x),
    "dict": lambda pd, x: [{3.0: 1, 1.0: 2}[x[0]], len({*x, 3.0}), max(x), sorted(x), 1.0 in x],
}


@pytest.mark.parametrize("name", PANDAS)
def test_pandas(name: str) -> None:
    pd = pytest.importorskip("pandas")
    compare(lambda make: PANDAS[name](pd, make(np.array([3.0, 1.0, 2.0]))))


XARRAY: dict[str, Callable[[Any], Any]] = {
    **{n: lambda d, n=n: getattr(d, n)("t") for n in ("mean", "sum", "std", "min", "max", "median", "prod", "count")},
    **{n: lambda d, n=n: getattr(d > 0, n)("t") for n in ("any", "all")},
    "np.any": lambda d: np.any(d > 0),
    "np.all": lambda d: np.all(d > 0, axis=0),
    "quantile": lambda d: d.quantile([0.3, 0.6], "t"),
    "rolling": lambda d: d.rolling(t=3).mean(),
    "construct": lambda d: d.rolling(t=3).construct("w"),
    "coarsen": lambda d: d.coarsen(t=5).max(),
    "polyfit": lambda d: d.fillna(0.0).polyfit("t", 2).polyfit_coefficients,
    "groupby": lambda d: d.groupby(d.t % 3).mean(),
    "dropna": lambda d: d.dropna("t"),
    "where": lambda d: d.where(d > 0, 0.0),
    "isin": lambda d: d.isin(d.data[0]),
    "interp": lambda d: d.interp(t=[0.5, 1.5]),
    "concat": lambda d: __import__("xarray").concat([d, d], "t"),
    "sortby": lambda d: d.sortby(d.t, ascending=False),
    "differentiate": lambda d: d.differentiate("t"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", XARRAY)
def test_xarray(name: str) -> None:
    xr = pytest.importorskip("xarray")
    compare(lambda make: XARRAY[name](xr.DataArray(make(N), dims=("t", "x"), coords={"t": np.arange(30)})))


SCIPY: dict[str, Callable[[Make], Any]] = {
    "describe": lambda m: scipy.stats.describe(m(V)).variance,
    "linregress": lambda m: tuple(scipy.stats.linregress(m(V), m(P))),
    "kde": lambda m: scipy.stats.gaussian_kde(m(V))(m(S)),
    "minimize": lambda m: scipy.optimize.minimize(lambda v: ((v - m(V[:3])) ** 2).sum(), m(np.zeros(3))).x.round(4),
    "curve_fit": lambda m: scipy.optimize.curve_fit(lambda x, a, b: a * x + b, m(S), m(V))[0],
    "least_squares": lambda m: scipy.optimize.least_squares(lambda v: m(A) @ v - m(V), m(np.zeros(4))).x.round(4),
    "welch": lambda m: scipy.signal.welch(m(V), nperseg=8),
    "savgol": lambda m: scipy.signal.savgol_filter(m(V), 5, 2),
    "find_peaks": lambda m: scipy.signal.find_peaks(m(V))[0],
    "CubicSpline": lambda m: scipy.interpolate.CubicSpline(m(S), m(V))(m(S) + 0.01),
    "interp1d": lambda m: scipy.interpolate.interp1d(m(S), m(V))(m(S[3:5])),
    "solve_ivp": lambda m: scipy.integrate.solve_ivp(lambda t, y: -m(np.asarray(y)), (0, 1), m(np.ones(2))).y,
    "gaussian_filter": lambda m: scipy.ndimage.gaussian_filter(m(G), 1),
    "cdist": lambda m: scipy.spatial.distance.cdist(m(A), m(A)),
    "csr": lambda m: scipy.sparse.csr_array(m(A)) @ m(V[:4]),
    "coo": lambda m: scipy.sparse.coo_array((m(V), (m(Y), m(Y))), shape=(3, 3)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCIPY)
def test_scipy(name: str) -> None:
    compare(SCIPY[name])


def test_scikit_learn() -> None:
    pytest.importorskip("sklearn")
    from sklearn import (
        cluster,
        decomposition,
        ensemble,
        linear_model,
        metrics,
        naive_bayes,
        neighbors,
        preprocessing,
        svm,
        tree,
    )

    for estimator in (
        linear_model.LogisticRegression(),
        linear_model.Ridge(),
        linear_model.Lasso(0.01),
        svm.SVC(random_state=0),
        ensemble.RandomForestClassifier(3, random_state=0),
        neighbors.KNeighborsClassifier(),
        naive_bayes.GaussianNB(),
        tree.DecisionTreeClassifier(random_state=0),
        cluster.KMeans(2, n_init=1, random_state=0),
    ):
        compare(lambda m, e=estimator: e.fit(m(A), m(Y)).predict(m(A)))
    for transformer in (preprocessing.StandardScaler(), preprocessing.OneHotEncoder(), decomposition.PCA(2)):
        compare(lambda m, e=transformer: e.fit_transform(m(A.round())))
    compare(lambda m: metrics.roc_curve(m(Y), m(P))[:2])
