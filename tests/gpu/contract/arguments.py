"""The arguments of each launch beside the signature of its kernel, as the source has it. CUDA asks for no sizes, and
reads as many bytes as the signature says from where it is pointed to.

A launch raises where the number of its arguments is another one, or the size of a value, and where an array of CuPy's
own kernels has other elements or dimensions, or gaps that the kernel does not know of.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import function

SIZES = {
    **dict.fromkeys(("bool", "char", "signed char", "unsigned char", "int8_t", "uint8_t"), 1),
    **dict.fromkeys(("short", "unsigned short", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int", "unsigned int", "unsigned", "float", "u32"), 4),
    **dict.fromkeys(("long long", "unsigned long long", "long", "double", "i64", "u64", "size_t", "ptrdiff_t"), 8),
    "thrust::complex<float>": 8,
    "thrust::complex<double>": 16,
}


class Misfit(TypeError):
    """A launch whose arguments are not those of its kernel."""


class Parameter(NamedTuple):
    """Of a kernel: "array" of CuPy's with its dimensions and whether its elements follow each other, "indexer" with its
    dimensions, "value", or "pointer", to which words of several elements may be; and the bytes of an element, or of the
    value."""

    kind: str
    size: int = 0
    ndim: int = 0
    packed: bool = False

    def takes(self, a: Any) -> bool:
        array = isinstance(a, cupy.ndarray)
        if self.kind == "indexer":
            return type(a).__name__ == "Indexer" and a.ndim == self.ndim
        if self.kind == "array":
            fits = array and (a.itemsize, a.ndim) == (self.size, self.ndim)
            return fits and (a.flags.c_contiguous or not self.packed)
        if self.kind == "pointer":
            return a is None or array or _bytes(a) == 8
        if type(a) is int:  # which CuPy passes as eight bytes, of which the first ones are the number
            return self.size in (4, 8)
        return not array and _bytes(a) == self.size


def _bytes(a: Any) -> int:
    """Of a value that is not an array."""
    return np.dtype(a.dtype).itemsize if hasattr(a, "dtype") else 1 if isinstance(a, bool) else 8


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
    return [_parameter(p, words) for p in _split(text)]


def _parameter(text: str, words: dict[str, str]) -> Parameter:
    of = re.sub(r"\b(const|volatile|__restrict__|struct)\b|\w+\s*$", " ", text).strip()
    if m := re.fullmatch(r"CIndexer<(\d+)(?:, *\w+)?>", of):
        return Parameter("indexer", 0, int(m[1]))
    if m := re.fullmatch(r"CArray<(.+?), *(\d+), *(\w+)(?:, *\w+)?>", of):
        return Parameter("array", _size(m[1], words), int(m[2]), m[3] in ("1", "true"))
    if of.endswith("*") or text.endswith("[]"):
        return Parameter("pointer")
    return Parameter("value", _size(of, words))


def _size(of: str, words: dict[str, str]) -> int:
    of = words.get(of, of).strip()
    if m := re.fullmatch(r"Wide<(\w+)>", of):  # of short floats float
        return max(4, _size(m[1], words))
    if of not in SIZES:
        raise Misfit(f"a parameter of the type {of}")
    return SIZES[of]


class Function(function.Function):
    """A kernel that looks at what it is given, once for each kind of arguments."""

    source: str
    name: str
    kinds: set[Any]

    def look(self, args: Any) -> None:
        kind = tuple(
            (a.dtype, a.ndim, a.flags.c_contiguous)
            if isinstance(a, cupy.ndarray)
            else (type(a), getattr(a, "dtype", None), getattr(a, "ndim", 0))
            for a in args
        )
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
