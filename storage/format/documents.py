"""The small files of a checkpoint that are no arrays: an architecture, a generation config, a tokenizer.

They lie beside the arrays under their own names, byte for byte as they were given, so that a directory is enough to run
the model, and other tools find them where they look (``config.json``, ``generation_config.json``). The manifest holds
their checksums.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from typing import Any

from ...arrays.core.errors import CheckpointError, CheckpointKeyError, CorruptCheckpoint, StoreError
from ..base import names
from ..base.arguments import mapping
from ..base.checksums import crc32c
from ..base.threads import UPLOADS, in_threads
from ..stores import store as stores
from ..stores.generations import NONE
from . import manifest
from .tensor_sums import values

Held = Mapping[str, tuple[int | None, str]]
"""Checksum and file of documents by name."""
SUFFIXES = (".json", ".txt", ".model", ".jinja")
MAX_NBYTES = 64 << 20
PROGRAM = "program.json"  # what makes a directory a program file (see ``program_file``)
MARK = re.compile(r"~g[0-9a-f]{8}(?=\Z|\.[a-z]+\Z)")
"""The mark of a writer in a name, see :func:`marked`."""
_KEPT = (*SUFFIXES, ".md", ".rst", ".py", ".yaml", ".yml")
_KEPT_NAMES = frozenset(["LICENSE", "LICENCE", "NOTICE", "README", ".gitattributes"])
_USUAL = (
    *(f"{n}.json" for n in ("added_tokens", "chat_template", "special_tokens_map", "tokenizer", "tokenizer_config")),
    *(f"{n}config.json" for n in ("", "adapter_", "generation_", "preprocessor_", "processor_")),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "README.md", "LICENSE"),
)
"""The files of models that are asked for where nothing lists what is there."""
_NOBODYS = "no-such-file.meshtape"  # a name for which a server has nothing
_QUANTIZATION = ("quantization_config", "compression_config")
_OURS = frozenset(["meshtape.json", "zarr.json", "model.safetensors.index.json", PROGRAM])


def encode(given: Mapping[str, Any] | None) -> dict[str, bytes]:
    """File names and bytes of given documents: dicts and lists become JSON, texts and bytes stay as they are.

    A name without a suffix gets ``.json``, or ``.txt`` where the text is no JSON.

    >>> encode({"config": {"layers": 2}})
    {'config.json': b'{\\n  "layers": 2\\n}\\n'}
    """
    out: dict[str, bytes] = {}
    for name, value in mapping("documents", given).items():
        file = name if name.endswith(_KEPT) or name in _KEPT_NAMES else f"{name}.json"
        if isinstance(value, (str, bytes)):
            try:
                data = value.encode() if isinstance(value, str) else bytes(value)
            except UnicodeEncodeError as e:
                raise CheckpointError(f"document {name!r} is no text of Unicode: {e}; give bytes") from None
            if file != name and not _is_json(data):
                file = f"{name}.txt"
        else:
            try:
                data = (json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode()
            except (TypeError, ValueError) as e:
                raise CheckpointError(f"document {name!r} is no JSON: {e}; give a text, or plain values") from None
        if len(data) > MAX_NBYTES:
            raise CheckpointError(f"document {file!r} has {len(data)} bytes, at most {MAX_NBYTES} are allowed")
        if file.casefold() in map(str.casefold, out):  # some disks tell no cases apart
            raise CheckpointKeyError(f"two documents are named {file!r}, upper and lower case aside")
        if file in _OURS or names.zarr_names([file]) != [file]:
            raise CheckpointKeyError(f"a document cannot be named {file!r}; choose a plain file name")
        if file.endswith(".json") and not _is_json(data):
            raise CheckpointError(
                f"document {file!r} is no JSON; give it another name, such as {file.removesuffix('.json') + '.txt'!r}"
            )
        out[file] = data
    return out


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def is_kept(name: str) -> bool:
    """Whether a file of a checkpoint's directory is a document of its user, which stays where the checkpoint is
    replaced.

    >>> [is_kept(n) for n in ("README.md", "tokenizer.model", "meshtape.json", "old.safetensors", "run/notes.txt")]
    [True, True, False, False, False]
    """
    plain = "/" not in name and name not in _OURS
    return plain and (name in _KEPT_NAMES or (name.endswith(_KEPT) and not name.startswith(".")))


def with_dtype(config: bytes, dtype: str) -> bytes:
    """The ``config.json`` of a Hugging Face model with another dtype of its weights; unchanged where it names none.

    >>> with_dtype(b'{"torch_dtype": "float32", "text_config": {"dtype": "float32"}}', "bfloat16")
    b'{\\n  "torch_dtype": "bfloat16",\\n  "text_config": {\\n    "dtype": "bfloat16"\\n  }\\n}\\n'
    """

    def of(node: dict[str, Any]) -> dict[str, Any]:
        out = {}
        for key, value in node.items():
            if key in ("dtype", "torch_dtype") and isinstance(value, str):
                value = dtype
            # A model within the model has a configuration of its own.
            within = key.endswith("_config") and key not in _QUANTIZATION and isinstance(value, dict)
            out[key] = of(value) if within else value
        return out

    return edited(config, of)


def without_quantization(config: bytes) -> bytes:
    """The ``config.json`` of a model whose weights are quantised no longer; as it is where it says nothing of that.

    >>> without_quantization(b'{"hidden_size": 8, "quantization_config": {"quant_method": "fp8"}}')
    b'{\\n  "hidden_size": 8\\n}\\n'
    """

    def of(node: dict[str, Any]) -> dict[str, Any]:
        kept = {k: v for k, v in node.items() if k not in _QUANTIZATION}
        return {k: of(v) if k.endswith("_config") and isinstance(v, dict) else v for k, v in kept.items()}

    return edited(config, of)


def untied(config: bytes) -> bytes:
    """The ``config.json`` of a model whose head is an array of its own, and not the embedding.

    >>> untied(b'{"tie_word_embeddings": true}')
    b'{\\n  "tie_word_embeddings": false\\n}\\n'
    """
    own = {"tie_word_embeddings": False}

    def of(node: dict[str, Any]) -> dict[str, Any]:
        text = node.get("text_config")
        inner = {"text_config": text | own} if isinstance(text, dict) and own.keys() <= text.keys() else {}
        return node | inner | own

    return edited(config, of)


def edited(config: bytes, change: Callable[[dict[str, Any]], dict[str, Any]]) -> bytes:
    """A JSON document after a change; returned as it is where it is no JSON object or nothing changes."""
    try:
        parsed = json.loads(config)
    except (ValueError, RecursionError):
        return config
    if not isinstance(parsed, dict) or (new := change(parsed)) == parsed:
        return config
    return (json.dumps(new, indent=2, ensure_ascii=False) + "\n").encode()


def marked(file: str, suffix: str) -> str:
    """The name under which a document is stored by a writer with a ``suffix`` (see ``commit.Folder``).

    >>> marked("config.json", "~g01234567")
    'config~g01234567.json'
    """
    stem, dot, kind = file.rpartition(".")
    return f"{stem}{suffix}{dot}{kind}"


class Documents(Mapping[str, Any]):
    """Documents of an opened checkpoint: by file name, or without ``.json``; JSON is parsed, the rest is text, or bytes
    where it is none."""

    def __init__(
        self,
        root: str,
        held: Held | Callable[[], tuple[Held, tuple[str, ...]]],
        exported: Mapping[str, str] | None = None,
        index: str = "",
        weights: Iterable[str] = (),
    ) -> None:
        self._root, self._held = root, held
        self._put: dict[str, bytes] = {}  # those in place of others
        self._notes: tuple[str, ...] = ()
        self._weights = frozenset(weights)
        # Checksums that an index has. These documents are there to be edited, so reads take them as they are; `verify`
        # compares.
        self._exported, self._index = dict(exported or {}), index
        self._edits: dict[str, list[Callable[[bytes], bytes]]] = {}
        self.generation = NONE

    def _found(self) -> tuple[Held, tuple[str, ...]]:
        """What there is, and notes; found when it is asked for, where that takes requests."""
        if callable(self._held):
            self._held, self._notes = self._held()
        return self._held, self._notes

    @property
    def _sums(self) -> Held:
        """Checksum and file by name."""
        return self._found()[0]

    @property
    def notes(self) -> tuple[str, ...]:
        """What was changed, or not found, for people."""
        return self._found()[1]

    @notes.setter
    def notes(self, notes: tuple[str, ...]) -> None:
        self._notes = notes

    def edited(self, name: str, change: Callable[[bytes], bytes], notes: Iterable[str] = ()) -> Documents:
        """The same documents, one of them read through a change. ``notes`` say of it what a user has to know."""
        notes = (*self.notes, *notes)
        out = copy.copy(self)
        out.notes = notes
        out._edits = {**self._edits, name: [*self._edits.get(name, ()), change]}
        return out

    def replaced(self, gone: Iterable[str], put: Mapping[str, bytes], notes: Iterable[str] = ()) -> Documents:
        """The same documents with some given ones in place of others."""
        notes = (*self.notes, *notes)
        out, left = copy.copy(self), {*gone, *put}
        out.notes = notes
        out._held = {n: at for n, at in self._sums.items() if n not in left} | {n: (None, n) for n in put}
        out._edits = {n: changes for n, changes in self._edits.items() if n not in left}
        out._put = self._put | put
        return out

    def _file(self, name: str) -> str:
        return next((f for f in (name, f"{name}.json", f"{name}.txt") if f in self._sums), name)

    def raw(self, name: str) -> bytes:
        """The bytes of a document, checked."""
        file = self._file(name)
        if file not in self._sums:
            raise CheckpointKeyError(f"{self._root} has no document {name!r}; it has {', '.join(self._sums) or 'none'}")
        changes = self._edits.get(file, ())
        if file in self._put:
            return reduce(lambda held, change: change(held), changes, self._put[file])
        wanted, stored = self._sums[file]
        where = names.inside(self._root, stored, self._root)
        with self.generation.guarded():
            data = stores.at(self._root).get(stored)
            if wanted is not None and crc32c(data) != wanted:
                raise CorruptCheckpoint(f"{where} does not fit its crc32c: it is damaged or was edited")
        if wanted is None:
            self.generation.of(where).check()
        return reduce(lambda held, change: change(held), changes, data)

    def __getitem__(self, name: str) -> Any:
        data = self.raw(name)
        if not self._file(name).endswith(".json"):
            try:
                return data.decode()
            except UnicodeDecodeError:  # a tokenizer's model
                return data
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as e:
            raise CorruptCheckpoint(f"{stores.join(self._root, name)}: not JSON: {e}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)

    def __repr__(self) -> str:
        return f"<Documents {list(self._sums)}>"

    def compare(self) -> tuple[set[str], int, list[str]]:
        """(names of the files with a checksum in an index, and of the index; their bytes; their faults)."""
        nbytes, faults = 0, []
        for name, stored in self._exported.items():
            where = names.inside(self._root, name, self._root)
            try:
                data = stores.at(self._root).get(name)
                wanted = values(stored, 1)
            except FileNotFoundError:
                faults.append(f"{where} is missing")
            except ValueError as e:
                faults.append(f"{where}: in the index {e}")
            else:
                nbytes += len(data)
                if wanted != [crc32c(data)]:
                    faults.append(
                        f"{where} does not fit its crc32c: it is damaged or was edited; merge the directory anew to "
                        "keep an edit"
                    )
        return {*self._exported, *([self._index] if self._index else [])}, nbytes, faults

    def others(self) -> list[str]:
        """The other entries of a directory of safetensors, neither documents nor the weights that are read; folders end
        in ``/``. None where this knows no weights: of a checkpoint of ours."""
        store = stores.at(self._root)
        listed = bool(self._weights) and store.lists
        held = [*store.files(), *(f"{f}/" for f in store.folders())] if listed else []
        own = self._sums.keys() | self._weights
        return sorted(
            n for n in held if n not in own and not n.endswith(".safetensors.index.json") and not n.startswith(".")
        )

    def every(self) -> dict[str, bytes]:
        """All of them."""
        return {file: self.raw(file) for file in self._sums}


def given(source: str | os.PathLike[str] | Mapping[str, Any] | None) -> dict[str, bytes]:
    """The documents that a user gives for a target: by name, or those of a directory of a model or of a checkpoint."""
    if source is None or isinstance(source, Mapping):
        return encode(source)
    root = stores.location(source)
    found = manifest.read(root)
    held = beside(root, ()) if found is None else Documents(root, found.documents)
    out = {n: data for n, data in held.every().items() if not n.endswith(".index.json")}
    if "config.json" not in out:
        raise CheckpointError(
            f"{root} has no config.json: documents= names the directory of a model, or gives {{'config': {{…}}}}"
        )
    return out


def beside(root: str, weights: Iterable[str], exported: Mapping[str, str] | None = None, index: str = "") -> Documents:
    """The documents in a directory without a manifest: its small files that belong to a model, code and licence
    included.

    ``weights``: the files of its arrays. ``exported``: the checksums of such files in an ``index`` that has its own.
    """
    store = stores.at(root)

    def size(name: str) -> int | None:
        try:
            return store.size(name)
        except StoreError as e:
            if "access was refused" not in str(e):
                raise
            return None  # as some servers answer for what is not there

    def held(names: Iterable[str]) -> tuple[Held, list[str]]:
        """Documents, and files that are too large for one."""
        likely = sorted(names)
        sizes = in_threads(size, likely, UPLOADS, alone=store.lists)
        there = {n: nbytes for n, nbytes in zip(likely, sizes, strict=True) if nbytes is not None}
        large = [n for n, nbytes in there.items() if nbytes > MAX_NBYTES]
        return {n: (None, n) for n in there if n not in large}, large

    def asked() -> tuple[Held, tuple[str, ...]]:
        if size(_NOBODYS) is not None:
            return {}, (f"{root} answers for files that it does not have: no documents are taken",)
        found, large = held(_USUAL)
        said = f"{root}: HTTP lists no files: of its documents those of usual names are taken"
        return found, (f"{said}, but for what is larger than 64 MiB: {', '.join(large)}" if large else said,)

    known = held(filter(is_kept, store.files()))[0] if store.lists else asked
    return Documents(root, known, exported, index, weights)
