"""grad, value_and_grad, vjp, jvp, hvp, jacobian, hessian and check_grads: trees, nesting, closed forms, errors."""

from __future__ import annotations

import collections
import math
import re
import types
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

import meshtape as mt


@dataclass
class Layer:
    w: Any
    b: Any


class Pair(NamedTuple):
    left: Any
    right: Any


def arr(*values):
    return mt.asarray(list(values), dtype=mt.float64)


# ----- trees ----------------------------------------------------------------------------------------------------------


def test_gradients_have_the_structure_of_the_argument():
    params = {
        "a": [arr(1, 2), (mt.asarray(3.0),)],
        "layer": Layer(arr(4.0), None),
        "pair": Pair(2.0, np.asarray([5.0])),
        "flag": True,
        "name": "x",
    }

    def loss(p):
        assert p["name"] == "x"
        return (p["a"][0].sum() * p["a"][1][0] + p["layer"].w.sum() * p["pair"].left + p["pair"].right.sum()) * 1.0

    g = mt.grad(loss)(params)
    assert list(g) == list(params)
    assert g["a"][0].tolist() == [3, 3]
    assert float(g["a"][1][0]) == 3.0
    assert isinstance(g["layer"], Layer)
    assert g["layer"].w.tolist() == [2]
    assert g["layer"].b is None
    assert isinstance(g["pair"], Pair)
    assert (float(g["pair"].left), g["pair"].right.tolist()) == (4.0, [1])


def test_argnums():
    f = lambda x, y, z: (x * y + y * z).sum()  # noqa: E731
    x, y, z = arr(1, 2), arr(3, 4), arr(5, 6)
    assert mt.grad(f)(x, y, z).tolist() == [3, 4]
    assert mt.grad(f, 1)(x, y, z).tolist() == [6, 8]
    assert mt.grad(f, -1)(x, y, z).tolist() == [3, 4]
    (only,) = mt.grad(f, (1,))(x, y, z)
    assert only.tolist() == [6, 8]
    dz, dx = mt.grad(f, (2, 0))(x, y, z)
    assert (dz.tolist(), dx.tolist()) == ([3, 4], [3, 4])
    with pytest.raises(mt.errors.GradientError, match=r"argnums 3 for 3 positional"):
        mt.grad(f, 3)(x, y, z)


def test_keyword_arguments_are_passed_on():
    assert float(mt.grad(lambda x, *, power: x**power)(3.0, power=2)) == 6.0


def test_has_aux():
    f = lambda x: ((x * x).sum(), {"y": x * 2, "n": 3})  # noqa: E731
    (value, aux), g = mt.value_and_grad(f, has_aux=True)(arr(1, 2))
    assert (float(value), aux["y"].tolist(), aux["n"], g.tolist()) == (5.0, [2, 4], 3, [2, 4])
    g, aux = mt.grad(f, has_aux=True)(arr(1, 2))
    assert (g.tolist(), aux["n"]) == ([2, 4], 3)
    value, pull, aux = mt.vjp(f, arr(1, 2), has_aux=True)
    assert (pull(mt.asarray(2.0))[0].tolist(), aux["n"]) == ([4, 8], 3)
    with pytest.raises(mt.errors.GradientError, match=r"\[grad\] with has_aux the function must return \(value, aux\)"):
        mt.grad(lambda x: x.sum(), has_aux=True)(arr(1, 2))


def test_an_array_passed_twice_has_two_gradients():
    x = arr(2, 3)
    dx, dy = mt.grad(lambda x, y: (x * x * y).sum(), (0, 1))(x, x)
    assert (dx.tolist(), dy.tolist()) == ([8, 18], [4, 9])
    g = mt.grad(lambda p: (p["a"] * p["b"] * p["b"]).sum())({"a": x, "b": x})
    assert (g["a"].tolist(), g["b"].tolist()) == ([4, 9], [8, 18])


def test_unused_leaves_have_zeros():
    assert mt.grad(lambda p: p["x"].sum())({"x": arr(1, 2), "u": arr(3)})["u"].tolist() == [0]


