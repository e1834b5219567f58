"""The tape: what it records, what it keeps, what it frees, and what it says when it is misused."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import threading
import tracemalloc
import weakref

import numpy as np
import pytest
from op_samples import calls, differentiable

import meshtape as mt
from meshtape.arrays import OPS
from meshtape.arrays.core.dispatch import apply, compiled
from meshtape.arrays.core.op import ShapeDtype, state
from meshtape.arrays.nn.norms.layer_norm import layer_norm
from meshtape.autodiff.rules import RULES
from meshtape.autodiff.tape import backward

GradientError = mt.errors.GradientError


def arr(*values):
    return mt.asarray(list(values), dtype=mt.float64)


def watched(*values):
    x = arr(*values)
    tape = mt.Tape()
    tape.watch(x)
    return tape, x


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    yield
    assert state.recorders == ()
    assert state.origin is None


# ----- asking ---------------------------------------------------------------------------------------------------------


def test_sources_are_a_tree():
    tape, x = watched(1, 2)
    n = mt.asarray([1, 2])
    with tape:
        y = x * x
        z = (y * n).sum()
    g = tape.gradient(z, {"x": x, "y": [y], "n": n})
    assert (g["x"].tolist(), g["y"][0].tolist(), g["n"]) == ([2, 8], [1, 2], None)


def test_unconnected_sources():
    tape = mt.Tape(persistent=True)
    x, y = arr(1, 2), arr(3)
    tape.watch(x, y)
    with tape:
        z = x.sum()
    assert tape.gradient(z, [x, y])[1] is None
    assert tape.gradient(z, [x, y], unconnected="zeros")[1].tolist() == [0]
    with pytest.raises(ValueError, match="unconnected must be"):
        tape.gradient(z, x, unconnected="zero")


def test_a_tape_is_used_up_unless_persistent():
    tape, x = watched(1, 2)
    with tape:
        y = (x * x).sum()
    assert tape.gradient(y, x).tolist() == [2, 4]
    with pytest.raises(GradientError, match=r"used up .* Tape\(persistent=True\)"):
        tape.gradient(y, x)
    again = mt.Tape(persistent=True)
    again.watch(x)
    seed = arr(1, 10)
    with again:
        y = x * x
    for _ in range(3):
        assert again.gradient(y, x, seed).tolist() == [2, 40]
    assert seed.tolist() == [1, 10]
    assert len(again) == 1


def test_a_backward_pass_that_fails_leaves_its_tape_recording():
    x, fails = arr(1, 2), [True]

    def hook(g):
        if fails:
            fails.pop()
            raise RuntimeError("on purpose")

    with mt.Tape(persistent=True) as tape:
        tape.watch(x)
        y = x * x
        tape.hook(y, hook)
        with pytest.raises(RuntimeError, match="on purpose"):
            tape.gradient(y, x, arr(1, 1))
        z = (y * 3.0).sum()
        assert tape.gradient(z, x).tolist() == [6, 12]
        w = (y * z).sum()
    assert tape.gradient(w, x).tolist() == mt.grad(lambda x: (x * x * (x * x * 3.0).sum()).sum())(x).tolist()


def test_recording_may_be_continued():
    tape, x = watched(1, 2)
    with tape:
        y = x * x
    z = y * 100.0  # not seen
    with tape:
        w = (y * 3.0).sum()
    assert z.tolist() == [100, 400]
    assert tape.gradient(w, x).tolist() == [6, 12]


def test_stop_recording():
    tape, x = watched(1, 2)
    with tape:
        y = x * 2.0
        with tape.stop_recording():
            factor = y * 1.0
            y[0] = 50.0  # a new value, unknown to the tape
        z = (x * factor).sum() + y.sum()
    assert tape.gradient(z, x).tolist() == [2, 4]


def test_stop_recording_leaves_other_tapes_alone():
    x = arr(1, 2)
    with mt.Tape() as outer, mt.Tape() as inner:
        outer.watch(x)
        inner.watch(x)
        with inner.stop_recording():
            y = (x * x).sum()
        with mt.no_grad():
            z = (x * x).sum()
    assert inner.gradient(y, x) is None
    assert outer.gradient(y + z, x) is None
    assert outer._used
    with mt.Tape(persistent=True) as outer, mt.Tape() as inner:
        outer.watch(x)
        with inner.stop_recording():
            y = (x * x).sum()
    assert outer.gradient(y, x).tolist() == [2, 4]


@pytest.mark.parametrize(
    ("ask", "match"),
    [
        (lambda t, x, y: t.gradient(y, x), r"\[gradient\] the target has shape \(2,\): reduce it to one element"),
        (lambda t, x, y: t.gradient(y.sum(), arr(1)), r"the source \(shape \(1,\)\) was not watched"),
        (lambda t, x, y: t.gradient(y, {"p": [x, arr(1)]}, y), r"p\.1 \(shape \(1,\)\) was not watched"),
        (lambda t, x, y: t.gradient(y, 3.0, y), r"the source is no Array but float"),
        (lambda t, x, y: t.gradient(2.0, x), r"the target is no Array but float"),
        (lambda t, x, y: t.gradient(y > 0, x, y > 0), r"the target has dtype bool, which has no derivatives"),
        (lambda t, x, y: t.gradient(y, x, arr(1, 2, 3)), r"the seed has shape \(3,\), the target \(2,\)"),
        (lambda t, x, y: t.gradient(y, x, mt.asarray([1j, 0])), r"the seed has dtype complex128, the target float64"),
        (lambda t, x, y: t.watch(3.0), r"\[watch\] takes Arrays, got float: make one with mt.asarray"),
        (lambda t, x, y: t.watch(np.ones(2)), r"\[watch\] takes Arrays, got ndarray"),
    ],
)
def test_misuse_is_named_and_does_not_use_the_tape_up(ask, match):
    tape, x = watched(1, 2)
    with tape:
        y = x * x
    with pytest.raises(GradientError, match=match):
        ask(tape, x, y)
    assert tape.gradient(y, x, arr(1, 1)).tolist() == [2, 4]


def test_a_tape_cannot_be_entered_twice_at_once():
    tape, _ = watched(1)
    with tape, pytest.raises(GradientError, match="recording already"), tape:
        pass
    with tape:
        pass


def test_a_seed_of_a_narrower_dtype_is_cast():
    tape, x = watched(1, 2)
    with tape:
        y = x * x
    g = tape.gradient(y, x, mt.asarray([1, 2], dtype=mt.float32))
    assert (g.tolist(), g.dtype) == ([2, 8], mt.float64)


# ----- values that are written to -------------------------------------------------------------------------------------


def test_in_place_writes_do_not_reach_saved_values():
    tape, x = watched(1, 2, 3)
    with tape:
        y = x * x
        x[0] = 0.0
        z = x * 1.0
        v = z[0:2]
        w = z * z
        v[...] = 7.0
        total = y.sum() + w.sum()
    x[:] = -1.0
    z[:] = -1.0
    assert tape.gradient(total, x).tolist() == [2, 4 + 4, 6 + 6]


def test_the_gradient_is_that_of_the_watched_value():
    tape, x = watched(0, 1, 2, 3, 4, 5)
    v = arr(10, 20, 30)
    tape.watch(v)
    with tape:
        x[[1, 1, 5]] = v
        y = x * 1.0
    dx, dv = tape.gradient(y, [x, v], arr(1, 2, 3, 4, 5, 6))
    assert (dx.tolist(), dv.tolist()) == ([1, 0, 3, 4, 5, 0], [0, 2, 6])
    assert x.tolist() == [0, 20, 2, 3, 4, 30]


def test_a_write_outside_the_tape_makes_a_new_value():
    tape, x = watched(1, 2)
    with tape:
        y = x * x
    y[0] = 100.0
    with tape:
        z = (y * 3.0).sum()  # of an array that the tape has never seen
    assert tape.gradient(z, x) is None


def test_watching_again_after_a_write():
    tape, x = watched(1, 2)
    with tape:
        x[0] = 5.0
        tape.watch(x)
        y = (x * x).sum()
    assert tape.gradient(y, x).tolist() == [10, 4]


def test_a_new_array_is_not_taken_for_one_that_is_gone():
    tape, x = watched(1, 2)
    with tape:
        y = (x * x).sum()
    z = arr(5, 6)
    tape._watched[id(z)] = tape._watched.pop(id(x))  # as if z had been made where x was
    del x
    with pytest.raises(GradientError, match="was not watched"):
        tape.gradient(y, z)


# ----- buffers --------------------------------------------------------------------------------------------------------


def test_gradients_share_nothing_that_shows():
    tape = mt.Tape()
    x, y = arr(1, 2), arr(3, 4)
    tape.watch(x, y)
    seed = arr(1, 10)
    with tape:
        z = x + y
    dx, dy, dz = tape.gradient(z, [x, y, z], seed)
    dx[...] = 0.0
    assert (dy.tolist(), dz.tolist(), seed.tolist()) == ([1, 10], [1, 10], [1, 10])
    dz += 5.0
    seed[0] = -1.0
    assert (dx.tolist(), dy.tolist(), dz.tolist()) == ([0, 0], [1, 10], [6, 15])


def test_the_seed_is_never_changed():
    tape = mt.Tape(persistent=True)
    x = arr(1, 2)
    tape.watch(x)
    seed, numpy_seed = arr(1, 10), np.asarray([1.0, 10.0])
    with tape:
        z = x + x + x * 2.0 + x
    for s in (seed, numpy_seed):
        for _ in range(2):
            assert tape.gradient(z, x, s).tolist() == [5, 50]
        assert np.asarray(s).tolist() == [1, 10]


def test_seeds_of_several_results_are_never_changed():
    # The first result is an operand of the others: its cotangent is the seed, and more.
    x, seeds = arr(1, 2), (arr(1, 10), arr(1, 1), arr(2, 2))
    _, pull = mt.vjp(lambda x: (y := x * 2.0, y * 3.0, y * 4.0), x)
    for _ in range(2):
        assert pull(seeds)[0].tolist() == [2 * (1 + 3 + 8), 2 * (10 + 3 + 8)]
    assert [s.tolist() for s in seeds] == [[1, 10], [1, 1], [2, 2]]


def test_accumulation_does_not_write_into_a_kept_cotangent():
    # y is a source itself; its cotangent is passed on to a and b, which get more from elsewhere.
    tape = mt.Tape()
    a, b = arr(1, 2), arr(3, 4)
    tape.watch(a, b)
    with tape:
        y = a + b
        z = (y * y + y * 3.0 + a * 2.0 + b + a).sum()
    da, db, dy = tape.gradient(z, [a, b, y])
    assert dy.tolist() == [11, 15]
    assert da.tolist() == [14, 18]
    assert db.tolist() == [12, 16]


def test_gradients_of_broadcasts_can_be_written():
    x = arr(1, 2)
    g = mt.grad(lambda x: x.sum())(x)
    g[0] = 5.0
    assert g.tolist() == [5, 1]
    # That of a number is an array of no dimension, and no number of NumPy's.
    g = mt.grad(lambda x: x * x)(mt.asarray(3.0))
    g[...] = 5.0
    assert g.tolist() == 5


def test_a_chain_of_adds_keeps_nothing(peak_of):
    n = 200_000
    x = mt.ones(n)

    def run():
        tape = mt.Tape()
        tape.watch(x)
        with tape:
            y = x
            for _ in range(20):
                y = y + 1.0
        tape.gradient(y, x, y)

    assert peak_of(run, most := 3.2 * 8 * n) < most


def test_saved_values_and_cotangents_are_freed_on_the_way_back(peak_of):
    n, held = 200_000, []
    x = mt.ones(n)

    def run():
        tape = mt.Tape()
        tape.watch(x)
        with tape:
            y = x
            for _ in range(20):
                y = mt.tanh(y)  # keeps its result
            held.append(tracemalloc.get_traced_memory()[0])
        tape.hook(x, lambda g: held.append(tracemalloc.get_traced_memory()[0]))
        assert tape.gradient(y, x, mt.ones(n)).shape == (n,)

    peak_of(run)
    up, back = held[-2], min(held[3::2])  # the first call is not traced; other threads add to what is counted
    assert up > 19 * 8 * n
    # Of 20 results and as many cotangents, when the first value's is known: that, the last result and the seed.
    assert back < 6 * 8 * n


def buffer_ref(x) -> weakref.ref:
    return weakref.ref(x._buf)


def test_only_what_a_rule_names_is_kept():
    tape, x = watched(1, 2)
    with tape:
        y = x * 3.0
        added, product = buffer_ref(y), None
        z = y + 1.0
        product = buffer_ref(z)
        w = z * z
        out = w.sum()
        del y, z, w
    assert added() is None, "a sum needs no operand"
    assert product() is not None, "a product needs its operands"
    tape.gradient(out, x)
    assert product() is None, "freed as soon as the walk has passed"


def test_no_cycles():
    """Nothing waits for the garbage collector: buffers die when their last holder goes."""
    gc.collect()
    gc.disable()
    try:
        refs = []

        def step(params, x):
            refs.append(buffer_ref(x))
            refs.extend(buffer_ref(p) for p in params.values())
            h = layer_norm(mt.nn.gelu(x @ params["w"]), 4, params["g"])
            refs.append(buffer_ref(h))
            return (h * h).sum()

        params = {"w": mt.ones((4, 4)), "g": mt.ones(4)}
        x = mt.ones((3, 4))
        value, grads = mt.value_and_grad(step)(params, x)
        y, pull = mt.vjp(step, params, x)
        hvp = mt.hvp(functools.partial(step, params), x, x)
        refs += [buffer_ref(a) for a in (value, grads["w"], y, hvp, pull(y)[1])]
        refs.append(weakref.ref(grads["w"]))
        del params, x, value, grads, y, pull, hvp
        assert sum(r() is not None for r in refs) == 0
        assert len(refs) > 12
    finally:
        gc.enable()


# ----- threads --------------------------------------------------------------------------------------------------------


def test_threads_do_not_mix():
    tape, x = watched(1, 2)
    barrier = threading.Barrier(4)
    results = {}

    def work(k):
        own = mt.Tape()
        mine = arr(k, k)
        own.watch(mine)
        barrier.wait()
        with own:
            y = x * 5.0  # x is watched by the tape of the main thread, not by this one
            for _ in range(50):
                mine_y = mt.layer_norm(mine, 2) + mine * mine
                assert state.origin is None
        assert {e.origin for e in own.entries} == {"layer_norm", None}
        results[k] = own.gradient(mine_y, mine, arr(1, 1)).tolist(), len(y)

    with tape:
        threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 4)]
        for t in threads:
            t.start()
        barrier.wait()
        for _ in range(50):
            y = (x * x).sum()
        for t in threads:
            t.join()
    assert len(tape) == 100
    assert tape.gradient(y, x).tolist() == [2, 4]
    assert results == {k: ([2.0 * k, 2.0 * k], 2) for k in (1, 2, 3)}


# ----- origins and errors ---------------------------------------------------------------------------------------------


def origins(fn, *args):
    with mt.Tape() as tape:
        tape.watch(*args)
        fn(*args)
    return [e.origin for e in tape.entries]


def test_entries_carry_the_outermost_public_function():
    x = arr(1, 2)
    found = origins(mt.nn.logsumexp, x)
    assert len(found) >= 3
    assert set(found) == {"logsumexp"}
    # cross_entropy calls mean; the word of the user is kept.
    assert set(origins(lambda x: mt.nn.cross_entropy(x, mt.asarray(1)), x)) == {"cross_entropy"}
    assert origins(lambda x: x * x, x) == [None]
    assert set(origins(lambda x: mt.var(x) + mt.nn.silu(x), x)) == {"var", "silu", None}


def test_the_origin_is_reset_after_an_exception():
    with pytest.raises(ValueError, match="cross_entropy"):
        mt.nn.cross_entropy(arr(1, 2), mt.asarray([1, 2, 3]))
    with pytest.raises(ValueError, match="axis 4"):
        mt.nn.softmax(arr(1, 2), axis=4)
    assert origins(lambda x: x * x, arr(1)) == [None]


@pytest.fixture
def broken_op():
    """An op whose derivative raises, and one that has none; both are taken out again."""
    from meshtape.arrays import Op
    from meshtape.arrays.core import shape_rules

    bad = Op("broken_for_test", ("x",), lambda xp, x: x * 1.0, shape_rules.same)
    none = Op("ruleless_for_test", ("x",), lambda xp, x: x * 1.0, shape_rules.same)

    def vjp(xp, g, x):
        raise ZeroDivisionError("the rule failed")

    from meshtape.autodiff.rules import defvjp

    defvjp(bad, x=vjp)
    yield bad, none
    RULES.pop(bad)
    OPS.pop(bad.name)
    OPS.pop(none.name)


def test_errors_of_the_backward_pass_name_the_calling_line(broken_op):
    bad, _ = broken_op

    def model(x):
        return apply(bad, (x,)).sum()  # this line

    line = model.__code__.co_firstlineno + 1
    for run in (mt.grad(model), mt.grad(lambda x: mt.grad(model)(x).sum())):
        with pytest.raises(ZeroDivisionError) as e:
            run(arr(1, 2))
        notes = "\n".join(e.value.__notes__)
        assert "in the derivative of broken_for_test" in notes
        assert f"test_tape.py:{line}, in model" in notes
        assert mt.grad(lambda x: (x * x).sum())(arr(1, 2)).tolist() == [2, 4]


def test_an_op_without_a_derivative_is_named(broken_op):
    _, none = broken_op
    with pytest.raises(mt.errors.NonDifferentiableError, match=r"\[ruleless_for_test\] has no derivative; .*test_tape"):
        mt.grad(lambda x: apply(none, (x,)).sum())(arr(1, 2))
    # It is no obstacle where it is not on the way.
    assert mt.grad(lambda x: apply(none, (x * 2.0,)).sum() * 0.0 + x.sum() if False else x.sum())(arr(1)).tolist() == [
        1
    ]


def test_rules_are_declared_once_and_for_differentiable_ops_only():
    from meshtape.autodiff.rules import defvjp

    with pytest.raises(ValueError, match="add has a rule already"):
        defvjp(OPS["add"], x=lambda xp, g: g)
    with pytest.raises(ValueError, match="floor has a rule already, or is declared nondifferentiable"):
        defvjp(OPS["floor"], x=lambda xp, g: g)
    with pytest.raises(TypeError, match=r"a rule of where must take \(xp, g, …\)"):
        defvjp(OPS["where"], x=lambda g: g)


def test_micro_batches_add_up_to_the_batch():
    rng = np.random.default_rng(0)
    w, x, y = (mt.asarray(rng.standard_normal(s)) for s in ((3,), (8, 3), (8,)))
    loss = lambda w, x, y: mt.mean((x @ w - y) ** 2)  # noqa: E731
    whole = mt.grad(loss)(w, x, y)
    parts = [mt.grad(loss)(w, x[i : i + 2], y[i : i + 2]) for i in range(0, 8, 2)]
    np.testing.assert_allclose(np.asarray(sum(parts[1:], parts[0]) / 4), np.asarray(whole), rtol=1e-12)
    # Uneven ones count by their number of samples.
    uneven = mt.grad(loss)(w, x[:6], y[:6]) * (6 / 8) + mt.grad(loss)(w, x[6:], y[6:]) * (2 / 8)
    np.testing.assert_allclose(np.asarray(uneven), np.asarray(whole), rtol=1e-12)


def test_calls_on_numbers_alone_are_passed_over():
    x = arr(1, 2)
    with mt.Tape() as tape:
        tape.watch(x)
        y = x * mt.exp(0.0) + mt.add(1.0, 2.0) + mt.where(True, 1.0, 2.0) + mt.sum(mt.maximum(1, 2))
    assert [e.op.name for e in tape.entries] == ["multiply", "add", "add", "add"]
    assert tape.gradient(y, x, mt.ones(2)).tolist() == [1, 1]


@pytest.mark.parametrize("number", [2, 2.5, True, 1.5 + 0.5j])
def test_numbers_in_entries_and_in_the_backward_pass(number):
    """A number is recorded as it is, on either side, and differentiated through in one and two orders."""
    x = arr(1, 2)
    with mt.Tape() as tape:
        tape.watch(x)
        y = number * x / (x * number)
    recorded = tape.entries[0].inputs[0].value
    assert recorded == number
    assert type(recorded) is type(number)
    g = tape.gradient(y, x, mt.ones(2, dtype=y.dtype))
    assert (g.dtype, g.shape) == (x.dtype, x.shape)
    np.testing.assert_allclose(np.asarray(g), 0, atol=1e-15)
    cube = lambda x: mt.real(number * x * x * x).sum()  # noqa: E731
    np.testing.assert_allclose(np.asarray(mt.grad(cube)(x)), np.real(number) * np.asarray([3.0, 12.0]))
    np.testing.assert_allclose(np.asarray(mt.hvp(cube, x, arr(1, 1))), np.real(number) * np.asarray([6.0, 12.0]))


@pytest.mark.parametrize("dtype", [mt.float16, mt.bfloat16, mt.float32, mt.float64])
def test_cotangents_have_the_dtype_of_their_values(dtype):
    """Also along calls on one array and a number, whose cotangents are not looked at one by one."""
    x = mt.asarray([0.5, 1.0], dtype=dtype)
    chain = lambda x: mt.tanh(mt.erf(mt.log2(2.0 * x + 1.0) / 3.0) ** 2) - 1.0  # noqa: E731
    with mt.Tape(persistent=True) as tape:
        tape.watch(x)
        a = 2.0 * x + 1.0
        b = mt.erf(mt.log2(a) / 3.0)
        c = mt.nn.gelu(mt.nn.sigmoid(b**2 - 1.0))
    for source in (x, a, b):
        g = tape.gradient(c, source, mt.ones(2, dtype=dtype))
        assert (g.dtype, g.shape) == (dtype, (2,))
    value, pull = mt.vjp(chain, x)
    assert pull(mt.ones_like(value))[0].dtype == dtype
    assert mt.hvp(lambda x: mt.sum(chain(x)), x, x).dtype == dtype


class InPython(mt.Tape):
    """A tape whose calls are none of C's."""


