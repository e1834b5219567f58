"""The lazy tensors of a blend: names and layers of the sources matched, parameters resolved, everything checked before
a byte is written."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...arrays.core.errors import CheckpointError, CheckpointKeyError, CheckpointShapeError
from ...arrays.core.formatting import count, some
from ..base.names import chooser
from ..checkpoint.checkpoint import Checkpoint
from ..format import dtypes
from ..format.documents import Documents
from ..rules.dequantized import scaled
from ..rules.lazy_tensors import Converted, renamed
from ..rules.measured import Measured
from ..transform import layer_entries
from ..transform.attributes import refuse_packed
from ..transform.model_config import BUFFER, HEADS, LAYER, TABLES, config_of, is_embedding, stands_for
from ..virtual import fitting
from ..virtual.computed import cancels
from ..virtual.expressions import agreed
from ..virtual.tied import ties_head
from . import methods
from .blended import Blended
from .config import METHODS, BlendConfig, ModelRef, Problems, Slice, Source, filters, resolve
from .selective import AgentMerging, ArceeFusion, NearSwap
from .vocabulary import Vocabulary

_AHEAD = re.compile(
    r"embed(?!_out|ding_norm)|pre_?la?yrnorm|pre_layernorm|feature_(extractor|projection)|relative_attention_bias|rel_pos"
    r"|per_layer_|rotary|inv_freq|deberta\.encoder\.LayerNorm|layoutlmv3\.(LayerNorm|norm)\."
    r"|(^|\.)(w|w[tp]e|emb_\w+|mask_emb|project_in|(cls|class|mask|register)_tokens?|(conv_)?stem)(\.|$)"
)
"""Names of arrays that come before the layers; all others come after them."""
_BEHIND = re.compile(
    r"(?i)(^|\.)(\w*(head|classifier|output|prediction|projection|projector)s?|cls|score|pooler|dense|logit_scale"
    r"|output_layer|final_logits_bias|(project|proj|embed)_out|out_proj|vocab_transform|(embedding|ln|norm)_(norm|f|out)"
    r"|((final|post|last|output|model)_?)?(layer_?)?norm(_f|_final|_out)?)(\.|$)|^decoder\.(weight|bias)$"
)
"""Names of those of which this is known."""


@dataclass(frozen=True)
class BlendedArray:
    """How an array of a blend was made: the sources (model and name there), and the parameters that applied."""

    method: str
    sources: tuple[str, ...]
    parameters: Mapping[str, Any]


@dataclass
class Parent:
    """An open source of a blend. ``layers`` maps (prefix, rest of a name) of each layer to the name."""

    ckpt: Checkpoint
    tensors: dict[str, Any]
    loose: dict[str, str] = field(default_factory=dict)
    layers: dict[int, dict[tuple[str, str], str]] = field(default_factory=dict)

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The part of its ``config.json`` that describes the layers."""
        return layer_entries.inner(config_of(self.ckpt.documents))

    @functools.cached_property
    def scaled(self) -> set[str]:
        """The names of quantised weights whose scales lie beside them, and of these scales."""
        return {name for both in scaled(self.tensors) for name in both}

    @classmethod
    def of(cls, ckpt: Checkpoint) -> Parent:
        tensors = {n: a.tensor for n, a in ckpt.arrays.items()}
        out = cls(ckpt, tensors)
        for n in tensors:
            if found := LAYER.search(n):
                key = n[: found.start()], n[found.end() :]
                out.layers.setdefault(int(found[1]), {})[key] = n
            else:
                out.loose[n] = n
        return out

    @functools.cached_property
    def forms(self) -> dict[Any, set[tuple[int, ...]]]:
        """The shapes of arrays by name, and of those of layers by (prefix, rest of a name)."""
        out: dict[Any, set[tuple[int, ...]]] = {n: {tuple(self.tensors[n].shape)} for n in self.loose}
        for keys in self.layers.values():
            for key, n in keys.items():
                out.setdefault(key, set()).add(tuple(self.tensors[n].shape))
        return out

    @functools.cached_property
    def depths(self) -> dict[str, int]:
        """How many layers each stack has, by the prefix of its names."""
        return {prefix: i + 1 for i in sorted(self.layers) for prefix, _ in self.layers[i]}

    @functools.cached_property
    def kinds(self) -> list[frozenset[tuple[str, str]]]:
        """The different sets of keys that layers have."""
        return list(dict.fromkeys(map(frozenset, self.layers.values())))

    @property
    def count(self) -> int:
        """How many layers it has."""
        return max(self.depths.values(), default=0)

    def tied(self, name: str) -> str | None:
        """The array that stands for one that is not stored as it is the same."""
        return stands_for(name, self.loose)


