// CuPy's own generated sources as C++, beside the emulation of CUDA that our kernels run in: what they use of CUDA's built-in functions and of
// its headers for 16-bit numbers. It is parsed once; each source is then compiled in a namespace of its own.
#pragma once
#define RETURNED_THREADS_MISS_BARRIERS 1  // as on a device; kernels of CuPy count on it
#include "emulation.h"

#include <algorithm>
#include <cassert>
#include <initializer_list>
#include <limits>
#include <tuple>

#define __CUDACC_VER_MAJOR__ 13
#define __shared__ static
#define __constant__ static
#define __noinline__

using std::acos, std::acosh, std::asin, std::asinh, std::atan, std::atan2, std::atanh, std::cbrt, std::ceil, std::copysign, std::cos, std::cosh;
using std::erf, std::erfc, std::exp2, std::expm1, std::fabs, std::floor, std::fmax, std::fmin, std::fmod, std::frexp, std::hypot, std::ldexp;
using std::abs, std::ilogb, std::isfinite, std::isinf, std::isnan, std::lgamma, std::log10, std::log1p, std::log2, std::logb, std::modf, std::nearbyint;
using std::nextafter, std::pow, std::remainder, std::rint, std::round, std::signbit, std::sin, std::sinh, std::tan, std::tanh, std::tgamma, std::trunc;

// CUDA has these of the numbers alone, and of two types of them.
template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
std::common_type_t<A, B> min(A a, B b)
{
    using C = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<C>) return std::fmin((C)a, (C)b);
    else return (C)b < (C)a ? (C)b : (C)a;
}
template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
std::common_type_t<A, B> max(A a, B b)
{
    using C = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<C>) return std::fmax((C)a, (C)b);
    else return (C)a < (C)b ? (C)b : (C)a;
}
inline float rsqrt(float x) { return 1 / std::sqrt(x); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
inline double exp10(int x) { return std::pow(10.0, x); }
inline float exp10(float x) { return std::pow(10.0f, x); }
inline float sinpi(float x) { return std::sin(x * 3.14159265358979323846); }
inline double sinpi(double x) { return std::sin(x * 3.14159265358979323846); }
inline float cospi(float x) { return std::cos(x * 3.14159265358979323846); }
inline double cospi(double x) { return std::cos(x * 3.14159265358979323846); }
inline double normcdf(double x) { return std::erfc(-x * 0.70710678118654752440) / 2; }
inline double cyl_bessel_i0(double x) { return std::cyl_bessel_i(0, std::fabs(x)); }
inline double cyl_bessel_i1(double x) { return std::copysign(std::cyl_bessel_i(1, std::fabs(x)), x); }
inline double erfinv(double y)
{  // a first guess (Winitzki), and Newton's steps
    if (!(std::fabs(y) < 1)) return std::fabs(y) == 1 ? y * INFINITY : NAN;
    const double l = std::log1p(-y * y), t = 2 / (M_PI * 0.147) + l / 2;
    double x = std::copysign(std::sqrt(std::sqrt(t * t - l / 0.147) - t), y);
    for (int i = 0; i < 4; ++i) x -= (std::erf(x) - y) / (2 / std::sqrt(M_PI) * std::exp(-x * x));
    return x;
}
inline double normcdfinv(double p)
{  // Newton's steps on the logarithm of the smaller side
    if (!(p > 0 && p < 1)) return p == 0 ? -INFINITY : p == 1 ? INFINITY : NAN;
    if (p > 0.5) return -normcdfinv(1 - p);
    double x = p > 0.1 ? M_SQRT2 * erfinv(2 * p - 1) : -std::sqrt(-2 * std::log(p));
    for (int i = 0; i < 8; ++i) x -= (std::log(normcdf(x)) - std::log(p)) * normcdf(x) * std::sqrt(2 * M_PI) * std::exp(x * x / 2);
    return x;
}
inline double erfcinv(double y) { return -normcdfinv(y / 2) / M_SQRT2; }
inline float normcdfinv(float p) { return normcdfinv((double)p); }
inline float erfcinv(float y) { return erfcinv((double)y); }
inline float erfinv(float y) { return erfinv((double)y); }

inline int __float_as_int(float x) { return (int)__float_as_uint(x); }
inline float __int_as_float(int x) { return __uint_as_float((unsigned)x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) { unsigned y = 0; for (int i = 0; i < 32; ++i) y |= (x >> i & 1) << (31 - i); return y; }
inline long long __float2ll_rn(float x) { return std::llrint(x); }
inline long long __double2ll_rn(double x) { return std::llrint(x); }
inline int __float2int_rn(float x) { return (int)std::lrint(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float a, float b) { return a / b; }
template <class T>
T __ldg(const T* p) { return *p; }
// Of the whole warp's width.
template <class T>
T __shfl_sync(unsigned mask, T v, int lane, int) { return __shfl_sync(mask, v, lane); }
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int lane_mask, int) { return __shfl_xor_sync(mask, v, lane_mask); }
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned delta, int) { return __shfl_up_sync(mask, v, delta); }
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned delta, int) { return __shfl_down_sync(mask, v, delta); }
constexpr int warpSize = 32;
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T>
T atomicSub(T* p, T v) { T old = *p; *p = old - v; return old; }
template <class T>
T atomicExch(T* p, T v) { T old = *p; *p = v; return old; }
template <class T>
T atomicAnd(T* p, T v) { T old = *p; *p = old & v; return old; }
template <class T>
T atomicOr(T* p, T v) { T old = *p; *p = old | v; return old; }
template <class T>
T atomicXor(T* p, T v) { T old = *p; *p = old ^ v; return old; }
inline int atomicAdd(int* p, int v) { int old = *p; *p = old + v; return old; }

