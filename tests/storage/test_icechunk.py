"""Saves into icechunk repositories: one snapshot a step, whole or not at all, read by branch, tag or snapshot."""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime

import ml_dtypes
import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

import meshtape as mt
from meshtape import errors
from meshtape.cli.main import main
from meshtape.storage import (
    convert,
    diff,
    icechunk_references,
    load,
    merge,
    open_checkpoint,
    options,
    save,
    save_async,
    save_safetensors,
    serve,
    verify,
    virtual,
)
from meshtape.storage.browse.model.layout import chunk_map
from meshtape.storage.foreign import icechunk
from meshtape.storage.saving import icechunk_commit
from meshtape.storage.stores import icechunk_store, store


def test_a_location_names_a_branch_and_the_package_is_asked_for(monkeypatch, tmp_path):
    assert store.location("icechunk:///a/b") == "icechunk:///a/b@main"
    assert store.location("icechunk://s3://bucket//x/@v1") == "icechunk://s3://bucket/x@v1"
    for bad in ("icechunk:///a@b@c", "icechunk://", "icechunk:///a@"):
        with pytest.raises(errors.CheckpointError, match="icechunk location"):
            store.location(bad)
    monkeypatch.setitem(sys.modules, "icechunk", None)
    for work in (lambda u: save(u, {"w": np.ones(2)}), open_checkpoint):
        with pytest.raises(errors.StoreError, match=r"pip install 'meshtape\[icechunk\]'"):
            work(f"icechunk://{tmp_path}/nothing")


@pytest.fixture
def ice():
    return pytest.importorskip("icechunk")


@pytest.fixture
def url(ice, tmp_path):
    return f"icechunk://{tmp_path / 'repo'}"


@pytest.fixture(params=["disk", pytest.param("s3", marks=pytest.mark.slow)])
def anywhere(request, url):
    """On a disk and in a bucket."""
    return url if request.param == "disk" else f"icechunk://{request.getfixturevalue('s3').url}"


@pytest.fixture
def tree(kit):
    held = {f"{d.name}{s}": kit.random(d, s, i) for i, d in enumerate(kit.DTYPES) for s in kit.SHAPES}
    blocks = kit.split(kit.random(np.dtype("f4"), (300, 500)), kit.Sharding(kit.Host({"x": 2, "y": 2}), (0, 1)))
    return {"layers": [held, {"blocks": blocks, "zeros": np.zeros((700, 900), "f4")}], "lr": 0.1, "t": (1, None)}


def test_trees_come_back_exactly_and_every_function_reads_them(kit, anywhere, tree, tmp_path):
    url = anywhere
    first = save(url, tree, step=1, metadata={"loss": float("inf")})
    save(tmp_path / "plain", tree)
    ckpt = open_checkpoint(url)
    assert (ckpt.kind, ckpt.step, ckpt.metadata) == ("icechunk", 1, {"loss": float("inf")})
    assert ckpt.structure["t"] == (1, None)
    assert diff(tmp_path / "plain", url).same
    assert verify(url).uncovered == []
    kept = ckpt["layers.1.blocks"][3:9, ::7]
    save(url, {"w": np.ones(3)}, step=2, message="smaller")
    assert open_checkpoint(url).step == 2
    assert list(open_checkpoint(url)) == ["w"]  # nothing of the step before
    assert kit.same(ckpt["layers.1.blocks"][3:9, ::7], kept)  # an open checkpoint stays at its snapshot
    assert diff(tmp_path / "plain", first.path).same
    convert(first.path, tmp_path / "z", format="zarr")
    assert diff(tmp_path / "z", first.path).same
    merge(url, tmp_path / "hf")
    host = kit.Host({"x": 3}, processes=3)
    got = load(first.path, shardings=lambda p, shape, dtype: kit.Sharding(host, (0,)) if len(shape) == 2 else None)
    assert kit.same(got["layers"][1]["zeros"].whole(), np.zeros((700, 900), "f4"))


def test_xarray_opens_a_save_as_a_plain_one(ice, url, tmp_path):
    xarray = pytest.importorskip("xarray")
    tree = {"w": np.arange(12.0).reshape(3, 4), "deep": {"n": np.arange(3)}, "scalar": np.float32(2)}
    save(url, tree)
    save(tmp_path / "plain", tree)
    session = icechunk_store.repository(str(tmp_path / "repo")).readonly_session("main")
    seen, wanted = xarray.open_zarr(session.store, consolidated=False), xarray.open_zarr(tmp_path / "plain")
    xarray.testing.assert_equal(seen, wanted)
    assert seen.w.dims == wanted.w.dims
    assert open_checkpoint(url)["w"].dimension_names is None


def test_branches_tags_and_snapshots(ice, url, tmp_path):
    first = save(url, {"w": np.ones(2, ml_dtypes.bfloat16)}, step=1, message="the first")
    repo = icechunk_store.repository(str(tmp_path / "repo"))
    snapshot = first.path.rpartition("@")[2]
    repo.create_tag("v1", snapshot)
    save(f"{url}@side", {"w": np.ones(3)}, step=7)
    save(url, {"w": np.ones(4)}, step=2)
    steps = {ref: open_checkpoint(f"{url}@{ref}").step for ref in ("main", "side", "v1", snapshot)}
    assert steps == {"main": 2, "side": 7, "v1": 1, snapshot: 1}
    assert [a.message for a in repo.ancestry(branch="main")][:2] == ["step 2", "the first"]
    with pytest.raises(errors.NotACheckpoint, match="main, side, v1"):
        open_checkpoint(f"{url}@nothing")
    for ref in ("v1", snapshot):
        with pytest.raises(errors.CheckpointError, match="no branch"):
            save(f"{url}@{ref}", {"w": np.ones(2)})
    repo.create_branch("v1", snapshot)
    with pytest.raises(errors.CheckpointError, match="a branch and a tag"):
        open_checkpoint(f"{url}@v1")


