"""What the contract runs over the fake CUDA, each sweep in a process of its own: ``python sweeps.py NAME ARGUMENTS``,
whose answer is JSON."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import doctest
import functools
import gc
import importlib
import importlib.util
import itertools
import json
import os
import pickle
import pkgutil
import re
import sys
import tempfile
import threading
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def beside(path: str) -> Any:
    """A module of the tests, whose folders are not on the path (one is called ``meshtape``)."""
    file = HERE / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake_cuda = beside("fake_cuda.py")
if sys.argv[1:2] in (["values"], ["products"], ["convolutions"], ["attention"], ["donated"], ["decoder"]):
    os.environ[fake_cuda.VALUES] = sys.argv[2]
FAKE = fake_cuda.FakeCuda()

import numpy as np  # noqa: E402

import meshtape as mt  # noqa: E402
from meshtape.arrays.core.dispatch import apply  # noqa: E402
from meshtape.arrays.core.op import Op  # noqa: E402

op_samples, every = beside("../../op_samples.py"), beside("../test_every_op.py")
DTYPES = [*every.FLOATS, *every.OTHERS]
LARGE = [np.dtype(np.float32), every.BFLOAT16]
"""The dtypes of :func:`large`."""
NAMES = {d: "bf2" if d == every.BFLOAT16 else f"{d.kind}{d.itemsize}" for d in (*DTYPES, np.dtype(np.complex128))}

LEFT_OUT = {
    **dict.fromkeys(("add_layer_norm", "add_rms_norm", "batch_norm", "batch_norm_inference", "cross_entropy"), "c"),
    **dict.fromkeys(("attention", "attention_bias", "group_norm", "layer_norm", "linear_cross_entropy"), "c"),
    **dict.fromkeys(("rms_norm", "rotary_embedding"), "c"),
    "experts": "biuc",
}
"""Kinds of dtypes that the function of an op refuses, on a CPU too (``_of_complex``), so that no call has them."""


def _said(x: Any) -> str:
    return f"{type(x).__name__}: {str(x)[:200]}" if isinstance(x, Exception) else "a result"


def arrays_of(tree: Any) -> list[mt.Array]:
    return [o for o in mt.tree.flatten(tree)[0] if isinstance(o, mt.Array)]


def outcome(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The arrays that a call gives, or its error."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return arrays_of(call(*args))
        except Exception as e:
            return e


def placed(args: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    return tuple(mt.asarray(a, device=device) if isinstance(a, np.ndarray) else a for a in args)


class Row:
    """Of one op: how many calls were compared, where they differ from the CPU's, how many cost what, and those that
    wait more or less often than they tell."""

    def __init__(self) -> None:
        self.calls = 0
        self.differences: list[str] = []
        self.untold: list[str] = []
        self.other_rule: list[str] = []  # calls whose results a CPU gives another dtype than the op's rule
        self.by_value = 0  # calls whose shapes depend on values
        self.costs: dict[str, Counter[str]] = defaultdict(Counter)  # by direction and dtype

    def on_gpu(self, call: Callable[..., Any], args: tuple[Any, ...], what: str, kind: str) -> Any:
        with FAKE.calls() as made, mt.host_waits() as told, mt.use_device("cuda:0"):
            out = outcome(call, args)
        if not isinstance(out, Exception):
            n = fake_cuda.counts(made)
            if n["wait"] != len(told):
                self.untold.append(f"({what}): {n['wait']} waits, {len(told)} told")
            self.costs[kind][fake_cuda.cost(n)] += 1
        return out

    def compare(self, got: Any, want: Any, what: str) -> bool:
        """Whether both are results, noting where they differ."""
        if got is None:
            return False
        self.calls += 1
        if isinstance(want, Exception) or isinstance(got, Exception):
            if isinstance(got, Exception) and not isinstance(want, Exception):
                self.differences.append(f"({what}): {_said(got)}, on the CPU a result")
            return False
        for k, (g, w) in enumerate(zip(got, want, strict=True)):
            if (str(g.device), g.dtype, g.shape) != ("cuda:0", w.dtype, w.shape):
                here = f"{g.dtype}{list(g.shape)} on {g.device}"
                self.differences.append(f"({what}): result {k} is {here}, on the CPU {w.dtype}{list(w.shape)}")
        return True


def described(args: tuple[Any, ...]) -> str:
    return ", ".join(f"{a.dtype}{list(a.shape)}" if isinstance(a, np.ndarray) else repr(a) for a in args)


def is_float(a: Any) -> bool:
    return isinstance(a, np.ndarray) and a.dtype.kind not in "iub"


def kind_of(dtype: np.dtype | None, args: tuple[Any, ...]) -> str:
    """The dtype of a call's numbers as the budgets name it."""
    found = {a.dtype for a in args if is_float(a) and a.dtype.kind == "c"} or {dtype}
    return "/".join(sorted(NAMES.get(d, "own") for d in found))


def is_made(name: str, dtype: np.dtype | None, args: tuple[Any, ...]) -> bool:
    """Whether a function makes such calls of an op."""
    refused = LEFT_OUT.get(name.removesuffix("_backward"), "")
    is_complex = any(is_float(a) and a.dtype.kind == "c" for a in args)
    return (dtype is None or dtype.kind not in refused) and not (is_complex and refused)


def ops(sources: str = "") -> dict[str, Any]:
    """Calls of every op in every dtype. Left out are those that no function makes: of dtypes that the CPU gives another
    result for than the op's own rule says, or none. The CUDA sources that CuPy would compile go to a file."""
    out = {}
    for name in sorted(op_samples.SAMPLES):
        row, seen, op = Row(), set(), mt.OPS[name]
        for args, params in op_samples.calls(name):
            floats = any(map(is_float, args))
            for dtype in [*DTYPES, None] if floats else [None]:
                cast = args if dtype is None else tuple(op_samples.recast(a, dtype) for a in args)
                key = described(cast) + repr(params)
                if key in seen or not is_made(name, dtype, cast) or (dtype is None and floats and DTYPES == LARGE):
                    continue
                seen.add(key)

                def call(*xs: Any, op: Any = op, params: Any = params) -> Any:
                    return apply(op, xs, params)

                want = outcome(call, placed(cast, "cpu"))
                if isinstance(want, Exception):
                    continue
                if "Truth(" in key:
                    row.by_value += 1
                    continue
                if not every.by_its_rule(op, params, cast, want):
                    row.other_rule.append(described(cast))
                    continue
                got = row.on_gpu(call, placed(cast, "cuda:0"), described(cast), kind_of(dtype, cast))
                row.compare(got, want, described(cast))
        out[name] = vars(row)
    if sources:
        Path(sources).write_text(json.dumps(sorted(FAKE.sources)))
    return out


def derivatives(_: str = "") -> dict[str, Any]:
    """Values and cotangents of every op's samples."""
    out = {}
    for name in op_samples.differentiable():
        row, rng = Row(), op_samples.rng_of(name)
        for sample in op_samples.slopes(name):
            hosts = sample.make(rng, exact=False)
            with op_samples.recording(recorder := op_samples.Calls()):
                outcome(sample.fn, placed(tuple(hosts), "cpu"))
            if any("Truth(" in repr(params) for *_, params in recorder.seen):
                row.by_value += 1
                continue
            seen: set[str] = set()  # in each dtype complex operands are alike
            for dtype in [*every.FLOATS, np.dtype(np.complex64)]:
                args = tuple(op_samples.recast(a, dtype) for a in hosts)
                what, pulls = described(args), []
                if what in seen or not is_made(name, dtype, args):
                    continue
                seen.add(what)

                def forward(*xs: Any, fn: Any = sample.fn, pulls: Any = pulls) -> Any:
                    values, pull = mt.vjp(lambda *xs: arrays_of(fn(*xs)), *xs)
                    pulls.append(pull)
                    return values

                want = outcome(forward, placed(args, "cpu"))
                got = row.on_gpu(forward, placed(args, "cuda:0"), what, f"forward {kind_of(dtype, args)}")
                if not row.compare(got, want, what):
                    continue
                host, gpu = pulls
                seeds = [np.ones(w.shape, w.dtype) for w in want]
                back = outcome(host, (list(placed(tuple(seeds), "cpu")),))
                given = list(placed(tuple(seeds), "cuda:0"))
                what = f"back through {what}"
                found = row.on_gpu(lambda g=given, p=gpu: p(g), (), what, f"back {kind_of(dtype, args)}")
                row.compare(found, back, what)
        out[name] = vars(row)
    return out


def large(_: str = "") -> dict[str, Any]:
    """Both in two dtypes, by the kernels for calls of many elements, of operands with gaps between their rows."""
    global placed

    def placed(args: tuple[Any, ...], device: str) -> tuple[Any, ...]:
        def held(a: np.ndarray) -> mt.Array:
            wide = np.zeros((*a.shape[:-1], a.shape[-1] + 3), a.dtype)
            wide[..., 1:-2] = a
            return mt.asarray(wide, device=device)[..., 1:-2]

        return tuple(
            (held(a) if a.ndim else mt.asarray(a, device=device)) if isinstance(a, np.ndarray) else a for a in args
        )

    Op.large = 1
    every.FLOATS[:] = DTYPES[:] = LARGE
    return {f"{kind.__name__}, {name}": row for kind in (ops, derivatives) for name, row in kind().items()}


# ----- code that is written for other ends ----------------------------------------------------------------------------


class _AnyOutput(doctest.OutputChecker):
    def check_output(self, want: str, got: str, flags: int) -> bool:
        return True


class _Errors(doctest.DocTestRunner):
    """Notes the examples that raise what the text does not say."""

    def __init__(self) -> None:
        super().__init__(checker=_AnyOutput(), verbose=False)
        self.raised: list[str] = []

    def report_unexpected_exception(self, out: Any, test: Any, example: Any, info: Any) -> None:
        self.raised.append(f"{test.name}: {example.source.strip()[:90]}: {_said(info[1])}")


PACKAGES = ("meshtape", *(f"meshtape.{n}" for n in ("arrays", "autodiff", "parallel", "storage")))


def doctests(_: str = "") -> dict[str, Any]:
    """The examples of all docstrings, on the device. Values are not compared, and some examples need those."""
    finder, runner = doctest.DocTestFinder(exclude_empty=True), _Errors()
    packages = [importlib.import_module(name) for name in PACKAGES]
    found = [
        m.name for p in packages for m in pkgutil.walk_packages(p.__path__, f"{p.__name__}.") if "._" not in m.name
    ]
    seen: set[int] = set()
    for name in dict.fromkeys([*PACKAGES, *found]):
        module = importlib.import_module(name)
        for test in finder.find(module, name, extraglobs={"mt": mt}):
            if test.examples and id(test.docstring) not in seen:
                seen.add(id(test.docstring))
                with mt.use_device("cuda:0"), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    runner.run(test, out=lambda text: None)
    return {"examples": runner.tries, "raised": runner.raised}


