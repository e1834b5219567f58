"""Attributes and names of dimensions that xarray gave arrays: which of them computed arrays keep, where their units meet,
and what is said of variables and leaves that have no form here."""

import json
import os
import urllib.request

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import meshtape as mt
from meshtape import errors
from meshtape.cli.main import main
from meshtape.storage import (
    as_zarr,
    blended,
    convert,
    diff,
    load,
    merge,
    open_checkpoint,
    quantize,
    save,
    save_safetensors,
    serve,
    serving,
    virtual,
    zarr_references,
)

xarray, zarr = pytest.importorskip("xarray"), pytest.importorskip("zarr")
DAY = np.datetime64("2000-01-01", "ns")
VALUES = np.arange(12.0).reshape(4, 3)
VALUES[1, 1] = VALUES[3, 0] = np.nan


def group(home, version=3, dtype="f4", fill=1e20, **encoding):
    """A masked array with its coordinates."""
    times = DAY + np.arange(4) * np.timedelta64(1, "D")
    data = xarray.Dataset(
        {"t": (("time", "lat"), VALUES, {"units": "K", "long_name": "temperature"})},
        {"time": times, "lat": [10.0, 20.0, 30.0]},
    )
    said = {"t": {"dtype": dtype, "_FillValue": fill, **encoding}}
    data.to_zarr(home, encoding=said, zarr_format=version, consolidated=False)
    return os.fspath(home)


def seen(source):
    return xarray.open_zarr(as_zarr(source), consolidated=False)


RULES = "time -> time\nlat -> lat\n"
VIEWS = {
    "a wider dtype": (lambda p: virtual.cast(p, "float64"), lambda d: d),
    "rows": (lambda p: virtual.rows(p, {"t": (1, 4), "time": (1, 4)}), lambda d: d.isel(time=slice(1, 4))),
    "columns": (lambda p: virtual.rows(p, {"t": (0, 2, 1), "lat": (0, 2)}), lambda d: d.isel(lat=slice(0, 2))),
    "slices": (
        lambda p: virtual.with_rules(p, "t -> t, slice(0, 0, 2)\ntime -> time, slice(0, 0, 2)"),
        lambda d: d.isel(time=slice(0, 2)),
    ),
    "the other way round": (
        lambda p: virtual.with_rules(p, f"{RULES}t -> t, permute(axes=[1, 0])"),
        lambda d: d.transpose("lat", "time"),
    ),
    "joined again": (
        lambda p: virtual.with_rules(p, f"{RULES}t -> $a, $b, split()\n$a, $b -> t, concat()"),
        lambda d: d,
    ),
    "a rule's cast": (lambda p: virtual.with_rules(p, f"{RULES}t -> t, cast(float64)"), lambda d: d),
    "views of views": (
        lambda p: virtual.cast(virtual.rows(virtual.rows(p, {"t": (1, 4), "time": (1, 4)}), {}), "float64"),
        lambda d: d.isel(time=slice(1, 4)),
    ),
}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_one_parent_keep_what_is_said_of_it(tmp_path, view, ours, version):
    path = group(tmp_path / "a", version)
    if ours:
        path = convert(path, tmp_path / "ours", format="zarr").path
    make, oracle = VIEWS[view]
    made = make(path)
    wanted = oracle(xarray.open_zarr(tmp_path / "a", consolidated=False)).load()
    where = virtual.write(tmp_path / "d.json", made)
    written = convert(where, tmp_path / "written", format="zarr")
    exported = merge(made, tmp_path / "exported")
    if view != "joined again":
        assert not [n for n in (*written.notes, *exported.notes) if "dimensions" in n or "FillValue" in n]
    found = [seen(x) for x in (made, where, open_checkpoint(where), exported.path)]
    for got in (*found, xarray.open_zarr(written.path, consolidated=False)):
        assert got.t.dims == (wanted.t.dims if view != "joined again" else ("t.0", "lat"))
        np.testing.assert_array_equal(got.t.values, wanted.t.values)
        np.testing.assert_array_equal(got.time.values, wanted.time.values)
        np.testing.assert_array_equal(got.lat.values, wanted.lat.values)
        assert got.t.attrs == wanted.t.attrs
    assert made["t"].attributes["units"] == "K"
    assert "lat" in open_checkpoint(where)["t"].dimension_names
    with serve(where) as server, urllib.request.urlopen(f"{server.url}zarr/t/zarr.json") as answer:
        assert json.load(answer)["attributes"]["units"] == "K"