def test_the_command_line_looks_at_repositories(ice, url, tmp_path):
    first = save(url, {"w": np.arange(6.0), "lr": 0.5}, step=1, message="the \x1b[2Jfirst").path.rpartition("@")[2]
    icechunk_store.repository(str(tmp_path / "repo")).create_tag("v1", first)
    second = save(f"{url}@side", {"w": np.ones(3)}, step=7).path.rpartition("@")[2]

    def call(*args, code=0):
        done = CliRunner().invoke(main, args)
        assert done.exit_code == code, done.output
        return json.loads(done.stdout) if "--json" in args else done.stdout + done.stderr

    held = call("ls", url, "--json")
    assert held["path"] == str(tmp_path / "repo")
    assert (held["branches"], held["tags"]) == ({"main": first, "side": second}, {"v1": first})
    assert [(s["id"], s["step"], s["refs"]) for s in held["snapshots"][:2]] == [
        (second, 7, ["side"]),
        (first, 1, ["main", "tag v1"]),
    ]
    assert held["snapshots"][1]["message"] == "the \x1b[2Jfirst"
    assert held["snapshots"][2]["step"] is None  # icechunk's own first one
    text = call("ls", url)
    assert "side" in text
    assert "step 7" in text
    assert "\x1b" not in text
    assert [r["name"] for r in call("ls", f"{url}@v1", "--json")["rows"]] == ["w"]
    assert call("show", f"{url}@{first}", "w", "--json")["max"] == 5
    assert call("browse", f"{url}@side", "--json")[0]["step"] == 7
    assert call("browse", url, "--json")[0]["step"] == 1  # main
    assert call("verify", url, "--json")["arrays"] == 1
    assert "no icechunk repository" in call("ls", "icechunk://" + str(tmp_path / "nothing"), code=1)
    ckpt = open_checkpoint(url)
    assert chunk_map(ckpt["w"], None, 0, (0,), check=True).chunks[0].state == "sound"


@pytest.fixture(params=["icechunk://{}", "{}"], ids=["url", "path"])
def repository(request, ice, tmp_path):
    """A repository of ten thousand float64, ten thousand others to which nothing leads, and its location."""
    place = tmp_path / "repo"
    save(f"icechunk://{place}", {"w": np.random.default_rng(0).random((100, 100)), "n": np.arange(3)}, step=1)
    save(f"icechunk://{place}@side", {"w": np.random.default_rng(1).random((100, 100))}, step=2)
    icechunk_store.repository(str(place)).delete_branch("side")
    return str(place), request.param.format(place)


def test_bytes_of_a_repository_are_those_that_icechunk_counts(repository, capsys):
    place, where = repository
    found = mt.storage.usage(where)
    files = [p for p in pathlib.Path(place).rglob("*") if p.is_file()]
    assert (found.path, found.nbytes) == (place, sum(p.stat().st_size for p in files))
    assert (found.chunks, found.inlined, found.virtual) == (80_004, 24 + 4, 0)
    assert 80_004 < found.unreachable < found.nbytes - 80_004
    assert mt.storage.usage(f"icechunk://{place}@main") == found
    said = json.loads(CliRunner().invoke(main, ["du", where, "--json"]).stdout)
    assert {**dataclasses.asdict(found), "file_nbytes": found.nbytes} == {**said, "nbytes": said["file_nbytes"]}
    assert "no branch or tag leads there" in CliRunner().invoke(main, ["du", where]).stdout


def test_history_that_others_have_shortened_is_seen(tmp_path):
    ice = pytest.importorskip("icechunk")
    for step in range(3):
        save(f"icechunk://{tmp_path}", {"w": np.full(1000, float(step))}, step=step)
    assert len(icechunk_store.history(str(tmp_path), 9).snapshots) == 4  # with the first, which is empty
    place = ice.local_filesystem_storage(str(tmp_path))
    ice.Repository.open(place).expire_snapshots(older_than=datetime.now(UTC))
    left = len(list(ice.Repository.open(place).ancestry(branch="main")))
    assert len(icechunk_store.history(str(tmp_path), 9).snapshots) == left < 4
    assert mt.storage.usage(tmp_path).unreachable > 0
    assert mt.storage.gc(tmp_path, older_than=-1)
    assert mt.storage.usage(tmp_path).unreachable == 0
    assert load(f"icechunk://{tmp_path}")["w"][0] == 2


def test_garbage_of_a_repository_is_deleted_by_icechunk(ice, repository):
    place, where = repository
    log = 1 if ice.__version__.startswith("1.") else 4096  # bytes: icechunk 2 notes what was done
    before = mt.storage.usage(where)
    assert mt.storage.gc(where) == []  # younger than a day: a save may be at work
    (left,) = mt.storage.gc(where, older_than=0, dry_run=True)
    assert (left.path, left.kind, left.nbytes, left.dead) == (place, "garbage", before.unreachable, True)
    assert mt.storage.leftovers(where, older_than=0) == [left]
    looked = mt.storage.usage(where)
    assert 0 <= looked.nbytes - before.nbytes < log
    assert dataclasses.replace(looked, nbytes=before.nbytes) == before
    said = CliRunner().invoke(main, ["gc", where, "--older-than", "0"]).stdout
    assert "no branch or tag leads to 1 chunk" in said
    after = mt.storage.usage(where)
    assert 0 <= after.nbytes - (before.nbytes - before.unreachable) < log
    assert after.unreachable == 0
    assert mt.storage.gc(where, older_than=0) == mt.storage.gc(where, older_than=1e30) == []
    assert verify(f"icechunk://{place}").arrays == 2


