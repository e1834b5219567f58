"""Batches of training: sources, sampling, loading.

Imports storage, arrays and mesh. Begin with sources.py, then loader.py.
"""
