"""Checkpoints made of checkpoints: merge, convert, reshard, and their comparison.

Imports its sinks, saving, loading, rules and checkpoint. Begin with convert.py, then transfer.py.
"""