def pulled(kind, op, args, params, result):
    """Records of a call, and the cotangents of its operands from one of its results, or from all (None)."""
    args = [mt.asarray(a) if isinstance(a, np.ndarray) else a for a in args]
    sources = [a for a in args if isinstance(a, mt.Array) and a.dtype.kind == "f"]
    with np.errstate(all="ignore"), kind(persistent=True) as tape:
        tape.watch(sources)
        outs = apply(op, tuple(args), params)
        outs = outs if isinstance(outs, tuple) else (outs,)
        of = [o for o in outs if o.dtype.kind == "f"] if result is None else [outs[result]]
        total = functools.reduce(mt.add, [mt.sum(mt.cos(o) * o) for o in of])
    kept = [[k.tobytes() if isinstance(k, np.ndarray) else k for k in r[3]] for r in tape._records]
    records = [(r[0], len(r[2]), k, r[5]) for r, k in zip(tape._records, kept, strict=True)]
    try:
        found = [g.tolist() for g in tape.gradient(total, sources, unconnected="zeros")]
    except GradientError as e:  # of a mode without a derivative
        found = [str(e), *e.__notes__]
    return repr((records, found))


WHOLE = [n for n in differentiable() if OPS[n].nout > 1 or (OPS[n] in RULES and RULES[OPS[n]].together)]


