"""Expressions: small frozen nodes that say how a checkpoint is computed from others. They nest in any way.

A node has its operands in ``of``, and parameters. `Node.apply` makes a checkpoint of those of its operands: it checks
names, shapes and dtypes first, and reads nothing. A new kind of node is a class with a row in `NODES`.

Arithmetic is for floating and complex arrays. All others (counts of steps, masks, quantised weights) must be equal in
all operands.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ...arrays.core.errors import (
    CheckpointDTypeError,
    CheckpointError,
    CheckpointKeyError,
    CheckpointShapeError,
)
from ..base.names import fits
from ..checkpoint.checkpoint import Checkpoint, StoredArray, fill
from ..format import dtypes
from ..format.documents import Documents, with_dtype
from ..format.manifest import Leaf, scalar_leaves
from ..loading.report import listed
from ..rules.lazy_tensors import Converted, Sliced
from ..rules.rules import Rules
from ..saving.quantize import LEVELS, MARK, refuse_quantized
from ..stores import store
from ..transform.convert import cancels, converted, floating, scaled
from ..transform.model_config import config_of, followed
from .computed import Equal, LowRankSum, RowIntegers, RowScales, WeightedSum, working_dtype
from .tied import with_own_head

LINEAGE = "meshtape.virtual"  # in the metadata of a virtual checkpoint, and of what is written from one
MOST_READS = 4096  # of stored elements for one
DEEPEST = 32  # nodes within nodes, also through documents, and documents within documents
_LONGEST = 400  # characters of a text
_LARGEST = float(np.finfo(np.float32).max)
_SHOWN = 12


# ----- forms of parameters, of callers and of documents ---------------------------------------------------------------


def number(x: Any) -> float:
    """A number that float32 holds."""
    if isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool) and abs(x) <= _LARGEST:
        return float(x)
    raise CheckpointError(f"{x!r:.40} is no number that float32 holds")


def numbers(x: Any) -> tuple[float, ...]:
    return tuple(map(number, _sequence(x)))


def flag(x: Any) -> bool:
    if not isinstance(x, bool):
        raise CheckpointError(f"{x!r:.40} is neither true nor false")
    return x


def index(x: Any) -> int:
    if isinstance(x, bool) or not isinstance(x, (int, np.integer)) or not 0 <= x < 1 << 62:
        raise CheckpointError(f"{x!r:.40} is no whole number from 0 on")
    return int(x)


def text(x: Any) -> str:
    if not isinstance(x, str):
        raise CheckpointError(f"{x!r:.40} is no text")
    return x


def texts(x: Any) -> tuple[str, ...]:
    return tuple(map(text, _sequence(x)))


def rows_of(*forms: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The form of a list of rows, each with one value of each form."""

    def form(x: Any) -> tuple[tuple[Any, ...], ...]:
        rows = [_sequence(row) for row in _sequence(x)]
        if any(len(row) != len(forms) for row in rows):
            raise CheckpointError(f"each row has {len(forms)} values, got {x!r:.80}")
        return tuple(tuple(f(v) for f, v in zip(forms, row, strict=True)) for row in rows)

    return form


def _sequence(x: Any) -> Sequence[Any]:
    if isinstance(x, (list, tuple)) or (isinstance(x, np.ndarray) and x.ndim == 1):
        return x
    raise CheckpointError(f"{x!r:.40} is no list")


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
            wanted = str(least) if least == most else f"{least} to {most}"
            raise CheckpointError(f"{self.kind} is made of {wanted} checkpoints, got {len(self.of)}")
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
        held = {name: getattr(self, name) for name in self.params}
        return self._told(
            self.kind, *(f"{name}={value!r:.60}" for name, value in held.items() if value not in (None, ()))
        )


def parents_of(node: Any) -> Iterator[Parent]:
    """The parents of an expression, from the left; one that it names twice comes twice."""
    if isinstance(node, Parent):
        yield node
    else:
        for x in node.of:
            yield from parents_of(x)


def _computed(node: Node, base: Checkpoint, arrays: Mapping[str, Any], **changed: Any) -> Checkpoint:
    """The checkpoint of some tensors, with structure, step, metadata and documents of a base."""
    label = str(node)
    held = {}
    for name, tensor in arrays.items():
        held[name] = StoredArray(base.arrays[name].path, tensor)
        held[name].rule = label
    metadata = {k: v for k, v in base.metadata.items() if not k.startswith("meshtape.")} | {LINEAGE: label}
    own = {"path": label, "kind": "virtual", "arrays": held, "metadata": metadata, "meshes": [], "manifest": None}
    return replace(base, **own, computed=None, whole=True, **changed)  # type: ignore[arg-type]


