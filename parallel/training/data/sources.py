"""Sources of samples: arrays, Zarr groups, tables, Dask collections, tokens; or anything with ``len`` and ``read``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ....arrays.core import tree as trees
from ....arrays.core.array import Array
from ....arrays.core.errors import DataError
from ....storage.checkpoint.checkpoint import StoredArray
from ....storage.readers.dual_tensor import at_folder
from ....storage.readers.zarr_tensor import ZarrTensor, of_array
from ....storage.stores import store as stores
from ...dask.workers import TaskWatch, while_answering
from .columnar import ArrowSource
from .mapping import MapSource, array_of, is_map_style
from .parts import PartedSource, Sized


@runtime_checkable
class Source(Protocol):
    """A data set of numbered samples.

    ``read`` is called with numbers in any order, from one background thread at a time. With ``remote`` true the source
    is sent to the workers (it must be picklable, and its files visible there), and each reads just the rows of its
    ranks.
    """

    remote: bool

    def __len__(self) -> int: ...

    def read(self, ids: np.ndarray) -> Any:
        """A tree of NumPy arrays whose first dimension runs over ``ids``."""


class ArraySource(Sized):
    """Samples in memory (or a memory map): a tree of arrays of one first dimension.

    >>> import numpy as np
    >>> source = ArraySource({"x": np.arange(6).reshape(3, 2), "y": np.arange(3)})
    >>> len(source), source.read(np.array([2, 0]))["x"].tolist()
    (3, [[4, 5], [0, 1]])
    """

    remote = False

    def __init__(self, tree: Any) -> None:
        self.tree = trees.tree_map(array_of, tree)
        leaves = trees.flatten_with_path(self.tree)
        lengths = {trees.path_name(p): len(x) if x.ndim else None for p, x in leaves}
        if not leaves or len(set(lengths.values())) != 1 or None in lengths.values():
            raise DataError(f"arrays of samples need one common first dimension, got lengths {lengths}")
        self._size = next(iter(lengths.values()))

    def read(self, ids: np.ndarray) -> Any:
        """See :class:`Source`."""
        return trees.tree_map(lambda x: x[ids], self.tree)


class TokenSource(Sized):
    """Windows of a long row of tokens, for language models: ``ids`` and, one place later, ``labels``.

    Parameters
    ----------
    tokens
        A vector of integers; a memory map is read where needed.
    length
        Tokens of a window.
    stride
        From one window to the next; ``length`` by default.

    Examples
    --------
    >>> import numpy as np
    >>> source = TokenSource(np.arange(10), length=4)
    >>> len(source), source.read(np.array([1]))["labels"].tolist()
    (2, [[5, 6, 7, 8]])
    """

    remote = False

    def __init__(self, tokens: np.ndarray, length: int, stride: int | None = None) -> None:
        stride = length if stride is None else stride
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(f"tokens must be a vector of integers, got {tokens.dtype.name}{tokens.shape}")
        if length < 1 or stride < 1:
            raise DataError(f"length and stride must be at least 1, got {length} and {stride}")
        self.tokens, self.length, self.stride = tokens, length, stride
        self._size = max(0, (len(tokens) - 1 - length) // stride + 1)
        if not self._size:
            raise DataError(f"{len(tokens)} tokens are too few for one window of {length} and its next token")

    def read(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """See :class:`Source`."""
        places = (np.asarray(ids, np.int64) * self.stride)[:, None] + np.arange(self.length + 1)
        window = self.tokens[places].astype(np.int64)
        return {"ids": window[:, :-1], "labels": window[:, 1:]}


class ZarrSource(Sized):
    """Samples in the arrays of a Zarr group, or in one Zarr array. Workers read their own rows.

    Parameters
    ----------
    path
        A local path or a URL, as ``zarr.open`` takes it.
    columns
        Names of arrays in the group; all by default.
    """

    remote = True

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> None:
        self.path, self.columns = os.fspath(path), None if columns is None else tuple(columns)
        self._open: Any = None
        arrays = self._arrays()
        lengths = {n: a.shape[0] if a.shape else None for n, a in arrays.items()}
        if len(set(lengths.values())) != 1 or None in lengths.values():
            raise DataError(f"{self.path}: arrays of samples need one common first dimension, got lengths {lengths}")
        self._size = int(next(iter(lengths.values())))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}  # opened anew where it is used

    def _arrays(self) -> dict[str, Any]:
        if self._open is None:
            import zarr

            try:
                # Consolidated metadata may be stale; a server has no other list of its arrays.
                listed = None if stores.is_url(stores.location(self.path)) else False
                node = zarr.open(self.path, mode="r", use_consolidated=listed)
            except (OSError, ValueError) as e:
                raise DataError(f"{self.path} is no Zarr array or group: {e}") from e
            if isinstance(node, zarr.Array):
                found = {"": node}
            else:
                found = dict(node.arrays())
                missing = sorted(set(self.columns or ()) - set(found))
                if missing or not found:
                    raise DataError(f"{self.path} has no array {missing}; it has {sorted(found)}")
                found = {n: found[n] for n in self.columns or sorted(found)}
            self._open = {n: self._checked(n, a) for n, a in found.items()}
        return self._open

    def _checked(self, name: str, array: Any) -> Any:
        """An array, or where it is of a checkpoint of ours, of whose chunks and checksums zarr does not know, our own
        reader of it."""
        root = stores.location(self.path)
        if not array.shards or at_folder(stores.join(root, name).rstrip("/"), True) is None:
            return array
        found = of_array(root, name, array)
        return StoredArray((name,), found.kept() if isinstance(found, ZarrTensor) else found)

    def read(self, ids: np.ndarray) -> Any:
        """See :class:`Source`."""
        ids = np.asarray(ids)
        order, inverse = np.unique(ids, return_inverse=True)  # chunks are read once, in order
        out = {n: _rows(a, order)[inverse] for n, a in self._arrays().items()}
        return out.get("", out)


def _rows(array: Any, order: np.ndarray) -> np.ndarray:
    """The rows of these numbers, in ascending order."""
    if not isinstance(array, StoredArray):
        return np.asarray(array.oindex[order])
    n = array.tensor.chunk[0]
    at = order // n
    parts = [array[k * n : (k + 1) * n][order[at == k] - k * n] for k in np.unique(at).tolist()]
    return np.concatenate([array[:0], *parts])


class DaskSource(PartedSource):
    """Samples in any Dask collection: an array (first dimension), a data frame (columns), a bag or delayed parts of
    trees.

    Parts are computed where the collection's scheduler runs them and held in this process, ``cached`` of them at a
    time; persist the collection to have them stay on the cluster. Lengths that Dask does not know are computed once.

    Parameters
    ----------
    collection
        A ``dask.array``, ``dask.dataframe``, ``dask.bag`` of samples, or a list of ``dask.delayed`` parts, each a tree
        of arrays.
    client
        Runs the parts; the scheduler in force by default.
    cached
        Parts kept in memory.
    """

    remote = False

    def __init__(self, collection: Any, *, client: Any = None, cached: int = 4) -> None:
        super().__init__(cached)
        self.client = client
        if hasattr(collection, "chunks") and hasattr(collection, "to_delayed"):
            whole = collection.rechunk(dict.fromkeys(range(1, collection.ndim), -1))
            self.parts = list(whole.to_delayed().reshape(-1))
            lengths = list(whole.chunks[0])
        elif hasattr(collection, "to_delayed"):
            self.parts, lengths = list(collection.to_delayed()), [float("nan")]
        elif isinstance(collection, Sequence) and all(hasattr(p, "dask") for p in collection):
            self.parts, lengths = list(collection), [float("nan")]
        else:
            raise DataError(f"a {type(collection).__name__} is no Dask collection: it has no to_delayed()")
        if any(n != n for n in lengths):  # unknown ones are NaN
            import dask

            lengths = self._compute([dask.delayed(_length)(p) for p in self.parts])
        self.starts = [int(s) for s in np.cumsum([0, *lengths[:-1]])]
        self._size = int(sum(lengths))
        if not self._size:
            raise DataError("the Dask collection is empty")

    def _compute(self, parts: Sequence[Any]) -> list[Any]:
        import dask

        if self.client is not None:
            futures = self.client.compute(list(parts))
            watch = TaskWatch(self.client, "the parts of a DaskSource", [f.key for f in futures])
            return while_answering(self.client, self.client.gather, futures, look=watch.look)
        return list(dask.compute(*parts))

    def _load(self, number: int) -> Any:
        return _as_tree(self._compute([self.parts[number]])[0])


def _length(part: Any) -> int:
    if isinstance(part, Mapping):
        return len(next(iter(part.values())))
    return len(part)


def _as_tree(part: Any) -> Any:
    """A computed part as a tree of arrays."""
    if isinstance(part, np.ndarray):
        return part
    if hasattr(part, "columns"):  # a data frame
        return {str(c): np.asarray(part[c]) for c in part.columns}
    if isinstance(part, list):  # a bag: one tree a sample
        return trees.tree_map(lambda *xs: np.stack([np.asarray(x) for x in xs]), *part)
    return trees.tree_map(np.asarray, part)


def as_source(data: Any) -> Any:
    """A source as it is; a tree of arrays, a data frame, an Arrow table, a Dask collection or a map-style data set as a
    source."""
    if isinstance(data, Source):
        return data
    if isinstance(data, Array):  # which is a Dask collection too
        return ArraySource(data)
    if hasattr(data, "__dask_graph__"):
        return DaskSource(data)
    if hasattr(data, "column_names") and hasattr(data, "to_batches"):
        return ArrowSource(data)
    if hasattr(data, "iloc"):
        return ArraySource(_as_tree(data))
    if is_map_style(data):
        return MapSource(data)
    return ArraySource(dict(data) if isinstance(data, Mapping) else data)
