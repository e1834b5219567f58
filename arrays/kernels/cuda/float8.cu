// float8 e4m3fn (four bits of exponent, no infinity) and e5m2 (five), to and from other numbers, as ml_dtypes has them: rounded once, to the
// nearest, ties to even; what is too large is NaN in e4m3fn and infinity in e5m2.
#include "headers/reduce.cuh"

constexpr int THREADS = 256;

template <int E>
struct Format {
    static constexpr int mantissa = 7 - E, bias = (1 << (E - 1)) - 1;
    static constexpr u32 largest = E == 4 ? 0x7e : 0x7b, beyond = E == 4 ? 0x7f : 0x7c, nan = E == 4 ? 0x7f : 0x7e;
};

// Of a number by its sign (as that of the result), its other bits, and how many of these are its mantissa's.
template <int E>
__device__ inline unsigned char rounded(u32 sign, u64 bits, int mantissa, int bias)
{
    using F = Format<E>;
    const int exponent = (int)(bits >> mantissa);
    const u64 hidden = (u64)1 << mantissa, fraction = bits & (hidden - 1);
    u32 found;
    if (exponent == 2 * bias + 1) {
        found = fraction ? F::nan : F::beyond;
    } else {
        const int e = exponent - bias + F::bias;
        const int drop = mantissa - F::mantissa + (e < 1 ? 1 - e : 0);  // below the least exponent fewer places are kept
        found = 0;
        if (drop <= mantissa + 1) {
            const u64 significand = fraction | (exponent ? hidden : 0);
            const u64 kept = (significand + ((u64)1 << (drop - 1)) - 1 + ((significand >> drop) & 1)) >> drop;
            // The hidden bit counts the exponent up by one, and so does what rounding carries.
            found = (u32)kept + (e < 1 ? 0u : (u32)(e - 1) << F::mantissa);
        }
        if (found > F::largest) found = F::beyond;
    }
    return (unsigned char)(sign | found);
}

template <int E>
__device__ inline unsigned char to_float8(float x)
{
    const u32 b = __float_as_uint(x);
    return rounded<E>(b >> 24 & 0x80u, b & 0x7fffffffu, 23, 127);
}
template <int E>
__device__ inline unsigned char to_float8(double x)
{
    const u64 b = (u64)__double_as_longlong(x);
    return rounded<E>((u32)(b >> 56) & 0x80u, b & 0x7fffffffffffffffULL, 52, 1023);
}
// Integers that double does not hold are beyond all float8.
template <int E, class T>
__device__ inline unsigned char to_float8(T x)
{
    return to_float8<E>((double)x);
}
template <int E>
__device__ inline unsigned char to_float8(float16 x)
{
    return to_float8<E>(wide(x));
}
template <int E>
__device__ inline unsigned char to_float8(bfloat16 x)
{
    return to_float8<E>(wide(x));
}

template <int E>
__device__ inline float from_float8(u32 b)
{
    using F = Format<E>;
    const u32 sign = (b & 0x80u) << 24, bits = b & 0x7fu, fraction = bits & ((1u << F::mantissa) - 1);
    const u32 exponent = bits >> F::mantissa;
    if (bits > F::largest) return __uint_as_float(sign | (bits == F::beyond && F::beyond != F::nan ? 0x7f800000u : 0x7fc00000u));
    if (exponent) return __uint_as_float(sign | (exponent + 127 - F::bias) << 23 | fraction << (23 - F::mantissa));
    // A multiple of the smallest number, 2^-9 or 2^-16.
    const float least = __uint_as_float((u32)(128 - F::bias - F::mantissa) << 23);
    return __uint_as_float(sign | __float_as_uint((float)fraction * least));
}

template <int E>
__global__ void __launch_bounds__(THREADS) widen(const unsigned char* x, float* y, i64 n)
{
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < n; i += (i64)gridDim.x * THREADS) y[i] = from_float8<E>(x[i]);
}

template <int E, class T>
__global__ void __launch_bounds__(THREADS) narrow_to(const T* x, unsigned char* y, i64 n)
{
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < n; i += (i64)gridDim.x * THREADS) y[i] = to_float8<E>(x[i]);
}

// Rounded after a division by `scale`. A finite number beyond the largest is the largest; what is not finite stays.
template <int E>
__device__ inline unsigned char scaled(float x, float scale)
{
    const float most = E == 4 ? 448.0f : 57344.0f, v = x / scale;
    return to_float8<E>(v - v != 0.0f ? v : fminf(fmaxf(v, -most), most));
}

template <int E, class T>
__global__ void __launch_bounds__(THREADS) narrow_scaled(const T* x, const float* scale, unsigned char* y, i64 n)
{
    constexpr int VEC = 16 / sizeof(T);
    const i64 first = (i64)blockIdx.x * THREADS + threadIdx.x, step = (i64)gridDim.x * THREADS;
    const i64 vectors = is_aligned<VEC>(x) ? n / VEC : 0;
    const float factor = *scale;
    for (i64 i = first; i < vectors; i += step) {
        const auto v = vector_at<VEC>(x + i * VEC);
        Vector<unsigned char, VEC> to;
#pragma unroll
        for (int k = 0; k < VEC; k++) to.at[k] = scaled<E>(wide(v.at[k]), factor);
        store_vector<VEC>(y + i * VEC, to);
    }
    for (i64 i = vectors * VEC + first; i < n; i += step) y[i] = scaled<E>(wide(x[i]), factor);
}

// The largest magnitude that each block has read.
template <class T>
__global__ void __launch_bounds__(THREADS) magnitudes(const T* x, float* most, i64 n)
{
    constexpr int VEC = 16 / sizeof(T);
    const i64 first = (i64)blockIdx.x * THREADS + threadIdx.x, step = (i64)gridDim.x * THREADS;
    const i64 vectors = is_aligned<VEC>(x) ? n / VEC : 0;
    float found = 0.0f;
    for (i64 i = first; i < vectors; i += step) {
        const auto v = vector_at<VEC>(x + i * VEC);
#pragma unroll
        for (int k = 0; k < VEC; k++) found = Max::of(found, fabsf(wide(v.at[k])));
    }
    for (i64 i = vectors * VEC + first; i < n; i += step) found = Max::of(found, fabsf(wide(x[i])));
    found = row_reduce<Max, THREADS>(found, 0.0f);
    if (threadIdx.x == 0) most[blockIdx.x] = found;
}

// The smallest power of two, a normal number, that brings all of them into the range; what is not finite stays.
template <int E>
__global__ void __launch_bounds__(THREADS) scale_of(const float* most, float* scale, i64 n)
{
    float found = 0.0f;
    for (i64 i = threadIdx.x; i < n; i += THREADS) found = Max::of(found, most[i]);
    found = row_reduce<Max, THREADS>(found, 0.0f);
    if (threadIdx.x) return;
    const u32 bits = __float_as_uint(found / (E == 4 ? 448.0f : 57344.0f));
    const u32 exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0);
    *scale = found - found != 0.0f ? found : __uint_as_float((bits >> 23 == 0 ? 1u : exponent) << 23);
}
