"""Tracing, compiling and running of ``mt.compile``: programs, fusion and CUDA.

Imports arrays, tape, rules and captures. Begin with compile.py, then tracing.py.
"""
