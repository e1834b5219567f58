"""Plans of attention that the real cuDNN makes for devices that are not there: ``python plans.py``, whose answer is JSON.

cuDNN plans for a description of a device, and then needs a driver only to be given what it compiled.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any

import numpy as np

from meshtape.arrays.core.dtypes import bfloat16
from meshtape.arrays.kernels.cudnn import attention as cudnn_attention
from meshtape.arrays.kernels.cudnn.attention import Form, Side

DEVICES = {800: (108, 166_912), 900: (132, 232_448), 1000: (148, 232_448)}
"""By compute capability: multiprocessors, and bytes of shared memory of a block."""
CASES: Any = {
    # Batches, heads of queries and keys, rows, keys, columns, columns of values, causal, heads beside each other.
    "packed": (2, 4, 4, 1024, 1024, 64, 64, True, False),
    "heads last": (2, 4, 4, 1024, 1024, 64, 64, True, True),
    "grouped": (1, 8, 2, 1000, 1000, 128, 128, True, True),
    "short values": (2, 4, 4, 512, 2048, 64, 32, False, False),
    "more rows": (2, 4, 2, 2048, 520, 128, 128, True, False),
    "few columns": (1, 1, 1, 600, 600, 8, 8, False, False),
    "long": (1, 2, 2, 16_384, 16_384, 128, 128, True, True),
}


def described(capability: int) -> str:
    multiprocessors, shared = DEVICES[capability]
    return json.dumps(
        {
            "deviceName": "a GPU", "deviceVer": capability, "driverVer": 13_000, "cudaDeviceId": 0, "pciDeviceId": 0,
            "multiProcessorCount": multiprocessors, "maxSharedMemoryPerBlock": 49_152,
            "maxSharedMemoryPerBlockOptin": shared, "reservedSharedMemoryPerBlock": 1024,
            "oversizedSharedMemoryPerBlock": 0, "regsPerBlock": 65_536, "maxRegistersPerSM": 65_536,
            "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "maxCtasPerSM": 32, "maxBlockSize": [1024, 1024, 64],
            "maxGridSize": [(1 << 31) - 1, 65_535, 65_535], "warpSize": 32, "memClockRateKHz": 2_600_000,
            "smClockRateKHz": 1_800_000, "memoryBusWidth": 5120, "totalGlobalMem": 80 << 30, "l2CacheSize": 50 << 20,
            "isTccDriver": 0, "supportCoopLaunch": 1,
        }
    )  # fmt: skip


def side(batches: int, heads: int, rows: int, columns: int, last: bool, dtype: Any) -> Side:
    shape = batches, heads, rows, columns
    strides = heads * rows * columns, rows * columns, columns, 1
    return Side(shape, (strides[0], columns, heads * columns, 1) if last else strides, np.dtype(dtype))


def forms(case: Any, dtype: Any, in_order: bool) -> tuple[Form, Form]:
    batches, heads, served, rows, keys, d, e, causal, last = case
    q, k, v = (side(batches, *n, last, dtype) for n in ((heads, rows, d), (served, keys, d), (served, keys, e)))
    out = side(batches, heads, rows, e, last, dtype)
    sums = side(batches, heads, rows, 1, False, np.float32)
    how = 1 / math.sqrt(d), causal, in_order
    return Form((q, k, v), (out, sums), *how), Form((q, k, v, out, out, sums), (q, k, v), *how)


def main() -> dict[str, Any]:
    import cudnn

    cudnn_attention.frontend = lambda: cudnn  # whose library has no functions without a driver
    out: dict[str, Any] = {"version": cudnn.backend_version()}
    for capability in DEVICES:
        os.environ["MAJOR"] = str(capability // 100)  # for the runtime
        device = cudnn.create_device_properties(described(capability))
        for name, case in CASES.items():
            for dtype, in_order in ((bfloat16, True), (np.float16, False)):
                found = []
                for form in forms(case, dtype, in_order):
                    try:
                        plan = cudnn_attention.Plan(form, device_property=device)
                        notes = plan.made.get_behavior_notes_for_plan_at_index(0)
                        found.append([len(plan._parts), plan.workspace, [str(n).split(".")[-1] for n in notes]])
                    except Exception as e:
                        found.append(f"{type(e).__name__}: {e}"[:300])
                out[f"{capability} {name} {np.dtype(dtype).name}"] = found
    return out


if __name__ == "__main__":
    answer, sys.stdout = sys.stdout, sys.stderr
    json.dump(main(), answer)
