"""rms_norm, group_norm and batch_norm are right at every order, as layer_norm is: fused backward ops have histories."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import pytest

import meshtape as mt


def normal(x: mt.Array, axes: tuple[int, ...], eps: float = 1e-5) -> mt.Array:
    d = x - mt.mean(x, axis=axes, keepdims=True)
    return d / mt.sqrt(mt.mean(d * d, axis=axes, keepdims=True) + eps)


def grouped(x: mt.Array) -> mt.Array:
    return mt.reshape(normal(mt.reshape(x, (2, 2, 2, 3)), (2, 3)), x.shape)


Z, O = np.zeros, np.ones
CASES = {
    "rms_norm": (lambda x: mt.rms_norm(x, 3), lambda x: x / mt.sqrt(mt.mean(x * x, axis=-1, keepdims=True) + 1e-6)),
    "add_rms_norm": (
        lambda x: mt.add(*mt.nn.add_rms_norm(x, x**2, 3)),
        lambda x: (x + x**2) * (1 + 1 / mt.sqrt(mt.mean((x + x**2) ** 2, axis=-1, keepdims=True) + 1e-6)),
    ),
    "add_layer_norm": (
        lambda x: mt.multiply(*mt.nn.add_layer_norm(x, x**2, 3)),
        lambda x: normal(x + x**2, (2,)) * (x + x**2),
    ),
    "group_norm": (lambda x: mt.group_norm(x, 2), grouped),
    "group_norm, channels last": (
        lambda x: mt.permute_dims(mt.group_norm(mt.permute_dims(x, (0, 2, 1)), 2, channel_axis=-1), (0, 2, 1)),
        grouped,
    ),
    "instance_norm": (mt.instance_norm, lambda x: normal(x, (2,))),
    "batch_norm": (
        lambda x: mt.batch_norm(x, mt.zeros(4), mt.ones(4), training=True).out,
        lambda x: normal(x, (0, 2)),
    ),
    "batch_norm, weight of itself": (
        lambda x: mt.batch_norm(x, mt.zeros(4), mt.ones(4), x[0, :, 0], x[1, :, 1], training=True).out,
        lambda x: normal(x, (0, 2)) * x[0, :, 0][:, None] + x[1, :, 1][:, None],
    ),
    "batch_norm by running statistics": (
        lambda x: mt.batch_norm(x, x[0, :, 0], x[1, :, 1] ** 2, training=False).out,
        lambda x: (x - x[0, :, 0][:, None]) / mt.sqrt(x[1, :, 1][:, None] ** 2 + 1e-5),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_to_fourth_order_along_a_line(name: str, derivatives_along) -> None:
    fused, plain = CASES[name]
    rng = np.random.default_rng(3)
    x, v, w = (mt.asarray(rng.standard_normal((2, 4, 3))) for _ in range(3))
    expected = derivatives_along(plain, x, v, w, 4)
    np.testing.assert_allclose(derivatives_along(fused, x, v, w, 4), expected, rtol=1e-8)
    assert all(abs(e) > 1e-6 for e in expected)


@pytest.mark.parametrize("dtype", [mt.float32, mt.float64, mt.float16, mt.bfloat16], ids=str)
@pytest.mark.parametrize("used", ["both", "norm", "sum"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_the_norm_of_a_sum_has_the_bits_of_the_sum_and_its_norm(kind: str, used: str, dtype: mt.DType) -> None:
    """Values and gradients, eager and compiled; a result that nothing uses costs no zeros."""
    rng = np.random.default_rng(0)
    x, r, g, h = (mt.asarray(rng.normal(size=(6, 40)), dtype=dtype) for _ in range(4))
    own = [mt.asarray(rng.normal(size=40), dtype=dtype) for _ in range(2 if kind == "layer" else 1)]
    fused, norm = (getattr(mt.nn, n) for n in (f"add_{kind}_norm", f"{kind}_norm"))

    def plain(x: mt.Array, r: mt.Array, n: int, *own: mt.Array) -> tuple[mt.Array, mt.Array]:
        return norm(x + r, n, *own), x + r

    def slopes(fn: Callable[..., tuple[mt.Array, mt.Array]]) -> Callable[..., tuple[mt.Array, ...]]:
        def loss(x: mt.Array, r: mt.Array, *own: mt.Array) -> mt.Array:
            y, total = fn(x, r, 40, *own)
            parts = {"norm": mt.sum(y * g), "sum": mt.sum(total * total * h)}
            return parts["norm"] + parts["sum"] if used == "both" else parts[used]

        return mt.grad(loss, argnums=tuple(range(2 + len(own))))

    expected = [*plain(x, r, 40, *own), *slopes(plain)(x, r, *own)]
    for run in (lambda f: f, mt.compile):
        got = [*run(lambda *a: fused(*a[:2], 40, *a[2:]))(x, r, *own), *run(slopes(fused))(x, r, *own)]
        for a, e in zip(got, expected, strict=True):
            assert np.asarray(a).tobytes() == np.asarray(e).tobytes()


def test_a_sum_that_nothing_uses_gets_no_cotangent() -> None:
    x, w = mt.ones((3, 4)), mt.ones(4)
    program = mt.compile(mt.grad(lambda x: mt.sum(mt.nn.add_rms_norm(x, x, 4, w)[0]))).program(x)
    assert {e.op.name: len(e.inputs) for e in program.entries}["rms_norm_backward"] == 3


def test_statistics_of_the_op_have_derivatives_too() -> None:
    from meshtape.arrays.core.dispatch import apply

    x, w = np.random.default_rng(0).normal(size=(3, 2, 2)), mt.ones(2)

    def fn(x: mt.Array) -> mt.Array:
        _, mean, var, *_ = apply(mt.OPS["batch_norm"], (x, w, w, w, w), {"axis": 1, "eps": 1e-5, "momentum": 0.1})
        return mt.sum(mean**2) + mt.sum(var**3)

    mt.check_grads(fn, x)


def test_the_result_is_not_kept_for_the_derivative() -> None:
    memory = []

    def total(x: mt.Array) -> mt.Array:
        y = mt.batch_norm(x, mt.zeros(2), mt.ones(2), training=True).out
        memory.append(weakref.ref(y._buf))
        return mt.sum(y)

    x = mt.asarray(np.random.default_rng(0).normal(size=(4, 2, 3)))
    _, pull = mt.vjp(total, x)
    assert memory[0]() is None
    assert pull(mt.asarray(1.0))[0].shape == x.shape


def test_the_new_running_statistics_are_constants() -> None:
    x = mt.asarray(np.random.default_rng(0).normal(size=(4, 2)))

    def fn(x: mt.Array) -> mt.Array:
        got = mt.batch_norm(x, mt.zeros(2), mt.ones(2), training=True)
        return mt.sum(got.running_mean) + mt.sum(got.running_var) + 0.0 * mt.sum(x)

    assert mt.grad(fn)(x).tolist() == np.zeros((4, 2)).tolist()


@pytest.mark.parametrize("momentum", [0.1, 1.0])
def test_running_variance_is_unbiased(momentum: float) -> None:
    """A batch of 1 and 3 has the biased variance 1, by which it is normalised, and the unbiased 2, which is kept."""
    x = mt.asarray([[1.0], [3.0]])
    got = mt.batch_norm(x, mt.zeros(1), mt.ones(1), training=True, momentum=momentum, eps=1e-12)
    np.testing.assert_allclose(got.out, [[-1.0], [1.0]])
    np.testing.assert_allclose(got.running_mean, [momentum * 2])
    np.testing.assert_allclose(got.running_var, [1 - momentum + momentum * 2])


@pytest.mark.parametrize("dtype", [mt.float16, mt.bfloat16], ids=str)
def test_short_floats_keep_their_statistics_in_float32(dtype: np.dtype) -> None:
    x = mt.asarray(np.array([[[6e4, -6e4, 3e4]], [[1e4, 2e4, -3e4]]]), dtype=dtype)
    one, zero = mt.ones(1, dtype=dtype), mt.zeros(1, dtype=dtype)
    for fn in (
        lambda x: mt.group_norm(x, 1),
        lambda x: mt.instance_norm(x, channel_axis=1),
        lambda x: mt.batch_norm(x, zero, one, training=True).out,
    ):
        y, pull = mt.vjp(fn, x)
        assert y.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(y, np.float64), np.asarray(fn(x.astype(mt.float64)), np.float64), rtol=0.02, atol=0.01
        )
        (dx,) = pull(mt.ones(x.shape, dtype=dtype))
        assert dx.dtype == dtype
        assert np.isfinite(np.asarray(dx, np.float64)).all()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: mt.group_norm(x, 3), r"\[group_norm\] 3 groups do not divide the 4 channels of x \(2, 4, 3\)"),
        (lambda x: mt.group_norm(x, 2, mt.ones(3)), r"\[group_norm\] weight has shape \(3,\), expected \(4,\)"),
        (lambda x: mt.group_norm(x, 2, channel_axis=0), r"\[group_norm\] channel_axis is 1 or the last"),
        (lambda x: mt.instance_norm(x[0]), r"\[instance_norm\] x has the shape \(N, channels, ...\) with something"),
        (lambda x: mt.batch_norm(x, Z(3), O(4), training=True), r"\[batch_norm\] running_mean has shape \(3,\)"),
        (lambda x: mt.batch_norm(x, Z(4), O(4), training=True, eps=0), r"\[batch_norm\] eps must be positive, got 0"),
        (
            lambda x: mt.nn.add_rms_norm(x, x[:1], 3),
            r"\[add_rms_norm\] residual has shape \(1, 4, 3\), expected \(2, 4, 3\)",
        ),
        (lambda x: mt.nn.add_layer_norm(x, x > 0, 3), r"\[add_layer_norm\] residual must be real floating, got bool"),
        (lambda x: mt.rms_norm(x, 4), r"\[rms_norm\] the last dimensions of x \(2, 4, 3\) must be"),
        (lambda x: mt.rms_norm(x.astype(mt.int64), 3), r"\[rms_norm\] x must be real floating, got int64"),
        (lambda x: mt.layer_norm(x.astype(mt.int64), 3), r"\[layer_norm\] x must be real floating, got int64"),
        (lambda x: mt.layer_norm(x, 3, mt.ones(3, dtype=mt.int64)), r"\[layer_norm\] weight must be real floating"),
    ],
)
def test_arguments_are_checked(call: Callable[[mt.Array], object], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        call(mt.ones((2, 4, 3)))
