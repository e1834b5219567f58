"""Locations as texts: an absolute path, or a URL of an object store."""

from __future__ import annotations

import os
import re

URL = re.compile(r"\A([A-Za-z][A-Za-z0-9+.-]+)://(.*)\Z", re.S)
SCHEMES = ("s3", "gs", "az", "memory", "http", "https")
READ_ONLY = ("http", "https")


def is_url(location: str) -> bool:
    """Whether a location lies in an object store."""
    return "://" in location and URL.match(location) is not None


def join(root: str, *names: str) -> str:
    """A location below another."""
    return "/".join([root, *names]) if is_url(root) else os.path.join(root, *names)


def split(where: str) -> tuple[str, str]:
    """The location above, and the last name.

    >>> split("s3://bucket/run/step-1")
    ('s3://bucket/run', 'step-1')
    """
    if not is_url(where):
        return os.path.split(where)
    scheme, _, rest = where.partition("://")
    head, _, name = rest.rpartition("/")
    return (f"{scheme}://{head}", name) if head else (where, "")