class Faults:
    """Problems of arrays: those with one text are told once, with the first names."""

    def __init__(self) -> None:
        self._held: dict[str, list[str]] = {}
        self._kinds: set[type[CheckpointError]] = set()

    def add(self, text: str, name: str, kind: type[CheckpointError] = CheckpointError) -> None:
        self._held.setdefault(text, []).append(name)
        self._kinds.add(kind)

    def refuse(self, where: str) -> None:
        problems = Problems()
        for text, names in self._held.items():
            problems.append(f"{text}: {some(map(repr, names), 3)}")
        problems.refuse(where, self._kinds.pop() if len(self._kinds) == 1 else CheckpointError)


class Planner:
    """The tensors of a configuration, in the order of the first source. ``made`` has the models, as the configuration
    names them."""

    def __init__(
        self,
        config: BlendConfig,
        made: Sequence[Checkpoint],
        seed: int,
        keys: Sequence[str] | None,
        drop: Sequence[str],
        integers: str,
    ) -> None:
        self.config, self.seed, self.integers = config, seed, integers
        self.parents = {m: Parent.of(c) for m, c in zip(config.models, made, strict=True)}
        known = {n for p in self.parents.values() for n in p.tensors}
        self._wanted = chooser(keys, drop, known)
        self.names: list[str] = []  # of all arrays, wanted or not
        self.tensors: dict[str, Any] = {}
        self.arrays: dict[str, BlendedArray] = {}
        self.layers = 0
        self.notes: list[str] = []
        # Of the layers that slices name: the model that describes each, and its number there.
        self.order: list[tuple[ModelRef, int]] = []
        self._faults = Faults()
        self._adapters = fitting.are_adapters(made)
        self._said: dict[str, Any] = {}  # of their arrays by other writers, by checkpoint
        self.vocabulary: Vocabulary | None = None
        if config.tokenizer is not None:
            docs = {m: p.ckpt.documents for m, p in self.parents.items()}
            self.vocabulary = Vocabulary.of(config.tokenizer, docs, self._sizes())
            self.notes += self.vocabulary.notes
        for m, p in self.parents.items():
            held = p.ckpt.documents
            self.notes += [f"{m}: {note}" for note in held.notes] if m.lora and isinstance(held, Documents) else []
        self.notes += [fitting.AVERAGED] if self._adapters and len(made) > 1 else []
        self._plan()
        for pattern in (*(keys or ()), *drop):
            if not any(map(chooser(pattern, None, known), self.names)):
                self._faults.add("nothing matches", pattern, CheckpointKeyError)
        known.update(self.names)
        held = [config.parameters, *((s.parameters, [x.parameters for x in s.sources]) for s in config.slices)]
        for wanted in dict.fromkeys(filters(held)):
            if not any(wanted in n for n in known):
                self._faults.add("filter: matches no array", wanted)
        self._faults.refuse(f"{config.method} cannot blend these models")

    def _sizes(self) -> dict[ModelRef, int]:
        """Rows of the embeddings of each model."""
        out = {}
        for m, p in self.parents.items():
            found = [p.tensors[n].shape[0] for n in p.loose if is_embedding(n) and p.tensors[n].shape]
            out[m] = max(found, default=0)
        return out

    @property
    def donor(self) -> Parent:
        """The model whose documents go along: the base, or the first."""
        return self.parents[self.config.models[0]]

    def _plan(self) -> None:
        first, last, unknown = self.config.slices[0], self.config.slices[-1], list[str]()
        for name in self._union(first, lambda p: p.loose):
            if _AHEAD.search(name):
                self._loose(first, name)
        for s in self.config.slices:
            self._slice(s)
        for name in self._union(last, lambda p: p.loose):
            if not _AHEAD.search(name):
                self._loose(last, name)
                if not _BEHIND.search(name) and _models(first) != _models(last):
                    unknown.append(name)
        if unknown:
            told = f"{some(map(repr, unknown), 3)}: of {_models(last)}, as the last layers are, because nothing tells"
            self.notes.append(f"{told} whether the model needs them before its layers or after them")
        if any(self._where not in [x.model for x in s.sources] for s in (first, last)):
            self._complete(last)
        for m in self.parents if self.donor.config else ():
            hard, notes = fitting.compared(
                self.donor.config, self.parents[m].config, str(self._where), str(m), not self.order
            )
            self.notes += notes
            if hard:
                self._faults.add(f"{self._not_of(m)}: {hard}", str(m), CheckpointShapeError)

    @property
    def _where(self) -> ModelRef:
        return self.config.models[0]

    def _not_of(self, m: Any) -> str:
        return f"{m} makes no model with {self._where}{', whose config.json is written' if self.donor.config else ''}"

    def _complete(self, last: Slice) -> None:
        """Add a head that the last models tie to their embedding, and look for arrays that the first has alone."""
        models = _models(last)
        for name in self.donor.loose:
            if name in self.names or BUFFER.search(name):
                continue
            if all(self.parents[x.model].tied(name) for x in last.sources):
                self._loose(last, name)
            else:
                self._faults.add(f"{self._not_of(models)}: it lacks", name, CheckpointKeyError)
        tied = next((n for n in self.donor.loose if n.endswith(TABLES) and is_embedding(n)), None)
        if tied and ties_head(config_of(self.donor.ckpt.documents)) and not any(n.endswith(HEADS) for n in self.names):
            self.notes.append(f"config.json: ties the head to {tied}, also after the layers of {models}")

    def _union(self, s: Slice, names: Callable[[Parent], Mapping[Any, str]]) -> list[Any]:
        return list(dict.fromkeys(k for x in s.sources for k in names(self.parents[x.model])))

    def _loose(self, s: Slice, name: str) -> None:
        self._tensor(s, name, [self.parents[x.model].loose.get(name) for x in s.sources], 0.0, name)

    def _named(self, x: Source, name: str, found: str | None) -> str | None:
        """The name of an array in a source; None, and a fault, where it has none."""
        if found is None and (found := self.parents[x.model].tied(name)) is None:
            self._faults.add(f"{x.model} has no such key", name, CheckpointKeyError)
        return found

    def _slice(self, s: Slice) -> None:
        base, ranges = s.base or self.config.base, []
        for x in s.sources:
            held = self.parents[x.model]
            start, stop = x.layers or (0, held.count)
            if stop > held.count:
                self._faults.add(f"{x.model} has {count(held.count, 'layer')}", f"layer_range [{start}, {stop}]")
                return
            ranges.append((start, stop - start))
            if x.parameters and x.model == base and self._with_base(x.model):
                told = ", ".join(x.parameters)
                self.notes.append(f"{self.config.method}: parameters of the base have no effect ({told} of {x.model})")
        lengths = {n for _, n in ranges}
        if len(lengths) > 1:
            told = ", ".join(map(str, sorted(lengths)))
            self._faults.add("the sources of a slice have different numbers of layers", told)
            return
        (n,) = lengths
        ranged = any(x.layers for x in s.sources)
        prefixes = {prefix for x in s.sources for prefix in self.parents[x.model].depths}
        if ranged and len(prefixes) > 1:
            self._faults.add(
                "layer_range: is not clear, as a model has several stacks of layers", ", ".join(sorted(prefixes))
            )
            return
        describes = next((i for i, x in enumerate(s.sources) if x.model == base), 0)
        for j in range(n if ranged else 0):
            self.order.append((s.sources[describes].model, ranges[describes][0] + j))
        for j in range(n):
            at = [
                self.parents[x.model].layers.get(start + j, {}) for x, (start, _) in zip(s.sources, ranges, strict=True)
            ]
            self._layer(s, {k for held in at for k in held})
            for prefix, rest in dict.fromkeys(k for held in at for k in held):
                name = f"{prefix}{self.layers + j}{rest}"
                names = [held.get((prefix, rest)) for held in at]
                depth = n if ranged else self.parents[s.sources[0].model].depths.get(prefix, 1)
                self._tensor(s, name, names, j / (depth - 1) if depth > 1 else 1.0, (prefix, rest))
        self.layers += n

    def _layer(self, s: Slice, keys: set[tuple[str, str]]) -> None:
        """Look for the arrays that a layer of the model has whose ``config.json`` is written."""
        kinds = self.donor.kinds
        if self._where in [x.model for x in s.sources] or not kinds:
            return
        closest = max(kinds, key=lambda held: len(held & keys))
        lacks = [f"{p}N{r}" for p, r in sorted(closest - keys) if not BUFFER.search(r)]
        for name in lacks:
            self._faults.add(f"{self._not_of(_models(s))}: its layers lack", name, CheckpointKeyError)

    def _fits(self, s: Slice, name: str, key: Any, shape: tuple[int, ...]) -> bool:
        """Whether an array has a shape that the model knows whose ``config.json`` is written; else a fault."""
        if self._where in [x.model for x in s.sources] or BUFFER.search(name):
            return True
        tokens = self.vocabulary is not None and is_embedding(name)
        known = self.donor.forms.get(key) or self.donor.forms.get(self.donor.tied(name))
        configs = [self.donor.config, *(self.parents[x.model].config for x in s.sources)]
        if known is None:
            text = f"{self._not_of(_models(s))}; {self._where} has no such array"
            self._faults.add(text, name, CheckpointKeyError)
        elif not any(shape[tokens:] == k[tokens:] for k in known) and not all(map(fitting.is_sized_by_layer, configs)):
            why = fitting.told(fitting.sizes(configs[0], configs[1]))
            text = f"{self._not_of(_models(s))}{f' ({why})' if why else ''}: shapes differ"
            self._faults.add(text, f"{name} {shape} for {some(sorted(known), 3)}", CheckpointShapeError)
        else:
            return True
        return False

    # ----- one tensor -------------------------------------------------------------------------------------------------

    def _tensor(self, s: Slice, name: str, found: Sequence[str | None], t: float, key: Any) -> None:
        self.names.append(name)
        if not self._wanted(name):
            return
        names = [self._named(x, name, n) for x, n in zip(s.sources, found, strict=True)]
        if None in names:
            return
        base = s.base or self.config.base
        parts = {x.model: self.parents[x.model].tensors[n] for x, n in zip(s.sources, names, strict=True)}
        told = tuple(f"{x.model}: {n}" for x, n in zip(s.sources, names, strict=True))
        if self.vocabulary is not None and is_embedding(name):
            parts = self.vocabulary.aligned(name, parts, base)
        if len({tuple(p.shape) for p in parts.values()}) > 1:
            shapes = ", ".join(f"{m}: {tuple(p.shape)}" for m, p in parts.items())
            hint = "; give tokenizer_source: to align the tokens" if is_embedding(name) else ""
            self._faults.add(f"shapes differ ({shapes}){hint}", name, CheckpointShapeError)
            return
        if not self._fits(s, name, key, tuple(next(iter(parts.values())).shape)):
            return
        # Filters know a head by its own name, also where a model ties it to its embedding.
        own = [n or name for n in found]
        kinds = [p.dtype for p in parts.values()]
        sums = all(k.name in dtypes.FLOATS for k in kinds)
        try:
            copied = self.config.method == "passthrough" and all(
                each["scale"] in (None, 1) for each in self._parameters(s, name, own, base, t)[1].values()
            )
            wanted = self.config.dtype or self.config.out_dtype
            cast = sums and wanted not in (None, kinds[0].name)  # also of scales
            for m, n in zip(parts, names, strict=True):
                if n in self.parents[m].scaled and (not copied or cast):
                    self._faults.add(f"{m} is quantised: blend what the rule dequantize() makes of it", name)
                    return
            if not copied if sums else self.integers == "equal":
                refuse_packed(name, list(parts.values()), list(map(str, parts)), sums, self._said)
        except CheckpointError as e:
            self._faults.add(str(e), name, type(e))
            return
        if not sums:
            if len(set(kinds)) > 1 or kinds[0].kind == "c":
                self._faults.add(f"dtypes cannot be blended ({', '.join(map(str, dict.fromkeys(kinds)))})", name)
                return
            ordered = sorted(zip(s.sources, parts.values(), strict=True), key=lambda both: both[0].listed)
            held = tuple(part for _, part in ordered)  # the base before those that are listed
            self.tensors[name] = agreed(
                name, held, self.integers, [str(x.model) for x, _ in ordered], "mt.storage.blend"
            )
            self.arrays[name] = BlendedArray("equal", told, {})
            return
        work = dtypes.by_name(self.config.dtype) if self.config.dtype else _promoted(kinds)
        if work is None:
            self._faults.add(f"{', '.join(sorted({str(k) for k in kinds}))} have no common dtype; give dtype:", name)
            return
        dtype = dtypes.by_name(self.config.out_dtype) if self.config.out_dtype else work
        try:
            shared, each = self._parameters(s, name, own, base, t)
            _check_range(shared, list(each.values()), work)
            order = [m for m in parts if m != base] if self._with_base(base) else list(parts)
            method = _formula(
                self.config.method, shared, [each[m] for m in order], self._with_base(base), name, self.seed
            )
        except CheckpointError as e:
            self._faults.add(str(e), name)
            return
        if self._adapters and not method.keeps_scale:
            text = "factors of adapters are blended by linear alone, with normalize: true or weights that sum to 1"
            self._faults.add(f"{text}. {fitting.EXACT}", name)
            return
        if isinstance(method, (methods.Directions, methods.SelectCalculateErase, ArceeFusion)) and work.itemsize == 2:
            work = np.dtype(np.float32)  # mergekit's angles and variances of short numbers have few right digits
        ordered = [parts[m] for m in order]
        if self._with_base(base) and base is not None and not isinstance(method, methods.Scaled):
            ordered.insert(0, parts[base])
        self.tensors[name] = _lazy(name, ordered, method, work, dtype)
        weights = {str(m): v for m, v in each.items() if v and m in order}
        self.arrays[name] = BlendedArray(self.config.method, told, {**shared, **weights})

    def _with_base(self, base: ModelRef | None) -> bool:
        return base is not None and METHODS[self.config.method].base != "ignored"

    def _parameters(
        self, s: Slice, name: str, names: Sequence[str], base: ModelRef | None, t: float
    ) -> tuple[dict[str, Any], dict[ModelRef, dict[str, Any]]]:
        spec, outer = METHODS[self.config.method], (s.parameters, *self.config.parameters)
        shared = {p: resolve(p, default, outer, name, t) for p, default in spec.shared.items()}
        each = {}
        for x, n in zip(s.sources, names, strict=True):
            if x.model != base or spec.base == "ignored":
                try:
                    own = (x.parameters, *outer)
                    each[x.model] = {p: resolve(p, default, own, n, t) for p, default in spec.each.items()}
                except CheckpointError as e:
                    raise CheckpointError(f"{x.model}: {e}") from None
        return shared, each


