"""Unpickling of arrays: on their old device, in memory that nobody else can write to."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backends.backend import backend_for
from ..core.array import Array
from ..core.devices import CPU, device
from ..core.dispatch import wrap
from ..core.errors import BackendError, DeviceError
from ..core.op import state


def unpickle(host: np.ndarray, where: str | None = None) -> Array:
    """An array as it was pickled: on the device where it was, or on that of ``mt.use_device``."""
    if where is None:
        return wrap(host if _is_frozen(host) else host.copy())
    target = state.device or device(where)
    try:
        return wrap(backend_for(target).from_host(host.copy() if target is CPU else host, target))
    except (BackendError, DeviceError) as e:
        raise type(e)(
            f"[pickle] this array was pickled on {where}, and goes to {target}: {e}. Inside `with "
            "mt.use_device('cpu'):` it is unpickled on the CPU; to send it anywhere, pickle x.to_device('cpu')"
        ) from None


def _is_frozen(host: np.ndarray) -> bool:
    """Whether nobody can write to an unpickled array's memory. Out-of-band buffers are read-only for us, but perhaps
    not for others."""
    owner: Any = host
    while owner.base is not None:
        if owner.flags.writeable:
            return False
        owner = owner.base
        if not isinstance(owner, np.ndarray):
            if isinstance(owner, bytes) or type(owner).__name__ == "PyCapsule":
                return True
            owner = memoryview(owner).obj
            if not isinstance(owner, np.ndarray):
                return isinstance(owner, bytes)
    return owner is host
