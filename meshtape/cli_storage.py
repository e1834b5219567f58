"""Commands that check and change checkpoints: ``verify``, ``diff``, ``merge``, ``convert``, ``reshard``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from .arrays.display import human_bytes


def _mapping(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, int] | None:
    """``data=2,model=4`` as a dict."""
    if value is None:
        return None
    try:
        pairs = [part.split("=") for part in value.split(",")]
        return {name.strip(): int(n) for name, n in pairs}
    except ValueError:
        raise click.BadParameter(f"{value!r}: write NAME=NUMBER,NAME=NUMBER") from None


def _shards(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, dict[str, int]] | None:
    """``PATTERN:axis=dimension`` options as a map of patterns."""
    out: dict[str, dict[str, int]] = {}
    for text in value:
        pattern, colon, rest = text.rpartition(":")
        if not colon:
            raise click.BadParameter(f"{text!r}: write PATTERN:AXIS=DIMENSION")
        out[pattern] = _mapping(ctx, param, rest) or {}
    return out or None


_SELECTION = (
    click.option("--keys", multiple=True, metavar="PATTERN", help="Take only these arrays (may be repeated)."),
    click.option("--drop", multiple=True, metavar="PATTERN", help="Leave these arrays out (may be repeated)."),
    click.option(
        "--rules", type=click.Path(exists=True, dir_okay=False), help="A file of key rules: renames, splits, casts, …"
    ),
)
_TARGET = (
    *_SELECTION,
    click.option("--dtype", help="Store floating arrays in this dtype."),
    click.option("--memory-limit", default=256, show_default=True, metavar="MIB", type=click.IntRange(min=1)),
    click.option("--overwrite", is_flag=True, help="Replace an existing checkpoint."),
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Plain data instead of text.")


def _with(options: tuple[Any, ...]) -> Callable[[Any], Any]:
    def add(fn: Any) -> Any:
        for option in reversed(options):
            fn = option(fn)
        return fn

    return add


def _selected(keys: tuple[str, ...], drop: tuple[str, ...], rules: str | None) -> dict[str, Any]:
    import meshtape as mt

    return {
        "keys": list(keys) or None,
        "drop": list(drop) or None,
        "rules": mt.Rules(Path(rules).read_text()) if rules else None,
    }


@contextmanager
def _progress(title: str, shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar of bytes on a terminal; nothing in a pipe."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield None
        return
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _write(
    run: Callable[..., Any],
    title: str,
    src: str,
    dst: str,
    *,
    keys: tuple[str, ...],
    drop: tuple[str, ...],
    rules: str | None,
    dtype: str | None,
    memory_limit: int,
    overwrite: bool,
    as_json: bool,
    **own: Any,
) -> Any:
    """Run a function of ``storage`` that writes a checkpoint, with the options of ``_TARGET`` and its own, and a bar."""
    with _progress(title, not as_json) as progress:
        return run(
            src,
            dst,
            dtype=dtype,
            memory_limit=memory_limit << 20,
            overwrite=overwrite,
            progress=progress,
            **_selected(keys, drop, rules),
            **own,
        )


def _tell(report: Any, as_json: bool, text: str) -> None:
    click.echo(json.dumps(dataclasses.asdict(report), indent=2, default=str) if as_json else text)


@click.command()
@click.argument("path")
@_JSON
def verify(path: str, as_json: bool) -> None:
    """Check every byte of a checkpoint against its checksums.

    The exit code is 0 when all is well, and 1 with the list of damaged files when it is not.
    """
    import meshtape as mt

    report = mt.verify(path)
    _tell(
        report,
        as_json,
        f"{report.path}: {report.arrays} arrays, {human_bytes(report.nbytes)} in {report.files} files are sound",
    )


@click.command()
@click.argument("a")
@click.argument("b")
@_with(_SELECTION)
@_JSON
def diff(a: str, b: str, keys: tuple[str, ...], drop: tuple[str, ...], rules: str | None, as_json: bool) -> None:
    """Compare two checkpoints, of whatever format: names, shapes, dtypes and values.

    The exit code is 0 when they are the same, and 1 when they differ.
    """
    from meshtape.storage import diff as compare  # mt.diff is the differences of an array

    report = compare(a, b, **_selected(keys, drop, rules))
    _tell(report, as_json, str(report))
    if not report.same:
        raise click.exceptions.Exit(1)


@click.command()
@click.argument("src")
@click.argument("dst")
@click.option("--max-shard-mib", type=click.IntRange(min=1), metavar="MIB", help="Largest file; one file by default.")
@_with(_TARGET)
@_JSON
def merge(
    src: str,
    dst: str,
    max_shard_mib: int | None,
    as_json: bool,
    **target: Any,
) -> None:
    """Write a checkpoint as Hugging Face style safetensors, streaming.

    \b
    Example:  meshtape merge run/checkpoints/step-00000264 exported --keys 'params.*'
    """
    import meshtape as mt

    report = _write(
        mt.merge,
        "merging",
        src,
        dst,
        as_json=as_json,
        max_shard_bytes=max_shard_mib << 20 if max_shard_mib else None,
        **target,
    )
    skipped = f"; left out: {', '.join(report.skipped)}" if report.skipped else ""
    _tell(
        report,
        as_json,
        f"{report.path}: {report.arrays} arrays, {human_bytes(report.total_size)} in {', '.join(report.files)}{skipped}",
    )


@click.command()
@click.argument("src")
@click.argument("dst")
@click.option("--format", "kind", type=click.Choice(["zarr", "safetensors"]), required=True, help="What to write.")
@_with(_TARGET)
@_JSON
def convert(
    src: str,
    dst: str,
    kind: str,
    as_json: bool,
    **target: Any,
) -> None:
    """Write a checkpoint in another format, streaming. A run that was interrupted goes on where it stopped."""
    import meshtape as mt

    report = _write(mt.convert, "converting", src, dst, as_json=as_json, format=kind, **target)
    _tell(report, as_json, f"{report.path}: {report.arrays} arrays, {human_bytes(report.total_size)}")


@click.command()
@click.argument("src")
@click.argument("dst")
@click.option(
    "--mesh", callback=_mapping, required=True, metavar="AXES", help="Axes of the target mesh: data=2,model=4."
)
@click.option(
    "--shard",
    "shards",
    callback=_shards,
    multiple=True,
    metavar="PATTERN:AXIS=DIM",
    help="What an axis splits (may be repeated).",
)
@_with(_TARGET)
@_JSON
def reshard(
    src: str,
    dst: str,
    mesh: dict[str, int],
    shards: dict[str, dict[str, int]] | None,
    as_json: bool,
    **target: Any,
) -> None:
    """Write a checkpoint cut for another mesh, without that mesh.

    \b
    Example:  meshtape reshard old new --mesh model=4 --shard 'params.w1:model=1'
    """
    from meshtape.storage import reshard as run

    report = _write(run, "resharding", src, dst, as_json=as_json, mesh=mesh, shardings=shards, **target)
    _tell(report, as_json, f"{report.path}: {report.arrays} arrays, {human_bytes(report.total_size)} for {mesh}")


COMMANDS = (verify, diff, merge, convert, reshard)
