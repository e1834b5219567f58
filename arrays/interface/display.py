"""Display of arrays in a terminal and in a notebook."""

from __future__ import annotations

from html import escape

import numpy as np

from ..core.array import Array
from ..core.dispatch import Deferred
from ..core.formatting import human_bytes


def array_text(x: Array) -> str:
    """As NumPy prints it; with the dtype unless it is the default integer or boolean, the sharding, and the device if
    no CPU."""
    buf = x._buf
    if isinstance(buf, Deferred) and buf.traced:
        return f"Array({buf.aval}, traced)"
    text = np.array2string(x._concrete(), separator=", ", prefix="Array(")
    if x.size == 0 and x.shape != (0,):
        text = f"[], shape={x.shape}"
    notes = [] if x.dtype.name in ("int64", "bool") else [f"dtype={x.dtype.name}"]
    if x.sharding is not None:
        notes.append(f"sharding={x.sharding}")
    elif x.device.kind != "cpu":
        notes.append(f"device={str(x.device)!r}")
    return f"Array({', '.join([text, *notes])})"


def array_html(x: Array) -> str:
    """A table of facts, the blocks where the array is split, and the first values."""
    rows = [("shape", str(x.shape)), ("dtype", x.dtype.name), ("bytes", human_bytes(x.nbytes))]
    rows.append(("sharding", str(x.sharding)) if x.sharding is not None else ("device", str(x.device)))
    table = "".join(
        f"<tr><th style='text-align:left;padding-right:1em'>{k}</th><td style='text-align:left'>{escape(v)}</td></tr>"
        for k, v in rows
    )
    draw = getattr(x._buf, "blocks_html", None)
    picture = draw() if draw is not None else ""
    values = ""
    if not isinstance(x._buf, Deferred):
        with np.printoptions(threshold=20, edgeitems=3):
            values = f"<pre>{escape(repr(x))}</pre>"
    return f"<div><table style='margin:0'>{table}</table>{picture}{values}</div>"
