"""Virtual checkpoints of virtual ones: each distinct array of each distinct parent is opened and read once."""

from __future__ import annotations

import json
import pickle
import signal
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.core.blocks import Box
from meshtape.storage import (
    CheckpointManager,
    LoadReport,
    convert,
    diff,
    load,
    merge,
    open_checkpoint,
    save,
    verify,
    virtual,
)
from meshtape.storage.readers import shared
from meshtape.storage.readers.shared import once
from meshtape.storage.readers.tensor import ChunkedTensor
from meshtape.storage.rules import casting
from meshtape.storage.rules.labels import Labels
from meshtape.storage.rules.lazy_tensors import labels_of
from meshtape.storage.virtual import document

SHAPE = (1500, 1100)  # of more than one piece
NBYTES = 4 * SHAPE[0] * SHAPE[1]
SLACK = 1.01  # checksums beside the chunks, and the padding of small arrays


def mean(arrays):
    total = arrays[0].copy()
    for x in arrays[1:]:
        total += x
    return total / np.float32(len(arrays))


def without(i, held):
    return [x for j, x in enumerate(held) if j != i]


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """(places, their arrays) of six steps."""
    home, rng = tmp_path_factory.mktemp("steps"), np.random.default_rng(0)
    arrays = [rng.normal(size=SHAPE).astype(np.float32) for _ in range(6)]
    return [save(home / f"s{i}", {"w": w, "n": np.int64(3)}).path for i, w in enumerate(arrays)], arrays


@pytest.fixture
def means(steps, tmp_path):
    """(the document of a mean of four means, each of five means, each of five steps; its array)."""
    places, arrays = steps
    for level, n in (("m", 6), ("n", 4)):
        made = [virtual.mean(without(i, places)) for i in range(n)]
        places = [virtual.write(tmp_path / f"{level}{i}.json", ckpt) for i, ckpt in enumerate(made)]
        arrays = [mean(without(i, arrays)) for i in range(n)]
    return virtual.write(tmp_path / "top.json", virtual.mean(places)), mean(arrays)


def chain(home: Path, source: str, depth: int) -> str:
    """A document that is the mean of the one before and of a copy of that under another name, and so on."""
    names = [source, source]
    for i in range(depth):
        ckpt = virtual.mean(names)
        names = [virtual.write(home / f"{side}{i}.json", ckpt) for side in "ab"]
    return names[0]


@pytest.fixture
def read(monkeypatch):
    """The bytes that were read of each array of each checkpoint."""
    counts, lock, inner = Counter(), threading.Lock(), ChunkedTensor.jobs

    def jobs(tensor, box, out):
        def counted(job):
            with lock:
                counts[tensor.root, tensor.name] += (nbytes := job())
            return nbytes

        return [lambda job=job: counted(job) for job in inner(tensor, box, out)]

    monkeypatch.setattr(ChunkedTensor, "jobs", jobs)
    return counts


def test_a_load_reads_each_parent_once(means):
    where, w = means
    report = LoadReport()
    assert np.array_equal(np.asarray(load(where, report=report)["w"]), w)
    assert 6 * NBYTES <= report.bytes_read <= SLACK * 6 * NBYTES


def test_whoever_writes_or_compares_reads_each_parent_once(means, tmp_path, read):
    where, w = means
    merge(where, tmp_path / "out")
    assert len(read) == 12
    assert max(read.values()) <= SLACK * NBYTES
    assert np.array_equal(np.asarray(load(tmp_path / "out")["w"]), w)
    read.clear()
    assert diff(where, where).same
    assert max(read.values()) <= SLACK * 2 * NBYTES  # once for each side
    assert verify(where).nbytes <= SLACK * 6 * NBYTES


def test_another_process_reads_each_parent_once(means):
    where, w = means
    box = Box((0, 0), (1024, SHAPE[1]))
    tensor = pickle.loads(pickle.dumps(once("only", open_checkpoint(where)["w"].tensor, box)))
    out = np.empty(box.shape, np.float32)
    nbytes = sum(job() for job in tensor.jobs(box, out))
    assert np.array_equal(out, w[box.slices])
    assert nbytes == once("planned", tensor, box) <= SLACK * 6 * NBYTES


