"""Meshes on the workers of a Dask cluster: plugins, streams, queues, leases and recovery.

Imports execution, partition, transports and base. Begin with runtime.py (the client), then worker.py and
worker_queue.py.
"""