def test_the_path_of_a_repository_opens_its_main_branch(repository):
    place, where = repository
    assert diff(place, f"icechunk://{place}@main").same
    assert open_checkpoint(place).path.startswith(f"icechunk://{place}@")
    listed = [json.loads(CliRunner().invoke(main, ["ls", x, "--json"]).stdout) for x in (where, f"icechunk://{place}")]
    assert listed[0] == listed[1]
    assert list(listed[0]["branches"]) == ["main"]
    with pytest.raises(errors.CheckpointError, match="holds"):
        save(place, {"w": np.ones(2)}, overwrite=True)
    os.makedirs(f"{place}-not/snapshots")
    with pytest.raises(errors.NotACheckpoint, match="it holds snapshots/"):
        open_checkpoint(f"{place}-not")


def test_a_new_repository_has_no_checkpoint_yet(ice, url, tmp_path):
    repo = ice.Repository.create(ice.local_filesystem_storage(str(tmp_path / "repo")))
    first = repo.lookup_branch("main")
    for where in (url, tmp_path / "repo", f"{url}@{first}"):
        for read in (open_checkpoint, load, verify):
            with pytest.raises(errors.NotACheckpoint, match=f"snapshot {first} is not a checkpoint: it is empty"):
                read(where)
    found = CliRunner().invoke(main, ["ls", url])
    assert found.exit_code == 0
    assert first in found.output
    found = CliRunner().invoke(main, ["ls", f"{url}@{first}"])
    assert found.exit_code == 1
    assert "it is empty" in found.output
    save(url, {"w": np.ones(2)})
    assert list(open_checkpoint(url)) == ["w"]
    with pytest.raises(errors.NotACheckpoint, match="nothing lies at 'none'"):
        open_checkpoint(f"{url}@main/none")
    with pytest.raises(errors.CheckpointKeyError, match="main/none is no run"):
        virtual.mean(f"{url}@main/none")
    with pytest.raises(errors.NotACheckpoint, match="it is empty"):
        open_checkpoint(f"{url}@{first}")


@pytest.mark.parametrize("chosen", ["", "icechunk.set_logs_filter('debug');"])
def test_what_icechunk_prints_is_as_its_user_chose(ice, url, chosen):
    code = (
        "import sys, numpy as np; from meshtape.storage import save; from meshtape.storage.stores import "
        f"icechunk_store\n{'import icechunk;' * bool(chosen)} {chosen}\nsave(sys.argv[1], {{'w': np.ones(3)}})"
    )
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}  # version 2 prints on the latter
    said = subprocess.run([sys.executable, "-c", code, url], check=True, text=True, **both).stdout
    assert ("not safe for concurrent" in said, "DEBUG" in said) == (bool(chosen), bool(chosen))


def _messages(url):
    repo = icechunk_store.repository(icechunk_store.divide(store.location(url))[0])
    return [s.message for s in repo.ancestry(branch="main")]


def test_a_bucket_by_its_url_or_the_environment(ice, s3, monkeypatch):
    by_environment = f"icechunk://{s3.url}"
    save(by_environment, {"w": np.arange(5.0)}, step=1)
    endpoint = s3.environment["AWS_ENDPOINT_URL"]
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name)
    url = f"icechunk://{options(s3.url, endpoint=endpoint, region='us-east-1')}"
    assert open_checkpoint(url).step == 1
    alone = icechunk_store.alone

    @contextlib.contextmanager
    def late(place):
        monkeypatch.setattr(icechunk_store, "alone", alone)
        save(url, {"w": np.ones(9)}, step=2)  # before the other has committed
        yield

    monkeypatch.setattr(icechunk_store, "alone", late)
    with pytest.raises(errors.CheckpointExists, match="save again"):
        save(url, {"w": np.ones(7)}, step=3)
    assert _messages(url)[:2] == ["step 2", "step 1"]
    assert load(url)["w"].shape == (9,)
    # The answers to a commit are lost: it is not taken for another's.
    harmed = []

    def lost(number, method, path):
        if method == "PUT" and ("/refs/" in path or "/repo?" in path) and path not in harmed:
            harmed.append(path)
            return "lost"
        return None

    s3.proxy.fault = lost
    first = save(url, {"w": np.ones(4)}, step=4)
    assert harmed
    assert _messages(url)[:2] == ["step 4", "step 2"]
    assert open_checkpoint(url).path == first.path
    verify(url)


def test_what_is_refused(ice, url, tmp_path):
    import zarr

    with pytest.raises(errors.NotACheckpoint, match="no icechunk repository"):
        open_checkpoint(url)
    given = {"documents": {"config": {}}, "compression": "zstd", "pack": True, "dtype_fallback": "raw"}
    for name, value in (given | {"share": str(tmp_path), "layout": "dual", "overwrite": True}).items():
        with pytest.raises(errors.CheckpointError, match=f"no place for {name}="):
            save(url, {"w": np.ones(2)}, **{name: value})
    with pytest.raises(errors.CheckpointError, match="no option encryption"):
        save("icechunk://s3://bucket;encryption=AES256/run", {"w": np.ones(2)})
    plain = save(tmp_path / "z", {"w": np.ones(2)}).path
    for work in (lambda: convert(plain, url, format="zarr"), lambda: merge(plain, url)):
        with pytest.raises(errors.StoreError, match="read"):
            work()
    with pytest.raises(errors.CheckpointError, match="background"):
        save_async(url, {"w": np.ones(2)})
    with pytest.raises(errors.CheckpointError, match="message"):
        save(tmp_path / "plain", {"w": np.ones(2)}, message="x")
    repo = icechunk_store.repository(str(tmp_path / "repo"), create=True)
    session = repo.writable_session("main")
    zarr.create_group(session.store).create_array("theirs", data=np.arange(6.0))
    session.commit("by others")
    assert np.array_equal(open_checkpoint(url)["theirs"][:], np.arange(6.0))
    with pytest.raises(errors.CheckpointError, match="no checksums"):
        verify(url)
    with pytest.raises(errors.CheckpointExists, match="another program"):
        save(url, {"w": np.ones(2)})
    assert list(open_checkpoint(url)) == ["theirs"]


