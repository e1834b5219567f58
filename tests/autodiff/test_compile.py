"""mt.compile: the program gives what the code gives, is differentiated like it, and is made only as often as needed."""

from __future__ import annotations

import functools
import threading
import weakref

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.core.op import state

TracedValueError = mt.errors.TracedValueError


def arr(*values):
    return mt.asarray(list(values), dtype=mt.float64)


X = mt.asarray(np.random.default_rng(0).standard_normal((3, 4)))
W = mt.asarray(np.random.default_rng(1).standard_normal((4, 4)))


def _write(x, w):
    y = x * 1.0
    y[0] = w[1] * 2.0
    y[1:, [0, 0]] += 1.0
    return y


def _loop(x, w):
    for _ in range(3):
        x = mt.tanh(x @ w)
    return x


FUNCTIONS = {
    "elementwise": lambda x, w: mt.where(x > 0, mt.exp(x), -x) ** 2 + w[0],
    "layer": lambda x, w: mt.nn.gelu(mt.layer_norm(x @ w, 4, w[0], w[1])),
    "softmax": lambda x, w: mt.nn.softmax(x @ w, axis=0),
    "loss": lambda x, w: mt.nn.cross_entropy(x @ w, mt.asarray([0, 3, 1])),
    "write": _write,
    "loop": _loop,
    "index": lambda x, w: x[[0, 0, 2]][:, ::-1].T @ x[:, 1],
    "reduce": lambda x, w: (mt.max(x, axis=1), mt.argmax(w), mt.var(x), mt.prod(w, axis=0, keepdims=True)),
    "tree": lambda x, w: {"a": [x, (w * 2,)], "b": None, "n": 3, "name": "loss"},
    "gradient": lambda x, w: mt.grad(lambda w: mt.sum(mt.nn.silu(x @ w)))(w),
    "both": lambda x, w: mt.value_and_grad(lambda p: mt.mean((x @ p["w"] + p["b"]) ** 2))({"w": w, "b": w[0]}),
    "second order": lambda x, w: mt.hvp(lambda w: mt.sum(mt.layer_norm(x @ w, 4) ** 3), w, w),
    "jvp": lambda x, w: mt.jvp(lambda x: mt.nn.logsumexp(x @ w, axis=1), [x], [x * 2.0]),
    "jacobian": lambda x, w: mt.jacobian(lambda v: mt.tanh(v @ w))(x[0]),
    "tape": lambda x, w: _with_tape(x, w),
}


def _with_tape(x, w):
    with mt.Tape() as tape:
        tape.watch(w)
        y = mt.sum(mt.sin(x @ w))
    return tape.gradient(y, w)


def same(a, b):
    assert mt.arrays.tree.flatten(a)[1] == mt.arrays.tree.flatten(b)[1]
    for p, q in zip(mt.arrays.tree.flatten(a)[0], mt.arrays.tree.flatten(b)[0], strict=True):
        if isinstance(p, mt.Array):
            assert (p.shape, p.dtype) == (q.shape, q.dtype)
            np.testing.assert_allclose(np.asarray(p), np.asarray(q), rtol=1e-12, atol=1e-14)
        else:
            assert p == q


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_equals_eager(name):
    fn = FUNCTIONS[name]
    fast = mt.compile(fn)
    for x, w in ((X, W), (X * 0.5, W.T)):
        same(fast(x, w), fn(x, w))
    assert fast.signatures == 1
    assert state.recorders == ()
    assert state.origin is None


# ----- derivatives of programs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["elementwise", "layer", "softmax", "loss", "write", "loop", "index", "gradient", "jvp"]
)
def test_the_gradient_of_a_program_is_that_of_its_code(name):
    fn = FUNCTIONS[name]
    fast = mt.compile(fn)

    def loss(f):
        return lambda x, w: sum((mt.sum(mt.sin(y)) for y in mt.arrays.tree.flatten(f(x, w))[0]), mt.asarray(0.0))

    same(mt.grad(loss(fast), (0, 1))(X, W), mt.grad(loss(fn), (0, 1))(X, W))
    same(mt.compile(mt.grad(loss(fast)))(X, W), mt.grad(loss(fn))(X, W))
    inner = lambda f: lambda w: mt.sum(mt.grad(loss(f), 1)(X, w) ** 2)  # noqa: E731
    same(mt.grad(inner(fast))(W), mt.grad(inner(fn))(W))
    assert fast.signatures == 1


