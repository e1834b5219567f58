"""Optimizer state in a quarter or an eighth of the space: symmetric integers with a scale for each row.

A row is everything along the last dimension. ``scale = max|row| / 127`` (or 7), ``q = round(x / scale)``: the error is
at most half a scale. A row without a negative number, such as Adam's mean squares, is stored by its roots, between 0
and the largest in 254 (or 14) steps, and its scale is ``-sqrt(max) / 254``: ``x = ((q + 127) * scale) ** 2`` has the
same bound, and no number that is not zero becomes zero, by which Adam would divide. Scales of float64 are float64, all
others float32. Four-bit values are packed two a byte, the first in the lower half. An array becomes a small dict of
arrays and values, so any format and any tool stores it. A row that holds NaN or infinity is NaN as a whole afterwards.
Rounding again and again adds up: what was restored from such a state is not quantised once more unless that is asked
for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ... import arrays as mt
from ...arrays.core.errors import CheckpointDTypeError, CheckpointError, CheckpointKeyError
from ...arrays.core.formatting import some
from ...arrays.core.tree import flatten_with_path, map_with_path
from ..base.leaves import taken
from ..base.malformed import malformed
from ..base.names import chooser, leaf_name, matching, patterns_of
from ..format import dtypes
from ..rules.casting import count_lost_rows
from ..rules.dequantized import MARK, MARKS, scale_beside

MAX_TIMES = 1
_MEMBERS = ("q", "scale", *MARKS)
LEVELS = {8: 127, 4: 7}
_MOST = 3.4e38  # the square of a root above it may be infinite in float32


def quantize(
    tree: Any,
    *,
    bits: int = 8,
    keys: Iterable[str] = ("*",),
    times: int = 0,
    allow_again: bool = False,
    allow_overflow: bool = False,
) -> Any:
    """A tree to save, in which floating arrays are small integers with scales.

    Parameters
    ----------
    tree
        Any tree that `save` takes. 0-d arrays, integers and what no pattern matches stay as they are.
    bits
        8 or 4.
    keys
        Names or patterns of the arrays to quantise.
    times
        How often this state has been through quantisation, as `dequantize` told.
    allow_again
        Quantise a state that has been through it.
    allow_overflow
        Make a row NaN as a whole where one of its elements is not finite.

    Returns
    -------
    tree
        With ``{"meshtape.quantized": bits, "q": …, "scale": …, "dtype": …, "length": …, "times": …}`` in the place of
        each.

    Raises
    ------
    CheckpointError
        ``bits`` is neither, the state has been through it and ``allow_again`` is false, or an array is quantised
        now.
    CheckpointKeyError
        One of ``keys`` matches nothing.
    CheckpointDTypeError
        An array that ``keys`` names exactly is not floating.
    Lossy
        A row has a NaN or an infinity beside numbers, and ``allow_overflow`` is false.

    Examples
    --------
    >>> state = quantize({"m": np.array([[1.0, -2.0, 0.5]])})
    >>> np.asarray(state["m"]["q"])
    array([[  64, -127,   32]], dtype=int8)
    >>> restored, times = dequantize(state)
    >>> bool(np.abs(np.asarray(restored["m"]) - [[1.0, -2.0, 0.5]]).max() <= 1 / 127), times
    (True, 1)
    """
    if bits not in tuple(LEVELS):  # of which a list can be asked
        raise CheckpointError(f"bits must be 8 or 4, got {bits!r}")
    if type(times) is not int or times < 0:
        raise CheckpointError(f"times is how often the state has been quantised, got {times!r:.80}")
    if times >= MAX_TIMES and not allow_again:
        raise CheckpointError(
            f"this state has been quantised {times} times already, and its errors add up; save it in full, or pass "
            "allow_again=True"
        )
    given, leaves = patterns_of(keys), {leaf_name(path): leaf for path, leaf in flatten_with_path(tree)}
    refuse_quantized(leaves, wanted := chooser(given, None, leaves))
    if unused := [p for p in given if p != "*" and not matching(p, leaves)]:
        raise CheckpointKeyError(f"nothing matches {unused}; the tree holds {some(leaves, 12)}")

    def one(path: Any, leaf: Any) -> Any:
        name = leaf_name(path)
        if not wanted(name):
            return leaf
        leaf = taken(leaf, f"key {name!r}")
        kind = np.dtype(leaf.dtype).name if hasattr(leaf, "dtype") else ""
        if kind not in dtypes.FLOATS:
            if name in given:
                raise CheckpointDTypeError(
                    f"key {name!r}: only floating arrays are quantised, this is {kind or type(leaf).__name__}"
                )
            return leaf
        if not len(leaf.shape) or 0 in leaf.shape:
            return leaf
        wide = mt.astype(mt.asarray(leaf), wide_of(leaf.dtype))
        scale = row_scales(wide, LEVELS[bits])
        if not allow_overflow and bool(mt.any(mt.isnan(scale))):
            count_lost_rows(name, np.asarray(wide), np.asarray(scale))
        q, length = row_integers(wide, scale, LEVELS[bits]), int(leaf.shape[-1])
        q = mt.asarray(pack(np.asarray(q))) if bits == 4 else q
        return {MARK: bits, "q": q, "scale": scale, "dtype": kind, "length": length, "times": times + 1}

    return map_with_path(one, tree)


def refuse_quantized(leaves: Mapping[str, Any], wanted: Callable[[str], bool]) -> None:
    """Raise where one of the leaves, by name, is quantised as its mark or its dtype says, and its scales are wanted."""
    found = {n.removesuffix(MARK).removesuffix("."): f"{n.removesuffix(MARK)}scale" for n in leaves if n.endswith(MARK)}
    for name, leaf in leaves.items():
        kind = str(getattr(leaf, "dtype", "")).removeprefix("torch.")
        scale = scale_beside(name, dtypes.by_name(kind), leaves) if kind.startswith(("int", "uint", "float8")) else None
        if scale is not None:
            found.setdefault(name.removesuffix(".q"), scale)
    for name, scale in found.items():
        if wanted(scale):
            raise CheckpointError(
                f"key {name!r} is quantised already: restore it first (tree, times = dequantize(tree)), or leave it "
                "out of keys="
            )


def wide_of(dtype: Any) -> np.dtype:
    """The dtype in which rows are computed, and that of their scales."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def row_scales(wide: Any, levels: int) -> Any:
    """The scale of each row of a float32 or float64 array: its largest magnitude over ``levels``, negative where it is
    one of roots; 1 for one of zeros, and NaN for one that is not finite, which stays NaN."""
    largest = mt.max(mt.abs(wide), axis=-1, keepdims=True)
    roots = (mt.min(wide, axis=-1, keepdims=True) >= 0) & (largest < _MOST)
    least = float(np.finfo(wide.dtype).smallest_subnormal)  # so that a scale is never 0, nor rounded down to half
    most = np.nextafter(np.finfo(wide.dtype).max / levels, 0, dtype=wide.dtype)  # times ``levels`` it is finite
    scale = mt.where(roots, mt.sqrt(largest) / (-2 * levels), mt.minimum(largest / levels + least, float(most)))
    return mt.where(mt.isfinite(largest), mt.where(largest > 0, scale, mt.ones_like(largest)), mt.nan)


