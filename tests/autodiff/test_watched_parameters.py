"""A watched array where a function takes a number: the derivative by it is right, or the call says that it has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshtape as mt

X = np.array([[0.3, -1.2, 0.8], [1.1, 0.4, -0.6]])
POSITIVE = np.abs(X) + 0.5
KEY = mt.random.key(3)
LABELS = np.array([0, 2])
IMAGES = np.random.default_rng(0).normal(size=(2, 4, 3))
ONE = np.ones(4)

CALLS: dict[str, Callable[[Any], Any]] = {
    "arange start": lambda p: mt.arange(p, 3.0),
    "arange step": lambda p: mt.arange(0.0, 3.0, p),
    "asarray": lambda p: mt.asarray([p, 1.0]),
    "average weights": lambda p: mt.average(X, weights=p * POSITIVE**2 + p**2),
    "batch_norm eps": lambda p: mt.batch_norm(IMAGES, ONE, ONE, training=True, eps=p),
    "bincount weights": lambda p: mt.bincount(LABELS, weights=mt.asarray([1.0, 2.0]) * p),
    "binary_cross_entropy": lambda p: mt.nn.binary_cross_entropy(X, (X > 0).astype(float), positive_weight=p),
    "celu": lambda p: mt.nn.celu(X, alpha=p),
    "clip": lambda p: mt.clip(X, -p, p),
    "corrcoef": lambda p: mt.corrcoef(X * p, X[::-1] + p),
    "cosine_similarity eps": lambda p: mt.nn.cosine_similarity(X * 1e-3, X[::-1] * 1e-3, eps=p),
    "cross_entropy": lambda p: mt.nn.cross_entropy(X, LABELS, label_smoothing=p),
    "cov aweights": lambda p: mt.cov(X, aweights=p * np.array([1.0, 2.0, 3.0]) + 1),
    "diff prepend": lambda p: mt.diff(X, prepend=p * np.ones((2, 1))),
    "digitize bins": lambda p: mt.digitize(X, mt.stack([p, p + 1])),
    "dropout": lambda p: mt.nn.dropout(X, p, key=KEY),
    "dropout_add": lambda p: mt.nn.dropout_add(X, X, p, key=KEY),
    "ediff1d": lambda p: mt.ediff1d(X, to_end=p),
    "elu": lambda p: mt.nn.elu(X, alpha=p),
    "fftfreq": lambda p: mt.fft.fftfreq(4, d=p),
    "full": lambda p: mt.full((3,), p),
    "full_like": lambda p: mt.full_like(X, p),
    "geomspace": lambda p: mt.geomspace(p, 3.0, 4),
    "gradient": lambda p: mt.gradient(X, p, axis=1),
    "group_norm eps": lambda p: mt.group_norm(IMAGES, 2, ONE, ONE, eps=p),
    "heaviside": lambda p: mt.heaviside(X * 0, p),
    "histogram range": lambda p: mt.histogram(X, 3, range=(-p, p))[1],
    "histogram weights": lambda p: mt.histogram(X, 3, weights=X * p)[0],
    "histogram bins": lambda p: mt.histogram(X, mt.stack([-p, p, 2 * p]))[1],
    "histogram_bin_edges": lambda p: mt.histogram_bin_edges(X * p, 3),
    "huber": lambda p: mt.nn.huber_loss(X, X[::-1], delta=p),
    "info_nce": lambda p: mt.nn.info_nce(X, X[::-1], temperature=p),
    "instance_norm eps": lambda p: mt.instance_norm(IMAGES, ONE, ONE, eps=p),
    "interp left": lambda p: mt.interp(X, mt.asarray([0.0, 1.0]), mt.asarray([0.0, 1.0]), left=p),
    "kaiser": lambda p: mt.kaiser(5, p),
    "layer_norm eps": lambda p: mt.layer_norm(X, 3, np.ones(3), np.ones(3), eps=p),
    "leaky_relu": lambda p: mt.nn.leaky_relu(X, negative_slope=p),
    "linspace": lambda p: mt.linspace(p, 3.0, 4),
    "logspace": lambda p: mt.logspace(p, 3.0, 4),
    "logspace base": lambda p: mt.logspace(0.0, 3.0, 4, base=p),
    "nan_to_num": lambda p: mt.nan_to_num(np.where(X > 1, np.nan, X), nan=p),
    "nanstd correction": lambda p: mt.nanstd(X, correction=p),
    "nanvar correction": lambda p: mt.nanvar(X, correction=p),
    "norm ord": lambda p: mt.linalg.norm(X[0], ord=p),
    "vector_norm ord": lambda p: mt.linalg.vector_norm(X, ord=p),
    "normal": lambda p: mt.random.normal(KEY, (3,), mean=p, std=p),
    "exponential": lambda p: mt.random.exponential(KEY, (3,), scale=p),
    "truncated_normal": lambda p: mt.random.truncated_normal(KEY, -1.0, 1.0, (3,), mean=p, std=p),
    "truncated_normal lower": lambda p: mt.random.truncated_normal(KEY, -p, p, (3,)),
    "uniform": lambda p: mt.random.uniform(KEY, (3,), low=-p, high=p),
    "pad": lambda p: mt.pad(X, 1, constant_values=p),
    "percentile": lambda p: mt.percentile(X, p * 10),
    "piecewise": lambda p: mt.piecewise(X, [X > 0], [p, -p]),
    "polyint": lambda p: mt.polyint(X[0], k=p),
    "polyfit weights": lambda p: mt.polyfit(X[0], X[1], 1, w=p + X[0] ** 2),
    "put by index": lambda p: mt.asarray(X).at[0].set(p),
    "quantile": lambda p: mt.quantile(X, p),
    "nanquantile": lambda p: mt.nanquantile(X, p),
    "rms_norm eps": lambda p: mt.rms_norm(X, 3, np.ones(3), eps=p),
    "attention scale": lambda p: mt.nn.scaled_dot_product_attention(IMAGES, IMAGES, IMAGES, scale=p),
    "attention dropout": lambda p: mt.nn.scaled_dot_product_attention(IMAGES, IMAGES, IMAGES, dropout_rate=p, dropout_key=KEY),
    "select default": lambda p: mt.select([X > 0], [X], default=p),
    "softplus": lambda p: mt.nn.softplus(X, beta=p),
    "std correction": lambda p: mt.std(X, correction=p),
    "tri": lambda p: mt.tril(p * X),
    "trapezoid dx": lambda p: mt.trapezoid(X, dx=p),
    "unwrap period": lambda p: mt.unwrap(np.cumsum(POSITIVE * 4, 1), period=p * 4),
    "unwrap discont": lambda p: mt.unwrap(np.cumsum(POSITIVE * 4, 1) * p),
    "vander": lambda p: mt.vander(p * X[0], 3),
    "var correction": lambda p: mt.var(X, correction=p),
    "where": lambda p: mt.where(X > 0, p, -p),
    "adam lr": lambda p: _stepped(mt.optim.adam(p)),
    "adam b1": lambda p: _stepped(mt.optim.adam(0.1, b1=p)),
    "adam eps": lambda p: _stepped(mt.optim.adam(0.1, eps=p)),
    "adamw decay": lambda p: _stepped(mt.optim.adamw(0.1, weight_decay=p)),
    "sgd lr": lambda p: _stepped(mt.optim.sgd(p)),
    "sgd decay": lambda p: _stepped(mt.optim.sgd(0.1, weight_decay=p)),
    "sgd momentum": lambda p: _stepped(mt.optim.sgd(0.1, momentum=p)),
    "momentum": lambda p: _stepped(mt.optim.momentum(0.1, beta=p)),
    "cosine lr": lambda p: _stepped(mt.optim.sgd(mt.optim.cosine(p, 10))),
    "clip_by_global_norm": lambda p: mt.optim.clip_by_global_norm({"a": mt.asarray(X)}, p),
    "clip_by_value": lambda p: mt.optim.clip_by_value({"a": mt.asarray(X)}, p),
    "interp right": lambda p: mt.interp(X, mt.asarray([0.0, 1.0]), mt.asarray([0.0, 1.0]), right=p),
    "sum initial": lambda p: mt.sum(X, initial=p),
    "prod initial": lambda p: mt.prod(X, initial=p),
    "max initial": lambda p: mt.max(X - 2, axis=1, initial=p),
    "min initial": lambda p: mt.min(X + 2, axis=1, initial=p),
    "nan_to_num posinf": lambda p: mt.nan_to_num(np.where(X > 1, np.inf, X), posinf=p),
    "nan_to_num neginf": lambda p: mt.nan_to_num(np.where(X > 1, -np.inf, X), neginf=p),
    "diff append": lambda p: mt.diff(X, append=p * np.ones((2, 1))),
    "diff prepend a number": lambda p: mt.diff(X[0], prepend=p),
    "ediff1d begin": lambda p: mt.ediff1d(X, to_begin=p),
    "clip max alone": lambda p: mt.clip(X, None, p),
    "histogram2d weights": lambda p: mt.histogram2d(X[0], X[1], 2, weights=p * X[0])[0],
    "rfftfreq": lambda p: mt.fft.rfftfreq(4, d=p),
    "linspace stop": lambda p: mt.linspace(0.0, p, 4),
    "where of ours": lambda p: mt.where(X > 0, X, p),
    "trapezoid x": lambda p: mt.trapezoid(X[0], mt.asarray([0.0, 1.0, 2.0]) * p),
    "isclose": lambda p: mt.where(mt.isclose(X, X + 1e-9, rtol=p), X, X),
    "bernoulli": lambda p: mt.random.bernoulli(KEY, p, (3,)),
    "choice p": lambda p: mt.random.choice(KEY, 3, (4,), p=mt.stack([p, p, 1 - 2 * p])) * 1.0,
    "cauchy": lambda p: mt.random.cauchy(KEY, (3,), loc=p, scale=p),
    "laplace": lambda p: mt.random.laplace(KEY, (3,), loc=p, scale=p),
    "logistic": lambda p: mt.random.logistic(KEY, (3,), loc=p, scale=p),
    "lognormal": lambda p: mt.random.lognormal(KEY, (3,), mean=p, sigma=p),
    "pareto": lambda p: mt.random.pareto(KEY, 2.0, (3,), scale=p),
    "rayleigh": lambda p: mt.random.rayleigh(KEY, (3,), scale=p),
    "weibull": lambda p: mt.random.weibull(KEY, 2.0, (3,), scale=p),
    "batch_norm momentum": lambda p: mt.batch_norm(IMAGES, ONE, ONE, training=True, momentum=p),
    "pinv rtol": lambda p: mt.linalg.pinv(X, rtol=p * 1e-9),
    "lstsq rcond": lambda p: mt.linalg.lstsq(X.T, X[0], rcond=p * 1e-9)[0],
    "pool": lambda p: mt.nn.pool(IMAGES * p, 2, kind="mean"),
    "softmax where": lambda p: mt.nn.softmax(X, where=mt.asarray(X) > p - 5),
    # NumPy's own, of which the watched number is no argument that NumPy asks for its protocol.
    "numpy.interp left": lambda p: np.interp(X, np.array([0.0, 1.0]), np.array([0.0, 1.0]), left=p),
    "numpy.interp right": lambda p: np.interp(X, np.array([0.0, 1.0]), np.array([0.0, 1.0]), right=p),
    "numpy.interp of ours": lambda p: np.interp(mt.asarray(X), np.array([0.0, 1.0]), np.array([0.0, 1.0]), left=p),
    "numpy.interp period": lambda p: np.interp(X, np.array([0.0, 1.0]), np.array([0.0, 1.0]), period=p),
    "numpy.pad": lambda p: np.pad(X, 1, constant_values=p),
    "numpy.pad end_values": lambda p: np.pad(X, 1, mode="linear_ramp", end_values=p),
    "numpy.sum initial": lambda p: np.sum(X, initial=p),
    "numpy.max initial": lambda p: np.max(X, axis=1, initial=p),
    "numpy.nan_to_num": lambda p: np.nan_to_num(np.where(X > 1, np.nan, X), nan=p),
    "numpy.diff": lambda p: np.diff(X[0], prepend=p, append=p),
    "numpy.ediff1d": lambda p: np.ediff1d(X[0], to_end=p),
    "numpy.clip": lambda p: np.clip(X, -p, p),
    "numpy.linspace": lambda p: np.linspace(0.0, p, 4),
    "numpy.arange": lambda p: np.arange(0.0, 3.0, p),
    "numpy.full": lambda p: np.full(3, p),
    "numpy.full_like": lambda p: np.full_like(X, p),
    "numpy.average": lambda p: np.average(X[0], weights=mt.stack([p, p, 1.0])),
    "numpy.quantile": lambda p: np.quantile(X, p),
    "numpy.trapezoid": lambda p: np.trapezoid(X, dx=p),
    "numpy.gradient": lambda p: np.gradient(X[0], p),
    "numpy.unwrap": lambda p: np.unwrap(X[0], period=p),
    "numpy.select": lambda p: np.select([X > 0], [X], default=p),
    "numpy.piecewise": lambda p: np.piecewise(X, [X > 0], [p, 0.0]),
    "numpy.kaiser": lambda p: np.kaiser(5, p),
    "numpy.histogram": lambda p: np.histogram(X, 3, range=(-p, p))[1],
    "numpy.polyint": lambda p: np.polyint(X[0], k=p),
    "numpy.fft.fftfreq": lambda p: np.fft.fftfreq(4, d=p),
    "numpy.where": lambda p: np.where(X > 0, p, -p),
    "numpy.insert": lambda p: np.insert(X[0], 1, p),
    "numpy.append": lambda p: np.append(X[0], p),
    "numpy.put": lambda p: (lambda a: (np.put(a, [0], p), a)[1])(X.copy()),
    "numpy.copyto": lambda p: (lambda a: (np.copyto(a, p), a)[1])(X.copy()),
    "numpy.place": lambda p: (lambda a: (np.place(a, X > 0, p), a)[1])(X.copy()),
    "numpy.std": lambda p: np.std(X, ddof=p),
    "numpy.random": lambda p: np.random.default_rng(0).normal(p, p, 3),
}  # fmt: skip


E = mt.errors
REFUSALS = (E.GradientError, E.DTypeError, E.TracedValueError, E.NonDifferentiableError, E.NumPyFunctionError)


def _stepped(optimizer: Any) -> Any:
    """Parameters after two steps."""
    params = {"a": mt.asarray(X)}
    state = optimizer.init(params)
    for k in (1, 2):
        params, state = optimizer.update(params, {"a": mt.asarray(X * k + 1)}, state)
    return params


def total(out: Any) -> Any:
    leaves = [mt.asarray(o) if isinstance(o, np.ndarray | np.generic) else o for o in mt.tree.flatten(out)[0]]
    arrays = [o for o in leaves if isinstance(o, mt.Array) and o.dtype.kind == "f"]
    return sum((mt.sum(o * np.cos(np.arange(o.size)).reshape(o.shape)) for o in arrays), mt.asarray(0.0))


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_watched_number_has_its_derivative_or_is_refused(name: str) -> None:
    def loss(p: Any) -> mt.Array:
        return total(CALLS[name](p))

    at, step = 0.37, 1e-6
    for way in (loss, mt.compile(loss)):
        try:
            slope = float(mt.grad(way)(mt.asarray(at)))
        except REFUSALS:
            continue
        except ValueError as e:  # NumPy puts one of its own around what a conversion raises
            if not name.startswith("numpy.") or not isinstance(e.__cause__, REFUSALS):
                raise
            continue
        wanted = (float(loss(at + step)) - float(loss(at - step))) / (2 * step)
        assert slope == pytest.approx(wanted, rel=1e-4, abs=1e-6)
