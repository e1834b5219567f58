"""From a program of arrays to the program of a rank.

Imports sharding and resharding. Begin with partition.py, then builder.py.
"""
