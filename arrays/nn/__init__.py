"""Neural networks: activations, losses, attention, convolution, dropout and experts.

Imports core, backends, indexing and ops. Begin with nn.py, the namespace ``mt.nn``.
"""
