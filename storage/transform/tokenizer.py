"""``tokenizer.json``: its tokens, more of them in the way that its model takes, and entries that name them."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...arrays.core.errors import CheckpointError
from ...arrays.core.formatting import some
from ..base.malformed import malformed
from ..format.documents import edited

PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
FILES = ("tokenizer", "special_tokens_map", "added_tokens", "vocab", "merges", "spiece.model", "sentencepiece")
"""Beginnings of the names of a tokenizer's documents."""
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab", "spiece.model", "sentencepiece")
"""Beginnings of the names of those that hold its tokens."""
TEMPLATE = "chat_template"
_OLDER = ("added_tokens.json", "vocab", "merges", "tokenizer.model", "spiece.model", "sentencepiece")
_IDS = re.compile(
    r"_token_(id|index)(s|es)?$|suppress_tokens$|^(bad|force)_words_ids$|^(sequence_bias|forced_decoder_ids)$"
    r"|^(bos|eos|pad|unk|mask)_index$|^newline_id$|^(im|image|slice|audio_stream)_(start|end|patch|newline|bos|eos)_id$"
    r"|^(lang|task|text_decoder_lang)_to_(code_)?id$|^vocabulary_map$"
)
"""Entries of configurations that name tokens."""
_SEQUENCES = ("bad_words_ids", "force_words_ids", "sequence_bias")
_ROWS = {"sequence_bias": 0, "forced_decoder_ids": 1}  # the place of the ids in rows with other things
_MAY_LACK = re.compile(
    r"^(pad|bos|eos|sep|cls|mask|unk|decoder_start|forced_[be]os)_token_id$|suppress_tokens$|^(bad|force)_words_ids$"
    r"|^(sequence_bias|forced_decoder_ids|vocabulary_map)$|_to_(code_)?id$"
)
"""Those that transformers takes without some token; for others its classes have a default, which is another token."""
_ELSEWHERE = re.compile(
    r"(t2u|(tts_)?codec|codebook|vocoder)_|(vision|audio|speech|depth_decoder|(code|token)2wav)_config$"
)
"""Those about other vocabularies, such as units of sound."""
_RULES = ("normalizer", "pre_tokenizer")  # members that say which pieces a text may have


