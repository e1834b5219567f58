"""``overwrite=True`` replaces what a manifest or an index lists: documents stay, and for the sake of anything else the
place is refused."""

import errno
import os
import shutil

import numpy as np
import pytest

import meshtape as mt
from meshtape import errors, storage
from meshtape.storage import CheckpointManager, load, merge, save, save_safetensors
from meshtape.storage.stores import store
from meshtape.storage.stores.filesystem import Files, using

OLD, NEW = {"w": np.full((4, 4), 1.0, "f4")}, {"w": np.full((4, 4), 2.0, "f4")}


@pytest.fixture(params=["local", "s3"])
def place(request, tmp_path):
    if request.param == "local":
        return os.fspath(tmp_path)
    pytest.importorskip("obstore")
    return request.getfixturevalue("s3").url


def source(place):
    if not store.at(f"{place}/source").files():
        save(f"{place}/source", NEW)
    return f"{place}/source"


def program(at, k, **kw):
    held = np.full(3, float(k))
    mt.save_program(at, lambda x: x + held, mt.zeros(3), **kw)


# How a place is filled first, how it is replaced, and how its value is read.
VALUE = lambda at: float(np.asarray(load(at)["w"]).max())  # noqa: E731
WRITERS = {
    "save": (lambda at, place: save(at, OLD), lambda at, place: save(at, NEW, overwrite=True), VALUE),
    "save_async": (
        lambda at, place: save(at, OLD),
        lambda at, place: storage.save_async(at, NEW, overwrite=True).wait(),
        VALUE,
    ),
    "merge over a checkpoint": (
        lambda at, place: save(at, OLD),
        lambda at, place: merge(source(place), at, overwrite=True),
        VALUE,
    ),
    "merge over Hugging Face": (
        lambda at, place: merge(save(f"{place}/first", OLD).path, at, max_shard_bytes=16),
        lambda at, place: merge(source(place), at, overwrite=True),
        VALUE,
    ),
    "merge over a single file": (
        lambda at, place: save_safetensors(f"{at}/model.safetensors", OLD),
        lambda at, place: merge(source(place), at, overwrite=True),
        VALUE,
    ),
    "convert": (
        lambda at, place: merge(save(f"{place}/first", OLD).path, at),
        lambda at, place: storage.convert(source(place), at, format="zarr", overwrite=True),
        VALUE,
    ),
    "convert into packs": (
        lambda at, place: save(at, OLD, pack=False),
        lambda at, place: storage.convert(source(place), at, format="zarr", pack=True, overwrite=True),
        VALUE,
    ),
    "convert out of packs": (
        lambda at, place: save(at, OLD, pack=True),
        lambda at, place: storage.convert(source(place), at, format="zarr", pack=False, overwrite=True),
        VALUE,
    ),
    "reshard": (
        lambda at, place: save(at, OLD),
        lambda at, place: storage.reshard(source(place), at, mesh={"m": 2}, shardings={"w": {"m": 0}}, overwrite=True),
        VALUE,
    ),
    "a program": (
        lambda at, place: program(at, 1),
        lambda at, place: program(at, 2, overwrite=True),
        lambda at: float(np.asarray(mt.load_program(at)(mt.zeros(3))).max()),
    ),
}
STRANGERS = {
    "a file": ["pytorch_model.bin"],
    "a file of ours that no index lists": ["lora.safetensors"],
    "a nested run": ["run/step-00000001/meshtape.json"],
    "a foreign Zarr group": ["other/zarr.json", "other/c/0/0"],
    "a hidden file": [".env"],
    "a file among the chunks": ["w/notes.txt"],
    "many": [f"part-{i:02d}.bin" for i in range(20)],
}


def everything(at):
    return {e.name: store.at(at).get(e.name) for e in store.at(at).entries()}


@pytest.mark.parametrize("writer", WRITERS)
def test_documents_stay_and_the_checkpoint_is_replaced(place, writer):
    first, again, value = WRITERS[writer]
    at = f"{place}/at"
    first(at, place)
    documents = {"README.md": b"# mine", "tokenizer.json": b"{}", "vocab.txt": b"a b", "LICENSE": b"MIT"}
    for name, data in documents.items():
        store.at(at).put(name, data)
    assert value(at) == 1
    again(at, place)
    assert value(at) == 2
    for name, data in documents.items():
        assert store.at(at).get(name) == data
    again(at, place)  # and once more, over what has them now
    assert {n: d for n, d in everything(at).items() if n in documents} == documents


