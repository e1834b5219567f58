"""CuPy on machines without a GPU, as strict as the real one where code for NumPy goes wrong on it.

Arrays lie in host memory, but nothing takes them for NumPy's: an implicit conversion, a NumPy array among the operands,
or an array of another device than the thread's current one is the error that CuPy raises. NumPy's ufuncs and functions
give way to the namespace's own by NumPy's protocols, as with CuPy. What CuPy does not have, the namespace does not have
either, where CuPy is installed. Kernels of ours and of CuPy's companion are not run here (``tests/arrays/kernels``
emulates ours): NumPy computes those ops.

NCCL's communicators pass messages between the threads of this process, by address and size, and as NCCL they wait for
each other without a limit, carry out a group of sends and receives together, and refuse two ranks on one device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import itertools
import queue
import sys
import threading
import weakref
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

SCALARS = (bool, int, float, complex, np.generic)


class _Current(threading.local):
    device = 0
    group: list[Any] | None = None


current = _Current()


class OutOfMemoryError(MemoryError):
    """CuPy's."""


class Memory:
    """The bytes that arrays of the devices take together: what is more than ``limit`` is not to be had."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.peak = limit, 0, 0
        self._held: set[int] = set()

    def take(self, a: np.ndarray) -> None:
        while isinstance(a.base, np.ndarray):
            a = a.base
        if id(a) in self._held:
            return
        if self.used + a.nbytes > self.limit:
            raise OutOfMemoryError(f"Out of memory allocating {a.nbytes} bytes")
        self._held.add(id(a))
        self.used += a.nbytes
        self.peak = max(self.peak, self.used)
        weakref.finalize(a, self._give, id(a), a.nbytes)

    def _give(self, key: int, nbytes: int) -> None:
        self._held.discard(key)
        self.used -= nbytes


memory: Memory | None = None


class DeviceArray:
    """``cupy.ndarray``: memory of one device."""

    __slots__ = ("__weakref__", "_a", "device")
    __array_priority__ = 100

    def __init__(self, a: np.ndarray, device: int) -> None:
        self._a, self.device = a, Device(device)
        if memory is not None:
            memory.take(a)

    # ----- what it tells ----------------------------------------------------------------------------------------------

    shape = property(lambda self: self._a.shape)
    dtype = property(lambda self: self._a.dtype)
    ndim = property(lambda self: self._a.ndim)
    size = property(lambda self: self._a.size)
    nbytes = property(lambda self: self._a.nbytes)
    itemsize = property(lambda self: self._a.itemsize)
    flags = property(lambda self: self._a.flags)
    strides = property(lambda self: self._a.strides)
    base = property(lambda self: None if self._a.base is None else SimpleNamespace(nbytes=self._a.base.nbytes))
    T = property(lambda self: self._like(self._a.T))
    mT = property(lambda self: self._like(self._a.mT))
    real = property(lambda self: self._like(self._a.real), lambda self, part: setattr(self._a, "real", part._a))
    imag = property(lambda self: self._like(self._a.imag), lambda self, part: setattr(self._a, "imag", part._a))
    data = property(lambda self: SimpleNamespace(ptr=self._a.__array_interface__["data"][0]))

    def _like(self, a: Any) -> DeviceArray:
        return DeviceArray(np.asarray(a), self.device.id)

    def get(self, out: np.ndarray | None = None) -> np.ndarray:
        if out is None:
            return self._a.copy()
        assert (out.shape, out.dtype, out.flags.c_contiguous) == (self.shape, self.dtype, True)
        if not self._a.flags.c_contiguous:  # CuPy copies it on the device first
            self._like(self._a.copy())
        out[...] = self._a
        return out

    def item(self, *at: int) -> Any:
        return self._a.item(*at)

    def __len__(self) -> int:
        return len(self._a)

    def __bool__(self) -> bool:
        return bool(self._a)

    def __int__(self) -> int:
        return int(self._a)

    def __index__(self) -> int:
        return self._a.__index__()

    def __float__(self) -> float:
        return float(self._a)

    def __iter__(self) -> Iterator[DeviceArray]:
        return (self[i] for i in range(len(self)))

    # ----- NumPy's protocols ------------------------------------------------------------------------------------------

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`.")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        fn = getattr(XP, ufunc.__name__, None)
        if method != "__call__" or fn is None:
            return NotImplemented
        if "out" in kwargs:
            (kwargs["out"],) = kwargs["out"]
        return fn(*inputs, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        fn = getattr(XP, func.__name__, None)
        if func.__module__ != "numpy" or fn is None:
            return NotImplemented
        return fn(*args, **kwargs)

    # ----- reading and writing ----------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> DeviceArray:
        return self._like(self._a[inside(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        self._a[inside(key)] = inside(value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        inside(self)
        return functools.partial(called, getattr(self._a, name))


def _operator(name: str) -> Any:
    method = getattr(np.ndarray, name)

    def run(self: DeviceArray, *others: Any) -> Any:
        return called(method, self, *others)

    return run


def _in_place(name: str) -> Any:
    method = getattr(np.ndarray, name)

    def run(self: DeviceArray, other: Any) -> DeviceArray:
        method(self._a, inside(other))
        return self

    return run


OPERATORS = """
    add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul and rand or ror xor rxor
    lshift rlshift rshift rrshift neg pos abs invert eq ne lt le gt ge iadd isub imul itruediv iand ior ixor
