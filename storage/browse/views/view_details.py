"""The view of a checkpoint's metadata, values, documents and meshes."""

from __future__ import annotations

import json
import math
from typing import Any

from ....arrays.core.errors import CheckpointError
from ...checkpoint.checkpoint import Checkpoint
from ..model.site import Site
from ..model.text import plain
from .frame import Shown, crumbs, href, mesh_text, render
from .view_checkpoint import facts_of, head

_VALUES = 500
_DOCUMENTS = 20
_LETTERS = 200_000


def _text(value: Any) -> str:
    """JSON, or lines of text, as far as a page should."""
    text = value if isinstance(value, str) else json.dumps(plain(value), indent=2, ensure_ascii=True)
    lines = text[:_LETTERS].split("\n")
    more = len(lines) > _VALUES or len(text) > _LETTERS
    return "\n".join([*lines[:_VALUES], "…"] if more else lines)


def _document(ckpt: Checkpoint, name: str) -> tuple[str, str, str]:
    """(name, text, error) of a document that lies beside the arrays: configuration, generation settings, …"""
    try:
        held = ckpt.documents[name]
        return name, _text(f"{len(held):,} bytes" if isinstance(held, bytes) else held), ""
    except (CheckpointError, OSError) as e:
        return name, "", f"{type(e).__name__}: {e}"


def details(site: Site, at: str) -> Shown:
    """Metadata, meshes, and the leaves of the tree that are not arrays."""
    opened = site.open(at)
    ckpt = opened.ckpt
    leaves = [(n, plain(v)) for n, v in ckpt.leaves.items()]
    body = render(
        "details.html",
        head=head(opened, "details"),
        metadata=_text(ckpt.metadata) if ckpt.metadata else "",
        leaves=[(n, json.dumps(v)) for n, v in leaves[:_VALUES]],
        leaf_count=len(leaves),
        skipped=ckpt.skipped,
        most=_VALUES,
        meshes=[(mesh_text(m), f"{math.prod(m.values()):,}") for m in ckpt.meshes],
        documents=[_document(ckpt, n) for n in list(ckpt.documents)[:_DOCUMENTS]],
        seconds=opened.seconds,
    )
    data = {"metadata": plain(ckpt.metadata), "values": dict(leaves[:_VALUES]), "skipped": ckpt.skipped}
    trail = crumbs(site, opened.place, ("details", None))
    return Shown(f"{opened.place.label}: details", body, facts_of(opened) | data, trail, up=href("checkpoint", at=at))
