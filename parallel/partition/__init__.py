"""From a program of arrays to the program of a rank.

Imports sharding, resharding and spmd. Begin with partition.py, then builder.py and rank_program.py.
"""
