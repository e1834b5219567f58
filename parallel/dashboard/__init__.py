"""Pages of Dask's dashboard that show meshes, jobs and checkpoints.

Imports ``training.job`` and storage. Begin with pages.py.
"""
