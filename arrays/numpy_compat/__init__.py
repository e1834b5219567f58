"""NumPy's names that the array-API standard lacks.

They are other spellings of the standard's functions, or compositions of this package's ops, so that they differentiate,
compile and shard like those. Functions that write into an argument (``numpy.put``, ``place``, ``copyto``,
``fill_diagonal``) are missing: arrays are values, written by ``x[i] = v`` and ``x.at[i].set(v)``.
"""

from __future__ import annotations

from ..core.op import defined as _defined
from ..ops import elementwise as _ew
from ..ops.manipulation import concat as concatenate
from ..reductions.reductions import max as amax
from ..reductions.reductions import min as amin
from . import (
    closeness,
    creation,
    index_tricks,
    joining,
    ordering,
    polynomials,
    products,
    rearranging,
    selecting,
    signals,
    statistics,
    ufuncs,
)

# The functions that the modules of this room define.
for _module in [m for m in list(globals().values()) if getattr(m, "__package__", None) == __name__]:
    globals().update({n: vars(_module)[n] for n in _defined(vars(_module))})

# Other names of the same functions.
around = ufuncs.round
absolute, conjugate, fix, mod, power, true_divide = _ew.abs, _ew.conj, _ew.trunc, _ew.remainder, _ew.pow, _ew.divide
arccos, arcsin, arctan, arctan2 = _ew.acos, _ew.asin, _ew.atan, _ew.atan2
arccosh, arcsinh, arctanh = _ew.acosh, _ew.asinh, _ew.atanh
bitwise_not = invert = _ew.bitwise_invert
left_shift, right_shift = _ew.bitwise_left_shift, _ew.bitwise_right_shift

__all__ = [n for n in dir() if not n.startswith("_") and callable(globals()[n])]
