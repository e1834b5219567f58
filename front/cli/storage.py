"""Commands that check and change checkpoints: ``tree``, ``verify``, ``diff``, ``estimate``, ``merge``, ``convert``,
``reshard``.

A checkpoint is a path or a URL everywhere. The exit code is 0 when all went well; 1 for an error, for damage, and for
checkpoints that differ; 2 for a wrong call; 130 after Ctrl-C. Results go to the standard output, progress to the
standard error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click

from ..arrays.core.formatting import human_bytes, some
from ..errors import Lossy
from ..storage.browse.model.text import count
from .parts import CHECKPOINT, JSON, MISSING, WorkStopped, checked, dtype_names, each, examples, packing, print_json


def _mapping(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, int] | None:
    """``data=2,model=4`` as a dict."""
    if value is None:
        return None
    pairs = [part.split("=") for part in value.split(",")]
    try:
        out = {name.strip(): int(n) for name, n in pairs}
    except ValueError:
        raise click.BadParameter(f"{value!r}: write NAME=NUMBER,NAME=NUMBER") from None
    if len(out) < len(pairs):
        raise click.BadParameter(f"{value!r}: a name occurs twice")
    return out


def _mesh(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, int] | None:
    """``_mapping`` of lengths, which are positive."""
    out = _mapping(ctx, param, value)
    if out and min(out.values()) < 1:
        raise click.BadParameter(f"{value!r}: an axis has a positive length")
    return out


def _shards(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, dict[str, int]] | None:
    """``PATTERN:axis=dimension`` options as a map of patterns; the mesh is read before them."""
    mesh: Any = ctx.params.get("mesh")
    if value and mesh is None:
        raise click.UsageError("--shard needs --mesh, such as --mesh model=4", ctx)
    out: dict[str, dict[str, int]] = {}
    for text in value:
        pattern, colon, rest = text.rpartition(":")
        if not colon:
            raise click.BadParameter(f"{text!r}: write PATTERN:AXIS=DIMENSION")
        out[pattern] = _mapping(ctx, param, rest) or {}
        if lost := out[pattern].keys() - mesh.keys():
            raise click.BadParameter(f"{text!r}: --mesh has no axis {min(lost)!r}")
    return out or None


def _patterns(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> list[str] | None:
    return list(value) or None


def _mib(ctx: click.Context, param: click.Parameter, value: int | None) -> int | None:
    return value and value << 20


_SELECTION = (
    click.option(
        "--keys", multiple=True, callback=_patterns, metavar="PATTERN", help="Take only these arrays (may be repeated)."
    ),
    click.option(
        "--drop", multiple=True, callback=_patterns, metavar="PATTERN", help="Leave these arrays out (may be repeated)."
    ),
    click.option(
        "--rules", type=click.Path(exists=True, dir_okay=False), help="A file of key rules: renames, splits, casts, …"
    ),
)
_MESH = (
    click.option(
        "--mesh", callback=_mesh, is_eager=True, metavar="AXES", help="Axes of the target mesh: data=2,model=4."
    ),
    click.option(
        "--shard",
        "shardings",
        callback=_shards,
        multiple=True,
        metavar="PATTERN:AXIS=DIM",
        help="What an axis splits (may be repeated).",
    ),
)
_MAX_SHARD = click.option(
    "--max-shard-mib",
    "max_shard_bytes",
    type=click.IntRange(min=1),
    metavar="MIB",
    callback=_mib,
    help="Largest file of safetensors or DCP; by default all arrays are in one.",
)
_STORED = (
    click.option(
        "--compression",
        metavar="zstd|weights[:N]|none",
        callback=checked("compression"),
        default="keep",
        help="Compress the chunks; by default as the source is.",
    ),
    click.option(
        "--pack",
        metavar="yes|no|BYTES",
        callback=packing,
        help="Whether small arrays (of at most so many bytes) share files; by default in object stores alone.",
    ),
    click.option(
        "--dtype-fallback",
        type=click.Choice(["raw"]),
        help="Call bfloat16 and float8 integers in Zarr's metadata, for readers without meshtape.",
    ),
)
_TARGET = (
    *_SELECTION,
    click.option("--prefix", help="Take what lies below this name, and leave the name out."),
    click.option(
        "--documents", type=CHECKPOINT, help="A model's directory, whose config, tokenizer and the like go along."
    ),
    click.option("--scheduler", metavar="ADDRESS", help="Spread the work over the workers of this Dask scheduler."),
    click.option(
        "--threads",
        default=2,
        show_default=True,
        type=click.IntRange(min=1),
        help="Pieces that are read and written at a time.",
    ),
    click.option(
        "--dtype", callback=checked("dtype"), shell_complete=dtype_names, help="Store floating arrays in this dtype."
    ),
    click.option(
        "--memory-limit",
        default=256,
        show_default=True,
        metavar="MIB",
        callback=_mib,
        type=click.IntRange(min=1),
        help="Memory for what is on its way.",
    ),
    click.option(
        "--allow-overflow", is_flag=True, help="Accept values that a cast turns into infinity, NaN or another integer."
    ),
    click.option(
        "--overwrite",
        is_flag=True,
        help="Replace an existing checkpoint. Documents beside it stay; where there is anything else, nothing is done.",
    ),
    MISSING,
)


def key_rules(path: str | None) -> Any:
    """The key rules of a file, if there is one; errors name it."""
    import meshtape as mt

    from ..errors import RuleSyntaxError

    if path is None:
        return None
    data = Path(path).read_bytes()
    try:
        return mt.Rules(data.decode("utf-8-sig"))
    except UnicodeDecodeError as e:
        number = data[: e.start].count(b"\n") + 1
        raise RuleSyntaxError(f"{path}: line {number}: not UTF-8 text") from None
    except RuleSyntaxError as e:
        raise RuleSyntaxError(f"{path}: {e}") from None


def _lines(title: str, every: float = 5.0) -> Callable[[int, int], None]:
    """Progress lines for a pipe: one at the start, at most one in so many seconds, and one at the end."""
    started, last, first = time.monotonic(), 0.0, -1

    def show(done: int, total: int) -> None:
        nonlocal last, first
        now = time.monotonic()
        if first < 0:
            first = done
        elif done < total and now - last < every:
            return
        last, seconds = now, now - started
        rate = (done - first) / seconds if seconds > 0 else 0.0
        text = f"{title}: {human_bytes(done)} of {human_bytes(total)} ({100 * done // max(total, 1)} %)"
        if rate > 0:
            text += f", {human_bytes(int(rate))}/s"
            text += f", {(total - done) / rate:.0f} s left" if done < total else f", {seconds:.1f} s"
        click.echo(text, err=True)

    return show


def _cluster(address: str | None) -> AbstractContextManager[Any]:
    """A client of the scheduler at an address, or None."""
    if address is None:
        return nullcontext()
    from ..parallel.dask.cluster import connect

    return connect(address)


@contextmanager
def _progress(title: str, shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar of bytes on a terminal; plain lines in a pipe."""
    from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

    from .tables import console

    if not shown:
        yield None
        return
    on = console(stderr=True)
    if not on.is_terminal:
        yield _lines(title)
        return

    class Rate(ProgressColumn):  # rich has one in powers of 1000
        def render(self, task: Any) -> str:
            rate = task.finished_speed or task.speed
            return "" if rate is None else f"{human_bytes(rate)}/s"

    columns = (TextColumn(title), BarColumn(), DownloadColumn(binary_units=True), Rate(), TimeRemainingColumn())
    bar = Progress(*columns, console=on)

    def show(done: int, total: int) -> None:
        if not bar.tasks:  # not before: an error of the arguments comes without a bar
            bar.add_task(title)
            bar.start()
        bar.update(bar.tasks[0].id, completed=done, total=total)

    try:
        yield show
    finally:
        if bar.tasks:
            bar.stop()