def test_reshaped_arrays_stay_masked(tmp_path):
    path = group(tmp_path / "a")
    for rule, names in (
        ("reshape(shape=[4, 1, 3])", ("t.0", "t.1", "t.2")),
        ("reshape(shape=[12])", ("t.0",)),
    ):
        got = seen(virtual.with_rules(path, f"{RULES}t -> t, {rule}")).t
        assert got.dims == names
        np.testing.assert_array_equal(got.values.ravel(), VALUES.astype("f4").ravel())
    empty = virtual.with_rules(path, "t -> t, slice(0, 0, 0), reshape(shape=[3, 0])")
    assert (empty["t"].dimension_names, empty["t"].attributes["units"]) == (None, "K")
    padded = seen(virtual.with_rules(path, f"{RULES}t -> t, pad(axis=0, size=5, fill=value, value=-1)")).t
    np.testing.assert_array_equal(padded.values, [*VALUES, [-1, -1, -1]])


def test_an_array_that_is_cut_alone_has_a_dimension_of_its_own(tmp_path):
    path = group(tmp_path / "a")
    for made in (
        virtual.rows(path, {"t": (0, 2)}),
        virtual.with_rules(path, f"{RULES}t -> t, slice(0, 1, 4)"),
        virtual.rows(path, {"t": (0, 2), "time": (1, 3)}),  # as long, but other times
    ):
        got = seen(made)
        assert got.t.dims == ("t.0", "lat")
        assert got.t.attrs["units"] == "K"
    report = convert(made, tmp_path / "out", format="zarr")
    assert any("names of dimensions" in n and "t (time)" in n for n in report.notes)


@pytest.mark.parametrize("version", [2, 3])
def test_a_fill_value_follows_a_cast_or_the_cast_is_refused(tmp_path, version):
    fits = group(tmp_path / "a", version, "f8", -999.0)
    for dtype in ("float32", "float16"):
        for source in (fits, convert(fits, tmp_path / f"ours-{dtype}", format="zarr").path):
            np.testing.assert_array_equal(seen(virtual.cast(source, dtype)).t.values, VALUES)
    below = convert(fits, tmp_path / "below", format="zarr", dtype="float32")
    np.testing.assert_array_equal(xarray.open_zarr(below.path, consolidated=False).t.values, VALUES)
    lost = group(tmp_path / "b", version, "f8", 1e20)
    ours = convert(lost, tmp_path / "ours", format="zarr").path
    for source in (lost, ours):
        for way in (
            lambda s: virtual.cast(s, "float32"),
            lambda s: virtual.with_rules(s, "t -> t, cast(float32)"),
            lambda s: convert(s, tmp_path / "none", format="zarr", dtype="float32"),
            lambda s: merge(s, tmp_path / "none", rules="t -> t, cast(float32)"),
        ):
            with pytest.raises(errors.CheckpointDTypeError, match=r"key 't' .*'_FillValue' = 1e\+20.*drop_encoding"):
                way(source)
    assert not (tmp_path / "none").exists()


def test_packed_numbers_keep_their_scale_in_another_dtype(tmp_path):
    packed = group(tmp_path / "a", 3, "i2", -1, scale_factor=0.5, add_offset=2.0)
    for dtype in ("int32", "float32", "float64"):
        made = virtual.with_rules(packed, f"{RULES}t -> t, cast({dtype})")
        assert made["t"].dtype == dtype
        np.testing.assert_array_equal(seen(made).t.values, VALUES)
    plain = group(tmp_path / "b", 3, "f4", np.nan)  # as xarray writes floats where nobody asks
    numbers = virtual.with_rules(plain, f"{RULES}t -> t, slice(0, 0, 1), cast(int32)")
    assert seen(numbers).t.values.tolist() == [[0, 1, 2]]
    assert seen(virtual.cast(plain, "bfloat16")).t.attrs["units"] == "K"
    unsigned = zarr.open_group(tmp_path / "c", mode="w").create_array("t", shape=(2,), dtype="i1")
    unsigned[:] = [-1, 3]
    unsigned.attrs["_Unsigned"] = "true"
    with pytest.raises(errors.CheckpointDTypeError, match="_Unsigned"):
        virtual.with_rules(os.fspath(tmp_path / "c"), "t -> t, cast(float32)")


@pytest.mark.parametrize("version", [2, 3])
def test_a_missing_value_of_nan_takes_nothing_with_it(tmp_path, version):
    path = group(tmp_path / "a", version, "f4", np.nan, missing_value=np.nan)
    for source in (path, virtual.cast(path, "float64")):
        assert seen(source).t.dims == ("time", "lat")
        assert seen(source).t.attrs["units"] == "K"


