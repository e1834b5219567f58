"""Sums, averages and blends that would be right for none of their users: each is refused, or says what it left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import meshtape as mt
from meshtape.errors import CheckpointError
from meshtape.storage import blended, save_safetensors, virtual


def adapter(home: Path, name: str, **config: object) -> Path:
    at = home / name
    at.mkdir()
    factors = {f"base_model.model.q.lora_{x}.weight": np.ones((2, 2), np.float32) for x in "AB"}
    save_safetensors(at / "adapter_model.safetensors", factors)
    (at / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 8, **config}))
    return at


@pytest.mark.parametrize("other", [{"lora_alpha": 64}, {"use_rslora": True}, {"alpha_pattern": {"q": 4}}])
def test_factors_of_adapters_with_other_scales_are_not_added(tmp_path: Path, other: dict) -> None:
    a, same, b = (adapter(tmp_path, n, **c) for n, c in (("a", {}), ("same", {}), ("b", other)))
    assert len(virtual.mean([a, same])) == 2
    for derive in (virtual.mean, lambda x: virtual.ema(x, decay=0.5), lambda x: virtual.difference(*x)):
        with pytest.raises(CheckpointError, match=f"{next(iter(other))} = .*lora"):
            derive([a, b])


def test_an_average_over_a_run_names_the_steps_that_it_cannot_read(tmp_path: Path) -> None:
    run = mt.CheckpointManager(tmp_path / "run", keep=None, anchor_every=2, compression="weights")
    for step in range(1, 7):
        run.save(step, {"w": np.full((300, 300), float(step), np.float32)})
    shutil.rmtree(tmp_path / "run" / "step-00000003")
    (tmp_path / "run" / "step-00000006" / "meshtape.json").unlink()
    with pytest.warns(UserWarning, match="skipped") as said:
        ema = virtual.ema(tmp_path / "run", decay=0.5)
    assert ["00000004" in str(said[0].message), "00000006" in str(said[1].message)] == [True, True]
    np.testing.assert_array_equal(ema["w"][0, 0], 0.25 * 1 + 0.25 * 2 + 0.5 * 5)


def test_coordinates_have_no_sums(tmp_path: Path) -> None:
    xr = pytest.importorskip("xarray")
    zarr = {}
    for name, first in (("a", 0.0), ("b", 0.0), ("moved", 5.0)):
        lat = ("lat", first + np.arange(3.0), {"units": "degrees_north"})
        xr.Dataset({"t": (("lat",), np.ones(3))}, coords={"lat": lat}).to_zarr(tmp_path / name, consolidated=False)
        zarr[name] = tmp_path / name
        mt.convert(zarr[name], tmp_path / f"{name}-ours", format="zarr")
    for suffix in ("", "-ours"):
        a, b, moved = (f"{at}{suffix}" for at in zarr.values())
        apart = virtual.difference(a, b)
        np.testing.assert_array_equal(apart["t"][...], 0)
        np.testing.assert_array_equal(apart["lat"][...], [0, 1, 2])
        np.testing.assert_array_equal(virtual.weighted_sum([a, b], [1, 1])["lat"][...], [0, 1, 2])
        with pytest.raises(CheckpointError, match="'lat'"):
            virtual.mean([a, moved])["lat"][...]
        np.testing.assert_array_equal(virtual.mean([a, moved], integers="last")["lat"][...], [5, 6, 7])


@pytest.mark.parametrize(
    "text",
    [
        "merge_method: linear\nmodels:\n  - model:\n  - model: m.safetensors\n    parameters: {weight: 1}",
        "merge_method: linear\nmodels:\n  - model: m.safetensors\n    parameters: {weight: &w [*w]}",
        "{a: " * 5000,
        "[" * 20000,
        "merge_method: linear\nmodels: [{model: m.safetensors, parameters: {weight: " + "9" * 6000 + "}}]",
        "a\0b",
        "merge_method: linear\nmodels:\n- model: a\0b",
    ],
    ids=["no model", "itself", "deep", "long", "digits", "NUL", "NUL in a path"],
)
def test_configurations_that_say_nothing_or_never_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save_safetensors("m.safetensors", {"layers.0.w": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError):
        blended(text)


def test_an_empty_location_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (lambda: mt.save("", {"a": np.ones(2)}, overwrite=True), lambda: mt.load("")):
        with pytest.raises(CheckpointError, match="empty"):
            call()
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_an_empty_token_is_refused(tmp_path: Path, host: str) -> None:
    mt.save(tmp_path / "c", {"a": np.ones(2)})
    with pytest.raises(CheckpointError, match="token is empty"):
        mt.storage.serve(tmp_path / "c", host=host, token="")
