"""float8 on a GPU. CuPy has no such dtypes: an array of bytes stands for the numbers, and all but views computes in
float32, as on a CPU; products are float8's own where the device has them, with float32 sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.array import Array
from ..core.devices import Device
from ..core.dispatch import Deferred, check_devices
from ..core.dtypes import float8_e4m3fn, float8_e5m2
from ..core.op import OPS, Op, ShapeDtype
from . import cublaslt

FLOAT8 = frozenset([float8_e4m3fn, float8_e5m2])


class Float8(Deferred):
    """A buffer of float8 in the memory of a GPU. It is never written to."""

    __slots__ = ("backend", "dtype", "memory")
    host = sharding = None
    priority = -1  # what is traced, split or sparse takes the call

    def __init__(self, backend: Any, memory: Any, dtype: np.dtype) -> None:
        self.backend, self.memory, self.dtype = backend, memory, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.memory.shape

    @property
    def device(self) -> Device:
        return self.backend.device_of(self.memory)

    def concrete(self) -> np.ndarray:
        return self.backend.to_host(self.memory).view(self.dtype)

    def emit(self, op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[Any, ...]:
        check_devices(op, args)
        return self.compute(op, [a._buf if type(a) is Array else a for a in args], params)

    def compute(self, op: Op, bufs: Sequence[Any], params: Mapping[str, Any]) -> tuple[Any, ...]:
        """The results of a call on buffers of one device, of which this is one."""
        avals = tuple([ShapeDtype(tuple(b.shape), b.dtype) if hasattr(b, "dtype") else b for b in bufs])
        wanted = op.avals(avals, params)
        with self.backend.at(self.memory):
            if op.name == "float8_matmul":  # which takes these, too
                return (op.overrides["cupy"](*bufs, **params),)
            if op.name == "astype" and wanted[0].dtype == self.dtype:
                return (self,)
            if op.name == "astype" and wanted[0].dtype == np.float32:
                return (self._as(self, np.float32),)
            if op.view == "always" and wanted[0].dtype == self.dtype:
                moved = [b.memory if type(b) is Float8 else b for b in bufs]
                return (Float8(self.backend, self.backend.run(op, moved, params)[0], self.dtype),)
            if params.get("dtype") in FLOAT8:
                params = {**params, "dtype": np.dtype(np.float32)}
            if op.name == "matmul" and all(type(b) is Float8 for b in bufs):
                dtypes = bufs[0].dtype, bufs[1].dtype, np.dtype(np.float32)
                product = cublaslt.product(*(b.memory for b in bufs), float8=cublaslt.Float8(dtypes))
                if product is not None:
                    return (self._as(product, self.dtype),)
            outs = self.backend.run(op, [self._as(b, np.float32) if type(b) is Float8 else b for b in bufs], params)
            return tuple([self._as(o, w.dtype) if w.dtype in FLOAT8 else o for o, w in zip(outs, wanted, strict=True)])

    def _as(self, buf: Any, dtype: Any) -> Any:
        return OPS["astype"].impl(self.backend.xp, buf, np.dtype(dtype))
