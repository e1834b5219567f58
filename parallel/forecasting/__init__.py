"""Forecasts: memory, messages and time of a step on a mesh of any size, from its program alone.

No worker is asked and no array is made. The partitioner writes the rank program of thousands of virtual ranks, as it
does for a run; the replay takes its steps as an executor would, and keeps account of blocks, messages and time.
``specs`` makes programs of shapes, ``traffic`` counts messages, ``costs`` and ``figures`` say how long things take,
``report`` shows it. Imports mesh, execution and partition. Begin with replay.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ...arrays.core.errors import MeshError
from ...autodiff.transforms import check_function
from ..partition.overlap import Buckets
from .figures import DEVICES, DeviceFigures, LinkFigures, device_figures, link_figures
from .replay import Order, RankForecast, Replay
from .report import Forecast
from .specs import Place, abstract, planned

__all__ = ["DEVICES", "DeviceFigures", "Forecast", "LinkFigures", "RankForecast", "abstract", "forecast"]


def forecast(
    step: Callable[..., Any],
    *args: Any,
    mesh_shape: Mapping[str, int] | None = None,
    device: str | Mapping[str, Any] | DeviceFigures = "H100-80GB",
    links: Mapping[str, Any] | LinkFigures | None = None,
    place: Place | None = None,
) -> Forecast:
    """Memory, messages and time of a rank for ``step(*args)`` on a mesh of any size. Nothing is computed.

    Every rank is a process with a device of its own. Bytes and messages are those that the executor would send. Times
    are lower bounds by data sheets: calls take as long as their operations or their bytes (a roofline), rounds of
    messages a latency each message and their bytes over the link, and rounds that start early run beside the
    computation.

    Parameters
    ----------
    step
        A function of arrays, such as a training step; it is traced as :func:`compile` does.
    args
        Its arguments: trees of arrays, or of anything with ``shape`` and ``dtype`` and perhaps a ``sharding``
        (``mt.ShapeDtype``, results of :func:`abstract`). Values are not read, but for numbers that are no arrays.
    mesh_shape
        Names and lengths of the axes. Arguments keep their placements by name; a mesh of their own may have other
        lengths. By default their mesh.
    device
        A name (``"H100-80GB"``), or figures: ``{"flops": …, "bandwidth": …, "memory": …}``.
    links
        Figures of links: ``{"ranks_per_host": 8, "within": (latency, bytes a second), "across": …, "store": …}``.
    place
        ``place(path, leaf, mesh)``: the sharding of each argument in place of its own; None replicates.

    Raises
    ------
    MeshError
        For axes that are no mesh or that arguments do not find, and links that do not fit.
    DeviceError
        For a device without figures; lists those that are known.
    ShardingConflict
        For an argument that lacks a dimension that is split.
    TracedValueError
        Where the step asks for a value.

    Examples
    --------
    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"data": 2})
    >>> def step(w, x):
    ...     return w - 0.1 * mt.grad(lambda w: mt.mean((x @ w) ** 2))(w)
    >>> x = mt.distribute(mt.ones((1 << 15, 1024)), mesh, data=mt.Shard(0))
    >>> f = mt.forecast(step, mt.ShapeDtype((1024, 1024), "float64"), x, mesh_shape={"data": 4096}, device="H100-80GB")
    >>> f.ranks, f.fullest.kinds["parameters"], f.fits
    (4096, 8388608, True)
    """
    check_function("forecast", step)
    figures, wires = device_figures(device), link_figures(links)
    made, mesh = planned(step, args, mesh_shape, place)
    per_host = wires.ranks_per_host
    if mesh.size > per_host and mesh.size % per_host:
        raise MeshError(
            f"[forecast] {mesh.size:,} ranks do not fill hosts of ranks_per_host={per_host}: take a multiple, or "
            f"links={{'ranks_per_host': …}}"
        )
    order = Order(made.program, mesh.names, made.kinds, figures.cuda, Buckets.configured(), per_host)

    @functools.cache
    def of(rank: int) -> RankForecast:
        return Replay(order, rank).forecast(figures, wires)

    nbytes = sum(a.nbytes for a in made.state)
    remarks = ()
    if made.uneven:
        some = ", ".join(made.uneven[:3]) + (" …" if len(made.uneven) > 3 else "")
        remarks = (
            f"{len(made.uneven)} inputs are cut in blocks of several lengths, as ranks do not divide them: {some}",
        )
    looked_at = tuple(of(r) for r in dict.fromkeys((0, mesh.size - 1)))
    return Forecast(
        mesh.describe(), figures, wires, looked_at, nbytes, nbytes / (order.hosts * wires.store), remarks, of
    )
