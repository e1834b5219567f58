"""Names, checksums, threads, waits and scratch memory, which every part of storage uses.

Imports arrays. Begin with threads.py.
"""