def test_derivatives_of_any_order():
    f = mt.compile(lambda x: mt.sum(mt.nn.softmax(x) * x**3))
    mt.check_grads(f, np.asarray([0.3, -0.5, 1.0]), order=3)
    assert f.signatures == 1


def test_arrays_from_the_closure_are_differentiated():
    w = arr(1, 2)
    f = mt.compile(lambda x: mt.sum(x * x * w))
    f(arr(3, 4))  # traced while nobody watched
    with mt.Tape() as tape:
        tape.watch(w)
        y = f(arr(3, 4))
    assert tape.gradient(y, w).tolist() == [9, 16]
    # Also where only the closure makes the call a function of what is differentiated.
    assert mt.grad(lambda w: mt.compile(lambda x: mt.sum(x * w))(arr(3, 4)))(w).tolist() == [3, 4]


W2 = arr(1, 2)


def _helper(x):
    return x * W2 * W2


@pytest.mark.parametrize(
    "make",
    [
        lambda w: lambda x: w * 2.0,
        lambda w: lambda x: x * (w * w).sum() + mt.stop_gradient(w) * w,
        lambda w: lambda x: x * mt.asarray(w, copy=True) + mt.exp(w)[::-1],
        lambda w: lambda x: x * mt.grad(lambda v: (v**3).sum())(w),
        lambda w: lambda x: x * mt.stop_gradient(w * w) * w,
        lambda w: lambda x, c={"w": [w]}: x * c["w"][0] ** 2,
        lambda w: functools.partial(lambda v, x: (v * v) @ x * v, w),
        lambda w: (lambda inner: lambda x: inner(x) + inner(mt.ones(2)))(mt.compile(lambda x: x * (w * w))),
        lambda w: lambda x: _written(w) * x,
    ],
)
def test_what_is_computed_from_the_closure_alone_is_differentiated(make):
    w, x = arr(1, 2), arr(3, 5)
    fast, plain = mt.compile(make(w)), make(w)
    fast(x)

    def gradient(f):
        with mt.Tape() as tape:
            tape.watch(w)
            y = f(x).sum()
        return tape.gradient(y, w)

    same(fast(x), plain(x))
    same(gradient(fast), gradient(plain))
    w[0] = 4.0
    same(fast(x), plain(x))
    same(gradient(fast), gradient(plain))


def _written(w):
    y = w * 1.0
    y[0] = w[1] * w[1]
    return y


def test_functions_of_the_module_are_followed():
    f = mt.compile(lambda x: _helper(x).sum())
    with mt.Tape() as tape:
        tape.watch(W2)
        y = f(arr(1, 1))
    assert tape.gradient(y, W2).tolist() == [2, 4]
    W2[0] = 3.0
    assert float(f(arr(1, 1))) == 13.0
    W2[0] = 1.0


def test_what_is_made_inside_stays_a_constant():
    program = mt.compile(lambda x: x + (mt.ones(2) * 3.0 + mt.arange(2))).program(arr(1, 2))
    assert [e.op.name for e in program.entries] == ["add"]


def test_a_program_that_hands_its_input_on_is_differentiated():
    f = mt.compile(lambda x, y: (x, y, x * y))
    dx, dy = mt.grad(lambda x, y: sum((mt.sum(o) for o in f(x, y)), mt.asarray(0.0)), (0, 1))(arr(1, 2), arr(3, 4))
    assert (dx.tolist(), dy.tolist()) == ([4, 5], [2, 3])


def test_entries_of_a_replayed_program_carry_their_origin():
    f = mt.compile(lambda x: mt.nn.softmax(x) * 2.0)
    with mt.Tape() as tape:
        x = arr(1, 2)
        tape.watch(x)
        f(x)
    found = {e.origin for e in tape.entries}
    assert found == {"softmax", None}


