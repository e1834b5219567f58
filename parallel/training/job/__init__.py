"""Jobs of training on a cluster: their state, logs and signals, their workers, and the run as others see it.

Imports dask and mesh. Begin with jobs.py.
"""