@pytest.mark.parametrize(
    ("place", "strangers"),
    [*(("local", s) for s in STRANGERS), ("s3", "a nested run"), ("s3", "a file of ours that no index lists")],
    indirect=["place"],
)
@pytest.mark.parametrize("writer", WRITERS)
def test_strangers_are_named_and_nothing_is_written(place, writer, strangers):
    first, again, value = WRITERS[writer]
    at = f"{place}/at"
    first(at, place)
    for name in STRANGERS[strangers]:
        store.at(at).put(name, b"mine")
    source(place)
    before = everything(at)
    around = sorted(store.at(place).folders())
    with pytest.raises(errors.CheckpointExists) as caught:
        again(at, place)
    assert STRANGERS[strangers][0].partition("/")[0] in str(caught.value)
    assert len(str(caught.value)) < 800
    assert everything(at) == before
    assert sorted(store.at(place).folders()) == around
    assert value(at) == 1


def test_what_is_no_checkpoint_is_never_replaced(place):
    import zarr

    held = {"group": "zarr", "home": "thesis.tex"}
    store.at(f"{place}/home").put("thesis.tex", b"x")
    if "://" in place:
        store.at(f"{place}/group").put("zarr.json", b"{}")
        store.at(f"{place}/group").put("a/zarr.json", b"{}")
    else:
        zarr.open_group(f"{place}/group", mode="w")["a"] = np.ones(3)
    for name in held:
        before = everything(f"{place}/{name}")
        for again in (
            lambda at: save(at, NEW, overwrite=True),
            lambda at: merge(source(place), at, overwrite=True),
            lambda at: storage.convert(source(place), at, format="zarr", overwrite=True),
            lambda at: program(at, 2, overwrite=True),
        ):
            with pytest.raises(errors.CheckpointExists, match="not a checkpoint"):
                again(f"{place}/{name}")
        assert everything(f"{place}/{name}") == before


def test_new_documents_replace_old_ones(place):
    at = f"{place}/at"
    merge(save(f"{place}/first", OLD, documents={"config": {"layers": 1}}).path, at)
    store.at(at).put("README.md", b"mine")
    merge(save(f"{place}/second", NEW, documents={"config": {"layers": 2}}).path, at, overwrite=True)
    assert storage.open_checkpoint(at).documents["config"] == {"layers": 2}
    assert store.at(at).get("README.md") == b"mine"


def test_a_damaged_checkpoint_can_be_replaced_and_strangers_in_it_cannot(tmp_path):
    save(tmp_path / "c", OLD)
    (tmp_path / "c" / "meshtape.json").write_bytes(b"{}")
    (tmp_path / "c" / "w" / "mine.txt").write_text("x")
    with pytest.raises(errors.CheckpointExists, match=r"w/mine\.txt"):
        save(tmp_path / "c", NEW, overwrite=True)
    (tmp_path / "c" / "w" / "mine.txt").unlink()
    save(tmp_path / "c", NEW, overwrite=True)
    assert VALUE(tmp_path / "c") == 2


def test_a_link_to_a_folder_is_a_stranger_and_a_linked_document_stays(tmp_path):
    save(tmp_path / "c", OLD)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_text("x")
    (tmp_path / "c" / "data").symlink_to("../data")
    (tmp_path / "blob").write_text("words")
    (tmp_path / "c" / "tokenizer.json").symlink_to("../blob")
    with pytest.raises(errors.CheckpointExists, match="data"):
        save(tmp_path / "c", NEW, overwrite=True)
    (tmp_path / "c" / "data").unlink()
    save(tmp_path / "c", NEW, overwrite=True)
    assert (tmp_path / "c" / "tokenizer.json").read_text() == "words"
    assert (tmp_path / "blob").read_text() == "words"


def test_what_comes_while_a_save_writes_is_not_lost(tmp_path, kit):
    from meshtape.storage.stores.filesystem import using

    save(tmp_path / "c", OLD)
    late = kit.Counting(8, lambda: (tmp_path / "c" / "mine.bin").write_text("x"))
    with using(late), pytest.raises(errors.CheckpointExists, match=r"mine\.bin"):
        save(tmp_path / "c", NEW, overwrite=True)
    assert (tmp_path / "c" / "mine.bin").read_text() == "x"
    assert VALUE(tmp_path / "c") == 1
    assert sorted(e.name for e in tmp_path.iterdir()) == ["c"]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_target_that_is_deleted_while_a_save_writes(tmp_path, monkeypatch, exchange):
    from meshtape.storage.commit import directory_commit
    from meshtape.storage.stores.filesystem import Files

    save(tmp_path / "c", OLD)
    look = directory_commit.check_target

    def deleting(target, overwrite, tables):
        found = look(target, overwrite, tables)
        if any(".tmp-" in e.name for e in tmp_path.iterdir()):
            shutil.rmtree(target)
        return found

    monkeypatch.setattr(directory_commit, "check_target", deleting)
    if not exchange:
        monkeypatch.setattr(Files, "exchange", lambda self, a, b: False)
    save(tmp_path / "c", NEW, overwrite=True)
    assert VALUE(tmp_path / "c") == 2
    assert [e.name for e in tmp_path.iterdir()] == ["c"]


