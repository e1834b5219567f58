"""A mesh for storage's tests: two contracts of ``arrays.blocks``, implemented in one process that plays several."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

# What the servers of several tests share.
sys.path.insert(0, str(Path(__file__).parent))

from serving import S3

from meshtape.arrays.core.blocks import Box, ceil_blocks
from meshtape.storage.stores.filesystem import Files, using

DTYPES = [
    *(np.dtype(t) for t in ("bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")),
    *(np.dtype(t) for t in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)),
]
SHAPES = [(), (0,), (0, 3), (1,), (5,), (6, 4), (3, 5, 2)]


@dataclass
class Host:
    """Ranks of a grid, dealt round robin to ``processes``; what goes to a process is pickled, as Dask would."""

    axes: dict[str, int]
    processes: int = 2
    calls: list = field(default_factory=list, compare=False)

    @property
    def size(self):
        return int(np.prod(list(self.axes.values())))

    def describe(self):
        return dict(self.axes)

    def settle(self, arrays):
        return [a.reduced() for a in arrays]

    def _by_process(self, payloads):
        for p in range(self.processes):
            mine = {r: v for r, v in payloads.items() if r % self.processes == p}
            if mine:
                self.calls.append(mine)
                yield pickle.loads(pickle.dumps(mine))

    def run_on_blocks(self, fn, arrays, payloads):
        fn = pickle.loads(pickle.dumps(fn))
        out, errors = [], []
        for mine in self._by_process(payloads):
            try:
                out.append(pickle.loads(pickle.dumps(fn(mine, {r: [a.blocks[r] for a in arrays] for r in mine}))))
            except Exception as e:
                errors.append(pickle.loads(pickle.dumps(e)))
        if errors:
            raise errors[0]
        return out

    def create(self, fn, payloads, specs):
        blocks = {}
        for mine in self._by_process(payloads):
            blocks |= fn(mine)
        made = []
        for i, (shape, dtype, sharding) in enumerate(specs):
            held = {r: blocks[r][i] for r in range(self.size)}
            for r, b in held.items():
                assert b.shape == sharding.box(shape, r).shape
                assert b.dtype == dtype
            made.append(Split(tuple(shape), np.dtype(dtype), sharding, held))
        return made


@dataclass(frozen=True)
class Sharding:
    """``dims[i]``: the dimension that mesh axis i splits, or None. Axes that share one count as one long axis."""

    mesh: Host
    dims: tuple
    partial: bool = False

    def box(self, shape, rank):
        index = np.unravel_index(rank, tuple(self.mesh.axes.values()))
        offset, lengths = [0] * len(shape), list(shape)
        for dim in {d for d in self.dims if d is not None}:
            axes = [i for i, d in enumerate(self.dims) if d == dim]
            sizes = [list(self.mesh.axes.values())[i] for i in axes]
            k = int(np.ravel_multi_index([index[i] for i in axes], sizes))
            offset[dim], lengths[dim] = ceil_blocks(shape[dim], int(np.prod(sizes)))[k]
        return Box(tuple(offset), tuple(lengths))

    def describe(self):
        return ["Replicate()" if d is None else f"Shard({d})" for d in self.dims]


@dataclass
class Split:
    """An array in blocks."""

    shape: tuple
    dtype: np.dtype
    sharding: Sharding
    blocks: dict

    def reduced(self):
        if not self.sharding.partial:
            return self
        total = sum(self.blocks[r] for r in self.blocks)
        return split(total, Sharding(self.sharding.mesh, self.sharding.dims))

    def whole(self):
        out = np.empty(self.shape, self.dtype)
        for rank, block in self.blocks.items():
            out[self.sharding.box(self.shape, rank).slices] = block
        return out


def split(a, sharding):
    return Split(
        a.shape,
        a.dtype,
        sharding,
        {r: a[(*sharding.box(a.shape, r).slices, ...)].copy() for r in range(sharding.mesh.size)},
    )


def random(dtype, shape, seed=0):
    """Any bits at all, NaN and negative zero among them (booleans stay 0 and 1)."""
    rng = np.random.default_rng(seed)
    n = int(np.prod(shape)) * dtype.itemsize
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    return np.frombuffer(rng.bytes(n), dtype).reshape(shape).copy()


def same(a, b):
    """Equal to the bit."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


