"""Manifests of earlier versions: steps in order."""

import copy

import pytest

from meshtape import errors
from meshtape.storage.format import manifest
from meshtape.storage.format.migrations import upgraded


def one(d):
    d["arrays"] = [{"name": a} for a in d.pop("tensors")]
    return d


def two(d):
    for a in d["arrays"]:
        a["attributes"] = {"scale": float("nan"), "sizes": [[1, 2]]}
    return d


def three(d):
    for a in d["arrays"]:
        a["attributes"]["sizes"][0].append(3)  # an attribute within an attribute
    return d | {"names": [a["name"] for a in d["arrays"]]}


STEPS = [one, two, three]
OLD = {"version": 1, "tensors": ["a", "b"], "extra": {"kept": True}}


def run(document, steps=STEPS):
    return upgraded(copy.deepcopy(document), steps, "m", errors.CorruptCheckpoint)


def test_a_chain_is_the_steps_one_after_the_other():
    direct, stepwise = run(OLD), OLD
    for n in (1, 2, 3):
        stepwise = run(stepwise, STEPS[:n])
    assert repr(stepwise) == repr(direct)  # repr, as NaN is not equal to itself
    assert direct["version"] == 4
    assert direct["names"] == ["a", "b"]
    assert direct["arrays"][1]["attributes"]["sizes"] == [[1, 2, 3]]
    assert direct["extra"] == {"kept": True}


def test_later_and_impossible_versions():
    with pytest.raises(errors.UnsupportedVersion, match="format version 5; this meshtape reads up to version 4"):
        run(OLD | {"version": 5})
    for version in (0, -1, "1", 1.0, None, True):
        with pytest.raises(errors.CorruptCheckpoint, match="is not a version"):
            run(OLD | {"version": version})


def test_a_document_that_is_not_of_its_version():
    for broken in ({"version": 1}, {"version": 1, "tensors": 3}, {"version": 2, "arrays": [3]}):
        with pytest.raises(errors.CorruptCheckpoint, match="does not have the form of version"):
            run(broken)


def test_manifests_use_it(monkeypatch):
    """As after the next release: what version 1 wrote is read through its step."""
    written = manifest.Manifest([], None, 3).dumps()
    monkeypatch.setattr(manifest, "MIGRATIONS", [lambda d: d | {"step": d["step"] + 100}])
    assert manifest.loads(written, "m").step == 103
    with pytest.raises(errors.CorruptCheckpoint, match="crc32c"):
        manifest.loads(written.replace(b'"step":3', b'"step":4'), "m")
