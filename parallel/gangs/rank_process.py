"""The program of one rank's process in :func:`meshtape.gang`.

It is loaded by its path, without the packages that it lies in: a rank that asks for no array and nothing of meshtape
does not wait until that is imported.

Its folder holds (path, shape, dtype) of each block (``blocks``) and gets the rank's result (``answer``). The parent
folder holds the pickled call of all ranks (``call``). Standard input is empty and ends with the worker; the process
then ends its children and itself, so that no rank outlives its worker.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import cloudpickle

_blocks: list[tuple[str, tuple[int, ...], Any]] = []


@functools.cache
def block(number: int) -> Any:
    """This rank's block of the split array of this number, as an array; the call names it so."""
    import numpy as np

    import meshtape

    path, shape, dtype = _blocks[number]
    if 0 in shape:
        return meshtape.asarray(np.empty(shape, dtype))
    held = np.memmap(path, dtype, "c", shape=shape)  # writes stay in this process
    return meshtape.asarray(held, device="cpu", copy=False)


def main(folder: Path) -> int:
    """Run the folder's call. Returns 0 on success. The answer is (True, value) or (False, text, pickled error)."""
    threading.Thread(
        target=_end_with_the_worker, args=(folder.parent,), name="meshtape-worker-watch", daemon=True
    ).start()
    try:
        _blocks.extend(cloudpickle.loads((folder / "blocks").read_bytes()))
        fn, args, kwargs = cloudpickle.loads((folder.parent / "call").read_bytes())
        answer, code = cloudpickle.dumps((True, fn(*args, **kwargs))), 0
    except BaseException as e:
        traceback.print_exc()
        error, code = b"", 1
        with contextlib.suppress(Exception):  # one that cannot be pickled
            error = cloudpickle.dumps(e)
        answer = cloudpickle.dumps((False, f"{type(e).__name__}: {e}", error))
    sys.stdout.flush()
    part = folder / "answer.part"
    part.write_bytes(answer)
    part.rename(folder / "answer")
    return code


def _end_with_the_worker(folder: Path) -> None:
    while sys.stdin.buffer.read(1 << 16):
        pass
    shutil.rmtree(folder, ignore_errors=True)  # one that was killed could not
    os.killpg(0, signal.SIGKILL)  # this process and its children


def start() -> None:
    """Of the process: its one argument is the folder."""
    code = main(Path(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # threads of libraries that wait for other ranks keep no process
