"""NumPy and CuPy behind one interface, and the memory, threads and synchronisation of each.

Imports core. Begin with backend.py.
"""
