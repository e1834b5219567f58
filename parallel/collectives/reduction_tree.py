"""The reduction tree: one binary tree over the contributions, which fixes the order of a sum over ranks.

With ``p`` the largest power of two up to ``n``, the first ``2 (n - p)`` of ``n`` contributions are joined in pairs, and
the ``p`` values that there are then by a perfect tree: neighbours, then neighbours of those. The left operand is always
that of the lower mesh coordinates. Every algorithm, transport and placement of ranks on processes evaluates this tree,
so that a result has the same bits everywhere; a process evaluates as much of it as its own ranks make up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class TreeSpan(NamedTuple):
    """A node of the tree: the contributions from ``start`` up to ``stop``."""

    start: int
    stop: int


@functools.lru_cache(maxsize=1024)
def merges(n: int) -> tuple[int, ...]:
    """The number of merges after each contribution, in order, when a stack evaluates the tree.

    >>> merges(6)  # ((0 + 1) + (2 + 3)) + (4 + 5)
    (0, 1, 0, 2, 0, 2)
    >>> merges(3)
    (0, 1, 1)
    """
    pairs = n - _power(n)
    out = []
    for t in range(n):
        group = t // 2 if t < 2 * pairs else t - pairs
        ends_pair = t < 2 * pairs and t % 2
        out.append(0 if t < 2 * pairs and not ends_pair else int(bool(ends_pair)) + _trailing_ones(group))
    return tuple(out)


def joined(terms: Sequence[Any], reducer: Callable[[Any, Any], Any]) -> Any:
    """All contributions joined in the order of the tree.

    >>> joined("abcde", lambda a, b: f"({a}{b})")
    '(((ab)c)(de))'
    """
    stack: list[Any] = []
    for term, count in zip(terms, merges(len(terms)), strict=True):
        stack.append(term)
        for _ in range(count):
            right = stack.pop()
            stack[-1] = reducer(stack[-1], right)
    (out,) = stack
    return out


class TreeNode(NamedTuple):
    """An inner node and its two children."""

    whole: TreeSpan
    left: TreeSpan
    right: TreeSpan


def levels(n: int, terms: Sequence[int]) -> list[list[TreeNode]]:
    """The inner nodes above some of ``n`` contributions, level by level from below, each level in order.

    >>> [[tuple(node.whole) for node in level] for level in levels(5, [4])]
    [[], [(3, 5)], [(0, 5)]]
    """
    power = _power(n)
    pairs = n - power

    def start(group: int) -> int:
        return group + min(group, pairs)

    groups = sorted({t // 2 if t < 2 * pairs else t - pairs for t in terms})
    found = []
    if pairs:
        found.append([_node(2 * g, 2 * g + 1, 2 * g + 2) for g in groups if g < pairs])
    width = 2
    while width <= power:
        firsts = sorted({g // width * width for g in groups})
        found.append([_node(start(g), start(g + width // 2), start(g + width)) for g in firsts])
        width *= 2
    return found


def _node(start: int, middle: int, stop: int) -> TreeNode:
    return TreeNode(TreeSpan(start, stop), TreeSpan(start, middle), TreeSpan(middle, stop))


def _power(n: int) -> int:
    return 1 << (n.bit_length() - 1) if n else 0


def _trailing_ones(n: int) -> int:
    return (~n & (n + 1)).bit_length() - 1