"""
for _name in OPERATORS.split():
    _is_in_place = _name[0] == "i" and _name != "invert"
    setattr(DeviceArray, f"__{_name}__", (_in_place if _is_in_place else _operator)(f"__{_name}__"))


def inside(x: Any) -> Any:
    """Operands as NumPy takes them; refuses what CuPy refuses."""
    if isinstance(x, DeviceArray):
        if x.device.id != current.device:
            raise ValueError(f"Array device must be same as the current device: {x.device.id} and {current.device}")
        return x._a
    if isinstance(x, np.ndarray) and x.ndim:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(x, tuple | list):
        return type(x)(map(inside, x)) if type(x) in (tuple, list) else x
    return x


def outside(x: Any) -> Any:
    """Results as arrays of the current device."""
    if isinstance(x, np.ndarray | np.generic):
        return DeviceArray(np.asarray(x), current.device)
    if type(x) in (tuple, list):
        return type(x)(map(outside, x))
    if isinstance(x, tuple):  # a named one, such as that of unique_all
        return type(x)(*map(outside, x))
    return x


def called(fn: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of NumPy on device arrays."""
    out = kwargs.get("out")
    found = fn(*map(inside, args), **{k: inside(v) for k, v in kwargs.items()})
    return out if out is not None else outside(found)


# ----- the namespace --------------------------------------------------------------------------------------------------


@functools.cache
def _cupy() -> Any:
    if importlib.util.find_spec("cupy") is None:
        return None
    import cupy

    return cupy


class Function(functools.partial):
    """A function of the namespace; ``at`` is that of a ufunc."""

    def at(self, out: DeviceArray, key: Any, value: Any) -> None:
        self.args[0].at(inside(out), inside(key), inside(value))


class Namespace(ModuleType):
    """``cupy``."""

    ndarray = DeviceArray

    def __init__(self, name: str = "emulated", of: Any = np) -> None:
        super().__init__(name)
        self._of = of

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)
        real = _cupy() if self._of is np else getattr(_cupy(), self.__name__.rpartition(".")[2], None)
        if real is not None and not hasattr(real, name):
            raise AttributeError(f"CuPy has no {name}")
        if isinstance(found, ModuleType):
            return Namespace(f"emulated.{name}", found)
        if isinstance(found, type) or not callable(found):
            return found
        return Function(called, found)

    def asnumpy(self, x: DeviceArray) -> np.ndarray:
        return x.get()

    def asarray(self, x: Any, dtype: Any = None, **kwargs: Any) -> DeviceArray:
        if isinstance(x, DeviceArray):
            return called(np.asarray, x, dtype)
        return outside(np.array(x, dtype))  # from the host: a copy

    def array(self, x: Any, dtype: Any = None, **kwargs: Any) -> DeviceArray:
        return called(np.array, x, dtype) if isinstance(x, DeviceArray) else outside(np.array(x, dtype))

    def argsort(self, x: DeviceArray, axis: int = -1, kind: Any = None) -> DeviceArray:
        return called(np.argsort, x, axis=axis, kind="stable")  # CuPy knows no other

    def get_default_memory_pool(self) -> Any:
        return SimpleNamespace(total_bytes=lambda: 1 << 20, used_bytes=lambda: 1 << 19, free_all_blocks=lambda: None)

    def is_available(self) -> bool:
        return True