def suite(_: str = "") -> dict[str, Any]:
    """``tests/gpu`` itself: comparisons of values look at shapes and dtypes alone, and an assertion about values may
    fail. (What NumPy computes to compare with may be float64 for any float.)"""
    import pytest

    def alike(actual: Any, desired: Any, *args: Any, **kwargs: Any) -> None:
        typed = all(isinstance(x, (mt.Array, np.ndarray)) for x in (actual, desired))
        actual, desired = np.asarray(actual), np.asarray(desired)
        same = actual.dtype == desired.dtype or (desired.dtype == np.float64 and actual.dtype in every.FLOATS)
        if actual.shape != desired.shape or (typed and not same):
            raise TypeError(f"{actual.dtype}{list(actual.shape)}, wanted {desired.dtype}{list(desired.shape)}")

    np.testing.assert_allclose = np.testing.assert_array_equal = alike
    out: dict[str, Any] = {"run": 0, "values": [], "raised": []}

    class Plugin:
        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
            report = yield
            if call.when == "call":
                out["run"] += 1
            if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
                kind = "values" if call.excinfo.errisinstance((AssertionError, pytest.fail.Exception)) else "raised"
                out[kind].append(f"{item.name}: {_said(call.excinfo.value)}")
            return report

    names = ("arrays", "transfers", "programs", "meshes", "kernels", "refusals")
    files = [str(HERE.parent / f"test_{n}.py") for n in names]
    # Workers are processes of their own, without the fake; and three tests need what is not there: memory, other
    # kernels' values.
    left = "not workers and not two_to_the_31 and not an_int_counts and not pytorch"
    pytest.main(["-q", "-p", "no:cacheprovider", "-k", left, *files], plugins=[Plugin()])
    return out


def asked(to: str) -> int:
    """The sources that all of this asks for, into a file: most of those that the same calls ask for when they compute
    values."""
    sys.argv = sys.argv[:1]
    for sweep in (ops, derivatives, steps, suite):
        sweep()
    Path(to).write_text(json.dumps(sorted(FAKE.asked)))
    return len(FAKE.asked)


SAMPLED = ("add", "exp", "sum", "matmul", "argmax", "inv", "solve", "pinv", "fft", "sort", "where")


def values(_: str) -> dict[str, Any]:
    """Of some ops, the first sample in float32: where its values differ from the CPU's; and the words for a singular
    matrix."""
    out: dict[str, Any] = {}
    for name in SAMPLED:
        args, params = op_samples.calls(name)[0]
        cast = tuple(op_samples.recast(a, np.dtype(np.float32)) for a in args)
        found = every.differences(name, lambda *xs, n=name, p=params: apply(mt.OPS[n], xs, p), cast)
        out[name] = list(found)
    with mt.use_device("cuda:0"):
        out["singular"] = text_of(lambda: mt.linalg.inv(mt.ones((3, 3))))
    out["float8"] = _float8()
    return out | {"failures": FAKE.libraries.failures}


def _asked_by(call: Callable[[], Any]) -> set[tuple[str, tuple[str, ...]]]:
    """The sources that a call asks for, told by a copy of this process in which kernels do nothing: compiled together
    they take a fifth of the time."""
    reads, writes = os.pipe()
    if (copy := os.fork()) == 0:
        try:
            FAKE.kernels = None
            with contextlib.suppress(Exception):  # of values that are not there
                call()
            with os.fdopen(writes, "wb") as told:
                pickle.dump(FAKE.asked, told)
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as told:
        found = pickle.load(told)
    os.waitpid(copy, 0)
    return found


def _float8() -> list[str]:
    """Calls of float8 arrays whose bits are not those of the CPU."""
    host = np.asarray([[1.0, -2.5, 0.3], [448.0, 1000.0, -0.01]], np.float32)
    calls: dict[str, Callable[[Any, Any], Any]] = {
        "cast": lambda x, f8: x.astype(f8),
        "back": lambda x, f8: x.astype(f8).astype(mt.float32),
        "sum of two": lambda x, f8: x.astype(f8) + x.astype(f8)[::-1] * 2.0,
        "view": lambda x, f8: mt.reshape(x.astype(f8).T[1:], (4,)),
        "place": lambda x, f8: x.astype(f8).at[0, 1].set(3.0),
        "reduction": lambda x, f8: mt.sum(x.astype(f8)[0]),
        "rounded": lambda x, f8: mt.round(x.astype(f8)),
        "nonzero": lambda x, f8: mt.nonzero(x.astype(f8)),
        "products": lambda x, f8: mt.grad(lambda w: mt.sum((w.astype(f8) @ w.astype(f8).T).astype(mt.float32)))(
            x[:, :1]
        ),
        "zeros": lambda x, f8: mt.zeros_like(x, dtype=f8),
        "gradient": lambda x, f8: mt.grad(lambda a: mt.sum((a * a).astype(mt.float32)))(x.astype(f8)),
        "compiled": lambda x, f8: mt.compile(lambda a: a.astype(f8) + 1.0)(x),
        "pickled": lambda x, f8: pickle.loads(pickle.dumps(x.astype(f8))),
    }
    out = []
    for f8 in (mt.float8_e4m3fn, mt.float8_e5m2):
        for name, call in calls.items():
            got, want = (outcome(call, (mt.asarray(host, device=d), f8)) for d in ("cuda:0", "cpu"))
            same = not isinstance(got, Exception) and (str(got[0].device), got[0].dtype) == ("cuda:0", want[0].dtype)
            if not same or got[0].numpy().tobytes() != want[0].numpy().tobytes():
                out.append(f"{name} of {f8.name}: {_said(got) if isinstance(got, Exception) else got}")
    return out


def _layouts(x: np.ndarray) -> dict[str, Any]:
    """A matrix, or a stack of them, in memory that a product takes as it is."""
    asarray, wide = FAKE.cupy.asarray, np.zeros((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1] + 5), x.dtype)
    wide[..., 1:, 1 : 1 + x.shape[-1]] = x
    return {
        "rows": asarray(x),
        "columns": asarray(np.ascontiguousarray(x.swapaxes(-1, -2))).swapaxes(-1, -2),
        "apart": asarray(wide)[..., 1:, 1 : 1 + x.shape[-1]],  # at an odd address
    }


STACKS = [((4, 3), (3, 5)), ((2, 4, 3), (3, 5)), ((2, 4, 3), (2, 3, 5)), ((4, 3), (2, 3, 5)), ((3,), (3, 5))]
STACKS += [
    ((2, 4, 3), (3,)),
    ((3,), (3,)),
    ((2, 3, 1, 3), (2, 3, 3, 1)),
    ((2, 2, 4, 3), (2, 1, 3, 5)),
    ((1, 3), (3, 5)),
]


def products(_: str) -> dict[str, Any]:
    """Products by cuBLASLt: where values differ from NumPy's, and the launches, uploads, waits and copies of a call."""
    from meshtape.arrays.backends import cublaslt as lt

    rng, out, calls = np.random.default_rng(0), {"differences": [], "calls": 0}, 0
    numbers = FAKE.products

    def cost(fn: Callable[[], Any]) -> list[int]:
        with FAKE.calls() as made:
            fn()
        n = fake_cuda.counts(made)
        return [n[k] for k in ("launch", "h2d", "wait", "d2d")]

    def near(got: Any, want: Any, dtype: Any) -> bool:
        short = {2: 1e-2, 4: 1e-5, 8: 1e-5 if np.dtype(dtype).kind == "c" else 1e-12, 16: 1e-12}
        got, want = (np.asarray(a).astype(np.complex128) for a in (got, want))
        return got.shape == want.shape and np.allclose(got, want, short[np.dtype(dtype).itemsize], 1e-2 * short[2])

    for dtype in (np.float16, mt.bfloat16, np.float32, np.float64, np.complex64, np.complex128):
        for shapes in STACKS:
            hosts = [rng.standard_normal(s).astype(dtype) for s in shapes]
            want = np.matmul(*(h.astype(np.complex128) for h in hosts))
            x, y = (_layouts(h) if h.ndim > 1 else {"": FAKE.cupy.asarray(h)} for h in hosts)
            ramp = np.arange(2 * hosts[1].shape[-1], dtype=np.float32).astype(dtype)
            bias = FAKE.cupy.asarray(ramp)[::2] if dtype is np.float32 else FAKE.cupy.asarray(ramp[::2].copy())
            for (a, left), (b, right) in itertools.product(x.items(), y.items()):
                found = {"": (lt.product(left, right), want)}
                if hosts[1].ndim > 1 and hosts[0].ndim > 1 and np.dtype(dtype).kind != "c":
                    found["bias"] = lt.product(left, right, bias=bias), want + ramp[::2].astype(np.float64)
                    if hosts[1].ndim == hosts[0].ndim == 2:
                        found["sums"] = lt.product(left, right, sums=True)[1], hosts[1].astype(np.float64).sum(0)
                for name, (got, wanted) in found.items():
                    calls += 1
                    if got is None or got.dtype != dtype or not near(FAKE.cupy.asnumpy(got), wanted, dtype):
                        out["differences"].append(f"{np.dtype(dtype).name} {shapes} {a} {b} {name}")
    out["calls"] = calls
    for dtype in (np.float16, mt.bfloat16, np.float32):
        # Sums in float32, unrounded, added to what is there: in memory of theirs, at an odd address, or with gaps.
        hosts = [rng.standard_normal(s).astype(dtype) for s in ((6, 16), (16, 9))]
        want = np.matmul(*(h.astype(np.float64) for h in hosts))
        memory = FAKE.cupy.ones((7, 12), np.float32)
        for sums in (
            None,
            memory.reshape(-1)[:54].reshape(6, 9),
            memory.reshape(-1)[1:55].reshape(6, 9),
            memory[:6, :9],
        ):
            memory[...] = 1
            add = sums is not None
            got = lt.product(*map(FAKE.cupy.asarray, hosts), dtype=np.dtype(np.float32), out=sums, add=add)
            if not near(FAKE.cupy.asnumpy(got), want + add, np.float32) or (add and got is not sums):
                out["differences"].append(f"{np.dtype(dtype).name} in float32, {sums is None or sums.strides}")
    with mt.use_device("cuda:0"):
        x, w = (mt.asarray(rng.standard_normal(s).astype(np.float32)) for s in ((8, 4, 6), (6, 5)))
        heads = mt.zeros((2, 4, 3, 5))  # with a query for each of three, as attention has them
        out["costs"] = {
            "served": cost(lambda: x @ w),
            "of other memory": cost(
                lambda: mt.permute_dims(heads, (0, 2, 1, 3)) @ mt.permute_dims(heads, (0, 2, 3, 1))
            ),
        }

        def asked(fn: Callable[[], Any]) -> Any:
            numbers.asked.clear()
            fn()
            return list(map(list, numbers.asked))

        out["asked"] = {"again": len(asked(lambda: x @ w)), "float32": asked(lambda: x[:7] @ w)[0]}
        with mt.use_tf32():
            out["asked"]["with TF32"] = asked(lambda: x @ w)[0]
        with mt.use_deterministic(False):
            out["asked"]["in any order"] = asked(lambda: x @ w)[0]
        x, w = (mt.asarray(rng.standard_normal(s).astype(np.float32)) for s in ((16, 32), (32, 16)))
        for dtype in (mt.float8_e4m3fn, mt.float8_e5m2):
            a, b = x.astype(dtype), w.astype(dtype)
            out["asked"][dtype.name] = asked(lambda a=a, b=b: a @ b)
            got, want = (
                (a @ b).numpy(),
                (mt.asarray(a.numpy(), device="cpu") @ mt.asarray(b.numpy(), device="cpu")).numpy(),
            )
            if got.tobytes() != want.tobytes():
                out["differences"].append(f"product of {dtype.name}")
        for dtype in (mt.float32, mt.bfloat16, mt.float16):
            given = [mt.asarray(rng.standard_normal(s).astype(dtype)) for s in ((32, 48), (48, 16))]
            out["asked"][f"scaled, {dtype.name}"] = asked(
                lambda given=given: out["differences"].extend(_in_float8(*given))
            )
            out["costs"]["in float8"] = cost(lambda given=given: mt.nn.float8_matmul(*given))
        out["differences"] += _in_float8(x[:5], w)  # a length that the library does not multiply
    return out | _in_programs(rng) | {"failures": FAKE.libraries.failures}


