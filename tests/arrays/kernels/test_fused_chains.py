"""Kernels that are generated for the elementwise chains of a compiled program: their sources compile for every
architecture, and run on the CPU under the emulation they give the numbers of NumPy's unfused run."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.chains import chains, cuda_codegen, large
from meshtape.arrays.core.dispatch import apply
from meshtape.arrays.core.op import Op
from meshtape.arrays.core.program import Program
from meshtape.arrays.kernels import launch
from meshtape.arrays.nn import activations
from meshtape.autodiff.compiler import cuda_fusion
from meshtape.autodiff.compiler.executable import local_executable
from meshtape.autodiff.compiler.fusion import FusedRun
from meshtape.autodiff.tape import backward
from meshtape.autodiff.tape.record import plan_for

pytestmark = pytest.mark.usefixtures("compiled_together")
RNG = np.random.default_rng(5)
FLOATS = ["float32", "float64", "float16", "bfloat16"]
INTS = ["int8", "uint16", "int32", "uint64"]
MORE_INTS = ["uint8", "int16", "uint32", "int64"]


def group_of(program: Program) -> FusedRun:
    """The whole program as one chain, as the executor would make it."""
    assert all(cuda_codegen.expressible(e, program) for e in program.entries), program
    made = {v for e in program.entries for v in e.outputs}
    inputs = dict.fromkeys(v for e in program.entries for v in e.inputs if isinstance(v, int) and v not in made)
    outputs = tuple(dict.fromkeys(v for v in program.outputs if v in made))
    return FusedRun(program.entries, tuple(inputs), outputs, program.avals[outputs[0]].shape)


def check(fn: Callable[..., Any], hosts: list[np.ndarray], place: Any, *, rtol: float = 0.0) -> None:
    """The fused kernel against the same calls made one by one by NumPy."""
    arrays = [mt.asarray(h) for h in hosts]
    program = mt.compile(fn).program(*arrays)
    group = group_of(program)
    of = dict(zip(program.inputs, hosts, strict=True)) | dict(program.constants)
    placed = [of[v] if not of[v].flags.c_contiguous else place(of[v]) for v in group.inputs]
    got = dict(zip(group.outputs, cuda_fusion.executable(group, program)(*placed), strict=True))
    with np.errstate(all="ignore"):
        want = fn(*arrays)
    want = want if isinstance(want, tuple) else (want,)
    for v, w in zip(program.outputs, want, strict=True):
        g, w = np.asarray(got[v]), w.numpy()
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        wide = np.float64 if mt.isdtype(g.dtype, "real floating") else g.dtype
        np.testing.assert_allclose(g.astype(wide), w.astype(wide), rtol=rtol, atol=rtol)


def same(got: np.ndarray, want: np.ndarray) -> None:
    """To the bit, by a function that says nothing while kernels are only noted."""
    np.testing.assert_array_equal(*(np.frombuffer(a.tobytes(), np.uint8) for a in (got, want)))


def values(dtype: str, shape: Any) -> np.ndarray:
    d = mt.arrays.core.dtypes.parse(dtype)
    if d.kind in "iu":
        limits = np.iinfo(d)
        x = RNG.integers(0 if d.kind == "u" else -100, 100, shape)
        x = x.astype(d)
        x.reshape(-1)[:2] = [limits.max, limits.min]
        return x
    x = RNG.standard_normal(shape) * 3
    x.reshape(-1)[:4] = [np.nan, np.inf, -np.inf, -0.0]
    return x.astype(d)


def arithmetic(x: Any, y: Any) -> Any:
    a = x * y + 1.5
    b = mt.maximum(a - x, -y) * 0.1
    return mt.where(b > 0, b, a), mt.square(b) - x


@pytest.mark.parametrize("dtype", FLOATS)
def test_arithmetic_is_numpys_to_the_bit(dtype: str, place: Any) -> None:
    for n in (1, 5, 1024, 3001):
        check(arithmetic, [values(dtype, max(n, 4))[:n], values(dtype, max(n, 4))[-n:]], place)


@pytest.mark.parametrize("dtype", [*INTS, *(pytest.param(d, marks=pytest.mark.slow) for d in MORE_INTS)])
def test_integers_wrap_as_numpys(dtype: str, place: Any) -> None:
    def f(x: Any, y: Any) -> Any:
        a = x * y + x
        return a - 3, mt.minimum(a, y), (x & y) | (a ^ 5), x > y, mt.square(x) + mt.abs(y)

    check(f, [values(dtype, 777), values(dtype, 777)], place)


def test_mixed_dtypes(place: Any) -> None:
    def f(i: Any, h: Any, s: Any, b: Any) -> Any:
        a = h * s  # float32
        c = mt.where(b, i, 7) * a  # float64
        d = (i > 2) & mt.logical_not(b) | mt.isnan(h)
        return c, d, mt.astype(d, mt.int8) + i, h + mt.astype(i, mt.float16), mt.astype(s, mt.bfloat16) * 2.0

    check(
        f,
        [
            RNG.integers(-5, 5, 100).astype(np.int32),
            values("float16", 100),
            values("float32", 100),
            RNG.random(100) > 0.5,
        ],
        place,
    )


UNARY = {
    "exp": (-3, 3), "expm1": (-3, 3), "log": (0.1, 9), "log1p": (0, 9), "log2": (0.1, 9), "log10": (0.1, 9), "sqrt": (0, 9),
    "sin": (-3, 3), "cos": (-3, 3), "tan": (-1, 1), "asin": (-1, 1), "acos": (-1, 1), "atan": (-9, 9), "sinh": (-3, 3),
    "cosh": (-3, 3), "tanh": (-3, 3), "asinh": (-9, 9), "acosh": (1, 9), "atanh": (-0.9, 0.9), "erf": (-3, 3),
    "reciprocal": (0.5, 9), "floor": (-9, 9), "ceil": (-9, 9), "trunc": (-9, 9), "round": (-9, 9), "sign": (-1, 1),
    "exp2": (-3, 3), "abs": (-9, 9), "negative": (-9, 9), "positive": (-9, 9), "square": (-9, 9),
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
def test_functions(dtype: str, place: Any) -> None:
    """All of one variable in one kernel each; the mathematical libraries differ in the last places."""
    rtol = {"float32": 5e-6, "float64": 1e-13, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    d = mt.arrays.core.dtypes.parse(dtype)
    hosts = [np.linspace(lo, hi, 64).astype(np.float32 if d.itemsize < 8 else d).astype(d) for lo, hi in UNARY.values()]

    def f(*xs: Any) -> Any:
        return tuple(getattr(mt, name)(x) for name, x in zip(UNARY, xs, strict=True))

    check(f, hosts, place, rtol=rtol)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_functions_of_two_variables_and_odd_values(dtype: str, place: Any) -> None:
    x, y = values(dtype, 200), RNG.permutation(values(dtype, 200))

    def odd(a: Any, b: Any) -> Any:
        return (
            mt.maximum(a, b), mt.fmax(a, b), mt.fmin(a, b), mt.copysign(a, b), mt.isinf(a), mt.isfinite(b), mt.sign(a),
            mt.nn.relu(a), a == b, a != b, a <= b, a >= 0, mt.logical_xor(a, b), mt.round(a), mt.stop_gradient(a) / b,
            a // b, (a * 8.0) // b, a // 0.5, mt.remainder(a, b), mt.remainder(a * 8.0, b), mt.fmod(a, b),
        )  # fmt: skip

    check(odd, [x, y], place)
    rtol = 5e-6 if dtype == "float32" else 1e-13
    check(
        lambda a, b: (mt.hypot(a, b), mt.atan2(a, b), mt.logaddexp(a, b), mt.nn.sigmoid(a), mt.pow(mt.abs(a), 1.5)),
        [x, y], place, rtol=rtol,
    )  # fmt: skip


SHAPES = [((3, 4, 5), (5,)), ((3, 4, 5), (4, 1)), ((3, 4, 5), ()), ((3, 4, 5), (3, 1, 5)), ((7,), (1,)), ((), ())]


@pytest.mark.parametrize(("shape", "other"), SHAPES)
def test_broadcasting(shape: tuple[int, ...], other: tuple[int, ...], place: Any) -> None:
    check(lambda x, y: (x * y + y, x - 1.0), [RNG.standard_normal(shape), RNG.standard_normal(other)], place)


@pytest.mark.parametrize(
    "view", [lambda x: x.T, lambda x: x[::2], lambda x: x[:, ::-1], lambda x: np.broadcast_to(x[0], x.shape)]
)
def test_operands_with_gaps_are_read_where_they_are(view: Any, place: Any) -> None:
    x = view(RNG.standard_normal((6, 6)))
    y = RNG.standard_normal(x.shape)
    check(lambda a, b: (a * b + 1.0, a > b), [x, y], place)


def test_no_elements_start_no_kernel(place: Any, emulator: Any) -> None:
    check(lambda x: x * 2.0 + 1.0, [np.zeros((3, 0))], place)
    assert not emulator.launched


NUMBERS = (0.1, 1e300, float("nan"), -float("inf"), 2, -0.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # 1e300 becomes infinite
def test_numbers_become_the_dtype_that_they_meet(place: Any) -> None:
    for dtype in FLOATS:
        check(lambda x: tuple(mt.where(x > n, x * n, n) for n in NUMBERS), [values(dtype, 33)], place)
    for dtype, number in (("int64", -(2**63)), ("uint64", 2**64 - 1), ("int8", -128), ("uint32", 2**32 - 1)):
        check(lambda x, n=number: (mt.maximum(x, n) + 0, x == n), [values(dtype, 33)], place)


def test_one_source_serves_all_calls_with_one_layout(place: Any, emulator: Any) -> None:
    x = RNG.standard_normal(64)
    program = mt.compile(lambda a: a * 2.0 + 1.0).program(mt.asarray(x))
    run = cuda_fusion.executable(group_of(program), program)
    before = len(launch.GENERATED)
    for _ in range(3):
        np.testing.assert_array_equal(run(place(x))[0], x * 2.0 + 1.0)
    assert len(launch.GENERATED) <= before + 1
    assert len({file for file, *_ in emulator.launched}) == 1
    assert len(emulator.launched) == 3


def test_vectors_are_read_only_where_addresses_allow(place: Any, emulator: Any) -> None:
    x = RNG.standard_normal(64).astype(np.float32)
    program = mt.compile(lambda a: a * 2.0 + 1.0).program(mt.asarray(x))
    run = cuda_fusion.executable(group_of(program), program)
    for array in (place(x), place(np.concatenate([x, x[:1]]))[1:]):
        out = run(array)[0]
        np.testing.assert_array_equal(out, array * np.float32(2) + np.float32(1))
        aligned = all(emulator.address(a) % 16 == 0 for a in (array, out))
        assert emulator.launched[-1][1] == ("fused<true>" if aligned else "fused<false>")


STEPS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: a * b,
    mt.maximum,
    lambda a, b: mt.where(a > b, a, b * 0.5),
    lambda a, b: mt.abs(a),
    lambda a, b: mt.where(mt.isfinite(a), a, 0),
    lambda a, b: mt.square(mt.minimum(mt.maximum(a, -4), 4)),
]


def random_chain(seed: int) -> Callable[..., Any]:
    """A chain of ops drawn at random; the same seed gives the same one."""

    def f(x: Any, y: Any, z: Any) -> Any:
        rng = np.random.default_rng(seed)
        pool = [x, x + y, x - z]  # of one shape, as a chain is
        for _ in range(12):
            a, b = (pool[i] for i in rng.integers(0, len(pool), 2))
            pool.append(STEPS[rng.integers(0, len(STEPS))](a, b))
        return tuple(pool[-3:])

    return f


@pytest.mark.parametrize("seed", range(6))
def test_random_chains(seed: int, place: Any) -> None:
    dtypes = ["float32", "float16", "int16"] if seed % 2 else ["float64", "bfloat16", "int32"]
    hosts = [values(d, s) for d, s in zip(dtypes, [(8, 16), (16,), (8, 1)], strict=True)]
    hosts = [
        np.nan_to_num(h.astype(np.float64), posinf=9, neginf=-9).astype(h.dtype) if h.dtype.kind not in "iu" else h
        for h in hosts
    ]
    check(random_chain(seed), hosts, place, rtol=1e-12 if seed % 2 == 0 else 1e-6)


# ----- without running ------------------------------------------------------------------------------------------------


def test_what_no_kernel_can_say_stays_alone() -> None:
    def expressible(fn: Any, *arrays: mt.Array) -> bool:
        program = mt.compile(fn).program(*arrays)
        return all(cuda_codegen.expressible(e, program) for e in program.entries)

    f, i, u, c = mt.ones(3), mt.ones(3, dtype=mt.int64), mt.ones(3, dtype=mt.uint64), mt.ones(3, dtype=mt.complex64)
    assert expressible(lambda a: a * 2.0 + 1.0, f)
    assert not expressible(lambda a: a * 2.0, c)
    assert not expressible(lambda a: a * 1j, f)
    assert not expressible(lambda a: a + 1, mt.ones(3, dtype=mt.float8_e5m2))
    assert not expressible(lambda a, b: a < b, i, u)  # exact in NumPy, although no dtype holds both
    assert not expressible(lambda a: a < 2**70, i)
    assert not expressible(lambda a: mt.astype(a, mt.int8), f)
    assert expressible(lambda a: a // 2, f)
    assert not expressible(lambda a: a // 2, i)  # by zero it is NumPy's own


@pytest.mark.parametrize("architecture", [75, 80, 90, 100])
def test_generated_sources_compile_for_every_architecture(architecture: int, machine_code: Callable[..., Any]) -> None:
    at = (75, 80, 90, 100).index(architecture)
    for k, dtype in enumerate([*FLOATS, "int8", "uint32", "int64", "uint64"]):
        if at and (k + at) % 3:
            continue  # the oldest takes all dtypes, each of the others a third of them
        x = mt.asarray(values(dtype, (4, 8)))
        if dtype in FLOATS:
            program = mt.compile(
                lambda x, y: (*arithmetic(x, y), *(getattr(mt, n)(x) for n in UNARY), mt.nn.sigmoid(y), mt.atan2(x, y),
                              mt.hypot(x, y), mt.logaddexp(x, y), mt.fmax(x, y), mt.isinf(x), mt.copysign(x, y), x**y)
            ).program(x, x)  # fmt: skip
        else:
            program = mt.compile(lambda x, y: (x * y + x, x > y, (x & y) ^ 3, mt.maximum(x, y), mt.sign(x))).program(
                x, x
            )
        group = group_of(program)
        second = ("full", "one", "strided")[(k + architecture) % 3]
        layouts = ["full", second, *["one"] * (len(group.inputs) - 2)]  # the others are numbers
        text = cuda_fusion.source(group, program, layouts)
        file = f"test_{zlib.crc32(text.encode())}.cu"
        launch.GENERATED[file] = text
        vectors = "strided" not in layouts
        machine_code(file, [launch.named("fused", vectors)], architecture, binary=not at)


def test_the_executor_makes_kernels_of_chains(place: Any, emulator: Any) -> None:
    def f(x: Any, y: Any) -> Any:
        a = x * 2.0 + 1.0
        b = mt.maximum(a, x)
        return b - 1.0, y * y + y

    x, y = RNG.standard_normal((4, 8)), RNG.standard_normal(8)
    program = mt.compile(f).program(mt.asarray(x), mt.asarray(y))
    got = local_executable(program, emulator.xp)([place(x), place(y)])
    for g, w in zip(got, f(mt.asarray(x), mt.asarray(y)), strict=True):
        np.testing.assert_array_equal(g, w.numpy())
    assert len(emulator.launched) == 2


def test_an_optimizer_is_one_kernel_for_leaves_of_many_shapes(place: Any, emulator: Any, monkeypatch: Any) -> None:
    """Leaves of one number, of none, of odd sizes and in another order; and no more of them in a launch than fit."""
    opt = mt.optim.adamw(0.1)
    shapes = [(3,), (4, 5), (), (0, 2), (1,), (300,), (2, 3, 4)]
    leaves = [RNG.standard_normal(s).astype(np.float32) for s in shapes]
    leaves[1] = np.asfortranarray(leaves[1])
    params = [mt.asarray(x) for x in leaves]
    slots = opt.update(params, params, opt.init(params))[1]
    want = mt.tree.flatten(opt.update(params, params, slots))[0]
    program = mt.compile(opt.update).program(params, params, slots)
    hosts = [np.asarray(x) for x in mt.tree.flatten((params, params, slots))[0]]
    for batch, launches in ((1 << 24, 4), (100, 6)):
        emulator.launched.clear()
        monkeypatch.setattr(cuda_fusion, "BATCH", batch)
        got = local_executable(program, emulator.xp)([place(x) if x.flags.c_contiguous else x for x in hosts])
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w.numpy(), rtol=1e-6)
        assert len(emulator.launched) == launches


def test_a_norm_of_all_leaves_is_one_kernel_for_their_squares(place: Any, emulator: Any, monkeypatch: Any) -> None:
    """Of each dtype; also of leaves that take several blocks, odd sizes, one number and none."""
    shapes = [(3,), (4, 5), (), (0, 2), (5001,), (2, 3, 4)]
    leaves = [RNG.standard_normal(s).astype(np.float32) for s in shapes]
    leaves[1] = np.asfortranarray(leaves[1])
    hosts = [*leaves, *(values("bfloat16", n)[4:] for n in (40, 2051)), values("float64", 99)[4:]]
    grads = [mt.asarray(x) for x in hosts]
    want = mt.optim.global_norm(grads)
    program = mt.compile(mt.optim.global_norm).program(grads)
    for batch, sums in ((1 << 24, 3), (100, 6)):
        emulator.launched.clear()
        monkeypatch.setattr(cuda_fusion, "BATCH", batch)
        (got,) = local_executable(program, emulator.xp)([place(x) if x.flags.c_contiguous else x for x in hosts])
        np.testing.assert_allclose(got, float(want), rtol=1e-6)
        texts = [launch.GENERATED[file] for file, *_ in emulator.launched]
        assert len([t for t in texts if "row_sum" in t]) == sums


def test_runs_that_need_one_another_stay_apart(place: Any, emulator: Any) -> None:
    def f(x: Any, y: Any) -> Any:
        a, b = x * 2.0 + 1.0, y * 2.0 + 1.0
        c = mt.sum(a) * 2.0 + 1.0
        return b * c, a.mT * 2.0 + 1.0, mt.cumulative_sum(b)

    x, y = RNG.standard_normal((4, 8)), RNG.standard_normal(8)
    program = mt.compile(f).program(mt.asarray(x), mt.asarray(y))
    got = local_executable(program, emulator.xp)([place(x), place(y)])
    for g, w in zip(got, f(mt.asarray(x), mt.asarray(y)), strict=True):
        np.testing.assert_allclose(g, w.numpy(), rtol=1e-15)


@pytest.mark.parametrize("dtype", FLOATS)
def test_activations_are_one_launch(dtype: str, place: Any, emulator: Any) -> None:
    """Also of infinities and NaN, of a number, and of operands that repeat; those of complex numbers stay composed."""
    x, g = values(dtype, (3, 40)), values(dtype, (3, 40))
    rows = {"gelu": [x], "gelu_backward": [g, x], "sigmoid": [x], "silu": [x], "swiglu": [x, g[:1]], "erf": [x]}
    for name, hosts in (rows | {"swiglu_backward": [1.0, x, g]}).items():
        op = mt.arrays.OPS[name]
        emulator.launched.clear()
        got = op.overrides["cupy"](*[h if isinstance(h, float) else place(h) for h in hosts])
        assert len(emulator.launched) == 1
        with np.errstate(all="ignore"):
            want = op.impl(np, *[h if isinstance(h, float) else h.astype(np.float64) for h in hosts])
        tol = {"float32": 2e-6, "float64": 1e-13, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), tol, tol, err_msg=name)


# ----- derivatives and functions of several ops -----------------------------------------------------------------------

CUPY = SimpleNamespace(__name__="cupy")  # it has no functions: what is not one launch raises
PULLED = [
    "log1p",
    "log2",
    "log10",
    "sin",
    "cos",
    "tan",
    "asin",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "asinh",
    "erf",
    "sigmoid",
    "hypot",
    "logaddexp",
    "atan2",
    "pow",
    "divide",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "fmod",
    "remainder",
    "copysign",
    "where",
    "swiglu",
    "relu",
    "sqrt",
    "cbrt",
    "exp2",
    "multiply",
    "expm1",
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rules_of_an_elementwise_op_are_one_launch(dtype: str, place: Any, emulator: Any) -> None:
    rtol = 2e-5 if dtype == "float32" else 1e-12
    g, x, y = (RNG.uniform(0.1, 0.9, s).astype(dtype) for s in ((4, 6), (4, 6), (6,)))
    y[:2] = x[1, :2]  # ties
    for name in PULLED:
        op = mt.arrays.OPS[name]
        arrays = [mt.asarray(h) for h in ([x > 0.5, x, y] if name == "where" else [x, y][: len(op.operands)])]
        with mt.Tape() as tape:
            tape.watch([a for a in arrays if a.dtype.kind == "f"])
            apply(op, tuple(arrays))
        plan, _, _, kept, *_ = tape._records[-1]
        placed = [place(k) if isinstance(k, np.ndarray) else k for k in kept]
        emulator.launched.clear()
        if plan.on_gpu.together is not None:
            found = plan.on_gpu.together[0](CUPY, place(g), *placed)
        else:
            found = {i: rule(CUPY, place(g), *find(placed)) for i, rule, find in plan.on_gpu.pulls}
        assert len(emulator.launched) == 1, name
        for i, rule, find in plan.pulls:
            np.testing.assert_allclose(found[i], rule(np, g, *find(kept)), rtol, rtol, err_msg=name)


def test_rules_that_have_no_kernel_run_one_by_one() -> None:
    """On a CPU, and of what is traced."""
    x, y = mt.asarray(RNG.uniform(0.1, 0.9, (4, 6))), mt.asarray(RNG.uniform(0.1, 0.9, 6))
    with mt.Tape() as tape:
        tape.watch([x, y])
        mt.hypot(x, y)
    plan, _, _, kept, *_ = tape._records[-1]
    g = np.ones((4, 6))
    for i, rule, find in plan.pulls:
        np.testing.assert_array_equal(plan.on_gpu.together[0](np, g, *kept)[i], rule(np, g, *find(kept)))
        traced = plan.on_gpu.together[0](mt.arrays, mt.asarray(g), *map(mt.asarray, kept))[i]
        np.testing.assert_array_equal(np.asarray(traced), rule(np, g, *find(kept)))


FUNCTIONS = {
    **dict.fromkeys(
        ["log_sigmoid", "selu", "relu6", "hard_tanh", "hard_sigmoid", "hard_silu", "mish", "softsign", "squared_relu"],
        (),
    ),
    **{"softplus": (2.0,), "elu": (0.5,), "celu": (2.0,), "leaky_relu": (0.1,), "_gelu_by_tanh": ()},
}


@pytest.mark.parametrize("dtype", FLOATS)
def test_functions_of_several_ops_are_one_launch_each_way(dtype: str, place: Any, emulator: Any) -> None:
    """Of infinities, NaN and the points where they bend, too."""
    assert FUNCTIONS.keys() == activations._FUNCTIONS.keys()
    x = values(dtype, (3, 20))
    x.reshape(-1)[4:10] = [0.0, 6.0, -3.0, 3.0, 1.0, -1.0]
    g, op = RNG.standard_normal((3, 20)).astype(np.float32 if x.dtype.itemsize < 8 else x.dtype), activations.POINTWISE
    rtol = {"float32": 5e-6, "float64": 1e-13, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    for name, numbers in FUNCTIONS.items():
        params = {"function": name, "numbers": numbers}
        emulator.launched.clear()
        got = activations._chain(name)(place(x), *numbers)
        plan, short = plan_for(op, 0b11), x.dtype.itemsize == 2
        to = (x.dtype if short else None,)
        (slope,), (rounded,) = (
            backward._in_one_launch(plan, repr(params), tuple(params.items()), short, to, mt.Tape)(
                place(given), place(x)
            )
            for given, to in ((g, (None,)), (g.astype(x.dtype), to))
        )
        assert len(emulator.launched) == 3, name
        with np.errstate(all="ignore"):
            value = apply(op, (mt.asarray(x),), params)
            _, pull_wide = mt.vjp(lambda a, p=params: apply(op, (a,), p), mt.asarray(x.astype(g.dtype)))
            want = pull_wide(mt.asarray(g))[0]
        assert (got.dtype, slope.dtype, rounded.dtype) == (x.dtype, g.dtype, x.dtype)
        np.testing.assert_allclose(got.astype(float), np.asarray(value).astype(float), rtol, rtol, err_msg=name)
        np.testing.assert_allclose(
            slope, np.asarray(want), *((2e-5, 1e-5) if g.itemsize == 4 else (1e-11, 1e-12)), err_msg=name
        )
        np.testing.assert_allclose(rounded.astype(float), np.asarray(want), rtol * 2, rtol, err_msg=name)


def test_what_is_not_one_launch_is_told(place: Any, emulator: Any) -> None:
    x = place(np.ones((2, 3), np.float32))
    one = chains.as_one_launch
    row = place(np.ones(3, np.float32))
    assert one(lambda a: mt.sum(a))(x) is NotImplemented
    assert one(lambda a: a + float(mt.max(mt.asarray([np.asarray(a).item()]))))(x) is NotImplemented  # reads a value
    assert one(lambda a, b: (a + b, b * 2.0))(x, row) is NotImplemented  # two shapes
    assert one(lambda a: a)(x) is NotImplemented
    assert one(lambda a: a + 1.0, least=2)(x) is NotImplemented
    assert one(lambda a: a + 1.0)(np.float32(1)) is NotImplemented
    assert one(lambda a: a + 1.0)(place(np.ones(3, np.complex64))) is NotImplemented
    assert one(lambda a: 1 / 0)(x) is NotImplemented
    assert not emulator.launched
    total, none = one(lambda a, b: (a + b * 2.0, None))(x, row)
    np.testing.assert_array_equal(total, np.full((2, 3), 3.0))
    assert none is None
    for number in (1, 1.0, True, -0.0, 0.0):  # which are equal, some of them
        got = one(lambda a, n: mt.copysign(a, n) + n)(x, number)
        np.testing.assert_array_equal(got, np.copysign(1.0, number) + np.full((2, 3), float(number)))


def test_a_kernel_takes_no_more_parameters_than_cuda_allows(place: Any, emulator: Any) -> None:
    hosts = [RNG.standard_normal((4, 3)).T for _ in range(200)]

    def f(*xs: Any) -> Any:
        total = xs[0] * 1.0
        for x in xs[1:]:
            total = total + x
        return total, total * 2.0

    program = mt.compile(f).program(*map(mt.asarray, hosts))
    parts = cuda_fusion.chains(program)
    assert len(parts) > 1
    assert all(8 * (2 + len(p.outputs) + 3 * len(p.inputs)) <= 4096 for p in parts)
    got = local_executable(program, emulator.xp)(hosts)
    for g, w in zip(got, f(*map(mt.asarray, hosts)), strict=True):
        np.testing.assert_array_equal(g, w.numpy())
    assert len(emulator.launched) == len(parts)


def test_copies_of_many_arrays_are_few_launches(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, in every dtype and of every size; one launch for each size of the words that memory consists of."""
    hosts = [values(d, max(n, 4))[:n] for d in (*FLOATS, "int8", "uint64") for n in (0, 1, 37)]
    hosts += [np.ones((3, 5), np.complex64) * 2j, RNG.random(9) > 0.5]
    gaps = [RNG.standard_normal((4, 6)).T, RNG.standard_normal(40)[1::3]]  # which are copied one by one
    sources = [*map(place, hosts), *gaps]
    runner, launches = launch.runner(), []
    start = runner.launch
    monkeypatch.setattr(runner, "launch", lambda *a, **more: launches.append(a[2][1]) or start(*a, **more))

    def copied() -> list[int]:
        """The arrays of each launch."""
        launches.clear()
        targets = [place(np.zeros(h.shape, h.dtype)) for h in (*hosts, *gaps)]
        chains.copy_all(targets, sources)
        for target, h in zip(targets, (*hosts, *gaps), strict=True):
            same(target, h)
        return [*launches]

    full = len([h for h in hosts if h.size])
    assert copied() == [full]
    monkeypatch.setattr(chains, "FEW_BYTES", 100)
    assert len(copied()) in (1, 2, 3, 4)
    assert sum(launches) == full
    monkeypatch.setattr(chains, "MOST_COPIES", 3)
    assert max(copied()) == 3
    assert sum(launches) == full


