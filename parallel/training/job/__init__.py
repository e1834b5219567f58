"""Jobs of training on a cluster: their state, logs and signals.

Imports dask. Begin with jobs.py.
"""
