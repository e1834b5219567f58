"""Matplotlib, pandas, xarray, SciPy and scikit-learn on our arrays, as code that was written for NumPy uses them: what
they give on NumPy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy  # whose parts are imported where they are used

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


def at_zero(d: Any, key: Any, value: Any = 5.0) -> Any:
    d = d.copy()
    d[key] = value
    return d


def labelled(found: Any) -> Any:
    """Labels that stayed NumPy's, as numbers that tell them apart."""
    assert type(found.data) is np.ndarray
    return found.copy(data=np.char.str_len(found.values.astype(str)).astype(float))


def points(**indices: Any) -> dict[str, Any]:
    xr = pytest.importorskip("xarray")
    return {k: xr.DataArray(v, dims="z") for k, v in indices.items()}


def of_store(d: Any) -> Any:
    import xarray as xr
    import zarr

    store = zarr.storage.MemoryStore()
    d.to_zarr(store, consolidated=False)
    old = zarr.storage.MemoryStore()
    d.to_zarr(old, consolidated=False, zarr_format=2)
    return [xr.open_zarr(s, consolidated=False)["v"].values for s in (store, old)]


def applied(d: Any, fn: Any, core: bool = True, **options: Any) -> Any:
    import xarray as xr

    return xr.apply_ufunc(fn, d, **({"input_core_dims": [["t"]]} if core else {}), **options)


def daily(d: Any) -> Any:
    import pandas as pd

    return d.assign_coords(t=pd.date_range("2000-01-01", periods=d.sizes["t"], freq="D"))


def whole(d: Any) -> Any:
    return d.fillna(0.0)


