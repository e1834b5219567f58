"""Program files: a traced function as JSON and its constants as safetensors, to be run by another process, another
year.

A program file is a directory, or a place in an object store, with ``program.json`` (see ``storage/programs/encode.py``
for the format) and ``constants.safetensors``. It is written like a checkpoint: whole or not at all. `program_document`
is the same in one JSON document, with the constants inside, to be kept among the documents of a checkpoint.

Beside the program the document says which ``file`` holds the constants and the crc32c of each (``checksums``), and ends
in one of its own: of the document without it as compact JSON with sorted keys. Documents without checksums, as older
ones are, are taken as they are.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.devices import Device, default_device
from ...arrays.core.dispatch import apply, made, wrap
from ...arrays.core.errors import (
    ArrayIndexError,
    CorruptCheckpoint,
    GradientError,
    MeshtapeError,
    NotACheckpoint,
    OutOfMemory,
    ProgramError,
    ShapeError,
)
from ...arrays.core.formatting import count, human_bytes
from ...arrays.core.op import call_beside, not_recording, state
from ...arrays.core.program import Program, last_uses, trace
from ...arrays.ops.creation import asarray
from ..base import names, strict_json
from ..base.checksums import crc32c
from ..commit.contents import PROGRAMS
from ..commit.protocol import protocol_of
from ..format import dtypes
from ..format.documents import PROGRAM, marked
from ..readers.safetensors import load_safetensors, save_safetensors
from ..stores import generations, store
from ..stores.atomic_directory import resolve, room_for
from .encode import current, decode, encode, from_json, to_json
from .memory import most_held

_CONSTANTS = "constants.safetensors"
_LITTLE = 1 << 30  # bytes that are not asked for before they are taken


def save_program(path: str | os.PathLike[str], fn: Callable[..., Any], *args: Any, overwrite: bool = False) -> None:
    """Write the program of ``fn(*args)`` to a directory or an object store, all or nothing.

    Parameters
    ----------
    path
        The directory, or a URL (``s3://``, ``gs://``, ``az://``, ``memory://``).
    fn
        A function as for :func:`meshtape.compile`, compiled or not. Arrays that it reads from around it become
        constants.
    args
        Trees as for ``fn``; of arrays only shapes and dtypes count, everything else is part of the program.
    overwrite
        Replace a program file that is there.

    Raises
    ------
    CheckpointExists
        When ``path`` exists and ``overwrite`` is not given.
    ProgramError
        For what has no form in a file: a parameter that belongs to one mesh, a named tuple or dataclass among arguments
        or results. Nothing is written then.
    StorageFull, StoreError
        There is no room for it, or the place cannot be written to.

    See Also
    --------
    program_document : a program among the documents of a checkpoint

    Examples
    --------
    >>> import meshtape as mt, tempfile, os
    >>> where = os.path.join(tempfile.mkdtemp(), "double")
    >>> mt.save_program(where, lambda x: {"y": x + x}, mt.ones(2))
    >>> mt.load_program(where)(mt.asarray([1.0, 2.0]))
    {'y': Array([2., 4.], dtype=float64)}
    """
    document, constants = _described(fn, args)
    target = store.location(path)
    store.at(target).refuse_writes()
    nbytes = 4096 + len(json.dumps(document, indent=1)) + sum(a.nbytes for a in constants.values())
    with (
        room_for(nbytes, target),
        protocol_of(target).replacing(target, overwrite=overwrite, tables=PROGRAMS) as folder,
    ):
        document["file"] = marked(_CONSTANTS, folder.suffix)
        save_safetensors(store.join(folder.root, document["file"]), constants)
        folder.put(PROGRAM, json.dumps({**document, "crc32c": _sum_of(document)}, indent=1, allow_nan=False).encode())
        folder.settle()
        folder.commit()


def program_document(fn: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """The program of ``fn(*args)`` as one JSON document, its constants inside: for ``save(..., documents=...)``.

    So a checkpoint carries the function that its arrays are for, under its own checksums, and `merge`, `convert` and
    `reshard` take it along. Let the arrays of the checkpoint be arguments of ``fn``, so that they are not stored twice.

    Parameters
    ----------
    fn, args
        As for `save_program`.

    Raises
    ------
    ProgramError
        As `save_program`.

    Examples
    --------
    >>> import meshtape as mt, tempfile, os
    >>> where = os.path.join(tempfile.mkdtemp(), "ckpt")
    >>> params = {"w": mt.ones((2, 3))}
    >>> forward = program_document(lambda p, x: x @ p["w"], params, mt.ones(2))
    >>> _ = mt.save(where, params, documents={"forward": forward})
    >>> run = mt.load_program(mt.open_checkpoint(where).documents["forward"])
    >>> run(mt.load(where), mt.asarray([1.0, 2.0]))
    Array([3., 3., 3.], dtype=float64)
    """
    document, constants = _described(fn, args)
    document["values"] = {
        name: {"dtype": a.dtype.name, "shape": list(a.shape), "base64": base64.b64encode(_bytes(a)).decode()}
        for name, a in constants.items()
    }
    return {**document, "crc32c": _sum_of(document)}


@generations.once_more
@generations.one()
def load_program(source: str | os.PathLike[str] | Mapping[str, Any]) -> LoadedProgram:
    """The function that `save_program` wrote, or that a document of `program_document` holds.

    Parameters
    ----------
    source
        The path or URL of a program file; or a document, as ``open_checkpoint(path).documents["forward"]`` gives it.

    Raises
    ------
    NotACheckpoint
        When there is no program at the path.
    UnsupportedVersion
        When a later version of meshtape wrote it; names both versions.
    CorruptCheckpoint
        When it, or a constant, does not fit its checksum.
    CheckpointReplaced
        When writers replaced it again and again while it was read.
    ProgramError
        When it is damaged otherwise, or names an op that does not exist here.
    """
    if isinstance(source, Mapping):
        where, document = "the document", dict(source)
    else:
        where = resolve(store.location(source))
        names.inside(where, PROGRAM, where)
        try:
            data = store.at(where).get(PROGRAM)
        except (FileNotFoundError, NotADirectoryError):
            raise NotACheckpoint(f"{where} holds no program: there is no {PROGRAM} in it") from None
        try:
            document = strict_json.loads(data)
        except (ValueError, RecursionError) as e:
            raise ProgramError(f"{store.join(where, PROGRAM)} is no JSON document: {e}") from e
    _check_signature(document, where)
    document = current(document)
    program = from_json(document, _constants(document, where))
    try:
        _check_structures(document, program, where)
    except RecursionError:
        raise ProgramError(f"{where}: its arguments or results are nested too deeply") from None
    return LoadedProgram(program, document)


def _check_structures(document: Mapping[str, Any], program: Program, where: str) -> None:
    """Refuse arguments and a result that are none, or that do not fit the program."""

    def variables(d: Any, what: str) -> Iterator[int]:
        kind = d.get("kind") if isinstance(d, dict) else None
        if kind == "array":
            v = d.get("variable")
            if type(v) is not int or v not in program.avals:
                raise ProgramError(f"{where}: {what} is an array of the program's, and it says which one by {v!r}")
            yield v
        elif kind == "static":
            decode(d.get("value"), f"{where}: {what}")
        elif kind in ("none", "list", "tuple", "dict"):
            children, keys = d.get("children"), d.get("keys")
            named = isinstance(keys, list) and all(isinstance(k, str) for k in keys)
            if not isinstance(children, list) or (kind == "dict" and not (named and len(set(keys)) == len(children))):
                raise ProgramError(f"{where}: {what} is damaged: a {kind} has a list of children, and a dict its keys")
            for i, child in enumerate(children):
                yield from variables(child, f"{what}, {i}")
        else:
            raise ProgramError(f"{where}: {what} is of no kind that programs have: {kind!r}")

    arguments = document.get("arguments")
    if not isinstance(arguments, list):
        raise ProgramError(f"{where}: the program does not say its arguments")
    given = [v for i, a in enumerate(arguments) for v in variables(a, f"argument {i}")]
    if sorted(given) != sorted(program.inputs):
        raise ProgramError(f"{where}: the arguments are {given}, and the program takes {list(program.inputs)}")
    result = list(variables(document.get("result"), "the result"))
    if result != list(program.outputs):
        raise ProgramError(
            f"{where}: the result has the variables {result}, and the program gives {list(program.outputs)}"
        )


def _described(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The document of a program with its arguments and result, and the constants; refuses values it cannot store."""
    traced = trace(fn, args)
    document, constants = to_json(traced.program)
    places = iter(traced.program.inputs)
    document["arguments"] = [_structure(a, places, f"argument {i}") for i, a in enumerate(args)]
    document["result"] = _structure(traced.result, iter(traced.program.outputs), "the result")
    constants = {name: np.asarray(a) for name, a in constants.items()}
    if traced.own_derivatives:
        document["own_derivatives"] = True
    document["checksums"] = {name: f"{crc32c(_bytes(a)):08x}" for name, a in constants.items()}
    return document, constants


def _bytes(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a, dtypes.little(a.dtype)).reshape(-1).view(np.uint8)


def _sum_of(document: Mapping[str, Any]) -> str:
    text = json.dumps({k: v for k, v in document.items() if k != "crc32c"}, sort_keys=True, separators=(",", ":"))
    return f"{crc32c(text.encode()):08x}"


def _check_signature(document: Any, where: str) -> None:
    try:
        good = not isinstance(document, dict) or document.get("crc32c", "") in ("", _sum_of(document))
    except (ValueError, TypeError, RecursionError):
        good = False
    if not good:
        raise CorruptCheckpoint(f"{where}: the program does not fit its crc32c: it is damaged or was edited")


def _constants(document: Mapping[str, Any], where: str) -> dict[str, np.ndarray]:
    """The values of the constants, compared with their checksums."""
    if "values" in document:
        found = _embedded(document["values"], where)
    else:
        file = document.get("file", _CONSTANTS)
        if not isinstance(file, str):
            raise ProgramError(f"{where}: the file of the constants is {file!r}, not a name")
        try:
            found = load_safetensors(names.inside(where, file, where))
        except NotACheckpoint:
            raise ProgramError(f"{store.join(where, file)} is missing, which holds the constants") from None
    sums = document.get("checksums", {})
    for name, a in found.items():
        wanted = sums.get(name) if isinstance(sums, Mapping) else None
        if wanted is not None and wanted != f"{crc32c(_bytes(a)):08x}":
            raise CorruptCheckpoint(f"{where}: {name!r} does not fit its crc32c; restore the file or another")
    return found


def _embedded(values: Any, where: str) -> dict[str, np.ndarray]:
    out = {}
    try:
        for name, v in values.items():
            dtype, shape = dtypes.by_name(v["dtype"]), tuple(int(n) for n in v["shape"])
            data = base64.b64decode(v["base64"], validate=True)
            if len(data) != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{len(data)} bytes do not make {dtype} of shape {shape}")
            out[name] = np.frombuffer(data, dtypes.little(dtype)).reshape(shape).astype(dtype)
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise ProgramError(f"{where}: its constants are damaged: {e}") from None
    return out


class LoadedProgram:
    """A program as a function of arrays. It is differentiated, compiled and split over meshes like the code it came
    from.

    The derivative of a ``custom_vjp`` or ``gradient_hook`` is code, and not in a program of values: gradients of one
    with such calls are refused. Save the program of ``mt.grad(fn)`` beside it.

    ``program`` is the :class:`~meshtape.arrays.core.program.Program`; ``print`` it to see it. Calls are made one by
    one: pass it to ``mt.compile`` to have it optimised.
    """

    def __init__(self, program: Program, document: Mapping[str, Any]) -> None:
        self.program = program
        self._own_derivatives = document.get("own_derivatives") is True
        self._arguments, self._result = document["arguments"], document["result"]
        self._constants: dict[Device, dict[int, Array]] = {}
        self._free = last_uses(program)
        self._most, self._most_at = most_held(program)

    def __call__(self, *args: Any) -> Any:
        """Run the program on ``args``, trees of the structure, shapes and dtypes that it was made for.

        Raises
        ------
        ShapeError
            Where an argument is another one; says which, and what the program takes.
        ProgramError
            Where an op refuses values that no check at loading could know; names the entry. (An index out of range is
            an :class:`ArrayIndexError`; errors that an op raises in its own words keep their type and get a note with
            the entry.)
        OutOfMemory
            Where arrays of this process are given, and what the program would surely hold at once is more than this
            machine has free: nothing has run. Names the entry.
        """
        if len(args) != len(self._arguments):
            raise ShapeError(f"the program takes {len(self._arguments)} argument(s), got {len(args)}")
        return call_beside(self._run, args, {})

    def _run(self, *args: Any) -> Any:
        env = dict(self._constants_on(default_device()))
        for x in env.values() if state.recorders else ():
            made(x)  # a program is never changed: whoever traces this call may keep what it holds
        for i, (a, want) in enumerate(zip(args, self._arguments, strict=True)):
            self._bind(a, want, f"argument {i}", env)
        for r in state.recorders if self._own_derivatives else ():
            if any(map(r.watches, env.values())):
                raise GradientError(
                    "[load_program] the function had a custom_vjp or a gradient_hook, whose derivative is not in its "
                    "program: save the program of mt.grad(fn), or pass mt.stop_gradient of the arguments"
                )
            if hasattr(r, "note_call"):
                r.note_call((), True)
        self._check_memory(env)
        outer, n = state.origin, 0
        try:
            for n, (e, free) in enumerate(zip(self.program.entries, self._free, strict=True)):  # noqa: B007
                state.origin = outer or e.origin
                out = apply(e.op, tuple(env[v] if isinstance(v, int) else v.value for v in e.inputs), e.params)
                env.update(zip(e.outputs, out if e.op.nout > 1 else (out,), strict=True))
                for v in free:
                    env.pop(v, None)
        except MeshtapeError as error:
            error.add_note(f"in {self._named(n)}")
            raise
        except IndexError as error:
            raise ArrayIndexError(f"{self._named(n)}: {error}") from error
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, ZeroDivisionError) as error:
            raise ProgramError(f"{self._named(n)} cannot be computed: {error}") from error
        finally:
            state.origin = outer
        return _build(self._result, env)

    def _constants_on(self, device: Device) -> dict[int, Array]:
        if device not in self._constants:
            with not_recording():
                held = {v: wrap(c) for v, c in self.program.constants.items()}
                self._constants[device] = {v: c.to_device(device) for v, c in held.items()}
        return self._constants[device]

    def _check_memory(self, env: Mapping[int, Array]) -> None:
        # On a device or a mesh the memory is another, and while a function is traced nobody knows whose it will be.
        if self._most <= _LITTLE or not all(isinstance(x._buf, np.ndarray) for x in env.values()):
            return
        import psutil

        free = psutil.virtual_memory().available + psutil.swap_memory().free
        if self._most > free:
            raise OutOfMemory(
                f"{self._named(self._most_at)} would hold {human_bytes(self._most)} at once with what is there then, "
                f"and this machine has {human_bytes(free)} free: take a larger one, or give the program arrays of "
                "a mesh"
            )

    def _named(self, n: int) -> str:
        return f"entry {n} ({self.program.entries[n].op.name}) of the program"

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
            found, treedef = trees.flatten(x, is_leaf=lambda y: y is not x)
            keys = [*want.get("keys", range(len(want["children"])))]
            held = dict(zip(treedef.keys, found, strict=True))
            # A dict is the same in any order: a checkpoint in another format gives its arrays by name.
            if treedef.kind != kind or len(held) != len(keys) or any(k not in held for k in keys):
                raise ShapeError(
                    f"{where} is a {treedef.kind} of {list(treedef.keys)}, the program takes a {kind} of {keys}"
                )
            for key, wanted in zip(keys, want["children"], strict=True):
                self._bind(held[key], wanted, f"{where}, {key}", env)

    def __repr__(self) -> str:
        return f"LoadedProgram({count(len(self.program.inputs), 'array')}, {count(len(self.program.entries), 'entry')})"


def _structure(x: Any, variables: Any, where: str) -> Any:
    """A tree as JSON, the arrays in it by their variables."""
    if isinstance(x, Array | np.ndarray):
        return {"kind": "array", "variable": next(variables)}
    if x is None:
        return {"kind": "none", "children": []}
    children, treedef = trees.flatten(x, is_leaf=lambda y: y is not x)
    if treedef.kind == "leaf":
        return {"kind": "static", "value": encode(x, where)}
    if treedef.type is not None:
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
    if kind == "dict":
        return dict(zip(d["keys"], children, strict=True))
    return tuple(children) if kind == "tuple" else children


__all__ = ["LoadedProgram", "load_program", "program_document", "save_program"]
