"""cuBLAS, cuSOLVER, cuFFT and Thrust's sorting, answered by NumPy, LAPACK and SciPy on the same memory: values, and the
codes of what fails.

A function gets the arguments of the C function as 64-bit words, and returns its status. Functions that are not here say
that they are not supported.
"""

from __future__ import annotations

import ctypes
import math
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from scipy.linalg import lapack

LETTERS = {"S": np.float32, "D": np.float64, "C": np.complex64, "Z": np.complex128}
CUDA_TYPES = {
    **{0: np.float32, 1: np.float64, 2: np.float16, 3: np.int8, 4: np.complex64, 5: np.complex128, 8: np.uint8},
    **{10: np.int32, 14: ml_dtypes.bfloat16},
}
OK, FAILED, UNSUPPORTED = 0, 14, 15
ANSWERS: dict[str, Callable[..., Any]] = {}
"""By name without the letter of the type, which is the first argument where there is one."""
failures: list[str] = []
"""Calls that were not answered, and errors of the answers."""


def answers(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        ANSWERS.update(dict.fromkeys(names, fn))
        return fn

    return add


class Words:
    """The arguments of a call: ``a[3]`` is a number of 32 bits, ``a.long(3)`` one of 64 bits or an address."""

    def __init__(self, words: Any) -> None:
        self._words = words

    def __getitem__(self, i: int) -> int:
        return ctypes.c_int32(self._words[i] & 0xFFFFFFFF).value

    def long(self, i: int) -> int:
        return ctypes.c_int64(self._words[i]).value

    def ints(self, i: int, n: int) -> list[int]:
        return list((ctypes.c_int32 * n).from_address(self._words[i])) if self._words[i] else []

    def number(self, i: int, dtype: Any) -> Any:
        return strided(self._words[i], dtype, (), ())[()]

    def put(self, i: int, value: int) -> None:
        self._words[i] = value

    def write(self, i: int, value: int) -> None:
        if self._words[i]:
            ctypes.c_int32.from_address(self._words[i]).value = int(value)


def strided(address: int, dtype: Any, shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    """Memory as an array; strides in elements."""
    dtype = np.dtype(dtype)
    if 0 in shape:
        return np.empty(shape, dtype)
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    raw = (ctypes.c_char * (last * dtype.itemsize)).from_address(address)
    flat = np.frombuffer(raw, np.uint8).view(dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, [s * dtype.itemsize for s in strides])


def matrix(address: int, dtype: Any, rows: int, columns: int, ld: int) -> np.ndarray:
    return strided(address, dtype, (rows, columns), (1, ld))


def addresses(at: int, n: int) -> np.ndarray:
    return strided(at, np.uint64, (n,), (1,)).astype(object)


def operand(x: np.ndarray, op: int) -> np.ndarray:
    """By cuBLAS's word for the matrix, its transpose, or its adjoint."""
    return x if op == 0 else x.T if op == 1 else x.T.conj()


# ----- products -------------------------------------------------------------------------------------------------------


def product(
    ops: tuple[int, int], mnk: tuple[int, int, int], alpha: Any, a: tuple, b: tuple, beta: Any, c: tuple, wide: Any
) -> None:
    """``c = alpha * a @ b + beta * c``; each matrix is (address, dtype, leading dimension)."""
    m, n, k = mnk
    shapes = ((m, k) if ops[0] == 0 else (k, m)), ((k, n) if ops[1] == 0 else (n, k))
    left, right = (
        operand(matrix(x[0], x[1], *s, x[2]), op).astype(wide) for x, s, op in zip((a, b), shapes, ops, strict=True)
    )
    out = matrix(c[0], c[1], m, n, c[2])
    found = alpha * (left @ right)
    out[...] = (found if beta == 0 else found + beta * out.astype(wide)).astype(out.dtype)


def _types(a: int, compute: int) -> tuple[Any, Any]:
    """What a product is computed in, and the type of its factors."""
    real = {64: np.float16, 65: np.float16, 70: np.float64, 71: np.float64, 72: np.int32, 73: np.int32}.get(
        compute, np.float32
    )
    complexes = {np.float32: np.complex64, np.float64: np.complex128}
    scale = complexes[real] if a in (4, 5) else real
    return (np.float32 if scale is np.float16 else scale), scale


@answers("cublasGemmEx")
def _gemm_ex(w: Words) -> None:
    wide, scale = _types(w[8], w[17])
    a, b, c = ((w.long(i), CUDA_TYPES[w[i + 1]], w[i + 2]) for i in (7, 10, 14))
    product((w[1], w[2]), (w[3], w[4], w[5]), w.number(6, scale), a, b, w.number(13, scale), c, wide)


@answers("cublasGemmStridedBatchedEx")
def _gemm_strided_ex(w: Words) -> None:
    wide, scale = _types(w[8], w[21])
    for i in range(w[20]):
        a, b, c = (
            (w.long(j) + i * w.long(j + 3) * np.dtype(CUDA_TYPES[w[j + 1]]).itemsize, CUDA_TYPES[w[j + 1]], w[j + 2])
            for j in (7, 11, 16)
        )
        product((w[1], w[2]), (w[3], w[4], w[5]), w.number(6, scale), a, b, w.number(15, scale), c, wide)


@answers("cublasgemmBatched")
def _gemm_batched(t: Any, w: Words) -> None:
    lists = [addresses(w.long(i), w[14]) for i in (7, 9, 12)]
    for a, b, c in zip(*lists, strict=True):
        product(
            (w[1], w[2]),
            (w[3], w[4], w[5]),
            w.number(6, t),
            (a, t, w[8]),
            (b, t, w[10]),
            w.number(11, t),
            (c, t, w[13]),
            t,
        )


@answers("cublasgemm_v2", "cublasgemm")
def _gemm(t: Any, w: Words) -> None:
    a, b, c = ((w.long(i), t, w[i + 1]) for i in (7, 9, 12))
    product((w[1], w[2]), (w[3], w[4], w[5]), w.number(6, t), a, b, w.number(11, t), c, t)


@answers("cublasgemv_v2", "cublasgemv")
def _gemv(t: Any, w: Words) -> None:
    a = operand(matrix(w.long(5), t, w[2], w[3], w[6]), w[1])
    x, y = strided(w.long(7), t, a.shape[1:], (w[8],)), strided(w.long(10), t, a.shape[:1], (w[11],))
    beta = w.number(9, t)
    y[...] = w.number(4, t) * (a @ x) + (0 if beta == 0 else beta * y)


@answers("cublasdot_v2", "cublasdot", "cublasdotu_v2", "cublasdotu", "cublasdotc_v2", "cublasdotc")
def _dot(t: Any, w: Words, name: str = "") -> None:
    x, y = (strided(w.long(i), t, (w[1],), (w[i + 1],)) for i in (2, 4))
    strided(w.long(6), t, (), ())[...] = (x.conj() if "dotc" in name else x) @ y


@answers("cublasnrm2_v2", "cublasnrm2")
def _nrm2(t: Any, w: Words) -> None:
    out = strided(w.long(4), np.zeros((), t).real.dtype, (), ())
    out[...] = np.linalg.norm(strided(w.long(2), t, (w[1],), (w[3],)))


# ----- factors --------------------------------------------------------------------------------------------------------


def _of(name: str, t: Any) -> Callable[..., Any]:
    """LAPACK's function for a dtype."""
    letter = next(k for k, v in LETTERS.items() if v is t).lower()
    return getattr(lapack, letter + name)


def _lu(t: Any, a: np.ndarray, pivots: int) -> int:
    n = min(a.shape)
    lu, found, info = _of("getrf", t)(a)
    a[...] = lu
    if pivots:
        strided(pivots, np.int32, (n,), (1,))[...] = found + 1
    return info


def _pivots(at: int, n: int) -> np.ndarray:
    return strided(at, np.int32, (n,), (1,)) - 1 if at else np.arange(n, dtype=np.int32)


@answers("cusolverDngetrf")
def _getrf(t: Any, w: Words) -> None:
    w.write(7, _lu(t, matrix(w.long(3), t, w[1], w[2], w[4]), w.long(6)))


@answers("cusolverDngetrs")
def _getrs(t: Any, w: Words) -> None:
    n, b = w[2], matrix(w.long(7), t, w[2], w[3], w[8])
    x, info = _of("getrs", t)(matrix(w.long(4), t, n, n, w[5]), _pivots(w.long(6), n), b, trans=w[1])
    b[...] = x
    w.write(9, info)


@answers("cublasgetrfBatched")
def _getrf_batched(t: Any, w: Words) -> None:
    n, info = w[1], strided(w.long(5), np.int32, (w[6],), (1,))
    for i, a in enumerate(addresses(w.long(2), w[6])):
        info[i] = _lu(t, matrix(a, t, n, n, w[3]), w.long(4) and w.long(4) + 4 * n * i)


@answers("cublasgetrsBatched")
def _getrs_batched(t: Any, w: Words) -> None:
    n = w[2]
    for i, (a, b) in enumerate(zip(addresses(w.long(4), w[10]), addresses(w.long(7), w[10]), strict=True)):
        out = matrix(b, t, n, w[3], w[8])
        pivots = _pivots(w.long(6) and w.long(6) + 4 * n * i, n)
        out[...] = _of("getrs", t)(matrix(a, t, n, n, w[5]), pivots, out, trans=w[1])[0]
    w.write(9, 0)


@answers("cublasgetriBatched")
def _getri_batched(t: Any, w: Words) -> None:
    n, info = w[1], strided(w.long(7), np.int32, (w[8],), (1,))
    for i, (a, c) in enumerate(zip(addresses(w.long(2), w[8]), addresses(w.long(5), w[8]), strict=True)):
        pivots = _pivots(w.long(4) and w.long(4) + 4 * n * i, n)
        matrix(c, t, n, n, w[6])[...], info[i] = _of("getri", t)(matrix(a, t, n, n, w[3]), pivots)


def _cholesky(t: Any, a: np.ndarray, uplo: int) -> int:
    a[...], info = _of("potrf", t)(a, lower=uplo == 0, clean=0)
    return info


@answers("cusolverDnpotrf")
def _potrf(t: Any, w: Words) -> None:
    w.write(7, _cholesky(t, matrix(w.long(3), t, w[2], w[2], w[4]), w[1]))


@answers("cusolverDnpotrfBatched")
def _potrf_batched(t: Any, w: Words) -> None:
    info = strided(w.long(5), np.int32, (w[6],), (1,))
    for i, a in enumerate(addresses(w.long(3), w[6])):
        info[i] = _cholesky(t, matrix(a, t, w[2], w[2], w[4]), w[1])


@answers("cusolverDngeqrf")
def _geqrf(t: Any, w: Words) -> None:
    a = matrix(w.long(3), t, w[1], w[2], w[4])
    qr, tau, _, info = _of("geqrf", t)(a)
    a[...] = qr
    strided(w.long(5), t, (min(a.shape),), (1,))[...] = tau
    w.write(8, info)


@answers("cusolverDnorgqr", "cusolverDnungqr")
def _orgqr(t: Any, w: Words) -> None:
    a, k = matrix(w.long(4), t, w[1], w[2], w[5]), w[3]
    of = _of("orgqr" if np.dtype(t).kind == "f" else "ungqr", t)
    a[...], _, info = of(a, strided(w.long(6), t, (k,), (1,)))
    w.write(9, info)


def _svd(t: Any, a: np.ndarray, vectors: bool, full: bool) -> tuple[Any, Any, Any, int]:
    return _of("gesvd", t)(a.copy(), compute_uv=vectors, full_matrices=full)


@answers("cusolverDngesvd")
def _gesvd(t: Any, w: Words) -> None:
    m, n, real = w[3], w[4], np.zeros((), t).real.dtype
    k, jobs = min(m, n), [chr(w[i] & 0xFF) for i in (1, 2)]
    u, s, vt, info = _svd(t, matrix(w.long(5), t, m, n, w[6]), "N" not in jobs, "A" in jobs)
    w.write(15, info)
    strided(w.long(7), real, (k,), (1,))[...] = s
    if "O" in jobs:  # over the matrix itself
        at = jobs.index("O")
        over = (u[:, :k], vt[:k])[at]
        matrix(w.long(5), t, *over.shape, w[6])[...] = over
    for job, found, at in ((jobs[0], u, 8), (jobs[1], vt, 10)):
        if job in "AS":
            matrix(w.long(at), t, *found.shape, w[at + 1])[...] = found


@answers("cusolverDngesvdj")
def _gesvdj(t: Any, w: Words) -> None:
    _jacobi(t, w[1] == 1, not w[2], (w[3], w[4]), (w.long(5), w[6]), w.long(7), (w.long(8), w[9]), (w.long(10), w[11]))
    w.write(14, 0)


@answers("cusolverDngesvdjBatched")
def _gesvdj_batched(t: Any, w: Words) -> None:
    m, n, info = w[2], w[3], strided(w.long(13), np.int32, (w[15],), (1,))
    size, real = np.dtype(t).itemsize, np.zeros((), t).real.dtype.itemsize
    for i in range(w[15]):
        a, u, v = ((w.long(at) + i * columns * w[at + 1] * size, w[at + 1]) for at, columns in ((4, n), (7, m), (9, n)))
        info[i] = _jacobi(t, w[1] == 1, True, (m, n), a, w.long(6) + i * min(m, n) * real, u, v)


def _jacobi(t: Any, vectors: bool, full: bool, mn: tuple[int, int], a: tuple, s: int, u: tuple, v: tuple) -> int:
    """The right vectors as columns."""
    left, values, right, info = _svd(t, matrix(a[0], t, *mn, a[1]), vectors, full)
    strided(s, values.dtype, values.shape, (1,))[...] = values
    if vectors:
        matrix(u[0], t, *left.shape, u[1])[...] = left
        matrix(v[0], t, *right.T.shape, v[1])[...] = right.T.conj()
    return info


def _hermitian(t: Any, vectors: bool, uplo: int, a: np.ndarray, w: int) -> int:
    name = "syevd" if np.dtype(t).kind == "f" else "heevd"
    values, found, info = _of(name, t)(a.copy(), compute_v=vectors, lower=uplo == 0)
    strided(w, values.dtype, values.shape, (1,))[...] = values
    if vectors:
        a[...] = found
    return info


@answers("cusolverDnsyevd", "cusolverDnheevd", "cusolverDnsyevj", "cusolverDnheevj")
def _syevd(t: Any, w: Words) -> None:
    w.write(9, _hermitian(t, w[1] == 1, w[2], matrix(w.long(4), t, w[3], w[3], w[5]), w.long(6)))


@answers("cusolverDnsyevjBatched", "cusolverDnheevjBatched")
def _syevj_batched(t: Any, w: Words) -> None:
    n, info = w[3], strided(w.long(9), np.int32, (w[11],), (1,))
    size, real = np.dtype(t).itemsize, np.zeros((), t).real.dtype.itemsize
    for i in range(w[11]):
        a = matrix(w.long(4) + i * n * w[5] * size, t, n, n, w[5])
        info[i] = _hermitian(t, w[1] == 1, w[2], a, w.long(6) + i * n * real)


@answers("cusolverDnXsyevd")
def _xsyevd(w: Words) -> None:
    t, n = CUDA_TYPES[w[5]], w[4]
    w.write(15, _hermitian(t, w[2] == 1, w[3], matrix(w.long(6), t, n, n, w[7]), w.long(9)))


@answers("cusolverDnXgeev")
def _xgeev(w: Words) -> None:
    """The vectors of a real matrix as LAPACK packs them: of a pair, the real parts and the imaginary ones."""
    t, n = CUDA_TYPES[w[5]], w[4]
    a = matrix(w.long(6), t, n, n, w[7])
    found = _of("geev", t)(a.copy(), compute_vl=0, compute_vr=w[3] == 1)
    real = len(found) == 5
    values, vectors, info = (found[0] + 1j * found[1] if real else found[0]), found[-2], found[-1]
    strided(w.long(9), CUDA_TYPES[w[8]], (n,), (1,))[...] = values
    if w[3] == 1:
        matrix(w.long(14), t, n, n, w[15])[...] = vectors
    w.write(21, info)


# ----- Fourier transforms ---------------------------------------------------------------------------------------------

_plans: dict[int, Any] = {}
_HALF = {0x2A: "R2C", 0x2C: "C2R", 0x29: "C2C", 0x6A: "D2Z", 0x6C: "Z2D", 0x69: "Z2Z"}


@answers("cufftCreate")
def _create(w: Words) -> None:
    _plans[len(_plans) + 7] = None
    w.write(0, len(_plans) + 6)


@answers("cufftMakePlan1d")
def _plan_1d(w: Words) -> None:
    _plans[w[0]] = ([w[1]], [], 1, 0, [], 1, 0, w[2], w[3])


@answers("cufftMakePlanMany")
def _plan_many(w: Words) -> None:
    rank = w[1]
    _plans[w[0]] = (w.ints(2, rank), w.ints(3, rank), w[4], w[5], w.ints(6, rank), w[7], w[8], w[9], w[10])


def _side(lengths: Sequence[int], embed: Sequence[int], stride: int, apart: int, batch: int) -> tuple[Any, Any]:
    """Shape and strides of one side's batch."""
    if not embed:
        embed, stride, apart = lengths, 1, math.prod(lengths)
    strides = [stride * math.prod(embed[i + 1 :]) for i in range(len(embed))]
    return (batch, *lengths), (apart, *strides)


@answers("cufftExec")
def _transform(w: Words, name: str = "") -> None:
    n, inembed, istride, idist, onembed, ostride, odist, kind, batch = _plans[w[0]]
    kind, axes, dtypes = _HALF[kind], tuple(range(1, len(n) + 1)), {"R": "f", "D": "d", "C": "F", "Z": "D"}
    if kind != name[-3:]:
        raise ValueError(f"a plan of {kind} was given to {name}")
    half = [*n[:-1], n[-1] // 2 + 1]
    given, made = (half if kind in ("C2R", "Z2D") else n), (half if kind in ("R2C", "D2Z") else n)
    x = strided(w.long(1), dtypes[kind[0]], *_side(given, inembed, istride, idist, batch))
    y = strided(w.long(2), dtypes[kind[2]], *_side(made, onembed, ostride, odist, batch))
    if kind in ("R2C", "D2Z"):
        found = np.fft.rfftn(x, axes=axes)
    elif kind in ("C2R", "Z2D"):
        found = np.fft.irfftn(x, n, axes, norm="forward")
    else:
        found = np.fft.fftn(x, axes=axes) if w[3] == -1 else np.fft.ifftn(x, axes=axes, norm="forward")
    y[...] = found


# ----- sorting --------------------------------------------------------------------------------------------------------


def _keys(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if x.dtype.itemsize == 2 and x.dtype.kind not in "iu" else x


def _packed(address: int, dtype: Any, shape: Sequence[int]) -> np.ndarray:
    return strided(address, dtype, shape, [math.prod(shape[i + 1 :]) for i in range(len(shape))])


def sort(dtype: Any, data: int, keys: int, shape: Sequence[int], *_: Any) -> None:
    x = _packed(data, dtype, shape)
    x[...] = np.sort(_keys(x), axis=-1, kind="stable").astype(dtype)


def argsort(dtype: Any, idx: int, data: int, keys: int, shape: Sequence[int], *_: Any) -> None:
    x = _packed(data, dtype, shape)
    _packed(idx, np.intp, shape)[...] = np.argsort(_keys(x), axis=-1, kind="stable")


def lexsort(dtype: Any, idx: int, keys: int, k: int, n: int, *_: Any) -> None:
    _packed(idx, np.intp, (n,))[...] = np.lexsort(_keys(_packed(keys, dtype, (k, n))))


# ----- the way from C -------------------------------------------------------------------------------------------------

Answer = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64))
_TYPED = re.compile(r"(cublas|cusolverDn)(?:I)?([SDCZ])(?=[a-z])")
_HANDLES = re.compile(r"\w*(Create|Destroy|Get|Set|bufferSize|Version|WorkArea|AutoAllocation)\w*")


def answer(name: bytes, words: Any) -> int:
    """The status of a call, -1 where there is nothing to compute."""
    said = name.decode()
    plain, typed = re.sub(r"^cufftExec\w+", "cufftExec", _TYPED.sub(r"\1", said)), _TYPED.match(said)
    plain = re.sub(r"^(cublas)(gemm3m)", r"\1gemm", plain)
    fn = ANSWERS.get(plain)
    if fn is None:
        if _HANDLES.fullmatch(said):
            return -1
        failures.append(f"{said} is not answered")
        return UNSUPPORTED
    named = {"name": said} if "name" in fn.__code__.co_varnames[: fn.__code__.co_argcount] else {}
    try:
        status = fn(*([LETTERS[typed[2]]] if typed else []), Words(words), **named)
    except Exception:
        failures.append(f"{said}: {traceback.format_exc()[-800:]}")
        return FAILED
    return -1 if said.startswith("cufftMake") else status or OK  # which also write the size of the work area