# ----- single ops of large arrays -------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[str, tuple[int, ...]], np.ndarray]] = {
    "full": values,
    "turned": lambda d, s: values(d, (s[2], s[0], s[1])).transpose(1, 2, 0),
    "turned further": lambda d, s: values(d, s[::-1]).transpose(2, 1, 0),
    "row": lambda d, s: values(d, s[2:]),
    "matrix": lambda d, s: values(d, s[1:]),
    "held": lambda d, s: values(d, (s[0], s[1], 1)),
    "held in the middle": lambda d, s: values(d, (s[0], 1, s[2])),
    "cut": lambda d, s: values(d, (s[0], s[1], s[2] + 3))[..., 1:-2],
    "each second": lambda d, s: values(d, (s[0], s[1], 2 * s[2]))[..., ::2],
    "backwards": lambda d, s: values(d, s)[:, ::-1, ::-1],
    "one": lambda d, s: np.asarray(values(d, 4)[0]),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", [(3, 4, 16), (2, 5, 7)])
@pytest.mark.parametrize("first", LAYOUTS)
def test_a_large_op_is_one_kernel_wherever_its_operands_lie(
    first: str, shape: tuple[int, ...], dtype: str, place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are NumPy's to the bit; a result lies in memory as the first operand of its shape."""
    monkeypatch.setattr(Op, "large", 1)
    large._single.cache_clear()
    x = LAYOUTS[first](dtype, shape)
    for second in ("full", "turned", "row", "held", "cut", "one"):
        y = LAYOUTS[second](dtype, shape)
        x, y = (place(a) if a.flags.c_contiguous else a for a in (x, y))
        for op in (mt.OPS["add"], mt.OPS["greater"]):
            with np.errstate(all="ignore"):
                want = op.numpy(x, y)
            if want.size <= 1:
                continue
            got = large.of_large(op, (x, y), {})
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))
    whole = next((a for a in (x, y) if a.shape == shape), None)
    if first in ("turned", "turned further"):
        assert (
            np.argsort([-s for s in large.of_large(mt.OPS["add"], (x, x), {}).strides]).tolist()
            == np.argsort([-s for s in whole.strides]).tolist()
        )
    large._single.cache_clear()


