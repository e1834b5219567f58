"""Meshes and sharded arrays: the API, transfers, replicas, pictures, and Dask's collections.

Imports sharding, spmd, partition, execution and dask. Begin with mesh.py, then sharded_array.py and api.py.
"""
