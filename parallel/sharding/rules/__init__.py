"""The factor mapping of every op: tables, one a chapter of ops. The legend is in ``parallel.factors``."""

from . import convolution, elementwise, experts, indexing, linalg, random, reductions, softmax, structure

__all__ = [
    "convolution",
    "elementwise",
    "experts",
    "indexing",
    "linalg",
    "random",
    "reductions",
    "softmax",
    "structure",
]
