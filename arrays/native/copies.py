"""Copies past the caches, for results that are larger than those.

An ordinary store first reads the line that it writes, and puts it in the place of something that is needed again. A
copy that is not read soon needs neither: on two busy cores it takes half the time.
"""

from __future__ import annotations

import numpy as np

from . import _kernels

LARGE = 8 << 20
"""Bytes of an array that no cache of one core holds."""

_WORTH_A_CALL = 64 << 10


def is_large(to: np.ndarray) -> bool:
    """Whether copies to an array should bypass the caches of a CPU, and can: it is large and in host memory."""
    return _kernels is not None and isinstance(to, np.ndarray) and to.nbytes >= LARGE


def stream(to: np.ndarray, source: np.ndarray) -> None:
    """``to[...] = source``, past the caches where that is possible. The two share no memory.

    Examples
    --------
    >>> import numpy as np
    >>> to, source = np.zeros((2, 3)), np.arange(6.0).reshape(2, 3)
    >>> stream(to, source)
    >>> to[1]
    array([3., 4., 5.])
    """
    fits = source.nbytes >= _WORTH_A_CALL and (to.shape, to.dtype) == (source.shape, source.dtype)
    if not (fits and _kernels is not None and _kernels.stream(to, source)):
        to[...] = source