def check_alike(made: Sequence[Checkpoint], mixed: bool = False) -> None:
    """Raise, listing all, where names, shapes or dtypes differ from those of the first. ``mixed``: floating dtypes
    may."""
    first, lines, kinds = made[0], [], []
    for other in made[1:]:
        missing, unexpected = [n for n in first if n not in other], [n for n in other if n not in first]
        unread = {**first.skipped, **other.skipped}
        lines += [f"  {n} cannot be read: {unread[n]}" for n in missing + unexpected if n in unread]
        lines += listed(f"missing in {other.path}", missing) + listed(f"only in {other.path}", unexpected)
        kinds += [CheckpointKeyError] * bool(missing or unexpected)
        common = [n for n in first if n in other]
        shapes = [n for n in common if first[n].shape != other[n].shape]
        types = [n for n in common if not _dtypes_fit(first[n].dtype, other[n].dtype, mixed)]
        for what, found, kind in (("shape", shapes, CheckpointShapeError), ("dtype", types, CheckpointDTypeError)):
            kinds += [kind] * bool(found)
            told = [f"    {n}: {getattr(first[n], what)} and {getattr(other[n], what)}" for n in found[:_SHOWN]]
            more = [f"    … and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
            lines += [f"  {what}s differ in {other.path} ({len(found)}):", *told, *more] if found else []
    if lines:
        worst = next(k for k in (CheckpointKeyError, CheckpointShapeError, CheckpointDTypeError) if k in kinds)
        raise worst("\n".join([f"the parents do not fit {first.path}; nothing was read", *lines]))


def _dtypes_fit(a: np.dtype, b: np.dtype, mixed: bool) -> bool:
    return a == b or (mixed and a.name in dtypes.FLOATS and b.name in dtypes.FLOATS)


class Arithmetic(Node):
    """Base of the weighted sums."""

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
            raise CheckpointError(f"{self.kind} of {len(self.of)} checkpoints has {len(self.terms)} weights")

    def apply(self, made: Sequence[Checkpoint]) -> Checkpoint:
        check_alike(made, self.mixed)
        for ckpt in made:
            _refuse_scaled(ckpt)
        base = made[self.base]
        arrays: dict[str, Any] = {}
        for name in base:
            parts = tuple(c[name].tensor for c in made)
            if working_dtype(base[name].dtype) is None:
                arrays[name] = Equal(name, parts, tuple(c.path for c in made))
            else:
                arrays[name] = WeightedSum(name, parts, self.terms, self.divisor, self.base)
        step = base.step if self.own_step or len({c.step for c in made}) == 1 else None
        skipped = {n: why for c in made for n, why in c.skipped.items()}
        return _computed(self, base, arrays, step=step, skipped=skipped)


@dataclass(frozen=True)
class Sum(Arithmetic):
    """``Σ w x``, and with ``normalize`` over ``Σ w``. A mean is one of weights 1."""

    weights: tuple[float, ...]
    normalize: bool

    kind = "sum"
    params: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"weights": numbers, "normalize": flag}
    terms = property(lambda self: self.weights)
    divisor = property(lambda self: math.fsum(self.weights) if self.normalize else 1.0)

    def check(self) -> None:
        Arithmetic.check(self)
        if self.normalize and (cancels(self.weights) or not 1e-30 < abs(self.divisor) <= _LARGEST):
            raise CheckpointError(f"the weights {self.weights!r:.60} sum to {self.divisor}; nothing is divided by that")

    def __str__(self) -> str:
        return self._told("mean") if self.normalize and set(self.weights) == {1.0} else Node.__str__(self)


@dataclass(frozen=True)
class Ema(Arithmetic):
    """``m = x0``, then ``m = decay m + (1 - decay) x`` for each further step: one weighted sum of all."""

    decay: float

    kind = "ema"
    base = -1
    own_step = True
    params: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"decay": number}

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

    kind = "difference"
    operands = (2, 2)
    terms = property(lambda self: (1.0, -1.0))


@dataclass(frozen=True)
class Add(Arithmetic):
    """``base + scale * delta``, in the dtypes of the base; the floating dtypes of the delta may be others."""

    scale: float

    kind = "add"
    operands = (2, 2)
    mixed = True
    own_step = True
    params: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"scale": number}
    terms = property(lambda self: (1.0, self.scale))


