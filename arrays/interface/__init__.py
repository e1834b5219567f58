"""The interface of ``Array``: its operators, methods, protocols, indexing and display, attached to the class of core.

Imports all rooms below: core, backends, ops, reductions, indexing and numpy_compat. Begin with values.py (attributes,
indexing), then operators.py.
"""