@pytest.mark.parametrize("version", [2, 3])
def test_rows_of_masked_numbers_are_not_quantised(tmp_path, version):
    with pytest.raises(errors.CheckpointDTypeError, match="_FillValue"):
        virtual.quantize(group(tmp_path / "a", version))
    assert set(virtual.quantize(group(tmp_path / "b", version, fill=np.nan), keys=["lat"])) >= {"lat.q", "t"}


def times(home, dtype="f8", units="days since 2000-01-01", unit="K", **attributes):
    data = xarray.Dataset({"v": ("time", np.arange(3.0), {"units": unit, **attributes})})
    data.coords["time"] = ("time", np.arange(3).astype(dtype), {"units": units, "calendar": "standard"})
    data.to_zarr(home, zarr_format=2, consolidated=False)
    return os.fspath(home)


SUMS = {
    "mean": virtual.mean,
    "sum": lambda p: virtual.weighted_sum(p, [1, 2]),
    "difference": lambda p: virtual.difference(*p),
    "add": lambda p: virtual.add(*p),
    "ema": lambda p: virtual.ema(p, decay=0.5),
}


@pytest.mark.parametrize("dtype", ["i8", "f8"])
@pytest.mark.parametrize("way", SUMS)
def test_sums_of_other_units_are_refused(tmp_path, way, dtype):
    first, later = times(tmp_path / "a", dtype), times(tmp_path / "b", dtype, "days since 2010-01-01")
    celsius, none = times(tmp_path / "c", dtype, unit="degC"), os.fspath(tmp_path / "d")
    save(none, {k: np.asarray(v) for k, v in load(first).items()})
    for other, told in ((later, "2010-01-01.*2000-01-01"), (celsius, "degC.*'K'"), (none, "= None: .*(K|days)")):
        ours = convert(other, f"{other}-ours", format="zarr").path
        for second in (other, ours, virtual.rows(other, {})):
            with pytest.raises(errors.CheckpointDTypeError, match=told):
                SUMS[way]([first, second])


def test_a_blend_of_other_units_is_refused(tmp_path):
    paths = [times(tmp_path / "a"), times(tmp_path / "b", unit="degC"), times(tmp_path / "c")]
    models = [{"model": p, "parameters": {"weight": 1}} for p in paths]
    with pytest.raises(errors.CheckpointDTypeError, match=r"degC.*'K'"):
        blended({"merge_method": "linear", "models": models[:2]})
    assert blended({"merge_method": "linear", "models": models[::2]})["v"].read().tolist() == [0, 1, 2]


def test_arrays_of_other_units_are_not_joined_in_silence(tmp_path):
    path = times(tmp_path / "a")
    made = virtual.with_rules(path, "time, v -> x, concat()")
    np.testing.assert_array_equal(made["x"].read(), [0, 1, 2] * 2)  # numbers alone
    for use in (as_zarr, lambda m: convert(m, tmp_path / "none", format="zarr"), lambda m: m["x"].attributes):
        with pytest.raises(errors.CheckpointDTypeError, match=r"'units' = 'days.*and one 'K'.*of one unit"):
            use(made)
    twice = virtual.with_rules(path, "v -> v, concat()\ntime -> time")
    assert seen(twice).v.attrs == {"units": "K"}


def test_sums_keep_what_their_parents_say_alike(tmp_path):
    paths = [times(tmp_path / n, long_name=f"run {n}", place="Bern") for n in "ab"]
    mean = virtual.mean(paths)
    got = seen(mean)
    assert got.v.attrs == {"units": "K", "place": "Bern"}
    np.testing.assert_array_equal(got.time.values, DAY + np.arange(3) * np.timedelta64(1, "D"))
    again = virtual.add(paths[0], virtual.difference(*paths))  # coordinates stay
    np.testing.assert_array_equal(seen(again).time.values, got.time.values)
    when = [virtual.with_rules(p, "time -> when") for p in paths]  # times that are none
    delta = virtual.difference(*when)
    units = {k: v for k, v in delta["when"].attributes.items() if k != "_FillValue"}
    assert units == {"units": "days"}  # a difference of times is none
    again = virtual.add(when[0], delta)
    assert again["when"].attributes["units"] == when[0]["when"].attributes["units"]
    np.testing.assert_array_equal(again["when"][...], when[0]["when"][...])
    assert virtual.weighted_sum(when, [1, 1])["when"].attributes["units"] == "days"
    report = convert(mean, tmp_path / "out", format="zarr")
    assert any("v (long_name)" in n for n in report.notes)


