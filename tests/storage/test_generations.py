"""One generation for every reader: writers that overwrite beside readers of every kind."""

import contextlib
import itertools
import multiprocessing
import os
import pickle
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import meshtape as mt
from meshtape import errors, storage
from meshtape.storage import load, merge, open_checkpoint, reshard, save, save_safetensors, verify, virtual
from meshtape.storage.programs import program_file
from meshtape.storage.readers import safetensors
from meshtape.storage.stores import store as stores

NAMES = [f"w{i}" for i in range(5)]
LAYOUTS = ["zarr", "zstd", "weights", "packed", "dual", "shared", "file", "hf"]


def tree(generation):
    return {name: np.full((40, 90), generation, "f4") for name in NAMES}


def write(layout, path, generation):
    """Put a generation in the place of the one before."""
    if layout == "file":
        save_safetensors(path, tree(generation), overwrite=generation > 0)
    elif layout == "hf":
        source = f"{path}.source{generation % 2}"
        save(source, tree(generation), overwrite=True)
        merge(source, path, overwrite=True, max_shard_bytes=30_000)
    else:
        how = {
            "zstd": {"compression": "zstd"},
            "weights": {"compression": "weights"},
            "packed": {"pack": True},
            "dual": {"layout": "dual"},
        }.get(layout, {})
        if layout == "shared":  # every shard is a second name of one of a checkpoint that is replaced as well
            how = {"share": f"{path}.source{generation % 2}"}
            save(how["share"], tree(generation), overwrite=True)
        report = save(path, tree(generation), overwrite=True, step=generation, **how)
        assert layout != "shared" or report.shared > 0.8 * report.nbytes


def keep_writing(layout, path, stop):
    generation = 0
    while not stop.is_set():
        generation += 1
        write(layout, path, generation)
        time.sleep(0.01)  # in memory a file is replaced within a millisecond, faster than anything reads it


@contextlib.contextmanager
def writing(layout, path):
    """A process that overwrites as fast as it can."""
    write(layout, path, 0)
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    process = context.Process(target=keep_writing, args=(layout, path, stop))
    process.start()
    try:
        yield process
    finally:
        stop.set()
        process.join(200)
        process.kill()


def values(held):
    return {float(v) for a in held for v in np.unique(np.asarray(a))}


def read_once(path, home):
    """One of each kind of reader; gives how many generations each has seen at a time."""

    def slices():
        ckpt = open_checkpoint(path)
        return values(ckpt[name][3:5, ::7] for name in NAMES)

    def unverified():
        ckpt = open_checkpoint(path, verify=False)
        return values(ckpt[name][1] for name in NAMES)

    def export(act):
        out = os.path.join(home, "out")
        act(path, out)
        return values(load(out).values())

    yield lambda: values(load(path).values())
    yield slices
    yield unverified
    yield lambda: export(lambda a, b: merge(a, b, overwrite=True))
    yield lambda: export(lambda a, b: storage.convert(a, b, format="zarr", overwrite=True))
    yield lambda: export(lambda a, b: reshard(a, b, mesh={"m": 2}, shardings={"w*": {"m": 0}}, overwrite=True))


def race(layout, tmp_path, rounds):
    path = str(tmp_path / ("c.safetensors" if layout == "file" else "c"))
    seen, reads, replaced = set(), 0, 0
    with writing(layout, path) as process:
        for _ in range(rounds):
            for read in read_once(path, str(tmp_path)):
                try:
                    found = read()
                except errors.CheckpointReplaced:
                    replaced += 1
                    continue
                assert len(found) == 1, f"{layout}: {found}"
                seen |= found
                reads += 1
        assert process.is_alive()
    return seen, reads, replaced


@pytest.mark.parametrize("layout", LAYOUTS)
def test_readers_beside_a_writer_see_one_generation(layout, tmp_path):
    seen, reads, _ = race(layout, tmp_path, 12)
    assert len(seen) > 3
    assert reads > 20


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_readers_beside_a_writer_see_one_generation(layout, tmp_path):
    _, reads, replaced = race(layout, tmp_path, 850)
    assert reads + replaced == 850 * 6
    assert reads > 2000  # the fewer files a writer replaces, the more often it is faster than a reader


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("checked", [True, False])
def test_what_was_opened_before_tells_of_the_replacement(layout, checked, tmp_path):
    path = str(tmp_path / ("c.safetensors" if layout == "file" else "c"))
    write(layout, path, 0)
    ckpt = open_checkpoint(path, verify=checked)
    travelled = pickle.loads(
        pickle.dumps([a.tensor.only(storage.readers.tensor.Box.whole(a.shape)) for a in ckpt.values()])
    )
    write(layout, path, 1)
    for read in (
        lambda: ckpt["w0"][:],
        lambda: np.asarray(ckpt["w4"]),
        lambda: storage.readers.tensor.read_box(travelled[2]),
    ):
        with pytest.raises(errors.CheckpointReplaced, match=r"was replaced.*it had .* bytes.*now it has .* bytes"):
            read()
    with pytest.raises(errors.CheckpointReplaced):
        ckpt["w1"][0]
    assert values(load(path).values()) == {1.0}


