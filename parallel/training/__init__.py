"""Training (``mt.Trainer``, ``mt.training``): data, steps, checkpoints, and jobs that survive the loss of workers.

Imports models, transforms, mesh and storage, and its own rooms ``data``, ``job``, ``logging`` and ``methods``. Begin
with trainer.py, then step.py and recovery.py.

>>> import meshtape as mt
>>> mt.training.batch_sizes(32, ranks=2, micro=4).accumulation
4
"""

from .callbacks import Callback, EarlyStop
from .data.batching import BatchSizes, batch_sizes
from .data.columnar import ArrowSource, ParquetSource
from .data.loader import Batch, Loader
from .data.mapping import MapSource
from .data.sampler import Sampler
from .data.sources import ArraySource, DaskSource, Source, TokenSource, ZarrSource
from .elastic import Elastic
from .job.jobs import cluster_mesh
from .methods import lora
from .methods.contrastive import contrastive_loss, grad_cache
from .pipeline import Pipeline
from .precision import Precision
from .trainer import Trainer, TrainResult

__all__ = [
    "ArraySource",
    "ArrowSource",
    "Batch",
    "BatchSizes",
    "Callback",
    "DaskSource",
    "EarlyStop",
    "Elastic",
    "Loader",
    "MapSource",
    "ParquetSource",
    "Pipeline",
    "Precision",
    "Sampler",
    "Source",
    "TokenSource",
    "TrainResult",
    "Trainer",
    "ZarrSource",
    "batch_sizes",
    "cluster_mesh",
    "contrastive_loss",
    "grad_cache",
    "lora",
]
__dir__ = __all__.copy
