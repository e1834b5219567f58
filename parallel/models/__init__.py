"""Models (``mt.models``): pure functions over trees of parameters, with named sharding plans.

Each module has a frozen ``Config``, ``init(key, config)``, ``apply(params, ids, config, …)``, ``plan(name)`` and
``rules(config)`` (key rules from Hugging Face names). A plan says where each parameter lives and which activations are
moved; the functions themselves are the same on one device and on any mesh.

- ``mt.models.decoder``: a GPT-style decoder (RoPE, grouped queries, RMSNorm, SwiGLU, tied head), dense or with experts.
- ``mt.models.encoder``: a BERT-style encoder and its sentence embeddings.
- ``mt.models.moe``: a mixture-of-experts block.
- ``mt.models.Plan``: a sharding plan for models of your own; ``mt.models.Stages``: the stages of one for a pipeline.

Imports arrays, autodiff, storage, mesh and transforms. Begin with layers.py, then decoder.py.
"""

from . import decoder, encoder, moe
from .plans import Plan, Stages

__all__ = ["Plan", "Stages", "decoder", "encoder", "moe"]
__dir__ = __all__.copy
