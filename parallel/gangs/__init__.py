"""``mt.gang``: functions that run in several processes of a cluster at once.

Imports dask and mesh. Begin with gang.py.
"""
