"""Loading and verifying of checkpoints.

Imports checkpoint, readers and rules. Begin with load.py.
"""
