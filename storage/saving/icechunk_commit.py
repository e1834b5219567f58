"""A save as one snapshot of an icechunk repository: arrays through its Zarr store, the tree as an attribute of the root
group.

The commit is icechunk's own, and so is the format. Each chunk ends with its crc32c (a codec of Zarr), since icechunk
compares nothing that it reads. The attribute has these checksums once more, by place, and one of its own. Blocks of
split arrays are written by the processes that hold them, each into a fork of the session, which are merged into the one
commit.

A chunk that the snapshot before has with the very same bytes is not written again: snapshots share it. That the bytes
are the same is found by reading those whose checksums are, as 32 bits prove too little.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.errors import CheckpointError, CheckpointExists, StoreError
from ...arrays.core.formatting import some
from ..base.checksums import crc32c
from ..base.malformed import malformed
from ..base.waiting import is_late
from ..format import manifest
from ..format.chunk_grid import ChunkGrid, cells, slashed_key, windows
from ..format.sharding_spec import by_mesh
from ..format.zarr_format import GROUP_ATTRIBUTE, own_names
from ..stores import icechunk_store
from ..stores.store import is_url
from . import packs
from .items import SaveItem
from .write_shards import wait_for

T = TypeVar("T")

_Sums = list[tuple[tuple[int, ...], int]]  # the place of a chunk, and its crc32c
_Written = tuple[Any, list[tuple[int, _Sums]]]  # a fork of the session, and (number of an array, checksums)
_WINDOW = 64 << 20  # bytes that are written at a time


def commit(target: str, head: manifest.Manifest, items: Sequence[SaveItem], message: str | None) -> tuple[str, int]:
    """Commit a tree to a branch; returns the location of the snapshot, and the bytes of the elements."""
    from ..format.zarr_dtypes import zarr

    ice = icechunk_store.package()
    place, branch, node = icechunk_store.divide(target)
    if icechunk_store.VIRTUAL in place:
        raise CheckpointError(f"{target}: a save writes no virtual chunks; leave out virtual_chunks")
    if node:
        raise CheckpointError(
            f"{target}: a save fills a repository; leave out {node!r} (a branch begins at @, also in a folder's name)"
        )
    icechunk_store.refuse_unwritable(place)

    def call(work: Callable[[], T], asked: str, nbytes: int = 0) -> T:
        return icechunk_store.called(work, place, asked, nbytes)

    token = uuid.uuid4().hex  # there is always something to commit, and a commit whose answer was lost is found by it

    def begun() -> tuple[Any, ...]:
        """(repository, session, attributes and rows of `_of_before`, session to write with, group) of a save."""
        repo = icechunk_store.repository(place, create=True)
        if "main" not in repo.list_branches():  # which none can delete: the repository itself was, since it was opened
            icechunk_store.forget()
            repo = icechunk_store.repository(place, create=True)
        if branch not in repo.list_branches():
            if branch in repo.list_tags() or icechunk_store.is_id(branch):
                raise CheckpointError(f"{target}: {branch!r} is no branch; saves are committed to branches")
            with contextlib.suppress(ice.IcechunkError):  # another writer was first; what else it is comes again below
                repo.create_branch(branch, repo.lookup_branch("main"))
        session = repo.writable_session(branch)
        before = _of_before(zarr, session.store, target)
        # icechunk 1 forks no session that was written to, and icechunk 2 merges no fork that makes old arrays anew.
        first = session.fork() if ice.__version__.startswith("1.") else session
        return repo, session, *before, first, zarr.open_group(first.store, mode="a")

    def put(sums: np.ndarray, found: _Sums) -> None:
        for coord, value in found:
            sums[coord] = value

    try:
        repo, session, kept, rows, first, group = call(begun, "the beginning of a save")
        stored = call(lambda: _stored(group, rows, items), "a look at the arrays before")
        # What is saved is a whole tree, so nothing else of the step before stays.
        for name in set(dict(group.members())) - set(stored):
            call(lambda name=name: group.__delitem__(name), f"a deletion of {name}")
        arrays = [
            stored[i.directory][0]
            if i.directory in stored
            else _create(zarr, group, i, kept.get(i.directory, {}), call)
            for i in items
        ]
        olds = [stored[i.directory][1] if i.directory in stored else None for i in items]
        sums = [np.zeros(_grid(item.shape, _chunk(item)).counts, "<u4") for item in items]
        numbers = {id(item): n for n, item in enumerate(items)}
        forks = [] if first is session else [first]
        for mesh, some in by_mesh(items):
            fork = session.fork() if first is session else first
            for made, written in _spread(mesh, some, [olds[numbers[id(i)]] for i in some], target, fork):
                if all(made is not f for f in forks):  # a process of its own has a copy
                    forks.append(made)
                for n, found in written:
                    put(sums[numbers[id(some[n])]], found)
        for n, item in enumerate(items):
            if item.sharding is None:
                put(sums[n], _write(arrays[n], Box.whole(item.shape), item.array, _chunk(item), olds[n], call))
        if forks:
            call(lambda: session.merge(*forks), "a merge of what was written")
        attributes = kept.get("", {}) | {GROUP_ATTRIBUTE: _described(head, items, sums, token)}
        call(lambda: zarr.open_group(session.store, mode="r+").update_attributes(attributes), "a write of attributes")
    except ice.IcechunkError as e:
        raise icechunk_store.refused(target, "could not write", e) from None
    told: dict[str, Any] = {} if head.step is None else {"step": head.step}
    told["save"] = token
    text = message or ("a checkpoint" if head.step is None else f"step {head.step}")
    before = session.snapshot_id
    unknown = f"{target}: whether the commit was made is not known, as its answer was lost"

    def found() -> str:
        line = itertools.takewhile(lambda s: s.id != before, repo.ancestry(branch=branch))
        return next((s.id for s in line if s.metadata.get("save") == token), "")

    try:
        with icechunk_store.alone(place):
            made = call(lambda: session.commit(text, told), "a commit")
    except StoreError as e:
        if is_late(e):
            raise StoreError(f"{unknown} ({e})") from None
        raise
    except (ice.ConflictError, ice.IcechunkError) as e:
        # Where the answer was lost, icechunk asks again, and takes its own commit for another's.
        with icechunk_store.asked(unknown):
            made = call(found, "its history")
        if not made and isinstance(e, ice.ConflictError):
            raise CheckpointExists(
                f"{target}: another process has committed to {branch!r} meanwhile; its snapshot stays, nothing of this "
                "save is there: save again"
            ) from None
        if not made:
            raise icechunk_store.refused(target, "could not commit", e) from None
    return f"{icechunk_store.SCHEME}://{place}@{made}", sum(i.dtype.itemsize * int(np.prod(i.shape)) for i in items)


def _of_before(zarr: Any, store: Any, target: str) -> tuple[dict[str, dict[str, Any]], dict[str, list[Any]]]:
    """(the attributes that others gave to the group, by an empty name, and to arrays of ours; what the save before says
    of each array, by its node). Raises `CheckpointExists` where the branch holds what a save of ours would replace and
    did not write."""
    try:
        group = zarr.open_group(store, mode="r")
    except FileNotFoundError:
        return {}, {}
    except Exception:  # an array is the root
        raise CheckpointExists(f"{target} holds an array that another program wrote; choose another branch") from None
    ours = group.attrs.get(GROUP_ATTRIBUTE)
    with malformed(f"{target}: the attribute of its group is damaged, so that no save can tell whose arrays are there"):
        rows = {} if ours is None else {row[1]: row[2:] for row in json.loads(ours["checkpoint"])["arrays"]}
    held = dict(group.members(max_depth=None))
    others = [n for n in held if n not in rows and (ours is None or not any(m.startswith(f"{n}/") for m in held))]
    if others:
        what = f"holds what another program wrote: {some(sorted(others), 3)}"
        raise CheckpointExists(f"{target} {what}; choose another branch, or move that elsewhere")
    return {n: dict(node.attrs) for n, node in {**held, "": group}.items()}, rows


def _chunk(item: SaveItem) -> tuple[int, ...]:
    return tuple(max(c, 1) for c in item.grid.chunk)


def _grid(shape: tuple[int, ...], chunk: tuple[int, ...]) -> ChunkGrid:
    return ChunkGrid(shape, chunk, chunk)


def _described(
    head: manifest.Manifest, items: Sequence[SaveItem], sums: Sequence[np.ndarray], token: str
) -> dict[str, str]:
    """The attribute: a JSON text, which has the crc32c of every chunk, and the crc32c of the text."""
    rows = [
        [list(i.path), i.directory, list(i.shape), i.dtype.name, list(_chunk(i)), base64.b64encode(each).decode()]
        for i, each in zip(items, sums, strict=True)
    ]
    held = {
        "version": 1,
        "save": token,
        "tree": head.tree,
        "step": head.step,
        "metadata": manifest.encode_json(head.metadata, "metadata"),
    }
    text = json.dumps(held | {"arrays": rows})
    return {"checkpoint": text, "crc32c": f"{crc32c(text.encode()):08x}"}


def _stored(group: Any, rows: Mapping[str, list[Any]], items: Sequence[SaveItem]) -> dict[str, tuple[Any, np.ndarray]]:
    """The arrays of the save before that are stored as those of this one, and the checksums of their chunks."""
    found = {}
    for item in items:
        form = [list(item.shape), item.dtype.name, list(_chunk(item))]
        *before, sums = rows.get(item.directory, [None])
        held = group.get(item.directory) if before == form else None
        if held is None or not _is_alike(held, item):
            continue
        with contextlib.suppress(ValueError):  # others may have written the attribute
            counts = _grid(item.shape, _chunk(item)).counts
            found[item.directory] = held, np.frombuffer(base64.b64decode(sums), "<u4").reshape(counts)
    return found


def _is_alike(held: Any, item: SaveItem) -> bool:
    """Whether an array has the metadata that `_create` would give it: another program may have made it anew."""
    said = held.metadata.to_dict()
    codecs = [(c["name"], c.get("configuration", {}).get("endian", "little")) for c in said.get("codecs", ())]
    keys, names = said.get("chunk_key_encoding"), tuple(said.get("dimension_names") or ())
    return (
        codecs == [("bytes", "little"), ("crc32c", "little")]
        and (held.shape, held.dtype, held.chunks) == (item.shape, item.dtype, _chunk(item))
        and names == tuple(own_names(item.name, len(item.shape)) or ())
        and keys == {"name": "default", "configuration": {"separator": "/"}}
        and not held.fill_value
    )


def _create(zarr: Any, group: Any, item: SaveItem, attributes: Mapping[str, Any], call: Callable[..., Any]) -> Any:
    form = {"compressors": [zarr.codecs.Crc32cCodec()], "fill_value": 0, "attributes": attributes}
    form["dimension_names"] = own_names(item.name, len(item.shape))  # for xarray, as of a plain save
    form |= {"shape": item.shape, "chunks": _chunk(item), "dtype": item.dtype}
    return call(lambda: group.create_array(item.directory, **form), f"a write of {item.directory}")


def _write(
    array: Any, block: Box, data: Any, chunk: tuple[int, ...], old: np.ndarray | None, call: Callable[..., Any]
) -> _Sums:
    """Write the chunks of a block, those of zeros too, but for those that are there already, by their ``old``
    checksums and then by their bytes; returns the checksums."""
    import asyncio

    from zarr.core.buffer.cpu import Buffer
    from zarr.core.sync import sync

    dtype, grid, sums = np.dtype(data.dtype), _grid(array.shape, chunk), list[tuple[tuple[int, ...], int]]()

    async def put_one(key: str, held: bytes, known: bool) -> None:
        at = array.store_path / key
        if known:
            with contextlib.suppress(Exception):  # one that is lost, or cannot be read, is written
                there = await at.get()
                if there is not None and there.to_bytes() == held:
                    return
        await at.set(Buffer.from_bytes(held))

    async def put(chunks: Mapping[str, tuple[bytes, bool]]) -> None:
        await asyncio.gather(*(put_one(key, *held) for key, held in chunks.items()))

    for part in windows(block.shape, chunk, dtype.itemsize, _WINDOW):
        values = data[(*part.slices, ...)]
        held = np.asarray(values if isinstance(values, np.ndarray) else values.to_device("cpu"))
        place = part.shifted(block.offset)
        chunks = {}
        for coord in cells(place, chunk):
            inside = grid.shard_box(coord).within(place)
            padded = np.zeros(chunk, dtype)
            padded[(*map(slice, inside.shape), ...)] = held[(*inside.slices, ...)]
            raw = padded.tobytes()
            sums.append((coord, value := crc32c(raw)))
            chunks[slashed_key(coord)] = raw + value.to_bytes(4, "little"), old is not None and old[coord] == value
        nbytes = sum(len(held) for held, _ in chunks.values())
        call(lambda held=chunks: sync(put(held)), f"a write of {nbytes} bytes", nbytes)
    return sums


def _spread(
    mesh: Any, items: Sequence[SaveItem], olds: Sequence[np.ndarray | None], target: str, fork: Any
) -> list[_Written]:
    """Have the processes of a mesh write the blocks of its arrays."""
    settled = mesh.settle([item.array for item in items])
    with _sign(icechunk_store.divide(target)[0]) as sign:
        payloads = {
            rank: (target, sign, fork, [(n, items[n].directory, _chunk(items[n]), olds[n], box) for n, box in dealt])
            for rank, dealt in packs.assign(packs.held_blocks(mesh, items, settled)).items()
        }
        return mesh.run_on_blocks(write_blocks, settled, payloads) if payloads else []


@contextlib.contextmanager
def _sign(place: str) -> Iterator[str]:
    """A new folder in a repository on a disk, by which processes see that theirs is the same; empty elsewhere. icechunk
    itself would make another repository where there is none."""
    if is_url(place):
        yield ""
        return
    sign = tempfile.mkdtemp(prefix=".meshtape-", dir=place)
    try:
        yield sign
    finally:
        with contextlib.suppress(OSError):
            os.rmdir(sign)


def write_blocks(payloads: Mapping[int, Any], blocks: Mapping[int, Sequence[np.ndarray]]) -> _Written:
    """Write the blocks that the ranks of this process were given into one fork of the session; returns it, and the
    checksums of each array. Called through ``BlockHost.run_on_blocks``."""
    from ..format.zarr_dtypes import zarr

    ice = icechunk_store.package()
    target, sign, fork, _ = next(iter(payloads.values()))
    place = icechunk_store.divide(target)[0]

    def call(work: Callable[[], T], asked: str, nbytes: int = 0) -> T:
        return icechunk_store.called(work, place, asked, nbytes)

    if sign:
        wait_for(sign, min(payloads))
    written = []
    try:
        for rank, (_, _, _, tasks) in payloads.items():
            for n, directory, chunk, old, box in tasks:
                array = call(lambda d=directory: zarr.open_array(fork.store, path=d, mode="r+"), "a look at an array")
                written.append((n, _write(array, box, np.asarray(blocks[rank][n]), chunk, old, call)))
    except ice.IcechunkError as e:
        raise icechunk_store.refused(target, "could not write", e) from None
    return fork, written
