"""Convolution and pooling against sums written out, and against SciPy."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
import scipy  # whose parts are imported where they are used

import meshtape
from meshtape import arrays as mt
from meshtape.arrays.core.errors import ArgumentError, DTypeError, ShapeError
from meshtape.arrays.nn import convolution

rng = np.random.default_rng(11)


def written_out(x, w, stride, padding, dilation, groups):
    """The definition, one result at a time."""
    x = np.pad(x, ((0, 0), (0, 0), *((p, p) for p in padding)))
    n, _, *image = x.shape
    o, i, *kernel = w.shape
    out = [(m - d * (k - 1) - 1) // s + 1 for m, k, s, d in zip(image, kernel, stride, dilation, strict=True)]
    y = np.zeros((n, o, *out), np.result_type(x, w))
    for place in itertools.product(*map(range, out)):
        part = tuple(
            slice(p * s, p * s + d * (k - 1) + 1, d) for p, s, d, k in zip(place, stride, dilation, kernel, strict=True)
        )
        for c in range(o):
            g = c // (o // groups)
            seen = x[(slice(None), slice(g * i, (g + 1) * i), *part)]
            y[(slice(None), c, *place)] = (seen * w[c]).sum(axis=tuple(range(1, seen.ndim)))
    return y


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 0, 1), (2, 1, 1), ((1, 2), (2, 0), (2, 1)), (3, 2, 2)])
def test_conv2d_is_its_definition(stride, padding, dilation, groups):
    pair = lambda v: (v, v) if isinstance(v, int) else v  # noqa: E731
    x, w, b = rng.normal(size=(2, 4, 7, 8)), rng.normal(size=(6, 4 // groups, 3, 2)), rng.normal(size=6)
    got = mt.nn.conv2d(*map(mt.asarray, (x, w, b)), stride=stride, padding=padding, dilation=dilation, groups=groups)
    want = written_out(x, w, pair(stride), pair(padding), pair(dilation), groups) + b[:, None, None]
    np.testing.assert_allclose(np.asarray(got), want, atol=1e-12)


def test_conv1d_and_same_padding_are_scipys():
    x, w = rng.normal(size=9), rng.normal(size=4)
    got = mt.nn.conv1d(mt.asarray(x[None, None]), mt.asarray(w[None, None]))
    np.testing.assert_allclose(np.asarray(got)[0, 0], scipy.signal.correlate(x, w, "valid"), atol=1e-12)
    image, kernel = rng.normal(size=(5, 6)), rng.normal(size=(3, 3))
    got = mt.nn.conv2d(mt.asarray(image[None, None]), mt.asarray(kernel[None, None]), padding="same")
    np.testing.assert_allclose(np.asarray(got)[0, 0], scipy.signal.correlate(image, kernel, "same"), atol=1e-12)
    for stride in (1, 2, 3):
        y = mt.nn.conv1d(mt.ones((1, 1, 7)), mt.ones((1, 1, 4)), padding="same", stride=stride)
        assert y.shape[2] == -(-7 // stride)


def test_precision_and_empty_batches():
    x, w = mt.ones((1, 300, 4), dtype=mt.bfloat16), mt.ones((2, 300, 1), dtype=mt.bfloat16)
    y = mt.nn.conv1d(x, w)
    assert y.dtype == mt.bfloat16
    assert float(y[0, 0, 0]) == 300  # a sum kept in bfloat16 would stop at 256
    assert mt.nn.conv1d(mt.zeros((0, 2, 4)), mt.ones((3, 2, 2))).shape == (0, 3, 3)


@pytest.mark.parametrize("columns", [1, 50, 400])
@pytest.mark.parametrize("groups", [1, 2])
def test_blocks_of_patches_give_what_one_block_does(columns, groups, monkeypatch):
    """By lines of a sample, and by samples: the result and its gradients."""
    how = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2), "groups": groups}
    x, w = rng.normal(size=(3, 4, 9, 6)), rng.normal(size=(6, 4 // groups, 3, 2))
    g = rng.normal(size=mt.nn.conv2d(mt.asarray(x), mt.asarray(w), **how).shape)

    def all_three():
        y, pull = meshtape.vjp(lambda x, w: mt.nn.conv2d(x, w, **how), mt.asarray(x), mt.asarray(w))
        return y, *pull(mt.asarray(g))

    whole = all_three()
    monkeypatch.setattr(convolution, "COLUMNS", columns)
    for got, want in zip(all_three(), whole, strict=True):
        np.testing.assert_allclose(got.numpy(), want.numpy(), atol=1e-12)


def test_patches_do_not_exist_in_full():
    x, w = mt.ones((2, 4, 300, 300), dtype=mt.float32), mt.ones((4, 4, 5, 5), dtype=mt.float32)
    tracemalloc.start()
    y, pull = meshtape.vjp(lambda x, w: mt.nn.conv2d(x, w, padding=2), x, w)
    pull(y)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.5 * 25 * x.nbytes  # the patches have 25 times the elements of the image


def windows(x, size, stride, padding):
    """All windows of an image of two dimensions, with NaN for what is padded."""
    p = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)), constant_values=np.nan)
    return np.lib.stride_tricks.sliding_window_view(p, size, (2, 3))[:, :, :: stride[0], :: stride[1]]


@pytest.mark.parametrize(("size", "stride", "padding"), [((2, 2), (2, 2), 0), ((3, 2), (1, 2), 1), ((3, 3), (2, 1), 2)])
def test_pooling_is_its_definition(size, stride, padding):
    x = rng.normal(size=(2, 3, 7, 6))
    w = windows(x, size, stride, padding)
    for kind, reduce in (("max", np.nanmax), ("mean", np.nanmean)):
        got = mt.nn.pool(mt.asarray(x), size, kind=kind, stride=stride, padding=padding)
        np.testing.assert_allclose(np.asarray(got), reduce(w, axis=(-2, -1)), atol=1e-12)
        meshtape.check_grads(
            lambda a, kind=kind: mt.nn.pool(a, size, kind=kind, stride=stride, padding=padding), x[:1, :1]
        )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mt.nn.conv1d(mt.ones((1, 2, 3, 3)), mt.ones((1, 2, 3))), ShapeError, "3 dimensions"),
        (lambda: mt.nn.conv1d(mt.ones((1, 3, 4)), mt.ones((1, 2, 3))), ShapeError, "channels"),
        (lambda: mt.nn.conv1d(mt.ones((1, 2, 4)), mt.ones((3, 1, 3)), groups=2), ShapeError, "divide evenly"),
        (lambda: mt.nn.conv1d(mt.ones((1, 2, 2)), mt.ones((1, 2, 3))), ShapeError, "does not fit"),
        (lambda: mt.nn.conv1d(mt.ones((1, 1, 4)), mt.ones((2, 1, 3)), mt.ones(3)), ShapeError, "bias"),
        (lambda: mt.nn.conv1d(mt.ones((1, 1, 4)), mt.ones((1, 1, 3)), stride=0), ValueError, "stride"),
        (lambda: mt.nn.conv1d(mt.ones((1, 1, 4)), mt.ones((1, 1, 3)), padding="full"), ValueError, "padding"),
        (lambda: mt.nn.conv1d(mt.ones((1, 1, 4), dtype=mt.int8), mt.ones((1, 1, 3))), DTypeError, "floating"),
        (lambda: mt.nn.pool(mt.ones((1, 1, 4)), 2, padding=2), ValueError, "nothing but padding"),
        (lambda: mt.nn.pool(mt.ones((1, 1, 4)), 5), ShapeError, "does not fit"),
        (lambda: mt.nn.pool(mt.ones((1, 1, 4)), 2, kind="sum"), ValueError, "kind"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def grid(*shape):
    return ((np.arange(np.prod(shape)) * 7 + 3) % 11 - 5.0).reshape(shape)


# Of torch 2.13: `y = conv_transposeNd(x, w, b, **how)` of such grids, and the gradients of `(y * grid(*y.shape)).sum()`.
TRANSPOSED = [
    ((1, 2, 3), (2, 1, 3), {'stride': 2}, (1, 1, 7), [11, -24, -26, 39, 1, 3, -1], [30, -13, -12, 26, -15, -12], [13, -25, 14, 10, -27, 13], [1]),
    ((2, 2, 3), (2, 2, 2), {'stride': 3, 'padding': 1, 'output_padding': 2}, (2, 2, 8), [-12, -2, 4, 23, -2, -4, 3, -2, 2, 5, -6, 2, 5, 6, 2, 5, -22, -2, 0, 13, -2, -8, -7, -2, 2, 5, 0, 2, 5, 12, 2, 5], [-7, -9, -10, -3, -10, -13, -3, -7, -8, 3, -4, -7], [12, -16, 20, -14, 6, -4, 10, -8], [2, -4]),
    ((1, 4, 2, 3), (4, 1, 3, 2), {'stride': (2, 1), 'padding': (1, 0), 'output_padding': (1, 0), 'dilation': (1, 2), 'groups': 2}, (1, 2, 4, 5), [0, 0, 26, -32, 0, 8, 8, -14, 18, -6, 0, 0, 34, -24, 8, -24, 18, 4, -6, 2, -25, 7, 65, 7, -17, 25, 1, 7, -2, -17, -17, 15, 12, 1, -1, 1, 9, -11, -5, 46], [-5, -2, 1, 18, -2, -33, -9, 4, -5, -2, 4, -23, 7, 30, -2, -20, 23, 33, 27, -28, 27, 18, 43, -31], [-16, -13, 16, -24, -29, 8, -14, -7, -2, -34, -27, 18, -12, -12, -29, -20, -23, 19, -14, 23, 11, 17, 15, -23], [3, -2]),
    ((1, 2, 2, 2, 1), (2, 1, 1, 2, 3), {'stride': 1, 'padding': (0, 1, 0)}, (1, 1, 2, 1, 3), [-26, 23, -5, 9, -12, 0], [26, 30, 25, 26, 18, 22, 23, 24], [-1, 13, 5, 1, -6, -2, -9, 12, 0, 4, 4, 4], [5]),
    ((1, 2, 3, 2), (2, 1, 2, 2), {'stride': (1, 2), 'padding': (1, 0), 'output_padding': (2, 2), 'dilation': 3}, (1, 1, 6, 8), [-8, -2, -16, 3, -2, -17, -2, -2, -2, -2, -10, 18, -2, -2, -2, -2, 12, -2, -9, -8, -2, -8, -2, -2, 3, -2, 15, -8, -2, -8, -2, -2, -6, -2, 6, -8, -2, -8, -2, -2, -2, -2, -2, -2, -2, -2, -2, -2], [3, -3, -10, -7, -9, -6, -3, -6, -12, -3, -9, 0], [-9, -11, 12, 7, -9, -3, -18, -11], [1]),
]  # fmt: skip


@pytest.mark.parametrize(("image", "kernel", "how", "shape", "y", "gx", "gw", "gb"), TRANSPOSED)
def test_conv_transpose_is_torchs(image, kernel, how, shape, y, gx, gw, gb):
    x, w, b = grid(*image), grid(*kernel), grid(kernel[1] * how.get("groups", 1))
    for run in (lambda f: f, meshtape.compile):
        got, pull = meshtape.vjp(run(lambda *a: mt.nn.conv_transpose(*a, **how)), *map(mt.asarray, (x, w, b)))
        assert got.shape == shape
        for a, want in zip((got, *pull(mt.asarray(grid(*shape)))), (y, gx, gw, gb), strict=True):
            np.testing.assert_array_equal(np.asarray(a).ravel(), want)


def test_conv_transpose_is_the_adjoint_of_a_convolution_split_or_not():
    how = {"stride": (2, 3), "padding": (1, 0), "dilation": (2, 1)}
    x, w = rng.normal(size=(4, 3, 5, 4)), rng.normal(size=(3, 2, 3, 2))
    y = mt.nn.conv_transpose(mt.asarray(x), mt.asarray(w), output_padding=(1, 2), **how)
    z = rng.normal(size=y.shape)
    back = mt.nn.conv2d(mt.asarray(z), mt.asarray(w), **how)
    np.testing.assert_allclose(float(mt.sum(y * z)), float(mt.sum(back * x)), rtol=1e-12)
    meshtape.check_grads(lambda x, w: mt.nn.conv_transpose(x, w, **how), mt.asarray(x), mt.asarray(w), order=2)
    split = meshtape.distribute(x, meshtape.Mesh({"m": 2}), m=meshtape.Shard(0))
    np.testing.assert_allclose(mt.nn.conv_transpose(split, w, output_padding=(1, 2), **how), y, rtol=1e-12)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    ("kernel", "padding", "dilation"), [((3, 2), (1, 0), (1, 2)), ((1, 1), 0, 1), ((2, 3), (2, 3), 1)]
)
def test_the_gradient_of_an_image_is_the_adjoint(kernel, padding, dilation, groups, stride):
    """Of few kernels and of many, whose patches are read or added to."""
    how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    for kernels in (4, 16):
        x, w = rng.normal(size=(2, 4, 6, 7)), rng.normal(size=(kernels, 4 // groups, *kernel))
        y, pull = meshtape.vjp(lambda x: mt.nn.conv2d(x, w, **how), mt.asarray(x))  # noqa: B023
        g = rng.normal(size=y.shape)
        np.testing.assert_allclose(float(mt.sum(y * g)), float(mt.sum(pull(mt.asarray(g))[0] * x)), rtol=1e-10)


def test_conv_transpose_refuses_what_has_no_meaning():
    x, w = mt.ones((1, 2, 4)), mt.ones((2, 3, 2))
    for args, how, error, said in (
        ((x, w[:1]), {}, ShapeError, "has the channels of weight"),
        ((x, w), {"groups": 3}, ShapeError, r"3 group\(s\) divide"),
        ((x[0], w), {}, ShapeError, "dimensions"),
        ((x[0], w[0]), {}, ShapeError, "dimensions"),
        ((x, w), {"padding": 3}, ShapeError, "would give an image of shape"),
        ((x, w, mt.ones(2)), {}, ShapeError, r"bias has shape \(2,\), expected \(3,\)"),
        ((x, w), {"stride": 2, "output_padding": 2}, ArgumentError, r"must be less than stride \(2,\) or dilation"),
        ((x, w), {"padding": "same"}, ArgumentError, "padding must be an integer"),
        ((x.astype(mt.int64), w), {}, DTypeError, "must be floating"),
    ):
        with pytest.raises(error, match=said):
            mt.nn.conv_transpose(*args, **how)