def test_a_chain_of_documents_is_as_long_as_it_has_documents(steps, tmp_path, read, monkeypatch):
    opened = []
    monkeypatch.setattr(document, "open_checkpoint", lambda where: opened.append(where) or open_checkpoint(where))
    (source, *_), (w, *_) = steps
    where = chain(tmp_path, source, 12)
    opened.clear()
    ckpt = open_checkpoint(where)
    assert len(opened) == len(set(opened)) == 2 * 11 + 1
    assert len(ckpt.generation.parts) == 2 * 11 + 2
    assert ckpt.places == {where, *opened}
    labels = []
    labels_of(ckpt["w"].tensor, lambda t: labels.append(t) or Labels())
    assert len(labels) == 2
    assert np.array_equal(np.asarray(load(where)["w"]), w)
    assert max(read.values()) <= SLACK * NBYTES
    assert once("planned", ckpt["w"].tensor, Box.whole(SHAPE)) <= SLACK * NBYTES


def test_open_documents_share_their_parents(steps, tmp_path):
    places, arrays = steps
    inner = [virtual.write(tmp_path / f"{i}.json", virtual.mean(places[i : i + 3])) for i in range(3)]
    for parents in (inner, [open_checkpoint(p) for p in inner], [virtual.mean(places[i : i + 3]) for i in range(3)]):
        report = LoadReport()
        w = load(virtual.mean(parents), report=report)["w"]
        assert np.array_equal(np.asarray(w), mean([mean(arrays[i : i + 3]) for i in range(3)]))
        assert report.bytes_read <= SLACK * 5 * NBYTES


@pytest.mark.parametrize("of", [[1, 2, 3, 4], [2, 3, 4], [4, 2, 1]])
def test_deltas_of_one_anchor_read_it_once(tmp_path, read, of):
    manager = CheckpointManager(tmp_path / "run", keep=None, anchor_every=4)
    w = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    for step in range(1, 5):
        manager.save(step, {"w": w + np.float32(1e-6 * step)})
    deltas = [open_checkpoint(manager.path(i)) for i in (2, 3, 4)]
    assert {c.base.path for c in deltas} == {manager.path(1)}
    alone = np.asarray(load(virtual.mean(deltas))["w"])
    assert np.array_equal(alone, mean([w + np.float32(1e-6 * i) for i in (2, 3, 4)]))
    read.clear()
    found = load(virtual.write(tmp_path / "run" / "mean.json", virtual.mean(tmp_path / "run", steps=of)))["w"]
    assert np.array_equal(np.asarray(found), mean([w + np.float32(1e-6 * i) for i in sorted(of)]))
    assert len(read) == len({1, *of})
    assert read[manager.path(1), "w"] <= SLACK * NBYTES


@pytest.mark.parametrize("method", ["linear", "slerp"])
def test_blends_rules_and_parts_share_their_parents(steps, tmp_path, read, method):
    places, arrays = steps
    both = virtual.write(tmp_path / "both.json", virtual.mean(places[:2]))
    turned = "w -> w, permute([1, 0])\n"
    one = virtual.write(tmp_path / "one.json", virtual.with_rules(both, turned))
    cut = virtual.rows(both, {"w": (0, SHAPE[0])})
    two = virtual.write(tmp_path / "two.json", virtual.with_rules(cut, turned))
    report = LoadReport()
    w = load(virtual.mean([one, two]), report=report)["w"]
    assert np.array_equal(np.asarray(w), mean(arrays[:2]).T)
    assert report.bytes_read <= SLACK * 2 * NBYTES

    def passes(*models):
        weights = {"parameters": {"weight": 1.0}} if method == "linear" else {}
        config = {"merge_method": method, "models": [{"model": m, **weights} for m in models], "dtype": "float32"}
        config |= {} if method == "linear" else {"base_model": models[0], "parameters": {"t": 0.5}}
        read.clear()
        load(mt.storage.blended(config))
        return max(read.values())

    assert passes(both, virtual.write(tmp_path / "cut.json", cut)) <= SLACK * passes(*places[:2])


def test_without_memory_values_stay(means, monkeypatch):
    where, w = means
    monkeypatch.setattr(shared, "KEPT", 1)
    report = LoadReport()
    assert np.array_equal(np.asarray(load(where, report=report)["w"]), w)
    assert report.bytes_read > 12 * NBYTES


