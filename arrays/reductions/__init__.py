"""Reductions and orders: sums, moments, extrema, cumulative functions, sorting and searching.

Imports core, backends, kernels and ops. Begin with reductions.py.
"""
