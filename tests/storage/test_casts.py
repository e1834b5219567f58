"""Casts count what they lose, and refuse it unless that was allowed."""

import itertools
import json
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtape import errors
from meshtape.storage import (
    CastLoss,
    LoadReport,
    Rules,
    blend,
    convert,
    dequantize,
    load,
    merge,
    open_checkpoint,
    quantize,
    reshard,
    save,
    save_safetensors,
    virtual,
)
from meshtape.storage.format import dtypes
from meshtape.storage.rules import casting
from meshtape.storage.transform import transfer

NAMES = [row.name for row in dtypes.ROWS if row.name]
LOSSY = {"w": np.asarray([[1.0, 7e4, -7e4], [1e-9, 2.0, np.inf]], np.float32), "b": np.ones(3, np.float32)}


def kinds(a, b):
    """The losses of ``b`` made of ``a``, one element at a time in Python numbers."""
    found = dict.fromkeys(("overflow", "nan", "wrapped", "fraction", "imaginary", "underflow"), 0)

    def one(x, y, x_dtype, y_dtype):
        if y_dtype.kind == "b":
            found["wrapped"] += x not in (0, 1)
        elif y_dtype.kind in "iu":
            limits = np.iinfo(y_dtype)
            if x != x or abs(x) == np.inf or not limits.min <= int(x) <= limits.max:
                found["wrapped"] += 1
            elif int(x) != x:
                found["fraction"] += 1
        else:
            found["overflow"] += abs(y) == np.inf and abs(x) != np.inf and x == x
            found["nan"] += y != y and x == x
            found["underflow"] += y == 0 and x != 0 and x_dtype.kind not in "iu"

    for x, y in zip(a.reshape(-1), b.reshape(-1), strict=True):
        integral = a.dtype.kind in "iub"
        if a.dtype.kind == "c" and b.dtype.kind == "c":
            one(float(x.real), float(y.real), a.real.dtype, b.real.dtype)
            one(float(x.imag), float(y.imag), a.real.dtype, b.real.dtype)
        elif a.dtype.kind == "c":
            found["imaginary"] += x.imag != 0
            one(float(x.real), float(y), a.real.dtype, b.dtype)
        else:
            y = y.real if b.dtype.kind == "c" else y
            one(int(x) if integral else float(x), float(y), a.dtype, b.real.dtype if b.dtype.kind == "c" else b.dtype)
    return found


def samples(dtype):
    """Every bit pattern of a short type; the awkward ones of a long one."""
    dtype = dtypes.by_name(dtype)
    if dtype.itemsize <= 2 and dtype.kind != "b":
        return np.arange(1 << (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}")[
            :: 1 if dtype.itemsize == 1 else 37
        ].view(dtype)
    if dtype.kind == "b":
        return np.asarray([True, False])
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        near = [0, 1, 2, 127, 128, 255, 256, 300, 448, 465, 65504, 65519, 65520, limits.max, limits.max - 1]
        return np.asarray([n for n in {*near, *(-n for n in near), limits.min} if limits.min <= n <= limits.max], dtype)
    near = [
        0.0,
        0.5,
        1,
        1.5,
        127.5,
        128,
        255.5,
        256,
        300,
        448,
        464,
        464.001,
        465,
        57344,
        61440,
        65504,
        65519.9,
        65520,
        7e4,
    ]
    near += [2.0**31, 2.0**32, 2.0**63, 2.0**64, 3.3e38, 3.4e38, 1e39, 1e300, np.inf, np.nan]
    near += [
        1e-3,
        2.0**-10,
        2.0**-11,
        1.1 * 2.0**-11,
        2.0**-17,
        2.0**-18,
        2.0**-25,
        2.0**-24,
        1e-30,
        1e-41,
        1e-45,
        1e-300,
        5e-324,
    ]
    with np.errstate(all="ignore"):
        real = np.asarray([*near, *(-n for n in near)], np.float64)
        return (real + 1j * real[::-1]).astype(dtype) if dtype.kind == "c" else real.astype(dtype)


@pytest.mark.parametrize("source", NAMES)
def test_every_pair_of_dtypes_counts_as_python_numbers_do(source):
    a = samples(source)
    for target in NAMES:
        tally = casting.Tally()
        b = casting.tallied(tally, lambda target=target: casting.cast("a", a, dtypes.by_name(target), (0,)))
        got = tally.get("a", CastLoss())
        assert {k: getattr(got, k) for k in kinds(a[:0], b[:0])} == kinds(a, b), target
        assert bool(got.places) == any(n for k, n in kinds(a, b).items() if k != "underflow")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(list(itertools.product(dtypes.FLOATS, dtypes.FLOATS))))
