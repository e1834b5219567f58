"""Kernels in C for arrays in the memory of the CPU: one pass over the rows for a dozen passes of NumPy.

The functions of :mod:`.ops` stand before the NumPy forms of ops (:func:`.calls.first`), which stay the reference, and
compute what the kernels do not take: other dtypes, other layouts, and everything where the kernels are not there. They
are there where the package was installed, editable or not, with a C compiler at hand; ``meshtape info`` says so.

A new kernel is a function in a ``.h`` file, a row in the table of ``module.c``, a function in :mod:`.ops`, and a case
of the test that compares each with its NumPy form.
"""

from __future__ import annotations

try:
    from . import _kernels
except ImportError:
    _kernels = None

AVAILABLE = _kernels is not None
"""Whether the kernels are installed."""
