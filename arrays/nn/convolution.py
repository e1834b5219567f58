"""Convolution and pooling over the last dimensions.

Convolution is linear in the image and in the kernel. Its three forms, the convolution itself and its adjoints in either
operand, are one op each, and each is the derivative of the others: derivatives of every order are closed among them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backends.memory_pool import fresh
from ..backends.row_blocks import wide
from ..core.array import Array
from ..core.dispatch import apply
from ..core.dtypes import result_type
from ..core.errors import ArgumentError, DTypeError, ShapeError
from ..core.op import Op, ShapeDtype, composite
from ..kernels.cudnn import convolution as cudnn
from ..kernels.cudnn.convolution import Ints
from ..ops.creation import asarray, beside
from ..ops.manipulation import reshape, stack
from ..ops.matmul import MATMUL
from ..ops.param_kinds import POSITIVE, SIZES, STEPS
from ..ops.wide_floats import in_float32
from ..reductions.reductions import max as max_
from ..reductions.reductions import sum
from ..statistics.padding import pad

# ----- ops ------------------------------------------------------------------------------------------------------------
# x: (N, groups * I, *image), to which ``padding`` adds zeros at both ends; w: (groups * O, I, *kernel); result:
# (N, groups * O, *out).

COLUMNS = 1 << 20
"""Elements of the patches that exist at a time, where one line of the result has no more."""
COLUMNS_ON_A_GPU = 1 << 26
"""The same there, where each block is as many launches as the kernel has places."""


def _out_shape(image: Ints, kernel: Ints, padding: Ints, stride: Ints, dilation: Ints) -> Ints:
    sizes = zip(image, kernel, padding, stride, dilation, strict=True)
    return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, p, s, d in sizes)


def _wide(xp: Any, *arrays: Any) -> tuple[np.dtype, tuple[Any, ...]]:
    """Dtype of the result, and the operands in the dtype that sums are kept in."""
    dtype = xp.result_type(*arrays)
    return dtype, tuple(a.astype(wide(dtype), copy=False) for a in arrays)


def _inside(image: Ints, padding: Ints) -> tuple[slice, ...]:
    """The image in its padded form."""
    return (slice(None), slice(None), *(slice(p, p + n) for n, p in zip(image, padding, strict=True)))


def _padded(xp: Any, x: Any, padding: Ints) -> Any:
    if not any(padding):
        return x
    out = xp.zeros((*x.shape[:2], *(n + 2 * p for n, p in zip(x.shape[2:], padding, strict=True))), x.dtype)
    out[_inside(x.shape[2:], padding)] = x
    return out


def _taps(kernel: Ints, out: Ints, stride: Ints, dilation: Ints) -> Any:
    """Each tap of the kernel, with the part of the image that it meets."""
    for place in itertools.product(*map(range, kernel)):
        steps = zip(place, dilation, stride, out, strict=True)
        yield place, tuple(slice(p * d, p * d + s * (n - 1) + 1, s) for p, d, s, n in steps)


def _blocks(xp: Any, n: int, w: Ints, out: Ints, stride: Ints, dilation: Ints, groups: int) -> Any:
    """Parts of the result, and of the padded image that they are made of, by samples and lines: those whose patches, or
    kernels of shape ``w`` for each sample, have about :data:`COLUMNS` elements."""
    most, places = COLUMNS if xp is np else COLUMNS_ON_A_GPU, w[2:]
    line = groups * math.prod((*w[1:], *out[1:]))
    lines = min(out[0], max(most // max(line, 1), 1))
    samples = max(most // max(line * lines, math.prod(w), 1), 1) if lines == out[0] else 1
    for i, o in itertools.product(range(0, n, samples), range(0, out[0], max(lines, 1))):
        to = min(o + lines, out[0])
        seen = slice(o * stride[0], (to - 1) * stride[0] + dilation[0] * (places[0] - 1) + 1)
        yield (slice(i, i + samples), slice(None), slice(o, to)), (slice(i, i + samples), slice(None), seen)


def _room(xp: Any, shape: Ints, dtype: np.dtype) -> Any:
    """Memory of a block: of the pool, where the next block finds it in cache."""
    return fresh(shape, dtype) if xp is np else xp.empty(shape, dtype)


def _columns(xp: Any, x: Any, kernel: Ints, stride: Ints, dilation: Ints, groups: int) -> Any:
    """The patch of the image under each position of the result (im2col), of shape (N, groups, I * kernel, out)."""
    n, c, *image = x.shape
    if max(*kernel, *stride) == 1:
        return x.reshape(n, groups, c // groups, math.prod(image))
    out = _out_shape(tuple(image), kernel, (0,) * len(kernel), stride, dilation)
    cols = _room(xp, (n, c, *kernel, *out), x.dtype)
    for place, part in _taps(kernel, out, stride, dilation):
        cols[(slice(None), slice(None), *place)] = x[(slice(None), slice(None), *part)]
    return cols.reshape(n, groups, c // groups * math.prod(kernel), math.prod(out))


def _flat(w: Any, groups: int) -> Any:
    return w.reshape(groups, w.shape[0] // groups, math.prod(w.shape[1:]))


def _conv(xp: Any, x: Any, w: Any, padding: Ints, stride: Ints, dilation: Ints, groups: int) -> Any:
    n, outs, kernel = x.shape[0], w.shape[0], w.shape[2:]
    shape = (n, outs, *_out_shape(x.shape[2:], kernel, padding, stride, dilation))
    found = cudnn.convolution(xp, "Forward", x, w, shape, padding, stride, dilation, groups)
    if found is not None:
        return found
    dtype, (x, w) = _wide(xp, x, w)
    x, flat, y = _padded(xp, x, padding), _flat(w, groups), xp.empty(shape, dtype)
    for part, seen in _blocks(xp, n, w.shape, shape[2:], stride, dilation, groups):
        cols = _columns(xp, x[seen], kernel, stride, dilation, groups)
        to = y[part]
        if xp is np and dtype == w.dtype and to.flags.c_contiguous:
            MATMUL.numpy(flat, cols, out=to.reshape(len(to), groups, outs // groups, cols.shape[3]))
            continue
        found = MATMUL.bind(xp)(flat, cols)
        if found.size == y.size:
            return found.reshape(shape).astype(dtype, copy=False)
        y[part] = found.reshape(to.shape)
    return y


def _conv_image(xp: Any, g: Any, w: Any, image: Ints, padding: Ints, stride: Ints, dilation: Ints, groups: int) -> Any:
    """Adjoint in the image (a transposed convolution): each cotangent is spread over its patch of the image."""
    n, outs, kernel, channels = g.shape[0], w.shape[0], w.shape[2:], groups * w.shape[1]
    shape = (n, channels, *image)
    found = cudnn.convolution(xp, "BackwardData", w, g, shape, padding, stride, dilation, groups)
    if found is not None:
        return found
    around = tuple(d * (k - 1) - p for k, d, p in zip(kernel, dilation, padding, strict=True))
    if xp is np and max(stride) == 1 and min(around) >= 0 and outs <= 2 * channels:
        # A convolution with the kernels turned round, which reads patches instead of adding to them.
        turned = np.flip(w.reshape(groups, outs // groups, *w.shape[1:]), tuple(range(3, w.ndim + 1))).swapaxes(1, 2)
        turned = np.ascontiguousarray(turned).reshape(channels, outs // groups, *kernel)
        return _conv(xp, g, turned, around, stride, dilation, groups)
    dtype, (g, w) = _wide(xp, g, w)
    flat = _flat(w, groups).swapaxes(1, 2)
    x = xp.zeros((n, channels, *(m + 2 * p for m, p in zip(image, padding, strict=True))), g.dtype)
    for part, seen in _blocks(xp, n, w.shape, g.shape[2:], stride, dilation, groups):
        of, to = g[part], x[seen]
        cols = MATMUL.bind(xp)(flat, of.reshape(len(of), groups, outs // groups, math.prod(of.shape[2:])))
        cols = cols.reshape(len(of), channels, *kernel, *of.shape[2:])
        for place, met in _taps(kernel, of.shape[2:], stride, dilation):
            to[(slice(None), slice(None), *met)] += cols[(slice(None), slice(None), *place)]
    return xp.ascontiguousarray(x[_inside(image, padding)]).astype(dtype, copy=False)


def _conv_kernel(
    xp: Any, g: Any, x: Any, kernel: Ints, padding: Ints, stride: Ints, dilation: Ints, groups: int
) -> Any:
    """Adjoint in the kernel."""
    n, outs, channels = *g.shape[:2], x.shape[1]
    shape = (outs, channels // groups, *kernel)
    found = cudnn.convolution(xp, "BackwardFilter", x, g, shape, padding, stride, dilation, groups)
    if found is not None:
        return found
    dtype, (g, x) = _wide(xp, g, x)
    x, w = _padded(xp, x, padding), xp.zeros((groups, outs // groups, math.prod(shape[1:])), x.dtype)
    # Places beyond the last one that a stride reaches have no part in the result.
    for part, seen in _blocks(xp, n, shape, g.shape[2:], stride, dilation, groups):
        cols = _columns(xp, x[seen], kernel, stride, dilation, groups)
        rows = g[part].reshape(len(cols), groups, outs // groups, cols.shape[3])
        w += MATMUL.bind(xp)(rows, cols.swapaxes(2, 3)).sum(axis=0)
    return w.reshape(shape).astype(dtype, copy=False)


def _infer_conv(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    x, w = args
    out = _out_shape(x.shape[2:], w.shape[2:], params["padding"], params["stride"], params["dilation"])
    return ShapeDtype((x.shape[0], w.shape[0], *out), result_type(x.dtype, w.dtype))


def _infer_image(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    g, w = args
    shape = (g.shape[0], params["groups"] * w.shape[1], *params["image"])
    return ShapeDtype(shape, result_type(g.dtype, w.dtype))


def _infer_kernel(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    g, x = args
    shape = (g.shape[1], x.shape[1] // params["groups"], *params["kernel"])
    return ShapeDtype(shape, result_type(g.dtype, x.dtype))


_STEPS = {"padding": SIZES, "stride": STEPS, "dilation": STEPS, "groups": POSITIVE}
CONV = Op("conv", ("x", "w"), _conv, _infer_conv, params=_STEPS, wide_sums=True)
CONV_IMAGE = Op("conv_image", ("y", "w"), _conv_image, _infer_image, params={"image": SIZES, **_STEPS}, wide_sums=True)
CONV_KERNEL = Op(
    "conv_kernel", ("y", "x"), _conv_kernel, _infer_kernel, params={"kernel": SIZES, **_STEPS}, wide_sums=True
)

# ----- functions ------------------------------------------------------------------------------------------------------


def _each(name: str, what: str, value: int | Sequence[int], n: int, least: int) -> Ints:
    full = (value,) * n if isinstance(value, int | np.integer) else tuple(value)
    if len(full) != n or any(not isinstance(v, int | np.integer) or v < least for v in full):
        raise ArgumentError(f"[{name}] {what} must be an integer of at least {least}, or {n} of them, got {value!r}")
    return tuple(map(int, full))


def _paddings(
    name: str, padding: Any, image: Ints, kernel: Ints, stride: Ints, dilation: Ints
) -> list[tuple[int, int]]:
    if isinstance(padding, str) and padding not in ("valid", "same"):
        raise ArgumentError(f"[{name}] padding must be 'valid', 'same' or integers, got {padding!r}")
    if padding == "valid":
        return [(0, 0)] * len(image)
    if padding == "same":
        totals = [
            max((-(-n // s) - 1) * s + d * (k - 1) + 1 - n, 0)
            for n, k, s, d in zip(image, kernel, stride, dilation, strict=True)
        ]
        return [(t // 2, t - t // 2) for t in totals]
    return [(p, p) for p in _each(name, "padding", padding, len(image), 0)]


def _operands(name: str, n: int, x: Any, weight: Any) -> tuple[Array, Array]:
    x, w = asarray(x), asarray(weight)
    if n < 1 or x.ndim != n + 2 or w.ndim != n + 2:
        raise ShapeError(f"[{name}] x and weight have {max(n, 1) + 2} dimensions, got {x.shape} and {w.shape}")
    if x.dtype.kind in "biu" or w.dtype.kind in "biu":
        raise DTypeError(f"[{name}] x and weight must be floating, got {x.dtype.name} and {w.dtype.name}")
    return x, w


def _biased(name: str, out: Array, bias: Any) -> Array:
    if bias is None:
        return out
    b = asarray(bias)
    if b.shape != (out.shape[1],):
        raise ShapeError(f"[{name}] bias has shape {b.shape}, expected {(out.shape[1],)}")
    return out + reshape(b, (-1, *[1] * (out.ndim - 2)))


def _convolution(
    name: str, n: int, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Array:
    x, w = _operands(name, n, x, weight)
    if groups < 1 or x.shape[1] != groups * w.shape[1] or w.shape[0] % groups:
        raise ShapeError(
            f"[{name}] {groups} group(s): x {x.shape} must have groups * {w.shape[1]} channels, and the "
            f"{w.shape[0]} kernels of weight {w.shape} must divide evenly"
        )
    stride, dilation = _each(name, "stride", stride, n, 1), _each(name, "dilation", dilation, n, 1)
    kernel = w.shape[2:]
    around = _paddings(name, padding, x.shape[2:], kernel, stride, dilation)
    ends = tuple(min(pair) for pair in around)  # alike at both
    if any(p != q for p, q in around):
        x = pad(x, ((0, 0), (0, 0), *((p - e, q - e) for (p, q), e in zip(around, ends, strict=True))))
    out_shape = _out_shape(x.shape[2:], kernel, ends, stride, dilation)
    if any(k == 0 or m < 1 for k, m in zip(kernel, out_shape, strict=True)):
        padded = tuple(m + 2 * e for m, e in zip(x.shape[2:], ends, strict=True))
        raise ShapeError(f"[{name}] a kernel of shape {kernel} does not fit an image of shape {padded} (padded)")
    out = apply(CONV, (x, w), {"padding": ends, "stride": stride, "dilation": dilation, "groups": groups})
    return _biased(name, out, bias)


@composite("conv1d")
def conv1d(
    x: Any,
    weight: Any,
    bias: Any = None,
    /,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Array:
    """Each kernel slid along a signal: see :func:`conv2d`, with one dimension instead of two.

    >>> x = mt.asarray([[[1.0, 2.0, 4.0]]])
    >>> mt.nn.conv1d(x, mt.asarray([[[-1.0, 1.0]]])).tolist()
    [[[1.0, 2.0]]]
    """
    return _convolution("conv1d", 1, x, weight, bias, stride, padding, dilation, groups)


@composite("conv2d")
def conv2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    /,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Array:
    """Each kernel slid over an image (a cross-correlation, as everywhere in machine learning).

    Parameters
    ----------
    x
        Shape ``(N, channels, height, width)``.
    weight
        Shape ``(kernels, channels / groups, kernel height, kernel width)``.
    bias
        One number a kernel.
    stride, dilation
        Steps between the places of the kernel, and between its elements; one number or one for each dimension.
    padding
        Zeros around the image: one number, one for each dimension, ``"valid"`` (none) or ``"same"`` (as many results as
        elements, divided by the stride and rounded up; an odd one goes to the end).
    groups
        Channels and kernels are dealt out to groups that do not see each other.

    Examples
    --------
    >>> mt.nn.conv2d(mt.ones((1, 3, 5, 5)), mt.ones((8, 3, 3, 3)), padding="same").shape
    (1, 8, 5, 5)
    """
    return _convolution("conv2d", 2, x, weight, bias, stride, padding, dilation, groups)


@composite("conv_transpose")
def conv_transpose(
    x: Any,
    weight: Any,
    bias: Any = None,
    /,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Array:
    """The adjoint of a convolution in its image: each element of ``x`` adds its multiple of a kernel to the result.

    Parameters
    ----------
    x
        Shape ``(N, channels, *image)``, of one or more dimensions of an image.
    weight
        Shape ``(channels, results / groups, *kernel)``, as in PyTorch.
    bias
        One number a channel of the result.
    stride, padding, dilation, groups
        Those of the convolution from the result to ``x``: see :func:`conv2d`.
    output_padding
        Lines at the end of the result, fewer than ``stride`` or ``dilation``. A dimension of ``n`` elements
        becomes ``(n - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1``.

    Examples
    --------
    >>> mt.nn.conv_transpose(mt.asarray([[[1.0, 2.0]]]), mt.asarray([[[1.0, 10.0, 100.0]]]), stride=2).tolist()
    [[[1.0, 10.0, 102.0, 20.0, 200.0]]]
    """
    name, n = "conv_transpose", np.ndim(x) - 2
    x, w = _operands(name, n, x, weight)
    if groups < 1 or x.shape[1] != w.shape[0] or w.shape[0] % groups:
        raise ShapeError(f"[{name}] x {x.shape} has the channels of weight {w.shape}, which {groups} group(s) divide")
    steps, dilation = _each(name, "stride", stride, n, 1), _each(name, "dilation", dilation, n, 1)
    ends, more = _each(name, "padding", padding, n, 0), _each(name, "output_padding", output_padding, n, 0)
    if any(m >= max(s, d) for m, s, d in zip(more, steps, dilation, strict=True)):
        raise ArgumentError(f"[{name}] output_padding {more} must be less than stride {steps} or dilation {dilation}")
    sizes = zip(x.shape[2:], w.shape[2:], steps, ends, more, dilation, strict=True)
    image = tuple((m - 1) * s - 2 * p + d * (k - 1) + q + 1 for m, k, s, p, q, d in sizes)
    if min(*x.shape[2:], *w.shape[2:], *image) < 1:
        raise ShapeError(f"[{name}] x {x.shape} and weight {w.shape} would give an image of shape {image}")
    how = {"stride": steps, "dilation": dilation, "groups": groups}
    if all(q < s for q, s in zip(more, steps, strict=True)):
        return _biased(name, apply(CONV_IMAGE, (x, w), {"image": image, "padding": ends, **how}), bias)
    # The convolution of such an image would have more places than x: of all that kernels reach a part, and zeros.
    reached = tuple(m + 2 * p - q for m, p, q in zip(image, ends, more, strict=True))
    out = apply(CONV_IMAGE, (x, w), {"image": reached, "padding": (0,) * n, **how})
    out = out[(slice(None), slice(None), *(slice(p, p + m) for p, m in zip(ends, image, strict=True)))]
    rest = ((0, m - found) for m, found in zip(image, out.shape[2:], strict=True))
    return _biased(name, pad(out, ((0, 0), (0, 0), *rest)), bias)


@composite("pool")
@in_float32
def pool(
    x: Any,
    window: int | Sequence[int],
    /,
    *,
    kind: str = "max",
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] | str = 0,
) -> Array:
    """The largest element, or the mean, of each window of an image.

    Parameters
    ----------
    x
        Shape ``(N, channels, *image)``.
    window
        Lengths of the window; one number for all dimensions of the image.
    kind
        ``"max"`` or ``"mean"``. Padding belongs to no window: it is never the largest, and is not counted.
    stride
        Steps between windows; those of the window by default.
    padding
        As in :func:`conv2d`.

    Examples
    --------
    >>> mt.nn.pool(mt.asarray([[[1.0, 5.0, 2.0, 3.0]]]), 2).tolist()
    [[[5.0, 3.0]]]
    """
    x = asarray(x)
    n = x.ndim - 2
    if n < 1:
        raise ShapeError(f"[pool] x has the shape (N, channels, *image), got {x.shape}")
    if kind not in ("max", "mean"):
        raise ArgumentError(f"[pool] kind must be 'max' or 'mean', got {kind!r}")
    if x.dtype.kind in "biuc":
        raise DTypeError(f"[pool] x must be real floating, got {x.dtype.name}")
    size = _each("pool", "window", window, n, 1)
    steps = size if stride is None else _each("pool", "stride", stride, n, 1)
    ones = (1,) * n
    image = x.shape[2:]
    around = _paddings("pool", padding, image, size, steps, ones)
    if any(p >= k for pair, k in zip(around, size, strict=True) for p in pair):
        raise ArgumentError(f"[pool] padding {around} would make windows {size} of nothing but padding")
    padded = any(p != (0, 0) for p in around)
    widths = ((0, 0), (0, 0), *around)
    y = pad(x, widths, constant_values=-np.inf if kind == "max" else 0) if padded else x
    out = _out_shape(y.shape[2:], size, (0,) * n, steps, ones)
    if any(m < 1 for m in out):
        raise ShapeError(f"[pool] a window of {size} does not fit an image of shape {image}")
    parts = stack([y[(..., *part)] for _, part in _taps(size, out, steps, ones)])
    if kind == "max":
        return max_(parts, axis=0)
    inside = np.pad(np.ones(image), around)
    counts = np.sum([inside[part] for _, part in _taps(size, out, steps, ones)], axis=0)
    return sum(parts, axis=0) / asarray(counts.astype(x.dtype), device=beside(x))