def _tangents(x):
    return mt.tree_map(lambda leaf: np.ones(np.shape(leaf)), x)


TRANSFORMS = {
    "grad": lambda f, x: mt.grad(f)(x),
    "value_and_grad": lambda f, x: mt.value_and_grad(f)(x),
    "grad, argnums": lambda f, x: mt.grad(lambda y, x: f(x) * y, argnums=(0, 1))(2.0, x),
    "grad of grad": lambda f, x: mt.grad(lambda y: mt.grad(f)(x)["i"].sum() * y)(2.0),
    "compiled": lambda f, x: mt.compile(mt.grad(f))(x),
    "jacobian": lambda f, x: mt.jacobian(f)(x),
    "jacobian_blocks": lambda f, x: next(mt.jacobian_blocks(f, x)),
    "hessian": lambda f, x: mt.hessian(f)(x),
    "hvp": lambda f, x: mt.hvp(f, x, _tangents(x)),
    "jvp": lambda f, x: mt.jvp(f, [x], [_tangents(x)]),
}


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_integers_are_not_differentiated_by_in_silence(name, dtype):
    """The error names the leaf; integers that are not differentiated by are welcome."""
    i = mt.ones(2, dtype=dtype)
    f = lambda x: mt.sum(x["w"] ** 2 * x["i"])  # noqa: E731
    with pytest.raises(mt.errors.DTypeError, match=r"no derivatives.*\.astype\(float\)") as caught:
        TRANSFORMS[name](f, {"w": arr(1, 2), "i": i})
    assert re.search(rf"leaf i, is {dtype}|primal 0\.i ", str(caught.value))
    with pytest.raises(mt.errors.DTypeError, match="no derivatives"):
        TRANSFORMS[name](mt.sum, i)
    TRANSFORMS[name](
        lambda x: f({**x, "i": i}) + (mt.sum(x["i"]) if "i" in x else 0.0), {"w": arr(1, 2), "i": arr(1.0)}
    )


def test_a_pull_gives_integers_none():
    _, pull = mt.vjp(lambda x, i: x * i, arr(1, 2), mt.asarray([3, 4]))
    found = pull(arr(1, 1))
    assert (found[0].tolist(), found[1]) == ([3, 4], None)
    with pytest.raises(mt.errors.DTypeError, match=r"\[vjp\] argument 0 is int64"):
        mt.vjp(lambda i: i * 1.0, mt.asarray([3, 4]))
    _, tangent = mt.jvp(lambda x, i: x * i, [arr(1, 2), mt.asarray([3, 4])], [arr(1, 1), None])
    assert tangent.tolist() == [3, 4]
    assert mt.jvp(lambda x: mt.argmax(x), [arr(1, 2)], [arr(1, 1)])[1] is None


def test_python_numbers_are_differentiated():
    assert float(mt.grad(lambda x: x * x)(3.0)) == 6.0
    assert float(mt.grad(lambda x: x * x)(3)) == 6.0
    assert complex(mt.grad(lambda z: mt.real(z * z))(1 + 2j)) == 2 - 4j


def test_a_function_that_writes_to_its_argument():
    """The gradient is that of what was passed, and the caller's array keeps its value."""

    def f(x, v):
        x[0] = v
        x[1] *= 3.0
        return (x * x).sum()

    x = arr(1, 2, 3)
    dx, dv = mt.grad(f, (0, 1))(x, 5.0)
    assert x.tolist() == [1, 2, 3]
    assert dx.tolist() == [0, 36, 6]
    assert float(dv) == 10.0
    y, pull = mt.vjp(lambda x: (x * x, x), x)
    y[0][:] = 0.0
    assert pull((arr(1, 1, 1), arr(1, 1, 1)))[0].tolist() == [3, 5, 7]


# ----- orders ---------------------------------------------------------------------------------------------------------


