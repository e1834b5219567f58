// Sums and other reductions over the threads of a row: shuffles within a warp, shared memory between warps.
#pragma once
#include "headers/types.cuh"

struct Add {
    template <class A>
    __device__ static A of(A a, A b)
    {
        return a + b;
    }
};
// NaN wins, as in NumPy.
struct Max {
    template <class A>
    __device__ static A of(A a, A b)
    {
        return a > b || a != a ? a : b;
    }
};
struct Min {
    template <class A>
    __device__ static A of(A a, A b)
    {
        return a < b || a != a ? a : b;
    }
};

template <class Op, class A>
__device__ inline A warp_reduce(A v)
{
#pragma unroll
    for (int o = 16; o; o >>= 1) v = Op::of(v, __shfl_xor_sync(WHOLE_WARP, v, o));
    return v;
}

// The reduction of `v` over the THREADS threads (along x) of a row; every one of them gets it. With THREADS == 32 a block may
// have several rows, one a warp; with more it has one.
template <class Op, int THREADS, class A>
__device__ inline A row_reduce(A v, A identity)
{
    static_assert(THREADS % 32 == 0 && THREADS <= 1024, "whole warps");
    v = warp_reduce<Op>(v);
    if constexpr (THREADS > 32) {
        SHARED(A, slots, THREADS / 32);
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        __syncthreads();  // the slots may still be read for the reduction before
        if (lane == 0) slots[warp] = v;
        __syncthreads();
        v = warp_reduce<Op>(lane < THREADS / 32 ? slots[lane] : identity);
    }
    return v;
}

template <int THREADS, class A>
__device__ inline A row_sum(A v)
{
    return row_reduce<Add, THREADS>(v, A(0));
}

// Two sums for the price of one exchange.
template <class A>
struct Pair {
    A a, b;
};

template <int THREADS, class A>
__device__ inline Pair<A> row_sums(A a, A b)
{
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        a += __shfl_xor_sync(WHOLE_WARP, a, o);
        b += __shfl_xor_sync(WHOLE_WARP, b, o);
    }
    if constexpr (THREADS > 32) {
        SHARED(Pair<A>, slots, THREADS / 32);
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        __syncthreads();
        if (lane == 0) slots[warp] = Pair<A>{a, b};
        __syncthreads();
        const bool mine = lane < THREADS / 32;
        a = warp_reduce<Add>(mine ? slots[lane].a : A(0));
        b = warp_reduce<Add>(mine ? slots[lane].b : A(0));
    }
    return Pair<A>{a, b};
}

// The reduction over the threads of a row before this one, in their order, and over all of them. With THREADS == 32 a block may
// have several rows, one a warp.
template <class Op, int THREADS, class A>
__device__ inline Pair<A> row_scan(A own, A identity)
{
    const int lane = threadIdx.x % 32;
    A upto = own;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        const A before = __shfl_up_sync(WHOLE_WARP, upto, o);
        if (lane >= o) upto = Op::of(before, upto);
    }
    A before = __shfl_up_sync(WHOLE_WARP, upto, 1);  // no difference: that of infinities would be NaN
    if (lane == 0) before = identity;
    if constexpr (THREADS == 32) return Pair<A>{before, __shfl_sync(WHOLE_WARP, upto, 31)};
    SHARED(A, totals, THREADS / 32);
    const int warp = threadIdx.x / 32;
    __syncthreads();  // the totals may still be read for the scan before
    if (lane == 31) totals[warp] = upto;
    __syncthreads();
    A lead = identity, all = identity;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) {
        if (w == warp) lead = all;
        all = Op::of(all, totals[w]);
    }
    return Pair<A>{Op::of(lead, before), all};
}

// The sum over the threads of a block before this one, and over all of them.
template <int THREADS, class A>
__device__ inline Pair<A> prefix_sum(A own)
{
    return row_scan<Add, THREADS>(own, A(0));
}

// Count, mean and sum of squared deviations of a set of numbers; sets are merged by the rule of Chan, Golub and LeVeque
// (1979), which does not cancel as a difference of sums of squares does.
template <class A>
struct Moments {
    A n, mean, m2;

    __device__ static Moments none() { return Moments{A(0), A(0), A(0)}; }

    __device__ void merge(const Moments& o)
    {
        const A total = n + o.n;
        if (total == A(0)) return;
        const A d = o.mean - mean, part = o.n / total;
        mean += d * part;
        m2 += o.m2 + d * d * n * part;
        n = total;
    }

    // `count` numbers at once: one division for all of them.
    template <int N>
    __device__ void add(const A (&x)[N], int count)
    {
        A s = A(0), d = A(0), q = A(0);
#pragma unroll
        for (int k = 0; k < N; ++k) s += k < count ? x[k] : A(0);
        const A each = count ? A(1) / A(count) : A(0), m = s * each;
#pragma unroll
        for (int k = 0; k < N; ++k)
            if (k < count) d += x[k] - m, q += (x[k] - m) * (x[k] - m);
        const A left = d * each, rest = q - d * left;  // of the rounded mean, see `row_scale`
        merge(Moments{A(count), m + left, rest < A(0) ? A(0) : rest});
    }
};

template <class A>
__device__ inline Moments<A> warp_moments(Moments<A> v)
{
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        Moments<A> u;
        u.n = __shfl_xor_sync(WHOLE_WARP, v.n, o);
        u.mean = __shfl_xor_sync(WHOLE_WARP, v.mean, o);
        u.m2 = __shfl_xor_sync(WHOLE_WARP, v.m2, o);
        // Both lanes of a pair merge in the same order: they get the same bits. (Chosen number by number: whole sets would lie in memory.)
        const bool upper = threadIdx.x & o;
        const Moments<A> high{upper ? v.n : u.n, upper ? v.mean : u.mean, upper ? v.m2 : u.m2};
        v = Moments<A>{upper ? u.n : v.n, upper ? u.mean : v.mean, upper ? u.m2 : v.m2};
        v.merge(high);
    }
    return v;
}

template <int THREADS, class A>
__device__ inline Moments<A> row_moments(Moments<A> v)
{
    v = warp_moments(v);
    if constexpr (THREADS > 32) {
        SHARED(Moments<A>, slots, THREADS / 32);
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        __syncthreads();
        if (lane == 0) slots[warp] = v;
        __syncthreads();
        v = warp_moments(lane < THREADS / 32 ? slots[lane] : Moments<A>::none());
    }
    return v;
}
