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

    def reshape(self, *shape: Any) -> Array:
        """See :func:`meshtape.reshape`; takes a tuple or the lengths one by one."""
        if len(shape) == 1 and type(shape[0]) is not int and not isinstance(shape[0], int | np.integer):
            (shape,) = shape
        return manipulation.reshape(self, shape)

    def flatten(self) -> Array:
        """The elements in C order, in one dimension."""
        return manipulation.reshape(self, (-1,))

    ravel = flatten

    def transpose(self, *axes: Any) -> Array:
        """See :func:`meshtape.permute_dims`; takes a tuple or the axes one by one, and reverses all of them without any."""
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int | np.integer) else axes
        return manipulation.permute_dims(self, order or tuple(range(self.ndim))[::-1])

    def squeeze(self, axis: Any = None) -> Array:
        """See :func:`meshtape.squeeze`; without ``axis`` all dimensions of length one go."""
        ones = tuple(i for i, n in enumerate(self.shape) if n == 1)
        return manipulation.squeeze(self, ones if axis is None else axis)

    # ----- reductions ---------------------------------------------------------------------------------------------------

    def sum(self, axis: Any = None, *, keepdims: bool = False) -> Array:
        """See :func:`meshtape.sum`."""
        return reductions.sum(self, axis=axis, keepdims=keepdims)

    def prod(self, axis: Any = None, *, keepdims: bool = False) -> Array:
        """See :func:`meshtape.prod`."""
        return reductions.prod(self, axis=axis, keepdims=keepdims)

    def mean(self, axis: Any = None, *, keepdims: bool = False) -> Array:
        """See :func:`meshtape.mean`."""
        return reductions.mean(self, axis=axis, keepdims=keepdims)

    def var(self, axis: Any = None, *, correction: float = 0.0, keepdims: bool = False) -> Array:
        """See :func:`meshtape.var`."""
        return reductions.var(self, axis=axis, correction=correction, keepdims=keepdims)

    def std(self, axis: Any = None, *, correction: float = 0.0, keepdims: bool = False) -> Array:
        """See :func:`meshtape.std`."""
        return reductions.std(self, axis=axis, correction=correction, keepdims=keepdims)

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