class Counting(Files):
    """Does something at the N-th operation, before it is carried out; `exchange` can be taken away."""

    def __init__(self, n, act, exchange=True):
        self.n, self.act, self.can_exchange, self.done = n, act, exchange, 0

    def _step(self):
        self.done += 1
        if self.done == self.n:
            self.act()


for _name in (
    "mkdir",
    "create",
    "write",
    "fsync",
    "close",
    "rename",
    "exchange",
    "fsync_dir",
    "link",
    "unlink",
    "rmdir",
):

    def _wrapped(self, *args, _name=_name):
        self._step()
        if _name == "exchange" and not self.can_exchange:
            return False
        if _name == "write" and self.done == self.n - 1 and len(args[1]) > 1:
            # The next step dies: let this write have been torn.
            return getattr(Files, _name)(self, args[0], args[1][:1], args[2])
        return getattr(Files, _name)(self, *args)

    setattr(Counting, _name, _wrapped)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(n, work, exchange=True):
    """Run ``work`` in a child that is killed at operation ``n``; False when it ended before."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with using(Counting(n, kill, exchange)):
                work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


class Kit:
    """What tests take from here; test modules are imported one by one, so they cannot import this file."""

    Host, Sharding, Split, DTYPES, SHAPES = Host, Sharding, Split, DTYPES, SHAPES
    Counting, die_at = Counting, staticmethod(die_at)
    split, random, same = staticmethod(split), staticmethod(random), staticmethod(same)

    @staticmethod
    def shardings(ndim, parts):
        """Every way to split ``ndim`` dimensions over a mesh of ``parts``."""
        host = Host({f"axis{i}": n for i, n in enumerate(parts)})
        options = [None, *range(ndim)]
        return [Sharding(host, dims) for dims in itertools.product(options, repeat=len(parts))]


@pytest.fixture(scope="session")
def kit():
    return Kit


@pytest.fixture(scope="session")
def op_programs():
    """``op_programs(name)``: for each sample call of an op, a program of that call alone, its document, the operands
    and the parameters."""
    from op_samples import calls

    from meshtape.arrays.core.op import OPS, ShapeDtype
    from meshtape.arrays.core.program import Const, Entry, Program
    from meshtape.storage.programs.encode import to_json

    def programs(name):
        for args, params in calls(name):
            given = [ShapeDtype(a.shape, a.dtype) if isinstance(a, np.ndarray) else a for a in args]
            types = [a for a in given if isinstance(a, ShapeDtype)]
            places = iter(range(len(types)))
            inputs = tuple(next(places) if isinstance(a, ShapeDtype) else Const(a) for a in given)
            results = OPS[name].avals(tuple(given), params)
            outputs = tuple(range(len(types), len(types) + len(results)))
            entries = (Entry(OPS[name], inputs, outputs, params),)
            program = Program(tuple(range(len(types))), entries, outputs, dict(enumerate([*types, *results])))
            document, _ = to_json(program)
            document["arguments"] = [{"kind": "array", "variable": v} for v in program.inputs]
            document["result"] = {"kind": "list", "children": [{"kind": "array", "variable": v} for v in outputs]}
            yield program, {**document, "values": {}}, args, params

    return programs


@pytest.fixture
def quick(tmp_path):
    """A directory in memory where there is one: thousands of syncs cost nothing there."""
    home = Path(tempfile.mkdtemp(dir="/dev/shm")) if os.access("/dev/shm", os.W_OK) else tmp_path
    yield home
    shutil.rmtree(home, ignore_errors=True)


# ----- an S3 server -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def s3_server():
    pytest.importorskip("obstore")
    pytest.importorskip("moto")
    server = S3()
    yield server
    server.close()


@pytest.fixture
def s3(s3_server, monkeypatch, request):
    """The server, its environment set, and ``s3.url``: an empty place of its own for each test."""
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    s3_server.proxy.reset()
    s3_server.empty()
    s3_server.url = f"s3://bucket/{abs(hash(request.node.nodeid)):x}"
    yield s3_server
    s3_server.proxy.reset()
