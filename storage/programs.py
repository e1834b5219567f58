"""Program files: a traced function as JSON and its constants as safetensors, to be run by another process, another year.

A program file is a directory with ``program.json`` (see ``arrays/program_json.py`` for the format) and ``constants.safetensors``. It
is written like a checkpoint: whole or not at all.
"""

# Paths are plain texts here, as in the rest of this package.

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..arrays import tree as trees
from ..arrays._array import Array
from ..arrays._dispatch import apply, wrap
from ..arrays._op import state
from ..arrays.creation import asarray
from ..arrays.errors import CheckpointError, NotACheckpoint, ProgramError, ShapeError
from ..arrays.program import Program, last_uses, trace
from ..arrays.program_json import current, decode, encode, from_json, to_json
from . import stores
from .commit import replacing, resolve
from .safetensors import load_safetensors, save_safetensors

_DOCUMENT = "program.json"
_CONSTANTS = "constants.safetensors"


def save_program(path: str | os.PathLike[str], fn: Callable[..., Any], *args: Any, overwrite: bool = False) -> None:
    """Write the program of ``fn(*args)`` to a directory.

    Parameters
    ----------
    path
        The directory.
    fn
        A function as for :func:`meshtape.compile`, compiled or not. Arrays that it reads from around it become constants.
    args
        Trees as for ``fn``; of arrays only shapes and dtypes count, everything else is part of the program.
    overwrite
        Replace a program file that is there.

    Raises
    ------
    CheckpointExists
        When ``path`` exists and ``overwrite`` is not given.
    ProgramError
        For what has no form in a file: a parameter that belongs to one mesh, a named tuple or dataclass among arguments or
        results. Nothing is written then.

    Examples
    --------
    >>> import meshtape as mt, tempfile, os
    >>> where = os.path.join(tempfile.mkdtemp(), "double")
    >>> mt.save_program(where, lambda x: {"y": x + x}, mt.ones(2))
    >>> mt.load_program(where)(mt.asarray([1.0, 2.0]))
    {'y': Array([2., 4.], dtype=float64)}
    """
    traced = trace(fn, args)
    document, constants = to_json(traced.program)
    places = iter(traced.program.inputs)
    document["arguments"] = [_structure(a, places, f"argument {i}") for i, a in enumerate(args)]
    document["result"] = _structure(traced.result, iter(traced.program.outputs), "the result")
    text = json.dumps(document, indent=1, allow_nan=False).encode()
    target = stores.location(path)
    if stores.is_url(target):
        raise CheckpointError(f"{target}: a program is written to a local directory; copy it from there")
    with replacing(target, overwrite=overwrite, ours=_is_program) as folder:
        save_safetensors(os.path.join(folder.root, _CONSTANTS), constants)
        folder.put(_DOCUMENT, text)
        folder.settle()
        folder.commit()


def load_program(path: str | os.PathLike[str]) -> LoadedProgram:
    """The function that :func:`save_program` wrote.

    Raises
    ------
    NotACheckpoint
        When there is no program at ``path``.
    UnsupportedVersion
        When a later version of meshtape wrote it; names both versions.
    ProgramError
        When it is damaged, or names an op that does not exist here.
    """
    where = resolve(os.fspath(path))
    try:
        with open(os.path.join(where, _DOCUMENT), "rb") as f:
            document = json.load(f)
    except (FileNotFoundError, NotADirectoryError):
        raise NotACheckpoint(f"{where} holds no program: there is no {_DOCUMENT} in it") from None
    except ValueError as e:
        raise ProgramError(f"{os.path.join(where, _DOCUMENT)} is no JSON document: {e}") from e
    document = current(document)
    program = from_json(document, load_safetensors(os.path.join(where, _CONSTANTS)))
    return LoadedProgram(program, document)


