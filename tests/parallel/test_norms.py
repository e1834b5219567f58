"""Norms of images on a mesh are those of one device: whatever is split, ragged blocks and empty ones too."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshtape as mt

C = 6
NORMS: dict[str, Callable[..., Any]] = {
    "group": lambda x, w, b: mt.group_norm(x, 2, w, b),
    "group of 3": lambda x, w, b: mt.group_norm(x, 3, w, b),
    "instance": mt.instance_norm,
    "batch": lambda x, w, b: mt.batch_norm(x, mt.zeros(C), mt.ones(C), w, b, training=True),
    "batch, running": lambda x, w, b: mt.batch_norm(x, mt.zeros(C), mt.ones(C), w, b, training=False).out,
    "layer": lambda x, w, b: mt.layer_norm(x, x.shape[2:]),
    "rms": lambda x, w, b: mt.rms_norm(x, x.shape[2:]),
    "layer of a sum": lambda x, w, b: mt.multiply(*mt.nn.add_layer_norm(x, mt.sin(x), x.shape[2:])),
    "rms of a sum": lambda x, w, b: mt.multiply(*mt.nn.add_rms_norm(mt.sin(x), x, x.shape[2:], x[0, 0])),
}
SPLITS = [s for s in itertools.product((None, 0, 1, 2, 3), repeat=2) if s[0] is None or s[0] != s[1]]


def results(fn: Callable[..., Any], x: mt.Array, w: mt.Array, b: mt.Array, seed: np.ndarray) -> list[np.ndarray]:
    """What the norm gives, and the gradients of x, weight and bias."""

    def loss(x: mt.Array, w: mt.Array, b: mt.Array) -> mt.Array:
        out = fn(x, w, b)
        return mt.sum((out.out if isinstance(out, tuple) else out) * seed)

    out = fn(x, w, b)
    grads = mt.grad(loss, argnums=(0, 1, 2))(x, w, b)
    return [np.asarray(a) for a in (*(out if isinstance(out, tuple) else (out,)), *grads)]


def operands(shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(7)
    return rng.normal(1, 2, shape), rng.normal(size=C), rng.normal(size=C), rng.normal(size=shape)


@pytest.mark.parametrize("name", NORMS)
def test_every_split_of_samples_channels_and_positions(name: str) -> None:
    mesh = mt.Mesh({"a": 2, "b": 2})
    x, w, b, seed = operands((4, C, 5, 5))
    whole = results(NORMS[name], *map(mt.asarray, (x, w, b)), seed)
    for first, second in SPLITS:
        splits = {axis: mt.Shard(d) for axis, d in (("a", first), ("b", second)) if d is not None}
        got = results(NORMS[name], mt.distribute(x, mesh, **splits), mt.asarray(w), mt.asarray(b), seed)
        for a, e in zip(got, whole, strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-6, atol=1e-9, err_msg=f"{name} split {splits}")


def test_a_step_of_a_split_batch_adds_up_four_numbers_a_channel_over_ranks() -> None:
    """Mean and variance, which the running ones and the derivative share; and the gradients of weight and bias, which
    that of x shares."""
    mesh = mt.Mesh({"a": 2})
    x, w, b, seed = operands((4, C, 5, 5))

    def step(x: mt.Array, w: mt.Array, b: mt.Array, g: mt.Array) -> Any:
        out, pull = mt.vjp(lambda x, w, b: mt.batch_norm(x, mt.zeros(C), mt.ones(C), w, b, training=True), x, w, b)
        return out, pull(type(out)(g, mt.zeros(C), mt.zeros(C)))

    split = (mt.distribute(a, mesh, a=mt.Shard(0)) for a in (x, seed))
    text = mt.explain(lambda x, g: step(x, mt.asarray(w), mt.asarray(b), g), *split)
    assert text.count("all_reduce") == 4


@pytest.mark.parametrize("samples", [5, 1])
@pytest.mark.parametrize("name", NORMS)
def test_ragged_and_empty_blocks_count_by_their_elements(name: str, samples: int) -> None:
    mesh = mt.Mesh({"a": 2})
    x, w, b, seed = operands((samples, C, 2, 2))
    whole = results(NORMS[name], *map(mt.asarray, (x, w, b)), seed)
    got = results(NORMS[name], mt.distribute(x, mesh, a=mt.Shard(0)), mt.asarray(w), mt.asarray(b), seed)
    for a, e in zip(got, whole, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-6, atol=1e-9)


def test_a_split_batch_stays_split() -> None:
    mesh = mt.Mesh({"a": 2, "b": 2})
    x, w, b, _ = operands((4, C, 3, 3))
    by_sample = mt.distribute(x, mesh, a=mt.Shard(0))
    for name in ("group", "instance", "batch", "batch, running"):
        out = NORMS[name](by_sample, mt.asarray(w), mt.asarray(b))
        out = out.out if isinstance(out, tuple) else out
        assert out.sharding == by_sample.sharding, name
    by_channel = mt.distribute(x, mesh, b=mt.Shard(1))
    out = NORMS["batch"](by_channel, mt.asarray(w), mt.asarray(b))
    assert out.out.sharding == by_channel.sharding
    assert out.running_mean.sharding.layout.axes_of(0) == (1,)
