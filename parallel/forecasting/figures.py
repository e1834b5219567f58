"""Figures of devices and links: from data sheets by name, or from the caller."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays.core.errors import DeviceError, MeshError


@dataclass(frozen=True)
class DeviceFigures:
    """Peak figures of one device.

    Parameters
    ----------
    name
        The name to show.
    flops
        Dense floating-point operations a second by dtype. A dtype that is left out has those of ``float32``.
    bandwidth
        Bytes a second to and from its memory.
    memory
        Bytes, or None if unknown.
    overhead
        The least seconds of a call.
    cuda
        Whether elementwise calls are fused as on a GPU.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: float | None = None
    overhead: float = 4e-6
    cuda: bool = True

    def seconds(self, flops: float, nbytes: float, dtype: np.dtype) -> float:
        """Time of a call by the roofline model (Williams, Waterman, Patterson, 2009)."""
        return max(flops / self.flops.get(dtype.name, self.flops["float32"]), nbytes / self.bandwidth, self.overhead)


def _gpu(
    name: str, half: float, single: float, double: float, bandwidth: float, memory: int, eighth: float = 0.0
) -> DeviceFigures:
    """A GPU with its figures in teraflops, terabytes a second and gigabytes."""
    flops = {"bfloat16": half, "float16": half, "float32": single, "float64": double}
    flops |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), eighth or half)
    return DeviceFigures(name, {k: v * 1e12 for k, v in flops.items()}, bandwidth * 1e12, memory * 1e9)


DEVICES = {
    d.name: d
    for d in (
        _gpu("V100-32GB", 125, 15.7, 7.8, 0.9, 32),
        _gpu("A100-40GB", 312, 19.5, 19.5, 1.555, 40),
        _gpu("A100-80GB", 312, 19.5, 19.5, 2.039, 80),
        _gpu("L40S-48GB", 362, 91.6, 1.4, 0.864, 48, 733),
        _gpu("H100-80GB", 989, 67, 67, 3.35, 80, 1979),
        _gpu("H200-141GB", 989, 67, 67, 4.8, 141, 1979),
        _gpu("B200-180GB", 2250, 75, 37, 7.7, 180, 4500),
        DeviceFigures("CPU-core", {"float32": 1e11, "float64": 5e10}, 1e10, None, 2e-6, False),
    )
}
"""Dense peaks as their makers print them; ``CPU-core`` is one core of a server."""


@dataclass(frozen=True)
class LinkFigures:
    """Figures of the links between ranks, and of the store.

    Parameters
    ----------
    ranks_per_host
        How many consecutive ranks share a host.
    within, across
        Latency in seconds and bytes a second of a rank's link to ranks of its host, and to others.
    store
        Bytes a second that one host writes to the store of checkpoints.
    """

    ranks_per_host: int = 8
    within: tuple[float, float] = (3e-6, 450e9)
    across: tuple[float, float] = (10e-6, 50e9)
    store: float = 2e9


def device_figures(device: Any) -> DeviceFigures:
    """The figures of a device by name, or those given as a mapping.

    Raises
    ------
    DeviceError
        For an unknown name, and figures that are missing or not positive; lists the known devices.

    >>> device_figures("H200-141GB").bandwidth
    4800000000000.0
    >>> device_figures({"flops": 1e12, "bandwidth": 1e11}).seconds(2e12, 0, np.dtype("f4"))
    2.0
    """
    if isinstance(device, DeviceFigures):
        return device
    if isinstance(device, str):
        if device not in DEVICES:
            raise DeviceError(
                f"[forecast] no figures of a device {device!r}: known are {', '.join(DEVICES)}; or pass a dict such as "
                '{"flops": 1e14, "bandwidth": 1e12, "memory": 40e9}'
            )
        return DEVICES[device]
    if not isinstance(device, Mapping):
        raise DeviceError(f"[forecast] device is a name ({', '.join(DEVICES)}) or a dict of figures, got {device!r}")
    given = {"name": "device", "cuda": False} | dict(device)
    known = [f.name for f in dataclasses.fields(DeviceFigures)]
    flops = given.get("flops")
    given["flops"] = flops = {"float32": flops} if not isinstance(flops, Mapping) else dict(flops)
    _check("device", given, known, ("flops", "bandwidth"), DeviceError)
    if "float32" not in flops or not all(_positive(x) for x in flops.values()):
        raise DeviceError(f"[forecast] flops are positive numbers by dtype, float32 among them, got {flops}")
    for name in ("bandwidth", "memory", "overhead"):
        if given.get(name) is not None and not _positive(given[name]):
            raise DeviceError(f"[forecast] {name} of a device is a positive number, got {given[name]!r}")
    return DeviceFigures(**given)


def link_figures(links: Any) -> LinkFigures:
    """The figures of links, those that a mapping leaves out by default.

    Raises
    ------
    MeshError
        For unknown or impossible figures.

    >>> link_figures({"ranks_per_host": 4}).ranks_per_host
    4
    """
    if links is None or isinstance(links, LinkFigures):
        return links or LinkFigures()
    if not isinstance(links, Mapping):
        raise MeshError(f"[forecast] links is a dict of figures, got {links!r}")
    _check("links", links, [f.name for f in dataclasses.fields(LinkFigures)], (), MeshError)
    found = LinkFigures(**links)
    if type(found.ranks_per_host) is not int or found.ranks_per_host < 1:
        raise MeshError(f"[forecast] ranks_per_host is at least 1, got {found.ranks_per_host!r}")
    for name in ("within", "across"):
        pair = getattr(found, name)
        if (
            not isinstance(pair, tuple | list)
            or len(pair) != 2
            or not _positive(pair[1])
            or not (_positive(pair[0]) or pair[0] == 0)
        ):
            raise MeshError(f"[forecast] {name} is (latency in seconds, bytes a second), got {pair!r}")
    if not _positive(found.store):
        raise MeshError(f"[forecast] store is bytes a second, got {found.store!r}")
    return found


def _check(
    what: str, given: Mapping[str, Any], known: list[str], needed: tuple[str, ...], error: type[Exception]
) -> None:
    unknown, missing = sorted(set(given) - set(known)), [n for n in needed if given.get(n) is None]
    if unknown or missing:
        wrong = f"has no {unknown[0]!r}" if unknown else f"lacks {missing[0]!r}"
        raise error(f"[forecast] {what} {wrong}: its figures are {', '.join(known)}")


def _positive(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < float("inf")
