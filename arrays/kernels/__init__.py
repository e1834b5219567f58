"""Fused CUDA kernels behind ops: one file of CUDA C++ and one module of Python a subject.

``launch`` compiles and starts kernels, ``geometry`` decides how many threads do what, and the other modules give the functions
that ops name in ``overrides={"cupy": ...}``. Importing this package imports neither CuPy nor compiles anything.
"""