def test_errors_of_the_backward_pass_name_the_line_that_called_the_program():
    f = mt.compile(lambda x: x * 2.0)
    with mt.Tape() as tape:
        x = arr(1, 2)
        tape.watch(x)
        f(x)
    code, _ = tape.entries[0].site
    assert code.co_name == "test_errors_of_the_backward_pass_name_the_line_that_called_the_program"


def test_nothing_is_replayed_where_nobody_watches():
    f = mt.compile(lambda x: x * 2.0)
    other = arr(1)
    with mt.Tape() as tape:
        tape.watch(other)
        assert f(arr(1, 2)).tolist() == [2, 4]
    assert len(tape) == 0


# ----- signatures -----------------------------------------------------------------------------------------------------


def test_a_new_signature_is_traced_and_an_old_one_is_not():
    @mt.compile
    def f(x, n=1, *, flag=None):
        return x * n if flag is None else x * (n + 0)

    for args, kwargs, traced in [
        ((arr(1, 2),), {}, True),
        ((arr(3, 4),), {}, False),
        ((arr(1, 2, 3),), {}, True),  # shape
        ((arr(1, 2).astype(mt.float32),), {}, True),  # dtype
        ((np.asarray([5.0, 6.0]),), {}, False),  # NumPy's are arrays too
        ((arr(1, 2), 2), {}, True),  # static argument
        ((arr(1, 2), 2.0), {}, True),  # equal, of another type
        ((arr(1, 2), True), {}, True),
        ((arr(1, 2), 2), {}, False),
        ((arr(1, 2),), {"n": 2}, True),  # by keyword: another structure
        ((arr(1, 2),), {"flag": "train"}, True),
        ((arr(1, 2),), {"flag": "eval"}, True),
        ((arr(1, 2),), {"flag": "train"}, False),
        ((arr(1, 2), np.float32(1)), {}, True),
        ((arr(1, 2), np.float64(1)), {}, True),
        ((arr(1, 2), float("nan")), {}, False),  # another number is not: it only enters arithmetic
        ((arr(1, 2), float("nan")), {}, False),
    ]:
        before = f.signatures
        out = f(*args, **kwargs)
        assert f.signatures - before == traced, (args, kwargs)
        n = args[1] if len(args) > 1 else kwargs.get("n", 1)
        np.testing.assert_array_equal(np.asarray(out), np.asarray(args[0]) * n)


def test_results_follow_the_closure():
    scale, w, config = 2.0, arr(1, 1), {"w": arr(1, 1)}

    @mt.compile
    def f(x):
        return x * scale * w * config["w"]

    x = arr(1, 2)
    assert f(x).tolist() == [2, 4]
    assert f(x).tolist() == [2, 4]
    assert f.signatures == 1
    scale = 3.0
    assert f(x).tolist() == [3, 6]
    w[0] = 10.0  # in place
    assert f(x).tolist() == [30, 6]
    w = arr(0, 1)
    assert f(x).tolist() == [0, 6]
    config["w"] = arr(1, 5)
    assert f(x).tolist() == [0, 30]
    assert f.signatures == 5
    scale = 2.0
    f(x)
    scale = 3.0
    assert f(x).tolist() == [0, 30]
    assert f.signatures == 6


SCALE = 2.0
TABLE = arr(1, 2)


def test_results_follow_the_variables_of_the_module():
    global SCALE
    f = mt.compile(lambda x: (lambda y: y * SCALE * TABLE)(x))
    try:
        assert f(arr(1, 1)).tolist() == [2, 4]
        SCALE = 3.0
        assert f(arr(1, 1)).tolist() == [3, 6]
        TABLE[0] = 5.0
        assert f(arr(1, 1)).tolist() == [15, 6]
        f(arr(1, 1))
        assert f.signatures == 3
    finally:
        SCALE = 2.0
        TABLE[0] = 1.0


