"""The lock of a run's directory, which the operating system releases with the process.

On one host a second run is refused at once, and a dead holder never blocks. Between hosts this needs a file system that
carries locks from host to host (NFS with its lock service, Lustre with ``flock``, GPFS, CephFS). On others a second run
cannot detect the first; it only warns if a run on another host did not release the directory.
"""

from __future__ import annotations

import json
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...arrays.core.errors import DirectoryInUse
from ...storage.stores.atomic_directory import writing
from ...storage.stores.filesystem import try_lock

FILE = "run.lock"


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """While it is open, the directory is this run's.

    Raises
    ------
    DirectoryInUse
        Where another run has it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory / FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        locked, before = try_lock(fd), _read(fd)
        if locked is False:
            raise DirectoryInUse(
                f"{directory} belongs to another run, {_said(before)}: wait for its end, stop it, or give this one a "
                "directory of its own"
            )
        here = socket.gethostname()
        if before and before.get("host") != here:
            warnings.warn(
                f"{directory} was not given back by {_said(before)}: see that it runs no more, if the file system has "
                "no locks between hosts",
                stacklevel=5,
            )
        with writing(str(directory / FILE)):
            _write(fd, {"pid": os.getpid(), "host": here, "since": time.time()})
        try:
            yield
        finally:
            _write(fd, None)
    finally:
        os.close(fd)


def _read(fd: int) -> dict[str, Any]:
    os.lseek(fd, 0, os.SEEK_SET)
    try:
        found = json.loads(os.read(fd, 4096) or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _write(fd: int, record: dict[str, Any] | None) -> None:
    # The file stays: were it removed, two processes could lock two files of one name.
    os.ftruncate(fd, 0)
    os.lseek(fd, 0, os.SEEK_SET)
    if record is not None:
        os.write(fd, json.dumps(record).encode())


def _said(record: dict[str, Any]) -> str:
    if not isinstance(record.get("since"), int | float):
        return "of a process that has only just begun"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["since"]))
    return f"process {record.get('pid')} on {record.get('host')}, since {since}"
