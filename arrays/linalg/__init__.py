"""Linear algebra: solvers, decompositions and norms of matrices.

Imports core, backends, indexing and ops. Begin with linalg.py, the namespace ``mt.linalg``.
"""
