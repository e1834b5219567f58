"""What the reference takes from the code itself: a page for each namespace, and the catalogue of errors."""

from __future__ import annotations

import inspect
import types
from pathlib import Path
from typing import Any

from cures import CURES
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

# (file, title, module whose names are listed, what the page says first)
NAMESPACES = (
    ("arrays", "Arrays", "meshtape", "What `import meshtape as mt` offers on arrays, in the order of its modules."),
    ("nn", "mt.nn", "meshtape.nn", "Functions that models need and the array standard lacks."),
    ("linalg", "mt.linalg", "meshtape.linalg", "Linear algebra."),
    ("fft", "mt.fft", "meshtape.fft", "Fourier transforms."),
    ("random", "mt.random", "meshtape.random", "Random numbers: a pure function of a key and a position."),
    ("tree", "mt.tree", "meshtape.tree", "Nested dicts, lists, tuples and dataclasses of arrays."),
    ("gradients", "Gradients and compiled functions", "meshtape.autodiff", "The tape, and what reads it."),
    ("optim", "mt.optim", "meshtape.optim", "Optimizers as pure functions over trees."),
    ("parallel", "Meshes and shardings", "meshtape.parallel", "Arrays over a mesh of ranks."),
    ("training", "mt.training", "meshtape.training", "Training on a mesh."),
    ("models", "mt.models", "meshtape.models", "Models as pure functions over trees of parameters."),
    ("storage", "mt.storage", "meshtape.storage", "Checkpoints."),
    (
        "virtual",
        "mt.storage.virtual",
        "meshtape.storage.virtual",
        "Checkpoints that are computed from others when they are read.",
    ),
    ("browse", "mt.storage.browse", "meshtape.storage.browse", "Looking at checkpoints with a web browser."),
)


def _names(module: types.ModuleType) -> list[str]:
    listed = getattr(module, "__all__", None)
    if listed is None:
        listed = [
            n
            for n, o in vars(module).items()
            if not n.startswith("_") and getattr(o, "__module__", "") == module.__name__
        ]
    return [n for n in listed if not n.startswith("_") and hasattr(module, n)]


def _documented(module: types.ModuleType, file: str) -> dict[str, list[str]]:
    """Names with docstrings, by the first line of the module that defines them."""
    groups: dict[str, list[str]] = {}
    for name in _names(module):
        value: Any = getattr(module, name)
        if not (inspect.isfunction(value) or inspect.isclass(value)) or not value.__doc__:
            continue
        home = inspect.getmodule(value)
        if file == "arrays" and (home is None or ".arrays" not in home.__name__ or issubclass_of_error(value)):
            continue
        title = (home.__doc__ or "").strip().split("\n")[0].rstrip(".") if home else ""
        groups.setdefault(title or module.__name__, []).append(name)
    return groups


def issubclass_of_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)


def _summary(module: types.ModuleType, names: list[str]) -> list[str]:
    """A table of names and the first lines of their docstrings. ``autosummary`` would analyse every source a second
    time for it."""
    lines = [".. list-table::", "   :widths: 1 3", ""]
    for n in names:
        lines += [f"   * - `{n}`", f"     - {inspect.getdoc(getattr(module, n)).split(chr(10))[0]}"]
    return lines


def _page(title: str, module: types.ModuleType, file: str, intro: str) -> str:
    lines = [title, "=" * len(title), "", intro.replace("`", "``"), "", f".. currentmodule:: {module.__name__}", ""]
    for heading, names in _documented(module, file).items():
        heading = heading.replace("`", "").replace("*", "\\*").replace("|", "\\|").replace("_", "\\_")
        lines += [heading, "-" * max(len(heading), 3), "", *_summary(module, names), ""]
        for n in names:
            if inspect.isclass(getattr(module, n)):
                lines += [f".. autoclass:: {n}", "   :members:", ""]
            else:
                lines += [f".. autofunction:: {n}", ""]
    return "\n".join(lines) + "\n"


def write_pages(app: Sphinx) -> None:
    """Write a page for each namespace that exists, into a folder that is not kept."""
    import importlib

    import meshtape as mt

    target = Path(app.srcdir) / "reference" / "api"
    target.mkdir(exist_ok=True)
    for file, title, name, intro in NAMESPACES:
        parts = name.split(".")[1:]
        try:
            module: Any = mt
            for part in parts:
                module = getattr(module, part)
        except AttributeError:
            module = importlib.import_module(name)
        text = _page(title, module, file, intro)
        path = target / f"{file}.rst"
        if not path.exists() or path.read_text() != text:  # an unchanged page is not read again
            path.write_text(text)


_PLAIN = (Exception, BaseException, object)


class ErrorCatalogue(SphinxDirective):
    """Every error that a user can cause: when, from the docstrings of ``meshtape.errors``, and what to do about it."""

    def run(self) -> list[nodes.Node]:
        from meshtape import errors

        lines = []
        for name in errors.__all__:
            kind = getattr(errors, name)
            bases = [b for b in kind.__mro__[1:] if b.__module__ == "builtins" and b not in _PLAIN]
            ours = [b.__name__ for b in kind.__bases__ if b.__module__ != "builtins"]
            also = [f"a `{b}`" for b in [*ours, *(b.__name__ for b in bases[:1])]]
            lines += [
                f":::{{py:exception}} meshtape.errors.{name}",
                f"Is {' and '.join(also)}.\n" if also else "",
                f"**When.** {' '.join((kind.__doc__ or '').split())}\n",
                f"**What to do.** {CURES[name]}",
                ":::\n",
            ]
        # The page is Markdown, and so is what stands on it.
        lines = "\n".join(lines).split("\n")
        node = nodes.Element()
        node.document = self.state.document
        self.state.nested_parse(StringList(lines, source="meshtape.errors"), self.content_offset, node)
        return node.children


class CommandLine(SphinxDirective):
    """The help of every command of ``meshtape``, as it prints it."""

    def run(self) -> list[nodes.Node]:
        import click

        from meshtape.cli.main import main

        out: list[nodes.Node] = []
        root = click.Context(main, info_name="meshtape", terminal_width=100)
        for name in main.list_commands(root):
            command = main.get_command(root, name)
            if command is None:
                continue
            section = nodes.section(ids=[nodes.make_id(f"meshtape-{name}")])
            section += nodes.title(text=f"meshtape {name}")
            text = command.get_help(click.Context(command, info_name=name, parent=root, terminal_width=100))
            section += nodes.literal_block(text, text, language="text")
            out.append(section)
        return out


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", write_pages)
    app.add_directive("error-catalogue", ErrorCatalogue)
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True}
