"""Code that runs on each rank: collectives and traces of per-rank functions.

Imports sharding and partition. Begin with collectives.py.
"""
