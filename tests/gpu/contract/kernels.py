"""CuPy's generated kernels on the CPU: each source that it would hand to NVRTC is compiled by g++, many in one library,
and kept by its content."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
HEADERS = (HERE / "device.h", HERE.parents[1] / "arrays/kernels/emulation.h")
COMPILER = shutil.which("g++")
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-w", "-fwrapv", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-gnu-unique")
UNIT = 48
"""Sources compiled together: the header costs as much as ten of them."""

Source = tuple[str, tuple[str, ...]]
"""A CUDA source, and the instances of its templates that are asked for."""

_MACROS = re.compile(r"^\s*#\s*define\s+(\w+)", re.MULTILINE)
_HELD = frozenset(_MACROS.findall("".join(h.read_text() for h in HEADERS)))  # for all sources
_KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(")


class CompilationError(RuntimeError):
    """A source that g++ refused."""


def _entries(text: str, names: Sequence[str], prefix: str) -> str:
    """A source in a namespace of its own, with what the driver asks for: each kernel, or each instance as ``t0``,
    ``t1``, …"""
    waits = re.search(r"__sync|__shfl|__ballot|__shared__|SHARED\(", text)
    own = re.search(
        r"threadIdx|blockIdx|blockDim|gridDim|\breturn;", text
    )  # a thread that returns leaves the others' elements to them
    how = "FIBERS" if waits else "EACH" if own else "ONE"
    kernels = dict.fromkeys(_KERNEL.findall(text))
    asked = [(f"t{i}", n) for i, n in enumerate(names)] or [(n, n) for n in kernels]
    text = re.sub(r"extern\s+__shared__\s+(.+?)\s+(\w+)\[\];", r"DYNAMIC_SHARED(\1, \2);", text)
    text = text.replace('extern "C"', "")
    starts = "\n".join(f"START({prefix}_{name}, {how}, {expression})" for name, expression in asked)
    macros = "\n".join(f"#undef {m}" for m in dict.fromkeys(_MACROS.findall(text)) if m not in _HELD)
    return f"namespace {prefix} {{\n{text}\n{starts}\n}}\n{macros}\n"


class Kernels:
    """The compiled kernels of a folder. Processes may share it."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.compiled = 0
        self.refused: dict[str, str] = {}
        self._found: dict[str, str] = {}
        said = "".join(h.read_text() for h in HEADERS) + " ".join(FLAGS) + Path(__file__).read_text()
        self._version = hashlib.sha256(said.encode()).hexdigest()[:12]
        cache.mkdir(parents=True, exist_ok=True)
        for index in cache.glob(f"{self._version}-*.txt"):
            self._note(index.with_suffix(".so"), index.read_text().split())

    def _note(self, library: Path, keys: Iterable[str]) -> None:
        self._found.update({key: f"{library} k{i}" for i, key in enumerate(keys)})

    @staticmethod
    def key(source: Source) -> str:
        return hashlib.sha256(repr(source).encode()).hexdigest()[:24]

    def module(self, source: Source) -> bytes:
        """The code of a module for the fake driver. A source that is not there yet is compiled alone."""
        key = self.key(source)
        if key not in self._found:
            self.compile([source])
        if key in self.refused:
            raise CompilationError(self.refused[key])
        return self._found[key].encode()

    def compile(self, sources: Iterable[Source]) -> None:
        """Compile those that are not there yet, on all processors."""
        new = {self.key(s): s for s in sources}
        new = [(k, s) for k, s in new.items() if k not in self._found and k not in self.refused]
        units = [new[i : i + UNIT] for i in range(0, len(new), UNIT)]
        if units:
            headers = self._headers()
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                list(pool.map(lambda unit: self._unit(unit, headers), units))

    def _headers(self) -> Path:
        """A folder with the header as the compiler has parsed it, and stand-ins for the toolkit's headers."""
        folder = self.cache / f"{self._version}-header"
        parsed = folder / "device.h.gch"
        if not parsed.exists():
            thrust = folder / "thrust/detail/config"
            thrust.mkdir(parents=True, exist_ok=True)
            (thrust / "namespace.h").write_text(
                "#pragma once\n#define THRUST_NAMESPACE_BEGIN namespace thrust {\n#define THRUST_NAMESPACE_END }\n"
            )
            for name in ("cuda_fp16.h", "cuda_bf16.h"):
                (folder / name).touch()
            shutil.copy(HEADERS[0], folder)
            self._run(parsed, folder, "-x", "c++-header", folder / "device.h")
        return folder

    def _run(self, target: Path, headers: Path, *arguments: str | Path) -> None:
        cupy = Path(next(iter(find_spec("cupy").submodule_search_locations))) / "_core/include"
        made = target.with_suffix(f".{os.getpid()}")
        folders = (f"-I{headers}", f"-I{HEADERS[1].parent}", f"-I{cupy}")
        done = subprocess.run([COMPILER, *FLAGS, *folders, "-o", made, *arguments], capture_output=True, text=True)
        if done.returncode:
            raise CompilationError("\n".join(s for s in done.stderr.splitlines() if "error" in s)[:2000])
        made.rename(target)

    def _unit(self, unit: Sequence[tuple[str, Source]], headers: Path) -> None:
        keys = [k for k, _ in unit]
        name = f"{self._version}-{hashlib.sha256(' '.join(keys).encode()).hexdigest()[:16]}"
        library, text = self.cache / f"{name}.so", self.cache / f"{name}.{os.getpid()}.cpp"
        parts = [_entries(*source, f"k{i}") for i, (_, source) in enumerate(unit)]
        text.write_text("\n".join(['#include "device.h"', *parts]))
        try:
            self._run(library, headers, "-shared", text)
        except CompilationError as e:
            if len(unit) == 1:
                self.refused[keys[0]] = f"{_KERNEL.findall(unit[0][1][0])[:1]}: {e}"
            else:
                half = len(unit) // 2
                self._unit(unit[:half], headers)
                self._unit(unit[half:], headers)
            return
        finally:
            text.unlink()
        index = library.with_suffix(f".{os.getpid()}")
        index.write_text(" ".join(keys))
        index.rename(library.with_suffix(".txt"))
        self._note(library, keys)
        self.compiled += len(keys)
