"""Copies and pickles of meshes, shardings and functions of functions: they work, or say what to do instead."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import meshtape as mt
from meshtape.errors import MeshError

cloudpickle = pytest.importorskip("cloudpickle")


def squares(x):
    return mt.sum(x * x)


@mt.compile
def decorated(x):
    return x * 3.0


WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "in a dict": lambda x: copy.deepcopy({"k": [x]})["k"][0]}
PICKLES = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "cloudpickle": lambda x: pickle.loads(cloudpickle.dumps(x)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_mesh_is_that_mesh(way):
    mesh = mt.Mesh({"a": 2})
    x = mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0))
    assert WAYS[way](mesh) is mesh
    assert WAYS[way](x.sharding) == x.sharding
    assert WAYS[way](x.sharding).mesh is mesh
    assert (mt.distribute(np.ones(4), WAYS[way](x.sharding)) + x).tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("way", PICKLES)
def test_a_mesh_is_not_pickled_and_says_why(way):
    mesh = mt.Mesh({"a": 2})
    x = mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0))
    for held in (mesh, x.sharding, {"k": [mesh]}):
        with pytest.raises(MeshError, match=r"Mesh\(a=2\) .* cannot be pickled: make a mesh where it is needed"):
            PICKLES[way](held)
    assert PICKLES[way](x).tolist() == x.tolist()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [mt.compile, mt.grad, mt.value_and_grad, mt.checkpoint])
def test_copies_of_functions(make, way):
    fn = make(squares)
    assert WAYS[way](fn) is fn


@pytest.mark.parametrize("make", [mt.compile, mt.grad, mt.value_and_grad, mt.checkpoint])
def test_functions_that_are_sent_elsewhere(make):
    here, there = make(squares), PICKLES["cloudpickle"](make(squares))
    x = mt.asarray([1.0, 2.0])
    for a, b in zip(mt.tree.flatten(here(x))[0], mt.tree.flatten(there(x))[0], strict=True):
        assert a.tolist() == b.tolist()


@pytest.mark.parametrize("way", PICKLES)
def test_compiled_functions_keep_their_options_and_are_traced_anew(way):
    fn = mt.compile(squares, cache_size=3, donate=0)
    fn(mt.ones(2))
    back = PICKLES[way](fn)
    assert (back._cache_size, back._donate, back.signatures) == (3, (0,), 0)
    assert float(back(mt.ones(2))) == 2.0
    assert PICKLES[way](decorated) is decorated


def test_optimizers_are_copied_and_sent():
    for way in (copy.deepcopy, PICKLES["cloudpickle"]):
        opt = way(mt.optim.adam(mt.optim.cosine(0.1, 3)))
        p, _ = opt.update(mt.ones(1), mt.ones(1), opt.init(mt.ones(1)))
        right = mt.optim.adam(mt.optim.cosine(0.1, 3))
        assert p.tolist() == right.update(mt.ones(1), mt.ones(1), right.init(mt.ones(1)))[0].tolist()
