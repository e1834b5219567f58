"""Vocabularies that are joined, read by the library that uses them: a text has the ids whose rows the embeddings have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtape.errors import CheckpointError
from meshtape.storage import blend, merge, open_checkpoint, save_safetensors, virtual
from meshtape.storage.transform.tokenizer import Tokenizer, renumbered

tokenizers = pytest.importorskip("tokenizers")

TEXTS = {"A": ["the cat sat on the mat", "a cat and a dog"], "B": ["the fish swims in water", "a fish and a cat swim"]}
SPECIAL = {"A": ["<unk>", "<pad>"], "B": ["<unk>", "<eot>"]}


def _word_level(words: list[str], special: list[str]) -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(special)
    return made


def _word_piece(words: list[str], special: list[str]) -> Any:
    letters = sorted({c for w in words for c in w})
    pieces = [*special, *letters, *(f"##{c}" for c in letters), *(w for w in words if len(w) > 2)]
    vocab = {p: i for i, p in enumerate(dict.fromkeys(pieces))}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(special)
    return made


def _unigram(words: list[str], special: list[str]) -> Any:
    letters = sorted({c for w in words for c in w} | {"▁"})
    rows = [(s, 0.0) for s in special] + [(c, -8.0) for c in letters] + [(f"▁{w}", -3.0) for w in words]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(rows, unk_id=0))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.add_special_tokens(special)
    return made


def _bpe(words: list[str], special: list[str]) -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, special_tokens=special, show_progress=False)
    made.train_from_iterator(words * 3, trainer)
    return made


KINDS = {"WordLevel": _word_level, "WordPiece": _word_piece, "Unigram": _unigram, "BPE": _bpe}


def model(where: Path, kind: str, spare: int = 0) -> tuple[str, Any]:
    """A model whose row for each token is (number of the model, its id), with spare rows; and its tokenizer."""
    words = list(dict.fromkeys(" ".join(TEXTS[where.name]).split()))
    made = KINDS[kind](words, SPECIAL[where.name])
    where.mkdir()
    made.save(str(where / "tokenizer.json"))
    (where / "vocab.txt").write_text("older")
    n = max(made.get_vocab().values()) + 1 + spare
    (where / "config.json").write_text(json.dumps({"vocab_size": n}))
    table = np.stack([np.full(n, "AB".index(where.name)), np.arange(n)], 1).astype(np.float32)
    save_safetensors(where / "model.safetensors", {"model.embed_tokens.weight": table})
    return str(where), made


def joined(
    a: str, b: str, out: Path, weights: tuple[float, float] = (1, 0), **more: Any
) -> tuple[Any, np.ndarray, Any]:
    """(the tokenizer of the result, its rows, the report). The first model alone counts, as far as it has a token."""
    models = [{"model": m, "parameters": {"weight": w}} for m, w in zip((a, b), weights, strict=True)]
    report = blend({"merge_method": "linear", "models": models, "tokenizer_source": "union"} | more, out)
    rows = open_checkpoint(out)["model.embed_tokens.weight"].read()
    return tokenizers.Tokenizer.from_file(str(out / "tokenizer.json")), rows, report


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_has_the_ids_of_its_rows(tmp_path: Path, kind: str, spare: int) -> None:
    (a, first), (b, second) = (model(tmp_path / n, kind, spare) for n in "AB")
    made, rows, report = joined(a, b, tmp_path / "out")
    vocab = made.get_vocab()
    assert (
        sorted(vocab.values())
        == list(range(len(rows)))
        == list(range(open_checkpoint(tmp_path / "out").documents["config"]["vocab_size"]))
    )
    assert set(vocab) == {*first.get_vocab(), *second.get_vocab()}
    for token, i in vocab.items():
        of_first = first.token_to_id(token)
        assert rows[i].tolist() == ([0, of_first] if of_first is not None else [1, second.token_to_id(token)]), token
        assert of_first in (None, i)
    for text in (*TEXTS["A"], *TEXTS["B"], "fish<eot>the mat<pad>"):
        found = made.encode(text)
        assert [vocab[t] for t in found.tokens] == found.ids
        if "<" in text:
            assert {vocab["<eot>"], vocab["<pad>"]} <= set(found.ids)
        elif kind == "WordLevel":
            assert found.tokens == text.split()
        elif kind in ("WordPiece", "Unigram"):  # each has its words whole, and these are the best pieces
            assert [t.lstrip("▁") for t in found.tokens if len(t.lstrip("▁#")) > 2] == [
                w for w in text.split() if len(w) > 2
            ]
    ordinary = {t for t in second.get_vocab() if t not in first.get_vocab() and "<" not in t}
    added = {t.content for t in made.get_added_tokens_decoder().values() if not t.special}
    assert added == (ordinary if kind == "BPE" else set())
    told = " ".join(report.notes)
    assert (f"{len(ordinary)} ordinary tokens became added tokens of {a}, as its merges cannot be joined" in told) == (
        kind == "BPE"
    )
    assert (f"{len(ordinary)} tokens joined the vocabulary of {a}" in told) == (kind != "BPE")
    assert ("vocab.txt" in open_checkpoint(tmp_path / "out").documents) == (kind == "BPE")


def test_added_pieces_come_before_merges(tmp_path: Path) -> None:
    """As the note says: they are found within words, where the base makes other tokens; the rest is split as before."""
    (a, first), (b, second) = (model(tmp_path / n, "BPE") for n in "AB")
    made, _, _ = joined(a, b, tmp_path / "out")
    assert made.encode("the mat").tokens == first.encode("the mat").tokens
    assert "fish" in made.encode("catfish").tokens
    alone = blend(
        {
            "merge_method": "linear",
            "models": [{"model": m, "parameters": {"weight": 1}} for m in (a, b)],
            "tokenizer_source": "base",
        },
        tmp_path / "base",
    )
    gone = second.get_vocab().keys() - first.get_vocab().keys()
    assert [n.partition(" of ")[0] for n in alone.notes] == [f"tokenizer.json: without {len(gone)} tokens"]
    assert tokenizers.Tokenizer.from_file(str(tmp_path / "base" / "tokenizer.json")).get_vocab() == first.get_vocab()


def test_tokens_of_another_kind_are_added_and_told(tmp_path: Path) -> None:
    (a, _), (b, second) = model(tmp_path / "A", "WordPiece"), model(tmp_path / "B", "BPE")
    made, rows, report = joined(a, b, tmp_path / "out")
    assert all(
        rows[made.token_to_id(t)].tolist() == [1, i] for t, i in second.get_vocab().items() if t in ("<eot>", "fish")
    )
    assert any("tokens of BPE are none of WordPiece" in n for n in report.notes)


@pytest.mark.parametrize("kind", ["BPE", "WordLevel", "Unigram"])
def test_tokens_without_rows_go(tmp_path: Path, kind: str) -> None:
    (a, first), (b, _) = (model(tmp_path / n, kind) for n in "AB")
    table = open_checkpoint(a)["model.embed_tokens.weight"].read()
    save_safetensors(tmp_path / "A" / "model.safetensors", {"model.embed_tokens.weight": table[:-2]}, overwrite=True)
    lost = {t for t, i in first.get_vocab().items() if i >= len(table) - 2}
    made, rows, report = joined(a, b, tmp_path / "out")
    assert not lost & (set(made.get_vocab()) - set(tokenizers.Tokenizer.from_file(f"{b}/tokenizer.json").get_vocab()))
    assert sorted(made.get_vocab().values()) == list(range(len(rows)))
    assert max(made.encode(" ".join(TEXTS["A"])).ids) < len(rows)
    assert any("without " in n and "has no rows" in n for n in report.notes)


def test_ids_without_tokens(tmp_path: Path) -> None:
    """Libraries number added tokens by counting: gaps are filled where tokens join a vocabulary, else refused."""
    for kind in ("WordLevel", "BPE"):
        home = tmp_path / kind
        home.mkdir()
        (a, _), (b, _) = (model(home / n, kind) for n in "AB")
        file = home / "A" / "tokenizer.json"
        told = json.loads(file.read_text())
        last = max(told["model"]["vocab"], key=told["model"]["vocab"].get)
        highest = max([*told["model"]["vocab"].values(), *(t["id"] for t in told["added_tokens"])])
        told["model"]["vocab"][last] = highest + 5
        file.write_text(json.dumps(told))
        table = np.zeros((highest + 6, 2), np.float32)
        save_safetensors(home / "A" / "model.safetensors", {"model.embed_tokens.weight": table}, overwrite=True)
        if kind == "BPE":
            with pytest.raises(CheckpointError, match="ids without tokens"):
                joined(a, b, home / "out")
        else:
            made, rows, _ = joined(a, b, home / "out", (0, 1))
            assert made.token_to_id(last) == highest + 5
            assert made.token_to_id("fish") > highest + 5
            assert len(rows) == max(made.get_vocab().values()) + 1


def test_added_tokens_have_the_ids_that_libraries_give_them(tmp_path: Path) -> None:
    """Whatever ids a file says: of a token that is there twice, of one that the vocabulary has, of two with one id."""
    rng = np.random.default_rng(0)
    for n in range(60):
        words = [f"w{i}" for i in range(rng.integers(1, 5))]
        told = json.loads(_word_level(words, []).to_str())
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        names = [str(rng.choice([*words, "<a>", "<b>", "<c>"])) for _ in range(rng.integers(0, 6))]
        told["added_tokens"] = [{"id": int(rng.integers(0, 9)), "content": t, **plain} for t in names]
        wanted = tokenizers.Tokenizer.from_str(json.dumps(told)).get_vocab(True)
        assert Tokenizer.of(told, 99).tokens == wanted, n
        if any(t not in words for t in names):
            files, _ = Tokenizer.of(told, 99).extended(
                {"tokenizer.json": json.dumps(told).encode()}, wanted | {"<new>": len(wanted)}, {"<new>": plain}, {}
            )
            made = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
            assert made.get_vocab(True) == wanted | {"<new>": len(wanted)}
            assert all(made.token_to_id(a["content"]) == a["id"] for a in json.loads(made.to_str())["added_tokens"])


def test_entries_that_name_tokens_follow_the_tokenizer(tmp_path: Path) -> None:
    (a, first), (b, second) = (model(tmp_path / n, "WordLevel") for n in "AB")
    ids = {t: first.token_to_id(t) for t in ("<unk>", "cat", "<pad>")}
    said = {"eos_token_id": [ids["<unk>"], ids["cat"]], "pad_token_id": ids["<pad>"], "bos_token_id": None}
    for name, told in (("config", {"text_config": said, "vocab_size": 9}), ("generation_config", said)):
        (tmp_path / "A" / f"{name}.json").write_text(json.dumps(told))
    _, _, report = joined(a, b, tmp_path / "out", tokenizer_source=b)
    docs = open_checkpoint(tmp_path / "out").documents
    wanted = said | {"eos_token_id": [second.token_to_id("<unk>"), second.token_to_id("cat")], "pad_token_id": None}
    assert docs["config"]["text_config"] == docs["generation_config"] == wanted
    lost = [n for n in report.notes if "pad_token_id is without '<pad>'" in n]
    assert sorted(n.partition(":")[0] for n in lost) == ["config.json", "generation_config.json"]
    joined(a, b, tmp_path / "union")
    assert open_checkpoint(tmp_path / "union").documents["generation_config"] == said


def _entries(of: Any) -> dict[str, Any]:
    """Every entry of transformers that names tokens, in its own nesting. ``of`` gives the id of a token, or None."""
    two = [of("cat"), of("mat")]
    return {
        "bos_token_id": of("cat"),
        "eos_token_id": [of("cat"), of("<unk>")],
        "decoder_start_token_id": of("cat"),
        "forced_bos_token_id": of("cat"),
        "forced_eos_token_id": [of("cat")],
        "suppress_tokens": [of("<unk>"), of("<pad>"), -1],
        "begin_suppress_tokens": [of("<pad>")],
        "bad_words_ids": [two[:1], two],
        "force_words_ids": [[two[:1], [of("<unk>")]], two],
        "sequence_bias": [[[of("cat")], -1.0], [two, 2.0]],
        "forced_decoder_ids": [[1, None], [2, of("cat")], [3, of("<pad>")]],
        "lang_to_id": {"<|en|>": of("cat"), "<|de|>": of("<pad>")},
        "no_timestamps_token_id": of("cat"),
        "image_token_index": of("cat"),
        "t2u_pad_token_id": 1,
        "max_length": 2,
        "exponential_decay_length_penalty": [1, 1.5],
        "audio_config": {"pad_token_id": 1},
        "text_config": {"pad_token_id": of("<unk>"), "sep_token_id": of("<pad>")},
    }


def _left(x: dict[str, Any], sequences: bool) -> dict[str, Any]:
    """Entries without <pad>, and without sequences of two words where these lack one."""
    out = x | {"begin_suppress_tokens": None, "suppress_tokens": [x["suppress_tokens"][0], -1]}
    out |= {"forced_decoder_ids": x["forced_decoder_ids"][:2], "lang_to_id": {"<|en|>": x["lang_to_id"]["<|en|>"]}}
    whole = ("bad_words_ids", "force_words_ids", "sequence_bias")
    return out if sequences else out | {name: x[name][:1] for name in whole}


def _sized(entries: dict[str, Any], n: int) -> dict[str, Any]:
    return entries | {"text_config": entries["text_config"] | {"vocab_size": n}}


WAYS = ["blend", "rows", "rules"]


def _followed(tmp_path: Path, way: str) -> tuple[dict[str, int], Any]:
    """(ids of now, the report) of a model that has another's vocabulary, its own without the last row, or without some
    in the middle."""
    (a, first), (b, second) = (model(tmp_path / n, "WordLevel") for n in "AB")
    n, table = len(first.get_vocab()), "model.embed_tokens.weight"
    kept = {"blend": None, "rows": [*range(n - 1)], "rules": [*range(1, 2), *range(3, n - 1)]}[way]
    was, now = first.get_vocab(), second.get_vocab()
    if kept is not None:  # the last is <pad>
        names = {i: t for t, i in was.items()}
        now = {names[old]: new for new, old in enumerate(kept)}
    assert "<pad>" not in now
    (tmp_path / "A" / "config.json").write_text(json.dumps(_sized(_entries(was.get), n)))
    (tmp_path / "A" / "generation_config.json").write_text(json.dumps(_entries(was.get)))
    if way == "blend":
        *_, report = joined(a, b, tmp_path / "out", tokenizer_source=b)
    elif way == "rows":
        report = merge(virtual.rows(a, {"*": (0, n - 1)}), tmp_path / "out")
    else:
        parts = f"{table} -> $a, slice(axis=0, start=1, stop=2)\n{table} -> $b, slice(axis=0, start=3, stop={n - 1})"
        report = merge(a, tmp_path / "out", rules=f"{parts}\n$a, $b -> {table}, concat(axis=0)", dtype="float16")
    return now, report


@pytest.mark.parametrize("way", WAYS)
def test_every_entry_that_names_tokens_follows_their_rows(tmp_path: Path, way: str) -> None:
    now, report = _followed(tmp_path, way)
    docs = open_checkpoint(tmp_path / "out").documents
    wanted = _left(_entries(now.get), "mat" in now)
    assert docs["generation_config"] == wanted
    assert docs["config"] == _sized(wanted, len(now))
    told = [note for note in report.notes if note.startswith("generation_config.json")]
    lists = {"suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids", "lang_to_id", "sep_token_id"}
    assert {t.split()[1] for t in told} >= lists
    assert all("'<pad>'" in t or "'mat'" in t for t in told)
    assert any("tokens have other rows here" in t for t in report.notes) == (way == "rules")


@pytest.mark.parametrize("way", WAYS)
def test_transformers_generates_by_entries_that_followed(tmp_path: Path, way: str) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    now, _ = _followed(tmp_path, way)
    read = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    ids, scores = torch.tensor([[now["cat"]]]), torch.zeros(1, len(now))
    biased = transformers.SequenceBiasLogitsProcessor(read.sequence_bias)(ids, scores)
    banned = transformers.NoBadWordsLogitsProcessor(read.bad_words_ids, read.eos_token_id)(ids, scores)
    assert biased[0, now["cat"]] == -1
    assert "mat" not in now or biased[0, now["mat"]] == 2
    assert [i for i, x in enumerate(banned[0].tolist()) if x != 0] == sorted(now[t] for t in ("mat",) if t in now)


def test_ids_in_texts_and_entries_that_are_malformed() -> None:
    """Keys of JSON are texts: those of tuples follow; an entry in another form stays."""
    before, after = {"a": 0, "b": 1, "c": 2}, {"b": 0, "c": 1}
    said = {"sequence_bias": {"(1, 2)": 1.0, "(2,)": 2.0, "(0, 1)": 3.0}, "eos_index": 1, "vocabulary_map": {"x": 2}}
    broken = {"forced_decoder_ids": [[1]], "bos_token_id": None, "eos_token_id": True}
    data, notes = renumbered("config.json", json.dumps(said | broken).encode(), before, after)
    new = {"sequence_bias": {"(0, 1)": 1.0, "(1,)": 2.0}, "eos_index": 0, "vocabulary_map": {"x": 1}}
    assert json.loads(data) == new | broken
    assert notes == [
        "config.json: sequence_bias is without 'a', no tokens any more",
    ]
    data, notes = renumbered("c", b'{"image_token_id": 0, "pad_token_id": 0, "suppress_tokens": [0]}', before, after)
    assert json.loads(data) == {"image_token_id": 0, "pad_token_id": None, "suppress_tokens": None}
    assert notes[0] == "c: image_token_id is still 0, which was 'a', a token that is not there any more"


MALFORMED: dict[str, Any] = {
    "no model": {"version": "1.0"},
    "no vocabulary": {"model": {"vocab": 5}},
    "an id that is a text": {"model": {"vocab": {"a": "3"}}},
    "an id that is no whole number": {"model": {"vocab": {"a": 1.5}}},
    "pieces without scores": {"model": {"vocab": [["a"]]}},
    "an added token without an id": {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": None, "content": "<s>"}]},
    "an added token without a text": {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]},
    "no object": [1],
    "a damaged processor": {"model": {"vocab": {"a": 0}}, "post_processor": {"sep": 5}},
    "a token of the unknown that is a list": {"model": {"vocab": {"a": 0}, "unk_token": ["a"]}},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_tokenizer_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no tokenizer"):
        Tokenizer.of(MALFORMED[name], 10)


def _put_last(where: Path, kind: str, token: str = "<unk>") -> tuple[str, int]:
    """(a model whose token for what is unknown has the last id, its rows)."""
    words = list(dict.fromkeys(" ".join(TEXTS[where.name]).split()))
    where.mkdir()
    if kind == "Unigram":
        made = tokenizers.models.Unigram([(w, -1.0) for w in words] + [(token, 0.0)], unk_id=len(words))
    elif kind == "BPE":
        made = tokenizers.models.BPE({w: i for i, w in enumerate([*words, token])}, [], unk_token=token)
    else:
        made = getattr(tokenizers.models, kind)({w: i for i, w in enumerate([*words, token])}, unk_token=token)
    tokenizers.Tokenizer(made).save(str(where / "tokenizer.json"))
    table = np.arange(2.0 * len(words) + 2).reshape(-1, 2)
    save_safetensors(where / "model.safetensors", {"model.embed_tokens.weight": table})
    (where / "config.json").write_text(json.dumps({"vocab_size": len(table)}))
    return str(where), len(table)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_of_the_unknown_without_a_row_is_told_before_a_text_is_encoded(tmp_path: Path, kind: str) -> None:
    (a, n), (b, second) = _put_last(tmp_path / "A", kind), model(tmp_path / "B", kind)
    short = virtual.rows(a, {"*": (0, n - 1)})
    assert any("'<unk>', that of what is unknown, has no row here" in t for t in merge(short, tmp_path / "m").notes)
    moved = f"{{e}} -> $a, slice(axis=0, start={n - 1}, stop={n})\n{{e}} -> $b, slice(axis=0, start=0, stop={n - 2})"
    moved = f"{moved}\n$a, $b -> {{e}}, concat(axis=0)".replace("{e}", "model.embed_tokens.weight")
    assert not any("unknown" in t for t in merge(a, tmp_path / "turned", rules=moved).notes)
    for source in ("base", "union"):
        if source == "union" and kind in ("WordLevel", "WordPiece"):  # that of the other one joins the vocabulary
            made, rows, _ = joined(str(tmp_path / "m"), b, tmp_path / "out", tokenizer_source=source)
            assert made.encode("zebra").ids == [made.token_to_id("<unk>")]
            assert rows[made.token_to_id("<unk>")].tolist() == [1, second.token_to_id("<unk>")]
            continue
        with pytest.raises(CheckpointError, match="'<unk>', that of what is unknown, has no row"):
            joined(str(tmp_path / "m"), b, tmp_path / "out", tokenizer_source=source)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["TemplateProcessing", "BertProcessing", "Sequence"])
def test_tokens_put_into_every_text_have_rows(tmp_path: Path, kind: str) -> None:
    (a, n), (b, _) = _put_last(tmp_path / "A", "WordLevel", "<s>"), model(tmp_path / "B", "WordLevel")
    made = tokenizers.Tokenizer.from_file(f"{a}/tokenizer.json")
    with_first = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", n - 1)])
    made.post_processor = {
        "TemplateProcessing": with_first,
        "BertProcessing": tokenizers.processors.BertProcessing(("the", 0), ("<s>", n - 1)),
        "Sequence": tokenizers.processors.Sequence([tokenizers.processors.ByteLevel(), with_first]),
    }[kind]
    made.model.unk_token = "the"
    made.save(f"{a}/tokenizer.json")
    assert n - 1 in made.encode("the").ids
    joined(a, b, tmp_path / "whole")
    short = merge(virtual.rows(a, {"*": (0, n - 1)}), tmp_path / "m")
    assert "tokenizer.json: '<s>', which it puts into texts, has no row here" in short.notes
    with pytest.raises(CheckpointError, match="'<s>', which it puts into texts, has no row"):
        joined(short.path, b, tmp_path / "out")
