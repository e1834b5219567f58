"""Commands that look at a checkpoint: ``ls`` and ``show``. Both read no more than they print."""

from __future__ import annotations

import sys
from typing import Any

import click

from ..arrays.core.errors import CheckpointError
from .parts import CHECKPOINT, JSON, array_names, checked, dtype_names, examples, print_json

_CORNER = (8, 6)  # rows and columns of a large array that are printed
_WHOLE = 1 << 20  # bytes up to which an array is read for its text


@click.command(
    epilog=examples(
        "meshtape ls run/checkpoints/step-00000264", "meshtape ls model.safetensors --match '*.weight' --sort size"
    )
)
@click.argument("path", type=CHECKPOINT)
@click.option("--match", metavar="PATTERN", help="Only names that fit a pattern with * and ?, or contain these words.")
@click.option("--dtype", callback=checked("dtype"), shell_complete=dtype_names, help="Only arrays of this dtype.")
@click.option(
    "--sort",
    type=click.Choice(["stored", "name", "size", "dtype"]),
    default="stored",
    show_default=True,
    help="Order of the list; by size, the largest come first.",
)
@JSON
def ls(path: str, match: str | None, dtype: str | None, sort: str, as_json: bool) -> None:
    """List the arrays of a checkpoint, or the steps of a run.

    PATH is a checkpoint of meshtape, torch.distributed or Orbax, a file of safetensors, NumPy or PyTorch, a Hugging
    Face directory, a Zarr group or array, or the document of a virtual checkpoint. Reads its table of contents alone.
    On a terminal the table fits its width; in a pipe every line is whole.

    Of a run, a directory of numbered checkpoints, it lists these, with their branches and the leftovers of killed
    writers. Of an icechunk repository, its path or icechunk://PLACE without @REF, it lists branches, tags and the
    newest snapshots.
    """
    import meshtape as mt

    from ..arrays.core.formatting import human_bytes
    from ..storage.browse.model.inventory import Inventory, Query
    from ..storage.browse.model.text import count, visible
    from ..storage.checkpoint.checkpoint import unread
    from ..storage.loading.runs import beside
    from ..storage.stores import store
    from . import runs
    from .tables import Column, write, write_text

    if "@" not in path and (repository := store.repository_at(store.location(path))):
        runs.show_repository(repository, as_json)
        return
    try:
        ckpt = mt.open_checkpoint(path)
    except CheckpointError:
        if not runs.show(path, as_json):
            raise
        return
    held = Inventory(ckpt)
    rows = held.select(Query(match or "", dtype or ""))
    if sort != "stored":
        rows = held.ordered(rows, sort, sort == "size")
    total = sum(r.nbytes for r in rows)
    if as_json:
        print_json(_facts(ckpt, rows, total))
        return
    how = "" if ckpt.compression is None else f", {ckpt.compression}"
    how += "" if ckpt.computed is None else f" {ckpt.computed.expression}"
    how += "" if ckpt.base is None else f", delta of {ckpt.base.path}"
    how += "" if ckpt.step is None else f", step {ckpt.step}"
    how += "".join(f", saved from {' × '.join(f'{n}={s}' for n, s in m.items())}" for m in ckpt.meshes)
    columns = [Column("name", name=True), Column("dtype", rank=1), Column("shape", rank=2)]
    columns += [Column("bytes", number=True), Column("sharding", rank=3)]
    lines = [
        [visible(r.name, 10**6), r.dtype, str(r.shape), human_bytes(r.nbytes), visible(r.sharding or "", 10**4)]
        for r in rows
    ]
    footer = [count(len(rows), "array"), "", "", human_bytes(total), ""]
    write(columns, lines, title=visible(f"{ckpt.path} ({ckpt.kind}{how})", 10**4), footer=footer)
    if ckpt.skipped:
        write_text(visible(unread(ckpt.skipped)[2:], 10**4))
    if ckpt.manifest is None and "zarr" not in ckpt.kind.lower() and (steps := beside(store.location(path))):
        write_text(visible(f"checkpoints below: {', '.join(steps)} (meshtape ls {path}/{steps[-1]})", 10**4))


