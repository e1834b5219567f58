"""Directories and object stores, and what makes a write in them atomic.

Imports base. Begin with store.py.
"""
