"""Attention of float16 and bfloat16 on a GPU by cuDNN 9, where its frontend (``nvidia-cudnn-frontend``) is installed.

The frontend describes attention as one operation, for which cuDNN makes a kernel of these very shapes: some tenths of a
second for each new form. So calls of fewer than :data:`LEAST` queries or keys are not served. Arrays stay where they
lie: heads beside each other in memory need no copy. Both functions return None for what cuDNN does not serve; the
caller then goes another way.

Sums of the queries' cotangents in one order take cuDNN two bytes of memory for each score. Batches and heads then go to
it in parts, none of which takes more than :data:`~.convolution.WORKSPACE`.

The first call of each kind computes a small example, too, by the plain formula. Where cuDNN differs it is not used, and
a warning says so.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...backends import determinism, host_sync
from ...core.dtypes import bfloat16
from ...core.errors import BackendError
from ..geometry import ceil_div
from .convolution import ALIGNED, LARGEST, VERSIONS, WORKSPACE, Ints, library

LEAST = 512
LONGEST = 128
"""Columns of queries and values."""
DTYPES = {np.dtype(np.float16): "HALF", np.dtype(bfloat16): "BFLOAT16", np.dtype(np.float32): "FLOAT"}
EXPONENTS = {np.dtype(np.float16): 0x7C00, np.dtype(bfloat16): 0x7F80, np.dtype(np.float32): 0x7F800000}
"""The bits of an exponent, all of which are set in what is not finite."""
NEAR = 2.0**-5
"""Of the largest element of a result: how far that of cuDNN may be off in the example."""


class Side(NamedTuple):
    """An array of batches, heads, rows and columns, with the elements from one to the next along each."""

    shape: Ints
    strides: Ints
    dtype: np.dtype


class Form(NamedTuple):
    """All that a plan depends on."""

    inputs: tuple[Side, ...]  # queries, keys, values; backward also the result, its cotangent, and log-sum-exps
    results: tuple[Side, ...]  # and log-sum-exps; backward the cotangents of the first three
    scale: float
    causal: bool
    in_order: bool


class Kind(NamedTuple):
    """Forms that one example stands for."""

    dtype: np.dtype
    columns: int  # of queries and keys
    values: int  # columns of values
    is_grouped: bool
    causal: bool
    in_order: bool


@functools.cache
def frontend() -> Any:
    """NVIDIA's module; None where it or the library is absent."""
    if library() is None:
        return None
    try:
        import cudnn

        return cudnn if cudnn.backend_version() in VERSIONS else None
    except (ImportError, OSError, RuntimeError, AttributeError):  # or of another module of that name
        return None


@functools.cache
def _handle(device: int) -> tuple[Any, threading.Lock]:
    """For the current device, whose number is ``device``, with the lock of whoever uses it."""
    return frontend().create_handle(), threading.Lock()


def graph(module: Any, form: Form, **where: Any) -> tuple[Any, list[int]]:
    """A planned graph of ``module``, and the numbers of its arrays in their order."""
    types = {dtype: getattr(module.data_type, name) for dtype, name in DTYPES.items()}
    wide, own = types[np.dtype(np.float32)], types[form.inputs[0].dtype]
    made = module.pygraph(io_data_type=own, intermediate_data_type=wide, compute_data_type=wide, **where)
    names = ("q", "k", "v", "o", "dO", "stats")
    given = {
        name: made.tensor(name=name, dim=list(x.shape), stride=list(x.strides), data_type=types[x.dtype])
        for name, x in zip(names, form.inputs, strict=False)
    }
    options = {"attn_scale": form.scale, "use_causal_mask": form.causal}
    if len(given) == 3:
        found = made.sdpa(**given, **options, generate_stats=True)
    else:
        found = made.sdpa_backward(**given, **options, use_deterministic_algorithm=form.in_order)
    for out, x in zip(found, form.results, strict=True):
        out.set_output(True).set_dim(list(x.shape)).set_stride(list(x.strides)).set_data_type(types[x.dtype])
    made.validate()
    made.build_operation_graph()
    made.create_execution_plans([module.heur_mode.A])
    made.check_support()
    made.build_plans()
    return made, [x.get_uid() for x in (*given.values(), *found)]


def _divisor(n: int, least: int) -> int:
    return next((d for d in range(1, n + 1) if n % d == 0 and d >= least), n)


