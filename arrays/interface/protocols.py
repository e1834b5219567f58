"""Protocols by which other libraries take an ``Array``."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ..backends import host_sync
from ..backends.dlpack import export, read_only
from ..core.array import Array
from ..core.dispatch import Deferred, refuse_watched
from ..core.dtypes import FIRST_USER_DTYPE
from ..core.errors import ArgumentError
from .askers import beside_labels, refuse_applied

_API_VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12", "2025.12")

_KINDS_FOR_PANDAS = {"is_bool_indexer": "extension", "convert_to_list_like": "extension", "length_of_indexer": "index"}
"""The value of ``Array._typ`` for functions of ``pandas.core``, by their names."""


_lent: dict[int, list[Any]] = {}
"""By the identity of an Array, the buffers that consumers of its ``__cuda_array_interface__`` read. They hold the Array
alone."""


def _namespace(*, api_version: str | None = None) -> Any:
    if api_version not in (None, *_API_VERSIONS):
        raise ArgumentError(f"unknown version {api_version!r} of the array API: {', '.join(_API_VERSIONS)} are served")
    return sys.modules[__package__.rpartition(".")[0]]  # the package above, which imports this one


class Protocols:
    """Protocols of ``Array``: the array API, NumPy's protocols, DLPack, CUDA's array interface."""

    # (``__array_ufunc__`` and ``__array_function__`` come from numpy_protocol, which needs the functions that need this
    # class.)
    __array_priority__ = 1000

    def __array__(self: Array, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        refuse_watched("asarray", self)
        if isinstance(self._buf, Deferred) and self._buf.host is not None:
            refuse_applied(self)
        host = self._concrete()
        if copy is False and (not isinstance(self._buf, np.ndarray) or (dtype is not None and host.dtype != dtype)):
            raise ArgumentError(
                f"{self.dtype.name} on {self.device} to {dtype or 'host memory'} takes a copy, and copy=False forbids "
                "it"
            )
        if dtype is not None and host.dtype != np.dtype(dtype):
            return host.astype(dtype)
        if copy:
            return host.copy()
        return read_only(host)

    @property
    def __array_namespace__(self: Array) -> Callable[..., Any]:
        """The function that gives the namespace of the array API.

        xarray's indexing is not shown it, and so takes NumPy's way: its way for arrays of the standard refuses
        pointwise indices, and writes to the points of outer ones instead of to their product. Nor is it shown where
        xarray has texts or dates beside the array, which stay NumPy's."""
        if sys._getframe(1).f_code.co_name == "as_indexable" or beside_labels(sys._getframe(1)):
            raise AttributeError("__array_namespace__")
        return _namespace

    @property
    def _typ(self) -> str:
        """The kind of an object for pandas. An Array has none, except where pandas would read it as a list of labels.

        There pandas then takes its elements by ``__array__``. An Array with a history is refused."""
        refuse_watched("pandas", self)  # which goes through the elements one by one where it makes no array of them
        if getattr(self._buf, "traced", False):
            self._concrete()
        asked: Any = sys._getframe(1)
        for _ in range(2):  # the two functions of pandas in which `isinstance` asks
            asked = asked and asked.f_back
        return _KINDS_FOR_PANDAS.get(asked.f_code.co_name, "") if asked else ""

    def __dlpack__(
        self: Array,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[Any, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule for ``from_dlpack`` of another library.

        Nobody writes through it: consumers of DLPack 1.0 and later get the memory itself, marked read-only; older ones,
        whose capsules cannot say so, get a copy, unless they ask for ``copy=False`` and so promise not to write. That
        holds on a GPU too. A consumer that does not heed the mark (PyTorch 2.13) can write to the Array's memory:
        there, clone first. Views with negative strides are copied: PyTorch (2.13) aborts the process when it meets one.
        """
        refuse_watched("__dlpack__", self)
        buf = self._concrete() if isinstance(self._buf, Deferred) else self._buf
        marked = max_version is not None and max_version[0] >= 1
        if not isinstance(buf, np.ndarray):
            to_host = dl_device is not None and int(dl_device[0]) == 1  # for which CuPy makes a copy
            shared = not to_host and copy is not True and (marked or copy is False)
            if to_host:
                host_sync.note("a value is read")
            elif not shared:
                buf, copy = buf.copy(), None  # CuPy itself refuses to copy on the device
            if shared:
                host_sync.forget_range(buf)
            extra = {} if copy is None else {"copy": copy}
            return export(
                buf, read_only=shared and marked, stream=stream, max_version=max_version, dl_device=dl_device, **extra
            )
        backwards = any(s < 0 and n > 1 for s, n in zip(buf.strides, buf.shape, strict=True))
        if backwards and copy is False:
            raise BufferError(
                "a view that runs backwards through memory is exported as a copy, and copy=False forbids it"
            )
        if copy or backwards or (copy is None and not marked):
            buf, copy = buf.copy(), None
        elif marked:
            buf = buf.view()
            buf.flags.writeable = False
        elif not buf.flags.writeable:
            buf, copy = buf.copy(), None  # a capsule without the mark cannot be made of read-only memory
        return export(buf, read_only=False, stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self: Array) -> tuple[Any, int]:
        return (self._concrete() if isinstance(self._buf, Deferred) else self._buf).__dlpack_device__()

    @property
    def __cuda_array_interface__(self: Array) -> dict[str, Any]:
        """The memory on a GPU, marked read-only, for libraries that speak this older protocol; other arrays have no
        such attribute."""
        buf = self._buf
        if isinstance(buf, np.ndarray | Deferred):
            raise AttributeError(f"__cuda_array_interface__: the array is on {self.device}")  # noqa: TRY004  hasattr is how it is asked for
        if buf.dtype.num >= FIRST_USER_DTYPE:  # CuPy would take its elements for some of no bytes
            raise AttributeError(f"__cuda_array_interface__: it has no name for {buf.dtype}; use from_dlpack")
        refuse_watched("__cuda_array_interface__", self)
        # The consumer holds this Array, not the buffer: a later write must neither take the buffer nor free it.
        self._buf = buf.view()
        if (held := _lent.get(id(self))) is None:
            held = _lent[id(self)] = []
            weakref.finalize(self, _lent.pop, id(self), None)
        if not any(b.data.ptr == buf.data.ptr for b in held):
            held.append(buf)
            if len(held) in (16, 256, 4096):
                warnings.warn(
                    f"[__cuda_array_interface__] the memory of {len(held)} values of one array is kept, as consumers "
                    "of this protocol do not say when they let go: take them by DLPack, cupy.from_dlpack(x)",
                    RuntimeWarning,
                    stacklevel=2,
                )
        host_sync.forget_range(buf)
        interface = dict(self._buf.__cuda_array_interface__)
        interface["data"] = (interface["data"][0], True)
        return interface
