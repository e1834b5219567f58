"""The functions that people expect as methods of ``Array``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import elementwise as ew
from . import manipulation, reductions

if TYPE_CHECKING:
    from ._array import Array


class Methods:
    """Base of ``Array``: each method is the function of the same name in the namespace."""

    __slots__ = ()

    # ----- elements -----------------------------------------------------------------------------------------------------

    @property
    def real(self) -> Array:
        """See :func:`meshtape.real`."""
        return ew.real(self)

    @property
    def imag(self) -> Array:
        """See :func:`meshtape.imag`."""
        return ew.imag(self)

    def conj(self) -> Array:
        """See :func:`meshtape.conj`."""
        return ew.conj(self)

    def clip(self, min: Any = None, max: Any = None) -> Array:
        """See :func:`meshtape.clip`."""
        return ew.clip(self, min, max)

    def __divmod__(self, other: Any) -> tuple[Array, Array]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Array, Array]:
        return other // self, other % self

    def __contains__(self, value: Any) -> bool:
        return bool(reductions.any(ew.equal(self, value)))

    # ----- rearranging --------------------------------------------------------------------------------------------------

    def astype(self, dtype: Any, /, *, copy: bool = True) -> Array:
        """See :func:`meshtape.astype`."""
        return manipulation.astype(self, dtype, copy=copy)

    def copy(self) -> Array:
        """An Array of the same value; memory is shared until one side is written."""
        from .creation import wrap_same

        return wrap_same(self)

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
        """See :func:`meshtape.permute_dims`; takes a tuple or the axes one by one, and reverses all of them without any."""
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int | np.integer) else axes
        return manipulation.permute_dims(self, order or tuple(range(self.ndim))[::-1])

    def squeeze(self, axis: Any = None) -> Array:
        """See :func:`meshtape.squeeze`; without ``axis`` all dimensions of length one go."""
        return manipulation.squeeze(self, axis)

    # ----- reductions ---------------------------------------------------------------------------------------------------

    def sum(self, axis: Any = None, dtype: Any = None, *, keepdims: bool = False) -> Array:
        """See :func:`meshtape.sum`."""
        return reductions.sum(self, axis=axis, dtype=dtype, keepdims=keepdims)

    def prod(self, axis: Any = None, dtype: Any = None, *, keepdims: bool = False) -> Array:
        """See :func:`meshtape.prod`."""
        return reductions.prod(self, axis=axis, dtype=dtype, keepdims=keepdims)

    def mean(self, axis: Any = None, dtype: Any = None, *, keepdims: bool = False) -> Array:
        """See :func:`meshtape.mean`."""
        return reductions.mean(self, axis=axis, dtype=dtype, keepdims=keepdims)

    def var(
        self,
        axis: Any = None,
        dtype: Any = None,
        *,
        correction: float = 0.0,
        keepdims: bool = False,
        ddof: float | None = None,
    ) -> Array:
        """See :func:`meshtape.var`."""
        return reductions.var(self, axis, correction=correction, keepdims=keepdims, ddof=ddof, dtype=dtype)

    def std(
        self,
        axis: Any = None,
        dtype: Any = None,
        *,
        correction: float = 0.0,
        keepdims: bool = False,
        ddof: float | None = None,
    ) -> Array:
        """See :func:`meshtape.std`."""
        return reductions.std(self, axis, correction=correction, keepdims=keepdims, ddof=ddof, dtype=dtype)

    def max(self, axis: Any = None, *, keepdims: bool = False) -> Array:
        """See :func:`meshtape.max`."""
        return reductions.max(self, axis=axis, keepdims=keepdims)

    def min(self, axis: Any = None, *, keepdims: bool = False) -> Array:
        """See :func:`meshtape.min`."""
        return reductions.min(self, axis=axis, keepdims=keepdims)

    def any(self, axis: Any = None, *, keepdims: bool = False) -> Array:
        """See :func:`meshtape.any`."""
        return reductions.any(self, axis=axis, keepdims=keepdims)

    def all(self, axis: Any = None, *, keepdims: bool = False) -> Array:
        """See :func:`meshtape.all`."""
        return reductions.all(self, axis=axis, keepdims=keepdims)

    def argmax(self, axis: int | None = None, *, keepdims: bool = False) -> Array:
        """See :func:`meshtape.argmax`."""
        return reductions.argmax(self, axis=axis, keepdims=keepdims)

    def argmin(self, axis: int | None = None, *, keepdims: bool = False) -> Array:
        """See :func:`meshtape.argmin`."""
        return reductions.argmin(self, axis=axis, keepdims=keepdims)

    # ----- NumPy's ------------------------------------------------------------------------------------------------------

    conjugate = conj

    def round(self, decimals: int = 0) -> Array:
        """See :func:`meshtape.round`."""
        from . import numpy_names as names

        return names.round(self, decimals)

    def cumsum(self, axis: int | None = None, dtype: Any = None) -> Array:
        """See :func:`meshtape.cumsum`."""
        from . import numpy_names as names

        return names.cumsum(self, axis, dtype)

    def cumprod(self, axis: int | None = None, dtype: Any = None) -> Array:
        """See :func:`meshtape.cumprod`."""
        from . import numpy_names as names

        return names.cumprod(self, axis, dtype)

    def dot(self, other: Any) -> Array:
        """See :func:`meshtape.dot`."""
        from . import numpy_names as names

        return names.dot(self, other)

    def swapaxes(self, axis1: int, axis2: int) -> Array:
        """See :func:`meshtape.swapaxes`."""
        from . import numpy_names as names

        return names.swapaxes(self, axis1, axis2)

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Array:
        """See :func:`meshtape.diagonal`."""
        from . import numpy_names as names

        return names.diagonal(self, offset, axis1, axis2)

    def trace(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Array:
        """See :func:`meshtape.trace`."""
        from . import numpy_names as names

        return names.trace(self, offset, axis1, axis2)

    def sort(self, axis: int = -1, *, descending: bool = False) -> Array:
        """See :func:`meshtape.sort`. A sorted array is returned; this one stays as it is."""
        from . import sorting

        return sorting.sort(self, axis=axis, descending=descending)

    def argsort(self, axis: int = -1, *, descending: bool = False) -> Array:
        """See :func:`meshtape.argsort`."""
        from . import sorting

        return sorting.argsort(self, axis=axis, descending=descending)

    def take(self, indices: Any, axis: int | None = None) -> Array:
        """See :func:`meshtape.take`."""
        from . import searching

        return searching.take(self, indices, axis=axis)

    def repeat(self, repeats: Any, axis: int | None = None) -> Array:
        """See :func:`meshtape.repeat`."""
        return manipulation.repeat(self, repeats, axis=axis)

    def nonzero(self) -> tuple[Array, ...]:
        """See :func:`meshtape.nonzero`."""
        from . import searching

        return searching.nonzero(self)

    def searchsorted(self, values: Any, side: str = "left") -> Array:
        """See :func:`meshtape.searchsorted`."""
        from . import searching
        from .creation import asarray

        return searching.searchsorted(self, asarray(values), side=side)

    def tobytes(self) -> bytes:
        """The elements in C order, as they lie in memory."""
        return np.asarray(self).tobytes()