def test_third_order():
    f = lambda x: mt.sin(x) * mt.exp(2 * x)  # noqa: E731
    d3 = mt.grad(mt.grad(mt.grad(f)))
    x = 0.3
    expected = math.exp(2 * x) * (2 * math.sin(x) + 11 * math.cos(x))
    assert float(d3(x)) == pytest.approx(expected, rel=1e-12)
    # The same through forward mode over reverse mode over forward mode.
    one = mt.asarray(1.0)
    d = lambda g: lambda x: mt.jvp(g, [x], [one])[1]  # noqa: E731
    assert float(d(mt.grad(d(f)))(mt.asarray(x))) == pytest.approx(expected, rel=1e-12)


def test_inner_and_outer_derivatives_are_not_confused():
    # d/dx x * (d/dy (x + y)) = 1, where a naive nesting finds 2.
    assert float(mt.grad(lambda x: x * mt.grad(lambda y: x + y)(2.0))(3.0)) == 1.0
    assert float(mt.grad(lambda x: mt.grad(lambda y: x * x * y * y)(x))(3.0)) == 3 * 2 * 9.0


def test_second_order_through_index_writes():
    def f(x):
        y = x * 1.0
        y[[0, 0, 1]] = x[[1, 2, 2]] ** 2
        return (y**2).sum()

    mt.check_grads(f, np.asarray([0.5, -1.0, 2.0]), order=3)


def test_jvp_against_the_closed_form():
    a = arr(1, 2, 3)
    y, dy = mt.jvp(lambda x, p: {"s": mt.sin(x) * p["k"]}, [a, {"k": 2.0}], [arr(1, 0, 1), {"k": mt.asarray(0.5)}])
    np.testing.assert_allclose(np.asarray(y["s"]), 2 * np.sin([1, 2, 3]))
    np.testing.assert_allclose(
        np.asarray(dy["s"]), 2 * np.cos([1, 2, 3]) * [1, 0, 1] + 0.5 * np.sin([1, 2, 3]), rtol=1e-14
    )


def test_jvp_with_integers_and_constants():
    x = arr(1, 2)
    value, tangent = mt.jvp(lambda x, i: (x[i], i, x > 1), [x, mt.asarray([1, 1])], [arr(3, 4), None])
    assert tangent[0].tolist() == [4, 4]
    assert tangent[1] is None
    assert tangent[2] is None
    assert value[1].tolist() == [1, 1]
    _, tangent = mt.jvp(lambda x: mt.ones(2), [x], [arr(3, 4)])
    assert tangent.tolist() == [0, 0]
    with pytest.raises(mt.errors.GradientError, match=r"\[jvp\] the tangents have structure"):
        mt.jvp(lambda x: x, [x], [{"x": x}])


def test_hvp_jacobian_and_hessian_of_a_quadratic():
    rng = np.random.default_rng(0)
    m = rng.standard_normal((3, 3))
    a, x, v = mt.asarray(m), mt.asarray(rng.standard_normal(3)), mt.asarray(rng.standard_normal(3))
    f = lambda x: x @ a @ x  # noqa: E731
    sym = m + m.T
    np.testing.assert_allclose(np.asarray(mt.hessian(f)(x)), sym, rtol=1e-12)
    np.testing.assert_allclose(np.asarray(mt.hvp(f, x, v)), sym @ np.asarray(v), rtol=1e-12)
    np.testing.assert_allclose(np.asarray(mt.jacobian(lambda x: a @ x)(x)), m, rtol=1e-12)
    third = mt.jacobian(mt.hessian(lambda x: (x**3).sum()))(arr(1, 2))
    assert third.tolist() == [[[6, 0], [0, 0]], [[0, 0], [0, 6]]]


def test_jacobian_of_awkward_shapes():
    assert mt.jacobian(lambda x: x.sum())(arr(1, 2)).tolist() == [1, 1]
    assert float(mt.jacobian(lambda x: x * x)(3.0)) == 6.0
    assert mt.jacobian(lambda x: mt.stack([x, x * x]))(3.0).tolist() == [1, 6]
    assert mt.jacobian(lambda x: mt.zeros((0, 2)))(arr(1, 2, 3)).shape == (0, 2, 3)
    assert mt.jacobian(lambda x: x)(mt.zeros((0,))).shape == (0, 0)
    tree = mt.jacobian(lambda p: p["w"] * p["b"])({"w": arr(1, 2), "b": mt.asarray(3.0)})
    assert (tree["w"].tolist(), tree["b"].tolist()) == ([[3, 0], [0, 3]], [1, 2])
    with pytest.raises(
        mt.errors.GradientError, match=r"\[jacobian\] the function must return an Array, or a tree, got int"
    ):
        mt.jacobian(lambda x: (x, 3))(arr(1))