class Device:
    """``cupy.cuda.Device``: within it, the thread's current one."""

    def __init__(self, id: int | None = None) -> None:
        self.id = current.device if id is None else id
        self._before: list[int] = []

    def __enter__(self) -> Device:
        self._before.append(current.device)
        current.device = self.id
        return self

    def __exit__(self, *exc: object) -> None:
        current.device = self._before.pop()


class Stream(contextlib.nullcontext):
    """``cupy.cuda.Stream``: nothing is put off here."""

    ptr = 0

    def __init__(self, non_blocking: bool = False) -> None:
        super().__init__(self)

    def record(self) -> Any:
        return SimpleNamespace(done=True)

    def wait_event(self, event: Any) -> None:
        """All that was before is done."""


class Nccl:
    """``cupy.cuda.nccl``."""

    available = True
    NCCL_UINT8, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_SUM = 1, 7, 8, 0

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._meetings: dict[tuple[int, ...], Any] = {}
        self.moved = 0
        """Bytes that were sent, of all communicators."""
        self.sums: list[tuple[int, int]] = []
        """Of each process in each of NCCL's own all-reduces: how many processes take part, and how many numbers."""

    def get_version(self) -> int:
        return 22700

    def get_unique_id(self) -> tuple[int, ...]:
        number = next(self._numbers)
        return tuple((number >> 7 * i & 0x7F) - (i % 2) for i in range(128))

    def groupStart(self) -> None:  # NCCL's name
        current.group = []

    def groupEnd(self) -> None:  # NCCL's name
        calls, current.group = current.group or [], None
        for send in (True, False):
            for is_send, run in calls:
                if is_send is send:
                    run()

    def NcclCommunicator(self, count: int, ident: tuple[int, ...], rank: int) -> Communicator:  # NCCL's name
        assert len(ident) == 128
        assert all(-128 <= b < 128 for b in ident)
        with self._lock:
            meeting = self._meetings.setdefault(
                ident, SimpleNamespace(barrier=threading.Barrier(count), devices={}, mail={}, terms={})
            )
        meeting.devices[rank] = current.device
        meeting.barrier.wait(120)
        if len(set(meeting.devices.values())) < count:
            raise RuntimeError("NCCL_ERROR_INVALID_USAGE: Duplicate GPU detected")
        return Communicator(self, meeting, rank)


class Communicator:
    """One rank's."""

    def __init__(self, nccl: Nccl, meeting: Any, rank: int) -> None:
        self._nccl, self._meeting, self._rank, self._closed = nccl, meeting, rank, False

    def _box(self, source: int, target: int) -> queue.Queue[bytes]:
        with self._nccl._lock:
            return self._meeting.mail.setdefault((source, target), queue.Queue())

    def send(self, pointer: int, count: int, kind: int, peer: int, stream: int) -> None:
        assert kind == Nccl.NCCL_UINT8
        assert not self._closed

        def run() -> None:
            self._nccl.moved += count
            self._box(self._rank, peer).put(ctypes.string_at(pointer, count))

        self._do(True, run)

    def recv(self, pointer: int, count: int, kind: int, peer: int, stream: int) -> None:
        assert kind == Nccl.NCCL_UINT8
        assert not self._closed

        def run() -> None:
            found = self._box(peer, self._rank).get(timeout=120)
            assert len(found) == count, "NCCL would have read other memory"
            ctypes.memmove(pointer, found, count)

        self._do(False, run)

    def allReduce(self, given: int, into: int, count: int, kind: int, op: int, stream: int) -> None:  # NCCL's name
        assert op == Nccl.NCCL_SUM
        assert not self._closed
        meeting, dtype = self._meeting, {Nccl.NCCL_FLOAT32: np.float32, Nccl.NCCL_FLOAT64: np.float64}[kind]
        self._nccl.sums.append((meeting.barrier.parties, count))
        mine = np.frombuffer(ctypes.string_at(given, count * np.dtype(dtype).itemsize), dtype)
        meeting.terms[self._rank] = mine
        meeting.barrier.wait(120)
        total = np.sum([meeting.terms[r] for r in sorted(meeting.terms, reverse=True)], axis=0, dtype=dtype)
        meeting.barrier.wait(120)  # the next one puts its terms in their places
        ctypes.memmove(into, total.ctypes.data, total.nbytes)

    @staticmethod
    def _do(send: bool, run: Any) -> None:
        if current.group is None:
            run()
        else:
            current.group.append((send, run))

    def check_async_error(self) -> int:
        return 0

    def abort(self) -> None:
        self._closed = True

    def destroy(self) -> None:
        self._closed = True


