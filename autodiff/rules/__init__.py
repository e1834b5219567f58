"""The VJP rule of every differentiable op: tables, one a chapter of ops. Imports arrays. The legend is in
registry.py."""

from . import elementwise, fft, linalg, nn, reductions, structure
from .registry import RULES, Need, VJPRule, defvjp, defvjp_all

__all__ = ["RULES", "Need", "VJPRule", "defvjp", "defvjp_all"]
