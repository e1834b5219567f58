"""Random numbers on CUDA: the same bits as on a CPU, made where they are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..core.dtypes import KERNEL_FLOATS
from .geometry import MAX_GRID, ceil_div
from .launch import NAMES, contiguous, i64, named, runner

FILE = "philox.cu"
_THREADS = 256
_U32, _U64, _BOOL = (np.dtype(t) for t in (np.uint32, np.uint64, np.bool_))


def _recipe(kind: str, dtype: np.dtype) -> str:
    return kind if kind == "Bernoulli" else f"{kind}<{NAMES[dtype]}>"


def variants() -> Iterator[tuple[str, str]]:
    """File and name of every kernel that these functions may start."""
    of_floats = ((kind, KERNEL_FLOATS) for kind in ("Uniform", "Normal", "Exponential", "Gumbel"))
    for kind, dtypes in (("Bits", (_U32, _U64)), *of_floats, ("Bernoulli", (_BOOL,))):
        for d in dtypes:
            yield FILE, named("philox_fill", _recipe(kind, d), d)
    yield FILE, "fold_keys"
    for d in KERNEL_FLOATS:
        yield FILE, named("dropout", False, d)
        yield FILE, named("dropout", True, d)


def _grid(start: int, count: int, per: int) -> tuple[int, int, int]:
    blocks = ceil_div(start + count, per) - start // per
    return (min(ceil_div(blocks, _THREADS), MAX_GRID), 1, 1)


def fill(key: Any, kind: str, numbers: Mapping[str, float], out: Any, start: int, stream: int) -> None:
    """Elements ``start`` … of ``key`` into ``out`` (flat): of a kind, a recipe in the source, with its numbers."""
    count = out.shape[0]
    if not count:
        return
    per = 4 if out.dtype.itemsize == 8 else 8
    shift, scaled = np.int32(numbers.get("shift", 0)), np.bool_(numbers.get("scaled", False))
    rest = [np.float64(numbers.get(n, 0.0)) for n in ("unit", "width", "low", "below")]
    kernel = named("philox_fill", _recipe(kind, out.dtype), out.dtype)
    arguments = (contiguous(key), out, i64(start), i64(count), np.uint64(stream), shift, *rest, scaled)
    runner().launch(FILE, kernel, _grid(start, count, per), (_THREADS, 1, 1), arguments)


def words(key: Any, start: int, count: int, stream: int = 0) -> Any:
    """Words ``start`` … ``start + count - 1`` of a key."""
    out = runner().xp.empty(count, _U64)
    fill(key, "Bits", {}, out, start, stream)
    return out


def fold(key: Any, data: Any, stream: int) -> Any:
    """A key (2,) and a number, or keys (n, 1, 2) and numbers (n,), or one of either: new keys of these shapes."""
    r, given, number = runner(), hasattr(data, "dtype"), np.uint64(0)
    key = contiguous(key)
    if given:
        data = contiguous(data.view(_U64) if data.dtype.itemsize == 8 else data.astype(_U64))
    else:
        number = np.uint64(data % 2**64)
    sizes = (key.size // 2, data.size if given else 1)
    rows = max(sizes) if all(sizes) else 0
    out = r.xp.empty((rows, 1, 2) if key.ndim == 3 or (given and data.ndim) else (2,), _U64)
    if rows:
        addresses = (r.address(key), r.address(data) if given else 0, r.address(out))
        steps = i64(2 * (sizes[0] > 1)), i64(sizes[1] > 1)
        arguments = (*map(np.uint64, addresses), i64(rows), *steps, number, np.uint64(stream))
        r.launch(FILE, "fold_keys", (ceil_div(rows, _THREADS), 1, 1), (_THREADS, 1, 1), arguments)
    return out


def dropout_run(key: Any, x: Any, y: Any, out: Any, start: int, stream: int, threshold: int, keep: float) -> None:
    """``out = dropout(x) + y`` (``y`` may be None) for flat arrays that begin at element ``start`` of the whole one."""
    count = out.shape[0]
    if not count:
        return
    kernel = named("dropout", y is not None, out.dtype)
    numbers = (i64(start), i64(count), np.uint64(stream), np.uint64(threshold), np.float64(keep))
    arguments = (contiguous(key), x, x if y is None else y, out, *numbers)
    runner().launch(FILE, kernel, _grid(start, count, 8), (_THREADS, 1, 1), arguments)
