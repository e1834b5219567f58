"""Commands for directories of numbered checkpoints: steps and branches (``ls``), leftovers of dead writers (``gc``),
bytes (``du``)."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ..arrays.core.errors import CheckpointError, NotACheckpoint
from ..arrays.core.formatting import duration, human_bytes
from .parts import CHECKPOINT, JSON, examples, print_json

_SNAPSHOTS = 30  # of a repository that are listed


def _table(found: list[Any], title: str) -> None:
    from ..storage.browse.model.text import visible
    from .tables import Column, write

    columns = [Column("leftover", name=True), Column("kind", rank=1), Column("bytes", number=True)]
    rows = [
        [visible(x.path, 10**5), x.kind, human_bytes(x.nbytes), duration(x.age), x.why or "lives, or cannot be asked"]
        for x in found
    ]
    write([*columns, Column("age"), Column("owner")], rows, title=title)


def _plain(x: Any) -> dict[str, Any]:
    return {**asdict(x), "dead": x.dead}


def show(path: str, as_json: bool) -> bool:
    """List the steps of a run and its leftovers; False where the place has neither."""
    from ..storage import leftovers
    from ..storage.browse.model.runs import history
    from ..storage.browse.model.text import visible
    from ..storage.loading.runs import is_run, warn_of_others
    from ..storage.stores import store
    from .tables import Column, write

    path = store.location(path)
    try:
        left = leftovers(path)
    except (CheckpointError, OSError):  # no list can be had
        left = []
    if not is_run(path) and not left:
        return False
    run = history(path)
    warn_of_others(path, [s.name for s in run.steps if s.kind != "meshtape"])
    line = {s.name for s in run.branch.line(run.complete)}
    latest, best = run.latest, run.best
    rows: list[dict[str, Any]] = [
        {
            **{k: getattr(s, k) for k in ("name", "step", "arrays", "nbytes")},
            "kind": s.kind,
            "branch": str(s.branch) if s.kind == "meshtape" else "",
            "current": s.name in line,
            "metrics": dict(s.metrics),
            "note": s.note,
            "marks": [t for t, x in (("latest", latest), ("best", best)) if x is s],
            "base": None if s.base is None else s.base.name,
        }
        for s in run.steps
    ]
    if as_json:
        print_json({"path": path, "branch": str(run.branch), "steps": rows, "leftovers": [_plain(x) for x in left]})
        return True
    metric = run.metric
    write(
        [
            Column("step", name=True),
            Column("arrays", number=True, rank=2),
            Column("bytes", number=True, rank=1),
            Column("branch"),
            *([Column(metric, rank=3)] if metric else []),
            Column(""),
        ],
        [
            [
                r["name"],
                *([""] * 2 if r["note"] else [str(r["arrays"]), human_bytes(r["nbytes"])]),
                r["branch"] if r["current"] or r["note"] else f"{r['branch']} (left)",
                *([f"{r['metrics'][metric]:.6g}" if metric in r["metrics"] else ""] if metric else []),
                visible(r["note"] or ", ".join(r["marks"] + ([f"delta of {r['base']}"] if r["base"] else [])), 200),
            ]
            for r in rows
        ],
        title=visible(f"{path} (run, {run.origin})", 10**4),
    )
    if left:
        _table(left, "what writers have not finished (meshtape gc removes what is dead)")
    return True


def show_repository(repository: str, as_json: bool) -> None:
    """List branches, tags and the newest snapshots of an icechunk repository."""
    from ..storage.browse.model.text import visible
    from ..storage.stores import icechunk_store
    from .tables import Column, write

    place = icechunk_store.divide(repository)[0]
    held = icechunk_store.history(place, _SNAPSHOTS)
    names = [*held.branches.items(), *((f"tag {t}", snapshot) for t, snapshot in held.tags.items())]
    rows = [
        {
            "id": s.id,
            "step": step if type(step := s.metadata.get("step")) is int else None,  # others write anything there
            "message": s.message,
            "time": s.written_at.isoformat(timespec="seconds"),
            "refs": [name for name, snapshot in names if snapshot == s.id],
        }
        for s in held.snapshots
    ]
    if as_json:
        print_json({"path": place, "branches": held.branches, "tags": held.tags, "snapshots": rows})
        return
    write(
        [Column("snapshot", name=True), Column("step", number=True), Column("message"), Column("time"), Column("")],
        [
            [
                r["id"],
                "" if r["step"] is None else str(r["step"]),
                visible(r["message"], 200),
                r["time"],
                visible(", ".join(r["refs"]), 1000),
            ]
            for r in rows
        ],
        title=visible(f"{place} (icechunk, {', '.join(f'{name} at {snapshot}' for name, snapshot in names)})", 10**4),
    )


@click.command(epilog=examples("meshtape gc run/checkpoints --dry-run", "meshtape gc s3://bucket/run --older-than 2"))
@click.argument("path", type=CHECKPOINT)
@click.option("--dry-run", is_flag=True, help="Change nothing; show what would go, and why it is taken for dead.")
@click.option(
    "--older-than",
    type=click.FloatRange(min=0),
    metavar="HOURS",
    help="Silence after which an owner that cannot be asked is dead; by default 1, and 24 in an object store or a "
    "repository.",
)
@click.option("--parts", is_flag=True, help="Remove unfinished transfers too, with which the same command would go on.")
@JSON
def gc(path: str, dry_run: bool, older_than: float | None, parts: bool, as_json: bool) -> None:
    """Remove leftovers of killed writers.

    PATH is a directory of checkpoints, a checkpoint, or an icechunk repository, of which icechunk deletes all to which
    no branch or tag leads. Files of a live process, and your own files, are never touched.
    """
    from ..storage import gc as run
    from ..storage.stores import store

    path = store.location(path)
    if older_than is not None and math.isnan(older_than):
        raise click.BadParameter("write a number of hours", param_hint="--older-than")
    if not store.is_url(path) and not Path(path).is_dir():
        raise NotACheckpoint(f"{path} is no directory")
    found = run(path, dry_run=dry_run, older_than=None if older_than is None else 3600 * older_than, parts=parts)
    if as_json:
        print_json({"path": path, "dry_run": dry_run, "leftovers": [_plain(x) for x in found]})
    elif not found:
        silent = older_than is None and store.repository_at(store.location(path)) is not None
        young = " that is a day old (--older-than 0 takes all that no branch or tag leads to)" if silent else ""
        click.echo(f"{path}: nothing to remove{young}")
    else:
        total = human_bytes(sum(x.nbytes for x in found))
        _table(found, f"{'would remove' if dry_run else 'removed'} {total}")


@click.command(epilog=examples("meshtape du run/checkpoints", "meshtape du s3://bucket/run --json"))
@click.argument("path", type=CHECKPOINT)
@JSON
def du(path: str, as_json: bool) -> None:
    """Bytes on disk, and what deleting each step would free.

    PATH is a directory of checkpoints, or a checkpoint. Steps share the files of arrays that did not change: those
    count once in the total, and are free when the last step that has them is deleted. A base of deltas is replaced by
    the first of them when it is deleted: about that one's bytes are free then.

    Of an icechunk repository it tells the bytes of its chunks, and those to which no branch or tag leads.
    """
    from ..storage import RepositoryUsage, usage
    from ..storage.browse.model.text import visible
    from .reports import data
    from .tables import Column, write, write_text

    found = usage(path)
    if as_json:
        print_json(data(found))
        return
    title = visible(f"{found.path}: {human_bytes(found.nbytes)} on disk", 10**4)
    if isinstance(found, RepositoryUsage):
        rows = [
            ["chunks of branches and tags", human_bytes(found.chunks)],
            ["chunks inlined in manifests", human_bytes(found.inlined)],
            ["virtual chunks, in files elsewhere", human_bytes(found.virtual)],
            ["no branch or tag leads there (meshtape gc)", human_bytes(found.unreachable)],
        ]
        write([Column(""), Column("bytes", number=True)], rows, title=title)
        return
    write(
        [
            Column("checkpoint", name=True),
            Column("arrays", number=True, rank=3),
            Column("bytes", number=True, rank=1),
            Column("on disk", number=True),
            Column("freed alone", number=True),
            Column("delta of", rank=2),
        ],
        [
            [
                visible(s.path, 10**5),
                str(s.arrays),
                human_bytes(s.total_size),
                human_bytes(s.nbytes),
                human_bytes(s.freed),
                visible(s.base or "", 200),
            ]
            for s in found.steps
        ],
        title=title,
    )
    for u in found.unread:
        write_text(visible(f"cannot be opened, {human_bytes(u.nbytes)}: {u.path}: {u.why}", 10**4))
