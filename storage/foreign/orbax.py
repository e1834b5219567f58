"""Checkpoints that Orbax wrote, read-only, in its four layouts: Zarr v2 or v3, in files or in a database of TensorStore
(OCDBT).

``_METADATA`` is JSON: for each leaf its keys and what it was. In files, each leaf is a Zarr array in a folder named by
its keys joined with dots, which `ZarrTensor` reads. OCDBT is a format of TensorStore alone, so the ``tensorstore``
package reads it, where it is installed. Numbers of the tree are arrays without dimensions, as Orbax stores them; texts
come along as values.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...arrays.core.errors import CheckpointDTypeError, CheckpointError, CorruptCheckpoint, IncompleteCheckpoint
from ..base import strict_json
from ..base.malformed import malformed
from ..base.waiting import uninterrupted
from ..checkpoint.checkpoint import Checkpoint, StoredArray
from ..format import dtypes
from ..format.manifest import Leaf
from ..readers.zarr_tensor import GridTensor, open_array
from ..stores import store as stores
from ..stores.contract import Store
from ..stores.generations import NONE, Generation

FILE = "_METADATA"
DATABASE = "manifest.ocdbt"
STEP = "_CHECKPOINT_METADATA"  # in each step of a manager
_STRINGS = "_strings.json"
_ARRAYS = "array_metadatas/process_0"  # each process has the same arrays
_EMPTY: dict[str, Any] = {"Dict": {}, "List": [], "Tuple": (), "NamedTuple": None, "None": None, "empty": None}


@dataclass(frozen=True, slots=True)
class DatabaseTensor(GridTensor):
    """An array in a database of TensorStore."""

    how: ClassVar[str] = "an array in a database of TensorStore"
    root: str
    name: str
    node: str
    driver: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    file_chunk: tuple[int, ...]
    encoding: tuple[str, str]
    missing: str = "warn"
    generation: Generation = NONE

    @property
    def readers(self) -> int:
        return 1

    def _keys(self) -> set[str]:
        import tensorstore

        try:
            held = tensorstore.KvStore.open(_database(self.root, self.node)).result()
            return {k.decode() for k in held.list().result()}
        except (ValueError, OSError, KeyError) as e:
            self.generation.check()
            raise CorruptCheckpoint(f"{self.root}: tensorstore cannot list key {self.name!r}: {e}") from e

    def _read(self, index: tuple[slice, ...], out: np.ndarray) -> int:
        try:
            out[...] = _opened(self.root, self.node, self.driver)[(*index, ...)].read().result()
        except (ValueError, OSError, KeyError) as e:
            self.generation.check()
            raise CorruptCheckpoint(f"{self.root}: tensorstore cannot read key {self.name!r}: {e}") from e
        self.generation.check()
        return out.nbytes


def _database(root: str, node: str) -> dict[str, str]:
    return {"driver": "ocdbt", "base": f"file://{root}/", "path": f"{node}/"}


def _opened(root: str, node: str, driver: str) -> Any:
    with uninterrupted():
        import tensorstore

    return tensorstore.open({"driver": driver, "kvstore": _database(root, node)}, open=True, read=True).result()


def _leaves(where: str, top: Any) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """(keys, kind) of every leaf."""
    with malformed(f"{where}: not the metadata of an Orbax checkpoint"):
        for entry in top["tree_metadata"].values():
            said = [(k["key"], k["key_type"]) for k in entry["key_metadata"]]
            keys = tuple(int(k) if kind == 1 and k.isdecimal() else str(k) for k, kind in said)
            yield keys, str(entry["value_metadata"]["value_type"])


def _insert(tree: dict[Any, Any], keys: tuple[str | int, ...], leaf: Any, where: str) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise CorruptCheckpoint(f"{where}: {keys} lies below a leaf")
    if keys[-1] in tree:
        raise CorruptCheckpoint(f"{where}: {keys} occurs twice")
    tree[keys[-1]] = leaf


def _listed(node: Any) -> Any:
    """Dicts whose keys are the numbers from 0 on, as lists."""
    if not isinstance(node, dict):
        return node
    if node and all(type(k) is int for k in node) and sorted(node) == list(range(len(node))):
        return [_listed(node[i]) for i in range(len(node))]
    return {k: _listed(v) for k, v in node.items()}


def _tensor(root: str, node: str, database: bool, driver: str) -> Any:
    if not database:
        return open_array(root, node)  # `local_zarr` knows the dtypes of Orbax's Zarr v2, zarr-python does not
    try:
        held = _opened(root, node, driver)
        dtype = dtypes.by_name(held.dtype.name)
    except CheckpointDTypeError:
        raise
    except (ValueError, OSError, KeyError) as e:
        raise CorruptCheckpoint(f"{root}: tensorstore cannot open key {node!r}: {e}") from e
    layout, shape = held.chunk_layout, tuple(map(int, held.shape))
    chunk = tuple(min(c or n, n) for c, n in zip(layout.read_chunk.shape or (), shape, strict=True))
    said = held.spec().to_json()["metadata"]
    form = said.get("chunk_key_encoding", {"name": "v2"})
    separator = form.get("configuration", {}).get("separator", "/" if form["name"] == "default" else ".")
    encoding = (form["name"], said.get("dimension_separator", separator))
    return DatabaseTensor(root, node, node, driver, shape, dtype, chunk, layout.write_chunk.shape or (), encoding)


def open_orbax(root: str) -> Checkpoint:
    """Open such a checkpoint: arrays lazily, in the tree that was saved.

    Raises `CheckpointError` for one in a database where ``tensorstore`` is not installed.
    """
    where = stores.join(root, FILE)
    store = stores.at(root)
    with malformed(f"{where}: not JSON"):
        top = strict_json.loads(store.get(FILE))
    database = store.size(DATABASE) is not None
    if database and (importlib.util.find_spec("tensorstore") is None or stores.is_url(root)):
        remote = stores.is_url(root)
        what = "copy the directory to a disk" if remote else "install meshtape[orbax], or tensorstore itself"
        told = f"{root} is an Orbax checkpoint in OCDBT, a database of TensorStore"
        raise CheckpointError(f"{told}: {what}, or save it anew with use_ocdbt=False")
    driver = "zarr3" if isinstance(top, dict) and top.get("use_zarr3") else "zarr"
    arrays: dict[str, StoredArray] = {}
    tree: dict[Any, Any] = {}
    texts: Any = None
    skipped: dict[str, str] = {}
    for keys, kind in _leaves(where, top):
        node = ".".join(map(str, keys))
        leaf: Any = None
        if kind == "string":
            texts = _texts(store, where) if texts is None else texts
            leaf = texts.get(node)
        elif kind in _EMPTY:
            leaf = copy(_EMPTY[kind])
        else:
            try:
                arrays[node] = StoredArray(keys, _tensor(root, node, database, driver))
            except CheckpointDTypeError as e:
                skipped[node] = str(e)
                continue
            leaf = Leaf(len(arrays) - 1)
        if not keys:
            raise CorruptCheckpoint(f"{where}: a leaf without a key")
        _insert(tree, keys, leaf, where)
    keyed = {n: impl for n, impl in _key_impls(store).items() if n in arrays}
    for n, impl in keyed.items():
        warnings.warn(
            f"{root}: {n} holds keys of jax.random, and is read as their data; jax.random.wrap_key_data(data, "
            f"impl={impl!r}) makes keys of it",
            stacklevel=5,
        )
    metadata = {"random_key_impl": keyed} if keyed else {}
    return Checkpoint(root, "Orbax", arrays, _listed(tree), metadata=metadata, skipped=skipped)


def _key_impls(store: Store) -> dict[str, str]:
    """The generators of the arrays that are typed keys of random numbers in JAX, by name."""
    with suppress(FileNotFoundError), malformed(f"{stores.join(store.root, _ARRAYS)}: not what Orbax writes"):
        rows = strict_json.loads(store.get(_ARRAYS))["array_metadatas"]
        held = {r["array_metadata"]["param_name"]: r["array_metadata"].get("ext_metadata") or {} for r in rows}
        return {str(n): str(e["random_key_impl"])[:80] for n, e in held.items() if "random_key_impl" in e}
    return {}


def _texts(store: Store, where: str) -> dict[str, Any]:
    try:
        with malformed(f"{where}: {_STRINGS} is not JSON"):
            held = strict_json.loads(store.get(_STRINGS))
    except FileNotFoundError:
        raise IncompleteCheckpoint(f"{stores.join(store.root, _STRINGS)} is missing") from None
    return held if isinstance(held, dict) else {}


def item_of(store: Store) -> str | None:
    """The one item of a step of Orbax's manager, which is the checkpoint; None where this is no such step."""
    if store.size(STEP) is None:
        return None
    held = [f for f in store.folders() if store.size(f"{f}/{FILE}") is not None]
    return stores.join(store.root, held[0]) if len(held) == 1 else None
