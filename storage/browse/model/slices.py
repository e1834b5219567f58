"""A window onto an array of any rank: two of its dimensions as rows and columns, the others fixed, at any
magnification.

Zoomed out, a window shows every k-th row and column: it reads rows here and there, never the plane. Where even that
would read more than the budget allows, rows are left out, and the window says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ....arrays.core.blocks import Box
from ....arrays.core.errors import ArrayIndexError
from ...checkpoint.checkpoint import StoredArray
from ...readers.shared import once
from .pieces import refuse_giants

CELLS = 64  # rows and columns of a window
BUDGET = 64 << 20  # bytes that one window may read


@dataclass(frozen=True)
class SliceView:
    """Where to look. ``rows`` and ``columns`` are dimensions (rows is None for a vector or a scalar); ``at`` is one
    index a dimension.

    ``at[rows]`` and ``at[columns]`` are where the window starts; ``steps`` are the distances of neighbouring rows and
    columns.
    """

    rows: int | None
    columns: int | None
    at: tuple[int, ...]
    steps: tuple[int, int] = (1, 1)

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        rows: int | None = None,
        columns: int | None = None,
        at: tuple[int, ...] = (),
        steps: tuple[int, int] = (0, 0),
    ) -> SliceView:
        """A valid view: missing values are chosen, others moved inside the array. A step of 0 shows a whole dimension.

        >>> SliceView.of((8, 5, 300))
        SliceView(rows=1, columns=2, at=(0, 0, 0), steps=(1, 5))
        >>> SliceView.of((8, 5, 300), at=(99, 0, 280), steps=(1, 1)).at
        (7, 0, 236)
        """
        ndim = len(shape)
        if columns is None:
            columns = next((d for d in range(ndim - 1, -1, -1) if d != rows), rows)
        if rows is None or rows == columns:
            rows = next((d for d in range(ndim - 1, -1, -1) if d != columns), None)
        for d in (rows, columns):
            if d is not None and not 0 <= d < ndim:
                raise ArrayIndexError(f"dimension {d} is out of range for an array of {ndim} dimensions")
        own: dict[int | None, int] = {None: 1}
        for d, step in zip((rows, columns), steps, strict=True):
            if d is not None:
                own[d] = min(step, max(shape[d], 1)) if step > 0 else max(1, -(-shape[d] // CELLS))
        place = []
        for d, n in enumerate(shape):
            last = n - 1 - ((CELLS - 1) * own[d] if d in own else 0)
            place.append(max(0, min(at[d] if d < len(at) else 0, last)))
        return cls(rows, columns, tuple(place), (own[rows], own[columns]))

    @property
    def is_turned(self) -> bool:
        """Whether rows run along the faster dimension: the file is read the other way round, and the picture turned."""
        return self.rows is not None and self.columns is not None and self.rows > self.columns

    @property
    def turned(self) -> SliceView:
        return SliceView(self.columns, self.rows, self.at, self.steps[::-1])

    def zoomed(self, shape: tuple[int, ...], factor: float) -> SliceView:
        """The view with its steps multiplied, as far as a window can show."""
        most = SliceView.of(shape, self.rows, self.columns).steps
        steps = tuple(max(1, min(int(s * factor), m)) for s, m in zip(self.steps, most, strict=True))
        return SliceView.of(shape, self.rows, self.columns, self.at, (steps[0], steps[1]))

    def moved(self, shape: tuple[int, ...], dimension: int, windows: int) -> SliceView:
        """The view moved by whole windows along its rows' or columns' dimension."""
        at = list(self.at)
        at[dimension] = max(0, at[dimension] + windows * CELLS * self.steps[0 if dimension == self.rows else 1])
        return SliceView.of(shape, self.rows, self.columns, tuple(at), self.steps)


@dataclass(frozen=True)
class SliceValues:
    """The values of a view, row by row, and the cost of reading them."""

    view: SliceView
    values: np.ndarray
    nbytes: int
    shape: tuple[int, ...]

    @property
    def limits(self) -> tuple[float, float] | None:
        """Smallest and largest finite value, or None."""
        numbers = self.numbers
        finite = numbers[np.isfinite(numbers)]
        return (float(finite.min()), float(finite.max())) if finite.size else None

    @property
    def numbers(self) -> np.ndarray:
        """As float64: complex values as magnitudes."""
        with np.errstate(all="ignore"):
            return (np.abs(self.values) if self.values.dtype.kind == "c" else self.values).astype(np.float64)


def window(array: StoredArray, view: SliceView, budget: int = BUDGET) -> SliceValues:
    """Read a view; its step grows where reading would take more than ``budget`` bytes.

    >>> import os, tempfile
    >>> from meshtape.storage import open_checkpoint, save
    >>> where = os.path.join(tempfile.mkdtemp(), "c")
    >>> _ = save(where, {"w": np.arange(24.0).reshape(2, 3, 4)})
    >>> window(open_checkpoint(where)["w"], SliceView.of((2, 3, 4), rows=0, at=(0, 1, 0))).values
    array([[ 4.,  5.,  6.,  7.],
           [16., 17., 18., 19.]])
    """
    if 0 in array.shape:
        return SliceValues(view, np.empty((0, 0), array.dtype), 0, array.shape)
    refuse_giants(array)
    if view.is_turned:
        turned = window(array, view.turned, budget)
        return SliceValues(turned.view.turned, turned.values.T, turned.nbytes, array.shape)
    while True:
        groups = list(_groups(array, view))
        planned = sum(once("planned", array.tensor, box) for box, _ in groups)
        if planned <= budget or view.rows is None or len(groups) <= 8:
            break
        # Fewer rows: what lies between the columns of one row is read anyway.
        view = SliceView.of(array.shape, view.rows, view.columns, view.at, (2 * view.steps[0], view.steps[1]))
    if planned > 4 * budget:
        raise ArrayIndexError(
            f"{array.name}: this plane takes {planned:,} bytes to read, as its chunks are long in other dimensions; "
            "choose other dimensions as rows and columns"
        )
    parts = []
    for box, row_step in groups:
        every = {view.columns: slice(None, None, view.steps[1]), view.rows: slice(None, None, row_step)}
        plane = array.read(box)[tuple(every.get(d, 0) for d in range(array.ndim))]
        parts.append(plane.reshape(1, -1) if view.rows is None else plane)
    return SliceValues(view, np.concatenate(parts, axis=0), planned, array.shape)


def cost(array: StoredArray, view: SliceView) -> int:
    """Bytes that reading a view would take."""
    if 0 in array.shape:
        return 0
    return sum(once("planned", array.tensor, box) for box, _ in _groups(array, view.turned if view.is_turned else view))


def _groups(array: StoredArray, view: SliceView) -> Iterator[tuple[Box, int]]:
    """(box, distance of wanted rows in it): rows that share a chunk are read together, others alone."""
    offset, shape = list(view.at), [1] * array.ndim
    if view.columns is not None:
        n = min(CELLS, -(-(array.shape[view.columns] - view.at[view.columns]) // view.steps[1]))
        shape[view.columns] = (n - 1) * view.steps[1] + 1
    if view.rows is None:
        yield Box(tuple(offset), tuple(shape)), 1
        return
    first = view.at[view.rows]
    wanted = range(first, array.shape[view.rows], view.steps[0])[:CELLS]
    length = max(1, array.tensor.chunk[view.rows])
    start = 0
    for k in range(1, len(wanted) + 1):
        if k == len(wanted) or wanted[k] // length != wanted[start] // length:
            offset[view.rows] = wanted[start]
            shape[view.rows] = wanted[k - 1] - wanted[start] + 1
            yield Box(tuple(offset), tuple(shape)), view.steps[0]
            start = k
