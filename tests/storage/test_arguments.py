"""Arguments of wrong kinds: each is a typed error that names the argument, before anything is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.errors import CheckpointReplaced, MeshtapeError
from meshtape.storage import virtual
from meshtape.storage.stores import generations

TREE = {"a": np.arange(12.0, dtype=np.float32).reshape(3, 4), "b": np.ones(3, np.float32)}
NAMES = [5, True, [1], ["a", None], b"a"]
PICKS = {"prefix": [5, True, ["a"], b"a", {}], "keys": NAMES, "drop": NAMES, "rules": [5, [1], {"a": "b"}, b"a -> b"]}
WRITTEN = {"dtype": [5, ["f4"], "i4"], **PICKS, "keys": [*NAMES, [], iter(())]}


def blend_of(at: Path) -> dict[str, Any]:
    return {"merge_method": "passthrough", "models": [{"model": str(at / "p")}], "dtype": "float32"}


CALLS: dict[str, Callable[..., Any]] = {
    "save": lambda at, **k: mt.save(at / "new", TREE, **k),
    "save_safetensors": lambda at, **k: mt.storage.save_safetensors(at / "new", **{"tensors": TREE, **k}),
    "CheckpointManager": lambda at, **k: mt.CheckpointManager(at / "new", **k),
    "merge": lambda at, **k: mt.merge(at / "p", at / "new", **k),
    "blend": lambda at, **k: mt.storage.blend(blend_of(at), at / "new", **k),
    "blended": lambda at, **k: mt.storage.blended(blend_of(at), **k),
    "with_rules": lambda at, **k: virtual.with_rules(at / "p", **k),
    "cast": lambda at, **k: virtual.cast(at / "p", **k),
    "load": lambda at, **k: mt.load(at / "p", **k),
    "convert": lambda at, **k: mt.storage.convert(at / "p", at / "new", **{"format": "safetensors", **k}),
    "reshard": lambda at, **k: mt.storage.reshard(at / "p", at / "new", **k),
    "diff": lambda at, **k: mt.storage.diff(at / "p", at / "p", **k),
    "estimate": lambda at, **k: mt.storage.estimate(TREE, **k),
    "quantize": lambda at, **k: mt.storage.quantize(TREE, **k),
    "extract_lora": lambda at, **k: mt.storage.extract_lora(at / "p", at / "p", at / "new", **k),
    "mean": lambda at, **k: virtual.mean([at / "p", at / "p"], **k),
}
ODD = {
    "save": {
        "step": ["x", 3.5, -1],
        "metadata": [5, "x", True],
        "documents": ["x", [1], True],
        "compression": [5, [1]],
    },
    "CheckpointManager": {"best": [5, ["loss"]], "share": ["no", None], "keep": [0, 1.5], "layout": ["both"]},
    "save_safetensors": {"tensors": [5, [1], None], "metadata": [5, "x"]},
    "merge": WRITTEN,
    "blend": {**WRITTEN, "seed": ["x", 1.5]},
    "blended": {"keys": [*NAMES, []], "drop": NAMES},
    "with_rules": {"rules": PICKS["rules"]},
    "cast": {"dtype": WRITTEN["dtype"]},
    "load": {"ignore": [5, [1]], "report": [True, {}], **{k: v for k, v in PICKS.items() if k != "drop"}},
    "convert": {
        "client": [5, "x"],
        "progress": [True, "bar"],
        "threads": [0, 3.5, "x"],
        "memory_limit": [None, -1],
        "format": [5, None],
        **WRITTEN,
    },
    "reshard": {"mesh": [5, "x", [1]], "shardings": [5, [1]], "client": [{}], **WRITTEN},
    "diff": {"keys": NAMES, "drop": NAMES, "rules": PICKS["rules"], "memory_limit": ["x", 0]},
    "estimate": {"mesh": [5], "optimizer": [[1], {}], "shard_optimizer_over": [[1]], "max_shard_bytes": ["x", 0]},
    "quantize": {"bits": [[1], {}], "times": ["x", -1]},
    "extract_lora": {"energy": ["x", [1], 2.0]},
    "mean": {"integers": [5, [1]]},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("arguments")
    mt.save(at / "p", TREE)
    return at


@pytest.mark.parametrize(
    ("call", "name", "value"), [(c, n, v) for c, named in ODD.items() for n, values in named.items() for v in values]
)
def test_an_odd_argument_is_a_typed_error_before_anything_is_written(home: Path, call, name, value):
    with pytest.raises(MeshtapeError, match=name) as e:
        CALLS[call](home, **{name: value})
    assert len(str(e.value)) < 400
    assert os.listdir(home) == ["p"]


def test_names_may_come_from_an_iterator(tmp_path: Path):
    """Whoever asks a second time, or begins anew beside a writer, has them all."""
    mt.save(tmp_path / "p", TREE)
    mt.merge(tmp_path / "p", tmp_path / "new", keys=iter(["a", "b"]), drop=iter(["b"]))
    assert list(mt.open_checkpoint(tmp_path / "new")) == ["a"]
    seen = []

    @generations.once_more
    def read(keys: Any) -> list[str]:
        seen.append(list(keys))
        if len(seen) == 1:
            raise CheckpointReplaced("by a writer")
        return seen[-1]

    assert read(keys=iter(["a"])) == ["a"]
    assert seen == [["a"], ["a"]]
