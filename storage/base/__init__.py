"""Names, checksums, threads and scratch memory, which every part of storage uses.

Imports arrays. Begin with threads.py.
"""
