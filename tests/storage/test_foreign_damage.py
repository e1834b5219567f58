"""Damage and loss in what others wrote: PyTorch's CRC32 are compared, lost chunks of Zarr are no zeros, and no chunk
unpacks to more than its metadata says."""

import gzip
import json
import shutil
import warnings
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import zarr
from numcodecs.zstd import compress

from meshtape import errors
from meshtape.storage import Rules, convert, diff, load, merge, open_checkpoint, reshard, verify
from meshtape.storage.browse.model.site import Site
from meshtape.storage.browse.views import view_array
from meshtape.storage.foreign.dcp import _place
from meshtape.storage.foreign.torch_pickle import read_values
from meshtape.storage.readers.tensor import read_box
from meshtape.storage.readers.zarr_bounds import _NBYTES

GOLDEN = Path(__file__).parent / "golden" / "torch-2.13-dcp"


def test_elements_of_dcp_are_compared_with_their_crc32(tmp_path):
    """A flip in the elements of each part of each tensor: a load raises, and verify finds it."""
    wanted = {n: np.asarray(a) for n, a in load(GOLDEN).items() if hasattr(a, "shape")}
    assert verify(GOLDEN).arrays == len(open_checkpoint(GOLDEN))
    found = 0
    for name, a in open_checkpoint(GOLDEN).items():
        for k, chunk in enumerate(a.tensor.chunks):
            at, nbytes = _place(str(GOLDEN), chunk, name, a.dtype, None).stored
            if not nbytes:
                continue
            where = Path(shutil.copytree(GOLDEN, tmp_path / f"{name}-{k}"))
            bad = bytearray((where / chunk.file).read_bytes())
            bad[at + nbytes - 1] ^= 4
            (where / chunk.file).write_bytes(bad)
            with pytest.raises(errors.CorruptCheckpoint, match="CRC32"):
                verify(where)
            with pytest.raises(errors.CorruptCheckpoint, match="CRC32"):
                load(where)
            got = load(where, verify=False)
            assert np.asarray(got[name]).tobytes() != wanted[name].tobytes()
            found += 1
    assert found == 10


def test_damaged_values_of_dcp_do_not_vanish(tmp_path):
    """Wherever a byte of a value that is no tensor is changed, the value is read as it was, or an error names it."""
    where = Path(shutil.copytree(GOLDEN, tmp_path / "d"))
    names, rng, found = ("step", "lr", "name", "list.1"), np.random.default_rng(0), 0
    right = {n: load(where)[n] for n in names}
    places = read_values((where / ".metadata").read_bytes(), "x").field("storage_data")
    for name in names:
        file, start, length = next(
            [i.field(k) for k in ("relative_path", "offset", "length")]
            for x, i in places.items()
            if x.field("fqn") == name
        )
        good = (where / file).read_bytes()
        for at in rng.choice(length, 30, replace=False).tolist():
            bad = bytearray(good)
            bad[start + at] ^= 1 << int(rng.integers(8))
            (where / file).write_bytes(bad)
            try:
                got = load(where)
            except errors.CorruptCheckpoint as e:
                assert name in str(e)  # noqa: PT017
                with pytest.raises(errors.CorruptCheckpoint):
                    verify(where)
                with pytest.raises(errors.CorruptCheckpoint):
                    merge(where, tmp_path / "out", overwrite=True)
                found += 1
            else:
                assert {n: got.get(n) for n in names} == right
        (where / file).write_bytes(bad)
        assert set(open_checkpoint(where, verify=False)) == set(open_checkpoint(GOLDEN))
        (where / file).write_bytes(good)
    assert found > 12


