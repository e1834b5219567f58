"""`config.json` beside arrays: the names of embeddings and of layers, and entries that follow arrays that change."""

from __future__ import annotations

import contextlib
import copy
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays.core.errors import CorruptCheckpoint, IncompleteCheckpoint
from ...arrays.core.formatting import count, some
from ..format.documents import Documents, edited
from ..rules.growing import GrownRows
from ..rules.lazy_tensors import Converted, Filled, Joined, Sliced, every
from . import layer_entries
from .tokenizer import ids_of, renumbered

TABLES = tuple(f"{n}.weight" for n in ("embed_tokens", "wte", "word_embeddings", "embed_in", "tokens_embed", "shared"))
"""Ends of the names of embeddings."""
HEADS = ("lm_head.weight", "embed_out.weight")
"""Ends of the names of heads, which a model may tie to its embedding and not store."""
LAYER = re.compile(r"(?:^|(?<=\.))(\d+)(?=\.)")
"""The number of the layer in the name of an array."""
BUFFER = re.compile(r"inv_freq$|masked_bias$|(?:^|\.)(?:attn|attention)\.bias$")
"""Arrays that a model computes by itself and some writers store: frequencies and masks."""
_EXPERT = re.compile(r"(?<=\.experts\.)(\d+)(?=\.)")
_OF_EXPERTS = re.compile(rf"{LAYER.pattern}.*\.experts\.")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ELSE = re.compile(r"vision|visual|audio|speech|encoder|mtp")  # in names of stacks that are not the layers of text
_AHEAD = "num_nextn_predict_layers"  # counts further layers, which predict later tokens
_SIZES = re.compile(r"size|dim|width|position|channels|labels|experts|n_embd|n_inner|n_ctx")  # names of such entries

Order = Sequence[tuple[dict[str, Any], int]]  # the configuration that describes each layer, and its number there


def is_embedding(name: str) -> bool:
    """Whether an array has a row for each token.

    >>> [is_embedding(n) for n in ("wte.weight", "lm_head.bias", "h.0.shared.weight", "wpe.weight")]
    [True, True, False, False]
    """
    return name.endswith((*TABLES, *HEADS, "lm_head.bias")) and LAYER.search(name) is None


def stands_for(head: str, names: Iterable[str]) -> str | None:
    """The embedding that stands for a head that is not stored, as it is the same.

    >>> stands_for("lm_head.weight", ["model.norm.weight", "model.embed_tokens.weight"])
    'model.embed_tokens.weight'
    """
    if not head.endswith(HEADS):
        return None
    # T5, whose embedding is called shared, scales what goes into a head that is tied.
    return next((n for n in names if n.endswith(TABLES[:-1]) and is_embedding(n)), None)


def config_of(documents: Mapping[str, Any], file: str = "config.json") -> dict[str, Any]:
    """The configuration of a Hugging Face model or adapter; nothing where there is none, or no JSON object."""
    config = documents.get(file)
    return config if isinstance(config, dict) else {}


