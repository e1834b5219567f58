// Sums of columns, extremes of rows of short floats, and where rows have theirs, of memory without gaps.
#include "headers/row.cuh"

// Sums over a share of the rows: partial[share][column], for `sum_parts`. Blocks of 32 times VEC columns by 8 rows.
template <class T, int VEC>
__global__ void __launch_bounds__(256) column_sums(const T* x, Wide<T>* partial, i64 rows, i64 width)
{
    using A = Wide<T>;
    SHARED(A, tile, 8 * VEC * 32);
    const i64 column = ((i64)blockIdx.x * 32 + threadIdx.x) * VEC;
    A sums[VEC] = {};
    if (column < width)
#pragma unroll 4
        for (i64 row = (i64)blockIdx.y * 8 + threadIdx.y; row < rows; row += (i64)gridDim.y * 8) {
            const Vector<T, VEC> v = vector_at<VEC>(x + row * width + column);
#pragma unroll
            for (int k = 0; k < VEC; ++k) sums[k] += wide(v.at[k]);
        }
#pragma unroll
    for (int k = 0; k < VEC; ++k) tile[(threadIdx.y * VEC + k) * 32 + threadIdx.x] = sums[k];
    __syncthreads();
    if (column < width)
        for (int k = threadIdx.y; k < VEC; k += 8) {
            A total = A(0);
            for (int y = 0; y < 8; ++y) total += tile[(y * VEC + k) * 32 + threadIdx.x];
            partial[blockIdx.y * width + column + k] = total;
        }
}

template <class Op, class T, int THREADS>
__global__ void __launch_bounds__(256) row_extremes(const T* x, T* out, i64 rows, i64 length, float identity)
{
    for (i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += (i64)gridDim.x * blockDim.y) {
        const T* from = x + row * length;
        const Cut<THREADS, 0, 16 / sizeof(T)> cut(from, length);
        float found = identity;
        cut.each([&](auto p) { each_of(vector_at<p.size>(from + p.column), [&](float v) { found = Op::of(found, v); }); });
        found = row_reduce<Op, THREADS>(found, identity);
        if (threadIdx.x == 0) out[row] = narrow<T>(found);
    }
}

// Where the extreme of a row is: the first of equal ones, or the first NaN.
template <bool MAX, class A>
struct Best {
    A value;
    i64 at;

    __device__ void meet(A v, i64 place)
    {
        const bool none = value != value, other_none = v != v, same = v == value || (none && other_none);
        if (same ? place < at : none != other_none ? other_none : MAX ? v > value : v < value) {
            value = v;
            at = place;
        }
    }
    __device__ void meet_warp()
    {
#pragma unroll
        for (int o = 16; o; o >>= 1) {
            const A v = __shfl_xor_sync(WHOLE_WARP, value, o);
            meet(v, __shfl_xor_sync(WHOLE_WARP, at, o));
        }
    }
};

template <bool MAX, class T, int THREADS>
__global__ void __launch_bounds__(256) row_places(const T* x, i64* out, i64 rows, i64 length)
{
    using A = Wide<T>;
    for (i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += (i64)gridDim.x * blockDim.y) {
        const T* from = x + row * length;
        const Cut<THREADS, 0, 16 / sizeof(T)> cut(from, length);
        const Best<MAX, A> nothing{MAX ? -infinity<A>() : infinity<A>(), length};
        Best<MAX, A> best = nothing;
        cut.each([&](auto p) {
            const auto v = vector_at<p.size>(from + p.column);
#pragma unroll
            for (int k = 0; k < p.size; ++k) best.meet(wide(v.at[k]), p.column + k);
        });
        best.meet_warp();
        if constexpr (THREADS > 32) {
            SHARED(A, values, THREADS / 32);
            SHARED(i64, places, THREADS / 32);
            const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
            __syncthreads();  // they may still be read for the row before
            if (lane == 0) {
                values[warp] = best.value;
                places[warp] = best.at;
            }
            __syncthreads();
            best = nothing;
            if (lane < THREADS / 32) best = Best<MAX, A>{values[lane], places[lane]};
            best.meet_warp();
        }
        if (threadIdx.x == 0) out[row] = best.at;
    }
}
