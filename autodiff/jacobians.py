"""Jacobians and Hessians: one pull back for each element of the value, in blocks of rows.

One convention for complex numbers: a Jacobian ``J`` is the matrix of ``jvp(v) = J @ v``, of which the real part is
taken where the value is real, and of ``vjp(c) = J^H @ c``, of which the real part is taken where the argument is. So
``J`` is complex where the value or the argument is, and holds ``f'(z)`` where both are. A complex function of complex
numbers has such a matrix only if it is holomorphic; the derivative of others (``conj(z)``, ``z * abs(z)``) is no
complex number, and asking for it is an error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..arrays.core import tree as trees
from ..arrays.core.array import Array
from ..arrays.core.dispatch import Deferred, wrap
from ..arrays.core.errors import GradientError, check_function
from ..arrays.core.op import not_recording, state
from ..arrays.ops.creation import asarray, ones_like, zeros, zeros_like
from ..arrays.ops.elementwise import conj
from ..arrays.ops.manipulation import concat, reshape, stack
from .transforms import argument_positions, chosen_arguments, refuse_underivable, vjp

BLOCK_SIZE = 64


def jacobian_blocks(
    fn: Callable[[Any], Any], x: Any, *, block_size: int = BLOCK_SIZE, holomorphic: bool = False
) -> Iterator[tuple[slice, Any]]:
    """The rows of a Jacobian, block after block: for one that is too large to be kept whole.

    Parameters
    ----------
    fn
        From an array, or a tree of them, to an array of ``m`` elements.
    x
        Where to differentiate.
    block_size
        Rows in a block (the last one may have fewer). The memory in use is that of one block.
    holomorphic
        As in :func:`jacobian`.

    Yields
    ------
    slice, tree
        Which elements of the flattened value, and their derivatives: the structure of ``x``, with leaves ``(rows,
        *leaf)``.

    Raises
    ------
    GradientError
        When the function returns anything but an Array, or is not holomorphic (:func:`jacobian` says when that counts).

    Examples
    --------
    >>> for rows, block in mt.jacobian_blocks(lambda x: x * x, mt.asarray([1.0, 2.0, 3.0]), block_size=2):
    ...     print(rows.start, rows.stop, block.tolist())
    0 2 [[2.0, 0.0, 0.0], [0.0, 4.0, 0.0]]
    2 3 [[0.0, 0.0, 6.0]]
    """
    if block_size < 1:
        raise ValueError(f"[jacobian_blocks] block_size must be at least 1, got {block_size}")
    check_function("jacobian_blocks", fn)
    refuse_underivable("jacobian_blocks", [x], [0])
    value, pull = vjp(fn, x)
    if not isinstance(value, Array):
        raise GradientError(f"[jacobian_blocks] the function must return an Array, got {type(value).__name__}")
    row = _row_of("jacobian_blocks", value, lambda seed: pull(seed)[0], holomorphic)
    return _blocks(value, row, block_size)


def _row_of(who: str, value: Array, pull: Callable[[Array], Any], holomorphic: bool) -> Callable[[Array], Any]:
    """From a seed, which is 1 at one element of the value, to that row of the Jacobian, by the convention of this
    module."""
    checked = value.dtype.kind != "c"

    def row(seed: Array) -> Any:
        nonlocal checked
        leaves, treedef = trees.flatten(pull(seed))
        if not checked and any(x.dtype.kind == "c" for x in leaves):
            _check_holomorphic(who, value, pull, holomorphic)
            checked = True
        if value.dtype.kind != "c" or all(x.dtype.kind == "c" for x in leaves):
            return trees.unflatten(treedef, [conj(x) if x.dtype.kind == "c" else x for x in leaves])
        # Of a real argument a cotangent is a real part: the seed turned by a right angle gives the imaginary one.
        turned = trees.flatten(pull(seed * 1j))[0]
        both = [conj(x) if x.dtype.kind == "c" else x + y * 1j for x, y in zip(leaves, turned, strict=True)]
        return trees.unflatten(treedef, both)

    return row


def _check_holomorphic(who: str, value: Array, pull: Callable[[Array], Any], promised: bool) -> None:
    """Raise unless ``pull`` is linear over the complex numbers, which one direction taken at random tells."""
    rng = np.random.default_rng(0)
    cot = asarray((rng.normal(size=value.shape) + 1j * rng.normal(size=value.shape)).astype(value.dtype))
    with not_recording():
        plain, turned = (trees.flatten(pull(c))[0] for c in (cot, cot * 1j))
        for x, y in zip(plain, turned, strict=True):
            if x.dtype.kind != "c":
                continue
            if isinstance(x._buf, Deferred) and x._buf.traced:
                if promised:
                    return
                raise GradientError(
                    f"[{who}] a complex function of complex arguments has a Jacobian only if it is holomorphic, which "
                    "cannot be checked while it is traced: promise it with holomorphic=True"
                )
            a, b = x._concrete() * 1j, y._concrete()
            known = np.isfinite(a) & np.isfinite(b)
            size = np.abs(a[known]).max(initial=0)
            if np.abs(a[known] - b[known]).max(initial=0) > np.sqrt(np.finfo(a.dtype).eps) * size:
                raise GradientError(
                    f"[{who}] the function is not holomorphic, so that its derivative is no complex number: "
                    "differentiate with respect to the real and the imaginary part, mt.jacobian(lambda a, b: fn(a + "
                    "1j * b), argnums=(0, 1)), or take products with mt.jvp and mt.vjp"
                )


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
    holomorphic: bool = False,
) -> Callable[..., Any]:
    """Jacobian of a function from an array, or a tree of them, to an array, or a tree of them.

    The result has the structure of the value, with the structure of the argument in place of each array; its leaves
    have the shape ``(*output, *leaf)``. One pull back an output element; beside the result no more than ``block_size``
    rows are kept. For one that is too large to be kept whole, see :func:`jacobian_blocks`.

    With complex numbers the Jacobian ``J`` is the matrix of ``jvp(v) = J @ v`` (the real part of it, where the value is
    real), and of ``vjp(c) = J^H @ c`` (the real part of it, where the argument is real). Of a holomorphic function it
    is ``f'(z)``. Of a real function of complex numbers it is the conjugate of the gradient, since ``grad`` is ``vjp``
    of 1.

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
    holomorphic
        A promise that complex values are holomorphic in complex arguments. It is checked at the point given, whether
        promised or not, except where values are traced (``mt.compile``, ``mt.shard_map``): there the promise is needed.

    Raises
    ------
    GradientError
        When the function returns anything but Arrays, and where a complex value is not holomorphic in a complex
        argument.

    Examples
    --------
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
        refuse_underivable("jacobian", args, chosen)
        value, pull, *rest = vjp(_of_chosen(fn, args, kwargs, chosen), *(args[i] for i in chosen), has_aux=has_aux)
        outputs, out_def = trees.flatten(value)
        for y in outputs:
            if not isinstance(y, Array):
                raise GradientError(f"[jacobian] the function must return an Array, or a tree, got {type(y).__name__}")
        zero = [zeros_like(y) for y in outputs]

        def of_output(k: int) -> Any:
            def of(seed: Array) -> Any:
                found = pull(trees.unflatten(out_def, [*zero[:k], seed, *zero[k + 1 :]]))
                return found[0] if isinstance(argnums, int) else found

            row = _row_of("jacobian", outputs[k], of, holomorphic)
            return _joined(outputs[k].shape, row(zero[k]), _blocks(outputs[k], row, block_size))

        found = trees.unflatten(out_def, [of_output(k) for k in range(len(outputs))])
        return (found, *rest) if has_aux else found

    return wrapped


