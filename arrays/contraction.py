"""Sums of products in Einstein's notation.

A formula is parsed and planned once for the shapes it meets (``opt_einsum`` chooses the order of the products); each step is a
transposition, a sum or a matrix product, so that gradients and shardings are theirs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._op import composite
from .creation import arange, asarray, beside, wrap_same
from .dtypes import result_type
from .errors import ShapeError
from .manipulation import astype, moveaxis, permute_dims, reshape, squeeze
from .products import matmul
from .reductions import sum

if TYPE_CHECKING:
    from ._array import Array

Labels = tuple[str, ...]


@composite("einsum")
def einsum(formula: str, /, *operands: Any) -> Array:
    """Products of the operands, summed over the letters that the result lacks.

    Parameters
    ----------
    formula
        One group of letters an operand, separated by commas: ``"ij,jk->ik"``. A letter stands for one length everywhere; twice
        in one group it takes the diagonal. ``...`` stands for dimensions that broadcast. Without ``->`` the result has the
        letters that occur once, in alphabetic order, after the broadcast dimensions.
    operands
        Arrays.

    Raises
    ------
    ShapeError
        That shows the formula and the shapes, where they do not fit together.

    Examples
    --------
    >>> import meshtape as mt
    >>> mt.einsum("ij,j->i", mt.asarray([[1, 2], [3, 4]]), mt.asarray([1, 10]))
    Array([21, 43])
    >>> mt.einsum("...ii->...", mt.asarray([[1, 2], [3, 4]]))
    Array(5)
    """
    xs = [asarray(x) for x in operands]
    inputs, output, steps = _plan(formula, tuple(x.shape for x in xs))
    dtypes = {x.dtype for x in xs}
    if len(dtypes) > 1:
        dtype = result_type(*dtypes)
        xs = [astype(x, dtype, copy=False) for x in xs]
    parts = [_simplify(x, labels) for x, labels in zip(xs, inputs, strict=True)]
    for chosen in steps:
        left, *rest = (parts[i] for i in chosen)
        parts = [p for i, p in enumerate(parts) if i not in chosen]
        needed = set(output).union(*(labels for _, labels in parts))
        parts.append(_product(left, rest[0], needed) if rest else left)
    ((x, labels),) = parts
    x = _arrange(*_sum_out(x, labels, set(output)), output)
    return (
        wrap_same(x) if any(x is given for given in operands) else x
    )  # never an operand itself, which may be written to


@functools.lru_cache(maxsize=1024)
def _plan(
    formula: str, shapes: tuple[tuple[int, ...], ...]
) -> tuple[tuple[Labels, ...], Labels, tuple[tuple[int, ...], ...]]:
    """Labels of the operands and of the result, and which operands each step joins. The label of a broadcast dimension is
    ``...3``, counted from the right; a dimension of length one that broadcasts has none (``""``)."""
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


def _simplify(x: Array, labels: Labels) -> tuple[Array, Labels]:
    """Without dimensions that broadcast, and with the diagonals of repeated letters taken."""
    ones = tuple(i for i, c in enumerate(labels) if not c)
    if ones:
        x, labels = squeeze(x, ones), tuple(c for c in labels if c)
    for c in dict.fromkeys(labels):
        while labels.count(c) > 1:
            first = labels.index(c)
            second = labels.index(c, first + 1)
            i = arange(x.shape[first], device=beside(x))
            x = moveaxis(x, (first, second), (0, 1))[i, i]
            labels = (c, *(d for j, d in enumerate(labels) if j not in (first, second)))
    return x, labels


def _sum_out(x: Array, labels: Labels, needed: set[str]) -> tuple[Array, Labels]:
    """Summed over what nobody needs. The dtype stays: a product of small integers is theirs too."""
    gone = tuple(i for i, c in enumerate(labels) if c not in needed)
    if not gone:
        return x, labels
    return sum(x, axis=gone, dtype=x.dtype if x.dtype.kind in "biu" else None), tuple(c for c in labels if c in needed)


def _arrange(x: Array, labels: Labels, wanted: Sequence[str]) -> Array:
    if labels == tuple(wanted):
        return x
    return permute_dims(x, tuple(labels.index(c) for c in wanted))


def _product(left: tuple[Array, Labels], right: tuple[Array, Labels], needed: set[str]) -> tuple[Array, Labels]:
    """Both multiplied and summed over the letters that nobody else needs."""
    (x, a), (y, b) = left, right
    x, a = _sum_out(x, a, needed | set(b))
    y, b = _sum_out(y, b, needed | set(a))
    batch = [c for c in a if c in b and c in needed]
    summed = [c for c in a if c in b and c not in needed]
    rows, cols = [c for c in a if c not in b], [c for c in b if c not in a]
    size = dict(zip((*a, *b), (*x.shape, *y.shape), strict=True))

    def lengths(letters: Sequence[str]) -> list[int]:
        return [size[c] for c in letters]

    if not summed:
        x = reshape(_arrange(x, a, (*batch, *rows)), (*lengths(batch), *lengths(rows), *[1] * len(cols)))
        y = reshape(_arrange(y, b, (*batch, *cols)), (*lengths(batch), *[1] * len(rows), *lengths(cols)))
        return x * y, (*batch, *rows, *cols)
    n, k, m = (math.prod(lengths(g)) for g in (rows, summed, cols))
    x = reshape(_arrange(x, a, (*batch, *rows, *summed)), (*lengths(batch), n, k))
    y = reshape(_arrange(y, b, (*batch, *summed, *cols)), (*lengths(batch), k, m))
    return reshape(matmul(x, y), (*lengths(batch), *lengths(rows), *lengths(cols))), (*batch, *rows, *cols)