def test_a_load_begins_anew(tmp_path, monkeypatch):
    path = str(tmp_path / "c")
    write("zarr", path, 0)
    opened = []

    def replace_twice(*args, **kwargs):
        ckpt = open_checkpoint(*args, **kwargs)
        opened.append(ckpt.step)
        if len(opened) < 3:
            write("zarr", path, len(opened))
        return ckpt

    monkeypatch.setattr(storage.loading.load, "open_checkpoint", replace_twice)
    assert values(load(path).values()) == {2.0}
    assert opened == [0, 1, 2]


def test_a_load_ends_though_writers_do_not(tmp_path, monkeypatch):
    path = str(tmp_path / "c")
    write("zarr", path, 0)

    def replaced(*args, **kwargs):
        ckpt = open_checkpoint(*args, **kwargs)
        write("zarr", path, ckpt.step + 1)
        return ckpt

    monkeypatch.setattr(storage.loading.load, "open_checkpoint", replaced)
    with pytest.raises(errors.CheckpointReplaced):
        load(path)


def after(monkeypatch, owner, name, acts):
    """Have a function of a module do one of ``acts`` after each of its first calls."""
    plain, left = getattr(owner, name), list(acts)

    def then(*args, **kwargs):
        found = plain(*args, **kwargs)
        if left:
            left.pop(0)()
        return found

    monkeypatch.setattr(owner, name, then)
    return left


@pytest.mark.parametrize("ours", [True, False], ids=["with checksums", "without"])
def test_a_file_that_is_replaced_behind_its_header_is_read_anew(tmp_path, monkeypatch, ours):
    path, other = tmp_path / "m.safetensors", tmp_path / "other.safetensors"

    def put(where, rows):  # of one length in all, whatever the rows of the first
        held = {"a": np.full(rows, 1, "f4"), "b": np.full(12 - rows, 2, "f4")}
        save_safetensors(where, held, overwrite=True) if ours else save_file(held, where)

    def replace(rows):
        put(other, rows)
        os.replace(other, path)

    put(path, 4)
    left = after(monkeypatch, safetensors, "read_header", [lambda: replace(8), lambda: replace(4)])
    found = storage.load_safetensors(path)
    assert not left
    assert values([found["a"]]) == {1.0}
    assert values([found["b"]]) == {2.0}
    after(monkeypatch, safetensors, "read_header", [lambda rows=rows: replace(rows) for rows in [8, 4] * 5])
    with pytest.raises(errors.CheckpointReplaced):
        storage.load_safetensors(path)


@pytest.mark.parametrize("remote", [False, True])
def test_a_program_that_is_replaced_behind_its_document_is_read_anew(tmp_path, monkeypatch, remote, request):
    path = f"{request.getfixturevalue('s3').url}/p" if remote else str(tmp_path / "p")

    def put(k):
        held = mt.asarray(np.full((3, 3), float(k)))
        mt.save_program(path, lambda x: x @ held * float(k), mt.ones(3), overwrite=True)

    put(2)
    left = after(monkeypatch, program_file, "_check_signature", [lambda: put(3), lambda: put(4)])
    assert np.asarray(mt.load_program(path)(mt.ones(3))).tolist() == [48.0] * 3
    assert not left
    after(monkeypatch, program_file, "_check_signature", [lambda k=k: put(k) for k in range(10)])
    with pytest.raises(errors.CheckpointReplaced):
        mt.load_program(path)


def test_damage_is_still_damage(tmp_path):
    path = tmp_path / "c"
    write("zarr", path, 0)
    ckpt = open_checkpoint(path)
    (path / "w1" / "c.0.0").unlink()
    with pytest.raises(errors.IncompleteCheckpoint):
        ckpt["w1"][:]
    data = bytearray((path / "w2" / "c.0.0").read_bytes())
    data[5] ^= 1
    (path / "w2" / "c.0.0").write_bytes(data)
    with pytest.raises(errors.CorruptCheckpoint):
        ckpt["w2"][:]


def test_an_export_of_a_checkpoint_that_is_replaced_meanwhile_commits_nothing(tmp_path):
    for layout in ("zarr", "file", "hf"):
        home = tmp_path / layout
        home.mkdir()
        path = str(home / ("c.safetensors" if layout == "file" else "c"))
        write(layout, path, 0)
        out = str(home / "out")
        save(out, tree(7))
        told = []

        def progress(done, total, path=path, layout=layout, told=told):
            if not told:
                told.append(done)
                write(layout, path, 1)

        with pytest.raises(errors.CheckpointReplaced):
            storage.convert(path, out, format="zarr", overwrite=True, progress=progress, threads=1)
        assert values(load(out).values()) == {7.0}
        verify(out)


