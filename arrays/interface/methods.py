"""The functions that people expect as methods of ``Array``."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np

from ..core.array import Array
from ..core.dtypes import as_dtype
from ..core.errors import DTypeError, MeshtapeError, NumPyAttributeError
from ..numpy_compat.selecting import compress
from ..ops import elementwise as ew
from ..ops import manipulation
from ..ops.creation import own_copy
from ..reductions import reductions


class Methods:
    """Methods of ``Array`` that are not just the function of the same name in the namespace (see :data:`FUNCTIONS`)."""

    # ----- elements ---------------------------------------------------------------------------------------------------

    @property
    def real(self) -> Array:
        """See :func:`meshtape.real`."""
        return ew.real(self)

    @property
    def imag(self) -> Array:
        """See :func:`meshtape.imag`."""
        return ew.imag(self)

    def __divmod__(self, other: Any) -> tuple[Array, Array]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Array, Array]:
        return other // self, other % self

    def __contains__(self, value: Any) -> bool:
        return bool(reductions.any(ew.equal(self, value)))

    # ----- rearranging ------------------------------------------------------------------------------------------------

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = "unsafe", subok: bool = True, copy: bool = True
    ) -> Array:
        """See :func:`meshtape.astype`. ``casting`` is as NumPy's; an ``order`` of memory is not seen in a value."""
        if casting != "unsafe" and not np.can_cast(self.dtype, as_dtype(dtype, "astype"), casting):
            raise DTypeError(f"[astype] {self.dtype.name} to {dtype} is no cast of the kind {casting!r}")
        if order != "K" and _of_zarr(sys._getframe(1)):
            return np.asarray(self).astype(dtype, order, copy=copy)  # type: ignore[return-value, arg-type]
        return manipulation.astype(self, dtype, copy=copy)

    def copy(self, order: str = "C") -> Array:
        """An Array of the same value; memory is shared until one side is written. (An ``order`` of it is not seen in a
        value.)"""
        return own_copy(self)

    def reshape(self, *shape: Any, order: str = "C") -> Array:
        """See :func:`meshtape.reshape`; takes a tuple or the lengths one by one."""
        if len(shape) == 1 and type(shape[0]) is not int and not isinstance(shape[0], int | np.integer):
            (shape,) = shape
        return manipulation.reshape(self, shape, order=order)

    def flatten(self, order: str = "C") -> Array:
        """The elements in C order, in one dimension; with ``order="F"`` the first index runs fastest."""
        return manipulation.reshape(self, (-1,), order=order)

    ravel = flatten

    def transpose(self, *axes: Any) -> Array:
        """See :func:`meshtape.permute_dims`; takes a tuple or the axes one by one, and reverses all of them without
        any."""
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int | np.integer) else axes
        return manipulation.permute_dims(self, order or tuple(range(self.ndim))[::-1])

    def compress(self, condition: Any, axis: int | None = None) -> Array:
        """See :func:`meshtape.compress`."""
        return compress(condition, self, axis)

    def tobytes(self) -> bytes:
        """The elements in C order, as they lie in memory."""
        return np.asarray(self).tobytes()

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def flat(self) -> Array:
        """The elements in C order, in one dimension, to read."""
        return self.flatten()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(np.ndarray, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name == "flags" and isinstance(error := sys.exception(), MeshtapeError):
            raise error  # of a write, for which xarray looks for a reason
        if name == "view" and _of_zarr(sys._getframe(1)):
            return np.asarray(self).view
        raise NumPyAttributeError(f"[{name}] {_INSTEAD.get(name, f'is of NumPy arrays alone: np.asarray(x).{name}')}")


def _of_zarr(frame: FrameType) -> bool:
    """Whether zarr asks, which takes an array that is written into its own for NumPy's, and wants the bytes."""
    return frame.f_globals.get("__name__", "").startswith("zarr.")


_WRITE = "arrays are values: write x[i] = v"
_INSTEAD = {
    **dict.fromkeys(("fill", "itemset", "put", "setfield"), _WRITE),
    "choose": "write mt.select(conditions, choices)",
    "partition": "writes in place, and arrays are values: write x = mt.partition(x, kth)",
    "resize": "writes in place, and arrays are values: write x = mt.reshape(x, shape), or mt.pad",
    "view": "x.astype(dtype) converts the numbers; np.asarray(x).view(dtype) reads their bytes anew",
}

# The methods that are functions of the namespace.
FUNCTIONS = (
    "all any argmax argmin argpartition argsort clip conj conjugate cumprod cumsum diagonal dot max mean min "
    "nonzero prod ptp repeat round searchsorted sort squeeze std sum swapaxes take trace var"
)
