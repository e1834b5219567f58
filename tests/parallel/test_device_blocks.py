"""Blocks on GPUs: what a mesh does with them, against an emulation of CuPy that is as strict as CuPy; ``tests/gpu`` has
the real one."""

from __future__ import annotations

import asyncio
import pickle
import re
import sys
from types import ModuleType, SimpleNamespace

import dask
import numpy as np
import pytest
import zarr
from dask.utils import Dispatch

import meshtape as mt
from meshtape import errors
from meshtape.arrays.backends.backend import cupy_backend
from meshtape.parallel.base.device_memory import memory_of
from meshtape.parallel.dask.cluster import local_cluster
from meshtape.parallel.dask.worker import _STATES, Bundle, MeshtapeWorker, close_state
from meshtape.parallel.execution.devices import DeviceChoice, Gpus, choose, visible

# ----- which device ---------------------------------------------------------------------------------------------------

ONE, TWO = Gpus(("A",), nccl=22700), Gpus(("A", "B"), nccl=22700)
NONE = Gpus(missing="there is no CUDA driver")

CHOICES = {
    "no GPU anywhere": (None, [NONE, NONE], ("cpu", "cpu"), False, None),
    "one each, on two hosts": (None, [ONE, Gpus(("C",), nccl=22700)], ("cuda:0", "cuda:0"), True, "NCCL between GPUs"),
    "plain workers of a host": (None, [TWO, TWO], ("cuda:0", "cuda:1"), True, "NCCL between GPUs"),
    "dask-cuda's workers": (None, [TWO, Gpus(("B", "A"), nccl=22700)], ("cuda:0", "cuda:0"), True, "NCCL between GPUs"),
    "some have none": (None, [ONE, NONE], ("cpu", "cpu"), False, "worker w1 has no GPU .there is no CUDA driver."),
    "too few": (None, [ONE, ONE], ("cpu", "cpu"), False, "2 workers share 1 GPU; device='cuda' lets them"),
    "too few, asked for": (
        "cuda",
        [ONE, ONE],
        ("cuda:0", "cuda:0"),
        False,
        "through host memory: 2 workers share 1 GPU",
    ),
    "three on two": ("cuda", [TWO] * 3, ("cuda:0", "cuda:1", "cuda:0"), False, "3 workers share 2 GPUs"),
    "the second of each": ("cuda:1", [TWO, Gpus(("C", "D"), nccl=22700)], ("cuda:1", "cuda:1"), True, "NCCL"),
    "not wanted": ("cpu", [TWO, TWO], ("cpu", "cpu"), False, None),
    "a device, not its name": (mt.device("cpu"), [TWO, TWO], ("cpu", "cpu"), False, None),
    "one alone": (None, [ONE], ("cuda:0",), False, "^cuda:0$"),
    "no NCCL": (
        None,
        [TWO, Gpus(("A", "B"), without_nccl="CuPy found no NCCL library")],
        ("cuda:0", "cuda:1"),
        False,
        "through host memory: worker w1 has no NCCL .CuPy found no NCCL library.",
    ),
    "two NCCLs": (None, [TWO, Gpus(("B",), nccl=21800)], ("cuda:0", "cuda:0"), False, "NCCL 21800 and 22700"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_each_process_gets_a_device_and_says_why(case):
    wanted, found, devices, nccl, text = CHOICES[case]
    got = choose(wanted, {f"w{i}": g for i, g in enumerate(found)})
    assert (got.devices, got.nccl) == (devices, nccl)
    if text is None:
        assert got.text is None
    else:
        assert re.search(text, got.text)


def test_nccl_is_left_where_it_would_break_a_promise():
    found = {"w0": TWO, "w1": TWO}
    assert choose("cuda", found, plain=False) == DeviceChoice(
        ("cuda:0", "cuda:1"), False, "the cluster uses TLS, and NCCL does not encrypt"
    )
    assert "opens ports of its own" in choose("cuda", found, ports=False).why


def test_a_device_that_is_not_there_is_an_error():
    with pytest.raises(errors.DeviceError, match=r"worker w1 has no GPU: there is no CUDA driver; use device='cpu'"):
        choose("cuda", {"w0": ONE, "w1": NONE})
    with pytest.raises(errors.DeviceError, match=r"worker w0 has no cuda:1: it sees 1 GPU"):
        choose("cuda:1", {"w0": ONE, "w1": TWO})
    with pytest.raises(errors.DeviceError, match="unknown device 'gpu'"):
        mt.Mesh({"a": 2}, device="gpu")
    with pytest.raises(errors.DeviceError, match=r"named by a string"):
        mt.Mesh({"a": 2}, device=0)


def test_what_a_process_sees(gpus):
    with gpus(2):
        found = visible()
        assert found.ids == ("00" * 16, "01" * 16)
        assert found.nccl == 22700
        with pytest.raises(errors.DeviceError, match=r"there is no cuda:2: this machine has 2 CUDA device"):
            mt.Mesh({"a": 2}, device="cuda:2")


# ----- ranks of this process ------------------------------------------------------------------------------------------


@pytest.fixture(params=["cuda:0", "cuda:1"])
def mesh(gpus, request):
    with gpus(2), mt.Mesh({"a": 2, "b": 2}, device=request.param) as mesh:
        yield mesh


def devices_of(x):
    return {(type(b).__name__, b.device.id) for b in x._buf.handle.blocks.values()}


def test_blocks_live_where_the_mesh_computes(mesh):
    host = np.arange(24.0).reshape(4, 6)
    x = mt.distribute(host, mesh, a=mt.Shard(0), b=mt.Shard(1))
    y = mt.compute(mt.nn.softmax(x @ x.mT, axis=1))
    where = mesh.runtime.memory.name
    assert devices_of(y) == {("DeviceArray", int(where[-1]))}
    assert repr(mesh) == f"Mesh(a=2, b=2) on {where}"
    assert repr(mesh.submesh(a=0)) == f"Mesh(b=2) on {where}"
    np.testing.assert_allclose(np.asarray(y), np.asarray(mt.nn.softmax(mt.asarray(host @ host.T), axis=1)))
    assert "rank program" in mt.explain(lambda x: mt.sum(x), x)
    assert f"blocks on {where}" in mt.explain(lambda x: mt.sum(x), x)


def test_the_default_device_of_this_process_is_that_of_its_meshes(gpus):
    with gpus(1), mt.use_device("cuda"):
        assert repr(mt.Mesh({"a": 2})) == "Mesh(a=2) on cuda:0"
        assert repr(mt.Mesh({"a": 2}, device="cpu")) == "Mesh(a=2)"
        with pytest.raises(errors.DeviceError, match=r"there is no cuda:1: this machine has 1 CUDA device"):
            mt.use_device("cuda:1")


def test_a_training_step_and_a_loop(mesh):
    rng = np.random.default_rng(0)
    x0, w0 = rng.normal(size=(7, 6)).astype("f4"), rng.normal(size=(6, 3)).astype("f4")
    opt = mt.optim.adamw(0.1)

    def turn(state, x):
        w, s = state
        loss, g = mt.value_and_grad(lambda w: mt.mean(mt.tanh(x @ w) ** 2))(w)
        return opt.update(w, g, s), loss

    def run(w, xs):
        (w, _), losses = mt.scan(turn, (w, opt.init(w)), xs)
        return np.asarray(w), np.asarray(losses)

    want = run(mt.asarray(w0), [mt.asarray(x0)] * 3)
    got = run(
        mt.distribute(w0, mesh, b=mt.Shard(1)),
        [mt.distribute(x0, mesh, a=mt.Shard(0)) for _ in range(3)],
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, 1e-4, 1e-5)


def test_random_numbers_are_those_of_any_mesh(mesh):
    def draw(m):
        key = mt.distribute(mt.random.key(3), m)
        return np.asarray(mt.reshard(mt.random.uniform(key, (5, 4)), a=mt.Shard(0)))

    np.testing.assert_array_equal(draw(mesh), draw(mt.Mesh({"a": 2}, device="cpu")))


def test_blocks_go_to_other_meshes_and_come_back(mesh):
    x = mt.compute(mt.distribute(np.arange(10.0), mesh, a=mt.Shard(0)) * 2)
    cpu = mt.Mesh({"c": 3}, device="cpu")
    there = mt.reshard(x, mt.Sharding(cpu, c=mt.Shard(0)))
    assert isinstance(there._buf.handle.blocks[0], np.ndarray)
    back = mt.reshard(there + 1, mt.Sharding(mesh, b=mt.Shard(0)))
    assert {n for n, _ in devices_of(back)} == {"DeviceArray"}
    np.testing.assert_array_equal(np.asarray(back), np.arange(10.0) * 2 + 1)


def test_dask_checkpoints_and_stores(mesh, tmp_path):
    host = np.arange(30.0).reshape(10, 3)
    x = mt.compute(mt.distribute(host, mesh, a=mt.Shard(0)) + 0)
    np.testing.assert_array_equal(x.to_dask().compute(), host)
    again = mt.from_dask(x.to_dask(), mesh, b=mt.Shard(0))
    assert {n for n, _ in devices_of(again)} == {"DeviceArray"}
    np.testing.assert_array_equal(np.asarray(again), host)
    mt.save(tmp_path / "c", {"x": x})
    loaded = mt.load(tmp_path / "c", like={"x": x})["x"]
    assert {n for n, _ in devices_of(loaded)} == {"DeviceArray"}
    np.testing.assert_array_equal(np.asarray(loaded), host)
    zarr.create_array(str(tmp_path / "z"), shape=host.shape, chunks=(4, 3), dtype="f8")[...] = host
    stored = mt.from_zarr(tmp_path / "z", mesh, a=mt.Shard(0))
    assert {n for n, _ in devices_of(stored.load())} == {"DeviceArray"}
    out = mt.stream(lambda x: x - mt.mean(x, axis=0), stored, memory=200, to=tmp_path / "y")
    np.testing.assert_allclose(zarr.open(out.path)[...], host - host.mean(axis=0))


def test_used_up_memory_is_an_error_of_ours(gpus, monkeypatch):
    with gpus(1) as xp, mt.Mesh({"a": 2}, device="cuda") as mesh:
        x = mt.distribute(np.ones(4), mesh, a=mt.Shard(0))

        def full(*args, **kwargs):
            raise xp.cuda.memory.OutOfMemoryError("Out of memory allocating 32 bytes")

        monkeypatch.setattr(xp, "exp", full, raising=False)
        op = mt.arrays.OPS["exp"]
        bound = op._bound.pop(xp.__name__, None)
        try:
            with pytest.raises(
                errors.OutOfMemory, match=r"rank 0 failed in exp.*32 bytes; 1\.0 MiB of 1\.0 GiB are free"
            ):
                np.asarray(mt.exp(x))
        finally:
            op._bound.pop(xp.__name__, None)
            if bound is not None:
                op._bound[xp.__name__] = bound
        monkeypatch.setattr(xp, "empty", full, raising=False)
        with pytest.raises(errors.OutOfMemory, match=r"32 bytes; 1\.0 MiB of 1\.0 GiB are free"):
            np.asarray(mt.reshard(x + 1, a=mt.Replicate()))


# ----- ranks on workers -----------------------------------------------------------------------------------------------

NCCL, STAGED = "cuda", "cuda:1"  # workers that are threads of one process share what each calls cuda:1


@pytest.fixture(params=[NCCL, STAGED])
def cluster_mesh(gpus, threads, request):
    with gpus(2) as xp, mt.Mesh({"a": 2, "b": 2}, client=threads, device=request.param) as mesh:
        yield mesh, xp.cuda.nccl


def kinds(mesh, x):
    """Where the blocks of an array are: its bundles, as their workers hold them."""
    handle = mt.compute(x)._buf.handle
    held = [
        _STATES[f.stream.address].resident.of(f.stream.session).now(f.number).slots[handle.slot]
        for f in handle.gang.futures
    ]
    return [
        {("ndarray", -1) if isinstance(b, np.ndarray) else (type(b).__name__, b.device.id) for b in blocks.values()}
        for blocks in held
    ]


def test_workers_compute_on_gpus_of_their_own(cluster_mesh):
    mesh, nccl = cluster_mesh
    through_nccl = "NCCL between GPUs" in repr(mesh)
    assert through_nccl or "messages through host memory: 2 workers share 1 GPU" in repr(mesh)
    host = np.random.default_rng(0).normal(size=(300, 40)).astype("f4")
    x = mt.distribute(host, mesh, a=mt.Shard(0), b=mt.Shard(1))
    y = mt.nn.softmax(x @ x.mT, axis=1)
    assert kinds(mesh, y) == [{("DeviceArray", 0)} if through_nccl else {("DeviceArray", 1)}, {("DeviceArray", 1)}]
    want = np.asarray(mt.nn.softmax(mt.asarray(host) @ mt.asarray(host.T), axis=1))
    np.testing.assert_allclose(np.asarray(y), want, 1e-4, 1e-6)
    assert (nccl.moved > 0) == through_nccl
    assert "blocks on cuda" in mt.explain(lambda x: mt.sum(x), x)
    sorted_rows, largest = mt.sort(x, axis=0), mt.max(x, axis=0)
    np.testing.assert_array_equal(np.asarray(sorted_rows), np.sort(host, axis=0))
    np.testing.assert_array_equal(np.asarray(largest), host.max(axis=0))


def test_the_same_bits_through_nccl_through_the_host_and_without_a_cluster(gpus, threads):
    host = np.random.default_rng(1).normal(size=(64, 33)).astype("f4")

    def found(mesh):
        with mesh:
            x = mt.distribute(host, mesh, a=mt.Shard(0))
            mean = mt.compile(lambda x: mt.sum(x * x, axis=0))(x)
            return np.asarray(mt.astype(mean, mt.bfloat16).astype(mt.float32)), np.asarray(mean)

    with gpus(2):
        axes = {"a": 4}
        first, *others = (
            found(mt.Mesh(axes, client=threads, device=NCCL)),
            found(mt.Mesh(axes, client=threads, device=STAGED)),
            found(mt.Mesh(axes, device="cuda")),
            found(mt.Mesh(axes, device="cpu")),
        )
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_sums_without_a_fixed_order_are_nccls_own(gpus):
    """In groups of processes, too, and of several ranks a process; in a fixed order as before and afterwards."""
    rng, host = np.random.default_rng(2), {}
    for dtype in (mt.float32, mt.float64, mt.bfloat16, mt.complex64, mt.int32):
        host[dtype.name] = np.asarray(rng.integers(-99, 99, (16, 6))).astype(dtype)

    def step(x):
        return [mt.sum(x, axis=0), mt.sum(x, axis=1), mt.sum(x)]

    with gpus(4) as xp, local_cluster(4, processes=False) as client:
        nccl = xp.cuda.nccl
        for axes in ({"a": 2, "b": 2}, {"a": 4, "b": 2}):
            with mt.Mesh(axes, client=client, device="cuda") as mesh:
                compiled = mt.compile(step)
                for name, value in host.items():
                    x = mt.distribute(value, mesh, a=mt.Shard(0), b=mt.Shard(1))
                    fixed = [np.asarray(y) for y in compiled(x)]
                    assert nccl.sums == []
                    with mt.use_deterministic(False):
                        free = [np.asarray(y) for y in compiled(x)]
                    for a, b in zip(free, fixed, strict=True):
                        np.testing.assert_array_equal(a, b)  # of small whole numbers
                    groups = {n for n, _ in nccl.sums}
                    if name in ("complex64", "int32"):
                        assert not groups
                    else:
                        assert groups == ({2, 4} if axes["a"] == 2 else {4})
                    nccl.sums.clear()
                    for a, b in zip(compiled(x), fixed, strict=True):
                        np.testing.assert_array_equal(a, b)
                    assert nccl.sums == []


def test_collectives_beside_the_computation(cluster_mesh):
    """The thread that carries them computes on the rank's device too."""
    mesh, _ = cluster_mesh
    rng = np.random.default_rng(0)
    x0, w0 = rng.normal(size=(8, 40)), [rng.normal(size=(40, 40)) for _ in range(4)]

    def loss(ws, x):
        for w in ws:
            x = mt.tanh(x @ w)
        return mt.mean(x * x)

    with dask.config.set({"meshtape.overlap": 1, "meshtape.bucket": 1}):
        slopes = mt.compile(mt.grad(loss))
        x = mt.distribute(x0, mesh, a=mt.Shard(0))
        got = slopes([mt.distribute(w, mesh) for w in w0], x)
        assert "start" in mt.explain(mt.grad(loss), [mt.distribute(w, mesh) for w in w0], x)
        values = [np.asarray(g) for g in got]
    for g, want in zip(values, mt.grad(loss)([mt.asarray(w) for w in w0], mt.asarray(x0)), strict=True):
        np.testing.assert_allclose(g, np.asarray(want), 1e-9, 1e-12)


def test_what_leaves_a_gpu_is_host_memory_and_what_comes_goes_to_it(cluster_mesh, threads, tmp_path):
    mesh, _ = cluster_mesh
    host = np.arange(400_000.0).reshape(1000, 400)  # too large to travel with a task
    x = mt.distribute(host, mesh, a=mt.Shard(0))
    y = x + 1
    assert {k for ks in kinds(mesh, y) for k, _ in ks} == {"DeviceArray"}
    np.testing.assert_array_equal(threads.compute(y.to_dask()[:2, :2]).result(), host[:2, :2] + 1)
    again = mt.from_dask(y.to_dask(), mesh, b=mt.Shard(1))
    assert {k for ks in kinds(mesh, again) for k, _ in ks} == {"DeviceArray"}
    mt.save(tmp_path / "c", {"y": again})
    loaded = mt.load(tmp_path / "c", like={"y": x})["y"]
    assert {k for ks in kinds(mesh, loaded) for k, _ in ks} == {"DeviceArray"}
    np.testing.assert_array_equal(np.asarray(loaded), host + 1)
    with mt.Mesh({"c": 2}, client=threads, device="cpu") as cpu:
        there = mt.reshard(loaded, mt.Sharding(cpu, c=mt.Shard(0)))
        assert kinds(cpu, there) == [{("ndarray", -1)}] * 2
        back = mt.reshard(there * 2, mt.Sharding(mesh, a=mt.Shard(0)))
        assert {k for ks in kinds(mesh, back) for k, _ in ks} == {"DeviceArray"}
        np.testing.assert_array_equal(np.asarray(back), (host + 1) * 2)


def test_a_rank_that_fails_ends_the_others_and_the_mesh_goes_on(cluster_mesh):
    mesh, _ = cluster_mesh
    x = mt.distribute(np.arange(8.0), mesh, a=mt.Shard(0), b=mt.Replicate())
    bad = mt.distribute(np.array([0, 1, 99, 3]), mesh)
    with pytest.raises(errors.MeshtapeError, match="99 is out of bounds"):
        np.asarray(mt.take(x, bad) + mt.sum(x))
    np.testing.assert_array_equal(np.asarray(mt.sum(x)), 28.0)


def test_kept_blocks_beyond_their_share_of_the_device_wait_in_host_memory(gpus, threads):
    """Of a device with a share of 20,000 bytes; each array takes 8,000 of it a worker."""
    with gpus(2), mt.Mesh({"a": 2}, client=threads, device="cuda:1") as mesh:
        with dask.config.set({"meshtape.device-memory": 20_000 / (1 << 30)}):
            xs = [mt.compute(mt.distribute(np.full((2, 1000), i), mesh, a=mt.Shard(0)) * 2.0) for i in range(5)]
            held = [kinds(mesh, x) for x in xs]
            assert held[0] == [{("ndarray", -1)}] * 2
            assert held[4] == [{("DeviceArray", 1)}] * 2
            total = mt.compute(xs[0] + xs[4])  # which takes it back, and sends another one
            assert kinds(mesh, xs[0]) == [{("DeviceArray", 1)}] * 2
            assert kinds(mesh, xs[3]) == [{("ndarray", -1)}] * 2
        for i, x in enumerate(xs):
            np.testing.assert_array_equal(np.asarray(x), np.full((2, 1000), i * 2.0))
        np.testing.assert_array_equal(np.asarray(total), np.full((2, 1000), 8.0))


def test_blocks_that_dask_puts_aside_come_back_to_their_device(gpus, monkeypatch):
    with gpus(2):
        memory = memory_of("cuda:1")
        with memory.using():
            bundle = Bundle({0: {3: memory.put(np.arange(4))}})
        assert bundle.__sizeof__() == 64 + 4 * 8  # what Dask puts aside to have that much less
        cuda = ModuleType("dask_cuda.is_device_object")
        cuda.is_device_object = Dispatch()
        monkeypatch.setitem(sys.modules, "dask_cuda", ModuleType("dask_cuda"))
        monkeypatch.setitem(sys.modules, cuda.__name__, cuda)

        async def set_up() -> None:  # as Dask does, on its event loop
            MeshtapeWorker().setup(SimpleNamespace(address="tcp://nowhere", metrics={}, handlers={}))

        asyncio.run(set_up())
        close_state("tcp://nowhere")
        assert cuda.is_device_object(bundle)
        assert not cuda.is_device_object(Bundle({0: {3: np.arange(4)}}))
        again = pickle.loads(pickle.dumps(bundle))
        assert again.slots[0][3].device.id == 1
        np.testing.assert_array_equal(again.slots[0][3].get(), np.arange(4))
    plain = Bundle({0: {0: np.arange(4)}})
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(plain)).slots[0][0], np.arange(4))