def make(count: int = 2) -> Namespace:
    """A namespace with this many devices."""
    xp = Namespace()
    xp.cuda = SimpleNamespace(
        Device=Device,
        Stream=Stream,
        get_current_stream=Stream,
        memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        alloc_pinned_memory=lambda size: bytearray(size + 512),  # at least as much
        runtime=SimpleNamespace(
            getDevice=lambda: current.device,
            getDeviceCount=lambda: count,
            memGetInfo=lambda: (1 << 20, 1 << 30),
            getDeviceProperties=lambda i: {"name": b"emulated", "uuid": bytes([i]) * 16},
        ),
        nccl=Nccl(),
    )
    return xp


COMPANION = ("erf", "gelu", "gelu_backward", "random_truncated_normal")
"""Ops that use ``cupyx``."""

XP: Any = None
"""The namespace in use: NumPy's protocols lead to it."""


def call_by_call(group: Any, program: Any) -> Any:
    """A chain of elementwise calls without the kernel that would be made of it."""

    last = {v: e for e in group.entries for v in e.inputs if isinstance(v, int) and v not in group.outputs}

    def run(*inputs: Any, into: Any = (), failed: Any = None) -> list[Any]:
        values = dict(zip(group.inputs, inputs, strict=True))
        for e in group.entries:
            args = [values[v] if isinstance(v, int) else v.value for v in e.inputs]
            try:
                values[e.outputs[0]] = e.op.bind(XP)(*args, **e.params)
            except Exception as error:
                if failed is None:
                    raise
                raise failed(error, [e]) from error
            del args
            for v in {v for v in e.inputs if isinstance(v, int) and last.get(v) is e}:
                del values[v]
        return [XP.asarray(values[v]) for v in group.outputs]

    return run


@contextlib.contextmanager
def installed(count: int = 2, limit: int | None = None) -> Iterator[Namespace]:
    """CuPy's place is taken, in this process, by the emulation with this many devices, whose memory has a limit."""
    global XP, memory
    from meshtape.arrays import OPS
    from meshtape.arrays.backends.backend import cupy_backend
    from meshtape.arrays.kernels import launch
    from meshtape.autodiff.compiler import cuda_fusion
    from meshtape.parallel.execution import devices as gpus

    _cupy()
    xp = make(count)
    cuda = ModuleType("cupy.cuda")
    vars(cuda).update(vars(xp.cuda))
    names = {"cupy": xp, "cupy.cuda": cuda, "cupyx": ModuleType("cupyx")}
    modules = {n: sys.modules.get(n) for n in names}
    # What some library had loaded lazily must not wake up meanwhile: Hypothesis looks at every module, once.
    asleep = {n: sys.modules.pop(n) for n in list(sys.modules) if n.partition(".")[0] == "cupyx"}
    before, XP, driver = XP, xp, gpus._no_driver
    sys.modules.update(names)
    gpus._no_driver = str
    by_kernels = [op for op in OPS.values() if "cupy" in op.overrides or op.name in COMPANION]
    for op in by_kernels:
        op._bound[xp.__name__] = functools.partial(called, op.numpy)
    cupy_backend.cache_clear()
    launch._cuda_runner.cache_clear()  # which knows CuPy's arrays
    chain, cuda_fusion.executable = cuda_fusion.executable, call_by_call
    memory = xp.memory = None if limit is None else Memory(limit)
    try:
        yield xp
    finally:
        memory = None
        XP, gpus._no_driver, cuda_fusion.executable = before, driver, chain
        cupy_backend.cache_clear()
        launch._cuda_runner.cache_clear()
        for op in by_kernels:
            del op._bound[xp.__name__]
        for n, m in modules.items():
            sys.modules.pop(n)
            if m is not None:
                sys.modules[n] = m
        sys.modules.update(asleep)
