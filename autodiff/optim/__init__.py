"""Optimizers, schedules, clipping and averages of parameters.

Imports arrays and tape. Begin with optimizers.py, the namespace ``mt.optim``.
"""
