"""Values from files that PyTorch wrote, without running anything: a reader of the pickle format that knows data and
nothing else.

``torch.save`` and ``torch.distributed.checkpoint`` describe tensors in pickles. Loading a pickle calls whatever it
names. This module never does: it walks the operations with the standard library's parser (``pickletools``), which
executes nothing, builds plain values, and puts an inert `PickledObject` in the place of every object. A name that is
not in ``KNOWN`` is refused, so that a hostile file ends in an error; where the file holds many values (``lenient``), it
is the name of an inert object like the others, which whoever asks for that value refuses. `dumps` writes what is read
so.
"""

from __future__ import annotations

import pickletools
import struct
from dataclasses import dataclass, field
from typing import Any

from ...arrays.core.errors import CheckpointDTypeError, CorruptCheckpoint
from ..base.malformed import malformed

_NAMES = {
    "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties "
    "ChunkStorageMetadata MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch._utils": "_rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter",
    "torch.storage": "UntypedStorage",
    "torch": "Size FloatStorage DoubleStorage HalfStorage BFloat16Storage LongStorage IntStorage ShortStorage "
    "CharStorage ByteStorage BoolStorage ComplexFloatStorage ComplexDoubleStorage float64 float32 float16 bfloat16 "
    "complex64 complex128 bool int64 int32 int16 int8 uint8 uint16 uint32 uint64 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu "
    # dtypes without a form here, whose tensors are named and skipped
    "complex32 float4_e2m1fn_x2 qint8 quint8 qint32 quint4x2 quint2x4 bits8 bits16 bits1x8 bits2x4 bits4x2 "
    "int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7",
    "collections": "OrderedDict",
    "pathlib": "PosixPath PurePosixPath",
    "pathlib._local": "PosixPath",
}
KNOWN = frozenset(f"{module}.{name}" for module, names in _NAMES.items() for name in names.split())
MAX_NBYTES = 1 << 30
_MAX_DEPTH = 500


@dataclass(frozen=True, eq=False, slots=True)
class PickledName:
    """A class or function that the file names."""

    name: str


@dataclass(eq=False, slots=True)
class PickledObject:
    """An object that the file asks for: its name and arguments, never the object itself."""

    name: str
    args: tuple[Any, ...]
    state: Any = field(default=None, repr=False)

    def field(self, name: str, position: int | None = None) -> Any:
        """An attribute; ``position`` is its place where the state is a tuple."""
        if isinstance(self.state, dict) and name in self.state:
            return self.state[name]
        if isinstance(self.state, tuple) and position is not None and position < len(self.state):
            return self.state[position]
        raise ValueError(f"{self.name} lacks {name!r}")


@dataclass(frozen=True, eq=False, slots=True)
class Persistent:
    """A reference to a storage."""

    id: Any


_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_WITH_ARGUMENT = (
    "BININT BININT1 BININT2 LONG1 INT LONG FLOAT BINFLOAT SHORT_BINUNICODE "
    "BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8"
)
_ARGUMENT = frozenset(_WITH_ARGUMENT.split())


def _named(name: str, lenient: bool) -> PickledName:
    if name not in KNOWN and not lenient:
        raise ValueError(f"it names {name[:100]!r}, which is no part of a checkpoint; refused")
    return PickledName(name)


def _called(fn: Any, args: Any) -> Any:
    if not isinstance(fn, PickledName) or not isinstance(args, tuple):
        raise TypeError("it calls something that is not a name")
    if fn.name == "collections.OrderedDict":
        return {_key(k): value for k, value in args[0]} if args else {}
    if fn.name == "collections.defaultdict":
        return {}
    if fn.name == "torch.Size":
        return tuple(args[0])
    return PickledObject(fn.name, args)


def _built(target: Any, state: Any) -> None:
    if isinstance(target, dict):  # attributes of an OrderedDict, such as a module's version numbers
        return
    if not isinstance(target, PickledObject):
        raise TypeError("it sets the state of something that is not an object")
    if isinstance(state, tuple) and len(state) == 2 and all(x is None or isinstance(x, dict) for x in state):
        state = {**(state[0] or {}), **(state[1] or {})}  # of __dict__ and of __slots__
    target.state = state


def _run(data: bytes, lenient: bool) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def marked() -> list[Any]:
        for at in range(len(stack) - 1, -1, -1):
            if stack[at] is _MARK:
                items = stack[at + 1 :]
                del stack[at:]
                return items
        raise ValueError("it has no mark")

    def pairs(items: list[Any]) -> dict[Any, Any]:
        return {_key(key): value for key, value in zip(items[::2], items[1::2], strict=True)}

    for op, argument, _ in pickletools.genops(data):
        name = op.name
        if name in ("PROTO", "FRAME"):
            continue
        if name == "STOP":
            (value,) = stack
            return value
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _ARGUMENT:
            stack.append(argument)
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE"):
            stack.append([] if name == "EMPTY_LIST" else {} if name == "EMPTY_DICT" else ())
        elif name in ("TUPLE", "LIST", "DICT"):
            items = marked()
            stack.append(tuple(items) if name == "TUPLE" else items if name == "LIST" else pairs(items))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            n = int(name[-1])
            if len(stack) < n:
                raise ValueError("it takes more than there is")
            stack[-n:] = [tuple(stack[-n:])]
        elif name in ("APPEND", "APPENDS"):
            items = marked() if name == "APPENDS" else [stack.pop()]
            if not isinstance(stack[-1], PickledObject):  # a class of its own is an object, whatever lies in it
                stack[-1].extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = marked() if name == "SETITEMS" else [stack.pop() for _ in range(2)][::-1]
            if not isinstance(stack[-1], PickledObject):
                stack[-1].update(pairs(items))
        elif lenient and name in ("EMPTY_SET", "ADDITEMS", "FROZENSET", "NEWOBJ_EX"):
            if name in ("ADDITEMS", "FROZENSET"):
                marked()
            if name == "NEWOBJ_EX":
                stack[-3:] = [_called(stack[-3], stack[-2])]
            elif name != "ADDITEMS":
                stack.append(PickledObject("builtins.set", ()))
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[int(argument)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[int(argument)])
        elif name == "GLOBAL":
            stack.append(_named(str(argument).replace(" ", "."), lenient))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_named(".".join((module, attribute)), lenient))
        elif name in ("REDUCE", "NEWOBJ"):
            args, fn = stack.pop(), stack.pop()
            stack.append(_called(fn, args))
        elif name == "BUILD":
            state = stack.pop()
            _built(stack[-1], state)
        elif name == "BINPERSID":
            stack.append(Persistent(stack.pop()))
        elif name == "POP":
            stack.pop()
        else:
            raise ValueError(f"it has the operation {name}, which no checkpoint needs; refused")
    raise ValueError("it ends early")


