"""Index templates: the static part of a key, with a slot for each index array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .errors import ArrayIndexError


class Slot(NamedTuple):
    """Place of the ``n``-th index array in a template."""

    n: int


class Span(NamedTuple):
    """A slice in a template (``slice`` itself cannot be hashed before Python 3.12)."""

    start: int | None
    stop: int | None
    step: int | None

    def places(self, n: int) -> range:
        """The positions that it selects in a dimension of length ``n``, for reads, writes and their parts alike."""
        return range(n)[slice(*self)]


class Truth(NamedTuple):
    """A single boolean in a template: an index array of length one (or zero) that consumes no axis."""

    value: bool


class Gap(NamedTuple):
    """An ellipsis that stands for no dimension, yet separates the index arrays on its two sides."""


Template = tuple[int | Span | Slot | Truth | Gap | None, ...]
"""A parsed index without ellipsis: every dimension of the array is named; ``None`` is a new axis."""


def numpy_key(template: Template, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The template with its arrays put in, as NumPy and CuPy take it."""
    key: list[Any] = []
    for p in template:
        if isinstance(p, Span):
            key.append(slice(*p))
        elif isinstance(p, Slot):
            a = arrays[p.n]
            if isinstance(a, np.ndarray) and a.dtype == np.uint64 and a.size and (most := int(a.max())) >= 2**63:
                raise ArrayIndexError(f"index {most} is out of bounds: NumPy would wrap it around")
            # CuPy computes places in the dtype of the index, which a short one cannot hold.
            key.append(a if isinstance(a, np.ndarray) or a.dtype.kind == "b" else a.astype(np.int64, copy=False))
        else:
            key.append(p.value if isinstance(p, Truth) else Ellipsis if isinstance(p, Gap) else p)
    return tuple(key)


def slots(template: Template) -> int:
    """The number of index arrays of a template."""
    return sum(isinstance(p, Slot) for p in template)


def key_text(template: Template, arrays: Sequence[str]) -> str:
    """The text of an index between the brackets, as Python writes it; ``arrays`` names the index arrays.

    >>> key_text((Span(2, 5, None), Span(None, None, -2), None, 3, Slot(0)), ["ids"])
    '2:5, ::-2, None, 3, ids'
    """
    parts = []
    for p in template:
        if isinstance(p, Span):
            start, stop, step = ("" if n is None else str(n) for n in p)
            parts.append(f"{start}:{stop}" + (f":{step}" if step else ""))
        elif isinstance(p, Slot):
            parts.append(arrays[p.n])
        else:
            parts.append("..." if isinstance(p, Gap) else str(p.value) if isinstance(p, Truth) else str(p))
    return ", ".join(parts) or "()"


def is_basic(template: Template) -> bool:
    """Whether no index array is in it: the result is a view, and no element is read twice."""
    return not any(isinstance(p, Slot | Truth) for p in template)


def result_shape(
    template: Template, shape: tuple[int, ...], index_shapes: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:
    """Shape of ``x[key]`` by NumPy's rules: index arrays broadcast together, ints beside them count as arrays, and
    their dimensions come first unless all of them stand side by side."""
    index_shapes = [*index_shapes, *((int(p.value),) for p in template if isinstance(p, Truth))]
    advanced = not is_basic(template)
    if advanced:
        joined = [i for i, p in enumerate(template) if isinstance(p, Slot | Truth | int)]
        try:
            common = np.broadcast_shapes(*index_shapes)
        except ValueError:
            raise ArrayIndexError(
                f"shape mismatch: indexing arrays could not be broadcast together with shapes "
                f"{' '.join(map(str, index_shapes))}"
            ) from None
        together = joined == list(range(joined[0], joined[-1] + 1))
    out: list[int] = []
    front: int | None = None
    axis = 0
    for p in template:
        if p is None:
            out.append(1)
            continue
        if isinstance(p, Gap):
            continue
        if isinstance(p, Span):
            out.append(len(p.places(shape[axis])))
        elif advanced and front is None:
            front = len(out)
        axis += not isinstance(p, Truth)
    if advanced:
        at = front if together else 0
        out[at:at] = common
    return tuple(out)


def fitted(v: Any, out: Any, template: Template, arrays: Sequence[Any]) -> Any:
    """The value without leading dimensions of length one beyond those of the target; not all writes drop them."""
    if not getattr(v, "ndim", 0) or v.shape[0] != 1:
        return v
    lead = v.ndim - len(result_shape(template, out.shape, [a.shape for a in arrays]))
    return v.reshape(v.shape[lead:]) if lead > 0 else v
