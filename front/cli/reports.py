"""The reports of ``storage`` as data for ``--json``, with common names in all commands.

``arrays`` counts arrays and ``nbytes`` the bytes of their elements; ``file_nbytes`` are the bytes of files, which hold
checksums, headers and tables of contents besides.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..storage.blending.blend import BlendReport
from ..storage.blending.lora import LoraReport
from ..storage.loading.usage import RepositoryUsage, StepUsage, UnreadStep, Usage
from ..storage.loading.verify import VerifyReport
from ..storage.transform.convert import ConvertReport
from ..storage.transform.diff import DiffReport
from ..storage.transform.estimate import Estimate, RankMemory
from ..storage.transform.merge import MergeReport

_MERGED = "path arrays nbytes=total_size written=files skipped notes left_behind losses seconds"
_CONVERTED = f"{_MERGED} file_nbytes=nbytes resumed"
# The names in the data, each with that in the report where it is another.
_NAMES: dict[type, str] = {
    VerifyReport: "path arrays files file_nbytes=nbytes seconds uncovered skipped",
    DiffReport: "a b same equal only_a only_b differing=arrays values skipped",
    Estimate: "arrays elements nbytes zarr compression safetensors safetensors_files=files largest ranks",
    MergeReport: _MERGED,
    ConvertReport: _CONVERTED,
    BlendReport: f"{_CONVERTED} made",
    LoraReport: "path ranks energy left notes seconds",
    Usage: "path file_nbytes=nbytes steps unread",
    StepUsage: "path step arrays nbytes=total_size file_nbytes=nbytes freed base",
    UnreadStep: "path file_nbytes=nbytes why",
    RepositoryUsage: "path file_nbytes=nbytes chunks inlined virtual unreachable",
}


def data(report: Any) -> dict[str, Any]:
    """A report as plain data.

    >>> data(VerifyReport("run", arrays=2, files=3, nbytes=400, seconds=0.5))
    {'path': 'run', 'arrays': 2, 'files': 3, 'file_nbytes': 400, 'seconds': 0.5, 'uncovered': [], 'skipped': []}
    """
    pairs = (pair.partition("=") for pair in _NAMES[type(report)].split())
    found = {name: _plain(getattr(report, of or name)) for name, _, of in pairs}
    return found | {"skipped": list(found["skipped"])} if "skipped" in found else found


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if type(value) in _NAMES:
        return data(value)
    if isinstance(value, RankMemory):
        return dataclasses.asdict(value) | {"total": value.total}
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
