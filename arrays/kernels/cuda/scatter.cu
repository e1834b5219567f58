// Writing rows at given places: added up, or the last one written.
//
// `places[k]` says where row k of `values` goes, among the rows of `out`; a row has `inner` elements that lie together. With
// `one` there is one value for everything.
#include "headers/reduce.cuh"

constexpr int THREADS = 256;

// ----- sums, in any order -----------------------------------------------------------------------------------------------

__device__ inline void add_at(float* p, float v) { atomicAdd(p, v); }
__device__ inline void add_at(double* p, double v) { atomicAdd(p, v); }
__device__ inline void add_at(u32* p, u32 v) { atomicAdd(p, v); }
__device__ inline void add_at(u64* p, u64 v) { atomicAdd(p, v); }

template <int VEC, class A>
__device__ inline void add_vector_at(A* p, const Vector<A, VEC>& v)
{
#if !defined(EMULATED) && __CUDA_ARCH__ >= 900
    if constexpr (VEC % 4 == 0 && sizeof(A) == 4) {
#pragma unroll
        for (int k = 0; k < VEC; k += 4)
            asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p + k), "f"(v.at[k]), "f"(v.at[k + 1]), "f"(v.at[k + 2]), "f"(v.at[k + 3]) : "memory");
        return;
    }
#endif
#pragma unroll
    for (int k = 0; k < VEC; ++k) add_at(p + k, v.at[k]);
}

template <class A, class T>
__device__ inline A as(T x)
{
    return (A)x;
}
template <>
__device__ inline float as<float, float16>(float16 x)
{
    return wide(x);
}
template <>
__device__ inline float as<float, bfloat16>(bfloat16 x)
{
    return wide(x);
}

// With `one`, VEC is 1; else it divides a row.
template <class T, class A, int VEC>
__global__ void __launch_bounds__(THREADS)
    add_atomically(const i64* places, const T* values, A* out, i64 count, i64 inner, bool one)
{
    const i64 total = count * inner / VEC, step = (i64)gridDim.x * THREADS;
    const bool small = total <= 0xffffffffLL;
    for (i64 e = (i64)blockIdx.x * THREADS + threadIdx.x; e < total; e += step) {
        const Element at(e, inner / VEC, small);
        const Vector<T, VEC> v = vector_at<VEC>(values + (one ? 0 : e * VEC));
        Vector<A, VEC> all;
#pragma unroll
        for (int k = 0; k < VEC; ++k) all.at[k] = as<A>(v.at[k]);
        add_vector_at<VEC>(out + places[at.row] * inner + at.column * VEC, all);
    }
}

// ----- sums, always in the order of the rows ----------------------------------------------------------------------------

// The rows are visited in the order of their places: `sorted` are the places in ascending order, `order` the rows they belong
// to. Each thread adds up VEC columns over a chunk of them. What lies within a chunk is added to `out` at once, by the only thread
// that has that place; a sum that goes on in a neighbouring chunk is left in `carry[chunk][0]` if it began before the chunk,
// and in `carry[chunk][1]` if it begins in it. With `one`, VEC is 1.
template <class T, class A, int VEC>
__global__ void __launch_bounds__(THREADS, 4)
    add_in_order(const i64* sorted, const i64* order, const T* values, T* out, A* carry, i64 count, i64 inner, i64 chunk,
                 bool one)
{
    const i64 column = ((i64)blockIdx.x * 32 + threadIdx.x) * VEC;
    const i64 index = (i64)blockIdx.y * blockDim.y + threadIdx.y;
    const i64 start = index * chunk, stop = start + chunk < count ? start + chunk : count;
    if (column >= inner || start >= count) return;
    const bool began_before = start > 0 && sorted[start - 1] == sorted[start];
    const bool goes_on = stop < count && sorted[stop] == sorted[stop - 1];
    Vector<A, VEC> sum{};
    bool first = true;  // within the run that the chunk starts in
    i64 place = sorted[start];
    const auto put = [&](bool later) {  // `later`: the run goes on in the next chunk
        if (first && began_before)
            store_vector<VEC>(carry + index * 2 * inner + column, sum);
        else if (later)
            store_vector<VEC>(carry + (index * 2 + 1) * inner + column, sum);
        else {
            T* o = out + place * inner + column;
            Vector<T, VEC> all = vector_at<VEC>(o);
#pragma unroll
            for (int k = 0; k < VEC; ++k) all.at[k] = narrow<T>(as<A>(all.at[k]) + sum.at[k]);
            store_vector<VEC>(o, all);
        }
    };
#pragma unroll 4
    for (i64 p = start; p < stop; ++p) {
        const i64 next = sorted[p];
        const Vector<T, VEC> v = vector_at<VEC>(values + (one ? 0 : order[p] * inner + column));
        if (next != place) {
            put(false);
            first = false;
            sum = Vector<A, VEC>{};
            place = next;
        }
#pragma unroll
        for (int k = 0; k < VEC; ++k) sum.at[k] += as<A>(v.at[k]);
    }
    put(goes_on);
}

