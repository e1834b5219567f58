"""``mt.compile``: programs of traced functions, their fusion, and their run on CPUs and CUDA devices.

Imports arrays, tape, captures and ``autodiff.transforms``. Begin with compile.py, then executable.py.
"""
