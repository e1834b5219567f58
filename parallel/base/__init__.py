"""Settings, the memory of blocks on the host or a GPU, and messages between a client and its workers.

Imports arrays. Begin with settings.py.
"""
