"""Uploads of long objects to an object store, in parts, while their pieces are made."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import queue
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

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


def in_parts(held: Any, key: str, first: list[bytes], rest: Iterator[bytes], attributes: Any = None) -> int:
    """Upload an object in parts, while its pieces are made here.

    The client takes pieces inside its own event loop, where nothing else can be asked of it; pieces may themselves be
    downloads.
    """
    waiting: queue.Queue[Any] = queue.Queue(2 * UPLOADS)
    total = 0

    def taken() -> Iterator[bytes]:
        while not isinstance(item := waiting.get(), _UploadEnd):
            yield item
        if item.error is not None:
            raise item.error  # the client then gives the parts up

    def give(item: Any) -> bool:
        while not upload.done():
            with contextlib.suppress(queue.Full):
                waiting.put(item, timeout=1.0)
                return True
        return False

    with starting(), ThreadPoolExecutor(1, thread_name_prefix="meshtape-upload") as pool:
        upload = pool.submit(
            importlib.import_module("obstore").put,
            held,
            key,
            taken(),
            chunk_size=PART,
            max_concurrency=UPLOADS,
            attributes=attributes,
        )
        try:
            for data in itertools.chain(first, rest):
                total += len(data)
                if not give(data):
                    break
        except BaseException as e:
            give(_UploadEnd(e))
            wait([upload])
            raise
        give(_UploadEnd())
        upload.result()
    return total
