"""A window onto an array of any rank: two of its dimensions as rows and columns, the others fixed, at any magnification.

Zoomed out, a window shows one element of every ``step``: it reads rows here and there, never the plane. Where even that would
read more than the budget allows, the step is made longer, and the window says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...arrays.blocks import Box
from ...arrays.errors import ArrayIndexError
from ..opened import StoredArray

CELLS = 64  # rows and columns of a window
BUDGET = 64 << 20  # bytes that one window may read


@dataclass(frozen=True)
class View:
    """Where to look. ``rows`` and ``columns`` are dimensions (rows is None for a vector or a scalar); ``at`` is one index a dimension.

    ``at[rows]`` and ``at[columns]`` are where the window starts; ``step`` is the distance of neighbouring cells; 0 asks for the
    step that shows the whole plane.
    """

    rows: int | None
    columns: int | None
    at: tuple[int, ...]
    step: int = 1

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        rows: int | None = None,
        columns: int | None = None,
        at: tuple[int, ...] = (),
        step: int = 0,
    ) -> View:
        """A sound view: what is left out is chosen, what lies outside is moved inside.

        >>> View.of((8, 5, 300))
        View(rows=1, columns=2, at=(0, 0, 0), step=5)
        >>> View.of((8, 5, 300), at=(99, 0, 280), step=1).at
        (7, 0, 236)
        """
        ndim = len(shape)
        if columns is None:
            columns = next((d for d in range(ndim - 1, -1, -1) if d != rows), None)
        if rows is None or rows == columns:
            rows = next((d for d in range(ndim - 1, -1, -1) if d != columns), None)
        for d in (rows, columns):
            if d is not None and not 0 <= d < ndim:
                raise ArrayIndexError(f"dimension {d} is out of range for an array of {ndim} dimensions")
        plane = [d for d in (rows, columns) if d is not None]
        if step <= 0:
            step = max([1, *(-(-shape[d] // CELLS) for d in plane)])
        place = []
        for d, n in enumerate(shape):
            i = at[d] if d < len(at) else 0
            last = max(0, n - 1 if d not in plane else n - (CELLS - 1) * step - 1)
            place.append(max(0, min(i, last)))
        return cls(rows, columns, tuple(place), step)


@dataclass(frozen=True)
class Window:
    """The values of a view, row by row, and what reading them took."""

    view: View
    values: np.ndarray
    nbytes: int
    shape: tuple[int, ...]

    def index(self, i: int, j: int) -> tuple[int, ...]:
        """The index in the array of the cell in row ``i``, column ``j``."""
        out = list(self.view.at)
        for d, k in ((self.view.rows, i), (self.view.columns, j)):
            if d is not None:
                out[d] += k * self.view.step
        return tuple(out)

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


def window(array: StoredArray, view: View, budget: int = BUDGET) -> Window:
    """Read a view; its step grows where reading would take more than ``budget`` bytes.

    >>> import os, tempfile
    >>> from meshtape.storage import open_checkpoint, save
    >>> where = os.path.join(tempfile.mkdtemp(), "c")
    >>> _ = save(where, {"w": np.arange(24.0).reshape(2, 3, 4)})
    >>> window(open_checkpoint(where)["w"], View.of((2, 3, 4), rows=0, at=(0, 1, 0))).values
    array([[ 4.,  5.,  6.,  7.],
           [16., 17., 18., 19.]])
    """
    if 0 in array.shape:
        return Window(view, np.empty((0, 0), array.dtype), 0, array.shape)
    if view.rows is not None and view.columns is not None and view.rows > view.columns:
        # Along the slower dimension as rows, as the file lies; the picture is turned afterwards.
        turned = window(array, View(view.columns, view.rows, view.at, view.step), budget)
        view = View(view.rows, view.columns, turned.view.at, turned.view.step)
        return Window(view, turned.values.T, turned.nbytes, array.shape)
    while True:
        groups = list(_groups(array, view))
        planned = sum(array.tensor.planned(box) for box, _ in groups)
        if planned <= budget or not _coarser(array, view):
            break
        view = View.of(array.shape, view.rows, view.columns, view.at, 2 * view.step)
    if planned > 4 * budget:
        raise ArrayIndexError(
            f"{array.name}: this plane takes {planned:,} bytes to read, as its chunks are long in other dimensions; "
            "choose other dimensions as rows and columns"
        )
    parts = []
    for box, row_step in groups:
        part = array.read(box)
        index: list[slice | int] = [0] * array.ndim
        if view.rows is not None:
            index[view.rows] = slice(None, None, row_step)
        if view.columns is not None:
            index[view.columns] = slice(None, None, view.step)
        plane = part[tuple(index)]
        parts.append(plane.reshape(1, -1) if view.rows is None else plane)
    return Window(view, np.concatenate(parts, axis=0), planned, array.shape)


def _coarser(array: StoredArray, view: View) -> bool:
    """Whether a longer step would read less: there must be more than a few cells to leave out."""
    plane = [d for d in (view.rows, view.columns) if d is not None]
    return any(-(-(array.shape[d] - view.at[d]) // view.step) > 8 for d in plane)


def _groups(array: StoredArray, view: View) -> Iterator[tuple[Box, int]]:
    """(box, distance of wanted rows in it): rows that share a chunk are read together, others alone."""
    offset, shape = list(view.at), [1] * array.ndim
    if view.columns is not None:
        n = min(CELLS, -(-(array.shape[view.columns] - view.at[view.columns]) // view.step))
        shape[view.columns] = (n - 1) * view.step + 1
    if view.rows is None:
        yield Box(tuple(offset), tuple(shape)), 1
        return
    first = view.at[view.rows]
    wanted = range(first, array.shape[view.rows], view.step)[:CELLS]
    length = max(1, array.tensor.chunk[view.rows])
    start = 0
    for k in range(1, len(wanted) + 1):
        if k == len(wanted) or wanted[k] // length != wanted[start] // length:
            offset[view.rows] = wanted[start]
            shape[view.rows] = wanted[k - 1] - wanted[start] + 1
            yield Box(tuple(offset), tuple(shape)), view.step
            start = k


