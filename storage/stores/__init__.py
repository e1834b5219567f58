"""Directories and object stores, what makes a write in them atomic, and which generation of files is read.

Imports base. Begin with contract.py, then store.py.
"""
