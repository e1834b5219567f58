"""The command line: ``meshtape demo | info | ls | show``, and the commands of ``cli_storage``.

An error that a user can cause is one message and exit code 1, without a traceback; a wrong call is click's message and code 2.
"""

from __future__ import annotations

import json
from typing import Any

import click

from . import __version__, cli_run
from .cli_browse import browse
from .cli_storage import COMMANDS
from .errors import MeshtapeError


class _Commands(click.Group):
    """Turns meshtape's own errors into messages."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MeshtapeError as e:
            raise click.ClickException(f"{type(e).__name__}: {e}") from None


def _console() -> Any:
    from rich.console import Console

    return Console()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="meshtape")
def main() -> None:
    """Arrays that differentiate, shard over Dask workers, and checkpoint to open formats."""


@main.command()
@click.option("--scheduler", metavar="ADDRESS", help="Use this Dask scheduler instead of starting clusters here.")
@click.option(
    "--directory",
    default="meshtape-demo",
    show_default=True,
    type=click.Path(file_okay=False),
    help="Where a directory for this run is made. Workers must see it too.",
)
@click.option("--epochs", default=24, show_default=True, type=click.IntRange(min=1), help="Passes over the data.")
@click.option("--seed", default=0, show_default=True, help="Seed of the weights and of the order of the data.")
def demo(scheduler: str | None, directory: str, epochs: int, seed: int) -> None:
    """Train a network on handwritten digits over two Dask clusters, and check the result.

    Two worker processes train it on a mesh of 2 × 2 ranks (data × model), save a sharded checkpoint and stop. Another cluster
    resumes on 3 ranks, finishes, and exports to safetensors, which is then read without meshtape. The exit code is not 0 when
    the accuracy is too low or the readers disagree.
    """
    from .demo import run

    run(scheduler=scheduler, directory=directory, epochs=epochs, seed=seed, console=_console())


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Plain data instead of a table.")
def info(as_json: bool) -> None:
    """Versions, devices, and what is missing and how to get it."""
    from .info import collect, show

    if as_json:
        click.echo(json.dumps(collect(), indent=2))
    else:
        show(_console())


@main.command()
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Plain data instead of a table.")
def ls(path: str, as_json: bool) -> None:
    """List the arrays of a checkpoint: a meshtape directory, a safetensors file, a Hugging Face directory, a Zarr group.

    \b
    Example:  meshtape ls run/checkpoints/step-00000264
    """
    import meshtape as mt

    ckpt = mt.open_checkpoint(path)
    if as_json:
        click.echo(json.dumps(_facts(ckpt), indent=2))
        return
    from rich.markup import escape
    from rich.table import Table

    from .arrays.display import human_bytes

    step = "" if ckpt.step is None else f", step {ckpt.step}"
    mesh = "".join(f", saved from {' × '.join(f'{n}={s}' for n, s in m.items())}" for m in ckpt.meshes)
    title = f"{ckpt.path} ({ckpt.kind}{step}{mesh})"
    table = Table(title=escape(title), title_justify="left")
    table.add_column("name", overflow="fold")
    table.add_column("dtype")
    table.add_column("shape")
    table.add_column("bytes", justify="right")
    table.add_column("sharding", overflow="fold")
    for name, a in ckpt.items():
        table.add_row(
            escape(_safe(name)), a.dtype.name, str(a.shape), human_bytes(a.nbytes), escape(a.sharding_text or "")
        )
    table.add_section()
    table.add_row(f"{len(ckpt)} arrays", "", "", human_bytes(ckpt.nbytes), "")
    _console().print(table)


@main.command()
@click.argument("path")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Plain data instead of a table.")
def show(path: str, name: str, as_json: bool) -> None:
    """Show one array of a checkpoint: its facts, statistics and first values.

    \b
    Example:  meshtape show run/checkpoints/step-00000264 params.w1
    """
    import numpy as np

    import meshtape as mt

    ckpt = mt.open_checkpoint(path)
    stored = ckpt[name]
    values = np.asarray(stored)
    facts = _describe(stored, values)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(_safe(name)), title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value", overflow="fold")
    for what, value in facts.items():
        if what not in ("name", "values"):
            table.add_row(what, escape(f"{value:.6g}" if isinstance(value, float) else str(value)))
    console = _console()
    console.print(table)
    with np.printoptions(threshold=60, edgeitems=3, precision=4, suppress=True):
        console.print(str(values), highlight=False, markup=False)


def _safe(text: str) -> str:
    """A name from a file, with control characters written out: a terminal must not obey it."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _facts(ckpt: Any) -> dict[str, Any]:
    from .storage.manifest import encode_json

    return {
        "path": ckpt.path,
        "kind": ckpt.kind,
        "step": ckpt.step,
        "meshes": ckpt.meshes,
        "metadata": encode_json(ckpt.metadata, "metadata"),  # NaN is no JSON
        "documents": list(ckpt.documents),
        "nbytes": ckpt.nbytes,
        "arrays": [
            {
                "name": name,
                "dtype": a.dtype.name,
                "shape": list(a.shape),
                "nbytes": a.nbytes,
                "sharding": a.sharding_text,
            }
            for name, a in ckpt.items()
        ],
    }


def _describe(stored: Any, values: Any) -> dict[str, Any]:
    import numpy as np

    facts: dict[str, Any] = {
        "name": stored.name,
        "dtype": stored.dtype.name,
        "shape": str(stored.shape),
        "bytes": stored.nbytes,
        "sharding": stored.sharding_text or "-",
    }
    if values.size and values.dtype.kind not in "cb":
        wide = values.astype(np.float64)
        finite = wide[np.isfinite(wide)]
        facts |= {
            "NaN": int(np.isnan(wide).sum()),
            "infinite": int(np.isinf(wide).sum()),
            "zeros": int((wide == 0).sum()),
        }
        if finite.size:
            facts |= {
                "min": float(finite.min()),
                "max": float(finite.max()),
                "mean": float(finite.mean()),
                "std": float(finite.std()),
            }
    return facts


for _command in (*COMMANDS, *cli_run.COMMANDS):
    main.add_command(_command)
main.add_command(browse)