def test_partials_and_defaults_and_methods():
    w = arr(1, 2)
    f = mt.compile(functools.partial(lambda w, x: x * w, w))
    assert f(arr(1, 1)).tolist() == [1, 2]
    w[0] = 7.0
    assert f(arr(1, 1)).tolist() == [7, 2]

    class Model:
        def __init__(self, k):
            self.k = k

        @mt.compile
        def call(self, x):
            return x * self.k

    assert Model(2.0).call(arr(1, 2)).tolist() == [2, 4]
    assert Model(3.0).call(arr(1, 2)).tolist() == [3, 6]


def test_a_compiled_function_is_compiled_once_and_nests():
    f = mt.compile(lambda x: x * 2.0)
    assert mt.compile(f) is f
    g = mt.compile(lambda x: f(x) + f(x))
    assert g(arr(1)).tolist() == [4]
    assert f.signatures == 0  # it became part of g
    assert [e.op.name for e in g.program(arr(1)).entries] == ["multiply", "add"]
    assert repr(g) == "compile(<lambda>, 1 signature(s))"


# ----- programs -------------------------------------------------------------------------------------------------------


def test_printed_program():
    f = mt.compile(lambda x, w: mt.nn.softplus(x @ w) + 1.0)
    text = str(f.program(mt.zeros((2, 3)), mt.zeros((3, 4))))
    assert text.splitlines()[0] == "program(%0: float64[2,3], %1: float64[3,4]):"
    assert "matmul(%0, %1)" in text
    assert "# softplus" in text
    assert "float64[2,4]" in text
    assert text.splitlines()[-1].startswith("  return %")


def test_dead_and_repeated_code_is_dropped():
    def f(x):
        mt.exp(x)  # dead
        return mt.sin(x) * mt.sin(x) + mt.asarray(x)

    assert [e.op.name for e in mt.compile(f).program(arr(1)).entries] == ["sin", "multiply", "add"]
    # The forward pass that only the value needs is not run for the gradient.
    g = mt.compile(mt.grad(lambda x: mt.sum(mt.exp(x) + x)))
    assert "sum" not in [e.op.name for e in g.program(arr(1, 2)).entries]


def test_draws_by_one_key_are_one_and_by_two_keys_two():
    keys = mt.random.split(mt.random.key(3), 2)
    x = mt.ones(64)

    def f(x, keys):
        a, b = keys
        return [mt.nn.dropout(x, 0.5, key=k) for k in (a, b, a)] + [mt.random.normal(k, (3,)) for k in (a, b)]

    g = mt.compile(f)
    for found, expected in zip(g(x, keys), f(x, keys), strict=True):
        assert found.tolist() == expected.tolist()
    ops = [e.op.name for e in g.program(x, keys).entries]
    assert ops.count("dropout") == 2
    assert g(x, keys)[0].tolist() != g(x, keys)[1].tolist()


def test_equal_numbers_of_different_types_stay_apart():
    x = mt.asarray([1, 2])
    f = mt.compile(lambda x: (x * 1, x * 1.0, x * True))
    assert [y.dtype for y in f(x)] == [y.dtype for y in (x * 1, x * 1.0, x * True)]


def test_outputs_that_are_inputs_constants_or_named_twice():
    c = arr(7, 8)

    def f(x):
        y = x * 2.0
        return x, y, y, c, mt.asarray(3.0), x

    fast = mt.compile(f)
    x = arr(1, 2)
    for _ in range(2):
        out = fast(x)
        assert [o.tolist() for o in out] == [[1, 2], [2, 4], [2, 4], [7, 8], 3.0, [1, 2]]
        for o in out:
            o[...] = -1.0  # results belong to the caller
    assert (x.tolist(), c.tolist()) == ([1, 2], [7, 8])


def test_writes_to_a_copy_leave_the_caller_alone():
    @mt.compile
    def f(x):
        x = mt.copy(x)
        x[0] = 9.0
        return x

    x = arr(1, 2)
    assert f(x).tolist() == [9, 2]
    assert x.tolist() == [1, 2]