def test_the_emulation_is_as_strict_as_cupy(gpus):
    """What the tests above rest on: NumPy's arrays are not taken, and no array is taken for one of NumPy's or of the
    other device."""
    with gpus(2):
        memory = memory_of("cuda:1")
        xp = cupy_backend().xp
        with memory.using():
            x = memory.put(np.ones(3))
            for wrong in (
                lambda: np.asarray(x),
                lambda: np.ascontiguousarray(x),
                lambda: x + np.ones(3),
                lambda: xp.add(x, np.ones(3)),
                lambda: x.__setitem__(0, np.ones(1)),
            ):
                with pytest.raises(TypeError):
                    wrong()
            assert type(np.add(x, x)) is type(x)
        with pytest.raises(ValueError, match="device must be same"):
            x + x


# ----- what else must stay on the device ------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_a_pickled_array_comes_back_to_its_device(gpus, protocol):
    with gpus(2):
        x = mt.asarray(np.arange(6.0).reshape(2, 3), device="cuda:1")
        pickled = pickle.dumps(x, protocol)
        y = pickle.loads(pickled)
        assert str(y.device) == "cuda:1"
        np.testing.assert_array_equal(y.numpy(), x.numpy())
        with mt.use_device("cpu"):
            z = pickle.loads(pickled)
        assert str(z.device) == "cpu"
        z[0, 0] = 7.0
        np.testing.assert_array_equal(x.numpy(), np.arange(6.0).reshape(2, 3))
        with mt.use_device("cuda:0"):
            assert str(pickle.loads(pickled).device) == "cuda:0"
            assert str(pickle.loads(pickle.dumps(z)).device) == "cpu"
    with gpus(1), pytest.raises(errors.DeviceError, match=r"pickled on cuda:1.*use_device"):
        pickle.loads(pickled)
    with pytest.raises(errors.BackendError, match=r"pickled on cuda:1.*use_device.*to_device"):
        pickle.loads(pickled)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_large_reductions_on_a_device_have_no_scratch_on_the_host(gpus, monkeypatch, wide, count):
    from meshtape.arrays.native import copies
    from meshtape.parallel.collectives import pieces

    dtype = np.float16 if wide else np.float64
    with gpus(1) as cupy:
        if not wide:
            monkeypatch.setattr(copies, "LARGE", 1)
            monkeypatch.setattr(copies, "_kernels", object())
            assert copies.is_large(np.ones(3))
        terms = [cupy.asarray(np.full(1 << 20, i + 1.0, dtype)) for i in range(count)]
        out = cupy.zeros(1 << 20, dtype)
        fold = pieces.Fold(out, terms, np.add, wide)
        assert fold.done
        np.testing.assert_array_equal(out.get(), np.full(1 << 20, sum(range(1, count + 1)), dtype))
        out = cupy.zeros(1 << 20, dtype)
        fold = pieces.Fold(out, [None, *terms], np.add, wide)
        for k, part in enumerate(pieces.chunks(out.shape, out.itemsize)):
            assert fold.accept(k, 0, cupy.ones(out.shape, dtype)[part])
        assert fold.done
        np.testing.assert_array_equal(out.get(), np.full(1 << 20, 1 + sum(range(1, count + 1)), dtype))


@pytest.mark.parametrize("dtype", "bBhHiIlL")
def test_unchecked_indices_of_every_dtype(gpus, dtype):
    with gpus(1):
        x = mt.asarray(np.arange(100000.0), device="cuda:0")
        at = mt.asarray(np.array([1, 2, 100], dtype), device="cuda:0")
        for checked in (True, False):
            with mt.index_checks(checked):
                assert x[at].numpy().tolist() == [1.0, 2.0, 100.0]
                assert x.at[at].set(0.0).numpy()[[0, 1, 2, 3]].tolist() == [0.0, 0.0, 0.0, 3.0]