def test_an_evaluation_keeps_no_more_than_it_may(means, monkeypatch):
    where, w = means
    held, inner = [], shared._Reads._read

    def watched(reads, *args):
        nbytes = inner(reads, *args)
        held.append(sum(a.nbytes + shared.ENTRY for a, _ in reads._held.values()))
        assert held[-1] == reads._nbytes
        return nbytes

    monkeypatch.setattr(shared._Reads, "_read", watched)
    assert np.array_equal(np.asarray(load(where)["w"]), w)
    assert 0 < max(held) <= shared.KEPT


def test_what_a_sum_loses_is_counted_once(tmp_path):
    save(tmp_path / "a", {"w": np.full(3, 3e38, np.float32)})
    twice = virtual.write(tmp_path / "b.json", virtual.weighted_sum([tmp_path / "a"] * 2, [1.0, 1.0]))
    report = LoadReport()
    load(virtual.mean([twice, twice]), allow_overflow=True, report=report)
    assert report.losses["w"].overflow == 3
    with pytest.raises(mt.errors.Lossy):
        convert(virtual.mean([twice, twice]), tmp_path / "out", format="safetensors")


def test_many_small_boxes_of_a_shared_tensor_are_not_compared_with_each_other(tmp_path, monkeypatch):
    rows, rng = 3000, np.random.default_rng(5)
    parent, w = tmp_path / "p.safetensors", rng.normal(size=(16, rows)).astype(np.float32)
    mt.storage.save_safetensors(parent, {"w": w})
    turned = virtual.with_rules(parent, f"w -> w, reshape([{rows}, 16]), permute([1, 0])")
    turned = virtual.write(tmp_path / "turned.json", turned)
    plain = virtual.write(tmp_path / "plain.json", virtual.with_rules(parent, "w -> w"))
    ckpt = open_checkpoint(virtual.write(tmp_path / "d.json", virtual.mean([plain, turned])))
    compared, intersect = [0], Box.intersect

    def counted(self, other):
        compared[0] += 1
        return intersect(self, other)

    monkeypatch.setattr(Box, "intersect", counted)
    assert np.array_equal(ckpt["w"][...], (w + w.reshape(rows, 16).T) / np.float32(2))
    assert compared[0] < 60 * rows


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of those that a finalizer gets
def test_an_interrupt_leaves_no_evaluation_and_no_tally_behind():
    """At any moment, while its exception is kept, as a notebook keeps it."""
    kept, state = [], ({}, casting.Tally())

    def interrupted(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupted)
    rng = np.random.default_rng(6)
    try:
        for _ in range(1500):
            try:
                signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(5e-6, 6e-5)))
                for _ in range(200):  # an interrupt within a finalizer is lost
                    shared.evaluation({1: 2}, lambda: casting.tallied(state[1], lambda: once("__str__", state)))
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt as e:
                kept.append(e)
            assert not shared.is_evaluating()
            assert casting._current.tally is None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(kept) > 100


def test_a_loss_is_counted_where_numbers_about_a_whole_tensor_were_read_before(tmp_path):
    """The second operand reads the adapter's rows as the first measures them, which counts none of their losses."""
    rng, key = np.random.default_rng(0), "model.embed_tokens.weight"
    places = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for place in places:
        mt.storage.save_safetensors(place, {key: rng.normal(size=(100, 8)).astype(np.float16)})
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    rows = rng.normal(size=(50, 8)).astype(np.float32)
    rows[26:30] = 1e6  # no numbers of float16
    trained = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    mt.storage.save_safetensors(adapter / "adapter_model.safetensors", {trained: rows})
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "modules_to_save": None}
    config["trainable_token_indices"] = {"embed_tokens": list(range(0, 100, 2))}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    tuned = virtual.write(tmp_path / "tuned.json", virtual.lora(places[0], adapter))
    half = {"weight": 1.0, "density": 0.5}
    models = [{"model": str(m), "parameters": half} for m in (tuned, places[1])]
    ties = {"merge_method": "ties", "base_model": str(places[2]), "dtype": "float16", "models": models}
    blend = virtual.write(tmp_path / "blend.json", mt.storage.blended(ties))
    halves = virtual.with_rules(tuned, f"{key} -> lo, hi, split(axis=0, sizes=[50, 50])")
    halves = virtual.write(tmp_path / "halves.json", halves)
    swapped = virtual.write(tmp_path / "swapped.json", virtual.with_rules(halves, f"hi, lo -> {key}, concat(axis=0)"))
    ckpt = open_checkpoint(virtual.write(tmp_path / "both.json", virtual.mean([blend, swapped])))
    with pytest.raises(mt.errors.Lossy):
        ckpt[key][:10]