@dataclass(frozen=True)
class Tokenizer:
    """The tokens of a model that have a row of its embeddings, those of them that were added, and how, and the tokens
    without a row."""

    said: Mapping[str, Any]
    tokens: dict[str, int]
    added: dict[str, dict[str, Any]]
    beyond: frozenset[str]
    needed: dict[Any, str]  # those that it makes of texts whatever these say, and why; a number is of no piece

    @classmethod
    def of(cls, said: Mapping[str, Any], size: int) -> Tokenizer:
        vocab = _vocab_of(said)
        tokens = dict(vocab) if isinstance(vocab, Mapping) else {t: i for i, (t, *_) in enumerate(vocab)}
        added = _added(said)
        end = 0
        for t in added:  # libraries count these, whatever ids the file says
            end = max(end, tokens.setdefault(t, max(len(vocab), end)) + 1)
        kept = {t: i for t, i in sorted(tokens.items(), key=lambda item: item[1]) if i < size}
        how = {t: {k: a[k] for k in PLAIN if k in a} for t, a in added.items() if t in kept}
        return cls(said, kept, how, frozenset(tokens.keys() - kept.keys()), _needed(said))

    @property
    def kind(self) -> str:
        """The type of the model, which older files do not name."""
        model = self.said["model"]
        shapes = {"merges": "BPE", "max_input_chars_per_word": "WordPiece", "unk_id": "Unigram"}
        return model.get("type") or next((v for k, v in shapes.items() if k in model), "WordLevel")

    @property
    def end(self) -> int:
        """The id of the next token."""
        return max(self.tokens.values(), default=-1) + 1

    @property
    def has_gaps(self) -> bool:
        """Whether libraries would give the next added token another id: they count tokens."""
        names = {t if isinstance(t, str) else t[0] for t in self.said["model"].get("vocab", {})}
        vocab = len([t for t in self.tokens if t not in self.added or t in names])
        return max(vocab, *(self.tokens[t] + 1 for t in self.added), 0) != self.end

    def takes(self, other: Tokenizer) -> bool:
        """Whether ordinary tokens of another one can join the vocabulary: it has no merges, and pieces mean the
        same."""
        if self.kind != other.kind or self.kind not in ("WordLevel", "WordPiece", "Unigram"):
            return False
        prefixes = [t.said["model"].get("continuing_subword_prefix") for t in (self, other)]
        return prefixes[0] == prefixes[1] and (self.kind != "Unigram" or self.end == len(self.tokens))

    def splits_as(self, other: Tokenizer) -> bool:
        """Whether both make the same words of a text, of which their models make tokens."""
        return all(self.said.get(k) == other.said.get(k) for k in _RULES)

    def scores(self) -> dict[str, float]:
        """The scores of the pieces of a Unigram model."""
        vocab = self.said["model"].get("vocab")
        return {} if isinstance(vocab, Mapping) else dict(vocab or ())

    def extended(
        self,
        files: Mapping[str, bytes],
        tokens: Mapping[str, int],
        added: Mapping[str, Mapping[str, Any]],
        scores: Mapping[str, float],
    ) -> tuple[dict[str, bytes], list[str]]:
        """(its documents with all ``tokens``, of which some were ``added``; notes). The others are in the vocabulary,
        with ``scores``."""
        out = dict(files)
        told = json.loads(out["tokenizer.json"])
        model = told["model"]
        ordered = sorted(tokens.items(), key=lambda item: item[1])
        if len(tokens) > len(self.tokens) + len(added):
            # Tokens that were added are in the vocabulary too, so that libraries do not number them anew.
            least = min(self.scores().values(), default=0.0)
            by_score = isinstance(model["vocab"], list)
            model["vocab"] = [[t, scores.get(t, least)] for t, _ in ordered] if by_score else dict(ordered)
        elif self.beyond:
            vocab = model["vocab"]
            kept = [row for row in vocab if row[0] not in self.beyond] if isinstance(vocab, list) else None
            model["vocab"] = kept or {t: i for t, i in vocab.items() if t not in self.beyond}
        for token, why in self.needed.items():
            again = token == model.get("unk_token") and isinstance(model["vocab"], dict) and token in model["vocab"]
            if isinstance(token, int) or (token in self.beyond and not again):
                raise CheckpointError(f"tokenizer.json: {token!r}, {why}, has no row")
        if self.beyond and "merges" in model:
            model["merges"] = [m for m in model["merges"] if not self.beyond.intersection(_made_of(m))]
        more = [{"id": tokens[t], "content": t, **how} for t, how in added.items()]
        own = [a | {"id": tokens[t]} for t, a in _added(told).items() if t not in self.beyond]
        told["added_tokens"] = own + more
        out["tokenizer.json"] = json.dumps(told, ensure_ascii=False, indent=2).encode()
        if "tokenizer_config.json" in out:
            said = json.loads(out["tokenizer_config.json"])
            if (decoder := said.get("added_tokens_decoder")) is not None:
                lost = {k for k, a in decoder.items() if a.get("content") in self.beyond}
                new = {str(a["id"]): {k: v for k, v in a.items() if k != "id"} for a in more}
                said["added_tokens_decoder"] = {k: v for k, v in decoder.items() if k not in lost} | new
                out["tokenizer_config.json"] = json.dumps(said, ensure_ascii=False, indent=2).encode()
        older = [n for n in out if n.startswith(_OLDER) and (model["vocab"] != self.said["model"].get("vocab"))]
        for n in older:
            del out[n]
        return out, [f"{', '.join(older)}: left out, as they do not have the tokens of tokenizer.json"] if older else []


def _vocab_of(said: Any) -> Any:
    """The vocabulary of a ``tokenizer.json``: ids by token, or pieces with scores. Raises `CheckpointError` for what is
    no tokenizer."""
    with malformed("tokenizer.json is no tokenizer, with a vocabulary of tokens and their ids", error=CheckpointError):
        vocab, added = said["model"].get("vocab", {}), said.get("added_tokens") or []
        if isinstance(vocab, list):
            fits = all(isinstance(t, str) and type(score) in (int, float) for t, score in vocab)
        else:
            fits = all(type(i) is int and i >= 0 for i in vocab.values())
        if not fits or any(not isinstance(a["content"], str) or type(a["id"]) is not int for a in added):
            raise ValueError("a token has no text, or no id")
    return vocab


