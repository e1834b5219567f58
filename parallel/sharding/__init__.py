"""Placements, factor rules, halos, and the propagation of shardings; the mesh as a contract.

Imports arrays and autodiff's rules. Begin with placement.py, then factors.py. The table of each op's factors is in
``sharding.rules``, which stands above this room and is read by ``Mesh``.
"""
