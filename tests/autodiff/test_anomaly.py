"""detect_anomaly names the op and the line where the first NaN or infinity came about."""

from __future__ import annotations

import threading
import warnings

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.core.op import state
from meshtape.autodiff.tape.anomaly import mode


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        yield
    assert state.recorders == ()
    assert not mode.on


def arr(*values):
    return mt.asarray(list(values), dtype=mt.float64)


def forward_fault(x):
    y = x * 2.0
    z = mt.log(y - 4.0)  # the line
    return (z + 1.0).sum()


def backward_fault(x):
    y = x - 2.0
    z = mt.sqrt(y)  # the line
    return (z * 3.0).sum()


def line_of(fn):
    """The marked line of a function."""
    import inspect

    lines, start = inspect.getsourcelines(fn)
    return start + next(i for i, text in enumerate(lines) if "# the line" in text)


def on_a_mesh(x):
    return mt.distribute(x, mt.Mesh({"a": 2}), a=mt.Shard(0))


PLACES = {"local": lambda x: x, "mesh": on_a_mesh}
HOW = {"eager": lambda f: f, "compiled": mt.compile}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", HOW)
def test_the_forward_pass(how, place):
    x = PLACES[place](arr(5.0, 2.0, 1.0))
    # With the value: a compiled gradient alone leaves out the logarithm, which it does not need.
    for fn in (forward_fault, mt.value_and_grad(forward_fault), mt.value_and_grad(mt.checkpoint(forward_fault))):
        with mt.detect_anomaly(), pytest.raises(mt.errors.AnomalyError) as e:
            HOW[how](fn)(x)
        assert "[log] log gave the first NaN (2 of 3 elements, the first at (1,))" in str(e.value)
        assert f"test_anomaly.py:{line_of(forward_fault)}, in forward_fault" in str(e.value)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "wrap", [lambda f: f, mt.checkpoint, lambda f: lambda x: mt.vjp(f, x)[0]], ids=["plain", "checkpoint", "vjp"]
)
def test_the_backward_pass(place, wrap):
    x = PLACES[place](arr(5.0, 2.0))
    with mt.detect_anomaly(), pytest.raises(FloatingPointError) as e:
        mt.grad(wrap(backward_fault))(x)
    assert "[sqrt] the derivative of sqrt gave the first infinity (for operand 0, 1 of 2 elements" in str(e.value)
    assert f"test_anomaly.py:{line_of(backward_fault)}, in backward_fault" in str(e.value)


def test_the_backward_pass_of_a_program():
    with mt.detect_anomaly(), pytest.raises(mt.errors.AnomalyError) as e:
        mt.compile(mt.grad(backward_fault))(arr(5.0, 2.0))
    assert "[sqrt vjp] divide gave the first infinity" in str(e.value)
    assert f"test_anomaly.py:{line_of(backward_fault)}, in backward_fault" in str(e.value)


def test_the_first_fault_is_the_one_that_is_named():
    with mt.detect_anomaly():
        with pytest.raises(mt.errors.AnomalyError, match=r"divide gave the first infinity"):
            mt.exp(1.0 / arr(0.0) - 1.0 / arr(0.0))
        # Bad operands come from elsewhere: what is computed from them raises only where it gets worse.
        bad = arr(float("inf"), 1.0) * 2.0
        with pytest.raises(mt.errors.AnomalyError, match=r"subtract gave the first NaN"):
            bad - bad
        assert mt.nn.softmax(mt.where(arr(1, 0) > 0, arr(1, 2), -float("inf"))).tolist() == [1, 0]
        assert np.isnan(float((arr(float("nan")) + 1.0).sum()))


def test_the_word_that_the_user_wrote_is_named():
    with (
        mt.detect_anomaly(),
        pytest.raises(mt.errors.AnomalyError, match=r"^\[logsumexp\] subtract gave the first infinity"),
    ):
        mt.nn.logsumexp(mt.full(2, 1e308) * arr(1.0, -1.0))


def test_integers_low_precision_and_complex_numbers():
    with mt.detect_anomaly():
        assert (mt.asarray([1, 2]) * 2).tolist() == [2, 4]
        with pytest.raises(mt.errors.AnomalyError, match="multiply gave the first infinity"):
            mt.full(2, 3e38, dtype=mt.bfloat16) * 4.0
        with pytest.raises(mt.errors.AnomalyError, match="exp gave the first"):
            mt.exp(mt.asarray([1000.0 + 1j]))


def test_nothing_else_changes_and_it_ends_with_the_context():
    f = mt.value_and_grad(lambda x: (mt.exp(x) * mt.layer_norm(x, 3)).sum())
    x = arr(0.1, 0.5, 0.3)
    value, g = f(x)
    with mt.detect_anomaly():
        again, h = f(x)
        twice = mt.hessian(lambda x: f(x)[0])(x)
    assert (float(value), g.tolist()) == (float(again), h.tolist())
    assert twice.tolist() == mt.hessian(lambda x: f(x)[0])(x).tolist()
    assert np.isinf((1.0 / arr(0.0)).item())
    assert np.isinf(mt.grad(backward_fault)(arr(2.0)).item())


def test_other_threads_are_left_alone():
    found = []
    with mt.detect_anomaly():
        t = threading.Thread(target=lambda: found.append(mt.grad(backward_fault)(arr(2.0)).item()))
        t.start()
        t.join()
    assert found == [float("inf")]


def test_an_anomaly_leaves_the_engine_usable():
    with mt.detect_anomaly():
        with pytest.raises(mt.errors.AnomalyError):
            mt.grad(backward_fault)(arr(2.0))
        assert mt.grad(backward_fault)(arr(3.0)).tolist() == [1.5]


@pytest.mark.parametrize("context", [mt.detect_anomaly, lambda: np.errstate(divide="raise")])
def test_a_context_that_would_end_with_the_trace_is_refused(context):
    def inside(x):
        with context():
            return mt.log(x)

    for traced in (
        mt.compile(inside),
        mt.shard_map(inside, mt.Mesh({"a": 2}), ({"a": mt.Shard(0)},), {"a": mt.Shard(0)}),
    ):
        with pytest.raises(mt.errors.TracedValueError, match="put it around the call"):
            traced(mt.ones(2))
    with context(), pytest.raises(FloatingPointError):
        mt.compile(mt.log)(mt.zeros(2))