def test_functions_without_arrays():
    assert mt.compile(lambda: mt.ones(2) * 3.0)().tolist() == [3, 3]
    assert mt.compile(lambda n: n + 1)(3) == 4
    assert mt.compile(lambda x: None)(arr(1)) is None


def test_values_are_freed_at_their_last_use(peak_of):
    n = 200_000
    x = mt.ones(n)

    @mt.compile
    def chain(x):
        for _ in range(20):
            x = mt.tanh(x) + x
        return x

    assert peak_of(lambda: chain(x), most := 3.2 * 8 * n) < most


# ----- what cannot be traced ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x if x.sum() > 0 else -x,
        lambda x: float(x.sum()),
        lambda x: x[: int(x[0])],
        lambda x: np.asarray(x),
        lambda x: x.tolist(),
        lambda x: x[x.sum().astype(mt.int64).item()],
    ],
    ids=["if", "float", "int", "numpy", "tolist", "item"],
)
def test_values_are_refused(fn):
    f = mt.compile(fn)
    with pytest.raises(TracedValueError, match=r"float64\[|bool\[|int64\["):
        f(arr(1, 2))
    assert f.signatures == 0
    assert f.program is not None
    assert state.recorders == ()


def caught(read):
    def f(x):
        try:
            scale = read(x)
        except (TypeError, ValueError):
            scale = 1.0
        return x / scale

    return f


@pytest.mark.parametrize(
    "read", [lambda x: float(mt.max(x)), lambda x: np.asarray(x).max(), lambda x: 2.0 if x[0] > 0 else 1.0]
)
def test_a_value_that_is_asked_for_and_done_without_is_refused(read):
    x, mesh = arr(1, 4), mt.Mesh({"a": 2})
    with pytest.raises(TracedValueError, match=r"mt\.compile|traced"):
        mt.compile(caught(read))(x)
    sharded = mt.shard_map(caught(read), mesh, in_placements={"a": mt.Shard(0)}, out_placements={"a": mt.Shard(0)})
    with pytest.raises(TracedValueError, match=r"mt\.shard_map"):
        sharded(x)
    assert "traced" in repr(mt.compile(lambda x: [repr(x), x][0])(x))


def test_the_message_says_what_to_do():
    with pytest.raises(TracedValueError, match=r"a value \(bool\[\]\) was asked for inside mt.compile.*mt.where"):
        mt.compile(lambda x: x if x > 0 else -x)(mt.asarray(1.0))


def test_masks_are_refused_where_their_count_would_be_a_shape():
    with pytest.raises(mt.errors.ArrayIndexError, match=r"mt\.where"):
        mt.compile(lambda x: x[x > 0])(arr(1, 2))


def test_traced_arrays_do_not_outlive_the_trace():
    kept = []

    @mt.compile
    def f(x):
        kept.append(x * 2.0)
        return x

    with pytest.raises(TracedValueError, match=r"f keeps a traced array in kept\[0\].*return it"):
        f(arr(1, 2))
    assert "traced" in repr(kept[0])
    for use in (np.asarray, lambda x: x.tolist(), lambda x: x + 1.0, lambda x: x[0]):
        with pytest.raises(TracedValueError, match=r"after the function returned.*return it"):
            use(kept[0])
    with pytest.raises(TracedValueError, match="after the function returned"):
        kept[0] * 2.0
    with pytest.raises(TracedValueError, match="of one traced function was used in another"):
        mt.compile(lambda x: x + kept[0])(arr(1, 2))


def test_an_exception_while_tracing_leaves_nothing_behind():
    flag = {"fail": True}

    def f(x):
        y = mt.nn.softmax(x)
        if flag["fail"]:
            raise RuntimeError("boom")
        return y

    fast = mt.compile(f)
    with pytest.raises(RuntimeError, match="boom"):
        fast(arr(1, 2))
    flag["fail"] = False
    same(fast(arr(1, 2)), f(arr(1, 2)))
    assert fast.signatures == 1


def test_tracing_is_seen_by_no_tape():
    f = mt.compile(lambda x: x * 2.0 + 1.0)
    with mt.Tape() as tape:
        x = arr(1, 2)
        tape.watch(x)
        f(x)
        f(x)
    assert [e.op.name for e in tape.entries] == ["multiply", "add"] * 2