def _models(s: Slice) -> str:
    return ", ".join(str(x.model) for x in s.sources)


def _check_range(shared: Mapping[str, Any], each: Sequence[Mapping[str, Any]], work: np.dtype) -> None:
    """Refuse numbers, and sums of weights, that become infinite in the dtype that is computed with."""
    if work.itemsize == 1 or not any("density" in e for e in each):
        work = methods.real(work)  # the formulas of differences alone round their numbers to a short dtype
    given = [(f"parameter {p!r}", v) for p, v in (*shared.items(), *(i for e in each for i in e.items()))]
    given.append(("the sum of 'weight'", sum(abs(e.get("weight", 0)) for e in each)))
    for told, value in given:
        with np.errstate(over="ignore"):
            if value is not None and not np.isfinite(np.asarray(value).astype(work)):
                raise CheckpointError(f"{told}: {value} is no number that {work} holds")


def _promoted(kinds: Sequence[np.dtype]) -> np.dtype | None:
    """The dtype that PyTorch promotes these to; None where there is none."""
    names = {k.name for k in kinds}
    if len(names) == 1:
        return kinds[0]
    if any(n.startswith("float8") for n in names):
        return None
    return np.dtype(np.float64 if "float64" in names else np.float32)


def _lazy(name: str, parts: Sequence[Any], method: methods.Formula, work: np.dtype, dtype: np.dtype) -> Any:
    if isinstance(method, methods.Scaled) and method.scale is None:
        held = renamed(name, parts[0])
        for kind in (work, dtype):
            held = held if held.dtype == kind else Converted(name, held, kind)
        return held
    measured = Measured() if method.measures and 0 not in parts[0].shape else None
    return Blended(name, tuple(parts), method, work, dtype, measured)