TURNED = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}
"""Types of models with matrices that transformers stores as (in, out), those of its ``Conv1D``."""
TURNED_MODULES = {"c_attn", "q_attn", "c_proj", "c_fc"}
"""The last part of the names of these matrices' modules."""
ADAPTER = re.compile(r"(?:base_model\.model\.)?(.+)\.(lora(?:_embedding)?)_([AB])(?:\.default)?(?:\.weight)?\Z")


@dataclass(frozen=True)
class Lora(Node):
    """``W + scale * factor * B @ A`` of a PEFT adapter. ``factors`` has those of modules that have their own."""

    scale: float
    factor: float
    factors: tuple[tuple[str, float], ...]
    transposed: bool  # weights are stored as (in, out), and not (out, in)

    kind = "lora"
    operands = (2, 2)
    params: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "scale": number,
        "factor": number,
        "factors": rows_of(text, number),
        "transposed": flag,
    }

    def apply(self, made: Sequence[Checkpoint]) -> Checkpoint:
        base, adapter = made
        _refuse_scaled(base)
        pairs: dict[tuple[str, str], dict[str, str]] = {}
        strange = []
        for name in adapter:
            found = ADAPTER.match(name)
            if found is None:
                strange.append(name)
            else:
                pairs.setdefault((found[1], found[2]), {})[found[3]] = name
        trained = [_trained_whole(n) for n in strange if ".base_layer." not in n]
        base = with_own_head(base, trained, [f"{module}.weight" for module, _ in pairs])
        arrays = {n: a.tensor for n, a in base.arrays.items()}
        whole = {n: t for n in strange if (t := _trained_whole(n)) in arrays}
        strange = [n for n in strange if n not in whole]
        lines = listed("keys of the adapter that are no part of a LoRA", [*strange, *adapter.skipped])
        if self.scale != 1 and (trained := [n for n in whole if ".base_layer." not in n]):
            raise CheckpointError(
                f"scale={self.scale} has no meaning for {trained[:4]}, which the adapter trained whole"
            )
        own, kind = dict(self.factors), config_of(base.documents).get("model_type")
        for name, target in whole.items():
            new, old = adapter[name].tensor, arrays[target]
            if tuple(new.shape) != tuple(old.shape):
                lines.append(f"  {name} of the adapter has the shape {new.shape}, and {target} {old.shape}")
            arrays[target] = new if new.dtype == old.dtype else Converted(target, new, old.dtype)
        for (module, form), ab in pairs.items():
            target = next((n for n in (f"{module}.weight", module) if n in base), None)
            if len(ab) < 2:
                lines.append(f"  {module} has {next(iter(ab.values()))!r} alone, without its other factor")
            elif target is None:
                lines.append(f"  {module} is no array of the base, nor is '{module}.weight'")
            else:
                a, b, w = adapter[ab["A"]].tensor, adapter[ab["B"]].tensor, arrays[target]
                swapped = form == "lora_embedding" or self._is_turned(kind, module, w, b, a)
                if why := _misfit(target, w, a, b, swapped):
                    lines.append(f"  {why}")
                else:
                    arrays[target] = LowRankSum(target, w, (a, b), self.scale * own.get(module, self.factor), swapped)
        if lines or not pairs:
            lines = lines or ["  the adapter has no array"]
            raise CheckpointKeyError("\n".join([f"{adapter.path} does not fit {base.path}; nothing was read", *lines]))
        return _computed(self, base, arrays)

    def _is_turned(self, kind: Any, module: str, w: Any, b: Any, a: Any) -> bool:
        """Whether a weight is stored as (in, out), in a model of this kind. Its shape says so, or PEFT's ways do: these
        go by the kind of the layer, and their configuration has one flag for all layers."""
        if all(len(x.shape) == 2 for x in (w, b, a)) and w.shape[0] != w.shape[1]:
            shape, product = tuple(w.shape), (b.shape[0], a.shape[1])
            return shape == product[::-1] if shape in (product, product[::-1]) else self.transposed
        if kind in TURNED:
            return module.rpartition(".")[2] in TURNED_MODULES
        return self.transposed


def _trained_whole(name: str) -> str:
    """The array of the base for one that PEFT saves whole (``modules_to_save``)."""
    # An embedding with factors is saved beside them.
    plain = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
    return plain.replace(".base_layer.weight", ".weight")


