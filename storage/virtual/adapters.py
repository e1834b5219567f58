"""LoRA adapters of PEFT applied to a base: the node of the expression."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...arrays.core.errors import CheckpointError, CheckpointKeyError
from ..checkpoint.checkpoint import Checkpoint
from ..format import dtypes
from ..format.documents import Documents
from ..loading.report import listed
from ..rules.lazy_tensors import Converted
from ..transform.model_config import config_of, followed, is_embedding, stands_for, token_rows
from ..transform.tokenizer import FILES, TEMPLATE, VOCABULARIES, ids_of
from .computed import LowRankSum
from .expressions import NODES, Node, computed_from, flag, index, number, refuse_scaled, rows_of, text, texts
from .tied import with_own_head
from .token_rows import TokenRows

TURNED = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}
"""Types of models with matrices that transformers stores as (in, out), those of its ``Conv1D``."""
TURNED_MODULES = {"c_attn", "q_attn", "c_proj", "c_fc"}
"""The last part of the names of these matrices' modules."""


def is_turned_model(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` describes such a model, or one of which a part is one."""
    parts = [config, *(v for v in config.values() if isinstance(v, Mapping))]
    return any(str(p.get("model_type")) in TURNED for p in parts)


ADAPTER = re.compile(r"(?:base_model\.model\.)?(.+)\.(lora(?:_embedding)?)_([AB])(?:\.default)?(?:\.weight)?\Z")


@dataclass(frozen=True)
class Lora(Node):
    """``W + scale * factor * B @ A`` of a PEFT adapter. ``factors`` has those of modules that have their own."""

    scale: float
    factor: float
    factors: tuple[tuple[str, float], ...]
    transposed: bool  # weights are stored as (in, out), and not (out, in)
    copies: tuple[str, ...] | None  # modules of which it trained a copy; None: all that it trained whole
    tokens: tuple[tuple[str, tuple[int, ...]], ...]  # rows of embeddings that it trained, by the end of the module

    kind = "lora"
    operands = (2, 2)
    params: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "scale": number,
        "factor": number,
        "factors": rows_of(text, number),
        "transposed": flag,
        "copies": lambda x: None if x is None else texts(x),
        "tokens": rows_of(text, lambda x: tuple(index(i) for i in x)),
    }

    def apply(self, made: Sequence[Checkpoint]) -> Checkpoint:
        base, adapter = made
        before = {n: a.tensor for n, a in base.arrays.items()}
        pairs: dict[tuple[str, str], dict[str, str]] = {}
        held: dict[str, tuple[str, str]] = {}
        for name in adapter:
            found = ADAPTER.match(name)
            if found is not None:
                pairs.setdefault((found[1], found[2]), {})[found[3]] = name
            elif (place := _place(name))[1] != "old":
                held[name] = place
        factored = [n for module, _ in pairs for n in (f"{module}.weight", module)]
        refuse_scaled(base, {*factored, *(t for t, _ in held.values())})
        alone = [t for t, what in held.values() if what == "copy" or (what == "whole" and self._is_copy(t))]
        base = with_own_head(base, alone, [f"{module}.weight" for module, _ in pairs])
        arrays = {n: a.tensor for n, a in base.arrays.items()}
        parted = [n for n in arrays if n not in before and n not in alone]  # heads that were tied
        said = {t for t, _ in held.values()}
        tied = [n for n, (t, _) in held.items() if t not in arrays and stands_for(t, arrays) in said]  # told twice
        strange = [n for n, (t, _) in held.items() if t not in arrays and n not in tied]
        lines = listed("keys of the adapter that are no part of a LoRA", [*strange, *adapter.skipped])
        trained = [*alone, *(t for t, what in held.values() if what == "rows")]
        if self.scale != 1 and trained:
            raise CheckpointError(
                f"scale={self.scale} has no meaning for {trained[:4]}, which the adapter trained whole"
            )
        own, config = dict(self.factors), config_of(base.documents)
        turned: dict[bool, dict[str, bool]] = {False: {}, True: {}}  # of square matrices or not: stored as (in, out)?
        for name, (target, what) in sorted(held.items(), key=lambda item: _ORDER.index(item[1][1])):
            if name in strange or name in tied:
                continue
            new, old = adapter[name].tensor, arrays[target]
            new = new if new.dtype == old.dtype else Converted(target, new, old.dtype)
            tokens = is_embedding(target)
            if what == "rows":
                rows = next((rows for m, rows in self.tokens if target.removesuffix(".weight").endswith(m)), ())
                fits = (len(rows), *old.shape[1:]) == tuple(new.shape) and max(rows, default=0) < old.shape[0]
                if fits:  # of the module that a tied head shares, too
                    for n in (target, *(h for h in parted if stands_for(h, before) == target)):
                        arrays[n] = _with_rows(n, arrays[n], new, rows)
                    continue
            else:
                fits = tuple(new.shape[tokens:]) == tuple(old.shape[tokens:])
            if not fits:
                lines.append(f"  {name} of the adapter has the shape {new.shape}, and {target} {old.shape}")
            arrays[target] = new
        for (module, form), ab in pairs.items():
            target = next((n for n in (f"{module}.weight", module) if n in base), None)
            if len(ab) < 2:
                lines.append(f"  {module} has {next(iter(ab.values()))!r} alone, without its other factor")
            elif target is None:
                lines.append(f"  {module} is no array of the base, nor is '{module}.weight'")
            elif (target, "rows") in held.values():
                lines.append(f"  {module} has factors and tokens of its own (trainable_token_indices)")
            else:
                a, b, w = adapter[ab["A"]].tensor, adapter[ab["B"]].tensor, arrays[target]
                swapped = form == "lora_embedding" or self._is_turned(config, module, w, b, a)
                if form == "lora":
                    turned[len(w.shape) == 2 and w.shape[0] == w.shape[1]][target] = swapped
                if why := _misfit(target, w, a, b, swapped):
                    lines.append(f"  {why}")
                else:
                    arrays[target] = LowRankSum(target, w, (a, b), self.scale * own.get(module, self.factor), swapped)
        lines += _uneven(before, arrays)
        others = {} if is_turned_model(config) else {swapped: n for n, swapped in turned[False].items()}
        lines += [
            f"  {n} is square, {others[not swapped]} is not, and fan_in_fan_out does not fit both; give the base its "
            "config.json, or correct the flag in adapter_config.json"
            for n, swapped in turned[True].items()
            if others and swapped not in others
        ]
        if lines or not (pairs or held):
            lines = lines or ["  the adapter has no array"]
            raise CheckpointKeyError("\n".join([f"{adapter.path} does not fit {base.path}; nothing was read", *lines]))
        documents = _with_tokenizer(base.documents, adapter.documents, token_rows(before), token_rows(arrays))
        return computed_from(self, base, arrays, documents=followed(documents, before, arrays))

    def _is_copy(self, target: str) -> bool:
        """Whether the adapter trained a copy of a module, which is tied to no other (``modules_to_save``)."""
        module = target.rpartition(".")[0]
        return self.copies is None or any(module.endswith(m) for m in self.copies)

    def _is_turned(self, config: Mapping[str, Any], module: str, w: Any, b: Any, a: Any) -> bool:
        """Whether a weight is stored as (in, out), in a model of this ``config.json``. Its shape says so, or PEFT's
        ways do: these go by the kind of the layer, which overrides the one flag of the adapter."""
        if all(len(x.shape) == 2 for x in (w, b, a)) and w.shape[0] != w.shape[1]:
            shape, product = tuple(w.shape), (b.shape[0], a.shape[1])
            return shape == product[::-1] if shape in (product, product[::-1]) else self.transposed
        if is_turned_model(config):
            return module.rpartition(".")[2] in TURNED_MODULES
        return self.transposed and "model_type" not in config


_PARTS = {
    ".modules_to_save.default.": "copy",
    ".modules_to_save.": "copy",
    ".base_layer.": "base",
    ".original_module.": "old",
}
_ORDER = ("whole", "base", "copy", "rows")  # each in place of those before it
_ROWS = ".trainable_tokens_delta"


def _place(name: str) -> tuple[str, str]:
    """(the array of the base for one that PEFT saves beside factors, its part there).

    >>> _place("base_model.model.embed.modules_to_save.weight"), _place("wte.token_adapter.trainable_tokens_delta")
    (('embed.weight', 'copy'), ('wte.weight', 'rows'))
    """
    plain = name.removeprefix("base_model.model.").replace(".token_adapter", "")
    if plain.removesuffix(".default").endswith(_ROWS):
        return f"{plain.partition(_ROWS)[0]}.weight", "rows"
    part = next((p for p in _PARTS if p in plain), None)
    return (plain, "whole") if part is None else (plain.replace(part, "."), _PARTS[part])


def _with_tokenizer(documents: Any, own: Any, before: int, rows: int) -> Any:
    """The documents of a base with the tokenizer that an adapter brings, where the embeddings have a row for each of
    its tokens. ``before`` and ``rows``: those of the embeddings without the adapter, and with it."""
    if not isinstance(documents, Documents) or not isinstance(own, Documents) or not rows:
        return documents
    found = {n: own.raw(n) for n in own if n.startswith((*FILES, TEMPLATE))}
    had = [n for n in documents if n.startswith(FILES) or (n.startswith(TEMPLATE) and n in found)]
    if not any(n.startswith(VOCABULARIES) for n in found):
        why = f"tokenizer: the embeddings have {rows} rows, not {before}, and the adapter brings no tokenizer"
        return documents.replaced((), {}, [why] if had and rows != before else ())
    if (end := max(ids_of(own)[0].values(), default=-1)) >= rows:
        why = f"tokenizer: that of the base, as the one of the adapter has the id {end}, and the embeddings {rows} rows"
        return documents.replaced((), {}, [why])
    other = [n for n in found if n not in had or documents.raw(n) != found[n]]
    note = f"{', '.join(sorted(other))}: of the adapter, in place of the base's tokenizer"
    return documents.replaced(had, found, [note]) if other else documents


def _with_rows(name: str, table: Any, new: Any, rows: Sequence[int]) -> TokenRows:
    """A table with some rows of another."""
    tables, places = [0] * table.shape[0], list(range(table.shape[0]))
    for i, row in enumerate(rows):
        tables[row], places[row] = 1, i
    return TokenRows(name, (table, new), tuple(tables), tuple(places), (), table.dtype)


def _uneven(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Faults of embeddings of which not all have the rows that some got."""
    names = [n for n in after if is_embedding(n) and after[n].shape]
    was = {n: before.get(n, before.get(str(stands_for(n, before)))) for n in names}
    new = [n for n, table in was.items() if table is not None and after[n].shape[0] != table.shape[0]]
    old = [n for n in names if new and after[n].shape[0] != after[new[0]].shape[0]]
    return [
        f"  {new[0]} has {after[new[0]].shape[0]} rows in the adapter, and {n}, which it does not hold, "
        f"{after[n].shape[0]}; apply it to the base after resize_token_embeddings({after[new[0]].shape[0]})"
        for n in old
    ]


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


NODES[Lora.kind] = Lora
