"""Compilation and launch of kernels.

A kernel is a template of a ``.cu`` file in ``cuda/``, named with its arguments as in C++: ``norm_forward<true, float,
…>``. Each is compiled by NVRTC when it is first used (CuPy keeps the result on disk), for the current device, and
starts on that device's current stream. All launches go through a :class:`Runner`, so that the tests can run the same
host code and the same kernels on a machine without a GPU.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from ..core.op import Op

SOURCES = Path(__file__).parent / "cuda"
OPTIONS = ("-std=c++17",)
"""Options of NVRTC beside the architecture. Contraction into fused multiply-adds stays on: kernels with reproducible
bits use intrinsics that are never contracted."""

NAMES = {
    np.dtype(np.float32): "float",
    np.dtype(np.float64): "double",
    np.dtype(np.float16): "float16",
    np.dtype(ml_dtypes.bfloat16): "bfloat16",
    np.dtype(np.int8): "signed char",
    np.dtype(np.int16): "short",
    np.dtype(np.int32): "int",
    np.dtype(np.int64): "i64",
    np.dtype(np.uint8): "unsigned char",
    np.dtype(np.uint16): "unsigned short",
    np.dtype(np.uint32): "u32",
    np.dtype(np.uint64): "u64",
    np.dtype(np.bool_): "bool",
}
"""The name of each dtype in the kernels."""

NOTHING = np.uint64(0)
"""The address of an operand that is not there."""

Lengths = Sequence[int]
"""Of a grid in blocks, or of a block in threads, along each dimension."""


class Properties(NamedTuple):
    """The properties of a device for launch geometry."""

    multiprocessors: int
    shared_memory: int  # bytes that one block may have
    capability: int  # 90 for 9.0


class Runner(Protocol):
    """A runner of kernels. ``xp`` is the namespace of their arrays."""

    xp: Any

    def properties(self) -> Properties:
        """Of the current device."""

    def address(self, array: Any) -> int:
        """Of the first element."""

    def launch(
        self, file: str, kernel: str, grid: Lengths, block: Lengths, arguments: Sequence[Any], shared: int = 0
    ) -> None:
        """Start ``kernel`` of ``file``. Arguments are arrays of ``xp``, and NumPy scalars of the parameters' exact
        types."""


class CudaRunner:
    """Kernels on the current CUDA device and its current stream, through CuPy."""

    def __init__(self) -> None:
        import cupy

        self.xp = cupy
        self._kernels: dict[tuple[int, str, str], Any] = {}

    def properties(self) -> Properties:
        return self._properties(self.xp.cuda.runtime.getDevice())

    @functools.cache  # noqa: B019  there is one runner
    def _properties(self, device: int) -> Properties:
        runtime = self.xp.cuda.runtime
        wanted = (runtime.cudaDevAttrMultiProcessorCount, runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin)
        numbers = [runtime.deviceGetAttribute(a, device) for a in wanted]
        return Properties(*numbers, int(self.xp.cuda.Device(device).compute_capability))

    def address(self, array: Any) -> int:
        return array.data.ptr

    def launch(
        self, file: str, kernel: str, grid: Lengths, block: Lengths, arguments: Sequence[Any], shared: int = 0
    ) -> None:
        fn = self._function(file, kernel)
        # Arrays that a kernel declares count as well: some hundred bytes.
        if shared > 47 << 10 and fn.max_dynamic_shared_size_bytes < shared:
            fn.max_dynamic_shared_size_bytes = shared
        fn(tuple(grid), tuple(block), tuple(arguments), shared_mem=shared)

    def _function(self, file: str, kernel: str) -> Any:
        key = (self.xp.cuda.runtime.getDevice(), file, kernel)
        fn = self._kernels.get(key)
        if fn is None:
            module = self.xp.RawModule(code=source(file), options=OPTIONS, name_expressions=(kernel,))
            fn = self._kernels[key] = module.get_function(kernel)
        return fn


@functools.cache
def _cuda_runner() -> CudaRunner:
    return CudaRunner()


_other: Runner | None = None


def runner() -> Runner:
    """The present runner of kernels."""
    return _other or _cuda_runner()


@contextmanager
def running_on(other: Runner) -> Iterator[None]:
    """All kernels go to another runner while the context is open (for tests: it holds for all threads)."""
    global _other
    before, _other = _other, other
    try:
        yield
    finally:
        _other = before


GENERATED: dict[str, str] = {}
"""Sources generated at run time, by unique names that no file has."""

_INCLUDE = re.compile(r'^#include "([^"]+)"\n', re.MULTILINE)


@functools.cache
def source(file: str) -> str:
    """A source of this folder with its includes from this folder put in, each file once."""
    seen: set[str] = set()

    def text(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        own = (GENERATED.get(name) or (SOURCES / name).read_text()).replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda m: text(m[1]), own)

    return text(file)


# Names are asked for at every launch. True and 1 are different arguments.
@functools.lru_cache(maxsize=4096, typed=True)
def named(kernel: str, *arguments: Any) -> str:
    """The name of an instance of a template: dtypes, truths and numbers become C++.

    >>> import numpy as np
    >>> named("sum_parts", np.dtype("float32"), True, 4)
    'sum_parts<float, true, 4>'
    """
    words = []
    for a in arguments:
        if isinstance(a, np.dtype):
            words.append(NAMES[a])
        else:
            words.append(str(a).lower() if isinstance(a, bool) else str(a))
    return f"{kernel}<{', '.join(words)}>"


def wide(dtype: np.dtype) -> np.dtype:
    """The dtype that a kernel computes in: float32 for the short ones.

    >>> wide(np.dtype("float16")).name
    'float32'
    """
    return np.dtype(np.float32) if dtype.itemsize <= 2 else dtype


large_copy: Callable[[Any, Any], None] | None = None
"""``large_copy(source, target)`` of large arrays by vectors, wherever they lie; ``chains.large`` sets it."""


def write(out: Any, key: Any, value: Any) -> None:
    """``out[key] = value`` by a key without arrays, of a value in other memory, or of a number."""
    alike = type(value) is type(out) and value.dtype == out.dtype and out.dtype.itemsize <= 8
    part = out[key] if alike and out.size >= Op.large and large_copy is not None and key is not ... else out
    if not alike or large_copy is None or part.size < Op.large:
        out[key] = value
    else:
        large_copy(value if value.shape == part.shape else runner().xp.broadcast_to(value, part.shape), part)


def contiguous(array: Any, dtype: np.dtype | None = None) -> Any:
    """The array itself where its elements lie in C order without gaps, else a copy that does; in another ``dtype``, if
    one is given."""
    if dtype is not None and array.dtype != dtype:
        array = array.astype(dtype)
    if array.flags.c_contiguous:  # the namespace's own function would give an array without dimensions one
        return array
    out = runner().xp.empty(array.shape, array.dtype)
    write(out, ..., array)
    return out


def placed(array: Any) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """How an array lies in memory: its shape, strides and size of elements, and the last bits of its address."""
    return array.shape, array.strides, array.itemsize, runner().address(array) % 16


def in_step(*arrays: Any) -> list[Any]:
    """The arrays, with copies of those in which vectors of 16 bytes begin at other elements than in the last one, which
    a kernel writes."""
    addresses = [runner().address(a) for a in arrays]
    if not any(p % 16 for p in addresses):
        return list(arrays)
    n = 16 // min(a.dtype.itemsize for a in arrays)
    starts = [p // a.dtype.itemsize % n for p, a in zip(addresses, arrays, strict=True)]
    return [a if s == starts[-1] else runner().xp.array(a) for a, s in zip(arrays, starts, strict=True)]


i64 = np.int64
"""The type of every length that a kernel takes."""
