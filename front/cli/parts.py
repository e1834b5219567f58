"""Parts that commands share: the option ``--json`` and its output, examples below a help text, completion."""

from __future__ import annotations

import json
from typing import Any

import click

from ..storage.browse.model.text import plain

JSON = click.option("--json", "as_json", is_flag=True, help="Plain data instead of text.")
MISSING = click.option(
    "--missing",
    type=click.Choice(["error", "fill"]),
    default="error",
    help="Of Zarr by others: refuse chunks that are not there, or take them for the fill value.",
)
INTEGERS = click.option(
    "--integers",
    type=click.Choice(["equal", "first", "last"]),
    help="Whose counts and the like, which have no sums: by default they must be equal in all.",
)


def as_json(data: Any) -> str:
    """``data`` for ``--json``. JSON has no NaN and no infinities: they are texts, which ``float`` and ``Number`` read.

    >>> print(as_json({"loss": float("nan"), "shape": (2, 3), "most": -float("inf")}))
    {
      "loss": "NaN",
      "shape": [
        2,
        3
      ],
      "most": "-Infinity"
    }
    """
    return json.dumps(plain(data, str), indent=2, allow_nan=False)


def print_json(data: Any) -> None:
    """Print data for ``--json``; docs/reference/json.md names every field."""
    click.echo(as_json(data))


class WorkStopped(KeyboardInterrupt):
    """Ctrl-C, with a message on the work that it stopped."""


CHECKPOINT = click.Path()
"""A path or URL; the shell completes paths."""

_MOST = 200  # names that are offered for completion


def examples(*commands: str) -> str:
    """The epilog of a help text. A test runs every line of it.

    >>> examples("meshtape ls ckpt").splitlines()[1:]
    ['Examples:', '  meshtape ls ckpt']
    """
    return "\n".join(["\b", "Examples:", *(f"  {c}" for c in commands)])


def array_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of arrays in the checkpoint that was typed before."""
    import meshtape as mt

    from ..errors import MeshtapeError

    try:
        ckpt = mt.open_checkpoint(ctx.params["path"])
    except (MeshtapeError, OSError, KeyError):
        return []  # a shell that waits for suggestions has no use for an error
    # A name that a shell would have to quote is typed by those who know it.
    return [n for n in ckpt if n.startswith(incomplete) and n.isprintable() and not set(n) & set(" '\"\\$`!;&|<>()")][
        :_MOST
    ]


def dtype_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of dtypes that checkpoints hold."""
    from ..arrays.core.dtypes import DTYPES

    return [n for n in sorted(DTYPES) if n.startswith(incomplete)]


def checked(what: str) -> Any:
    """A callback for a ``"dtype"`` or a ``"compression"``: one that does not exist is a wrong call."""

    def check(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        from ..errors import MeshtapeError
        from ..storage.format import compression, dtypes

        if value in (None, "none", "keep"):
            return None if value == "none" else value
        try:
            dtypes.by_name(value) if what == "dtype" else compression.chosen(value)
        except MeshtapeError as e:
            raise click.BadParameter(str(e)) from None
        return value

    return check


def packing(ctx: click.Context, param: click.Parameter, value: str | None) -> bool | int | None:
    """Callback of an option that is ``yes``, ``no`` or a number of bytes."""
    if value in (None, "yes", "no"):
        return None if value is None else value == "yes"
    if not value.isdecimal():
        raise click.BadParameter(f"{value!r}: write yes, no, or a number of bytes")
    return int(value)


def each(options: tuple[Any, ...]) -> Any:
    """A decorator that adds several options, in their order."""

    def add(fn: Any) -> Any:
        for option in reversed(options):
            fn = option(fn)
        return fn

    return add
