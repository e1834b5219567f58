"""Our format on disk: manifest, Zarr metadata, chunks, checksums, documents.

Imports stores and base. Begin with manifest.py, then zarr_format.py.
"""
