"""Code that runs on each rank: collectives, their ops and derivatives, and traces of per-rank functions.

Imports sharding and resharding. Begin with collectives.py, then rank_trace.py.
"""
