"""Factor mappings: the dimensions along which an op may be split.

For each call a rule names the op's *factors*, like the letters of an einsum: which dimension of each operand and result
each factor runs along. From this mapping follow the sharding of the results, the collectives of the operands, and the
calls on each
rank. Legend:

* a factor that all results have may be split freely (*batch*);
* a factor that a result lacks leaves that result ``Partial(op)`` when it is split, by the factor's ``reduce``;
* a factor with ``whole=True`` must not be split: operands split there are gathered (or the op is decomposed);
* a dimension can be made of a factor and an inner length: ``Dim(f, inner=3)`` is ``3 * size(f)`` long, so that it may
  be split only where the split falls on multiples of 3 (*blocked*);
* a dimension can see a factor through a *window* (a slice, a concatenation, a convolution): each rank then fetches the
range that its
  part of the factor needs (a *halo*).

Where a rank does not run the op itself on its part (as on some rows of a table), ``part`` names the other op.

``linear`` lists the sets of operands in which the op is jointly linear: when exactly those are ``Partial("sum")`` along
a mesh axis, so is the result, and nothing needs to be reduced yet. It has to hold for infinities and the signs of zeros
too. So a product with the values of another array is not linear: the parts of a sum may be zero where the sum is not,
and 0 × inf is NaN. ``made`` says that any block of the results can be made from operands that are whole along it
(random numbers, broadcasts): a part of a replicated result is then made, not cut out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ...arrays.core.blocks import Box
from ...arrays.core.op import Op, ShapeDtype
from .halos import Halo


class Dim(NamedTuple):
    """A dimension along factor ``factor``, times ``inner`` elements that stay together. With a ``window``, a rank
    fetches the range that the window gives for its block."""

    factor: int
    inner: int = 1
    window: Halo | None = None


@dataclass(frozen=True, slots=True)
class Factor:
    """One letter: its length, whether it must stay whole, and how results that lack it are reduced."""

    size: int
    whole: bool = False
    reduce: str | None = None


class RankView(NamedTuple):
    """One rank's view of a call: the boxes of its operand and result blocks within the whole arrays."""

    operands: tuple[Box | None, ...]
    results: tuple[Box, ...]


Localize = Callable[[Mapping[str, Any], RankView], Mapping[str, Any]]


class PartCall(NamedTuple):
    """The op that a rank runs in place of the call's op where a factor of ``factors`` is split, with own parameters."""

    factors: frozenset[int]
    op: Op
    localize: Localize
    makes: frozenset[int] = frozenset()
    """Factors of results that no operand has: a part of a result that is replicated there can be made, not cut out."""


class ExpertExchange(NamedTuple):
    """Factors that one mesh axis may split together: any of ``rows``, and ``expert``, of which each row needs a few.
    Operand ``chosen`` says which, by the ``numbers`` of another. Ranks send the rows to each other at run time
    (:mod:`meshtape.parallel.resharding.expert_all_to_all`)."""

    rows: frozenset[int]
    expert: int
    chosen: int
    numbers: int


@dataclass(frozen=True, slots=True)
class FactorRule:
    """The mapping of one call. ``operands[i][d]`` is the :class:`Dim` of dimension ``d``, or None where it cannot be
    split (a length-one dimension that broadcasts). Scalars have an empty tuple."""

    factors: tuple[Factor, ...]
    operands: tuple[tuple[Dim | None, ...], ...]
    results: tuple[tuple[Dim | None, ...], ...]
    linear: tuple[frozenset[int], ...] = ()
    localize: Localize | None = None
    made: bool = False
    part: PartCall | None = None
    valueless: bool = False
    """Whether the op reads only shapes of operands, which may then stay pending."""
    choice: str = ""
    """Why dimensions are kept whole for speed, although the op could split them."""
    exchange: ExpertExchange | None = None


class Letters:
    """Collects factors while a rule is made."""

    def __init__(self) -> None:
        self.factors: list[Factor] = []

    def new(self, size: int, *, whole: bool = False, reduce: str | None = None) -> Dim:
        self.factors.append(Factor(size, whole, reduce))
        return Dim(len(self.factors) - 1)

    def many(self, shape: Sequence[int], *, whole: bool = False, reduce: str | None = None) -> tuple[Dim, ...]:
        return tuple(self.new(n, whole=whole, reduce=reduce) for n in shape)

    def aligned(self, dims: Sequence[Dim], shape: Sequence[int]) -> list[Dim | None]:
        """Those of ``dims`` that an array of ``shape`` has which broadcasts with them: they align from the right."""
        own = dims[len(dims) - len(shape) :]
        return [d if n == self.factors[d.factor].size else None for d, n in zip(own, shape, strict=True)]

    def turn(self, factors: Iterable[int], *, whole: bool = False, reduce: str | None = None) -> None:
        """Change factors, but for those that are whole."""
        for f in factors:
            if not self.factors[f].whole:
                self.factors[f] = Factor(self.factors[f].size, whole, reduce)

    def rule(
        self,
        operands: Sequence[Sequence[Dim | None]],
        results: Sequence[Sequence[Dim | None]],
        linear: Sequence[Sequence[int]] = (),
        localize: Localize | None = None,
        **options: Any,
    ) -> FactorRule:
        """The rule with these factors; ``options`` are the other fields of a :class:`FactorRule`."""
        dims, made = tuple(map(tuple, operands)), tuple(map(tuple, results))
        return FactorRule(tuple(self.factors), dims, made, tuple(map(frozenset, linear)), localize, **options)


Avals = Sequence[Any]
Outs = Sequence[ShapeDtype]
Params = Mapping[str, Any]
Maker = Callable[[Letters, Op, Avals, Outs, Params], FactorRule]
"""``maker(letters, op, avals, outs, params)``: the rule of a call on these operands, with these results."""

RULES: dict[Op, Maker] = {}


def rule(*ops: Op) -> Callable[[Maker], Maker]:
    """Decorator: the function makes the rules of these ops."""

    def add(maker: Maker) -> Maker:
        for op in ops:
            if op in RULES or op.replicate_only:
                raise ValueError(f"{op.name} has a sharding rule already, or is declared replicate_only")
            RULES[op] = maker
        return maker

    return add


def bilinear(out_avals: Sequence[ShapeDtype]) -> list[tuple[int, ...]]:
    """The linear sets of a product of two arrays: integers have no infinities."""
    return [(0,), (1,)] if out_avals[0].dtype.kind in "iu" else []


def replicated_rule(avals: Sequence[Any], out_avals: Sequence[ShapeDtype]) -> FactorRule:
    """The rule with every dimension whole: each rank computes everything."""
    letters = Letters()
    operands = [letters.many(a.shape, whole=True) if isinstance(a, ShapeDtype) else () for a in avals]
    results = [letters.many(a.shape, whole=True) for a in out_avals]
    return letters.rule(operands, results)


def rule_for(op: Op, avals: Sequence[Any], out_avals: Sequence[ShapeDtype], params: Mapping[str, Any]) -> FactorRule:
    """The rule of a call; everything whole for an op that is ``replicate_only``."""
    maker = RULES.get(op)
    found = replicated_rule(avals, out_avals) if maker is None else maker(Letters(), op, avals, out_avals, params)
    # Parts of a sum of integers may wrap around where the sum does not: they stay of the dtype in which they wrap
    # alike.
    wraps = {i for i, a in enumerate(avals) if isinstance(a, ShapeDtype) and a.dtype.kind in "iu"}
    kept = tuple(g for g in found.linear if all(avals[i].dtype == out_avals[0].dtype for i in wraps.intersection(g)))
    return found if kept == found.linear else replace(found, linear=kept)
