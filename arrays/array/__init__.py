"""The public ``Array``: its class, operators, methods, indexing and display.

Imports core, backends, indexing, ops and numpy_compat. Begin with array.py (the class), then operators.py.
"""
