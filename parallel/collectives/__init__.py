"""Algorithms of collectives between processes, and the cost model that chooses one.

Imports base and arrays. Begin with costs.py, then reduction_tree.py.
"""
