"""The text form of key rules: one rule a line, and back.

::

    # names, an arrow, names, then steps in order; {layer} stands for one part of a key between dots
    layers.{layer}.q, layers.{layer}.k, layers.{layer}.v -> blocks.{layer}.qkv, fuse_qkv(heads=8, groups=2)
    "odd name, with a comma" -> odd
    lm_head.weight -> _                      # drop
    _ -> bias, init(shape=[8], dtype=float32)
    @follow opt.m.{}                         # the rules apply to these keys as well

A name is quoted, as JSON or in single quotes, where it holds spaces, commas, parentheses, quotes, ``#``, ``->``, or
begins with ``@`` or is ``_``. ``{{`` and ``}}`` are braces.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any, NoReturn

from ...arrays.core.errors import RuleSyntaxError
from . import steps, value_steps
from .step import Step, fits

_PLAIN = r"""(?:(?!->)[^\s,()#"'])+"""
_NUMBER = re.compile(r"[+-]?(\d+)(\.\d*)?([eE][+-]?\d+)?\Z")
_WORDS = {"true": True, "false": False, "none": None, **{t: float(t) for t in ("inf", "-inf", "nan")}}
# The names in the text form.
STEPS: dict[str, type[Step]] = {
    "concat": steps.Concat,
    "split": steps.Split,
    "permute": steps.Permute,
    "reshape": steps.Reshape,
    "cast": value_steps.Cast,
    "pad": value_steps.Pad,
    "slice": steps.Slice,
    "interleave": steps.Interleave,
    "deinterleave": steps.Deinterleave,
    "fuse_qkv": steps.FuseQKV,
    "split_qkv": steps.SplitQKV,
    "fuse_ffn": steps.FuseFFN,
    "split_ffn": steps.SplitFFN,
    "init": value_steps.Init,
    "dequantize": value_steps.Dequantize,
}
_NAMES = {cls: name for name, cls in STEPS.items()}


class _Line:
    """A cursor over one line."""

    def __init__(self, text: str, number: int) -> None:
        self.text, self.number, self.at = text, number, 0

    def fail(self, what: str, at: int | None = None) -> NoReturn:
        at = self.at if at is None else at
        raise RuleSyntaxError(f"line {self.number}, column {at + 1}: {what}\n  {self.text}\n  {' ' * at}^")

    def match(self, pattern: str) -> re.Match[str] | None:
        """The text at the cursor, after blanks and a comment, which then stands behind it; None where it is another."""
        self.at = re.compile(r"[ \t\r]*(#.*)?").match(self.text, self.at).end()  # type: ignore[union-attr]
        m = re.compile(pattern).match(self.text, self.at)
        self.at = self.at if m is None else m.end()
        return m

    def take(self, mark: str) -> bool:
        return self.match(re.escape(mark)) is not None

    def ended(self) -> bool:
        return self.match(r"\Z") is not None

    def found(self, length: int) -> str:
        return "the end of the line" if self.ended() else repr(self.text[self.at :][:length])

    def need(self, mark: str, after: str) -> None:
        if not self.take(mark):
            self.fail(f"expected {mark!r} after {after}, found {self.found(12)}")

    def string(self) -> str | None:
        """A quoted text, or None."""
        m = self.match(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'')
        if m is None:
            if self.text[self.at : self.at + 1] in ("'", '"'):
                self.fail("the quote is never closed")
            return None
        try:
            return json.loads(m[0]) if m[0][0] == '"' else m[0][1:-1]
        except ValueError as e:
            self.fail(f"not a JSON text: {e}", m.start())

    def word(self, what: str) -> str:
        m = self.match(_PLAIN)
        if m is None:
            self.fail(f"expected {what}, found {self.found(1)}")
        return m[0]

    def name(self) -> str | None:
        """A key or pattern; None for the hole."""
        quoted = self.string()
        if quoted is not None:
            return quoted
        word = self.word("a name")
        if problem := check_pattern(word):
            self.fail(problem, self.at - len(word))
        return None if word == "_" else word

    def names(self) -> list[str | None]:
        out = [self.name()]
        while self.take(","):
            out.append(self.name())
        return out

    def value(self) -> Any:
        """A number, a text, or a list of them in brackets."""
        quoted = self.string()
        if quoted is not None:
            return quoted
        if self.take("["):
            items: list[Any] = []
            while not self.take("]"):
                if items:
                    self.need(",", "a list item")
                items.append(self.value())
            return tuple(items)
        m = self.match(r"[^\s,()\[\]=#\"']+")
        if m is None:
            self.fail("expected a value")
        number = _NUMBER.match(m[0])
        if number is None:
            return _WORDS.get(m[0], m[0])
        return int(m[0]) if number[2] is None and number[3] is None else float(m[0])

    def arguments(self) -> list[tuple[str | None, Any, int]]:
        """(keyword or None, value, place) up to the closing parenthesis."""
        out: list[tuple[str | None, Any, int]] = []
        while not self.take(")"):
            if out:
                self.need(",", "an argument")
            self.match("")
            at, key = self.at, self.match(r"([A-Za-z_]\w*)[ \t]*=")
            out.append((key[1] if key else None, self.value(), at))
        return out


def check_pattern(name: str) -> str | None:
    """The fault in the braces of a name, or None."""
    rest = name.replace("{{", "").replace("}}", "")
    left = re.sub(r"\{[A-Za-z_]\w*\*?\}", "", rest)
    if "{" in left or "}" in left:
        return f"{name!r}: braces hold the name of a capture, as in {{layer}} or {{rest*}}; a brace itself is doubled"
    return None


def parse_line(text: str, number: int) -> tuple[tuple[str, ...], tuple[str, ...], tuple[Step, ...], bool] | str | None:
    """(sources, targets, steps, optional) of a line, the template of ``@follow``, or None for an empty line."""
    line = _Line(text, number)
    if line.ended():
        return None
    if line.take("@follow"):
        quoted = line.string()
        template = quoted if quoted is not None else line.word("a template such as opt.m.{}")
        if template.count("{}") != 1:
            line.fail("the template has one {}, where the name of the parameter goes", line.at - len(template))
        if not line.ended():
            line.fail("expected the end of the line")
        return template
    sources = line.names()
    line.need("->", "the names")
    targets: list[str | None] = []
    steps: list[Step] = []
    optional = False
    while True:
        call = line.match(r"([A-Za-z_]\w*)[ \t]*\(")
        if call is not None:
            arguments = line.arguments()
            if call[1] == "optional":
                optional = True
            else:
                steps.append(_step(line, call[1], arguments, call.start()))
        elif steps or optional:
            line.fail("expected a step, such as cast(bfloat16): names stand before the steps")
        else:
            targets.append(line.name())
        if line.ended():
            break
        line.need(",", "a name or a step")
    holes = [None in sources, None in targets]
    for hole, given in zip(holes, (sources, targets), strict=True):
        if hole and len(given) > 1:
            line.fail("'_' stands alone on its side", 0)
    if all(holes) or not targets:
        line.fail("a rule names something on at least one side", 0)
    return (
        () if holes[0] else tuple(n for n in sources if n is not None),
        () if holes[1] else tuple(n for n in targets if n is not None),
        tuple(steps),
        optional,
    )


def _step(line: _Line, name: str, arguments: list[tuple[str | None, Any, int]], start: int) -> Step:
    cls = STEPS.get(name)
    if cls is None:
        line.fail(f"unknown step {name!r}; known are {', '.join(STEPS)}", start)
    wanted = {f.name: str(f.type) for f in fields(cls)}
    given: dict[str, Any] = {}
    order = iter(wanted)
    for key, value, at in arguments:
        key = next(order, None) if key is None else key
        if key not in wanted or key in given:
            line.fail(f"{name} takes {', '.join(wanted) or 'nothing'}", at)
        kind = wanted[key]
        if not fits(value, kind):
            line.fail(f"{name}: {key} cannot be {value!r}", at)
        given[key] = value
    try:
        return cls(**given)
    except TypeError:
        lacking = [f.name for f in fields(cls) if f.name not in given]
        line.fail(f"{name} needs {', '.join(lacking)}", start)


def quote(name: str) -> str:
    """A name as it stands in a line."""
    if re.fullmatch(_PLAIN, name) and name != "_" and not name.startswith("@"):
        return name
    return json.dumps(name, ensure_ascii=False)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if re.fullmatch(r"[A-Za-z_]\w*", value) else json.dumps(value)
    return repr(value)


def format_step(step: Step) -> str:
    """The text of a step in a line; parameters with their default are left out."""
    given = []
    for f in fields(step):
        value = getattr(step, f.name)
        if value != f.default:
            given.append(f"{f.name}={_text(value)}")
    return f"{_NAMES[type(step)]}({', '.join(given)})"


def format_line(sources: tuple[str, ...], targets: tuple[str, ...], steps: tuple[Step, ...], optional: bool) -> str:
    """Inverse of `parse_line`.

    >>> format_line(*parse_line("a , b->c,concat( 1 ) # x", 1))
    'a, b -> c, concat(axis=1)'
    """
    right = [quote(n) for n in targets] or ["_"]
    right += [format_step(s) for s in steps] + (["optional()"] if optional else [])
    return f"{', '.join(map(quote, sources)) or '_'} -> {', '.join(right)}"