def followed(documents: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> Mapping[str, Any]:
    """The documents of tensors made from others, with what of ``config.json`` follows from their shapes and names.

    ``after`` are made of the objects in ``before``. Entries that cannot follow are notes of the documents.
    """
    alike = before.keys() == after.keys() and all(before[n] is after[n] for n in before)
    if alike or not isinstance(documents, Documents) or "config.json" not in list(documents):
        return documents
    try:
        config, notes = following(documents.raw("config.json"), before, after)
    except (CorruptCheckpoint, IncompleteCheckpoint):  # told where it is read: arrays can be without it
        return documents
    (ids, needed), rows, moved = ids_of(documents), token_rows(after), _moved(before, after)
    shorter = 0 < rows < token_rows(before)
    if shorter and (cut := [t for t, i in ids.items() if i >= rows]):
        notes.append(f"tokenizer.json: has {count(len(cut), 'token')} beyond the {rows} rows here: {some(cut, 3)}")
    there = range(rows) if moved is None else moved
    if shorter or moved is not None:
        lost = (t for t in needed if t in ids and ids[t] not in there)
        notes += (f"tokenizer.json: {t!r}, {needed[t]}, has no row here" for t in lost)
    if moved is not None:
        if turned := [t for t, i in ids.items() if i < rows and moved.get(i) != i]:
            notes.append(f"tokenizer.json: {count(len(turned), 'token')} have other rows here: {some(turned, 3)}")
        was = {f"id {i}": i for i in set(range(token_rows(before))).difference(ids.values())} | ids
        now = {t: moved[i] for t, i in was.items() if i in moved}
        config, told = renumbered("config.json", config, was, now)
        notes += told
        if (name := "generation_config.json") in list(documents):
            with contextlib.suppress(CorruptCheckpoint, IncompleteCheckpoint):
                data, told = renumbered(name, documents.raw(name), was, now)
                documents = documents.edited(name, lambda _: data, told)
    return documents.edited("config.json", lambda _: config, notes)


def _moved(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[int, int] | None:
    """The rows of now by those of before, in embeddings that lost some or have another order; None in others."""
    tables, was = {id(t) for n, t in before.items() if is_embedding(n)}, np.arange(token_rows(before))
    try:
        found = [_origin_rows(t, tables) for n, t in after.items() if is_embedding(n)]
    except TypeError:
        return None
    if not found or np.array_equal((rows := found[0])[: len(was)], was):
        return None
    alike = all(np.array_equal(rows, other) for other in found)
    return {int(rows[new]): new for new in reversed(range(len(rows))) if rows[new] >= 0} if alike else None


def _origin_rows(tensor: Any, tables: Container[int]) -> np.ndarray:
    """The row of a table that each row of a tensor is, -1 for new ones. Raises `TypeError` where it is not known."""
    if id(tensor) in tables:
        return np.arange(tensor.shape[0])
    if isinstance(tensor, (Filled, GrownRows)):
        return np.full(tensor.shape[0], -1)
    if isinstance(tensor, Joined):
        parts = [_origin_rows(p, tables) for p in tensor.parts]
        return np.concatenate(parts) if tensor.axis == 0 else parts[0]
    if not isinstance(tensor, (Sliced, Converted)):
        raise TypeError(tensor.name)
    first = tensor.start[0] if isinstance(tensor, Sliced) else 0
    return _origin_rows(tensor.source, tables)[first : first + tensor.shape[0]]


def following(
    config: bytes, before: Mapping[str, Any], after: Mapping[str, Any], order: Order | None = None
) -> tuple[bytes, list[str]]:
    """(``config.json`` for tensors made from others, notes). ``order`` is that of all layers, where it is known."""
    notes: list[str] = []

    def change(told: dict[str, Any]) -> dict[str, Any]:
        out = copy.deepcopy(told)
        inner = layer_entries.inner(out)
        notes.extend(_layers(inner, before, after, order))
        notes.extend(_vocabulary(inner, before, after))
        notes.extend(_left_out(told | inner, before, after))
        notes.extend(_sizes(layer_entries.inner(told), before, after))
        return out

    return edited(config, change), notes


def untrue(config: bytes, arrays: Mapping[str, Any]) -> list[str]:
    """Notes of sizes in a configuration of other weights that these arrays do not have."""
    rows, stacks, notes = _rows(arrays), _stacks(arrays), list[str]()
    layers = max((len(numbers) for numbers in stacks.values()), default=0)

    def look(told: dict[str, Any]) -> dict[str, Any]:
        inner = layer_entries.inner(told)
        size, count = inner.get("vocab_size"), _count(inner)
        if rows and type(size) is int and size not in rows:
            has = some(rows, 3)
            notes.append(f"config.json: vocab_size is {size}, and the embeddings here have {has} rows")
        more = len(stacks) == 1 and count is not None and layers > inner[count] + (inner.get(_AHEAD) or 0)
        if count is not None and (more or inner[count] > layers > 0) and "num_hidden_groups" not in inner:
            notes.append(f"config.json: {count} is {inner[count]}, and there are {layers} layers here")
        return told

    edited(config, look)
    return notes


def _count(inner: Mapping[str, Any]) -> str | None:
    return next((k for k in layer_entries.COUNTS if type(inner.get(k)) is int), None)


def _stacks(names: Iterable[str], number: re.Pattern[str] = LAYER) -> dict[str, set[int]]:
    """The numbers of the layers of each stack, by what stands before them."""
    out: dict[str, set[int]] = {}
    for n in names:
        if found := number.search(n):
            out.setdefault(n[: found.start()], set()).add(int(found[1]))
    return out


def token_rows(arrays: Mapping[str, Any]) -> int:
    """The most rows that an embedding has; 0 where there is none."""
    return max(_rows(arrays), default=0)


def _layer_of(name: str) -> str:
    """The name of the layer of an array; nothing where it is of none."""
    return name[: found.end()] if (found := LAYER.search(name)) else ""


def _rows(arrays: Mapping[str, Any]) -> list[int]:
    return sorted({int(t.shape[0]) for n, t in arrays.items() if is_embedding(n) and t.shape})


def _origins(tensor: Any, known: Mapping[int, str]) -> set[str]:
    """Names of the known tensors that a tensor is made of."""
    return {known[id(t)] for t in every(tensor, known) if id(t) in known}


def _layers(
    inner: dict[str, Any], before: Mapping[str, Any], after: Mapping[str, Any], order: Order | None
) -> list[str]:
    key, n_layers, stacks = _count(inner), layer_entries.count(inner), _stacks(before)
    said = f"{key} {n_layers}" if key else f"{n_layers} layers"
    if not n_layers or not stacks:
        told = [k for k in inner if inner[k] and layer_entries.is_about_layers(k, inner)]
        changed = told and _stacks(after) != stacks
        return [f"config.json: see whether {told[0]!r} is right, which speaks of layers"] if changed else []
    fits = [s for s, numbers in stacks.items() if numbers == set(range(n_layers))]
    plain = ([s for s in fits if not _ELSE.search(s)] or fits) if not inner.get("is_encoder_decoder") else []
    now = _stacks(after)
    if order is None and len(plain) != 1:
        same = sorted(map(sorted, now.values())) == sorted(map(sorted, stacks.values()))
        return [] if same else [f"config.json: see whether its numbers of layers ({said}) are right"]
    made: dict[int, set[int]] = {j: set() for numbers in now.values() for j in numbers}
    towers = [s for s in sorted(now.keys() & stacks.keys()) if order is None and s != plain[0] and now[s] != stacks[s]]
    notes = [f"config.json: see whether it says how many layers there are of {s!r}, which were more" for s in towers]
    if order is None:
        made, stack, known = {}, plain[0], {id(t): n for n, t in before.items()}
        for n, t in after.items():
            origins = _origins(t, known) or {n}
            of_stack = [o for o in origins if o in before and o.startswith(stack)]
            if numbers := [int(m[1]) for o in of_stack if (m := LAYER.match(o, len(stack)))]:
                found = LAYER.search(n)
                made.setdefault(int(found[1]) if found else -1, set()).update(numbers)
        if -1 in made:  # layers joined in one array are of another library, which has other documents
            return notes
    if sorted(made) != list(range(len(made))) or not made:
        left = f"layers {some(sorted(made), 6)}, which key rules may number 0, 1, …" if made else "no layers"
        return [*notes, f"config.json: still says {said}, and there are {left}"]
    if order is None and all(len(numbers) == 1 for numbers in made.values()):
        order = [(dict(inner), next(iter(made[j]))) for j in range(len(made))]
        if [i for _, i in order] == list(range(n_layers)):
            return notes
    each = [n for n in after if "per_layer" in n and not LAYER.search(n)]
    notes += [f"config.json: other layers than before, and {n!r} has a part for each of those" for n in each[:1]]
    if order is not None:
        notes += layer_entries.renumber(inner, [order[j] for j in range(len(made))])
    elif len(made) != n_layers:
        notes += ["config.json: layers are made of several others, and entries about each layer are as they were"]
    inner |= dict.fromkeys([k for k in layer_entries.COUNTS if inner.get(k) == n_layers], len(made))
    return notes


def _vocabulary(inner: dict[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    rows, now = _rows(before), _rows(after)
    if rows == now or not now or type(size := inner.get("vocab_size")) is not int or (not rows and size in now):
        return []
    if len(now) == 1 and size in rows:
        inner["vocab_size"] = now[0]
        return []
    had = f"had {some(rows, 3)} rows, and have" if rows else "have"
    return [f"config.json: see whether vocab_size {size} is right: the embeddings {had} {some(now, 3)}"]


def _left_out(inner: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Notes of experts and of a head that the configuration wants and that are left out."""
    notes = []
    key = next((k for k in _EXPERTS if type(inner.get(k)) is int), None)
    if key is not None:
        every = set(range(inner[key]))
        was, now = (_stacks(arrays, _EXPERT) for arrays in (before, after))
        if few := next((s for s, n in now.items() if was.get(s) == every != n), None):
            notes.append(f"config.json: {key} is {inner[key]}, and {few!r} has the experts {some(sorted(now[few]), 6)}")
    known = {id(t): n for n, t in before.items()}
    of = {n: _origins(t, known) for n, t in after.items()}
    made: dict[str, set[str]] = {}  # the origins of the arrays of each layer, and of those of none
    for n, origins in of.items():
        made.setdefault(_layer_of(n), set()).update(origins or {n})
    mixtures = {_layer_of(n) for n in before if _OF_EXPERTS.search(n)}
    whole = {layer for layer, names in made.items() if any(map(_OF_EXPERTS.search, names | made.get("", set())))}
    bare = [p for p, names in made.items() if p and p not in whole and not mixtures.isdisjoint(map(_layer_of, names))]
    told = f"config.json: a layer of experts does not load without any, and none are in {some(bare, 3)}"
    notes += [told] if bare else []
    used = set().union(*of.values())
    left = [n for n in before if n not in used and n not in after]
    tied = inner.get("tie_word_embeddings")
    lost = [n for n in left if n.endswith(HEADS) and is_embedding(n) and not tied]
    ties = "does not tie" if tied is False else "does not say that it ties"
    notes += [f"config.json: {ties} the head to the embedding, and {n} is not here" for n in lost]
    layers = {_layer_of(n) for n in used} - {""}
    gone = [n for n in left if not BUFFER.search(n) and not _OF_EXPERTS.search(n)]
    gone = [n for n in gone if _layer_of(n) in layers or (n.endswith(TABLES) and is_embedding(n))]
    return notes + [f"config.json: arrays of the model are not here: {some(gone, 3)}"] * bool(gone)


def _sizes(inner: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Notes of entries that had the length of an array whose length is another now."""
    found: dict[str, list[str]] = {}
    for n in before.keys() & after.keys():
        old, new = tuple(before[n].shape), tuple(after[n].shape)
        if is_embedding(n) and old[1:] == new[1:]:
            continue
        if gone := Counter(old) - Counter(new) if sorted(old) != sorted(new) and len(old) == len(new) else None:
            for key, value in inner.items():
                if type(value) is int and value in gone and _SIZES.search(key):
                    found.setdefault(f"{key} is {value}", []).append(f"{n} {new}")
    return [
        f"config.json: {said}, and arrays here have other lengths: {some(sorted(held), 3)}"
        for said, held in found.items()
    ]
