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
    g = np.random.default_rng(len(name))
    factors = {f"base_model.model.q.lora_{x}.weight": g.normal(size=(2, 2)).astype("f4") for x in "AB"}
    save_safetensors(at / "adapter_model.safetensors", factors)
    (at / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 8, **config}))
    return at


def linear(*models: Path, weights: tuple[float, ...] = (1, 1), method: str = "linear", **parameters: object) -> dict:
    each = [{"model": str(m), "parameters": {"weight": w}} for m, w in zip(models, weights, strict=True)]
    return {"merge_method": method, "models": each, "parameters": parameters}


@pytest.mark.parametrize("other", [{"lora_alpha": 64}, {"use_rslora": True}, {"alpha_pattern": {"q": 4}}])
def test_factors_of_adapters_with_other_scales_are_not_added(tmp_path: Path, other: dict) -> None:
    a, same, b = (adapter(tmp_path, n, **c) for n, c in (("a", {}), ("same", {}), ("b", other)))
    assert len(virtual.mean([a, same])) == 2
    ways = (virtual.mean, lambda x: virtual.ema(x, decay=0.5), lambda x: virtual.difference(*x))
    for derive in (*ways, lambda x: blended(linear(*x))):
        with pytest.raises(CheckpointError, match=f"{next(iter(other))} = .*lora"):
            derive([a, b])


def test_factors_are_added_by_weights_that_keep_the_scale_of_their_products(tmp_path: Path) -> None:
    a, b = adapter(tmp_path, "a"), adapter(tmp_path, "bc")
    key = "base_model.model.q.lora_A.weight"
    first, second = (mt.open_checkpoint(p)[key][...] for p in (a, b))
    vector = virtual.difference(b, a)
    for made, wanted in (
        (virtual.weighted_sum([a, b], [0.25, 0.75]), 0.25 * first + 0.75 * second),
        (virtual.weighted_sum([a, b], [1, 3], normalize=True), 0.25 * first + 0.75 * second),
        (virtual.add(a, vector, 0.5), first + 0.5 * (second - first)),
        (virtual.ema([a, b], decay=0.5), 0.5 * first + 0.5 * second),
        (blended(linear(a, b)), 0.5 * first + 0.5 * second),
        (blended(linear(a, b, weights=(2, -1), normalize=False)), 2 * first - second),
    ):
        np.testing.assert_allclose(made[key][...], wanted, rtol=1e-6)
    for make in (
        lambda: virtual.weighted_sum([a, b], [1, 1]),
        lambda: virtual.weighted_sum([a], [0.5]),
        lambda: virtual.add(a, b),
        lambda: virtual.add(vector, a, 2),
        lambda: blended(linear(a, b, normalize=False)),
        lambda: blended(linear(a, b, method="ties", density=0.5) | {"base_model": str(a)}),
        lambda: blended({"merge_method": "passthrough", "models": [{"model": str(a), "parameters": {"scale": 2}}]}),
    ):
        with pytest.raises(CheckpointError, match="extract_lora makes an adapter"):
            make()


def test_the_mean_of_what_adapters_add_is_an_adapter_by_way_of_the_model(tmp_path: Path) -> None:
    """As PEFT's ``add_weighted_adapter`` with ``svd`` or ``cat``, whatever the scales."""
    a, b = adapter(tmp_path, "a"), adapter(tmp_path, "bc", lora_alpha=64)
    save_safetensors(tmp_path / "base.safetensors", {"q.weight": np.random.default_rng(9).normal(size=(2, 2))})
    added = [virtual.lora(tmp_path / "base.safetensors", x) for x in (a, b)]
    mt.storage.extract_lora(virtual.mean(added), tmp_path / "base.safetensors", tmp_path / "mean", rank=2)
    assert sorted(p.name for p in (tmp_path / "mean").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]

    def product(where: Path, scale: float) -> np.ndarray:
        held = {n: np.asarray(x, "f8") for n, x in mt.load(where).items()}
        return scale * held["base_model.model.q.lora_B.weight"] @ held["base_model.model.q.lora_A.weight"]

    wanted = (product(a, 4) + product(b, 32)) / 2
    np.testing.assert_allclose(product(tmp_path / "mean", 1), wanted, rtol=1e-5, atol=1e-5)


def test_an_adapter_is_written_under_the_name_that_peft_opens(tmp_path: Path) -> None:
    a, b = adapter(tmp_path, "a"), adapter(tmp_path, "bc")
    for i, src in enumerate((a, virtual.mean([a, b]), virtual.cast(a, "bfloat16"), blended(linear(a, b)))):
        report = mt.merge(src, tmp_path / str(i))
        assert report.files == ["adapter_model.safetensors"]
        assert (tmp_path / str(i) / "adapter_config.json").exists()
        assert len(mt.load(tmp_path / str(i))) == 2
        assert mt.verify(tmp_path / str(i)).uncovered == []
        assert any("one by one" in note for note in report.notes) == (i in (1, 3))
    assert "several files" in mt.merge(a, tmp_path / "parts", max_shard_bytes=1).notes[-1]
    assert mt.merge(b, tmp_path / "0", overwrite=True).files == ["adapter_model.safetensors"]
    save_safetensors(tmp_path / "model.safetensors", {"w": np.ones(2)})
    assert mt.merge(tmp_path / "model.safetensors", tmp_path / "0", overwrite=True).files == ["model.safetensors"]
    assert not (tmp_path / "0" / "adapter_model.safetensors").exists()


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
    with pytest.raises(CheckpointError, match="a token is a text of a character or more"):
        mt.storage.serve(tmp_path / "c", host=host, token="")


def test_a_virtual_adapter_is_applied_as_the_directory_that_it_becomes(tmp_path: Path) -> None:
    base = tmp_path / "base.safetensors"
    save_safetensors(base, {"q.weight": np.eye(2, dtype="f4")})
    a, b = adapter(tmp_path, "a"), adapter(tmp_path, "bb")
    mean = virtual.mean([a, b])
    document = virtual.write(tmp_path / "mean.json", mean)
    mt.merge(document, tmp_path / "made")
    wanted = mt.load(virtual.lora(base, tmp_path / "made"))["q.weight"]
    for given in (mean, document):
        applied = virtual.lora(base, given, 1.0)
        again = virtual.write(tmp_path / "applied.json", applied, overwrite=True)
        for found in (applied, again):
            assert np.array_equal(mt.load(found)["q.weight"], wanted)
    apart = virtual.difference(a, b)
    with pytest.raises(CheckpointError, match="a difference of adapters"):
        virtual.lora(base, apart)
    both = (mt.load(virtual.lora(base, x))["q.weight"] for x in (virtual.add(b, apart), a))
    np.testing.assert_allclose(*both, rtol=1e-5)
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        virtual.lora(base, virtual.mean([base, base]))
