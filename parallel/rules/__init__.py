"""The factor mapping of every op: tables, one a chapter of ops. The legend is in ``parallel.factors``."""

from . import elementwise, linalg, random, reductions, structure

__all__ = ["elementwise", "linalg", "random", "reductions", "structure"]
