"""Manifests of earlier versions: steps in order, each once, none missing."""

import copy

import pytest

from meshtape import errors
from meshtape.storage.format import manifest
from meshtape.storage.format.migrations import Migrations


def chain_of(last):
    chain = Migrations(last)

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

    for v, step in enumerate((one, two, three), 1):
        if v < last:
            chain.step(v)(step)
    chain.check()
    return chain


OLD = {"version": 1, "tensors": ["a", "b"], "extra": {"kept": True}}


def test_a_chain_is_the_steps_one_after_the_other():
    direct = chain_of(4).run(copy.deepcopy(OLD), "m")
    stepwise = copy.deepcopy(OLD)
    for v in (2, 3, 4):
        stepwise = chain_of(v).run(stepwise, "m")
    assert repr(stepwise) == repr(direct)  # repr, as NaN is not equal to itself
    assert direct["version"] == 4
    assert direct["names"] == ["a", "b"]
    assert direct["arrays"][1]["attributes"]["sizes"] == [[1, 2, 3]]
    assert direct["extra"] == {"kept": True}


def test_the_present_version_stays_as_it_is_and_the_old_document_too():
    chain, old = chain_of(3), copy.deepcopy(OLD)
    new = chain.run(old, "m")
    assert old == OLD
    assert chain.run(new, "m") is new


def test_later_and_impossible_versions():
    with pytest.raises(errors.UnsupportedVersion, match="format version 5; this meshtape reads up to version 4"):
        chain_of(4).run(OLD | {"version": 5}, "m")
    for version in (0, -1, "1", 1.0, None, True):
        with pytest.raises(errors.CorruptCheckpoint, match="is not a version"):
            chain_of(4).run(OLD | {"version": version}, "m")


def test_a_document_that_is_not_of_its_version():
    for broken in ({"version": 1}, {"version": 1, "tensors": 3}, {"version": 2, "arrays": [3]}):
        with pytest.raises(errors.CorruptCheckpoint, match="not a manifest of version"):
            chain_of(4).run(broken, "m")


def test_a_missing_a_second_and_an_impossible_step():
    chain = Migrations(4)
    chain.step(2)(lambda d: d)
    with pytest.raises(ValueError, match="no migration from version 1, 3"):
        chain.check()
    with pytest.raises(ValueError, match="two steps"):
        chain.step(2)(lambda d: d)
    for version in (0, 4):
        with pytest.raises(ValueError, match="leads nowhere"):
            chain.step(version)(lambda d: d)


def test_manifests_use_it(monkeypatch):
    """As after the next release: what version 1 wrote is read through its step."""
    written = manifest.Manifest([], None, 3).dumps()
    later = Migrations(2)
    later.step(1)(lambda d: d | {"step": d["step"] + 100})
    monkeypatch.setattr(manifest, "VERSION", 2)
    monkeypatch.setattr(manifest, "MIGRATIONS", later)
    assert manifest.loads(written, "m").step == 103
    with pytest.raises(errors.CorruptCheckpoint, match="crc32c"):
        manifest.loads(written.replace(b'"step":3', b'"step":4'), "m")