@pytest.mark.parametrize(("source", "target"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("int8", "float16")])
def test_a_large_cast_is_one_kernel(source: str, target: str, place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Op, "large", 1)
    large._single.cache_clear()
    x, d = place(values(source, (6, 40))), mt.arrays.core.dtypes.parse(target)
    got = large.of_large(mt.OPS["astype"], (x,), {"dtype": d})
    want = mt.astype(mt.asarray(x), d).numpy()
    assert got.dtype == d
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))
    large._single.cache_clear()


def test_calls_that_no_kernel_serves_are_told(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Op, "large", 1)
    add = mt.OPS["add"]
    assert large.of_large(add, (place(np.ones(8, np.complex64)),) * 2, {}) is NotImplemented
    assert large.of_large(add, (place(np.ones(8)), 1j), {}) is NotImplemented
    assert large.of_large(mt.OPS["astype"], (place(np.ones(8)),), {"dtype": np.dtype(np.float64)}) is NotImplemented
    monkeypatch.setattr(Op, "large", 1000)
    large._single.cache_clear()
    assert large.of_large(add, (place(np.ones(8)), place(np.ones(8))), {}) is NotImplemented
    assert large.of_large(add, (place(np.ones((80, 1))), place(np.ones((1, 80)))), {}).shape == (80, 80)
    large._single.cache_clear()


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("kind", ["turned", "turned further", "cut", "each second", "backwards"])
def test_a_large_copy_is_in_c_order(kind: str, dtype: str, place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Op, "large", 1)
    x = LAYOUTS[kind]("float32", (3, 4, 16))
    x = (x > 0 if dtype == "bool" else x).astype(mt.arrays.core.dtypes.parse(dtype), order="K")
    got = launch.contiguous(x)
    assert got.flags.c_contiguous
    assert got.tobytes() == x.tobytes()