def _in_float8(x: Any, w: Any) -> list[str]:
    """Differences of products in float8, their gradients and a graph from the same on the CPU."""

    def both(x: Any, w: Any) -> Any:
        y, pull = mt.vjp(mt.nn.float8_matmul, x, w)
        return y, *pull(y)

    want = both(*(mt.asarray(a.numpy(), device="cpu") for a in (x, w)))
    graph = mt.compile(both, cuda_graph=True)
    graph(x, w)
    return [
        f"{way} of {x.dtype.name}{x.shape}: {i}"
        for way, found in (("float8_matmul", both(x, w)), ("its graph", graph(x, w)))
        for i, (a, b) in enumerate(zip(found, want, strict=True))
        if a.dtype != b.dtype or not np.allclose(a.numpy().astype(float), b.numpy().astype(float), 1e-2, 1e-2)
    ]


def _in_programs(rng: Any) -> dict[str, Any]:
    """Of a layer and its gradients, compiled and as one CUDA graph: launches, epilogues and values."""
    from meshtape.arrays.backends import cublaslt as lt

    def layer(w: Any, b: Any, x: Any, g: Any) -> Any:
        y, pull = mt.vjp(lambda w, b: x @ w + b, w, b)
        return y, *pull(g)

    hosts = [rng.standard_normal(s).astype(np.float32) for s in ((3, 5), (5,), (2, 4, 3), (2, 4, 5))]
    want = [a.numpy() for a in layer(*(mt.asarray(h, device="cpu") for h in hosts))]
    given = [mt.asarray(h, device="cuda:0") for h in hosts]
    compiled, graph = mt.compile(layer), mt.compile(layer, cuda_graph=True)
    lt._plan.cache_clear()
    numbers = FAKE.products
    numbers.asked.clear()

    def near(got: Any) -> bool:
        return all(np.allclose(a.numpy(), w, 1e-5, 1e-5) for a, w in zip(got, want, strict=True))

    with mt.use_device("cuda:0"):
        close = near(compiled(*given))
        epilogues = [a[3] for a in numbers.asked]
        with FAKE.calls() as made, mt.host_waits():
            compiled(*given)
        with_plain = fake_cuda.counts(made)["launch"]
        replays = [near(graph(*given))]
        with FAKE.calls() as made:
            again = graph(*given)
        replays.append(near(again))
        counted = fake_cuda.counts(made)
    return {
        "captured": {"graphs": counted["graph"], "waits": counted["wait"], "replays": replays},
        "compiled": {"launches": with_plain, "epilogues": epilogues, "near": close},
    }


# ----- convolutions by cuDNN ------------------------------------------------------------------------------------------

CONVOLUTIONS: Any = (
    # Of image and kernel the shapes, then padding, stride, dilation and groups.
    ((2, 3, 9), (4, 3, 3), (1,), (2,), (1,), 1),
    ((2, 3, 6, 5), (4, 3, 3, 2), (0, 0), (1, 1), (1, 1), 1),
    ((2, 4, 6, 7), (6, 2, 3, 3), (1, 2), (2, 1), (1, 2), 2),
    ((2, 4, 5, 5), (8, 1, 2, 2), (1, 0), (1, 3), (1, 1), 4),
    ((3, 8, 4, 4), (5, 8, 1, 1), (0, 0), (1, 1), (1, 1), 1),
    ((1, 2, 4, 5, 4), (4, 1, 2, 3, 2), (1, 0, 1), (1, 2, 1), (2, 1, 1), 2),
)


