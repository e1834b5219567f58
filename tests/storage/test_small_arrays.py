"""Many small arrays: what they cost beside their bytes, and that short ways give the same bytes and the same errors."""

import gc
import json
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from meshtape import errors
from meshtape.arrays.core.blocks import Box
from meshtape.storage import load, merge, open_checkpoint, save, save_safetensors
from meshtape.storage.base import names
from meshtape.storage.base.sealed import unsealed
from meshtape.storage.format.chunk_grid import choose_grid
from meshtape.storage.format.zarr_format import array_metadata, group_metadata
from meshtape.storage.readers import reading
from meshtape.storage.readers.safetensors import joined
from meshtape.storage.saving import write_shards
from meshtape.storage.stores import local
from meshtape.storage.stores import store as stores

COUNT = 300
FORMS = ["a directory each", "packed", "safetensors"]


def trees():
    kinds = [
        np.dtype("f4"),
        np.dtype("i8"),
        np.dtype("?"),
        np.dtype(ml_dtypes.bfloat16),
        np.dtype(ml_dtypes.float8_e4m3fn),
    ]
    shapes = [(8,), (), (3, 5), (1,), (2, 2, 2)]
    return {
        f"layers.{i}.w": (np.arange(np.prod(shapes[i % 5], dtype=int)) % 7 + i % 3)
        .reshape(shapes[i % 5])
        .astype(kinds[i % 4 if i % 9 else 4])
        for i in range(COUNT)
    }


@pytest.fixture(params=FORMS)
def kept(request, tmp_path):
    where, tree = tmp_path / "c.safetensors", trees()
    if request.param == "safetensors":
        save_safetensors(where, tree)
    else:
        save(where, tree, pack=request.param == "packed")
    return request.param, where, tree


def same(got, tree):
    assert set(got) == set(tree)
    for name, a in tree.items():
        found = np.asarray(got[name])
        assert (found.dtype, found.shape, found.tobytes()) == (a.dtype, a.shape, a.tobytes()), name


def test_what_memory_holds_is_read_without_threads(kept, monkeypatch):
    _, where, tree = kept
    if not _at_hand(where):
        pytest.skip("this file system does not tell what memory holds")
    pools: list[int] = []
    real = reading.in_threads
    monkeypatch.setattr(reading, "in_threads", lambda *args: pools.append(1) or real(*args))
    for attempt in range(1, 6):  # a page that the system is just writing back is not at hand
        same(load(where), tree)
        if len(pools) < attempt:
            return
    raise AssertionError("each load had threads")


def _at_hand(where):
    file = next(p for p in [where, *where.rglob("*")] if p.is_file())
    store, name = stores.holding(str(file))
    reader = store.reader(name)
    try:
        return reader.at_hand(0)
    finally:
        reader.close()


@pytest.mark.parametrize("form", ["packed", "safetensors"])
def test_neighbours_share_reads(form, tmp_path, monkeypatch):
    where, tree = tmp_path / "c.safetensors", trees()
    save(where, tree, pack=True) if form == "packed" else save_safetensors(where, tree)
    reads = []
    for name in ("readv", "read_now"):
        real = getattr(local._LocalReader, name)
        monkeypatch.setattr(local._LocalReader, name, lambda *args, real=real: reads.append(1) or real(*args))
    same(load(where), tree)
    assert len(reads) < COUNT / 10
    reads.clear()
    merge(where, tmp_path / "hf")
    same(load(tmp_path / "hf"), tree)
    assert len(reads) < COUNT / 5


def test_the_text_of_a_manifest_is_that_of_a_writer_of_json(tmp_path):
    odd = {'a"\\\0ü': np.ones(2), "t": (1, None, [np.zeros((0, 3))])}
    for pack in (False, True):
        save(tmp_path / str(pack), trees() | odd, pack=pack)
        text, _, fits = unsealed((tmp_path / str(pack) / "meshtape.json").read_bytes())
        assert fits
        assert json.dumps(json.loads(text), separators=(",", ":")).encode() == text


def _forgotten(monkeypatch):
    """Memory holds no bytes of files."""
    for each in (local._LocalReader, local.Beneath):
        monkeypatch.setattr(each, "read_now", lambda *args: -1)


def test_they_are_read_by_threads_where_a_disk_must_be_waited_for(kept, monkeypatch):
    _, where, tree = kept
    _forgotten(monkeypatch)
    same(load(where), tree)
    same(load(where, verify=False), tree)


@pytest.mark.parametrize("at_hand", [True, False])
def test_damage_names_the_array(kept, at_hand, monkeypatch):
    form, where, tree = kept
    name = "layers.7.w"
    tensor = open_checkpoint(where)[name].tensor
    if form == "safetensors":
        path, start = tensor.path, tensor.start
    else:
        (held,) = tensor.objects.values()
        path, start = str(where / held.file), held.start
    with open(path, "r+b") as f:
        f.seek(start)
        byte = f.read(1)
        f.seek(start)
        f.write(bytes([byte[0] ^ 1]))
    if not at_hand:
        _forgotten(monkeypatch)
    with pytest.raises(errors.CorruptCheckpoint, match=r"layers\.7\.w"):
        load(where)
    got = load(where, verify=False)
    assert sum(np.asarray(got[n]).tobytes() != a.tobytes() for n, a in tree.items()) == 1


