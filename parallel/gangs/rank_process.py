"""The process of one rank of :func:`meshtape.gang`.

Its folder holds the pickled blocks of arrays (``blocks``) and gets the rank's result (``answer``). The parent folder
holds the pickled call of all ranks (``call``). Standard input is empty and ends with the worker; the process then ends
its children and itself, so that no rank outlives its worker.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from distributed.protocol.pickle import dumps, loads

from ...arrays.ops.creation import asarray


class SharedBlock(NamedTuple):
    """A block that another process left in a file."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def array(self) -> Any:
        """The block as an array; writes to it stay in this process."""
        if 0 in self.shape:
            return asarray(np.empty(self.shape, self.dtype))
        return asarray(np.memmap(self.path, self.dtype, "c", shape=self.shape), copy=False)


def leave_block(path: Path, block: np.ndarray) -> SharedBlock:
    """Write a block for :class:`SharedBlock`."""
    path.write_bytes(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
    return SharedBlock(str(path), block.shape, block.dtype)


_blocks: list[Any] = []


def block(number: int) -> Any:
    """This rank's block of the array of this number, which the call names so."""
    return _blocks[number]


def main(folder: Path) -> int:
    """Run the folder's call. Returns 0 on success. The answer is (True, value) or (False, text, pickled error)."""
    threading.Thread(
        target=_end_with_the_worker, args=(folder.parent,), name="meshtape-worker-watch", daemon=True
    ).start()
    try:
        _blocks.extend(b.array() for b in loads((folder / "blocks").read_bytes()))
        fn, args, kwargs = loads((folder.parent / "call").read_bytes())
        answer, code = dumps((True, fn(*args, **kwargs))), 0
    except BaseException as e:
        traceback.print_exc()
        error, code = b"", 1
        with contextlib.suppress(Exception):  # one that cannot be pickled
            error = dumps(e)
        answer = dumps((False, f"{type(e).__name__}: {e}", error))
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
