"""Arguments of wrong kinds: each is a typed error that names the argument, before anything is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.errors import MeshtapeError
from meshtape.storage import virtual

TREE = {"a": np.arange(12.0, dtype=np.float32).reshape(3, 4), "b": np.ones(3, np.float32)}
CALLS: dict[str, Callable[..., Any]] = {
    "save": lambda at, **k: mt.save(at / "new", TREE, **k),
    "save_safetensors": lambda at, **k: mt.storage.save_safetensors(at / "new", **{"tensors": TREE, **k}),
    "CheckpointManager": lambda at, **k: mt.CheckpointManager(at / "new", **k),
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
    "load": {"ignore": [5, [1]], "report": [True, {}]},
    "convert": {
        "client": [5, "x"],
        "progress": [True, "bar"],
        "threads": [0, 3.5, "x"],
        "memory_limit": [None, -1],
        "format": [5, None],
        "keys": [5, [1]],
    },
    "reshard": {"mesh": [5, "x", [1]], "shardings": [5, [1]], "client": [{}]},
    "diff": {"keys": [5, [1]], "drop": [3.5], "memory_limit": ["x", 0]},
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
