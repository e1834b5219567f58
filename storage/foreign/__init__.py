"""Checkpoints of other libraries: PyTorch, Orbax, NumPy.

Imports readers, format, stores and base. Begin with dcp.py.
"""
