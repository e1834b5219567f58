"""What the views show, compared with NumPy, with the meshes that saved it, and with the files themselves."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import meshtape as mt
from meshtape.cli.main import main
from meshtape.storage import open_checkpoint, save
from meshtape.storage.browse.model.compare import compare, names
from meshtape.storage.browse.model.health import Health, scan
from meshtape.storage.browse.model.inventory import PAGE, Inventory, Query
from meshtape.storage.browse.model.jobs import BrowseJob, Jobs, Stopped
from meshtape.storage.browse.model.layout import blocks, chunk_map, stored
from meshtape.storage.browse.model.pieces import Pieces
from meshtape.storage.browse.model.runs import history
from meshtape.storage.browse.model.slices import CELLS, SliceView, window
from meshtape.storage.browse.model.statistics import QUANTILES, statistics
from meshtape.storage.browse.model.text import key, natural
from meshtape.storage.browse.views import charts, png
from meshtape.storage.browse.views.treemap import Rectangle, squarify, treemap
from meshtape.storage.checkpoint.checkpoint import StoredArray, flat
from meshtape.storage.rules.lazy_tensors import InMemoryTensor

shapes = st.lists(st.integers(1, 90), min_size=0, max_size=4).filter(lambda s: math.prod(s) <= 20_000).map(tuple)


def stored_array(tmp: Path, values: np.ndarray, kind: str):
    tmp.mkdir(parents=True, exist_ok=True)
    if kind == "safetensors":
        save_file({"w": np.ascontiguousarray(values).reshape(values.shape)}, tmp / "x.safetensors")
        return open_checkpoint(tmp / "x.safetensors")["w"]
    save(tmp / "c", {"w": values}, overwrite=True)
    return open_checkpoint(tmp / "c")["w"]


# ----- windows --------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(shapes, st.data())
@pytest.mark.parametrize("kind", ["zarr", "safetensors"])
def test_a_window_is_the_slice_that_numpy_takes(
    kind: str, tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], data: st.DataObject
) -> None:
    values = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    a = stored_array(tmp_path_factory.mktemp("w"), values, kind)
    dims = st.none() | st.integers(0, len(shape) - 1) if shape else st.none()
    at = tuple(data.draw(st.integers(0, 2 * n)) for n in shape)
    steps = data.draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    view = SliceView.of(shape, data.draw(dims), data.draw(dims), at, steps)
    seen = window(a, view)
    index: list = list(view.at)
    for d, step in zip((view.rows, view.columns), view.steps, strict=True):
        if d is not None:
            index[d] = slice(view.at[d], view.at[d] + CELLS * step, step)
    expected = values[tuple(index)]
    if view.rows is not None and view.columns is not None and view.rows > view.columns:
        expected = expected.T
    np.testing.assert_array_equal(seen.values, expected.reshape(seen.values.shape))
    assert max(seen.values.shape) <= CELLS


def test_a_window_reads_little_of_a_large_array(tmp_path: Path) -> None:
    values = np.zeros((4096, 2048), np.float32)
    a = stored_array(tmp_path, values, "safetensors")
    assert window(a, SliceView.of(a.shape)).nbytes < values.nbytes // 32
    assert window(a, SliceView.of(a.shape, steps=(1, 1))).nbytes <= CELLS * 2048 * 4


# ----- statistics -----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32), min_size=1, max_size=400),
    st.sampled_from([np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.uint8, np.bool_]),
)
def test_statistics_are_numpys(values: list[float], dtype: type) -> None:
    with np.errstate(all="ignore"):
        a = np.array(values, np.float32)
        a = (
            (np.nan_to_num(a, posinf=9, neginf=-9) % 50).astype(dtype)
            if np.dtype(dtype).kind in "iub"
            else a.astype(dtype)
        )
    s = statistics(StoredArray(("w",), InMemoryTensor("w", a)))
    wide = a.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    assert s.exact
    assert (s.seen, s.nan, s.infinite) == (a.size, np.isnan(wide).sum(), np.isinf(wide).sum())
    if finite.size:
        assert (s.low, s.high) == (finite.min(), finite.max())
        assert s.zeros == (finite == 0).sum()
        assert sum(s.counts) == finite.size
        ordered = np.sort(finite)
        for q in QUANTILES:
            assert s.quantiles[q] == ordered[min(finite.size - 1, int(q * finite.size))]
        if np.abs(finite).max() < 1e100:
            np.testing.assert_allclose(s.mean, finite.mean(), rtol=1e-9, atol=1e-9 * np.abs(finite).max() + 1e-300)
            np.testing.assert_allclose(s.norm, np.linalg.norm(finite), rtol=1e-9)


def test_reading_all_of_a_large_array_agrees_with_numpy(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(700, 900)).astype(np.float32)
    values[3, 5] = np.nan
    a = stored_array(tmp_path, values, "zarr")
    sampled = statistics(a, limit=1 << 19)
    assert not sampled.exact
    assert 0 < sampled.seen < values.size
    assert "Sampled" in sampled.how
    s = statistics(a, limit=1 << 19, exact=True)
    finite = np.sort(values[np.isfinite(values)])
    assert s.exact
    assert s.nan == 1
    np.testing.assert_allclose(
        [s.mean, s.std, s.norm],
        [finite.mean(dtype="f8"), finite.std(dtype="f8"), np.linalg.norm(finite.astype("f8"))],
        rtol=1e-6,
    )
    np.testing.assert_array_equal(s.counts, np.histogram(finite.astype("f8"), s.edges)[0])
    for q, v in s.quantiles.items():
        assert abs(v - finite[int(q * finite.size)]) <= 2 * s.quantile_error * abs(v)


def test_integers_beyond_float64_keep_their_ends(tmp_path: Path) -> None:
    ends = np.array([np.iinfo(np.int64).min, -1, 0, np.iinfo(np.int64).max])
    s = statistics(stored_array(tmp_path, ends, "zarr"))
    assert (s.low, s.high) == (-(2**63), 2**63 - 1)
    assert sum(s.counts) == 4


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=4), st.integers(1, 10**6))
def test_pieces_are_counted_not_listed(shape: list[int], limit: int) -> None:
    pieces = Pieces(tuple(shape), (1,) * len(shape), 8, limit)
    few = list(itertools.islice(pieces.spread(7), 7))
    assert len(few) == min(7, pieces.total)
    assert all(b <= n for box in few for b, n in zip(box.stop, shape, strict=True))
    assert len({b.offset for b in few}) == len(few)


def test_the_pieces_of_a_huge_array_come_at_once() -> None:
    pieces = Pieces((1 << 40, 1 << 20), (1, 1), 4)
    assert len(list(pieces.spread(16))) == 16


# ----- layout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "placements",
    [
        {},
        {"a": mt.Shard(0)},
        {"a": mt.Shard(1), "b": mt.Shard(0)},
        {"a": mt.Shard(0), "b": mt.Shard(0)},
        {"b": mt.Shard(1)},
    ],
    ids=str,
)
def test_blocks_are_where_the_mesh_had_them(placements: dict, tmp_path: Path) -> None:
    mesh = mt.Mesh({"a": 2, "b": 3})
    x = mt.distribute(np.arange(35.0).reshape(5, 7), mesh, **placements)
    save(tmp_path / "c", {"w": x})
    found = blocks(open_checkpoint(tmp_path / "c")["w"])
    assert found is not None
    mine = {rank: b.box for b in found for rank in b.ranks}
    assert mine == {rank: x.sharding.box((5, 7), rank) for rank in range(6)}


def test_chunks_cover_the_array_and_damage_shows(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32)
    save(tmp_path / "c", {"w": values})
    a = open_checkpoint(tmp_path / "c")["w"]
    m = chunk_map(a, 0, 1, (0, 0), check=True)
    assert m is not None
    covered = np.zeros(a.shape, int)
    for c in m.chunks:
        covered[c.box.slices] += 1
    assert (covered == 1).all()
    assert {c.state for c in m.chunks} == {"sound"}
    files = [p for p in (tmp_path / "c").rglob("c.*") if p.is_file()]
    assert stored(a).nbytes == sum(p.stat().st_size for p in files)
    data = bytearray(files[0].read_bytes())
    data[100] ^= 1
    files[0].write_bytes(bytes(data))
    m = chunk_map(open_checkpoint(tmp_path / "c")["w"], 0, 1, (0, 0), check=True)
    assert m is not None
    assert [c.state for c in m.chunks].count("damaged") == 1
    files[0].write_bytes(bytes(data[:-1]))
    m = chunk_map(open_checkpoint(tmp_path / "c")["w"], 0, 1, (0, 0))
    assert m is not None
    assert {c.state for c in m.chunks} == {"length"}
    files[0].unlink()
    m = chunk_map(open_checkpoint(tmp_path / "c")["w"], 0, 1, (0, 0))
    assert m is not None
    assert {c.state for c in m.chunks} == {"missing"}


def test_chunks_of_a_foreign_zarr_array_that_were_never_written(tmp_path: Path) -> None:
    import zarr

    z = zarr.create_array(tmp_path / "z", shape=(8, 8), chunks=(4, 4), dtype="f4", compressors=None)
    z[:4, :4] = 1
    a = next(iter(open_checkpoint(tmp_path / "z").values()))
    m = chunk_map(a, 0, 1, (0, 0))
    assert m is not None
    states = {(c.row, c.column): (c.state, c.nbytes) for c in m.chunks}
    assert states[0, 0] == ("plain", 64)
    assert states[1, 1][0] == "absent"


# ----- lists and maps -------------------------------------------------------------------------------------------------


@pytest.fixture
def inventory(tmp_path: Path) -> Inventory:
    tree = {
        "layers": [{"w": np.ones((4, i + 1), np.float32), "b": np.ones(4)} for i in range(12)],
        "Head": np.ones(3, np.int8),
    }
    save(tmp_path / "c", tree)
    return Inventory(open_checkpoint(tmp_path / "c"))


def test_queries_select_sort_and_page(inventory: Inventory) -> None:
    assert [r.name for r in inventory.list(Query("head")).rows] == ["Head"]
    assert [r.name for r in inventory.list(Query("layers.1*.w")).rows] == ["layers.1.w", "layers.10.w", "layers.11.w"]
    assert inventory.list(Query("w 11")).found == 1
    sizes = [r.nbytes for r in inventory.list(Query(sort="size", descending=True)).rows]
    assert sizes == sorted(sizes, reverse=True)
    assert {r.dtype for r in inventory.list(Query(dtype="float64")).rows} == {"float64"}
    assert all(100 <= r.nbytes <= 150 for r in inventory.list(Query(least=100, most=150)).rows)
    assert inventory.list(Query("nothing like it")).rows == []
    assert inventory.list(Query(page=99)).page == 0


def test_pages_hold_every_row_once(tmp_path: Path) -> None:
    save_file({f"w{i}": np.zeros(1, np.int8) for i in range(2 * PAGE + 1)}, tmp_path / "x.safetensors")
    held = Inventory(open_checkpoint(tmp_path / "x.safetensors"))
    pages = [held.list(Query(sort="name", page=p)) for p in range(3)]
    seen = [r.name for p in pages for r in p.rows]
    assert seen == [f"w{i}" for i in range(2 * PAGE + 1)]
    assert pages[0].pages == 3


def test_groups_add_up(inventory: Inventory) -> None:
    root = inventory.tree
    assert root.nbytes == inventory.nbytes == sum(r.nbytes for r in inventory.rows)
    assert root.arrays == len(inventory.rows)
    layers = inventory.group(["layers"])
    assert [c.path[-1] for c in layers.children()] == [str(i) for i in range(12)]
    assert inventory.group(["layers", "3"]).nbytes == 4 * 4 * 4 + 32


@example([999997.0, 0.044715], 309.0, 217.0)
@example([460697.0, 0.01171875], 731.0, 1685.0)
@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=40), st.floats(10, 2000), st.floats(10, 2000))
def test_a_treemap_fills_its_place_with_the_right_areas(sizes: list[float], width: float, height: float) -> None:
    sizes = sorted(sizes, reverse=True)
    tiles = squarify(sizes, Rectangle(0, 0, width, height))
    unit = width * height / sum(sizes)
    for s, t in zip(sizes, tiles, strict=True):
        assert t.width * t.height == pytest.approx(s * unit, rel=1e-6)
        assert t.x >= -1e-6
        assert t.x + t.width <= width * (1 + 1e-9) + 1e-6
        assert t.y + t.height <= height * (1 + 1e-9) + 1e-6
    for a, b in itertools.combinations(tiles, 2):
        apart = min(a.x + a.width, b.x + b.width) - max(a.x, b.x), min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
        assert min(apart) <= 1e-6 * (width + height)


def test_a_treemap_gathers_what_is_small(tmp_path: Path) -> None:
    save_file({f"w{i}": np.zeros(i + 1, np.int8) for i in range(300)}, tmp_path / "x.safetensors")
    tree = Inventory(open_checkpoint(tmp_path / "x.safetensors")).tree
    tiles = treemap(tree, 800, 400)
    assert sum(t.count for t in tiles) == 300
    assert sum(t.nbytes for t in tiles) == tree.nbytes
    assert ">252 more arrays<" in str(charts.bytes_map(tree, None)), "the tile of the rest says how much it holds"


@given(st.text(), st.text())
def test_keys_are_plain_and_tell_names_apart(a: str, b: str) -> None:
    assert key(a).isprintable()
    assert key(a).isascii() or key(a) == a
    assert len(key(a)) <= 200
    assert a == b or key(a) != key(b)


def test_natural_order() -> None:
    texts = ["layers.10.w", "layers.9.w", "a", "", "7", "٣", "²"]
    assert sorted(texts, key=natural).index("layers.9.w") < sorted(texts, key=natural).index("layers.10.w")


# ----- pictures -------------------------------------------------------------------------------------------------------


def test_a_heat_map_is_a_png_that_others_read() -> None:
    import io

    from matplotlib import image

    values = np.array([[-1.0, 0.0, 1.0], [np.nan, np.inf, -np.inf]])
    read = image.imread(io.BytesIO(png.heat(values, -1.0, 1.0)))
    assert read.shape[:2] == (2, 3)
    low, zero, high = (read[0, i, :3] for i in range(3))
    assert zero.min() > 0.9, "zero is the light middle of a scale with two sides"
    assert low[0] > low[2]
    assert high[2] > high[0]
    assert len({tuple(c) for c in read[1, :, :3].tolist()} | {tuple(low), tuple(high)}) == 5
    extremes = np.array([[np.finfo("f8").min, np.finfo("f8").max]])
    ends = image.imread(io.BytesIO(png.heat(extremes, *extremes[0])))
    assert not np.array_equal(ends[0, 0], ends[0, 1]), "the range of all float64 is beyond float64"


def test_a_curve_leaves_a_gap_where_a_value_is_missing() -> None:
    drawn = str(charts.curve([(0, 1.0), (1, 2.0), (2, math.nan), (3, 1.0), (4, 2.0)]))
    assert drawn.count("<polyline") == 2
    assert "No finite" in str(charts.curve([(0, math.nan)]))


# ----- health, comparison, runs ---------------------------------------------------------------------------------------


def test_health_finds_what_was_planted(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(64, 32)).astype(np.float32)
    dead = w.copy()
    dead[[3, 40]] = 0
    tree = {
        "w": w,
        "twin": w.copy(),
        "nan": np.where(w > 2, np.nan, w),
        "inf": np.array([1.0, -np.inf]),
        "dead": dead,
        "zero": np.zeros((3, 3)),
        "ones": np.ones(9),
        "scalar": np.array(0.0),
    }
    save(tmp_path / "c", tree)
    health = scan(open_checkpoint(tmp_path / "c"), Health())
    found = {(f.kind, f.name) for f in health.findings}
    assert found == {
        ("duplicate", "twin"),
        ("nan", "nan"),
        ("infinite", "inf"),
        ("dead", "dead"),
        ("zero", "zero"),
        ("constant", "ones"),
    } or found == {
        ("duplicate", "w"),
        ("nan", "nan"),
        ("infinite", "inf"),
        ("dead", "dead"),
        ("zero", "zero"),
        ("constant", "ones"),
    }
    assert health.faults == 2
    assert "fit the manifest" in health.verified
    assert "2 of 64 rows" in next(f.text for f in health.findings if f.kind == "dead")
    assert f"{int((w > 2).sum())} of 2,048" in next(f.text for f in health.findings if f.kind == "nan")


def test_health_goes_on_past_damage(tmp_path: Path) -> None:
    save(tmp_path / "c", {"a": np.arange(100.0), "b": np.arange(200.0)})
    shard = next(p for p in (tmp_path / "c" / "a").iterdir() if p.name != "zarr.json")
    data = bytearray(shard.read_bytes())
    data[8] ^= 4
    shard.write_bytes(bytes(data))
    health = scan(open_checkpoint(tmp_path / "c"), Health())
    assert health.complete
    assert health.scanned == 2
    assert {f.kind for f in health.findings} == {"unreadable", "verify"}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)), min_size=1, max_size=50))
def test_changes_are_numpys(pairs: list[tuple[float, float]]) -> None:
    x, y = (np.array(v) for v in zip(*pairs, strict=True))
    sides = {"w": x, "only": np.ones(1)}, {"w": y.astype(np.float32), "other": np.ones((2, 2))}
    a, b = (flat("x", "memory", {n: InMemoryTensor(n, v) for n, v in side.items()}) for side in sides)
    found = compare(a, b, names(a, b))
    assert (found.only_a, found.only_b, found.common) == (["only"], ["other"], 1)
    (c,) = found.changes
    d = y.astype(np.float32).astype(float) - x
    np.testing.assert_allclose(
        [c.norms[0], c.norms[1], c.distance],
        [np.linalg.norm(x), np.linalg.norm(y.astype("f4").astype(float)), np.linalg.norm(d)],
        rtol=1e-9,
        atol=1e-12,
    )
    assert c.changed == np.count_nonzero(d)
    assert c.largest == np.abs(d).max()


def test_comparison_names_what_cannot_be_compared_first(tmp_path: Path) -> None:
    save(
        tmp_path / "a",
        {"small": np.array([1.0, 0.0]), "big": np.array([1.0]), "shape": np.ones(3), "same": np.array([np.nan])},
    )
    save(
        tmp_path / "b",
        {"small": np.array([1.0, 0.001]), "big": np.array([9.0]), "shape": np.ones(4), "same": np.array([np.nan])},
    )
    a, b = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    found = compare(a, b, names(a, b))
    assert [c.name for c in found.ranked()] == ["shape", "big", "small", "same"]
    assert found.equal == 1
    edges, counts = found.histogram()
    assert sum(counts) == 2
    assert edges[0] <= -3


def test_a_run_shows_what_is_incomplete_and_changes_nothing(tmp_path: Path) -> None:
    manager = mt.CheckpointManager(tmp_path / "run", keep=None, best="loss")
    for step, loss in ((10, 0.5), (20, math.nan), (30, 0.1), (40, 0.2)):
        manager.save(step, {"w": np.full(3, step)}, metrics={"loss": loss, "acc": 1 - loss})
    (tmp_path / "run" / "step-00000050").mkdir()
    manifest = tmp_path / "run" / "step-00000040" / "meshtape.json"
    manifest.write_bytes(manifest.read_bytes()[:-30])
    before = sorted(os.listdir(tmp_path / "run"))
    run = history(str(tmp_path / "run"))
    assert [s.step for s in run.complete] == [10, 20, 30]
    assert run.best is not None
    assert run.best.step == 30
    assert {s.step: bool(s.note) for s in run.steps} == {10: False, 20: False, 30: False, 40: True, 50: True}
    assert history(str(tmp_path / "run"), "acc", "highest").best.step == 30
    assert sorted(os.listdir(tmp_path / "run")) == before


def marked(directory: Path) -> tuple[list[str], str, int | None]:
    """Steps that `ls` marks as best; the metric and the best step of the page's data."""
    listed = json.loads(CliRunner().invoke(main, ["ls", str(directory), "--json"]).stdout)["steps"]
    page = json.loads(CliRunner().invoke(main, ["browse", str(directory), "--json"]).stdout)[0]
    return [s["name"] for s in listed if "best" in s["marks"]], page["metric"], page["best"]


