"""The bytes of a shard: zeros over the edge; and the same for any number of threads that compress, with a few chunks in
memory at a time."""

import itertools
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import pytest

from meshtape.storage import convert, load, save
from meshtape.storage.format import zarr_format
from meshtape.storage.format.chunk_grid import ChunkGrid
from meshtape.storage.format.compression import Zstd
from meshtape.storage.format.zarr_format import ShardBytes
from meshtape.storage.saving import write_shards


@pytest.fixture(autouse=True)
def _small_shards_too(monkeypatch):
    monkeypatch.setattr(zarr_format, "_WORTH", 0)


def tables():
    whole = np.random.default_rng(0).integers(0, 9, (12, 10)).astype(np.float32)
    yield "rows as they lie", whole, ChunkGrid((12, 10), (12, 10), (1, 10))
    yield "columns, cut off at the edge", whole, ChunkGrid((12, 10), (15, 12), (5, 3))
    yield "every other row", whole[::2], ChunkGrid((6, 10), (6, 10), (2, 5))
    yield "big-endian", whole.astype(">f4"), ChunkGrid((12, 10), (12, 10), (4, 5))
    yield "one chunk", whole, ChunkGrid((12, 10), (12, 10), (12, 10))


def test_any_number_of_threads_gives_the_same_bytes():
    for what, block, grid in tables():
        seen = set()
        for threads in (1, 2, 3, 64):
            shard = ShardBytes(block, grid, (0, 0), compression=Zstd(), threads=threads)
            data = b"".join(bytes(memoryview(p).cast("B")) for p in itertools.chain.from_iterable(shard.batches()))
            assert len(data) == shard.nbytes
            seen.add((data, shard.digest))
        assert len(seen) == 1, what


@dataclass
class Counted:
    """A codec that knows how often it was asked, and fails when it is told to."""

    fails_at: int = -1
    asked: int = 0
    lock: Lock = field(default_factory=Lock)

    def compress(self, data, itemsize=1):
        with self.lock:
            self.asked += 1
            if data[0] == self.fails_at:
                raise ValueError("no frame of it")
        return bytes(data)


def chunks(codec, threads):
    block = np.arange(40, dtype=np.uint8).reshape(40, 1)
    return ShardBytes(block, ChunkGrid((40, 1), (40, 1), (1, 1)), (0, 0), threads=threads)._frames(codec)


def test_no_more_chunks_are_on_their_way_than_threads_and_one():
    for threads in (2, 5):
        codec = Counted()
        coming = chunks(codec, threads)
        for n in range(4):
            assert next(coming) == bytes([n])
        coming.close()  # waits for those on their way
        assert 4 <= codec.asked <= 4 + threads


def test_an_error_of_one_is_the_error_of_all():
    with pytest.raises(ValueError, match="no frame of it"):
        list(chunks(Counted(fails_at=7), 3))


def files(path):
    return {p.relative_to(path): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_saves_and_transfers_write_the_same_files_on_any_machine(tmp_path, monkeypatch):
    tree = {"one": np.arange(3 << 18, dtype=np.int64).reshape(-1, 512) % 1000}
    written = []
    for processors in (1, 4):
        monkeypatch.setattr(write_shards.os, "cpu_count", lambda n=processors: n)
        assert write_shards.compressors(1, 2) == processors
        home = tmp_path / str(processors)
        save(home / "saved", tree, compression="zstd")
        save(home / "plain", tree)
        convert(home / "plain", home / "converted", format="zarr", compression="zstd")
        written.append((files(home / "saved"), files(home / "converted")))
        assert (np.asarray(load(home / "converted")["one"]) == tree["one"]).all()
    assert written[0] == written[1]


@pytest.mark.parametrize("compression", [None, Zstd()])
def test_what_lies_over_the_edge_is_zero(monkeypatch, compression):
    """Whatever the chunk before it has left in the memory that is used again."""
    monkeypatch.setattr(zarr_format, "_BATCH", 1)
    block = np.arange(1, 13, dtype="<i8").reshape(3, 4)
    wanted = np.zeros((4, 6), "<i8")
    wanted[:3, :4] = block
    shard = zarr_format.ShardBytes(block, ChunkGrid((3, 4), (4, 6), (2, 3)), (0, 0), compression=compression)
    *chunks, _ = [bytes(memoryview(p).cast("B")) for p in itertools.chain.from_iterable(shard.batches())]
    for k, (i, j) in enumerate(itertools.product(range(2), range(2))):
        held = np.frombuffer(chunks[2 * k], np.uint8)
        if compression is not None:
            held, frame = np.empty(48, np.uint8), held
            compression.decompress(frame, held)
        assert held.tobytes() == wanted[2 * i : 2 * i + 2, 3 * j : 3 * j + 3].tobytes(), (i, j)
