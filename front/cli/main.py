"""The command line: ``meshtape demo | info | completion``, and the commands of the modules beside this one.

An error that a user can cause is one message and exit code 1, without a traceback. A wrong call is click's message and
code 2; Ctrl-C is code 130.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..errors import MeshtapeError
from . import blending, look, runs
from . import run as cli_run
from .browse import browse, serve
from .derive import derive
from .help import FittingContext
from .parts import JSON, WorkStopped, examples, print_json
from .storage import COMMANDS

INTERRUPTED = 130  # what a shell says of a command that Ctrl-C ended
_NARROWEST, _WIDEST = 30, 78  # columns of help texts; click's own least is 50


class _Commands(click.Group):
    """The group of commands, which turns errors of meshtape and of the operating system into messages."""

    context_class = FittingContext

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One line each, broken and never cut."""
        with formatter.section("Commands"):
            formatter.write_dl([(n, self.commands[n].get_short_help_str(200)) for n in self.list_commands(ctx)])

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        cmd.context_class = FittingContext
        super().add_command(cmd, name)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by who started the command: nobody wants what it prints
                setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
        extra.setdefault("terminal_width", max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns - 2)))
        with _fitting_messages(), _system_errors():  # a page of help may have no place to go
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):
            # A name that the terminal has no characters for is shown by their numbers.
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        with _fitting_messages(), _plain_warnings(), _system_errors():
            return self._invoked(ctx)

    def _invoked(self, ctx: click.Context) -> Any:
        from .tables import console, write_text

        try:
            found = super().invoke(ctx)
            sys.stdout.flush()  # what could not be written is an error here, and not after the exit code
            return found
        except MeshtapeError as e:
            # Options have other names here than arguments of Python.
            raise click.ClickException(str(e).replace("overwrite=True", "--overwrite")) from None
        except KeyboardInterrupt as e:
            write_text(f"\n{e if isinstance(e, WorkStopped) else 'interrupted'}", console(stderr=True))
            raise click.exceptions.Exit(INTERRUPTED) from None


@contextlib.contextmanager
def _system_errors() -> Iterator[None]:
    """A block in which an error of the operating system is one line."""
    try:
        yield
    except OSError as e:
        if e.errno == errno.EPIPE:  # who reads has read enough; click ends quietly
            raise
        _give_up_unwritten()
        raise click.ClickException(f"{e.strerror or e}{f': {e.filename}' if e.filename else ''}") from None


@contextlib.contextmanager
def _fitting_messages() -> Iterator[None]:
    """A block in which click's errors are wrapped between words on a terminal."""
    from .tables import terminal_width, wrapped

    try:
        yield
    except click.ClickException as e:
        width = terminal_width(sys.stderr)
        if width is not None:
            text = wrapped(e.format_message(), width, len("Error: "))
            e.format_message = lambda: text  # type: ignore[method-assign]
        raise


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """A block in which a warning for users is one line, without the place in the code. A script of ``run`` keeps it."""
    from ..storage.browse.model.text import visible

    python = warnings.formatwarning

    def told(message: Warning | str, category: type[Warning], *place: Any, **line: Any) -> str:
        ctx = click.get_current_context(silent=True)
        if not issubclass(category, UserWarning) or (ctx is not None and ctx.command is cli_run.run):
            return python(message, category, *place, **line)
        return f"warning: {visible(str(message), 10**5)}\n"

    warnings.formatwarning = told
    try:
        yield
    finally:
        warnings.formatwarning = python


def _give_up_unwritten() -> None:
    """Send output that the standard output refuses to the null device, as Python's exit would raise a second error."""
    try:
        sys.stdout.flush()
    except OSError:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="meshtape")
def main() -> None:
    """Arrays that differentiate, shard over Dask workers, and checkpoint to open formats.

    meshtape COMMAND --help shows examples. A checkpoint is a path or a URL (s3://, gs://, az://, https://) everywhere.
    """


@main.command(
    epilog=examples("meshtape demo --directory first-run", "meshtape demo --scheduler tcp://10.0.0.1:8786 --epochs 8")
)
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
@JSON
def demo(scheduler: str | None, directory: str, epochs: int, seed: int, as_json: bool) -> None:
    """Train on two Dask clusters, export, check.

    Two worker processes train a network on handwritten digits, on a mesh of 2 × 2 ranks (data × model), save a sharded
    checkpoint and stop. Another cluster resumes on 3 ranks, finishes, and exports to safetensors, which is then read
    without meshtape. The exit code is not 0 when the accuracy is too low or the readers disagree.
    """
    from ..demo import run
    from .tables import console

    # Where data is asked for, the standard output holds nothing else.
    report = run(scheduler=scheduler, directory=directory, epochs=epochs, seed=seed, console=console(stderr=as_json))
    if as_json:
        print_json(report.facts)


@main.command(epilog=examples("meshtape info", "meshtape info --json"))
@JSON
def info(as_json: bool) -> None:
    """Versions, devices, and missing packages.

    Each missing package has the command that installs it.
    """
    from ..info import collect, show
    from .tables import console

    if as_json:
        print_json(collect())
    else:
        show(console())


@main.command(epilog=examples("meshtape completion bash > ~/.local/share/bash-completion/completions/meshtape"))
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Completion for bash, zsh or fish.

    Prints a script for the shell, which completes commands, options, paths, and names of arrays.

    \b
    Put it where the shell looks, and open a new one:
      bash  ~/.local/share/bash-completion/completions/meshtape
      zsh   a folder of $fpath, such as ~/.zfunc/_meshtape
      fish  ~/.config/fish/completions/meshtape.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "meshtape", "_MESHTAPE_COMPLETE").source())


_FURTHER = (look.ls, look.show, runs.gc, runs.du, derive, serve, browse)
for _command in (*_FURTHER, *COMMANDS, *blending.COMMANDS, *cli_run.COMMANDS):
    main.add_command(_command)
