"""Saving: shards, checksums, commit, rotation.

Imports format, stores and base. Begin with save.py, then write_shards.py.
"""
