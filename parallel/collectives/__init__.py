"""Algorithms of collectives between processes, the chunks that they send, and the cost model that chooses one.

Imports base and arrays. Begin with pieces.py (chunks of arrays, and the sinks that take them), then reduction_tree.py
and costs.py.
"""
