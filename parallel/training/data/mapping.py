"""Samples of a map-style data set: any object with ``__len__`` and ``__getitem__(i)``, one sample a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ....arrays.core import tree as trees
from ....arrays.core.errors import DataError
from .parts import Sized

_NUMBERS = (bool, int, float, complex, np.generic)


class MapSource(Sized):
    """A data set of numbered samples, such as PyTorch's ``Dataset``, ``datasets.Dataset`` or a list of dicts.

    A sample is an array or a number, or a dict, a tuple, a named tuple or a dataclass of such; a list of numbers is an
    array. All samples have the structure, the shapes and the dtypes of the first. It is read in the client, by one
    background thread, in any order.

    Parameters
    ----------
    data
        The data set. Where it has ``__getitems__(list of numbers)``, which gives a list of samples, that is called
        instead.

    Examples
    --------
    >>> import numpy as np
    >>> source = MapSource([{"x": np.arange(2) + i, "y": i} for i in range(3)])
    >>> source.read(np.array([2, 0]))["x"].tolist()
    [[2, 3], [0, 1]]
    """

    remote = False

    def __init__(self, data: Any) -> None:
        self.data, self.name = data, type(data).__name__
        try:
            self._size = len(data)
        except Exception as e:
            raise DataError(
                f"the length of the data set {self.name} cannot be asked for: {type(e).__name__}: {e}"
            ) from e
        if not self._size:
            raise DataError(f"the data set {self.name} is empty")
        first = self._leaves(0, self._samples([0])[0])
        self.first = [(path, x.shape, x.dtype) for path, x in first]

    def _samples(self, ids: list[int]) -> list[Any]:
        many = getattr(self.data, "__getitems__", None)
        at = ids
        try:
            if many is not None:
                found = list(many(ids))
            else:
                found = []
                for i in ids:
                    at = [i]
                    found.append(self.data[i])
        except Exception as e:
            raise DataError(
                f"the data set {self.name}, of length {self._size}, failed at {', '.join(map(str, at[:8]))}: "
                f"{type(e).__name__}: {e}"
            ) from e
        if len(found) != len(ids):
            raise DataError(f"the data set {self.name} gave {len(found)} samples for {len(ids)} numbers")
        return found

    def _leaves(self, number: int, sample: Any) -> list[tuple[trees.Path, np.ndarray]]:
        out = []
        for path, x in trees.flatten_with_path(sample, is_leaf=_is_row):
            try:
                a = np.asarray(x)
            except Exception as e:
                raise DataError(
                    f"sample {number} of the data set {self.name} holds no array at {_name(path)}: {type(e).__name__}: "
                    f"{e}"
                ) from e
            if a.dtype.kind in "OUSmM":
                raise DataError(
                    f"sample {number} of the data set {self.name} holds a {type(x).__name__} at {_name(path)}: arrays "
                    "hold numbers; tokenise texts, and leave out what is no number"
                )
            out.append((path, a))
        if not out:
            raise DataError(f"sample {number} of the data set {self.name} holds nothing")
        return out

    def read(self, ids: np.ndarray) -> Any:
        """See :class:`Source`."""
        numbers = [int(i) for i in ids]
        samples = self._samples(numbers)
        rows = []
        for i, sample in zip(numbers, samples, strict=True):
            found = self._leaves(i, sample)
            kinds = [(path, x.shape, x.dtype) for path, x in found]
            if kinds != self.first:
                mine, theirs = (
                    ", ".join(f"{_name(p)}: {d.name}{s}" for p, s, d in ks if (p, s, d) not in other)
                    for ks, other in ((kinds, self.first), (self.first, kinds))
                )
                raise DataError(
                    f"sample {i} of the data set {self.name} is unlike sample 0: it has {mine or 'less'}, and sample 0 "
                    f"{theirs or 'less'}; pad, cut or cast in __getitem__"
                )
            rows.append([x for _, x in found])
        treedef = trees.flatten(samples[0] if samples else self._samples([0])[0], is_leaf=_is_row)[1]
        columns = [np.stack(c) for c in zip(*rows, strict=True)] or [np.empty((0, *s), d) for _, s, d in self.first]
        return trees.unflatten(treedef, columns)


def _name(path: trees.Path) -> str:
    return trees.path_name(path) or "its top"


def _is_row(x: Any) -> bool:
    """Whether a list is a row of numbers, which tables give instead of arrays."""
    return isinstance(x, list) and all(isinstance(v, _NUMBERS) or v is None or _is_row(v) for v in x)


def is_map_style(data: Any) -> bool:
    """Whether something is a data set of numbered samples, and no tree of arrays. A list of dicts is one; a tuple is a
    tree."""
    if isinstance(data, list):
        return bool(data) and all(isinstance(x, Mapping) for x in data)
    if isinstance(data, tuple | Mapping | str | bytes) or is_array(data):
        return False
    return callable(getattr(data, "__getitem__", None)) and callable(getattr(data, "__len__", None))


def is_array(x: Any) -> bool:
    """Whether NumPy converts an object to an array without indexing its elements."""
    return any(
        hasattr(x, name) for name in ("__array__", "__array_interface__", "__cuda_array_interface__", "__dlpack__")
    ) or isinstance(x, memoryview | bytearray)


def array_of(x: Any) -> np.ndarray:
    """A leaf of a tree of samples as an array. Other indexable objects are refused: NumPy might index them for ever."""
    if not is_array(x) and hasattr(x, "__getitem__") and not isinstance(x, Sequence):
        raise DataError(
            f"a {type(x).__name__} is no array of samples: give it as the data itself, where it has __len__ and "
            "__getitem__, or its arrays"
        )
    return np.asarray(x)
