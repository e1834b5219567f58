"""The run of a rank program: the executor, fusion, memory limits, devices, and the program as text.

Imports partition, resharding, transports, sharding and base. Begin with executor.py, then runtime.py.
"""
