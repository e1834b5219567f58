"""``mt.gang``: functions that run in several processes of a cluster at once.

Imports dask, transports and base. Begin with gang.py.
"""