def _key(seed: int, name: str, number: int) -> tuple[int, int]:
    """The key of the random numbers of a source of a tensor."""
    digest = hashlib.sha256(f"{seed}\0{number}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")


_NO_SUM = "the weights sum to 0, which normalize: divides by"


def _formula(
    method: str, shared: Mapping[str, Any], each: Sequence[Mapping[str, Any]], based: bool, name: str, seed: int
) -> methods.Formula:
    weights = tuple(e["weight"] for e in each if "weight" in e)
    if method == "linear":
        if shared["normalize"] and cancels(weights):
            raise CheckpointError(_NO_SUM)
        return methods.Linear(weights, shared["normalize"])
    if method == "passthrough":
        return methods.Scaled(each[0]["scale"])
    if method == "sce":
        return methods.SelectCalculateErase(shared["select_topk"])
    if method == "nearswap":
        return NearSwap(shared["t"])
    if method == "arcee_fusion":
        return ArceeFusion()
    if method.startswith("ram"):
        return AgentMerging(**shared)
    if method == "slerp":
        return methods.Directions("slerp", (shared["t"],))
    if method == "nuslerp":
        if cancels(weights) or abs(sum(weights)) < 1e-6:  # mergekit's bound, below which it takes the middle
            raise CheckpointError("the weights sum to 0, by which nuslerp divides")
        axis = None if shared["nuslerp_flatten"] else 0 if shared["nuslerp_row_wise"] else -1
        return methods.Directions("nuslerp", weights, based, axis)
    if method == "karcher":
        return methods.Directions("karcher", (), options=tuple(shared.items()))
    if method == "multislerp":
        if len(weights) == 1:
            return methods.Scaled(None)
        if shared["normalize_weights"] and cancels(weights):
            raise CheckpointError(_NO_SUM)
        return methods.Directions("multislerp", weights, based, None, tuple(shared.items()))
    if method == "model_stock":
        return methods.Directions("model_stock", (), False, -1 if shared["filter_wise"] else None)
    consensus = method in ("ties", "dare_ties", "breadcrumbs_ties", "della")
    if shared["normalize"] and not consensus and (cancels(weights) or abs(sum(weights)) < 1e-8):
        raise CheckpointError(_NO_SUM)
    chosen = tuple(_sparsifier(method, e, _key(seed, name, i)) for i, e in enumerate(each))
    return methods.TaskVectors(weights, shared["lambda"], shared["normalize"], consensus, shared["rescale"], chosen)


def _sparsifier(method: str, said: Mapping[str, Any], key: tuple[int, int]) -> methods.Sparsifier:
    density = said["density"]
    if method == "ties":
        return methods.Trim(density)
    if method.startswith("dare"):
        return methods.Drop(density, key)
    if method.startswith("breadcrumbs"):
        return methods.Outliers(density, said["gamma"])
    if method.startswith("della"):
        epsilon = said["epsilon"]
        if 0 < density < 1 and not 0 < density - epsilon <= density + epsilon < 1:
            raise CheckpointError(f"density {density} plus or minus epsilon {epsilon} must lie between 0 and 1")
        return methods.MagnitudeDrop(density, key, epsilon)
    return methods.Sparsifier()  # without an effect of density, as mergekit has it


def parameters_of(arrays: Mapping[str, BlendedArray]) -> Iterator[str]:
    """Lines for people: what each array got."""
    for name, a in arrays.items():
        told = ", ".join(f"{k}={v}" for k, v in a.parameters.items())
        yield f"{name}: {a.method}({told}) of {'; '.join(a.sources)}"
