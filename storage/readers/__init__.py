"""Lazy tensors: arrays in files, read by range or slice.

Imports format, stores and base. Begin with tensor.py, then reading.py.
"""
