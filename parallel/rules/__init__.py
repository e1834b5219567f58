"""The factor mapping of every op: tables, one a chapter of ops. The legend is in ``parallel.factors``."""

from . import elementwise, reductions, structure

__all__ = ["elementwise", "reductions", "structure"]