# Of "s", arrays that are split over a mesh, "w", watched ones, and "t", traced ones, those that a method refuses by an
# error of ours. Else it gives the values that it gives on NumPy's array: as an array split over the mesh, with its gradient.
XARRAY: dict[str, tuple[Callable[[Any], Any], str]] = {
    **{n: (lambda d, n=n: getattr(d, n)("t"), "") for n in ("mean", "sum", "std", "var", "min", "max", "median")},
    **{n: (lambda d, n=n: getattr(d, n)("t"), "") for n in ("prod", "count", "argmax", "idxmin", "cumsum", "cumprod")},
    **{n: (lambda d, n=n: getattr(d > 0, n)("t"), "") for n in ("any", "all")},
    "np.any": (lambda d: np.any(d > 0), ""),
    "arithmetic": (lambda d: abs(1 - d) ** 2 + d * d.t, ""),
    "alignment": (lambda d: d + d.isel(t=slice(2, 5)), ""),
    "operand of NumPy's": (lambda d: np.arange(32.0).reshape(8, 4) * d, ""),
    "ufunc": (lambda d: np.tanh(d), ""),
    "isel": (lambda d: d.isel(t=[1, 3], x=[0, 2, 3]), ""),
    "isel of points": (lambda d: d.isel(**points(t=[1, 5, 2], x=[0, 3, 3])), ""),
    "sel": (lambda d: d.sel(t=[2.2, 3.9], method="nearest"), ""),
    "sel by values": (lambda d: d.isel(t=whole(d).argmax("t")), "t"),
    "d[i] = v": (lambda d: at_zero(d, {"t": 1}), ""),
    "d[[i], [j]] = v": (lambda d: at_zero(d, {"t": [1, 3], "x": [0, 2]}), ""),
    "d[points] = v": (lambda d: at_zero(d, points(t=[1, 3], x=[0, 2])), ""),
    "d[mask] = v": (lambda d: at_zero(d, {"t": np.arange(8) % 2 == 0}), ""),
    "d[i] = too long": (lambda d: at_zero(d, {"t": 1}, np.zeros(3)), "n"),
    "where": (lambda d: d.where(d > 0, 0.0), ""),
    "where drop": (lambda d: d.where(d.t > 2, drop=True), ""),
    "clip": (lambda d: d.clip(-0.5, 0.5), ""),
    "fillna": (lambda d: d.fillna(d.mean("t")), ""),
    "isin": (lambda d: d.isin([1.0, 2.0]), ""),
    "dropna": (lambda d: d.dropna("t"), "t"),
    "shift": (lambda d: d.shift(t=2), ""),
    "roll": (lambda d: d.roll(t=2), ""),
    "pad": (lambda d: d.pad(t=2, mode="reflect"), ""),
    "diff": (lambda d: d.diff("t", 2), ""),
    "differentiate": (lambda d: d.differentiate("t"), ""),
    "integrate": (lambda d: whole(d).integrate("t"), ""),
    "cumulative_integrate": (lambda d: d.cumulative_integrate("t"), ""),
    "sortby": (lambda d: d.sortby("g"), ""),
    "argsort": (lambda d: whole(d).argsort(1), ""),
    "stack": (lambda d: d.stack(z=("t", "x")), ""),
    "unstack": (lambda d: d.stack(z=("t", "x")).isel(z=slice(3, None)).unstack("z"), ""),
    "reindex": (lambda d: d.reindex(t=[1.0, 2.0, 9.0]), ""),
    "quantile": (lambda d: d.quantile([0.3, 0.6], "t"), ""),
    "coarsen": (lambda d: d.coarsen(t=2).max(), ""),
    "rolling": (lambda d: d.rolling(t=3).mean(), ""),
    "rolling of two": (lambda d: d.rolling(t=3, x=2, center=True, min_periods=1).sum(), ""),
    "rolling.construct": (lambda d: d.rolling(t=3).construct("w"), ""),
    "cumulative": (lambda d: d.cumulative("t").sum(), ""),
    "groupby": (lambda d: d.groupby("g").mean(), ""),
    "groupby anomaly": (lambda d: d.groupby("g") - d.groupby("g").mean(), ""),
    "groupby.quantile": (lambda d: d.groupby("g").quantile(0.3), ""),
    "groupby.first": (lambda d: d.groupby("g").first(), "wt"),
    "resample": (lambda d: daily(d).resample(t="2D").sum(), ""),
    "weighted": (lambda d: d.weighted(d.t + 1).std("t"), ""),
    "weighted.quantile": (lambda d: d.weighted(d.t + 1).quantile(0.5, dim="t"), "swt"),
    "polyfit": (lambda d: whole(d).polyfit("t", 2).polyfit_coefficients, "t"),
    "curvefit": (lambda d: whole(d).curvefit("t", lambda t, a, b: a * t + b).curvefit_coefficients, "swt"),
    "dot": (lambda d: whole(d).dot(d.t), ""),
    "concat": (lambda d: __import__("xarray").concat([d, d], "t"), ""),
    "merge": (lambda d: __import__("xarray").merge([d, d * 1]).v, "t"),
    "equals": (lambda d: int(d.equals(d * 1)), "t"),
    "interp": (lambda d: d.interp(t=[0.5, 1.5]), "swt"),
    "interp of points": (lambda d: d.interp(**points(t=[0.5, 1.5], x=[0.5, 1.5])), "swt"),
    "interpolate_na": (lambda d: d.interpolate_na("t", limit=1), "swt"),
    "apply_ufunc": (lambda d: applied(d, scipy.special.j0, core=False), "swt"),
    "apply_ufunc of ours": (lambda d: applied(d, lambda v: np.nanmean(v, axis=-1)), ""),
    "apply_ufunc vectorized": (lambda d: applied(d, np.nanmax, vectorize=True), "swt"),
    "apply_ufunc parallelized": (lambda d: applied(d, np.tanh, core=False, dask="parallelized"), ""),
    "Dataset": (lambda d: d.to_dataset(name="v").rolling(t=3).mean().map(lambda v: v * 2).v, ""),
    "DataTree": (lambda d: __import__("xarray").DataTree.from_dict({"/a": d.to_dataset()}).mean("t")["a/v"], ""),
    "compute": (lambda d: d.compute(), ""),
    "persist": (lambda d: d.persist(), ""),
    "load": (lambda d: d.copy().load(), ""),
}
# Results that are NumPy's by their nature: labels, which are chosen by values, and arrays without a sharding.
LABELLED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "idxmax of dates": (lambda d: labelled(daily(d).idxmax("t")), "t"),
    "idxmin of texts": (lambda d: labelled(d.assign_coords(x=list("abcd")).idxmin("x")), "t"),
    "where of dates": (lambda d: labelled((e := daily(d)).t.where(e.isel(x=0) > 0)), "t"),
    "where of texts": (lambda d: labelled(d.g.astype(str).where(d.isel(x=0) > 0, "no")), "t"),
    "like of a shape": (lambda d: [np.full_like(d.data, 2.0, shape=(2, 3)), np.zeros_like(d.data, shape=2)], ""),
}
# Values that leave: NumPy's, and Dask's of an array on a mesh. (A file keeps those of a watched array, as np.save does.)
LEFT: dict[str, Callable[[Any], Any]] = {
    "to_zarr": of_store,
    "values": lambda d: d.values,
    "as_numpy": lambda d: d.as_numpy().interp(t=[0.5, 1.5]),
    "to_dataframe": lambda d: d.to_dataframe(),
    "to_series": lambda d: d.to_series(),
    "to_dict": lambda d: np.asarray(d.to_dict()["data"]),
    "to_netcdf": lambda d: np.frombuffer(d.to_netcdf(engine="scipy"), np.uint8),
    "chunk": lambda d: d.chunk(t=4).mean("t").compute(),
    "chunk and NaN": lambda d: d.chunk(t=4).sum("t").compute(),
    "chunk, cumsum": lambda d: d.chunk(t=5).cumsum("t").compute(),
    "chunk, median": lambda d: d.chunk(t=5).median("x").compute(),
    "unify_chunks": lambda d: d.to_dataset().chunk(t=4).unify_chunks().to_dask_dataframe().compute()[["v"]],
}
LABELS = {"t": np.arange(8), "x": np.arange(4), "g": ("t", np.arange(8) % 3)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*XARRAY, *LABELLED, *LEFT])
def test_xarray(name: str) -> None:
    xr = pytest.importorskip("xarray")
    named = XARRAY | LABELLED
    way, refused = named[name] if name in named else (LEFT[name], "t" if name == "to_zarr" else "wt")

    def call(x: Any) -> Any:
        found = way(xr.DataArray(x, dims=("t", "x"), coords=LABELS, name="v"))
        return getattr(found, "data", found)

    mesh = mt.Mesh({"m": 2})

    def split(x: Any) -> mt.Array:
        return mt.distribute(x, mesh, m=mt.Shard(0))

    def total(x: Any, xp: Any) -> Any:
        return xp.sum(xp.where(xp.isnan(x), 0.0, xp.cos(x)))

    def grad(x: Any) -> Any:
        kept: list[Any] = []

        def loss(v: Any) -> mt.Array:
            kept.append(call(v))
            return total(kept[0], mt) if isinstance(kept[0], mt.Array) else 0 * mt.sum(v)

        slope = mt.grad(loss)(mt.asarray(x))
        if isinstance(kept[0], mt.Array):
            v = np.cos(np.arange(32.0)).reshape(8, 4)
            higher, lower = (total(call(x + s * v), np) for s in (1e-6, -1e-6))
            np.testing.assert_allclose((np.asarray(slope) * v).sum(), (higher - lower) / 2e-6, rtol=1e-5, atol=1e-7)
        return kept[0]

    values = N[:8].copy()
    values[0, 0] = np.nan
    forms = {"l": mt.asarray, "s": split, "w": grad, "t": mt.compile(call)}
    for form, make in forms.items():
        x = A[:8] if form == "w" else values
        if form in refused or refused == "n":
            with pytest.raises(mt.errors.MeshtapeError if refused != "n" else ValueError):
                make(x) if form in "wt" else call(make(x))
            continue
        got = make(x) if form in "wt" else call(make(x))
        if form == "s" and name in XARRAY and not isinstance(got, int):
            assert got.sharding is not None
        for w, g in zip(plain(call(x.copy())), plain(got), strict=True):
            assert w.shape == g.shape
            np.testing.assert_allclose(g, w, rtol=1e-6)


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
