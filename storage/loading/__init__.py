"""Opening, loading and verifying of checkpoints.

Imports checkpoint, foreign, rules and what they stand on. Begin with open.py, then load.py.
"""
