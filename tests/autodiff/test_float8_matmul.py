"""Products in float8: values by ml_dtypes, derivatives straight through the rounding, blocks on a mesh, bad input."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshtape as mt

E4, E5 = (np.dtype(d) for d in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
LIMITS = {E4: 448.0, E5: 57344.0}


def scale_of(x: np.ndarray, dtype: Any) -> np.float32:
    """The smallest power of two that brings ``x`` into the range."""
    most, e = float(np.abs(x.astype(np.float64)).max(initial=0)), -126
    while most > LIMITS[dtype] * 2.0**e:
        e += 1
    return np.float32(2.0**e)


def rounded(x: np.ndarray, dtype: Any) -> np.ndarray:
    """What is left of ``x``, in float64."""
    s = scale_of(x, dtype)
    return (x.astype(np.float32) / s).astype(dtype).astype(np.float64) * s


def numbers(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(2 * rng.standard_normal(shape))).astype(dtype)


def near(got: Any, want: np.ndarray) -> None:
    eps = float(mt.finfo(got.dtype).eps)
    np.testing.assert_allclose(got.numpy().astype(float), want, rtol=2 * eps, atol=eps * np.abs(want).max(initial=0))


@pytest.mark.parametrize("exponent", [-140, -126, -60, 0, 60, 110])
@pytest.mark.parametrize("dtype", [E4, E5], ids=str)
def test_a_scale_is_the_smallest_power_of_two(dtype: Any, exponent: int) -> None:
    one = np.float32(1)
    for factor in (one, np.nextafter(one, np.float32(2)), 1.5, np.nextafter(one, np.float32(0))):
        x = np.asarray([LIMITS[dtype] * 2.0**exponent * factor, -1e-30], np.float32)
        assert mt.nn.float8_scale(x, dtype).numpy() == mt.nn.float8_scale(-x, dtype).numpy() == scale_of(x, dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shapes", [((5, 7), (7, 3)), ((2, 4, 6), (6, 5)), ((3, 1, 4, 6), (2, 6, 2)), ((0, 3), (3, 2))])
def test_values_are_those_of_rounded_operands(shapes: Any, dtype: Any) -> None:
    x, y = (numbers(*s, seed=i, dtype=dtype) for i, s in enumerate(shapes))
    for a, b in ((E4, E4), (E5, E4), (E5, E5)):
        got = mt.nn.float8_matmul(x, y, x_dtype=a, y_dtype=b)
        assert got.dtype == dtype
        near(got, rounded(x, a) @ rounded(y, b))


@pytest.mark.parametrize("shapes", [((5, 7), (7, 3)), ((2, 4, 6), (6, 5)), ((3, 1, 4, 6), (2, 6, 2))])
def test_derivatives_go_straight_through(shapes: Any) -> None:
    x, y = (numbers(*s, seed=i) for i, s in enumerate(shapes))
    value, pull = mt.vjp(mt.nn.float8_matmul, x, y)
    g = numbers(*value.shape, seed=2)
    dx, dy = pull(g)
    g8, x8, y8 = rounded(g, E5), rounded(x, E4), rounded(y, E4)
    undone = [  # of the leading dimensions that were repeated
        np.asarray(np.einsum(term, a, b))
        for term, a, b in (
            ("...mn,...kn->...mk", g8, np.broadcast_to(y8, (*g.shape[:-2], *y8.shape[-2:]))),
            ("...mk,...mn->...kn", np.broadcast_to(x8, (*g.shape[:-2], *x8.shape[-2:])), g8),
        )
    ]
    for got, want, like in zip((dx, dy), undone, (x, y), strict=True):
        want = want.sum(axis=tuple(range(want.ndim - like.ndim)))
        axes = tuple(i for i, n in enumerate(like.shape) if n == 1 != want.shape[i])
        near(got, want.sum(axis=axes, keepdims=True))
    compiled = mt.compile(lambda x, y: mt.vjp(mt.nn.float8_matmul, x, y)[1](g))(x, y)
    for a, b in zip(compiled, (dx, dy), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_the_second_derivative_is_that_of_a_product_in_float8() -> None:
    x, y, g, v = (numbers(*s, seed=i) for i, s in enumerate(((4, 6), (6, 3), (4, 3), (4, 6))))
    got = mt.grad(lambda g: mt.sum(mt.vjp(lambda x: mt.nn.float8_matmul(x, y), x)[1](g)[0] * v))(mt.asarray(g))
    near(got, rounded(v, E5) @ rounded(y, E4))


def test_float8_operands_are_taken_as_they_are() -> None:
    x8, w8 = numbers(4, 8).astype(E4), numbers(8, 3, seed=1).astype(E4)
    scale = np.float32(0.75)
    plain = x8.astype(float) @ w8.astype(float)
    near(mt.nn.float8_matmul(x8, w8), plain)
    near(mt.nn.float8_matmul(x8, w8, scale, 2.0, dtype="bfloat16"), plain * 1.5)
    x = numbers(4, 8, dtype=ml_dtypes.bfloat16)
    near(mt.nn.float8_matmul(x, w8, y_scale=scale), rounded(x, E4) @ w8.astype(float) * scale)
    near(mt.grad(lambda s: mt.sum(mt.nn.float8_matmul(x8, w8, s)))(mt.asarray(scale)), np.asarray(plain.sum()))
    assert mt.grad(lambda s: mt.sum(mt.nn.float8_matmul(x, w8, s)))(mt.asarray(scale)) == 0
    saturated = mt.nn.float8_matmul(np.asarray([[1e6, 2.0]], np.float32), np.eye(2, dtype=np.float32), 1.0)
    assert saturated.tolist() == [[448.0, 2.0]]


SMALL, LARGE = 2.0**-120, 2.0**120


@pytest.mark.parametrize("scales", [(LARGE, SMALL), (SMALL, LARGE), (LARGE, LARGE), (SMALL, SMALL)])
def test_scales_far_apart_reach_no_further_than_the_product(scales: tuple[float, float]) -> None:
    x, y = (np.float32(s) * numbers(*shape, seed=7) for s, shape in zip(scales, ((3, 5), (5, 2)), strict=True))
    x[0] = 0
    want = rounded(x, E4) @ rounded(y, E4)
    with np.errstate(over="ignore"):
        want32 = want.astype(np.float32)
    np.testing.assert_allclose(mt.nn.float8_matmul(x, y), want32, rtol=1e-5, atol=np.abs(want).max() * 1e-6)
    assert (np.asarray(mt.nn.float8_matmul(x, y))[0] == 0).all()
    if scales[0] != scales[1]:
        np.testing.assert_allclose(mt.compile(mt.nn.float8_matmul)(x, y), want32, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows(bad: float) -> None:
    x, y = numbers(3, 4), numbers(4, 2)
    x[1, 2] = bad
    assert np.isnan(mt.nn.float8_matmul(x, y).numpy()).all()
    with_scale = mt.nn.float8_matmul(x, y, 1.0).numpy()
    assert not np.isfinite(with_scale[1]).any()
    assert np.isfinite(with_scale[[0, 2]]).all()


@pytest.mark.parametrize(
    "split", [(mt.Shard(0), mt.Replicate()), (mt.Shard(1), mt.Shard(0)), (mt.Replicate(), mt.Shard(1))]
)
def test_blocks_give_what_the_whole_gives(split: Any) -> None:
    mesh = mt.Mesh({"x": 4})
    x, y = 0.01 * numbers(8, 16), numbers(16, 4, seed=1)
    x[:2], x[:, :4] = 0, 0  # whole blocks, whose scales must not count

    def f(x: Any, y: Any) -> Any:
        out, pull = mt.vjp(mt.nn.float8_matmul, x, y)
        return out, *pull(mt.ones_like(out))

    want = f(mt.asarray(x), mt.asarray(y))
    got = f(*(mt.distribute(a, mt.Sharding(mesh, x=s)) for a, s in zip((x, y), split, strict=True)))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-5 * np.abs(b.numpy()).max())


def test_stored_operands_and_short_floats_are_split_alike() -> None:
    """Sums over ranks are made in float32, in which a float8 operand must stay what it is."""
    mesh = mt.Mesh({"a": 2, "b": 2})
    x, w8 = numbers(4, 8, dtype=ml_dtypes.bfloat16), numbers(8, 4, seed=1).astype(E4)

    def f(x: Any, w: Any) -> Any:
        out, pull = mt.vjp(lambda x, w: mt.nn.float8_matmul(x, w, y_scale=8.0), x, w)
        return out, *pull(mt.ones_like(out))

    want = f(mt.asarray(x), mt.asarray(w8))
    near(want[0], rounded(x, E4) @ w8.astype(float) * 8)
    near(want[1], np.ones((4, 4)) @ w8.astype(float).T * 8)
    near(want[2], (rounded(x, E4).T @ np.ones((4, 4)) * 8).clip(-448, 448).astype(E4).astype(float))
    for of_x, of_w in ((1, 0), (0, 1)):
        got = f(mt.distribute(x, mesh, a=mt.Shard(of_x)), mt.distribute(w8, mesh, a=mt.Shard(of_w)))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a.numpy().astype(float), b.numpy().astype(float), rtol=2e-2, atol=1)
    ones = np.asarray([[300.0, 1.0, -300.0, 1.0]], ml_dtypes.bfloat16)  # 301 is no bfloat16
    halves = mt.distribute(ones, mesh, a=mt.Shard(1)), mt.distribute(np.ones((4, 1), E4), mesh, a=mt.Shard(0))
    assert mt.nn.float8_matmul(*halves, 1.0).tolist() == mt.nn.float8_matmul(ones, np.ones((4, 1), E4), 1.0).tolist()
    nothing = mt.distribute(np.zeros((0, 3), np.float32), mesh, b=mt.Shard(1))
    assert mt.nn.float8_scale(nothing).numpy() == np.float32(2.0**-126)
    assert mt.nn.float8_matmul(np.zeros((3, 0), np.float32), nothing).numpy().tolist() == np.zeros((3, 3)).tolist()


def test_bad_input() -> None:
    x, y = np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)
    for args, kwargs, error, said in (
        ((x.astype(float), y), {}, mt.errors.DTypeError, "x must be float32, float16, bfloat16 or float8, got float64"),
        ((x, y.astype(int)), {}, mt.errors.DTypeError, "y must be float32"),
        ((x, y[0]), {}, mt.errors.ShapeError, "matrices or stacks"),
        ((x, x), {}, mt.errors.ShapeError, "contracted lengths differ"),
        ((x, y, np.ones(2)), {}, mt.errors.ShapeError, "x_scale is one number"),
        *(
            ((x, y), {which: scale}, mt.errors.ArgumentError, f"{which} must be a normal number of float32")
            for which in ("x_scale", "y_scale")
            for scale in (0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 1e39, np.float32(0), np.asarray(np.nan))
        ),
        ((x, y), {"x_dtype": "float16"}, mt.errors.DTypeError, "takes float8_e4m3fn and float8_e5m2, got float16"),
        ((x, y), {"dtype": "float64"}, mt.errors.DTypeError, "the result is float32, float16 or bfloat16"),
        ((x, y), {"dtype": E4}, mt.errors.DTypeError, "the result is"),
    ):
        with pytest.raises(error, match=said):
            mt.nn.float8_matmul(*args, **kwargs)


def test_the_sign_of_a_scale_cancels_where_it_divides_and_counts_where_it_multiplies() -> None:
    x, y = numbers(4, 8, seed=1, dtype=np.float32), numbers(8, 3, seed=2, dtype=np.float32)

    def found(*scales: float) -> list[np.ndarray]:
        out, pull = mt.vjp(lambda x, y: mt.nn.float8_matmul(x, y, *scales), x, y)
        return [a.numpy() for a in (out, *pull(mt.ones_like(out)))]

    for scales in ((-0.25, 0.5), (0.25, -0.5), (-0.25, -0.5)):
        for got, want in zip(found(*scales), found(0.25, 0.5), strict=True):
            np.testing.assert_array_equal(got, want)
    stored = x.astype(E4)
    for scale in (-0.5, 0.0):
        plain = np.float32(scale) * mt.nn.float8_matmul(stored, y).numpy()
        np.testing.assert_array_equal(mt.nn.float8_matmul(stored, y, x_scale=scale), plain)
    assert np.isnan(mt.nn.float8_matmul(x, y, x_scale=mt.asarray(np.float32(0))).numpy()).all()


def test_a_network_learns_in_float8() -> None:
    x = numbers(256, 16, seed=3, dtype=np.float32)
    x /= np.abs(x).max(axis=0)
    y = np.tanh(x @ numbers(16, 4, seed=4))
    weights = [
        0.3 * np.random.default_rng(i).standard_normal(s).astype(np.float32) for i, s in enumerate(((16, 32), (32, 4)))
    ]

    def losses(times: Any) -> list[float]:
        def loss(w: Any) -> Any:
            return mt.mean((times(mt.tanh(times(mt.asarray(x), w[0])), w[1]) - y) ** 2)

        step = mt.compile(mt.value_and_grad(loss))
        now, out = [mt.asarray(w) for w in weights], []
        for _ in range(300):
            value, g = step(now)
            now = [w - 1.0 * d for w, d in zip(now, g, strict=True)]
            out.append(float(value))
        return out

    plain, short = losses(mt.matmul), losses(mt.nn.float8_matmul)
    assert plain[-1] < plain[0] / 2
    assert abs(short[-1] - plain[-1]) < 0.1 * plain[-1]