class Plan:
    """A form with its kernel. It runs in parts where its workspace would be too large."""

    def __init__(self, form: Form, **where: Any) -> None:
        self.made, self._uids = graph(frontend(), form, **where)
        self.workspace, self._parts = self.made.get_workspace_size(), [(0,) * len(self._uids)]
        if self.workspace <= WORKSPACE:
            return
        sides, parts = (*form.inputs, *form.results), ceil_div(self.workspace, WORKSPACE)
        batches, heads = form.inputs[1].shape[:2]
        over_batches = _divisor(batches, parts)
        over_heads = _divisor(heads, ceil_div(parts, over_batches))
        small = [x._replace(shape=(x.shape[0] // over_batches, x.shape[1] // over_heads, *x.shape[2:])) for x in sides]
        count = len(form.inputs)
        self.made, self._uids = graph(
            frontend(), form._replace(inputs=tuple(small[:count]), results=tuple(small[count:])), **where
        )
        self.workspace = self.made.get_workspace_size()
        self._parts = [
            tuple((i * x.shape[0] * x.strides[0] + j * x.shape[1] * x.strides[1]) * x.dtype.itemsize for x in small)
            for i, j in itertools.product(range(over_batches), range(over_heads))
        ]

    def run(self, cupy: Any, arrays: Sequence[Any]) -> None:
        """Launch it on the current stream. Its workspace comes from the present pool, and returns to it in the order of
        the stream."""
        workspace = cupy.cuda.alloc(self.workspace) if self.workspace else None
        handle, lock = _handle(cupy.cuda.runtime.getDevice())
        with lock:
            frontend().set_stream(handle, cupy.cuda.get_current_stream().ptr)
            for part in self._parts:
                addresses = (x.data.ptr + n for x, n in zip(arrays, part, strict=True))
                pack = dict(zip(self._uids, addresses, strict=True))
                try:
                    self.made.execute(pack, workspace.ptr if workspace else 0, handle=handle)
                except RuntimeError as e:
                    raise BackendError(f"[attention] cuDNN failed: {e}") from e


Find = Callable[[Form], Plan | None]


def _made(device: int, form: Form) -> Plan | None:
    try:
        plan = Plan(form, handle=_handle(device)[0])
    except Exception:  # of many types, by the frontend's version; there is another way for all of them
        return None
    return plan if plan.workspace <= WORKSPACE else None


@functools.lru_cache(maxsize=1024)
def _plan(device: int, form: Form) -> Plan | None:
    q, k, v, *_ = form.inputs
    kind = Kind(q.dtype, q.shape[-1], v.shape[-1], q.shape[1] > k.shape[1], form.causal, form.in_order)
    return _made(device, form) if _agrees(device, kind) else None


# ----- calls ----------------------------------------------------------------------------------------------------------


@functools.cache
def _kernels() -> tuple[Any, Any, Any]:
    """Which columns have an element that is not finite; NaN where that is so; and log-sum-exps."""
    import cupy

    elementwise = cupy.ElementwiseKernel
    return (
        cupy.ReductionKernel("T x, T mask", "bool y", "(x & mask) == mask", "a || b", "y = a", "false", "lost_columns"),
        elementwise("uint16 x, bool lost", "uint16 y", "y = lost ? 0x7fff : x", "lost_elements"),
        elementwise("float32 shift, float32 total", "float32 y", "y = shift + logf(total)", "log_sums"),
    )


def _lost(x: Any) -> Any:
    bits = np.dtype(f"u{x.itemsize}")
    return _kernels()[0](x.view(bits), bits.type(EXPONENTS[x.dtype]), axis=2, keepdims=True)


def _lose(x: Any, lost: Any) -> None:
    bits = x.view(np.uint16)
    _kernels()[1](bits, lost, bits)


def _by_group(x: Any, heads: int) -> Any:
    """With a dimension for the heads of queries that one of the keys serves."""
    return x.reshape(x.shape[0], heads, -1, *x.shape[2:])


def _laid(cupy: Any, x: Any, batches: int) -> Any:
    """``x`` with one dimension of heads, where it lies if cuDNN can read it there."""
    x = x.reshape(batches, -1, *x.shape[-2:])
    *steps, last = x.strides
    steps = [s for n, s in zip(x.shape, steps, strict=False) if n > 1]
    if last == x.itemsize and all(s > 0 and s % ALIGNED == 0 for s in (*steps, x.data.ptr)):
        return x
    return cupy.array(x, order="C")


def _alike(cupy: Any, x: Any, columns: int) -> Any:
    """A new array with the rows of ``x``, whose dimensions follow each other in memory as those of ``x`` do."""
    order = sorted(range(3), key=lambda axis: -x.strides[axis])
    out = cupy.empty((*(x.shape[axis] for axis in order), columns), x.dtype)
    return out.transpose(*(order.index(axis) for axis in range(3)), 3)


def _side(x: Any) -> Side:
    packed = (math.prod(x.shape[axis + 1 :]) for axis in range(4))
    strides = (s // x.itemsize if n > 1 else step for n, s, step in zip(x.shape, x.strides, packed, strict=True))
    return Side(x.shape, tuple(strides), x.dtype)


def _run(
    cupy: Any, find: Find, inputs: Sequence[Any], results: Sequence[Any], scale: float, causal: bool
) -> Sequence[Any] | None:
    sides = tuple(map(_side, inputs)), tuple(map(_side, results))
    plan = find(Form(*sides, scale, causal, determinism.is_deterministic()))
    if plan is None:
        return None
    plan.run(cupy, [*inputs, *results])
    return results


def _forward(cupy: Any, find: Find, q: Any, k: Any, v: Any, scale: float, causal: bool) -> Sequence[Any] | None:
    results = _alike(cupy, q, v.shape[-1]), cupy.empty((*q.shape[:3], 1), np.float32)
    return _run(cupy, find, (q, k, v), results, scale, causal)


def _backward(cupy: Any, find: Find, given: Sequence[Any], scale: float, causal: bool) -> Sequence[Any] | None:
    results = [_alike(cupy, x, x.shape[-1]) for x in given[:3]]
    return _run(cupy, find, given, results, scale, causal)


@functools.lru_cache(maxsize=256)
def _heads(q: Ints, k: Ints, v: Ints, diagonal: int | None) -> tuple[int, bool] | None:
    """Batches, and whether keys are hidden; None for shapes that are not served."""
    lead, (rows, d), (keys, e) = q[:-2], q[-2:], v[-2:]
    causal = diagonal is not None and diagonal < keys - 1
    if k[:-2] not in (lead, (*lead[:-1], 1)) or v[:-2] != k[:-2] or (causal and diagonal) or d % 8 or e % 8:
        return None
    sizes = [math.prod(s) for s in (q, k, v, (*lead, rows, e))]
    if min(rows, keys) < LEAST or max(d, e) > LONGEST or not 0 < min(sizes) <= max(sizes) <= LARGEST:
        return None
    return (lead[0] if len(lead) > 1 else 1), causal


def _served(cupy: Any, q: Any, k: Any, v: Any, diagonal: int | None) -> tuple[int, bool, Find] | None:
    if cupy is np or q.dtype not in DTYPES or q.itemsize > 2 or not q.dtype == k.dtype == v.dtype:
        return None
    found = _heads(q.shape, k.shape, v.shape, diagonal)
    if found is None or frontend() is None:
        return None
    return *found, functools.partial(_plan, cupy.cuda.runtime.getDevice())


def attention(cupy: Any, q: Any, k: Any, v: Any, scale: float, diagonal: int | None) -> Sequence[Any] | None:
    """As :data:`meshtape.arrays.nn.attention.ATTENTION`. The shift of a row is its log-sum-exp, of which the sum is 1:
    it has fewer digits than both where scores are large, some 2**-24 of the largest."""
    served = _served(cupy, q, k, v, diagonal)
    if served is None:
        return None
    batches, causal, find = served
    given = [_laid(cupy, x, batches) for x in (q, k, v)]
    found = _forward(cupy, find, *given, scale, causal)
    if found is None:
        return None
    out, sums = found
    if causal:  # a weight of zero times what is not finite is NaN
        heads = given[2].shape[1]
        _lose(_by_group(out, heads), _lost(given[2])[:, :, None])
    return out.reshape(*q.shape[:-1], v.shape[-1]), sums.reshape(q.shape[:-1]), cupy.ones(q.shape[:-1], np.float32)


def attention_backward(
    cupy: Any, g: Any, q: Any, k: Any, v: Any, out: Any, shift: Any, total: Any, scale: float, diagonal: int | None
) -> Sequence[Any] | None:
    """As :data:`meshtape.arrays.nn.attention.ATTENTION_BACKWARD`."""
    served = _served(cupy, q, k, v, diagonal)
    if served is None or not g.dtype == out.dtype == q.dtype:
        return None
    batches, causal, find = served
    sums = _kernels()[2](shift, total).reshape(batches, -1, q.shape[-2], 1)
    given = [*(_laid(cupy, x, batches) for x in (q, k, v, out, g)), sums]
    found = _backward(cupy, find, given, scale, causal)
    if found is None:
        return None
    if causal:
        heads = given[1].shape[1]
        of_q, of_k, of_g, of_rows = map(_lost, (given[0], given[1], given[4], sums))
        of_slopes = of_q | of_rows | of_g.any(axis=-1, keepdims=True)
        _lose(_by_group(found[0], heads), of_k[:, :, None])
        for x, lost in ((found[1], of_slopes), (found[2], of_g | of_rows)):
            _lose(x, _by_group(lost, heads).any(axis=2))
    return [x.reshape(like.shape) for x, like in zip(found, (q, k, v), strict=True)]


# ----- the example ----------------------------------------------------------------------------------------------------


def _formula(xp: Any, q: Any, k: Any, v: Any, g: Any, scale: float, causal: bool) -> list[Any]:
    """Result, log-sum-exps and cotangents."""
    scores = q @ k.swapaxes(-1, -2) * scale
    if causal:
        scores = xp.where(xp.tri(*scores.shape[-2:], dtype=bool), scores, -math.inf)
    most = scores.max(axis=-1, keepdims=True)
    weights = xp.exp(scores - most)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / total
    out = weights @ v
    slopes = weights * (g @ v.swapaxes(-1, -2) - (g * out).sum(axis=-1, keepdims=True)) * scale
    return [out, most + xp.log(total), slopes @ k, slopes.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ g]


def _errors(cupy: Any, device: int, kind: Kind) -> list[float]:
    """Of the largest element of each result, those of cuDNN in the example; and how far hidden keys that are NaN move
    the log-sum-exps. Empty where it does not serve them."""
    d, e, scale, rng, find = kind.columns, kind.values, 0.1, np.random.default_rng(0), functools.partial(_made, device)
    heads = 2 if kind.is_grouped else 4

    def numbers(heads: int, columns: int) -> Any:  # rows with their heads beside each other, as a decoder has them
        host = rng.standard_normal((2, LEAST + 24, heads, columns)).astype(np.float32)
        return cupy.asarray(host).astype(kind.dtype).swapaxes(1, 2)

    q, k, v, g = numbers(4, d), numbers(heads, d), numbers(heads, e), numbers(4, e)
    results = _forward(cupy, find, q, k, v, scale, kind.causal)
    slopes = results and _backward(cupy, find, [q, k, v, results[0], g, results[1]], scale, kind.causal)
    if slopes is None:
        return []
    wide = [x.astype(np.float32) for x in (q, k, v, g)]
    wide[1:3] = (cupy.repeat(x, 4 // heads, axis=1) for x in wide[1:3])
    wanted = _formula(cupy, *wide, scale, kind.causal)
    wanted[3:] = (_by_group(x, heads).sum(axis=2) for x in wanted[3:])
    found = zip((*results, *slopes), wanted, strict=True)
    errors = [float(abs(x.astype(np.float32) - y).max() / abs(y).max()) for x, y in found]
    if kind.causal:
        k[:, :, -1] = math.nan
        hidden = _forward(cupy, find, q, k, v, scale, kind.causal)
        errors.append(float(abs(hidden[1] - results[1])[:, :, :-1].max()))
    return errors


@functools.cache
def _agrees(device: int, kind: Kind) -> bool:
    """Whether cuDNN gives the formula's numbers, up to their rounding, and leaves hidden keys alone."""
    import cupy

    host_sync.note("cuDNN's attention is compared with its formula, once for each kind")
    # The present memory and stream may be those of a graph that is recorded.
    with cupy.cuda.Stream(non_blocking=True), cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc):
        try:
            errors: Any = _errors(cupy, device, kind)
        except BackendError as e:
            errors = e
    if isinstance(errors, list) and all(x <= NEAR for x in errors):  # not so of NaN
        return bool(errors)
    of = f"{kind.dtype.name}, {kind.columns} and {kind.values} columns{', causal' * kind.causal}"
    text = f"[attention] cuDNN {frontend().backend_version()} is not used ({of}), for its example is wrong"
    warnings.warn(f"{text} (by {NEAR} of the largest element is allowed): {errors}", RuntimeWarning, stacklevel=2)
    return False
