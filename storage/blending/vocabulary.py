"""Vocabularies: tokenizers joined, and the rows of embeddings brought into the order of the result's tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...arrays.core.errors import CheckpointError
from ...arrays.core.formatting import count, some
from ..transform.tokenizer import FILES, PLAIN, TEMPLATE, Tokenizer
from ..virtual.token_rows import MEAN, ZERO, Mean, TokenRows
from .config import ModelRef, Problems


@dataclass
class Vocabulary:
    """The tokens of the result, and of each model."""

    tokens: dict[str, int]
    models: dict[ModelRef, dict[str, int]]
    chosen: Mapping[str, Mapping[str, Any]]
    size: int
    documents: dict[str, bytes] = field(default_factory=dict)  # of the tokenizer
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, said: Mapping[str, Any], documents: Mapping[ModelRef, Mapping[str, Any]], sizes: Mapping[ModelRef, int]
    ) -> Vocabulary:
        problems = Problems()
        held = {m: _tokenizer(str(m), d, sizes[m], problems) for m, d in documents.items()}
        base = next(iter(held))
        source = said.get("source") or "union"
        donor = base
        if source not in ("union", "base"):
            donor = ModelRef.of(source)
            if donor not in held:
                problems.append(f"tokenizer: {source} is none of the models that are blended")
        chosen = said.get("tokens") or {}
        for token, s in chosen.items():
            problems.unknown(f"tokens: {token!r}", s, ("source", "force"))
            row = s.get("source") if isinstance(s, Mapping) else None
            if isinstance(row, Mapping) and "kind" in row:
                if row["kind"] not in ("zero", "model_token"):
                    problems.append(f"tokens: {token!r}: kind: is zero or model_token, got {row['kind']!r}")
                elif row["kind"] == "model_token" and not row.get("model"):
                    problems.append(f"tokens: {token!r}: model_token needs model:")
        pad = said.get("pad_to_multiple_of")
        if pad is not None and (type(pad) is not int or pad < 1):
            problems.append(f"pad_to_multiple_of: is a positive number, got {pad!r}")
        problems.refuse("the vocabularies cannot be joined")
        named = [n for n in documents[donor] if n.startswith((*FILES, TEMPLATE))]
        files = {n: documents[donor].raw(n) for n in named}  # type: ignore[attr-defined]
        own = held[donor]
        others = [t for m, t in held.items() if m != donor] if source == "union" else []
        special = {t: None for o in others for t in o.added if t not in own.tokens}
        special |= {t: how for o in reversed(others) for t, how in o.added.items() if t in special}  # the first counts
        joined: dict[str, Tokenizer] = {}
        left: dict[str, Tokenizer] = {}
        for other in others:
            fresh = [t for t in other.tokens if not any(t in held for held in (own.tokens, special, joined, left))]
            (joined if own.takes(other) else left).update(dict.fromkeys(fresh, other))
        added = dict.fromkeys(left, PLAIN) | special
        added |= {t: PLAIN for t in chosen if t not in own.tokens and t not in added and t not in joined}
        end = own.end
        tokens = own.tokens | {t: end + i for i, t in enumerate([*joined, *added])}
        if added and not joined and own.has_gaps:
            problems.append(f"{donor} has ids without tokens, so that new tokens would get other ids than here")
            problems.refuse("the vocabularies cannot be joined")
        size = end + len(joined) + len(added)
        if pad:
            size = -(-size // pad) * pad
        templates = [n for n in documents[base] if n.startswith(TEMPLATE)]
        notes = [
            f"{n}: left out, as the tokenizer is that of {donor}, which has none" for n in templates if n not in files
        ]
        notes += _notes(str(donor), own, others, len(joined), list(left.values()))
        for m, other in held.items():
            if gone := sorted(other.tokens.keys() - tokens.keys()):
                some_of = f"{count(len(gone), 'token')} of {m}, whose rows are left out: {some(gone, 3)}"
                notes.append(f"tokenizer.json: without {some_of}")
        if joined or added or own.beyond:
            scores = {t: score for o in reversed(others) for t, score in o.scores().items()} | own.scores()
            files, more = own.extended(files, tokens, added, scores)
            notes += more
        return cls(tokens, {m: t.tokens for m, t in held.items()}, chosen, size, files, notes)

    def aligned(self, name: str, parts: Mapping[ModelRef, Any], base: ModelRef | None) -> dict[ModelRef, Any]:
        """The tables of all models with the rows of the result's tokens."""
        models = list(parts)
        kinds = {p.dtype for p in parts.values()}
        dtype = kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)
        named = sorted(self.tokens.items(), key=lambda item: item[1])
        found: dict[ModelRef, tuple[list[int], list[int], dict[int, Mean]]] = {
            m: ([ZERO] * self.size, [0] * self.size, {}) for m in models
        }
        for token, i in named:
            said = self.chosen.get(token) or {}
            own = {m: self.models[m][token] for m in models if token in self.models[m]}
            default = self._default(token, said, own, models, base)
            for m in models:
                tables, rows, means = found[m]
                if m in own and not said.get("force"):
                    tables[i], rows[i] = models.index(m), own[m]
                elif len(default) == 1:
                    tables[i], rows[i] = default[0]
                elif default:
                    tables[i], means[i] = MEAN, (tuple((*d, 1) for d in default), len(default))
        out = {}
        for m, (tables, rows, means) in found.items():
            whole = TokenRows(name, tuple(parts.values()), tuple(tables), tuple(rows), tuple(means.items()), dtype)
            out[m] = self._padded(whole) if self.size > len(named) else whole
        return out

    def _padded(self, table: TokenRows) -> TokenRows:
        """The table with the mean of its other rows where no token has one."""
        taken, means = set(self.tokens.values()), dict(table.means)
        rows = [
            means.get(i, (((table.tables[i], table.rows[i], 1),), 1)) for i in sorted(taken) if table.tables[i] != ZERO
        ]
        unit = math.lcm(*(count for _, count in rows))
        every = tuple((t, row, times * unit // count) for summed, count in rows for t, row, times in summed)
        rest = [i for i in range(len(table.rows)) if i not in taken]
        tables = tuple(t if i in taken else MEAN for i, t in enumerate(table.tables))
        return replace(table, tables=tables, means=(*table.means, *((i, (every, unit * len(taken))) for i in rest)))

    def _default(
        self,
        token: str,
        said: Mapping[str, Any],
        own: Mapping[ModelRef, int],
        models: Sequence[ModelRef],
        base: ModelRef | None,
    ) -> tuple[tuple[int, int], ...]:
        """(table, row) of the embedding for a model that lacks a token: none is zero, several are averaged."""
        source = said.get("source")
        if source is None:
            if len(own) == 1 or base not in own:
                return tuple((models.index(m), row) for m, row in own.items())
            return ((models.index(base), own[base]),)  # type: ignore[arg-type,index]
        if isinstance(source, Mapping) and source.get("kind") == "zero":
            return ()
        model = ModelRef.of(source["model"] if isinstance(source, Mapping) and "kind" in source else source)
        if model not in models:
            raise CheckpointError(f"tokens: {token!r}: {model} is none of the models that are blended")
        held = self.models[model]
        row = source.get("token_id") if isinstance(source, Mapping) else None
        if row is None:
            row = held.get(source.get("token", token) if isinstance(source, Mapping) else token)
        if type(row) is not int or not 0 <= row <= max(held.values(), default=-1):
            raise CheckpointError(f"tokens: {token!r}: {model} has no such token")
        return ((models.index(model), row),)


def _tokenizer(model: str, documents: Mapping[str, Any], size: int, problems: Problems) -> Tokenizer:
    said = documents.get("tokenizer.json") if "tokenizer.json" in documents else None
    if not isinstance(said, Mapping) or not isinstance(said.get("model"), Mapping):
        problems.append(f"{model} has no tokenizer.json")
        said = {"model": {}}
    return Tokenizer.of(said, size)


def _notes(base: str, own: Tokenizer, others: Sequence[Tokenizer], joined: int, left: Sequence[Tokenizer]) -> list[str]:
    """Of ordinary tokens of other models: those that joined the vocabulary of the base, and those that could not."""
    notes = []
    if own.beyond:
        notes.append(f"tokenizer.json: without {some(sorted(own.beyond), 3)}, for which {base} has no rows")
    if joined:
        after = "" if own.kind == "WordLevel" else ", which may split a text otherwise than before"
        notes.append(f"tokenizer.json: {count(joined, 'token')} joined the vocabulary of {base}{after}")
    if left:
        why = "its merges cannot be joined" if own.kind == "BPE" else f"tokens of {left[0].kind} are none of {own.kind}"
        notes.append(
            f"tokenizer.json: {count(len(left), 'ordinary token')} became added tokens of {base}, as {why}: wherever a "
            "text has their characters, within words too, they come before all others, so that texts are split "
            "otherwise than before; tokenizer_source: base leaves them out"
        )
    if (joined or left) and not all(map(own.splits_as, others)):
        notes.append(f"tokenizer.json: words are those of {base}; tokens that it never makes of a text are not found")
    return notes
