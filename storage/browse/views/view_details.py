"""The view of a checkpoint's metadata, values, documents and meshes."""

from __future__ import annotations

import json
import math
from typing import Any

from ....arrays.core.errors import CheckpointError
from ...base.names import leaf_name
from ...checkpoint.checkpoint import Checkpoint
from ...format.manifest import scalar_leaves
from ..model.site import Site
from ..model.text import plain, visible
from .frame import Shown, crumbs, href, notice, section, table
from .html import Markup, join, tag
from .view_checkpoint import facts_of, head, tab_bar

_VALUES = 500
_DOCUMENTS = 20
_LETTERS = 200_000


def _pre(value: Any) -> Markup:
    """JSON, or lines of text, as far as a page should."""
    text = value if isinstance(value, str) else json.dumps(plain(value), indent=2, ensure_ascii=True)
    lines = text[:_LETTERS].split("\n")
    more = "\n…" if len(lines) > _VALUES or len(text) > _LETTERS else ""
    return tag("pre", join((tag("span", line) for line in lines[:_VALUES]), "\n"), Markup(more))


def _document(ckpt: Checkpoint, name: str) -> Markup:
    """A document that lies beside the arrays: configuration, generation settings, …"""
    try:
        held = ckpt.documents[name]
        return _pre(f"{len(held):,} bytes" if isinstance(held, bytes) else held)
    except (CheckpointError, OSError) as e:
        return notice("bad", "It cannot be read", tag("p", visible(f"{type(e).__name__}: {e}", 600)))


def details(site: Site, at: str) -> Shown:
    """Metadata, meshes, and the leaves of the tree that are not arrays."""
    opened = site.open(at)
    ckpt = opened.ckpt
    leaves = [(leaf_name(p), v) for p, v in scalar_leaves(ckpt.structure)]
    documents = [section(f"Document {visible(n, 100)}", _document(ckpt, n)) for n in list(ckpt.documents)[:_DOCUMENTS]]
    body = join(
        [
            head(opened),
            tab_bar(opened, "details"),
            section(
                "Metadata",
                _pre(ckpt.metadata) if ckpt.metadata else tag("p", "None was saved.", class_="mt-quiet"),
            ),
            section(
                "Values",
                table(
                    ("Name", "Value"),
                    [(visible(n, 200), visible(json.dumps(plain(v)), 400)) for n, v in leaves[:_VALUES]],
                )
                if leaves
                else tag("p", "The tree has no leaves but arrays.", class_="mt-quiet"),
                note=f"the first {_VALUES} of {len(leaves):,}"
                if len(leaves) > _VALUES
                else "leaves of the tree that are not arrays",
            ),
            section(
                "Not readable here",
                table(
                    ("Name", "Why"),
                    [(visible(n, 200), visible(w, 400)) for n, w in list(ckpt.skipped.items())[:_VALUES]],
                ),
                note=f"{len(ckpt.skipped):,} in its files",
            )
            if ckpt.skipped
            else None,
            section(
                "Meshes",
                table(
                    ("Mesh", "Ranks"),
                    [(" × ".join(f"{a}={n}" for a, n in m.items()), f"{math.prod(m.values()):,}") for m in ckpt.meshes],
                    numeric=(1,),
                )
                if ckpt.meshes
                else tag("p", "All arrays were local.", class_="mt-quiet"),
            ),
            documents,
            tag(
                "p",
                f"Opened in {1000 * opened.seconds:.0f} ms; only the table of contents was read.",
                class_="mt-quiet",
            ),
        ]
    )
    data = facts_of(opened) | {"metadata": plain(ckpt.metadata), "values": {n: plain(v) for n, v in leaves[:_VALUES]}}
    data["skipped"] = ckpt.skipped
    return Shown(
        f"{opened.place.label}: details",
        body,
        data,
        crumbs(site, opened.place, ("details", None)),
        up=href("checkpoint", at=at),
    )
