// Storage types, the type that their arithmetic is done in, and vectors of them.
//
// No toolkit header is needed: NVRTC compiles a kernel in some ten milliseconds without <cuda_fp16.h>. The same text is
// compiled as C++ by the tests, where EMULATED is defined.
#pragma once

typedef long long i64;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef EMULATED
#define SHARED(type, name, count) __shared__ type name[count]
#define DYNAMIC_SHARED(type, name)                                  \
    extern __shared__ __align__(16) double dynamic_shared_memory[]; \
    type* name = reinterpret_cast<type*>(dynamic_shared_memory)
#endif

constexpr u32 WHOLE_WARP = 0xffffffffu;

struct float16 {
    unsigned short bits;
};
struct bfloat16 {
    unsigned short bits;
};

template <class T>
struct Arithmetic {
    using type = T;
};
template <>
struct Arithmetic<float16> {
    using type = float;
};
template <>
struct Arithmetic<bfloat16> {
    using type = float;
};
template <class T>
using Wide = typename Arithmetic<T>::type;

__device__ inline float wide(float x) { return x; }
__device__ inline double wide(double x) { return x; }
__device__ inline float wide(bfloat16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ inline float wide(float16 x)
{
#ifdef EMULATED
    return emulation::from_half(x.bits);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
#endif
}

// Rounding to the nearest, ties to even.
template <class T, class X>
__device__ inline T narrow(X x)
{
    return (T)x;
}
template <>
__device__ inline float16 narrow<float16, float>(float x)
{
    float16 y;
#ifdef EMULATED
    y.bits = emulation::to_half(x);
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#endif
    return y;
}
template <>
__device__ inline bfloat16 narrow<bfloat16, float>(float x)
{
    bfloat16 y;
#if defined(EMULATED) || __CUDA_ARCH__ < 800
    const u32 b = __float_as_uint(x);  // NaN must not round to infinity
    y.bits = (b & 0x7fffffffu) > 0x7f800000u ? (unsigned short)0x7fff : (unsigned short)((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#endif
    return y;
}

// Products and sums that are never contracted.
__device__ inline float product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double product(double a, double b) { return __dmul_rn(a, b); }
__device__ inline float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ inline double plus(double a, double b) { return __dadd_rn(a, b); }

// The widest load is of 16 bytes: a longer vector takes several.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vector {
    T at[N];
};

template <int VEC, class T>
__device__ inline Vector<T, VEC> vector_at(const T* p)
{
    return *reinterpret_cast<const Vector<T, VEC>*>(p);
}

// The compiler would take the stores of a loop apart into elements.
template <int VEC, class T>
__device__ inline void store_vector(T* p, const Vector<T, VEC>& v)
{
#ifndef EMULATED
    constexpr int BYTES = sizeof(v);
    u32 w[BYTES / 4 + 1];
    memcpy(w, &v, BYTES);
    if constexpr (BYTES % 16 == 0)
#pragma unroll
        for (int i = 0; i < BYTES / 4; i += 4)
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(reinterpret_cast<u32*>(p) + i), "r"(w[i]), "r"(w[i + 1]), "r"(w[i + 2]), "r"(w[i + 3]));
    else if constexpr (BYTES == 8)
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(w[0]), "r"(w[1]));
    else
#endif
        *reinterpret_cast<Vector<T, VEC>*>(p) = v;
}

// Whether a vector at `p` is one that the device can load.
template <int VEC, class T>
__device__ inline bool is_aligned(const T* p)
{
    return reinterpret_cast<u64>(p) % alignof(Vector<T, VEC>) == 0;
}

template <class T>
__device__ T infinity();
template <>
__device__ inline float infinity<float>()
{
    return __uint_as_float(0x7f800000u);
}
template <>
__device__ inline double infinity<double>()
{
    return __longlong_as_double(0x7ff0000000000000LL);
}

// A division of 32 bits costs a quarter of one of 64.
__device__ inline i64 divided(i64 a, i64 b, bool small) { return small ? (i64)((u32)a / (u32)b) : a / b; }

// Row and column of element e of rows of `inner` elements.
struct Element {
    i64 row, column;
    __device__ Element(i64 e, i64 inner, bool small) : row(divided(e, inner, small)), column(e - row * inner) {}
};
