"""Pages of Dask's dashboard that show meshes, jobs and checkpoints.

Imports dask and storage. Begin with pages.py.
"""