def _key(key: Any) -> Any:
    """A key of a dict: texts and numbers, and the objects that stand for one.

    A file could choose tuples in tuples, or large integers, whose hashes take for ever. They get a place of their own.
    """
    if (isinstance(key, tuple) and any(isinstance(k, tuple) for k in key)) or (isinstance(key, int) and key >> 63):
        return PickledObject(type(key).__name__, (key,))
    if isinstance(key, (str, int, float, bool, bytes, tuple, PickledObject, PickledName)) or key is None:
        return key
    raise ValueError(f"a {type(key).__name__} is the key of a dict")


def _check_walk(value: Any, most: int, lenient: bool) -> None:
    """Refuse values that stand in one another so deep, or so often, that whoever walks through them never ends."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        most -= len(level)
        if not level or most < 0:
            break
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                below += node.keys()
                below += node.values()
            elif isinstance(node, (list, tuple)):
                below += node
            elif isinstance(node, PickledObject):  # nobody looks into the state of an object that is only named
                below += (node.args, None if lenient else node.state)
            elif isinstance(node, Persistent):
                below.append(node.id)
            if len(below) > most:
                break
        level = below
    if level:
        raise ValueError(f"its values are nested deeper than {_MAX_DEPTH} levels, or stand in one another without end")


def read_values(data: bytes, where: str, lenient: bool = False) -> Any:
    """The value that a file describes; `CorruptCheckpoint` naming ``where`` for damaged or hostile data."""
    if len(data) > MAX_NBYTES:
        raise CorruptCheckpoint(f"{where}: larger than {MAX_NBYTES} bytes")
    with malformed(f"{where}: not a description of tensors"):
        value = _run(data, lenient)
        _check_walk(value, len(data) + 1_000_000, lenient)
        return value


def dumps(value: Any) -> bytes:
    """The pickle (protocol 2) of plain values and of what `read_values` gives: names, objects and persistent ids; its
    inverse.

    An object without a state is the call of its name; one with a state is made bare, and the state set.
    """
    out, memo = bytearray(b"\x80\x02"), dict[tuple[type, Any], int]()
    _write(value, out, memo)
    return bytes(out + b".")


def _write(value: Any, out: bytearray, memo: dict[tuple[type, Any], int]) -> None:
    if value is None or isinstance(value, bool):
        out += {None: b"N", True: b"\x88", False: b"\x89"}[value]
    elif isinstance(value, int):
        out += _int(value)
    elif isinstance(value, float):
        out += b"G" + struct.pack(">d", value)
    elif isinstance(value, (str, PickledName)):
        text = value if isinstance(value, str) else value.name
        if (place := memo.get((type(value), text))) is not None:
            out += b"h%c" % place if place < 256 else b"j" + place.to_bytes(4, "little")
            return
        if isinstance(value, str):
            held = value.encode("utf-8", "surrogatepass")
            out += b"X" + len(held).to_bytes(4, "little") + held
        else:
            out += "c{}\n{}\n".format(*text.rsplit(".", 1)).encode()
        place = memo[type(value), text] = len(memo)
        out += b"q%c" % place if place < 256 else b"r" + place.to_bytes(4, "little")
    elif isinstance(value, (tuple, list)):
        out += b"](" if isinstance(value, list) else b"("
        for v in value:
            _write(v, out, memo)
        out += b"e" if isinstance(value, list) else b"t"
    elif isinstance(value, dict):
        out += b"}("
        for k, v in value.items():
            _write(k, out, memo)
            _write(v, out, memo)
        out += b"u"
    elif isinstance(value, PickledObject):
        _write(PickledName(value.name), out, memo)
        _write(value.args, out, memo)
        out += b"R" if value.state is None else b"\x81"
        if value.state is not None:
            _write(value.state, out, memo)
            out += b"b"
    elif isinstance(value, Persistent):
        _write(value.id, out, memo)
        out += b"Q"
    else:
        raise CheckpointDTypeError(f"a {type(value).__name__} has no plain form in a pickle")


def _int(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K%c" % value
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    held = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(held) > 255:
        raise CheckpointDTypeError(f"an integer of {value.bit_length()} bits has no form in a pickle here")
    return b"\x8a%c" % len(held) + held