// Sums over several chunks come together, in their order, where they begin.
template <class T, class A>
__global__ void __launch_bounds__(THREADS)
    join_chunks(const i64* sorted, const A* carry, T* out, i64 count, i64 inner, i64 chunk)
{
    const i64 column = (i64)blockIdx.x * 32 + threadIdx.x;
    const i64 index = (i64)blockIdx.y * blockDim.y + threadIdx.y;
    const i64 start = index * chunk, stop = start + chunk;
    if (column >= inner || stop >= count) return;
    const i64 place = sorted[stop - 1];
    const bool began_before = start > 0 && sorted[start - 1] == place;  // then the run has the whole chunk
    if (sorted[stop] != place || began_before) return;
    // How many chunks further the sum goes: the last of a run of equal places, found by halving.
    i64 low = index + 1, high = (count - 1) / chunk;
    while (low < high) {
        const i64 middle = (low + high + 1) / 2;
        if (sorted[middle * chunk] == place)
            low = middle;
        else
            high = middle - 1;
    }
    A sum = carry[(index * 2 + 1) * inner + column];
#pragma unroll 8
    for (i64 c = index + 1; c <= low; ++c) sum += carry[c * 2 * inner + column];
    T* o = out + place * inner + column;
    *o = narrow<T>(as<A>(*o) + sum);
}

// ----- the last row written ---------------------------------------------------------------------------------------------

template <class N>
__global__ void __launch_bounds__(THREADS) mark_last(const i64* places, N* last, i64 count)
{
    for (i64 k = (i64)blockIdx.x * THREADS + threadIdx.x; k < count; k += (i64)gridDim.x * THREADS)
        atomicMax(last + places[k], (N)k);
}

template <class N>
__global__ void __launch_bounds__(THREADS) kept_by_mark(const i64* places, const N* last, bool* kept, i64 count)
{
    for (i64 k = (i64)blockIdx.x * THREADS + threadIdx.x; k < count; k += (i64)gridDim.x * THREADS)
        kept[k] = last[places[k]] == (N)k;
}

template <class N>
__global__ void __launch_bounds__(THREADS)
    kept_by_order(const i64* sorted, const N* order, bool* kept, i64 count)
{
    for (i64 p = (i64)blockIdx.x * THREADS + threadIdx.x; p < count; p += (i64)gridDim.x * THREADS)
        kept[order[p]] = p + 1 == count || sorted[p + 1] != sorted[p];
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    write_kept(const i64* places, const bool* kept, const T* values, T* out, i64 count, i64 inner, bool one)
{
    const i64 total = count * inner, step = (i64)gridDim.x * THREADS;
    const bool small = total <= 0xffffffffLL;
    for (i64 e = (i64)blockIdx.x * THREADS + threadIdx.x; e < total; e += step) {
        const Element at(e, inner, small);
        if (kept[at.row]) out[places[at.row] * inner + at.column] = values[one ? 0 : e];
    }
}

// out[k] = source[places[k]], zero where a later write took the place. Zero bits are zero in every dtype.
template <class T>
__global__ void __launch_bounds__(THREADS)
    read_kept(const i64* places, const bool* kept, const T* source, T* out, i64 count, i64 inner)
{
    const i64 total = count * inner, step = (i64)gridDim.x * THREADS;
    const bool small = total <= 0xffffffffLL;
    for (i64 e = (i64)blockIdx.x * THREADS + threadIdx.x; e < total; e += step) {
        const Element at(e, inner, small);
        out[e] = kept[at.row] ? source[places[at.row] * inner + at.column] : T(0);
    }
}