def test_jacobians_in_blocks():
    x = mt.asarray(np.random.default_rng(0).standard_normal((3, 4)))
    f = lambda x: mt.tanh(x @ x.T)  # noqa: E731
    whole = np.asarray(mt.jacobian(f)(x))
    for size in (1, 2, 4, 9, 100):
        np.testing.assert_array_equal(np.asarray(mt.jacobian(f, block_size=size)(x)), whole)
        blocks = list(mt.jacobian_blocks(f, x, block_size=size))
        assert [r.start for r, _ in blocks] == list(range(0, 9, size))
        assert blocks[-1][0].stop == 9
        np.testing.assert_array_equal(np.concatenate([np.asarray(b) for _, b in blocks]), whole.reshape(9, 3, 4))
    # Recorded, traced, and of a tree.
    second = mt.jacobian(mt.jacobian(f, block_size=2), block_size=5)
    np.testing.assert_array_equal(np.asarray(second(x)), np.asarray(mt.jacobian(mt.jacobian(f))(x)))
    np.testing.assert_allclose(np.asarray(mt.compile(mt.jacobian(f, block_size=2))(x)), whole, rtol=1e-14)
    (rows, block) = next(mt.jacobian_blocks(mt.grad(lambda a: (a**3).sum()), x))
    assert (rows, block.shape) == (slice(0, 12), (12, 3, 4))
    (_, tree) = next(mt.jacobian_blocks(lambda p: p["a"] * p["b"], {"a": x, "b": mt.asarray(2.0)}))
    assert {k: v.shape for k, v in tree.items()} == {"a": (12, 3, 4), "b": (12,)}
    with pytest.raises(
        mt.errors.GradientError, match=r"\[jacobian_blocks\] the function must return an Array, got tuple"
    ):
        mt.jacobian_blocks(lambda x: (x, x), x)
    for fn in (mt.jacobian, mt.hessian):
        with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
            fn(f, block_size=0)
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        mt.jacobian_blocks(f, x, block_size=0)


def test_blocks_bound_the_memory_of_a_jacobian(peak_of):
    n = 1200
    x = mt.ones(n)
    f = lambda x: x * x  # noqa: E731
    nbytes = mt.jacobian(f)(x).nbytes
    assert peak_of(lambda: mt.jacobian(f, block_size=16)(x), most := 1.2 * nbytes) < most
    blocks = lambda: collections.deque(mt.jacobian_blocks(f, x, block_size=16), maxlen=0)  # noqa: E731
    assert peak_of(blocks, most := 0.2 * nbytes) < most


def test_jacobian_and_hessian_of_trees():
    both = mt.jacobian(lambda p: {"y": p["a"] * p["b"], "z": (p["b"] ** 2,)})({"a": arr(1, 2), "b": mt.asarray(3.0)})
    assert both["y"]["a"].tolist() == [[3, 0], [0, 3]]
    assert both["y"]["b"].tolist() == [1, 2]
    assert both["z"][0]["a"].tolist() == [0, 0]
    assert both["z"][0]["b"].item() == 6.0

    params = {"w": [arr(1, 2)], "b": mt.asarray(3.0), "n": None}
    loss = lambda p: (p["w"][0] ** 2 * p["b"] * mt.asarray([1, 2])).sum() + p["b"] ** 3  # noqa: E731
    for how in (lambda f: f, mt.compile):
        h = how(mt.hessian(loss))(params)
        assert h["w"][0]["w"][0].tolist() == [[6, 0], [0, 12]]
        assert h["w"][0]["b"].tolist() == h["b"]["w"][0].tolist() == [2, 8]
        assert h["b"]["b"].item() == 18.0


