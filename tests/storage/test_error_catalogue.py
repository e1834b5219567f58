"""Each kind of error about a checkpoint says what was wrong, where, and what would be right."""

import re

import numpy as np
import pytest

from meshtape import errors
from meshtape.storage import Rules, load, merge, open_checkpoint, save, verify
from meshtape.storage.base.checksums import crc32c
from meshtape.storage.format import manifest


def _signed(path, change):
    """The manifest with something changed, its checksum right."""
    text = (path / "meshtape.json").read_bytes()
    body = change(text[: text.rindex(b', "crc32c"')] + b"}")
    (path / "meshtape.json").write_bytes(body[:-1] + b', "crc32c": "%08x"}\n' % crc32c(body))


def _keys(c):
    load(c, like={"w": np.ones((4, 2), "f4"), "x": np.ones(1)})


def _missing(c):
    (c / "w" / "c.2.0").unlink()
    load(c)


def _newer(c):
    later = manifest.VERSION + 1
    _signed(c, lambda text: re.sub(rb'"version":\d+', b'"version":%d' % later, text))
    load(c)


def _flipped(c):
    data = bytearray((c / "w" / "c.1.0").read_bytes())
    data[1] ^= 1
    (c / "w" / "c.1.0").write_bytes(data)
    verify(c)


# Situation: (what is done, type, what the message contains, in any order)
CATALOGUE = {
    "missing, unexpected and mismatched keys": (
        _keys,
        errors.CheckpointKeyError,
        [
            "missing in the checkpoint (1): x",
            "unexpected, not in like (10): layers.{0-9}.b (10)",
            "nothing was read",
        ],
    ),
    "a shape that a rule made": (
        lambda c: load(c, like={"v": np.ones((4, 2), "f4")}, rules="w -> v, permute()", keys=["v"]),
        errors.CheckpointShapeError,
        ["v: stored shape (2, 4)", "wanted (4, 2)", "w -> v, permute()"],
    ),
    "another dtype": (
        lambda c: load(c, like={"w": np.ones((4, 2), "f8")}, keys=["w"]),
        errors.CheckpointDTypeError,
        ["w: stored dtype float32", "wanted float64", "cast=True"],
    ),
    "files missing": (
        _missing,
        errors.IncompleteCheckpoint,
        ["1 of 4 files of key 'w' missing: w/c.2.0", "saved by 4 ranks (data=4)"],
    ),
    "a newer version": (
        _newer,
        errors.UnsupportedVersion,
        [f"version {manifest.VERSION + 1}", f"up to version {manifest.VERSION}"],
    ),
    "a rule that is none": (
        lambda c: Rules("a -> b\nc => d"),
        errors.RuleSyntaxError,
        ["line 2", "column 3", "c => d\n    ^"],
    ),
    "a rule that matches nothing": (
        lambda c: load(c, rules="layers.{i}.c -> {i}"),
        errors.RuleMatchError,
        ["'layers.{i}.c'", "nearest keys: 'layers.", "line 1"],
    ),
    "a target given twice": (
        lambda c: load(c, rules="w -> z\nlayers.0.b -> z"),
        errors.RuleConflict,
        ["'z' is given twice", "w -> z   (line 1)", "layers.0.b -> z   (line 2)"],
    ),
    "a flipped bit": (_flipped, errors.CorruptCheckpoint, ["w/c.1.0", "'w'", "chunk", "crc32c"]),
    "no directory": (lambda c: load(c / "nothing"), errors.NotACheckpoint, ["nothing: no such file or directory"]),
    "a target that exists": (
        lambda c: merge(c, c),
        errors.CheckpointError,
        ["is the source; write to another place"],
    ),
    "a name that is not there": (
        lambda c: open_checkpoint(c)["layers.11.b"],
        errors.CheckpointKeyError,
        ["has no array 'layers.11.b'", "layers.1.b"],
    ),
}


@pytest.mark.parametrize("situation", CATALOGUE)
def test_what_an_error_says(situation, kit, tmp_path):
    act, kind, wanted = CATALOGUE[situation]
    c = tmp_path / "c"
    host = kit.Host({"data": 4})
    w = kit.split(np.arange(8, dtype="f4").reshape(4, 2), kit.Sharding(host, (0,)))
    save(c, {"w": w, "layers": [{"b": np.ones(2)} for _ in range(10)]})
    with pytest.raises(kind) as told:
        act(c)
    assert type(told.value) is kind
    for text in wanted:
        assert text in str(told.value), str(told.value)
    assert "nothing" in situation or str(c) in str(told.value) or "rule" in situation or "twice" in situation