class LoadedProgram:
    """A program as a function of arrays. It is differentiated, compiled and split over meshes like the code it came from.

    ``program`` is the :class:`~meshtape.arrays.program.Program`; ``print`` it to see it. Calls are made one by one: pass it to
    ``mt.compile`` to have it optimised.
    """

    def __init__(self, program: Program, document: Mapping[str, Any]) -> None:
        self.program = program
        self._arguments, self._result = document["arguments"], document["result"]
        self._constants = {v: wrap(c) for v, c in program.constants.items()}
        self._free = last_uses(program)

    def __call__(self, *args: Any) -> Any:
        """Raises :class:`ShapeError` where an argument has not the structure, shape or dtype that the program was made for."""
        if len(args) != len(self._arguments):
            raise ShapeError(f"the program takes {len(self._arguments)} argument(s), got {len(args)}")
        env = dict(self._constants)
        for i, (a, want) in enumerate(zip(args, self._arguments, strict=True)):
            self._bind(a, want, f"argument {i}", env)
        outer = state.origin
        try:
            for e, free in zip(self.program.entries, self._free, strict=True):
                state.origin = outer or e.origin
                out = apply(e.op, tuple(env[v] if isinstance(v, int) else v.value for v in e.inputs), e.params)
                env.update(zip(e.outputs, out if e.op.nout > 1 else (out,), strict=True))
                for v in free:
                    env.pop(v, None)
        finally:
            state.origin = outer
        return _build(self._result, env)

    def _bind(self, x: Any, want: Any, where: str, env: dict[int, Array]) -> None:
        kind = want["kind"]
        if kind == "array":
            x, aval = asarray(x), self.program.avals[want["variable"]]
            if x.shape != aval.shape or x.dtype != aval.dtype:
                raise ShapeError(f"{where} is {x.dtype.name}[{','.join(map(str, x.shape))}], the program takes {aval}")
            env[want["variable"]] = x
        elif kind == "static":
            value = decode(want["value"], where)
            if type(x) is not type(value) or (x != value and not x != x):
                raise ShapeError(f"{where} is {x!r}, the program was made for {value!r}")
        else:
            found = trees.flatten(x, is_leaf=lambda y: y is not x)
            names = [*want.get("keys", range(len(want["children"])))]
            if found[1].kind != kind or list(found[1].keys) != names:
                raise ShapeError(
                    f"{where} is a {found[1].kind} of {list(found[1].keys)}, the program takes a {kind} of {names}"
                )
            for key, child, wanted in zip(names, found[0], want["children"], strict=True):
                self._bind(child, wanted, f"{where}, {key}", env)

    def __repr__(self) -> str:
        return f"LoadedProgram({len(self.program.inputs)} arrays, {len(self.program.entries)} entries)"


def _is_program(path: str) -> bool:
    return os.path.isfile(os.path.join(path, _DOCUMENT))


def _structure(x: Any, variables: Any, where: str) -> Any:
    """A tree as JSON, the arrays in it by their variables."""
    if isinstance(x, Array | np.ndarray):
        return {"kind": "array", "variable": next(variables)}
    if x is None:
        return {"kind": "none", "children": []}
    children, treedef = trees.flatten(x, is_leaf=lambda y: y is not x)
    if treedef.kind == "leaf":
        return {"kind": "static", "value": encode(x, where)}
    if treedef.kind in ("namedtuple", "dataclass"):
        raise ProgramError(
            f"{where} is a {type(x).__qualname__}: its class has no form in a program file; use a dict or a tuple"
        )
    out: dict[str, Any] = {"kind": treedef.kind}
    if treedef.kind == "dict":
        lost = [k for k in treedef.keys if type(k) is not str]
        if lost:
            raise ProgramError(f"{where} has the keys {lost}: in a program file keys are texts")
        out["keys"] = list(treedef.keys)
    out["children"] = [_structure(c, variables, f"{where}, {k}") for k, c in zip(treedef.keys, children, strict=True)]
    return out


def _build(d: Any, env: Mapping[int, Array]) -> Any:
    kind = d["kind"]
    if kind == "array":
        # Of the same value, but an object of its own: writing to a result leaves arguments and constants alone.
        x = env[d["variable"]]
        out = wrap(x._buf)
        out._id = x._id
        return out
    if kind == "static":
        return decode(d["value"], "the result")
    if kind == "none":
        return None
    children = [_build(c, env) for c in d["children"]]
    return (
        dict(zip(d["keys"], children, strict=True))
        if kind == "dict"
        else tuple(children)
        if kind == "tuple"
        else children
    )


__all__ = ["LoadedProgram", "load_program", "save_program"]
