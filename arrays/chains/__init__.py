"""Chains of elementwise ops as one CUDA kernel: generated, where ``kernels`` are written by hand.

Imports core, backends, kernels. Begin with chains.py.
"""