def test_hvp_of_a_tree():
    p = {"a": arr(1, 2), "b": mt.asarray(3.0)}
    v = {"a": arr(1, 0), "b": mt.asarray(2.0)}
    out = mt.hvp(lambda p: (p["a"] ** 2).sum() * p["b"], p, v)
    assert (out["a"].tolist(), float(out["b"])) == ([2 * 3 + 2 * 1 * 2, 2 * 2 * 2], 2.0)


def test_directions_take_the_dtype_of_what_they_are_of():
    x = {"w": mt.ones(2, dtype=mt.float32), "b": arr(1.0)}
    f = lambda x: (x["w"] ** 3).sum() * x["b"].sum() * 3  # noqa: E731
    found = mt.hvp(f, x, {"w": np.ones(2), "b": np.zeros(1)})
    assert (found["w"].tolist(), found["w"].dtype) == ([18, 18], mt.float32)
    assert found["b"].tolist() == [18]


def test_pull_can_be_called_again():
    _, pull = mt.vjp(lambda x: {"y": x * x, "n": mt.asarray(3)}, arr(1, 2))
    for k in (1.0, 2.0, 1.0):
        assert pull({"y": arr(k, k), "n": mt.asarray(0)})[0].tolist() == [2 * k, 4 * k]
    with pytest.raises(mt.errors.GradientError, match=r"\[vjp\] the cotangent has structure"):
        pull(arr(1, 1))
    with pytest.raises(mt.errors.GradientError, match=r"the seed has shape \(3,\), the target \(2,\)"):
        pull({"y": arr(1, 1, 1), "n": mt.asarray(0)})


def test_pull_is_differentiable():
    x = arr(1, 2)
    f = lambda x: x**3  # noqa: E731
    second = mt.grad(lambda x: mt.vjp(f, x)[1](arr(1, 1))[0].sum())(x)
    assert second.tolist() == [6, 12]


# ----- losses that are no losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "match"),
    [
        (lambda x: x * 2, r"the target has shape \(2,\): reduce it to one element"),
        (lambda x: mt.sum(x > 0), r"the target has dtype int64"),
        (lambda x: 3.0, r"the function must return an Array, got float"),
        (lambda x: (x.sum(), x), r"the function must return an Array, got tuple"),
    ],
)
def test_errors_of_grad(fn, match):
    with pytest.raises(mt.errors.GradientError, match=match):
        mt.grad(fn)(arr(1, 2))


def test_a_loss_that_does_not_depend_on_the_argument():
    assert mt.grad(lambda x: mt.asarray(1.0))(arr(1, 2)).tolist() == [0, 0]
    assert mt.grad(lambda x: mt.stop_gradient(x).sum())(arr(1, 2)).tolist() == [0, 0]
    with mt.no_grad():
        assert mt.grad(lambda x: (x * x).sum())(arr(1, 2)).tolist() == [2, 4]

    def loss(x):
        with mt.no_grad():
            factor = x * 1.0
        return (x * factor).sum()

    assert mt.grad(loss)(arr(1, 2)).tolist() == [1, 2]


def test_an_exception_in_the_function_leaves_the_engine_usable():
    def bad(x):
        mt.nn.softmax(x * 2)
        raise RuntimeError("boom")

    for transform in (
        mt.grad,
        mt.jacobian,
        lambda f: lambda x: mt.vjp(f, x),
        lambda f: lambda x: mt.grad(mt.grad(f))(x),
    ):
        with pytest.raises(RuntimeError, match="boom"):
            transform(bad)(arr(1, 2))
        assert mt.grad(lambda x: (x * x).sum())(arr(1, 2)).tolist() == [2, 4]
        from meshtape.arrays.core.op import state

        assert state.recorders == ()
        assert state.origin is None


# ----- the check itself -----------------------------------------------------------------------------------------------


