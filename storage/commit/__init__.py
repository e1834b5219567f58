"""The commit protocol: how a place becomes a checkpoint, a whole one or none, and what dead writers leave.

Imports format, stores and base. Begin with protocol.py, then directory_commit.py and object_commit.py.
"""