def _refuse_scaled(ckpt: Checkpoint) -> None:
    """Raise for float8 weights with scales beside them: arithmetic on their numbers alone would mean nothing."""
    for name, scale in scaled({n: a.tensor for n, a in ckpt.arrays.items()}):
        if ckpt[name].dtype.name.startswith("float8"):
            raise CheckpointDTypeError(
                f"{ckpt.path}: key {name!r} is {ckpt[name].dtype} with its scale in {scale!r}, and its numbers mean "
                "nothing without; "
                f"dequantise it first: virtual.with_rules(…, '{name}, {scale} -> {name}, dequantize()')"
            )


def _misfit(name: str, w: Any, a: Any, b: Any, swapped: bool) -> str | None:
    """Why the product of an adapter cannot be added to a weight."""
    shapes = [tuple(t.shape) for t in (w, a, b)]
    if any(len(s) != 2 for s in shapes):
        return f"{name} of shape {shapes[0]} has factors of shapes {shapes[1]} and {shapes[2]}; all must be matrices"
    if any(t.dtype.name not in dtypes.FLOATS for t in (w, a, b)):
        return f"{name} is {w.dtype} with factors of {a.dtype} and {b.dtype}; all must be floating: dequantise first"
    product = (shapes[2][0], shapes[1][1])
    if shapes[1][0] != shapes[2][1] or (product[::-1] if swapped else product) != shapes[0]:
        return f"{name} has the shape {shapes[0]}, and its factors {shapes[1]} and {shapes[2]} do not make that"
    return None


@dataclass(frozen=True)
class Cast(Node):
    """Floating arrays in another floating dtype."""

    dtype: str

    kind = "cast"
    params: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"dtype": lambda x: floating(text(x)).name}

    def apply(self, made: Sequence[Checkpoint]) -> Checkpoint:
        base, wanted = made[0], dtypes.by_name(self.dtype)
        arrays = converted({n: a.tensor for n, a in base.arrays.items()}, wanted)
        documents = base.documents
        if isinstance(documents, Documents):
            documents = documents.edited("config.json", partial(with_dtype, dtype=self.dtype))
        return _computed(self, base, arrays, documents=documents)


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
        stored, held = list(base.arrays.values()), dict[str, StoredArray]()
        label = str(self)
        refuse_quantized((path for path, _ in scalar_leaves(base.structure)), self.keys)

        def put(path: tuple[str | int, ...], tensor: Any) -> Leaf:
            a = StoredArray(path, tensor)
            a.rule = label
            held[a.name] = a
            return Leaf(len(held) - 1)

        def one(leaf: Leaf) -> Any:
            a = stored[leaf.index]
            if a.dtype.name not in dtypes.FLOATS or not a.nbytes or not a.shape or not fits(a.name, self.keys):
                return put(a.path, a.tensor)
            q = RowIntegers(f"{a.name}.q", a.tensor, LEVELS[self.bits])
            scale = RowScales(f"{a.name}.scale", a.tensor, LEVELS[self.bits])
            said = {"dtype": a.dtype.name, "length": a.shape[-1], "times": 1}
            return {MARK: self.bits, "q": put((*a.path, "q"), q), "scale": put((*a.path, "scale"), scale), **said}

        structure = fill(base.structure, one)
        return replace(_computed(self, base, {}), arrays=held, structure=structure)


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
        documents = followed(made_so.documents, {n: a.tensor for n, a in made[0].arrays.items()}, arrays)
        out = _computed(self, made_so, arrays, documents=documents)
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
        arrays = dict(before)
        for pattern, axis, start, stop in self.ranges:
            found = [n for n in arrays if fits(n, pattern)]
            if not found:
                base.refuse_skipped([pattern])
                raise CheckpointKeyError(f"{base.path}: nothing matches {pattern!r}, of which rows are wanted")
            for n in found:
                shape = tuple(arrays[n].shape)
                if axis >= len(shape) or not start <= stop <= shape[axis]:
                    raise CheckpointShapeError(
                        f"key {n!r} of shape {shape} has no rows {start} to {stop} of axis {axis}"
                    )
                offset = tuple(start if i == axis else 0 for i in range(len(shape)))
                arrays[n] = Sliced(n, arrays[n], offset, (*shape[:axis], stop - start, *shape[axis + 1 :]))
        return _computed(self, base, arrays, documents=followed(base.documents, before, arrays))


NODES: dict[str, type[Node]] = {
    node.kind: node for node in (Sum, Ema, Difference, Add, Lora, Cast, Quantize, KeyRules, Rows)
}
"""The kinds of nodes, by their names in documents."""