def _write(
    run: Callable[..., Any],
    title: str,
    src: str,
    dst: str,
    more: Callable[[Any], str] = lambda report: "",
    *,
    rules: str | None,
    scheduler: str | None,
    overwrite: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Write a checkpoint by a function of ``storage`` with the options of ``_TARGET`` and a bar; print its report."""
    with _cluster(scheduler) as client, _progress(title, not as_json) as progress:
        options |= {"client": client, "progress": progress, "overwrite": overwrite, "rules": key_rules(rules)}
        try:
            r = run(src, dst, **options)
        except Lossy as e:
            raise Lossy(str(e).replace("allow_overflow=True", "--allow-overflow")) from None
        except KeyboardInterrupt:
            raise WorkStopped(f"interrupted. What was written stays: the same command goes on with {dst}") from None
    text = f"{r.path}: {count(r.arrays, 'array')}, {human_bytes(r.total_size)}{more(r)}"
    for how, names in (("left out", r.skipped), ("left behind", r.left_behind)):
        text += f"; {how}: {some(names, 8)}" if names else ""
    _tell(r, as_json, "\n  ".join([text, *r.notes, *(f"{name}: {loss}" for name, loss in r.losses.items())]))


def _tell(report: Any, as_json: bool, text: str) -> None:
    from .reports import data
    from .tables import write_text

    print_json(data(report)) if as_json else write_text(text)


@click.command(epilog=examples("meshtape verify run/checkpoints/step-00000264"))
@click.argument("path", type=CHECKPOINT)
@JSON
def verify(path: str, as_json: bool) -> None:
    """Check every byte against its checksums.

    The exit code is 0 when all is well, and 1 with the list of damaged files when it is not. It is 1, too, for files of
    others that have no checksums: they may be whole, but nothing tells.
    """
    import meshtape as mt

    _tell(report := mt.verify(path), as_json, str(report))
    if report.is_bare:
        click.get_current_context().exit(1)


@click.command(
    epilog=examples(
        "meshtape diff run/checkpoints/step-00000198 run/checkpoints/step-00000264",
        "meshtape diff run/checkpoints/step-00000264 renamed --rules names.rules",
    )
)
@click.argument("a", type=CHECKPOINT)
@click.argument("b", type=CHECKPOINT)
@each(_SELECTION)
@click.option("--no-values", is_flag=True, help="Compare names, shapes and dtypes alone: reads the tables of contents.")
@JSON
def diff(a: str, b: str, rules: str | None, no_values: bool, as_json: bool, **selection: Any) -> None:
    """Compare two checkpoints.

    Names, shapes, dtypes and values, whatever the formats. With --rules the names of A are written as in B first.

    The exit code is 0 when they are the same, and 1 when they differ.
    """
    from meshtape.storage import diff as compare  # mt.diff is the differences of an array

    report = compare(a, b, values=not no_values, rules=key_rules(rules), **selection)
    _tell(report, as_json, str(report))
    if not report.same:
        raise click.exceptions.Exit(1)


@click.command(
    epilog=examples(
        "meshtape merge run/checkpoints/step-00000264 exported --keys 'params.*'",
        "meshtape merge run/checkpoints/step-00000264 renamed --rules names.rules",
        "meshtape merge run/checkpoints/step-00000264 half --dtype bfloat16 --max-shard-mib 512",
    )
)
@click.argument("src", type=CHECKPOINT)
@click.argument("dst", type=CHECKPOINT)
@_MAX_SHARD
@each(_TARGET)
@JSON
def merge(src: str, dst: str, **options: Any) -> None:
    """Write Hugging Face style safetensors.

    Streaming: memory is bounded by --memory-limit, whatever the size.
    """
    import meshtape as mt

    _write(mt.merge, "merging", src, dst, lambda report: f" in {', '.join(report.files)}", **options)


@click.command(
    epilog=examples("meshtape convert model.safetensors as-zarr --format zarr --mesh model=2 --shard '*.w1:model=1'")
)
@click.argument("src", type=CHECKPOINT)
@click.argument("dst", type=CHECKPOINT)
@click.option("--format", type=click.Choice(["zarr", "safetensors", "dcp"]), required=True, help="What to write.")
@click.option(
    "--layout", type=click.Choice(["dual"]), help="For zarr: files that are at once shards and safetensors files."
)
@_MAX_SHARD
@each(_MESH)
@each(_STORED)
@each(_TARGET)
@JSON
def convert(src: str, dst: str, **options: Any) -> None:
    """Write a checkpoint in another format.

    Streaming. A run that was interrupted goes on where it stopped.
    """
    import meshtape as mt

    _write(mt.convert, "converting", src, dst, **options)


@click.command(
    epilog=examples("meshtape reshard run/checkpoints/step-00000264 wider --mesh model=4 --shard 'params.w1:model=1'")
)
@click.argument("src", type=CHECKPOINT)
@click.argument("dst", type=CHECKPOINT)
@each(_MESH)
@each(_STORED)
@each(_TARGET)
@JSON
def reshard(src: str, dst: str, mesh: dict[str, int] | None, **options: Any) -> None:
    """Cut a checkpoint for another mesh.

    That mesh need not exist.
    """
    from meshtape.storage import reshard as run

    if mesh is None:
        raise click.UsageError("Missing option '--mesh'.")
    _write(run, "resharding", src, dst, lambda report: f" for {mesh}", mesh=mesh, **options)


@click.command(
    epilog=examples("meshtape estimate model.safetensors --mesh model=4 --shard '*.w1:model=1' --optimizer adamw")
)
@click.argument("path", type=CHECKPOINT)
@each(_MESH)
@click.option(
    "--dtype", callback=checked("dtype"), shell_complete=dtype_names, help="As if all floating arrays had this dtype."
)
@click.option("--optimizer", help="Add gradients, and the state of this optimizer: sgd, momentum, adam, adamw, lion, …")
@click.option("--optimizer-dtype", default="float32", show_default=True, help="Of the state and the master weights.")
@click.option(
    "--zero", "shard_optimizer_over", metavar="AXIS", help="A mesh axis over which the optimizer's state is divided."
)
@_MAX_SHARD
@click.option(
    "--compression",
    metavar="zstd|weights[:N]|none",
    callback=checked("compression"),
    help="Of the Zarr files: the most that they can then need.",
)
@JSON
def estimate(path: str, as_json: bool, **options: Any) -> None:
    """Bytes on disk and in the memory of ranks.

    Reads the table of contents alone.
    """
    from meshtape.storage import estimate as run

    found = run(path, **options)
    _tell(found, as_json, str(found))


@click.command(
    epilog=examples(
        "meshtape tree run/checkpoints/step-00000264 --depth 2", "meshtape tree s3://bucket/run/step-00001000"
    )
)
@click.argument("path", type=CHECKPOINT)
@click.option("--depth", type=click.IntRange(min=1), help="Show so many levels.")
@JSON
def tree(path: str, depth: int | None, as_json: bool) -> None:
    """Show the tree of a checkpoint.

    Folders with their sizes, arrays with shape and dtype. Numbered folders that are alike are one.
    """
    import meshtape as mt

    from .tables import write_lines, write_text
    from .tree import as_data, as_text

    ckpt = mt.open_checkpoint(path)
    if as_json:
        print_json(as_data(ckpt))
    else:
        head, *lines = as_text(ckpt, depth)
        write_text(head)
        write_lines(lines)


COMMANDS = (tree, verify, diff, estimate, merge, convert, reshard)
