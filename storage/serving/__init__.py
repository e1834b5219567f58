"""A checkpoint in other formats, without a copy: as a Zarr v3 hierarchy, as a safetensors directory, by references,
over HTTP.

Imports loading and browse.server. Begin with virtual_files.py.
"""