@click.command(
    epilog=examples(
        "meshtape show run/checkpoints/step-00000264 params.w1",
        "meshtape show run/checkpoints/step-00000264 params.w1 --exact --json",
    )
)
@click.argument("path", type=CHECKPOINT)
@click.argument("name", shell_complete=array_names)
@click.option(
    "--exact", is_flag=True, help="Read all of a large array for its statistics, in pieces; a sample is the default."
)
@JSON
def show(path: str, name: str, exact: bool, as_json: bool) -> None:
    """Show one array of a checkpoint.

    Its facts, statistics, and first values; or the value of a leaf that is no array.
    """
    import numpy as np

    import meshtape as mt

    from ..storage.browse.model.text import visible
    from .tables import Column, terminal_width, write, write_text

    ckpt = mt.open_checkpoint(path)
    values = ckpt.leaves
    if name in values and name not in ckpt:
        print_json({"name": name, "value": values[name]}) if as_json else write_text(visible(repr(values[name]), 10**6))
        return
    stored = ckpt[name]
    facts = _describe(stored, exact)
    if as_json:
        print_json({k: v for k, v in facts.items() if k != "how"})
        return
    rows = [[_TITLES.get(k, k), visible(_plain(k, v), 10**4)] for k, v in facts.items() if k not in _UNSHOWN]
    write([Column(""), Column("")], rows, title=visible(name, 10**4))
    if not stored.nbytes:
        return
    corner, where = _corner(stored)
    if where:
        write_text(f"first values, {where}:")
    width = terminal_width(sys.stdout) or 10**6  # in a pipe a row is a line
    with np.printoptions(threshold=60, edgeitems=3, precision=4, suppress=True, linewidth=width):
        click.echo(str(corner))


def _plain(what: str, value: Any) -> str:
    """A fact as people read it.

    >>> _plain("nbytes", 2048), _plain("shape", [3]), _plain("quantiles", {"0.01": -1.5, "0.5": 0.25})
    ('2,048 (2.0 KiB)', '(3,)', '1%=-1.5   50%=0.25')
    """
    from ..arrays.core.formatting import human_bytes

    if value is None:
        return "-"
    if what == "shape":
        return str(tuple(value))
    if what == "nbytes":
        return f"{value:,}" + (f" ({human_bytes(value)})" if value >= 1024 else "")
    if isinstance(value, dict):
        return "   ".join(f"{100 * float(q):g}%={x:.6g}" for q, x in value.items())
    return f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _corner(stored: Any) -> tuple[Any, str]:
    """The values to print, and which part of the array they are; ``""`` for all of it."""
    if stored.nbytes <= _WHOLE:
        return stored[...], ""
    index = [0] * max(0, stored.ndim - 2) + [slice(0, n) for n in _CORNER[-min(2, stored.ndim) :]]
    text = ", ".join(str(i) if isinstance(i, int) else f":{i.stop}" for i in index)
    return stored[tuple(index)], f"[{text}]"


def _facts(ckpt: Any, rows: list[Any], total: int) -> dict[str, Any]:
    return {
        "path": ckpt.path,
        "kind": ckpt.kind,
        "step": ckpt.step,
        "computed": None if ckpt.computed is None else str(ckpt.computed.expression),
        "base": None if ckpt.base is None else ckpt.base.path,
        "meshes": ckpt.meshes,
        "compression": None if ckpt.compression is None else str(ckpt.compression),
        "metadata": ckpt.metadata,
        "documents": list(ckpt.documents),
        "skipped": list(ckpt.skipped),
        "arrays": len(rows),
        "nbytes": total,
        "rows": [r.data() for r in rows],
    }


_TITLES = {"nbytes": "bytes", "how": "statistics", "rule": "made by", "nan": "NaN"}
_UNSHOWN = ("name", "exact", "seen")


def _describe(stored: Any, exact: bool) -> dict[str, Any]:
    """Facts in the order in which they are shown; without elements there are no statistics."""
    from ..storage.browse.model.statistics import statistics

    facts: dict[str, Any] = {"name": stored.name, "dtype": stored.dtype.name, "shape": list(stored.shape)}
    facts |= {"nbytes": stored.nbytes, "sharding": stored.sharding_text}
    if stored.rule:
        facts["rule"] = stored.rule
    if not stored.nbytes:
        return facts
    s = statistics(stored, exact=exact)
    facts |= {"how": s.how, "exact": s.exact, "seen": s.seen, "nan": s.nan, "infinite": s.infinite, "zeros": s.zeros}
    if s.low is not None:
        facts |= {"min": s.low, "max": s.high, "mean": s.mean, "std": s.std, "norm": s.norm}
        facts |= {"quantiles": {str(q): v for q, v in s.quantiles.items()}}
    return facts