def row_integers(wide: Any, scale: Any, levels: int) -> Any:
    """Rows in units of their scale, as int8."""
    wide, scale = (mt.where(mt.isfinite(scale), x, mt.ones_like(x)) for x in (wide, scale))
    roots = mt.maximum(mt.round(mt.sqrt(mt.maximum(wide, 0)) / -scale), mt.astype(wide > 0, wide.dtype)) - levels
    return mt.astype(mt.clip(mt.where(scale < 0, roots, mt.round(wide / scale)), -levels, levels), mt.int8)


def pack(q: np.ndarray) -> np.ndarray:
    """Two four-bit values a byte; an odd row ends in a zero.

    >>> pack(np.array([1, -1, 7], np.int8))
    array([241,   7], dtype=uint8)
    """
    bits = q.astype(np.uint8) & 15
    if bits.shape[-1] % 2:
        bits = np.concatenate([bits, np.zeros((*bits.shape[:-1], 1), np.uint8)], axis=-1)
    return bits[..., ::2] | (bits[..., 1::2] << 4)


def _unpack(packed: np.ndarray, length: int) -> np.ndarray:
    """Inverse of `pack`.

    >>> _unpack(np.array([241, 7], np.uint8), 3)
    array([ 1, -1,  7], dtype=int8)
    """
    out = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    out[..., ::2], out[..., 1::2] = packed & 15, packed >> 4
    return ((out ^ 8).astype(np.int8) - 8)[..., :length]