def test_arrays_that_others_commit_beside_ours_are_told_and_stay(ice, url, tmp_path):
    """An array of another program on a branch of ours is named where the branch is opened, and no save removes it."""
    save(url, {"w": np.ones(3), "deep": {"v": np.zeros(2)}}, step=1)
    repo = icechunk_store.repository(str(tmp_path / "repo"))
    save(url, {"w": np.ones(3), "deep": {"v": np.ones(2)}}, step=2)
    session = repo.writable_session("main")
    zarr.open_group(session.store, mode="a").create_array("deep/mine", data=np.arange(3.0))
    session.commit("mine")
    ckpt = open_checkpoint(url)
    assert sorted(ckpt) == ["deep.v", "w"]
    assert list(ckpt.skipped) == ["deep/mine"]
    assert list(verify(url).skipped) == ["deep/mine"]
    with pytest.raises(errors.CheckpointExists, match="another program wrote: deep/mine"):
        save(url, {"w": np.ones(3)}, step=3)
    assert np.array_equal(zarr.open_group(repo.readonly_session("main").store, mode="r")["deep/mine"], np.arange(3.0))
    session = repo.writable_session("main")
    group = zarr.open_group(session.store, mode="a")
    group.update_attributes({"meshtape": {"checkpoint": "{"}})
    session.commit("damaged")
    with pytest.raises(errors.CorruptCheckpoint, match="whose arrays"):
        save(url, {"w": np.ones(3)}, step=3)


def test_attributes_that_others_set_stay(ice, url, tmp_path):
    """Those of the root group and of arrays, before the first save and between two; a group of theirs is refused."""
    place = str(tmp_path / "repo")
    repo = icechunk_store.repository(place, create=True)

    def told(change):
        session = repo.writable_session("main")
        change(zarr.open_group(session.store, mode="a"))
        session.commit("theirs")

    told(lambda group: group.update_attributes({"title": "a run", "nested": {"x": [1, None, 2.5]}}))
    save(url, {"w": np.ones(3), "v": np.ones(2)}, step=1)
    told(lambda group: group["w"].update_attributes({"units": "m"}))
    told(lambda group: group.update_attributes({"owner": "them"}))
    for step in (2, 3):
        save(url, {"w": np.full(3, step), "u": np.ones(2)}, step=step)
    group = zarr.open_group(repo.readonly_session("main").store, mode="r")
    kept = {k: v for k, v in group.attrs.items() if k != "meshtape"}
    assert kept == {"title": "a run", "nested": {"x": [1, None, 2.5]}, "owner": "them"}
    assert (dict(group["w"].attrs), dict(group["u"].attrs)) == ({"units": "m"}, {})
    assert load(url)["w"].tolist() == [3] * 3
    assert not verify(url).skipped
    told(lambda group: group.create_group("notes", attributes={"why": "theirs"}))
    with pytest.raises(errors.CheckpointExists, match="another program wrote: notes"):
        save(url, {"w": np.ones(3)}, step=4)
    assert open_checkpoint(url).step == 3