def _needed(said: Mapping[str, Any]) -> dict[Any, str]:
    model, processor = said["model"], said.get("post_processor") or {}
    vocab, at, unknown = model.get("vocab"), model.get("unk_id"), model.get("unk_token")
    if isinstance(vocab, list) and type(at) is int:
        unknown = vocab[at][0] if at in range(len(vocab)) else at
    put: list[str] = []
    with malformed("tokenizer.json is no tokenizer: its post_processor is damaged", error=CheckpointError):
        for each in processor.get("processors") or [processor]:
            put += (t for s in (each.get("special_tokens") or {}).values() for t in s["tokens"])
            put += (each[key][0] for key in ("sep", "cls") if each.get(key))
        needed = dict.fromkeys(put, "which it puts into texts")
        return needed if unknown is None else needed | {unknown: "that of what is unknown"}


def ids_of(documents: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, str]]:
    """(the tokens of a model's ``tokenizer.json``, those that it always needs); none of what is missing or damaged."""
    try:
        made = Tokenizer.of(documents["tokenizer.json"], sys.maxsize)
        return made.tokens, made.needed
    except (CheckpointError, LookupError, TypeError, ValueError, AttributeError):
        return {}, {}


def renumbered(
    file: str, config: bytes, before: Mapping[str, int], after: Mapping[str, int]
) -> tuple[bytes, list[str]]:
    """(a configuration whose ids are those of the same tokens in another tokenizer, notes)."""
    named, taken = ({i: t for t, i in ids.items()} for ids in (before, after))
    gone: dict[str, dict[str, None]] = {}  # tokens that are not there any more, by the entries that go without them
    notes: list[str] = []

    def new(key: str, value: Any) -> Any:
        """The id of now; None where there is none any more."""
        token = named.get(value) if type(value) is int else None
        if token in after:
            return after[token]
        if token is not None and _MAY_LACK.search(key):
            gone.setdefault(key, {})[token] = None
            return None
        if token is not None:
            notes.append(f"{file}: {key} is still {value}, which was {token!r}, a token that is not there any more")
        elif type(value) is int and value in taken:
            notes.append(f"{file}: {key} is still {value}, which was no token and is {taken[value]!r} now")
        return value

    def moved(key: str, value: Any) -> Any:
        if isinstance(value, dict) and key == "sequence_bias":  # by tuples of ids, which are texts in JSON
            held = [(moved(key, [int(i) for i in re.findall(r"\d+", ids)]), bias) for ids, bias in value.items()]
            return {str(tuple(ids)): bias for ids, bias in held if ids}
        if isinstance(value, dict):
            return {name: i for name, held in value.items() if (i := new(key, held)) is not None}
        if not isinstance(value, list):
            return new(key, value)
        nested = bool(value) and isinstance(value[0], list)
        if nested and (at := _ROWS.get(key)) is not None:
            rows = [(row, moved(key, row[at])) for row in value]
            return [[*row[:at], x, *row[at + 1 :]] for row, x in rows if row[at] is None or x not in (None, [])]
        found = [moved(key, x) for x in value]
        whole = nested or key not in _SEQUENCES or None not in found  # or a sequence that never comes
        return [x for x in found if whole and x not in (None, [])]

    def of(node: dict[str, Any]) -> dict[str, Any]:
        out = dict(node)
        for k, v in node.items():
            with contextlib.suppress(TypeError, LookupError):  # what has another form was never read
                if _IDS.search(k) and not _ELSEWHERE.match(k):
                    out[k] = None if (found := moved(k, v)) in ([], {}) else found  # transformers refuses empty ones
                elif isinstance(v, dict) and not _ELSEWHERE.match(k):
                    out[k] = of(v)
        return out

    out = edited(config, of)
    told = (f"{file}: {key} is without {some(map(repr, lost), 3)}, no tokens any more" for key, lost in gone.items())
    return out, [*dict.fromkeys(notes), *told]


def _added(said: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The added tokens; of one that is listed twice the first counts."""
    out: dict[str, dict[str, Any]] = {}
    for a in said.get("added_tokens") or ():
        out.setdefault(a["content"], a)
    return out


def _made_of(merge: Any) -> Iterable[str]:
    """The tokens of a merge: two, and the one that they become."""
    pair = merge.split(" ") if isinstance(merge, str) else merge
    return (*pair, "".join(pair))