@pytest.mark.parametrize("name", WHOLE)
def test_several_results_and_rules_of_all_operands_are_the_same_in_c(name, monkeypatch):
    op, tried = OPS[name], 0
    for args, params in calls(name):
        if any(isinstance(a, np.ndarray) and a.dtype.kind == "c" for a in args):
            continue
        avals = op.avals(tuple(ShapeDtype(a.shape, a.dtype) if isinstance(a, np.ndarray) else a for a in args), params)
        of_floats = [i for i, a in enumerate(avals) if a.dtype.kind == "f"]
        for result in [None] * bool(of_floats) + of_floats:
            with monkeypatch.context() as patch:
                patch.setattr(backward, "compiled", None)
                in_python = pulled(InPython, op, args, params, result)
            with monkeypatch.context() as patch:
                if all(a.dtype.kind != "c" for a in avals) and op in RULES and compiled is not None:
                    patch.setattr(mt.Tape, "record", None)  # neither is called
                    patch.setattr(backward, "_found", None)
                assert pulled(mt.Tape, op, args, params, result) == in_python
            tried += 1
    assert tried or name == "eig"  # of which all results are complex


@pytest.mark.skipif(compiled is None, reason="all of this file has just run without the calls in C")
def test_without_the_calls_in_c_the_tape_is_the_same():
    code = "import sys; sys.modules['meshtape.arrays.core._calls'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    usual = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, "-c", code, "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=usual)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 skipped" in done.stdout
