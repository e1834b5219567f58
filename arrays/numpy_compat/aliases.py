"""NumPy's other names of the standard's functions."""

from __future__ import annotations

from ..ops.elementwise import (
    abs,
    acos,
    acosh,
    asin,
    asinh,
    atan,
    atan2,
    atanh,
    bitwise_invert,
    bitwise_left_shift,
    bitwise_right_shift,
    conj,
    divide,
    pow,
    remainder,
    trunc,
)
from ..ops.manipulation import concat
from ..reductions.reductions import max, min
from .ufuncs import round

absolute = abs
amax, amin = max, min
arccos, arcsin, arctan, arctan2 = acos, asin, atan, atan2
arccosh, arcsinh, arctanh = acosh, asinh, atanh
around = round
bitwise_not = invert = bitwise_invert
left_shift, right_shift = bitwise_left_shift, bitwise_right_shift
concatenate = concat
conjugate = conj
fix = trunc
mod = remainder
power = pow
true_divide = divide