GAPS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "columns": lambda a: a[:, :, 4:20],
    "columns at an odd place": lambda a: a[:, :, 3:19],
    "rows": lambda a: a[1:4, ::2, 2:18],
    "each second": lambda a: a[:3, :4, ::2],
    "backwards": lambda a: a[::-1, ::-1, 18:2:-1],
    "turned": lambda a: a[:, :, :6].transpose(2, 0, 1),
    "a row": lambda a: a[2, 3],
}


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("kind", GAPS)
def test_a_large_copy_into_a_part_of_an_array(
    kind: str, dtype: str, place: Any, emulator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lies between its elements stays."""
    monkeypatch.setattr(Op, "large", 1)
    d = mt.arrays.core.dtypes.parse(dtype)
    for turned in (False, True):
        out = place((RNG.standard_normal((5, 8, 32)) > 0).astype(d))
        want = out.copy()
        part = GAPS[kind](out)
        source = (RNG.standard_normal(part.shape[::-1] if turned else part.shape) > 0).astype(d)
        source = source.transpose() if turned else source
        GAPS[kind](want)[...] = source
        launch.write(part, ..., source)
        same(out, want)
        row = source[:1] if source.ndim > 1 else source
        GAPS[kind](want)[...] = row
        launch.write(part, ..., row)  # spread over it
        same(out, want)
    assert len(emulator.launched) == 4


def test_joined_and_written_arrays_are_copied_by_vectors(
    place: Any, emulator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Op, "large", 1)
    x, y = place(values("bfloat16", (6, 16))), place(values("bfloat16", (6, 24)))
    concat = mt.OPS["concat"].impl
    namespace = launch.runner().xp
    same(concat(_Other(namespace), x, y, axis=1), np.concatenate([x, y], axis=1))
    same(concat(_Other(namespace), x, y[:, :16], axis=0), np.concatenate([x, y[:, :16]]))
    assert len(emulator.launched) == 4


class _Other:
    """A namespace that is not NumPy itself."""

    def __init__(self, namespace: Any) -> None:
        self._namespace = namespace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._namespace, name)