def dequantize(tree: Any) -> tuple[Any, int]:
    """(the tree with floating arrays again, how often it has been through quantisation at most).

    A flat tree, as `load` gives it of safetensors or DCP, has the arrays of each record under the record's name with a
    dot (``w.q``, ``w.scale``). Without the other members, which safetensors has no place for, eight bits are restored
    in the dtype of the scales.

    Raises `CorruptCheckpoint` where a quantised array is not what `quantize` makes, and `CheckpointError` for four bits
    without the length of their rows.
    """
    most = 0

    def walk(node: Any) -> Any:
        nonlocal most
        if isinstance(node, dict):
            node = _gathered(node)
            if MARK in node:
                most = max(most, int(node.get("times", 1)))
                return _large(node)
            return {k: walk(v) for k, v in node.items()}
        if type(node) in (list, tuple):
            return type(node)(walk(v) for v in node)
        return node

    out = walk(tree)
    return out, most


def _gathered(node: dict[Any, Any]) -> dict[Any, Any]:
    """A dict with the members of records of flat names under one name each, and with their marks."""
    if node.keys() == {"q", "scale"} and _is_record(node):
        return _marked("", node)
    flat = [n[:-2] for n in node if isinstance(n, str) and n.endswith(".q")]
    held = {s: {m: node[f"{s}.{m}"] for m in _MEMBERS if f"{s}.{m}" in node} for s in flat if s not in node}
    held = {s: record for s, record in held.items() if MARK in record or _is_record(record)}
    owner = {f"{s}.{m}": s for s, record in held.items() for m in record}
    return {owner.get(n, n): _marked(owner[n], held[owner[n]]) if n in owner else v for n, v in node.items()}


def _is_record(node: Mapping[str, Any]) -> bool:
    """Whether arrays are those of a record, as their dtypes and shapes tell."""
    q, scale = (node.get(m) for m in ("q", "scale"))
    kinds = [str(getattr(x, "dtype", "")).removeprefix("torch.") for x in (q, scale)]
    fits = kinds[0] in ("int8", "uint8") and kinds[1] in ("float32", "float64") and len(q.shape) > 0  # type: ignore[union-attr]
    return fits and tuple(scale.shape) == (*q.shape[:-1], 1)  # type: ignore[union-attr]


def _marked(name: str, node: dict[str, Any]) -> dict[str, Any]:
    """A record with its mark, of eight bits where it has lost that."""
    if MARK in node:
        return node
    q, scale = node["q"], node["scale"]
    if "uint8" in str(q.dtype):
        what = f"key {name!r}" if name else "an array"
        raise CheckpointError(
            f"{what} has rows of four bits, two a byte, and nothing says how long they are, as safetensors keeps "
            "arrays alone; write the quantised state as Zarr, or in eight bits"
        )
    dtype = str(scale.dtype).removeprefix("torch.")
    return {MARK: 8, **node, "dtype": dtype, "length": int(q.shape[-1])}


def _large(node: dict[str, Any]) -> Any:
    with malformed("a quantised array is incomplete", CheckpointDTypeError):
        bits, q, scale, length = node[MARK], node["q"], node["scale"], node["length"]
        dtype = dtypes.by_name(node["dtype"])
        width = length if bits == 8 else -(-length // 2)
        if bits not in LEVELS or q.shape[-1] != width or scale.shape != (*q.shape[:-1], 1):
            raise ValueError(f"{bits} bits, {q.shape} values and {scale.shape} scales for rows of {length}")
    values = mt.asarray(_unpack(np.asarray(q), length)) if bits == 4 else q
    scale = mt.asarray(scale)
    wide = mt.astype(mt.asarray(values), scale.dtype)
    roots = (wide + LEVELS[bits]) * mt.minimum(scale, 0)
    return mt.astype(mt.where(scale < 0, roots * roots, wide * scale), dtype)
