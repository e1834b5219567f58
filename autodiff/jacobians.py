"""Jacobians and Hessians: one pull back for each element of the value, in blocks of rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..arrays import tree as trees
from ..arrays._array import Array
from ..arrays._dispatch import wrap
from ..arrays._op import state
from ..arrays.creation import zeros, zeros_like
from ..arrays.errors import GradientError
from ..arrays.manipulation import concat, reshape, stack
from .gradients import chosen_arguments
from .transforms import argument_positions, check_function, grad, vjp

BLOCK_SIZE = 64


def jacobian_blocks(fn: Callable[[Any], Any], x: Any, *, block_size: int = BLOCK_SIZE) -> Iterator[tuple[slice, Any]]:
    """The rows of a Jacobian, block after block: for one that is too large to be kept whole.

    Parameters
    ----------
    fn
        From an array, or a tree of them, to an array of ``m`` elements.
    x
        Where to differentiate.
    block_size
        Rows in a block (the last one may have fewer). The memory in use is that of one block.

    Yields
    ------
    slice, tree
        Which elements of the flattened value, and their derivatives: the structure of ``x``, with leaves ``(rows, *leaf)``.

    Raises
    ------
    GradientError
        When the function returns anything but an Array.

    Examples
    --------
    >>> import meshtape as mt
    >>> for rows, block in mt.jacobian_blocks(lambda x: x * x, mt.asarray([1.0, 2.0, 3.0]), block_size=2):
    ...     print(rows.start, rows.stop, block.tolist())
    0 2 [[2.0, 0.0, 0.0], [0.0, 4.0, 0.0]]
    2 3 [[0.0, 0.0, 6.0]]
    """
    if block_size < 1:
        raise ValueError(f"[jacobian_blocks] block_size must be at least 1, got {block_size}")
    value, pull = vjp(fn, x)
    if not isinstance(value, Array):
        raise GradientError(f"[jacobian_blocks] the function must return an Array, got {type(value).__name__}")
    return _blocks(value, lambda seed: pull(seed)[0], block_size)


def _blocks(value: Array, pull: Callable[[Array], Any], block_size: int) -> Iterator[tuple[slice, Any]]:
    size, zero = value.size, zeros_like(value)
    for start in range(0, size, block_size):
        rows = slice(start, min(start + block_size, size))
        places = (np.unravel_index(i, value.shape) for i in range(rows.start, rows.stop))
        found = [pull(zero.at[tuple(map(int, p))].set(1.0)) for p in places]
        yield rows, trees.tree_map(lambda *parts: _stacked(parts), *found)


def _stacked(parts: Sequence[Array]) -> Array:
    if state.recorders or any(type(p._buf) is not np.ndarray for p in parts):
        return stack(parts)
    return wrap(np.stack([p._buf for p in parts]))


def jacobian(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    block_size: int = BLOCK_SIZE,
) -> Callable[..., Any]:
    """Jacobian of a function from an array, or a tree of them, to an array, or a tree of them.

    The result has the structure of the value, with the structure of the argument in place of each array; its leaves have the
    shape ``(*output, *leaf)``. One pull back an output element; beside the result no more than ``block_size`` rows are kept.
    For one that is too large to be kept whole, see :func:`jacobian_blocks`.

    Parameters
    ----------
    fn
        Returns an array or a tree of them (with ``has_aux``: that and anything else).
    argnums
        Which positional arguments to differentiate; a tuple of trees takes the place of the argument's for a sequence.
    has_aux
        ``fn`` returns ``(value, aux)``; the result is then ``(jacobian, aux)``.
    block_size
        Rows that are kept beside the result.

    Raises
    ------
    GradientError
        When the function returns anything but Arrays.

    Examples
    --------
    >>> import meshtape as mt
    >>> mt.jacobian(lambda x: x * x)(mt.asarray([1.0, 2.0]))
    Array([[2., 0.],
           [0., 4.]], dtype=float64)
    >>> by_x, by_y = mt.jacobian(lambda x, y: x * y, argnums=(0, 1))(mt.asarray([1.0, 2.0]), mt.asarray(3.0))
    >>> by_x.tolist(), by_y.tolist()
    ([[3.0, 0.0], [0.0, 3.0]], [1.0, 2.0])
    """
    check_function("jacobian", fn)
    positions = argument_positions("jacobian", argnums)
    if block_size < 1:
        raise ValueError(f"[jacobian] block_size must be at least 1, got {block_size}")

    @functools.wraps(fn, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        chosen = chosen_arguments("jacobian", positions, len(args))

        def of_chosen(*xs: Any) -> Any:
            full = list(args)
            for i, x in zip(chosen, xs, strict=True):
                full[i] = x
            return fn(*full, **kwargs)

        value, pull, *rest = vjp(of_chosen, *(args[i] for i in chosen), has_aux=has_aux)
        outputs, out_def = trees.flatten(value)
        for y in outputs:
            if not isinstance(y, Array):
                raise GradientError(f"[jacobian] the function must return an Array, or a tree, got {type(y).__name__}")
        zero = [zeros_like(y) for y in outputs]

        def of_output(k: int) -> Any:
            def of(seed: Array) -> Any:
                found = pull(trees.unflatten(out_def, [*zero[:k], seed, *zero[k + 1 :]]))
                return found[0] if isinstance(argnums, int) else found

            like = of(zero[k])
            return _joined(outputs[k].shape, like, _blocks(outputs[k], of, block_size))

        found = trees.unflatten(out_def, [of_output(k) for k in range(len(outputs))])
        return (found, *rest) if has_aux else found

    return wrapped


def _joined(shape: tuple[int, ...], like: Any, blocks: Iterator[tuple[slice, Any]]) -> Any:
    """The blocks of rows as one tree, with leaves ``(*shape, *leaf)``; ``like`` is a row."""
    leaves, treedef = trees.flatten(like)
    m = math.prod(shape)
    if not m:
        full = [zeros((*shape, *x.shape), dtype=x.dtype, device=x.device) for x in leaves]
        return trees.unflatten(treedef, full)
    if state.recorders or any(type(x._buf) is not np.ndarray for x in leaves):
        columns = zip(*(trees.flatten(b)[0] for _, b in blocks), strict=True)
        full = [reshape(concat(list(c), axis=0), (*shape, *c[0].shape[1:])) for c in columns]
        return trees.unflatten(treedef, full)
    # Each block is written where it belongs, and dropped: the result is never there twice.
    host = [np.empty((m, *x.shape), x.dtype) for x in leaves]
    for rows, block in blocks:
        for h, b in zip(host, trees.flatten(block)[0], strict=True):
            h[rows] = b._buf
    return trees.unflatten(treedef, [wrap(h.reshape((*shape, *h.shape[1:]))) for h in host])


def hessian(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    block_size: int = BLOCK_SIZE,
) -> Callable[..., Any]:
    """Hessian of a scalar function of one array (shape ``(*input, *input)``) or of a tree.

    Of a tree it is a tree of trees: ``hessian(fn)(params)["w"]["b"]`` has the shape ``(*w, *b)``. For products with it alone, see
    :func:`hvp`; for its rows block after block, ``jacobian_blocks(grad(fn), x)``. ``argnums``, ``has_aux`` and ``block_size`` are as
    in :func:`jacobian`: of the arguments 0 and 1 it is ``h[0][1]``, with the shape ``(*first, *second)``.

    >>> import meshtape as mt
    >>> mt.hessian(lambda x: (x ** 3).sum())(mt.asarray([1.0, 2.0]))
    Array([[ 6.,  0.],
           [ 0., 12.]], dtype=float64)
    >>> h = mt.hessian(lambda p: (p["a"] * p["b"]).sum())({"a": mt.ones(2), "b": mt.ones(1)})
    >>> h["a"]["b"].tolist(), h["b"]["b"].tolist()
    ([[1.0], [1.0]], [[0.0]])
    """
    return jacobian(grad(fn, argnums, has_aux=has_aux), argnums, has_aux=has_aux, block_size=block_size)


__all__ = ["hessian", "jacobian", "jacobian_blocks"]