def test_a_chunk_that_is_not_the_one_of_its_place_is_found(ice, url, tmp_path, kit):
    """icechunk compares nothing: a flip anywhere, a cut, a lost file and an exchange are errors that name key and
    chunk, never other numbers."""
    wanted = np.random.default_rng(0).normal(size=(300, 500)).astype("f4")
    blocks = kit.split(wanted, kit.Sharding(kit.Host({"x": 4}), (0,)))
    save(url, {"w": blocks, "b": 2 * wanted[:75]}, step=1)
    files = sorted((tmp_path / "repo" / "chunks").iterdir())
    kept = {path: path.read_bytes() for path in files}
    assert len(files) == 5
    assert len({len(data) for data in kept.values()}) == 1  # each could be taken for any other

    def harmed(now, error=errors.CorruptCheckpoint, says=r"chunk \(\d, 0\) of key '[wb]'"):
        for path, data in now.items():
            path.write_bytes(data)
        icechunk_store.forget()
        with pytest.raises(error, match=says):
            verify(url)
        if now[path][:-4] == kept[path][:-4]:  # the checksum beside the elements, for other readers
            assert kit.same(load(url)["w"], wanted)
        else:
            with pytest.raises(error, match=says):
                load(url)
        for path in now:
            path.write_bytes(kept[path])

    for path, data in list(kept.items())[:2]:
        for at in (0, len(data) // 2, len(data) - 1):
            harmed({path: data[:at] + bytes([data[at] ^ 8]) + data[at + 1 :]})
    for one, two in itertools.pairwise(files):
        harmed({one: kept[two], two: kept[one]}, says=r"chunk \(\d, 0\) of key '[wb]' is whole, but not the one")
    harmed({files[0]: b""}, errors.StoreError, "/c/[0-3]/0 cannot be read")
    icechunk_store.forget()
    assert verify(url).nbytes == 375 * 500 * 4


_WRITER = """
import sys, numpy as np
from meshtape import errors
from meshtape.storage import save
url, name, first, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
print("ready", flush=True)
for step in range(first, first + count):
    try:
        save(url, {"w": np.full((200, 300), step), "b": np.full(9, step)}, step=step, message=f"{name} {step}")
        print(f"{name} {step}", flush=True)
    except errors.CheckpointExists:
        pass
"""


def _writer(*args):
    command = [sys.executable, "-c", _WRITER, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _whole(url):
    ckpt = open_checkpoint(url)
    got = load(ckpt)
    assert {int(v) for a in ("w", "b") for v in np.asarray(got[a]).reshape(-1)} == {ckpt.step}
    verify(url)


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_the_last_snapshot(anywhere):
    url = anywhere
    save(url, {"w": np.full((200, 300), 0), "b": np.full(9, 0)}, step=0)
    rng, last = random.Random(0), 0
    for n in range(12):
        process = _writer(url, "x", last + 1, 100_000)
        process.stdout.readline()
        first = process.stdout.readline() if n % 2 else ""  # every other one may die in its first save
        time.sleep(rng.uniform(0.05, 0.6))
        os.kill(process.pid, signal.SIGKILL)
        lines = [first, *process.communicate()[0].splitlines()]
        said = [int(line.split()[1]) for line in lines if line.startswith("x ")]
        now = open_checkpoint(url).step
        # What a call has returned from is there; the one that was killed may be.
        assert now in {max([last, *said]), max([last, *said]) + 1}, n
        _whole(url)
        last = now
    assert last > 5


@pytest.mark.slow
def test_a_writer_killed_at_each_request_leaves_a_whole_snapshot(ice, s3):
    url = f"icechunk://{s3.url}"
    save(url, {"w": np.full((200, 300), 0), "b": np.full(9, 0)}, step=0)
    seen, last = set(), 0
    for n in range(1, 100):
        victim = []
        s3.proxy.reset(lambda number, method, path, n=n, victim=victim: victim[0] if number >= n else None)
        victim.append((process := _writer(url, "x", last + 1, 1)).pid)
        said = process.communicate()[0].splitlines()
        s3.proxy.reset()
        now = open_checkpoint(url).step
        assert now == last + 1 if said[1:] else now in (last, last + 1), n
        _whole(url)
        seen.add(now - last)
        last = now
        if process.returncode == 0:
            break
    assert process.returncode == 0
    assert seen == {0, 1}
    assert n > 5


@pytest.mark.slow
def test_two_writers_at_once_lose_nothing(anywhere):
    """Each save is a snapshot of the history or a typed error of its writer; readers beside them see one step at a
    time, by the branch, and always the same by a tag or snapshot."""
    url = anywhere
    first = save(url, {"w": np.full((200, 300), 0), "b": np.full(9, 0)}, step=0).path
    repository = icechunk_store.repository(icechunk_store.divide(store.location(url))[0])
    repository.create_tag("v0", first.rpartition("@")[2])
    both = [_writer(url, name, first, 25) for name, first in (("a", 100), ("b", 200))]
    while any(p.poll() is None for p in both):
        for place in (url, f"{url}@v0", first):
            _whole(place)
            assert place == url or open_checkpoint(place).step == 0
    said = {line for p in both for line in p.communicate()[0].splitlines() if line != "ready"}
    assert [p.returncode for p in both] == [0, 0]
    history = _messages(url)
    assert len(history) == len(set(history))
    assert said == {m for m in history if m[:2] in ("a ", "b ")}
    assert said


# ----- virtual chunks -------------------------------------------------------------------------------------------------

WEIGHTS = {"w": np.arange(5000.0).reshape(50, 100), "b": np.ones(3, "f4")}


def _referring(ice, tmp_path, source, prefix, held):
    """The location of a repository that refers to the tensors of a file below ``prefix``, of a store as icechunk has
    it."""
    config = ice.RepositoryConfig.default()
    config.set_virtual_chunk_container(ice.VirtualChunkContainer(prefix, held))
    storage = ice.local_filesystem_storage(str(tmp_path / "repo"))
    repo = ice.Repository.create(storage, config, authorize_virtual_chunk_access={prefix: None})
    repo.save_config()
    icechunk_references(source, repo)
    return f"icechunk://{tmp_path / 'repo'}"


@pytest.fixture
def referring(ice, tmp_path):
    (tmp_path / "my data").mkdir()
    save_safetensors(tmp_path / "my data" / "a#b%41.safetensors", WEIGHTS)
    held = ice.local_filesystem_store(str(tmp_path))
    return _referring(ice, tmp_path, tmp_path / "my data" / "a#b%41.safetensors", f"file://{tmp_path}/", held)


def test_virtual_chunks_are_fetched_where_the_location_allows_it(referring, tmp_path, kit):
    folder = f"file://{tmp_path}/my data"
    with pytest.raises(errors.StoreError, match="nothing is fetched without your word") as refused:
        load(referring)
    wanted = re.search(r'options\("(.+)", virtual_chunks="(.+)"\)', str(refused.value))
    for where in (
        options(wanted[1], virtual_chunks=wanted[2]),  # the line that the error gives
        options(referring, virtual_chunks=folder),
        f"{referring};virtual_chunks={folder}/@main",  # as a command line has it
        options(options(referring, virtual_chunks="file:///nowhere/"), virtual_chunks=f"file:///nowhere,{folder}"),
    ):
        assert all(kit.same(load(where)[n], WEIGHTS[n]) for n in WEIGHTS), where
    held = open_checkpoint(where)
    assert kit.same(held["w"][7:30:3, 5], WEIGHTS["w"][7:30:3, 5])
    with serve(where) as server:
        assert kit.same(open_checkpoint(server.url + "safetensors")["w"].read(), WEIGHTS["w"])
    with pytest.raises(errors.CheckpointError, match="no checksums"):
        verify(where)
    done = CliRunner().invoke(main, ["show", where, "w", "--json"])
    assert json.loads(done.stdout)["max"] == 4999
    other = options(referring, virtual_chunks=f"file://{tmp_path}/my")  # a folder, not the beginning of a name
    with pytest.raises(errors.StoreError, match=f"below file://{tmp_path}/my.*Allow it beside file://{tmp_path}/my/"):
        load(other)


def test_a_virtual_chunk_whose_file_changed_is_no_other_number(referring, tmp_path):
    where = options(referring, virtual_chunks=f"file://{tmp_path}")
    ckpt = open_checkpoint(where)
    (file,) = (tmp_path / "my data").iterdir()
    os.utime(file, (4e9, 4e9))  # as if written later: nothing here waits for the second to pass
    for read in (lambda: ckpt["w"][:3], lambda: load(where)):
        with pytest.raises(errors.CheckpointReplaced, match="is a virtual chunk, whose file is another"):
            read()
    file.unlink()
    with pytest.raises(errors.StoreError, match=r"cannot be fetched: .*Object at location .* not found"):
        load(where)


def _untimed(ice, tmp_path, prefix, held, file):
    """The location of an array of two chunks that are ranges of one file, by references without time and ETag."""
    import zarr

    config = ice.RepositoryConfig.default()
    config.set_virtual_chunk_container(ice.VirtualChunkContainer(prefix, held))
    repo = ice.Repository.create(ice.local_filesystem_storage(str(tmp_path / "repo")), config)
    session = repo.writable_session("main")
    group = zarr.create_group(session.store)
    group.create_array("x", shape=(8,), chunks=(4,), dtype="f4", compressors=None)
    for i in range(2):
        session.store.set_virtual_ref(f"x/c/{i}", prefix + file, offset=16 * i, length=16)
    session.commit("by others")
    return f"icechunk://{tmp_path / 'repo'}@main"


@pytest.fixture
def untimed(ice, tmp_path):
    """Such a location, and a function that puts a whole new file there."""
    (tmp_path / "data").mkdir()

    def put(value):
        np.full(8, value, "f4").tofile(tmp_path / "new")
        (tmp_path / "new").replace(tmp_path / "data" / "a b.bin")

    put(1)
    prefix = f"file://{tmp_path}/data/"
    where = _untimed(ice, tmp_path, prefix, ice.local_filesystem_store(str(tmp_path / "data")), "a b.bin")
    return options(where, virtual_chunks=prefix), put


def test_a_file_behind_references_without_a_time_is_not_mixed_with_another(untimed, monkeypatch, tmp_path):
    where, put = untimed
    ckpt = open_checkpoint(where)
    assert ckpt["x"][:4].tolist() == [1] * 4
    put(2)
    for read in (lambda: ckpt["x"][4:], lambda: merge(ckpt, tmp_path / "out")):
        with pytest.raises(errors.CheckpointReplaced, match=r"a b\.bin was replaced"):
            read()
    assert not (tmp_path / "out").exists()
    waiting = [lambda: put(3), lambda: None, lambda: put(4)]

    def reader(self, name, plain=icechunk_store.IcechunkStore.reader):
        found = plain(self, name)
        if waiting and "c/" in name:
            waiting.pop(0)()
        return found

    monkeypatch.setattr(icechunk_store.IcechunkStore, "reader", reader)
    assert np.asarray(load(where)["x"]).tolist() == [4] * 8
    waiting[:] = [lambda: put(5), lambda: None, lambda: put(6)]
    x = mt.from_zarr(f"{where}/x", mt.Mesh({"a": 2}), a=mt.Shard(0))
    assert np.asarray(x.load()).tolist() == [6] * 8


def test_served_ranges_behind_references_without_a_time_are_of_one_file(untimed):
    where, put = untimed

    def get(**headers):
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status, answer.headers["ETag"], answer.read()

    with serve(where, follow=True) as server:
        url = server.url + "safetensors/model.safetensors"
        _, etag, whole = get()
        put(2)
        with pytest.raises(urllib.error.HTTPError, match="409"):
            get(Range=f"bytes={len(whole) - 16}-", **{"If-Range": etag})
        status, now, found = get(Range=f"bytes={len(whole) - 16}-", **{"If-Range": etag})
        assert (status, now == etag) == (200, False)
        assert np.frombuffer(found[-32:], "f4").tolist() == [2] * 8


def test_an_object_behind_references_without_an_etag(ice, s3, tmp_path):
    bucket, rest = s3.url.removeprefix("s3://").split("/", 1)
    held = ice.s3_store(endpoint_url="http://127.0.0.1:9", allow_http=True, region="us-east-1")
    place = store.at(s3.url)
    place.put("a.bin", np.full(8, 1, "f4").tobytes())
    where = options(_untimed(ice, tmp_path, f"s3://{bucket}/{rest}/", held, "a.bin"), virtual_chunks=s3.url)
    ckpt = open_checkpoint(where)
    assert ckpt["x"][:4].tolist() == [1] * 4
    place.put("a.bin", np.full(8, 2, "f4").tobytes())
    with pytest.raises(errors.CheckpointReplaced, match=r"a\.bin was replaced"):
        ckpt["x"][4:]
    assert np.asarray(load(where)["x"]).tolist() == [2] * 8


def test_files_that_no_read_compares_are_told(untimed, monkeypatch):
    monkeypatch.setattr(icechunk, "_MOST", 0)
    with pytest.warns(UserWarning, match="refers to 1 files, too many to compare"):
        open_checkpoint(untimed[0])


def test_ranks_read_one_snapshot_of_a_branch(ice, url):
    save(url, {"w": np.full((4, 2), 1, "f4")})
    x = mt.from_zarr(f"{url}@main/w", mt.Mesh({"a": 2}), a=mt.Shard(0))
    save(url, {"w": np.full((4, 2), 2, "f4")})
    assert np.unique(np.asarray(x.load())).tolist() == [1]


@pytest.mark.parametrize("tail", ["../secret", "%2e%2e/secret", "..%2fsecret", "x/../../secret"])
def test_no_reference_leads_out_of_the_folder_that_is_allowed(ice, tmp_path, tail):
    import zarr

    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(b"S" * 100)
    config = ice.RepositoryConfig.default()
    config.set_virtual_chunk_container(
        ice.VirtualChunkContainer(f"file://{tmp_path}/", ice.local_filesystem_store(str(tmp_path)))
    )
    repo = ice.Repository.create(ice.local_filesystem_storage(str(tmp_path / "repo")), config)
    repo.save_config()
    session = repo.writable_session("main")
    zarr.create_group(session.store).create_array("w", shape=(100,), chunks=(100,), dtype="u1", compressors=None)
    session.store.set_virtual_ref("w/c/0", f"file://{folder}/{tail}", offset=0, length=100, validate_container=False)
    session.commit("by others")
    with pytest.raises(errors.StoreError, match=r"virtual chunk|cannot be read"):
        load(options(f"icechunk://{tmp_path}/repo", virtual_chunks=f"file://{folder}"))


def test_who_may_allow_virtual_chunks(referring, tmp_path):
    for bad in ("file:///", "/data", "s3://", "gs://bucket/", "https://me:secret@host/x"):
        with pytest.raises(errors.CheckpointError, match="virtual_chunks allows folders") as refused:
            options(referring, virtual_chunks=bad)
        assert "secret" not in str(refused.value)
    with pytest.raises(errors.CheckpointError, match="has no options"):
        options(referring, endpoint="http://localhost")
    where = options(referring, virtual_chunks=f"file://{tmp_path}")
    with pytest.raises(errors.CheckpointError, match="a save writes no virtual chunks"):
        save(where, {"w": np.ones(2)})
    # A document that somebody sends gives itself no leave.
    with pytest.raises(errors.CheckpointError, match="which only its reader may"):
        virtual.write(tmp_path / "doc.json", virtual.mean([where, where]))


def test_virtual_chunks_in_a_bucket(ice, s3, tmp_path, kit, monkeypatch):
    save_safetensors(f"{s3.url}/m.safetensors", WEIGHTS)
    bucket, rest = s3.url.removeprefix("s3://").split("/", 1)
    endpoint = s3.environment["AWS_ENDPOINT_URL"]
    elsewhere = {"endpoint_url": "http://127.0.0.1:9", "allow_http": True, "region": "us-east-1"}
    # The repository sends its readers' signatures to a server of its own, which they do not follow.
    referring = _referring(ice, tmp_path, f"{s3.url}/m.safetensors", f"s3://{bucket}/", ice.s3_store(**elsewhere))
    assert kit.same(load(options(referring, virtual_chunks=s3.url))["w"], WEIGHTS["w"])
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    prefix = options(f"s3://{bucket}/{rest}", endpoint=endpoint, region="us-east-1")
    assert kit.same(load(options(referring, virtual_chunks=prefix))["w"], WEIGHTS["w"])
    where = options(referring, virtual_chunks=prefix)
    save_safetensors(f"{options(s3.url, endpoint=endpoint)}/m.safetensors", {"w": WEIGHTS["w"] + 1}, overwrite=True)
    with pytest.raises(errors.CheckpointReplaced, match="whose file is another"):
        load(where)


_NOBODY = """
import os, sys, encodings.ascii
import numpy as np
import icechunk, zarr, meshtape as mt
mt.save(sys.argv[1], {"w": np.ones(2)})  # all that it imports may be read by root alone
os.setgid(65534), os.setuid(65534)
for url in sys.argv[1:]:
    try:
        mt.save(url, {"w": np.ones(2)})
    except mt.errors.StoreError as e:
        print("told:", e)
print(mt.storage.usage(sys.argv[1]).unreachable, mt.storage.gc(sys.argv[1], older_than=0, dry_run=True))
try:
    mt.storage.gc(sys.argv[1], older_than=0)
except mt.errors.StoreError as e:
    print("told:", e)
"""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root alone can become nobody")
def test_a_repository_that_may_not_be_written_is_told(ice):
    folder = tempfile.mkdtemp()  # nobody does not come to pytest's
    try:
        os.chmod(folder, 0o755)
        mt.save(f"icechunk://{folder}/repo", {"w": np.ones(3)})
        done = _saved_by_nobody([f"icechunk://{folder}/{name}" for name in ("repo", "new", "deep/new")])
    finally:
        shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("told:") == 4
    assert done.stdout.count("no permission to write in") == 4


def _saved_by_nobody(urls):
    return subprocess.run([sys.executable, "-c", _NOBODY, *urls], capture_output=True, text=True, timeout=120)


def test_a_branch_that_another_writer_makes_first_is_written_to(ice, tmp_path, monkeypatch):
    url = f"icechunk://{tmp_path}/repo"
    mt.save(url, {"w": np.ones(3)})
    repo = icechunk_store.repository(f"{tmp_path}/repo", create=True)
    repo.create_branch("fresh", repo.lookup_branch("main"))
    asked = iter([{"main"}])
    real = type(repo).list_branches
    monkeypatch.setattr(type(repo), "list_branches", lambda self: next(asked, None) or real(self))
    mt.save(f"{url}@fresh", {"w": np.full(3, 2.0)})
    monkeypatch.undo()
    assert mt.load(f"{url}@fresh")["w"].tolist() == [2.0] * 3


def test_a_read_makes_no_folder(ice, tmp_path):
    with pytest.raises(mt.errors.NotACheckpoint, match="no icechunk repository"):
        mt.load(f"icechunk://{tmp_path / 'none'}")
    assert not (tmp_path / "none").exists()


def test_a_full_disk_is_storage_full(ice, tmp_path, monkeypatch):
    """Icechunk gives the system's error as a text alone."""
    url = f"icechunk://{tmp_path}/repo"
    mt.save(url, {"w": np.ones(3)})

    def full(*_):
        raise ice.IcechunkError("Unable to copy data to file: No space left on device (os error 28)")

    monkeypatch.setattr(icechunk_commit, "_write", full)
    with pytest.raises(errors.StorageFull, match=r"could not write: .*No space left on device.*storage\.gc"):
        mt.save(url, {"w": np.zeros(3)})
    assert mt.load(url)["w"].tolist() == [1.0] * 3


def test_folders_of_a_repository_that_may_not_be_read(ice, tmp_path, monkeypatch):
    """Icechunk takes them for empty, and says that a snapshot is not there."""
    mt.save(f"icechunk://{tmp_path}/repo", {"w": np.ones(3)})
    icechunk_store.forget()
    access = os.access
    monkeypatch.setattr(os, "access", lambda p, mode: os.path.basename(p) != "snapshots" and access(p, mode))
    for where in (f"icechunk://{tmp_path}/repo", tmp_path / "repo"):
        with pytest.raises(errors.StoreError, match=r"repo/snapshots cannot be read: Permission denied"):
            mt.load(where)


def test_a_snapshot_that_is_lost_is_typed(ice, tmp_path):
    mt.save(f"icechunk://{tmp_path}/repo", {"w": np.ones(3)})
    icechunk_store.forget()
    shutil.rmtree(tmp_path / "repo" / "snapshots")
    (tmp_path / "repo" / "snapshots").mkdir()
    with pytest.raises(errors.StoreError, match=r"cannot (be )?read.*: .*not found"):
        mt.load(f"icechunk://{tmp_path}/repo")


def chunk_files(tmp_path):
    return {p.name for p in (tmp_path / "repo" / "chunks").iterdir()}


def test_snapshots_share_chunks_that_did_not_change(ice, anywhere, kit):
    """Ten steps of a tree with 95 % frozen arrays take 1.6 times one at most, split arrays too, and each is whole."""
    frozen = {f"f{i}": kit.random(np.dtype("f4"), (64, 512), i) for i in range(18)}
    host = kit.Sharding(kit.Host({"x": 2, "y": 2}), (0, 1))
    split = kit.random(np.dtype("f4"), (64, 512), 50)
    at, trees = {}, {}
    for step in range(10):
        trees[step] = {**frozen, "w": kit.random(np.dtype("f4"), (64, 512), 100 + step)}
        at[step] = save(anywhere, {**trees[step], "split": kit.split(split, host), "step": step}, step=step).path
        if not step:
            first = mt.storage.usage(anywhere).nbytes
    assert mt.storage.usage(anywhere).nbytes < 1.6 * first
    for step, path in at.items():
        found = load(path)
        assert found["step"] == step
        assert all(kit.same(found[n], a) for n, a in {**trees[step], "split": split}.items())
        assert verify(path).uncovered == []


def test_a_chunk_is_shared_by_its_bytes(ice, url, tmp_path, monkeypatch):
    """Not by its checksum, its place, or the words of another program."""
    place = ice.local_filesystem_storage(str(tmp_path / "repo"))
    x = np.arange(1200.0).reshape(40, 30)
    save(url, {"x": x, "y": x + 1, "z": x + 2}, step=1)
    before = chunk_files(tmp_path)
    assert save(url, {"x": x, "y": x + 1, "z": x + 2}, step=2).path != save(url, {"x": x, "y": x + 1, "z": x + 2}).path
    assert chunk_files(tmp_path) == before
    # Of equal checksums the bytes are compared.
    monkeypatch.setattr(icechunk_commit, "crc32c", lambda data: 7)
    for number in (1.0, 2.0):
        save(url, {"x": np.full(3, number)})
        session = ice.Repository.open(place).readonly_session("main")
        raw = sync(session.store.get("x/c/0", default_buffer_prototype())).to_bytes()
        assert raw == np.full(3, number).tobytes() + (7).to_bytes(4, "little")
    monkeypatch.undo()
    held = {"x": x, "y": x + 1, "z": x + 2}
    save(url, held)
    # Others write a chunk of one array, make another anew in other codecs, and delete a chunk of the third.
    session = ice.Repository.open(place).writable_session("main")
    group = zarr.open_group(session.store, mode="r+")
    group["x"][:] = -1
    group.create_array("y", data=x, chunks=(40, 30), overwrite=True)
    sync(session.store.delete("z/c/0/0"))
    session.commit("by others")
    save(url, held, step=4)
    assert all(np.array_equal(load(url)[n], a) for n, a in held.items())
    assert verify(url).uncovered == []
    # What has another form, and what is no longer in the tree, goes.
    save(url, {"x": x.astype("f4"), "y": x[:20]}, step=5)
    assert {n: (a.shape, a.dtype.name) for n, a in open_checkpoint(url).items()} == {
        "x": ((40, 30), "float32"),
        "y": ((20, 30), "float64"),
    }
    assert sorted(zarr.open_group(ice.Repository.open(place).readonly_session("main").store, mode="r")) == ["x", "y"]


def test_a_process_that_sees_another_disk_writes_nothing(kit, url, tmp_path):
    """icechunk would make a repository there."""
    blocks = kit.split(np.ones((4, 4)), kit.Sharding(kit.Host({"x": 2}), (0, None)))
    save(url, {"w": blocks})
    assert not [p for p in (tmp_path / "repo").iterdir() if p.name.startswith(".")]
    with pytest.raises(errors.CheckpointError, match=r"rank 1 does not see .*a file system that all workers share"):
        icechunk_commit.write_blocks({1: (store.location(url), str(tmp_path / "gone"), None, [])}, {})


@pytest.mark.parametrize("damage", [lambda b: b[:7], lambda b: b"", lambda b: b.replace(b'"', b"'", 1)])
def test_a_damaged_branch_of_a_repository_that_is_known_is_typed(ice, tmp_path, damage):
    place, where = str(tmp_path / "repo"), f"icechunk://{tmp_path / 'repo'}"
    save(where, {"w": np.ones(3)})
    load(where)
    if not (ref := tmp_path / "repo" / "refs" / "branch.main" / "ref.json").exists():
        pytest.skip("this icechunk keeps its branches elsewhere")
    ref.write_bytes(damage(ref.read_bytes()))
    for act in (open_checkpoint, load, verify, lambda u: save(u, {"w": np.ones(3)}), lambda u: mt.storage.usage(place)):
        with pytest.raises(errors.StoreError):
            act(where)


def test_verify_looks_at_the_disk_and_not_at_what_is_remembered(ice, url, tmp_path):
    save(url, {"w": np.random.default_rng(0).normal(size=(40, 30))})
    load(url)
    assert verify(url).uncovered == []
    for file in (tmp_path / "repo" / "manifests").iterdir():
        file.unlink()
    with pytest.raises(errors.MeshtapeError):
        verify(url)
