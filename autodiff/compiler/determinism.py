"""Detection of nondeterministic functions, which give another program each time they are traced.

A program repeats for ever the random numbers and times that its function read during the trace. That is refused where
it can be seen: a function that drew from a reachable generator of Python or NumPy, or that names a clock or another
source of chance, is traced once more, and the two programs must be the same. All others are traced once.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays.core.dispatch import wrap
from ...arrays.core.errors import NondeterministicError, TracedValueError
from ...arrays.core.op import not_recording
from ...arrays.core.program import Const, Entry, Program, Site, freeze, site_text
from ..captures.captures import Captures

SOURCES = (
    "time time_ns perf_counter perf_counter_ns monotonic monotonic_ns process_time now utcnow today urandom "
    "getrandom uuid1 uuid4 token_bytes token_hex token_urlsafe randbits randbelow SystemRandom default_rng"
)
"""Names of functions that give another value at each call without a state that shows it."""


class ImpurityCheck:
    """The random generators that a function may draw from, with their states before the trace."""

    def __init__(self, reads: Captures, arguments: Iterable[Any] = ()) -> None:
        self._named = not reads.named.isdisjoint(SOURCES.split())
        kinds: tuple[type, ...] = (random.Random,)
        generators = [random._inst]  # type: ignore[attr-defined]
        numpy_random = sys.modules.get("numpy.random")  # nobody has drawn from what nobody has imported
        if numpy_random is not None:
            kinds += (numpy_random.Generator, numpy_random.RandomState)
            generators.append(numpy_random.mtrand._rand)
        found = [g for g in (*reads.chance, *arguments) if isinstance(g, kinds)]
        self._reached = [g for g in found if not isinstance(g, random.SystemRandom)]
        self._named |= len(self._reached) < len(found)
        self._generators = [*generators, *self._reached]
        self._before = [_state(g) for g in self._generators]

    def suspect(self) -> bool:
        """Whether a generator has moved since (perhaps in another thread), or the function names a source of chance."""
        return self._named or [_state(g) for g in self._generators] != self._before

    def draws(self) -> bool:
        """Whether the function names a source of chance, or one of the generators that it reaches has moved since."""
        return self._named or bool(self.drawn().generators)

    def drawn(self) -> Drawn:
        """The generators that the function reaches and that have moved since."""
        moved = {id(g) for g, before in zip(self._generators, self._before, strict=True) if _state(g) != before}
        return Drawn([g for g in self._reached if id(g) in moved])


class Drawn:
    """Generators that a function has drawn from, at the state that they have now."""

    def __init__(self, generators: Sequence[Any]) -> None:
        self.generators = generators
        self._at = [(g, g.getstate() if isinstance(g, random.Random) else _bits(g).state) for g in generators]

    def rewind(self) -> str | None:
        """Undo later draws; returns a text that names the first generator, from which a program would not draw."""
        for g, state in self._at:
            if isinstance(g, random.Random):
                g.setstate(state)
            else:
                _bits(g).state = state
        return f"the state of a {type(self._at[0][0]).__name__}" if self._at else None


def _bits(generator: Any) -> Any:
    return getattr(generator, "_bit_generator", None) or generator.bit_generator


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return _frozen(_bits(generator).state)


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in value.items())
    return value.tobytes() if isinstance(value, np.ndarray) else value


def refuse_other(name: str, first: Program, second: Program) -> None:
    """Raise :class:`NondeterministicError` where two programs of one function differ."""
    for a, b in zip(first.entries, second.entries, strict=False):
        if _key(a) != _key(b):
            raise _error(name, f"{a} and then {b}, called at {site_text(a.site)}")
        for x, y in zip(_programs_of(a), _programs_of(b), strict=True):
            refuse_other(name, x, y)
    if len(first.entries) != len(second.entries) or first.outputs != second.outputs:
        raise _error(name, f"{len(first.entries)} entries and then {len(second.entries)}")
    users = {v: e for e in reversed(first.entries) for v in e.inputs if isinstance(v, int)}
    for v, value in first.constants.items():
        if not _same_value(value, second.constants.get(v)):
            where = f", read by {users[v].op.name}, called at {site_text(users[v].site)}" if v in users else ""
            raise _error(name, f"the constant %{v} ({first.avals[v]}) with two values{where}")


def refuse_strangers(name: str, first: Mapping[int, tuple[Any, Site | None]], second: Mapping[int, Any]) -> None:
    """Raise :class:`TracedValueError` where both traces met one array that the function neither made nor captured."""
    for i, (x, site) in first.items():
        if i in second:
            raise TracedValueError(
                f"[compile] {name} reads an array of {x.dtype.name}{list(x.shape)}, at {site_text(site)}, from where "
                "later changes "
                "would not be noticed (code that is not Python, or an object of a library): pass it as an argument"
            )


def _error(name: str, what: str) -> NondeterministicError:
    return NondeterministicError(
        f"[compile] {name} was traced twice and gave {what}. A program repeats what was drawn or read while it was "
        "traced: "
        "draw with mt.random from a key that is an argument, and pass times and numbers drawn elsewhere as arguments"
    )


def _key(e: Entry) -> Any:
    params = {k: v for k, v in e.params.items() if not _is_code(v)}
    inputs = tuple(freeze(v.value) if isinstance(v, Const) else v for v in e.inputs)
    return e.op, inputs, e.outputs, freeze(params), len(_programs_of(e))


def _programs_of(e: Entry) -> list[Program]:
    """The programs of separately traced code (of ranks, say), which are new objects in each trace."""
    return [v.program for v in e.params.values() if _is_code(v)]


def _is_code(value: Any) -> bool:
    return isinstance(getattr(value, "program", None), Program)


def _same_value(a: Any, b: Any) -> bool:
    if a is b or b is None:
        return a is b
    with not_recording():
        x, y = np.asarray(wrap(a)), np.asarray(wrap(b))
    return (x.shape, x.dtype) == (y.shape, y.dtype) and x.tobytes() == y.tobytes()
