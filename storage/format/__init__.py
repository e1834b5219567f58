"""Our format on disk: manifest, Zarr metadata, chunks, packs, checksums.

Imports stores and base. Begin with manifest.py, then zarr_format.py.
"""