def test_diff_lists_attributes_that_give_meaning(tmp_path):
    first, later = times(tmp_path / "a"), times(tmp_path / "b", units="days since 2010-01-01")
    for values in (True, False):
        found = diff(first, later, values=values)
        assert not found.same
        (one,) = found.arrays
        assert (one.name, found.equal) == ("time", 1)
        assert one.attributes == {"units": ("days since 2000-01-01", "days since 2010-01-01")}
        assert "units 'days since 2000-01-01' and 'days since 2010-01-01'" in str(one)
    ours = convert(later, tmp_path / "ours", format="zarr").path
    assert diff(later, ours).same
    assert [a.name for a in diff(first, ours).arrays] == ["time"]
    assert diff(first, times(tmp_path / "c", long_name="another text")).same
    packed = [group(tmp_path / f"p{s}", 3, "i2", -1, scale_factor=s) for s in (1.0, 0.5)]
    assert diff(*packed).arrays[-1].attributes["scale_factor"] == (1.0, 0.5)
    said = json.loads(CliRunner().invoke(main, ["diff", first, later, "--json"]).stdout)
    assert said["differing"][0]["attributes"]["units"][1] == "days since 2010-01-01"


def test_an_error_shows_a_neutral_scale(tmp_path):
    paths = [group(tmp_path / str(s), 3, "i2", -1, scale_factor=s, add_offset=1.0) for s in (0.5, 1.0)]
    with pytest.raises(errors.CheckpointDTypeError, match=r"'scale_factor' = 1\.0: .* has 0\.5"):
        virtual.mean(paths)


def texts(home):
    data = xarray.Dataset({"t": ("station", np.arange(2.0))}, {"station": ["Bern", "Oslo"]})
    data.to_zarr(home, zarr_format=2, consolidated=False)
    return os.fspath(home)


def test_variables_without_a_form_are_told(tmp_path, monkeypatch):
    path = texts(tmp_path / "a")
    document = virtual.write(tmp_path / "d.json", virtual.cast(path, "float32"))
    assert "station" in open_checkpoint(document).skipped
    for where in (path, document):
        with pytest.warns(UserWarning, match="shown without what cannot be read.*station"):
            store = as_zarr(where)
        assert zarr.open_group(store, mode="r").attrs["skipped"] == ["station"]
        with pytest.warns(UserWarning, match="station"), serve(where) as server:
            assert server.source.skipped == ["station"]
        monkeypatch.setattr(serving.server.CheckpointServer, "run", lambda self: None)
        assert "not readable here (1): station" in CliRunner().invoke(main, ["serve", where]).output
        assert json.loads(CliRunner().invoke(main, ["serve", where, "--json"]).stdout)["skipped"] == ["station"]
    np.savez(tmp_path / "x.npz", w=np.ones(3), names=np.array(["a"]))
    with pytest.warns(UserWarning, match="names"):
        as_zarr(tmp_path / "x.npz")


def test_a_rule_drops_what_cannot_be_read(tmp_path, recwarn):
    np.savez(path := tmp_path / "x.npz", w=np.ones(3), v=np.zeros(2), names=np.array(["a"]), more=np.array(["b"]))
    assert set(load(path, rules="{n*}ames -> _\nmore -> _".replace("{n*}", "{x}"))) == {"w", "v"}
    assert not recwarn.list
    made = virtual.with_rules(path, "names, v -> _")
    assert set(made) == {"w"}
    assert list(made.skipped) == ["more"]
    assert merge(path, tmp_path / "m", rules="names -> _").skipped == ["more"]
    with pytest.raises(errors.CheckpointDTypeError, match="'names' cannot be read"):
        load(path, rules="names -> other")
    with pytest.raises(errors.RuleMatchError, match="nearest keys"):
        load(path, rules="names -> _\nnone -> other")
    with pytest.raises(errors.RuleMatchError):
        load(path, rules="nothing -> _")


