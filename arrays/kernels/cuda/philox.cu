// Philox4x64-10 (Salmon, Moraes, Dror and Shaw, 2011): words, and the numbers that are made of them, to the bits of the CPU.
//
// Word n of a key is lane n % 4 of the cipher applied to the counter (n / 4, 0, 0, stream). Where bits are promised the
// products and sums of floats are the ones that are never contracted.
#include "headers/types.cuh"

constexpr int THREADS = 256;

struct Words {
    u64 at[4];
};

__device__ inline Words philox(u64 block, u64 stream, u64 k0, u64 k1)
{
    constexpr u64 M0 = 0xD2E7470EE14C6C93ULL, M1 = 0xCA5A826395121157ULL;
    constexpr u64 W0 = 0x9E3779B97F4A7C15ULL, W1 = 0xBB67AE8584CAA73BULL;
    u64 c0 = block, c1 = 0, c2 = 0, c3 = stream;
#pragma unroll
    for (int r = 0; r < 10; ++r) {
        const u64 h0 = __umul64hi(M0, c0), l0 = M0 * c0, h1 = __umul64hi(M1, c2), l1 = M1 * c2;
        c0 = h1 ^ c1 ^ k0;
        c1 = l1;
        c2 = h0 ^ c3 ^ k1;
        c3 = l0;
        k0 += W0;
        k1 += W1;
    }
    return Words{{c0, c1, c2, c3}};
}

// What the words become. `PER` elements come of each word; `make` gives those of a lane.

struct Limits {  // of `uniform`: digits to drop, the unit of the last one kept, and the interval; of others factor (width) and place (low)
    int shift;
    double unit, width, low, below;
    bool scaled;
};

template <class T>
struct Bits {
    static constexpr int PER = 8 / sizeof(T);
    __device__ static void make(const Words& w, int lane, const Limits&, T* out)
    {
        out[0] = (T)w.at[lane];
        if constexpr (PER == 2) out[1] = (T)(w.at[lane] >> 32);
    }
};

template <class T>
struct Uniform {
    static constexpr int PER = sizeof(T) == 8 ? 1 : 2;
    using A = Wide<T>;
    __device__ static T scaled(A u, const Limits& l)
    {
        if (l.scaled) u = plus(product(u, (A)l.width), (A)l.low);
        const T x = narrow<T>(u);
        // Scaling rounds, and may round up to the excluded end.
        return l.scaled && wide(x) > (A)l.below ? narrow<T>((A)l.below) : x;
    }
    __device__ static void make(const Words& w, int lane, const Limits& l, T* out)
    {
        const u64 word = w.at[lane];
        if constexpr (PER == 1)
            out[0] = scaled(product((double)(i64)(word >> 11), l.unit), l);
        else {
            out[0] = scaled(product((float)((u32)word >> l.shift), (float)l.unit), l);
            out[1] = scaled(product((float)((u32)(word >> 32) >> l.shift), (float)l.unit), l);
        }
    }
};

// The upper 53 bits of a word in [0, 1), and all 32 of half a word in (0, 1).
__device__ inline double fraction(u64 word) { return product((double)(i64)(word >> 11), 0x1p-53); }
__device__ inline float fraction(u32 word) { return product(plus((float)word, 0.5f), 0x1p-32f); }

// Two normal numbers by Box and Muller, of what is uniform in (0, 1] and of an angle; operations and their order are those of the CPU.
template <class A, class T>
__device__ inline void polar(A u, A angle, const Limits& l, T* out)
{
    const A radius = product(sqrt(product(log(u), A(-2))), (A)l.width), place = (A)l.low;
    const A x = product(radius, cos(angle)), y = product(radius, sin(angle));
    out[0] = narrow<T>(place == A(0) ? x : plus(x, place));
    out[1] = narrow<T>(place == A(0) ? y : plus(y, place));
}

template <class T>
struct Normal {
    static constexpr int PER = sizeof(T) == 8 ? 1 : 2;
    __device__ static void make(const Words& w, int lane, const Limits& l, T* out)
    {
        constexpr double TURN = 6.283185307179586;
        if constexpr (PER == 2)
            polar(fraction((u32)w.at[lane]), product((float)(u32)(w.at[lane] >> 32), (float)(TURN * 0x1p-32)), l, out);
        else if (lane % 2 == 0)
            polar(plus(1.0, -fraction(w.at[lane])), product(fraction(w.at[lane + 1]), TURN), l, out);
    }
};

// A number of each word or half: of u in (0, 1), finest near 0.
template <class T, class F>
__device__ inline void each_survival(u64 word, T* out, F of)
{
    if constexpr (sizeof(T) == 8) {
        const double u = plus(fraction(word), 0x1p-54);
        out[0] = of(u < 1 - 0x1p-53 ? u : 1 - 0x1p-53);
    } else
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float u = fraction((u32)(word >> 32 * i));
            out[i] = narrow<T>(of(u < 1 - 0x1p-24f ? u : 1 - 0x1p-24f));
        }
}

