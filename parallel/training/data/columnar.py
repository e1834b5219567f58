"""Samples in the rows of tables: Parquet files, Arrow files, and Arrow tables in memory."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ....arrays.core.errors import BackendError, DataError
from .parts import PartedSource, Sized


def _need_pyarrow(what: str) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        raise BackendError(f"{what} read by pyarrow, which is not installed: pip install pyarrow")


def _files(paths: Any, *patterns: str) -> list[str]:
    """One path or several, with the files of directories in order."""
    given = [Path(p) for p in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    return [str(f) for p in given for f in (sorted(f for q in patterns for f in p.glob(q)) if p.is_dir() else [p])]


class ParquetSource(PartedSource):
    """Rows of Parquet files (needs pyarrow). Workers read their own rows; a row group is the unit of reading.

    Parameters
    ----------
    paths
        A file, a directory of ``*.parquet``, or several files; their rows are numbered in this order.
    columns
        Names of columns; all by default. Lists of one length become a second dimension.
    cached
        Row groups that are kept in memory.
    """

    remote = True

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        columns: Sequence[str] | None = None,
        *,
        cached: int = 4,
    ) -> None:
        _need_pyarrow("Parquet files are")
        import pyarrow.parquet as pq

        self.paths = _files(paths, "*.parquet")
        self.columns = None if columns is None else list(columns)
        super().__init__(cached)
        self.groups: list[tuple[str, int]] = []
        self.starts: list[int] = []
        total = 0
        for path in self.paths:
            try:
                metadata = pq.read_metadata(path)
            except (OSError, ValueError) as e:  # ArrowInvalid is a ValueError
                raise DataError(f"{path} is no Parquet file: {e}") from e
            for g in range(metadata.num_row_groups):
                self.groups.append((path, g))
                self.starts.append(total)
                total += metadata.row_group(g).num_rows
        if not total:
            raise DataError(f"no rows in the Parquet file(s) {self.paths or paths}")
        self._size = total

    def _load(self, number: int) -> dict[str, np.ndarray]:
        import pyarrow.parquet as pq

        path, g = self.groups[number]
        with pq.ParquetFile(path) as file:
            table = file.read_row_group(g, columns=self.columns)
        return {n: _column(path, n, table.column(n)) for n in table.column_names}


class ArrowSource(Sized):
    """Rows of an Arrow table, or of Arrow files (needs pyarrow). Workers read their own rows of files.

    Parameters
    ----------
    data
        A ``pyarrow.Table``; or a file, a directory of ``*.arrow`` and ``*.feather``, or several files, in Arrow's file
        or stream format (Feather, and files of Hugging Face datasets). Files are memory-mapped: uncompressed data is
        read lazily.
    columns
        Names of columns; all by default. Lists of one length become a second dimension.

    Raises
    ------
    DataError
        For no file of Arrow, columns that are not there or have missing values, and no rows.
    BackendError
        Without pyarrow.

    Examples
    --------
    >>> import numpy as np
    >>> import pyarrow as pa
    >>> source = ArrowSource(pa.table({"x": [[1, 2], [3, 4], [5, 6]], "y": [0, 1, 0]}))
    >>> len(source), source.read(np.array([2, 0]))["x"].tolist()
    (3, [[5, 6], [1, 2]])
    """

    def __init__(self, data: Any, columns: Sequence[str] | None = None) -> None:
        _need_pyarrow("Arrow tables are")
        self.columns = None if columns is None else list(columns)
        self.remote = isinstance(data, str | os.PathLike) or not hasattr(data, "column_names")
        self.paths = _files(data, "*.arrow", "*.feather") if self.remote else []
        self._held = None if self.remote else data
        table = self._table()
        if not len(table):
            raise DataError(f"no rows in {self._name}")
        self._size = len(table)

    @property
    def _name(self) -> str:
        return ", ".join(self.paths[:3]) + ", …" * (len(self.paths) > 3) or "the Arrow table"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None if self.remote else self._held}  # files are mapped where they are read

    def _table(self) -> Any:
        if self._held is None:
            import pyarrow as pa

            if not self.paths:
                raise DataError("no Arrow files were given, or there are none in the directory")
            try:
                self._held = pa.concat_tables([_mapped(p) for p in self.paths])
            except pa.ArrowInvalid as e:
                raise DataError(f"the tables of {self._name} do not fit together: {e}") from e
        if self.columns is not None and self._held.column_names != self.columns:
            missing = sorted(set(self.columns) - set(self._held.column_names))
            if missing:
                raise DataError(f"{self._name} has no column {missing}; it has {self._held.column_names}")
            self._held = self._held.select(self.columns)
        return self._held

    def read(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """See :class:`Source`."""
        rows = self._table().take(np.asarray(ids, np.int64))
        return {n: _column(self._name, n, rows.column(n)) for n in rows.column_names}


def _mapped(path: str) -> Any:
    import pyarrow as pa

    try:
        file = pa.memory_map(path)
        try:
            return pa.ipc.open_file(file).read_all()
        except pa.ArrowInvalid:  # the other of the two formats
            file.seek(0)
            return pa.ipc.open_stream(file).read_all()
    except (OSError, ValueError) as e:  # ArrowInvalid is a ValueError
        raise DataError(f"{path} is no Arrow file: {e}") from e


def _column(path: str, name: str, column: Any) -> np.ndarray:
    if column.null_count:
        raise DataError(f"{path}: column {name!r} has {column.null_count} missing values; fill or drop them first")
    values = column.to_numpy()
    if values.dtype != object:
        return values
    rows = [np.asarray(v) for v in values]
    lengths = {r.shape for r in rows}
    if len(lengths) != 1 or rows[0].dtype.kind not in "biuf":
        raise DataError(f"{path}: column {name!r} is neither numbers nor lists of numbers of one length")
    return np.stack(rows)
