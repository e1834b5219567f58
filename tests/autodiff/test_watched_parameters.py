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
}  # fmt: skip


E = mt.errors
REFUSALS = (E.GradientError, E.DTypeError, E.TracedValueError, E.NonDifferentiableError)


def _stepped(optimizer: Any) -> Any:
    """Parameters after two steps."""
    params = {"a": mt.asarray(X)}
    state = optimizer.init(params)
    for k in (1, 2):
        params, state = optimizer.update(params, {"a": mt.asarray(X * k + 1)}, state)
    return params


def total(out: Any) -> Any:
    arrays = [o for o in mt.tree.flatten(out)[0] if isinstance(o, mt.Array) and o.dtype.kind == "f"]
    return sum((mt.sum(o * np.cos(np.arange(o.size)).reshape(o.shape)) for o in arrays), mt.asarray(0.0))


@pytest.mark.parametrize("name", sorted(CALLS))
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_a_watched_number_has_its_derivative_or_is_refused(name: str, way: str) -> None:
    def loss(p: Any) -> mt.Array:
        return total(CALLS[name](p))

    at, step = 0.37, 1e-6
    try:
        slope = float(mt.grad(mt.compile(loss) if way == "compiled" else loss)(mt.asarray(at)))
    except REFUSALS:
        return
    wanted = (float(loss(at + step)) - float(loss(at - step))) / (2 * step)
    assert slope == pytest.approx(wanted, rel=1e-4, abs=1e-6)