template <class T>
struct Exponential {
    static constexpr int PER = sizeof(T) == 8 ? 1 : 2;
    __device__ static void make(const Words& w, int lane, const Limits& l, T* out)
    {
        each_survival(w.at[lane], out, [&](auto u) { return product(log(u), (decltype(u))l.width); });
    }
};

template <class T>
struct Gumbel {
    static constexpr int PER = sizeof(T) == 8 ? 1 : 2;
    __device__ static void make(const Words& w, int lane, const Limits&, T* out)
    {
        each_survival(w.at[lane], out, [](auto u) { return -log(-log1p(-u)); });
    }
};

struct Bernoulli {
    static constexpr int PER = 2;
    __device__ static void make(const Words& w, int lane, const Limits& l, bool* out)
    {
        const u64 threshold = (u64)l.width;  // of 2^32: exact in a double
        out[0] = (u64)(u32)w.at[lane] < threshold;
        out[1] = (w.at[lane] >> 32) < threshold;
    }
};

// Whether all of N elements are among those asked for, and lie where a vector may.
template <int N, class T>
__device__ inline bool is_whole(const T* p, i64 at, i64 count)
{
    return at >= 0 && at + N <= count && is_aligned<N>(p);
}

// Elements start … start + count - 1 of a key. A thread makes what comes of one block of four words.
template <class Recipe, class T>
__global__ void __launch_bounds__(THREADS)
    philox_fill(const u64* key, T* out, i64 start, i64 count, u64 stream, int shift, double unit, double width,
                double low, double below, bool scaled)
{
    constexpr int N = 4 * Recipe::PER;
    const Limits limits{shift, unit, width, low, below, scaled};
    const u64 k0 = key[0], k1 = key[1];
    const i64 first = start / N, last = (start + count + N - 1) / N, step = (i64)gridDim.x * THREADS;
    for (i64 block = first + (i64)blockIdx.x * THREADS + threadIdx.x; block < last; block += step) {
        const Words w = philox((u64)block, stream, k0, k1);
        Vector<T, N> made;
#pragma unroll
        for (int lane = 0; lane < 4; ++lane) Recipe::make(w, lane, limits, made.at + lane * Recipe::PER);
        const i64 at = block * N - start;
        if (is_whole<N>(out + at, at, count))
            store_vector<N>(out + at, made);
        else
#pragma unroll
            for (int i = 0; i < N; ++i)
                if (at + i >= 0 && at + i < count) out[at + i] = made.at[i];
    }
}

// New keys: the first two words of the block whose number is the datum, `number` where there are no data. A step is 0 where
// all rows have one key, or datum.
__global__ void __launch_bounds__(THREADS)
    fold_keys(const u64* keys, const u64* data, u64* out, i64 rows, i64 key_step, i64 data_step, u64 number,
              u64 stream)
{
    const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= rows) return;
    const u64* key = keys + i * key_step;
    const Words w = philox(data ? data[i * data_step] : number, stream, key[0], key[1]);
    out[2 * i] = w.at[0];
    out[2 * i + 1] = w.at[1];
}

// ----- dropout ----------------------------------------------------------------------------------------------------------

__device__ inline float quotient(float a, float b) { return __fdiv_rn(a, b); }
__device__ inline double quotient(double a, double b) { return __ddiv_rn(a, b); }

// out = (kept ? x / keep : 0) + y, rounded once; elements of x are `start` … of the array that the mask belongs to. Without y
// (WITH_Y false) it is dropout itself, and its own derivative.
template <bool WITH_Y, class T>
__global__ void __launch_bounds__(THREADS)
    dropout(const u64* key, const T* x, const T* y, T* out, i64 start, i64 count, u64 stream, u64 threshold,
            double keep)
{
    using A = Wide<T>;
    constexpr int N = 8;
    const u64 k0 = key[0], k1 = key[1];
    const i64 first = start / N, last = (start + count + N - 1) / N, step = (i64)gridDim.x * THREADS;
    for (i64 block = first + (i64)blockIdx.x * THREADS + threadIdx.x; block < last; block += step) {
        const Words w = philox((u64)block, stream, k0, k1);
        const i64 at = block * N - start;
        const auto made = [&](int i, T xi, T yi) {
            const u64 bits = i % 2 ? w.at[i / 2] >> 32 : (u64)(u32)w.at[i / 2];
            const A kept = bits < threshold ? quotient(wide(xi), (A)keep) : A(0);
            return WITH_Y ? narrow<T>(plus(kept, wide(yi))) : narrow<T>(kept);
        };
        if (is_whole<N>(x + at, at, count) && is_aligned<N>(out + at) && (!WITH_Y || is_aligned<N>(y + at))) {
            const Vector<T, N> xs = vector_at<N>(x + at), ys = vector_at<N>((WITH_Y ? y : x) + at);
            Vector<T, N> all;
#pragma unroll
            for (int i = 0; i < N; ++i) all.at[i] = made(i, xs.at[i], ys.at[i]);
            store_vector<N>(out + at, all);
        } else
#pragma unroll
            for (int i = 0; i < N; ++i)
                if (at + i >= 0 && at + i < count) out[at + i] = made(i, x[at + i], WITH_Y ? y[at + i] : T{});
    }
}