@pytest.mark.parametrize("policy", [("loss", "lowest"), ("accuracy", "highest"), None])
def test_the_best_step_is_that_of_the_manager(tmp_path: Path, policy: tuple[str, str] | None) -> None:
    options = dict(zip(("best", "best_is"), policy, strict=True)) if policy else {}
    manager = mt.CheckpointManager(tmp_path, keep=None, **options)
    for step, loss, accuracy in ((10, 5.0, 0.1), (20, 1.0, 0.5), (30, 3.0, 0.9), (40, 4.0, 0.2)):
        manager.save(step, {"w": np.ones(3)}, metrics={"epoch": step / 10, "loss": loss, "accuracy": accuracy})
    best = manager.best()
    name = os.path.basename(best) if best else None
    wanted = {"loss": 20, "accuracy": 30}[policy[0]] if policy else None
    assert marked(tmp_path) == ([name] if name else [], policy[0] if policy else "loss", wanted)
    assert name == (f"step-{wanted:08d}" if wanted else None)
    shown = CliRunner().invoke(main, ["ls", str(tmp_path)]).stdout.splitlines()
    assert (policy[0] if policy else "loss") in shown[1].split()
    assert ("<td>best</td>" in manager._repr_html_()) == (policy is not None)


def test_the_policy_is_that_of_the_latest_step_and_never_a_guess(tmp_path: Path) -> None:
    values = {"metrics": {"loss": 1.0, "accuracy": 0.5}}
    mt.CheckpointManager(tmp_path, keep=None, best="loss").save(10, {"w": np.ones(3)}, **values)
    assert marked(tmp_path) == (["step-00000010"], "loss", 10)
    later = mt.CheckpointManager(tmp_path, keep=None, best="accuracy", best_is="highest")
    later.save(20, {"w": np.ones(3)}, **values)
    assert marked(tmp_path) == (["step-00000020"], "accuracy", 20)
    mt.CheckpointManager(tmp_path, keep=None, best="seldom").save(30, {"w": np.ones(3)}, **values)
    assert marked(tmp_path) == ([], "loss", None)
    assert history(str(tmp_path), "gone", "highest").best is None
    for odd in ({"metric": "loss", "is": "nearest"}, {"metric": ["loss"], "is": "lowest"}, {"is": "lowest"}, "loss", 3):
        mt.save(tmp_path / "step-00000040", {"w": 1}, metadata={"meshtape.best": odd, "meshtape.metrics": {"loss": 1}})
        assert marked(tmp_path) == ([], "loss", None)
        shutil.rmtree(tmp_path / "step-00000040")


# ----- jobs -----------------------------------------------------------------------------------------------------------


def test_a_job_can_be_stopped_and_its_error_is_kept() -> None:
    import threading

    jobs = Jobs()
    started = threading.Event()

    def forever(job: BrowseJob) -> None:
        n = 0
        job.result = []
        while True:
            n += 1
            job.result.append(n)
            started.set()
            job.advance(n, 10**9)

    job = jobs.start(("x",), forever)
    assert started.wait(60)
    seen = jobs.find(("x",))
    job.stop()
    assert jobs.wait(job).state == "stopped"
    assert (seen.state, jobs.find(("x",)).state) == ("running", "stopped"), "a page shows one moment"
    assert job.result

    def broken(job: BrowseJob) -> None:
        raise RuntimeError("odd")

    bad = jobs.wait(jobs.start(("y",), broken))
    assert bad.state == "failed"
    assert "odd" in bad.error
    assert jobs.start(("y",), lambda job: None) is not bad, "what failed can be tried again"
    assert issubclass(Stopped, Exception)
    jobs.close()
