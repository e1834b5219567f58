"""The arguments of each launch beside the signature of its kernel, as the source has it. CUDA asks for no sizes, and
reads as many bytes as the signature says from where it is pointed to.

A launch raises where the number of its arguments is another one, or the dtype of a value or of what a pointer points
at, where an array of CuPy's own kernels has other elements or dimensions, or gaps that the kernel does not know of, and
where an address is null that is not said to be nothing.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import function

DTYPES = {
    **{
        "bool": "bool",
        "char": "int8",
        "signed char": "int8",
        "int8_t": "int8",
        "unsigned char": "uint8",
        "uint8_t": "uint8",
    },
    **{"short": "int16", "unsigned short": "uint16", "float16": "float16", "bfloat16": "bfloat16", "int": "int32"},
    **dict.fromkeys(("unsigned int", "unsigned", "u32"), "uint32"),
    **dict.fromkeys(("long long", "long", "i64", "ptrdiff_t"), "int64"),
    **dict.fromkeys(("unsigned long long", "u64", "size_t"), "uint64"),
    **{"float": "float32", "double": "float64"},
    **{"thrust::complex<float>": "complex64", "thrust::complex<double>": "complex128"},
}
ANY = "any"
"""The dtype of what ``void*`` points at."""
WORDS = ("gather_rows",)
"""Kernels that move the memory of any dtype in words of theirs."""
UNREAD = {"backward_factors<false": ("mean", "var", "g_mean", "g_var"), "fold_keys": ("data",)}
"""Pointers that an instance does not read, or not of one number, so that any address may stand there."""


class Misfit(TypeError):
    """A launch whose arguments are not those of its kernel."""


class Parameter(NamedTuple):
    """Of a kernel: "array" of CuPy's with its dimensions and whether its elements follow each other, "indexer" with its
    dimensions, "value", "pointer", or "unread" one; and the dtype of an element, or of the value."""

    kind: str
    dtype: str = ANY
    ndim: int = 0
    packed: bool = False

    def takes(self, a: Any) -> bool:
        array = isinstance(a, cupy.ndarray)
        if self.kind == "indexer":
            return type(a).__name__ == "Indexer" and a.ndim == self.ndim
        if self.kind == "array":
            fits = array and (a.dtype.name, a.ndim) == (self.dtype, self.ndim)
            return fits and (a.flags.c_contiguous or not self.packed)
        if self.kind == "unread":
            return array or _dtype(a) == "uint64"
        if self.kind == "pointer":
            fits = self.dtype in (ANY, a.dtype.name) if array else _dtype(a) == "uint64"
            return fits and not _is_null(a)
        if type(a) is int:  # which CuPy passes as eight bytes, of which the first ones are the number
            return self.dtype in ("int32", "int64", "uint32", "uint64")
        return not array and _dtype(a) == self.dtype


def _dtype(a: Any) -> str:
    """Of a value that is not an array; an address is a number, too."""
    return "uint64" if isinstance(a, cupy.cuda.MemoryPointer) else np.dtype(getattr(a, "dtype", type(a))).name


def _is_null(a: Any) -> bool:
    """Whether it is an address of no memory, though elements should be there."""
    if isinstance(a, cupy.ndarray):
        return a.data.ptr == 0 and a.size > 0
    address = a.ptr if isinstance(a, cupy.cuda.MemoryPointer) else a if type(a) is np.uint64 else 1
    return address == 0 and a is not sys.modules["meshtape.arrays.kernels.launch"].NOTHING


def _kind(a: Any) -> Any:
    """All that decides whether a parameter takes it."""
    if isinstance(a, cupy.ndarray):
        return a.dtype, a.ndim, a.flags.c_contiguous, _is_null(a)
    return type(a), getattr(a, "dtype", None), getattr(a, "ndim", 0), _is_null(a)


def _split(text: str) -> list[str]:
    """The parts between the commas that stand in no brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "(<[") - (c in ")>]")
        if c == "," and not depth:
            parts.append("")
        else:
            parts[-1] += c
    return [p.strip() for p in parts if p.strip()]


