"""JSON texts whose last member is the crc32c of all that stands before it."""

from __future__ import annotations

import re

from .checksums import crc32c

_TAIL = re.compile(rb', "crc32c": "([0-9a-f]{8})"\}\n?\Z')


def sealed(text: bytes) -> bytes:
    """An object's JSON text, with its checksum as last member.

    >>> unsealed(sealed(b'{"a": 1}'))[0]
    b'{"a": 1}'
    """
    return text[:-1] + b', "crc32c": "%08x"}\n' % crc32c(text)


def unsealed(data: bytes) -> tuple[bytes, int | None, bool]:
    """Inverse of `sealed`: the text, the checksum that it says (None where it says none), and whether that fits."""
    found = _TAIL.search(data)
    if found is None:
        return data, None, False
    text, said = data[: found.start()] + b"}", int(found[1], 16)
    return text, said, said == crc32c(text)
