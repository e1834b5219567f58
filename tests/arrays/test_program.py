"""Programs as data: passes keep results, drop what is dead and share what is common."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtape import arrays as mt
from meshtape.arrays.core.dispatch import call_site, program_inputs
from meshtape.arrays.core.op import OPS, ShapeDtype, not_recording, recording, state
from meshtape.arrays.core.program import Const, ProgramBuilder, freeze, last_uses, simplify, site_text

BOUNDED = settings(max_examples=150, deadline=None)

F64 = np.dtype(np.float64)
NAMES = ["add", "multiply", "subtract", "negative", "positive", "square", "sum"]


@st.composite
def programs(draw):
    """A random straight-line program over vectors of three."""
    builder = ProgramBuilder()
    aval = ShapeDtype((3,), F64)
    known = [builder.input(aval) for _ in range(draw(st.integers(1, 3)))]
    known += [builder.constant(np.full(3, k + 2.0), aval) for k in range(draw(st.integers(0, 2)))]
    for _ in range(draw(st.integers(0, 14))):
        op = OPS[draw(st.sampled_from(NAMES))]
        any_input = st.sampled_from(known)
        if len(op.operands) == 2:
            any_input = any_input | st.sampled_from([Const(1), Const(1.0), Const(True), Const(0.5)])
            x, y = draw(st.sampled_from(known)), draw(any_input)
            inputs = (x, y) if draw(st.booleans()) else (y, x)
        else:
            inputs = (draw(any_input),)
        params = {"axis": (0,), "keepdims": draw(st.booleans())} if op.name == "sum" else {}
        args = tuple(builder.avals[v] if isinstance(v, int) else v.value for v in inputs)
        known += builder.add(op, inputs, params, op.avals(args, params)) if _fits(op, args) else ()
    return builder.build(draw(st.lists(st.sampled_from(known), min_size=1, max_size=3)))


def _fits(op, args):
    return op.name != "sum" or len(args[0].shape) == 1


def run(program, inputs):
    values = dict(zip(program.inputs, inputs, strict=True)) | dict(program.constants)
    for e, dead in zip(program.entries, last_uses(program), strict=True):
        args = [values[v] if isinstance(v, int) else v.value for v in e.inputs]
        out = e.op.numpy(*args, **e.params)
        values.update(zip(e.outputs, (out,) if e.op.nout == 1 else out, strict=True))
        for v in dead:
            del values[v]
    return [values[v] for v in program.outputs]


@BOUNDED
@given(programs())
def test_simplify_keeps_results(program):
    inputs = [np.arange(3.0) + i for i in range(len(program.inputs))]
    small = simplify(program)
    with np.errstate(all="ignore"):
        for a, b in zip(run(program, inputs), run(small, inputs), strict=True):
            np.testing.assert_array_equal(a, b)
    assert small.inputs == program.inputs
    assert len(small.entries) <= len(program.entries)
    # Nothing repeated, nothing dead.
    keys = [(e.op, tuple(repr(v) for v in e.inputs), freeze(e.params)) for e in small.entries]
    assert len(set(keys)) == len(keys)
    read = {v for e in small.entries for v in e.inputs if isinstance(v, int)} | set(small.outputs)
    assert all(read & set(e.outputs) for e in small.entries)
    assert set(small.constants) <= read
    assert set(small.avals) >= read
    assert simplify(small) == small


@BOUNDED
@given(programs())
def test_last_uses_free_each_value_once_and_after_its_last_reader(program):
    dead = last_uses(program)
    assert len(dead) == len(program.entries)
    flat = [v for group in dead for v in group]
    assert len(flat) == len(set(flat))
    assert not set(flat) & set(program.outputs)
    for k, group in enumerate(dead):
        for later in program.entries[k + 1 :]:
            assert not set(group) & {v for v in later.inputs if isinstance(v, int)}


def test_a_multi_output_entry_lives_as_one():
    builder = ProgramBuilder()
    x = builder.input(ShapeDtype((2, 3), F64))
    w = builder.input(ShapeDtype((3,), F64))
    op = OPS["layer_norm_backward"]
    avals = op.avals((builder.avals[x], builder.avals[x], builder.avals[w]), {})
    dx, dw, db = builder.add(op, (x, x, w), {"naxes": 1, "eps": 1e-5}, avals)
    program = simplify(builder.build([dw]))
    assert [e.outputs for e in program.entries] == [(dx, dw, db)]
    assert set(last_uses(program)[0]) == {x, w, dx, db}


# ----- freeze ---------------------------------------------------------------------------------------------------------


def test_freeze_tells_equal_numbers_of_different_types_apart():
    assert len({freeze(v) for v in (1, 1.0, True, 1 + 0j)}) == 4
    assert freeze(math.nan) == freeze(float("nan"))
    assert freeze(0.0) != freeze(-0.0)
    assert freeze([1, 2]) != freeze((1, 2))
    assert freeze({"a": 1, "b": 2}) == freeze({"b": 2, "a": 1})
    assert freeze({"a": [1, {"b": (math.nan,)}]}) == freeze({"a": [1, {"b": (math.nan,)}]})
    assert freeze(None) != freeze(0)
    assert freeze(np.dtype("float32")) != freeze(np.dtype("float64"))


@BOUNDED
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda x: (
            st.lists(x, max_size=3) | st.lists(x, max_size=3).map(tuple) | st.dictionaries(st.text(), x, max_size=3)
        ),
    )
)
def test_freeze_is_hashable_and_repeatable(value):
    import copy

    frozen = freeze(value)
    assert hash(frozen) == hash(freeze(copy.deepcopy(value)))
    assert frozen == freeze(copy.deepcopy(value))


# ----- recording ------------------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self):
        self.calls = []

    def record(self, op, args, bufs, outs, params):
        self.calls.append(
            (op.name, program_inputs(args, lambda a: 0), len(outs), dict(params), state.origin, call_site())
        )


def here():
    x = mt.ones(3)
    return (x + 1) * x


def test_every_op_call_is_shown_to_recorders():
    r = Recorder()
    with recording(r):
        here()
    assert [c[0] for c in r.calls] == ["add", "multiply"]
    assert r.calls[0][1] == (0, Const(1))
    assert "test_program.py" in site_text(r.calls[0][5])
    assert "in here" in site_text(r.calls[0][5])
    here()
    assert len(r.calls) == 2


def test_the_outermost_public_name_stays():
    r = Recorder()
    with recording(r):
        mt.nn.softmax(mt.ones(3))
    assert {c[4] for c in r.calls} == {"softmax"}
    r = Recorder()
    with recording(r), pytest.raises(ValueError, match="layer_norm"):
        mt.layer_norm(mt.ones(3), 4)
    with recording(r):
        mt.ones(3) + 1
    assert r.calls[-1][4] is None, "an error leaves no origin behind"


def test_nested_recorders_and_their_absence():
    outer, inner = Recorder(), Recorder()
    with recording(outer):
        with recording(inner):
            mt.ones(1) + 1
            with not_recording(inner):
                mt.ones(1) + 1
            with not_recording():
                mt.ones(1) + 1
        mt.ones(1) + 1
    assert (len(outer.calls), len(inner.calls)) == (3, 1)


def test_other_threads_are_not_recorded():
    import threading

    r = Recorder()
    with recording(r):
        t = threading.Thread(target=here)
        t.start()
        t.join()
    assert r.calls == []


def test_text_of_a_program():
    builder = ProgramBuilder()
    x = builder.input(ShapeDtype((3,), F64))
    c = builder.constant(np.ones(3), ShapeDtype((3,), F64))
    (y,) = builder.add(OPS["add"], (x, c), {}, [ShapeDtype((3,), F64)], origin="softmax")
    (z,) = builder.add(OPS["sum"], (y,), {"axis": (0,), "keepdims": False}, [ShapeDtype((), F64)])
    text = str(builder.build([z]))
    assert "program(%0: float64[3]):" in text
    assert "%1 = constant" in text
    assert "%2 = add(%0, %1)" in text
    assert "# softmax" in text
    assert "%3 = sum(%2, axis=(0,), keepdims=False)" in text
    assert text.endswith("return %3")
    assert site_text(None) == "an unknown line"
