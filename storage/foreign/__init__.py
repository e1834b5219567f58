"""Checkpoints of other libraries: PyTorch, Orbax, NumPy.

Imports checkpoint, readers, format, stores and base. Begin with dcp.py.
"""