def test_programs_that_were_not_used_for_long_make_room():
    f = mt.compile(lambda x: x * 2.0, cache_size=2)
    for n in (1, 2, 1, 3, 1):  # 2 makes room for 3; 1 was used in between, and stays
        f(mt.ones(n))
    assert f.signatures == 3
    f(mt.ones(2))
    assert f.signatures == 4
    assert "4 signature(s)" in repr(f)
    with pytest.raises(ValueError, match=r"\[compile\] cache_size must be at least 1, got 0"):
        mt.compile(lambda x: x, cache_size=0)
    read = [mt.ones(1000)]
    first = weakref.ref(read[0])
    h = mt.compile(lambda x: x * read[0], cache_size=1)
    h(mt.ones(1000))
    read[0] = mt.zeros(1000)
    assert h(mt.ones(1000)).tolist() == [0] * 1000
    assert first() is None  # the program that made room let go of what it read from around it


def test_threads_share_a_compiled_function():
    f = mt.compile(lambda x, n: (x * float(n)).sum(), cache_size=3)
    wrong = []

    def work(seed):
        for i in range(60):
            n = (seed + i) % 7 + 1
            if float(f(mt.ones(n), n)) != n * n:
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not wrong
    assert not any(t.is_alive() for t in threads)


@pytest.mark.parametrize("n", [3, 300])
def test_memory_of_operands_is_used_again_where_nobody_else_can_hold_it(n):
    """``y`` is read twice and returned once; views of values are handed on: none of them may be written to."""

    def fn(x, w):
        a = x @ w
        b = mt.tanh(a)
        c = b * b
        view = c[0]
        d = mt.exp(-c)
        e = d + 1.0
        return e, view, b, mt.sqrt(e) + view, a.T

    rng = np.random.default_rng(0)
    x, w = (mt.asarray(rng.standard_normal((n, n))) for _ in range(2))
    before = x.tolist(), w.tolist()
    for _ in range(2):
        for got, want in zip(mt.compile(fn)(x, w), fn(x, w), strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert (x.tolist(), w.tolist()) == before


def test_a_chain_between_products_takes_the_memory_of_one_result(peak_of):
    n = 200  # below the size that is fused

    def fn(x):
        y = x @ x
        for _ in range(20):
            y = mt.sin(y)
        return y

    x = mt.asarray(np.random.default_rng(0).standard_normal((n, n)))
    f = mt.compile(fn)
    assert peak_of(lambda: f(x), most := 2.5 * x.nbytes) < most


@pytest.mark.parametrize(
    ("name", "fn"),
    {
        "nonzero": lambda x: mt.nonzero(x),
        "unique_values": lambda x: mt.unique_values(x),
        "repeat": lambda x: mt.repeat(x, (x * 2).astype(mt.int64)),
        "bincount": lambda x: mt.bincount(x.astype(mt.int64)),
    }.items(),
)
def test_a_shape_that_depends_on_values_is_refused_with_the_name_of_the_function(name, fn):
    with pytest.raises(TracedValueError, match=rf"\[{name}\].*(float64|int64)\[3\].*mt.compile"):
        mt.compile(fn)(mt.asarray([1.0, 0.0, 2.0]))
    with pytest.raises(TracedValueError, match=rf"\[{name}\]"):
        mt.compile(mt.grad(lambda x: mt.sum(x * 2.0) + mt.sum(fn(x)[0] * 0.0)))(mt.asarray([1.0, 0.0, 2.0]))


def test_a_compiled_function_called_where_nothing_is_recorded_is_part_of_the_program_around_it() -> None:
    inner = mt.compile(lambda x: mt.exp(x) * 2.0)

    def outer(x: mt.Array) -> mt.Array:
        with mt.no_grad():
            y = inner(x)
        return y + x

    x = mt.asarray([0.0, 1.0])
    np.testing.assert_array_equal(np.asarray(mt.compile(outer)(x)), np.asarray(outer(x)))