def group(where, version, **kw):
    g = zarr.open_group(where, mode="w", zarr_format=version)
    g.create_array("w", shape=(6, 4), chunks=(2, 2), dtype="f4", **kw)[...] = np.arange(1, 25).reshape(6, 4)
    g.create_array("s", shape=(), dtype="f8", fill_value=0)[...] = 3.0
    return where


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("name", ["w", "s"])
def test_lost_chunks_of_foreign_zarr_are_no_zeros(tmp_path, version, name):
    where = group(tmp_path / "z", version)
    for use in (merge, reshard, lambda a, b: convert(a, b, format="zarr")):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            use(where, tmp_path / "whole")
        assert verify(tmp_path / "whole").arrays == 2
        shutil.rmtree(tmp_path / "whole")
    file = {("w", 2): "w/1.0", ("w", 3): "w/c/1/0", ("s", 2): "s/0", ("s", 3): "s/c"}[name, version]
    (where / file).unlink()
    if name == "w":  # a chunk outside of the array, as resizing leaves it, stands in for none
        beyond = where / file.replace("1", "9")
        beyond.parent.mkdir(exist_ok=True)
        beyond.touch()
    for use in (merge, reshard, lambda a, b: convert(a, b, format="zarr")):
        with pytest.raises(errors.IncompleteCheckpoint, match=f"1 chunk of key '{name}'.*missing=\"fill\""):
            use(where, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        merge(where, tmp_path / "kept", keys=["s" if name == "w" else "w"], overwrite=True)  # the other one is whole
    with pytest.raises(errors.IncompleteCheckpoint, match="1 chunk"):
        verify(where)
    with pytest.warns(UserWarning, match=f"1 chunk of key '{name}' is not there"):
        load(where)
    for read in (
        lambda a: a[...],
        lambda a: a[::2] if a.ndim else a[()],
        lambda a: a[2:4, :1] if a.ndim else a.read(),
        lambda a: list(a) if a.ndim else a[()],
        np.asarray,
    ):
        with pytest.warns(UserWarning, match=f"1 chunk of key '{name}' is not there"):
            read(open_checkpoint(where)[name])
    with pytest.warns(UserWarning, match="1 chunk"):
        diff(where, where)
    with pytest.warns(UserWarning, match="1 chunk"):
        read_box(
            Rules("w -> v, cast(float64)\ns -> t, cast(float32)").on(open_checkpoint(where))["vt"[name == "s"]].tensor
        )
    page = Site([str(where)])
    with pytest.warns(UserWarning, match="1 chunk"):
        assert "are not there" in str(view_array.array(page, "0", name, {}, False).body)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_checkpoint(where)["s" if name == "w" else "w"][...]
        if name == "w":
            open_checkpoint(where)["w"][:, 2:]
    merge(where, tmp_path / "out", missing="fill")
    got = np.asarray(load(tmp_path / "out")["w"])
    assert (got == 0).sum() == (4 if name == "w" else 0)


@pytest.mark.parametrize("location", ["start", "end"])
def test_inner_chunks_that_a_shard_says_are_absent_are_the_fill_value(kit, tmp_path, location):
    inner = zarr.codecs.ShardingCodec(chunk_shape=(2, 2), index_location=location)
    g = zarr.open_group(tmp_path / "z", mode="w")
    w = g.create_array("w", shape=(6, 8), chunks=(6, 4), dtype="f4", fill_value=3, serializer=inner, compressors=None)
    values = np.full((6, 8), 3, "f4")
    values[0, 0], values[4:, 6:] = 1, 2
    w[...] = values  # zarr leaves out inner chunks of fill values alone
    shard, sharding = tmp_path / "z" / "w" / "c" / "0" / "1", kit.Sharding(kit.Host({"x": 2}), (0,))
    assert shard.stat().st_size == 6 * 16 + 4 + 16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(load(tmp_path / "z")["w"], values)
        assert kit.same(load(tmp_path / "z", shardings=lambda *_: sharding)["w"].whole(), values)
        assert np.array_equal(open_checkpoint(tmp_path / "z")["w"][1::2, 3:7], values[1::2, 3:7])
        for use in (merge, reshard, lambda a, b: convert(a, b, format="zarr")):
            use(tmp_path / "z", tmp_path / "out")
            assert verify(tmp_path / "out").arrays == 1
            assert np.array_equal(load(tmp_path / "out")["w"], values)
            shutil.rmtree(tmp_path / "out")
    with pytest.raises(errors.CheckpointError, match="no checksums"):  # and nothing is lost
        verify(tmp_path / "z")
    whole = shard.read_bytes()
    for held in (whole[:0], whole[: len(whole) // 2], whole[: 6 * 16 + 4] if location == "start" else whole[:-1]):
        shard.write_bytes(held)
        for read in (load, merge, lambda a, *_: open_checkpoint(a)["w"][4:, 6:]):
            with pytest.raises(errors.CheckpointError, match=r"ends early|checksum|size 0"):
                read(tmp_path / "z", *([tmp_path / "out"] if read is merge else []))
    shard.unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match="1 chunk of key 'w'"):
        merge(tmp_path / "z", tmp_path / "out")


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("unknown", ["dtype", "codec"])
@pytest.mark.parametrize("consolidated", [False, True])
def test_an_array_that_zarr_does_not_know_is_listed_beside_the_others(tmp_path, version, unknown, consolidated):
    where = group(tmp_path / "z", version)
    group(where / "sub", version)
    field = {("dtype", 2): "dtype", ("codec", 2): "compressor", ("dtype", 3): "data_type", ("codec", 3): "codecs"}
    odd = {
        "dtype": "float6_e2m3fn",
        "codec": {"id": "acme"} if version == 2 else [{"name": "acme", "configuration": {}}],
    }
    if consolidated:
        zarr.consolidate_metadata(where)
    files = [where / "sub/w" / ("zarr.json" if version == 3 else ".zarray")]
    files += [where / ("zarr.json" if version == 3 else ".zmetadata")] if consolidated else []
    for file in files:
        said = json.loads(file.read_text())
        held = (
            said
            if file is files[0]
            else said["consolidated_metadata"]["metadata"]
            if version == 3
            else said["metadata"]
        )
        one = held if file is files[0] else held["sub/w" if version == 3 else "sub/w/.zarray"]
        one[field[unknown, version]] = odd[unknown]
        file.write_text(json.dumps(said))
    ckpt = open_checkpoint(where)
    assert (sorted(ckpt), list(ckpt.skipped)) == (["s", "sub/s", "w"], ["sub/w"])
    with pytest.raises(errors.CheckpointDTypeError, match=r"acme|float6"):
        ckpt["sub/w"]
    assert merge(where, tmp_path / "out").skipped == ["sub/w"]
    files[0].write_text("{")  # damage is not taken for it
    with pytest.raises(errors.CorruptCheckpoint):
        open_checkpoint(where)


def test_rules_do_not_hide_lost_chunks(tmp_path):
    where = group(tmp_path / "z", 3)
    (where / "w" / "c" / "0" / "0").unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match="c/0/0"):
        merge(where, tmp_path / "out", rules="w -> v, permute([1, 0])")


def test_many_chunks_that_were_never_written_are_counted_not_listed(tmp_path):
    zarr.create_array(tmp_path / "z", shape=(1 << 50,), chunks=(1 << 10,), dtype="u1")
    with pytest.raises(errors.IncompleteCheckpoint, match=f"{1 << 40} chunks"):
        verify(tmp_path / "z")


@pytest.mark.parametrize("shape", [(1 << 62,), (1 << 40, 1 << 40), ((1 << 63) - 1,)])
def test_absurd_sizes_are_typed(tmp_path, shape):
    zarr.create_array(tmp_path / "z", shape=(4,), chunks=(4,), dtype="f8")
    meta = tmp_path / "z" / "zarr.json"
    text = meta.read_text().replace('"shape": [\n    4\n  ]', f'"shape": {list(shape)}')
    if len(shape) == 2:
        text = text.replace('"chunk_shape": [\n        4\n      ]', '"chunk_shape": [4, 4]')
    meta.write_text(text)
    for use in (load, verify, lambda p: open_checkpoint(p)["z"][:], lambda p: merge(p, tmp_path / "out")):
        with pytest.raises(errors.CheckpointError):
            use(tmp_path / "z")


BIG = 64 << 20
BOMBS = {
    "zstd": lambda: compress(np.zeros(BIG, "u1"), 3),
    "gzip": lambda: gzip.compress(bytes(BIG), 9),
    "blosc": lambda: numcodecs.Blosc("zstd", 9).encode(np.zeros(BIG, "u1")),
}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("codec", BOMBS)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_chunk_that_unpacks_to_more_than_its_metadata_says(tmp_path, version, codec, sharded, peak_of):
    if version == 2 and sharded:
        pytest.skip("Zarr v2 has no shards")
    made = {
        "zstd": (zarr.codecs.ZstdCodec(), numcodecs.Zstd()),
        "gzip": (zarr.codecs.GzipCodec(), numcodecs.GZip()),
        "blosc": (zarr.codecs.BloscCodec(), numcodecs.Blosc()),
    }[codec][version == 2]
    kw = {"shards": (1024,)} if sharded else {}
    a = zarr.create_array(
        tmp_path / "z", shape=(1024,), chunks=(1024,), dtype="f4", compressors=made, zarr_format=version, **kw
    )
    a[...] = np.arange(1024)
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "z")["z"][:], np.arange(1024))
    file = tmp_path / "z" / ("0" if version == 2 else "c/0")
    bomb = BOMBS[codec]()
    if sharded:
        index = np.array([0, len(bomb)], "<u8").tobytes()
        import google_crc32c

        bomb += index + google_crc32c.value(index).to_bytes(4, "little")
    file.write_bytes(bomb)

    def refused():
        with pytest.raises(errors.CheckpointError, match="unpacks"):
            load(tmp_path / "z")

    assert peak_of(refused, below=BIG // 4) < BIG // 4


@pytest.mark.parametrize("name", ["zlib", "bz2", "lzma", "lz4"])
def test_lengths_by_other_codecs(name):
    codec = {"zlib": numcodecs.Zlib, "bz2": numcodecs.BZ2, "lzma": numcodecs.LZMA, "lz4": numcodecs.LZ4}[name]()
    data = bytes(codec.encode(np.zeros(5 << 20, "u1")))
    assert _NBYTES[name](data, 1 << 30) == 5 << 20
    assert _NBYTES[name](data, 1 << 20) > 1 << 20


def test_zstd_frames_that_do_not_say_their_length():
    # One RLE block of 100 bytes, as a streaming encoder may write it: within any limit.
    frame = b"\x28\xb5\x2f\xfd" + bytes([0, 0x50]) + (1 | 1 << 1 | 100 << 3).to_bytes(3, "little") + b"a"
    assert _NBYTES["zstd"](frame, 10) == 0
    many = b"\x28\xb5\x2f\xfd" + bytes([0, 0x50]) + ((1 << 1 | (100 << 10) << 3).to_bytes(3, "little") + b"a") * 2000
    assert _NBYTES["zstd"](many, 1 << 20) > 1 << 20