def _of_chosen(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], chosen: Sequence[int]
) -> Callable[..., Any]:
    """``fn`` as a function of the chosen arguments alone."""

    def of_chosen(*xs: Any) -> Any:
        full = list(args)
        for i, x in zip(chosen, xs, strict=True):
            full[i] = x
        return fn(*full, **kwargs)

    return of_chosen


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
    holomorphic: bool = False,
) -> Callable[..., Any]:
    """Hessian of a scalar function of one array (shape ``(*input, *input)``) or of a tree.

    Of a tree it is a tree of trees: ``hessian(fn)(params)["w"]["b"]`` has the shape ``(*w, *b)``. For products with it
    alone, see :func:`hvp`; for its rows block after block, ``jacobian_blocks(grad(fn), x)``. ``argnums``, ``has_aux``
    and ``block_size`` are as in :func:`jacobian`: of the arguments 0 and 1 it is ``h[0][1]``, with the shape ``(*first,
    *second)``.

    Of a complex value it is the second derivative, ``f''(z)`` where the argument is complex too. Of a real value it is
    the Jacobian of the gradient; in complex arguments few gradients are holomorphic (that of ``abs(z)**2`` is), and the
    others are refused.

    >>> mt.hessian(lambda x: (x ** 3).sum())(mt.asarray([1.0, 2.0]))
    Array([[ 6.,  0.],
           [ 0., 12.]], dtype=float64)
    >>> h = mt.hessian(lambda p: (p["a"] * p["b"]).sum())({"a": mt.ones(2), "b": mt.ones(1)})
    >>> h["a"]["b"].tolist(), h["b"]["b"].tolist()
    ([[1.0], [1.0]], [[0.0]])
    """
    check_function("hessian", fn)
    positions = argument_positions("hessian", argnums)

    @functools.wraps(fn, updated=())
    def slope(*args: Any, **kwargs: Any) -> Any:
        chosen = chosen_arguments("hessian", positions, len(args))
        value, pull, *rest = vjp(_of_chosen(fn, args, kwargs, chosen), *(args[i] for i in chosen), has_aux=has_aux)
        if not isinstance(value, Array) or value.size != 1:
            shown = f"shape {value.shape}" if isinstance(value, Array) else type(value).__name__
            raise GradientError(
                f"[hessian] the function must return an Array of one element, got {shown}: reduce it, y.sum()"
            )

        def of(seed: Array) -> Any:
            return pull(seed)[0] if isinstance(argnums, int) else pull(seed)

        of = _row_of("hessian", value, of, holomorphic) if value.dtype.kind == "c" else of
        found = of(ones_like(value))
        return (found, *rest) if has_aux else found

    return jacobian(slope, argnums, has_aux=has_aux, block_size=block_size, holomorphic=holomorphic)
