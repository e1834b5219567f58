"""Reads and writes by index: keys, parts of arrays, and the sparse cotangents of reads.

Imports core and backends. Begin with keys.py, then indexing.py.
"""
