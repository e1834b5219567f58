"""Checkpoints, key rules, programs, models and training take a dtype however it is spelled, and keep it as plain
text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.parallel.training.precision import Precision
from meshtape.storage import Rule, Rules, estimate
from meshtape.storage.rules.casting import exact
from meshtape.storage.rules.value_steps import Cast, Init

SPELLINGS = [mt.bfloat16, mt.bfloat16.dtype, mt.bfloat16.type, "bfloat16"]
SHAPES = {"w": ((4, 2), mt.float32), "n": ((2,), mt.int64)}


@pytest.mark.parametrize("dtype", SPELLINGS, ids=repr)
def test_storage_takes_it(dtype: Any, tmp_path: Path) -> None:
    mt.save(tmp_path / "a", {"w": mt.ones((4, 2), dtype=mt.float32)})
    mt.convert(tmp_path / "a", tmp_path / "b", format="zarr", dtype=dtype)
    assert mt.load(tmp_path / "b")["w"].dtype == mt.bfloat16
    mt.merge(tmp_path / "a", tmp_path / "m", dtype=dtype)
    assert mt.load(tmp_path / "m")["w"].dtype == mt.bfloat16
    like = {"w": mt.ShapeDtype((4, 2), dtype)}
    assert mt.load(tmp_path / "a", like=like, cast=True)["w"].dtype == mt.bfloat16
    assert estimate(SHAPES, dtype=dtype).elements == estimate(SHAPES, dtype="bfloat16").elements
    assert estimate(SHAPES, optimizer_dtype=dtype).ranks == estimate(SHAPES, optimizer_dtype="bfloat16").ranks
    assert estimate({"w": ((4, 2), dtype)}).nbytes == 16


@pytest.mark.parametrize("dtype", SPELLINGS, ids=repr)
def test_key_rules_take_it_and_write_its_name(dtype: Any) -> None:
    cast = Rule("a", "b", Cast(dtype, back=mt.float32))
    assert str(cast) == "a -> b, cast(dtype=bfloat16, back=float32)"
    assert str(Rules(str(cast))) == str(Rules([cast]))
    assert Cast(dtype) == Cast("bfloat16")
    assert Init((2,), dtype) == Init((2,), "bfloat16")
    assert Rules([Rule("a", "b", Cast(dtype))]).on_arrays({"a": np.ones(2, "f4")})["b"].dtype == mt.bfloat16
    assert exact(dtype, mt.float32)
    assert not exact(mt.float32, dtype)


@pytest.mark.parametrize("dtype", [object, "int7", None, 3])
def test_what_is_no_dtype_is_named(dtype: Any) -> None:
    with pytest.raises((mt.errors.CheckpointDTypeError, mt.errors.RuleSyntaxError), match=r"unknown dtype|cannot be"):
        Rules([Rule("a", "b", Cast(dtype))]).on_arrays({"a": np.ones(2, "f4")})


@pytest.mark.parametrize("dtype", SPELLINGS, ids=repr)
def test_models_and_training_take_it(dtype: Any) -> None:
    assert Precision.of(dtype) == Precision.of("bfloat16") == Precision(dtype)
    with pytest.raises(mt.errors.TrainingError, match="precision must be one of"):
        Precision(mt.int8)
    config = mt.models.decoder.Config(vocab=8, width=8, layers=1, heads=2, kv_heads=2, ffn=8, max_length=4)
    params = mt.models.decoder.init(mt.random.key(0), config, dtype=dtype)
    assert {x.dtype for x in mt.tree.flatten(params)[0]} == {mt.bfloat16.dtype}


def test_compiled_functions_and_program_files_take_it(tmp_path: Path) -> None:
    @mt.compile
    def step(x: mt.Array, dtype: Any) -> mt.Array:
        return mt.astype(x, dtype) * 2 + mt.zeros(2, dtype=dtype)

    for dtype in SPELLINGS:
        assert step(mt.ones(2), dtype).dtype == mt.bfloat16
    mt.save_program(tmp_path / "p", lambda x: mt.astype(x, mt.float16), mt.ones(2))
    assert mt.load_program(tmp_path / "p")(mt.ones(2)).dtype == mt.float16
