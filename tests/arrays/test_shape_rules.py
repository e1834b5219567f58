"""The shape rule of every op gives the shape and dtype of what the op computes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import meshtape.parallel  # noqa: F401  # it has ops of its own
from meshtape import arrays as mt
from meshtape.arrays.core.errors import ShapeError
from meshtape.arrays.core.op import OPS, Op, op_named
from meshtape.arrays.core.shape_dtype import ShapeDtype
from meshtape.arrays.indexing import indexing

Sample = tuple[tuple[Any, ...], dict[str, Any]]


def f(*shape: int, dtype: Any = np.float64) -> np.ndarray:
    """Numbers between 0.1 and 0.9: inside the domain of every function."""
    return np.linspace(0.1, 0.9, int(np.prod(shape))).reshape(shape).astype(dtype)


def i(*shape: int, dtype: Any = np.int64) -> np.ndarray:
    return (np.arange(int(np.prod(shape))) % 3 + 1).reshape(shape).astype(dtype)


def b(*shape: int) -> np.ndarray:
    return (np.arange(int(np.prod(shape))) % 2 == 0).reshape(shape)


BF16 = mt.bfloat16
FLOAT_UNARY = [
    "exp exp2 expm1 log log1p log2 log10 sin cos tan asin acos atan sinh cosh tanh asinh atanh",
    "negative positive abs sign reciprocal square sqrt floor ceil trunc round rint conj isnan isinf isfinite signbit",
    "relu erf sigmoid silu cbrt gelu alias barrier stop_gradient",
]
FLOAT_BINARY = [
    "divide floor_divide remainder pow hypot maximum minimum fmax fmin fmod logaddexp logaddexp2 heaviside atan2 copysign nextafter",
    "add subtract multiply equal not_equal less less_equal greater greater_equal logical_and logical_or logical_xor",
]


def broadcast_samples(*arrays: Any) -> list[Sample]:
    return [(arrays, {})]


def samples() -> dict[str, list[Sample]]:
    table: dict[str, list[Sample]] = {}
    for name in " ".join(FLOAT_UNARY).split():
        table[name] = [((f(2, 3),), {}), ((f(),), {}), ((f(0, 2, dtype=np.float32),), {}), ((f(3, dtype=BF16),), {})]
        if name not in ("signbit", "erf"):
            table[name].append(((f(2, dtype=np.float16),), {}))
    table["acosh"] = [((1 + f(2),), {})]
    for name in ("real", "imag"):
        table[name] = [((f(2).astype(complex),), {}), ((f(2, dtype=np.complex64),), {}), ((f(2),), {})]
    table["abs"].append(((f(2).astype(complex),), {}))
    for name in " ".join(FLOAT_BINARY).split():
        table[name] = [
            ((f(2, 3), f(3)), {}),
            ((f(2, 1), f(1, 3, dtype=np.float32)), {}),
            ((f(2), 2.0), {}),
            ((0.5, f(2, dtype=np.float32)), {}),
            ((f(0, 3), f(1, 3)), {}),
        ]
    for name in ("add", "subtract", "multiply", "maximum", "equal"):
        table[name] += [((i(2), i(2, dtype=np.int8)), {}), ((i(2), f(2)), {}), ((i(2, dtype=np.uint8), 3), {})]
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        table[name] = [((i(2, 3), i(3)), {}), ((i(2), 1), {}), ((b(2), b(2)), {})]
    for name in ("bitwise_left_shift", "bitwise_right_shift"):
        table[name] = [((i(2, 3), i(3)), {}), ((i(2, dtype=np.int8), 1), {})]
    table["ldexp"] = [((f(2, 3), i(3)), {}), ((f(2, dtype=np.float32), 2), {}), ((f(2, dtype=BF16), i(2)), {})]
    table["ldexp"] += [((i(2, dtype=np.int8), i(2)), {}), ((0.5, i(2)), {}), ((f(0, 3), i(1, 3)), {})]
    table["round_to"] = [
        ((f(2, 3), 2), {}),
        ((f(2, dtype=np.float32), -1), {}),
        ((f(2, dtype=BF16), 1), {}),
        ((i(2), -1), {}),
    ]
    table["gelu_backward"] = [((f(2, 3), f(3)), {}), ((f(2, dtype=np.float32), f(2, dtype=np.float32)), {})]
    table["gelu_backward"] += [((f(2, dtype=BF16), f(2, dtype=BF16)), {}), ((f(), f()), {}), ((f(0, 3), f(1, 3)), {})]
    table["bitwise_invert"] = [((i(2),), {}), ((b(2),), {})]
    table["logical_not"] = [((b(2),), {}), ((f(2),), {})]
    table["where"] = [((b(2, 1), f(3), f(2, 3)), {}), ((b(2), f(2, dtype=np.float32), 0.0), {}), ((b(2), 1.0, 2.0), {})]
    table["reshard"] = [((f(2, 3),), {"layout": None})]  # on one device it is the identity
    table["full_like"] = [((f(2, 3),), {"value": 2, "dtype": np.dtype(np.int32)})]
    table["astype"] = [((f(2, 3),), {"dtype": np.dtype(np.float32)}), ((i(0),), {"dtype": BF16})]

    for name in ("sum", "prod", "max", "min", "any", "all"):
        table[name] = [
            ((x,), {"axis": axis, "keepdims": keep})
            for x in (f(2, 3, 4), f(2, 3, 4, dtype=BF16), i(2, 3, 4, dtype=np.int8), b(2, 3, 4))
            for axis in ((0,), (1, 2), (0, 1, 2), ())
            for keep in (False, True)
        ] + [((f(0, 3),), {"axis": (1,), "keepdims": False})]
    table["mean"] = [
        ((x,), {"axis": axis, "keepdims": keep, "count": math.prod(x.shape[a] for a in axis)})
        for x in (f(2, 3, 4), f(2, 3, 4, dtype=np.float32), f(2, 3, 4, dtype=BF16), i(2, 3, 4, dtype=np.int8), f(0, 3))
        for axis in ((0,), (0, 1), ())
        for keep in (False, True)
    ]
    for name in ("argmax", "argmin"):
        table[name] = [((f(2, 3),), {"axis": a, "keepdims": k}) for a in (0, 1) for k in (False, True)]

    table["reshape"] = [((f(2, 3),), {"shape": (3, 2)}), ((f(),), {"shape": (1, 1)})]
    table["permute_dims"] = [((f(2, 3, 4),), {"axes": (2, 0, 1)})]
    table["broadcast_to"] = [((f(2, 1),), {"shape": (4, 2, 3)})]
    table["flip"] = [((f(2, 3),), {"axis": (0, 1)})]
    table["concat"] = [((f(2, 3), f(1, 3, dtype=np.float32), i(0, 3)), {"axis": 0}), ((f(2, 1), f(2, 3)), {"axis": 1})]
    table["matmul"] = [
        ((f(2, 3), f(3, 4)), {}),
        ((f(3), f(3)), {}),
        ((f(5, 2, 3), f(3)), {}),
        ((f(3), f(5, 3, 2, dtype=np.float32)), {}),
        ((f(1, 2, 3), f(5, 3, 4)), {}),
        ((i(2, 0), i(0, 3)), {}),
    ]

    template, _ = indexing.parse(mt.asarray(f(2, 3, 4)), (slice(None), [0, 2], None, [1, 1]))
    arrays = (np.array([0, 2]), np.array([1, 1]))
    basic, _ = indexing.parse(mt.asarray(f(2, 3, 4)), (1, slice(None, None, -2)))
    table["getitem"] = [((f(2, 3, 4), *arrays), {"template": template}), ((f(2, 3, 4),), {"template": basic})]
    for name in ("index_set", "index_add", "index_min", "index_max"):
        table[name] = [
            ((f(2, 3, 4), f(1, 2, 1), *arrays), {"template": template}),
            ((f(2, 3, 4), 2.0), {"template": basic}),
        ]
    table["scatter"] = [
        ((f(2, 2, 1), *arrays), {"template": template, "shape": (2, 3, 4)}),
        ((f(2, 4),), {"template": basic, "shape": (2, 3, 4)}),
    ]
    table["last_writes"] = table["getitem"]

    ADAM = {"b1": 0.9, "b2": 0.99}
    table["layer_norm"] = [
        ((f(2, 3, 4, dtype=d), f(4, dtype=d), f(4, dtype=d)), {"naxes": 1, "eps": 1e-5})
        for d in (np.float64, np.float32, BF16)
    ] + [((f(2, 3, dtype=np.float32), f(2, 3), f(2, 3)), {"naxes": 2, "eps": 1e-5})]
    table["layer_norm_backward"] = [
        ((f(2, 3, 4, dtype=d), f(2, 3, 4, dtype=d), f(4, dtype=d)), {"naxes": 1, "eps": 1e-5})
        for d in (np.float64, BF16)
    ]
    for name in ("layer_norm", "layer_norm_backward"):  # the same without a bias, forward, and its cotangent, backward
        drop = slice(None, 2) if name == "layer_norm" else slice(None)
        table[name.replace("layer", "rms")] = [(args[drop], params) for args, params in table[name]]
    table["lazy_adam"] = [
        ((f(2, 3, dtype=d), f(2, 3, dtype=d), f(2, 3, dtype=d), f(2, 3, dtype=d), d(0.1), d(0.3)), ADAM)
        for d in (np.float64, np.float32)
    ] + [((f(3), f(3), f(3), f(3), 0.1, 0.3), ADAM)]
    table |= channel_norm_samples()
    table |= softmax_samples()

    table |= along_axis_samples() | linalg_samples() | convolution_samples()

    key = np.array([1, 2], np.uint64)
    block = {"shape": (2, 3), "offset": (1, 0), "global_shape": (4, 3)}
    own: dict[str, list[dict[str, Any]]] = {
        "bits": [{"dtype": mt.uint64}, {"dtype": mt.uint32}],
        "uniform": [{"dtype": d, "low": 0.0, "high": 1.0} for d in (mt.float64, mt.float32, mt.float16, BF16)],
        "normal": [{"dtype": d, "mean": 0.0, "std": 1.0} for d in (mt.float64, mt.float32, BF16)],
        "truncated_normal": [{"dtype": mt.float32, "lower": -1.0, "upper": 1.0, "mean": 0.0, "std": 1.0}],
        "integers": [{"dtype": mt.int8, "low": -3, "span": 5}],
        "bernoulli": [{"dtype": mt.bool, "threshold": 2**31}],
        "exponential": [{"dtype": mt.float64, "scale": 1.0}],
        "gumbel": [{"dtype": mt.float32}],
        "split": [{"dtype": mt.uint64}],
    }
    for name, params in own.items():
        table[f"random_{name}"] = [((key,), {**block, **p}) for p in params]
    place = {"rate": 0.3, "offset": (1, 0), "global_shape": (4, 3)}
    for d in (np.float64, np.float32, BF16):
        table.setdefault("dropout", []).append(((f(2, 3, dtype=d), key), place))
        table.setdefault("dropout_add", []).append(((f(2, 3, dtype=d), f(2, 3, dtype=d), key), place))
    line = {"shape": (2,), "offset": (1,), "global_shape": (4,), "dtype": mt.int64}
    table["random_permutation"] = [((key,), line)]
    table["random_choice"] = [((key, f(5)), {**line, "replace": r}) for r in (True, False)]
    table["random_fold_in"] = [((key, 3), {"stream": 2}), ((key, np.array(3)), {"stream": 2})]
    return table


def channel_norm_samples() -> dict[str, list[Sample]]:
    """Images with the channels second and last, in several dtypes, and none."""
    table: dict[str, list[Sample]] = {}
    sizes = [((2, 4, 3), 1), ((2, 3, 4), 2), ((3, 4), 1), ((0, 4, 3), 1)]
    for d in (np.float64, np.float32, BF16):
        c = f(4, dtype=d)
        for shape, axis in sizes:
            x, one = f(*shape, dtype=d) ** 2, {"axis": axis, "eps": 1e-3}
            group = {"num_groups": 2, **one}
            for name, args, params in (
                ("group_norm", (x, c, c), group),
                ("group_norm_backward", (x, x, c), group),
                ("batch_norm_inference", (x, c, c, c, c), one),
                *((("batch_norm", (x, c, c), one), ("batch_norm_backward", (x, c, c, x, c), one)) if x.size else ()),
            ):
                table.setdefault(name, []).append((args, params))
    table["group_norm"].append(((f(2, 4, dtype=np.float32), f(4), f(4)), {"num_groups": 1, "axis": 1, "eps": 1e-5}))
    return table


def along_axis_samples() -> dict[str, list[Sample]]:
    """Sorting, running sums, Fourier transforms."""
    table: dict[str, list[Sample]] = {}
    order = [{"axis": a, "descending": d, "stable": s} for a in (0, 1) for d in (False, True) for s in (False, True)]
    table["sort"] = [((f(3, 4, dtype=d),), p) for d in (np.float64, BF16) for p in order] + [((i(0, 2),), order[0])]
    table["argsort"] = table["sort"]
    table["searchsorted"] = [((f(4), f(2, 3)), {"side": "left"}), ((f(4, dtype=np.float32), 0.5), {"side": "right"})]
    table["cumulative_sum"] = [
        ((x,), {"axis": a})
        for x in (f(2, 3), f(2, 3, dtype=BF16), i(2, 3, dtype=np.int8), i(2, 3, dtype=np.uint32), f(0, 2), b(2, 3))
        for a in (0, 1)
    ]
    table["cumulative_prod"] = table["cumulative_sum"]
    both = [{"norm": n, "inverse": v} for n in ("backward", "ortho", "forward") for v in (False, True)]
    table["fft"] = [
        ((f(2, 5, dtype=d),), {"axes": a, **p})
        for d in (np.float64, np.float32, np.complex64)
        for a in ((1,), (0, 1))
        for p in both
    ]
    table["rfft"] = [
        ((f(2, n, dtype=d),), {"axis": 1, "norm": "ortho"}) for n in (4, 5) for d in (np.float64, np.float32)
    ]
    table["irfft"] = [
        ((f(3, 2).astype(d),), {"n": n, "axis": 0, "norm": "backward"})
        for n in (4, 5)
        for d in (np.complex128, np.complex64)
    ]
    return table


def convolution_samples() -> dict[str, list[Sample]]:
    one = {"stride": (2,), "dilation": (1,), "groups": 1}
    two = {"stride": (1, 2), "dilation": (2, 1), "groups": 2}
    return {
        "conv": [
            ((f(2, 3, 6), f(4, 3, 3)), one),
            ((f(2, 4, 5, 6, dtype=np.float32), f(6, 2, 2, 3)), two),
            ((f(0, 3, 6, dtype=BF16), f(4, 3, 3, dtype=BF16)), one),
        ],
        "conv_image": [
            ((f(2, 4, 2), f(4, 3, 3)), {"image": (6,), **one}),
            ((f(2, 6, 3, 2), f(6, 2, 2, 3)), {"image": (5, 6), **two}),
        ],
        "conv_kernel": [
            ((f(2, 4, 2), f(2, 3, 6)), {"kernel": (3,), **one}),
            ((f(2, 6, 3, 2), f(2, 4, 5, 6, dtype=np.float32)), {"kernel": (2, 3), **two}),
        ],
    }


def linalg_samples() -> dict[str, list[Sample]]:
    table: dict[str, list[Sample]] = {}
    full, flat = f(2, 3, 3) + 2 * np.eye(3), f(2, 3)
    hermitian = full + full.swapaxes(-1, -2) + 4 * np.eye(3)
    for name in ("inv", "det", "slogdet", "eig", "eigvals", "adjugate"):
        table[name] = [((full.astype(d),), {}) for d in (np.float64, np.float32, np.complex64)] + [((f(0, 2, 2),), {})]
    for name in ("cholesky", "eigh", "eigvalsh"):
        table[name] = [((hermitian.astype(d),), {}) for d in (np.float64, np.float32, np.complex128)]
    table["solve"] = [((full, f(3, 2)), {}), ((full[0].astype(np.float32), f(2, 3, 1)), {}), ((full, full * 1j), {})]
    shapes = [flat, flat.T, full.astype(np.complex64), f(2, 4, 3, dtype=np.float32), f(2, 0)]
    table["svd"] = [((x,), {"full_matrices": k}) for x in shapes for k in (True, False)]
    table["svdvals"] = [((x,), {}) for x in shapes]
    table["qr"] = [((x,), {"mode": m}) for x in shapes for m in ("reduced", "complete")]
    table["pinv"] = [((x,), {"rtol": 1e-6}) for x in shapes]
    return table


def softmax_samples() -> dict[str, list[Any]]:
    table: dict[str, list[Any]] = {}
    shapes = [((2, 3, 4), 1), ((4,), 0), ((0, 3), 1), ((2, 0), 1)]
    dtypes = (np.float64, np.float32, np.float16, BF16)
    for name in ("softmax", "log_softmax"):
        table[name] = [
            ((f(*s, dtype=d),), {"axis": a, "masked": m}) for s, a in shapes for d in dtypes for m in (False, True)
        ]
        table[f"{name}_backward"] = [((f(*s, dtype=d), f(*s, dtype=d)), {"axis": a}) for s, a in shapes for d in dtypes]
    table["cross_entropy"] = [
        ((f(*n, 4, dtype=d), i(*n)), {"ignore_index": g, "label_smoothing": s})
        for n in ((2, 3), (), (0,))
        for d in dtypes
        for g, s in ((None, 0.0), (2, 0.25))
    ]
    table["cross_entropy_backward"] = [
        ((f(*labels.shape, dtype=float if x.dtype.itemsize == 8 else np.float32), x, labels), params)
        for (x, labels), params in table["cross_entropy"]
    ]
    rows = [
        (
            f(*n, 3, dtype=d),
            i(*n, 2),
            f(*n, 2, dtype=d),
            *(f(2, *w, dtype=d) for w in ((3, 4), (3, 4), (4, 3))),
            np.arange(2),
        )
        for n in ((2, 5), (0,), ())
        for d in dtypes
    ]
    table["experts"] = [(operands, {}) for operands in rows]
    table["experts_backward"] = [((operands[0], *operands), {}) for operands in rows]
    table["positions"] = [((f(2, 3),), {"axis": 1, "start": 5}), ((f(0, 3),), {"axis": 0, "start": 0})]
    return table


SAMPLES = samples()


def aval(x: Any) -> Any:
    return ShapeDtype(x.shape, x.dtype) if isinstance(x, np.ndarray) else x


@pytest.mark.parametrize("name", sorted(OPS))
def test_the_shape_rule_gives_the_shape_and_dtype_of_the_result(name):
    assert name in SAMPLES, f"op {name!r} has no sample: add one to SAMPLES, so that its shape rule is tested"
    op = OPS[name]
    for args, params in SAMPLES[name]:
        before = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
        out = op.numpy(*args, **params)
        outs = tuple(map(np.asarray, out)) if op.nout > 1 else (np.asarray(out),)
        assert tuple(map(aval, outs)) == op.avals(tuple(map(aval, args)), params), (args, params)
        for a, kept in zip(args, before, strict=True):
            np.testing.assert_array_equal(a, kept, err_msg=f"{name} changed its argument")


@pytest.mark.parametrize("name", sorted(OPS))
def test_read_only_arguments_will_do(name):
    for args, params in SAMPLES.get(name, []):
        frozen = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
        for a in frozen:
            if isinstance(a, np.ndarray):
                a.flags.writeable = False
        OPS[name].numpy(*frozen, **params)


@pytest.mark.parametrize("name", sorted(n for n, op in OPS.items() if op.decompose is not None))
def test_a_decomposition_computes_the_same(name):
    op = OPS[name]
    for args, params in SAMPLES[name]:
        out = op.numpy(*args, **params)
        outs = out if op.nout > 1 else (out,)
        parts = op.decompose(*(mt.asarray(a) for a in args), **params)
        parts = parts if op.nout > 1 else (parts,)
        for got, expected in zip(parts, outs, strict=True):
            assert got.shape == expected.shape
            assert got.dtype == expected.dtype
            wide = np.complex128 if expected.dtype.kind == "c" else np.float64
            np.testing.assert_allclose(
                np.asarray(got).astype(wide),
                expected.astype(wide),
                rtol=0.05 if expected.dtype.itemsize == 2 else 1e-5,
                atol={2: 0.05, 4: 2e-6}.get(expected.dtype.itemsize, 1e-9),
            )


# ----- the op table ---------------------------------------------------------------------------------------------------


def test_an_op_is_its_name():
    import pickle

    op = OPS["add"]
    assert pickle.loads(pickle.dumps(op)) is op
    assert op_named("add") is op
    with pytest.raises(KeyError, match="nonsense"):
        op_named("nonsense")
    with pytest.raises(ValueError, match="add"):
        Op("add", ("x",), "add", lambda *a: a)


@pytest.mark.parametrize("name", sorted(OPS))
def test_operands_are_named(name):
    op = OPS[name]
    assert len(set(op.operands)) == len(op.operands)
    for args, _ in SAMPLES.get(name, []):
        named = [o for o in op.operands if not o.startswith("*")]
        assert len(args) == len(named) or (len(args) >= len(named) and len(named) < len(op.operands))


@pytest.mark.parametrize(
    ("name", "shapes", "params"),
    [
        ("add", [(2,), (3,)], {}),
        ("matmul", [(2, 3), (2, 3)], {}),
        ("matmul", [(2, 2, 3), (3, 3, 4)], {}),
        ("concat", [(2, 3), (2, 4)], {"axis": 0}),
    ],
)
def test_shape_rules_refuse_what_the_op_refuses(name, shapes, params):
    op = OPS[name]
    with pytest.raises(ShapeError, match=rf"\[{name}\]"):
        op.avals(tuple(ShapeDtype(s, np.dtype(float)) for s in shapes), params)
    with pytest.raises(ValueError, match=r"."):
        op.numpy(*(np.ones(s) for s in shapes), **params)
