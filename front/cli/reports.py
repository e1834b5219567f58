"""The reports of ``storage`` as the data that ``--json`` prints: what several commands say has one name in all of them.

``arrays`` counts arrays and ``nbytes`` the bytes of their elements; ``file_nbytes`` are the bytes of files, which hold checksums, headers
and tables of contents besides.
"""

from __future__ import annotations

import dataclasses
from functools import singledispatch
from typing import Any

from ..storage.loading.verify import VerifyReport
from ..storage.transform.convert import ConvertReport
from ..storage.transform.diff import DiffReport
from ..storage.transform.estimate import Estimate
from ..storage.transform.merge import MergeReport


@singledispatch
def data(report: Any) -> dict[str, Any]:
    """A report as plain data.

    >>> data(VerifyReport("run", arrays=2, files=3, nbytes=400, seconds=0.5))
    {'path': 'run', 'arrays': 2, 'files': 3, 'file_nbytes': 400, 'seconds': 0.5, 'uncovered': [], 'skipped': []}
    """
    raise TypeError(f"no JSON for a {type(report).__name__}")


@data.register
def _verified(r: VerifyReport) -> dict[str, Any]:
    said = {"path": r.path, "arrays": r.arrays, "files": r.files, "file_nbytes": r.nbytes, "seconds": r.seconds}
    return said | {"uncovered": r.uncovered, "skipped": r.skipped}


@data.register
def _compared(r: DiffReport) -> dict[str, Any]:
    return {
        "a": r.a,
        "b": r.b,
        "same": r.same,
        "equal": r.equal,
        "only_a": r.only_a,
        "only_b": r.only_b,
        "differing": [dataclasses.asdict(d) for d in r.arrays],
        "values": r.values,
        "skipped": r.skipped,
    }


@data.register
def _estimated(e: Estimate) -> dict[str, Any]:
    return {
        "arrays": e.arrays,
        "elements": e.elements,
        "nbytes": e.nbytes,
        "zarr": e.zarr,
        "compression": e.compression,
        "safetensors": e.safetensors,
        "safetensors_files": e.files,
        "largest": e.largest,
        "ranks": [dataclasses.asdict(r) | {"total": r.total} for r in e.ranks],
    }


@data.register
def _merged(r: MergeReport) -> dict[str, Any]:
    return _written(r)


@data.register
def _converted(r: ConvertReport) -> dict[str, Any]:
    return _written(r) | {"file_nbytes": r.nbytes, "resumed": r.resumed}


def _written(r: MergeReport | ConvertReport) -> dict[str, Any]:
    return {
        "path": r.path,
        "arrays": r.arrays,
        "nbytes": r.total_size,
        "written": r.files,
        "skipped": r.skipped,
        "notes": r.notes,
        "left_behind": r.left_behind,
        "losses": {name: dataclasses.asdict(loss) for name, loss in r.losses.items()},
        "seconds": r.seconds,
    }
