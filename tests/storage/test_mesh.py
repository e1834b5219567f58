"""The same promises with meshtape's own mesh, through the public face."""

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.core.blocks import BlockHost, BlockSharding
from meshtape.storage import CheckpointManager, LoadReport, load, open_checkpoint, save, verify


def test_the_mesh_keeps_the_contracts():
    x = mt.distribute(mt.asarray(np.ones((5, 7))), mt.Mesh({"x": 2}), x=mt.Shard(0))
    assert isinstance(x.sharding, BlockSharding)
    assert isinstance(x.sharding.mesh, BlockHost)


@pytest.mark.parametrize("q", [{"t": 1}, {"t": 3}, {"a": 2, "b": 2}, {"a": 4, "b": 2}], ids=str)
def test_save_on_one_mesh_load_on_another(kit, tmp_path, q):
    mesh, target = mt.Mesh({"data": 2, "model": 2}), mt.Mesh(q)
    a = np.arange(35.0).reshape(5, 7)
    first, last = min(q), max(q)
    ways = [{}, {"data": mt.Shard(0)}, {"model": mt.Shard(1)}, {"data": mt.Shard(1), "model": mt.Shard(0)}]
    ways.append({"data": mt.Shard(0), "model": mt.Shard(0)})
    save(tmp_path / "c", {"w": [mt.distribute(mt.asarray(a), mesh, **w) for w in ways], "local": mt.asarray(a)})
    verify(tmp_path / "c")
    for wanted in [{}, {first: mt.Shard(0)}, {last: mt.Shard(1)}]:
        like = mt.distribute(mt.asarray(a), target, **wanted)
        report = LoadReport()
        got = load(tmp_path / "c", like={"w": [like] * len(ways), "local": mt.asarray(a)}, report=report)
        for x in got["w"]:
            assert x.sharding == like.sharding
            assert kit.same(x, a)
        assert report.bytes_read > 0
    assert open_checkpoint(tmp_path / "c")["w.1"].sharding_text == "data=Shard(0), model=Replicate()"


def test_values_that_are_still_partial_or_not_yet_computed(kit, tmp_path):
    mesh = mt.Mesh({"m": 2})
    a, b = np.arange(12.0).reshape(3, 4), np.arange(8.0).reshape(4, 2)
    y = mt.distribute(mt.asarray(a), mesh, m=mt.Shard(1)) @ mt.distribute(mt.asarray(b), mesh, m=mt.Shard(0))
    save(tmp_path / "c", {"y": y, "z": y + 1.0})
    assert kit.same(load(tmp_path / "c")["y"], a @ b)
    assert kit.same(load(tmp_path / "c")["z"], a @ b + 1.0)


def test_a_manager_restores_training_state_onto_fewer_ranks(kit, tmp_path):
    a = np.arange(24.0).reshape(6, 4)
    big, small = mt.Mesh({"x": 4}), mt.Mesh({"x": 2})
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(3, {"params": {"w": mt.distribute(mt.asarray(a), big, x=mt.Shard(0))}, "step": 3})
    like = {"params": {"w": mt.distribute(mt.zeros((6, 4), dtype=mt.float64), small, x=mt.Shard(0))}, "step": 0}
    got = manager.restore(like=like)
    assert got["step"] == 3
    assert kit.same(got["params"]["w"], a)


def test_arrays_of_several_meshes_and_of_none_in_one_save(kit, tmp_path):
    """As where a part of the ranks holds the experts: the checkpoint says of each array where it was, and loads onto
    one mesh or none."""
    a = np.arange(30.0).reshape(6, 5)
    every, some = mt.Mesh({"data": 4}), mt.Mesh({"expert": 2})
    tree = {
        "all": mt.distribute(mt.asarray(a), every, data=mt.Shard(0)),
        "some": mt.distribute(mt.asarray(a), some, expert=mt.Shard(1)),
        "here": mt.asarray(a),
    }
    save(tmp_path / "c", tree)
    verify(tmp_path / "c")
    ckpt = open_checkpoint(tmp_path / "c")
    assert ckpt.meshes == [{"data": 4}, {"expert": 2}]
    assert [ckpt[n].sharding_text for n in tree] == ["data=Shard(0)", "expert=Shard(1)", None]
    one = mt.Mesh({"x": 3})
    got = load(tmp_path / "c", shardings=lambda *_: mt.Sharding(one, x=mt.Shard(0)))
    assert all(kit.same(got[n], a) for n in tree)
    assert all(kit.same(v, a) for v in load(tmp_path / "c").values())
