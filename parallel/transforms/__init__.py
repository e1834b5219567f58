"""Functions of functions over meshes: shard_map, scan, pipeline, ring attention, stream.

Imports mesh and partition. Begin with shard_map.py.
"""
