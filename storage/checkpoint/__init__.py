"""An opened checkpoint: its contents, generations and branches.

Imports readers, foreign, format, stores and base. Begin with open.py, then checkpoint.py.
"""
