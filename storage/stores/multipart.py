"""Uploads of long objects to an object store, in parts, while their pieces are made."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import queue
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from ..base import waiting
from ..base.threads import starting

PART = 8 << 20  # bytes of one part
UPLOADS = 4  # parts of one object on their way


class _UploadEnd:
    """The last item in the queue of an upload: its end, or an error of the source of its pieces."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def owned(pieces: Iterable[Any]) -> Iterator[bytes]:
    """Copies: who makes the pieces uses its buffers again."""
    for piece in pieces:
        if data := bytes(memoryview(piece).cast("B")):
            yield data


def in_parts(held: Any, key: str, first: list[bytes], rest: Iterator[bytes], attributes: Any, where: str) -> int:
    """Upload an object in parts, while its pieces are made here.

    The client takes pieces inside its own event loop, where nothing else can be asked of it; pieces may themselves be
    downloads. An interrupt leaves the client alone with what it has, and without the end of the object.
    """
    pieces: queue.Queue[Any] = queue.Queue(2 * UPLOADS)
    ahead = (2 * UPLOADS + UPLOADS) * PART  # bytes that may be on their way
    total = 0

    def taken() -> Iterator[bytes]:
        while not isinstance(item := pieces.get(), _UploadEnd):
            yield item
        if item.error is not None:
            raise item.error  # the client then gives the parts up

    def give(item: Any) -> bool:
        end = time.monotonic() + waiting.seconds(ahead)
        while not upload.done():
            with contextlib.suppress(queue.Full):
                pieces.put(item, timeout=0.25)
                return True
            waiting.check_stopped(where)
            if time.monotonic() > end:
                raise waiting.late(where, asked, waiting.seconds(ahead))
        return False

    put, asked = importlib.import_module("obstore").put, "an upload in parts"
    options = {"chunk_size": PART, "max_concurrency": UPLOADS, "attributes": attributes}
    with starting():
        upload = waiting.begin(partial(put, held, key, taken(), **options))
    try:
        for data in itertools.chain(first, rest):
            total += len(data)
            if not give(data):
                break
        give(_UploadEnd())
        waiting.result(upload, where, asked, ahead)
    except BaseException as e:
        if upload.done():
            raise
        with contextlib.suppress(queue.Empty):
            while True:
                pieces.get_nowait()
        pieces.put(_UploadEnd(e))
        if isinstance(e, Exception) and not waiting.is_late(e):
            with contextlib.suppress(Exception):
                waiting.result(upload, where, asked, ahead)  # the client gives the parts up
        raise
    return total
