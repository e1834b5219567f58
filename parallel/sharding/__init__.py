"""Placements, factor rules, halos, and the propagation of shardings.

Imports arrays. Begin with placement.py, then factors.py.
"""
