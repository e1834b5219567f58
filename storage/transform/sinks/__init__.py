"""Where a transfer writes: shards of Zarr, packs, files of Hugging Face.

Imports saving, rules, readers, format, stores and base. Begin with sink.py.
"""
