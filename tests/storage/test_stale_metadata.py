"""Each array's own metadata are the truth of a Zarr hierarchy: consolidated ones are a copy, which writers leave behind,
and lost or damaged ones are said."""

import json
import shutil

import numpy as np
import pytest
import zarr

import meshtape as mt
from meshtape import errors
from meshtape.storage.stores import store

NUMBERS = np.arange(16, dtype="f4").reshape(4, 4) / 2


def _anew(group, **said):
    said = {"shape": (4, 4), "chunks": (4, 4), "dtype": "f4"} | said
    array = group.create_array("x", overwrite=True, **said)
    array[...] = np.resize(NUMBERS * 3, array.shape).astype(array.dtype)


CHANGES = {
    "dtype": lambda g: _anew(g, dtype="i4"),
    "order of bytes": lambda g: _anew(g, dtype=">f4"),
    "shape": lambda g: _anew(g, shape=(4, 2), chunks=(4, 2)),
    "rows": lambda g: g["x"].append(NUMBERS[:3]),
    "chunks": lambda g: _anew(g, chunks=(2, 2)),
    "shards": lambda g: _anew(g, chunks=(2, 2), **({"shards": (4, 2)} if g.metadata.zarr_format == 3 else {})),
    "fill value": lambda g: _anew(g, fill_value=7, config={"write_empty_chunks": True}),
    "codecs": lambda g: _anew(g, compressors=None),
    "an array more": lambda g: g.create_array("sub/more", data=NUMBERS + 1),
}


def _stale(where, version, change):
    """A hierarchy that was changed after it was consolidated, and its arrays as they are now."""
    group = zarr.open_group(where, mode="w", zarr_format=version)
    group.create_array("x", data=NUMBERS, chunks=(4, 4))
    group.create_array("sub/y", data=NUMBERS, chunks=(2, 4))
    zarr.consolidate_metadata(where, zarr_format=version)
    group = zarr.open_group(where, mode="r+", use_consolidated=False)
    CHANGES[change](group)
    return {n: a[...] for n, a in group.members(max_depth=None) if isinstance(a, zarr.Array)}


def _as_zarr(place, _):
    group = zarr.open_group(mt.storage.as_zarr(place), mode="r")
    return {n: a[...] for n, a in group.members(max_depth=None) if isinstance(a, zarr.Array)}


def _served(place, _):
    with mt.storage.serve(place) as served:
        return mt.load(f"{served.url}safetensors")


READS = {
    "load": lambda place, _: mt.load(place),
    "slices": lambda place, _: {n: a[:] for n, a in mt.open_checkpoint(place).items()},
    "merge": lambda place, out: mt.load(mt.merge(place, out, missing="fill").path),
    "as_zarr": _as_zarr,
    "serve": _served,
}


def _same(found, wanted):
    flat = {"/".join(p) if isinstance(p, tuple) else p: np.asarray(a) for p, a in found.items()}
    assert flat.keys() == wanted.keys()
    for name, a in wanted.items():
        assert flat[name].dtype == a.dtype.newbyteorder("=")
        np.testing.assert_array_equal(flat[name], a)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("read", READS)
@pytest.mark.filterwarnings("ignore:.*not there", "ignore:.*onsolidated", "ignore::zarr.errors.ZarrUserWarning")
def test_the_arrays_own_metadata_are_read(tmp_path, version, change, read):
    wanted = _stale(tmp_path / "z", version, change)
    _same(READS[read](tmp_path / "z", tmp_path / "out"), wanted)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:.*not there", "ignore:.*onsolidated")
def test_in_an_object_store_they_are_read_or_the_difference_is_named(tmp_path, request, version, change):
    """There each of them is a request, so they are looked at when the array is read."""
    pytest.importorskip("obstore")
    wanted, place = _stale(tmp_path / "z", version, change), f"memory://{abs(hash(request.node.nodeid)):x}"
    for file in filter(lambda f: f.is_file(), (tmp_path / "z").rglob("*")):
        store.at(place).put(str(file.relative_to(tmp_path / "z")), [file.read_bytes()])
    same = change not in ("dtype", "shape", "rows", "chunks", "shards")
    for read in ("load", "slices", "merge", "as_zarr"):
        if same:
            _same(READS[read](place, tmp_path / read), wanted)
        else:
            told = r"'x' was opened as float32\[4, 4\].*zarr\.consolidate_metadata"
            with pytest.raises(errors.CheckpointError, match=told):
                READS[read](place, tmp_path / read)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.filterwarnings("ignore:.*onsolidated")
