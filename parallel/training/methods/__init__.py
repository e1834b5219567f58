"""Methods of training: contrastive losses and low-rank adapters.

Imports arrays, autodiff and mesh. Begin with lora.py.
"""
