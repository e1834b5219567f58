"""Methods of training: contrastive losses and low-rank adapters.

Imports arrays and autodiff. Begin with lora.py.
"""
