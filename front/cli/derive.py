"""The command ``derive``, which writes the document of a virtual checkpoint."""

from __future__ import annotations

import re
from typing import Any

import click

from ..storage.browse.model.text import count
from .parts import CHECKPOINT, INTEGERS, JSON, checked, dtype_names, examples, print_json
from .storage import key_rules

_OPTIONS = {
    "mean": {"steps", "integers"},
    "sum": {"weights", "normalize", "integers"},
    "ema": {"decay", "steps", "integers"},
    "difference": {"integers"},
    "add": {"scale", "integers"},
    "lora": {"scale"},
    "cast": {"dtype"},
    "quantize": {"bits", "keys"},
    "rules": {"rules"},
    "rows": {"ranges"},
    "blend": {"seed", "keys", "integers"},
}
"""The options of each kind that has any."""
_NEEDED = {"weights", "decay", "dtype", "rules", "ranges"}
_NUMBERS = {"mean": 0, "sum": 0, "ema": 0, "difference": 2, "add": 2, "lora": 2}  # of checkpoints; 0: any


def _list(of: type) -> Any:
    """A callback for numbers with commas between them."""

    def parse(ctx: click.Context, param: click.Parameter, value: str | None) -> list[Any] | None:
        try:
            return None if value is None else [of(x) for x in value.split(",")]
        except ValueError:
            raise click.BadParameter(f"{value!r}: write NUMBER,NUMBER") from None

    return parse


def _ranges(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, tuple[int, ...]] | None:
    """``PATTERN:START:STOP`` options, with ``:AXIS`` where it is not 0."""
    out: dict[str, tuple[int, ...]] = {}
    for text in value:
        found = re.fullmatch(r"(.+?):(\d+):(\d+)(?::(\d+))?", text)
        if found is None or found[1] in out:
            raise click.BadParameter(
                f"{text!r}: write PATTERN:START:STOP or PATTERN:START:STOP:AXIS, each pattern once"
            )
        out[found[1]] = tuple(int(n) for n in found.groups()[1:] if n)
    return out or None


@click.command(
    epilog=examples(
        "meshtape derive mean run/checkpoints/step-00000198 run/checkpoints/step-00000264 --out run/mean.json",
        "meshtape derive ema run/checkpoints --decay 0.9 --out run/ema.json",
        "meshtape derive difference after.safetensors before.safetensors --out delta.json --json",
        "meshtape derive cast model.safetensors --dtype bfloat16 --out short.json",
    )
)
@click.argument(
    "kind",
    metavar="KIND",
    type=click.Choice(
        ["mean", "sum", "ema", "difference", "add", "lora", "cast", "quantize", "rules", "rows", "blend", "repin"]
    ),
)
@click.argument("sources", type=CHECKPOINT, nargs=-1, required=True)
@click.option("--out", required=True, metavar="FILE", help="The document to write: a file or URL of any name.")
@click.option("--weights", metavar="W,W,…", callback=_list(float), help="sum: the weight of each.")
@click.option("--normalize", is_flag=True, default=None, help="sum: divide by the sum of the weights.")
@click.option("--decay", type=float, help="ema: from 0, the last alone, to 1.")
@click.option("--steps", metavar="N,N,…", callback=_list(int), help="mean, ema: steps of the run; by default all.")
@INTEGERS
@click.option("--scale", type=float, help="add, lora: a factor of what is added.")
@click.option("--dtype", callback=checked("dtype"), shell_complete=dtype_names, help="cast: of floating arrays.")
@click.option("--bits", type=click.Choice(["8", "4"]), help="quantize: of each value.")
@click.option("--keys", multiple=True, metavar="PATTERN", help="quantize, blend: only these arrays (may be repeated).")
@click.option("--seed", type=int, help="blend: of the random choices of dare and della.")
@click.option("--rules", type=click.Path(exists=True, dir_okay=False), help="rules: a file of key rules.")
@click.option(
    "--rows",
    "ranges",
    multiple=True,
    callback=_ranges,
    metavar="PATTERN:START:STOP",
    help="rows: what stays of these arrays (may be repeated).",
)
@click.option("--overwrite", is_flag=True, help="Replace another such document, and nothing else.")
@JSON
def derive(kind: str, sources: tuple[str, ...], out: str, overwrite: bool, as_json: bool, **given: Any) -> None:
    """Compute a checkpoint from others, when it is read.

    Writes a small document that opens like any checkpoint: it is listed, loaded, verified, compared, browsed and
    merged, and its arrays are computed meanwhile. It names its parents, and notices when they change.

    KIND is mean or ema, over the steps of a run or over checkpoints; sum, of checkpoints; difference, A - B; add, BASE
    + scale × DELTA; lora, of BASE and the directory of an adapter of PEFT; cast, quantize, rules or rows, of one
    checkpoint; blend, by a configuration of mergekit, whose file takes the place of SOURCES; repin, a document whose
    parents are pinned as they are now.
    """
    from meshtape.storage import blended, virtual
    from meshtape.storage.loading.runs import is_run

    options = {name: value for name, value in given.items() if value not in (None, ())}
    shown = {"ranges": "rows"}
    if strange := options.keys() - _OPTIONS.get(kind, set()):
        raise click.UsageError(f"{kind} takes no --{shown.get(min(strange), min(strange))}")
    if lacks := (_OPTIONS.get(kind, set()) & _NEEDED) - options.keys():
        raise click.UsageError(f"{kind} needs --{shown.get(min(lacks), min(lacks))}")
    wanted = _NUMBERS.get(kind, 1)
    if wanted and len(sources) != wanted:
        raise click.UsageError(f"{kind} is made of {count(wanted, 'checkpoint')}, got {len(sources)}")
    if "bits" in options:
        options["bits"] = int(options["bits"])
    if "rules" in options:
        options["rules"] = key_rules(options["rules"])
    named = {"sum": "weighted_sum", "rules": "with_rules"}.get(kind, kind)
    function = blended if kind == "blend" else getattr(virtual, named)
    run = len(sources) == 1 and (kind == "ema" or (kind == "mean" and is_run(sources[0])))
    made = function(*([sources[0] if run else sources] if not wanted else sources), **options)
    where = virtual.write(out, made, overwrite=overwrite)
    if as_json:
        print_json({"path": where, "expression": made.path, "arrays": len(made), "nbytes": made.nbytes})
    else:
        click.echo(f"{where} = {made.path}: {count(len(made), 'array')}, computed when they are read")