def test_a_lost_file_is_named(tmp_path):
    save(tmp_path / "c", trees())
    for i in (3, 5):
        next((tmp_path / "c" / f"layers.{i}.w").glob("c*")).unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match=r"layers\.3\.w"):
        load(tmp_path / "c")


def test_one_range_serves_two_places(tmp_path):
    a, b = np.arange(6.0).reshape(2, 3), np.ones(4)
    save(tmp_path / "c", {"a": a, "b": b}, pack=True)
    ckpt = open_checkpoint(tmp_path / "c")
    whole, turned, other = np.empty((2, 3)), np.empty((3, 2)).T, np.empty(4)
    part, box = np.empty((1, 2)), Box((1, 1), (1, 2))
    t = ckpt["a"].tensor
    jobs = [j for out in (whole, turned) for j in t.jobs(Box.whole((2, 3)), out)]
    jobs += [*t.jobs(box, part), *ckpt["b"].tensor.jobs(Box.whole((4,)), other)]
    assert len(reading._neighbours(jobs)) == 1
    reading.run(jobs)
    assert np.array_equal(whole, a)
    assert np.array_equal(turned, a)
    assert np.array_equal(part, a[1:, 1:])
    assert np.array_equal(other, b)


def test_a_load_leaves_nothing_to_the_collector(kept):
    _, where, _ = kept
    load(where)
    found = []
    gc.disable()
    try:
        for _ in range(3):  # threads that other tests left behind may drop something meanwhile
            gc.collect()
            load(where)
            found.append(gc.collect())
    finally:
        gc.enable()
    assert min(found) < COUNT, found


# ----- short ways -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths", [[], [0], [5], [1, 2, 3], [20_000], [1, 20_000, 2], [9000] * 80, [300_000, 4, 300_000]]
)
def test_joined_pieces_are_the_same_bytes(lengths):
    memory = np.empty(max([*lengths, 1]), np.uint8)

    def pieces():
        for i, n in enumerate(lengths):
            memory[:n] = i  # each is valid until the next is asked for
            yield memory[:n] if i % 2 else memory[:n].tobytes()

    wanted = b"".join(bytes([i]) * n for i, n in enumerate(lengths))
    found = b""
    count = 0
    for piece in joined(pieces()):
        found += bytes(piece)
        count += 1
    assert found == wanted
    assert count <= 1 + len([n for n in lengths if n > 9000]) * 2 + len(wanted) // 200_000


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("shape", [(), (3,), (4, 5)])
@pytest.mark.parametrize("dtype", ["f4", ml_dtypes.bfloat16])
def test_metadata_of_equal_arrays_differ_in_their_names_alone(shape, dtype, raw):
    dtype = np.dtype(dtype)
    grid = choose_grid(shape, dtype.itemsize, [Box.whole(shape)])
    odd = 'a"\\\u0000ü.b'
    nodes = {name: json.loads(array_metadata(grid, dtype, name, None, raw)) for name in ("w", odd)}
    for name, node in nodes.items():
        assert node.pop("dimension_names") == [f"{name}.{i}" for i in range(len(shape))]
    assert nodes["w"] == nodes[odd]
    texts = {name: array_metadata(grid, dtype, name, None, raw) for name in ("w", odd)}
    group = group_metadata(1, texts)
    read = json.loads(group)
    assert read["consolidated_metadata"]["metadata"] == {n: json.loads(t) for n, t in texts.items()}
    assert group == json.dumps(read).encode()


def test_plain_names_stay_as_the_rule_for_all_names_leaves_them(monkeypatch):
    held = [
        "w",
        "wb",
        "a.b",
        "a.",
        "_a",
        "__a",
        "-a",
        ".a",
        "nul",
        "NUL.txt",
        "nul.x.y",
        "c",
        "c.d",
        "con",
        "zarr.json",
        "Zarr.json",
    ]
    held += [
        "a" * 100,
        "a" * 101,
        "a" * 400,
        "a b",
        "ä",
        "a/b",
        "meshtape.json",
        "layers.0.weight",
        "a\n",
        "٣٣",
        "com1.x",
        "_",
        "-_",
        "a-.",
    ]
    short = [names._escape(n) for n in held]
    monkeypatch.setattr(names, "_PLAIN", names.re.compile(r"(?!)"))
    assert short == [names._escape(n) for n in held]


@pytest.mark.parametrize("threads", [1, 3])
def test_work_in_threads_keeps_its_order_and_stops_at_an_error(threads):
    for work in (lambda i: i * i, lambda i: time.sleep(1e-3 * (i == 7)) or i * i):
        for alone in (False, True):
            found = write_shards.in_threads(work, range(100), threads, alone=alone)
            assert found == [i * i for i in range(100)]
    begun, gate = [], threading.Event()

    def work(i):
        begun.append(i)
        if i == 1:
            gate.set()
            raise ValueError(f"the error of {i}")
        if i in (0, 2) and threads > 1:
            gate.wait(5)
        return i

    with pytest.raises(ValueError, match="the error of 1"):
        write_shards.in_threads(work, range(1000), threads)
    assert len(begun) < 500