def test_check_grads_finds_wrong_derivatives():
    def wrong_value(x):
        return x * x + mt.stop_gradient(x)

    with pytest.raises(AssertionError, match="reverse mode against differences"):
        mt.check_grads(wrong_value, np.asarray([1.0, 2.0]))

    def wrong_second(x):
        # The first derivative is right at x = 1 and the second is not.
        return x * mt.stop_gradient(x) * 2.0 - mt.stop_gradient(x * x)

    mt.check_grads(wrong_second, np.asarray(1.0), order=1)
    with pytest.raises(AssertionError, match="reverse mode against differences"):
        mt.check_grads(wrong_second, np.asarray(1.0), order=2)
    mt.check_grads(lambda z: z * mt.conj(z), np.asarray([1 + 1j]), order=3)


def test_jacobians_and_hessians_of_several_arguments_and_with_more_results():
    x, y = mt.asarray([1.0, 2.0]), mt.asarray([[3.0], [4.0], [5.0]])

    def fn(x, y, *, scale=1.0):
        return {"p": scale * x * y, "s": (x * x).sum()}, ("more", x)

    for argnums in ((0, 1), (1, 0), (-2, -1)):
        found, (word, same) = mt.jacobian(fn, argnums, has_aux=True)(x, y, scale=2.0)
        assert (word, same.tolist()) == ("more", [1, 2])
        by_x, by_y = found["p"] if argnums != (1, 0) else found["p"][::-1]
        assert (by_x.shape, by_y.shape) == ((3, 2, 2), (3, 2, 3, 1))
        np.testing.assert_array_equal(np.asarray(by_x)[:, 0, 0], [6, 8, 10])
        np.testing.assert_array_equal(np.asarray(by_y)[1, :, 1, 0], [2, 4])
        assert found["s"][argnums.index(1 if 1 in argnums else -1)].tolist() == [[0], [0], [0]]
    assert mt.jacobian(lambda a, b: a * b, argnums=1)(2.0, mt.ones(2)).tolist() == [[2, 0], [0, 2]]

    h, aux = mt.hessian(lambda x, y: ((x * x).sum() * y.sum(), 7), argnums=(0, 1), has_aux=True)(x, y)
    assert aux == 7
    assert (h[0][0].tolist(), h[0][1].shape, h[1][1].shape) == ([[24, 0], [0, 24]], (2, 3, 1), (3, 1, 3, 1))
    np.testing.assert_array_equal(np.asarray(h[1][0])[2, 0], [2, 4])
    compiled = mt.compile(mt.hessian(lambda x, y: (x * x).sum() * y.sum(), argnums=(0, 1)))(x, y)
    np.testing.assert_array_equal(np.asarray(compiled[0][1]), np.asarray(h[0][1]))

    with pytest.raises(mt.errors.GradientError, match=r"\[jacobian\] argnums 2 for 2"):
        mt.jacobian(lambda a, b: a * b, argnums=2)(x, x)
    with pytest.raises(TypeError, match=r"\[jacobian\] argnums"):
        mt.jacobian(lambda a: a, argnums="0")
    with pytest.raises(mt.errors.GradientError, match="has_aux"):
        mt.jacobian(lambda a: a, has_aux=True)(x)


class _Box:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize("hidden", [_Box, lambda x: collections.deque([x]), lambda x: types.SimpleNamespace(v=x)])
@pytest.mark.parametrize("wrap", [lambda b: b, lambda b: {"a": b, "w": mt.ones(2)}, lambda b: [b]])
def test_arrays_that_no_gradient_finds_are_not_left_out_in_silence(hidden, wrap):
    arg = wrap(hidden(mt.ones(3)))
    for act in (
        lambda: mt.grad(lambda p: mt.sum(mt.ones(2)))(arg),
        lambda: mt.value_and_grad(lambda p: mt.sum(mt.ones(2)))(arg),
        lambda: mt.hvp(lambda p: mt.sum(mt.ones(2)), arg, arg),
        lambda: mt.jacobian(lambda p: mt.ones(2))(arg),
    ):
        with pytest.raises(mt.errors.GradientError, match="is no tree"):
            act()
    assert mt.grad(lambda w, p: mt.sum(w * 2))(mt.ones(2), arg).tolist() == [2, 2]
    assert mt.grad(lambda p: mt.sum(p["w"]))({"w": mt.ones(2), "name": "x", "f": mt.tanh, "none": None})[
        "w"
    ].tolist() == [1, 1]
