"""Functions of functions over meshes: shard_map, scan, pipeline, ring attention, stream.

Imports mesh, spmd, partition and storage. Begin with shard_map.py.
"""