def test_names_that_only_file_systems_refuse_stay(tmp_path):
    path = os.fspath(tmp_path / "a")
    root = zarr.open_group(path, mode="w")
    names = ["c", "con", "T", "t", "sea level", "Höhe", "g/c", "g/0", "g/h/c"]
    for i, name in enumerate(names):
        made = root.create_array(name, shape=(3,), dtype="f8", dimension_names=["x"])
        made[...] = i + 1
    odd = {"%63": "~2563", "q?": "q~3F"}
    for name in odd:
        root.create_array(name, shape=(), dtype="i4")[...] = 5
    shown = zarr.open_group(as_zarr(path), mode="r")
    arrays = {n for n, a in shown.members(max_depth=None) if isinstance(a, zarr.Array)}
    assert arrays == {*names, *odd.values()}
    for i, name in enumerate(names):
        assert shown[name][...].tolist() == [i + 1] * 3
    with serve(path) as server:
        for i, name in enumerate(names):
            with urllib.request.urlopen(server.url + "zarr/" + urllib.request.quote(f"{name}/c/0")) as answer:
                assert np.frombuffer(answer.read(), "f8").tolist() == [i + 1] * 3
    report = convert(path, tmp_path / "ours", format="zarr")
    assert any("con is %63on" in n and "q? is q%3F" in n for n in report.notes)
    assert zarr.open_group(tmp_path / "ours", mode="r")["c"][...].tolist() == [1] * 3
    np.testing.assert_array_equal(load(report.path)["Höhe"], [6] * 3)
    xarray.Dataset({"c": ("x", np.arange(3.0) + 1)}).to_zarr(tmp_path / "only")
    assert convert(tmp_path / "only", tmp_path / "kept", format="zarr").notes == []
    assert list(xarray.open_zarr(tmp_path / "kept")) == ["c"]


def test_labelled_leaves_are_refused(tmp_path):
    pandas = pytest.importorskip("pandas")
    labelled = xarray.DataArray(np.ones((2, 3)), dims=("x", "y"), coords={"x": [1, 2]}, attrs={"units": "K"})
    for leaf in (
        labelled,
        labelled.variable,
        labelled.to_dataset(name="t"),
        pandas.Series([1.0, 2.0], index=["a", "b"]),
        pandas.DataFrame({"a": [1.0]}),
    ):
        for tree in ({"a": [{"t": leaf}]}, {"t": leaf}):
            with pytest.raises(errors.CheckpointDTypeError, match=r"'.*t'.*labels.*\.values.*to_zarr"):
                save(tmp_path / "none", tree)
        with pytest.raises(errors.CheckpointDTypeError, match="labels"):
            save_safetensors(tmp_path / "none", {"t": leaf})
        with pytest.raises(errors.CheckpointDTypeError, match="labels"):
            quantize({"t": leaf})
    assert not (tmp_path / "none").exists()
    save(tmp_path / "a", {"t": labelled.values, "s": pandas.Series([1.0]).values})
    assert set(load(tmp_path / "a")) == {"t", "s"}


def test_references_to_layout_dual(tmp_path):
    r = np.random.default_rng(0)
    tree = {
        "w": r.normal(size=(300, 7000)),
        "odd": r.normal(size=(1001, 503)).astype("f4"),
        "half": r.normal(size=(5, 3)).astype(ml_dtypes.bfloat16),
        "scalar": np.asarray(np.float32(3)),
        "empty": np.zeros((0, 3), "f4"),
    }
    save(tmp_path / "a", tree)
    for n, how in enumerate(({}, {"mesh": {"m": 3}, "shardings": {"odd": {"m": 0}, "w": {"m": 0}}})):
        dual = convert(tmp_path / "a", tmp_path / f"dual{n}", format="zarr", layout="dual", **how).path
        refs = json.loads(json.dumps(zarr_references(dual)))["refs"]
        for name, want in tree.items():
            chunk = json.loads(refs[f"{name}/zarr.json"])["chunk_grid"]["configuration"]["chunk_shape"]
            out = np.zeros([-(-n // c) * c for n, c in zip(want.shape, chunk, strict=True)], want.dtype)
            for key, (file, start, nbytes) in ((k, v) for k, v in refs.items() if k.startswith(f"{name}/c")):
                at = [int(i) for i in key.split("/")[2:]]
                with open(file, "rb") as f:
                    f.seek(start)
                    part = np.frombuffer(f.read(nbytes), want.dtype).reshape(chunk)
                out[(*(slice(i * c, (i + 1) * c) for i, c in zip(at, chunk, strict=True)), ...)] = part
            assert out[(*map(slice, want.shape), ...)].tobytes() == want.tobytes(), name


def test_a_lazily_conjugated_tensor_names_the_cure(tmp_path):
    torch = pytest.importorskip("torch")
    tensor = torch.ones(3, dtype=torch.complex64).conj()
    with pytest.raises(errors.CheckpointDTypeError, match=r"resolve_conj\(\)"):
        save(tmp_path / "a", {"z": tensor})
    mt.save(tmp_path / "a", {"z": tensor.resolve_conj()})
