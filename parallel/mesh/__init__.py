"""Meshes and sharded arrays: the API, transfers, replicas, and Dask's collections.

Imports sharding, partition, execution and dask. Begin with mesh.py, then sharded_array.py.
"""