// <cuda_fp16.h> and <cuda_bf16.h>, whose own text is for nvcc.
struct __half_raw { unsigned short x; };
struct __half {
    unsigned short bits;
    __half() = default;
    __half(const __half_raw& r) : bits(r.x) {}
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
    __half(T v) { const _Float16 h = (_Float16)v; std::memcpy(&bits, &h, 2); }
    operator float() const { return emulation::from_half(bits); }
    explicit operator __half_raw() const { return {bits}; }
};
using half = __half;
inline unsigned short __half_as_ushort(half h) { return h.bits; }
inline half __ushort_as_half(unsigned short b) { return half(__half_raw{b}); }
struct __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float v)
    {
        const unsigned b = __float_as_uint(v);
        bits = v != v ? 0x7fff : (unsigned short)((b + 0x7fffu + (b >> 16 & 1)) >> 16);
    }
    operator float() const { return __uint_as_float((unsigned)bits << 16); }
};
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) { return h.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short b) { __nv_bfloat16 h; h.bits = b; return h; }
inline bool __hisnan(__nv_bfloat16 h) { return (h.bits & 0x7fff) > 0x7f80; }
inline bool __hisinf(__nv_bfloat16 h) { return (h.bits & 0x7fff) == 0x7f80; }

#include <cupy/complex.cuh>
#include <cupy/carray.cuh>
#include <cupy/atomics.cuh>
#include <cupy/math_constants.h>
#include <cupy/float16.cuh>
#include <cupy/bfloat16.cuh>

namespace emulation {

// Threads that do not wait for one another need no fibers: they run one by one; and where all they ask is which elements are theirs, one thread of
// one block does the work of all.
enum Threads { ONE, EACH, FIBERS };
inline int start(Threads how, void (*fn)(void*), void* arguments, const unsigned* grid, const unsigned* block, size_t shared)
{
    if (how == FIBERS) return launch(fn, arguments, grid, block, shared, 0, (long long)grid[0] * grid[1] * grid[2], 0);
    if (how == ONE) {
        gridDim = blockDim = {1, 1, 1};
        blockIdx = threadIdx = {0, 0, 0};
        fn(arguments);
        return 0;
    }
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    for (blockIdx.z = 0; blockIdx.z < grid[2]; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < grid[1]; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < grid[0]; ++blockIdx.x)
                for (threadIdx.z = 0; threadIdx.z < block[2]; ++threadIdx.z)
                    for (threadIdx.y = 0; threadIdx.y < block[1]; ++threadIdx.y)
                        for (threadIdx.x = 0; threadIdx.x < block[0]; ++threadIdx.x) fn(arguments);
    return 0;
}

template <auto kernel>
struct Bytes;
template <class... P, void (*kernel)(P...)>
struct Bytes<kernel> {
    static const unsigned* get()
    {
        static const unsigned found[] = {(unsigned)sizeof(P)..., 0};
        return found;
    }
};

}  // namespace emulation

// The driver asks a kernel for these: to run, and the bytes of each argument, 0 after the last.
#define START(name, how, ...)                                                                             \
    extern "C" int start_##name(void** a, const unsigned* grid, const unsigned* block, size_t shared)     \
    {                                                                                                     \
        return emulation::start(emulation::how, emulation::Entry<&__VA_ARGS__>::run, a, grid, block, shared); \
    }                                                                                                     \
    extern "C" const unsigned* bytes_##name() { return emulation::Bytes<&__VA_ARGS__>::get(); }
