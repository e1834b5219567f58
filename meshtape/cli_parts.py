"""What commands share: the option ``--json``, examples below a help text, and what the shell may complete."""

from __future__ import annotations

from typing import Any

import click

JSON = click.option("--json", "as_json", is_flag=True, help="Plain data instead of text.")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with what the user should know about the work that it stopped."""


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

    from .errors import MeshtapeError

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
    from .arrays.dtypes import DTYPES

    return [n for n in sorted(DTYPES) if n.startswith(incomplete)]


def each(options: tuple[Any, ...]) -> Any:
    """A decorator that adds several options, in their order."""

    def add(fn: Any) -> Any:
        for option in reversed(options):
            fn = option(fn)
        return fn

    return add