def test_rotation_and_delete_keep_what_is_not_theirs(place):
    manager = CheckpointManager(f"{place}/run", keep=1)
    manager.save(1, OLD)
    store.at(manager.path(1)).put("notes.md", b"why this one diverged")
    with pytest.warns(UserWarning, match=r"kept .*step-00000001.*notes\.md"):
        manager.save(2, NEW)
    assert manager.steps() == [1, 2]
    with pytest.raises(errors.CheckpointExists, match=r"notes\.md"):
        manager.delete(1)
    assert manager.steps() == [1, 2]
    store.at(manager.path(1)).delete(["notes.md"])
    manager.delete(1)
    assert manager.steps() == [2]
    assert store.at(f"{place}/run").folders() == ["step-00000002"]


def test_the_command_names_the_strangers_too(tmp_path):
    from click.testing import CliRunner

    from meshtape.cli.main import main

    merge(save(tmp_path / "a", OLD).path, tmp_path / "hf")
    (tmp_path / "hf" / "mine.bin").write_text("x")
    done = CliRunner().invoke(main, ["merge", str(tmp_path / "a"), str(tmp_path / "hf"), "--overwrite"])
    assert done.exit_code == 1
    assert "mine.bin" in done.output


def test_a_checkpoint_of_another_kind_is_told_for_one(tmp_path):
    save(tmp_path / "a", {"w": np.ones(3)})
    merge(tmp_path / "a", tmp_path / "hf")
    with pytest.raises(
        errors.CheckpointExists,
        match=r"holds model\.safetensors.*not a checkpoint of the kind that is written: remove it",
    ):
        save(tmp_path / "hf", {"w": np.ones(3)}, overwrite=True)
    assert np.asarray(load(tmp_path / "hf")["w"]).tolist() == [1, 1, 1]


def test_a_place_that_is_refused_anyway_is_not_said_to_need_overwrite(tmp_path):
    """Another's file or folder, a virtual checkpoint's name that is a folder, and a file where a folder is wanted."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("x")
    (tmp_path / "f").write_text("x")
    save_safetensors(tmp_path / "a.safetensors", OLD)
    mean = storage.virtual.mean([tmp_path / "a.safetensors"])
    for act in (
        lambda at, **kw: save(at, NEW, **kw),
        lambda at, **kw: merge(tmp_path / "a.safetensors", at, **kw),
        lambda at, **kw: program(at, 1, **kw),
        lambda at, **kw: storage.virtual.write(at, mean, **kw),
    ):
        for name in ("mine", "f"):
            for kw in ({}, {"overwrite": True}):
                with pytest.raises(errors.CheckpointExists) as told:
                    act(tmp_path / name, **kw)
                assert "pass overwrite" not in str(told.value)
        with pytest.raises(errors.StoreError, match=rf"f/deep/x cannot be written \({tmp_path}/f\): Not a directory"):
            act(tmp_path / "f" / "deep" / "x")


class Lower(Files):
    """Overlayfs, where a folder of a lower layer is to be replaced."""

    def exchange(self, a, b):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), a)


@pytest.mark.parametrize("how", WRITERS)
def test_a_folder_that_cannot_be_moved_is_refused_and_nothing_is_left(tmp_path, how):
    fill, replace, value = WRITERS[how]
    place = os.fspath(tmp_path)
    source(place)
    at = f"{place}/x"
    fill(at, place)
    held = sorted(os.listdir(place))
    with using(Lower()), pytest.raises(errors.StoreError, match=r"x cannot be written.*overlayfs.*another place"):
        replace(at, place)
    assert (value(at), sorted(os.listdir(place))) == (1.0, held)


@pytest.mark.parametrize("how", ["link", "mount point"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_links_and_mount_points_are_named_as_such(tmp_path, monkeypatch, how, overwrite):
    save(tmp_path / "real", OLD)
    save(tmp_path / "source", NEW)
    at, told = tmp_path / "real", "is a mount point, which cannot be replaced"
    if how == "link":
        at, told = tmp_path / "link", "is a link to real, and only directories are replaced"
        at.symlink_to("real")
    else:
        monkeypatch.setattr(os.path, "ismount", lambda p: os.fspath(p) == str(at))
    for write in (
        lambda: save(at, NEW, overwrite=overwrite),
        lambda: merge(tmp_path / "source", at, overwrite=overwrite),
    ):
        with pytest.raises(errors.CheckpointExists, match=told):
            write()
    assert VALUE(at) == 1.0
    assert sorted(os.listdir(tmp_path)) == sorted({"real", "source", at.name})