def test_bits_drawn_at_random(seed, pair):
    source, target = map(dtypes.by_name, pair)
    a = np.random.default_rng(seed).integers(0, 256, 64 * source.itemsize, dtype=np.uint8).view(source)
    with np.errstate(all="ignore"):
        b = a.astype(target)
        got = casting.measure(a, b)
    assert {k: getattr(got, k) for k in kinds(a, b)} == kinds(a, b)


# ----- every way to cast ----------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path):
    save(tmp_path / "c", LOSSY)
    return tmp_path / "c"


HALF = CastLoss(overflow=2, underflow=1, places=(((0, 1), "70000.0", "inf"), ((0, 2), "-70000.0", "-inf")))
WAYS = {
    "merge": lambda c, out, **o: merge(c, out, dtype="float16", **o),
    "convert": lambda c, out, **o: convert(c, out, format="zarr", dtype="float16", **o),
    "compressed": lambda c, out, **o: convert(c, out, format="zarr", dtype="float16", compression="zstd", **o),
    "reshard": lambda c, out, **o: reshard(c, out, mesh={"m": 2}, shardings={"w": {"m": 0}}, dtype="float16", **o),
    "rules": lambda c, out, **o: merge(c, out, rules="{n} -> {n}, cast(float16)", **o),
    "one thread": lambda c, out, **o: merge(c, out, dtype="float16", threads=1, **o),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_lossy_cast_is_refused_before_anything_is_replaced(kit, source, tmp_path, way):
    out = tmp_path / "out"
    merge(source, out) if way in ("merge", "rules", "one thread") else convert(source, out, format="zarr")
    with pytest.raises(errors.Lossy) as e:
        WAYS[way](source, out, overwrite=True)
    for text in (
        "'w'",
        "2 became infinite",
        "1 became zero",
        "[0, 1] is 70000.0 and would be inf",
        "allow_overflow=True",
    ):
        assert text in str(e.value)
    assert kit.same(open_checkpoint(out)["w"].read(), LOSSY["w"])
    assert not (tmp_path / "out.part").exists()
    report = WAYS[way](source, out, overwrite=True, allow_overflow=True)
    assert report.losses == {"w": HALF}
    with np.errstate(over="ignore"):
        assert kit.same(open_checkpoint(out)["w"].read(), LOSSY["w"].astype("f2"))


@pytest.mark.parametrize("target", ["memory://casts-zarr/{}", "memory://casts-hf/{}"])
def test_in_an_object_store(source, tmp_path, target):
    url = target.format(tmp_path.name)
    way = merge if "hf" in target else lambda *a, **o: convert(*a, format="zarr", **o)
    with pytest.raises(errors.Lossy, match="'w'"):
        way(source, url, dtype="float16")
    with pytest.raises(errors.NotACheckpoint):
        open_checkpoint(url)
    assert way(source, url, dtype="float16", allow_overflow=True).losses == {"w": HALF}


def test_in_other_processes(source, tmp_path):
    with ProcessPoolExecutor(2) as pool:
        with pytest.raises(errors.Lossy, match="2 became infinite"):
            merge(source, tmp_path / "out", dtype="float16", client=pool)
        report = merge(source, tmp_path / "out", dtype="float16", client=pool, allow_overflow=True)
    assert report.losses == {"w": HALF}


def test_counts_are_of_the_whole_array_whatever_the_windows(tmp_path):
    w = np.ones((600, 500), np.float32)
    w[::7, ::50] = 1e6
    w[3] = 1e-10
    save(tmp_path / "c", {"w": w})
    wanted = int((w == 1e6).sum())
    for limit, threads in ((1, 1), (1 << 20, 3), (1 << 28, 2)):
        with pytest.raises(
            errors.Lossy, match=rf"{wanted} became infinite, {(w == np.float32(1e-10)).sum()} became zero"
        ):
            merge(tmp_path / "c", tmp_path / "out", dtype="float16", memory_limit=limit, threads=threads)
        options = {"memory_limit": limit, "threads": threads, "overwrite": True, "allow_overflow": True}
        (loss,) = merge(tmp_path / "c", tmp_path / "ok", dtype="float16", **options).losses.values()
        assert [at for at, _, _ in loss.places] == [(0, 0), (0, 50), (0, 100)]


@pytest.mark.parametrize("threads", [1, 4])
def test_an_array_that_is_complete_first_tells_nothing_of_others(tmp_path, threads):
    w = np.ones((3000, 40), np.float32)
    w[::100] = 1e6
    save_safetensors(tmp_path / "c", {"w": w, **{f"a{i}": np.ones(3, np.float32) for i in range(40)}})
    with ThreadPoolExecutor(threads) as pool:  # windows of several arrays at a time, in any order
        for _ in range(5):
            with pytest.raises(errors.Lossy, match="'w': 1200 became infinite"):
                merge(tmp_path / "c", tmp_path / "out", dtype="float16", memory_limit=1, threads=threads, client=pool)


def test_what_rounds_or_becomes_zero_is_no_error(tmp_path):
    save(tmp_path / "c", {"w": np.asarray([1 / 3, 1e-9, 0.0, np.inf, np.nan], np.float32)})
    assert merge(tmp_path / "c", tmp_path / "b", dtype="bfloat16").losses == {}
    assert merge(tmp_path / "c", tmp_path / "h", dtype="float16").losses == {"w": CastLoss(underflow=1)}


@pytest.mark.parametrize(
    ("value", "dtype", "said"),
    [
        (300, "int8", "1 out of range"),
        (1.5, "int8", "1 lost a fraction"),
        (np.nan, "int32", "1 out of range"),
        (7e4, "float8_e4m3fn", "1 became NaN"),
        (np.inf, "float8_e4m3fn", "1 became NaN"),
        (7e4, "float8_e5m2", "1 became infinite"),
        (1 + 2j, "float32", "1 lost an imaginary part"),
        (-1, "uint8", "1 out of range"),
        (2, "bool", "1 out of range"),
        (10**6, "float16", "1 became infinite"),
    ],
)
def test_rules(tmp_path, value, dtype, said):
    rules = f"w -> v, cast({dtype})"
    with pytest.raises(errors.Lossy, match=said):
        Rules(rules).on_arrays({"w": np.asarray([1, value])})
    save(tmp_path / "c", {"w": np.asarray([1, value])})
    opened = Rules(rules).on(open_checkpoint(tmp_path / "c"))
    assert opened["v"][:1].tolist() == [1]  # what is not read is not lost
    with pytest.raises(errors.Lossy, match=said):
        opened["v"].read()
    with pytest.raises(errors.Lossy, match=said):
        load(tmp_path / "c", rules=rules)
    report = LoadReport()
    load(tmp_path / "c", rules=rules, allow_overflow=True, report=report)
    assert str(report.losses["v"]) == said
    assert said in str(report)
    accepted = Rules(f"w -> v, cast({dtype}, allow_overflow=true)")
    assert Rules(str(accepted)) == accepted
    accepted.on_arrays({"w": np.asarray([1, value])})
    assert merge(tmp_path / "c", tmp_path / "out", rules=accepted).losses["v"].places == ()


def test_a_real_complex_array_may_become_real():
    got = Rules("w -> w, cast(float32)").on_arrays({"w": np.asarray([1 + 0j, 2])})
    assert got["w"].tolist() == [1, 2]


def test_load(kit, source):
    like = {n: np.zeros(a.shape, "f2") for n, a in LOSSY.items()}
    with pytest.raises(errors.Lossy, match="'w': 2 became infinite"):
        load(source, like=like, cast=True)
    report = LoadReport()
    got = load(source, like=like, cast=True, allow_overflow=True, report=report)
    assert report.losses == {"w": HALF}
    with np.errstate(over="ignore"):
        assert kit.same(got["w"], LOSSY["w"].astype("f2"))
    # On a mesh, where ranks hold the same block: each element counts once.
    for sharding in ((0,), (None,)):
        host = kit.Host({"data": 2})
        like = {n: kit.split(np.zeros(a.shape, "f2"), kit.Sharding(host, sharding)) for n, a in LOSSY.items()}
        with pytest.raises(errors.Lossy, match="'w': 2 became infinite"):
            load(source, like=like, cast=True)
        load(source, like=like, cast=True, allow_overflow=True, report=report)
        assert report.losses == {"w": HALF}


# ----- resumed --------------------------------------------------------------------------------------------------------


class Stopped(BaseException):
    pass


def interrupted(src, out, after, **options):
    seen = []

    def progress(done, total):
        seen.append(done)
        if len(seen) > after:
            raise Stopped

    with pytest.raises(Stopped):
        merge(src, out, dtype="float16", threads=1, memory_limit=1, progress=progress, **options)


def test_counts_survive_an_interruption(tmp_path):
    w = np.ones((400, 300), np.float32)
    w[::9] = 1e6
    save_safetensors(tmp_path / "c", {"w": w})
    interrupted(tmp_path / "c", tmp_path / "out", 3, allow_overflow=True)
    lines = (tmp_path / "out.part" / transfer.JOURNAL).read_text().splitlines()
    assert len(lines) == 4
    assert len(json.loads(lines[1])) == 3
    options = {"format": "safetensors", "threads": 1, "memory_limit": 1, "allow_overflow": True}
    report = convert(tmp_path / "c", tmp_path / "out", dtype="float16", **options)
    assert report.resumed > 0
    assert report.losses["w"].overflow == (w == 1e6).sum()


@pytest.mark.parametrize("allowed", [True, False])
def test_counts_survive_an_interrupted_upload(tmp_path, allowed):
    held = {n: np.full((64, 64), 1e6, np.float32) for n in "abc"}
    save_safetensors(tmp_path / "c", held)
    url = f"memory://casts-resumed/{tmp_path.name}"
    options = {"dtype": "float16", "format": "safetensors", "max_shard_bytes": 9000, "threads": 1}
    seen = []

    def progress(done, total):
        seen.append(done)
        if len(seen) == 3:  # two files of three are there
            raise Stopped

    with pytest.raises(Stopped):
        convert(tmp_path / "c", url, progress=progress, allow_overflow=True, **options)
    if not allowed:
        with pytest.raises(errors.Lossy, match="'a': 4096 became infinite"):
            convert(tmp_path / "c", url, **options)
        return
    report = convert(tmp_path / "c", url, allow_overflow=True, **options)
    assert report.resumed > 0
    assert {n: loss.overflow for n, loss in report.losses.items()} == dict.fromkeys("abc", 4096)


def test_a_run_that_goes_on_without_leave_is_refused(tmp_path):
    w = np.ones((400, 300), np.float32)
    w[0, 0] = 1e6  # in a window that the interrupted run has written
    save_safetensors(tmp_path / "c", {"w": w})
    interrupted(tmp_path / "c", tmp_path / "out", 3, allow_overflow=True)
    with pytest.raises(errors.Lossy, match="1 became infinite"):
        merge(tmp_path / "c", tmp_path / "out", dtype="float16", threads=1, memory_limit=1)


def test_a_run_with_other_rules_of_the_same_shapes_starts_anew(kit, tmp_path):
    held = {n: np.full((300, 300), i, np.float32) for i, n in enumerate("ab")}
    save_safetensors(tmp_path / "c", held)
    seen = []

    def progress(done, total):
        seen.append(done)
        if len(seen) > 3:
            raise Stopped

    options = {"threads": 1, "memory_limit": 1}
    with pytest.raises(Stopped):
        merge(tmp_path / "c", tmp_path / "out", rules="a -> x\nb -> y", progress=progress, **options)
    report = merge(tmp_path / "c", tmp_path / "out", rules="a -> y\nb -> x", **options)
    assert report.files == ["model.safetensors"]
    got = open_checkpoint(tmp_path / "out")
    assert kit.same(got["x"].read(), held["b"])
    assert kit.same(got["y"].read(), held["a"])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scales_of_quantised_states_keep_their_dtype(tmp_path, bits, dtype):
    """Rounded they would change all numbers of a row; in float16 these would become zero."""
    x = np.random.default_rng(0).random((8, 16)).astype("f4") * np.float32(1e-11)
    save(tmp_path / "a", {"w": np.ones(4, "f4"), "opt": quantize({"v": x}, bits=bits)})
    wanted = np.asarray(dequantize(load(tmp_path / "a"))[0]["opt"]["v"])
    report = convert(tmp_path / "a", tmp_path / "b", format="zarr", dtype=dtype)
    assert report.notes == ["dtype: scales of quantised arrays keep theirs: opt.v.scale"]
    for held in (load(tmp_path / "b"), load(virtual.cast(tmp_path / "a", dtype))):
        assert np.asarray(held["w"]).dtype.name == dtype
        np.testing.assert_array_equal(np.asarray(dequantize(held)[0]["opt"]["v"]), wanted)
    config = {"merge_method": "passthrough", "models": [{"model": str(tmp_path / "a")}], "dtype": dtype}
    with pytest.raises(errors.CheckpointError, match="is quantised"):
        blend(config, tmp_path / "c", integers="first")
