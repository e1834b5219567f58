"""Elementwise chains as one CUDA kernel each, which is generated.

For each chain, and for each way in which its operands lie in memory, a kernel is written, compiled once (CuPy keeps it
on disk) and started on the current stream. Operands whose elements follow each other, all or along the last dimension,
are read in vectors where their addresses allow it; others through their strides, so that broadcasting and transposition
cost no copy. Offsets have 64 bits.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ..core.array import Array
from ..core.devices import use_device
from ..core.dispatch import apply, aval, wrap
from ..core.op import ShapeDtype, not_recording, op_named, recording
from ..core.program import Const, Entry, FusedRun, Program
from ..kernels import launch
from . import cuda_codegen as code
from .layouts import FULL, HELD, LINE, ONE, STRIDED, Layout, layout_of

THREADS = 256
BLOCKS_EACH = 16
"""Blocks for each multiprocessor: enough to hide the latency of memory, few enough that starting them costs nothing."""


def lanes_of(group: FusedRun, program: Program) -> int:
    """Elements that a thread has in hand at once: 16 bytes of floats of two."""
    return 8 if min(program.avals[v].dtype.itemsize for v in (*group.inputs, *group.outputs)) <= 2 else 4


def source(
    group: FusedRun, program: Program, kinds: Sequence[str], ndim: int = 1, small: bool = True, count: int = 1
) -> str:
    """CUDA C++ of the kernel ``fused`` for operands of these layouts, beside a result of ``ndim`` dimensions whose
    elements are ``small`` in number where 32 bits count them: a template over whether it reads vectors.

    ``kinds`` are those of the operands, and of the results where one of these has gaps. With a ``count`` it takes so
    many sets of arrays; the second coordinate of a block says which is its own. A group that ends with a sum gives one
    of each block.
    """
    total, lanes = code.sums_all(group.entries[-1], program), lanes_of(group, program)
    types = [launch.NAMES[program.avals[v].dtype] for v in group.inputs]
    held = [code.register_type(program.avals[v].dtype) for v in group.inputs]
    results = [launch.NAMES[program.avals[v].dtype] for v in group.outputs]
    name = {v: f"x{i}" for i, v in enumerate(group.inputs)}

    body = statements(group.entries[: len(group.entries) - total], program, name)
    if total:
        body.append(f"    y0 += {name[group.entries[-1].inputs[0]]};")
    for k, v in enumerate(() if total else group.outputs):
        short = results[k] in code.SHORT_FLOATS
        body.append(f"    y{k} = {f'narrow<{results[k]}>({name[v]})' if short else f'({results[k]}){name[v]}'};")

    element = ", ".join([f"{h} x{i}" for i, h in enumerate(held)] + [f"{r}& y{k}" for k, r in enumerate(results)])
    own = [("i64", "n"), *((f"const {t}*", f"in{i}") for i, t in enumerate(types))]
    own += [(f"{r}*", f"out{k}") for k, r in enumerate(results)]
    parameters, lines = [f"{t} {v}" for t, v in own], []
    if count > 1:
        parameters = [f"{t} {v}_{j}" for j in range(count) for t, v in own]
        lines = [f"    {t} {v} = {v}_0;" for t, v in own] + ["    switch (blockIdx.y) {"]
        lines += [f"    case {j}: {' '.join(f'{v} = {v}_{j};' for _, v in own)} break;" for j in range(1, count)]
        lines.append("    }")
    placed = [i for i, how in enumerate(kinds) if how not in (FULL, ONE)]
    reads = len(types)
    kinds, ends = kinds[:reads], dict(enumerate(kinds[reads:]))  # those of the results
    if placed:
        parameters += [f"i64 n{d}" for d in range(1, ndim)] + [f"i64 s{i}_{d}" for i in placed for d in range(ndim)]
    counted = "u32" if small else "i64"  # a division of 32 bits costs a quarter of one of 64

    def load(i: int, place: str) -> str:
        return code.widened(types[i], f"in{i}[{place}]")

    def coordinates(last: str, scale: str) -> list[str]:
        """Of element ``i``, or of the first one of a vector; the last dimension has ``last`` of them."""
        out = [f"{counted} rest = ({counted})i;"] if placed else []
        for d in range(ndim - 1 if placed else 0, 0, -1):
            n = last if d == ndim - 1 else f"({counted})n{d}"
            out += [f"const i64 c{d} = (i64)(rest % {n}){scale if d == ndim - 1 else ''};", f"rest /= {n};"]
        if placed:
            out.append(f"const i64 c0 = (i64)rest{scale if ndim == 1 else ''};")
        out += [f"const i64 at{i} = " + " + ".join(f"c{d} * s{i}_{d}" for d in range(ndim)) + ";" for i in placed]
        return [" " * 8 + line for line in out]

    lines += [f"    const {held[i]} one{i} = {load(i, '0')};" for i, how in enumerate(kinds) if how == ONE]
    lines += [
        "    const i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x;",
        "    const i64 step = (i64)gridDim.x * blockDim.x;",
        "    i64 done = 0;",
        *([f"    {results[0]} sum = 0;"] if total else []),
        "    if (VECTORS) {",
        f"        done = n / {lanes} * {lanes};",
        f"        for (i64 i = first; i < n / {lanes}; i += step) {{",
    ]
    lines += ["    " + line for line in coordinates(f"(({counted})n{ndim - 1} / {lanes})", f" * {lanes}")]
    args = []
    for i, how in enumerate(kinds):
        word = f"a{i}.at[k]"
        if how in (FULL, LINE):
            place = f"i * {lanes}" if how == FULL else f"at{i}"
            lines.append(f"            const auto a{i} = vector_at<{lanes}>(in{i} + {place});")
            word = code.widened(types[i], word)
        elif how == HELD:
            lines.append(f"            const {held[i]} a{i} = {load(i, f'at{i}')};")
            word = f"a{i}"
        else:
            word = f"one{i}" if how == ONE else load(i, f"at{i} + k * s{i}_{ndim - 1}")
        args.append(word)
    stored = [] if total else list(enumerate(results))
    lines += [f"            Vector<{r}, {lanes}> r{k};" for k, r in stored]
    args += [f"r{k}.at[k]" for k, _ in stored] or ["sum"]
    lines += ["#pragma unroll", f"            for (int k = 0; k < {lanes}; ++k) element({', '.join(args)});"]
    for k, _ in stored:
        if ends.get(k, FULL) in (FULL, LINE):
            place = f"at{reads + k}" if k in ends and ends[k] == LINE else f"i * {lanes}"
            lines.append(f"            store_vector<{lanes}>(out{k} + {place}, r{k});")
        else:
            place = f"at{reads + k} + k * s{reads + k}_{ndim - 1}"
            lines += ["#pragma unroll", f"            for (int k = 0; k < {lanes}; ++k) out{k}[{place}] = r{k}.at[k];"]
    lines += ["        }", "    }", "    for (i64 i = done + first; i < n; i += step) {"]
    lines += coordinates(f"({counted})n{ndim - 1}", "")
    args = []
    for i, how in enumerate(kinds):
        args.append(f"one{i}" if how == ONE else load(i, "i" if how == FULL else f"at{i}"))
    outs = [f"out{k}[{'i' if ends.get(k, FULL) == FULL else f'at{reads + k}'}]" for k in range(len(results))]
    args += ["sum"] if total else outs
    lines += [f"        element({', '.join(args)});", "    }"]
    if total:
        lines += [f"    sum = row_sum<{THREADS}>(sum);", "    if (threadIdx.x == 0) out0[blockIdx.x] = sum;"]
    return "\n".join(
        [
            f'#include "headers/{"reduce" if total else "types"}.cuh"',
            code.PRELUDE,
            f"__device__ inline void element({element})",
            "{",
            *body,
            "}",
            "",
            "template <bool VECTORS>",
            f"__global__ void fused({', '.join(parameters)})",
            "{",
            *lines,
            "}",
            "",
        ]
    )


def statements(entries: Sequence[Entry], program: Program, name: dict[int, str]) -> list[str]:
    """The lines that compute entries of one element; ``name`` has the variables of what they read, and gets theirs."""
    lines = []
    for e in entries:
        v = e.outputs[0]
        text = code.expression(e, program, [name[a] if isinstance(a, int) else None for a in e.inputs])
        name[v] = f"v{v}"
        lines.append(f"    const {code.register_type(program.avals[v].dtype)} v{v} = {text};")
    return lines


def executable(group: FusedRun, program: Program) -> Callable[..., list[Any]]:
    """The group as a function of its input buffers that returns its output buffers, made by one kernel.

    ``into`` and ``failed`` are those of the CPU's :func:`~meshtape.autodiff.compiler.fusion.executable`; a single
    result may be written into memory with gaps. Results lie in memory as the first operand of their shape does.
    """
    members = group.members or (group,)
    first, shape, count = members[0], tuple(members[0].shape), len(members)
    reads, writes = len(first.inputs), len(first.outputs)
    sizes = [math.prod(m.shape) for m in members]
    size, lanes = max(sizes), lanes_of(first, program)
    results = [program.avals[v] for v in group.outputs]
    total = code.sums_all(first.entries[-1], program)
    each, counted = reads + writes, [np.int64(n) for n in sizes]
    files: dict[tuple[Any, ...], str] = {}

    def run(*inputs: Any, into: Sequence[Any] = (), failed: Callable[..., Exception] | None = None) -> list[Any]:
        try:
            return compute(inputs, into or [None] * len(results))
        except Exception as e:
            if failed is None:
                raise
            raise failed(e, group.entries) from e

    @functools.lru_cache(maxsize=256)
    def laid_out(*strides: tuple[int, ...] | None) -> tuple[Layout, list[Any]]:
        """The layout of operands with these strides, and how memory of each result is made; where some exists, its
        strides come behind."""
        avals = [program.avals[v] for v in (*group.inputs, *group.outputs)]
        made = [s if s is None else _lying(*a, s) for a, s in zip(avals, strides, strict=True)]
        inputs, into = made[: len(group.inputs)], made[len(group.inputs) :]
        if len(into) != 1 or into[0] is None or into[0].flags.c_contiguous:
            layout = layout_of(inputs[:reads], shape, count > 1 or total or any(o is not None for o in into))
        else:  # written in its own order
            (kind, *kinds), (step, *steps) = (found := layout_of([*into, *inputs], shape)).kinds, found.steps
            layout = found._replace(kinds=(*kinds, kind), steps=(*steps, step))
        return layout, [_in_order(*a, layout.order) for a in results]

    @functools.lru_cache(maxsize=256)
    def geometry(layout: Layout, ends: Sequence[int], device: launch.Properties) -> Any:
        """File and kernel of a launch, its blocks, and the arguments behind the addresses, which have these last
        bits."""
        kinds, placed = list(layout.kinds), any(how not in (FULL, ONE) for how in layout.kinds)
        vectors = not placed or layout.sizes[-1] % lanes == 0
        itemsizes = [program.avals[v].dtype.itemsize for v in (*first.inputs, *first.outputs)]
        for i, end in enumerate(ends):
            k, itemsize = i % each, itemsizes[i % each]
            kind, steps = (kinds[k], layout.steps[k]) if k < len(kinds) else (FULL, ())
            whole = min(16, itemsize * lanes) // itemsize  # elements that the device can load at once
            apart = end % (whole * itemsize) != 0
            if kind == FULL and apart:
                vectors = False
            elif kind == LINE and (apart or any(s % whole for s in steps[:-1])):
                kinds[k] = STRIDED
        # Elements are counted up to a step beyond the last one; places in an operand have 64 bits.
        small, more = size < 1 << 31, ()
        key = (*kinds, len(layout.sizes), small) if placed else tuple(kinds)
        if key not in files:
            text = source(first, program, kinds, len(layout.sizes) if placed else 1, small or not placed, count)
            files[key] = generated(text)
        if placed:
            steps_of = [s for own, how in zip(layout.steps, kinds, strict=True) if how not in (FULL, ONE) for s in own]
            more = tuple(map(np.int64, (*layout.sizes[1:], *steps_of)))
        blocks = _blocks(device, size, lanes if vectors or total else 1)
        return files[key], launch.named("fused", vectors), (blocks, count, 1), more

    def compute(inputs: Sequence[Any], into: Sequence[Any]) -> list[Any]:
        runner = launch.runner()
        device, address = runner.properties(), runner.address
        if size and (count > 1 or total):
            inputs = [launch.contiguous(a) for a in inputs]
        layout, made = laid_out(*[a if a is None else a.strides for a in (*inputs, *into)])
        if total:
            partial = runner.xp.empty((count, _blocks(device, size, lanes)), results[0].dtype)
            outputs = list(partial)
        else:
            outputs = [make(runner.xp) if o is None else o for o, make in zip(into, made, strict=True)]
        if size == 0:
            return outputs
        own = []
        for j in range(count):
            own += [*inputs[j * reads : (j + 1) * reads], *outputs[j * writes : (j + 1) * writes]]
        addresses = [address(a) for a in own]
        file, kernel, grid, more = geometry(layout, tuple([p % 16 for p in addresses]), device)
        given = map(np.uint64, addresses)
        arguments = [a for n in counted for a in (n, *itertools.islice(given, each))]
        runner.launch(file, kernel, grid, (THREADS, 1, 1), [*arguments, *more])
        return list(partial.sum(axis=1)) if total else outputs

    return run


def _lying(shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...]) -> np.ndarray:
    """A stand-in for an array that lies so, without its memory."""
    return np.lib.stride_tricks.as_strided(np.empty((), dtype), shape, strides)


def _in_order(shape: tuple[int, ...], dtype: np.dtype, order: tuple[int, ...]) -> Callable[[Any], Any]:
    """A function of the namespace that makes memory of a result whose dimensions follow each other in this order."""
    if len(order) < 2 or len(order) != len(shape) or order == tuple(range(len(order))):
        return lambda xp: xp.empty(shape, dtype)
    turned, axes = [shape[d] for d in order], np.argsort(order).tolist()
    return lambda xp: xp.empty(turned, dtype).transpose(axes)


def _blocks(device: launch.Properties, size: int, each: int) -> int:
    return max(1, min(-(-size // (THREADS * each)), device.multiprocessors * BLOCKS_EACH))


def generated(text: str) -> str:
    """The name of a file with this text."""
    file = f"fused_{hashlib.sha256(text.encode()).hexdigest()[:24]}.cu"
    launch.GENERATED[file] = text
    return file


MOST_COPIES = 160
"""Copies of one launch: each takes 24 bytes of the 4096 that the parameters of a kernel have."""

FEW_BYTES = 1 << 16
"""Copies of no more bytes are one launch of words of any size: they take less than a second launch."""


def copy_all(targets: Sequence[Any], sources: Sequence[Any]) -> None:
    """``target[...] = source`` for each pair, of one shape and dtype: one launch for all that consist of words of one
    size. Targets are without gaps, and no source lies in the memory of a target."""
    runner = launch.runner()
    copies = []
    for to, source in zip(targets, sources, strict=True):
        if not isinstance(source, runner.xp.ndarray) or source.device != to.device or not source.flags.c_contiguous:
            to[...] = source
        elif to.nbytes:
            copies.append((to.nbytes, runner.address(source), runner.address(to)))
    least = math.gcd(8, *(x for copy in copies for x in copy))
    few = sum(n for n, _, _ in copies) <= FEW_BYTES
    words: dict[int, list[tuple[int, int, int]]] = {}
    for n, *places in copies:
        word = least if few else math.gcd(8, n, *places)
        words.setdefault(word, []).append((n // word, *places))
    for word, alike in words.items():
        for i in range(0, len(alike), MOST_COPIES):
            some = alike[i : i + MOST_COPIES]
            vectors = all(p % 16 == 0 for _, *places in some for p in places)
            file, lanes = _copying(word, len(some))
            blocks = _blocks(runner.properties(), max(n for n, _, _ in some), lanes if vectors else 1)
            columns = map(np.array, zip(*some, strict=True), (np.int64, np.uint64, np.uint64))
            arguments = [x for copy in zip(*columns, strict=True) for x in copy]
            kernel = file, launch.named("fused", vectors)
            runner.launch(*kernel, (blocks, len(some), 1), (THREADS, 1, 1), arguments)


@functools.cache
def _copying(word: int, count: int) -> tuple[str, int]:
    """The file of a kernel that copies so many arrays of words of so many bytes, and how many words at once."""
    aval = ShapeDtype((2,), np.dtype(f"i{word}"))
    entry = Entry(op_named("positive"), (0,), (1,), {})
    program = Program((0,), (entry,), (1,), {0: aval, 1: aval})
    run = FusedRun((entry,), (0,), (1,), aval.shape)
    return generated(source(run, program, (FULL,), count=count)), lanes_of(run, program)


# ----- functions of Arrays as one launch ------------------------------------------------------------------------------


def _reads(e: Entry) -> list[int]:
    return [v for v in e.inputs if isinstance(v, int)]


class _Calls:
    """The calls of ops on arrays of one element, as the entries of a program whose first inputs are these arrays."""

    def __init__(self, args: Sequence[Any]) -> None:
        self.held = list(args)  # so that no other array gets the address of one
        self.names = {id(a): i for i, a in enumerate(args) if isinstance(a, np.ndarray)}
        self.entries: list[Entry] = []
        self.dtypes: dict[int, np.dtype] = {}

    def watches(self, x: Array) -> bool:
        return False

    def record(self, op: Any, args: Any, bufs: Sequence[Any], outs: Sequence[Array], params: Any) -> None:
        out = outs[0]._buf
        self.held += [*bufs, out]
        if op.name == "full_like" or id(out) in self.names:  # a constant; the operand itself
            return
        found = [self.names.get(id(b)) for b in bufs]
        numbers = [Const(b.item() if hasattr(b, "dtype") else b) for b in bufs]
        inputs = tuple(n if v is None else v for v, n in zip(found, numbers, strict=True))
        name = self.names[id(out)] = len(self.held)
        self.dtypes[name] = out.dtype
        self.entries.append(Entry(op, inputs, (name,) * len(outs), params))

    def needed(self, outputs: Sequence[int | None]) -> list[Entry]:
        """The entries that these come from, in order."""
        wanted, out = set(outputs), []
        for e in reversed(self.entries):
            if e.outputs[0] in wanted:
                wanted.update(_reads(e))
                out.append(e)
        return out[::-1]


def _traced(fn: Callable[..., Any], args: Sequence[Any], value: int) -> tuple[Any, ...]:
    """Entries and dtypes of the calls that ``fn`` makes, their inputs named by place, and the names of its results."""
    shape = (1,) * max([1, *(len(a.shape) for a in args if type(a) is ShapeDtype)])
    held = [np.full(shape, value, a.dtype) if type(a) is ShapeDtype else a for a in args]
    calls = _Calls(held)
    with use_device("cpu"), not_recording(), recording(calls), np.errstate(all="ignore"):
        outs = fn(*[wrap(a) if isinstance(a, np.ndarray) else a for a in held])
    single = not isinstance(outs, tuple | list)
    names = [
        None if o is None else calls.names.get(id(getattr(o, "_buf", o)), -1) for o in ([outs] if single else outs)
    ]
    return calls.needed(names), calls.dtypes, names, single


def _kernel_of(fn: Callable[..., Any], args: Sequence[Any], least: int) -> Callable[..., Any] | None:
    try:
        entries, dtypes, names, single = found = _traced(fn, args, 1)
        same = repr(_traced(fn, args, 2)) == repr(found)  # else a constant depends on values
    except (ArithmeticError, TypeError, ValueError):  # it is raised again where the function runs by itself
        return None
    avals = dict(enumerate(args))
    for e in entries:
        shapes = [avals[v].shape for v in _reads(e)]
        avals[e.outputs[0]] = ShapeDtype(np.broadcast_shapes(*shapes), dtypes[e.outputs[0]])
    read = tuple(dict.fromkeys(v for e in entries for v in _reads(e) if v < len(args)))
    outputs = tuple(dict.fromkeys(v for v in names if v is not None))
    program = Program(read, tuple(entries), outputs, avals)
    shape = np.broadcast_shapes(*(avals[v].shape for v in read))
    if not same or len(entries) < max(least, 1) or any(v not in dtypes or avals[v].shape != shape for v in outputs):
        return None
    if not all(len(e.outputs) == 1 and _reads(e) and code.expressible(e, program) for e in entries):
        return None
    run = executable(FusedRun(program.entries, read, outputs, shape), program)

    def call(bufs: Sequence[Any], into: Sequence[Any]) -> Any:
        made = dict(zip(outputs, run(*[bufs[i] for i in read], into=into), strict=True))
        return made[names[0]] if single else tuple([made.get(v) for v in names])

    return call


NUMBERS = frozenset({bool, int, float, ml_dtypes.bfloat16})
"""Types of real numbers among the operands of a kernel: those that meet bfloat16 are of it."""


def as_one_launch(fn: Callable[..., Any], least: int = 1) -> Callable[..., Any]:
    """A function of Arrays that makes elementwise calls (``least``, or more), as a function of buffers on a GPU that is
    one launch.

    It answers NotImplemented where a call has no expression in CUDA, where a result has another shape than all operands
    together, and of what is neither a buffer nor a real number. ``into`` is memory for the results.
    """

    @functools.lru_cache(maxsize=256, typed=True)
    def ready(numbers: str, *args: Any) -> Callable[..., Any] | None:
        return _kernel_of(fn, args, least)

    def call(*bufs: Any, into: Sequence[Any] = ()) -> Any:
        array = launch.runner().xp.ndarray
        args = [aval((b.shape, b.dtype)) if isinstance(b, array) else b for b in bufs]
        numbers = [b for b in args if type(b) is not ShapeDtype]
        if not all(type(b) in NUMBERS for b in numbers):
            return NotImplemented
        run = ready(repr(numbers) if numbers else "", *args)  # 0.0, -0.0 and 0 are equal
        return NotImplemented if run is None else run(bufs, into)

    return call


def one_launch(name: str) -> Callable[..., Any]:
    """The CUDA form of an elementwise op of that name as one kernel; as it is composed, for dtypes that kernels do not
    take."""
    chain = as_one_launch(lambda *args: apply(op_named(name), args))

    def call(*bufs: Any) -> Any:
        out = chain(*bufs)
        if out is not NotImplemented:
            return out
        impl, xp = op_named(name).impl, launch.runner().xp
        return getattr(xp, impl)(*bufs) if isinstance(impl, str) else impl(xp, *bufs)

    return call
