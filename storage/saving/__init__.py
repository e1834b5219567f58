"""Saving: shards, packs, checksums, rotation.

Imports loading, commit, format, stores and base. Begin with save.py, then write_shards.py.
"""
