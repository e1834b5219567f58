"""Checkpoints made of checkpoints: merge, convert, reshard, and their comparison.

Imports checkpoint, rules, loading and saving. Begin with convert.py, then transfer.py.
"""
