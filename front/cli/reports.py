"""The reports of ``storage`` as data for ``--json``, with common names in all commands.

``arrays`` counts arrays and ``nbytes`` the bytes of their elements; ``file_nbytes`` are the bytes of files, which hold
checksums, headers and tables of contents besides.
"""

from __future__ import annotations

import dataclasses
from functools import singledispatch
from typing import Any

from ..storage.blending.blend import BlendReport
from ..storage.blending.lora import LoraReport
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


def _fields(report: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(report, name) for name in names}


@data.register
def _verified(r: VerifyReport) -> dict[str, Any]:
    said = _fields(r, "path", "arrays", "files") | {"file_nbytes": r.nbytes}
    return said | _fields(r, "seconds", "uncovered", "skipped")


@data.register
def _compared(r: DiffReport) -> dict[str, Any]:
    said = _fields(r, "a", "b", "same", "equal", "only_a", "only_b")
    return said | {"differing": [dataclasses.asdict(d) for d in r.arrays]} | _fields(r, "values", "skipped")


@data.register
def _estimated(e: Estimate) -> dict[str, Any]:
    said = _fields(e, "arrays", "elements", "nbytes", "zarr", "compression", "safetensors")
    ranks = [dataclasses.asdict(r) | {"total": r.total} for r in e.ranks]
    return said | {"safetensors_files": e.files, "largest": e.largest, "ranks": ranks}


@data.register
def _written(r: MergeReport | ConvertReport) -> dict[str, Any]:
    said = _fields(r, "path", "arrays") | {"nbytes": r.total_size, "written": r.files}
    losses = {name: dataclasses.asdict(loss) for name, loss in r.losses.items()}
    return said | _fields(r, "skipped", "notes", "left_behind") | {"losses": losses, "seconds": r.seconds}


@data.register
def _converted(r: ConvertReport) -> dict[str, Any]:
    return _written(r) | {"file_nbytes": r.nbytes, "resumed": r.resumed}


@data.register
def _blended(r: BlendReport) -> dict[str, Any]:
    return _converted(r) | {"made": {name: dataclasses.asdict(a) for name, a in r.made.items()}}


@data.register
def _extracted(r: LoraReport) -> dict[str, Any]:
    return _fields(r, "path", "ranks", "energy", "left", "seconds")
