"""Settings, and the memory of blocks on the host or a GPU.

Imports arrays. Begin with settings.py.
"""