def _within(text: str, start: int) -> str:
    """What stands in the parentheses that open at ``start``."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if not depth:
            return text[start + 1 : i]
    raise Misfit("a source without an end")


@functools.cache
def signature(source: str, name: str) -> list[Parameter]:
    """The parameters of a kernel, or of an instance of a template."""
    kernel, _, arguments = name.removesuffix(">").partition("<")
    found = re.search(rf"__global__[^;{{}}]*?\b{kernel}\s*\((?!\()", source)
    if found is None:
        raise Misfit(f"no {kernel} in its source")
    before = source[: found.start()].rstrip().removesuffix('extern "C"').rstrip()
    template = before[before.rfind("template") :].partition("<")[2][:-1] if before.endswith(">") else ""
    words = dict(zip([w.split("=")[0].split()[-1] for w in _split(template)], _split(arguments), strict=False))
    words |= {w: of for of, w in re.findall(r"\btypedef ([^;]+) (\w+);", source)}
    text = _within(source, found.end() - 1)
    for macro in re.findall(r"\b[A-Z]+_PARAMETERS\b", text):
        written = re.search(rf"#define {macro}((?:.*\\\n)*.*)", source)[1]
        text = text.replace(macro, written.replace("\\\n", " "))
    unread = next((of for instance, of in UNREAD.items() if name.startswith(instance)), ())
    return [
        Parameter("unread") if p.split()[-1] in unread else _parameter(p, words, source, kernel in WORDS)
        for p in _split(text)
    ]


def _parameter(text: str, words: dict[str, str], source: str, untyped: bool) -> Parameter:
    of = re.sub(r"\b(const|volatile|__restrict__|struct)\b|\w+\s*$", " ", text).strip()
    if m := re.fullmatch(r"CIndexer<(\d+)(?:, *\w+)?>", of):
        return Parameter("indexer", ndim=int(m[1]))
    if m := re.fullmatch(r"CArray<(.+?), *(\d+), *(\w+)(?:, *\w+)?>", of):
        return Parameter("array", _of_type(m[1], words, source), int(m[2]), m[3] in ("1", "true"))
    if text.endswith("[]"):  # of pointers
        return Parameter("pointer", "uint64")
    if m := re.match(r"(.+?)\s*\*", of):
        untyped = untyped or m[1] in ("void", "uint4")  # which is a vector, to move memory by
        return Parameter("pointer", ANY if untyped else _of_type(m[1], words, source))
    return Parameter("value", _of_type(of, words, source))


def _of_type(of: str, words: dict[str, str], source: str) -> str:
    """The dtype of a type; of a struct that of its first member, as all of them are of one type."""
    of = words.get(of, of).strip()
    if m := re.fullmatch(r"Wide<(\w+)>", of):  # of short floats float
        dtype = _of_type(m[1], words, source)
        return "float32" if dtype in ("float16", "bfloat16") else dtype
    name, _, arguments = of.removesuffix(">").partition("<")
    if of not in DTYPES and (m := re.search(rf"(?:template <([^<>]+)>\s*)?struct {name} {{\s*(\w+) ", source)):
        names = [w.split()[-1] for w in _split(m[1] or "")]
        return _of_type(dict(zip(names, _split(arguments), strict=False)).get(m[2], m[2]), words, source)
    if of not in DTYPES:
        raise Misfit(f"a parameter of the type {of}")
    return DTYPES[of]


class Function(function.Function):
    """A kernel that looks at what it is given, once for each kind of arguments."""

    source: str
    name: str
    kinds: set[Any]

    def look(self, args: Any) -> None:
        kind = tuple(map(_kind, args))
        if kind in self.kinds:
            return
        wanted = signature(self.source, self.name)
        wrong = [i for i, (p, a) in enumerate(zip(wanted, args, strict=False)) if not p.takes(a)]
        if wrong or len(wanted) != len(args):
            raise Misfit(f"{self.name} takes {wanted}, got {kind}: {wrong or len(args)}")
        self.kinds.add(kind)
        Module.looked += 1

    def linear_launch(self, size: int, args: Any, *how: Any, **more: Any) -> Any:
        self.look(args)
        return super().linear_launch(size, args, *how, **more)

    def __call__(self, grid: Any, block: Any, args: Any, *how: Any, **more: Any) -> Any:
        self.look(args)
        return super().__call__(grid, block, args, *how, **more)


class Module(function.Module):
    """The kernels of a source; ``names`` are the instances of its templates, which the driver knows as t0, t1, …"""

    looked = 0
    """Kinds of arguments that were found to fit, of all kernels."""

    def __init__(self, source: str, names: Sequence[str]) -> None:
        super().__init__()
        self.source, self.names = source, {f"t{i}": name for i, name in enumerate(names)}

    def get_function(self, name: str) -> Function:
        made = Function(self, name)
        made.source, made.name, made.kinds = self.source, self.names.get(name, name), set()
        return made
