"""The device of each process of a mesh, and the transport between GPUs.

Every process reports its visible GPUs (:func:`visible`). The client chooses for all of them (:func:`choose`), so that
no two processes take one GPU while another is idle. dask-cuda shows each worker all GPUs, its own one first; plain
workers of a host see the same GPUs in the same order. Taking the first GPU that the fewest others have taken serves
both.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from ...arrays.backends.backend import CuPyBackend, cupy_backend
from ...arrays.core.devices import CPU, Device, default_device, device
from ...arrays.core.errors import BackendError, DeviceError
from ..transports.nccl import nccl


class Gpus(NamedTuple):
    """The visible GPUs of a process. ``ids`` name them in its own order; a GPU has the same id in every process.
    ``missing`` says why there is none, ``without_nccl`` why NCCL cannot be used. ``nccl`` is its version."""

    ids: tuple[str, ...] = ()
    missing: str = ""
    nccl: int = 0
    without_nccl: str = ""


class DeviceChoice(NamedTuple):
    """The chosen devices by process, and whether GPUs use NCCL. ``why`` gives the reason against NCCL or GPUs."""

    devices: tuple[str, ...]
    nccl: bool = False
    why: str = ""

    @property
    def text(self) -> str | None:
        """The choice in words, for a ``repr``; None for a CPU without a special reason."""
        if self.devices[0] == "cpu":
            return f"cpu: {self.why}" if self.why else None
        where = "cuda" if len(self.devices) > 1 else self.devices[0]
        if len(self.devices) == 1:
            return where
        return f"{where}, NCCL between GPUs" if self.nccl else f"{where}, messages through host memory: {self.why}"


def visible() -> Gpus:
    """The GPUs that this process sees. CuPy is imported only if a driver with a device answers."""
    problem = _no_driver()
    if problem:
        return Gpus(missing=problem)
    try:
        backend = cupy_backend()
    except BackendError as e:
        return Gpus(missing=str(e))
    ids = tuple(_identity(backend, i) for i in range(backend.device_count()))
    try:
        return Gpus(ids, nccl=int(nccl().get_version()))
    except BackendError as e:
        return Gpus(ids, without_nccl=str(e))


def _no_driver() -> str:
    """Why the CUDA driver has no device for this process; empty if it has one. Respects ``CUDA_VISIBLE_DEVICES``."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return "there is no CUDA driver"
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the CUDA driver shows no device"
    return ""


def _identity(backend: CuPyBackend, index: int) -> str:
    found = backend.xp.cuda.runtime.getDeviceProperties(index).get("uuid")
    # (Without one, the place on the bus and the host's name would do; every driver since CUDA 10 has one.)
    if not found:
        raise DeviceError(f"cuda:{index} has no UUID: this CUDA driver is too old for a mesh")
    return bytes(found).hex()


def local_device(wanted: str | Device | None) -> str:
    """The device of a mesh whose ranks are all in this process: they share one. Raises :class:`DeviceError` for an
    unknown device or one that is not here, :class:`BackendError` where CuPy or a driver is missing.

    >>> local_device(None)
    'cpu'
    """
    chosen = default_device() if wanted is None else device(wanted)
    if chosen != CPU and chosen.index >= (n := cupy_backend().device_count()):
        raise DeviceError(f"there is no {chosen}: this machine has {n} CUDA device(s)")
    return str(chosen)


def choose(
    wanted: str | Device | None, found: Mapping[str, Gpus], *, plain: bool = True, ports: bool = True
) -> DeviceChoice:
    """The device of each process, from what each sees (``found``, in the order of processes).

    ``"cuda"`` is a GPU for each, shared where there are too few; ``"cuda:N"`` the N-th that each sees; None GPUs where
    each process has one to itself, else the CPU. NCCL needs messages that are not encrypted (``plain``) and open ports
    (``ports``). Raises :class:`DeviceError`, which names the process, where one has no such GPU.

    >>> same_host = {"w0": Gpus(("A", "B")), "w1": Gpus(("A", "B"))}
    >>> choose("cuda", same_host).devices
    ('cuda:0', 'cuda:1')
    >>> dask_cuda = {"w0": Gpus(("A", "B")), "w1": Gpus(("B", "A"))}
    >>> choose(None, dask_cuda).devices
    ('cuda:0', 'cuda:0')
    >>> choose(None, {"w0": Gpus(("A",)), "w1": Gpus(("A",))}).text
    "cpu: 2 workers share 1 GPU; device='cuda' lets them"
    """
    cpu = ("cpu",) * len(found)
    text = None if wanted is None else str(wanted)
    if text not in (None, "cuda") and device(text).kind == "cpu":
        return DeviceChoice(cpu)
    if wanted is None:
        have = [a for a, g in found.items() if g.ids]
        if len(have) < len(found):
            lacking = next(a for a, g in found.items() if not g.ids)
            return DeviceChoice(cpu, why=f"worker {lacking} has no GPU ({found[lacking].missing})" if have else "")
    for address, g in found.items():
        index = 0 if text in (None, "cuda") else device(text).index
        if not g.ids:
            raise DeviceError(f"worker {address} has no GPU: {g.missing}; use device='cpu', or workers that have one")
        if index >= len(g.ids):
            raise DeviceError(f"worker {address} has no cuda:{index}: it sees {len(g.ids)} GPU(s)")
    taken: Counter[str] = Counter()
    places = []
    for g in found.values():
        at = min(range(len(g.ids)), key=lambda i: taken[g.ids[i]]) if text in (None, "cuda") else device(text).index
        taken[g.ids[at]] += 1
        places.append(f"cuda:{at}")
    shared = max(taken.values()) > 1
    few = f"{len(found)} workers share {len(taken)} GPU{'s' if len(taken) > 1 else ''}"
    if wanted is None and shared:
        return DeviceChoice(cpu, why=f"{few}; device='cuda' lets them")
    why = few if shared else _without_nccl(found, plain, ports)
    return DeviceChoice(tuple(places), len(found) > 1 and not why, why)


def _without_nccl(found: Mapping[str, Gpus], plain: bool, ports: bool) -> str:
    """Why NCCL cannot connect these processes; empty if it can."""
    for address, g in found.items():
        if not g.nccl:
            return f"worker {address} has no NCCL ({g.without_nccl})"
    if len(versions := {g.nccl for g in found.values()}) > 1:
        return f"workers have NCCL {' and '.join(map(str, sorted(versions)))}"
    if not plain:
        return "the cluster uses TLS, and NCCL does not encrypt"
    return "" if ports else "meshtape.transport is comms, and NCCL opens ports of its own"