def convolutions(_: str) -> dict[str, Any]:
    """Convolutions by cuDNN: where values differ from the CPU's, and what the library was asked for."""
    from meshtape.arrays.kernels.cudnn import convolution as cudnn
    from meshtape.info import collect

    rng, fake, out = np.random.default_rng(0), FAKE.convolutions, {"differences": [], "calls": 0}
    near = {2: 2e-2, 4: 1e-5, 8: 1e-12}

    def placed_as(host: np.ndarray, layout: str) -> Any:
        """In the memory of a GPU: without gaps, with channels last, or at an odd address."""
        if layout == "last":
            return mt.moveaxis(mt.asarray(np.moveaxis(host, 1, -1).copy(), device="cuda:0"), -1, 1)
        if layout == "odd":
            return mt.asarray(np.concatenate([host.ravel()[:1], host.ravel()]), device="cuda:0")[1:].reshape(host.shape)
        return mt.asarray(host, device="cuda:0")

    def three(x: Any, w: Any, g: Any, numbers: Any) -> dict[str, Callable[[], Any]]:
        how = dict(zip(("padding", "stride", "dilation", "groups"), numbers, strict=True))
        return {
            "conv": lambda: apply(mt.OPS["conv"], (x, w), how),
            "conv_image": lambda: apply(mt.OPS["conv_image"], (g, w), {"image": x.shape[2:], **how}),
            "conv_kernel": lambda: apply(mt.OPS["conv_kernel"], (g, x), {"kernel": w.shape[2:], **how}),
        }

    def costs(fn: Callable[[], Any]) -> list[int]:
        with FAKE.calls() as made:
            fn()
        n = fake_cuda.counts(made)
        return [n[k] for k in ("launch", "h2d", "wait", "d2d")]

    def asked(fn: Callable[[], Any]) -> list[Any]:
        fake.asked.clear(), fake.taken.clear()
        fn()
        return [list(map(list, fake.asked)), list(map(list, fake.taken))]

    def sample(dtype: Any, case: Any) -> tuple[list[np.ndarray], dict[str, Any]]:
        x, w = (rng.standard_normal(s).astype(dtype) for s in case[:2])
        y = three(*(mt.asarray(a, device="cpu") for a in (x, w, x)), case[2:])["conv"]()
        g = rng.standard_normal(y.shape).astype(dtype)
        hosts = [x, w, g]
        return hosts, three(*(mt.asarray(a, device="cpu") for a in hosts), case[2:])

    with mt.use_device("cuda:0"):
        for dtype, case in itertools.product((np.float16, mt.bfloat16, np.float32, np.float64), CONVOLUTIONS):
            hosts, on_cpu = sample(dtype, case)
            for layout in ("packed", "last", "odd"):
                fake.taken.clear()
                for name, fn in three(*(placed_as(h, layout) for h in hosts), case[2:]).items():
                    got, want = fn(), on_cpu[name]()
                    a, b = got.numpy().astype(np.float64), want.numpy().astype(np.float64)
                    close = np.allclose(a, b, near[np.dtype(dtype).itemsize], 10 * near[np.dtype(dtype).itemsize])
                    if (got.dtype, got.shape, str(got.device)) != (want.dtype, want.shape, "cuda:0") or not close:
                        out["differences"].append(f"{name} of {np.dtype(dtype).name} {layout} {case}")
                    out["calls"] += 1
                served = not (dtype is np.float64 and len(case[0]) == 5)  # which the stand-in refuses
                if len(fake.taken) != 3 * served:
                    out["differences"].append(f"{len(fake.taken)} calls of {np.dtype(dtype).name} {layout} {case}")
        case = CONVOLUTIONS[2]
        hosts, on_cpu = sample(np.float32, case)
        x, w, g = (placed_as(h, "packed") for h in hosts)
        calls = three(x, w, g, case[2:])
        out["costs"] = {name: costs(fn) for name, fn in calls.items()}
        out["asked"] = {"again": asked(calls["conv"])}
        cudnn._plan.cache_clear()
        out["asked"]["float32"] = asked(lambda: [fn() for fn in calls.values()])
        with mt.use_tf32():
            out["asked"]["with TF32"] = asked(calls["conv"])
        with mt.use_deterministic(False):
            out["asked"]["in any order"] = asked(lambda: [fn() for fn in calls.values()])
            short = three(*(a.astype(mt.float16) for a in (x, w, g)), case[2:])
            out["asked"]["short, in any order"] = asked(lambda: [fn() for fn in short.values()])
        last = three(*(placed_as(h, "last") for h in hosts), case[2:])
        out["asked"]["channels last"] = asked(last["conv"])
        short = three(*(a.astype(mt.float16) for a in (placed_as(h, "last") for h in hosts)), case[2:])
        out["asked"]["groups, short, channels last"] = asked(short["conv"])
        out["asked"]["mixed"] = asked(three(x.astype(mt.float16), w, g, case[2:])["conv"])
        complex_ = three(*(a.astype(mt.complex64) for a in (x, w, g)), case[2:])
        out["asked"]["complex"] = asked(lambda: [fn() for fn in complex_.values()])
        out["layouts"] = [[n // 4 for n in fn()._buf.strides] for fn in last.values()]
        out["more"] = _derivatives_of_convolutions(hosts, case[2:])
        out["info"] = collect()["cuda_libraries"]
        out |= _without_cudnn(cudnn, calls, on_cpu)
    return out | {"failures": FAKE.libraries.failures}


def _step(x: Any, w: Any, g: Any, how: Any) -> Any:
    """A convolution, its gradients, and a gradient of these."""

    def conv(x: Any, w: Any) -> Any:
        return mt.nn.conv2d(x, w, **how)

    y, pull = mt.vjp(conv, x, w)
    second = mt.grad(lambda x: (mt.vjp(conv, x, w)[1](g)[1] ** 2).sum() + (conv(x, w) ** 3).sum())(x)
    return y, *pull(g), second


def _derivatives_of_convolutions(hosts: list[np.ndarray], numbers: Any) -> dict[str, Any]:
    """Values of derivatives, eager, and in a CUDA graph."""
    step = functools.partial(_step, how=dict(zip(("padding", "stride", "dilation", "groups"), numbers, strict=True)))
    want = [a.numpy() for a in step(*(mt.asarray(h, device="cpu") for h in hosts))]
    given, graph = [mt.asarray(h, device="cuda:0") for h in hosts], mt.compile(step, cuda_graph=True)

    def near(got: Any) -> bool:
        return all(np.allclose(a.numpy(), w, 1e-4, 1e-4) for a, w in zip(got, want, strict=True))

    out = {"eager": near(step(*given)), "graph": [near(graph(*given))]}
    with FAKE.calls() as made, mt.host_waits():
        again = graph(*given)
    counted = fake_cuda.counts(made)
    out["graph"].append(near(again))
    return out | {"counts": [counted["graph"], counted["wait"]]}


def _without_cudnn(cudnn: Any, calls: Mapping[str, Any], on_cpu: Mapping[str, Any]) -> dict[str, Any]:
    """Where the library is absent, refuses, or fails: the values of the other way, or the words of the error."""
    from meshtape.info import collect

    fake, library, out = FAKE.convolutions, cudnn.library, {}

    def near() -> bool:
        return all(np.allclose(fn().numpy(), on_cpu[n]().numpy(), 1e-5, 1e-5) for n, fn in calls.items())

    cudnn.library = lambda: None
    out["told"] = collect()["cuda_libraries"]["cuDNN"]
    fake.taken.clear()
    out["absent"] = near() and len(fake.taken)
    cudnn.library = library
    forward, asks = "cudnnConvolutionForward", "cudnnGetConvolutionForwardAlgorithm_v7"
    for name, function, answer in (
        ("refused", asks, 3000),
        ("refused in the call", forward, 3007),
        ("fails to ask", asks, 4000),
        ("fails", forward, 5000),
    ):
        fake.status[function] = answer
        cudnn._plan.cache_clear()
        fake.taken.clear()
        out[name] = near() and len(fake.taken) if answer < 4000 else text_of(calls["conv"])
        fake.status.clear()
    return out


# ----- attention by cuDNN ---------------------------------------------------------------------------------------------


def attention(_: str) -> dict[str, Any]:
    sys.modules["cudnn"] = beside("frontend.py")
    return beside("attention.py").sweep(FAKE)


# ----- steps ----------------------------------------------------------------------------------------------------------


DECODER = mt.models.decoder.Config(vocab=32, width=16, layers=2, heads=2, max_length=16)


def _decoder(**options: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A decoder's step: loss, gradient and AdamW; and its arguments, on the CPU."""
    de, config = mt.models.decoder, dataclasses.replace(DECODER, **options)
    update = mt.optim.adamw(1e-2)

    def step(params: Any, slots: Any, tokens: Any) -> Any:
        def loss(p: Any) -> Any:
            total, count = de.loss(p, {"ids": tokens, "labels": tokens}, config)
            return total / count

        value, grads = mt.value_and_grad(loss)(params)
        return value, *update.update(params, grads, slots)

    params = de.init(mt.random.key(0), config)
    return step, (params, update.init(params), mt.asarray(np.arange(24).reshape(2, 12) % 32))


def _short(params: Any) -> tuple[Any, ...]:
    params = mt.tree_map(lambda x: x.astype(mt.bfloat16), params)
    return params, params, mt.optim.adamw(1e-2).init(params)


def _layers(w: Any, x: Any, t: Any) -> Any:
    def loss(w: Any) -> Any:
        h = mt.layer_norm(mt.tanh(x @ w[0] + 1.0), w[0].shape[1])
        return mt.mean((mt.nn.gelu(h @ w[1]) - t) ** 2)

    value, grads = mt.value_and_grad(loss)(w)
    return value, [a - 0.1 * g for a, g in zip(w, grads, strict=True)]


def _layer_arguments() -> tuple[Any, ...]:
    ones = [np.ones(s, np.float32) for s in ((16, 32), (32, 8), (64, 16), (64, 8))]
    w0, w1, x, t = map(mt.asarray, ones)
    return [w0, w1], x, t


def steps(_: str = "") -> dict[str, Any]:
    """Steps by name: what the second of them costs, how often it is traced, and where shapes differ from the CPU's."""
    made: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Callable[..., Any]]] = {}
    plain, compiled, graph = (lambda f: f), mt.compile, functools.partial(mt.compile, cuda_graph=True)
    decoder, args = _decoder()
    made["decoder"], made["decoder, compiled"] = (decoder, args, plain), (decoder, args, compiled)
    made["decoder, graph"] = decoder, args, graph
    params, slots, tokens = args
    halved = mt.tree_map(lambda x: x.astype(mt.bfloat16), params)
    short = halved, mt.optim.adamw(1e-2).init(halved), tokens
    made["decoder, bfloat16"], made["decoder, bfloat16, compiled"] = (decoder, short, plain), (decoder, short, compiled)
    made["adamw"] = mt.optim.adamw(1e-2).update, (params, params, slots), plain
    clipped = functools.partial(mt.optim.clip_by_global_norm, limit=1.0)
    average = mt.optim.ema(0.9)
    made["clipping"], made["averages"] = (
        (clipped, (params,), plain),
        (average.update, (params, average.init(params)), plain),
    )
    cosine = mt.optim.adamw(mt.optim.warmup_cosine(1e-2, 10, 100)).update
    made["adamw, bfloat16, scheduled"] = cosine, _short(params), plain
    experts, args = _decoder(experts=mt.models.moe.Config(4, 2, capacity_factor=None, aux_weight=0.1))
    made["experts"], made["experts, graph"] = (experts, args, plain), (experts, args, graph)
    layers = _layer_arguments()
    made["layers"], made["layers, compiled"] = (_layers, layers, plain), (_layers, layers, compiled)
    made["layers, graphs"] = _layers, layers, graph
    made["layers, donated"] = _layers, layers, functools.partial(graph, donate=0)
    made["decoder, donated"] = *made["decoder"][:2], functools.partial(graph, donate=(0, 1))
    de, en, ids = mt.models.decoder, mt.models.encoder, np.arange(24).reshape(2, 12) % 32
    config = en.Config(vocab=32, width=16, layers=1, heads=2, ffn=16, max_length=16)
    sentences = functools.partial(en.embed, ids=ids, config=config, mask=ids > 4)
    made["decoder of a CPU's batch"] = lambda p: decoder(*p, ids), ((params, slots),), plain
    made["encoder of a CPU's batch"] = sentences, (en.init(mt.random.key(0), config),), plain
    made["continued from the CPU"] = lambda p: de.generate(p, ids, DECODER, 1), (params,), plain
    out = {}
    for name, (fn, args, prepared) in made.items():
        run, given = prepared(fn), mt.tree_map(lambda a: a.to_device("cuda:0"), args)
        with mt.use_device("cpu" if "CPU" in name else "cuda:0"):
            feeds = isinstance(prepared, functools.partial) and "donate" in prepared.keywords

            def call(run: Any = run, feeds: bool = feeds) -> Any:
                nonlocal given
                found = run(*given)
                if feeds:  # what comes after the value is the next state
                    given = (*found[1:], *given[len(found) - 1 :])
                return found

            out[name] = _counted(call, fn(*args), "cuda:0")
            out[name]["traces"] = call() and run.signatures if prepared is not plain else 0
    return out | _steps_on_meshes(decoder, (params, slots, tokens))


def _steps_on_meshes(step: Callable[..., Any], args: Any) -> dict[str, Any]:
    """The decoder's step with its batch over ranks that are threads of this process and share a GPU: one, and two."""
    out, want = {}, step(*args)
    for ranks in (1, 2):
        with mt.Mesh({"data": ranks}, device="cuda") as mesh, mt.use_device("cuda:0"):
            params, slots = mt.tree_map(lambda a, m=mesh: mt.distribute(a, m), args[:2])
            given = params, slots, mt.distribute(args[2], mesh, data=mt.Shard(0))
            for name, run in (("", step), (", compiled", mt.compile(step))):
                row = _counted(lambda r=run, g=given: mt.compute(r(*g)), want, f"Mesh(data={ranks}) on cuda:0")
                out[f"decoder, mesh of {ranks}{name}"] = row | {"traces": run.signatures if name else 0}
    return out


def _counted(call: Callable[[], Any], want: Any, device: str) -> dict[str, Any]:
    """What the second call costs, and where its results are not those of the CPU, on this device."""
    call()
    with FAKE.calls() as calls, mt.host_waits() as waits:
        got = arrays_of(call())
    counted = fake_cuda.counts(calls)
    return {
        "costs": fake_cuda.cost(counted),
        "graphs": counted["graph"],
        "untold": [] if counted["wait"] == len(waits) else [f": {counted['wait']} waits, {len(waits)} told"],
        "differences": [
            f"result {k}: {g.dtype}{list(g.shape)} on {g.device}, on the CPU {w.dtype}{list(w.shape)}"
            for k, (g, w) in enumerate(zip(got, arrays_of(want), strict=True))
            if (str(g.device), g.dtype, g.shape) != (device, w.dtype, w.shape)
        ],
    }


# ----- donated inputs of CUDA graphs ----------------------------------------------------------------------------------


def _momentum(state: Any, x: Any, t: Any) -> Any:
    """A step of a layer, with a slot for each parameter."""

    def loss(w: Any) -> Any:
        return mt.mean((mt.tanh(x @ w[0] + w[1]) - t) ** 2)

    value, grads = mt.value_and_grad(loss)(state[0])
    slots = [0.9 * m + g for m, g in zip(state[1], grads, strict=True)]
    return value, ([w - 0.1 * m for w, m in zip(state[0], slots, strict=True)], slots)


class Loop:
    """A loop of donated steps on a GPU, beside the same steps on the CPU."""

    def __init__(self, device: str = "cuda:0") -> None:
        rng = np.random.default_rng(0)
        shapes = (16, 8), (8,), (16, 8), (8,), (32, 16), (32, 8)
        hosts = [rng.standard_normal(s).astype(np.float32) for s in shapes]
        a, b = ([mt.asarray(h, device=d) for h in hosts] for d in (device, "cpu"))
        self.state, self.batch, self.want, self.told = (a[:2], a[2:4]), a[4:], (b[:2], b[2:4]), b[4:]
        self.run = mt.compile(_momentum, cuda_graph=True, donate=0)
        with mt.use_device(device):
            batch, self.batch = self.batch, [mt.permute_dims(mt.asarray(h.T), (1, 0)) for h in hosts[4:]]
        self.step()
        self.batch = batch  # the same, in the order of C

    def step(self) -> str:
        """A call: whether its values are right, its graphs, and the arrays that it copies in and out; numbers aside."""
        _copied.clear()
        with FAKE.calls() as made:
            value, self.state = self.run(self.state, *self.batch)
        told, self.want = _momentum(self.want, *self.told)
        right = near((value, self.state), (told, self.want))
        graphs = fake_cuda.counts(made)["graph"]
        return f"{'right' if right else 'wrong'}, {graphs} graph, {' and '.join(map(str, _copied[-2:]))} copies"


_copied: list[int] = []


def near(got: Any, want: Any) -> bool:
    pairs = zip(arrays_of(got), arrays_of(want), strict=True)
    return all(np.allclose(a.numpy(), b.numpy(), 1e-4, 1e-5) for a, b in pairs)


class Consumer:
    """Another library that holds an array of ours for its memory."""

    def __init__(self, x: Any) -> None:
        self.held, told = x, x.__cuda_array_interface__
        self.memory = (ctypes.c_char * x.nbytes).from_address(told["data"][0])

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return np.frombuffer(self.memory, np.float32)


def _counting() -> None:
    """Let graphs note how many arrays they copy, numbers aside."""
    from meshtape.autodiff.compiler.cuda_graphs import CudaGraphs

    plain = CudaGraphs.copy

    def copy(targets: Any, sources: Any) -> None:
        _copied.append(sum(x.size > 1 for x in targets))
        plain(targets, sources)

    CudaGraphs.copy = staticmethod(copy)


def decoder(_: str) -> list[Any]:
    """Donated steps of a decoder with AdamW, by values: whether they are those of the CPU, and the arrays copied.
    (Sums at indices are atomic, as a sort does not become part of the fake's graphs.)"""
    FAKE.use_pool(True)
    _counting()
    step, host = _decoder()
    given = mt.tree_map(lambda a: a.to_device("cuda:0"), host)
    run, out = mt.compile(step, cuda_graph=True, donate=(0, 1)), []
    for _ in range(3):
        with mt.use_device("cuda:0"), mt.use_deterministic(False):
            got = run(*given)
        want = step(*host)
        out.append([near(got, want), *_copied[-2:]])
        given, host = (*got[1:], given[2]), (*want[1:], host[2])
    return out


def donated(_: str) -> dict[str, Any]:
    """A state that is passed from call to call, by values: its copies, and all who may hold a part of it."""
    from meshtape.parallel.base.bundles import Bundle
    from meshtape.parallel.base.device_memory import memory_of

    cp, out = FAKE.cupy, {}
    FAKE.use_pool(True)
    _counting()
    loop = Loop()
    out["steps"] = [loop.step() for _ in range(3)]
    held = {
        "a view": lambda w: w[::2],
        "a copy of the object": lambda w: w.__copy__(),
        "the buffer": lambda w: w._buf,
        "CuPy": lambda w: cp.asarray(w),
        "DLPack": lambda w: cp.from_dlpack(w),
        "an older protocol": Consumer,
        "a block": lambda w: memory_of("cuda:0").put(w._buf),
        "pickled": lambda w: pickle.loads(pickle.dumps(w)),
        "a copy": lambda w: w.numpy(),
    }
    out["held"], out["old values"] = {}, {}

    def value(x: Any) -> np.ndarray:
        return np.array(x.get() if isinstance(x, cp.ndarray) else x.numpy() if isinstance(x, mt.Array) else x)

    for name, hold in held.items():
        loop.step()
        kept = hold(loop.state[0][0])
        before = value(kept)
        steps = [loop.step(), loop.step()]
        out["old values"][name] = bool(np.array_equal(value(kept), before))
        del kept
        out["held"][name] = [*steps, loop.step(), loop.step()]
    out["recordings"] = len(next(iter(loop.run._cache.values())).run._recordings)

    first = loop.state[0][0]
    loop.step()
    uses = {
        "an op": lambda: first + 1.0,
        "an index": lambda: first[0],
        "its values": first.numpy,
        "DLPack": lambda: cp.from_dlpack(first),
        "the function": lambda: loop.run(([first, loop.state[0][1]], loop.state[1]), *loop.batch),
        "another function": lambda: mt.compile(lambda a: a * 2.0)(first),
        "another graph": lambda: mt.compile(lambda a: a * 2.0 + 1.0, cuda_graph=True)(first),
        "a text": lambda: repr(first),
    }
    out["gone"] = {name: text_of(use) for name, use in uses.items()}
    out["gone is on"] = [str(first.device), list(first.shape)]

    left = Loop()
    state, want = left.state, left.want
    del left
    gc.collect()
    noise = [cp.full(1 << 12, 7.0, np.float32) for _ in range(64)]
    out["outlives the function"] = near(state, want)
    del noise, state

    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
    with streams[0]:
        loop.step()
    with streams[1], FAKE.calls() as made:
        again = loop.step()
    marks = [size for what, stream, size in made if what == "record" and stream == streams[0].ptr]
    awaited = [size for what, stream, size in made if what == "order" and stream == streams[1].ptr]
    out["another stream"] = [again, len(marks), set(marks) <= set(awaited)]
    foreign = cp.cuda.Stream(non_blocking=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is a newer name
        with cp.cuda.ExternalStream(foreign.ptr):
            loop.step()
    with mt.host_waits() as waits:
        out["after a stream of others"] = loop.step()
    out["waits"] = [re.sub(r":\d+", "", w.replace(str(HERE), "")) for w in waits if "graph" in w]

    threads = [Loop() for _ in range(3)]
    found: list[str] = []
    work = [threading.Thread(target=lambda t=t: found.extend(t.step() for _ in range(4))) for t in threads]
    for t in work:
        t.start()
    for t in work:
        t.join(120)
    out["threads"] = sorted({f.partition(",")[0] for f in found})

    there = Loop("cuda:1")
    out["the second device"] = [there.step(), str(there.state[0][0].device)]
    bundle = Bundle({0: {0: loop.state[0][0]._buf}})
    before = loop.state[0][0].numpy()
    out["with a kept block"] = [loop.step(), loop.step()]
    bundle.spill(memory_of("cuda:0"))
    out["with a spilled block"] = [loop.step(), loop.step()]
    out["the block"] = bool(np.array_equal(bundle.slots[0][0], before))
    out["short memory"] = _short_memory()
    return out | {"failures": FAKE.libraries.failures}


def _short_memory() -> dict[str, Any]:
    """Steps with AdamW on a mesh of one GPU, with memory for all of it, and for six tenths of the state: whether the
    bits are alike, and how often a block is moved to the host and back."""
    rng, update = np.random.default_rng(0), mt.optim.adamw(1e-2)
    # The least workspace of a product is a megabyte.
    hosts = [rng.standard_normal((256, 256)).astype(np.float32) for _ in range(8)]

    def loss(ws: Any) -> Any:
        return mt.mean(functools.reduce(lambda x, w: mt.tanh(x @ w), ws[1:], ws[0][:2]))

    def step(ws: Any, slots: Any) -> Any:
        value, grads = mt.value_and_grad(loss)(ws)
        return value, *update.update(ws, grads, slots)

    def trained(free: int) -> tuple[list[np.ndarray], list[int]]:
        FAKE.cupy.get_default_memory_pool().free_all_blocks()
        with mt.Mesh({"data": 1}, device="cuda") as mesh, FAKE.free_memory(free), FAKE.calls() as made:
            ws = [mt.distribute(w, mesh) for w in hosts]
            slots, run = update.init(ws), mt.compile(step)
            for _ in range(2):
                value, ws, slots = run(ws, slots)
            found = [np.asarray(a) for a in (value, *ws)]
        n = fake_cuda.counts(made)
        return found, [n["d2h"], n["h2d"]]

    gc.freeze()  # CuPy collects garbage before it gives up, some hundred times here
    (want, plenty), (got, short) = (trained(size) for size in (1 << 30, 6 * 3 * 8 * hosts[0].nbytes // 10))
    gc.unfreeze()
    return {"alike": all(map(np.array_equal, got, want)), "copies": [plenty, short]}


# ----- promises, one by one -------------------------------------------------------------------------------------------


def text_of(fn: Callable[[], Any]) -> str:
    """What a call raises."""
    try:
        fn()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "a result"


def names_of(tree: Any) -> list[str]:
    return [f"{a.dtype.name}{list(a.shape)} on {a.device}" for a in arrays_of(tree)]


def waits_of(fn: Callable[[], Any]) -> list[int]:
    """How often a call waited, and how often it said so."""
    with FAKE.calls() as made, mt.host_waits() as told:
        fn()
    return [fake_cuda.counts(made)["wait"], len(told)]


def _of_bfloat16() -> dict[str, Any]:
    b, c = mt.ones((2, 3, 3), dtype=mt.bfloat16), mt.ones((4, 1, 3, 3), dtype=mt.bfloat16)
    names = ("gelu", "elu", "selu", "leaky_relu", "silu", "celu", "mish", "softplus", "relu", "softmax")
    fns = {n: getattr(mt.nn, n) for n in names}
    fns |= {"where": lambda x: mt.where(x > 0, x, 0.0), "round": mt.round, "round to": lambda x: mt.round(x, 1)}
    fns |= {"tril": mt.tril, "clip": lambda x: mt.clip(x, 0, 1), "erf": mt.erf, "2**": lambda x: 2.0**x}
    fns |= {"matmul": lambda x: x @ c, "matmul 2": lambda x: x @ x[0], "solve": lambda x: mt.linalg.solve(x, x)}
    out = {
        n: [a.dtype.name for a in arrays_of((f(b), mt.grad(lambda x, f=f: mt.sum(f(x)))(b)))] for n, f in fns.items()
    }
    return {n: d for n, d in out.items() if d != ["bfloat16"] * 2}


def _of_solvers() -> dict[str, str]:
    a, b = mt.ones((3, 3)), mt.ones((2, 3, 3))
    with FAKE.memory_of(1):
        out = {
            n: text_of(lambda n=n: getattr(mt.linalg, n)(a)) for n in ("inv", "cholesky", "eigh", "svd", "qr", "eig")
        }
        out["solve"] = text_of(lambda: mt.linalg.solve(a, mt.ones((3, 1))))
        return out | {f"{n} of a stack": text_of(lambda n=n: getattr(mt.linalg, n)(b)) for n in ("inv", "cholesky")}


def _of_writes() -> dict[str, str]:
    index = mt.asarray([0, 1, 1])
    out = {}
    for dtype in (mt.int8, mt.uint8, mt.int16, mt.float16, mt.bfloat16, mt.bool, mt.complex64, mt.uint64):
        x, v = mt.zeros(4, dtype=dtype), mt.ones(3, dtype=dtype)
        for way in ("max", "min", "add", "multiply", "set"):
            out[f"{way} {dtype}"] = text_of(lambda x=x, v=v, w=way: getattr(x.at[index], w)(v))
    return {k: v for k, v in out.items() if v != "a result"}


def _of_short_indices() -> list[str]:
    x = mt.ones((300, 2))

    def read(dtype: Any) -> Any:
        i = mt.asarray(np.asarray([2, 0]), dtype=dtype)
        return x[i], x.at[i].set(1.0), mt.grad(lambda a: mt.sum(a[i]))(x)

    with mt.index_checks(False):
        return [text_of(lambda t=t: read(t)) for t in (mt.uint8, mt.int8, mt.uint16, mt.uint64)]


def _of_memory() -> list[str]:
    def used_up(size: int) -> Any:
        raise MemoryError("std::bad_alloc: out_of_memory")  # as RMM says it

    x, compiled, cuda = mt.ones(3), mt.compile(lambda a: a * 2.0 + 1.0), FAKE.cupy.cuda
    mask, wide = x > 0, mt.broadcast_to(x[:1], (2**45,))
    FAKE.use_pool(True)  # which is what knows
    out = [text_of(lambda: compiled(wide)), text_of(lambda: wide + 1.0), text_of(lambda: mt.zeros(2**50))]
    cuda.set_allocator(used_up)
    try:
        out += [text_of(lambda: x + 1.0), text_of(lambda: compiled(x)), text_of(lambda: x[mask])]
        return [*out, text_of(lambda: list(mt.prefetch([np.ones(3)])))]
    finally:
        FAKE.use_pool(False)


def _of_exchange() -> dict[str, Any]:
    from meshtape.arrays.backends.dlpack import contents

    x = mt.asarray(np.arange(4.0))
    again = pickle.loads(pickle.dumps(x))
    return {
        "pickled": [str(again.device), again.tolist()],
        "read-only": contents(x.__dlpack__(max_version=(1, 0))).flags,
        "shared": FAKE.cupy.from_dlpack(x).data.ptr == x._buf.data.ptr,
        "to the host": waits_of(lambda: np.from_dlpack(x, device="cpu")),
    }


def _of_prefetch() -> dict[str, Any]:
    def run() -> list[Any]:
        return [b for _ in range(3) for b in mt.prefetch([{"x": np.ones(5, np.float32), "i": np.asarray(3)}] * 4)]

    with FAKE.calls() as made:
        batches = run()
    copies = {stream for what, stream, _ in made if what == "h2d"}
    awaited = {size for what, stream, size in made if what == "order" and stream in copies}
    marks = {size for what, stream, size in made if what == "record" and stream not in copies}
    with FAKE.calls() as dropped:
        batches.clear()
        run()
    returned = [what for what, stream, _ in dropped if what == "order" and stream in copies]
    return {
        "streams": len(copies),
        "apart": 0 not in copies,
        "batch": names_of(next(iter(mt.prefetch([{"x": np.ones(5, np.float32), "i": np.asarray(3)}])))),
        "awaits only marks of the consumer": awaited <= marks,
        "awaits what was dropped": bool(returned),
    }


def _of_two_devices() -> dict[str, Any]:
    """The current device is the first, the arrays are on the second; and the CPU is where new arrays go."""
    x = mt.asarray(np.ones((4, 3), np.float32), device="cuda:1")
    mask, labels = (x > 0)[:, 0], mt.asarray([0, 1, 2, 0], device="cuda:1")
    calls: dict[str, Callable[[], Any]] = {
        "a list": lambda: x[[0, 2]],
        "an index": lambda: x[labels],
        "a mask": lambda: x[mask],
        "unchecked": lambda: x[labels.astype(mt.int8)],
        "nonzero": lambda: mt.nonzero(x),
        "labels": lambda: mt.nn.cross_entropy(x, labels),
        "tril": lambda: mt.tril(x),
        "cov": lambda: mt.cov(x),
        "a loss": lambda: mt.nn.mse_loss(x[0], [1.0, 2.0, 3.0]),
        "select": lambda: mt.select([x < 1, x > 2], [10, 20], default=x),
        "append": lambda: mt.append(x, 7),
        "convolve": lambda: mt.convolve(x[0], [1.0, 2.0]),
        "ldexp": lambda: mt.ldexp(x, 2),
        "gradient": lambda: mt.grad(lambda a: mt.sum(mt.nn.gelu(a)[[0, 0, 1]]))(x),
        "compiled": lambda: mt.compile(lambda a: a[[0, 0, 1]] * 2.0 + 1.0)(x),
        "laplace": lambda: mt.random.laplace(mt.random.key(0).to_device("cuda:1"), (3,)),
    } | _beside_what_is_no_array(x)
    with mt.use_device("cpu"):
        found = {name: outcome(lambda c=call: c(), ()) for name, call in calls.items()}
    return {
        n: _said(f) for n, f in found.items() if isinstance(f, Exception) or {str(a.device) for a in f} != {"cuda:1"}
    }


def _beside_what_is_no_array(x: Any) -> dict[str, Callable[[], Any]]:
    """Calls of an array of 4 x 3 with lists, NumPy's and CuPy's arrays, and keys in host memory."""
    import cupy

    v, host, key = x[:, 0], np.ones(4, np.float32), mt.random.key(0, device="cpu")
    with v._buf.device:
        theirs, places = cupy.ones(4, np.float32), cupy.asarray([0, 1])
    held = mt.asarray([1.0, 2.0, 3.0, 4.0], dtype=mt.float32, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        mt.storage.save_program(folder + "/p", lambda a: mt.tanh(a * held)[[0, 2]], held)
        program = mt.storage.load_program(folder + "/p")
    times = mt.compile(lambda a, b: mt.tanh(a * b) + np.float32(2))

    def written() -> Any:
        y = +v
        y[:2], y[2:], y[[True, False, True, False]] = [5.0, 6.0], np.ones(2), 3.0
        y[places] = theirs[:2]
        return y

    return {
        "take": lambda: mt.take(x, [0, 1], axis=1),
        "a method": lambda: v.dot([1.0, 2.0, 3.0, 4.0]),
        "outer": lambda: mt.linalg.outer(v, [1.0, 2.0]),
        "set": lambda: v.at[:2].set([1.0, 2.0]),
        "subtract": lambda: v.at[[0, 1]].subtract(np.ones(2)),
        "divide": lambda: v.at[[0, 0]].divide([1.0, 2.0]),
        "sum": lambda: mt.sum(v, where=[True, False, True, True]),
        "diff": lambda: mt.diff(v, prepend=[1.0]),
        "concat": lambda: mt.concat([v, [1.0, 2.0]]),
        "matmul": lambda: [1.0, 2.0, 3.0, 4.0] @ x,
        "solve": lambda: mt.linalg.solve(x.T @ x, [1.0, 2.0, 3.0]),
        "linspace": lambda: mt.linspace(v[0], v[1], 5),
        "full": lambda: mt.full((3,), v[1]),
        "losses": lambda: mt.asarray([v[0], v[1]]),
        "NumPy's": lambda: v + host,
        "NumPy's first": lambda: host @ x,
        "a ufunc": lambda: np.add(host, v),
        "a function of NumPy": lambda: np.where(host > 0, v, 0.0),
        "an index of CuPy": lambda: v[places],
        "CuPy's": lambda: v + theirs,
        "compared with CuPy's": lambda: v == theirs,
        "written": written,
        "compiled with a number": lambda: times(v, np.float32(3)),
        "compiled with NumPy's": lambda: times(v, host),
        "compiled with NumPy's first": lambda: times(host, v),
        "compiled with CuPy's": lambda: times(v, theirs),
        "a saved program": lambda: program(v),
        "a saved program, compiled": lambda: mt.compile(program)(v),
        "a saved program's derivative": lambda: mt.grad(lambda a: mt.sum(program(a)))(v),
        "dropout": lambda: mt.nn.dropout(v, 0.5, key=key),
        "dropout_add": lambda: mt.nn.dropout_add(v, v, 0.5, key=key),
        "choice": lambda: mt.random.choice(key, v, (3,)),
        "weights": lambda: mt.random.choice(key, 4, (3,), p=v),
        "permutation": lambda: mt.random.permutation(key, v),
        "categorical": lambda: mt.random.categorical(key, v),
        "a mean": lambda: mt.random.laplace(key, loc=v),
    }


def _of_frames() -> dict[str, int]:
    """Python's calls inside of one call of ours on arrays of the current device, once it has been made before: what it
    costs the host."""
    x, out = mt.ones(8), {}
    for name, call in {"a + a": lambda: x + x, "a * 2.0": lambda: x * 2.0, "tanh": lambda: mt.tanh(x)}.items():
        seen: list[Any] = []
        call()
        sys.setprofile(lambda frame, event, _, to=seen: to.append(frame.f_code) if event == "call" else None)
        try:
            call()
        finally:
            sys.setprofile(None)
        own = [code for code in seen if code.co_filename != FAKE.arguments.__file__]
        out[name] = len(own) - 1  # the call itself
    return out


ACTIVATIONS = [
    *("celu", "elu", "gelu", "hard_sigmoid", "hard_silu", "hard_tanh", "leaky_relu", "log_sigmoid", "mish", "relu"),
    *("relu6", "selu", "sigmoid", "silu", "softplus", "softsign", "squared_relu"),
]


def _of_launches() -> dict[str, list[Any]]:
    """Launches forward and backward of functions that are one each, by dtype."""
    calls: dict[str, Callable[..., Any]] = {name: getattr(mt.nn, name) for name in ACTIVATIONS}
    calls["gelu, by tanh"] = lambda x: mt.nn.gelu(x, approximate=True)
    calls["swiglu"] = lambda x, y: mt.nn.swiglu(x, y)
    calls["rotary_embedding"] = lambda x: mt.nn.rotary_embedding(x, table, table)
    calls["hypot"] = mt.hypot
    out: dict[str, list[Any]] = {}
    for dtype in every.FLOATS:
        x, y = mt.ones((6, 8)).astype(dtype), mt.ones((6, 8)).astype(dtype)
        table = mt.ones((6, 4)).astype(np.float64 if dtype.itemsize == 8 else np.float32)
        for name, fn in calls.items():
            args = (x, y) if name in ("swiglu", "hypot") else (x,)
            with FAKE.calls() as forward:
                value, pull = mt.vjp(fn, *args)
            with FAKE.calls() as back:
                pull(value)
            found = [fake_cuda.counts(forward)["launch"], fake_cuda.counts(back)["launch"]]
            if found != [1, 1]:
                out[f"{name} of {dtype}"] = found
    return out


def _of_arguments() -> dict[str, str]:
    """Launches whose arguments are not those of their kernel, and one whose are."""
    cp, x = FAKE.cupy, FAKE.cupy.ones((4, 6), np.float32)
    code = """
    typedef float T;
    template <class A> struct Pair { A first, second; };
    template <typename W, int N> __global__ void __launch_bounds__(N) of(int n, const W w, T* x) {}
    template <typename W> __global__ void more(const void* a, const Pair<W>* b, const bfloat16 *c) {}
    extern "C" __global__ void one(const CArray<T, 2, 1, 1> x, const bool b) {}
    """

    module = FAKE.arguments.Module(code, ("of<double, 32>", "more<double>"))
    module.load(b"nothing")

    def launch(name: str, *args: Any) -> str:
        return text_of(lambda: module.get_function(name).look(args))

    truth, short, wide = np.bool_(True), cp.ones((4, 6), np.float16), cp.ones(4)
    two, nothing = cp.ones(4, mt.bfloat16), mt.arrays.kernels.launch.NOTHING
    nowhere = cp.ndarray(4, np.float32, cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(0, 0, x, 0), 0))
    return {
        "right": launch("t0", np.int32(1), 2.0, x),
        "right, of CuPy": launch("one", x, truth),
        "right, of pairs": launch("t1", short, wide, two),
        "right, of nothing": launch("t1", nothing, np.uint64(wide.data.ptr), two[:0]),
        "a pointer at shorter numbers": launch("t0", np.int32(1), 2.0, short),
        "a pointer at integers": launch("t0", np.int32(1), 2.0, cp.ones(4, np.int32)),
        "a pointer at the other short float": launch("t1", x, wide, short),
        "pairs of shorter numbers": launch("t1", x, x, two),
        "an array at no address": launch("t0", np.int32(1), 2.0, nowhere),
        "an address of none": launch("t0", np.int32(1), 2.0, np.uint64(0)),
        "a float for an integer": launch("t0", np.float32(1), 2.0, x),
        "one is missing": launch("t0", np.int32(1), 2.0),
        "one more": launch("one", x, truth, x),
        "a longer number": launch("t0", np.int64(1), 2.0, x),
        "a shorter one": launch("t0", np.int32(1), np.float32(2.0), x),
        "an array for a number": launch("t0", x, 2.0, x),
        "a number for an array": launch("t0", np.int32(1), 2.0, np.int32(7)),
        "another dtype": launch("one", short, truth),
        "other dimensions": launch("one", x[0], truth),
        "gaps": launch("one", x[:, ::2], truth),
    }


def _of_complex() -> dict[str, list[str]]:
    """What normalises or compares real numbers alone says of complex ones, on a GPU and on a CPU."""
    z, half, labels, w = np.ones((4, 6), np.complex64), np.ones((4, 3)), np.asarray([0, 1, 2, 0]), np.ones(6)
    cube = np.ones((2, 6, 6))
    calls: dict[str, Callable[[Any], Any]] = {
        "softmax": mt.nn.softmax,
        "log_softmax": mt.nn.log_softmax,
        "layer_norm": lambda z: mt.layer_norm(z, 6),
        "rms_norm": lambda z: mt.rms_norm(z, 6),
        "group_norm": lambda z: mt.group_norm(z, 2),
        "batch_norm": lambda z: mt.batch_norm(z, w, w, training=True),
        "batch_norm of old statistics": lambda z: mt.batch_norm(z, w, w, training=False),
        "cross_entropy": lambda z: mt.nn.cross_entropy(z, labels),
        "linear_cross_entropy": lambda z: mt.nn.linear_cross_entropy(z, z.T, labels),
        "rotary_embedding": lambda z: mt.nn.rotary_embedding(z, half, half),
        "add_layer_norm": lambda z: mt.nn.add_layer_norm(z, z, 6),
        "add_rms_norm": lambda z: mt.nn.add_rms_norm(z, z, 6),
        "experts": lambda z: mt.nn.experts(z, labels[:, None] % 2, half[:, :1], gate=cube, up=cube, down=cube),
        "attention": lambda z: mt.nn.scaled_dot_product_attention(z, z, z),
    }
    return {
        n: [text_of(lambda d=d, f=f: f(mt.asarray(z, device=d))) for d in ("cuda:0", "cpu")] for n, f in calls.items()
    }


def _of_biases() -> dict[str, list[int]]:
    """Launches of a compiled layer with a bias, forward alone, and with its gradients, by dtype."""

    def both(x: Any, w: Any, b: Any, g: Any) -> Any:
        y, pull = mt.vjp(lambda w, b: x @ w + b, w, b)
        return y, *pull(g)

    out: dict[str, list[int]] = {}
    for layer in (mt.compile(lambda x, w, b, g: x @ w + b), mt.compile(both)):
        for dtype in every.FLOATS:
            given = [mt.ones(s).astype(dtype) for s in ((2, 8, 16), (16, 32), (32,), (2, 8, 32))]
            layer(*given)
            with FAKE.calls() as made:
                layer(*given)
            out.setdefault(str(dtype), []).append(fake_cuda.counts(made)["launch"])
    return out


def _of_the_loss_of_a_vocabulary() -> dict[str, list[int]]:
    """Launches forward and backward of 8,192 losses over 32,768 classes, which are 16 tiles."""
    out, labels = {}, mt.asarray(np.zeros(8192, np.int64))
    for dtype in (mt.bfloat16, mt.float16):
        h, w = mt.ones((8192, 16)).astype(dtype), mt.ones((16, 32768)).astype(dtype)
        with FAKE.calls() as forward:
            losses, pull = mt.vjp(lambda h, w: mt.nn.linear_cross_entropy(h, w, labels, reduction="none"), h, w)
        with FAKE.calls() as back:
            pull(losses)
        out[dtype.name] = [fake_cuda.counts(c)["launch"] for c in (forward, back)]
    return out


def _of_long_attention() -> dict[str, Any]:
    """Of a head of 65,536 tokens: launches and shapes each way, and the most bytes that were in use at once, and that
    CuPy's pool then held, beside the operands."""
    cp, out = FAKE.cupy, {}

    class InUse(cp.cuda.MemoryHook):
        name = "in use"
        now = most = 0

        def malloc_postprocess(self, **of: Any) -> None:
            self.now += of["mem_size"]
            self.most = max(self.most, self.now)

        def free_postprocess(self, **of: Any) -> None:
            self.now -= of["mem_size"]

    FAKE.use_pool(True)
    pool = cp.get_default_memory_pool()
    try:
        for dtype, causal in itertools.product((mt.bfloat16, mt.float32), (False, True)):
            given = [mt.zeros((1, 1, 1 << 16, 64), dtype=dtype) for _ in range(3)]
            pool.free_all_blocks()
            before = pool.total_bytes()
            attention = functools.partial(mt.nn.scaled_dot_product_attention, is_causal=causal)
            with InUse() as hook:
                with FAKE.calls() as forward:
                    result, pull = mt.vjp(attention, *given)
                with FAKE.calls() as back:
                    grads = pull(result)
            out[f"{dtype.name}{', causal' * causal}"] = {
                "launches": [fake_cuda.counts(c)["launch"] for c in (forward, back)],
                "shapes": {tuple(a.shape) for a in (result, *grads)} == {given[0].shape},
                "bytes": [hook.most, pool.total_bytes() - before],
            }
            del result, pull, grads
    finally:
        FAKE.use_pool(False)
        pool.free_all_blocks()
    return out


def _of_bundles() -> int:
    from meshtape.parallel.dask.worker import Bundle

    return sys.getsizeof(Bundle({0: {0: FAKE.cupy.ones(1000)}}))


def _of_spilled() -> list[str]:
    """Blocks that do not come back from pinned memory as they were."""
    from meshtape.parallel.base.device_memory import memory_of

    memory, wrong = memory_of("cuda:0"), []
    for host in (np.arange(6, dtype=np.int16).reshape(2, 3), np.ones((3, 0)), np.ones(5, mt.bfloat16), np.ones((1, 1))):
        with memory.using():
            block = memory.put(host)
            with FAKE.calls() as made:
                there = memory.spilled(block)
            back = memory.put(there)
        counted = [what for what, _, _ in made if what in ("h2d", "d2h", "launch")]
        same = type(there) is np.ndarray and type(back) is type(block) and np.array_equal(there, back.get())
        if not same or (there.dtype, there.shape) != (host.dtype, host.shape) or len(counted) > 1:
            wrong.append(f"{host.dtype} {host.shape} {counted}")
        if not np.array_equal(there, host):
            wrong.append(f"{host.dtype} {host.shape} has other numbers")
    return wrong


def _of_waits() -> dict[str, list[int]]:
    x, chosen = mt.ones((4, 3)), mt.asarray([[0], [1], [0], [1]])
    sent, w = mt.asarray([0, 1, 2, 0]), mt.ones((2, 3, 3))
    labels = sent + 0
    marked, masks = mt.asarray([[0, -100, 2, 0]] * 2), mt.asarray([0, 255, 2, 1], mt.uint8)
    lent = mt.asarray([0, 1])
    np.from_dlpack(lent, device="cpu", copy=True)
    kept = waits_of(lambda: x[lent])
    FAKE.cupy.from_dlpack(lent)
    return {
        "an index from the host": waits_of(lambda: x[sent]),
        "a part of an index from the host": waits_of(lambda: x[sent[1:], sent[:-1]]),
        "places that were counted": waits_of(lambda: x[mt.arange(4)]),
        "places that were counted down": waits_of(lambda: x[mt.arange(3, -1, -1)]),
        "an index from the host, at the other end": waits_of(lambda: x[mt.asarray([-4, -1])]),
        "labels from the host": waits_of(lambda: mt.nn.cross_entropy(x, sent)),
        "labels with a mark": waits_of(lambda: mt.nn.cross_entropy(x, marked[0], ignore_index=-100)),
        "labels of bytes with a mark": waits_of(lambda: mt.nn.cross_entropy(x, masks, ignore_index=255)),
        "nothing but marks": waits_of(lambda: mt.nn.cross_entropy(x[:1], marked[0, 1:2], ignore_index=-100)),
        "an index that was copied out": kept,
        "an index that another library holds": waits_of(lambda: x[lent]),
        "a list": waits_of(lambda: x[[0, 2]]),
        "a mask of the host": waits_of(lambda: x[np.asarray([True, False, True, True])]),
        "an index": waits_of(lambda: x[labels]),
        "labels": waits_of(lambda: mt.nn.cross_entropy(x, labels)),
        "experts": waits_of(lambda: mt.nn.experts(x, chosen, mt.ones((4, 1)), gate=w, up=w, down=w)),
        "det": waits_of(lambda: mt.grad(mt.linalg.det)(mt.ones((3, 3)))),
        "laplace": waits_of(lambda: mt.random.laplace(mt.random.key(0), (3,))),
        "a truth": waits_of(lambda: x[True]),
    }


def _by_libraries(x: Any, image: Any, kernel: Any) -> Any:
    """A value and gradients by cuSOLVER, cuBLAS, cuFFT and cuDNN, reductions by cub, and sorts."""

    def loss(x: Any, kernel: Any) -> Any:
        spectrum = mt.real(mt.fft.fft(mt.linalg.solve(x, mt.sort(x, axis=0))))
        return mt.sum(mt.nn.conv2d(image, kernel)) + mt.sum(spectrum @ x) + mt.linalg.svd(x)[1][0] + mt.max(x)

    return loss(x, kernel), mt.grad(loss, argnums=(0, 1))(x, kernel), mt.linalg.eigh(x)


def _of_streams() -> dict[str, Any]:
    """Of steps, plain, compiled and as graphs, under a stream that is not the default one: what they launch of
    libraries, and what went to another stream."""
    decoder, args = _decoder()
    experts = _decoder(experts=mt.models.moe.Config(4, 2, capacity_factor=None, aux_weight=0.1))
    images = mt.ones((2, 3, 6, 6)), mt.ones((4, 3, 3, 3))
    made = {"layers": (_layers, _layer_arguments()), "decoder": (decoder, args), "experts": experts}
    made |= {
        "decoder, bfloat16": (decoder, (*_short(args[0])[1:], args[2])),
        "libraries": (_by_libraries, (mt.eye(4), *images)),
    }
    out: dict[str, Any] = {"off": {}, "libraries": set()}
    for name, (step, host) in made.items():
        given = mt.tree_map(lambda a: a.to_device("cuda:0"), host)
        ways = {"plain": step, "compiled": mt.compile(step), "graph": mt.compile(step, cuda_graph=True)}
        for way, fn in ways.items():
            fn(*given)
            with FAKE.cupy.cuda.Stream(non_blocking=True) as stream, FAKE.calls() as calls:
                fn(*given)
            where = Counter((what, at) for what, at, _ in calls if what not in ("malloc", "order", "record"))
            out["libraries"] |= {what for what, _ in where}
            off = [f"{n} of {what}" for (what, at), n in where.items() if at != stream.ptr]
            if off or not where:
                out["off"][f"{name}, {way}"] = off
    return {"off": out["off"], "launched": sorted(out["libraries"])}


def _of_capture() -> dict[str, Any]:
    """What cannot be captured is refused by CuPy, and stays a call; the capture ends all the same, and streams and
    pools are the graph's own."""
    from meshtape.autodiff.compiler.cuda_graphs import CaptureRefused, CudaGraphs

    cp, graphs, x = FAKE.cupy, CudaGraphs(0), mt.ones((4, 4))._buf

    def recorded() -> Any:
        event = cp.cuda.Event()
        event.record()
        return event

    def ignored() -> Any:
        with contextlib.suppress(cp.cuda.runtime.CUDARuntimeError):
            cp.cuda.Device().synchronize()
        return x + x

    before = recorded()

    def captured(fn: Callable[[], Any]) -> str:
        with graphs.apart():
            try:
                graphs.capture(lambda: [fn()])
            except CaptureRefused:
                return "refused"
        return "captured"

    out = {
        "a sum of two": captured(lambda: x + x),
        "a product": captured(lambda: mt.OPS["matmul"].bind(cp)(x, x)),
        "a product of CuPy's": captured(lambda: x @ x),
        "a value": captured(lambda: float(x[0, 0])),
        "a solution": captured(lambda: cp.linalg.solve(x, x)),
        "a wait for the device": captured(cp.cuda.Device().synchronize),
        "a wait for an event of its own": captured(lambda: recorded().synchronize()),
        "a question to an event of its own": captured(lambda: recorded().done),
        "a wait for an event of before": captured(before.synchronize),
        "work behind an event of before": captured(lambda: cp.cuda.get_current_stream().wait_event(before)),
        "work behind an event of its own": captured(lambda: cp.cuda.get_current_stream().wait_event(recorded())),
        "what is left of a refusal that is not told": captured(ignored),
        "a sum of two, again": captured(lambda: x + x),
    }
    with graphs.apart():
        stream = cp.cuda.get_current_stream()
        out["its own stream"] = stream is not None and stream.ptr == graphs._stream.ptr != 0
        held = graphs._pool.used_bytes()
        kept = cp.empty(1000)
        out["its own pool"] = graphs._pool.used_bytes() >= held + kept.nbytes
    return out


def promises(_: str = "") -> dict[str, Any]:
    """The answer to each question of this section."""
    with mt.use_device("cuda:0"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out: dict[str, Any] = {"redirected": FAKE.redirected}
        found = FAKE.cupy.cuda.runtime.getDeviceProperties(1)
        out["properties"] = [found[k] for k in ("totalGlobalMem", "warpSize", "maxThreadsPerBlock", "major")]
        for name, fn in globals().items():
            if name.startswith("_of_"):
                out[name.removeprefix("_of_")] = outcome_of(fn)
        x = mt.ones((3, 3))
        out["heaviside"] = names_of(mt.grad(lambda a: mt.sum(mt.heaviside(1.5, a)))(x))
        out["2**x"] = names_of(mt.grad(lambda a: mt.sum(2.0**a))(x))
        out["solve"] = names_of([mt.linalg.solve(mt.ones((2, 3, 3)), x), mt.linalg.solve(x, mt.ones((2, 3, 1)))])
        out["float8"] = [
            text_of(lambda f=f: mt.compile(f, cuda_graph=True)(x))
            for f in (lambda a: a.astype(mt.float8_e5m2), lambda a: a.astype(mt.float8_e5m2).astype(a.dtype) + a)
        ]
        out["kinds of arguments"] = FAKE.arguments.Module.looked
        out["power"] = text_of(lambda: mt.asarray([2, 3]) ** -1)
        return out


def outcome_of(fn: Callable[[], Any]) -> Any:
    try:
        return fn()
    except Exception:
        return traceback.format_exc()[-1500:]


def benchmark(to: str) -> dict[str, Any]:
    """``benchmarks/gpu.py`` with tiny shapes, whose times say nothing here, and of whose ops one raises; then without
    any time; then what is left of it; and one whose clock raises."""
    sys.path.append(str(HERE / "../../../benchmarks"))
    module, rows, out = importlib.import_module("gpu"), importlib.import_module("gpu_rows"), {}
    given = rows.op

    def failing(name: str, **params: Any) -> Callable[..., Any]:
        if name == "rms_norm":
            raise RuntimeError("this one fails")
        return given(name, **params)

    def run(name: str, *options: str) -> None:
        status = module.main(["--tiny", "--quick", "--json", f"{to}/{name}.json", *options])
        out[name] = {"status": status, **json.loads(Path(f"{to}/{name}.json").read_text())}

    rows.op = failing
    run("whole")
    run("late", "--budget", "0")
    run("resumed", "--resume", f"{to}/whole.json", "--only", "softmax")
    module.checks = lambda meter: [][0]
    with contextlib.suppress(IndexError):
        run("ended")
    out["ended"] = json.loads(Path(f"{to}/ended.json").read_text())
    return out


# ----- our own kernels ------------------------------------------------------------------------------------------------


def kernels(cache: str) -> dict[str, str]:
    """Values of ops that our kernels alone compute, run by the emulator on CuPy's arrays; where they are not those of
    the CPU."""
    emulator, launch = beside("../../arrays/kernels/emulator.py"), mt.arrays.kernels.launch

    class OnCupy(emulator.Emulator):
        def launch(self, file: Any, kernel: Any, grid: Any, block: Any, arguments: Any, shared: int = 0) -> None:
            super().launch(file, kernel, grid, block, [self.host(a) for a in arguments], shared)

        def address(self, array: Any) -> int:
            return array.data.ptr if isinstance(array, FAKE.cupy.ndarray) else super().address(array)

        def host(self, a: Any) -> Any:
            if not isinstance(a, FAKE.cupy.ndarray):
                return a
            raw = (ctypes.c_char * a.nbytes).from_address(a.data.ptr) if a.nbytes else b""
            assert a.flags.c_contiguous, "an array with gaps was passed to a kernel"
            return np.frombuffer(raw, np.uint8).view(a.dtype).reshape(a.shape)

    runner = OnCupy(Path(cache))
    runner.xp = FAKE.cupy
    rng = np.random.default_rng(0)
    x, g, w = (rng.standard_normal(s).astype(np.float32) for s in ((6, 40), (6, 40), (40,)))
    image, c, labels = rng.standard_normal((2, 4, 9)).astype(np.float32), np.ones(4, np.float32), np.arange(6) * 7
    soft, logs = np.exp(x) / np.exp(x).sum(1, keepdims=True), x - 4
    short, places = x.astype(mt.bfloat16), np.asarray([5, 0, 2, 5])
    ops: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "softmax": ((x,), {"axis": 1, "masked": False}),
        "log_softmax": ((x,), {"axis": 1, "masked": False}),
        "softmax_backward": ((g, soft), {"axis": 1}),
        "log_softmax_backward": ((g, logs), {"axis": 1}),
        "layer_norm": ((x, w, w), {"naxes": 1, "eps": 1e-5}),
        "rms_norm": ((x, w), {"naxes": 1, "eps": 1e-5}),
        "group_norm": ((image, c, c), {"num_groups": 2, "axis": 1, "eps": 1e-5}),
        "batch_norm_inference": ((image, c, c, c, c), {"axis": 1, "eps": 1e-5}),
        "cross_entropy": ((x, labels), {"ignore_index": None, "label_smoothing": 0.0}),
        **{n: op_samples.calls(n)[2] for n in ("random_bits", "random_uniform", "random_bernoulli")},
    }
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        **{
            n: (functools.partial(lambda n, p, *xs: apply(mt.OPS[n], xs, p), n, p), args)
            for n, (args, p) in ops.items()
        },
        "rows": (lambda x, i: x[i], (x, places)),
        "columns": (lambda x, i: x[:, i], (short, places)),
        "rotary_embedding": (mt.nn.rotary_embedding, (x, x[:, :20], g[:, :20])),
        "running sums of rows": (lambda x: mt.cumulative_sum(x, axis=1), (x,)),
        "running products of columns": (lambda x: mt.cumulative_prod(x, axis=0), (x,)),
        "running sums of integers": (lambda i: mt.cumulative_sum(i), (places.astype(np.int8),)),
        "to float8": (lambda x: x.astype(mt.float8_e4m3fn), (x,)),
        "gelu": (mt.nn.gelu, (x,)),
        "swiglu": (mt.nn.swiglu, (short, short)),
        "a chain": (mt.compile(lambda x, w: mt.tanh(x * w + 1.0) * 2.0 - w), (x, w)),
        "a chain and its sum": (mt.compile(lambda x, w: mt.mean(mt.square(x - w), axis=1)), (np.tile(x, (12, 1)), w)),
    }
    out = {}
    with launch.running_on(runner):
        runner.noted = set()
        with mt.use_device("cuda:0"):
            for fn, args in calls.values():
                outcome(fn, placed(args, "cuda:0"))
        emulator.compile_kernels(runner.cache, runner.noted)  # together; else each with all that are like it
        runner.noted = None
        for name, (fn, args) in calls.items():
            want = arrays_of(fn(*placed(args, "cpu")))
            with mt.use_device("cuda:0"):
                runner.launched.clear()
                got = outcome(fn, placed(args, "cuda:0"))
            tolerance = 3e-2 if want[0].dtype == mt.bfloat16 else 1e-4
            near = not isinstance(got, Exception) and all(
                a.dtype == b.dtype and np.allclose(*(h.numpy().astype(np.float64) for h in (a, b)), tolerance, 1e-5)
                for a, b in zip(got, want, strict=True)
            )
            out[name] = (
                "no kernel of ours"
                if not runner.launched
                else ""
                if near
                else _said(got)
                if isinstance(got, Exception)
                else f"{[a.tolist() for a in got]} for {[a.tolist() for a in want]}"[:600]
            )
    return out


if __name__ == "__main__":
    out = sys.stdout
    sys.stdout = sys.stderr
    gc.freeze()  # modules are no garbage
    sweep = functools.partial(globals()[sys.argv[1]], *sys.argv[2:])
    if FAKE.kernels is not None:
        FAKE.kernels.compile(_asked_by(sweep))
    json.dump(sweep(), out)