def test_an_interrupted_export_does_not_go_on_with_another_generation(tmp_path):
    path, out = str(tmp_path / "c"), str(tmp_path / "out")
    write("zarr", path, 0)

    def stop(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        storage.convert(path, out, format="zarr", progress=stop, threads=1)
    write("zarr", path, 1)
    report = storage.convert(path, out, format="zarr")
    assert report.resumed == 0
    assert values(load(out).values()) == {1.0}


def test_a_file_that_is_written_in_place(tmp_path):
    """Others replace the bytes of a file, not the file."""
    path = tmp_path / "c.safetensors"
    write("file", str(path), 0)
    ckpt = open_checkpoint(path)
    data = path.read_bytes()
    time.sleep(0.02)  # more than the grain of a file system's clock
    path.write_bytes(data[:-4] + np.float32(3).tobytes())
    with pytest.raises(errors.CheckpointReplaced):
        ckpt["w4"][:]


def test_a_file_that_is_unpacked_over_another_of_its_length_and_time(tmp_path):
    """As of two archives whose files all have one time; the inode of the former is free, and is the next one's."""
    path, document = tmp_path / "x.safetensors", tmp_path / "d.json"

    def unpack(value):
        path.unlink(missing_ok=True)
        save_file({"w": np.full(9, value, "f4"), "u": np.full(9, value + 10, "f4")}, path)
        os.utime(path, (10**9, 10**9))

    unpack(1)
    storage.virtual.write(document, storage.virtual.weighted_sum([path], [1.0]))
    before, opened, inode = open_checkpoint(path), open_checkpoint(path), path.stat().st_ino
    assert before["w"][0] == 1
    unpack(2)
    if path.stat().st_ino == inode and "made 1970" in stores.holding(str(path))[0].tag(path.name):
        pytest.skip("this file system does not say when a file was made")
    for read in (lambda: opened["w"][...], lambda: before["u"][...]):
        with pytest.raises(errors.CheckpointReplaced):
            read()
    with pytest.raises(errors.ParentChanged):
        mt.load(document)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_a_folder_of_chunks_that_may_not_be_read(tmp_path):
    import zarr

    zarr.open_group(tmp_path / "z", mode="w").create_array("w", data=np.ones((4, 3)), chunks=(2, 3))
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and folder != Path("/") and not folder.stat().st_mode & 1:
            folder.chmod(0o755)
    opened = open_checkpoint(tmp_path / "z")
    (tmp_path / "z/w/c/0").chmod(0o700)
    os.seteuid(65534)
    try:
        with pytest.raises(errors.StoreError, match=r"w/c/0/0 cannot be looked at: Permission denied"):
            opened["w"][:1]
    finally:
        os.seteuid(0)


def test_a_zarr_hierarchy_by_others(tmp_path):
    import zarr

    def make(value):
        group = zarr.open_group(tmp_path / "z", mode="w")
        group.create_array("a", data=np.full((4, 4), value))

    make(0)
    ckpt = open_checkpoint(tmp_path / "z")
    time.sleep(0.02)
    make(1)
    with pytest.raises(errors.CheckpointReplaced):
        ckpt["a"][:]

    def progress(done, total):
        if not done:
            time.sleep(0.02)
            make(2)

    with pytest.raises(errors.CheckpointReplaced):
        storage.convert(tmp_path / "z", tmp_path / "out", format="zarr", progress=progress, threads=1)
    assert not Path(tmp_path / "out").exists()


def test_chunks_of_a_zarr_hierarchy_by_others_that_are_replaced_one_by_one(tmp_path, monkeypatch):
    import zarr

    group = zarr.open_group(tmp_path / "z", mode="w")
    for name in "ab":
        group.create_array(name, data=np.zeros((4, 4)), chunks=(1, 4))
    lazy = virtual.weighted_sum([tmp_path / "z"], [1.0])
    assert np.array_equal(lazy["a"][:2], np.zeros((2, 4)))
    time.sleep(0.02)
    zarr.open_group(tmp_path / "z", mode="r+")["a"][...] = 1
    with pytest.raises(errors.CheckpointReplaced, match=r"a/c/2/0 was replaced"):
        lazy["a"][2:]
    # Within one read, and between the arrays of one load, which then begins anew.
    plain, read, count = open_checkpoint(tmp_path / "z"), zarr.Array.__getitem__, itertools.count(2)
    writing = zarr.open_group(tmp_path / "z", mode="r+")["a"]

    def replacing(array, index):
        found = read(array, index)
        if (n := next(count)) < 4:
            time.sleep(0.02)
            writing[:1] = n
        return found

    monkeypatch.setattr(zarr.Array, "__getitem__", replacing)
    with pytest.raises(errors.CheckpointReplaced, match=r"a/c/0/0 was replaced"):
        plain["a"][:]
    assert np.array_equal(load(tmp_path / "z")["a"][0], np.full(4, 3.0))
    assert next(count) > 5


def test_an_opened_hierarchy_of_others_keeps_each_chunk_that_it_has_read(tmp_path):
    import zarr

    group = zarr.open_group(tmp_path / "z", mode="w")
    group.create_array("a", data=np.ones((6, 4)), chunks=(1, 4))
    group.create_array("b", shape=(2, 4), chunks=(1, 4), dtype="f4", fill_value=7)
    ckpt = open_checkpoint(tmp_path / "z")
    assert ckpt["a"][:3].sum() == 12
    with pytest.warns(UserWarning, match="are not there"):
        assert (ckpt["b"][:] == 7).all()
    writing = zarr.open_group(tmp_path / "z", mode="r+")
    writing["b"][0] = 1  # a chunk that was not there
    for row in (1, 4):
        writing["a"][row] = 5
    for name, rows, file in (
        ("a", slice(1, 2), "a/c/1/0"),
        ("a", slice(0, 6), "a/c/1/0"),
        ("b", slice(0, 1), "b/c/0/0"),
    ):
        for _ in range(2):  # it stays so
            with pytest.raises(errors.CheckpointReplaced, match=f"{file} was replaced after it was opened"):
                ckpt[name][rows]
    with pytest.raises(errors.CheckpointReplaced, match="a/c/1/0"):
        load(ckpt)
    assert ckpt["a"][2:4].sum() == 8
    assert ckpt["a"][4].sum() == 20  # first read now
    (tmp_path / "z/a/c/0/0").unlink()
    with pytest.raises(errors.CheckpointReplaced, match="now it is gone"):
        ckpt["a"][0]
    assert open_checkpoint(tmp_path / "z")["a"][1].sum() == 20


@pytest.mark.parametrize("layout", ["zarr", "zstd", "hf"])
def test_in_an_object_store(layout, s3):
    url = f"{s3.url}/c"
    write(layout, url, 0)
    ckpt = open_checkpoint(url)
    assert ckpt["w0"][0, 0] == 0
    write(layout, url, 1)
    with pytest.raises(errors.CheckpointReplaced):
        ckpt["w0"][:]
    assert values(load(url).values()) == {1.0}


@pytest.mark.parametrize(
    ("call", "how"),
    [
        (open_checkpoint, {"format": "safetensors"}),
        (open_checkpoint, {"format": "dcp"}),
        (verify, {"format": "zarr", "layout": "dual"}),
        (load, {"format": "zarr"}),
    ],
)
def test_a_deleter_beside_a_reader_is_told_as_an_error_of_ours(call, how, tmp_path, monkeypatch):
    save(tmp_path / "c", {"a": np.ones((3, 4)), "s": np.float32(2)})
    storage.convert(tmp_path / "c", tmp_path / "kept", **how)
    path, plain_open, left = tmp_path / "w", os.open, [0]

    def opened(file, *args, **kwargs):
        if str(file).startswith(str(path)):
            left[0] -= 1
            if left[0] == 0:
                path.rename(tmp_path / f"gone{number}")
        return plain_open(file, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)
    for number in range(1, 30):
        left[0] = 0
        shutil.copytree(tmp_path / "kept", path)
        left[0] = number
        try:
            call(path)
        except errors.MeshtapeError as e:
            assert str(path) in str(e)  # noqa: PT017
        if left[0] > 0:
            return
    raise AssertionError("it opens ever more files")


def test_the_tags_of_objects(tmp_path):
    """The tag changes with the object, and only then, in every store."""
    for root in (str(tmp_path), "memory://tags"):
        store = stores.at(root)
        store.put("x", b"one")
        first = store.tag("x")
        assert first == store.tag("x")
        assert "3 bytes" in first
        time.sleep(0.02)
        store.put("x", b"two")
        assert store.tag("x") != first
        store.delete(["x"])
        assert store.tag("x") is None


@pytest.mark.parametrize("format", ["zarr", "dcp"])
def test_what_is_written_below_a_source_is_no_change_of_it(tmp_path, format):
    """Of a directory by others all files count, but not those that the conversion itself makes there."""
    save(tmp_path / "ours", tree(1))
    source = tmp_path / "source"
    if format == "dcp":
        storage.convert(tmp_path / "ours", source, format="dcp")
    else:
        group = pytest.importorskip("zarr").open_group(source, mode="w", zarr_format=3)
        for name, x in tree(1).items():
            group.create_array(name, data=x)
    merge(source, source / "out")
    assert sorted(open_checkpoint(source / "out")) == NAMES
