"""The commit protocol: how a place becomes a checkpoint, a whole one or none, and the leftovers of dead writers.

Imports format, stores and base. Begin with protocol.py, then directory_commit.py and object_commit.py.
"""
