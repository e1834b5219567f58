"""Commands that merge models: ``blend``, ``lora-merge``, ``lora-extract``."""

from __future__ import annotations

from typing import Any

import click

from ..arrays.core.formatting import count
from .parts import CHECKPOINT, INTEGERS, JSON, checked, each, examples
from .storage import _MAX_SHARD, _SELECTION, _TARGET, _tell, _write


@click.command(
    epilog=examples(
        "meshtape blend config.yml --out blended", "meshtape blend config.yml --out blended.zarr --format zarr --list"
    )
)
@click.argument("config", type=click.Path(exists=True, dir_okay=False))
@click.option("--out", required=True, type=CHECKPOINT, help="The directory or URL to make.")
@click.option("--seed", default=0, show_default=True, help="Of the random choices of dare and della.")
@click.option(
    "--format",
    type=click.Choice(["safetensors", "zarr"]),
    default="safetensors",
    show_default=True,
    help="What to write.",
)
@INTEGERS
@click.option("--list", "listed", is_flag=True, help="Print how each array was made.")
@_MAX_SHARD
@each(_TARGET)
@JSON
def blend(config: str, out: str, listed: bool, integers: str | None, **options: Any) -> None:
    """Blend models by a configuration of mergekit.

    Streaming: memory is bounded by --memory-limit, whatever the size. A run that was interrupted goes on where it
    stopped.
    """
    import meshtape as mt

    options["integers"] = integers or "equal"
    _write(mt.storage.blend, "blending", config, out, lambda r: f"\n{r.table()}" if listed else "", **options)


@click.command(name="lora-merge", epilog=examples("meshtape lora-merge base.safetensors adapter merged"))
@click.argument("model", type=CHECKPOINT)
@click.argument("adapter", type=CHECKPOINT)
@click.argument("dst", type=CHECKPOINT)
@_MAX_SHARD
@each(_TARGET)
@JSON
def lora_merge(model: str, adapter: str, dst: str, **options: Any) -> None:
    """Write a model with a LoRA adapter applied.

    The adapter is a directory as PEFT writes it.
    """
    import meshtape as mt

    said = {"merge_method": "passthrough", "models": [{"model": {"model": model, "lora": adapter}}]}
    _write(mt.storage.blend, "merging", said, dst, **options)  # type: ignore[arg-type]


@click.command(
    name="lora-extract",
    epilog=examples(
        "meshtape lora-extract tuned.safetensors base.safetensors adapter --rank 16",
        "meshtape lora-extract tuned.safetensors base.safetensors adapter-90 --energy 0.9",
    ),
)
@click.argument("tuned", type=CHECKPOINT)
@click.argument("base", type=CHECKPOINT)
@click.argument("dst", type=CHECKPOINT)
@click.option("--rank", type=click.IntRange(min=1), help="The rank of every module.")
@click.option(
    "--energy", type=click.FloatRange(0, 1, min_open=True), help="Instead: the part of each difference to keep."
)
@each(_SELECTION[:2])
@click.option("--dtype", callback=checked("dtype"), default="float32", show_default=True, help="Of the factors.")
@JSON
def lora_extract(tuned: str, base: str, dst: str, as_json: bool, **options: Any) -> None:
    """Write the difference of two models as a LoRA adapter."""
    import meshtape as mt

    if (options["rank"] is None) == (options["energy"] is None):
        raise click.UsageError("give --rank or --energy")
    r = mt.storage.extract_lora(tuned, base, dst, **options)
    text = f"{r.path}: {count(len(r.ranks), 'module')}, rank at most {max(r.ranks.values())}, "
    text += f"at least {min(r.energy.values()):.1%} of each difference"
    text += f"; without a place in it: {', '.join(r.left)}" if r.left else ""
    _tell(r, as_json, "\n".join([text, *r.notes]))


COMMANDS = (blend, lora_merge, lora_extract)
