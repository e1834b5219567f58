"""Sums of products in Einstein's notation.

A formula is parsed and planned once for the shapes it meets (``opt_einsum`` chooses the order of the products); each
step is a transposition, a sum or a matrix product, so that gradients and shardings are theirs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from operator import index
from string import ascii_letters
from typing import Any, NamedTuple

from ..core.array import Array
from ..core.dispatch import as_array
from ..core.dtypes import result_type
from ..core.errors import ArgumentError, ShapeError
from ..core.op import composite
from ..ops.creation import arange, beside, wrap_same
from ..ops.elementwise import multiply
from ..ops.manipulation import astype, moveaxis, permute_dims, reshape, squeeze
from ..ops.matmul import matmul
from ..ops.wide_floats import in_float32
from .reductions import sum

Labels = tuple[str, ...]


@composite("einsum")
@in_float32
def einsum(formula: Any, /, *operands: Any) -> Array:
    """Products of the operands, summed over the letters that the result lacks.

    Parameters
    ----------
    formula
        One group of letters an operand, separated by commas: ``"ij,jk->ik"``. A letter stands for one length
        everywhere; twice in one group it takes the diagonal. ``...`` stands for dimensions that broadcast. Without
        ``->`` the result has the letters that occur once, in alphabetic order, after the broadcast dimensions. Or, as
        NumPy has it, each operand is followed by a list of numbers and ``...`` in place of letters, and the last one by
        that of the result: ``einsum(x, [0, 1], [1, 0])``.
    operands
        Arrays.

    Raises
    ------
    ShapeError
        That shows the formula and the shapes, where they do not fit together.

    Examples
    --------
    >>> mt.einsum("ij,j->i", mt.asarray([[1, 2], [3, 4]]), mt.asarray([1, 10]))
    Array([21, 43])
    >>> mt.einsum("...ii->...", mt.asarray([[1, 2], [3, 4]]))
    Array(5)
    """
    if not isinstance(formula, str):
        formula, operands = _of_lists((formula, *operands))
    env: list[Any] = [as_array(x) for x in operands]
    shapes = tuple([x.shape for x in env])
    try:
        steps = _recipe(formula, shapes)
    except TypeError:  # a formula that cannot be hashed
        raise ArgumentError(f"[einsum] the formula is a text, got {type(formula).__name__}") from None
    dtype = env[0].dtype if env else None
    if any(x.dtype is not dtype for x in env):
        dtype = result_type(*{x.dtype for x in env})
        env = [astype(x, dtype, copy=False) for x in env]
    for fn, places, args in steps:
        env.append(fn(*[env[i] for i in places], *args))
    x = env[-1]
    # Never an operand itself, which may be written to.
    return wrap_same(x) if any(x is given for given in operands) else x


def _of_lists(given: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """The formula, and the operands, of operands that are each followed by a list of numbers."""
    groups = [given[-1]] if len(given) % 2 else []
    try:
        groups = ["".join("..." if n is ... else ascii_letters[index(n)] for n in g) for g in (*given[1::2], *groups)]
    except (TypeError, IndexError):
        raise ShapeError(
            "[einsum] write a formula, 'ij,jk->ik', or behind each operand a list of numbers from 0 to 51: x, [0, 1], "
            "y, [1, 2]"
        ) from None
    operands = given[: len(given) - len(given) % 2 : 2]
    left, result = groups[: len(operands)], groups[len(operands) :]
    return "->".join((",".join(left), *result)), operands


Step = tuple[Callable[..., Any], tuple[int, ...], tuple[Any, ...]]
"""A function, the values that it takes (by place: operands first, then the results of the steps), and its other
arguments."""


@functools.lru_cache(maxsize=1024)
def _recipe(formula: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[Step, ...]:
    """The steps for operands of these shapes, without those that would change nothing."""
    if not isinstance(formula, str):
        raise TypeError
    inputs, output, order = _plan(formula, shapes)
    made = _EinsumPlan(len(shapes))
    parts = [made.simplified(_Operand(i, labels, s)) for i, (labels, s) in enumerate(zip(inputs, shapes, strict=True))]
    for chosen in order:
        left, *rest = (parts[i] for i in chosen)
        parts = [p for i, p in enumerate(parts) if i not in chosen]
        needed = set(output).union(*(p.labels for p in parts))
        parts.append(made.product(left, rest[0], needed) if rest else left)
    (part,) = parts
    made.handed_on(made.arranged(made.summed(part, set(output)), output))
    return tuple(made.steps)


class _Operand(NamedTuple):
    """A value on the way: its place, and the label and the length of each dimension."""

    place: int
    labels: Labels
    shape: tuple[int, ...]


class _EinsumPlan:
    """The plan of an einsum, step by step."""

    def __init__(self, operands: int) -> None:
        self.steps: list[Step] = []
        self._count = operands

    def _add(self, fn: Callable[..., Any], places: tuple[int, ...], *args: Any) -> int:
        self.steps.append((fn, places, args))
        self._count += 1
        return self._count - 1

    def handed_on(self, x: _Operand) -> None:
        """The result is the value of the last step."""
        if x.place != self._count - 1 or not self.steps:
            self._add(_same, (x.place,))

    def simplified(self, x: _Operand) -> _Operand:
        """Without dimensions that broadcast, and with the diagonals of repeated letters taken."""
        place, labels, shape = x
        ones = tuple(i for i, c in enumerate(labels) if not c)
        if ones:
            place = self._add(squeeze, (place,), ones)
            shape = tuple(n for i, n in enumerate(shape) if i not in ones)
            labels = tuple(c for c in labels if c)
        for c in dict.fromkeys(labels):
            while labels.count(c) > 1:
                first = labels.index(c)
                second = labels.index(c, first + 1)
                place = self._add(_diagonal, (place,), first, second)
                kept = [j for j in range(len(labels)) if j not in (first, second)]
                shape = (shape[first], *(shape[j] for j in kept))
                labels = (c, *(labels[j] for j in kept))
        return _Operand(place, labels, shape)

    def summed(self, x: _Operand, needed: set[str]) -> _Operand:
        """The operand summed over letters that are not needed."""
        gone = tuple(i for i, c in enumerate(x.labels) if c not in needed)
        if not gone:
            return x
        kept = [i for i in range(len(x.labels)) if i not in gone]
        place = self._add(_sum, (x.place,), gone)
        return _Operand(place, tuple(x.labels[i] for i in kept), tuple(x.shape[i] for i in kept))

    def arranged(self, x: _Operand, wanted: Sequence[str]) -> _Operand:
        """With its dimensions in this order."""
        if x.labels == tuple(wanted):
            return x
        axes = tuple(x.labels.index(c) for c in wanted)
        return _Operand(self._add(permute_dims, (x.place,), axes), tuple(wanted), tuple(x.shape[i] for i in axes))

    def shaped(self, place: int, now: Sequence[int], then: Sequence[int]) -> int:
        return place if tuple(now) == tuple(then) else self._add(reshape, (place,), tuple(then))

    def product(self, x: _Operand, y: _Operand, needed: set[str]) -> _Operand:
        """The product of both, summed over the letters that are not ``needed``."""
        x, y = self.summed(x, needed | set(y.labels)), self.summed(y, needed | set(x.labels))
        a, b = x.labels, y.labels
        batch = [c for c in a if c in b and c in needed]
        summed = [c for c in a if c in b and c not in needed]
        rows, cols = [c for c in a if c not in b], [c for c in b if c not in a]
        size = dict(zip((*a, *b), (*x.shape, *y.shape), strict=True))

        def lengths(letters: Sequence[str]) -> list[int]:
            return [size[c] for c in letters]

        labels = (*batch, *rows, *cols)
        shape = tuple(lengths(labels))
        if not summed:
            x, y = self.arranged(x, (*batch, *rows)), self.arranged(y, (*batch, *cols))
            left = self.shaped(x.place, x.shape, (*x.shape, *[1] * len(cols)))
            right = self.shaped(y.place, y.shape, (*lengths(batch), *[1] * len(rows), *lengths(cols)))
            return _Operand(self._add(multiply, (left, right)), labels, shape)
        n, k, m = (math.prod(lengths(g)) for g in (rows, summed, cols))
        x, y = self.arranged(x, (*batch, *rows, *summed)), self.arranged(y, (*batch, *summed, *cols))
        left = self.shaped(x.place, x.shape, (*lengths(batch), n, k))
        right = self.shaped(y.place, y.shape, (*lengths(batch), k, m))
        place = self._add(matmul, (left, right))
        return _Operand(self.shaped(place, (*lengths(batch), n, m), shape), labels, shape)


def _same(x: Array) -> Array:
    return x


def _diagonal(x: Array, first: int, second: int) -> Array:
    i = arange(x.shape[first], device=beside(x))
    return moveaxis(x, (first, second), (0, 1))[i, i]


def _sum(x: Array, axes: tuple[int, ...]) -> Array:
    """The dtype stays: a product of small integers is theirs too."""
    return sum(x, axis=axes, dtype=x.dtype if x.dtype.kind in "biu" else None)


def _plan(
    formula: str, shapes: tuple[tuple[int, ...], ...]
) -> tuple[tuple[Labels, ...], Labels, tuple[tuple[int, ...], ...]]:
    """Labels of the operands and of the result, and which operands each step joins. The label of a broadcast dimension
    is ``...3``, counted from the right; a dimension of length one that broadcasts has none (``""``)."""
    where = f"[einsum] {formula!r} of shapes {', '.join(map(str, shapes))}"
    text = formula.replace(" ", "")
    left, arrow, right = text.partition("->")
    groups = left.split(",")
    if len(groups) != len(shapes):
        raise ShapeError(f"{where}: the formula has {len(groups)} operands, {len(shapes)} are given")
    wide = 0
    split: list[tuple[str, str, int]] = []
    for group, shape in zip(groups, shapes, strict=True):
        head, dots, tail = group.partition("...")
        if not (head + tail).isalpha() and head + tail:
            raise ShapeError(f"{where}: {group!r} is not made of letters and one '...'")
        extra = len(shape) - len(head) - len(tail)
        if extra < 0 or (extra and not dots):
            raise ShapeError(f"{where}: {group!r} does not name the {len(shape)} dimensions of {shape}")
        wide = max(wide, extra)
        split.append((head, tail, extra if dots else -1))
    sizes: dict[str, int] = {}
    named: list[Labels] = []
    for (head, tail, extra), shape in zip(split, shapes, strict=True):
        labels = (*head, *(f"...{i}" for i in range(max(extra, 0), 0, -1)), *tail)
        for label, n in zip(labels, shape, strict=True):
            known = sizes.setdefault(label, n)
            if label.startswith("...") and 1 in (known, n):
                sizes[label] = n if known == 1 else known
            elif known != n:
                raise ShapeError(f"{where}: {label!r} has lengths {known} and {n}")
        named.append(labels)
    dotted = tuple(f"...{i}" for i in range(wide, 0, -1))
    if arrow:
        head, dots, tail = right.partition("...")
        output = (*head, *(dotted if dots else ()), *tail)
        unknown = [c for c in (*head, *tail) if c not in sizes]
        if unknown or len(set(output)) != len(output):
            raise ShapeError(f"{where}: the result {right!r} names {unknown[0] if unknown else 'a letter twice'}")
        if dotted and not dots:
            raise ShapeError(f"{where}: the result needs '...', since the operands have it")
    else:
        letters = [c for labels in named for c in labels if not c.startswith("...")]
        output = (*dotted, *sorted(c for c in set(letters) if letters.count(c) == 1))
    inputs = tuple(
        tuple("" if n == 1 and sizes[label] != 1 else label for label, n in zip(labels, shape, strict=True))
        for labels, shape in zip(named, shapes, strict=True)
    )
    return inputs, output, _order(inputs, output, sizes)


def _order(inputs: Sequence[Labels], output: Labels, sizes: dict[str, int]) -> tuple[tuple[int, ...], ...]:
    if len(inputs) < 3:
        return (tuple(range(len(inputs))),)
    import opt_einsum

    symbol = {label: opt_einsum.get_symbol(i) for i, label in enumerate(sizes)}
    groups = ["".join(symbol[c] for c in dict.fromkeys(labels) if c) for labels in inputs]
    formula = f"{','.join(groups)}->{''.join(symbol[c] for c in output)}"
    lengths = {symbol[c]: n for c, n in sizes.items()}
    shapes = [tuple(lengths[c] for c in g) for g in groups]
    path, _ = opt_einsum.contract_path(formula, *shapes, shapes=True)
    # opt_einsum may join more than two at once where nothing is summed; we go on pair by pair.
    out: list[tuple[int, ...]] = []
    count = len(inputs)
    for step in path:
        rest = sorted(step)
        while len(rest) > 2:
            out.append((rest[0], rest[1]))
            rest = [*(i - 2 for i in rest[2:]), count - 2]
            count -= 1
        out.append(tuple(rest))
        count -= len(rest) - 1
    return tuple(out)
