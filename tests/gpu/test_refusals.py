"""Operands that do not fit are refused on a GPU as on a CPU: kernels and libraries would read what is not theirs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import meshtape as mt

nn = mt.nn
KEY = np.asarray(mt.random.key(0, device="cpu"))


def short(fn: Any) -> Any:
    """The function of operands in bfloat16."""
    return lambda *xs: fn(*(x.astype(mt.bfloat16) if x.dtype == np.float32 else x for x in xs))


def attended(*arrays: Any) -> Any:
    return nn.scaled_dot_product_attention(*arrays[:3], mask=arrays[3] if len(arrays) > 3 else None)


HEADS = [(2, 5, 8), (2, 6, 8), (2, 6, 8)]
CALLS: dict[str, tuple[Any, list[Any]]] = {
    "matmul": (mt.matmul, [(5, 4), (4, 3)]),
    "stacks": (lambda a, b: a @ b, [(2, 5, 4), (2, 4, 3)]),
    "a matrix and a vector": (lambda a, b: a @ b, [(5, 4), (4,)]),
    "a vector and a matrix": (short(lambda a, b: a @ b), [(4,), (4, 3)]),
    "two dtypes": (lambda a, b: a.astype(np.float64) @ b, [(5, 4), (4, 3)]),
    "dot": (mt.dot, [(5, 4), (4, 3)]),
    "vdot": (mt.vdot, [(5,), (5,)]),
    "tensordot": (lambda a, b: mt.tensordot(a, b, 1), [(5, 4), (4, 3)]),
    "float8_matmul": (nn.float8_matmul, [(16, 32), (32, 16)]),
    "compiled": (mt.compile(lambda a, b: a @ b), [(5, 4), (4, 3)]),
    "layer_norm": (lambda x, w, b: nn.layer_norm(x, 4, w, b), [(5, 4), (4,), (4,)]),
    "add_rms_norm": (lambda x, r, w: nn.add_rms_norm(x, r, 4, w), [(5, 4), (5, 4), (4,)]),
    "batch_norm": (lambda *a: nn.batch_norm(*a, training=True), [(5, 4, 3), (4,), (4,), (4,), (4,)]),
    "group_norm": (lambda x, w, b: nn.group_norm(x, 2, w, b), [(5, 4, 3), (4,), (4,)]),
    "conv": (nn.conv2d, [(2, 4, 6, 6), (3, 4, 2, 2)]),
    "cross_entropy": (nn.cross_entropy, [(5, 3), np.zeros(5, int)]),
    "linear_cross_entropy": (nn.linear_cross_entropy, [(5, 4), (4, 7), np.zeros(5, int)]),
    "softmax": (lambda x, m: nn.softmax(x, where=m), [(5, 4), np.ones((5, 4), bool)]),
    "rotary": (nn.rotary_embedding, [(5, 4), (5, 2), (5, 2)]),
    "attention": (attended, HEADS),
    "attention of short floats": (short(attended), HEADS),
    "attention with a mask": (short(attended), [*HEADS, np.ones((2, 5, 6), bool)]),
    "experts": (nn.experts, [(5, 4), np.zeros((5, 2), int), (5, 2), (3, 4, 6), (3, 4, 6), (3, 6, 4)]),
    "swiglu": (nn.swiglu, [(5, 4), (5, 4)]),
    "dropout_add": (lambda x, y, k: nn.dropout_add(x, y, 0.5, key=k), [(5, 4), (5, 4), KEY]),
    "uniform": (lambda k: mt.random.uniform(k, (3,)), [KEY]),
    "choice": (lambda k, p: mt.random.choice(k, 5, (3,), p=p), [KEY, (5,)]),
    "set": (lambda x, v: x.at[1:3].set(v), [(5, 4), (2, 4)]),
    "add at": (lambda x, v: x.at[[0, 1]].add(v), [(5, 4), (2, 4)]),
    "where": (mt.where, [np.ones((5, 4), bool), (5, 4), (5, 4)]),
    "add": (mt.add, [(5, 4), (5, 4)]),
    "large": (mt.add, [(1024, 1100), (1024, 1100)]),
    "concat": (lambda a, b: mt.concat([a, b]), [(5, 4), (3, 4)]),
    "mse_loss": (nn.mse_loss, [(5, 4), (5, 4)]),
}


def variants(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for i, n in enumerate(shape):
        yield from ((*shape[:i], m, *shape[i + 1 :]) for m in (n + 1, n - 1) if m)
    yield from ((2, *shape), ()) if not shape else ((2, *shape), shape[1:], shape[:-1], ())


@pytest.mark.parametrize("name", CALLS)
def test_operands_that_do_not_fit_are_refused_as_on_a_cpu(name: str) -> None:
    fn, operands = CALLS[name]
    hosts = [a if isinstance(a, np.ndarray) else np.full(a, 0.5, np.float32) for a in operands]
    fn(*map(mt.asarray, hosts))
    refused = 0
    for i, host in enumerate(hosts):
        for shape in variants(host.shape):
            changed = [*hosts[:i], np.resize(host, shape), *hosts[i + 1 :]]
            try:
                with mt.use_device("cpu"):
                    fn(*map(mt.asarray, changed))
            except mt.errors.MeshtapeError as e:
                refused += 1
                with pytest.raises(type(e)):
                    fn(*map(mt.asarray, changed))
    assert refused
