"""Directories and object stores, their atomic writes, and the generations of the files that are read.

Imports base. Begin with contract.py, then store.py.
"""
