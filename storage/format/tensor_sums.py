"""Checksums that travel with safetensors: one text in the header of a file, or in the index of a directory.

``__metadata__`` holds ``"meshtape.crc32c": "crc32c:HHHHHHHH…"``: eight hexadecimal digits for the header, then eight
for each tensor in the order of their bytes. The header's own are the crc32c of the file up to the first tensor, taken
with these eight digits as zeros. So the text has a fixed width, and a file can be laid out before its tensors are
known. The index of a directory holds such a text for each file, and one for itself, whose digits count as zeros too.
Readers that know nothing of it see one more entry of free text.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..base.checksums import crc32c
from ..base.scratch import scratch
from ..stores.contract import Reader

KEY = "meshtape.crc32c"
INDEX = "index"  # the name under which an index holds its own checksum
BATCH = 1 << 20  # bytes that are read at a time: they are still in a processor's cache when their checksum is taken
_FORM = re.compile(r"\Acrc32c:(?:[0-9a-f]{8})+\Z")
_DIGITS = 8


def text(values: Sequence[int]) -> str:
    """Checksums as they are stored.

    >>> text([1, 0xE3069283])
    'crc32c:00000001e3069283'
    """
    return "crc32c:" + np.asarray(values, ">u4").tobytes().hex()


def values(stored: Any, count: int) -> list[int]:
    """The checksums of a stored text; ``ValueError`` where it does not hold ``count`` of them."""
    if not isinstance(stored, str) or _FORM.match(stored) is None or len(stored) != 7 + _DIGITS * count:
        raise ValueError(f"its entry {KEY!r} is not {count} checksums")
    return np.frombuffer(bytes.fromhex(stored[7:]), ">u4").tolist()


def _own(data: bytes, key: str) -> int:
    """Where the eight digits begin that stand for ``data`` itself; -1 where there are none."""
    found = re.search(rb'"%s": ?"crc32c:' % re.escape(key.encode()), data)
    return -1 if found is None else found.end()


def own_sum(data: bytes, key: str = KEY) -> int:
    """The checksum of a header or an index, with its own digits as zeros."""
    at, raw = _own(data, key), np.frombuffer(data, np.uint8)
    if at < 0:
        return crc32c(raw)
    return crc32c(raw[at + _DIGITS :], crc32c(b"0" * _DIGITS, crc32c(raw[:at])))


def sealed(data: bytes, rest: Sequence[int] = (), key: str = KEY) -> bytes:
    """A header or an index with its checksums in the place that was kept for them."""
    out, at = bytearray(data), _own(data, key)
    out[at + _DIGITS : at + _DIGITS * (1 + len(rest))] = text(rest)[7:].encode()
    out[at : at + _DIGITS] = f"{own_sum(bytes(out), key):08x}".encode()
    return bytes(out)


def taken(metadata: dict[str, Any]) -> Any:
    """The entry of the checksums, taken out of the metadata, or None; ``ValueError`` where it stands under another
    name: that name is damaged."""
    found = metadata.pop(KEY, None)
    for key, value in metadata.items() if found is None else ():
        texts = value.values() if isinstance(value, dict) else [value]
        if any(isinstance(v, str) and _FORM.match(v) for v in texts):
            raise ValueError(f"its checksums stand under the name {key!r}, which is not theirs")
    return found


def of_header(head: bytes, metadata: dict[str, str], count: int) -> list[int] | None:
    """The checksums of the tensors of a file, or None; ``ValueError`` where the header does not fit its own."""
    stored = taken(metadata)
    if stored is None:
        return None
    first, *rest = values(stored, count + 1)
    if own_sum(head) != first:
        raise ValueError(
            "its header does not fit the crc32c in it: it is damaged, or another program wrote it anew and kept the "
            f"entry {KEY!r}; verify=False reads it all the same"
        )
    return rest


def of_index(data: bytes, metadata: dict[str, Any]) -> Mapping[str, str]:
    """The texts of the files of a directory, by file; ``ValueError`` where the index does not fit its own checksum."""
    stored = taken(metadata)
    if stored is None:
        return {}
    if not isinstance(stored, dict) or values(stored.get(INDEX), 1) != [own_sum(data, INDEX)]:
        raise ValueError(
            "it does not fit the crc32c in it: it is damaged or was edited; verify=False reads it all the same, and "
            f"without its entry {KEY!r} it counts as one without checksums"
        )
    return stored


def of_range(reader: Reader, start: int, nbytes: int, batch: int = BATCH) -> int | None:
    """The crc32c of a part of a file, or None where it ends early."""
    value, at, end = 0, start, start + nbytes
    with contextlib.suppress(FileNotFoundError):
        while at < end:
            part = scratch("sum", min(batch, end - at))
            if reader.readv([part], at) != part.size:
                return None
            value = crc32c(part, value)
            at += part.size
        return value
    return None
