"""Expressions: small frozen nodes that say how a checkpoint is computed from others. They nest in any way.

A node has its operands in ``of``, and parameters. `Node.apply` makes a checkpoint of those of its operands: it checks
names, shapes and dtypes first, and reads nothing. A new kind of node is a class with a row in `NODES`.

Arithmetic is for floating and complex arrays. All others (counts of steps, masks, quantised weights) must be equal in
all operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ...arrays.core.errors import (
    CheckpointDTypeError,
    CheckpointError,
    CheckpointKeyError,
    CheckpointShapeError,
    CorruptCheckpoint,
    IncompleteCheckpoint,
)
from ...arrays.core.formatting import count
from ..base.names import chooser, leaf_name, matching
from ..checkpoint.checkpoint import Checkpoint, StoredArray, fill
from ..format import dtypes
from ..format.documents import Documents, with_dtype
from ..format.manifest import Leaf, scalar_leaves
from ..loading.match_target import select
from ..loading.report import listed, told
from ..rules.dequantized import converted, floating, not_followed, scaled
from ..rules.lazy_tensors import Sliced, renamed
from ..rules.rules import Rules
from ..rules.text import quote
from ..saving.quantize import LEVELS, MARK, refuse_quantized
from ..stores import store
from ..transform import layer_entries
from ..transform.attributes import is_coordinate, refuse_lost_fills, refuse_packed
from ..transform.model_config import config_of, followed, stands_for
from . import fitting
from .computed import Equal, RowIntegers, RowScales, WeightedSum, cancels, working_dtype

LINEAGE = "meshtape.virtual"  # in the metadata of a virtual checkpoint, and of what is written from one
MOST_READS = 4096  # of stored elements for one
DEEPEST = 32  # nodes within nodes, also through documents, and documents within documents
_LONGEST = 400  # characters of a text
_LARGEST = float(np.finfo(np.float32).max)


# ----- forms of parameters, of callers and of documents ---------------------------------------------------------------


def number(x: Any) -> float:
    """A number that float32 holds."""
    if isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool) and abs(x) <= _LARGEST:
        return float(x)
    raise CheckpointError(f"{x!r:.40} is no number that float32 holds")


def _is(kind: type, otherwise: str) -> Callable[[Any], Any]:
    def form(x: Any) -> Any:
        if not isinstance(x, kind):
            raise CheckpointError(f"{x!r:.40} {otherwise}")
        return x

    return form


flag, text = _is(bool, "is neither true nor false"), _is(str, "is no text")


def index(x: Any) -> int:
    if isinstance(x, bool) or not isinstance(x, (int, np.integer)) or not 0 <= x < 1 << 62:
        raise CheckpointError(f"{x!r:.40} is no whole number from 0 on")
    return int(x)


INTEGERS = ("equal", "first", "last")


def choice(x: Any) -> str:
    """Whose integers are taken where a sum has none: they must be equal, or are those of the first or last operand."""
    if not isinstance(x, str) or x not in INTEGERS:
        raise CheckpointError(f"{x!r:.40} is none of {', '.join(map(repr, INTEGERS))}")
    return str(x)


def _sequence(x: Any) -> Sequence[Any]:
    if isinstance(x, (list, tuple)) or (isinstance(x, np.ndarray) and x.ndim == 1):
        return x
    raise CheckpointError(f"{x!r:.40} is no list")


def list_of(form: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    """The form of a list of values of a form."""
    return lambda x: tuple(map(form, _sequence(x)))


numbers, texts = list_of(number), list_of(text)


def rows_of(*forms: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    """The form of a list of rows, each with one value of each form."""

    def row(x: Any) -> tuple[Any, ...]:
        if len(values := _sequence(x)) != len(forms):
            raise CheckpointError(f"each row has {len(forms)} values, got {x!r:.80}")
        return tuple(form(v) for form, v in zip(forms, values, strict=True))

    return list_of(row)


# ----- nodes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parent:
    """A stored checkpoint, or the document of a virtual one: its place, and the identity of what lay there."""

    path: str
    identity: str

    def __str__(self) -> str:
        head, name = store.split(self.path)
        above = store.split(head)[1]
        return f"{above}/{name}" if above else name


@dataclass(frozen=True)
class Node:
    """Base of the nodes. ``params`` has the form of each parameter, which is also its form in a document."""

    of: tuple[Any, ...]

    kind: ClassVar[str]
    operands: ClassVar[tuple[int, int]] = (1, 1)  # fewest and most
    params: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}

    def __post_init__(self) -> None:
        object.__setattr__(self, "of", tuple(self.of))
        least, most = self.operands
        if not least <= len(self.of) <= most:
            wanted = f"{least} to " * (least != most) + count(most, "checkpoint")
            raise CheckpointError(f"{self.kind} is made of {wanted}, got {len(self.of)}")
        for name, form in self.params.items():
            try:
                object.__setattr__(self, name, form(getattr(self, name)))
            except (CheckpointError, OverflowError) as e:
                raise CheckpointError(f"{name} of {self.kind}: {e}") from None
        self.check()

    def check(self) -> None:
        """Raise `CheckpointError` where parameters do not fit each other."""

    def apply(self, made: Sequence[Checkpoint]) -> Checkpoint:
        raise NotImplementedError

    def _told(self, kind: str, *params: str) -> str:
        shown = [str(x) for x in self.of[:4]] + ([f"… {len(self.of)} in all"] if len(self.of) > 4 else [])
        text = f"{kind}({', '.join([*shown, *params])}"
        return f"{text[:_LONGEST]}…)" if len(text) > _LONGEST else f"{text})"

    def __str__(self) -> str:
        return self._told(self.kind, *self._shown(*self.params))

    def _shown(self, *names: str) -> list[str]:
        held = {name: getattr(self, name) for name in names}
        texts = {name: repr(value) for name, value in held.items() if value not in (None, (), INTEGERS[0])}
        return [f"{name}={text:.60}{'…' * (len(text) > 60)}" for name, text in texts.items()]


def parents_of(node: Any) -> Iterator[Parent]:
    """The parents of an expression, from the left; one that it names twice comes twice."""
    if isinstance(node, Parent):
        yield node
    else:
        for x in node.of:
            yield from parents_of(x)


def computed_from(node: Node, base: Checkpoint, arrays: Mapping[str, Any], **changed: Any) -> Checkpoint:
    """The checkpoint of some tensors, with structure, step, metadata and documents of a base."""
    label = str(node)
    held = {}
    for name, tensor in arrays.items():
        held[name] = StoredArray(base.arrays[name].path, tensor)
        held[name].rule = label
    metadata = {k: v for k, v in base.metadata.items() if not k.startswith("meshtape.")} | {LINEAGE: label}
    own = {"path": label, "kind": "virtual", "arrays": held, "metadata": metadata, "meshes": [], "manifest": None}
    return replace(base, **own, computed=None, base=None, whole=True, **changed)  # type: ignore[arg-type]


def check_alike(made: Sequence[Checkpoint], mixed: bool = False) -> None:
    """Raise, listing all, where names, shapes or dtypes differ from those of the first. ``mixed``: floating dtypes
    may."""
    first, lines, kinds = made[0], [], []
    for other in made[1:]:
        missing, unexpected = [n for n in first if n not in other], [n for n in other if n not in first]
        unread = {**first.skipped, **other.skipped}
        lines += [f"  {n} cannot be read: {unread[n]}" for n in missing + unexpected if n in unread]
        lines += listed(f"missing in {other.path}", missing) + listed(f"only in {other.path}", unexpected)
        for n in missing + unexpected:
            lacks = other if n in missing else first
            if table := stands_for(n, lacks):
                lines.append(f"  {lacks.path} ties {n} to {table}: mt.storage.blend takes tied models with others")
        kinds += [CheckpointKeyError] * bool(missing or unexpected)
        common = [n for n in first if n in other]
        shapes = [n for n in common if first[n].shape != other[n].shape]
        types = [n for n in common if not _dtypes_fit(first[n].dtype, other[n].dtype, mixed)]
        for what, found, kind in (("shape", shapes, CheckpointShapeError), ("dtype", types, CheckpointDTypeError)):
            kinds += [kind] * bool(found)
            rows = [f"{n}: {getattr(first[n], what)} and {getattr(other[n], what)}" for n in found]
            lines += told(f"{what}s differ in {other.path} ({len(found)})", rows)
    if lines:
        worst = next(k for k in (CheckpointKeyError, CheckpointShapeError, CheckpointDTypeError) if k in kinds)
        raise worst("\n".join([f"the parents do not fit {first.path}; nothing was read", *lines]))


def _of_one_model(base: Checkpoint, made: Sequence[Checkpoint]) -> Mapping[str, Any]:
    """The documents of the base, with notes of what others say of the computation. Raises `CheckpointShapeError` where
    these describe no one model."""
    try:
        configs = [layer_entries.inner(config_of(c.documents)) for c in made]
        own = layer_entries.inner(config_of(base.documents))
    except (CorruptCheckpoint, IncompleteCheckpoint):  # told where it is read: arrays can be without it
        return base.documents
    faults, notes = [], dict[str, None]()
    for ckpt, config in zip(made, configs, strict=True):
        hard, told = fitting.compared(own, config, base.path, ckpt.path)
        notes |= dict.fromkeys(told)
        faults += [f"  {ckpt.path}: {hard}"] * bool(hard)
    if faults:
        raise CheckpointShapeError(
            "\n".join([f"the parents make no model with the config.json of {base.path}", *faults])
        )
    held = base.documents
    return held.edited("config.json", bytes, list(notes)) if notes and isinstance(held, Documents) else held


def agreed(name: str, parts: Sequence[Any], integers: str, places: Sequence[str], call: str) -> Any:
    """An array of which no sums are taken. ``call`` is the function that the user may give ``integers=``."""
    if integers != "equal" or len(parts) == 1:
        return renamed(name, parts[-1 if integers == "last" else 0])
    ways = (
        f"Take that of one: {call}(…, integers='first') or 'last', on the command line --integers first; or leave it "
        f"out by the key rule: {quote(name)} -> _"
    )
    return Equal(name, tuple(parts), tuple(places), ways)


def _dtypes_fit(a: np.dtype, b: np.dtype, mixed: bool) -> bool:
    return a == b or (mixed and a.name in dtypes.FLOATS and b.name in dtypes.FLOATS)


@dataclass(frozen=True)
class Arithmetic(Node):
    """Base of the weighted sums. ``integers`` says whose arrays without arithmetic are taken."""

    integers: str

    call: ClassVar[str]  # the function that makes it
    params: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"integers": choice}
    base: ClassVar[int] = 0  # the operand that gives structure, step, metadata and documents
    mixed: ClassVar[bool] = False
    own_step: ClassVar[bool] = False  # that of the base, and not one that all have
    divisor: ClassVar[Any] = 1.0
    operands: ClassVar[tuple[int, int]] = (1, MOST_READS)

    @property
    def terms(self) -> tuple[float, ...]:
        raise NotImplementedError

    def check(self) -> None:
        if len(self.terms) != len(self.of):
            raise CheckpointError(
                f"{self.kind} of {count(len(self.of), 'checkpoint')} has {count(len(self.terms), 'weight')}"
            )

    def _told_of_adapters(self) -> str:
        """A note on sums of factors. Raises where their weights would change each product by their square."""
        whole = weight_of(self)
        if not math.isclose(whole, 1, abs_tol=1e-6) and (whole or not isinstance(self, Difference)):
            raise CheckpointError(
                f"{self}: the weights of these adapters sum to {whole:g}, and products of their factors would be "
                f"{whole * whole:g} times as large. {fitting.EXACT}"
            )
        own = "adapter_config.json: factors are differences, and no adapter before they are added"
        return fitting.AVERAGED if whole else own

    def apply(self, made: Sequence[Checkpoint]) -> Checkpoint:
        check_alike(made, self.mixed)
        for ckpt in made:
            refuse_scaled(ckpt)
        base = made[self.base]
        documents = _of_one_model(base, made)
        if fitting.are_adapters(made) and isinstance(documents, Documents):
            documents = documents.edited("adapter_config.json", bytes, [self._told_of_adapters()])
        arrays: dict[str, Any] = {}
        places, known, named = [c.path for c in made], dict[str, Any](), dict[str, Any]()
        for name in base:
            parts = tuple(c[name].tensor for c in made)
            sums = working_dtype(base[name].dtype) is not None and not is_coordinate(name, parts[self.base], named)
            if sums or self.integers == "equal":
                refuse_packed(name, parts, places, sums, known)
            if not sums:
                arrays[name] = agreed(name, parts, self.integers, places, f"virtual.{self.call}")
            else:
                arrays[name] = WeightedSum(name, parts, self.terms, self.divisor, self.base)
        step = base.step if self.own_step or len({c.step for c in made}) == 1 else None
        skipped = {n: why for c in made for n, why in c.skipped.items()}
        return computed_from(self, base, arrays, step=step, skipped=skipped, documents=documents)


@dataclass(frozen=True)
class Sum(Arithmetic):
    """``Σ w x``, and with ``normalize`` over ``Σ w``. A mean is one of weights 1."""

    weights: tuple[float, ...]
    normalize: bool

    kind = "sum"
    params: ClassVar[Mapping[str, Callable[[Any], Any]]] = Arithmetic.params | {"weights": numbers, "normalize": flag}
    terms = property(lambda self: self.weights)
    call = property(lambda self: "mean" if self.normalize and set(self.weights) == {1.0} else "weighted_sum")
    divisor = property(lambda self: math.fsum(self.weights) if self.normalize else 1.0)

    def check(self) -> None:
        Arithmetic.check(self)
        if self.normalize and (cancels(self.weights) or not 1e-30 < abs(self.divisor) <= _LARGEST):
            raise CheckpointError(f"the weights {self.weights!r:.60} sum to {self.divisor}; nothing is divided by that")

    def __str__(self) -> str:
        return self._told("mean", *self._shown("integers")) if self.call == "mean" else Node.__str__(self)


@dataclass(frozen=True)
class Ema(Arithmetic):
    """``m = x0``, then ``m = decay m + (1 - decay) x`` for each further step: one weighted sum of all."""

    decay: float

    kind = call = "ema"
    base = -1
    own_step = True
    params: ClassVar[Mapping[str, Callable[[Any], Any]]] = Arithmetic.params | {"decay": number}

    @property
    def terms(self) -> tuple[float, ...]:
        n = len(self.of)
        return (self.decay ** (n - 1), *((1 - self.decay) * self.decay ** (n - 1 - i) for i in range(1, n)))

    def check(self) -> None:
        if not 0 <= self.decay <= 1:
            raise CheckpointError(f"decay of ema is a number from 0 to 1, got {self.decay}")


@dataclass(frozen=True)
class Difference(Arithmetic):
    """``a - b``: a task vector, where ``b`` is the base of a fine-tuned ``a``."""

    kind = call = "difference"
    operands = (2, 2)
    terms = property(lambda self: (1.0, -1.0))


@dataclass(frozen=True)
class Add(Arithmetic):
    """``base + scale * delta``, in the dtypes of the base; the floating dtypes of the delta may be others."""

    scale: float

    kind = call = "add"
    operands = (2, 2)
    mixed = True
    own_step = True
    params: ClassVar[Mapping[str, Callable[[Any], Any]]] = Arithmetic.params | {"scale": number}
    terms = property(lambda self: (1.0, self.scale))


def weight_of(node: Any) -> float:
    """The sum of the weights of all checkpoints of an expression."""
    if isinstance(node, Arithmetic):
        return math.fsum(t * weight_of(x) for t, x in zip(node.terms, node.of, strict=True)) / node.divisor
    return weight_of(node.of[0]) if getattr(node, "of", ()) else 1.0


def refuse_scaled(ckpt: Checkpoint, names: Container[str] | None = None) -> None:
    """Raise for quantised weights with scales beside them: arithmetic on their numbers alone would mean nothing.
    ``names``: of those that are computed; None: of all."""
    for name, scale in scaled({n: a.tensor for n, a in ckpt.arrays.items()}):
        if names is not None and name not in names:
            continue
        stem = name.removesuffix("_packed")
        sources = dict.fromkeys(n for n in (name, scale, f"{stem}_zero_point") if n in ckpt)
        target, bits = stem.removesuffix(".q"), "bits=…" if stem != name else ""
        way = f"dequantise it first: virtual.with_rules(…, '{', '.join(sources)} -> {target}, dequantize({bits})')"
        if target != stem and ckpt[name].dtype == np.uint8:
            way = "restore it first, and save it anew: mt.storage.dequantize(mt.load(…))"
        elif not scale.endswith(("scale", "_scale_inv")):
            why = not_followed(name, ckpt.arrays) or not_followed(scale, ckpt.arrays)
            way = why or "let the tool that made it write the full weights"
        raise CheckpointDTypeError(
            f"{ckpt.path}: key {name!r} is {ckpt[name].dtype} with its scale in {scale!r}, and its numbers mean "
            f"nothing without; {way}"
        )


@dataclass(frozen=True)
class Cast(Node):
    """Floating arrays in another floating dtype."""

    dtype: str

    kind = "cast"
    params: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"dtype": lambda x: floating(text(x)).name}

    def apply(self, made: Sequence[Checkpoint]) -> Checkpoint:
        base, wanted = made[0], dtypes.by_name(self.dtype)
        arrays = converted({n: a.tensor for n, a in base.arrays.items()}, wanted)
        refuse_lost_fills(arrays)
        documents = base.documents
        if isinstance(documents, Documents) and "float8" not in self.dtype:  # of which transformers has no models
            documents = documents.edited("config.json", partial(with_dtype, dtype=self.dtype))
        return computed_from(self, base, arrays, documents=documents)


@dataclass(frozen=True)
class Quantize(Node):
    """Floating arrays as small integers with a scale for each row, as `quantize` makes them of a tree."""

    bits: int
    keys: tuple[str, ...]

    kind = "quantize"
    params: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"bits": index, "keys": texts}

    def check(self) -> None:
        if self.bits not in LEVELS:
            raise CheckpointError(f"bits must be 8 or 4, got {self.bits}")

    def apply(self, made: Sequence[Checkpoint]) -> Checkpoint:
        base = made[0]
        stored, held, known = list(base.arrays.values()), dict[str, StoredArray](), dict[str, Any]()
        label = str(self)
        marks = {leaf_name(path): value for path, value in scalar_leaves(base.structure)}
        wanted = chooser(self.keys, None, base.arrays)
        refuse_quantized({**base.arrays, **marks}, wanted)
        select(base, [k for k in self.keys if k != "*"])  # refuses those that match nothing

        def put(path: tuple[str | int, ...], tensor: Any) -> Leaf:
            a = StoredArray(path, tensor)
            a.rule = label
            held[a.name] = a
            return Leaf(len(held) - 1)

        def one(leaf: Leaf) -> Any:
            a = stored[leaf.index]
            if a.dtype.name not in dtypes.FLOATS or not a.nbytes or not a.shape or not wanted(a.name):
                return put(a.path, a.tensor)
            refuse_packed(a.name, [a.tensor], [base.path], True, known)
            q = RowIntegers(f"{a.name}.q", a.tensor, LEVELS[self.bits])
            scale = RowScales(f"{a.name}.scale", a.tensor, LEVELS[self.bits])
            said = {"dtype": a.dtype.name, "length": a.shape[-1], "times": 1}
            return {MARK: self.bits, "q": put((*a.path, "q"), q), "scale": put((*a.path, "scale"), scale), **said}

        structure = fill(base.structure, one)
        return replace(computed_from(self, base, {}), arrays=held, structure=structure)


@dataclass(frozen=True)
class KeyRules(Node):
    """Key rules, in their text form."""

    rules: str

    kind = "rules"
    params: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"rules": lambda x: str(Rules(text(x)))}

    def apply(self, made: Sequence[Checkpoint]) -> Checkpoint:
        made_so = Rules(self.rules).on(made[0])
        rules = {n: a.rule for n, a in made_so.arrays.items()}
        arrays = {n: a.tensor for n, a in made_so.arrays.items()}
        refuse_lost_fills(arrays)
        documents = followed(made_so.documents, {n: a.tensor for n, a in made[0].arrays.items()}, arrays)
        out = computed_from(self, made_so, arrays, documents=documents)
        for name, a in out.arrays.items():
            a.rule = rules[name] or a.rule
        return out


@dataclass(frozen=True)
class Rows(Node):
    """Ranges of arrays along a dimension, such as a part of a vocabulary; others stay whole."""

    ranges: tuple[tuple[str, int, int, int], ...]  # pattern, dimension, start, stop

    kind = "rows"
    params: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"ranges": rows_of(text, index, index, index)}

    def apply(self, made: Sequence[Checkpoint]) -> Checkpoint:
        base = made[0]
        before = {n: a.tensor for n, a in base.arrays.items()}
        arrays, cut = dict(before), set[tuple[str, int]]()
        for pattern, axis, start, stop in self.ranges:
            if not (found := matching(pattern, arrays)):
                base.refuse_skipped([pattern])
                raise CheckpointKeyError(f"{base.path}: nothing matches {pattern!r}, of which rows are wanted")
            for n in found:
                if (n, axis) in cut:
                    raise CheckpointError(f"key {n!r}: two patterns give rows of its axis {axis}, {pattern!r} is one")
                cut.add((n, axis))
                shape = tuple(arrays[n].shape)
                if axis >= len(shape) or not start <= stop <= shape[axis]:
                    raise CheckpointShapeError(
                        f"key {n!r} of shape {shape} has no rows {start} to {stop} of axis {axis}"
                    )
                offset = tuple(start if i == axis else 0 for i in range(len(shape)))
                arrays[n] = Sliced(n, arrays[n], offset, (*shape[:axis], stop - start, *shape[axis + 1 :]))
        return computed_from(self, base, arrays, documents=followed(base.documents, before, arrays))


NODES: dict[str, type[Node]] = {node.kind: node for node in (Sum, Ema, Difference, Add, Cast, Quantize, KeyRules, Rows)}
"""The kinds of nodes, by their names in documents."""
