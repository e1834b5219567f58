"""The run of a rank program: the executor, fusion, memory limits and devices.

Imports partition, resharding and base. Begin with executor.py.
"""
