"""Vocabularies: tokenizers joined, and the rows of embeddings brought into the order of the result's tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...arrays.core.errors import CheckpointError
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

    @classmethod
    def of(
        cls, said: Mapping[str, Any], documents: Mapping[ModelRef, Mapping[str, Any]], sizes: Mapping[ModelRef, int]
    ) -> Vocabulary:
        problems = Problems()
        held = {m: _tokens(str(m), d, sizes[m], problems) for m, d in documents.items()}
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
        files = {n: documents[donor].raw(n) for n in documents[donor] if n.startswith(_FILES)}  # type: ignore[attr-defined]
        added: dict[str, dict[str, Any]] = {}
        if source == "union":
            others = [m for m in held if m != donor]
            plain = {t: None for m in others for t in held[m][0] if t not in held[m][1]}
            special = {t: info for m in others for t, info in held[m][1].items()}
            added = {t: _PLAIN for t in plain if t not in special and t not in held[donor][0]}
            added |= {t: info for t, info in special.items() if t not in held[donor][0]}
        added |= {t: _PLAIN for t in chosen if t not in held[donor][0] and t not in added}
        tokens = dict(held[donor][0])
        end = max(tokens.values(), default=-1) + 1
        tokens |= {t: end + i for i, t in enumerate(added)}
        size = end + len(added)
        if pad:
            size = -(-size // pad) * pad
        if added:
            files = _extended(files, {t: {**info, "id": tokens[t], "content": t} for t, info in added.items()})
        return cls(tokens, {m: h[0] for m, h in held.items()}, chosen, size, files)

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


_FILES = ("tokenizer", "special_tokens_map", "added_tokens", "vocab", "merges")
_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}


def _tokens(
    model: str, documents: Mapping[str, Any], size: int, problems: Problems
) -> tuple[dict[str, int], dict[str, dict[str, Any]]]:
    """(tokens with their rows, those of them that were added and how); tokens beyond the embeddings are left out."""
    said = documents.get("tokenizer.json") if "tokenizer.json" in documents else None
    if not isinstance(said, Mapping) or not isinstance(said.get("model"), Mapping):
        problems.append(f"{model} has no tokenizer.json")
        return {}, {}
    vocab = said["model"].get("vocab", {})
    tokens = dict(vocab) if isinstance(vocab, Mapping) else {t: i for i, (t, *_) in enumerate(vocab)}
    added = {a["content"]: a for a in said.get("added_tokens") or ()}
    tokens |= {t: a["id"] for t, a in added.items()}
    tokens = {t: i for t, i in sorted(tokens.items(), key=lambda item: item[1]) if i < size}
    return tokens, {t: {k: a[k] for k in _PLAIN if k in a} for t, a in added.items() if t in tokens}


def _extended(files: Mapping[str, bytes], added: Mapping[str, dict[str, Any]]) -> dict[str, bytes]:
    """The documents of a tokenizer with more tokens."""
    out = dict(files)
    told = json.loads(out["tokenizer.json"])
    told["added_tokens"] = [*(told.get("added_tokens") or ()), *added.values()]
    out["tokenizer.json"] = json.dumps(told, ensure_ascii=False, indent=2).encode()
    if "tokenizer_config.json" in out:
        said = json.loads(out["tokenizer_config.json"])
        if "added_tokens_decoder" in said:
            for a in added.values():
                said["added_tokens_decoder"][str(a["id"])] = {k: v for k, v in a.items() if k != "id"}
            out["tokenizer_config.json"] = json.dumps(said, ensure_ascii=False, indent=2).encode()
    return out