def test_lost_chunks_are_looked_for_in_the_grid_that_is_there(tmp_path, version):
    _stale(tmp_path / "z", version, "chunks")
    lost = "c/1/1" if version == 3 else "1.1"
    (tmp_path / "z" / "x" / lost).unlink()
    with pytest.warns(UserWarning, match=rf"1 chunk of key 'x' is not there \({lost}\)"):
        mt.load(tmp_path / "z")
    with pytest.raises(errors.IncompleteCheckpoint, match="1 chunk of key 'x'"):
        mt.merge(tmp_path / "z", tmp_path / "out")


def _group(where, version, consolidated):
    group = zarr.open_group(where, mode="w", zarr_format=version)
    for name in ("x", "y", "sub/x"):
        group.create_array(name, data=NUMBERS, chunks=(2, 4))
    if consolidated:
        zarr.consolidate_metadata(where, zarr_format=version)
    return {2: ".zarray", 3: "zarr.json"}[version]


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("name", ["x", "sub/x"])
@pytest.mark.parametrize("how", ["a member less", "lost", "with its folder"])
@pytest.mark.filterwarnings("ignore:.*onsolidated")
def test_arrays_with_damaged_or_lost_metadata_are_named(tmp_path, version, consolidated, name, how):
    file = tmp_path / "z" / name / _group(tmp_path / "z", version, consolidated)
    if how == "lost":
        file.unlink()
    elif how == "with its folder":
        shutil.rmtree(file.parent)
        if not consolidated:  # then nothing tells of it
            assert len(mt.load(tmp_path / "z")) == 2
            return
    else:
        said = json.loads(file.read_text())
        del said["fill_value"]
        file.write_text(json.dumps(said))
    damaged = how == "a member less"
    error = errors.CorruptCheckpoint if damaged else errors.IncompleteCheckpoint
    told = rf"key '{name}'.*fill_value" if damaged else rf"1 array without metadata .*: {name};"
    for read in (mt.load, mt.open_checkpoint, lambda p: mt.merge(p, tmp_path / "out")):
        with pytest.raises(error, match=told):
            read(tmp_path / "z")


@pytest.mark.filterwarnings("error")
def test_other_files_and_folders_in_a_hierarchy_are_passed_over(tmp_path):
    """Also without zarr's warning of each."""
    _group(tmp_path / "z", 3, False)
    for name in ("plots/1.png", "logs/2024/1.txt", "notes.txt", "empty/0/1/.keep"):
        (tmp_path / "z" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "z" / name).write_text("other")
    assert len(mt.load(tmp_path / "z")) == 3


@pytest.mark.filterwarnings("ignore:.*onsolidated")
def test_integers_that_became_short_floats_of_as_many_bits(tmp_path, request):
    """Zarr v2 has no name for these, so that zarr takes them for integers."""
    pytest.importorskip("obstore")
    group = zarr.open_group(tmp_path / "z", mode="w", zarr_format=2)
    group.create_array("x", data=np.arange(4, dtype="u2"), compressors=None)
    zarr.consolidate_metadata(tmp_path / "z", zarr_format=2)
    file = tmp_path / "z" / "x" / ".zarray"
    file.write_text(file.read_text().replace('"<u2"', '"bfloat16"'))
    (tmp_path / "z" / "x" / "0").write_bytes(NUMBERS[0].astype(mt.bfloat16).tobytes())
    found = mt.load(tmp_path / "z")["x"]
    assert (found.dtype, np.asarray(found).tolist()) == (mt.bfloat16, NUMBERS[0].tolist())
    place = f"memory://{abs(hash(request.node.nodeid)):x}"
    for file in filter(lambda f: f.is_file(), (tmp_path / "z").rglob("*")):
        store.at(place).put(str(file.relative_to(tmp_path / "z")), [file.read_bytes()])
    with pytest.raises(errors.CorruptCheckpoint, match=r"opened as uint16\[4\].*say bfloat16\[4\]"):
        mt.load(place)
