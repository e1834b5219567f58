"""Random numbers that do not depend on how an array is split (``mt.random``).

A draw is a pure function of a key and of the place of an element in the global array: the same key gives the same
numbers on one device, on any mesh, and after a resume. Nothing is hidden: to draw again, make a new key.

>>> key = mt.random.key(0)
>>> mt.random.uniform(key, (2,))
Array([0.08723912, 0.85597221], dtype=float64)
>>> mt.random.uniform(key, (2,))
Array([0.08723912, 0.85597221], dtype=float64)
>>> dropout_key, noise_key = mt.random.split(key)
>>> step_key = mt.random.fold_in(key, 1000)

Use each key for one draw: two functions given one key see the same random words, so that their results are related.

Every element takes a fixed number of random bits (no rejection), which is what makes it computable alone. The recipes,
and the price of having no rejection, are stated with each function. Random words and everything made of them by integer
arithmetic and single multiplications (``bits``, ``uniform``, ``integers``, ``bernoulli``, ``permutation``) are the same
to the bit on every machine and device; what takes a logarithm or a cosine agrees to the last places of the mathematical
library there.
"""

from __future__ import annotations

from .continuous import exponential, gumbel, normal, truncated_normal, uniform
from .discrete import bernoulli, bits, categorical, integers
from .keys import fold_in, key, split
from .permutations import choice, permutation
from .transformed import *

__all__ = [n for n in dir() if not n.startswith("_") and callable(globals()[n])]
__dir__ = __all__.copy
