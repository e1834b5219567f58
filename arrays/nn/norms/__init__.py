"""Normalisation over rows, groups and batches.

Imports core, backends, ops and kernels. Begin with layer_norm.py.
"""
