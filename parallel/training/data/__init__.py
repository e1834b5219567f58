"""Batches of training: sources, sampling, loading.

Imports storage and arrays. Begin with sources.py, then loader.py.
"""
