"""Made by docs/generate/stubs.py for type checkers."""

from collections.abc import Callable as Callable, Mapping as Mapping, Sequence as Sequence
from meshtape.arrays.core.array import Array as Array
from meshtape.parallel.mesh.mesh import Mesh as Mesh
from meshtape.parallel.training import lora as lora
from meshtape.parallel.training.callbacks import Callback as Callback, EarlyStop as EarlyStop
from meshtape.parallel.training.data.batching import BatchSizes as BatchSizes
from meshtape.parallel.training.data.columnar import ArrowSource as ArrowSource, ParquetSource as ParquetSource
from meshtape.parallel.training.data.loader import Batch as Batch, Loader as Loader
from meshtape.parallel.training.data.mapping import MapSource as MapSource
from meshtape.parallel.training.data.sampler import Sampler as Sampler
from meshtape.parallel.training.data.sources import (
    ArraySource as ArraySource, DaskSource as DaskSource, Source as Source, TokenSource as TokenSource,
    ZarrSource as ZarrSource
)
from meshtape.parallel.training.elastic import Elastic as Elastic
from meshtape.parallel.training.logging.progress import TrainResult as TrainResult
from meshtape.parallel.training.pipeline import Pipeline as Pipeline
from meshtape.parallel.training.precision import Precision as Precision
from meshtape.parallel.training.trainer import Trainer as Trainer
from typing import Any as Any

def batch_sizes(batch: int, *, ranks: int, micro: int | None = None, accumulation: int | None = None) -> BatchSizes: ...
def cluster_mesh(axes: Mapping[str, int] | None = None, *, client: Any = None) -> Mesh: ...
def contrastive_loss(queries: Any, keys: Any, /, *, temperature: float = 0.02, group_size: int = 1, dims: Sequence[int] | None = None, symmetric: bool = False) -> Array: ...
def grad_cache(embed: Callable[[Any, Any, Array | None], Any], loss: Callable[[Any], Any], *, chunk: int) -> Callable[[Any, Any, Array | None], Any]: ...
