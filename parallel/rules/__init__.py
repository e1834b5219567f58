"""The factor mapping of every op: tables, one a chapter of ops. The legend is in ``parallel.factors``."""

from . import elementwise, random, reductions, structure

__all__ = ["elementwise", "random", "reductions", "structure"]
