"""Rules drawn at random on checkpoints drawn at random, against the same done to a dict of arrays in memory."""

import contextlib
import math
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshtape import errors
from meshtape.storage import Rules, convert, load, merge, open_checkpoint, save, save_safetensors


def chain(draw, a):
    """A chain of steps as text, and the array that they make."""
    text = []
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["permute", "reshape", "cast", "pad", "mean", "slice"]))
        axis = draw(st.integers(0, a.ndim - 1)) if a.ndim else None
        if kind == "permute":
            axes = draw(st.permutations(range(a.ndim)))
            text.append(f"permute({list(axes)})")
            a = a.transpose(axes)
        elif kind == "reshape":
            shape = draw(st.sampled_from([[-1], [1, -1], [-1, 1], [a.shape[0], -1] if a.ndim and a.shape[0] else [-1]]))
            if 0 in a.shape:
                continue
            text.append(f"reshape({shape})")
            a = a.reshape(shape)
        elif kind == "cast":
            dtype = draw(st.sampled_from(["float32", "float64", "int32", "float16"]))
            if dtype == "int32" and (a != np.trunc(a)).any():
                continue
            text.append(f"cast({dtype})")
            a = a.astype(dtype)
        elif axis is None:
            continue
        elif kind == "pad":
            size = a.shape[axis] + draw(st.integers(0, 3))
            text.append(f"pad(axis={axis}, size={size}, value=3)")
            widths = [(0, size - n if d == axis else 0) for d, n in enumerate(a.shape)]
            a = np.pad(a, widths, constant_values=3)
        elif kind == "mean":
            if a.dtype.kind != "f" or 0 in a.shape:
                continue
            text.append(f"pad(axis={axis}, size={a.shape[axis] + 2}, fill=mean)")
            mean = a.astype("f8").mean(axis, keepdims=True).astype(a.dtype)
            a = np.concatenate([a, mean, mean], axis)
        else:
            start = draw(st.integers(0, a.shape[axis]))
            stop = draw(st.integers(start, a.shape[axis]))
            text.append(f"slice(axis={axis}, start={start}, stop={stop})")
            a = a[(slice(None),) * axis + (slice(start, stop),)]
    return text, a


@st.composite
def programs(draw):
    """(arrays, rules, the arrays that are wanted)."""
    held, want, lines = {}, {}, []
    n = draw(st.integers(1, 4))
    for i in range(n):
        shape = tuple(draw(st.lists(st.integers(0, 6), min_size=0, max_size=3)))
        dtype = draw(st.sampled_from(["float32", "float16", "int32"]))
        # Sums of few small numbers: the mean of a column is exact enough whatever the order.
        held[f"k{i}"] = (np.arange(math.prod(shape)) % 8 + i).astype(dtype).reshape(shape)
    order = draw(st.permutations(range(n)))
    for i, to in enumerate(order):
        a = held[f"k{i}"]
        what = draw(st.sampled_from(["keep", "drop", "rename", "steps", "steps", "steps", "split"]))
        if what == "keep":
            what = "rename"
            to = f"k{i}"
        else:
            to = f"t{to}"
        if what == "drop":
            lines.append(f"k{i} -> _")
        elif what == "split" and a.ndim and a.shape[-1]:
            cut = draw(st.integers(0, a.shape[-1]))
            lines.append(f"k{i} -> {to}.a, {to}.b, split(axis=-1, sizes=[{cut}, {a.shape[-1] - cut}])")
            want[f"{to}.a"], want[f"{to}.b"] = a[..., :cut], a[..., cut:]
        else:
            text, got = chain(draw, a)
            lines.append(", ".join([f"k{i} -> {to}", *text]))
            want[to] = got
    # Experts, collected in the order of numbers.
    experts = draw(st.integers(1, 11))
    columns = draw(st.integers(1, 4))
    for x in draw(st.permutations(range(experts))):
        held[f"e.{x}.w"] = np.full((2, columns), x, np.float32)
    lines.append("e.{x}.w -> experts, concat(axis=0)")
    want["experts"] = np.repeat(np.arange(experts, dtype="f4"), 2)[:, None] * np.ones((1, columns), "f4")
    return held, "\n".join(draw(st.permutations(lines))), want


def check(got, want):
    assert set(got) == set(want)
    for name, a in want.items():
        b = np.asarray(got[name])
        assert (b.shape, b.dtype) == (a.shape, a.dtype), name
        assert b.tobytes() == np.ascontiguousarray(a).tobytes(), name


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(), st.booleans(), st.sampled_from([1, 1 << 28]), st.integers(1, 3))
def test_every_reader_gives_what_numpy_gives(program, zarr, memory_limit, threads):
    held, rules, want = program
    check(Rules(rules).on_arrays(held), want)
    home = Path(tempfile.mkdtemp())
    try:
        source = home / "c" if zarr else home / "c.safetensors"
        save(source, held) if zarr else save_safetensors(source, held)
        check(load(source, rules=rules), want)
        opened = Rules(rules).on(open_checkpoint(source))
        for name, a in want.items():
            if a.ndim and a.shape[0]:
                assert np.array_equal(opened[name][-1], a[-1])
        options = {"rules": rules, "memory_limit": memory_limit, "threads": threads}
        merge(source, home / "m", **options)
        convert(source, home / "z", format="zarr", **options)
        for out in ("m", "z"):
            check(open_checkpoint(home / out), want)
    finally:
        shutil.rmtree(home)


@settings(max_examples=60, deadline=None)
@given(programs(), st.data())
def test_a_rule_with_a_letter_changed_raises_no_bare_error(program, data):
    held, rules, _ = program
    at = data.draw(st.integers(0, len(rules) - 1))
    changed = rules[:at] + data.draw(st.sampled_from("abkxw0.{}*->,()$_ ")) + rules[at + 1 :]
    with contextlib.suppress(errors.CheckpointError):  # nothing else may be raised
        got = Rules(changed).on_arrays(held)
        assert all(isinstance(a, np.ndarray) for a in got.values())


@pytest.mark.parametrize("lost", range(1, 5))
def test_no_expert_is_lost_in_silence(lost):
    held = {f"l.{i}.e.{x}.w": np.ones((1, 1), np.float32) for i in range(3) for x in range(6)}
    del held[f"l.1.e.{lost}.w"]
    for rule in ("l.{i}.e.{x}.w -> l.{i}.w, concat()", "l.{i}.e.{x}.w -> w, concat()"):
        with pytest.raises(errors.RuleMatchError, match=f"x={lost} is missing for i=1"):
            Rules(rule).on_arrays(held)
